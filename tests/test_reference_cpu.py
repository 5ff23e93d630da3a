"""The recurrence against a loop over scalars and vectors, and the chunked form against the recurrence, in float64."""

from __future__ import annotations

import math
import time

import pytest
import torch
import torch.nn.functional as F
from inputs import LENGTHS_WITH_GAPS, cu_seqlens_of, make_inputs, make_state
from numeric import assert_bitwise_equal, assert_close, assert_tiles_close, relative_error

from qla.reference import chunk_gate_sum_and_inverse, chunked_gated_delta_rule, recurrent_gated_delta_rule

FORMS = pytest.mark.parametrize("form", [recurrent_gated_delta_rule, chunked_gated_delta_rule], ids=["recurrent", "chunked"])
TIGHT = 1e-12


def both_forms(inputs, **options):
    """(o, final state) of the recurrence and of the chunked form."""
    options.setdefault("output_final_state", True)
    return recurrent_gated_delta_rule(*inputs, **options), chunked_gated_delta_rule(*inputs, **options)


def assert_forms_agree(inputs, tolerance=TIGHT, **options):
    (o, state), (o_chunked, state_chunked) = both_forms(inputs, **options)
    assert torch.isfinite(o).all() and torch.isfinite(state).all(), "the recurrence itself overflows: a bad test"
    assert_close(o_chunked, o, tolerance, "o")
    assert_tiles_close(o_chunked, o, 100 * tolerance, "o")
    assert_close(state_chunked, state, tolerance, "final state")


def gradients(form, inputs, state=None, **options):
    """Gradients of all inputs for fixed random gradients of o and the final state."""
    leaves = inputs.leaves()
    start = None if state is None else state.detach().clone().requires_grad_()
    o, final = form(*leaves, initial_state=start, output_final_state=True, **options)
    seeds = torch.Generator().manual_seed(1)
    grads = [torch.randn(x.shape, generator=seeds, dtype=torch.float64).to(x.dtype) for x in (o, final)]
    wanted = [*leaves] + ([] if start is None else [start])
    names = ["dq", "dk", "dv", "dg", "dbeta", "dh0"][: len(wanted)]
    return dict(zip(names, torch.autograd.grad([o, final], wanted, grads), strict=True))


def test_recurrence_is_the_definition(rng):
    inputs = make_inputs(rng, 9, batch=2, key_heads=2, value_heads=6, key_dim=3, value_dim=5)
    start = make_state(rng, inputs)
    o, final = recurrent_gated_delta_rule(*inputs, scale=0.7, initial_state=start, output_final_state=True)
    for b in range(2):
        for h in range(6):
            S = start[b, h].clone()
            for t in range(9):
                q, k = inputs.q[b, t, h // 3], inputs.k[b, t, h // 3]
                S = S * math.exp(inputs.g[b, t, h])
                S = S + torch.outer(k, inputs.beta[b, t, h] * (inputs.v[b, t, h] - S.T @ k))
                torch.testing.assert_close(o[b, t, h], 0.7 * S.T @ q, rtol=TIGHT, atol=1e-14)
            torch.testing.assert_close(final[b, h], S, rtol=TIGHT, atol=1e-14)


class TestLengths:
    @pytest.mark.parametrize("tokens", [1, 2, 7, 50, 63, 64, 65, 127, 128, 200])
    def test_equal_lengths(self, rng, tokens):
        inputs = make_inputs(rng, tokens, batch=2)
        assert_forms_agree(inputs, initial_state=make_state(rng, inputs))

    @pytest.mark.parametrize("remainder", range(1, 64))
    def test_final_state_after_a_short_last_chunk(self, rng, remainder):
        inputs = make_inputs(rng, 64 + remainder, key_heads=1, value_heads=1, key_dim=8, value_dim=8)
        assert_forms_agree(inputs)

    @pytest.mark.parametrize("lengths", [(5,), (0, 64), (64, 0, 64), (0,), LENGTHS_WITH_GAPS, (1,) * 20, (150, 3, 3, 90)], ids=str)
    @pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
    def test_packed(self, rng, lengths, dtype):
        inputs = make_inputs(rng, sum(lengths))
        start = make_state(rng, inputs, len(lengths))
        cu = cu_seqlens_of(lengths, dtype)
        (o, final), (o_chunked, final_chunked) = both_forms(inputs, initial_state=start, cu_seqlens=cu)
        for n, length in enumerate(lengths):
            part = inputs.rows(int(cu[n]), int(cu[n + 1]))
            alone, alone_final = recurrent_gated_delta_rule(*part, initial_state=start[n : n + 1], output_final_state=True)
            rows = slice(int(cu[n]), int(cu[n + 1]))
            for name, packed_o, packed_final in (("recurrent", o, final), ("chunked", o_chunked, final_chunked)):
                assert_close(packed_o[:, rows], alone, TIGHT, f"{name} o of sequence {n}")
                assert_close(packed_final[n], alone_final[0], TIGHT, f"{name} final state of sequence {n}")
                if length == 0:
                    assert_bitwise_equal(packed_final[n], start[n], f"{name} state of the empty sequence {n}")

    @FORMS
    def test_no_sequence_and_no_token(self, rng, form):
        inputs = make_inputs(rng, 5)
        o, final = form(*inputs.leaves(), output_final_state=True, cu_seqlens=torch.tensor([0]))
        assert o.count_nonzero() == 0 and final.shape == (0, 4, 16, 24)
        empty = make_inputs(rng, 0, batch=2)
        o, final = form(*empty, output_final_state=True)
        assert o.shape == (2, 0, 4, 24) and final.shape == (2, 4, 16, 24) and final.count_nonzero() == 0

    @FORMS
    def test_rows_past_the_last_sequence(self, rng, form):
        cu, tokens = torch.tensor([0, 40, 100]), 300
        inputs = make_inputs(rng, tokens)
        poisoned = inputs.leaves()
        with torch.no_grad():
            for x in poisoned:
                x[:, 100:] = math.nan
        o, final = form(*poisoned, output_final_state=True, cu_seqlens=cu)
        clean_o, clean_final = form(*inputs.rows(0, 100), output_final_state=True, cu_seqlens=cu)
        assert_bitwise_equal(o[:, :100], clean_o, "o")
        assert_bitwise_equal(final, clean_final, "final state")
        assert o[:, 100:].count_nonzero() == 0
        (o.sum() + final.square().sum()).backward()
        for name, x in poisoned._asdict().items():
            assert torch.isfinite(x.grad).all(), f"d{name}"
            assert x.grad[:, 100:].count_nonzero() == 0, f"d{name}"

    def test_thousands_of_short_sequences_and_a_long_one(self, rng):
        lengths = [900] + [1 + n % 5 for n in range(2000)]
        inputs = make_inputs(rng, sum(lengths), key_heads=1, value_heads=1, key_dim=4, value_dim=4)
        assert_forms_agree(inputs, initial_state=make_state(rng, inputs, len(lengths)), cu_seqlens=cu_seqlens_of(lengths))

    @pytest.mark.parametrize("values", [[0, 80, 40, 100], [5, 40], [0, 400], [-7, 40]], ids=str)
    @FORMS
    def test_bad_cu_seqlens_stay_within_bounds(self, rng, form, values):
        inputs = make_inputs(rng, 100)
        o, _ = form(*inputs, cu_seqlens=torch.tensor(values))
        assert o.shape == inputs.v.shape and torch.isfinite(o).all()


class TestHeads:
    @pytest.mark.parametrize("ratio", [1, 2, 3, 4, 8])
    def test_value_heads_per_key_head(self, rng, ratio):
        inputs = make_inputs(rng, 90, key_heads=2, value_heads=2 * ratio)
        repeated = inputs._replace(q=inputs.q.repeat_interleave(ratio, 2), k=inputs.k.repeat_interleave(ratio, 2))
        for form in (recurrent_gated_delta_rule, chunked_gated_delta_rule):
            for grouped, separate in zip(form(*inputs, output_final_state=True), form(*repeated, output_final_state=True), strict=True):
                assert_close(grouped, separate, TIGHT)
        grouped, separate = gradients(chunked_gated_delta_rule, inputs), gradients(chunked_gated_delta_rule, repeated)
        for name in ("dq", "dk"):
            assert_close(grouped[name], separate[name].unflatten(2, (2, ratio)).sum(3), TIGHT, name)

    @pytest.mark.parametrize(("key_dim", "value_dim"), [(1, 1), (128, 64), (64, 128), (100, 37), (200, 160)])
    def test_head_sizes(self, rng, key_dim, value_dim):
        assert_forms_agree(make_inputs(rng, 80, key_heads=1, value_heads=2, key_dim=key_dim, value_dim=value_dim))


class TestStates:
    @FORMS
    @pytest.mark.parametrize("split", [(128, 128), (100, 156), (64, 192), (1, 255)], ids=str)
    def test_carried_state(self, rng, form, split):
        inputs = make_inputs(rng, 256)
        whole, whole_final = form(*inputs, output_final_state=True)
        first, middle = form(*inputs.rows(0, split[0]), output_final_state=True)
        second, final = form(*inputs.rows(split[0], 256), initial_state=middle, output_final_state=True)
        assert_close(torch.cat([first, second], 1), whole, TIGHT, "o")
        assert_close(final, whole_final, TIGHT, "final state")

    @FORMS
    def test_token_by_token(self, rng, form):
        inputs = make_inputs(rng, 20)
        whole, whole_final = form(*inputs, output_final_state=True)
        state, outputs = None, []
        for t in range(20):
            o, state = form(*inputs.rows(t, t + 1), initial_state=state, output_final_state=True)
            outputs.append(o)
        assert_close(torch.cat(outputs, 1), whole, TIGHT, "o")
        assert_close(state, whole_final, TIGHT, "final state")

    @FORMS
    @pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
    def test_layouts_are_transposes_bit_for_bit(self, rng, form, dtype):
        inputs = make_inputs(rng, 150, batch=2).to(dtype)
        start = make_state(rng, inputs)
        o, final = form(*inputs, initial_state=start, output_final_state=True)
        o_v, final_v = form(*inputs, initial_state=start.transpose(2, 3), output_final_state=True, state_v_first=True)
        assert_bitwise_equal(o_v, o, "o")
        assert_bitwise_equal(final_v, final.transpose(2, 3), "final state")
        assert final.is_contiguous() and final_v.is_contiguous()

    @FORMS
    def test_none_when_not_asked(self, rng, form):
        assert form(*make_inputs(rng, 10))[1] is None


class TestDtypes:
    @FORMS
    @pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
    def test_results(self, rng, form, dtype):
        inputs = make_inputs(rng, 70).to(dtype)
        o, final = form(*inputs, output_final_state=True)
        assert o.dtype == dtype
        assert final.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
        expected, expected_final = recurrent_gated_delta_rule(*inputs.to(torch.float64), output_final_state=True)
        assert_close(o, expected, {torch.float64: TIGHT, torch.float32: 1e-6, torch.bfloat16: 4e-3, torch.float16: 5e-4}[dtype], "o")
        assert_close(final, expected_final, TIGHT if dtype == torch.float64 else 1e-6, "final state")

    def test_float16_state_above_its_range(self, rng):
        inputs = make_inputs(rng, 100, dtype=torch.float16)
        inputs = inputs._replace(v=inputs.v * 10000)
        start = torch.full((1, 4, 16, 24), 1e6)
        _, final = chunked_gated_delta_rule(*inputs, initial_state=start, output_final_state=True)
        _, expected = recurrent_gated_delta_rule(*inputs.to(torch.float64), initial_state=start.double(), output_final_state=True)
        assert_close(final, expected, 1e-6, "final state")

    @FORMS
    def test_autocast_changes_nothing(self, rng, form):
        inputs = make_inputs(rng, 70, dtype=torch.float32)
        expected = form(*inputs, output_final_state=True)
        with torch.autocast("cpu", torch.bfloat16):
            actual = form(*inputs, output_final_state=True)
        for a, e in zip(actual, expected, strict=True):
            assert_bitwise_equal(a, e)


class TestGates:
    """Strong gates, none, resets and growth: forward against the recurrence, gradients finite and right."""

    @staticmethod
    def gate_cases():
        def constant(value):
            return lambda g, rng: torch.full_like(g, value)

        def sprinkled(value):
            return lambda g, rng: torch.where(torch.rand(g.shape, generator=rng) < 0.05, value, g)

        cases = {f"constant {x}": constant(x) for x in (0.0, -1e-6, -1e-4, -1.0, -20.0, -50.0, -300.0, -1e4, -math.inf)}
        cases |= {f"sprinkled {x}": sprinkled(x) for x in (-300.0, -1e4, -1e30, -math.inf)}
        cases["zero on every second token"] = lambda g, rng: torch.where((torch.arange(g.shape[1]) % 2 == 0)[:, None], 0.0, g)
        cases["runs of -inf"] = lambda g, rng: torch.where((torch.arange(g.shape[1]) % 50 < 3)[:, None], -math.inf, 0.0 * g)
        cases["one head decays, its neighbour does not"] = lambda g, rng: torch.where(torch.arange(g.shape[2]) % 2 == 0, 0.0, 4 * g)
        return cases

    CASES = pytest.mark.parametrize("gates", gate_cases().values(), ids=gate_cases().keys())

    @CASES
    @pytest.mark.parametrize("tokens", [64, 150])
    def test_forward(self, rng, gates, tokens):
        inputs = make_inputs(rng, tokens)
        inputs = inputs._replace(g=gates(inputs.g, rng))
        assert_forms_agree(inputs, initial_state=make_state(rng, inputs))

    @CASES
    def test_gradients(self, rng, gates):
        inputs = make_inputs(rng, 100, value_dim=8)
        inputs = inputs._replace(g=gates(inputs.g, rng))
        state = make_state(rng, inputs)
        expected = gradients(recurrent_gated_delta_rule, inputs, state)
        actual = gradients(chunked_gated_delta_rule, inputs, state)
        for name, grad in actual.items():
            assert torch.isfinite(grad).all(), name
            assert_close(grad, expected[name], 1e-10, name)

    @CASES
    def test_float32(self, rng, gates):
        inputs = make_inputs(rng, 150)
        inputs = inputs._replace(g=gates(inputs.g, rng)).to(torch.float32)
        o, final = chunked_gated_delta_rule(*inputs, output_final_state=True)
        expected, expected_final = recurrent_gated_delta_rule(*inputs.to(torch.float64), output_final_state=True)
        assert_close(o, expected, 1e-5, "o")
        assert_close(final, expected_final, 1e-5, "final state")

    @pytest.mark.parametrize("tokens", [7, 50, 64, 65, 2048])
    def test_no_decay(self, rng, tokens):
        inputs = make_inputs(rng, tokens, key_heads=1, value_heads=1)
        assert_forms_agree(inputs._replace(g=torch.zeros_like(inputs.g)))

    def test_growth(self, rng):
        inputs = make_inputs(rng, 2048, key_heads=1, value_heads=1)
        inputs = inputs._replace(g=torch.full_like(inputs.g, 0.05), beta=inputs.beta * 0.1)
        assert_forms_agree(inputs, tolerance=1e-9)

    def test_a_reset_forgets_the_state(self, rng):
        inputs = make_inputs(rng, 100)
        inputs.g[:, 70] = -math.inf
        huge = 1e6 * make_state(rng, inputs)
        for form in (recurrent_gated_delta_rule, chunked_gated_delta_rule):
            o, final = form(*inputs, initial_state=huge, output_final_state=True)
            after, after_final = form(*inputs.rows(70, 100), output_final_state=True)
            assert_close(o[:, 70:], after, 1e-9, "o after the reset")
            assert_close(final, after_final, 1e-9, "final state")

    def test_dg_in_float32(self, rng):
        inputs = make_inputs(rng, 200)
        inputs = inputs._replace(g=16 * inputs.g).to(torch.float32)
        expected = gradients(recurrent_gated_delta_rule, inputs.to(torch.float64))["dg"]
        assert relative_error(gradients(chunked_gated_delta_rule, inputs)["dg"], expected) < 1e-4


class TestInverse:
    @staticmethod
    def nearly_equal_keys(rng, tokens, beta, dtype):
        inputs = make_inputs(rng, tokens)
        noise = torch.randn(inputs.k.shape, generator=rng, dtype=torch.float64)
        k = F.normalize(inputs.k[:, :1] + 1e-2 * noise, dim=-1)
        return inputs._replace(k=k, g=torch.zeros_like(inputs.g), beta=torch.full_like(inputs.beta, beta)).to(dtype)

    @pytest.mark.parametrize("beta", [0.99, 1.0, 1.5, 2.0])
    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
    def test_nearly_equal_keys(self, rng, beta, dtype):
        inputs = self.nearly_equal_keys(rng, 192, beta, dtype)
        exact = inputs.to(torch.float64)
        o, final = chunked_gated_delta_rule(*inputs, output_final_state=True)
        expected, expected_final = recurrent_gated_delta_rule(*exact, output_final_state=True)
        assert_close(final, expected_final, 1e-4, "final state")
        assert_close(o, expected, 1e-4 + torch.finfo(dtype).eps, "o")

    def test_float32_inverse_before_rounding(self, rng):
        inputs = self.nearly_equal_keys(rng, 128, 2.0, torch.float32)
        _, A = chunk_gate_sum_and_inverse(inputs.k, inputs.g, inputs.beta)
        _, exact = chunk_gate_sum_and_inverse(inputs.k.double(), inputs.g.double(), inputs.beta.double())
        assert relative_error(A, exact) < 1e-4

    @pytest.mark.parametrize("lengths", [None, LENGTHS_WITH_GAPS], ids=["equal", "packed"])
    def test_gate_sum_and_inverse(self, rng, lengths):
        tokens = 240  # past the last packed sequence: rows no sequence owns
        inputs = make_inputs(rng, tokens, key_heads=1, value_heads=2)
        inputs.g[0, 5] = -math.inf
        cu = [0, tokens] if lengths is None else cu_seqlens_of(lengths).tolist()
        g_cum, A = chunk_gate_sum_and_inverse(inputs.k, inputs.g, inputs.beta, None if lengths is None else torch.tensor(cu))
        assert g_cum.shape == (1, tokens, 2) and A.shape == (1, tokens, 2, 64)
        expected_g, expected_A = torch.zeros_like(g_cum), torch.zeros_like(A)
        lower_triangles = torch.zeros_like(A, dtype=torch.bool)
        for begin, end in zip(cu, cu[1:], strict=False):
            for first in range(begin, end, 64):
                rows = slice(first, min(first + 64, end))
                size = rows.stop - rows.start
                for h in range(2):
                    log2 = (inputs.g[0, rows, h] / math.log(2)).clamp_min(-256)
                    total = log2.cumsum(0)
                    k = inputs.k[0, rows, 0]
                    gated = torch.exp2(total[:, None] - total[None]).tril() * (k @ k.T)
                    lower = torch.eye(size, dtype=torch.float64) + (inputs.beta[0, rows, h][:, None] * gated).tril(-1)
                    expected_g[0, rows, h] = total
                    expected_A[0, rows, h, :size] = torch.linalg.inv(lower)
                    lower_triangles[0, rows, h, :size] = torch.ones(size, size).tril().bool()
        assert_close(g_cum, expected_g, TIGHT, "g_cum")
        assert_close(A, expected_A, 1e-10, "A")
        assert A[~lower_triangles].count_nonzero() == 0, "zeros above the diagonal, past the end and in rows no sequence owns"


class TestScale:
    @FORMS
    def test_linear_in_o_and_absent_from_the_state(self, rng, form):
        inputs = make_inputs(rng, 100)
        unit, state = form(*inputs, scale=1.0, output_final_state=True)
        for scale in (0.1, -2.0, 16**-0.5):
            o, scaled_state = form(*inputs, scale=scale, output_final_state=True)
            assert_close(o, scale * unit, TIGHT, f"o with scale {scale}")
            assert_bitwise_equal(scaled_state, state, "final state")
        assert form(*inputs, scale=0.0)[0].count_nonzero() == 0
        assert_bitwise_equal(form(*inputs)[0], form(*inputs, scale=16**-0.5)[0], "default scale")


class TestGradients:
    @pytest.mark.parametrize("lengths", [None, (30, 0, 70, 1)], ids=["equal", "packed"])
    def test_chunked_gives_the_recurrences_gradients(self, rng, lengths):
        inputs = make_inputs(rng, 110)
        options = {} if lengths is None else {"cu_seqlens": cu_seqlens_of(lengths)}
        state = make_state(rng, inputs, 1 if lengths is None else len(lengths))
        expected = gradients(recurrent_gated_delta_rule, inputs, state, **options)
        for name, grad in gradients(chunked_gated_delta_rule, inputs, state, **options).items():
            assert_close(grad, expected[name], 1e-11, name)

    @FORMS
    @pytest.mark.parametrize("state_v_first", [False, True])
    def test_gradcheck(self, rng, form, state_v_first):
        inputs = make_inputs(rng, 7, key_heads=1, value_heads=2, key_dim=2, value_dim=3)
        state = make_state(rng, inputs, 3)
        state = state.transpose(2, 3).contiguous() if state_v_first else state
        options = {"output_final_state": True, "state_v_first": state_v_first, "cu_seqlens": torch.tensor([0, 4, 4, 6])}
        if form is chunked_gated_delta_rule:
            options["chunk_size"] = 3

        def function(*tensors):
            return form(*tensors[:5], initial_state=tensors[5], **options)

        assert torch.autograd.gradcheck(function, (*inputs.leaves(), state.requires_grad_()))

    @FORMS
    def test_empty_sequence_passes_the_state_gradient_on(self, rng, form):
        inputs = make_inputs(rng, 20)
        state = make_state(rng, inputs, 3).requires_grad_()
        _, final = form(*inputs, initial_state=state, output_final_state=True, cu_seqlens=torch.tensor([0, 10, 10, 20]))
        grad = torch.randn(final.shape, generator=rng, dtype=torch.float64)
        (dh0,) = torch.autograd.grad(final, state, grad)
        assert_bitwise_equal(dh0[1], grad[1], "dh0 of the empty sequence")

    @FORMS
    def test_o_without_sequences_stays_differentiable(self, rng, form):
        leaves = make_inputs(rng, 5).leaves()
        o, _ = form(*leaves, cu_seqlens=torch.tensor([0]))
        o.sum().backward()
        for name, x in leaves._asdict().items():
            assert x.grad.count_nonzero() == 0, f"d{name}"


def test_chunked_form_is_usable_on_a_cpu(rng):
    inputs = make_inputs(rng, 4096, key_heads=4, value_heads=4, key_dim=128, value_dim=128, dtype=torch.float32)
    start = time.perf_counter()
    chunked_gated_delta_rule(*inputs, output_final_state=True)
    assert time.perf_counter() - start < 10, "takes a fraction of a second on one idle core"


def test_chunk_size_only_changes_rounding(rng):
    inputs = make_inputs(rng, 150)
    expected = recurrent_gated_delta_rule(*inputs, output_final_state=True)
    for chunk_size in (1, 16, 32, 64, 128, 1000):
        actual = chunked_gated_delta_rule(*inputs, output_final_state=True, chunk_size=chunk_size)
        assert_close(actual[0], expected[0], TIGHT, f"o in chunks of {chunk_size}")
        assert_close(actual[1], expected[1], TIGHT, f"final state in chunks of {chunk_size}")
