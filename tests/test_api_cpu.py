"""chunk_gated_delta_rule as fla's callers use it, through the PyTorch path."""

from __future__ import annotations

import inspect
import math
import warnings

import pytest
import torch
import torch.nn.functional as F
from inputs import cu_seqlens_of, make_inputs, make_state
from numeric import assert_bitwise_equal, assert_close

import qla
from qla import checks
from qla.reference import chunk_gate_sum_and_inverse, chunked_gated_delta_rule, recurrent_gated_delta_rule

pytestmark = pytest.mark.filterwarnings("ignore:qla runs this call through PyTorch:RuntimeWarning")

FLA_0_6_0_PARAMETERS = [
    "q", "k", "v", "g", "beta", "scale", "initial_state", "output_final_state", "use_qk_l2norm_in_kernel",
    "use_beta_sigmoid_in_kernel", "allow_neg_eigval", "state_v_first", "cu_seqlens", "cu_seqlens_cpu", "chunk_indices", "cp_context",
]  # fmt: skip


class TestDropIn:
    def test_positional_order(self):
        parameters = inspect.signature(qla.chunk_gated_delta_rule).parameters
        assert list(parameters) == [*FLA_0_6_0_PARAMETERS, "auto_cp", "kwargs"]
        defaults = {name: p.default for name, p in parameters.items() if p.default is not p.empty}
        off = dict.fromkeys(FLA_0_6_0_PARAMETERS[5:]) | dict.fromkeys(FLA_0_6_0_PARAMETERS[7:12], False)
        assert defaults == {**off, "auto_cp": True}

    def test_by_position_and_by_name(self, rng):
        inputs = make_inputs(rng, 70, dtype=torch.float32)
        state, cu = make_state(rng, inputs, 2), cu_seqlens_of([30, 40])
        by_position = qla.chunk_gated_delta_rule(*inputs, 0.3, state, True, True, True, True, False, cu, cu, None, None)
        by_name = qla.chunk_gated_delta_rule(
            **inputs._asdict(), scale=0.3, initial_state=state, output_final_state=True, use_qk_l2norm_in_kernel=True,
            use_beta_sigmoid_in_kernel=True, allow_neg_eigval=True, state_v_first=False, cu_seqlens=cu, cu_seqlens_cpu=cu,
            chunk_indices=None, cp_context=None, auto_cp=False,
        )  # fmt: skip
        for a, b in zip(by_position, by_name, strict=True):
            assert_bitwise_equal(a, b)

    def test_result_is_the_references(self, rng):
        inputs = make_inputs(rng, 100)
        o, state = qla.chunk_gated_delta_rule(*inputs, output_final_state=True)
        expected, expected_state = recurrent_gated_delta_rule(*inputs, output_final_state=True)
        assert_close(o, expected, 1e-12)
        assert_close(state, expected_state, 1e-12)

    def test_no_final_state_unless_asked(self, rng):
        o, state = qla.chunk_gated_delta_rule(*make_inputs(rng, 10))
        assert o.shape == (1, 10, 4, 24) and state is None

    def test_unknown_arguments_are_ignored(self, rng):
        inputs = make_inputs(rng, 10)
        expected, _ = qla.chunk_gated_delta_rule(*inputs)
        o, _ = qla.chunk_gated_delta_rule(*inputs, layer_idx=3, something_new=None, chunk_indices=torch.zeros(1, 2), head_first=False)
        assert_bitwise_equal(o, expected)

    def test_context_parallelism_is_refused(self, rng):
        with pytest.raises(NotImplementedError, match="does not support context parallelism over several GPUs"):
            qla.chunk_gated_delta_rule(*make_inputs(rng, 10), cp_context=object())

    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
    def test_dtypes(self, rng, dtype):
        inputs = make_inputs(rng, 100).to(dtype)
        o, state = qla.chunk_gated_delta_rule(*inputs, output_final_state=True)
        assert o.dtype == dtype and state.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)

    @pytest.mark.parametrize("g_dtype", [torch.bfloat16, torch.float16, torch.float32])
    @pytest.mark.parametrize("beta_dtype", [torch.bfloat16, torch.float16, torch.float32])
    def test_gate_dtypes(self, rng, g_dtype, beta_dtype):
        inputs = make_inputs(rng, 40, dtype=torch.bfloat16)
        mixed = inputs._replace(g=inputs.g.to(g_dtype), beta=inputs.beta.to(beta_dtype))
        wide = mixed._replace(g=mixed.g.float(), beta=mixed.beta.float())
        assert_bitwise_equal(qla.chunk_gated_delta_rule(*mixed)[0], qla.chunk_gated_delta_rule(*wide)[0])
        leaves = mixed.leaves()
        qla.chunk_gated_delta_rule(*leaves)[0].float().square().sum().backward()
        for name, x in leaves._asdict().items():
            assert x.grad.dtype == x.dtype, f"d{name}"


class TestOptions:
    def test_old_name_of_the_state_layout(self, rng):
        inputs = make_inputs(rng, 40)
        _, expected = qla.chunk_gated_delta_rule(*inputs, output_final_state=True, state_v_first=True)
        with pytest.warns(DeprecationWarning, match="use state_v_first"):
            _, state = qla.chunk_gated_delta_rule(*inputs, output_final_state=True, transpose_state_layout=True)
        assert_bitwise_equal(state, expected)
        with pytest.raises(ValueError, match="pass one of them, got both"):
            qla.chunk_gated_delta_rule(*inputs, state_v_first=True, transpose_state_layout=True)

    @pytest.mark.parametrize("chunk_size", [16, 32, 64])
    def test_chunk_size(self, rng, chunk_size):
        inputs = make_inputs(rng, 100)
        assert_close(qla.chunk_gated_delta_rule(*inputs, chunk_size=chunk_size)[0], qla.chunk_gated_delta_rule(*inputs)[0], 1e-12)

    @pytest.mark.parametrize("chunk_size", [0, 8, 128, None])
    def test_wrong_chunk_size(self, rng, chunk_size):
        with pytest.raises(ValueError, match=f"chunk_size must be 16, 32 or 64, got {chunk_size}"):
            qla.chunk_gated_delta_rule(*make_inputs(rng, 10), chunk_size=chunk_size)

    def test_head_first_is_gone(self, rng):
        with pytest.raises(ValueError, match="head_first=True is not supported"):
            qla.chunk_gated_delta_rule(*make_inputs(rng, 10), head_first=True)

    @pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
    def test_l2norm(self, rng, dtype):
        inputs = make_inputs(rng, 70)
        inputs = inputs._replace(q=inputs.q * 5, k=inputs.k * 0.1).to(dtype)
        normed = inputs._replace(**{
            name: (x.double() / (x.double().square().sum(-1, keepdim=True) + 1e-6).sqrt()).to(dtype)
            for name, x in (("q", inputs.q), ("k", inputs.k))
        })  # fmt: skip
        o, _ = qla.chunk_gated_delta_rule(*inputs, use_qk_l2norm_in_kernel=True)
        assert_close(o, qla.chunk_gated_delta_rule(*normed)[0], {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 1e-2}[dtype])

    def test_l2norm_of_padding_tokens(self, rng):
        inputs = make_inputs(rng, 40, dtype=torch.float32)
        for x in (inputs.q, inputs.k, inputs.v):
            x[:, 10:20] = 0
        leaves = inputs.leaves()
        o, state = qla.chunk_gated_delta_rule(*leaves, output_final_state=True, use_qk_l2norm_in_kernel=True)
        (o.sum() + state.sum()).backward()
        assert torch.isfinite(o).all() and o[:, 10:20].count_nonzero() == 0
        for name, x in leaves._asdict().items():
            assert torch.isfinite(x.grad).all(), f"d{name}"

    @pytest.mark.parametrize("neg", [False, True])
    def test_beta_sigmoid(self, rng, neg):
        inputs = make_inputs(rng, 70)
        logits = torch.randn(inputs.beta.shape, generator=rng, dtype=torch.float64)
        o, _ = qla.chunk_gated_delta_rule(*inputs._replace(beta=logits), use_beta_sigmoid_in_kernel=True, allow_neg_eigval=neg)
        expected, _ = qla.chunk_gated_delta_rule(*inputs._replace(beta=(1 + neg) / (1 + (-logits).exp())))
        assert_close(o, expected, 1e-12)

    def test_neg_eigval_needs_the_sigmoid(self, rng):
        with pytest.raises(ValueError, match="allow_neg_eigval=True needs use_beta_sigmoid_in_kernel=True, got False"):
            qla.chunk_gated_delta_rule(*make_inputs(rng, 10), allow_neg_eigval=True)

    @pytest.mark.parametrize("with_bias", [False, True])
    def test_gate(self, rng, with_bias):
        inputs = make_inputs(rng, 70)
        raw = torch.randn(inputs.g.shape, generator=rng, dtype=torch.float64)
        A_log, bias = (torch.randn(4, generator=rng, dtype=torch.float64).requires_grad_() for _ in range(2))
        options = {"A_log": A_log, "dt_bias": bias if with_bias else None, "use_gate_in_kernel": True}
        o, _ = qla.chunk_gated_delta_rule(*inputs._replace(g=raw), **options)
        expected, _ = qla.chunk_gated_delta_rule(*inputs._replace(g=-A_log.exp() * F.softplus(raw + bias if with_bias else raw)))
        assert_close(o, expected, 1e-12)
        o.sum().backward()
        assert A_log.grad.isfinite().all() and (bias.grad is not None) == with_bias

    def test_gate_needs_its_parameters(self, rng):
        inputs = make_inputs(rng, 10)
        with pytest.raises(ValueError, match=r"A_log must be a tensor \[HV\] when use_gate_in_kernel=True, got None"):
            qla.chunk_gated_delta_rule(*inputs, use_gate_in_kernel=True)
        with pytest.raises(ValueError, match=r"dt_bias must have HV = 4 elements, got shape \[3\]"):
            qla.chunk_gated_delta_rule(*inputs, use_gate_in_kernel=True, A_log=torch.zeros(4), dt_bias=torch.zeros(3))
        with pytest.raises(TypeError, match="A_log must be a tensor, got float"):
            qla.chunk_gated_delta_rule(*inputs, use_gate_in_kernel=True, A_log=1.0)
        o, _ = qla.chunk_gated_delta_rule(*inputs, A_log=None, dt_bias=torch.zeros(3))  # not used: not looked at
        assert_bitwise_equal(o, qla.chunk_gated_delta_rule(*inputs)[0])

    def test_activations_keep_unowned_rows_out_of_the_gradients(self, rng):
        inputs = make_inputs(rng, 60, dtype=torch.float32)
        for x in inputs:
            x[:, 40:] = math.nan
        leaves = inputs.leaves()
        A_log = torch.zeros(4, requires_grad=True)
        o, _ = qla.chunk_gated_delta_rule(
            *leaves, use_qk_l2norm_in_kernel=True, use_beta_sigmoid_in_kernel=True, use_gate_in_kernel=True, A_log=A_log,
            cu_seqlens=cu_seqlens_of([40]),
        )  # fmt: skip
        o.sum().backward()
        assert o[:, 40:].count_nonzero() == 0 and torch.isfinite(A_log.grad).all()
        for name, x in leaves._asdict().items():
            assert torch.isfinite(x.grad).all() and x.grad[:, 40:].count_nonzero() == 0, f"d{name}"

    def test_autocast_changes_nothing(self, rng):
        inputs = make_inputs(rng, 70, dtype=torch.float32)
        expected = qla.chunk_gated_delta_rule(*inputs, output_final_state=True, use_qk_l2norm_in_kernel=True)
        with torch.autocast("cpu", torch.bfloat16):
            actual = qla.chunk_gated_delta_rule(*inputs, output_final_state=True, use_qk_l2norm_in_kernel=True)
        for a, e in zip(actual, expected, strict=True):
            assert_bitwise_equal(a, e)


class TestStates:
    @pytest.mark.parametrize("split", [128, 100, 64, 1])
    def test_carried_state(self, rng, split):
        inputs = make_inputs(rng, 256, dtype=torch.bfloat16)
        whole, whole_state = qla.chunk_gated_delta_rule(*inputs, output_final_state=True)
        first, state = qla.chunk_gated_delta_rule(*inputs.rows(0, split), output_final_state=True)
        second, state = qla.chunk_gated_delta_rule(*inputs.rows(split, 256), initial_state=state, output_final_state=True)
        assert_close(torch.cat([first, second], 1), whole, 1e-4)
        assert_close(state, whole_state, 1e-6)

    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
    def test_layouts_are_transposes_bit_for_bit(self, rng, dtype):
        inputs = make_inputs(rng, 100, batch=2, dtype=dtype)
        start = make_state(rng, inputs)
        o, state = qla.chunk_gated_delta_rule(*inputs, initial_state=start, output_final_state=True)
        o_v, state_v = qla.chunk_gated_delta_rule(
            *inputs, initial_state=start.transpose(2, 3).contiguous(), output_final_state=True, state_v_first=True
        )
        assert_bitwise_equal(o_v, o)
        assert_bitwise_equal(state_v.transpose(2, 3), state)

    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
    def test_initial_state_of_any_dtype_is_never_rounded_lower(self, rng, dtype):
        inputs = make_inputs(rng, 40, dtype=torch.bfloat16)
        start = make_state(rng, inputs).to(dtype).requires_grad_()
        o, state = qla.chunk_gated_delta_rule(*inputs, initial_state=start, output_final_state=True)
        expected, expected_state = qla.chunk_gated_delta_rule(*inputs, initial_state=start.float(), output_final_state=True)
        assert_bitwise_equal(o, expected)
        assert_bitwise_equal(state, expected_state)
        assert state.dtype == torch.float32
        state.sum().backward()
        assert start.grad.dtype == dtype

    def test_no_token_and_no_sequence(self, rng):
        inputs = make_inputs(rng, 0, batch=2, dtype=torch.bfloat16)
        start = make_state(rng, inputs)
        o, state = qla.chunk_gated_delta_rule(*inputs, initial_state=start, output_final_state=True)
        assert o.shape == (2, 0, 4, 24)
        assert_bitwise_equal(state, start.float())
        assert qla.chunk_gated_delta_rule(*inputs, output_final_state=True)[1].count_nonzero() == 0
        packed = make_inputs(rng, 30, dtype=torch.bfloat16)
        o, state = qla.chunk_gated_delta_rule(*packed, output_final_state=True, cu_seqlens=torch.tensor([0]))
        assert o.count_nonzero() == 0 and state.shape == (0, 4, 16, 24)
        o, state = qla.chunk_gated_delta_rule(*packed.rows(0, 0), output_final_state=True, cu_seqlens=torch.tensor([0, 0]))
        assert o.shape == (1, 0, 4, 24) and state.shape == (1, 4, 16, 24)

    def test_the_callers_tensors_are_left_alone(self, rng):
        inputs = make_inputs(rng, 70)
        start = make_state(rng, inputs)
        before = [x.clone() for x in (*inputs, start)]
        _, state = qla.chunk_gated_delta_rule(*inputs, initial_state=start, output_final_state=True)
        state.fill_(math.nan)
        for x, copy in zip((*inputs, start), before, strict=True):
            assert_bitwise_equal(x, copy)


def strided_views(x):
    """The same values as x [B, T, H, ..] behind other strides and offsets."""
    wide = torch.full((*x.shape[:-1], 3 * x.shape[-1]), math.nan, dtype=x.dtype)
    wide[..., x.shape[-1] : 2 * x.shape[-1]] = x
    flat = torch.empty(x.numel() + 1, dtype=x.dtype)
    flat[1:] = x.flatten()
    sparse = torch.full((x.shape[0], 2 * x.shape[1], *x.shape[2:]), math.nan, dtype=x.dtype)
    sparse[:, ::2] = x
    return {
        "heads before tokens": x.transpose(1, 2).contiguous().transpose(1, 2),
        "middle of a fused projection": wide[..., x.shape[-1] : 2 * x.shape[-1]],
        "misaligned": flat[1:].view(x.shape),
        "every second token": sparse[:, ::2],
    }


@pytest.mark.parametrize("view", ["heads before tokens", "middle of a fused projection", "misaligned", "every second token"])
def test_views_give_the_same_bits(rng, view):
    inputs = make_inputs(rng, 70, batch=2, dtype=torch.bfloat16)
    start = make_state(rng, inputs)
    views = type(inputs)(*(strided_views(x)[view] for x in inputs))
    expected = qla.chunk_gated_delta_rule(*inputs, initial_state=start, output_final_state=True)
    actual = qla.chunk_gated_delta_rule(*views, initial_state=strided_views(start)[view], output_final_state=True)
    for a, e in zip(actual, expected, strict=True):
        assert_bitwise_equal(a, e)


def test_expanded_inputs(rng):
    inputs = make_inputs(rng, 70, dtype=torch.bfloat16)
    expanded = type(inputs)(*(x.expand(3, *x.shape[1:]) for x in inputs))
    copied = type(inputs)(*(x.contiguous() for x in expanded))
    assert_bitwise_equal(qla.chunk_gated_delta_rule(*expanded)[0], qla.chunk_gated_delta_rule(*copied)[0])


class TestLowLevelEntry:
    @pytest.mark.parametrize("packed", [False, True])
    def test_returns_what_it_computes_on_the_way(self, rng, packed):
        inputs = make_inputs(rng, 150, dtype=torch.bfloat16)
        cu = cu_seqlens_of([70, 0, 60]) if packed else None
        start = make_state(rng, inputs, 3 if packed else 1)
        g_cum, A, o, state = qla.chunk_gated_delta_rule_fwd(*inputs, None, start, True, cu)
        expected_g, expected_A = chunk_gate_sum_and_inverse(inputs.k, inputs.g, inputs.beta, cu)
        expected = qla.chunk_gated_delta_rule(*inputs, initial_state=start, output_final_state=True, cu_seqlens=cu)
        assert_bitwise_equal(g_cum, expected_g)
        assert_bitwise_equal(A, expected_A.bfloat16())
        assert_bitwise_equal(o, expected[0])
        assert_bitwise_equal(state, expected[1])
        assert g_cum.shape == (1, 150, 4) and A.shape == (1, 150, 4, 64)

    def test_records_no_gradients(self, rng):
        results = qla.chunk_gated_delta_rule_fwd(*make_inputs(rng, 20).leaves())
        assert results[3] is None and not any(x.requires_grad for x in results[:3])


class TestWarnings:
    @pytest.fixture(autouse=True)
    def forget(self, monkeypatch):
        monkeypatch.setattr(checks, "_warned", set())

    def test_one_a_reason(self, rng):
        inputs = make_inputs(rng, 10)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            for _ in range(3):
                qla.chunk_gated_delta_rule(*inputs)
                qla.chunk_gated_delta_rule(*inputs.to(torch.bfloat16))
                qla.chunk_gated_delta_rule_fwd(*inputs)
        (warning,) = caught
        assert warning.category is RuntimeWarning and warning.filename == __file__, "points at the caller"
        assert str(warning.message) == f"qla runs this call through PyTorch, which is slower: {qla.unsupported_reason(*inputs)}."

    def test_one_for_each_reason(self, rng, monkeypatch):
        inputs = make_inputs(rng, 10)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            for reason in ("first", "second", "first"):
                monkeypatch.setattr("qla.api.unsupported_reason", lambda q, k, v, reason=reason: reason)
                qla.chunk_gated_delta_rule(*inputs)
        assert [str(w.message).split(": ")[1] for w in caught] == ["first.", "second."]


def test_gradients_are_the_references(rng):
    inputs = make_inputs(rng, 100)
    start = make_state(rng, inputs)
    grads = []
    for function in (qla.chunk_gated_delta_rule, chunked_gated_delta_rule):
        leaves = [*inputs.leaves(), start.clone().requires_grad_()]
        o, state = function(*leaves[:5], initial_state=leaves[5], output_final_state=True)
        grads.append(torch.autograd.grad(o.square().sum() + state.sum(), leaves))
    for actual, expected in zip(*grads, strict=True):
        assert_bitwise_equal(actual, expected)
