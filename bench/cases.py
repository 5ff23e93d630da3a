"""Benchmark inputs, and the check that stands before every timing."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor

from bench.shapes import GATES, HEAD_DIM, Shape

# Relative Frobenius error that bf16 kernels reach here is about 4e-3: twice that is a fault, not rounding.
TOLERANCE = 8e-3
# A peer beyond this was called wrongly or is broken: its time would say nothing.
PEER_TOLERANCE = 3e-2


@dataclass(frozen=True)
class Case:
    """Inputs of one row: q, k [1, T, hk, 128], v [1, T, hv, 128] bf16; g, beta [1, T, hv] fp32; cu_seqlens int64, or None for one."""

    shape: Shape
    gates: str
    q: Tensor
    k: Tensor
    v: Tensor
    g: Tensor
    beta: Tensor
    cu_seqlens: Tensor | None

    @property
    def scale(self) -> float:
        return HEAD_DIM**-0.5

    @cached_property
    def do(self) -> Tensor:
        """The gradient of o [1, T, hv, 128] that a backward pass starts from: standard normal, bf16, always the same."""
        generator = torch.Generator(device=self.v.device).manual_seed(1)
        return torch.randn(self.v.shape, generator=generator, device=self.v.device).bfloat16()

    @property
    def packed_cu_seqlens(self) -> Tensor:
        """Offsets of the sequences also where there is only one."""
        if self.cu_seqlens is not None:
            return self.cu_seqlens
        return torch.tensor([0, self.shape.tokens], dtype=torch.int64, device=self.q.device)


def make_gates(gates: str, noise: Tensor) -> Tensor:
    """Log gates from standard normal noise [1, T, HV]. fast: logsigmoid(noise); slow: -1e-6 .. 0; mixed: every fourth head slow."""
    if gates not in GATES:
        raise ValueError(f"gates must be one of {GATES}, got {gates!r}")
    fast = torch.nn.functional.logsigmoid(noise)
    slow = -1e-6 * noise.sigmoid()
    if gates == "fast":
        return fast
    if gates == "slow":
        return slow
    never_decays = torch.arange(noise.shape[-1], device=noise.device) % 4 == 0
    return torch.where(never_decays, slow, fast)


def make_case(shape: Shape, gates: str, device: str | torch.device = "cuda", seed: int = 0) -> Case:
    """bf16 inputs with normalised q and k, beta = sigmoid(randn)."""
    return make_cases(shape, [gates], device, seed)[0]


def make_cases(shape: Shape, gates: Sequence[str], device: str | torch.device = "cuda", seed: int = 0) -> list[Case]:
    """The cases of one shape with each of these gate regimes. They share every tensor but g, and are what `make_case` makes."""
    generator = torch.Generator(device=device).manual_seed(seed)

    def normal(heads: int, *dims: int) -> Tensor:
        return torch.randn(1, shape.tokens, heads, *dims, generator=generator, device=device)

    q, k = (torch.nn.functional.normalize(normal(shape.hk, HEAD_DIM), dim=-1).bfloat16() for _ in range(2))
    v = normal(shape.hv, HEAD_DIM).bfloat16()
    noise, beta = normal(shape.hv), normal(shape.hv).sigmoid()
    lengths = shape.sequence_lengths
    cu_seqlens = None
    if len(lengths) > 1:
        cu_seqlens = torch.tensor([0, *lengths], dtype=torch.int64).cumsum(0).to(device)
    first = Case(shape, gates[0], q, k, v, make_gates(gates[0], noise), beta, cu_seqlens)
    return [first, *(replace(first, gates=name, g=make_gates(name, noise)) for name in gates[1:])]


@dataclass(frozen=True)
class Expected:
    """Float64 results of some value heads: o [1, T, heads, 128], state [S, heads, 128, 128] (K first)."""

    heads: tuple[int, ...]
    o: Tensor
    state: Tensor


def side_by_side(cases: Sequence[Case], of_key: list[int], of_value: list[int]) -> list[Tensor]:
    """q, k, v, g, beta in float64: these key and value heads of every case, one case's heads after the other's.

    The float64 reference takes a step for each chunk, which costs launches and not arithmetic: cases of one shape go
    through it together, as if they were more heads.
    """
    parts = [
        (case.q[:, :, of_key], case.k[:, :, of_key], case.v[:, :, of_value], case.g[:, :, of_value], case.beta[:, :, of_value])
        for case in cases
    ]
    return [torch.cat(tensors, dim=2).double() for tensors in zip(*parts, strict=True)]


def expected_slices(cases: Sequence[Case]) -> list[Expected]:
    """For each of these cases of one shape, the float64 chunked reference on the first and the last value head."""
    from qla.reference import chunked_gated_delta_rule

    shape = cases[0].shape
    heads = tuple(sorted({0, shape.hv - 1}))
    inputs = side_by_side(cases, [head * shape.hk // shape.hv for head in heads], list(heads))
    o, state = chunked_gated_delta_rule(*inputs, scale=cases[0].scale, output_final_state=True, cu_seqlens=cases[0].cu_seqlens)
    assert state is not None
    of_cases = zip(o.split(len(heads), dim=2), state.split(len(heads), dim=1), strict=True)
    return [Expected(heads, *results) for results in of_cases]


def relative_error(actual: Tensor, expected: Tensor) -> float:
    """Relative Frobenius error; inf where anything is not finite."""
    norm = float(expected.double().norm())
    error = float((actual.double() - expected.double()).norm()) / (norm if norm > 0 else 1.0)
    return error if math.isfinite(error) else math.inf


def errors(expected: Expected, o: Tensor, state: Tensor) -> tuple[float, float]:
    """Errors of o [1, T, hv, 128] and the final state [S, hv, 128, 128]; inf if any element of any head is not finite.

    Each is the larger of the heads' errors: a head that never decays has a state that would hide the others'.
    """
    if not all(bool(torch.isfinite(x).all()) for x in (o, state)):
        return math.inf, math.inf
    pairs = list(enumerate(expected.heads))
    return (
        max(relative_error(o[:, :, head], expected.o[:, :, i]) for i, head in pairs),
        max(relative_error(state[:, head], expected.state[:, i]) for i, head in pairs),
    )
