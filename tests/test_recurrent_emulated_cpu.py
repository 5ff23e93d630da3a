"""The recurrent kernel's generated code on a CPU (``emulated``), against the float64 reference."""

from __future__ import annotations

import functools

import pytest
import torch
from inputs import LENGTHS_WITH_GAPS, cu_seqlens_of, make_inputs, make_state
from numeric import relative_error

import qla
from qla import autograd
from qla.reference import recurrent_gated_delta_rule

pytest.importorskip("tilelang")
from qla.kernels import launch  # noqa: E402
from qla.kernels import recurrent as kernel  # noqa: E402
from tests.emulated import COMPILER, Emulated  # noqa: E402

pytestmark = pytest.mark.skipif(COMPILER is None, reason="needs g++")
EXACT = {torch.float32: 2e-6, torch.bfloat16: 3e-3, torch.float16: 4e-4}  # of o, which is rounded to the dtype


@pytest.fixture(scope="module")
def emulate(tmp_path_factory):
    """launcher() of emulated kernels."""

    @functools.cache
    def launcher(_, *form):
        grid = lambda values: (values["parts"], values["heads"], values["seqs"])  # noqa: E731
        return Emulated(kernel, kernel.config_for(*form), tmp_path_factory.mktemp("emulated"), grid)

    return launcher


@pytest.fixture(autouse=True)
def through_the_emulation(monkeypatch, emulate):
    """The public function takes the kernel's way on a CPU, and every buffer without values holds NaN."""
    import contextlib

    monkeypatch.setattr("qla.api.recurrent_unsupported_reason", lambda q, k, v: None)
    monkeypatch.setattr(launch, "launcher", emulate)
    monkeypatch.setattr(autograd.torch.cuda, "device", lambda device: contextlib.nullcontext())
    empty = torch.empty
    monkeypatch.setattr(torch, "empty", lambda *args, **options: empty(*args, **options).fill_(float("nan")))


def check(inputs, start, got, **options):
    """Against the float64 reference; raw inputs are activated here first."""
    o, state = got
    wide = {name: x.double() if isinstance(x, torch.Tensor) and x.is_floating_point() else x for name, x in options.items()}
    expected, final = recurrent_gated_delta_rule(
        *(x.double() for x in inputs), None, None if start is None else start.double(), True, **wide
    )
    assert o.dtype == inputs.q.dtype and o.shape == inputs.v.shape
    assert relative_error(o, expected) < EXACT[inputs.q.dtype]
    assert state.dtype == torch.float32 and relative_error(state, final) < 2e-6


@pytest.mark.parametrize("v_first", [False, True], ids=["K first", "V first"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_batch(dtype, v_first, rng):
    inputs = make_inputs(rng, 3, batch=2, key_dim=128, value_dim=128, dtype=dtype)
    start = make_state(rng, inputs).float()
    given = start.transpose(-1, -2).contiguous() if v_first else start
    got = qla.fused_recurrent_gated_delta_rule(
        inputs.q, inputs.k, inputs.v, inputs.g, beta=inputs.beta, initial_state=given, output_final_state=True, state_v_first=v_first
    )
    check(inputs, given, got, state_v_first=v_first)


def test_layouts_give_the_same_bits(rng):
    inputs = make_inputs(rng, 4, key_dim=100, value_dim=60, dtype=torch.bfloat16)
    start = make_state(rng, inputs).float()
    options = {"g": inputs.g, "beta": inputs.beta, "output_final_state": True}
    o, state = qla.fused_recurrent_gated_delta_rule(*inputs[:3], initial_state=start, **options)
    turned = start.transpose(-1, -2).contiguous()
    o_v, state_v = qla.fused_recurrent_gated_delta_rule(*inputs[:3], initial_state=turned, state_v_first=True, **options)
    assert torch.equal(o, o_v) and torch.equal(state, state_v.transpose(-1, -2))


@pytest.mark.parametrize("sizes", [(60, 64), (64, 100), (100, 36), (7, 5), (1, 128)], ids=str)
@pytest.mark.parametrize("v_first", [False, True], ids=["K first", "V first"])
def test_head_sizes(sizes, v_first, rng):
    inputs = make_inputs(rng, 2, batch=2, key_heads=1, value_heads=3, key_dim=sizes[0], value_dim=sizes[1], dtype=torch.float32)
    start = make_state(rng, inputs)
    given = start.transpose(-1, -2).contiguous() if v_first else start
    got = qla.fused_recurrent_gated_delta_rule(
        *inputs[:3], inputs.g, beta=inputs.beta, initial_state=given, output_final_state=True, state_v_first=v_first
    )
    assert got[1].shape == given.shape
    check(inputs, given, got, state_v_first=v_first)


@pytest.mark.parametrize("offsets", [torch.int32, torch.int64], ids=str)
def test_packed(offsets, rng):
    """Empty sequences, and rows that none owns, which hold NaN."""
    lengths = [min(n, 5) for n in LENGTHS_WITH_GAPS]
    inputs = make_inputs(rng, sum(lengths) + 17, key_dim=32, value_dim=32, dtype=torch.float32)
    for x in inputs:
        x[:, sum(lengths) :] = float("nan")
    cu = cu_seqlens_of(lengths, offsets)
    start = make_state(rng, inputs, len(lengths))
    got = qla.fused_recurrent_gated_delta_rule(
        *inputs[:3], inputs.g, beta=inputs.beta, initial_state=start, output_final_state=True, cu_seqlens=cu
    )
    assert bool((got[0][:, sum(lengths) :] == 0).all())
    check(inputs, start, got, cu_seqlens=cu)


@pytest.mark.parametrize("wrong", [[0, 5, 2, 8], [0, 30], [-7, 8], [9, 0, 9], [2**40, -(2**40), 3]], ids=str)
def test_wrong_offsets_stay_in_bounds(wrong, rng, monkeypatch):
    """Read from a tensor in the middle of others, which would show what is written beside it."""
    monkeypatch.setattr("qla.checks.check_cu_seqlens_values", lambda *_: None)
    inputs = make_inputs(rng, 8, key_dim=16, value_dim=16, dtype=torch.float32)
    around = torch.full((3, *inputs.v.shape), 7.0)
    empty = torch.empty
    monkeypatch.setattr(
        torch, "empty", lambda shape, **options: around[1] if tuple(shape) == inputs.v.shape else empty(shape, **options).fill_(7.0)
    )
    qla.fused_recurrent_gated_delta_rule(*inputs[:3], inputs.g, beta=inputs.beta, output_final_state=True, cu_seqlens=torch.tensor(wrong))
    assert bool((around[0] == 7).all()) and bool((around[2] == 7).all())


@pytest.mark.parametrize("small", [torch.float32, torch.bfloat16, torch.float16, torch.float64], ids=str)
def test_further_gates_and_beta_of_columns(small, rng):
    inputs = make_inputs(rng, 3, key_heads=1, value_heads=2, key_dim=36, value_dim=40, dtype=torch.float32)
    rows = inputs.v.shape[:3]
    gk, gv = (torch.nn.functional.logsigmoid(torch.randn(*rows, n, generator=rng)).to(small) for n in (36, 40))
    beta = torch.rand(*rows, 40, generator=rng).to(small)
    inputs = inputs._replace(beta=beta, g=inputs.g.to(small))
    start = make_state(rng, inputs)
    got = qla.fused_recurrent_gated_delta_rule(*inputs[:3], inputs.g, gk, gv, beta, initial_state=start, output_final_state=True)
    check(inputs, start, got, gk=gk, gv=gv)


@pytest.mark.parametrize("allow_neg_eigval", [False, True])
@pytest.mark.parametrize("small", [torch.float32, torch.bfloat16], ids=str)
def test_activations(small, allow_neg_eigval, rng):
    raw = make_inputs(rng, 3, batch=2, key_dim=64, value_dim=32, dtype=torch.float32)
    raw = raw._replace(q=3 * raw.q, k=0.3 * raw.k, g=30 * torch.randn(raw.g.shape, generator=rng).to(small), beta=raw.g.to(small))
    raw.q[0, 0, 0] = 0
    A_log, dt_bias = (torch.randn(4, generator=rng).to(small) for _ in range(2))
    got = qla.fused_recurrent_gated_delta_rule(
        *raw[:3], raw.g, beta=raw.beta, output_final_state=True, use_qk_l2norm_in_kernel=True, use_gate_in_kernel=True, A_log=A_log,
        dt_bias=dt_bias, use_beta_sigmoid_in_kernel=True, allow_neg_eigval=allow_neg_eigval,
    )  # fmt: skip
    q, k = (x.double() / (x.double().square().sum(-1, keepdim=True) + 1e-6).sqrt() for x in raw[:2])
    g = -A_log.double().exp() * torch.nn.functional.softplus(raw.g.double() + dt_bias.double())
    beta = raw.beta.double().sigmoid() * (2 if allow_neg_eigval else 1)
    expected, final = recurrent_gated_delta_rule(q, k, raw.v.double(), g, beta, None, None, True)
    assert relative_error(got[0], expected) < 5e-6 and relative_error(got[1], final) < 5e-6


def test_defaults_and_infinite_gates(rng):
    """Nothing but q, k and v: no decay, beta 1. A gate of -inf forgets the state, whatever it holds short of infinity."""
    inputs = make_inputs(rng, 3, key_dim=32, value_dim=32, dtype=torch.float32)
    ones, zeros = torch.ones_like(inputs.g), torch.zeros_like(inputs.g)
    check(inputs._replace(g=zeros, beta=ones), None, qla.fused_recurrent_gated_delta_rule(*inputs[:3], output_final_state=True))
    o, none = qla.fused_recurrent_gated_delta_rule(*inputs[:3])
    assert none is None and bool(torch.isfinite(o).all())
    start = torch.full((1, 4, 32, 32), 3e38)
    g = torch.full_like(inputs.g, -torch.inf)
    got = qla.fused_recurrent_gated_delta_rule(*inputs[:3], g, initial_state=start, output_final_state=True)
    check(inputs._replace(g=g, beta=ones), torch.zeros_like(start), got)


def test_slices_of_one_projection_are_read_in_place(rng):
    """Rows of q, k and v a stride apart, batch or packed; what cannot be read in place is copied."""
    inputs = make_inputs(rng, 4, batch=3, key_heads=2, value_heads=2, key_dim=32, value_dim=32, dtype=torch.bfloat16)
    start = make_state(rng, inputs).float()
    options = {"g": inputs.g, "beta": inputs.beta, "initial_state": start, "output_final_state": True}
    expected = qla.fused_recurrent_gated_delta_rule(*inputs[:3], **options)
    joined = torch.cat([x.flatten(2) for x in inputs[:3]], -1)
    parts = [x.unflatten(-1, (2, 32)) for x in joined.split(64, -1)]
    assert all(launch.token_rows(x)[0].data_ptr() == x.data_ptr() and launch.token_rows(x)[1] == 192 for x in parts)
    by_head = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in inputs[:3]]
    odd = [torch.cat([x.new_zeros(1), x.flatten()])[1:].view(x.shape) for x in inputs[:3]]
    time_first = [x.transpose(0, 1).contiguous().transpose(0, 1) for x in inputs[:3]]
    for views in (parts, by_head, odd, time_first):
        got = qla.fused_recurrent_gated_delta_rule(*views, **options)
        assert torch.equal(got[0], expected[0]) and torch.equal(got[1], expected[1])


def test_every_number_of_warps(rng):
    inputs = make_inputs(rng, 2, key_dim=64, value_dim=100, dtype=torch.float32)
    expected = qla.fused_recurrent_gated_delta_rule(*inputs[:3], inputs.g, beta=inputs.beta, output_final_state=True)
    for warps in (1, 4):
        o, state = torch.full_like(inputs.v, float("nan")), torch.full((1, 4, 64, 100), float("nan"))
        launch.recurrent(
            *inputs[:3], inputs.g, inputs.beta, None, None, None, None, o, None, state, None, 1, 2, 64**-0.5, False, False, False, False,
            warps,
        )  # fmt: skip
        assert torch.equal(o, expected[0]) and torch.equal(state, expected[1])


def test_more_sequences_than_a_launch_takes(rng, monkeypatch):
    """Their rows, and rows that none owns, are written by several launches."""
    lengths = [1, 0, 3, 1, 2]
    inputs = make_inputs(rng, sum(lengths) + 12, key_dim=16, value_dim=16, dtype=torch.float32)
    start = make_state(rng, inputs, len(lengths))
    options = {"beta": inputs.beta, "initial_state": start, "output_final_state": True, "cu_seqlens": cu_seqlens_of(lengths)}
    expected = qla.fused_recurrent_gated_delta_rule(*inputs[:3], inputs.g, **options)
    monkeypatch.setattr(launch, "SEQS_AT_ONCE", 2)
    got = qla.fused_recurrent_gated_delta_rule(*inputs[:3], inputs.g, **options)
    assert torch.equal(got[0], expected[0]) and torch.equal(got[1], expected[1])
