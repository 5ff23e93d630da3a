"""Gradients in the GPU tests: how they are taken, what they are compared with, and what error is allowed.

Every gradient is compared with float64 autograd through the reference, each on its own, as a whole and on its worst part
(a chunk of one head; one state for dh0). What is allowed for the whole is 8e-3 for dq, dk, dv and dh0 and 2e-2 for dg and
dbeta in bfloat16, a quarter of that in float16 (twice as much on the worst part, three times for dg, where plain PyTorch with
16-bit operands is off by up to four times on a chunk whose terms cancel), or twice the error of autograd through
``problems.rounded_chunked``, whichever is more: plain PyTorch that rounds the operands of every product to 16 bits, the
backward pass's products too.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from problems import DEVICE, Inputs, assert_same_bits, relative, rounded_chunked, worst_of
from torch import Tensor

NAMES = ("q", "k", "v", "g", "beta", "h0")
FLOORS = {
    torch.bfloat16: dict(zip(NAMES, (8e-3, 8e-3, 8e-3, 2e-2, 2e-2, 8e-3), strict=True)),
    torch.float16: dict(zip(NAMES, (2e-3, 2e-3, 2e-3, 5e-3, 5e-3, 2e-3), strict=True)),
}
# A gate's gradient is a sum over pairs of tokens, most of which cancel under strong decay: what fp32 leaves of 64 of them (64 x 2^-24)
# is not held against it, in units of dbeta's root mean square, which sums the same pairs.
DG_NOISE = 4e-6
UNDERFLOW = 1e-35  # what may be 0 in fp32

Gradients = dict[str, Tensor]
Call = Callable[[Inputs], "tuple[Tensor | None, Tensor | None]"]


class Losses(NamedTuple):
    """Gradients of the results: do like o, dht [S, HV, K, V] fp32. None: the loss does not depend on it."""

    do: Tensor | None
    dht: Tensor | None

    def sequence(self, x: Inputs, n: int) -> Losses:
        """What belongs to sequence n of x."""
        begin, end = x.bounds[n]
        do = None if self.do is None else self.do.flatten(0, 1)[begin:end].unsqueeze(0)
        return Losses(do, None if self.dht is None else self.dht[n : n + 1])


def make_losses(rng: torch.Generator, x: Inputs) -> Losses:
    """Normal gradients of o, in its dtype, and of the final state."""
    do = torch.randn(x.v.shape, generator=rng, device=rng.device).to(DEVICE, x.v.dtype)
    shape = (len(x.bounds), x.v.shape[2], x.q.shape[3], x.v.shape[3])
    return Losses(do, torch.randn(shape, generator=rng, device=rng.device).to(DEVICE))


def leaves_of(x: Inputs, names: Sequence[str] = NAMES) -> Inputs:
    """x with leaves that ask for gradients in place of some inputs; strides and storage stay."""
    return x.with_(**{name: getattr(x, name).detach().requires_grad_() for name in names if getattr(x, name) is not None})


def gradients_of(x: Inputs, losses: Losses, call: Call = Inputs.run, names: Sequence[str] = NAMES) -> Gradients:
    """Gradients of sum(do o) + sum(dht state) for the named inputs that are there; zeros where no result depends on one."""
    leaves = leaves_of(x, names)
    return collect(leaves, call(leaves), losses, names)


def collect(
    leaves: Inputs, results: tuple[Tensor | None, Tensor | None], losses: Losses, names: Sequence[str] = NAMES, retain_graph: bool = False
) -> Gradients:
    """The backward pass of ``gradients_of``; checks shapes and dtypes."""
    wanted = {name: getattr(leaves, name) for name in names if getattr(leaves, name) is not None}
    pairs = [(t, d) for t, d in zip(results, losses, strict=True) if d is not None and t is not None and t.requires_grad]
    found: Sequence[Tensor | None] = [None] * len(wanted)
    if pairs:
        given = [d.to(t.dtype) for t, d in pairs]
        found = torch.autograd.grad([t for t, _ in pairs], list(wanted.values()), given, retain_graph=retain_graph, allow_unused=True)
    gradients = {name: torch.zeros_like(leaf) if d is None else d for (name, leaf), d in zip(wanted.items(), found, strict=True)}
    for name, d in gradients.items():
        assert d.shape == wanted[name].shape and d.dtype == wanted[name].dtype, f"d{name}: {d.dtype} {tuple(d.shape)}"
    return gradients


def exact_gradients(x: Inputs, losses: Losses, scale: float | None = None, chunked: bool = True) -> Gradients:
    """float64 autograd through the reference, by chunks or token by token."""
    wide = Inputs(*(t.detach().double() for t in x.tensors), None if x.h0 is None else x.h0.detach().double(), x.cu)
    return gradients_of(wide, losses, lambda y: y.exact(scale, chunked))


def rounded_gradients(x: Inputs, losses: Losses, scale: float | None = None) -> Gradients:
    """Autograd through the chunked form with 16-bit operands."""
    return gradients_of(x, losses, lambda y: rounded_chunked(y, scale))


def without_noise(name: str, actual: Tensor, exact: Gradients) -> Tensor:
    """``actual`` in float64, with the exact value wherever they differ by no more than fp32 can tell."""
    least = UNDERFLOW
    if name == "g" and "beta" in exact and exact["beta"].numel():
        least += DG_NOISE * float(exact["beta"].double().square().mean().sqrt())
    wide, expected = actual.double(), exact[name].double()
    return torch.where((wide - expected).abs() <= least, expected, wide)


def assert_gradients_accurate(
    x: Inputs,
    losses: Losses,
    got: Gradients,
    scale: float | None = None,
    expected: Gradients | None = None,
    floors: dict[str, float] | None = None,
) -> Gradients:
    """Each gradient against float64, as the module says; ``floors`` in place of the dtype's own. Returns the exact ones."""
    expected = exact_gradients(x, losses, scale) if expected is None else expected
    baseline = rounded_gradients(x, losses, scale)
    floors = FLOORS[x.q.dtype] if floors is None else floors
    failures = []
    for name, actual in got.items():
        actual, plain, floor = without_noise(name, actual, expected), without_noise(name, baseline[name], expected), floors[name]
        for part, measure, least in (
            ("whole", relative, floor),
            ("worst part", lambda a, e, n=name: worst_of("state" if n == "h0" else "o", a, e), (3 if name == "g" else 2) * floor),
        ):
            error, plain_error = measure(actual, expected[name]), measure(plain, expected[name])
            limit = max(least, 2 * plain_error) if plain_error < float("inf") else least
            if not error <= limit:
                failures.append(f"d{name}, {part}: error {error:.2e} > {limit:.2e} (plain 16-bit PyTorch: {plain_error:.2e})")
    assert not failures, "; ".join(failures)
    return expected


def assert_same_gradients(got: Gradients, expected: Gradients, what: str) -> None:
    """Bitwise equality of every gradient."""
    assert got.keys() == expected.keys(), f"{what}: gradients of {list(got)} and {list(expected)}"
    assert_same_bits(list(got.values()), list(expected.values()), what, [f"d{name}" for name in got])
