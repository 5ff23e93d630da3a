"""What fla's ``use_..._in_kernel`` options do to q, k, g and beta before the rule: as PyTorch operations, and through kernels.

The kernels read each tensor once, whatever its floating dtype, where PyTorch makes several passes over memory, a launch for each.
q and k may be slices of a joint projection. While torch.compile traces, the PyTorch form is used: the compiler fuses it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from qla.autograd import ALIGNMENT, aligned, only_once, readable
from qla.device import device_spec, on_device

L2NORM_EPS = 1e-6  # inside the root, as fla has it: a zero row stays zero
VECTOR = 8  # elements of 16 bits that a thread loads at once


@dataclass(frozen=True)
class GateOptions:
    """sigmoid: beta holds logits. twice: 2 sigmoid(beta) is used. (What makes a gate of g is whether there is an A_log.)"""

    sigmoid: bool = False
    twice: bool = False


def l2norm(q: Tensor, k: Tensor, cu_seqlens: Tensor | None) -> tuple[Tensor, Tensor]:
    """Rows of q and k [B, T, H, K] over sqrt(sum of squares + 1e-6), in their dtype; rows that no sequence owns become 0."""
    q, k = (_l2norm(blank_unowned_rows(x, cu_seqlens)) for x in (q, k))
    return q, k


def gates(
    g: Tensor, beta: Tensor, A_log: Tensor | None, dt_bias: Tensor | None, cu_seqlens: Tensor | None, options: GateOptions
) -> tuple[Tensor, Tensor]:
    """g, or -exp(A_log) softplus(g + dt_bias) where there is an A_log, and beta as the options say; in at least fp32.

    g, beta: [B, T, HV]. A_log, dt_bias: HV elements each, or None. What is activated is 0 in rows that no sequence owns.
    """
    if options.sigmoid:
        beta = at_least_fp32(blank_unowned_rows(beta, cu_seqlens)).sigmoid() * (2.0 if options.twice else 1.0)
    if A_log is not None:
        raw = at_least_fp32(blank_unowned_rows(g, cu_seqlens))
        if dt_bias is not None:
            raw = raw + at_least_fp32(dt_bias).flatten()
        g = -at_least_fp32(A_log).flatten().exp() * F.softplus(raw)
    return g, beta


def l2norm_by_kernel(q: Tensor, k: Tensor, cu_seqlens: Tensor | None) -> tuple[Tensor, Tensor]:
    """``l2norm`` of q and k [B, T, H, K], K 64 or 128, bf16 or fp16, in one launch; cu_seqlens int32 on their device.

    Results are contiguous.
    """
    if q.numel() == 0:
        return l2norm(q, k, cu_seqlens)
    apply: Callable[..., tuple[Tensor, Tensor]] = _L2Norm.apply
    return apply(q, k, cu_seqlens)


def gates_by_kernel(
    g: Tensor, beta: Tensor, A_log: Tensor | None, dt_bias: Tensor | None, cu_seqlens: Tensor | None, options: GateOptions
) -> tuple[Tensor, Tensor]:
    """``gates`` in one launch, both results fp32; cu_seqlens int32 on their device."""
    if g.numel() == 0:
        return gates(g, beta, A_log, dt_bias, cu_seqlens, options)
    apply: Callable[..., tuple[Tensor, Tensor]] = _Gates.apply
    return apply(*(readable(x) for x in (g, beta, A_log, dt_bias)), cu_seqlens, options)


def blank_unowned_rows(x: Tensor, cu_seqlens: Tensor | None) -> Tensor:
    """Zeros the rows past the last sequence: an activation's own gradient would make 0 * NaN of a NaN there."""
    if cu_seqlens is None:
        return x
    owned = torch.arange(x.shape[1], device=x.device) < cu_seqlens[-1:].to(x.device)
    return torch.where(owned.view(1, -1, *[1] * (x.dim() - 2)), x, 0)


def at_least_fp32(x: Tensor) -> Tensor:
    return x if x.dtype == torch.float64 else x.float()


def _l2norm(x: Tensor) -> Tensor:
    wide = at_least_fp32(x)
    return (wide * (wide.square().sum(-1, keepdim=True) + L2NORM_EPS).rsqrt()).to(x.dtype)


class _L2Norm(torch.autograd.Function):
    """Saves the results and the factors of their rows, [B, T, H] fp32; not its inputs."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, cu_seqlens: Tensor | None) -> tuple[Tensor, Tensor]:
        from qla.kernels.launch import l2norm as launch

        with on_device(q.device):
            yq, yk, rq, rk = launch(_rows(q), _rows(k), cu_seqlens, L2NORM_EPS, device_spec(q.device).sm_count)
        yq, yk = yq.view(q.shape), yk.view(k.shape)
        ctx.save_for_backward(yq, yk, rq, rk)
        return yq, yk

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        from qla.kernels.launch import l2norm_backward as launch

        yq, yk, rq, rk = ctx.saved_tensors
        with torch.no_grad(), on_device(yq.device):
            tensors = (*(aligned(x.flatten(0, 1)) for x in grad_outputs), yq.flatten(0, 1), yk.flatten(0, 1), rq, rk)
            grads = [x.view(yq.shape) for x in launch(*tensors, device_spec(yq.device).sm_count)]
        return *only_once(grads, ctx.needs_input_grad[:2], yq), None


class _Gates(torch.autograd.Function):
    """Saves its inputs."""

    @staticmethod
    def forward(
        ctx: Any,
        g: Tensor,
        beta: Tensor,
        A_log: Tensor | None,
        dt_bias: Tensor | None,
        cu_seqlens: Tensor | None,
        options: GateOptions,
    ) -> tuple[Tensor, Tensor]:
        from qla.kernels.launch import gates as launch

        ctx.save_for_backward(g, beta, A_log, dt_bias, cu_seqlens)
        ctx.options = options
        with on_device(g.device):
            results = launch(*_flat(g, beta, A_log, dt_bias), cu_seqlens, _flags(options))
        out_g, out_beta = (x.view(g.shape) for x in results)
        return out_g, out_beta

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        from qla.kernels.launch import gates_backward as launch

        *inputs, cu_seqlens = ctx.saved_tensors
        g = inputs[0]
        with torch.no_grad(), on_device(g.device):
            dg, dbeta = (aligned(x.float().flatten(0, 1)) for x in grad_outputs)
            results = launch(dg, dbeta, *_flat(*inputs), cu_seqlens, _flags(ctx.options), device_spec(g.device).sm_count)
            grads = [None if x is None or d is None else d.view(x.shape).to(x.dtype) for x, d in zip(inputs, results, strict=True)]
        return *only_once(grads, ctx.needs_input_grad[:4], g), None, None


def _flags(options: GateOptions) -> int:
    from qla.kernels.launch import ACTIVATE_BETA, TWICE

    return (ACTIVATE_BETA if options.sigmoid else 0) | (TWICE if options.twice else 0)


def _flat(g: Tensor, beta: Tensor, A_log: Tensor | None, dt_bias: Tensor | None) -> tuple[Tensor | None, ...]:
    """As the kernel takes them: [N, HV] twice, [HV] twice, contiguous."""
    parameters = (None if x is None else aligned(x.flatten()) for x in (A_log, dt_bias))
    return *(aligned(x.flatten(0, 1)) for x in (g, beta)), *parameters


def _rows(x: Tensor) -> Tensor:
    """[B, T, H, K] as [N, H, K]: in place where the kernel can read it so, else a copy."""
    batch, tokens = x.shape[:2]
    one_step = batch == 1 or x.stride(0) == tokens * x.stride(1)
    whole_vectors = x.stride(3) == 1 and x.stride(1) % VECTOR == 0 and x.stride(2) % VECTOR == 0 and x.data_ptr() % ALIGNMENT == 0
    if one_step and whole_vectors and min(x.stride()) > 0:
        return x.as_strided((batch * tokens, *x.shape[2:]), x.stride()[1:])
    return aligned(x.flatten(0, 1))
