"""Our kernels one by one: their time, and the fused kernel's time a chunk and block."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from bench.cases import Case
from bench.shapes import Shape
from qla.autocp import FAST, WHOLE, Gates, Plan, Problem
from qla.costs import CHUNK, keeps_segment_states, launches

Calls = dict[str, Callable[[], object]]
# What a prediction assumes of the gates of a row: nothing warms up a slow head, and of mixed ones every fourth is slow.
ASSUMED = {"fast": FAST, "slow": Gates(slow=1.0), "mixed": Gates(slow=0.25)}
# Microseconds a chunk and block that the prototype of the fused kernel reached on an H200, by columns of V a block owns.
PROTOTYPE_US = {128: 2.0, 64: 1.3}


def serial_chunks(lengths: Sequence[int], blocks_per_sequence: int, num_sms: int) -> int:
    """Chunks that the busiest SM works through: blocks start in the order of the sequences, each on the SM that is free first."""
    free_at = [0] * num_sms
    for length in lengths:
        for _ in range(blocks_per_sequence):
            heapq.heappush(free_at, heapq.heappop(free_at) + -(-length // CHUNK))
    return max(free_at)


def block_columns(items: int, num_sms: int) -> int:
    """Columns of V a block of the fused kernel owns, as its launcher chooses."""
    from qla.kernels.launch import choose_block_v

    return int(choose_block_v(items, num_sms))


def problem_of(shape: Shape) -> Problem:
    """The row's cases as the planner sees them: lengths known."""
    lengths = shape.sequence_lengths
    packed = len(lengths) > 1
    return Problem(shape.hk, shape.hv, len(lengths), shape.tokens, 0 if packed else shape.tokens, lengths if packed else None)


@dataclass(frozen=True)
class _Inputs:
    """A case as the launchers take it; `place` is (cu_seqlens, num_seqs, seq_len)."""

    q: Tensor
    k: Tensor
    v: Tensor
    g: Tensor
    beta: Tensor
    place: tuple[Tensor | None, int, int]
    num_sms: int
    plan: Plan

    @property
    def is_cut(self) -> bool:
        return self.plan.chunks_per_segment > 0


def _inputs(case: Case, plan: Plan) -> _Inputs:
    from qla.device import device_spec

    tensors = (x[0].contiguous() for x in (case.q, case.k, case.v, case.g, case.beta))
    cu_seqlens = None if case.cu_seqlens is None else case.cu_seqlens.to(torch.int32)
    place = (cu_seqlens, len(case.shape.sequence_lengths), case.shape.tokens if cu_seqlens is None else 0)
    return _Inputs(*tensors, place, device_spec(case.q.device).sm_count, plan)


@dataclass
class _Segments:
    """What the kernels between kkt_solve and the recurrence make, and their calls in the order of their launch.

    forward, reverse, order: what cp_plan gives; these, states and transitions are None where the plan needs none.
    """

    calls: Calls = field(default_factory=dict)
    forward: Tensor | None = None
    reverse: Tensor | None = None
    order: Tensor | None = None
    states: Tensor | None = None
    transitions: Tensor | None = None


def _segments(x: _Inputs, g_cum: Tensor, A: Tensor, bound: Tensor) -> _Segments:
    """Runs them once; cp_merge works in place, so that its values, but not its time, change from call to call."""
    made, plan, tokens = _Segments(), x.plan, len(x.v)
    if not x.is_cut:
        return made
    from qla.autograd import LOG2E
    from qla.kernels.launch import cp_plan

    cu_seqlens, num_seqs, seq_len = x.place
    num_segments = plan.num_segments(num_seqs, tokens, seq_len)

    def find_items() -> tuple[Tensor, Tensor, Tensor]:
        return cp_plan(
            bound, cu_seqlens, tokens, num_seqs, seq_len, num_segments, plan.chunks_per_segment, plan.split == 2,
            plan.inline_warmup, plan.max_warmup, plan.max_transition_heads, plan.max_serial_heads, plan.threshold * LOG2E, x.num_sms,
            x.v.shape[2],
        )  # fmt: skip

    made.calls = {"cp_plan": find_items}
    made.forward, made.reverse, made.order = find_items()
    if not plan.needs_states:
        return made
    from qla.kernels.launch import cp_merge, prepare_states

    items = made.forward
    states = made.states = x.v.new_empty(*items.shape[:2], 128, 128, dtype=torch.float32)
    if plan.max_transition_heads > 0:
        made.transitions = x.v.new_empty(*items.shape[:2], 2, 128, 128, dtype=torch.bfloat16)
    transitions = made.transitions

    def prepare() -> None:
        prepare_states(x.k, x.v, g_cum, x.beta, A, None, *x.place, False, x.num_sms, items, states, transitions)

    def merge() -> None:
        cp_merge(states, transitions, items, cu_seqlens, tokens, num_seqs, seq_len, plan.chunks_per_segment, reverse=False)

    made.calls["cp_prep"] = prepare
    prepare()
    if transitions is not None:
        made.calls["cp_merge"] = merge
        merge()
    return made


def kernel_calls(case: Case, plan: Plan = WHOLE) -> Calls:
    """Each forward kernel alone on the case, in the order of their launch, with what the kernels before it have made."""
    from qla.autograd import LOG2E
    from qla.kernels.launch import fwd_fused, kkt_solve

    x = _inputs(case, plan)
    o = torch.empty_like(x.v)
    final_state = torch.empty(x.place[1], case.shape.hv, x.q.shape[-1], x.v.shape[-1], dtype=torch.float32, device=x.q.device)

    def solve() -> tuple[Tensor, Tensor, Tensor]:
        return kkt_solve(x.k, x.g, x.beta, o, *x.place, x.num_sms, with_bound=x.is_cut)

    g_cum, A, bound = solve()
    made = _segments(x, g_cum, A, bound) if plan.needs_tables else _Segments()
    recurrence = (x.q, x.k, x.v, g_cum, x.beta, A, o, None, final_state, case.scale, *x.place, False, x.num_sms)
    own: dict[str, Any] = {}
    if x.is_cut and not plan.needs_tables:
        own = {"bound": bound, "num_segments": plan.num_segments(*x.place[1:2], len(x.v), x.place[2]), "max_warmup": plan.max_warmup}
        own |= {"segment_chunks": plan.chunks_per_segment, "threshold": plan.threshold * LOG2E}

    def fused() -> None:
        fwd_fused(
            *recurrence, items=made.forward, order=made.order, segment_states=made.states,
            block_v=128 // plan.split if plan.split else None, blocks_an_item=plan.blocks_an_item, **own,
        )  # fmt: skip

    def whole() -> None:
        fwd_fused(*recurrence, order=made.order, block_v=128 // plan.whole_split if plan.whole_split else None)

    calls: Calls = {"kkt_solve": solve, **made.calls, "fwd_fused": fused}
    if plan.may_stay_whole and made.order is not None:
        busy, spare = (whole, fused) if bool(made.order[-1]) else (fused, whole)
        calls |= {"fwd_fused": busy, "fwd_spare": spare}
    return calls


def backward_kernel_calls(case: Case, plan: Plan = WHOLE) -> Calls:
    """Each kernel of a backward pass alone on the case, in the order of launch, all heads in one slice, no gradient of the final state."""
    from qla.kernels.launch import bwd_fused, cp_merge, kkt_solve, num_slots, prepare_state_gradients, scan_state_gradients, scan_states

    plan = plan.of_backward
    x = _inputs(case, plan)
    do = case.do[0].contiguous()
    g_cum, A, bound = kkt_solve(x.k, x.g, x.beta, torch.empty_like(x.v), *x.place, x.num_sms, with_bound=x.is_cut)
    made = _segments(x, g_cum, A, bound)
    state_shape = (num_slots(len(x.q), *x.place[1:]), case.shape.hv, 128, 128)
    states, state_grads = torch.empty(2, *state_shape, dtype=x.q.dtype, device=x.q.device)
    gradients = [torch.empty_like(tensor) for tensor in (x.q, x.k, x.v, g_cum, x.beta)]
    vd, dw = torch.empty(2, *x.v.shape, dtype=x.v.dtype, device=x.v.device)
    start_grads = None if made.transitions is None else torch.empty_like(made.states)
    gates = (g_cum, x.beta, A)

    def prepare_gradients() -> None:
        prepare_state_gradients(x.q, x.k, do, *gates, None, case.scale, *x.place, False, x.num_sms, made.reverse, start_grads)

    def merge_gradients() -> None:
        cp_merge(start_grads, made.transitions, made.forward, x.place[0], len(x.v), *x.place[1:], plan.chunks_per_segment, reverse=True)

    def scan() -> None:
        scan_states(x.k, x.v, *gates, states, vd, 0, None, *x.place, False, x.num_sms, items=made.forward, segment_states=made.states)

    def reverse_scan() -> None:
        scan_state_gradients(
            x.q, x.k, do, *gates, state_grads, dw, 0, None, None, case.scale, *x.place, False, x.num_sms,
            items=made.reverse, segment_states=start_grads,
        )  # fmt: skip

    def fused() -> None:
        bwd_fused(x.q, x.k, x.v, g_cum, x.beta, vd, do, dw, states, state_grads, *gradients, 0, case.scale, *x.place, x.num_sms)

    own: Calls = {"scan_states": scan, "scan_state_gradients": reverse_scan}
    if start_grads is not None:
        own = {"cp_prep_gradients": prepare_gradients, "cp_merge_gradients": merge_gradients, **own}
    for call in own.values():
        call()
    every = {**made.calls, **own, "bwd_fused": fused}
    return {name: every[name] for name in launches(plan, True, keeps_segment_states(problem_of(case.shape), plan))}


def us_per_chunk(case: Case, fused_ms: float, num_sms: int) -> tuple[int, float]:
    """(columns of V a block owns, microseconds a chunk takes on the busiest SM)."""
    lengths, hv = case.shape.sequence_lengths, case.shape.hv
    columns = block_columns(len(lengths) * hv, num_sms)
    chunks = serial_chunks(lengths, hv * (128 // columns), num_sms)
    return columns, fused_ms * 1e3 / chunks
