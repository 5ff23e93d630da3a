"""The public functions: defaults, checks, activations, and the choice between the kernels and PyTorch."""

from __future__ import annotations

import warnings
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from qla import activations, ops, reference
from qla.autocp import WHOLE, Plan
from qla.autograd import (
    ALIGNMENT,
    Call,
    Recurrence,
    RecurrentInputs,
    aligned,
    choose_plan,
    gated_delta_rule,
    launch_backward,
    launch_forward,
    recurrent_gated_delta_rule,
)
from qla.checks import (
    KERNEL_DIMS,
    Problem,
    check_cu_seqlens_values,
    check_inputs,
    check_per_head,
    check_recurrent_inputs,
    check_scale,
    check_shape,
    kernel_dim,
    recurrent_unsupported_reason,
    unsupported_reason,
    warn_once,
)
from qla.reference import CHUNK, chunk_gate_sum_and_inverse, chunked_gated_delta_rule, chunked_gradients, gates_from_chunk_sums


def chunk_gated_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    use_beta_sigmoid_in_kernel: bool = False,
    allow_neg_eigval: bool = False,
    state_v_first: bool = False,
    cu_seqlens: Tensor | None = None,
    cu_seqlens_cpu: Tensor | None = None,
    chunk_indices: Tensor | None = None,
    cp_context: object | None = None,
    auto_cp: bool | Plan = True,
    **kwargs: Any,
) -> tuple[Tensor, Tensor | None]:
    """Gated Delta Rule attention; takes the place of ``fla.ops.gated_delta_rule.chunk_gated_delta_rule`` (fla 0.6.0).

    For each sequence and value head, token by token: S = exp(g) S; S += k (beta (v - S^T k))^T; o = scale S^T q ("Gated
    Delta Networks", arXiv 2412.06464; ``qla.reference`` has the recurrence and the chunked form).

    On a Hopper GPU, bfloat16 or float16 inputs with head sizes up to 128 run through qla's kernels: K and V of 64 and 128 as they are,
    others padded with zeros to the next of the two, which changes nothing in the result. Everything else runs through PyTorch in float32
    (float64 for float64 inputs), with one warning for each reason; ``unsupported_reason`` tells in advance.

    q, k: [B, T, H, K], bf16, fp16, fp32 or fp64, any strides. bf16 has the range of fp32; with fp16 the state, and what a chunk
        adds to it, is rounded to fp16 for every product: entries above 65504 become inf, and below 6e-8 zero.
    v: [B, T, HV, V], dtype of q. HV is a multiple of H: value head j reads key head j // (HV / H).
    g: [B, T, HV], natural logarithm of the decay (<= 0; -inf forgets the state), any floating dtype, computed in fp32.
    beta: [B, T, HV], any floating dtype, computed in fp32.
    scale: factor on o, any finite number; K^-0.5 by default.
    initial_state: [S, HV, K, V] ([S, HV, V, K] if state_v_first), any floating dtype, computed in fp32. S is B, or the
        number of packed sequences. None is zero.
    output_final_state: whether to return the final state.
    use_qk_l2norm_in_kernel: divide each row of q and k by sqrt(sum of squares + 1e-6) first.
    use_beta_sigmoid_in_kernel: beta holds logits; sigmoid(beta) is used.
    allow_neg_eigval: 2 sigmoid(beta) is used; needs use_beta_sigmoid_in_kernel.
    state_v_first: both states are [V, K] instead of [K, V]; the result is the transpose bit for bit.
    cu_seqlens: [S + 1] int32 or int64, on q's device or the CPU: B = 1, and sequence n owns rows cu_seqlens[n] to
        cu_seqlens[n + 1] - 1. Empty sequences are fine; rows past the last sequence give o = 0 and zero gradients.
    cu_seqlens_cpu: a copy of cu_seqlens on the CPU; lets its values be checked, and spares the PyTorch path a wait.
    chunk_indices: accepted for fla's callers; not needed.
    cp_context: context parallelism over several GPUs; not supported (NotImplementedError).
    auto_cp: whether sequences may be split over a GPU's multiprocessors where ``qla.autocp`` expects that to be faster (``explain_plan``
        tells); a ``Plan`` says how. Both passes follow it, and nothing waits for the GPU: where lengths are only known there, so are the
        segments. The result is that of False but for rounding: what a segment neglects of the state before it is below exp(-10) of it.
    kwargs: use_gate_in_kernel, A_log [HV] and dt_bias [HV] (g holds raw values; -exp(A_log) softplus(g + dt_bias) is used),
        chunk_size (16, 32 or 64; the kernels always use 64, the result is the same), transpose_state_layout (old name
        of state_v_first). Others are ignored.

    Returns (o, final_state): o [B, T, HV, V] in q's dtype; final_state in the layout of initial_state, fp32 (fp64 for fp64
    inputs), or None. Differentiable in q, k, v, g, beta, initial_state, A_log and dt_bias; each gradient has its input's dtype.

    Raises ValueError or TypeError naming the argument, the rule and what it got, before any launch. The values in a
    cu_seqlens on the GPU are checked only with cu_seqlens_cpu or with QLA_DEBUG=1 in the environment: reading them waits for the GPU.
    torch.compile takes the function whole (fullgraph=True); then no values of cu_seqlens are checked.
    """
    if cp_context is not None:
        raise NotImplementedError("cp_context: qla does not support context parallelism over several GPUs; pass cp_context=None.")
    A_log = dt_bias = None
    if kwargs:
        state_v_first = _state_layout(state_v_first, kwargs)
        _check_known_options(kwargs)
    if auto_cp is not True:
        _check_auto_cp(auto_cp)
    if allow_neg_eigval and not use_beta_sigmoid_in_kernel:
        raise ValueError("allow_neg_eigval=True needs use_beta_sigmoid_in_kernel=True, got False")
    problem = check_inputs(q, k, v, g, beta, initial_state, state_v_first, cu_seqlens, cu_seqlens_cpu)
    scale = check_scale(scale, problem.key_dim)

    if kwargs:
        A_log, dt_bias = _gate_parameters(kwargs, g)

    reason = unsupported_reason(q, k, v)
    compiling = torch.compiler.is_compiling()
    by_kernel = reason is None and not compiling
    offsets = cu_seqlens if cu_seqlens is None or not by_kernel else _offsets_on_device(cu_seqlens, q)
    if use_qk_l2norm_in_kernel:
        q, k = activations.l2norm_by_kernel(_pad(q, 1), _pad(k, 1), offsets) if by_kernel else activations.l2norm(q, k, offsets)
    if use_beta_sigmoid_in_kernel or A_log is not None:
        activate = activations.gates_by_kernel if by_kernel else activations.gates
        options = activations.GateOptions(use_beta_sigmoid_in_kernel, allow_neg_eigval)
        g, beta = activate(g, beta, A_log, dt_bias, offsets, options)

    if reason is not None:
        warn_once(_pytorch_path_warning(reason))
        cu_host = _cu_seqlens_on_host(cu_seqlens, cu_seqlens_cpu, problem)
        return chunked_gated_delta_rule(q, k, v, g, beta, scale, initial_state, output_final_state, state_v_first, cu_host)

    tensors = _normalise(q, k, v, g, beta, scale, initial_state, offsets)
    plan = WHOLE if compiling else _segmentation(auto_cp, problem, v.device, cu_seqlens, cu_seqlens_cpu)
    call = Call(problem.num_seqs, problem.seq_len, abs(scale), state_v_first, output_final_state, plan)
    if compiling:
        o, final_state = ops.gated_delta_rule(*tensors, call, auto_cp if isinstance(auto_cp, Plan) else None if auto_cp else WHOLE)
    else:
        o, final_state = gated_delta_rule(*tensors, call)
    if problem.key_dim in KERNEL_DIMS and problem.value_dim in KERNEL_DIMS:  # nothing to trim
        return o.view_as(v), final_state
    return _rows_for_user(_trim(o, problem.value_dim), problem), _state_for_user(final_state, problem, state_v_first)


chunk_gdn = chunk_gated_delta_rule


# Keywords of serving engines' variants of this function: ignored, they would leave wrong states behind without a word.
SERVING_KEYWORDS = (
    "inplace_final_state", "ssm_state_indices", "initial_state_indices", "initial_state_source", "num_accepted_tokens", "cp_context",
)  # fmt: skip


def fused_recurrent_gated_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None = None,
    gk: Tensor | None = None,
    gv: Tensor | None = None,
    beta: Tensor | None = None,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    use_gate_in_kernel: bool = False,
    A_log: Tensor | None = None,
    dt_bias: Tensor | None = None,
    use_beta_sigmoid_in_kernel: bool = False,
    allow_neg_eigval: bool = False,
    state_v_first: bool = False,
    cu_seqlens: Tensor | None = None,
    cu_seqlens_cpu: Tensor | None = None,
    **kwargs: Any,
) -> tuple[Tensor, Tensor | None]:
    """The same operation token by token, for decoding; takes the place of ``fla.ops.gated_delta_rule.fused_recurrent_gated_delta_rule``.

    For each sequence and value head: S = exp(g) S, rows of S times exp(gk), columns times exp(gv); S += k (beta (v - S^T k))^T;
    o = scale S^T q. Any length; worth it up to some dozens of tokens a sequence, ``chunk_gated_delta_rule`` is for longer ones.

    On a Hopper GPU, bfloat16, float16 or float32 inputs with head sizes up to 128 run through one kernel, in float32, activations
    included: nothing is rounded on the way. Everything else runs through PyTorch, with one warning for each reason.

    q, k: [B, T, H, K], any strides; a slice of a wider projection is not copied if its heads lie together.
    v: [B, T, HV, V], dtype of q. HV is a multiple of H.
    g: [B, T, HV], natural logarithm of the decay, any floating dtype; None is no decay.
    gk, gv: [B, T, HV, K] and [B, T, HV, V], further ones of the state's rows and columns.
    beta: [B, T, HV], or [B, T, HV, V]: one for each column; any floating dtype. None is 1 (before a sigmoid).
    scale, initial_state, output_final_state, use_qk_l2norm_in_kernel, use_beta_sigmoid_in_kernel, allow_neg_eigval, state_v_first,
        cu_seqlens, cu_seqlens_cpu: as in ``chunk_gated_delta_rule``. The final state is a new tensor.
    use_gate_in_kernel: g holds raw values; -exp(A_log) softplus(g + dt_bias) is used.
    A_log, dt_bias: [HV], any floating dtype; ignored without use_gate_in_kernel. dt_bias may be None.
    kwargs: transpose_state_layout (old name of state_v_first). Others are ignored, but for what would change the result: head_first=True
        raises ValueError, and what serving engines add (SERVING_KEYWORDS: states by index or in place) NotImplementedError.

    Returns (o, final_state) as ``chunk_gated_delta_rule``.
    Taking a gradient raises NotImplementedError where the kernel ran; through PyTorch the function is differentiable.

    Raises ValueError or TypeError naming the argument, the rule and what it got, before any launch; values of cu_seqlens are checked as in
    ``chunk_gated_delta_rule``. torch.compile takes the function whole (fullgraph=True).
    """
    for name in SERVING_KEYWORDS:
        if kwargs.get(name) is not None and kwargs[name] is not False:
            raise NotImplementedError(
                f"{name}: fused_recurrent_gated_delta_rule takes states in order and returns new ones; pass {name}=None."
            )
    state_v_first = _state_layout(state_v_first, kwargs)
    _check_known_options(kwargs)
    if allow_neg_eigval and not use_beta_sigmoid_in_kernel:
        raise ValueError("allow_neg_eigval=True needs use_beta_sigmoid_in_kernel=True, got False")
    problem = check_recurrent_inputs(q, k, v, g, gk, gv, beta, initial_state, state_v_first, cu_seqlens, cu_seqlens_cpu)
    scale = check_scale(scale, problem.key_dim)
    if not use_gate_in_kernel:
        A_log = dt_bias = None
    elif g is None or A_log is None:
        name, form = ("g", "[B, T, HV]") if g is None else ("A_log", "[HV]")
        raise ValueError(f"{name} must be a tensor {form} when use_gate_in_kernel=True, got None")
    else:
        for name, x in (("A_log", A_log), ("dt_bias", dt_bias)):
            if x is not None:
                check_per_head(name, x, problem.value_heads, g.device)

    inputs = (q, k, v, g, beta, gk, gv, A_log, dt_bias, initial_state, cu_seqlens)
    call = Recurrence(scale, output_final_state, use_qk_l2norm_in_kernel, use_beta_sigmoid_in_kernel, allow_neg_eigval, state_v_first)
    reason = recurrent_unsupported_reason(q, k, v)
    if reason is not None:
        warn_once(_pytorch_path_warning(reason))
        return _recurrent_through_pytorch(inputs, call, _cu_seqlens_on_host(cu_seqlens, cu_seqlens_cpu, problem))
    if torch.compiler.is_compiling():
        return ops.recurrent_gated_delta_rule(inputs, call)
    return recurrent_gated_delta_rule(inputs, call)


fused_recurrent_gdn = fused_recurrent_gated_delta_rule


def _recurrent_through_pytorch(inputs: RecurrentInputs, call: Recurrence, cu_host: Tensor | None) -> tuple[Tensor, Tensor | None]:
    q, k, v, g, beta, gk, gv, A_log, dt_bias, initial_state, cu_seqlens = inputs
    dtype = q.dtype
    if call.use_qk_l2norm:  # as the kernel has it, not rounded to q's dtype
        q, k = activations.l2norm(activations.at_least_fp32(q), activations.at_least_fp32(k), cu_seqlens)
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    if beta is None:
        beta = torch.ones(v.shape[:3], dtype=wide, device=v.device)
    if g is None:
        g = torch.zeros(v.shape[:3], dtype=wide, device=v.device)
    options = activations.GateOptions(call.use_beta_sigmoid, call.allow_neg_eigval)
    g, beta = activations.gates(g, beta, A_log, dt_bias, cu_seqlens, options)
    o, final_state = reference.recurrent_gated_delta_rule(
        q, k, v, g, beta, call.scale, initial_state, call.output_final_state, call.state_v_first, cu_host, gk, gv
    )
    return o.to(dtype), final_state


def chunk_gated_delta_rule_fwd(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    cu_seqlens: Tensor | None = None,
    cu_seqlens_cpu: Tensor | None = None,
    state_v_first: bool = False,
    auto_cp: bool | Plan = True,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """The forward pass alone, with what it computes on the way; records no gradients.

    The arguments are those of ``chunk_gated_delta_rule``, and so are the errors and the choice of path.

    Returns (g_cum, A, o, final_state):
    g_cum: [B, T, HV] fp32, sum of the gates from the token's chunk's start (chunks of 64 from each sequence's start), in log2 units.
    A: [B, T, HV, 64] in q's dtype, the token's row of (I + StrictLower(diag(beta) (Gamma * K K^T)))^-1 of its chunk.
    o, final_state: as in ``chunk_gated_delta_rule``.
    Rows that no sequence owns are 0 in g_cum, A and o.
    """
    problem = check_inputs(q, k, v, g, beta, initial_state, state_v_first, cu_seqlens, cu_seqlens_cpu)
    scale = check_scale(scale, problem.key_dim)
    _check_auto_cp(auto_cp)
    reason = unsupported_reason(q, k, v)
    with torch.no_grad():
        if reason is not None:
            warn_once(_pytorch_path_warning(reason))
            cu_host = _cu_seqlens_on_host(cu_seqlens, cu_seqlens_cpu, problem)
            g_cum, A = chunk_gate_sum_and_inverse(k, g, beta, cu_host)
            o, final_state = chunked_gated_delta_rule(q, k, v, g, beta, scale, initial_state, output_final_state, state_v_first, cu_host)
            return g_cum.float(), A.to(q.dtype), o, final_state

        tensors = _normalise(q, k, v, g, beta, scale, initial_state, cu_seqlens)
        plan = _segmentation(auto_cp, problem, v.device, cu_seqlens, cu_seqlens_cpu)
        result = launch_forward(*tensors, Call(problem.num_seqs, problem.seq_len, abs(scale), state_v_first, output_final_state, plan))
        g_cum, A, o = (_rows_for_user(x, problem) for x in (result.g_cum, result.A, _trim(result.o, problem.value_dim)))
        return g_cum, A, o, _state_for_user(result.final_state, problem, state_v_first)


def chunk_gated_delta_rule_bwd(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    A: Tensor,
    scale: float | None,
    initial_state: Tensor | None,
    do: Tensor,
    dht: Tensor | None,
    cu_seqlens: Tensor | None = None,
    cu_seqlens_cpu: Tensor | None = None,
    state_v_first: bool = False,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor | None]:
    """The backward pass alone: "Gated Delta Networks" (arXiv 2412.06464) differentiated; ``qla.kernels.bwd_fused`` has the algebra.

    q, k, v, beta, scale, initial_state, cu_seqlens, cu_seqlens_cpu, state_v_first: as given to ``chunk_gated_delta_rule_fwd``.
    g, A: the first two results of ``chunk_gated_delta_rule_fwd``, [B, T, HV] and [B, T, HV, 64].
    do: gradient of o, [B, T, HV, V].
    dht: gradient of the final state, in its shape, or None for zero.

    Returns (dq, dk, dv, dg, dbeta, dh0): the first three in q's dtype, the others fp32 (fp64 for fp64 inputs); dg is the gradient of
    the gates that the forward pass took (natural logarithms, not their sums); dh0 is None without initial_state. Rows that no
    sequence owns are 0.

    The states of all chunks are computed again, in a workspace of at most 2.625 GiB (QLA_WORKSPACE_BYTES in the environment) but at least
    4 K V + 128 V bytes (80 KiB for heads of 128) for each chunk and value head of one key head.

    Raises ValueError or TypeError as ``chunk_gated_delta_rule``.
    """
    problem = check_inputs(q, k, v, g, beta, initial_state, state_v_first, cu_seqlens, cu_seqlens_cpu)
    scale = check_scale(scale, problem.key_dim)
    check_shape("A", A, (problem.batch, problem.tokens, problem.value_heads, CHUNK), q.device)
    check_shape("do", do, tuple(v.shape), q.device)
    if dht is not None:
        check_shape("dht", dht, problem.state_shape(state_v_first), q.device)
    reason = unsupported_reason(q, k, v)
    if reason is not None:
        warn_once(_pytorch_path_warning(reason))
        cu_host = _cu_seqlens_on_host(cu_seqlens, cu_seqlens_cpu, problem)
        gates = gates_from_chunk_sums(g, cu_host)
        return chunked_gradients(q, k, v, gates, beta, scale, initial_state, do, dht, state_v_first, cu_host)

    with torch.no_grad():
        q, k, v, g, beta, initial_state, cu_seqlens = _normalise(q, k, v, g, beta, scale, initial_state, cu_seqlens)
        call = Call(problem.num_seqs, problem.seq_len, abs(scale), state_v_first, False, WHOLE)
        A, do = aligned(A.to(q.dtype).flatten(0, 1)), _pad(do, 1).flatten(0, 1)
        dht = None if dht is None else _pad(dht, 2)
        *grads, dh0 = launch_backward(q, k, v, g, beta, A, initial_state, do, dht, cu_seqlens, call, initial_state is not None)
        dq, dk, dv, dg, dbeta = (_rows_for_user(x, problem) for x in grads)
        dq = -dq if scale < 0 else dq
        dq, dk, dv = (x[..., :size].contiguous() for x, size in ((dq, problem.key_dim), (dk, problem.key_dim), (dv, problem.value_dim)))
        return dq, dk, dv, dg, dbeta, _state_for_user(dh0, problem, state_v_first)


def _check_auto_cp(auto_cp: object) -> None:
    if not isinstance(auto_cp, (bool, Plan)):
        raise TypeError(f"auto_cp must be a bool or a qla.autocp.Plan, got {type(auto_cp).__name__}")


def _state_layout(state_v_first: bool, kwargs: dict[str, Any]) -> bool:
    """state_v_first, or its old name transpose_state_layout."""
    if "transpose_state_layout" not in kwargs:
        return state_v_first
    if state_v_first:
        raise ValueError("transpose_state_layout is the old name of state_v_first; pass one of them, got both")
    warnings.warn("transpose_state_layout is deprecated: use state_v_first", DeprecationWarning, stacklevel=3)
    return bool(kwargs["transpose_state_layout"])


def _check_known_options(kwargs: dict[str, Any]) -> None:
    if kwargs.get("head_first", False):
        raise ValueError("head_first=True is not supported: inputs must be [B, T, H, ...]")
    chunk_size = kwargs.get("chunk_size", CHUNK)
    if chunk_size not in (16, 32, 64):
        raise ValueError(f"chunk_size must be 16, 32 or 64, got {chunk_size!r}")
    if kwargs.get("use_gate_in_kernel", False) and kwargs.get("A_log") is None:
        raise ValueError("A_log must be a tensor [HV] when use_gate_in_kernel=True, got None")


def _gate_parameters(kwargs: dict[str, Any], g: Tensor) -> tuple[Tensor | None, Tensor | None]:
    """A_log and dt_bias, checked, or None twice where g holds the gates themselves."""
    if not kwargs.get("use_gate_in_kernel", False):
        return None, None
    A_log, dt_bias = kwargs.get("A_log"), kwargs.get("dt_bias")
    for name, x in (("A_log", A_log), ("dt_bias", dt_bias)):
        if x is not None:
            check_per_head(name, x, g.shape[2], g.device)
    return A_log, dt_bias


def _pytorch_path_warning(reason: str) -> str:
    return f"qla runs this call through PyTorch, which is slower: {reason}."


def _cu_seqlens_on_host(cu_seqlens: Tensor | None, cu_seqlens_cpu: Tensor | None, problem: Problem) -> Tensor | None:
    """cu_seqlens as the PyTorch path needs it: on the CPU, its values checked."""
    if cu_seqlens is None or cu_seqlens_cpu is not None:
        return cu_seqlens_cpu
    if cu_seqlens.device.type != "cpu":
        cu_seqlens = cu_seqlens.cpu()
        check_cu_seqlens_values(cu_seqlens.tolist(), problem.tokens)
    return cu_seqlens


_Tensors = tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor | None, Tensor | None]


def _normalise(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, scale: float, initial_state: Tensor | None, cu_seqlens: Tensor | None
) -> _Tensors:
    """Brings checked inputs into the kernels' form (``qla.autograd``), for abs(scale); differentiable."""
    if scale < 0:
        q = -q
    if q.shape[3] not in KERNEL_DIMS:
        q, k = _pad(q, 1), _pad(k, 1)
    if v.shape[3] not in KERNEL_DIMS:
        v = _pad(v, 1)
    if not g.dtype == beta.dtype == torch.float32:
        g, beta = g.float(), beta.float()
    q, v, g = q.flatten(0, 1), v.flatten(0, 1), g.flatten(0, 1)
    k, beta = k.reshape_as(q), beta.reshape_as(g)
    if torch.compiler.is_compiling() or not (
        q.is_contiguous()
        and k.is_contiguous()
        and v.is_contiguous()
        and g.is_contiguous()
        and beta.is_contiguous()
        and (q.data_ptr() | k.data_ptr() | v.data_ptr() | g.data_ptr() | beta.data_ptr()) % ALIGNMENT == 0
    ):
        q, k, v, g, beta = (aligned(x) for x in (q, k, v, g, beta))
    if initial_state is not None:
        initial_state = aligned(_pad(initial_state.float(), 2))
    return q, k, v, g, beta, initial_state, None if cu_seqlens is None else _offsets_on_device(cu_seqlens, q)


def _offsets_on_device(cu_seqlens: Tensor, q: Tensor) -> Tensor:
    if cu_seqlens.dtype != torch.int32 or cu_seqlens.device != q.device:
        cu_seqlens = cu_seqlens.to(q.device, torch.int32, non_blocking=True)
    return cu_seqlens.contiguous()


def _segmentation(
    auto_cp: bool | Plan, problem: Problem, device: torch.device, cu_seqlens: Tensor | None, cu_seqlens_cpu: Tensor | None
) -> Plan:
    """How a call's sequences are cut; their lengths count where the host has them."""
    if auto_cp is not True:
        return auto_cp if isinstance(auto_cp, Plan) else WHOLE
    on_host = cu_seqlens_cpu if cu_seqlens_cpu is not None else cu_seqlens
    lengths = None
    if on_host is not None and on_host.device.type == "cpu":
        lengths = tuple(on_host.diff().tolist())
    tokens = problem.batch * problem.tokens
    heads = (problem.key_heads, problem.value_heads, kernel_dim(problem.value_dim))
    return choose_plan(*heads, problem.num_seqs, tokens, problem.seq_len, lengths, device)


def _pad(x: Tensor, dims: int) -> Tensor:
    """Zeros up to a head size of the kernels in each of the last ``dims`` dimensions. Exact: they add zeros to sums, and stay zero in the
    state."""
    sizes = x.shape[-dims:]
    if all(size in KERNEL_DIMS for size in sizes):
        return x  # F.pad copies even when there is nothing to add
    return F.pad(x, [n for size in reversed(sizes) for n in (0, kernel_dim(size) - size)])


def _trim(x: Tensor, size: int) -> Tensor:
    """The first ``size`` elements of the last dimension."""
    return x if x.shape[-1] == size else x[..., :size]


def _rows_for_user(x: Tensor, problem: Problem) -> Tensor:
    """[N, ..] to a contiguous [B, T, ..]."""
    return x.contiguous().view(problem.batch, problem.tokens, *x.shape[1:])


def _state_for_user(state: Tensor | None, problem: Problem, state_v_first: bool) -> Tensor | None:
    if state is None:
        return None
    rows, columns = problem.state_shape(state_v_first)[2:]
    return state[..., :rows, :columns].contiguous()
