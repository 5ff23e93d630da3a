"""Inputs, oracles and tolerances of the GPU tests.

Every result is compared with float64 PyTorch, as a whole and on its worst part (a chunk of one head for o, one head of one
sequence for a state). What is allowed: 5e-3 in bfloat16 and 1e-3 in float16 (twice that on the worst part), or twice the
error of ``rounded_chunked``, whichever is more: the chunked algorithm in plain PyTorch with every operand of a matrix
product rounded to 16 bits. So an input that is hard in 16 bits for everybody is not held against the kernels, and a
kernel that loses digits of its own is found.
"""

from __future__ import annotations

import dataclasses
import importlib.util
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
from numeric import worst_tile
from torch import Tensor

import qla
from qla.reference import chunked_gated_delta_rule, recurrent_gated_delta_rule

DEVICE = os.environ.get("QLA_TEST_DEVICE", "cuda")  # "cpu" runs the numeric tests on the PyTorch path, to test the tests
CHUNK = 64
FLOOR = {torch.bfloat16: 5e-3, torch.float16: 1e-3, torch.float32: 1e-5}
GATES = ("fast", "none", "mixed")
NARROW = [(64, 64), (64, 128), (128, 64)]  # head sizes (K, V) that the kernels have besides 128 twice


def watchdog(seconds: int) -> list[pytest.MarkDecorator]:
    """A limit that also ends a hung kernel: the thread method leaves the process, a signal would wait for the GPU."""
    if importlib.util.find_spec("pytest_timeout") is None:
        return []
    return [pytest.mark.timeout(seconds, method="thread")]


def gpu_marks(*more: pytest.MarkDecorator, seconds: int = 180) -> list[pytest.MarkDecorator]:
    """Marks of a module of GPU tests. The first test may have to compile the kernels, hence the long limit."""
    return [pytest.mark.gpu, *watchdog(seconds), *more]


NAN_FILLED = pytest.mark.usefixtures("nan_filled_empty")


@pytest.fixture
def nan_filled_empty(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Every buffer that qla allocates without values holds NaN (integers: -7) first. The list grows by one name an allocation."""
    calls: list[str] = []

    def poisoned(allocate: Callable[..., Tensor], name: str) -> Callable[..., Tensor]:
        def wrapper(*args: object, **kwargs: object) -> Tensor:
            x = allocate(*args, **kwargs)
            if sys._getframe(1).f_globals.get("__name__", "").partition(".")[0] == "qla":
                calls.append(name)
                with torch.no_grad():
                    x.fill_(float("nan") if x.is_floating_point() else -7)
            return x

        return wrapper

    for owner, name in ((torch, "empty"), (torch, "empty_like"), (torch, "empty_strided"), (Tensor, "new_empty")):
        monkeypatch.setattr(owner, name, poisoned(getattr(owner, name), name))
    return calls


@dataclasses.dataclass(frozen=True)
class Inputs:
    """Inputs of one call; h0 [S, HV, K, V] and cu may be None."""

    q: Tensor
    k: Tensor
    v: Tensor
    g: Tensor
    beta: Tensor
    h0: Tensor | None = None
    cu: Tensor | None = None

    def with_(self, **changes: Tensor | None) -> Inputs:
        return dataclasses.replace(self, **changes)

    @property
    def tensors(self) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        return self.q, self.k, self.v, self.g, self.beta

    @property
    def bounds(self) -> list[tuple[int, int]]:
        """Rows of each sequence in the flattened tokens."""
        if self.cu is None:
            tokens = self.q.shape[1]
            return [(n * tokens, (n + 1) * tokens) for n in range(self.q.shape[0])]
        values = self.cu.tolist()
        return list(zip(values, values[1:], strict=False))

    def rows(self, begin: int, end: int) -> Inputs:
        """The tokens begin .. end - 1 of every batch row; states and lengths dropped."""
        return Inputs(*(x[:, begin:end] for x in self.tensors))

    def sequence(self, n: int) -> Inputs:
        """Sequence n as a call of its own, with its state."""
        begin, end = self.bounds[n]
        alone = [x.flatten(0, 1)[begin:end].unsqueeze(0) for x in self.tensors]
        return Inputs(*alone, None if self.h0 is None else self.h0[n : n + 1])

    def heads(self, value_heads: Sequence[int]) -> Inputs:
        """Some value heads, each with its own copy of its key head."""
        ratio = self.v.shape[2] // self.q.shape[2]
        of_value, of_key = list(value_heads), [h // ratio for h in value_heads]
        q, k = (x[:, :, of_key] for x in (self.q, self.k))
        v, g, beta = (x[:, :, of_value] for x in (self.v, self.g, self.beta))
        return Inputs(q, k, v, g, beta, None if self.h0 is None else self.h0[:, of_value], self.cu)

    def run(self, **options: object) -> tuple[Tensor, Tensor]:
        """o and final state of the public function, on the current stream."""
        options = {"initial_state": self.h0, "output_final_state": True, "cu_seqlens": self.cu} | options
        o, state = qla.chunk_gated_delta_rule(*self.tensors, **options)  # type: ignore[arg-type]
        assert o.dtype == self.q.dtype and o.shape == self.v.shape
        assert state is None or state.dtype == torch.float32
        return o, state  # type: ignore[return-value]

    def exact(self, scale: float | None = None, chunked: bool = False) -> tuple[Tensor, Tensor]:
        """o and final state in float64: token by token, or by chunks where that would take too long."""
        function = chunked_gated_delta_rule if chunked else recurrent_gated_delta_rule
        h0 = None if self.h0 is None else self.h0.double()
        o, state = function(*(x.double() for x in self.tensors), scale, h0, True, False, self.cu)
        assert state is not None
        return o, state


def cu_of(lengths: Sequence[int], dtype: torch.dtype = torch.int32) -> Tensor:
    return torch.tensor([0, *lengths]).cumsum(0).to(DEVICE, dtype)


def make_gates(kind: str, noise: Tensor) -> Tensor:
    """Log gates from normal noise [B, T, HV]. fast: logsigmoid; none: 0; mixed: every second head never decays."""
    fast = torch.nn.functional.logsigmoid(noise)
    if kind == "fast":
        return fast
    if kind == "none":
        return torch.zeros_like(fast)
    if kind == "mixed":
        never = torch.arange(noise.shape[-1], device=noise.device) % 2 == 1
        return torch.where(never, 0.0, fast)
    raise ValueError(kind)


def make_inputs(
    rng: torch.Generator,
    tokens: int | Sequence[int],
    heads: tuple[int, int] = (2, 4),
    batch: int = 1,
    dims: tuple[int, int] = (128, 128),
    dtype: torch.dtype = torch.bfloat16,
    gates: str = "fast",
    state: bool = True,
) -> Inputs:
    """Normalised q and k, normal v, beta = sigmoid(normal), fp32 gates. ``tokens`` is T, or the lengths of packed sequences."""
    packed = not isinstance(tokens, int)
    total = sum(tokens) if packed else tokens
    num_seqs = len(tokens) if packed else batch
    (h, hv), (key_dim, value_dim) = heads, dims

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=rng, device=rng.device).to(DEVICE)

    q, k = (torch.nn.functional.normalize(normal(batch, total, h, key_dim), dim=-1).to(dtype) for _ in range(2))
    v = normal(batch, total, hv, value_dim).to(dtype)
    g, beta = make_gates(gates, normal(batch, total, hv)), normal(batch, total, hv).sigmoid()
    h0 = normal(num_seqs, hv, key_dim, value_dim) if state else None
    return Inputs(q, k, v, g, beta, h0, cu_of(tokens) if packed else None)


def near_equal_keys(
    rng: torch.Generator, beta: float | str, spread: float, dtype: torch.dtype, tokens: Sequence[int] = (256, 65)
) -> Inputs:
    """Keys within ``spread`` of one direction, no decay: the inverse has no small off-diagonal part to neglect. beta: or "up to 2"."""
    x = make_inputs(rng, list(tokens), (2, 4), dtype=dtype, gates="none")
    k = torch.randn(x.k.shape, generator=rng) * spread
    k[..., 0] += 1
    k = torch.nn.functional.normalize(k, dim=-1).to(x.k.device, dtype)
    betas = 2 * torch.rand(x.beta.shape, generator=rng) if beta == "up to 2" else torch.full(x.beta.shape, float(beta))
    return x.with_(k=k, beta=betas.to(x.beta.device))


def with_garbage_rows(x: Inputs, count: int, value: float) -> Inputs:
    """``count`` rows past the last sequence, holding ``value``."""
    longer = [torch.cat([t, t.new_full((1, count, *t.shape[2:]), value)], 1) for t in x.tensors]
    return Inputs(*longer, x.h0, x.cu)


VIEWS = ("heads first", "time first", "slice of the last axis", "slice of tokens", "misaligned", "every second")


def as_view(t: Tensor, kind: str) -> Tensor:
    """The same values [B, T, H, ..] behind other strides or another address."""
    if kind == "heads first":
        return t.transpose(1, 2).contiguous().transpose(1, 2)
    if kind == "time first":
        return t.transpose(0, 1).contiguous().transpose(0, 1)
    if kind == "slice of the last axis":
        return torch.cat([t, t], -1)[..., : t.shape[-1]]
    if kind == "slice of tokens":
        return torch.cat([t[:, :3], t, t[:, :1]], 1)[:, 3:-1]
    if kind == "misaligned":
        whole = t.new_empty(t.numel() + 1)
        whole[1:] = t.flatten()
        return whole[1:].view(t.shape)
    if kind == "every second":
        return torch.stack([t, t + 1], -1).flatten(-2)[..., ::2]
    raise ValueError(kind)


def views_of(x: Inputs, kind: str) -> Inputs:
    """All inputs through ``as_view``; of states the first two axes take the place of batch and tokens."""
    h0 = None if x.h0 is None else as_view(x.h0, "time first" if kind == "heads first" else kind)
    return Inputs(*(as_view(t, kind) for t in x.tensors), h0, x.cu)


def device_rng(seed: int) -> torch.Generator:
    """A generator on the test device, for inputs too large to draw on the CPU."""
    return torch.Generator(device=DEVICE).manual_seed(seed)


class _RoundedProduct(torch.autograd.Function):
    """a @ b in ``wide`` of operands rounded to ``dtype``; so are the two products of the backward pass."""

    @staticmethod
    def forward(ctx: Any, a: Tensor, b: Tensor, dtype: torch.dtype, wide: torch.dtype) -> Tensor:
        ctx.dtypes = a.dtype, b.dtype, dtype
        a, b = a.to(dtype).to(wide), b.to(dtype).to(wide)
        ctx.save_for_backward(a, b)
        return a @ b

    @staticmethod
    def backward(ctx: Any, dc: Tensor) -> tuple[Tensor, Tensor, None, None]:
        a, b = ctx.saved_tensors
        of_a, of_b, dtype = ctx.dtypes
        dc = dc.to(dtype).to(a.dtype)
        return (dc @ b.transpose(-1, -2)).to(of_a), (a.transpose(-1, -2) @ dc).to(of_b), None, None


class _RoundedInverse(torch.autograd.Function):
    """(I + x)^-1 of a strictly lower x in float64; backward is -A^T dA A^T with operands rounded to ``dtype``."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, dtype: torch.dtype) -> Tensor:
        eye = torch.eye(x.shape[-1], dtype=x.dtype, device=x.device)
        inverse = torch.linalg.solve_triangular(eye + x, eye.expand_as(x), upper=False, unitriangular=True)
        ctx.save_for_backward(inverse.to(dtype).to(x.dtype))
        ctx.dtype = dtype
        return inverse

    @staticmethod
    def backward(ctx: Any, dA: Tensor) -> tuple[Tensor, None]:
        (inverse,) = ctx.saved_tensors
        transposed = inverse.transpose(-1, -2)
        left = transposed @ dA.to(ctx.dtype).to(dA.dtype)
        return -(left.to(ctx.dtype).to(dA.dtype) @ transposed), None


class _RoundedDecay(torch.autograd.Function):
    """gamma * state in fp32; gamma's gradient is a sum over a state and its gradient, which are kept in ``dtype`` between chunks."""

    @staticmethod
    def forward(ctx: Any, gamma: Tensor, state: Tensor, dtype: torch.dtype) -> Tensor:
        ctx.save_for_backward(gamma, state.to(dtype))
        return gamma * state

    @staticmethod
    def backward(ctx: Any, d: Tensor) -> tuple[Tensor, Tensor, None]:
        gamma, state = ctx.saved_tensors
        return (state.float() * d.to(state.dtype).float()).sum((-2, -1), keepdim=True), gamma * d, None


def side_load() -> Callable[[int], None]:
    """Work on a stream of its own, more or less of it by a running number: it takes multiprocessors, L2 and bandwidth away."""
    side = torch.cuda.Stream()
    a = torch.randn(2048, 2048, device=DEVICE, dtype=torch.bfloat16)
    big = torch.empty(64 << 20, device=DEVICE)
    side.wait_stream(torch.cuda.current_stream())

    def load(number: int) -> None:
        nonlocal a
        with torch.cuda.stream(side):
            for _ in range(number % 5):
                a = (a @ a).clamp_(-1, 1)
            if number % 3 == 0:
                big.add_(1)

    return load


def rounded_chunked(x: Inputs, scale: float | None = None) -> tuple[Tensor, Tensor]:
    """The chunked form in fp32 with every operand of a matrix product rounded to q's dtype, A included. Returns (o, state) in fp32.

    Differentiable, with the operands of the backward pass's products rounded likewise.
    """
    dtype, scale = x.q.dtype, x.q.shape[-1] ** -0.5 if scale is None else scale

    def product(a: Tensor, b: Tensor, wide: torch.dtype = torch.float32) -> Tensor:
        return _RoundedProduct.apply(a, b, dtype, wide)  # type: ignore[no-any-return]

    bounds = x.bounds
    owners = [(n, rows) for n, rows in enumerate(bounds) if rows[0] < rows[1]]
    chunks = max(1, -(-max((end - begin for begin, end in bounds), default=0) // CHUNK))

    def padded(t: Tensor) -> Tensor:
        """[B, T, H, ..] to [chunks, S, H, C, ..], zeros past each sequence's end."""
        t = t.flatten(0, 1)
        out = t.new_zeros(len(bounds), chunks * CHUNK, *t.shape[1:])
        for n, (begin, end) in owners:
            out[n, : end - begin] = t[begin:end]
        return out.unflatten(1, (chunks, CHUNK)).transpose(0, 1).transpose(2, 3)

    ratio = x.v.shape[2] // x.q.shape[2]
    q, k = (padded(t).float().repeat_interleave(ratio, 2) for t in (x.q, x.k))
    v, beta = padded(x.v).float(), padded(x.beta).float().unsqueeze(-1)
    g = padded(x.g).double().clamp_min(-1e3)
    lower = torch.ones(CHUNK, CHUNK, dtype=torch.bool, device=q.device).tril()
    # A sum of gates for each pair: the gradient of a gate sums the pairs around it, with nothing to cancel.
    between = torch.where(lower.tril(-1), g.unsqueeze(-1), 0).cumsum(-2)
    decay = torch.where(lower, between, -torch.inf).exp()
    gamma, to_end = g.cumsum(-1).exp().unsqueeze(-1).float(), decay[..., -1, :].unsqueeze(-1).float()
    last = gamma[..., -1:, :]

    products = (beta.double() * decay * product(k, k.transpose(-1, -2), torch.float64)).tril(-1)
    inverse = _RoundedInverse.apply(products, dtype)
    scores = scale * decay * product(q, k.transpose(-1, -2))

    shape = (len(bounds), x.v.shape[2], x.q.shape[-1], x.v.shape[-1])
    state = torch.zeros(shape, device=q.device) if x.h0 is None else x.h0.float()
    outputs = []
    for i in range(chunks):
        w = beta[i] * (v[i] - gamma[i] * product(k[i], state))
        added = product(inverse[i], w)
        outputs.append(scale * gamma[i] * product(q[i], state) + product(scores[i], added))
        state = _RoundedDecay.apply(last[i], state, dtype) + product(k[i].transpose(-1, -2), to_end[i] * added)
    o = torch.stack(outputs, 1).transpose(2, 3).flatten(1, 2)
    flat = torch.zeros(x.v.shape, device=q.device).flatten(0, 1)
    for n, (begin, end) in owners:
        flat[begin:end] = o[n, : end - begin]
    return flat.to(dtype).float().view(x.v.shape), state


def relative(actual: Tensor, expected: Tensor) -> float:
    """Relative Frobenius error on the tensors' own device; inf if anything in ``actual`` is not finite."""
    assert actual.shape == expected.shape, f"shapes differ: {tuple(actual.shape)} and {tuple(expected.shape)}"
    if not bool(torch.isfinite(actual).all()):
        return float("inf")
    norm = float(expected.double().norm())
    return float((actual.double() - expected.double()).norm()) / (norm if norm > 0 else 1.0)


def worst_state(actual: Tensor, expected: Tensor) -> float:
    """Largest relative error of one [K, V] state, against the larger of its norm and 5 % of the root-mean-square norm."""
    if expected.numel() == 0:
        return 0.0
    norms = expected.double().flatten(2).norm(dim=-1)
    floor = 0.05 * norms.square().mean().sqrt()
    differences = (actual.double() - expected.double()).flatten(2).norm(dim=-1)
    errors = differences / torch.maximum(norms, floor).clamp_min(torch.finfo(torch.float64).tiny)
    return float(torch.where(differences == 0, 0.0, errors).nan_to_num(nan=float("inf")).max())


def worst_of(name: str, actual: Tensor, expected: Tensor) -> float:
    return worst_tile(actual, expected).error if name == "o" else worst_state(actual, expected)


def assert_accurate(
    x: Inputs,
    got: tuple[Tensor, Tensor],
    scale: float | None = None,
    expected: tuple[Tensor, Tensor] | None = None,
    floor: float | None = None,
) -> None:
    """o and final state against float64, as the module says; ``floor`` in place of the dtype's own."""
    expected = x.exact(scale) if expected is None else expected
    floor = FLOOR[x.q.dtype] if floor is None else floor
    baseline = rounded_chunked(x, scale)
    failures = []
    for name, actual, exact, plain in zip(("o", "state"), got, expected, baseline, strict=True):
        for part, measure, least in (("whole", relative, floor), ("worst part", lambda a, e, n=name: worst_of(n, a, e), 2 * floor)):
            error, plain_error = measure(actual, exact), measure(plain, exact)
            limit = max(least, 2 * plain_error) if plain_error < float("inf") else least
            if not error <= limit:
                failures.append(f"{name}, {part}: error {error:.2e} > {limit:.2e} (plain 16-bit PyTorch: {plain_error:.2e})")
    assert not failures, "; ".join(failures)


def assert_same_bits(
    got: Sequence[Tensor | None], expected: Sequence[Tensor | None], what: str, names: Sequence[str] = ("o", "state")
) -> None:
    """Bitwise equality of (o, final state) pairs, or of what ``names`` says, on their own device."""
    for name, a, e in zip(names, got, expected, strict=True):
        if a is None or e is None:
            assert a is e, f"{what}: {name} is {a} and {e}"
            continue
        assert a.shape == e.shape and a.dtype == e.dtype, f"{what}: {name} {a.shape} {a.dtype} and {e.shape} {e.dtype}"
        if DEVICE == "cpu":  # PyTorch's products round differently in another batch
            limit = 1e-5 if a.element_size() > 2 else 1e-3
            assert relative(a, e) < limit, f"{what}: {name}: relative error {relative(a, e):.2e}"
            continue
        integer = {2: torch.int16, 4: torch.int32, 8: torch.int64}[a.element_size()]
        different = int((a.contiguous().view(integer) != e.contiguous().view(integer)).sum())
        assert different == 0, f"{what}: {different} of {a.numel()} elements of {name} differ, relative error {relative(a, e):.2e}"


def copy_into(x: Inputs, other: Inputs) -> None:
    """Other values into x's own tensors."""
    for a, b in zip((*x.tensors, x.h0, x.cu), (*other.tensors, other.h0, other.cu), strict=True):
        if a is not None:
            a.copy_(b)


def synchronise() -> None:
    if DEVICE != "cpu":
        torch.cuda.synchronize()


def free_gigabytes() -> float:
    torch.cuda.empty_cache()
    return torch.cuda.mem_get_info()[0] / 1e9


@pytest.fixture
def sync_is_an_error() -> Iterator[Callable[[], object]]:
    """A context manager within which PyTorch raises on every wait for the GPU."""
    import contextlib

    @contextlib.contextmanager
    def forbidden() -> Iterator[None]:
        previous = torch.cuda.get_sync_debug_mode()
        torch.cuda.set_sync_debug_mode("error")
        try:
            yield
        finally:
            torch.cuda.set_sync_debug_mode(previous)

    yield forbidden
