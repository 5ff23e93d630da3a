"""Activations through kernels against float64: norms of q and k, gates, beta, and their gradients."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from problems import DEVICE, NAN_FILLED, assert_same_bits, gpu_marks, nan_filled_empty, relative  # noqa: F401

from qla import activations
from qla.activations import GateOptions

pytestmark = gpu_marks(pytest.mark.skipif(DEVICE == "cpu", reason="compares the kernels with PyTorch"), NAN_FILLED)

DTYPES = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
SHAPES = [(1, 1, 1), (1, 5, 3), (2, 70, 2), (1, 1000, 16), (3, 257, 48)]  # batch, tokens, heads


def draw(rng, *shape, dtype=torch.float32):
    return torch.randn(shape, generator=rng).to(DEVICE, dtype)


def same_bits(got, expected, what):
    assert_same_bits(got, expected, what, [str(i) for i in range(len(got))])


def without_owner(x, end):
    """x with NaN from row `end` on."""
    return torch.where(torch.arange(x.shape[1], device=x.device).view(1, -1, *[1] * (x.dim() - 2)) < end, x, math.nan)


def exact_l2norm(*tensors):
    return [x.double() / (x.double().square().sum(-1, keepdim=True) + activations.L2NORM_EPS).sqrt() for x in tensors]


def gradients(function, inputs, grads):
    """Results of the function and the gradients of its inputs, in their dtypes."""
    leaves = [x.detach().clone(memory_format=torch.preserve_format).requires_grad_() for x in inputs]
    results = function(*leaves)
    found = torch.autograd.grad(results, leaves, [d.to(r.dtype) for d, r in zip(grads, results, strict=True)])
    assert all(d.dtype == x.dtype and d.shape == x.shape for d, x in zip(found, inputs, strict=True))
    return [*(result.detach() for result in results), *found]


@DTYPES
@pytest.mark.parametrize("dim", [128, 64])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_norms(shape, dim, dtype, rng):
    q, k = (draw(rng, *shape, dim, dtype=dtype) * size for size in (3.0, 0.2))
    dq, dk = (draw(rng, *shape, dim, dtype=dtype) for _ in range(2))
    ours = gradients(lambda *x: activations.l2norm_by_kernel(*x, None), (q, k), (dq, dk))
    exact = gradients(exact_l2norm, (q.double(), k.double()), (dq, dk))
    limit = 4e-3 if dtype == torch.bfloat16 else 1e-3
    for name, got, expected in zip(("q", "k", "dq", "dk"), ours, exact, strict=True):
        assert got.is_contiguous() and relative(got, expected) <= limit, name


@DTYPES
@pytest.mark.parametrize("dim", [128, 64])
def test_norms_of_slices_of_a_projection(dim, dtype, rng):
    """Read in place; any other layout is copied first. The same bits as from contiguous tensors."""
    joint = draw(rng, 2, 130, (2 * 4 + 8) * dim, dtype=dtype)
    q, k = (joint[..., i * 4 * dim : (i + 1) * 4 * dim].unflatten(-1, (4, dim)) for i in range(2))
    expected = activations.l2norm_by_kernel(q.contiguous(), k.contiguous(), None)
    odd = draw(rng, 2, 130, 4 * dim + 1, dtype=dtype)[..., 1:].unflatten(-1, (4, dim))
    for name, pair, wanted in (
        ("slices", (q, k), expected),
        ("heads first", tuple(x.transpose(1, 2).contiguous().transpose(1, 2) for x in (q, k)), expected),
        ("odd address", (odd, odd), activations.l2norm_by_kernel(odd.contiguous(), odd.contiguous(), None)),
        ("one row", (q[:1, :1].expand(2, 130, 4, dim), k), (expected[0][:1, :1].expand(2, 130, 4, dim), expected[1])),
    ):
        same_bits(activations.l2norm_by_kernel(*pair, None), wanted, name)


@DTYPES
def test_rows_of_zeros_and_extreme_rows(dtype, rng):
    q = draw(rng, 1, 64, 2, 128, dtype=dtype)
    q[:, ::3] = 0
    q[:, 1] *= 1e-4
    q[:, 2] *= 100
    y, *_, dq, _ = gradients(lambda *x: activations.l2norm_by_kernel(*x, None), (q, q), (torch.ones_like(q), torch.ones_like(q)))
    assert bool((y[:, ::3] == 0).all()) and bool(torch.isfinite(dq).all())
    assert bool((dq[:, ::3] == 1000).all()), "eps inside the root: a factor of 1e3"
    assert relative(y, exact_l2norm(q)[0]) <= 4e-3


@pytest.mark.parametrize("offsets", [[0, 40, 40, 90], [0], [0, 130]], ids=str)
def test_rows_without_owner(offsets, rng):
    """NaN there is not read: zeros come out, and zero gradients."""
    cu = torch.tensor(offsets, dtype=torch.int32, device=DEVICE)
    end = offsets[-1]
    q, raw_g = draw(rng, 1, 130, 4, 128, dtype=torch.bfloat16), draw(rng, 1, 130, 4, dtype=torch.bfloat16)
    A_log = draw(rng, 4)
    q, raw_g = without_owner(q, end), without_owner(raw_g, end)
    norms = gradients(lambda *x: activations.l2norm_by_kernel(*x, cu), (q, q), (torch.ones_like(q), torch.ones_like(q)))
    options = GateOptions(sigmoid=True)
    ones = torch.ones(1, 130, 4, device=DEVICE)
    gates = gradients(lambda g, b, A: activations.gates_by_kernel(g, b, A, None, cu, options), (raw_g, raw_g, A_log), (ones, ones))
    for x in (*norms, *gates[:4]):
        assert bool((x[:, end:] == 0).all()) and bool(torch.isfinite(x).all())
    if end:
        inputs = (raw_g[:, :end], raw_g[:, :end], A_log)
        part = gradients(lambda g, b, A: activations.gates(g, b, A, None, None, options), inputs, (ones[:, :end],) * 2)
        assert relative(gates[-1], part[-1]) < 1e-5


@pytest.mark.parametrize("with_bias", [True, False], ids=["dt_bias", "no dt_bias"])
@pytest.mark.parametrize("twice", [False, True], ids=["beta", "2 beta"])
@pytest.mark.parametrize("shape", [*SHAPES, (1, 100, 64), (1, 33, 256), (1, 33, 300), (1, 20000, 8)], ids=str)
def test_gates_and_beta(shape, twice, with_bias, rng):
    raw_g, raw_beta = 4 * draw(rng, *shape), 4 * draw(rng, *shape, dtype=torch.bfloat16)
    parameters = [draw(rng, shape[2]) for _ in range(2 if with_bias else 1)]
    grads = [draw(rng, *shape) for _ in range(2)]
    options = GateOptions(True, twice)

    def ours(g, beta, A, bias=None):
        return activations.gates_by_kernel(g, beta, A, bias, None, options)

    def exact(g, beta, A, bias=None):
        return -A.exp() * F.softplus(g if bias is None else g + bias), (2 if twice else 1) * beta.sigmoid()

    inputs = (raw_g, raw_beta, *parameters)
    found = gradients(ours, inputs, grads)
    expected = gradients(exact, [x.double() for x in inputs], grads)
    names = ("g", "beta", "dg", "dbeta", "dA_log", "ddt_bias")
    for name, got, wanted in zip(names, found, expected, strict=False):
        assert relative(got, wanted) <= (4e-3 if got.dtype == torch.bfloat16 else 5e-6), name
    again = gradients(ours, inputs, grads)
    same_bits(again, found, "again")


@pytest.mark.parametrize("g_dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64], ids=str)
def test_dtypes_are_each_their_own(g_dtype, dtype, rng):
    """Every input may have any floating dtype; the same bits as from the same values in fp32, and gradients rounded from those."""
    raw_g, raw_beta, A_log, dt_bias = (
        draw(rng, *shape, dtype=kind) for shape, kind in (((1, 70, 6), g_dtype), ((1, 70, 6), dtype), ((6,), g_dtype), ((1, 6), dtype))
    )
    grads = [draw(rng, 1, 70, 6) for _ in range(2)]

    def ours(*x):
        return activations.gates_by_kernel(*x, None, GateOptions(True))

    found = gradients(ours, (raw_g, raw_beta, A_log, dt_bias), grads)
    wide = gradients(ours, [x.float() for x in (raw_g, raw_beta, A_log, dt_bias)], grads)
    for got, expected in zip(found, wide, strict=True):
        same_bits([got], [expected.to(got.dtype)], "widened, then rounded")


def test_extreme_gates(rng):
    """As PyTorch: the identity above 20, zero far below; -inf gives a gate of 0 and no gradient."""
    raw = torch.tensor([-math.inf, -1000.0, -100.0, -20.0, 0.0, 19.9, 20.1, 1000.0], device=DEVICE).view(1, 8, 1)
    A_log = torch.zeros(1, device=DEVICE)
    ones = torch.ones_like(raw)
    g, beta, dg, dbeta, _ = gradients(
        lambda g, b, A: activations.gates_by_kernel(g, b, A, None, None, GateOptions(True)), (raw, raw, A_log), (ones, ones)
    )
    expected = gradients(lambda g, b, A: activations.gates(g, b, A, None, None, GateOptions(True)), (raw, raw, A_log), (ones, ones))
    for got, wanted in zip((g, beta, dg, dbeta), expected, strict=False):
        assert torch.allclose(got, wanted, rtol=1e-5, atol=1e-30)


def test_only_beta(rng):
    """Without A_log the gates go through as they are, and so do their gradients."""
    g, beta = draw(rng, 1, 70, 6, dtype=torch.bfloat16), draw(rng, 1, 70, 6)
    grads = [draw(rng, 1, 70, 6, dtype=torch.bfloat16).float() for _ in range(2)]
    found = gradients(lambda *x: activations.gates_by_kernel(*x, None, None, None, GateOptions(True)), (g, beta), grads)
    same_bits([found[0], found[2]], [g.float(), grads[0].to(g.dtype)], "gates")
    assert relative(found[1], beta.double().sigmoid()) < 1e-6
