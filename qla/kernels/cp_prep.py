"""Scans over the chunks of a work item (sequence or segment of one, value head) that keep nothing but the state: S, backwards dS.

They have two uses.
    States and values of all chunks, for the backward pass: the forward scan leaves the state that enters each chunk and Vd, the reverse
    scan the gradient of the state that leaves it and dW, all rounded to the inputs' dtype: all that links the chunks of a sequence, and
    what the scans have worked out anyway, so that ``bwd_fused`` can work on all chunks at once. Of an item's chunks the first `skip`
    only warm the state up. Both ends' states are read and written in fp32.
    What segments start from: the state that [start, first) of an item (``cp_plan``; in reverse
    [end, start)) leaves, in fp32, and no states of chunks. From the sequence's own state that is what the segment starts from; from
    zero it is, behind a long enough warm-up, or it is S*, which ``cp_merge`` completes by the transition M. M^T is the same
    scan of the identity, with no values entering (beta 0 in front of V), by blocks of its own beside those of S*; it is stored as a high
    and a low bf16 part. Gradients need no transitions of their own: theirs are the transposed ones.
The state is kept V-first in accumulators, and every product is transposed, as in ``fwd_fused``. Algebra of one chunk (gates
cumulative, log2 units; gamma = 2^g; L the last token; s the scale; A the gated inverse of ``kkt_solve``; primes: on the far side):
    forward   U   = K S                                W  = diag(beta) V - diag(beta gamma) U    Vd = A W
              S'  = gamma_L S + K^T diag(gamma_L/gamma) Vd
    reverse   dVd = diag(gamma_L/gamma) K dS' + P^T dO   P  = s Lower(Gamma * Q K^T)               dW = A^T dVd
              dS  = gamma_L dS' + s Q^T diag(gamma) dO - K^T diag(beta gamma) dW

Shapes   Q, K [N, H, K], X (V, or dO in reverse) [N, HV, V], A [N, HV, 64] 16-bit; G (cumulative gate), Beta [N, HV] fp32;
         States [slots, heads, V, K] 16-bit, V-first, of heads head0 .. head0 + heads - 1; Values (Vd, or dW in reverse)
         [N, some heads, V] 16-bit, the first of which is value head values_head0; the states at both ends fp32 [S, HV, K, V].
         Items [segments, HV, 4] int32 of the direction; Segments [segments, HV, V K] fp32, in accumulators' order;
         Transitions [segments, HV, 2, K, K] bf16, M^T [in, out], high part first.
         K (64 or 128) is fixed at compile time. N tokens, heads, sequences, segments, scale, states, their layout and, with block_v = 64,
         V (64 or 128): run-time values. Blocks of a transition divide its K rows as others do the V columns, so block_v = 64 if one of
         the two is 64.
         The chunks of sequence n have the slots from cu[n] / 64 + n on (equal lengths: the chunks in order).
Roles    (registers a thread; block_v = 128 | 64)
    role    threads          regs        work
    STATE   0-255 | 0-127    208 | 208   the recurrence (two warpgroups | one)
    SCORE   next 128          64 | 128   P, one chunk ahead; in reverse only
    IO      last 128          32 | 48    warp 0: TMA loads; warp 1: gates; warp 2: states and values to memory; forward 40 | 48
Shared memory                   bytes (block_v = 128 | 64)
    q        [3, 64, K]         384 K            in reverse only
    k        [3, 64, K]         384 K
    x        [3, 64, block_v]   49152 | 24576    then Vd or dW, which leaves from here
    a        [3, 64, 64]        24576
    p        [64, 64]            8192            in reverse only
    state0   [block_v, 64]      16384 | 8192     columns 0-63 of K
    state1   [block_v, 64]      16384 | 8192     the others, with K = 128
    gates    5 x [3, 64] fp32    3840            (static, with the barriers; forward 3 x, 2304)
    decay    [3] fp32              16            (static)
    place    [12] int32            48            (static) what the block works on: fields in ws.py
Barriers
    name              signalled by    waited by            count
    tiles.full        IO 0, IO 1      STATE, SCORE, IO 2   64, and the bytes of the TMA loads
    tiles.empty       all but IO 0,1  IO 0, IO 1           STATE threads + 32, in reverse + 128
    p_ring.full       SCORE           STATE                128
    p_ring.empty      STATE           SCORE                STATE threads
    state_ring.full   STATE           IO 2                 STATE threads
    state_ring.empty  IO 2            STATE                32
    values_ready      STATE           IO 2                 STATE threads; one for each stage
    tail              IO 0            IO 0                 32: a chunk that is not whole is cleaned before it is handed on
    block sync, twice, before the roles: the barriers are ready; the place, which thread 0 writes, can be read
Schedule of chunk i, the i-th that the block walks (| separates what runs while wgmma is in flight)
    IO 0    acquire tiles | TMA K, X, A, Q | commit
    IO 1    take gates of chunk i, start loads of those of i + 1 | acquire tiles | gates, decay -> shared | commit
    SCORE   wait tiles | P = s Gamma * (Q K^T) | acquire p | store | commit p | release tiles
    STATE   forward: U | [acquire state_ring, store S, commit,] load V | W | Vd | decay S | S += K^T Vd | [Vd to x, values_ready] |
            release tiles
            reverse: K dS | [acquire state_ring, store dS, commit,] load dO, decay dS | dS += Q^T dO | wait p | dVd += P^T dO | release p
            dW | dS -= K^T diag(beta gamma) dW | [dW to x, values_ready] | release tiles
            [in brackets: from chunk `skip` on; none of them where segments' starts are prepared]
            behind the last chunk: reverse dS += Q^T (what rounding took from diag(gamma) dO) | the state to memory, if it is wanted
    IO 2    wait tiles | from chunk `skip` on: wait state_ring | fence | TMA the state by halves of K | release state_ring
            wait values_ready | fence | TMA values (rows one by one in a chunk that is not whole) | release tiles
"""

import functools
from dataclasses import dataclass
from enum import IntEnum
from types import SimpleNamespace

import tilelang.language as T
import torch
from tilelang.layout import make_full_bank_swizzled_layout

from qla.kernels.ws import (
    CHUNK,
    CHUNKS,
    ENDS,
    FULL_ROW,
    HALF,
    HEAD_DIMS,
    IDENTITY,
    ITEM,
    KEY_HEAD,
    PASS_CONFIGS,
    PLACE_FIELDS,
    PREP_STATE,
    ROW,
    ROWS,
    SKIP,
    SLOT,
    SOURCE,
    VALUE_HEAD,
    WARP,
    WARPGROUP,
    KernelConfig,
    Ring,
    compile_kernel,
    device_source,
    fetch_gates,
    halves_of,
    load_state,
    once_per_config,
    score_role,
    segment_at,
    state_at,
    state_fragment,
    store_state,
    take_gates,
    uniform,
)


class Role(IntEnum):
    STATE = 0
    SCORE = 1
    IO = 2


REGS = {
    128: {Role.STATE: 208, Role.SCORE: 64, Role.IO: 32},
    64: {Role.STATE: 208, Role.SCORE: 128, Role.IO: 48},  # addresses with V, a run-time value, take some
}


@dataclass(frozen=True)
class ScanConfig(KernelConfig):
    """Everything fixed at compile time. Equal configs share one compiled kernel."""

    reverse: bool = False  # the gradient of the state, from the last chunk to the first
    block_v: int = 128  # columns of V a block owns
    dtype: str = "bfloat16"  # of q, k, x, A, states
    head_k: int = 128  # K
    stages: int = 3  # chunks in flight

    def __post_init__(self):
        if self.stages < 1:
            raise ValueError(f"stages must be at least 1, got {self.stages}")
        if self.block_v not in REGS:
            raise ValueError(f"block_v must be one of {tuple(REGS)}, got {self.block_v}")
        self.check()

    @property
    def regs(self) -> dict[Role, int]:
        return REGS[self.block_v] if self.reverse else {Role.STATE: 208, Role.IO: max(40, REGS[self.block_v][Role.IO])}

    @property
    def state_threads(self) -> int:
        return self.block_v // 64 * WARPGROUP

    @property
    def score_threads(self) -> int:
        return WARPGROUP if self.reverse else 0

    def role_threads(self, role: Role) -> int:
        return self.state_threads if role == Role.STATE else WARPGROUP

    def smem_table(self) -> dict[str, int]:
        table = {
            "q": self.stages * CHUNK * self.head_k * 2,
            "k": self.stages * CHUNK * self.head_k * 2,
            "x": self.stages * CHUNK * self.block_v * 2,
            "a": self.stages * CHUNK * CHUNK * 2,
            "p": CHUNK * CHUNK * 2,
            "state0": self.block_v * HALF * 2,
            "state1": self.block_v * HALF * 2,
        }
        absent = (() if self.reverse else ("q", "p")) + (() if self.halves == 2 else ("state1",))
        return {name: size for name, size in table.items() if name not in absent}

    @property
    def halves(self) -> int:
        """Fragments of the state, 64 columns of K each."""
        return self.head_k // HALF

    @property
    def name(self) -> str:
        return f"scan_{'reverse' if self.reverse else 'forward'}_k{self.head_k}_v{self.block_v}_{self.dtype}"


CONFIGS = tuple(
    ScanConfig(reverse, v, dtype, k) for dtype in ("bfloat16", "float16") for k in HEAD_DIMS for reverse in (False, True) for v in (128, 64)
)


@T.macro
def issue_state_product(s, t, out, tx):
    # out^T = S^T K^T
    T.copy(s.S0, s.Sb0)
    if s.S1 is not None:
        T.copy(s.S1, s.Sb1)
    T.wgmma_gemm(s.Sb0, s.k[t, :, 0:HALF], out, transpose_B=True, policy=FULL_ROW, clear_accum=True)
    if s.S1 is not None:
        T.wgmma_gemm(s.Sb1, s.k[t, :, HALF : 2 * HALF], out, transpose_B=True, policy=FULL_ROW)


@T.macro
def add_to_state(s, rows, t):
    # S^T += W rows, in halves of K
    T.wgmma_gemm(s.W, rows[t, :, 0:HALF], s.S0, policy=FULL_ROW)
    if s.S1 is not None:
        T.wgmma_gemm(s.W, rows[t, :, HALF : 2 * HALF], s.S1, policy=FULL_ROW)


@T.macro
def hand_state(s, i, skip, state_ring, tx):
    if i >= skip:
        # the store warp fences: that orders these stores before its TMA store, and costs nothing here
        state_ring.acquire(i - skip)
        T.call_extern("int32", "qla_store_plain", s.Sb0.data, T.access_ptr(s.state0[0, 0], "r"), tx)
        if s.S1 is not None:
            T.call_extern("int32", "qla_store_plain", s.Sb1.data, T.access_ptr(s.state1[0, 0], "r"), tx)
        state_ring.commit(i - skip)


@T.macro
def hand_values(cfg, s, i, skip, values_ready, tx):
    # Vd or dW takes the place of what this thread has loaded from there; the store warp fences
    if i >= skip:
        T.call_extern("int32", f"qla_store_transposed_rounded<{cfg.is_half}>", s.Vd.data, T.access_ptr(s.x[i % cfg.stages, 0, 0], "r"), tx)
        T.barrier_arrive(values_ready[(i - skip) % cfg.stages])


@T.macro
def decay_state(s, t):
    s.last[0] = s.decay[t]
    for v, k in T.Parallel(s.block_v, HALF):
        s.S0[v, k] *= s.last[0]
    if s.S1 is not None:
        for v, k in T.Parallel(s.block_v, HALF):
            s.S1[v, k] *= s.last[0]


@T.macro
def wait_for_state(s):
    T.wait_wgmma(0)
    T.warpgroup_fence_operand(s.S0, num_regs=32)
    if s.S1 is not None:
        T.warpgroup_fence_operand(s.S1, num_regs=32)


@T.macro
def forward_role(cfg, s, tiles, state_ring, values_ready, tx):
    num_chunks = uniform(s.place[CHUNKS])
    skip = uniform(s.place[SKIP])
    for i in T.serial(num_chunks):
        tiles.wait(i)
        issue_state_product(s, i % cfg.stages, s.U, tx)
        hand_state(s, i, skip, state_ring, tx)
        T.call_extern("int32", "qla_load_transposed", T.access_ptr(s.x[i % cfg.stages, 0, 0], "r"), s.Xt.data, tx)
        T.wait_wgmma(0)
        T.warpgroup_fence_operand(s.U, num_regs=32)
        # W = diag(beta) V - diag(beta gamma) U
        for v, c in T.Parallel(s.block_v, CHUNK):
            s.W[v, c] = s.beta[i % cfg.stages, c] * s.Xt[c, v] - s.beta_gamma[i % cfg.stages, c] * s.U[v, c]
        # Vd^T = W^T A^T
        T.wgmma_gemm(s.W, s.a[i % cfg.stages, :, :], s.Vd, transpose_B=True, policy=FULL_ROW, clear_accum=True)
        decay_state(s, i % cfg.stages)
        T.wait_wgmma(0)
        T.warpgroup_fence_operand(s.Vd, num_regs=32)
        # S^T += (Vd^T diag(gamma_L/gamma)) K
        for v, c in T.Parallel(s.block_v, CHUNK):
            s.W[v, c] = s.Vd[v, c] * s.gamma_rest[i % cfg.stages, c]
        add_to_state(s, s.k, i % cfg.stages)
        hand_values(cfg, s, i, skip, values_ready, tx)
        wait_for_state(s)
        tiles.release(i)


@T.macro
def reverse_role(cfg, s, tiles, p_ring, state_ring, values_ready, tx):
    num_chunks = uniform(s.place[CHUNKS])
    skip = uniform(s.place[SKIP])
    for i in T.serial(num_chunks):
        tiles.wait(i)
        issue_state_product(s, i % cfg.stages, s.U, tx)
        hand_state(s, i, skip, state_ring, tx)
        T.call_extern("int32", "qla_load_transposed", T.access_ptr(s.x[i % cfg.stages, 0, 0], "r"), s.Xt.data, tx)
        decay_state(s, i % cfg.stages)
        # dS^T += (s dO^T diag(gamma)) Q
        for v, c in T.Parallel(s.block_v, CHUNK):
            s.W[v, c] = s.Xt[c, v] * s.scale_gamma[i % cfg.stages, c]
        add_to_state(s, s.q, i % cfg.stages)
        T.wait_wgmma(cfg.halves)
        T.warpgroup_fence_operand(s.U, num_regs=32)
        # dVd^T = (dS^T K^T) diag(gamma_L/gamma) + dO^T P
        for v, c in T.Parallel(s.block_v, CHUNK):
            s.U[v, c] *= s.gamma_rest[i % cfg.stages, c]
        for v, c in T.Parallel(s.block_v, CHUNK):
            s.Xv[v, c] = s.Xt[c, v]
        p_ring.wait(i)
        T.wgmma_gemm(s.Xv, s.p, s.U, policy=FULL_ROW)
        wait_for_state(s)
        T.warpgroup_fence_operand(s.U, num_regs=32)
        p_ring.release(i)
        # dW^T = dVd^T A
        T.copy(s.U, s.W)
        T.wgmma_gemm(s.W, s.a[i % cfg.stages, :, :], s.Vd, policy=FULL_ROW, clear_accum=True)
        T.wait_wgmma(0)
        T.warpgroup_fence_operand(s.Vd, num_regs=32)
        # dS^T -= (dW^T diag(beta gamma)) K
        for v, c in T.Parallel(s.block_v, CHUNK):
            s.W[v, c] = -s.beta_gamma[i % cfg.stages, c] * s.Vd[v, c]
        add_to_state(s, s.k, i % cfg.stages)
        hand_values(cfg, s, i, skip, values_ready, tx)
        wait_for_state(s)
        tiles.release(i)
    if num_chunks > 0:
        # what rounding took from the first chunk's dO, whose tile nobody overwrites: with fast gates the gradient of the initial
        # state is made of nothing else
        t = T.truncmod(num_chunks - 1, cfg.stages)
        for v, c in T.Parallel(s.block_v, CHUNK):
            s.W[v, c] = s.Xt[c, v] * s.scale_gamma[t, c]
        for v, c in T.Parallel(s.block_v, CHUNK):
            s.W[v, c] = s.Xt[c, v] * s.scale_gamma[t, c] - T.cast(s.W[v, c], "float32")
        add_to_state(s, s.q, t)
        wait_for_state(s)


@T.macro
def issue_loads(cfg, s, Q, K, X, A, barrier, index, t, row, hk, hv, v0):
    # of X, which no transition uses, zeros arrive where a block of one has rows past V
    T.tma_copy(K[row : row + CHUNK, hk, 0 : cfg.head_k], s.k[t, :, :], barrier=barrier[index])
    T.tma_copy(X[row : row + CHUNK, hv, v0 : v0 + s.block_v], s.x[t, :, :], barrier=barrier[index])
    T.tma_copy(A[row : row + CHUNK, hv, 0:CHUNK], s.a[t, :, :], barrier=barrier[index])
    if cfg.reverse:
        T.tma_copy(Q[row : row + CHUNK, hk, 0 : cfg.head_k], s.q[t, :, :], barrier=barrier[index])


@T.macro
def load_warp(cfg, s, tiles, tail, Q, K, X, A, v0, lane):
    begin = s.place[ROW]
    length = s.place[ROWS]
    hk = s.place[KEY_HEAD]
    hv = s.place[VALUE_HEAD]
    num_chunks = s.place[CHUNKS]
    for i in T.serial(num_chunks):
        first = (num_chunks - 1 - i if cfg.reverse else i) * CHUNK
        tiles.acquire(i)
        if first + CHUNK <= length:
            issue_loads(cfg, s, Q, K, X, A, tiles.full, i % cfg.stages, i % cfg.stages, begin + first, hk, hv, v0)
        else:
            # rows past the end are somebody else's, or nobody's: they become zero before anyone reads them
            issue_loads(cfg, s, Q, K, X, A, tail, 0, i % cfg.stages, begin + first, hk, hv, v0)
            T.barrier_arrive(tail[0])
            T.barrier_wait(tail[0], 0)
            T.call_extern("int32", "qla_zero_rows", T.address_of(s.k[i % cfg.stages, 0, 0]), cfg.halves, length - first, lane)
            T.call_extern("int32", "qla_zero_rows", T.address_of(s.x[i % cfg.stages, 0, 0]), cfg.block_v // 64, length - first, lane)
            T.call_extern("int32", "qla_zero_rows", T.address_of(s.a[i % cfg.stages, 0, 0]), 1, length - first, lane)
            if cfg.reverse:
                T.call_extern("int32", "qla_zero_rows", T.address_of(s.q[i % cfg.stages, 0, 0]), cfg.halves, length - first, lane)
            T.fence_proxy_async()
        tiles.commit(i)


@T.macro
def gate_warp(cfg, s, tiles, G, Beta, log2_scale, lane):
    begin = s.place[ROW]
    length = s.place[ROWS]
    hv = s.place[VALUE_HEAD]
    num_chunks = s.place[CHUNKS]
    if not cfg.reverse:
        s.value_factor[0] = T.if_then_else(s.place[SOURCE] == IDENTITY, 0.0, 1.0)  # a transition is a state that no values enter
    if num_chunks > 0:
        fetch_gates(s, G, Beta, begin, length, hv, (num_chunks - 1) * CHUNK if cfg.reverse else 0, lane)
    for i in T.serial(num_chunks):
        # the next chunk's loads are under way while this one waits for its slot
        take_gates(s, (num_chunks - 1 - i if cfg.reverse else i) * CHUNK, length, lane)
        if i + 1 < num_chunks:
            fetch_gates(s, G, Beta, begin, length, hv, (num_chunks - 2 - i if cfg.reverse else i + 1) * CHUNK, lane)
        tiles.acquire(i)
        for c in T.Parallel(CHUNK):
            s.beta_gamma[i % cfg.stages, c] = s.bf[c] * T.exp2(s.gf[c])
            s.gamma_rest[i % cfg.stages, c] = T.exp2(s.g_last[0] - s.gf[c])
            if cfg.reverse:
                s.g[i % cfg.stages, c] = s.gf[c]
                s.g_scaled[i % cfg.stages, c] = s.gf[c] + log2_scale
                s.scale_gamma[i % cfg.stages, c] = T.exp2(s.gf[c] + log2_scale)
            else:
                s.beta[i % cfg.stages, c] = s.bf[c] * s.value_factor[0]
        s.decay[i % cfg.stages] = T.exp2(s.g_last[0])
        tiles.commit(i)


@T.macro
def store_warp(cfg, s, tiles, state_ring, values_ready, States, Values, head0, values_head0, v0, row_stride, lane):
    begin = s.place[ROW]
    length = s.place[ROWS]
    num_chunks = s.place[CHUNKS]
    skip = uniform(s.place[SKIP])  # the first chunks only warm the state up
    slot0 = s.place[SLOT]
    head = s.place[VALUE_HEAD]
    for i in T.serial(num_chunks):
        chunk = num_chunks - 1 - i if cfg.reverse else i
        tiles.wait(i)
        if i >= skip:
            state_ring.wait(i - skip)
            T.fence_proxy_async()
            T.tma_copy(s.state0, States[slot0 + chunk, head - head0, v0 : v0 + cfg.block_v, 0:HALF])
            if cfg.halves == 2:
                T.tma_copy(s.state1, States[slot0 + chunk, head - head0, v0 : v0 + cfg.block_v, HALF : 2 * HALF])
            T.tma_store_wait(0)
            state_ring.release(i - skip)
            T.barrier_wait(values_ready[(i - skip) % cfg.stages], (i - skip) // cfg.stages % 2)
            if (chunk + 1) * CHUNK <= length:
                T.fence_proxy_async()
                row = begin + chunk * CHUNK
                T.tma_copy(s.x[i % cfg.stages, :, :], Values[row : row + CHUNK, head - values_head0, v0 : v0 + cfg.block_v])
                T.tma_store_wait(0)
            else:
                T.call_extern(
                    "int32", "qla_store_rows", T.address_of(Values[begin + chunk * CHUNK, head - values_head0, v0]),
                    T.access_ptr(s.x[i % cfg.stages, 0, 0], "r"), cfg.block_v // HALF, length - chunk * CHUNK,
                    T.cast(row_stride, "int64"), lane,
                )  # fmt: skip
        tiles.release(i)


def buffers(cfg: ScanConfig, value_heads, value_dim) -> SimpleNamespace:
    """Shared memory and fragments, allocated in the kernel being traced."""
    st, bv, dt, f32 = cfg.stages, cfg.block_v, cfg.dtype, "float32"

    def gates():
        return T.alloc_shared((st, CHUNK), f32, scope="shared")

    s = SimpleNamespace(
        block_v=bv,
        head_k=cfg.head_k,
        value_dim=value_dim,
        k=T.alloc_shared((st, CHUNK, cfg.head_k), dt),
        x=T.alloc_shared((st, CHUNK, bv), dt),
        a=T.alloc_shared((st, CHUNK, CHUNK), dt),
        state0=T.alloc_shared((bv, HALF), dt),
        state1=T.alloc_shared((bv, HALF), dt) if cfg.halves == 2 else None,
        beta_gamma=gates(),
        gamma_rest=gates(),  # gamma_L / gamma
        decay=T.alloc_shared((st,), f32, scope="shared"),  # gamma_L
        S0=T.alloc_fragment((bv, HALF), f32),
        S1=T.alloc_fragment((bv, HALF), f32) if cfg.halves == 2 else None,
        Sb0=T.alloc_fragment((bv, HALF), dt),
        Sb1=T.alloc_fragment((bv, HALF), dt) if cfg.halves == 2 else None,
        U=T.alloc_fragment((bv, CHUNK), f32),  # in reverse dVd
        Xt=T.alloc_fragment((CHUNK, bv), dt),
        W=T.alloc_fragment((bv, CHUNK), dt),
        Vd=T.alloc_fragment((bv, CHUNK), f32),  # in reverse dW
        last=T.alloc_local((1,), f32),
        place=T.alloc_shared((PLACE_FIELDS,), "int32", scope="shared"),
        value_heads=value_heads,
        g_last=T.alloc_local((1,), f32),
        gf=T.alloc_fragment((CHUNK,), f32),
        bf=T.alloc_fragment((CHUNK,), f32),
        next_gates=T.alloc_local((4,), f32),
    )
    if cfg.reverse:
        s.q = T.alloc_shared((st, CHUNK, cfg.head_k), dt)
        s.p = T.alloc_shared((CHUNK, CHUNK), dt)
        s.g, s.g_scaled, s.scale_gamma = gates(), gates(), gates()  # g_scaled: g + log2 s
        s.Xv = T.alloc_fragment((bv, CHUNK), dt)
        s.P = T.alloc_fragment((CHUNK, CHUNK), f32)
        s.Pb = T.alloc_fragment((CHUNK, CHUNK), dt)
    else:
        s.beta = gates()
        s.value_factor = T.alloc_local((1,), f32)
    return s


def prim_func(cfg: ScanConfig):
    """The kernel of one config, for `tilelang.compile` or for lowering without a GPU."""
    N, H, HV = T.dynamic("N, H, HV")
    DV = T.dynamic("DV") if cfg.block_v == HALF else cfg.block_v  # V
    slots, heads, values_heads = T.dynamic("slots, heads, values_heads")
    cu_size, h0_size, ht_size, items_size = T.dynamic("cu_size, h0_size, ht_size, items_size")
    segments_size, transitions_size = T.dynamic("segments_size, transitions_size")
    f32 = "float32"
    st, bv, dt = cfg.stages, cfg.block_v, cfg.dtype

    @T.prim_func
    def scan_kernel(
        Q: T.Tensor((N, H, cfg.head_k), dt),
        K: T.Tensor((N, H, cfg.head_k), dt),
        X: T.Tensor((N, HV, DV), dt),
        A: T.Tensor((N, HV, CHUNK), dt),
        G: T.Tensor((N, HV), f32),
        Beta: T.Tensor((N, HV), f32),
        States: T.Tensor((slots, heads, DV, cfg.head_k), dt),
        Values: T.Tensor((N, values_heads, DV), dt),
        H0: T.Tensor((h0_size,), f32),  # where the scan begins: the initial state, in reverse the final state's gradient
        HT: T.Tensor((ht_size,), f32),
        Cu: T.Tensor((cu_size,), "int32"),
        Items: T.Tensor((items_size,), "int32"),
        Segments: T.Tensor((segments_size,), f32),
        Transitions: T.Tensor((transitions_size,), "bfloat16"),
        # run-time
        head0: T.int32,
        values_head0: T.int32,
        num_rows: T.int32,  # sequences, or with items segments
        use_items: T.int32,  # NO_ITEMS, OWN_ITEMS or PREP_STATE
        kinds: T.int32,  # 2: PREP_TRANSITION as well
        seq_len: T.int32,  # 0: lengths are in Cu
        log2_scale: T.float32,
        use_h0: T.int32,
        use_ht: T.int32,
        v_first: T.int32,
    ):
        # 1: a block has half of 128 rows: V of a state, K of a transition; where only one of them is 128, the other's second blocks leave
        wide = T.max(DV, (kinds - 1) * cfg.head_k) // (2 * HALF) if bv == HALF else 0
        with T.Kernel(num_rows * heads * kinds * (1 + wide), threads=cfg.threads) as bid:
            T.import_source(device_source(__file__))
            s = buffers(cfg, HV, DV)
            T.annotate_layout({
                s.Xt: state_fragment(CHUNK, bv),
                **{x: make_full_bank_swizzled_layout(x) for x in (s.x, s.a, s.state0, s.state1) if x is not None},
            })  # fmt: skip
            p_ring = Ring(1, producers=WARPGROUP, consumers=cfg.state_threads, name="p_ring") if cfg.reverse else None
            tiles = Ring(st, producers=2 * WARP, consumers=cfg.state_threads + cfg.score_threads + WARP, name="tiles")
            state_ring = Ring(1, producers=cfg.state_threads, consumers=WARP, name="state_ring")
            values_ready = T.alloc_barrier([cfg.state_threads] * st)
            tail = T.alloc_barrier([WARP])

            tx = T.get_thread_binding()
            v0 = (bid & wide) * HALF if bv == HALF else 0
            kind = T.truncdiv(bid >> wide, num_rows * heads)
            if tx == 0:
                item = T.alloc_var("int32", T.truncmod(bid >> wide, num_rows * heads))
                if bv == HALF:
                    if v0 >= T.if_then_else(kind == 0, DV, cfg.head_k):
                        item = -1
                problem = (seq_len, N, item, 0, head0, heads, HV, T.truncdiv(HV, H), use_h0)
                T.call_extern(
                    "int32", "qla_locate", T.access_ptr(s.place, "w"), T.access_ptr(Items, "r"), use_items + kind, cfg.reverse,
                    T.access_ptr(Cu, "r"), *problem,
                )  # fmt: skip
            T.sync_threads()

            if tx < cfg.state_threads:
                T.set_max_nreg(cfg.regs[Role.STATE], 1)
                load_state(s, H0, Segments, v0, v_first, tx)
                if s.place[SOURCE] == IDENTITY:
                    T.call_extern("int32", f"qla_identity<{cfg.head_k}>", v0, *halves_of(s), tx)
                if cfg.reverse:
                    reverse_role(cfg, s, tiles, p_ring, state_ring, values_ready, tx)
                else:
                    forward_role(cfg, s, tiles, state_ring, values_ready, tx)
                if s.place[ENDS] != 0:
                    if use_items < PREP_STATE:
                        if use_ht != 0:
                            store_state(s, HT, state_at(s), v0, v_first, tx)
                    elif kind == 0:
                        T.call_extern(
                            "int32", f"qla_store_segment<{cfg.head_k}>", T.address_of(Segments[segment_at(s)]), DV, v0, *halves_of(s), tx
                        )
                    else:
                        T.call_extern(
                            "int32", f"qla_store_split<{cfg.head_k}>", T.access_ptr(Transitions, "w"), s.place[ITEM], v0, *halves_of(s), tx
                        )
            elif tx >= cfg.threads - WARPGROUP:
                T.set_max_nreg(cfg.regs[Role.IO], 0)
                if tx < cfg.threads - 3 * WARP:
                    load_warp(cfg, s, tiles, tail, Q, K, X, A, v0, tx % WARP)
                elif tx < cfg.threads - 2 * WARP:
                    gate_warp(cfg, s, tiles, G, Beta, log2_scale, tx % WARP)
                elif tx < cfg.threads - WARP:
                    store_warp(
                        cfg, s, tiles, state_ring, values_ready, States, Values, head0, values_head0, v0, values_heads * DV, tx % WARP
                    )
            elif cfg.reverse:
                T.set_max_nreg(REGS[bv][Role.SCORE], 0)
                num_chunks = s.place[CHUNKS]
                score_role(cfg, s, tiles, p_ring, num_chunks)

    return scan_kernel


@once_per_config
def build(cfg: ScanConfig):
    """The compiled kernel of a config."""
    return compile_kernel(lambda: prim_func(cfg), PASS_CONFIGS)


@functools.cache
def config_for(reverse: bool, block_v: int, dtype: torch.dtype, head_k: int) -> ScanConfig:
    return ScanConfig(reverse, block_v, str(dtype).removeprefix("torch."), head_k)
