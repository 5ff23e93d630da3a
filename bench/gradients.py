"""Gradients of a case in float64, and how far a provider's are from them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from bench.cases import Case, relative_error

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


def expected_gradients(case: Case, key_heads: tuple[int, ...] | None = None) -> ExpectedGradients:
    """Differentiates the float64 chunked reference on the first and the last key head, each with the value heads that read it.

    The loss is sum(o * case.do). At 32768 tokens a value head takes about 2 GiB while this runs, and nothing afterwards.
    """
    from qla.reference import chunked_gated_delta_rule

    key_heads = key_heads or tuple(sorted({0, case.shape.hk - 1}))
    ratio = case.shape.hv // case.shape.hk
    value_heads = tuple(head * ratio + i for head in key_heads for i in range(ratio))
    of_key, of_value = list(key_heads), list(value_heads)
    parts = (case.q[:, :, of_key], case.k[:, :, of_key], case.v[:, :, of_value], case.g[:, :, of_value], case.beta[:, :, of_value])
    leaves = [x.detach().double().requires_grad_() for x in parts]
    with torch.enable_grad():
        o, _ = chunked_gated_delta_rule(*leaves, scale=case.scale, cu_seqlens=case.cu_seqlens)
    return ExpectedGradients(key_heads, value_heads, torch.autograd.grad(o, leaves, case.do[:, :, of_value].double()))


def gradient_errors(expected: ExpectedGradients, gradients: Sequence[Tensor]) -> dict[str, float]:
    """Errors of (dq, dk, dv, dg, dbeta) by name, each the largest of its heads'; all inf if any element of any head is not finite."""
    if not all(bool(torch.isfinite(x).all()) for x in gradients):
        return dict.fromkeys(NAMES, math.inf)
    return {
        name: max(relative_error(actual[:, :, head], exact[:, :, i]) for i, head in enumerate(expected.heads(name)))
        for name, actual, exact in zip(NAMES, gradients, expected.gradients, strict=True)
    }
