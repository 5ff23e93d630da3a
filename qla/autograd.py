"""The kernels' two passes as one differentiable step: what is launched, what is saved.

Everything here sees normalised tensors: tokens flattened to N = B * T, head sizes K and V 64 or 128 each, gates and beta float32, all
contiguous and 16-byte aligned, scale >= 0. ``qla.api`` brings user input into that form with differentiable operations, so
gradients find their way back to its shapes and dtypes without help.
"""

from __future__ import annotations

import math
import os
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from qla import autocp, costs
from qla.autocp import WHOLE, Plan
from qla.checks import RECURRENT_DTYPES
from qla.device import DeviceSpec, device_spec, on_device
from qla.reference import CHUNK

LOG2E = 1.4426950408889634
ALIGNMENT = 16  # bytes, what a TMA load needs of a base address
WORKSPACE_VARIABLE = "QLA_WORKSPACE_BYTES"
WORKSPACE_BYTES = (2 << 30) + (640 << 20)  # 32768 tokens of 64 value heads in one slice, packed ones too, which take some slots more


class Call(NamedTuple):
    """What a launch needs besides tensors.

    num_seqs: number of sequences S.
    seq_len: tokens of each sequence; 0 when cu_seqlens tells.
    scale: factor on o, finite and >= 0.
    state_v_first: states are [V, K] instead of [K, V].
    output_final_state: whether to compute the final state.
    plan: how sequences are cut into segments.
    """

    num_seqs: int
    seq_len: int
    scale: float
    state_v_first: bool
    output_final_state: bool
    plan: Plan

    def state_shape(self, k: Tensor, v: Tensor) -> tuple[int, int, int, int]:
        """[S, HV, K, V], or [S, HV, V, K] if state_v_first; k: [N, H, K], v: [N, HV, V]."""
        inner = (v.shape[2], k.shape[2]) if self.state_v_first else (k.shape[2], v.shape[2])
        return (self.num_seqs, v.shape[1], *inner)


class Cut(NamedTuple):
    """How a call's sequences were cut, for its backward pass.

    forward, reverse: [segments, HV, 4] int32, work items of either direction (``qla.kernels.cp_plan``).
    states, transitions: what segments start from, [segments, HV, V, K] fp32, and transitions, [segments, HV, 2, K, K] bf16; None
        where the plan lets no item need any, or where they are to be computed again.
    """

    forward: Tensor
    reverse: Tensor
    states: Tensor | None = None
    transitions: Tensor | None = None


class Forward(NamedTuple):
    """What the forward kernels give.

    g_cum: [N, HV] fp32, gates summed within the chunk, log2 units. A: [N, HV, 64]. o: [N, HV, V].
    final_state: [S, HV, K, V] fp32, or [S, HV, V, K], or None.
    cut: None if no sequence is cut, or where the forward pass needs no table (``Plan.needs_tables``).
    bound: None if no sequence is cut; [slots, HV] fp32, what ``work_items`` decides by.
    """

    g_cum: Tensor
    A: Tensor
    o: Tensor
    final_state: Tensor | None
    cut: Cut | None = None
    bound: Tensor | None = None


def choose_plan(
    key_heads: int,
    value_heads: int,
    value_dim: int,
    num_seqs: int,
    tokens: int,
    seq_len: int,
    lengths: tuple[int, ...] | None,
    device: torch.device,
) -> Plan:
    """AutoCP's plan; value_dim: V, 64 or 128; tokens: of all sequences; lengths: of packed sequences where the host has them.

    The planner knows heads of 128. Two value heads with V = 64 are for it one whose columns two blocks share, which is what they cost
    the recurrence; of what depends on K it knows an upper bound.
    """
    if value_dim == 64:
        value_heads = -(-value_heads // 2)
        key_heads = math.gcd(key_heads, value_heads)
    return _plan_by(autocp.plan, device_spec, key_heads, value_heads, num_seqs, tokens, seq_len, lengths, device)


@lru_cache(maxsize=4096)
def _plan_by(
    plan: Callable[[autocp.Problem, DeviceSpec], Plan],
    spec: Callable[[torch.device], DeviceSpec],
    key_heads: int,
    value_heads: int,
    num_seqs: int,
    tokens: int,
    seq_len: int,
    lengths: tuple[int, ...] | None,
    device: torch.device,
) -> Plan:
    """What ``plan`` makes for this size: a call like one before costs one look, and neither a problem nor the facts of its device."""
    if num_seqs == 0 or tokens == 0:
        return WHOLE
    return plan(autocp.Problem(key_heads, value_heads, num_seqs, tokens, seq_len, lengths), spec(device))


def launch_forward(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, initial_state: Tensor | None, cu_seqlens: Tensor | None, call: Call
) -> Forward:
    """Launches the forward kernels on the current stream of q's device.

    q, k: [N, H, K] bf16 or fp16; v: [N, HV, V], same dtype; g, beta: [N, HV] fp32; initial_state: [S, HV, K, V] fp32 (as call has it:
    [S, HV, V, K]) or None; cu_seqlens: [S + 1] int32 on q's device, or None for equal lengths.
    """
    num_seqs, seq_len, scale, state_v_first, output_final_state, plan = call
    if len(v) == 0 or num_seqs == 0:
        return _result_without_tokens(k, v, g, initial_state, call)

    from qla.kernels import launch  # the module: names from it take the host longer

    device = v.device
    num_sms = device_spec(device).sm_count
    o = torch.empty_like(v)
    final_state = g.new_empty(call.state_shape(k, v)) if output_final_state else None
    is_cut = plan.chunks_per_segment > 0
    cut = items = order = starts = None
    own: dict[str, Any] = {}
    with on_device(device):
        g_cum, A, bound = launch.kkt_solve(k, g, beta, o, cu_seqlens, num_seqs, seq_len, num_sms, with_bound=is_cut)
        if is_cut and not plan.needs_tables:
            own = {"bound": bound, "num_segments": plan.num_segments(num_seqs, len(v), seq_len), "segment_chunks": plan.chunks_per_segment}
            own |= {"max_warmup": plan.max_warmup, "threshold": plan.threshold * LOG2E}
        elif is_cut:
            items, reverse, order = work_items(bound, v, cu_seqlens, call)
            starts, transitions = _segment_states(k, v, g_cum, beta, A, initial_state, items, cu_seqlens, call, num_sms)
            cut = Cut(items, reverse, starts, transitions)
        recurrence = (
            q, k, v, g_cum, beta, A, o, initial_state, final_state, scale, cu_seqlens, num_seqs, seq_len, state_v_first, num_sms
        )  # fmt: skip
        block_v = max(64, v.shape[2] // plan.split) if plan.split else None
        launch.fwd_fused(
            *recurrence, items=items, order=order, segment_states=starts, block_v=block_v, blocks_an_item=plan.blocks_an_item, **own
        )
        if plan.may_stay_whole:
            launch.fwd_fused(*recurrence, order=order, block_v=max(64, v.shape[2] // plan.whole_split) if plan.whole_split else None)
    return Forward(g_cum, A, o, final_state, cut, bound if is_cut else None)


def work_items(bound: Tensor, v: Tensor, cu_seqlens: Tensor | None, call: Call) -> tuple[Tensor, Tensor, Tensor]:
    """What each segment and head starts from, forward and reverse, decided on the device, and the order of the forward pass's blocks.

    bound: as ``Forward`` has it. v: [N, HV, V], of which only the shape matters.
    """
    from qla.kernels.launch import cp_plan

    plan, tokens = call.plan, len(v)
    num_segments = plan.num_segments(call.num_seqs, tokens, call.seq_len)
    items: tuple[Tensor, Tensor, Tensor] = cp_plan(
        bound, cu_seqlens, tokens, call.num_seqs, call.seq_len, num_segments, plan.chunks_per_segment, plan.split == 2,
        plan.inline_warmup, plan.max_warmup, plan.max_transition_heads, plan.max_serial_heads, plan.threshold * LOG2E,
        device_spec(bound.device).sm_count, v.shape[2],
    )  # fmt: skip
    return items


def _segment_states(
    k: Tensor,
    v: Tensor,
    g_cum: Tensor,
    beta: Tensor,
    A: Tensor,
    initial_state: Tensor | None,
    items: Tensor,
    cu_seqlens: Tensor | None,
    call: Call,
    num_sms: int,
) -> tuple[Tensor | None, Tensor | None]:
    """States that segments start from, [segments, HV, V, K] fp32, and transitions, [segments, HV, 2, K, K] bf16.

    Written where items need them; None where the plan lets no item need any.
    """
    from qla.kernels.launch import cp_merge, prepare_states

    states, transitions = _empty_segments(k, v, items, call.plan)
    place = (cu_seqlens, call.num_seqs, call.seq_len)
    if states is not None:
        prepare_states(k, v, g_cum, beta, A, initial_state, *place, call.state_v_first, num_sms, items, states, transitions)
    if transitions is not None:
        cp_merge(states, transitions, items, cu_seqlens, len(v), *place[1:], call.plan.chunks_per_segment, reverse=False)
    return states, transitions


def _empty_segments(k: Tensor, v: Tensor, items: Tensor, plan: Plan) -> tuple[Tensor | None, Tensor | None]:
    """Room for what ``_segment_states`` returns."""
    if not plan.needs_states:
        return None, None
    pairs, key_dim, value_dim = items.shape[:2], k.shape[2], v.shape[2]
    states = v.new_empty(*pairs, value_dim, key_dim, dtype=torch.float32)
    return states, v.new_empty(*pairs, 2, key_dim, key_dim, dtype=torch.bfloat16) if plan.max_transition_heads > 0 else None


def _result_without_tokens(k: Tensor, v: Tensor, g: Tensor, initial_state: Tensor | None, call: Call) -> Forward:
    """No sequence, or no token in any: nothing to launch; the final state is the initial one."""
    final_state = None
    if call.output_final_state:
        final_state = v.new_zeros(call.state_shape(k, v), dtype=torch.float32) if initial_state is None else initial_state.clone()
    return Forward(torch.zeros_like(g), v.new_zeros(*v.shape[:2], CHUNK), torch.zeros_like(v), final_state)


def gated_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    initial_state: Tensor | None,
    cu_seqlens: Tensor | None,
    call: Call,
) -> tuple[Tensor, Tensor | None]:
    """``launch_forward`` with gradients; saves tensors only when some input asks for a gradient. Returns (o, final_state)."""
    if torch.is_grad_enabled() and (
        q.requires_grad
        or k.requires_grad
        or v.requires_grad
        or g.requires_grad
        or beta.requires_grad
        or (initial_state is not None and initial_state.requires_grad)
    ):
        apply: Callable[..., tuple[Tensor, Tensor | None]] = _GatedDeltaRule.apply
        return apply(q, k, v, g, beta, initial_state, cu_seqlens, call)
    result = launch_forward(q, k, v, g, beta, initial_state, cu_seqlens, call)
    return result.o, result.final_state


class _GatedDeltaRule(torch.autograd.Function):
    """Both passes by the kernels.

    Saved, in this order: q, k, v, g_cum, beta, A, initial_state, cu_seqlens, items. A token takes 136 + 2 V bytes a value head (v 2 V,
    A 128, g_cum and beta 4 each) and 4 K a key head (q, k); of these, A and g_cum are not the caller's own. Where sequences are cut, a
    segment takes 32 bytes a value head: both passes go by the same items, unless the plan leaves the backward pass whole. Where the
    forward pass needs no items, a chunk takes 4 bytes a value head instead, its bound, of which the backward pass makes them. What segments
    start from, 4 K V bytes of states and as many as 4 K^2 of transitions for each segment and value head, is kept as well while it is at
    most a quarter of the rest. All other states are computed again.
    """

    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        g: Tensor,
        beta: Tensor,
        initial_state: Tensor | None,
        cu_seqlens: Tensor | None,
        call: Call,
    ) -> tuple[Tensor, Tensor | None]:
        result = launch_forward(q, k, v, g, beta, initial_state, cu_seqlens, call)
        saved = (q, k, v, result.g_cum, beta, result.A, initial_state, cu_seqlens)
        cut: Sequence[Tensor | None] = ()
        if result.bound is not None and not call.plan.whole_backward:
            cut = _worth_keeping(result.cut, saved) if result.cut else (result.bound,)
        ctx.save_for_backward(*saved, *cut)
        ctx.call = call
        ctx.set_materialize_grads(False)
        return result.o, result.final_state

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor | None) -> tuple[Tensor | None, ...]:
        q, k, v, g_cum, beta, A, initial_state, cu_seqlens, *cut = ctx.saved_tensors
        do, dht = grad_outputs
        needed = ctx.needs_input_grad[:6]
        with torch.no_grad():
            saved = (q, k, v, g_cum, beta, A, initial_state)
            if len(cut) == 1:  # the forward pass needed no table
                cut = work_items(cut[0], v, cu_seqlens, ctx.call)[:2]
            grads = launch_backward(*saved, do, dht, cu_seqlens, ctx.call, needed[5], Cut(*cut) if cut else None)
        return *only_once(grads, needed, q), None, None


def _worth_keeping(cut: Cut, saved: Sequence[Tensor | None]) -> Cut:
    """``cut`` with the states and transitions, if they take at most costs.KEPT_SHARE of what the other tensors take, else without."""
    taken, others = (sum(x.nbytes for x in tensors if x is not None) for tensors in (cut[2:], saved))
    return cut if taken <= costs.KEPT_SHARE * others else cut._replace(states=None, transitions=None)


def only_once(grads: Iterable[Tensor | None], needed: Sequence[bool], like: Tensor) -> list[Tensor | None]:
    """What a backward pass returns: the gradients that are needed, which under create_graph=True refuse to be differentiated."""
    kept = [grad if need else None for grad, need in zip(grads, needed, strict=True)]
    if torch.is_grad_enabled():
        anchor = _leaf(like)
        once: Callable[..., Tensor] = _OnceDifferentiable.apply
        kept = [None if grad is None else once(grad, anchor) for grad in kept]
    return kept


def _leaf(x: Tensor) -> Tensor:
    """A leaf that asks for a gradient, so that what is computed with it has a place in the graph."""
    return x.new_zeros((), requires_grad=True)


class _OnceDifferentiable(torch.autograd.Function):
    """Identity on a gradient, which refuses to be differentiated: without it second derivatives would silently miss a part."""

    @staticmethod
    def forward(ctx: Any, grad: Tensor, anchor: Tensor) -> Tensor:
        return grad.view_as(grad)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor | None) -> tuple[Tensor | None, ...]:
        raise RuntimeError(
            "chunk_gated_delta_rule cannot be differentiated twice through the kernels: they have no second derivative. "
            "On a CPU or in float32 it runs through PyTorch, which has."
        )


def workspace_limit() -> int:
    """Bytes that what the scans leave for all chunks may take in the backward pass: QLA_WORKSPACE_BYTES if set, else 2.625 GiB."""
    text = os.environ.get(WORKSPACE_VARIABLE, "")
    if not text:
        return WORKSPACE_BYTES
    if not text.isascii() or not text.isdigit():
        raise ValueError(f"{WORKSPACE_VARIABLE} must be a number of bytes, got {text!r}")
    return int(text)


def head_slices(key_heads: int, value_heads: int, bytes_a_head: int, limit: int) -> Iterator[tuple[int, int]]:
    """(first value head, number) of slices of whole groups, as equal as can be, that fit into ``limit`` bytes, or of one group."""
    ratio = value_heads // key_heads
    at_once = max(1, min(key_heads, limit // max(bytes_a_head * ratio, 1)))
    count = -(-key_heads // at_once)
    for i in range(count):
        first, end = i * key_heads // count, (i + 1) * key_heads // count
        yield first * ratio, (end - first) * ratio


def launch_backward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g_cum: Tensor,
    beta: Tensor,
    A: Tensor,
    initial_state: Tensor | None,
    do: Tensor | None,
    dht: Tensor | None,
    cu_seqlens: Tensor | None,
    call: Call,
    initial_state_grad: bool,
    cut: Cut | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor | None]:
    """Launches the backward kernels on the current stream of q's device.

    Takes what ``launch_forward`` took and gave (cut too), and do [N, HV, V], dht as the states: the gradients of o and of the final
    state, in any dtype, None for zero. Two scans, side by side, write the states with Vd and their gradients with dW for all chunks of a
    slice of heads, as many as fit into ``workspace_limit()``; then one kernel computes the rest.

    Returns dq, dk, dv in q's dtype, dg (of the natural-log gates), dbeta fp32, and dh0 fp32, None unless initial_state_grad.
    """
    tokens, value_heads, value_dim = v.shape
    do = torch.zeros_like(v) if do is None else aligned(do.to(v.dtype))
    dht = None if dht is None else aligned(dht.float())
    if tokens == 0 or call.num_seqs == 0:
        dh0 = None if initial_state is None else torch.zeros_like(initial_state) if dht is None else dht.clone()
        return *(torch.zeros_like(x) for x in (q, k, v, g_cum, beta)), dh0 if initial_state_grad else None  # type: ignore[return-value]

    from qla.kernels.launch import (
        bwd_fused,
        cp_merge,
        num_slots,
        prepare_state_gradients,
        prepare_states,
        scan_state_gradients,
        scan_states,
    )

    num_sms = device_spec(q.device).sm_count
    place = (cu_seqlens, call.num_seqs, call.seq_len)
    dq, dk, dv, dg, dbeta = (torch.empty_like(x) for x in (q, k, v, g_cum, beta))
    dh0 = q.new_empty(call.state_shape(k, v), dtype=torch.float32) if initial_state_grad else None
    slots, inner = num_slots(tokens, call.num_seqs, call.seq_len), (value_dim, k.shape[2])
    elements = 2 * slots * math.prod(inner) + tokens * value_dim  # of a head's states, their gradients and Vd
    slices = list(head_slices(k.shape[1], value_heads, elements * q.element_size(), workspace_limit()))
    at_once = max(heads for _, heads in slices)
    workspace, values = q.new_empty(2, slots * at_once, *inner), q.new_empty(tokens * at_once, value_dim)
    forward = reverse = starts = start_grads = transitions = None
    segments = (cu_seqlens, tokens, *place[1:], call.plan.chunks_per_segment)
    made_again = False
    with on_device(q.device):
        beside = _Beside(q.device)
        if cut is not None:
            forward, reverse, starts, transitions = cut
            made_again = starts is None
            if made_again:
                starts, transitions = _empty_segments(k, v, forward, call.plan)
            if transitions is not None:
                start_grads = torch.empty_like(starts)  # type: ignore[arg-type]
                with beside:
                    prepare_state_gradients(
                        q, k, do, g_cum, beta, A, dht, call.scale, *place, call.state_v_first, num_sms, reverse, start_grads
                    )  # fmt: skip
            if made_again and starts is not None:
                prepare_states(
                    k, v, g_cum, beta, A, initial_state, *place, call.state_v_first, num_sms, forward, starts, transitions
                )  # fmt: skip
        for head0, heads in slices:
            states, state_grads = (x[: slots * heads].view(slots, heads, *inner) for x in workspace)
            vd = values[: tokens * heads].view(tokens, heads, value_dim)
            with beside:
                if start_grads is not None and head0 == 0:
                    cp_merge(start_grads, transitions, forward, *segments, reverse=True)
                scan_state_gradients(
                    q, k, do, g_cum, beta, A, state_grads, dv, head0, dht, dh0, call.scale, *place, call.state_v_first, num_sms,
                    items=reverse, segment_states=start_grads,
                )  # fmt: skip
            if made_again and transitions is not None and head0 == 0:
                cp_merge(starts, transitions, forward, *segments, reverse=False)
            scan_states(
                k, v, g_cum, beta, A, states, vd, head0, initial_state, *place, call.state_v_first, num_sms,
                items=forward, segment_states=starts,
            )  # fmt: skip
            beside.join()
            # dW lies where dV is to be
            bwd_fused(q, k, v, g_cum, beta, vd, do, dv, states, state_grads, dq, dk, dv, dg, dbeta, head0, call.scale, *place, num_sms)
    return dq, dk, dv, dg, dbeta, dh0


class _SideStreams(threading.local):
    """of_device: a stream for each device that the thread has used."""

    def __init__(self) -> None:
        self.of_device: dict[int, torch.cuda.Stream] = {}


_side_streams = _SideStreams()


class _Beside:
    """A second stream: what is launched inside ``with`` comes after all that was launched before, and runs beside what is launched after.

    At ``join`` the current stream waits for it. Tensors that both streams use need no other care if they live until then. It is the
    thread's own, one for each device: each stream keeps some memory of PyTorch's for itself, and what one thread captures in a CUDA graph
    is nobody else's.
    """

    def __init__(self, device: torch.device) -> None:
        self.main = torch.cuda.current_stream(device)
        index = self.main.device_index
        if index not in _side_streams.of_device:
            _side_streams.of_device[index] = torch.cuda.Stream(device)
        self.side = _side_streams.of_device[index]
        self.inside = torch.cuda.stream(self.side)

    def __enter__(self) -> None:
        self.side.wait_stream(self.main)
        self.inside.__enter__()

    def __exit__(self, *exception: object) -> None:
        self.inside.__exit__(*exception)

    def join(self) -> None:
        self.main.wait_stream(self.side)


@dataclass(frozen=True)
class Recurrence:
    """What ``launch_recurrent`` needs besides tensors; as in ``qla.fused_recurrent_gated_delta_rule``."""

    scale: float
    output_final_state: bool
    use_qk_l2norm: bool
    use_beta_sigmoid: bool
    allow_neg_eigval: bool
    state_v_first: bool


RecurrentInputs = tuple[
    Tensor, Tensor, Tensor, Tensor | None, Tensor | None, Tensor | None, Tensor | None, Tensor | None, Tensor | None, Tensor | None,
    Tensor | None,
]  # fmt: skip


def launch_recurrent(inputs: RecurrentInputs, call: Recurrence) -> tuple[Tensor, Tensor | None]:
    """Launches the recurrent kernel on the current stream of q's device; records no gradients.

    inputs: q, k, v, g, beta, gk, gv, A_log, dt_bias, initial_state, cu_seqlens as the user gave them, checked; q, k and v in bf16, fp16 or
        fp32 with head sizes up to 128. A_log only where the gate is to be activated.

    Returns (o [B, T, HV, V], final state or None). Converted or copied is only what the kernel cannot read: float64, a state that is not
    float32, tokens at odd places, head sizes that are no multiple of four.
    """
    q, k, v, g, beta, gk, gv, A_log, dt_bias, initial_state, cu_seqlens = inputs
    batch, tokens, heads, value_dim = v.shape
    key_dim = k.shape[-1]
    num_seqs = batch if cu_seqlens is None else cu_seqlens.numel() - 1
    inner = (value_dim, key_dim) if call.state_v_first else (key_dim, value_dim)
    with torch.no_grad(), on_device(q.device):
        if initial_state is not None:
            initial_state = initial_state.float()
        if batch * tokens == 0 or num_seqs == 0:
            final_state = None
            if call.output_final_state:
                final_state = v.new_zeros(num_seqs, heads, *inner, dtype=torch.float32)
                final_state = final_state if initial_state is None else final_state.copy_(initial_state)
            return v.new_zeros(v.shape), final_state

        from qla.kernels.launch import recurrent

        g, beta, gk, gv, A_log, dt_bias = (readable(x) for x in (g, beta, gk, gv, A_log, dt_bias))
        if key_dim % 4 or value_dim % 4:  # zeros add nothing to sums and stay zero in the state
            q, k, v, gv = (None if x is None else _to_quads(x, 1) for x in (q, k, v, gv))  # type: ignore[assignment]
            gk = None if gk is None else _to_quads(gk, 1)
            beta = _to_quads(beta, 1) if beta is not None and beta.dim() == 4 else beta
            initial_state = None if initial_state is None else _to_quads(initial_state, 2)
        initial_state = None if initial_state is None else aligned(initial_state)
        if cu_seqlens is not None and cu_seqlens.device != q.device:
            cu_seqlens = cu_seqlens.to(q.device, non_blocking=True)
        o = torch.empty(v.shape, dtype=v.dtype, device=v.device)
        final_state = None
        if call.output_final_state:
            widths = (v.shape[-1], k.shape[-1]) if call.state_v_first else (k.shape[-1], v.shape[-1])
            final_state = torch.empty((num_seqs, heads, *widths), dtype=torch.float32, device=v.device)
        recurrent(
            q, k, v, g, beta, gk, gv, A_log, dt_bias, o, initial_state, final_state, cu_seqlens, num_seqs, tokens, call.scale,
            call.state_v_first, call.use_qk_l2norm, call.use_beta_sigmoid, call.allow_neg_eigval,
        )  # fmt: skip
        if o.shape[-1] != value_dim:
            o = o[..., :value_dim].contiguous()
        if final_state is not None and final_state.shape[-2:] != inner:
            final_state = final_state[..., : inner[0], : inner[1]].contiguous()
        return o, final_state


def _to_quads(x: Tensor, dims: int) -> Tensor:
    """Zeros up to multiples of four in the last ``dims`` dimensions."""
    missing = [-size % 4 for size in reversed(x.shape[-dims:])]
    return torch.nn.functional.pad(x, [n for m in missing for n in (0, m)])


def recurrent_gated_delta_rule(inputs: RecurrentInputs, call: Recurrence) -> tuple[Tensor, Tensor | None]:
    """``launch_recurrent``; where an input asks for a gradient, the results say, if one is taken, that there is none."""
    o, final_state = launch_recurrent(inputs, call)
    if torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in inputs):
        apply: Callable[..., tuple[Tensor, Tensor | None]] = _NotDifferentiable.apply
        return apply(o, final_state, *inputs)
    return o, final_state


NO_GRADIENT = (
    "fused_recurrent_gated_delta_rule has no gradient through its kernel: use chunk_gated_delta_rule, or call it under torch.no_grad()."
)


class _NotDifferentiable(torch.autograd.Function):
    """Identity on the results, which keeps a caller from taking the missing gradients for zero."""

    @staticmethod
    def forward(ctx: Any, o: Tensor, final_state: Tensor | None, *inputs: Tensor | None) -> tuple[Tensor, Tensor | None]:
        return o.view_as(o), None if final_state is None else final_state.view_as(final_state)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor | None) -> tuple[Tensor | None, ...]:
        raise NotImplementedError(NO_GRADIENT)


def readable(x: Tensor | None) -> Tensor | None:
    """In a dtype that the kernels without tensor cores read; differentiable."""
    return x if x is None or x.dtype in RECURRENT_DTYPES else x.float()


def aligned(x: Tensor) -> Tensor:
    """Contiguous and 16-byte aligned; a copy only where needed. While torch.compile traces, there are no addresses: ``qla.ops`` looks."""
    x = x.contiguous()
    if torch.compiler.is_compiling():
        return x
    return x.clone() if x.data_ptr() % ALIGNMENT else x
