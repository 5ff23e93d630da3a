"""The Gated Delta Rule in plain PyTorch: the executable specification, and the path where no kernel runs.

For each sequence and value head, with the state S [K, V], the log gate g_t, the key k_t, the value v_t and beta_t:

    S   = exp(g_t) S                                 decay first,
    S  += k_t (beta_t (v_t - S^T k_t))^T             then correct what the state returns for this key,
    o_t = scale S^T q_t                              then read.

``recurrent_gated_delta_rule`` does just that, token by token; in float64 it is the oracle for everything else.
``chunked_gated_delta_rule`` computes the same in chunks of 64 tokens (the WY form of "Gated Delta Networks",
arXiv 2412.06464, section 3): within a chunk, with gamma_i = exp(g_1 + .. + g_i) and Gamma_ij = gamma_i / gamma_j for i >= j,

    A  = (I + StrictLower(diag(beta) (Gamma * K K^T)))^-1
    D  = A diag(beta) (V - diag(gamma) K S)          what each token adds to the state
    O  = scale (diag(gamma) Q S + (Gamma * Q K^T) D)
    S' = gamma_L S + K^T diag(gamma_L / gamma) D

Gamma comes from sums of g over j+1 .. i, one sum for each pair: no quotient, no difference of long sums. So gates of
any size, -inf included, give neither NaN nor a loss of digits, in the values and in the gradients.

Both functions take equal-length batches and packed sequences, more value heads than key heads, and both state
layouts; both are differentiable. They compute in float32, or in float64 when q is float64.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

CHUNK = 64
# A log2 gate at or below this is 0 in float32 as a factor (2^-256), and sums of 64 of them stay finite.
MIN_LOG2_GATE = -256.0


def recurrent_gated_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    state_v_first: bool = False,
    cu_seqlens: Tensor | None = None,
    gk: Tensor | None = None,
    gv: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Gated Delta Rule, one token after the other. In float64 this is the oracle of the tests.

    q, k: [B, T, H, K], any floating dtype.
    v: [B, T, HV, V]; HV is a multiple of H, and value head j reads key head j // (HV / H).
    g: [B, T, HV], natural logarithm of the decay, usually <= 0; -inf forgets the state.
    beta: [B, T, HV], in (0, 1), or up to 2 for negative eigenvalues; or [B, T, HV, V], one for each column of the state.
    scale: factor on o; K^-0.5 when None.
    initial_state: [S, HV, K, V], or [S, HV, V, K] if state_v_first; S is B, or the number of packed sequences. None is zero.
    output_final_state: whether to return the final state.
    state_v_first: both states are [V, K] instead of [K, V].
    cu_seqlens: [S + 1], integer, on any device: sequence n owns rows cu_seqlens[n] to cu_seqlens[n + 1] - 1 of the
        only batch row. Rows that no sequence owns are never read as data: their o and gradients are 0.
    gk, gv: [B, T, HV, K] and [B, T, HV, V], further log gates of the state's rows and columns; None for none.

    Returns (o, final_state): o [B, T, HV, V] in q's dtype; final_state in initial_state's shape, float32 (float64 when q
    is float64), or None.
    """
    with torch.autocast(device_type=q.device.type, enabled=False):
        steps = _plan_steps(q, cu_seqlens, chunk=1)
        per_column = beta.dim() == 4
        data = _gather_inputs(steps, q, k, v, g, beta[..., 0] if per_column else beta, scale)
        state = _initial_state(steps, data, initial_state, state_v_first)
        betas = steps.gather(beta, _compute_dtype(q)) if per_column else data.beta.unsqueeze(-1)
        decays = [data.g.exp().unsqueeze(-1)]
        if gk is not None:
            decays.append(steps.gather(gk, _compute_dtype(q)).exp().transpose(-1, -2))
        if gv is not None:
            decays.append(steps.gather(gv, _compute_dtype(q)).exp())

        outputs, finished = [], []
        for q_t, k_t, v_t, beta_t, *decays_t in steps.split(data.q, data.k, data.v, betas, *decays):
            state, done = state.split([len(q_t), len(state) - len(q_t)])
            finished.append(done)
            for decay_t in decays_t:
                state = state * decay_t
            error = v_t - k_t @ state
            state = state + k_t.transpose(-1, -2) * (beta_t * error)
            outputs.append(q_t @ state)
        return _finish(steps, data, q, outputs, [state, *reversed(finished)], output_final_state, state_v_first)


def chunked_gated_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    state_v_first: bool = False,
    cu_seqlens: Tensor | None = None,
    chunk_size: int = CHUNK,
) -> tuple[Tensor, Tensor | None]:
    """Gated Delta Rule in chunks: parallel within a chunk, one step per chunk across chunks.

    The arguments and the results are those of ``recurrent_gated_delta_rule``; chunk_size is the number of tokens of a
    chunk, which changes only how the result is rounded.
    """
    with torch.autocast(device_type=q.device.type, enabled=False):
        steps = _plan_steps(q, cu_seqlens, chunk_size)
        data = _gather_inputs(steps, q, k, v, g, beta, scale)
        state = _initial_state(steps, data, initial_state, state_v_first)

        decay = _pairwise_decay(data.g)  # Gamma
        inverse = _gated_inverse(data.k, data.beta, decay)  # A
        scores = decay * (data.q @ data.k.transpose(-1, -2))  # Gamma * Q K^T
        gamma = data.g.cumsum(-1).exp().unsqueeze(-1)
        to_end = decay[..., -1, :].unsqueeze(-1)  # gamma_L / gamma: rows past a sequence's end have g = 0
        betas = data.beta.unsqueeze(-1)
        q_decayed = gamma * data.q
        k_decayed = gamma * data.k
        k_to_end_t = (to_end * data.k).transpose(-1, -2)

        outputs, finished = [], []
        for A, P, Q, K, K_end_t, V, b, gamma_end in steps.split(
            inverse, scores, q_decayed, k_decayed, k_to_end_t, data.v, betas, gamma[..., -1:, :]
        ):
            state, done = state.split([len(A), len(state) - len(A)])
            finished.append(done)
            added = A @ (b * (V - K @ state))
            outputs.append(Q @ state + P @ added)
            state = gamma_end * state + K_end_t @ added
        return _finish(steps, data, q, outputs, [state, *reversed(finished)], output_final_state, state_v_first)


def chunk_gate_sum_and_inverse(k: Tensor, g: Tensor, beta: Tensor, cu_seqlens: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """What the first kernel computes for each chunk of 64 tokens, in the layout it leaves in memory.

    k: [B, T, H, K]; g, beta: [B, T, HV]; cu_seqlens: as in ``recurrent_gated_delta_rule``.

    Returns (g_cum, A). g_cum [B, T, HV]: sum of the gates from the chunk's first token to this one, in log2 units, each
    gate cut at -256. A [B, T, HV, 64]: rows of the gated inverse of the token's chunk, 0 above the diagonal and past
    the sequence's end. Both float32 (float64 when k is float64); 0 in rows that no sequence owns.
    """
    with torch.autocast(device_type=k.device.type, enabled=False):
        steps = _plan_steps(k, cu_seqlens, CHUNK, shrink=False)
        dtype = _compute_dtype(k)
        heads = g.shape[2]
        keys = steps.gather(k, dtype).repeat_interleave(heads // k.shape[2], dim=1)
        gates, betas = (steps.gather(x.unsqueeze(-1), dtype).squeeze(-1) for x in (g, beta))
        log2_gates = gates * math.log2(math.e)
        log2_gates = torch.where(log2_gates < MIN_LOG2_GATE, MIN_LOG2_GATE, log2_gates)
        inverse = _gated_inverse(keys, betas, _pairwise_decay(gates))
        return steps.scatter(log2_gates.cumsum(-1).unsqueeze(-1)).squeeze(-1), steps.scatter(inverse)


def gates_from_chunk_sums(g_cum: Tensor, cu_seqlens: Tensor | None = None) -> Tensor:
    """Natural-log gates [B, T, HV] from their sums within chunks of 64 in log2 units, as ``chunk_gate_sum_and_inverse`` gives them."""
    steps = _plan_steps(g_cum, cu_seqlens, CHUNK, shrink=False)
    sums = steps.gather(g_cum.unsqueeze(-1), g_cum.dtype)
    return steps.scatter(torch.diff(sums, dim=2, prepend=torch.zeros_like(sums[:, :, :1])) * math.log(2)).squeeze(-1)


def chunked_gradients(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    scale: float | None,
    initial_state: Tensor | None,
    do: Tensor,
    dht: Tensor | None,
    state_v_first: bool = False,
    cu_seqlens: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor | None]:
    """Gradients of ``chunked_gated_delta_rule`` for given ones of o (do) and the final state (dht, or None).

    Returns (dq, dk, dv, dg, dbeta, dh0), the first three in q's dtype, the others in the dtype of the computation; dh0 is None
    without initial_state.
    """
    wide = _compute_dtype(q)
    inputs = (q, k, v, g.to(wide), beta.to(wide), None if initial_state is None else initial_state.to(wide))
    leaves = [None if x is None else x.detach().requires_grad_() for x in inputs]
    with torch.enable_grad():
        q_, k_, v_, g_, beta_, state = leaves
        assert q_ is not None and k_ is not None and v_ is not None and g_ is not None and beta_ is not None
        o, final_state = chunked_gated_delta_rule(q_, k_, v_, g_, beta_, scale, state, dht is not None, state_v_first, cu_seqlens)
    pairs = [(o, do.to(o.dtype))]
    if dht is not None and final_state is not None:
        pairs.append((final_state, dht.to(final_state.dtype)))
    wanted = [x for x in leaves if x is not None]
    results, grads = zip(*pairs, strict=True)
    dq, dk, dv, dg, dbeta, *dh0 = torch.autograd.grad(results, wanted, grads, allow_unused=True, materialize_grads=True)
    return dq, dk, dv, dg, dbeta, dh0[0] if dh0 else None


@dataclass(frozen=True)
class _Steps:
    """Chunks of all sequences in the order of time: first every sequence's first chunk, then every second one, and so on.

    Sequences are taken longest first, so the ones still running at a step are always a leading part of the state.
    ``rows`` [chunks, C] are token rows of the flattened input, ``valid`` [chunks, C] whether the row is the sequence's,
    ``active`` how many sequences have a chunk at each step, ``order`` [S] the sequences' own numbers.
    """

    batch: int
    tokens: int
    rows: Tensor
    valid: Tensor
    active: list[int]
    order: Tensor

    def split(self, *tensors: Tensor) -> Iterator[tuple[Tensor, ...]]:
        """For each step, its part of every [chunks, ..] tensor. (One split each: slices would cost backward a full-size zero a step.)"""
        return zip(*(x.split(self.active) for x in tensors), strict=True)

    def gather(self, x: Tensor, dtype: torch.dtype) -> Tensor:
        """[B, T, H, D] to [chunks, H, C, D] in ``dtype``. Rows outside a sequence become 0 whatever they hold, NaN too."""
        picked = x.flatten(0, 1).index_select(0, self.rows.flatten()).to(dtype)
        picked = picked.view(*self.rows.shape, *x.shape[2:])
        return torch.where(self.valid[..., None, None], picked, 0).transpose(1, 2)

    def scatter(self, x: Tensor) -> Tensor:
        """[chunks, H, C, D] to [B, T, H, D]; rows that no sequence owns are 0."""
        values = x.transpose(1, 2)[self.valid]
        out = values.new_zeros(self.batch * self.tokens, *values.shape[1:])
        return out.index_copy(0, self.rows[self.valid], values).view(self.batch, self.tokens, *values.shape[1:])


@dataclass(frozen=True)
class _Inputs:
    """Gathered inputs in the compute dtype, heads first: q (times scale), k, v [chunks, HV, C, D]; g, beta [chunks, HV, C]."""

    q: Tensor
    k: Tensor
    v: Tensor
    g: Tensor
    beta: Tensor


def _compute_dtype(x: Tensor) -> torch.dtype:
    return torch.float64 if x.dtype == torch.float64 else torch.float32


def _plan_steps(x: Tensor, cu_seqlens: Tensor | None, chunk: int, shrink: bool = True) -> _Steps:
    """Lays the sequences of x [B, T, ..] out in chunks. ``shrink``: no chunk longer than the longest sequence."""
    batch, tokens = x.shape[:2]
    if cu_seqlens is None:
        begins = torch.arange(batch) * tokens
        ends = begins + tokens
    else:
        # Out-of-order values give empty sequences, never rows out of bounds.
        bounds = cu_seqlens.detach().to("cpu", torch.int64).clamp(0, batch * tokens)
        begins, ends = bounds[:-1], torch.maximum(bounds[1:], bounds[:-1])
    lengths = ends - begins
    longest = int(lengths.max()) if lengths.numel() else 0
    if shrink:
        chunk = min(chunk, max(longest, 1))

    chunks = (lengths + chunk - 1) // chunk
    order = torch.argsort(chunks, descending=True, stable=True)
    begins, ends, chunks = begins[order], ends[order], chunks[order]
    num_steps = (longest + chunk - 1) // chunk
    active = len(order) - torch.searchsorted(chunks.flip(0), torch.arange(num_steps), right=True)
    step = torch.arange(num_steps).repeat_interleave(active)
    rank = torch.arange(len(step)) - (active.cumsum(0) - active)[step]
    rows = (begins[rank] + step * chunk)[:, None] + torch.arange(chunk)
    valid = rows < ends[rank][:, None]
    rows = torch.where(valid, rows, begins[rank][:, None])  # any row of the sequence: gather() blanks it
    return _Steps(batch, tokens, rows.to(x.device), valid.to(x.device), active.tolist(), order.to(x.device))


def _gather_inputs(steps: _Steps, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, scale: float | None) -> _Inputs:
    dtype = _compute_dtype(q)
    ratio = v.shape[2] // q.shape[2]
    # Repeated in the compute dtype: the gradients of a group of value heads are summed there too.
    keys = steps.gather(k, dtype).repeat_interleave(ratio, dim=1)
    queries = steps.gather(q, dtype).repeat_interleave(ratio, dim=1) * (q.shape[-1] ** -0.5 if scale is None else scale)
    gates, betas = (steps.gather(x.unsqueeze(-1), dtype).squeeze(-1) for x in (g, beta))
    return _Inputs(queries, keys, steps.gather(v, dtype), gates, betas)


def _initial_state(steps: _Steps, data: _Inputs, initial_state: Tensor | None, state_v_first: bool) -> Tensor:
    """The states [S, HV, K, V] in the order of ``steps``."""
    if initial_state is None:
        return data.v.new_zeros(len(steps.order), data.v.shape[1], data.k.shape[-1], data.v.shape[-1])
    state = initial_state.to(data.v.dtype).index_select(0, steps.order)
    # Contiguous, so that both layouts go through the same arithmetic and agree in every bit.
    return state.transpose(-1, -2).contiguous() if state_v_first else state


def _pairwise_decay(g: Tensor) -> Tensor:
    """Gamma [.., C, C] of log gates g [.., C]: exp(g_{j+1} + .. + g_i) for i >= j, 0 above the diagonal."""
    size = g.shape[-1]
    lower = torch.ones(size, size, dtype=torch.bool, device=g.device).tril()
    gates_after = torch.where(lower.tril(-1), g.unsqueeze(-1), 0)  # column j keeps the gates of tokens l > j
    return gates_after.cumsum(-2).masked_fill(~lower, -math.inf).exp()


def _gated_inverse(k: Tensor, beta: Tensor, decay: Tensor) -> Tensor:
    """(I + StrictLower(diag(beta) (Gamma * K K^T)))^-1 for k [.., C, K], beta [.., C], Gamma [.., C, C].

    In float64 throughout: with nearly equal keys and beta near 2 the solution amplifies rounding a thousandfold.
    """
    wide = k.double()
    products = (beta.double().unsqueeze(-1) * (decay.double() * (wide @ wide.transpose(-1, -2)))).tril(-1)
    identity = torch.eye(k.shape[-2], dtype=wide.dtype, device=k.device)
    inverse: Tensor = torch.linalg.solve_triangular(identity + products, identity.expand_as(products), upper=False, unitriangular=True)
    return inverse.to(k.dtype)


def _finish(
    steps: _Steps,
    data: _Inputs,
    q: Tensor,
    outputs: list[Tensor],
    states: list[Tensor],
    output_final_state: bool,
    state_v_first: bool,
) -> tuple[Tensor, Tensor | None]:
    """Puts o and the final states back into the caller's order, layout and dtype."""
    if not outputs:  # no token at all: nothing to add up, but o stays a function of every input
        outputs = [data.v + sum(x.sum() for x in (data.q, data.k, data.g, data.beta))]
    o = steps.scatter(torch.cat(outputs)).to(q.dtype)
    if not output_final_state:
        return o, None
    final = torch.cat(states).index_select(0, steps.order.argsort())
    return o, final.transpose(-1, -2).contiguous() if state_v_first else final
