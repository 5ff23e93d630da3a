"""Inputs that break kernels of this kind: extreme gates, nearly equal keys, growth, scales, the range of fp16, padding tokens."""

from __future__ import annotations

import pytest
import torch
from problems import (
    FLOOR,
    NAN_FILLED,
    Inputs,
    assert_accurate,
    assert_same_bits,
    gpu_marks,
    make_inputs,
    nan_filled_empty,  # noqa: F401
    near_equal_keys,
    relative,
    worst_state,
)

import qla
from qla.reference import chunk_gate_sum_and_inverse, recurrent_gated_delta_rule

pytestmark = gpu_marks(NAN_FILLED)

DTYPES = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
PACKED = [7, 50, 64, 65, 130]


# Gates


@DTYPES
@pytest.mark.parametrize("gate", [-20.0, -50.0, -88.0, -300.0, -1e4, -3e38])
def test_strong_gates(gate, dtype, rng):
    x = make_inputs(rng, PACKED, dtype=dtype)
    x = x.with_(g=torch.full_like(x.g, gate))
    assert_accurate(x, x.run())


@DTYPES
@pytest.mark.parametrize("share", [0.01, 0.3])
def test_some_tokens_forget_almost_everything(share, dtype, rng):
    x = make_inputs(rng, 700, dtype=dtype)
    strong = (torch.rand(x.g.shape, generator=rng) < share).to(x.g.device)
    x = x.with_(g=torch.where(strong, -1e4, x.g))
    assert_accurate(x, x.run())


@DTYPES
@pytest.mark.parametrize("tokens", [7, 50, 64, 65, 2048, PACKED], ids=str)
@pytest.mark.parametrize("every", [1, 2], ids=["no gate", "every second gate 0"])
def test_no_decay(every, tokens, dtype, rng):
    x = make_inputs(rng, tokens, dtype=dtype)
    g = x.g.clone()
    g[:, ::every] = 0
    x = x.with_(g=g)
    assert_accurate(x, x.run())


@DTYPES
@pytest.mark.parametrize("places", [[0], [63], [64], [129], [10, 11], [70], [0, 64, 128], list(range(130))], ids=lambda p: str(p)[:16])
def test_hard_reset(places, dtype, rng):
    """g = -inf forgets the state, (-inf) - (-inf) never comes up."""
    x = make_inputs(rng, 130, dtype=dtype)
    g = x.g.clone()
    g[:, places] = float("-inf")
    x = x.with_(g=g)
    assert_accurate(x, x.run())


@pytest.mark.parametrize("place", [1, 37, 63, 64, 70, 129])
def test_nothing_survives_a_hard_reset(place, rng):
    x, other = (make_inputs(rng, 140) for _ in range(2))
    mixed = [torch.cat([b[:, :place], a[:, place:]], 1) for a, b in zip(x.tensors, other.tensors, strict=True)]
    y = Inputs(*mixed, other.h0)
    x, y = (z.with_(g=z.g.index_fill(1, torch.tensor([place], device=z.g.device), float("-inf"))) for z in (x, y))
    (o, state), (o_other, state_other) = x.run(), y.run()
    # Not the same bits: gates are summed within the chunk, so what came before the reset rounds what comes after it. A state that
    # survived would differ by all of itself.
    assert relative(o[:, place:], o_other[:, place:].double()) < 1e-3
    assert relative(state, state_other.double()) < 1e-3


def test_reset_of_single_heads(rng):
    x = make_inputs(rng, [130, 65], (2, 8))
    g = x.g.clone()
    g[:, 40, ::2] = float("-inf")
    g[:, 140, 1::2] = float("-inf")
    x = x.with_(g=g)
    assert_accurate(x, x.run())


@pytest.mark.parametrize("gate, tokens", [(0.05, 1024), (0.03, 2048)])
def test_growth(gate, tokens, rng):
    x = make_inputs(rng, tokens, (1, 2))
    x = x.with_(g=torch.full_like(x.g, gate))
    o, state = x.exact()
    assert float(state.abs().max()) < 1e37, "the reference itself must stay within fp32"
    assert_accurate(x, x.run(), expected=(o, state))


def test_growth_until_fp32_ends(rng):
    """+0.05 a token for 2048 tokens leaves fp32's range near the end: right up to there."""
    x = make_inputs(rng, 2048, (1, 2))
    x = x.with_(g=torch.full_like(x.g, 0.05))
    exact, _ = x.exact()
    too_large = (exact.abs().amax((0, 2, 3)) > 1e34).nonzero()
    end = (int(too_large[0]) if len(too_large) else 2048) // 64 * 64 - 64
    assert end > 1024
    o, _ = x.run()
    assert relative(o[:, :end], exact[:, :end]) < 2 * FLOOR[torch.bfloat16]


@pytest.mark.parametrize("norm", [1.0, 1.4])
@pytest.mark.parametrize("slow", [0.0, -1e-6, -1e-4])
def test_heads_that_decay_beside_heads_that_do_not(slow, norm, rng):
    """A large initial state, keys that are not normalised: every head is as accurate as the serial recurrence."""
    x = make_inputs(rng, 2048, (2, 4))
    g = x.g.clone()
    g[..., 1::2] = slow
    # beta |k|^2 <= 2, so that the state cannot grow
    x = x.with_(g=g, k=(x.k.float() * norm).to(x.k.dtype), h0=x.h0 * 100)
    got, expected = x.run(), x.exact()
    assert_accurate(x, got, expected=expected)
    for head in range(4):
        one = [t[:, :, head : head + 1] for t in (got[0], expected[0])]
        assert relative(*one) < 2 * FLOOR[torch.bfloat16], f"o of head {head}"
        assert worst_state(got[1][:, head : head + 1], expected[1][:, head : head + 1]) < 2 * FLOOR[torch.bfloat16], f"state of head {head}"


# Keys


@DTYPES
@pytest.mark.parametrize("spread", [0.0, 1e-3, 0.1])
@pytest.mark.parametrize("beta", [0.5, 0.99, 1.0, 1.5, 2.0, "up to 2"])
def test_inverse_of_nearly_equal_keys(beta, spread, dtype, rng):
    x = near_equal_keys(rng, beta, spread, dtype)
    _, A, o, state = qla.chunk_gated_delta_rule_fwd(*x.tensors, None, x.h0, True, x.cu)
    _, exact = chunk_gate_sum_and_inverse(x.k.double(), x.g.double(), x.beta.double(), x.cu)
    error, rounding = relative(A, exact), relative(exact.to(dtype), exact)
    assert error <= rounding + 1e-3, f"A: error {error:.2e}, of which rounding to 16 bits {rounding:.2e}"
    assert_accurate(x, (o, state))


@DTYPES
def test_inverse_with_gates_and_large_beta(dtype, rng):
    x = near_equal_keys(rng, "up to 2", 1e-3, dtype)
    g = torch.nn.functional.logsigmoid(torch.randn(x.g.shape, generator=rng) + 2).to(x.g.device)
    x = x.with_(g=g)
    _, A, o, state = qla.chunk_gated_delta_rule_fwd(*x.tensors, None, x.h0, True, x.cu)
    _, exact = chunk_gate_sum_and_inverse(x.k.double(), x.g.double(), x.beta.double(), x.cu)
    assert relative(A, exact) <= relative(exact.to(dtype), exact) + 1e-3
    assert_accurate(x, (o, state))


def test_beta_zero_and_one(rng):
    x = make_inputs(rng, 130)
    zero = x.with_(beta=torch.zeros_like(x.beta), g=torch.zeros_like(x.g))
    o, state = zero.run()
    assert torch.equal(state, x.h0), "beta = 0 and g = 0 leave the state as it is"
    one = x.with_(beta=torch.ones_like(x.beta))
    assert_accurate(one, one.run())
    assert_accurate(zero, (o, state))


# Scale


@pytest.mark.parametrize("scale", [1.0, 0.1, 128**-0.5, 3.7, 1e-3, -0.5])
def test_scale(scale, rng):
    x = make_inputs(rng, [130, 64])
    assert_accurate(x, x.run(scale=scale), scale)


def test_scale_is_linear(rng):
    x = make_inputs(rng, [130, 64])
    o, state = x.run(scale=1.0)
    assert_same_bits(x.run(scale=None), x.run(scale=128**-0.5), "default scale")
    half = x.run(scale=0.5)
    assert torch.equal(half[0], 0.5 * o), "a power of two scales exactly"
    assert torch.equal(x.run(scale=-1.0)[0], -o)
    zero = x.run(scale=0.0)
    assert bool((zero[0] == 0).all())
    for other in (half, zero, x.run(scale=-1.0), x.run(scale=1e-3)):
        assert_same_bits((None, other[1]), (None, state), "the state does not know the scale")


# Range and padding


def test_large_states(rng):
    """bf16 holds any state; fp16 as long as the products stay below 65504."""
    large = make_inputs(rng, [130, 64], gates="none")
    large = large.with_(h0=large.h0 * 1e6, v=large.v * 1e3)
    assert_accurate(large, large.run())
    fitting = make_inputs(rng, [130, 64], dtype=torch.float16, gates="none")
    fitting = fitting.with_(h0=fitting.h0 * 5e3)
    assert_accurate(fitting, fitting.run())


def test_small_values(rng):
    x = make_inputs(rng, [130, 64])
    x = x.with_(h0=x.h0 * 1e-12, v=x.v * 1e-12)
    assert_accurate(x, x.run())


def test_zero_inputs(rng):
    x = make_inputs(rng, [130, 64])
    x = x.with_(q=torch.zeros_like(x.q), k=torch.zeros_like(x.k), v=torch.zeros_like(x.v))
    o, state = x.run()
    assert bool((o == 0).all())
    assert_accurate(x, (o, state))


@DTYPES
@pytest.mark.parametrize("inside", [True, False], ids=["l2norm inside", "zero keys"])
def test_padding_tokens(inside, dtype, rng):
    """Rows with q = k = v = 0, single ones and a long tail: no 0/0, with the norm taken inside too."""
    x = make_inputs(rng, 200, dtype=dtype)
    padding = (torch.rand(200, generator=rng) < 0.2).to(x.q.device) | (torch.arange(200, device=x.q.device) >= 150)
    q, k, v = (torch.where(padding.view(1, -1, 1, 1), 0, t) for t in (x.q, x.k, x.v))
    if inside:
        q, k = 3 * q, 0.2 * k
    if dtype == torch.float16:  # 50 tokens of strong decay leave a state below what fp16 can hold
        x = x.with_(g=x.g * 0.05)
    got = x.with_(q=q, k=k, v=v).run(use_qk_l2norm_in_kernel=inside)
    wide = [t.double() for t in (q, k, v)]
    if inside:
        wide[:2] = [t / (t.square().sum(-1, keepdim=True) + 1e-6).sqrt() for t in wide[:2]]
    expected = recurrent_gated_delta_rule(*wide, x.g.double(), x.beta.double(), None, x.h0.double(), True)
    # The normalised rows are rounded to 16 bits before the kernels: one more rounding than the inputs of other tests have.
    for actual, exact in zip(got, expected, strict=True):
        assert relative(actual, exact) < 2 * FLOOR[dtype]
