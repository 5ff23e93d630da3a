"""The kernels' forward pass as one differentiable step: what is launched, what is saved.

Everything here sees normalised tensors: tokens flattened to N = B * T, head sizes 128, gates and beta float32, all
contiguous and 16-byte aligned, scale >= 0. ``qla.api`` brings user input into that form with differentiable operations, so
gradients find their way back to its shapes and dtypes without help.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from qla.checks import warn_once
from qla.device import device_spec
from qla.reference import CHUNK, chunked_gated_delta_rule

SLOW_BACKWARD = (
    "qla has no backward kernel yet: gradients are right, but they are computed by running the chunked form again in PyTorch, "
    "which is much slower than the forward pass."
)


@dataclass(frozen=True)
class Call:
    """What a launch needs besides tensors.

    num_seqs: number of sequences S.
    seq_len: tokens of each sequence; 0 when cu_seqlens tells.
    scale: factor on o, finite and >= 0.
    state_v_first: states are [V, K] instead of [K, V].
    output_final_state: whether to compute the final state.
    """

    num_seqs: int
    seq_len: int
    scale: float
    state_v_first: bool
    output_final_state: bool


def launch_forward(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, initial_state: Tensor | None, cu_seqlens: Tensor | None, call: Call
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """Launches the forward kernels on the current stream of q's device.

    q, k: [N, H, 128] bf16 or fp16; v: [N, HV, 128], same dtype; g, beta: [N, HV] fp32; initial_state: [S, HV, 128, 128] fp32
    or None; cu_seqlens: [S + 1] int32 on q's device, or None for equal lengths.

    Returns (g_cum [N, HV] fp32 in log2 units, A [N, HV, 64], o [N, HV, 128], final_state [S, HV, 128, 128] fp32 or None).
    """
    tokens, heads, _ = v.shape
    if tokens == 0 or call.num_seqs == 0:
        return _result_without_tokens(v, g, initial_state, call)

    from qla.kernels.fwd_fused import fwd_fused
    from qla.kernels.kkt_solve import kkt_solve

    num_sms = device_spec(q.device).sm_count
    o = torch.empty_like(v)
    state_shape = (call.num_seqs, heads, k.shape[-1], v.shape[-1])
    final_state = torch.empty(state_shape, dtype=torch.float32, device=q.device) if call.output_final_state else None
    with torch.cuda.device(q.device):
        g_cum, A = kkt_solve(k, g, beta, o, cu_seqlens, call.num_seqs, call.seq_len, num_sms)
        fwd_fused(
            q, k, v, g_cum, beta, A, o, initial_state, final_state, call.scale,
            cu_seqlens, call.num_seqs, call.seq_len, call.state_v_first, num_sms,
        )  # fmt: skip
    return g_cum, A, o, final_state


def _result_without_tokens(v: Tensor, g: Tensor, initial_state: Tensor | None, call: Call) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """No sequence, or no token in any: nothing to launch; the final state is the initial one."""
    tokens, heads, dim = v.shape
    final_state = None
    if call.output_final_state:
        final_state = v.new_zeros(call.num_seqs, heads, dim, dim, dtype=torch.float32) if initial_state is None else initial_state.clone()
    return torch.zeros_like(g), v.new_zeros(tokens, heads, CHUNK), torch.zeros_like(v), final_state


def gated_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    initial_state: Tensor | None,
    cu_seqlens: Tensor | None,
    cu_seqlens_cpu: Tensor | None,
    call: Call,
) -> tuple[Tensor, Tensor | None]:
    """``launch_forward`` with gradients; saves tensors only when some input asks for a gradient. Returns (o, final_state)."""
    inputs = (q, k, v, g, beta, initial_state)
    if torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in inputs):
        apply: Callable[..., tuple[Tensor, Tensor | None]] = _GatedDeltaRule.apply
        return apply(*inputs, cu_seqlens, cu_seqlens_cpu, call)
    _, _, o, final_state = launch_forward(q, k, v, g, beta, initial_state, cu_seqlens, call)
    return o, final_state


class _GatedDeltaRule(torch.autograd.Function):
    """Forward by the kernels. Saved, in this order: q, k, v, g, beta, initial_state, cu_seqlens, cu_seqlens_cpu."""

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
        cu_seqlens_cpu: Tensor | None,
        call: Call,
    ) -> tuple[Tensor, Tensor | None]:
        _, _, o, final_state = launch_forward(q, k, v, g, beta, initial_state, cu_seqlens, call)
        ctx.save_for_backward(q, k, v, g, beta, initial_state, cu_seqlens, cu_seqlens_cpu)
        ctx.call = call
        ctx.set_materialize_grads(False)
        return o, final_state

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor | None) -> tuple[Tensor | None, ...]:
        *tensors, cu_seqlens, cu_seqlens_cpu = ctx.saved_tensors
        grads = _recomputed_gradients(tensors, ctx.needs_input_grad[: len(tensors)], grad_outputs, cu_seqlens, cu_seqlens_cpu, ctx.call)
        return (*grads, None, None, None)


def _recomputed_gradients(
    tensors: list[Tensor | None],
    needed: tuple[bool, ...],
    grad_outputs: tuple[Tensor | None, ...],
    cu_seqlens: Tensor | None,
    cu_seqlens_cpu: Tensor | None,
    call: Call,
) -> list[Tensor | None]:
    """Gradients of the six inputs by differentiating the chunked reference; None where not needed."""
    warn_once(SLOW_BACKWARD)
    leaves = [None if x is None else x.detach().requires_grad_(need) for x, need in zip(tensors, needed, strict=True)]
    with torch.enable_grad():
        batch = 1 if cu_seqlens is not None else call.num_seqs
        q, k, v, g, beta = (x.view(batch, len(x) // max(batch, 1), *x.shape[1:]) for x in leaves[:5] if x is not None)
        results = chunked_gated_delta_rule(
            q, k, v, g, beta, call.scale, leaves[5], call.output_final_state, call.state_v_first,
            cu_seqlens if cu_seqlens_cpu is None else cu_seqlens_cpu,
        )  # fmt: skip
    pairs = [
        (result, grad.view_as(result))
        for result, grad in zip(results, grad_outputs, strict=True)
        if result is not None and grad is not None and result.requires_grad
    ]
    wanted = [x for x in leaves if x is not None and x.requires_grad]
    if not pairs:
        return [torch.zeros_like(x) if x is not None and x.requires_grad else None for x in leaves]
    found = iter(
        torch.autograd.grad([result for result, _ in pairs], wanted, [grad for _, grad in pairs], allow_unused=True, materialize_grads=True)
    )
    return [next(found) if x is not None and x.requires_grad else None for x in leaves]
