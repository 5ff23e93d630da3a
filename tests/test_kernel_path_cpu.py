"""The way to the kernels and back, with stand-ins for the kernels: padding, layouts, views, scale, gradients, saved memory.

The stand-ins check that they get what the kernels are promised and compute it with the reference.
"""

from __future__ import annotations

import contextlib
import math
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest
import torch
from inputs import LENGTHS_WITH_GAPS, cu_seqlens_of, make_inputs, make_state
from numeric import assert_bitwise_equal, assert_close

import qla
from qla import autocp, autograd
from qla.api import _segmentation
from qla.autocp import WHOLE, Plan
from qla.autograd import LOG2E, _Beside, head_slices, workspace_limit
from qla.checks import check_inputs
from qla.device import DeviceSpec
from qla.kernels import launch
from qla.reference import chunk_gate_sum_and_inverse, chunked_gated_delta_rule, chunked_gradients, gates_from_chunk_sums

SPEC = DeviceSpec(index=0, capability=(9, 0), sm_count=132)


class Beside:
    """Of the second stream: whether launches go to it, and whether the first one waits for it."""

    def __init__(self):
        self.inside, self.joined = False, True

    def __enter__(self):
        self.inside, self.joined = True, False

    def __exit__(self, *exception):
        self.inside = False

    def join(self):
        self.joined = True


class StandIns:
    """Records the launches; the other methods have the kernels' signatures. The scans compute nothing: they note what they got, and
    ``bwd_fused`` makes all gradients of the slice from it. Nor do the kernels of cut calls compute anything: what they make and get is
    kept in ``made`` and ``got``, by launch, for comparisons by identity."""

    def __init__(self):
        self.launches = []
        self.made, self.got = {}, {}
        self.beside = Beside()

    @staticmethod
    def check(name, x, shape, dtype):
        assert tuple(x.shape) == shape, f"{name}: {tuple(x.shape)} is not {shape}"
        assert x.dtype == dtype and x.is_contiguous() and x.data_ptr() % 16 == 0, name

    @staticmethod
    def batched(cu_seqlens, num_seqs, seq_len, *tensors):
        if cu_seqlens is None:
            return [x.view(num_seqs, seq_len, *x.shape[1:]) for x in tensors]
        assert seq_len == 0 and cu_seqlens.dtype == torch.int32 and cu_seqlens.shape == (num_seqs + 1,)
        return [x.unsqueeze(0) for x in tensors]

    def l2norm(self, q, k, cu_seqlens, eps, num_sms):
        self.launches.append("l2norm")
        assert num_sms == SPEC.sm_count and (cu_seqlens is None or cu_seqlens.dtype == torch.int32)
        owned = torch.ones(len(q)) if cu_seqlens is None else torch.arange(len(q)) < cu_seqlens[-1]
        found = []
        for x in (q, k):
            assert x.shape[2] in (64, 128) and x.stride(2) == 1 and x.stride(0) % 8 == x.stride(1) % 8 == x.data_ptr() % 16 == 0
            r = owned.unsqueeze(1) * (x.float().square().sum(-1) + eps).rsqrt()
            found.append((torch.where(owned.view(-1, 1, 1) > 0, r.unsqueeze(-1) * x, 0).to(x.dtype), r))
        (yq, rq), (yk, rk) = found
        return yq.contiguous(), yk.contiguous(), rq, rk

    def l2norm_backward(self, dyq, dyk, yq, yk, rq, rk, num_sms):
        self.launches.append("l2norm_backward")
        grads = []
        for dy, y, r in ((dyq, yq, rq), (dyk, yk, rk)):
            self.check("dy", dy, tuple(y.shape), y.dtype)
            self.check("y", y, (*r.shape, dy.shape[2]), y.dtype)
            grads.append((r.unsqueeze(-1) * (dy.float() - y.float() * (dy.float() * y.float()).sum(-1, keepdim=True))).to(y.dtype))
        return grads

    ACTIVATE_BETA, TWICE = 4, 8

    def activated(self, raw_g, raw_beta, A_log, dt_bias, options):
        """g, beta, and their derivatives after the raw values."""
        g, dg, beta, dbeta = raw_g.float(), torch.ones(raw_g.shape), raw_beta.float(), torch.ones(raw_g.shape)
        if A_log is not None:
            raw = g if dt_bias is None else g + dt_bias.float()
            rate = -A_log.float().exp()
            g, dg = rate * torch.nn.functional.softplus(raw), rate * raw.sigmoid()
        if options & self.ACTIVATE_BETA:
            factor = 2 if options & self.TWICE else 1
            beta, dbeta = factor * beta.sigmoid(), factor * beta.sigmoid() * (-beta).sigmoid()
        return g, beta, dg, dbeta

    @staticmethod
    def owned(x, cu_seqlens, *values):
        mask = torch.ones(len(x), 1) if cu_seqlens is None else (torch.arange(len(x)) < cu_seqlens[-1]).unsqueeze(1)
        return [torch.where(mask > 0, value, 0) for value in values]

    def gates(self, raw_g, raw_beta, A_log, dt_bias, cu_seqlens, options):
        self.launches.append("gates")
        assert raw_g.is_contiguous() and raw_beta.is_contiguous()
        return self.owned(raw_g, cu_seqlens, *self.activated(raw_g, raw_beta, A_log, dt_bias, options)[:2])

    def gates_backward(self, dg, dbeta, raw_g, raw_beta, A_log, dt_bias, cu_seqlens, options, num_sms):
        self.launches.append("gates_backward")
        self.check("dg", dg, tuple(raw_g.shape), torch.float32)
        self.check("dbeta", dbeta, tuple(raw_g.shape), torch.float32)
        g, _, slope_g, slope_beta = self.activated(raw_g, raw_beta, A_log, dt_bias, options)
        draw_g, draw_beta, dA = self.owned(dg, cu_seqlens, dg * slope_g, dbeta * slope_beta, dg * g)
        sums = (None if A_log is None else dA.sum(0), None if dt_bias is None else draw_g.sum(0))
        return draw_g.to(raw_g.dtype), draw_beta.to(raw_beta.dtype), *sums

    def kkt_solve(self, k, g, beta, o, cu_seqlens, num_seqs, seq_len, num_sms, with_bound):
        self.launches.append("kkt_solve")
        tokens, heads = g.shape
        assert {k.shape[2], o.shape[2]} <= {64, 128}
        self.check("k", k, (tokens, *k.shape[1:]), k.dtype)
        self.check("g", g, (tokens, heads), torch.float32)
        self.check("beta", beta, (tokens, heads), torch.float32)
        self.check("o", o, (tokens, heads, o.shape[2]), k.dtype)
        assert num_sms == SPEC.sm_count
        o.fill_(math.nan)
        if cu_seqlens is not None:
            o[int(cu_seqlens[-1]) :] = 0
        self.g = g
        g_cum, A = chunk_gate_sum_and_inverse(*self.batched(cu_seqlens, num_seqs, seq_len, k, g, beta), cu_seqlens)
        self.bound = torch.zeros(self.num_slots(tokens, num_seqs, seq_len) if with_bound else 1, heads)
        g_cum, A = g_cum.flatten(0, 1), A.flatten(0, 1).to(k.dtype)
        self.made["kkt_solve"] = g_cum, A, self.bound, o
        return g_cum, A, self.bound

    def fwd_fused(
        self, q, k, v, g_cum, beta, A, o, initial_state, final_state, scale, cu_seqlens, num_seqs, seq_len, state_v_first, num_sms,
        items=None, order=None, segment_states=None, block_v=None, blocks_an_item=2, **own_segments,
    ):  # fmt: skip
        self.launches.append("fwd_fused")
        if items is None and order is not None:  # the sequences as a whole, if cp_plan leaves them whole
            assert order is self.made["cp_plan"][2] and not own_segments
            self.got["fwd_fused if whole"] = {"block_v": block_v}
            return
        assert items is None or order.numel() == 2 * items.shape[0] * items.shape[1] + 1
        self.got["fwd_fused"] = {
            "tensors": (k, v, g_cum, beta, A, initial_state), "place": (cu_seqlens, num_seqs, seq_len), "items": items, "order": order,
            "states": segment_states, "block_v": block_v, "blocks_an_item": blocks_an_item, "own": own_segments,
        }  # fmt: skip
        tokens, heads, _ = v.shape
        inner = self.inner(k, v, state_v_first)
        for name, x, shape, dtype in (
            ("q", q, tuple(k.shape), k.dtype),
            ("v", v, tuple(o.shape), k.dtype),
            ("g_cum", g_cum, (tokens, heads), torch.float32),
            ("A", A, (tokens, heads, 64), k.dtype),
            ("initial_state", initial_state, (num_seqs, heads, *inner), torch.float32),
            ("final_state", final_state, (num_seqs, heads, *inner), torch.float32),
        ):
            if x is not None:
                self.check(name, x, shape, dtype)
        assert isinstance(scale, float) and scale >= 0 and num_sms == SPEC.sm_count
        batched = self.batched(cu_seqlens, num_seqs, seq_len, q, k, v, self.g, beta)
        out, final = chunked_gated_delta_rule(*batched, scale, initial_state, True, state_v_first, cu_seqlens)
        owned = tokens if cu_seqlens is None else int(cu_seqlens[-1])
        o[:owned] = out.flatten(0, 1)[:owned]
        if final_state is not None:
            final_state.copy_(final)

    @staticmethod
    def num_slots(tokens, num_seqs, seq_len):
        return num_seqs * -(-seq_len // 64) if seq_len > 0 else tokens // 64 + num_seqs + 1

    @staticmethod
    def inner(k, v, state_v_first):
        """Last two dimensions of a state."""
        return (v.shape[2], k.shape[2]) if state_v_first else (k.shape[2], v.shape[2])

    def check_scan(self, name, x, k, states, values, head0, state, num_seqs, seq_len, state_v_first):
        self.launches.append((name, head0, states.shape[1]))
        self.check("x", x, (len(k), *x.shape[1:]), k.dtype)
        slots = self.num_slots(len(k), num_seqs, seq_len)
        self.check("states", states, (slots, states.shape[1], *self.inner(k, x, True)), k.dtype)
        self.check("values", values, (len(k), values.shape[1], x.shape[2]), k.dtype)
        self.got[name + " values"] = values
        first = head0 if values.shape[1] == x.shape[1] else 0
        values[:, first : first + states.shape[1]] = math.nan
        if state is not None:
            self.check("state", state, (num_seqs, x.shape[1], *self.inner(k, x, state_v_first)), torch.float32)
        states.fill_(math.nan)

    def scan_states(
        self, k, v, g_cum, beta, A, states, values, head0, initial_state, cu_seqlens, num_seqs, seq_len, state_v_first, num_sms, items,
        segment_states,
    ):  # fmt: skip
        assert not self.beside.inside and not self.beside.joined
        self.got.setdefault("scan_states", []).append({"items": items, "states": segment_states})
        self.check_scan("scan_states", v, k, states, values, head0, initial_state, num_seqs, seq_len, state_v_first)
        self.initial_state, self.state_v_first = initial_state, state_v_first

    def scan_state_gradients(
        self, q, k, do, g_cum, beta, A, states, values, head0, final_grad, initial_grad, scale, cu_seqlens, num_seqs, seq_len,
        state_v_first, num_sms, items, segment_states,
    ):  # fmt: skip
        assert self.beside.inside
        self.got.setdefault("scan_state_gradients", []).append({"items": items, "states": segment_states})
        self.check_scan("scan_state_gradients", do, k, states, values, head0, final_grad, num_seqs, seq_len, state_v_first)
        self.final_grad, self.initial_grad = final_grad, initial_grad

    def cp_plan(
        self, bound, cu_seqlens, tokens, num_seqs, seq_len, num_segments, segment_chunks, split, inline_warmup, max_warmup,
        max_transition_heads, max_serial_heads, threshold, num_sms, value_dim,
    ):  # fmt: skip
        self.launches.append("cp_plan")
        assert torch.equal(bound, self.bound) and len(bound) == self.num_slots(tokens, num_seqs, seq_len) and num_sms == SPEC.sm_count
        rule = (segment_chunks, split, inline_warmup, max_warmup, max_transition_heads, max_serial_heads, threshold)
        assert value_dim == self.made["kkt_solve"][3].shape[2]
        self.got["cp_plan"] = {"place": (cu_seqlens, num_seqs, seq_len), "tokens": tokens, "segments": num_segments, "rule": rule}
        forward, reverse = torch.zeros(2, num_segments, bound.shape[1], 4, dtype=torch.int32)
        self.made["cp_plan"] = forward, reverse, torch.zeros(2 * num_segments * bound.shape[1] + 1, dtype=torch.int32)
        return self.made["cp_plan"]

    def check_starts(self, items, states, transitions):
        value_dim, key_dim = states.shape[2:]
        assert {key_dim, value_dim} <= {64, 128}
        self.check("states", states, (*items.shape[:2], value_dim, key_dim), torch.float32)
        if transitions is not None:
            self.check("transitions", transitions, (*items.shape[:2], 2, key_dim, key_dim), torch.bfloat16)

    def prepare_states(
        self, k, v, g_cum, beta, A, initial_state, cu_seqlens, num_seqs, seq_len, state_v_first, num_sms, items, segment_states, transitions
    ):
        self.launches.append("prepare_states")
        self.check_starts(items, segment_states, transitions)
        assert segment_states.shape[2:] == self.inner(k, v, True)
        assert num_sms == SPEC.sm_count
        self.got["prepare_states"] = {
            "tensors": (k, v, g_cum, beta, A, initial_state), "place": (cu_seqlens, num_seqs, seq_len), "items": items,
            "states": segment_states, "transitions": transitions, "layout": state_v_first,
        }  # fmt: skip

    def prepare_state_gradients(
        self, q, k, do, g_cum, beta, A, final_grad, scale, cu_seqlens, num_seqs, seq_len, state_v_first, num_sms, items, segment_states
    ):
        self.launches.append("prepare_state_gradients")
        self.check_starts(items, segment_states, None)
        assert num_sms == SPEC.sm_count
        self.check("do", do, (*g_cum.shape, segment_states.shape[2]), k.dtype)
        self.got["prepare_state_gradients"] = {
            "tensors": (k, g_cum, beta, A, final_grad), "place": (cu_seqlens, num_seqs, seq_len), "items": items,
            "states": segment_states, "scale": scale, "layout": state_v_first,
        }  # fmt: skip

    def cp_merge(self, segment_states, transitions, items, cu_seqlens, tokens, num_seqs, seq_len, segment_chunks, reverse):
        self.launches.append(("cp_merge", reverse))
        self.check_starts(items, segment_states, transitions)
        self.got["cp_merge", reverse] = {
            "place": (cu_seqlens, num_seqs, seq_len), "items": items, "states": segment_states, "transitions": transitions,
            "tokens": tokens, "chunks": segment_chunks,
        }  # fmt: skip

    def bwd_fused(
        self, q, k, v, g_cum, beta, vd, do, dw, states, state_grads, dq, dk, dv, dg, dbeta, head0, scale, cu_seqlens, num_seqs, seq_len,
        num_sms,
    ):  # fmt: skip
        self.launches.append(("bwd_fused", head0, states.shape[1]))
        self.check("vd", vd, (len(k), states.shape[1], v.shape[2]), k.dtype)
        self.check("dw", dw, v.shape, k.dtype)
        assert self.got["scan_states values"] is vd and self.got["scan_state_gradients values"] is dw
        assert self.beside.joined and not self.beside.inside
        ratio, heads = v.shape[1] // k.shape[1], slice(head0, head0 + states.shape[1])
        keys = slice(head0 // ratio, heads.stop // ratio)
        inputs = (q[:, keys], k[:, keys], v[:, heads], g_cum[:, heads], beta[:, heads], do[:, heads])
        q, k, v, sums, beta, do = self.batched(cu_seqlens, num_seqs, seq_len, *(x.contiguous() for x in inputs))
        start, end = (None if x is None else x[:, heads] for x in (self.initial_state, self.final_grad))
        gates = gates_from_chunk_sums(sums, cu_seqlens)
        with ThreadPoolExecutor(1) as thread:  # inside an operator autograd records nothing, and the reference goes through it
            arguments = (q, k, v, gates, beta, scale, start, do, end, self.state_v_first, cu_seqlens)
            *grads, dh0 = thread.submit(chunked_gradients, *arguments).result()
        for out, part, x in zip((dq, dk, dv, dg, dbeta), (keys, keys, heads, heads, heads), grads, strict=True):
            out[:, part] = x.flatten(0, 1)
        if self.initial_grad is not None:
            self.initial_grad[:, heads] = dh0


KERNELS = (
    "l2norm", "l2norm_backward", "gates", "gates_backward", "kkt_solve", "fwd_fused", "cp_plan", "prepare_states",
    "prepare_state_gradients", "scan_states", "scan_state_gradients", "cp_merge", "bwd_fused",
)  # fmt: skip


@pytest.fixture(autouse=True)
def kernels(monkeypatch):
    stand_ins = StandIns()
    for name in KERNELS:
        monkeypatch.setattr(launch, name, getattr(stand_ins, name))
    monkeypatch.setattr("qla.api.unsupported_reason", lambda q, k, v: None)
    for module in ("autograd", "activations"):
        monkeypatch.setattr(f"qla.{module}.device_spec", lambda device: SPEC)
    monkeypatch.setattr(torch.cuda, "device", lambda device: contextlib.nullcontext())
    monkeypatch.setattr("qla.autograd._Beside", lambda device: stand_ins.beside)
    return stand_ins


def expected_of(inputs, **options):
    """The call through the reference."""
    return chunked_gated_delta_rule(*inputs, output_final_state=True, **options)


@pytest.mark.parametrize(("key_dim", "value_dim"), [(128, 128), (64, 64), (64, 65), (100, 37), (128, 1), (3, 128)])
@pytest.mark.parametrize("state_v_first", [False, True])
@pytest.mark.parametrize("lengths", [None, LENGTHS_WITH_GAPS], ids=["equal", "packed"])
def test_head_sizes_are_padded_exactly(rng, kernels, key_dim, value_dim, state_v_first, lengths):
    tokens = 240
    inputs = make_inputs(rng, tokens, batch=1 if lengths else 2, key_dim=key_dim, value_dim=value_dim, dtype=torch.bfloat16)
    start = make_state(rng, inputs, len(lengths) if lengths else None).float()
    options = {"initial_state": start.transpose(2, 3) if state_v_first else start, "state_v_first": state_v_first}
    if lengths:
        options["cu_seqlens"] = cu_seqlens_of(lengths)
    o, state = qla.chunk_gated_delta_rule(*inputs, output_final_state=True, **options)
    expected, expected_state = expected_of(inputs, **options)
    assert kernels.launches == ["kkt_solve", "fwd_fused"]
    k, v, *_ = kernels.got["fwd_fused"]["tensors"]
    assert (k.shape[2], v.shape[2]) == tuple(64 if size <= 64 else 128 for size in (key_dim, value_dim)), "each by itself"
    assert o.is_contiguous() and state.is_contiguous() and state.shape == options["initial_state"].shape
    assert_close(o, expected, 1e-3, "o")
    assert_close(state, expected_state, 1e-6, "final state")


@pytest.mark.parametrize("scale", [-0.5, 0.0, 2.0, None, 3])
def test_scale_reaches_the_kernel_as_a_float_of_at_least_zero(rng, scale):
    inputs = make_inputs(rng, 70, dtype=torch.bfloat16)
    o, state = qla.chunk_gated_delta_rule(*inputs, scale=scale, output_final_state=True)
    expected, expected_state = expected_of(inputs, scale=scale)
    assert_close(o, expected, 1e-3)
    assert_close(state, expected_state, 1e-6)


def test_views_give_the_same_bits(rng):
    inputs = make_inputs(rng, 70, batch=2, key_dim=128, value_dim=128, dtype=torch.bfloat16)
    start = make_state(rng, inputs)

    def misaligned(x):
        flat = torch.empty(x.numel() + 1, dtype=x.dtype)
        flat[1:] = x.flatten()
        return flat[1:].view(x.shape)

    expected = qla.chunk_gated_delta_rule(*inputs, initial_state=start, output_final_state=True)
    for view in (misaligned, lambda x: x.transpose(0, 1).contiguous().transpose(0, 1), lambda x: torch.stack([x, x], -1)[..., 1]):
        actual = qla.chunk_gated_delta_rule(*(view(x) for x in inputs), initial_state=view(start), output_final_state=True)
        for a, e in zip(actual, expected, strict=True):
            assert_bitwise_equal(a, e)


def test_fitting_inputs_are_not_copied(rng, kernels, monkeypatch):
    inputs = make_inputs(rng, 70, key_dim=128, value_dim=128, dtype=torch.bfloat16)
    inputs = inputs._replace(g=inputs.g.float(), beta=inputs.beta.float())
    seen = {}
    original = kernels.fwd_fused

    def spy(q, k, v, g_cum, beta, *rest, **options):
        seen.update(q=q, k=k, v=v, beta=beta)
        original(q, k, v, g_cum, beta, *rest, **options)

    monkeypatch.setattr(launch, "fwd_fused", spy)
    qla.chunk_gated_delta_rule(*inputs)
    for name, x in seen.items():
        assert x.data_ptr() == getattr(inputs, name).data_ptr(), name


@pytest.mark.parametrize("case", ["no token", "no sequence", "no token in a sequence"])
def test_nothing_is_launched_without_work(rng, kernels, case):
    inputs = make_inputs(rng, 30 if case == "no sequence" else 0, dtype=torch.bfloat16)
    cu = {"no token": None, "no sequence": torch.tensor([0]), "no token in a sequence": torch.tensor([0, 0, 0])}[case]
    num_seqs = 1 if cu is None else len(cu) - 1
    start = make_state(rng, inputs, num_seqs).requires_grad_()
    leaves = inputs.leaves()
    o, state = qla.chunk_gated_delta_rule(*leaves, initial_state=start, output_final_state=True, cu_seqlens=cu)
    assert kernels.launches == []
    assert o.shape == inputs.v.shape and o.count_nonzero() == 0
    assert_bitwise_equal(state, start.float())
    (o.sum() + 2 * state.sum()).backward()
    assert (start.grad == 2).all() and start.grad.dtype == start.dtype
    for name, x in leaves._asdict().items():
        assert x.grad.count_nonzero() == 0, f"d{name}"
    assert qla.chunk_gated_delta_rule(*inputs, output_final_state=True, cu_seqlens=cu)[1].count_nonzero() == 0


def same(a, b):
    """Whether two tensors are one: a saved tensor comes back as another object with the same storage."""
    if a is None or b is None:
        return a is b
    return a.data_ptr() == b.data_ptr() and a.shape == b.shape and a.dtype == b.dtype


PLANS = {
    "inline warm-up": Plan(4, 1, 16, 16, 0),
    "warm-up by cp_prep": Plan(4, 1, 1, 16, 0),
    "transitions": Plan(4, 2, 1, 2, 8, threshold=5.0),
    "own segments": Plan(4, 2, 2, 2, 0, threshold=3.0),
    "way back": Plan(4, 1, 8, 8, 0, max_serial_heads=0, whole_split=2),
}
LENGTHS = (300, 0, 70, 257)


class TestCutCalls:
    """What a call launches whose sequences are cut, and that every launch gets what the others made."""

    @pytest.fixture(params=PLANS)
    def plan(self, request):
        return PLANS[request.param]

    @pytest.fixture(params=["batch", "packed"])
    def problem(self, request, rng):
        """(inputs, start, options, (num_seqs, seq_len)); the packed one has rows that no sequence owns."""
        packed = request.param == "packed"
        inputs = make_inputs(rng, sum(LENGTHS) + 13 if packed else 300, batch=1 if packed else 2, value_dim=80, dtype=torch.bfloat16)
        start = make_state(rng, inputs, len(LENGTHS) if packed else None).float()
        return inputs, start, {"cu_seqlens": cu_seqlens_of(LENGTHS)} if packed else {}, (len(LENGTHS), 0) if packed else (2, 300)

    @classmethod
    def forward_launches(cls, plan):
        tables = ["cp_plan", *cls.preparation(plan)] if plan.needs_tables else []
        return ["kkt_solve", *tables, "fwd_fused", *["fwd_fused"] * plan.may_stay_whole]

    @staticmethod
    def preparation(plan):
        """Launches that make what segments start from."""
        return [*["prepare_states"] * plan.needs_states, *[("cp_merge", False)] * (plan.max_transition_heads > 0)]

    @staticmethod
    def check_preparation(kernels, plan, initial_state):
        """The prepared states and transitions, which are new tensors in each pass; both None where the plan needs none."""
        if not plan.needs_states:
            return None, None
        prepared, through = kernels.got["prepare_states"], kernels.got["fwd_fused"]
        assert same(prepared["items"], kernels.made["cp_plan"][0])
        assert all(same(a, b) for a, b in zip(prepared["tensors"], through["tensors"], strict=True))
        assert same(prepared["tensors"][2], kernels.made["kkt_solve"][0]) and same(prepared["tensors"][4], kernels.made["kkt_solve"][1])
        assert (prepared["tensors"][5] is None) == (initial_state is None)
        assert same(prepared["place"][0], through["place"][0]) and prepared["place"][1:] == through["place"][1:]
        assert (prepared["transitions"] is not None) == (plan.max_transition_heads > 0)
        if prepared["transitions"] is not None:
            TestCutCalls.check_merge(kernels, plan, False, prepared["states"], prepared["transitions"])
        return prepared["states"], prepared["transitions"]

    @staticmethod
    def check_merge(kernels, plan, reverse, states, transitions):
        merged, through = kernels.got["cp_merge", reverse], kernels.got["fwd_fused"]
        assert same(merged["states"], states) and same(merged["transitions"], transitions)
        assert same(merged["items"], kernels.made["cp_plan"][0]), "the forward items, in both directions"
        assert same(merged["place"][0], through["place"][0]) and merged["place"][1:] == through["place"][1:]
        assert (merged["tokens"], merged["chunks"]) == (len(through["tensors"][0]), plan.chunks_per_segment)

    @pytest.mark.parametrize("with_state", [False, True])
    def test_forward(self, kernels, plan, problem, with_state):
        inputs, start, options, (num_seqs, seq_len) = problem
        options = options | {"initial_state": start if with_state else None, "output_final_state": True}
        expected = qla.chunk_gated_delta_rule(*inputs, auto_cp=False, **options)
        assert kernels.launches == ["kkt_solve", "fwd_fused"]
        kernels.launches.clear()
        actual = qla.chunk_gated_delta_rule(*inputs, auto_cp=plan, **options)
        assert kernels.launches == self.forward_launches(plan)
        for a, b in zip(actual, expected, strict=True):
            assert_bitwise_equal(a, b)

        tokens, heads = inputs.g.shape[0] * inputs.g.shape[1], inputs.g.shape[2]
        through = kernels.got["fwd_fused"]
        if not plan.needs_tables:
            assert through["items"] is through["order"] is through["states"] is None
            assert same(through["own"].pop("bound"), kernels.bound)
            assert through["own"] == {
                "num_segments": plan.num_segments(num_seqs, tokens, seq_len), "segment_chunks": plan.chunks_per_segment,
                "max_warmup": plan.max_warmup, "threshold": plan.threshold * LOG2E,
            }  # fmt: skip
            return
        planned = kernels.got["cp_plan"]
        assert planned["rule"] == (
            plan.chunks_per_segment, plan.split == 2, plan.inline_warmup, plan.max_warmup, plan.max_transition_heads, plan.max_serial_heads,
            plan.threshold * LOG2E,
        )  # fmt: skip
        assert through["own"] == {} and through["blocks_an_item"] == (1 if plan.max_serial_heads == 0 else 2)
        assert kernels.got.get("fwd_fused if whole") == ({"block_v": 64} if plan.may_stay_whole else None)
        assert planned["tokens"] == tokens and planned["segments"] == plan.num_segments(num_seqs, tokens, seq_len)
        assert same(planned["place"][0], through["place"][0]) and planned["place"][1:] == through["place"][1:] == (num_seqs, seq_len)
        assert (planned["place"][0] is None) == (seq_len > 0)
        assert through["items"] is kernels.made["cp_plan"][0] and through["order"] is kernels.made["cp_plan"][2]
        states, _ = self.check_preparation(kernels, plan, options["initial_state"])
        assert through["states"] is states
        assert states is None or states.shape[:2] == (planned["segments"], heads)

    @pytest.mark.parametrize("slices", [1, 2])
    def test_backward(self, kernels, plan, problem, slices, monkeypatch):
        inputs, start, options, (num_seqs, seq_len) = problem
        options = options | {"output_final_state": True, "state_v_first": True, "scale": 0.25}
        if slices == 2:
            monkeypatch.setenv("QLA_WORKSPACE_BYTES", "1")
        grads = []
        for auto_cp in (False, plan):
            leaves = [*inputs.leaves(), start.transpose(-1, -2).clone().requires_grad_()]
            o, final = qla.chunk_gated_delta_rule(*leaves[:5], initial_state=leaves[5], auto_cp=auto_cp, **options)
            forward_states = kernels.got["fwd_fused"]["states"]
            kernels.launches.clear()
            for name in ("scan_states", "scan_state_gradients"):
                kernels.got.pop(name, None)
            grads.append(torch.autograd.grad(o.float().square().sum() + final.square().sum(), leaves))
            heads = inputs.g.shape[2] // slices
            of_slices = [(name, i * heads, heads) for i in range(slices) for name in ("scan_state_gradients", "scan_states", "bwd_fused")]
            if not auto_cp:
                assert kernels.launches == of_slices
                scans = kernels.got["scan_states"] + kernels.got["scan_state_gradients"]
                assert scans == [{"items": None, "states": None}] * 2 * slices
        for a, b in zip(*grads, strict=True):
            assert_bitwise_equal(a, b)
        gradients = plan.max_transition_heads > 0
        tables = [] if plan.needs_tables else ["cp_plan"]
        before = [*tables, *["prepare_state_gradients"] * gradients, *["prepare_states"] * plan.needs_states]
        before += [("cp_merge", True)] * gradients
        assert kernels.launches == [*before, of_slices[0], *[("cp_merge", False)] * gradients, *of_slices[1:]]

        forward, reverse, _ = kernels.made["cp_plan"]
        states, transitions = self.check_preparation(kernels, plan, start)
        assert states is None or not same(states, forward_states), "made again, not kept from the forward pass"
        start_grads = None
        if gradients:
            got, through = kernels.got["prepare_state_gradients"], kernels.got["prepare_states"]
            start_grads = got["states"]
            assert same(got["items"], reverse) and not same(start_grads, states)
            k, _, g_cum, beta, A, _ = through["tensors"]
            assert all(same(a, b) for a, b in zip(got["tensors"][:4], (k, g_cum, beta, A), strict=True))
            assert same(got["tensors"][4], kernels.final_grad) and (got["scale"], got["layout"]) == (0.25, True)
            assert through["layout"] is True
            assert same(got["place"][0], through["place"][0]) and got["place"][1:] == (num_seqs, seq_len)
            self.check_merge(kernels, plan, True, start_grads, transitions)
        for name, items, starts in (("scan_states", forward, states), ("scan_state_gradients", reverse, start_grads)):
            assert len(kernels.got[name]) == slices
            assert all(same(got["items"], items) and same(got["states"], starts) for got in kernels.got[name]), name

    def test_items_are_what_a_cut_keeps(self, problem, plan):
        """Besides what an uncut call saves; states and transitions are made again."""
        inputs, start, options, _ = problem
        saved = {}
        for auto_cp in (False, plan):
            shapes = saved.setdefault(auto_cp, [])
            with torch.autograd.graph.saved_tensors_hooks(lambda x, shapes=shapes: shapes.append((x.shape, x.dtype)) or x, lambda x: x):
                qla.chunk_gated_delta_rule(*inputs.leaves(), initial_state=start, auto_cp=auto_cp, **options)
        tokens, heads = inputs.g.shape[0] * inputs.g.shape[1], inputs.g.shape[2]
        num_seqs, seq_len = (len(LENGTHS), 0) if options else (2, 300)
        items = (torch.Size((plan.num_segments(num_seqs, tokens, seq_len), heads, 4)), torch.int32)
        bound = (torch.Size((StandIns.num_slots(tokens, num_seqs, seq_len), heads)), torch.float32)
        kept = [items] * 2 if plan.needs_tables else [bound]
        assert saved[plan][-len(kept) :] == kept and saved[plan][: -len(kept)] == saved[False]

    def test_backward_does_not_repeat_what_was_kept(self, kernels, plan, problem, monkeypatch):
        """Where states and transitions take little beside the rest, which nothing this small does by itself."""
        monkeypatch.setattr("qla.costs.KEPT_SHARE", 1e6)
        inputs, start, options, _ = problem
        leaves = [*inputs.leaves(), start.clone().requires_grad_()]
        o, _ = qla.chunk_gated_delta_rule(*leaves[:5], initial_state=leaves[5], auto_cp=plan, **options)
        forward_states, transitions = kernels.got["fwd_fused"]["states"], kernels.got.get("prepare_states", {}).get("transitions")
        kernels.launches.clear()
        torch.autograd.grad(o.float().sum(), leaves)
        gradients = ["prepare_state_gradients", ("cp_merge", True)] if plan.max_transition_heads > 0 else []
        scans = [(name, 0, inputs.g.shape[2]) for name in ("scan_state_gradients", "scan_states")]
        tables = [] if plan.needs_tables else ["cp_plan"]
        assert kernels.launches[: len(tables) + len(gradients) + 2] == [*tables, *gradients, *scans]
        assert same(kernels.got["scan_states"][-1]["states"], forward_states)
        if gradients:
            self.check_merge(kernels, plan, True, kernels.got["prepare_state_gradients"]["states"], transitions)

    def test_whole_backward_of_a_cut_forward(self, kernels, plan, problem):
        """Nothing is kept for it; the gradients are those of an uncut call."""
        inputs, start, options, _ = problem
        grads = []
        for auto_cp in (False, replace(plan, whole_backward=True)):
            leaves = [*inputs.leaves(), start.clone().requires_grad_()]
            kernels.launches.clear()
            o, _ = qla.chunk_gated_delta_rule(*leaves[:5], initial_state=leaves[5], auto_cp=auto_cp, **options)
            assert ("cp_plan" in kernels.launches) == bool(auto_cp and auto_cp.needs_tables)
            kernels.launches.clear()
            kernels.got.pop("scan_states", None)
            grads.append(torch.autograd.grad(o.float().sum(), leaves))
            assert [name for name, *_ in kernels.launches] == ["scan_state_gradients", "scan_states", "bwd_fused"]
            assert kernels.got["scan_states"] == [{"items": None, "states": None}]
        for a, b in zip(*grads, strict=True):
            assert_bitwise_equal(a, b)

    @pytest.mark.parametrize("auto_cp", [True, *PLANS.values()])
    def test_nothing_is_launched_without_work(self, rng, kernels, auto_cp):
        inputs = make_inputs(rng, 0, dtype=torch.bfloat16)
        start = make_state(rng, inputs, 3).float().requires_grad_()
        options = {"initial_state": start, "output_final_state": True, "cu_seqlens": cu_seqlens_of([0, 0, 0])}
        o, state = qla.chunk_gated_delta_rule(*inputs.leaves(), auto_cp=auto_cp, **options)
        (o.sum() + state.sum()).backward()
        assert kernels.launches == [] and kernels.got == {} and (start.grad == 1).all()

    @pytest.mark.parametrize(("split", "block_v"), [(0, None), (1, 128), (2, 64)])
    def test_whole_sequences_with_a_split(self, kernels, problem, split, block_v):
        inputs, _, options, _ = problem
        qla.chunk_gated_delta_rule(*inputs, auto_cp=autocp.Plan(0, split, 0, 0, 0), **options)
        assert kernels.launches == ["kkt_solve", "fwd_fused"] and kernels.got["fwd_fused"]["block_v"] == block_v

    def test_low_level_entry_is_cut_too(self, kernels, plan, problem):
        inputs, start, options, _ = problem
        qla.chunk_gated_delta_rule_fwd(*inputs, initial_state=start, auto_cp=plan, **options)
        assert kernels.launches == self.forward_launches(plan)

    def test_planner_decides_unless_told(self, kernels, problem, monkeypatch):
        inputs, _, options, _ = problem
        asked = []
        monkeypatch.setattr(autocp, "plan", lambda sizes, spec: asked.append((sizes, spec)) or PLANS["inline warm-up"])
        qla.chunk_gated_delta_rule(*inputs, auto_cp=False, **options)
        qla.chunk_gated_delta_rule(*inputs, auto_cp=WHOLE, **options)
        assert asked == [] and "cp_plan" not in kernels.launches
        qla.chunk_gated_delta_rule(*inputs, **options)
        assert [spec for _, spec in asked] == [SPEC] and kernels.launches[-3:] == ["kkt_solve", "cp_plan", "fwd_fused"]

    @pytest.mark.parametrize("wrong", [None, 1, "yes", (4, 1, 16, 16, 0)])
    def test_auto_cp_is_a_bool_or_a_plan(self, rng, kernels, wrong):
        with pytest.raises(TypeError, match=r"auto_cp must be a bool or a qla.autocp.Plan, got"):
            qla.chunk_gated_delta_rule(*make_inputs(rng, 70, dtype=torch.bfloat16), auto_cp=wrong)
        assert kernels.launches == []


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_planner_gets_exact_lengths_where_the_host_has_them(rng, monkeypatch, dtype):
    asked = []
    monkeypatch.setattr(autocp, "plan", lambda sizes, spec: asked.append(sizes) or WHOLE)
    lengths, padding = (65, 0, 200), 5
    inputs = make_inputs(rng, sum(lengths) + padding, value_dim=65, dtype=torch.bfloat16)
    cu = cu_seqlens_of(lengths, dtype)
    problem = check_inputs(*inputs, None, False, cu, None)
    elsewhere = cu.to("meta")  # as one on a GPU: its values are not the host's
    for given, on_host, expected in ((elsewhere, cu, lengths), (elsewhere, None, None), (cu, None, lengths), (cu, cu, lengths)):
        autograd._plan_by.cache_clear()
        assert _segmentation(True, problem, inputs.v.device, given, on_host) is WHOLE
        assert asked.pop() == autocp.Problem(2, 4, len(lengths), sum(lengths) + padding, 0, expected)
    assert asked == []
    for value_dim, heads, counted in ((128, (2, 4), (2, 4)), (64, (2, 4), (2, 2)), (64, (4, 4), (2, 2)), (64, (3, 9), (1, 5))):
        batch = make_inputs(rng, 70, 3, *heads, value_dim=value_dim, dtype=torch.bfloat16)
        autograd._plan_by.cache_clear()
        _segmentation(True, check_inputs(*batch, None, False, None, None), batch.v.device, None, None)
        assert asked.pop() == autocp.Problem(*counted, 3, 210, 70), "two heads of 64 columns are one that two blocks share"
    for auto_cp in (False, WHOLE, PLANS["transitions"]):
        assert _segmentation(auto_cp, problem, inputs.v.device, cu, None) == (auto_cp or WHOLE)
    assert asked == []


def test_planner_is_asked_once_for_a_form(rng, kernels, monkeypatch):
    """Each form for itself, and another planner again."""
    asked = []

    def planner(sizes, spec):
        asked.append(sizes)
        return WHOLE

    monkeypatch.setattr(autocp, "plan", planner)
    short, long = (make_inputs(rng, tokens, value_dim=128, dtype=torch.bfloat16) for tokens in (70, 90))
    for inputs, options in ((short, {}), (long, {}), (short, {}), (long, {"cu_seqlens": cu_seqlens_of([40, 50])}), (short, {})):
        qla.chunk_gated_delta_rule(*inputs, **options)
    assert asked == [autocp.Problem(2, 4, 1, 70, 70), autocp.Problem(2, 4, 1, 90, 90), autocp.Problem(2, 4, 2, 90, 0, (40, 50))]
    monkeypatch.setattr(autocp, "plan", lambda sizes, spec: asked.append(sizes) or PLANS["inline warm-up"])
    qla.chunk_gated_delta_rule(*short)
    assert len(asked) == 4 and "cp_plan" in kernels.launches


class TestGradients:
    @pytest.mark.parametrize("lengths", [None, LENGTHS_WITH_GAPS], ids=["equal", "packed"])
    @pytest.mark.parametrize("outputs", ["o", "state", "both"])
    def test_right_and_in_the_inputs_dtypes(self, rng, lengths, outputs):
        inputs = make_inputs(rng, 240, batch=1 if lengths else 2, key_dim=40, value_dim=24, dtype=torch.bfloat16)
        inputs = inputs._replace(g=inputs.g.float(), beta=inputs.beta.half())
        start = make_state(rng, inputs, len(lengths) if lengths else None)
        if lengths:
            for x in inputs:
                x[:, sum(lengths) :] = math.nan
        options = {"cu_seqlens": cu_seqlens_of(lengths)} if lengths else {}
        weights = [torch.randn(inputs.v.shape, generator=rng), torch.randn(start.shape, generator=rng)]
        grads = []
        for function in (qla.chunk_gated_delta_rule, chunked_gated_delta_rule):
            leaves = [*inputs.leaves(), start.clone().requires_grad_()]
            o, state = function(*leaves[:5], initial_state=leaves[5], output_final_state=True, **options)
            loss = sum((w * x).sum() for w, x, name in zip(weights, (o, state), ("o", "state"), strict=True) if outputs in (name, "both"))
            grads.append(torch.autograd.grad(loss, leaves, materialize_grads=True, allow_unused=True))
        names = ("dq", "dk", "dv", "dg", "dbeta", "dh0")
        for name, actual, expected, x in zip(names, *grads, [*inputs, start], strict=True):
            assert actual.dtype == x.dtype and actual.shape == x.shape, name
            assert_close(actual, expected, 1e-2 if actual.dtype != torch.float32 else 1e-5, name)

    @pytest.mark.parametrize("which", range(5))
    def test_of_one_input_alone(self, rng, which):
        inputs = make_inputs(rng, 70, dtype=torch.bfloat16)
        tensors = [x.clone().requires_grad_(i == which) for i, x in enumerate(inputs)]
        o, _ = qla.chunk_gated_delta_rule(*tensors)
        o.float().square().sum().backward()
        assert [x.grad is not None for x in tensors] == [i == which for i in range(5)]

    def test_nothing_is_saved_unless_asked(self, rng):
        inputs = make_inputs(rng, 70, dtype=torch.bfloat16)
        saved = []

        def pack(x):
            saved.append(x.shape)
            return x

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
            o, state = qla.chunk_gated_delta_rule(*inputs, output_final_state=True)
            assert not o.requires_grad and not state.requires_grad and saved == []
            with torch.no_grad():
                qla.chunk_gated_delta_rule(*inputs.leaves())
            assert saved == []
            qla.chunk_gated_delta_rule(*inputs.leaves())
        assert saved != []

    def test_through_activations_scale_and_padding(self, rng):
        inputs = make_inputs(rng, 70, dtype=torch.float32)
        options = {"use_qk_l2norm_in_kernel": True, "use_beta_sigmoid_in_kernel": True, "scale": -0.7}
        leaves = inputs.leaves()
        qla.chunk_gated_delta_rule(*leaves, **options)[0].square().sum().backward()
        exact = inputs.to(torch.float64).leaves()
        q, k = (x / (x.square().sum(-1, keepdim=True) + 1e-6).sqrt() for x in exact[:2])
        chunked_gated_delta_rule(q, k, exact.v, exact.g, exact.beta.sigmoid(), scale=-0.7)[0].square().sum().backward()
        for name, x in leaves._asdict().items():
            assert_close(x.grad, getattr(exact, name).grad, 1e-4, f"d{name}")

    def test_under_activation_checkpointing(self, rng):
        inputs = make_inputs(rng, 70, dtype=torch.bfloat16)
        grads = []
        for checkpointed in (False, True):
            leaves = inputs.leaves()
            if checkpointed:
                o, _ = torch.utils.checkpoint.checkpoint(qla.chunk_gated_delta_rule, *leaves, use_reentrant=False)
            else:
                o, _ = qla.chunk_gated_delta_rule(*leaves)
            grads.append(torch.autograd.grad(o.float().square().sum(), [*leaves]))
        for actual, expected in zip(*grads, strict=True):
            assert_bitwise_equal(actual, expected)

    def test_slices_of_heads_fit_into_the_workspace(self, rng, kernels, monkeypatch):
        inputs = make_inputs(rng, 200, key_heads=3, value_heads=6, dtype=torch.bfloat16)
        state = make_state(rng, inputs).float()
        bytes_a_head = (2 * 4 * 64 * 64 + 200 * 64) * 2
        grads = []
        for limit, slices in ((2**31, [(0, 6)]), (4 * bytes_a_head, [(0, 2), (2, 4)]), (1, [(0, 2), (2, 2), (4, 2)])):
            monkeypatch.setenv("QLA_WORKSPACE_BYTES", str(limit))
            kernels.launches.clear()
            leaves = [*inputs.leaves(), state.clone().requires_grad_()]
            o, final = qla.chunk_gated_delta_rule(*leaves[:5], initial_state=leaves[5], output_final_state=True)
            grads.append(torch.autograd.grad(o.float().square().sum() + final.square().sum(), leaves))
            names = ("scan_state_gradients", "scan_states", "bwd_fused")
            assert kernels.launches[2:] == [(name, *part) for part in slices for name in names]
        for other in grads[1:]:
            for a, b in zip(grads[0], other, strict=True):
                assert_close(b, a, 1e-6)

    def test_twice_is_refused(self, rng):
        leaves = make_inputs(rng, 70, dtype=torch.bfloat16).leaves()
        (dq,) = torch.autograd.grad(qla.chunk_gated_delta_rule(*leaves)[0].float().sum(), leaves.q, create_graph=True)
        with pytest.raises(RuntimeError, match="cannot be differentiated twice"):
            dq.float().square().sum().backward()


def test_slices_are_whole_groups():
    assert list(head_slices(16, 32, 100, 10**9)) == [(0, 32)]
    assert list(head_slices(16, 32, 100, 1300)) == [(0, 10), (10, 10), (20, 12)]
    assert list(head_slices(2, 16, 100, 1)) == [(0, 8), (8, 8)]


@pytest.mark.parametrize("text", ["", "123", "2 GiB", "-1", "1e9"])
def test_workspace_limit(text, monkeypatch):
    monkeypatch.setenv("QLA_WORKSPACE_BYTES", text)
    if text in ("", "123"):
        assert workspace_limit() == (int(text) if text else 2**31 + 5 * 2**27)
    else:
        with pytest.raises(ValueError, match="QLA_WORKSPACE_BYTES must be a number of bytes, got"):
            workspace_limit()


@pytest.mark.parametrize("scale", [None, -0.7])
@pytest.mark.parametrize("packed", [False, True])
def test_low_level_backward_entry(rng, packed, scale):
    inputs = make_inputs(rng, 150, batch=1 if packed else 2, key_dim=40, dtype=torch.bfloat16)
    options = {"cu_seqlens": cu_seqlens_of([70, 0, 60], torch.int64) if packed else None, "state_v_first": True}
    state = make_state(rng, inputs, 3 if packed else 2).float().transpose(-1, -2)
    g_cum, A, o, final = qla.chunk_gated_delta_rule_fwd(*inputs, scale, state, True, **options)
    do, dht = torch.randn(o.shape, generator=rng).bfloat16(), torch.randn(final.shape, generator=rng)
    got = qla.chunk_gated_delta_rule_bwd(*inputs[:3], g_cum, inputs.beta, A, scale, state, do, dht, **options)
    leaves = [*inputs.leaves(), state.clone().requires_grad_()]
    results = qla.chunk_gated_delta_rule(*leaves[:5], scale, leaves[5], True, **options)
    for name, a, b in zip(("dq", "dk", "dv", "dg", "dbeta", "dh0"), got, torch.autograd.grad(results, leaves, (do, dht)), strict=True):
        assert a.is_contiguous() and a.shape == b.shape, name
        assert a.dtype == (torch.bfloat16 if name in ("dq", "dk", "dv") else torch.float32), name
        assert_bitwise_equal(a.to(b.dtype), b, name)


@pytest.mark.parametrize("packed", [False, True])
def test_low_level_entry(rng, packed):
    inputs = make_inputs(rng, 150, batch=1 if packed else 2, key_dim=40, dtype=torch.bfloat16)
    cu = cu_seqlens_of([70, 0, 60], torch.int64) if packed else None
    g_cum, A, o, state = qla.chunk_gated_delta_rule_fwd(*inputs, output_final_state=True, cu_seqlens=cu, state_v_first=True)
    expected_g, expected_A = chunk_gate_sum_and_inverse(inputs.k, inputs.g, inputs.beta, cu)
    assert_close(g_cum, expected_g, 1e-6)
    assert_close(A, expected_A, 4e-3)
    assert_bitwise_equal(o, qla.chunk_gated_delta_rule(*inputs, cu_seqlens=cu)[0])
    assert g_cum.shape == inputs.g.shape and A.shape == (*inputs.g.shape, 64) and A.dtype == torch.bfloat16
    assert state.shape == (3 if packed else 2, 4, 24, 40) and state.dtype == torch.float32
    assert not qla.chunk_gated_delta_rule_fwd(*inputs.leaves())[2].requires_grad


def test_cu_seqlens_of_either_width(rng):
    inputs = make_inputs(rng, 100, dtype=torch.bfloat16)
    results = [
        qla.chunk_gated_delta_rule(*inputs, output_final_state=True, cu_seqlens=cu_seqlens_of([60, 40], dtype))
        for dtype in (torch.int32, torch.int64)
    ]
    for a, b in zip(*results, strict=True):
        assert_bitwise_equal(a, b)


class TestBeside:
    """The second stream, with streams that note what they wait for."""

    @pytest.fixture
    def log(self, monkeypatch):
        log = []

        class Stream:
            def __init__(self, device):
                self.device_index, self.name = torch.device(device).index, f"side {sum(line.startswith('new') for line in log)}"
                log.append(f"new {self.name} of {self.device_index}")

            def wait_stream(self, other):
                log.append(f"{self.name} waits for {other.name}")

        class Main(Stream):
            def __init__(self, device):
                self.device_index, self.name = torch.device(device).index, "main"

        monkeypatch.setattr(autograd, "_side_streams", autograd._SideStreams())
        monkeypatch.setattr(torch.cuda, "Stream", Stream)
        monkeypatch.setattr(torch.cuda, "current_stream", Main)
        monkeypatch.setattr(torch.cuda, "stream", lambda stream: contextlib.nullcontext(log.append(f"inside {stream.name}")))
        return log

    def test_forks_and_joins(self, log):
        beside = _Beside(torch.device("cuda:0"))
        for part in range(2):
            with beside:
                log.append(f"launch {part}")
        beside.join()
        order = ["side 0 waits for main", "launch 0", "side 0 waits for main", "launch 1", "main waits for side 0"]
        assert [line for line in log if "waits" in line or "launch" in line] == order

    def test_one_for_each_thread_and_device(self, log):
        def use(devices):
            return [_Beside(torch.device(device)).side for device in devices]

        first, again, other = use(["cuda:0", "cuda:0", "cuda:1"])
        with ThreadPoolExecutor(1) as pool:
            (elsewhere,) = pool.submit(use, ["cuda:0"]).result()
        assert first is again and len({id(stream) for stream in (first, other, elsewhere)}) == 3
        assert [stream.device_index for stream in (first, other, elsewhere)] == [0, 1, 0]
