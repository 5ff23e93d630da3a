"""How the kernels are called: what each allocates, its arguments and its grid, and where its compiled function comes from.

Nothing here needs TileLang but ``launcher``, for a kernel that the package does not carry (``qla.kernels.carried``). What the kernel
files share with their launch stands here, too.
"""

import functools
import importlib
import math
from collections.abc import Callable, Iterator
from typing import Any

import torch

from qla.kernels import carried

CHUNK = 64  # tokens a chunk
HALF = 64  # columns of K that a state fragment covers, and of V that a block has where two share a head: halves of 128
HEAD_DIMS = (64, 128)  # what K and V may be: other heads are padded by the caller
NO_ITEMS, OWN_ITEMS, PREP_STATE, PREP_TRANSITION, OWN_SEGMENTS = range(5)  # ways to find a block's item; ws.cuh names the same
HALVES = (torch.bfloat16, torch.float16)

# Of l2norm
NORM_THREADS = 256
NORM_VECTOR = 8  # elements of a lane, 16 bytes
NORM_ROWS_OF_LANES = 4  # that a group of lanes has in flight
NORM_BLOCKS_PER_SM = 8

# Of gates
GATES_THREADS = 256
GATES_QUAD = 4  # heads of a thread, where HV is a multiple
GATES_TOKENS_AT_ONCE = 2  # of a thread, forward
GATES_BLOCKS_PER_SM = 3  # backward, each of which is a row in the sum over them
ACTIVATE_GATE, HAS_BIAS, ACTIVATE_BETA, TWICE = 1, 2, 4, 8  # options; gates.cuh names the same
TYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}  # of elements; gates.cuh names the same

# Of kkt_solve
UNIT_HEADS = 4  # value heads of a unit: one warp each
KKT_BLOCKS_PER_SM = {2: 3, 4: 2}  # kk_slots -> blocks

# Of recurrent
QUAD = 4
COLUMNS = 8  # of V a warp owns
WARPS = 4
SEQS_AT_ONCE = 65535  # blocks in z
KINDS = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}  # the same enum is in recurrent.cuh
KIND_BITS = 2
G, A_LOG, DT_BIAS, GK, BETA, GV = range(6)  # places of kinds
NORMALISE, SIGMOID, DOUBLE, BETA_PER_COLUMN, WITH_STATE, WITH_FINAL, WIDE_OFFSETS = (1 << i for i in range(7))  # flags


def _kk_slots(ratio: int) -> int:
    """Slots of products that a unit of kkt_solve needs: its value heads span four key heads where HV == H, else two at most."""
    return 4 if ratio == 1 else 2


def _short(dtype: torch.dtype) -> str:
    return "bf16" if dtype == torch.bfloat16 else "f16"


def _long(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


# kernel file -> name of the variant for a form: the arguments of the file's `config_for`, whose config has the same name.
NAMES: dict[str, Callable[..., str]] = {
    "l2norm": lambda dtype, backward: f"l2norm_{'bwd' if backward else 'fwd'}_{_short(dtype)}",
    "gates": lambda backward: f"gates_{'bwd' if backward else 'fwd'}",
    "kkt_solve": lambda dtype, ratio, head_k: f"kkt_solve_k{head_k}_{_short(dtype)}_kk{_kk_slots(ratio)}",
    "cp_plan": lambda: "cp_plan",
    "cp_prep": lambda reverse, block_v, dtype, head_k: f"scan_{'reverse' if reverse else 'forward'}_k{head_k}_v{block_v}_{_long(dtype)}",
    "cp_merge": lambda reverse, head_k: f"merge_{'reverse' if reverse else 'forward'}_k{head_k}",
    "fwd_fused": lambda block_v, dtype, head_k: f"fwd_fused_k{head_k}_v{block_v}_{_long(dtype)}",
    "bwd_fused": lambda dtype, head_k, head_v: f"bwd_fused_k{head_k}_v{head_v}_{_long(dtype)}",
    "recurrent": lambda dtype, v_first, warps: (
        f"recurrent_{'v' if v_first else 'k'}first_{_long(dtype)}{'' if warps == WARPS else f'_{warps}warps'}"
    ),
}

# kernel file -> a form of each listed variant
FORMS: dict[str, tuple[tuple[Any, ...], ...]] = {
    "l2norm": tuple((dtype, backward) for dtype in HALVES for backward in (False, True)),
    "gates": ((False,), (True,)),
    "kkt_solve": tuple((dtype, ratio, head_k) for dtype in HALVES for head_k in HEAD_DIMS for ratio in (2, 1)),
    "cp_plan": ((),),
    "cp_prep": tuple(
        (reverse, block_v, dtype, head_k) for dtype in HALVES for head_k in HEAD_DIMS for reverse in (False, True) for block_v in (128, 64)
    ),
    "cp_merge": tuple((reverse, head_k) for head_k in HEAD_DIMS for reverse in (False, True)),
    "fwd_fused": tuple((block_v, dtype, head_k) for dtype in HALVES for head_k in HEAD_DIMS for block_v in (128, 64)),
    "bwd_fused": tuple((dtype, head_k, head_v) for dtype in HALVES for head_k in HEAD_DIMS for head_v in HEAD_DIMS),
    "recurrent": tuple((dtype, v_first, WARPS) for dtype in (*HALVES, torch.float32) for v_first in (False, True)),
}


def names(only: str = "") -> Iterator[str]:
    """Names of all listed variants that hold ``only``."""
    for kernel, forms in FORMS.items():
        yield from (name for form in forms if only in (name := NAMES[kernel](*form)))


@functools.lru_cache(maxsize=256)
def launcher(kernel: str, *form: Any) -> Callable[..., None]:
    """What launches a variant, found again at the price of one look: the function in its library.

    It is the one that the package carries, or TileLang compiles it or has it in its cache: then what TileLang wraps, whose own way to it
    goes through all arguments once more for each call, to allocate results, of which these kernels have none. The function checks number,
    dtypes, shapes and devices of its arguments, and launches on PyTorch's current stream of their device.

    kernel: name of its file. form: what the file's `config_for` takes.
    """
    found = carried.function(NAMES[kernel](*form))
    if found is not None:
        return found
    module = importlib.import_module(f"qla.kernels.{kernel}")
    compiled = module.build(module.config_for(*form))
    function: Callable[..., None] = compiled.adapter.get_exportable_executable()["main"]
    return function


@functools.lru_cache(maxsize=64)
def unread(device: torch.device, dtype: torch.dtype = torch.int32) -> torch.Tensor:
    """A tensor without elements, to stand where a kernel reads and writes nothing, the same one each time.

    It owns no memory, so that none is taken from a CUDA graph's pool that outlives the graph.
    """
    return torch.empty(0, dtype=dtype, device=device)


@functools.lru_cache(maxsize=1024)
def choose_block_v(items: int, num_sms: int) -> int:
    """Columns of V a block owns: 64 doubles the blocks where whole heads leave SMs idle.

    A chunk takes a block of the fused forward about 2.0 us with 128 columns and 1.3 with 64 (us_per_chunk in
    bench/results/fwd_targets.jsonl), so the split pays while it does not add waves. The scans follow the same rule.
    """
    whole, split = math.ceil(items / num_sms) * 2.0, math.ceil(2 * items / num_sms) * 1.3
    return 64 if split < whole else 128


def num_slots(tokens: int, num_seqs: int, seq_len: int) -> int:
    """Chunk slots, empty ones included, from what the host knows; ws.cuh numbers them in the same way."""
    return num_seqs * -(-seq_len // CHUNK) if seq_len > 0 else tokens // CHUNK + num_seqs + 1


def _norm_blocks(rows: int, dim: int, num_sms: int) -> int:
    at_once = NORM_THREADS // (dim // NORM_VECTOR) * NORM_ROWS_OF_LANES
    return max(1, min(-(-rows // at_once), NORM_BLOCKS_PER_SM * num_sms // 2))


def _elements(x: torch.Tensor) -> torch.Tensor:
    """All elements between the first and the last of x [N, H, K], as they lie in memory."""
    tokens, heads, dim = x.shape
    return x.as_strided(((tokens - 1) * x.stride(0) + (heads - 1) * x.stride(1) + dim,), (1,))


def l2norm(q, k, cu_seqlens, eps, num_sms) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Normalised q and k, contiguous, and the factors of their rows, [N, H] fp32; one launch on the current stream.

    Args:
        q, k: [N, H, K] bf16 or fp16, N > 0, K 64 or 128, at 16-byte aligned addresses; the last dimension is contiguous, the other
            strides are multiples of 8.
        cu_seqlens: int32 [S + 1] on the device, or None: then every row is owned.
        eps: added to the sum of squares.
        num_sms: multiprocessors of the device.
    """
    yq, yk = (torch.empty_like(x, memory_format=torch.contiguous_format) for x in (q, k))
    rq, rk = (torch.empty(x.shape[:2], dtype=torch.float32, device=x.device) for x in (q, k))
    launcher("l2norm", q.dtype, False)(
        _elements(q),
        _elements(k),
        unread(q.device) if cu_seqlens is None else cu_seqlens,
        yq,
        yk,
        rq,
        rk,
        *(q.stride(0), q.stride(1), k.stride(0), k.stride(1)),
        -1 if cu_seqlens is None else len(cu_seqlens) - 1,
        eps,
        _norm_blocks(rq.numel(), q.shape[2], num_sms),
    )
    return yq, yk, rq, rk


def l2norm_backward(dyq, dyk, yq, yk, rq, rk, num_sms) -> tuple[torch.Tensor, torch.Tensor]:
    """Gradients of q and k from those of the normalised ones; one launch on the current stream.

    Args:
        dyq, dyk: [N, H, K], N > 0, contiguous, in the dtype of yq and yk.
        yq, yk, rq, rk: results of `l2norm`.
        num_sms: multiprocessors of the device.
    """
    dq, dk = torch.empty_like(yq), torch.empty_like(yk)
    launcher("l2norm", yq.dtype, True)(
        dyq, dyk, yq, yk, rq, rk, dq, dk, _norm_blocks(rq.numel(), yq.shape[2], num_sms)
    )  # fmt: skip
    return dq, dk


def _gate_grid(tokens: int, heads: int, tokens_of_thread: int) -> tuple[int, int]:
    """Blocks for all tokens, and for all heads."""
    units = heads // GATES_QUAD if heads % GATES_QUAD == 0 else heads
    return -(-tokens // (GATES_THREADS // min(GATES_THREADS, units) * tokens_of_thread)), -(-units // GATES_THREADS)


def _bytes(x: torch.Tensor) -> torch.Tensor:
    return x.view(-1).view(torch.uint8)


def _gate_arguments(raw_g, raw_beta, A_log, dt_bias, cu_seqlens, options):
    """Tensors, and the values that go with them, as both kernels take them; unused ones are not read."""
    if A_log is not None:
        options |= ACTIVATE_GATE
    if dt_bias is not None:
        options |= HAS_BIAS
    unused = unread(raw_g.device, torch.float32)
    A_log, dt_bias = (unused if x is None else x for x in (A_log, dt_bias))
    tensors = (raw_g, raw_beta, A_log, dt_bias)
    cu = unread(raw_g.device) if cu_seqlens is None else cu_seqlens
    num_seqs = -1 if cu_seqlens is None else len(cu_seqlens) - 1
    return [_bytes(x) for x in tensors], cu, (options, *(TYPES[x.dtype] for x in tensors), num_seqs)


def gates(raw_g, raw_beta, A_log, dt_bias, cu_seqlens, options) -> tuple[torch.Tensor, torch.Tensor]:
    """g and beta, [N, HV] fp32; one launch on the current stream.

    Args:
        raw_g, raw_beta: [N, HV], contiguous and 16-byte aligned, N > 0, each fp32, bf16 or fp16.
        A_log: [HV], likewise, or None: then g is raw_g. dt_bias: [HV], likewise, or None.
        cu_seqlens: int32 [S + 1] on the device, or None: then every row is owned.
        options: ACTIVATE_BETA for the sigmoid of beta, with TWICE for twice that; 0 for raw_beta itself.
    """
    g, beta = (torch.empty(raw_g.shape, dtype=torch.float32, device=raw_g.device) for _ in range(2))
    tensors, cu, form = _gate_arguments(raw_g, raw_beta, A_log, dt_bias, cu_seqlens, options)
    launcher("gates", False)(*tensors, cu, g, beta, *form, *_gate_grid(*raw_g.shape, GATES_TOKENS_AT_ONCE))
    return g, beta


def gates_backward(
    dg, dbeta, raw_g, raw_beta, A_log, dt_bias, cu_seqlens, options, num_sms
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
    """Gradients of raw_g and raw_beta in their dtypes, and of A_log and dt_bias in fp32 (None without them).

    One launch on the current stream, and a sum over its blocks if there is an A_log.

    Args:
        dg, dbeta: [N, HV] fp32, contiguous and 16-byte aligned: gradients of the results of `gates`.
        num_sms: multiprocessors of the device.
        The others as given to `gates`.
    """
    draw_g, draw_beta = torch.empty_like(raw_g), torch.empty_like(raw_beta)
    tensors, cu, form = _gate_arguments(raw_g, raw_beta, A_log, dt_bias, cu_seqlens, options)
    blocks, groups = _gate_grid(*raw_g.shape, 1)
    blocks = min(blocks, GATES_BLOCKS_PER_SM * num_sms)
    sums = torch.empty(blocks, 2, raw_g.shape[1], dtype=torch.float32, device=raw_g.device)
    launcher("gates", True)(dg, dbeta, *tensors, cu, _bytes(draw_g), _bytes(draw_beta), sums, *form, groups)
    if A_log is None:
        return draw_g, draw_beta, None, None
    dA_log, dbias = sums.sum(0)
    return draw_g, draw_beta, dA_log, None if dt_bias is None else dbias


@functools.lru_cache(maxsize=1024)
def num_units(tokens: int, value_heads: int, num_seqs: int, seq_len: int) -> int:
    """Units to look at, empty ones included, from what the host knows; kkt_solve.cuh numbers them in the same way."""
    return num_slots(tokens, num_seqs, seq_len) * -(-value_heads // UNIT_HEADS)


def kkt_solve(
    k: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    o: torch.Tensor,
    cu_seqlens: torch.Tensor | None,
    num_seqs: int,
    seq_len: int,
    num_sms: int,
    with_bound: bool = False,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """Cumulative gates, gated inverses and transition bounds of all chunks; one launch on the current stream, no host synchronisation.

    Args:
        k: keys [N, H, K], bf16 or fp16, contiguous, K 64 or 128.
        g: natural-log gates [N, HV] fp32, contiguous, HV a multiple of H. -inf is legal (a hard reset), positive values too.
        beta: [N, HV] fp32, contiguous.
        o: [N, HV, V] in k's dtype, contiguous, V 64 or 128; its rows that no sequence owns are set to zero, the others are left alone.
        cu_seqlens: [num_seqs + 1] int32 on k's device, or None for equal lengths.
        num_seqs: number of sequences.
        seq_len: their length if it is the same for all (N = num_seqs * seq_len), 0 to read cu_seqlens.
        num_sms: multiprocessors to fill.
        with_bound: whether to compute the bounds.

    Returns:
        g_cum [N, HV] fp32: sums of g log2(e) within each chunk of 64 tokens; a token's gate counts as 2^-256 at least.
        A [N, HV, 64] in k's dtype: row i of a token's chunk of Gamma * (I + StrictLower(diag(beta) K K^T))^-1, zero past the chunk's end.
        bound [num_slots(..), HV] fp32: log2 of what each chunk leaves of a state at most; undefined in slots without a chunk.
            None without with_bound.
    """
    tokens, key_heads, key_dim = k.shape
    value_heads = g.shape[1]
    dtype, device = k.dtype, k.device
    g_cum = torch.empty_like(g)
    A = k.new_empty(tokens, value_heads, CHUNK)
    bound = None
    if with_bound:
        bound = torch.empty(num_slots(tokens, num_seqs, seq_len), value_heads, dtype=torch.float32, device=device)
    if tokens == 0:
        return g_cum, A, bound
    if k.data_ptr() % 16:
        k = k.clone()  # TMA reads from multiples of 16 bytes
    ratio = value_heads // key_heads
    launcher("kkt_solve", dtype, ratio, key_dim)(
        k,
        g,
        beta,
        unread(device) if cu_seqlens is None else cu_seqlens,
        A,
        g_cum,
        g_cum if bound is None else bound,
        o,
        ratio,
        num_seqs,
        seq_len,
        int(value_heads % UNIT_HEADS == 0 and g.data_ptr() % 16 == 0 and beta.data_ptr() % 16 == 0),
        int(with_bound),
        min(num_units(tokens, value_heads, num_seqs, seq_len), num_sms * KKT_BLOCKS_PER_SM[_kk_slots(ratio)]),
    )
    return g_cum, A, bound


def cp_plan(
    bound,
    cu_seqlens,
    tokens,
    num_seqs,
    seq_len,
    num_segments,
    segment_chunks,
    split,
    inline_warmup,
    max_warmup,
    max_transition_heads,
    max_serial_heads,
    threshold,
    num_sms,
    value_dim,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Items of both directions, [num_segments, HV, 4] int32, forward first, and the order of their blocks, [2 num_segments HV + 1] int32,
    whose last element is 1 if the sequences stay whole.

    One launch on the current stream, no host synchronisation.

    Args:
        bound: [slots, HV] fp32, log2 of the chunks' transition bounds (`kkt_solve`).
        cu_seqlens: int32 [num_seqs + 1] on the device, or None for num_seqs sequences of seq_len tokens.
        tokens: of all sequences.
        num_segments: rows of the tables, enough for any lengths.
        segment_chunks: L.
        split: whether two blocks share an item.
        inline_warmup: warm-ups up to so many chunks are the item's own, longer ones are left to cp_prep.
        max_warmup, max_transition_heads, max_serial_heads: see the head of cp_plan.py.
        threshold: log2 units, > 0.
        num_sms: multiprocessors of the device.
        value_dim: V; what is 64 wide is not split.
    """
    may_split = value_dim > HALF
    heads = bound.shape[1]
    forward, reverse = torch.empty(2, num_segments, heads, 4, dtype=torch.int32, device=bound.device)
    order = torch.empty(2 * num_segments * heads + 1, dtype=torch.int32, device=bound.device)
    launcher("cp_plan")(
        bound,
        unread(bound.device) if cu_seqlens is None else cu_seqlens,
        forward,
        reverse,
        order,
        torch.empty(num_seqs, heads, dtype=torch.int32, device=bound.device),
        0 if cu_seqlens is not None else seq_len,
        tokens,
        segment_chunks,
        int(split and may_split),
        inline_warmup,
        max_warmup,
        max_transition_heads,
        max_serial_heads,
        num_sms // 2 if may_split else -1,
        threshold,
    )
    return forward, reverse, order


def scan_states(
    k, v, g_cum, beta, A, states, values, head0, initial_state, cu_seqlens, num_seqs, seq_len, state_v_first, num_sms,
    items=None, segment_states=None,
) -> None:  # fmt: skip
    """Writes the state that enters each chunk, and Vd; one launch on the current stream.

    Args:
        k: [N, H, K] bf16 or fp16, contiguous, 16-byte aligned, K 64 or 128. N tokens of all sequences, packed.
        v: [N, HV, V], dtype of k, V 64 or 128.
        g_cum, beta: [N, HV] fp32; log2 gates summed within the chunk (`kkt_solve`).
        A: [N, HV, 64], dtype of k, gated inverse (`kkt_solve`).
        states: [num_slots(...), heads, V, K], dtype of k, of value heads head0 .. head0 + heads - 1; written in the slots of all chunks.
        values: [N, heads, V], dtype of k, of the same heads; written with Vd in the rows of all sequences.
        initial_state: fp32 [num_seqs, HV, K, V] or None, with state_v_first [num_seqs, HV, V, K].
        cu_seqlens: int32 [num_seqs + 1] on the device, or None for num_seqs sequences of seq_len tokens.
        num_sms: multiprocessors of the device.
        items: int32 [segments, HV, 4] (`cp_plan`), or None for one item a sequence and head.
        segment_states: fp32 [segments, HV, V, K] in accumulators' order, read where an item says so (`prepare_states`).
    """
    place = (cu_seqlens, num_seqs, seq_len, state_v_first, num_sms)
    ends = (initial_state, None, 1.0)
    _scan(False, k, k, v, g_cum, beta, A, states, values, head0, head0, *ends, *place, items, segment_states)


def scan_state_gradients(
    q, k, do, g_cum, beta, A, states, values, head0, final_grad, initial_grad, scale, cu_seqlens, num_seqs, seq_len, state_v_first,
    num_sms, items=None, segment_states=None,
) -> None:  # fmt: skip
    """Writes the gradient of the state that leaves each chunk, of the initial state, and dW; one launch on the current stream.

    Args as of `scan_states`, items and segment_states of the reverse direction, and:
        q: as k. do: gradient of o, as v.
        states: written with the gradients.
        values: [N, HV, V], of all heads; written with dW for those of `states`, in the rows of all sequences.
        final_grad, initial_grad: gradients of the final state (None: zero) and of the initial one (None: not wanted), as initial_state.
        scale: run-time float, finite and >= 0.
    """
    place = (cu_seqlens, num_seqs, seq_len, state_v_first, num_sms)
    ends = (final_grad, initial_grad, scale)
    _scan(True, q, k, do, g_cum, beta, A, states, values, head0, 0, *ends, *place, items, segment_states)


def prepare_states(
    k, v, g_cum, beta, A, initial_state, cu_seqlens, num_seqs, seq_len, state_v_first, num_sms, items, segment_states, transitions
) -> None:
    """Writes the states that items start from, or what `cp_merge` makes them of; one launch on the current stream.

    Args as of `scan_states`, and:
        segment_states: written for the items that say so.
        transitions: bf16 [segments, HV, 2, K, K], M^T [in, out] as a high and a low part, written for the items that say so, or
            None where none may.
    """
    states = segment_states.view(k.dtype).view(-1, *segment_states.shape[1:])  # not written
    place = (cu_seqlens, num_seqs, seq_len, state_v_first, num_sms)
    ends = (initial_state, None, 1.0)
    _scan(False, k, k, v, g_cum, beta, A, states, v, 0, 0, *ends, *place, items, segment_states, transitions, prepare=True)


def prepare_state_gradients(
    q, k, do, g_cum, beta, A, final_grad, scale, cu_seqlens, num_seqs, seq_len, state_v_first, num_sms, items, segment_states
) -> None:
    """As `prepare_states`, of the gradients; the transitions are those of the forward direction. Args as of `scan_state_gradients`."""
    states = segment_states.view(k.dtype).view(-1, *segment_states.shape[1:])  # not written
    place = (cu_seqlens, num_seqs, seq_len, state_v_first, num_sms)
    _scan(True, q, k, do, g_cum, beta, A, states, do, 0, 0, final_grad, None, scale, *place, items, segment_states, prepare=True)


def _scan(
    reverse, q, k, x, g_cum, beta, A, states, values, head0, values_head0, begin, end, scale, cu_seqlens, num_seqs, seq_len,
    state_v_first, num_sms, items, segment_states, transitions=None, prepare=False,
) -> None:  # fmt: skip
    num_rows = num_seqs if items is None else len(items)
    if x.shape[2] == HALF or (transitions is not None and q.shape[2] == HALF):
        block_v = HALF
    else:  # as in an uncut call, which is what serial heads are; preparing, all items are alike
        block_v = choose_block_v((num_rows if prepare else num_seqs) * states.shape[1], num_sms)
    nothing, no_offsets = unread(k.device, torch.float32), unread(k.device)
    launcher("cp_prep", reverse, block_v, k.dtype, k.shape[2])(
        q,
        k,
        x,
        A,
        g_cum,
        beta,
        states,
        values,
        nothing if begin is None else begin.view(-1),
        nothing if end is None else end.view(-1),
        no_offsets if cu_seqlens is None else cu_seqlens,
        no_offsets if items is None else items.view(-1),
        nothing if segment_states is None else segment_states.view(-1),
        unread(k.device, torch.bfloat16) if transitions is None else transitions.view(-1),
        head0,
        values_head0,
        num_rows,
        NO_ITEMS if items is None else PREP_STATE if prepare else OWN_ITEMS,
        1 if transitions is None else 2,
        0 if cu_seqlens is not None else seq_len,
        math.log2(scale) if scale > 0 else -math.inf,
        int(begin is not None),
        int(end is not None),
        int(state_v_first),
    )


def cp_merge(segment_states, transitions, items, cu_seqlens, tokens, num_seqs, seq_len, segment_chunks, reverse) -> None:
    """Completes the states that the segments of heads with a transition start from; one launch on the current stream.

    Args:
        segment_states: fp32 [segments, HV, V, K], as `cp_prep` leaves them; in reverse the gradients.
        transitions: bf16 [segments, HV, 2, K, K] (`cp_prep`).
        items: int32 [segments, HV, 4], the forward ones (`cp_plan`).
        cu_seqlens: int32 [num_seqs + 1] on the device, or None for num_seqs sequences of seq_len tokens.
        tokens: of all sequences.
        segment_chunks: L, as given to `cp_plan`.
        reverse: whether these are gradients.
    """
    launcher("cp_merge", reverse, transitions.shape[-1])(
        segment_states.view(-1),
        transitions,
        items,
        unread(items.device) if cu_seqlens is None else cu_seqlens,
        segment_states.shape[2],
        num_seqs,
        0 if cu_seqlens is not None else seq_len,
        tokens,
        segment_chunks,
    )


def fwd_fused(
    q, k, v, g_cum, beta, A, o, initial_state, final_state, scale, cu_seqlens, num_seqs, seq_len, state_v_first, num_sms,
    items=None, order=None, segment_states=None, block_v=None, blocks_an_item=2,
    bound=None, num_segments=0, segment_chunks=1, max_warmup=0, threshold=0.0,
) -> None:  # fmt: skip
    """Launch the fused forward on the current stream.

    Args:
        q, k: [N, H, K] bf16 or fp16, contiguous, 16-byte aligned, K 64 or 128. N tokens of all sequences, packed.
        v, o: [N, HV, V], dtype of q, V 64 or 128; o is written for every token of a sequence.
        g_cum: [N, HV] fp32, log2 gates summed within the chunk (`kkt_solve`).
        beta: [N, HV] fp32.
        A: [N, HV, 64], dtype of q, gated inverse (`kkt_solve`).
        initial_state, final_state: fp32 [num_seqs, HV, K, V] or None, with state_v_first [num_seqs, HV, V, K].
        scale: run-time float, finite and >= 0.
        cu_seqlens: int32 [num_seqs + 1] on the device, or None for num_seqs sequences of seq_len tokens.
        num_sms: multiprocessors of the device.
        items, order: int32 [segments, HV, 4] and [2 segments HV + 1] (`cp_plan`), or None for one item a sequence and head. With order
            alone that only if its last element says so, else nothing.
        segment_states: fp32 [segments, HV, V, K] in accumulators' order, read where an item says so (`cp_prep`), or None.
        block_v: with V = 128 and without items, columns of V a block owns, 128 or 64; None: by the number of heads.
        blocks_an_item: at most, 1 or 2, by `order`.
        bound: [slots, HV] fp32 (`kkt_solve`), for blocks of 64 columns that find the segment they walk, and its warm-up, themselves;
            or None.
        num_segments, segment_chunks, max_warmup, threshold: for these, as for `cp_plan`.
    """
    if bound is not None:
        block_v = HALF
    elif v.shape[2] == HALF or items is not None:
        block_v = v.shape[2]
    elif block_v is None:
        block_v = choose_block_v(num_seqs * v.shape[1], num_sms)
    device, dtype = q.device, q.dtype
    nothing, no_offsets = unread(device, torch.float32), unread(device)
    launcher("fwd_fused", block_v, dtype, q.shape[2])(
        q,
        k,
        v,
        A,
        g_cum,
        beta,
        o,
        nothing if initial_state is None else initial_state.ravel(),
        nothing if final_state is None else final_state.ravel(),
        no_offsets if cu_seqlens is None else cu_seqlens,
        no_offsets if items is None else items.view(-1),
        no_offsets if order is None else order if items is not None else order[-1:],
        bound.view(-1) if bound is not None else nothing if segment_states is None else segment_states.view(-1),
        num_segments if bound is not None else num_seqs if items is None else -(-len(items) * blocks_an_item // 2),
        OWN_SEGMENTS if bound is not None else NO_ITEMS if items is None else OWN_ITEMS,
        0 if cu_seqlens is not None else seq_len,
        math.log2(scale) if scale > 0 else -math.inf,
        int(initial_state is not None),
        int(final_state is not None),
        int(state_v_first),
        num_seqs,
        segment_chunks,
        max_warmup,
        threshold,
    )


def bwd_fused(
    q, k, v, g_cum, beta, vd, do, dw, states, state_grads, dq, dk, dv, dg, dbeta, head0, scale, cu_seqlens, num_seqs, seq_len, num_sms
) -> None:
    """Gradients of the value heads that `states` holds and of their key heads; one launch on the current stream.

    Args:
        q, k, dq, dk: [N, H, K] bf16 or fp16, contiguous, 16-byte aligned, K 64 or 128. N tokens of all sequences, packed.
        v, do, dw, dv: [N, HV, V], dtype of q, V 64 or 128; dw as `cp_prep` leaves it. dv may be the same tensor.
        g_cum, beta, dg, dbeta: [N, HV] fp32; log2 gates summed within the chunk (`kkt_solve`); dg is the gradient of natural-log gates.
        vd: [N, heads, V], states, state_grads: [slots, heads, V, K], dtype of q, as `cp_prep` leaves them for value heads
            head0 .. head0 + heads - 1, whole groups.
        dq, dk, dv, dg, dbeta: written for these heads, in all rows: zero where no sequence owns one.
        scale: run-time float, finite and >= 0.
        cu_seqlens: int32 [num_seqs + 1] on the device, or None for num_seqs sequences of seq_len tokens.
        num_sms: multiprocessors of the device.
    """
    ratio = v.shape[1] // k.shape[1]
    slots, heads = states.shape[:2]
    launcher("bwd_fused", q.dtype, q.shape[2], v.shape[2])(
        q,
        k,
        v,
        vd,
        g_cum,
        beta,
        do,
        dw,
        states,
        state_grads,
        dq,
        dk,
        dv,
        dg,
        dbeta,
        unread(q.device) if cu_seqlens is None else cu_seqlens,
        head0,
        ratio,
        num_seqs,
        0 if cu_seqlens is not None else seq_len,
        math.log2(scale) if scale > 0 else -math.inf,
        min(slots * (heads // ratio), num_sms),
    )


def recurrent(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor | None,
    beta: torch.Tensor | None,
    gk: torch.Tensor | None,
    gv: torch.Tensor | None,
    A_log: torch.Tensor | None,
    dt_bias: torch.Tensor | None,
    o: torch.Tensor,
    initial_state: torch.Tensor | None,
    final_state: torch.Tensor | None,
    cu_seqlens: torch.Tensor | None,
    num_seqs: int,
    seq_len: int,
    scale: float,
    state_v_first: bool,
    normalise: bool,
    sigmoid: bool,
    double: bool,
    warps: int = WARPS,
) -> None:
    """The recurrence over all tokens; one launch on the current stream for up to 65535 sequences, no host synchronisation.

    Args:
        q, k: [B, T, H, K] bf16, fp16 or fp32, K a multiple of 4, at most 128; any strides (`token_rows`).
        v: [B, T, HV, V], same dtype, V likewise.
        g: [B, T, HV] fp32, bf16 or fp16, natural-log gates; gk, gv: [B, T, HV, K] and [B, T, HV, V], more of them. None is 0.
        beta: [B, T, HV] or [B, T, HV, V], likewise; None is 1.
        A_log, dt_bias: [HV], likewise; with A_log the gate is -exp(A_log) softplus(g + dt_bias).
        o: [B, T, HV, V] in q's dtype, contiguous; written as a whole, zero in rows that no sequence owns.
        initial_state, final_state: [num_seqs, HV, K, V] fp32, V-first [num_seqs, HV, V, K], contiguous and 16-byte aligned; or None.
        cu_seqlens: [num_seqs + 1] int32 or int64 on q's device, or None for num_seqs sequences of seq_len tokens.
        scale: factor on o.
        normalise: divide rows of q and k by sqrt(sum of squares + 1e-6).
        sigmoid, double: sigmoid(beta), and twice that, in place of beta.
        warps: a block, for measurements.
    """
    batch, length, key_heads, key_dim = k.shape
    heads, value_dim = v.shape[2:]
    (q_flat, q_step), (k_flat, k_step), (v_flat, v_step) = (token_rows(x) for x in (q, k, v))
    small = [None if x is None else x.contiguous() for x in (g, A_log, dt_bias, gk, beta, gv)]
    kinds = sum(KINDS[x.dtype] << (KIND_BITS * place) for place, x in enumerate(small) if x is not None)
    if cu_seqlens is not None:
        cu_seqlens = cu_seqlens.contiguous()
    flags = sum(flag for flag, wanted in (
        (NORMALISE, normalise),
        (SIGMOID, sigmoid),
        (DOUBLE, double),
        (BETA_PER_COLUMN, beta is not None and beta.dim() == 4),
        (WITH_STATE, initial_state is not None),
        (WITH_FINAL, final_state is not None),
        (WIDE_OFFSETS, cu_seqlens is not None and cu_seqlens.dtype == torch.int64),
    ) if wanted)  # fmt: skip
    absent = None
    if initial_state is None and final_state is None:
        absent = unread(q.device, torch.float32)
    states = [x if x is not None else other if other is not None else absent for x, other in (
        (initial_state, final_state), (final_state, initial_state),
    )]  # fmt: skip
    launch = launcher("recurrent", q.dtype, bool(state_v_first), warps)
    for first_seq in range(0, num_seqs, SEQS_AT_ONCE):
        launch(
            q_flat,
            k_flat,
            v_flat,
            o.view(-1),
            *(x.view(-1) for x in states),
            *(0 if x is None else x.data_ptr() for x in (*small, cu_seqlens)),
            kinds,
            flags,
            q_step // QUAD,
            k_step // QUAD,
            v_step // QUAD,
            key_dim // QUAD,
            value_dim // QUAD,
            heads,
            key_share(key_heads, heads),
            num_seqs,
            first_seq,
            min(num_seqs - first_seq, SEQS_AT_ONCE),
            seq_len,
            batch * length,
            -(-value_dim // (warps * COLUMNS)),
            scale,
        )


def key_share(key_heads: int, heads: int) -> int:
    """What a head's number is multiplied with for that of its key head: 2^30 times their ratio, rounded up."""
    return -((-key_heads << 30) // heads)


def token_rows(x: torch.Tensor) -> tuple[torch.Tensor, int]:
    """x [B, T, H, D] as a flat tensor, and the elements from a token to the next one; a copy where the kernel cannot read x as it is.

    A slice of a wider projection is read in place.
    """
    batch, length, heads, dim = x.shape
    row = heads * dim
    if x.is_contiguous():
        step, even = row, True
    else:
        by_batch, by_token, by_head, by_element = x.stride()
        step = by_token if length > 1 else by_batch if batch > 1 else row
        even = (dim == 1 or by_element == 1) and (heads == 1 or by_head == dim)
        even = even and (batch == 1 or length == 1 or by_batch == length * by_token) and step % QUAD == 0 and step < QUAD << 31
    if not even or x.data_ptr() % (QUAD * x.element_size()):
        x, step = x.clone(memory_format=torch.contiguous_format), row
    return x.as_strided(((batch * length - 1) * step + row,), (1,)), step
