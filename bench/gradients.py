"""Gradients of a case in float64, and how far a provider's are from them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from bench.cases import Case, relative_error, side_by_side

NAMES = ("dq", "dk", "dv", "dg", "dbeta")


@dataclass(frozen=True)
class ExpectedGradients:
    """Float64 gradients of some key heads and of all their value heads.

    dq, dk: [1, T, len(key_heads), 128]; dv: [1, T, len(value_heads), 128]; dg, dbeta: [1, T, len(value_heads)].
    """

    key_heads: tuple[int, ...]
    value_heads: tuple[int, ...]
    gradients: tuple[Tensor, ...]

    def heads(self, name: str) -> tuple[int, ...]:
        return self.key_heads if name in ("dq", "dk") else self.value_heads


def expected_gradients(cases: Sequence[Case]) -> list[ExpectedGradients]:
    """For each of these cases of one shape, the gradients of sum(o * case.do), o from the float64 chunked reference.

    They are of the first and the last key head and the value heads that read them. At 32768 tokens a value head takes about
    2 GiB for each case while this runs (three cases with four value heads a key head: 48 GiB), and nothing afterwards.
    """
    from qla.reference import chunked_gated_delta_rule

    shape = cases[0].shape
    key_heads = tuple(sorted({0, shape.hk - 1}))
    ratio = shape.hv // shape.hk
    value_heads = tuple(head * ratio + i for head in key_heads for i in range(ratio))
    leaves = [x.detach().requires_grad_() for x in side_by_side(cases, list(key_heads), list(value_heads))]
    with torch.enable_grad():
        o, _ = chunked_gated_delta_rule(*leaves, scale=cases[0].scale, cu_seqlens=cases[0].cu_seqlens)
    do = torch.cat([case.do[:, :, list(value_heads)] for case in cases], dim=2).double()
    by_input = [x.tensor_split(len(cases), dim=2) for x in torch.autograd.grad(o, leaves, do)]
    return [ExpectedGradients(key_heads, value_heads, gradients) for gradients in zip(*by_input, strict=True)]


def gradient_errors(expected: ExpectedGradients, gradients: Sequence[Tensor]) -> dict[str, float]:
    """Errors of (dq, dk, dv, dg, dbeta) by name, each the largest of its heads'; all inf if any element of any head is not finite."""
    if not all(bool(torch.isfinite(x).all()) for x in gradients):
        return dict.fromkeys(NAMES, math.inf)
    return {
        name: max(relative_error(actual[:, :, head], exact[:, :, i]) for i, head in enumerate(expected.heads(name)))
        for name, actual, exact in zip(NAMES, gradients, expected.gradients, strict=True)
    }
