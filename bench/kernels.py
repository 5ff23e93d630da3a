"""Our kernels one by one: their time, and the fused kernel's time a chunk and block."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence

import torch

from bench.cases import Case

CHUNK = 64
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
    from qla.kernels.fwd_fused import choose_block_v

    return int(choose_block_v(items, num_sms))


def kernel_calls(case: Case) -> dict[str, Callable[[], object]]:
    """Each forward kernel alone on the case, with what the kernels before it have made."""
    from qla.device import device_spec
    from qla.kernels.fwd_fused import fwd_fused
    from qla.kernels.kkt_solve import kkt_solve

    num_sms = device_spec(case.q.device).sm_count
    q, k, v, g, beta = (x[0].contiguous() for x in (case.q, case.k, case.v, case.g, case.beta))
    num_seqs, seq_len = len(case.shape.sequence_lengths), 0
    cu_seqlens = None if case.cu_seqlens is None else case.cu_seqlens.to(torch.int32)
    if cu_seqlens is None:
        seq_len = case.shape.tokens
    o = torch.empty_like(v)
    final_state = torch.empty(num_seqs, case.shape.hv, q.shape[-1], v.shape[-1], dtype=torch.float32, device=q.device)

    def solve() -> tuple[torch.Tensor, torch.Tensor]:
        return kkt_solve(k, g, beta, o, cu_seqlens, num_seqs, seq_len, num_sms)

    g_cum, A = solve()

    def fused() -> None:
        fwd_fused(q, k, v, g_cum, beta, A, o, None, final_state, case.scale, cu_seqlens, num_seqs, seq_len, False, num_sms)

    return {"kkt_solve": solve, "fwd_fused": fused}


def backward_kernel_calls(case: Case) -> dict[str, Callable[[], object]]:
    """Each backward kernel alone on the case, all heads in one slice, no gradient of the final state."""
    from qla.device import device_spec
    from qla.kernels.bwd_fused import bwd_fused
    from qla.kernels.cp_prep import num_slots, scan_state_gradients, scan_states
    from qla.kernels.kkt_solve import kkt_solve

    num_sms = device_spec(case.q.device).sm_count
    q, k, v, g, beta, do = (x[0].contiguous() for x in (case.q, case.k, case.v, case.g, case.beta, case.do))
    num_seqs, seq_len = len(case.shape.sequence_lengths), 0
    cu_seqlens = None if case.cu_seqlens is None else case.cu_seqlens.to(torch.int32)
    if cu_seqlens is None:
        seq_len = case.shape.tokens
    place = (cu_seqlens, num_seqs, seq_len)
    g_cum, A = kkt_solve(k, g, beta, torch.empty_like(v), *place, num_sms)
    states, state_grads = torch.empty(2, num_slots(len(q), num_seqs, seq_len), case.shape.hv, 128, 128, dtype=q.dtype, device=q.device)
    gradients = [torch.empty_like(x) for x in (q, k, v, g_cum, beta)]

    def scan() -> None:
        scan_states(k, v, g_cum, beta, A, states, 0, None, *place, False, num_sms)

    def reverse_scan() -> None:
        scan_state_gradients(q, k, do, g_cum, beta, A, state_grads, 0, None, None, case.scale, *place, False, num_sms)

    def fused() -> None:
        bwd_fused(q, k, v, g_cum, beta, A, do, states, state_grads, *gradients, 0, case.scale, *place, num_sms)

    scan()
    reverse_scan()
    return {"scan_states": scan, "scan_state_gradients": reverse_scan, "bwd_fused": fused}


def us_per_chunk(case: Case, fused_ms: float, num_sms: int) -> tuple[int, float]:
    """(columns of V a block owns, microseconds a chunk takes on the busiest SM)."""
    lengths, hv = case.shape.sequence_lengths, case.shape.hv
    columns = block_columns(len(lengths) * hv, num_sms)
    chunks = serial_chunks(lengths, hv * (128 // columns), num_sms)
    return columns, fused_ms * 1e3 / chunks
