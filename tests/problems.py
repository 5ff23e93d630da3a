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


def device_rng(seed: int) -> torch.Generator:
    """A generator on the test device, for inputs too large to draw on the CPU."""
    return torch.Generator(device=DEVICE).manual_seed(seed)


def rounded_chunked(x: Inputs, scale: float | None = None) -> tuple[Tensor, Tensor]:
    """The chunked form in fp32 with every operand of a matrix product rounded to q's dtype, A included. Returns (o, state) in fp32."""
    dtype, scale = x.q.dtype, x.q.shape[-1] ** -0.5 if scale is None else scale

    def rounded(t: Tensor) -> Tensor:
        return t.to(dtype).float()

    bounds = x.bounds
    chunks = max(1, -(-max((end - begin for begin, end in bounds), default=0) // CHUNK))

    def padded(t: Tensor) -> Tensor:
        """[B, T, H, ..] to [chunks, S, H, C, ..], zeros past each sequence's end."""
        t = t.flatten(0, 1)
        out = t.new_zeros(len(bounds), chunks * CHUNK, *t.shape[1:])
        for n, (begin, end) in enumerate(bounds):
            out[n, : end - begin] = t[begin:end]
        return out.unflatten(1, (chunks, CHUNK)).transpose(0, 1).transpose(2, 3)

    ratio = x.v.shape[2] // x.q.shape[2]
    q, k = (padded(t).float().repeat_interleave(ratio, 2) for t in (x.q, x.k))
    v, beta = padded(x.v).float(), padded(x.beta).float().unsqueeze(-1)
    g = padded(x.g).double().clamp_min(-1e3).cumsum(-1)
    lower = torch.ones(CHUNK, CHUNK, dtype=torch.bool, device=q.device).tril()
    decay = torch.where(lower, g.unsqueeze(-1) - g.unsqueeze(-2), -torch.inf).exp()
    gamma, to_end = g.exp().unsqueeze(-1).float(), (g[..., -1:] - g).exp().unsqueeze(-1).float()
    last = gamma[..., -1:, :]

    products = (beta.double() * decay * (k.double() @ k.double().transpose(-1, -2))).tril(-1)
    eye = torch.eye(CHUNK, dtype=torch.float64, device=q.device)
    inverse = rounded(torch.linalg.solve_triangular(eye + products, eye.expand_as(products), upper=False, unitriangular=True))
    scores = rounded(scale * decay * (q @ k.transpose(-1, -2)))

    shape = (len(bounds), x.v.shape[2], x.q.shape[-1], x.v.shape[-1])
    state = torch.zeros(shape, device=q.device) if x.h0 is None else x.h0.float()
    outputs = []
    for i in range(chunks):
        s = rounded(state)
        w = rounded(beta[i] * (v[i] - gamma[i] * (k[i] @ s)))
        added = inverse[i] @ w
        outputs.append(scale * gamma[i] * (q[i] @ s) + scores[i] @ rounded(added))
        state = last[i] * state + k[i].transpose(-1, -2) @ rounded(to_end[i] * added)
    o = torch.stack(outputs, 1).transpose(2, 3).flatten(1, 2)
    flat = torch.zeros(x.v.shape, device=q.device).flatten(0, 1)
    for n, (begin, end) in enumerate(bounds):
        flat[begin:end] = o[n, : end - begin]
    return rounded(flat).view(x.v.shape), state


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


def assert_same_bits(got: Sequence[Tensor | None], expected: Sequence[Tensor | None], what: str) -> None:
    """Bitwise equality of (o, final state) pairs, on their own device."""
    for name, a, e in zip(("o", "state"), got, expected, strict=True):
        if a is None or e is None:
            assert a is e, f"{what}: {name} is {a} and {e}"
            continue
        assert a.shape == e.shape and a.dtype == e.dtype, f"{what}: {name} {a.shape} {a.dtype} and {e.shape} {e.dtype}"
        if DEVICE == "cpu":  # PyTorch's products round differently in another batch
            assert relative(a, e) < 1e-5, f"{what}: {name}"
            continue
        integer = {2: torch.int16, 4: torch.int32, 8: torch.int64}[a.element_size()]
        different = int((a.contiguous().view(integer) != e.contiguous().view(integer)).sum())
        assert different == 0, f"{what}: {different} of {a.numel()} elements of {name} differ, relative error {relative(a, e):.2e}"


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
