"""The kernels as operators that torch.compile takes as they are: ``torch.ops.qla.chunk_forward``, ``chunk_backward`` and ``recurrent``.

Outside torch.compile the same kernels run through ``qla.autograd``, whose Python costs less for each call. Tensors are normalised as
there. What the host decides, how sequences are cut, is decided when an operator runs, with the sizes of that call: a compiled
function with dynamic shapes neither recompiles nor is bound to one plan.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from qla.autocp import WHOLE, Plan
from qla.autograd import (
    NO_GRADIENT,
    Call,
    Cut,
    Recurrence,
    RecurrentInputs,
    aligned,
    choose_plan,
    launch_backward,
    launch_forward,
    launch_recurrent,
    work_items,
)
from qla.reference import CHUNK


def gated_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    initial_state: Tensor | None,
    cu_seqlens: Tensor | None,
    call: Call,
    plan: Plan | None,
) -> tuple[Tensor, Tensor | None]:
    """As ``qla.autograd.gated_delta_rule``, through the operators; plan in place of the call's, None for AutoCP's, made when they run."""
    numbers = []
    if plan is not None:
        numbers = [plan.chunks_per_segment, plan.split, plan.inline_warmup, plan.max_warmup, plan.max_transition_heads]
        numbers += [int(plan.whole_backward), plan.max_serial_heads, plan.whole_split]
    sizes = (call.num_seqs, call.seq_len, call.scale, call.state_v_first, numbers, (plan or WHOLE).threshold)
    o, final_state, *_ = chunk_forward(q, k, v, g, beta, initial_state, cu_seqlens, *sizes, call.output_final_state)
    return o, final_state if call.output_final_state else None


def _num_slots(tokens: int, num_seqs: int, seq_len: int) -> int:
    from qla.kernels.launch import num_slots

    return num_slots(tokens, num_seqs, seq_len)  # type: ignore[no-any-return]


def _state_shape(k: Tensor, v: Tensor, num_seqs: int, state_v_first: bool) -> tuple[int, int, int, int]:
    return Call(num_seqs, 0, 1.0, state_v_first, True, WHOLE).state_shape(k, v)


def _call(
    k: Tensor,
    v: Tensor,
    num_seqs: int,
    seq_len: int,
    scale: float,
    state_v_first: bool,
    plan: Sequence[int],
    threshold: float,
    output_final_state: bool = False,
) -> Call:
    if plan:
        length, split, inline_warmup, max_warmup, max_transition_heads, whole_backward, max_serial_heads, whole_split = plan
        rule = (length, split, inline_warmup, max_warmup, max_transition_heads, threshold, bool(whole_backward))
        fixed = Plan(*rule, max_serial_heads, whole_split)
    else:
        fixed = choose_plan(k.shape[1], v.shape[1], v.shape[2], num_seqs, len(v), seq_len, None, v.device)
    return Call(num_seqs, seq_len, scale, state_v_first, output_final_state, fixed)


@torch.library.custom_op("qla::chunk_forward", mutates_args=())
def chunk_forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    initial_state: Tensor | None,
    cu_seqlens: Tensor | None,
    num_seqs: int,
    seq_len: int,
    scale: float,
    state_v_first: bool,
    plan: Sequence[int],
    threshold: float,
    output_final_state: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """The forward pass.

    The first seven as ``launch_forward`` takes them, at any address; num_seqs to state_v_first as in ``Call``; plan: the integers of a
    Plan, or none for AutoCP's own; threshold: that of the plan.

    Returns o [N, HV, V], final_state as initial_state, fp32 (no element unless output_final_state), g_cum [N, HV] fp32, A [N, HV, 64]
    and bound [slots, HV] fp32, zeros unless sequences are cut.
    """
    q, k, v, g, beta = (aligned(x) for x in (q, k, v, g, beta))
    initial_state = None if initial_state is None else aligned(initial_state)
    call = _call(k, v, num_seqs, seq_len, scale, state_v_first, plan, threshold, output_final_state)
    result = launch_forward(q, k, v, g, beta, initial_state, cu_seqlens, call)
    final_state, bound = result.final_state, result.bound
    if final_state is None:
        final_state = torch.empty(0, dtype=torch.float32, device=v.device)
    if bound is None:
        bound = torch.zeros(_num_slots(len(v), num_seqs, seq_len), v.shape[1], dtype=torch.float32, device=v.device)
    return result.o, final_state, result.g_cum, result.A, bound


@chunk_forward.register_fake
def _(q, k, v, g, beta, initial_state, cu_seqlens, num_seqs, seq_len, scale, state_v_first, plan, threshold, output_final_state):  # type: ignore[no-untyped-def]
    tokens, heads, _ = v.shape
    final_state = v.new_empty(_state_shape(k, v, num_seqs, state_v_first) if output_final_state else (0,), dtype=torch.float32)
    bound = v.new_empty((_num_slots(tokens, num_seqs, seq_len), heads), dtype=torch.float32)
    return torch.empty_like(v), final_state, torch.empty_like(g), v.new_empty((tokens, heads, CHUNK)), bound


@torch.library.custom_op("qla::chunk_backward", mutates_args=())
def chunk_backward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g_cum: Tensor,
    beta: Tensor,
    A: Tensor,
    bound: Tensor,
    initial_state: Tensor | None,
    do: Tensor | None,
    dht: Tensor | None,
    cu_seqlens: Tensor | None,
    num_seqs: int,
    seq_len: int,
    scale: float,
    state_v_first: bool,
    plan: Sequence[int],
    threshold: float,
    initial_state_grad: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """The backward pass: gradients of q, k, v, g, beta and of the initial state (no element unless initial_state_grad).

    Arguments as of ``chunk_forward``, its results, and the gradients of o and of the final state, None for zero.
    """
    q, k, v, beta = (aligned(x) for x in (q, k, v, beta))
    initial_state = None if initial_state is None else aligned(initial_state)
    call = _call(k, v, num_seqs, seq_len, scale, state_v_first, plan, threshold)
    cut = None
    if call.plan.of_backward.chunks_per_segment > 0 and len(v) > 0 and num_seqs > 0:
        forward, reverse, _ = work_items(bound, v, cu_seqlens, call)
        cut = Cut(forward, reverse)
    *grads, dh0 = launch_backward(q, k, v, g_cum, beta, A, initial_state, do, dht, cu_seqlens, call, initial_state_grad, cut)
    dq, dk, dv, dg, dbeta = grads
    return dq, dk, dv, dg, dbeta, torch.empty(0, dtype=torch.float32, device=v.device) if dh0 is None else dh0


@chunk_backward.register_fake
def _(  # type: ignore[no-untyped-def]
    q, k, v, g_cum, beta, A, bound, initial_state, do, dht, cu_seqlens, num_seqs, seq_len, scale, state_v_first, plan, threshold,
    initial_state_grad,
):  # fmt: skip
    dh0 = v.new_empty(_state_shape(k, v, num_seqs, state_v_first) if initial_state_grad else (0,), dtype=torch.float32)
    return *(torch.empty_like(x) for x in (q, k, v, g_cum, beta)), dh0


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    q, k, v, _, beta, initial_state, cu_seqlens, *sizes, output_final_state = inputs
    _, _, g_cum, A, bound = output
    ctx.save_for_backward(q, k, v, g_cum, beta, A, bound, initial_state, cu_seqlens)
    ctx.sizes, ctx.with_state = sizes, output_final_state
    ctx.set_materialize_grads(False)


def _differentiate(ctx: Any, do: Tensor | None, dht: Tensor | None, *_: Tensor | None) -> tuple[Tensor | None, ...]:
    q, k, v, g_cum, beta, A, bound, initial_state, cu_seqlens = ctx.saved_tensors
    needed = ctx.needs_input_grad[:6]
    dht = dht if ctx.with_state else None
    grads = chunk_backward(q, k, v, g_cum, beta, A, bound, initial_state, do, dht, cu_seqlens, *ctx.sizes, needed[5])
    return (*(grad if need else None for grad, need in zip(grads, needed, strict=True)), *[None] * 8)


chunk_forward.register_autograd(_differentiate, setup_context=_save)


def recurrent_gated_delta_rule(inputs: RecurrentInputs, call: Recurrence) -> tuple[Tensor, Tensor | None]:
    """As ``qla.autograd.recurrent_gated_delta_rule``, through the operator."""
    flags = (call.use_qk_l2norm, call.use_beta_sigmoid, call.allow_neg_eigval, call.state_v_first)
    o, final_state = recurrent(*inputs, call.scale, call.output_final_state, *flags)
    return o, final_state if call.output_final_state else None


@torch.library.custom_op("qla::recurrent", mutates_args=())
def recurrent(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None,
    beta: Tensor | None,
    gk: Tensor | None,
    gv: Tensor | None,
    A_log: Tensor | None,
    dt_bias: Tensor | None,
    initial_state: Tensor | None,
    cu_seqlens: Tensor | None,
    scale: float,
    output_final_state: bool,
    use_qk_l2norm: bool,
    use_beta_sigmoid: bool,
    allow_neg_eigval: bool,
    state_v_first: bool,
) -> tuple[Tensor, Tensor]:
    """The recurrence: o [B, T, HV, V], and the final state, fp32, which has no element unless output_final_state.

    The tensors as ``launch_recurrent`` takes them, the rest as in ``Recurrence``. Has no gradient.
    """
    inputs = (q, k, v, g, beta, gk, gv, A_log, dt_bias, initial_state, cu_seqlens)
    call = Recurrence(scale, output_final_state, use_qk_l2norm, use_beta_sigmoid, allow_neg_eigval, state_v_first)
    o, final_state = launch_recurrent(inputs, call)
    return o, torch.empty(0, dtype=torch.float32, device=v.device) if final_state is None else final_state


@recurrent.register_fake
def _(  # type: ignore[no-untyped-def]
    q, k, v, g, beta, gk, gv, A_log, dt_bias, initial_state, cu_seqlens, scale, output_final_state, use_qk_l2norm, use_beta_sigmoid,
    allow_neg_eigval, state_v_first,
):  # fmt: skip
    num_seqs = v.shape[0] if cu_seqlens is None else cu_seqlens.numel() - 1
    inner = (v.shape[3], k.shape[3]) if state_v_first else (k.shape[3], v.shape[3])
    final_state = v.new_empty((num_seqs, v.shape[2], *inner) if output_final_state else (0,), dtype=torch.float32)
    return v.new_empty(v.shape), final_state


def _refuse(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
    raise NotImplementedError(NO_GRADIENT)


recurrent.register_autograd(_refuse)
