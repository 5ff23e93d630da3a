"""fused_recurrent_gated_delta_rule without a GPU: the call surface, the checks, the PyTorch path, torch.compile with a stand-in."""

from __future__ import annotations

import contextlib
import inspect
import types
import warnings

import pytest
import torch
import torch.nn.functional as F
from inputs import LENGTHS_WITH_GAPS, cu_seqlens_of, make_inputs, make_state
from numeric import assert_bitwise_equal, relative_error

import qla
from qla import checks, ops
from qla.checks import recurrent_unsupported_reason
from qla.device import DeviceSpec
from qla.kernels import launch
from qla.reference import recurrent_gated_delta_rule

FUNCTION = qla.fused_recurrent_gated_delta_rule
SPEC = DeviceSpec(index=0, capability=(9, 0), sm_count=132)


@pytest.fixture
def warnings_not_given_yet(monkeypatch):
    monkeypatch.setattr(checks, "_warned", set())


def call(inputs, **options):
    q, k, v, g, beta = inputs
    return FUNCTION(q, k, v, g, beta=beta, output_final_state=True, **options)


# The call surface


def test_arguments_stand_where_they_do_in_fla():
    names = list(inspect.signature(FUNCTION).parameters)
    assert names == [
        "q", "k", "v", "g", "gk", "gv", "beta", "scale", "initial_state", "output_final_state", "use_qk_l2norm_in_kernel",
        "use_gate_in_kernel", "A_log", "dt_bias", "use_beta_sigmoid_in_kernel", "allow_neg_eigval", "state_v_first", "cu_seqlens",
        "cu_seqlens_cpu", "kwargs",
    ]  # fmt: skip
    assert qla.fused_recurrent_gdn is FUNCTION


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("v_first", [False, True])
def test_is_the_recurrence(dtype, v_first, rng):
    inputs = make_inputs(rng, 5, batch=2, dtype=dtype)
    start = make_state(rng, inputs).float()
    given = start.transpose(-1, -2).contiguous() if v_first else start
    o, state = call(inputs, initial_state=given, state_v_first=v_first)
    expected = recurrent_gated_delta_rule(*inputs, None, given, True, v_first)
    assert_bitwise_equal(o, expected[0])
    assert_bitwise_equal(state, expected[1])
    assert FUNCTION(*inputs[:3], inputs.g, beta=inputs.beta)[1] is None


def test_packed(rng):
    lengths = LENGTHS_WITH_GAPS
    inputs = make_inputs(rng, sum(lengths) + 3)
    for x in inputs:
        x[:, sum(lengths) :] = float("nan")
    start = make_state(rng, inputs, len(lengths))
    cu = cu_seqlens_of(lengths, torch.int64)
    options = {"use_qk_l2norm_in_kernel": True, "use_beta_sigmoid_in_kernel": True}
    o, state = call(inputs, initial_state=start, cu_seqlens=cu, cu_seqlens_cpu=cu, **options)
    assert bool((o[:, sum(lengths) :] == 0).all())
    for n, begin in enumerate(cu[:-1].tolist()):
        alone = inputs.rows(begin, begin + lengths[n])
        o_n, state_n = call(alone, initial_state=start[n : n + 1], **options)
        assert relative_error(o[:, begin : begin + lengths[n]], o_n) < 1e-12
        assert relative_error(state[n : n + 1], state_n) < 1e-12


def test_activations_gates_and_defaults(rng):
    inputs = make_inputs(rng, 4, dtype=torch.float64)
    q, k, v, raw_g, raw_beta = inputs
    A_log, dt_bias = (torch.randn(4, generator=rng, dtype=torch.float64) for _ in range(2))
    gk, gv = (F.logsigmoid(torch.randn(*v.shape[:3], n, generator=rng, dtype=torch.float64)) for n in (q.shape[-1], v.shape[-1]))
    beta = torch.randn(v.shape, generator=rng, dtype=torch.float64)
    got = FUNCTION(
        3 * q, 0.2 * k, v, raw_g, gk, gv, beta, output_final_state=True, use_qk_l2norm_in_kernel=True, use_gate_in_kernel=True,
        A_log=A_log, dt_bias=dt_bias, use_beta_sigmoid_in_kernel=True, allow_neg_eigval=True,
    )  # fmt: skip
    wide_q, wide_k = (x / (x.square().sum(-1, keepdim=True) + 1e-6).sqrt() for x in (3 * q, 0.2 * k))
    g = -A_log.exp() * F.softplus(raw_g + dt_bias)
    state = torch.zeros(1, 4, q.shape[-1], v.shape[-1], dtype=torch.float64)
    for t in range(4):
        key, query = (x[:, t].repeat_interleave(2, 1).unsqueeze(-1) for x in (wide_k, wide_q))
        state = state * g[:, t, :, None, None].exp() * gk[:, t].exp().unsqueeze(-1) * gv[:, t].exp().unsqueeze(-2)
        u = 2 * beta[:, t].sigmoid() * (v[:, t] - (state * key).sum(-2))
        state = state + key * u.unsqueeze(-2)
        o = (state * query).sum(-2) * q.shape[-1] ** -0.5
        assert relative_error(got[0][:, t], o) < 1e-12
    assert relative_error(got[1], state) < 1e-12
    plain = FUNCTION(q, k, v, output_final_state=True)
    expected = recurrent_gated_delta_rule(q, k, v, torch.zeros_like(raw_g), torch.ones_like(raw_beta), None, None, True)
    assert relative_error(plain[0], expected[0]) < 1e-12
    sigmoid = FUNCTION(q, k, v, use_beta_sigmoid_in_kernel=True)[0]
    assert relative_error(sigmoid, FUNCTION(q, k, v, beta=torch.full_like(raw_beta, torch.tensor(1.0).sigmoid().item()))[0]) < 1e-7


def test_activated_q_and_k_are_not_rounded(rng):
    inputs = make_inputs(rng, 2, dtype=torch.bfloat16)
    o, _ = call(inputs, use_qk_l2norm_in_kernel=True)
    q, k = (x.double() / (x.double().square().sum(-1, keepdim=True) + 1e-6).sqrt() for x in inputs[:2])
    expected, _ = recurrent_gated_delta_rule(q, k, *(x.double() for x in inputs[2:]))
    assert o.dtype == torch.bfloat16
    assert relative_error(o, expected) < 1.05 * relative_error(expected.bfloat16(), expected)


def test_options_that_change_nothing_and_old_names(rng):
    inputs = make_inputs(rng, 3)
    start = make_state(rng, inputs)
    expected = call(inputs, initial_state=start)
    ignored = {"layer_idx": 3, "A_log": torch.zeros(1), "dt_bias": "ignored", "head_first": False, "inplace_final_state": False}
    assert_bitwise_equal(call(inputs, initial_state=start, **ignored)[1], expected[1])
    with pytest.warns(DeprecationWarning, match="transpose_state_layout"):
        _, state = call(inputs, initial_state=start.transpose(-1, -2), transpose_state_layout=True)
    assert_bitwise_equal(state.transpose(-1, -2), expected[1])


def test_no_tokens(rng):
    inputs = make_inputs(rng, 0)
    start = make_state(rng, inputs)
    o, state = call(inputs, initial_state=start)
    assert o.shape == inputs.v.shape and torch.equal(state, start)


# What is refused


@pytest.mark.parametrize("options, error, text", [
    ({"g": torch.zeros(1, 2, 4)}, ValueError, r"g must have shape \[B, T, HV\] = \[1, 3, 4\], got \[1, 2, 4\]"),
    ({"gk": torch.zeros(1, 3, 4, 24)}, ValueError, r"gk must have shape \[B, T, HV, K\] = \[1, 3, 4, 16\], got"),
    ({"gv": torch.zeros(1, 3, 4, 16)}, ValueError, r"gv must have shape \[B, T, HV, V\] = \[1, 3, 4, 24\], got"),
    ({"gk": 1.0}, TypeError, "gk must be a tensor, got float"),
    ({"gv": torch.zeros(1, 3, 4, 24, dtype=torch.int32)}, TypeError, "gv must be bfloat16, float16, float32 or float64, got int32"),
    ({"beta": torch.zeros(1, 3, 4, 16)}, ValueError, r"beta must have shape \[B, T, HV, V\] = \[1, 3, 4, 24\], got"),
    ({"beta": torch.zeros(1, 3, 2)}, ValueError, r"beta must have shape \[B, T, HV\] = \[1, 3, 4\], got"),
    ({"beta": torch.zeros(1, 3, 4, device="meta")}, ValueError, "beta must be on the device of q, cpu, got meta"),
    ({"initial_state": torch.zeros(1, 4, 24, 16)}, ValueError, r"initial_state must have shape \[S, HV, K, V\]"),
    ({"scale": float("inf")}, ValueError, "scale must be finite"),
    ({"allow_neg_eigval": True}, ValueError, "allow_neg_eigval=True needs use_beta_sigmoid_in_kernel=True"),
    ({"use_gate_in_kernel": True}, ValueError, r"A_log must be a tensor \[HV\]"),
    ({"use_gate_in_kernel": True, "A_log": torch.zeros(4), "g": None}, ValueError, r"g must be a tensor \[B, T, HV\] when use_gate"),
    ({"use_gate_in_kernel": True, "A_log": torch.zeros(3)}, ValueError, r"A_log must have HV = 4 elements, got shape \[3\]"),
    ({"use_gate_in_kernel": True, "A_log": torch.zeros(4), "dt_bias": 1}, TypeError, "dt_bias must be a tensor, got int"),
    ({"use_gate_in_kernel": True, "A_log": torch.zeros(4, dtype=torch.int64)}, TypeError, "A_log must be bfloat16"),
    ({"cu_seqlens": torch.tensor([0, 2, 1])}, ValueError, "cu_seqlens must not decrease"),
    ({"cu_seqlens": torch.tensor([0.0, 3.0])}, TypeError, "cu_seqlens must be int32 or int64"),
    ({"head_first": True}, ValueError, "head_first=True is not supported"),
    ({"ssm_state_indices": torch.zeros(1)}, NotImplementedError, "pass ssm_state_indices=None"),
    ({"inplace_final_state": True}, NotImplementedError, "pass inplace_final_state=None"),
    ({"cp_context": "context"}, NotImplementedError, "pass cp_context=None"),
], ids=str)  # fmt: skip
def test_refusals(options, error, text, rng):
    q, k, v, g, beta = make_inputs(rng, 3, dtype=torch.float32)
    with pytest.raises(error, match=text):
        FUNCTION(q, k, v, **({"g": g, "beta": beta} | options))


def test_more_heads_than_a_grid_has(rng):
    q, k, v, *_ = make_inputs(rng, 1, key_heads=1, value_heads=1, key_dim=4, value_dim=4, dtype=torch.float32)
    with pytest.raises(ValueError, match="v must have HV <= 65535, got HV = 65536"):
        FUNCTION(q, k, v.expand(1, 1, 2**16, 4))


def test_reasons(monkeypatch):
    monkeypatch.setattr("qla.device._spec_of_index", lambda index: SPEC)

    def reason(dtype, key_dim=128, device="cuda:0"):
        q = types.SimpleNamespace(dtype=dtype, device=torch.device(device), shape=(1, 1, 2, key_dim))
        return recurrent_unsupported_reason(q, q, q)

    assert reason(torch.float32) is reason(torch.bfloat16) is reason(torch.float16) is None
    assert reason(torch.float64) == "the kernels take bfloat16, float16 and float32, and q is float64"
    assert reason(torch.float32, 256) == "the kernels take head sizes up to 128, and K is 256"
    assert "need a CUDA device" in reason(torch.float32, device="cpu")


def test_one_warning(rng, warnings_not_given_yet):
    inputs = make_inputs(rng, 1)
    with pytest.warns(RuntimeWarning, match="through PyTorch.*need a CUDA device"):
        call(inputs)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        call(inputs)


# The way to the kernel, with a stand-in


@pytest.fixture
def stand_in(monkeypatch):
    """The launcher computes with the reference; its arguments, by name."""
    got = []

    def recurrent(
        q, k, v, g, beta, gk, gv, A_log, dt_bias, o, initial_state, final_state, cu_seqlens, num_seqs, seq_len, scale, state_v_first,
        normalise, sigmoid, double,
    ):  # fmt: skip
        got.append({name: value for name, value in locals().items() if name != "got"})
        assert not any(x is not None and x.dtype == torch.float64 for x in (q, g, beta, gk, gv, A_log, dt_bias, initial_state))
        assert q.shape[-1] % 4 == v.shape[-1] % 4 == 0 and not (normalise or sigmoid or double)
        g = torch.zeros(v.shape[:3]) if g is None else g
        beta = torch.ones(v.shape[:3]) if beta is None else beta
        rows, state = recurrent_gated_delta_rule(q, k, v, g, beta, scale, initial_state, True, state_v_first, cu_seqlens, gk, gv)
        o.copy_(rows)
        if final_state is not None:
            final_state.copy_(state)

    monkeypatch.setattr(launch, "recurrent", recurrent)
    monkeypatch.setattr("qla.api.recurrent_unsupported_reason", lambda q, k, v: None)
    monkeypatch.setattr(torch.cuda, "device", lambda device: contextlib.nullcontext())
    return got


def test_common_step_converts_nothing(rng, stand_in):
    inputs = make_inputs(rng, 1, batch=3, key_dim=128, value_dim=128, dtype=torch.bfloat16)
    start = make_state(rng, inputs).float()
    inputs = inputs._replace(g=inputs.g.float())
    o, state = call(inputs, initial_state=start)
    (seen,) = stand_in
    for name, x in (*zip(("q", "k", "v", "g", "beta"), inputs, strict=True), ("initial_state", start), ("o", o), ("final_state", state)):
        assert seen[name].data_ptr() == x.data_ptr(), name


def test_odd_sizes_are_padded_and_cut(rng, stand_in):
    inputs = make_inputs(rng, 3, key_dim=7, value_dim=9, dtype=torch.float32)
    rows = inputs.v.shape[:3]
    gk, gv = (F.logsigmoid(torch.randn(*rows, n, generator=rng)) for n in (7, 9))
    beta = torch.rand(*rows, 9, generator=rng)
    for v_first in (False, True):
        start = make_state(rng, inputs)
        start = start.transpose(-1, -2).contiguous() if v_first else start
        q, k, v, g, _ = inputs
        o, state = FUNCTION(q, k, v, g, gk, gv, beta, None, start, True, state_v_first=v_first)
        expected = recurrent_gated_delta_rule(q, k, v, g, beta, None, start, True, v_first, None, gk, gv)
        assert relative_error(o, expected[0]) < 1e-6 and relative_error(state, expected[1]) < 1e-6
        assert o.is_contiguous() and state.is_contiguous()
        assert stand_in[-1]["k"].shape[-1] == 8 and stand_in[-1]["gv"].shape[-1] == 12


def test_gradients_are_refused_when_taken(rng, stand_in):
    inputs = make_inputs(rng, 2, dtype=torch.float32).leaves()
    o, state = call(inputs)
    for result in (o, state):
        with pytest.raises(NotImplementedError, match="no gradient through its kernel: use chunk_gated_delta_rule"):
            result.sum().backward(retain_graph=True)
    assert not FUNCTION(*(x.detach() for x in inputs[:3]))[0].requires_grad
    with torch.no_grad():
        assert not call(inputs)[0].requires_grad


def test_the_pytorch_path_is_differentiable(rng):
    inputs = make_inputs(rng, 2, dtype=torch.float32).leaves()
    call(inputs)[0].sum().backward()
    assert all(x.grad is not None for x in inputs)


@pytest.mark.parametrize("packed", [False, True], ids=["batch", "packed"])
@pytest.mark.parametrize("options", [{}, {"state_v_first": True, "scale": -0.3}], ids=["plain", "V first"])
def test_compiled_is_eager(rng, stand_in, packed, options):
    torch._dynamo.reset()
    inputs = make_inputs(rng, 6, batch=1 if packed else 2, key_dim=32, value_dim=32, dtype=torch.bfloat16)
    start = make_state(rng, inputs, 3 if packed else None).float()
    options = options | {"initial_state": start} | ({"cu_seqlens": cu_seqlens_of([2, 0, 3])} if packed else {})
    compiled = torch.compile(call, fullgraph=True, backend="aot_eager")
    for got, expected in zip(compiled(inputs, **options), call(inputs, **options), strict=True):
        assert_bitwise_equal(got, expected)
    assert len(stand_in) == 2
    torch._dynamo.reset()


def test_operator_keeps_its_contract(rng, stand_in):
    inputs = make_inputs(rng, 3, batch=2, key_dim=32, value_dim=36, dtype=torch.bfloat16)
    start = make_state(rng, inputs).float()
    for final, v_first in ((True, False), (False, False), (True, True)):
        given = start.transpose(-1, -2).contiguous() if v_first else start
        arguments = (*inputs, None, None, None, None, given, None, 0.1, final, False, False, False, v_first)
        torch.library.opcheck(ops.recurrent, arguments, test_utils=("test_schema", "test_faketensor", "test_aot_dispatch_dynamic"))
