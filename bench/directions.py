"""The two directions that are timed, forward and backward: their rows, how a provider does them, how its results are checked."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from bench.cases import PEER_TOLERANCE, TOLERANCE, Case, Expected, errors, expected_slices
from bench.gradients import expected_gradients, gradient_errors
from bench.providers import Call, Outputs, Provider
from bench.shapes import BACKWARD_SETS, SETS, Shape

# Relative error of a result up to which it is timed, (ours, a peer's), where it is not the usual one: an element of dg and
# dbeta is a sum over a whole row, and smaller than its terms.
LIMITS = {"dg": (2e-2, 5e-2), "dbeta": (2e-2, 5e-2)}


@dataclass(frozen=True)
class Direction:
    """What timing one direction needs other than timing the other.

    sets: its named rows.
    prepare: how a provider does it; None where it cannot.
    expected: float64 results of each of some cases of one shape.
    errors: from those and what a provider gave, the error of each result by name.
    """

    sets: Mapping[str, Sequence[Shape]]
    prepare: Callable[[Provider], Callable[[Case], Call] | None]
    expected: Callable[[Sequence[Case]], Sequence[Any]]
    errors: Callable[[Any, Outputs], Mapping[str, float]]


def _forward_errors(expected: Expected, outputs: Outputs) -> dict[str, float]:
    err_o, err_state = errors(expected, *outputs)
    return {"o": err_o, "state": err_state}


DIRECTIONS = {
    "fwd": Direction(SETS, lambda provider: provider.prepare, expected_slices, _forward_errors),
    "bwd": Direction(BACKWARD_SETS, lambda provider: provider.prepare_backward, expected_gradients, gradient_errors),
}


def limit_of(result: str, own: bool) -> float:
    """The largest error of a result ("o", "dq", ..) with which our own kernels, or a peer, are timed."""
    ours, peers = LIMITS.get(result, (TOLERANCE, PEER_TOLERANCE))
    return ours if own else peers
