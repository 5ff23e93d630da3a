"""Scans over the chunks of a (sequence, value head, V half) that keep nothing but the state: forwards S, backwards its gradient dS.

The forward scan leaves the state that enters each chunk, the reverse scan the gradient of the state that leaves it, both rounded to the
inputs' dtype: all that links the chunks of a sequence, so that whatever reads them (``bwd_fused``) can work on all chunks at once.
The state is kept V-first in accumulators, and every product is transposed, as in ``fwd_fused``. Algebra of one chunk (gates
cumulative, log2 units; gamma = 2^g; L the last token; s the scale; A the gated inverse of ``kkt_solve``; primes: on the far side):
    forward   U   = K S                                W  = diag(beta) V - diag(beta gamma) U    Vd = A W
              S'  = gamma_L S + K^T diag(gamma_L/gamma) Vd
    reverse   dVd = diag(gamma_L/gamma) K dS' + P^T dO   P  = s Lower(Gamma * Q K^T)               dW = A^T dVd
              dS  = gamma_L dS' + s Q^T diag(gamma) dO - K^T diag(beta gamma) dW

Shapes   Q, K [N, H, 128], X (V, or dO in reverse) [N, HV, 128], A [N, HV, 64] 16-bit; G (cumulative gate), Beta [N, HV] fp32;
         States [slots, heads, 128, 128] 16-bit, V-first, of heads head0 .. head0 + heads - 1; the states at both ends fp32
         [S, HV, 128, 128]. N tokens, heads, sequences, scale, states, their layout: run-time values.
         The chunks of sequence n have the slots from cu[n] / 64 + n on (equal lengths: the chunks in order).
Roles    (registers a thread; block_v = 128 | 64)
    role    threads          regs        work
    STATE   0-255 | 0-127    200 | 208   the recurrence (two warpgroups | one)
    SCORE   next 128          72 | 128   P, one chunk ahead; in reverse only
    IO      last 128          40 | 40    warp 0: TMA loads; warp 1: gates; warp 2: states to memory
Shared memory                   bytes (block_v = 128 | 64)
    q        [3, 64, 128]       49152            in reverse only
    k        [3, 64, 128]       49152
    x        [3, 64, block_v]   49152 | 24576
    a        [3, 64, 64]        24576
    p        [64, 64]            8192            in reverse only
    state0   [block_v, 64]      16384 | 8192     columns 0-63 of K
    state1   [block_v, 64]      16384 | 8192     the others
    gates    5 x [3, 64] fp32    3840            (static, with the barriers; forward 3 x, 2304)
    decay    [3] fp32              16            (static)
Barriers
    name              signalled by   waited by      count
    tiles.full        IO 0, IO 1     STATE, SCORE   64, and the bytes of the TMA loads
    tiles.empty       STATE, SCORE   IO 0, IO 1     STATE threads, in reverse + 128
    p_ring.full       SCORE          STATE          128
    p_ring.empty      STATE          SCORE          STATE threads
    state_ring.full   STATE          IO 2           STATE threads
    state_ring.empty  IO 2           STATE          32
    tail              IO 0           IO 0           32: a chunk that is not whole is cleaned before it is handed on
Schedule of chunk i (| separates what runs while wgmma is in flight)
    IO 0    acquire tiles | TMA K, X, A, Q | commit            IO 1   acquire tiles | gates of the chunk | commit
    SCORE   wait tiles | P = s Gamma * (Q K^T) | acquire p | store | commit p | release tiles
    STATE   forward: U | acquire state_ring, store S, commit, load V | W | Vd | decay S | S += K^T Vd | release tiles
            reverse: K dS | acquire state_ring, store dS, commit, load dO, decay dS | dS += Q^T dO | wait p | dVd += P^T dO | release p
            dW | dS -= K^T diag(beta gamma) dW | release tiles
    IO 2    wait state_ring | fence | TMA both halves of the state | release state_ring
"""

import functools
import math
from dataclasses import dataclass
from enum import IntEnum
from types import SimpleNamespace

import tilelang.language as T
import torch
from tilelang.layout import make_full_bank_swizzled_layout

from qla.kernels.ws import (
    CHUNK,
    FULL_ROW,
    HALF,
    HEAD_DIM,
    PASS_CONFIGS,
    WARP,
    WARPGROUP,
    KernelConfig,
    Ring,
    choose_block_v,
    compile_kernel,
    device_source,
    load_state,
    score_role,
    state_fragment,
    store_state,
)


class Role(IntEnum):
    STATE = 0
    SCORE = 1
    IO = 2


REGS = {
    128: {Role.STATE: 200, Role.SCORE: 72, Role.IO: 40},
    64: {Role.STATE: 208, Role.SCORE: 128, Role.IO: 40},
}


@dataclass(frozen=True)
class ScanConfig(KernelConfig):
    """Everything fixed at compile time. Equal configs share one compiled kernel."""

    reverse: bool = False  # the gradient of the state, from the last chunk to the first
    block_v: int = 128  # columns of V a block owns
    dtype: str = "bfloat16"  # of q, k, x, A, states
    stages: int = 3  # chunks in flight

    def __post_init__(self):
        if self.stages < 1:
            raise ValueError(f"stages must be at least 1, got {self.stages}")
        if self.block_v not in REGS:
            raise ValueError(f"block_v must be one of {tuple(REGS)}, got {self.block_v}")
        self.check()

    @property
    def regs(self) -> dict[Role, int]:
        return {role: count for role, count in REGS[self.block_v].items() if self.reverse or role != Role.SCORE}

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
            "q": self.stages * CHUNK * HEAD_DIM * 2,
            "k": self.stages * CHUNK * HEAD_DIM * 2,
            "x": self.stages * CHUNK * self.block_v * 2,
            "a": self.stages * CHUNK * CHUNK * 2,
            "p": CHUNK * CHUNK * 2,
            "state0": self.block_v * HALF * 2,
            "state1": self.block_v * HALF * 2,
        }
        return table if self.reverse else {name: size for name, size in table.items() if name not in ("q", "p")}

    @property
    def name(self) -> str:
        return f"scan_{'reverse' if self.reverse else 'forward'}_v{self.block_v}_{self.dtype}"


CONFIGS = tuple(ScanConfig(reverse, v, dtype) for dtype in ("bfloat16", "float16") for reverse in (False, True) for v in (128, 64))


@T.macro
def issue_state_product(s, t, out, tx):
    # out^T = S^T K^T
    T.copy(s.S0, s.Sb0)
    T.copy(s.S1, s.Sb1)
    T.wgmma_gemm(s.Sb0, s.k[t, :, 0:HALF], out, transpose_B=True, policy=FULL_ROW, clear_accum=True)
    T.wgmma_gemm(s.Sb1, s.k[t, :, HALF:HEAD_DIM], out, transpose_B=True, policy=FULL_ROW)


@T.macro
def hand_state(s, i, state_ring, tx):
    # the store warp fences: that orders these stores before its TMA store, and costs nothing here
    state_ring.acquire(i)
    T.call_extern("int32", "qla_store_plain", s.Sb0.data, T.access_ptr(s.state0[0, 0], "r"), tx)
    T.call_extern("int32", "qla_store_plain", s.Sb1.data, T.access_ptr(s.state1[0, 0], "r"), tx)
    state_ring.commit(i)


@T.macro
def decay_state(s, t):
    s.last[0] = s.decay[t]
    for v, k in T.Parallel(s.block_v, HALF):
        s.S0[v, k] *= s.last[0]
    for v, k in T.Parallel(s.block_v, HALF):
        s.S1[v, k] *= s.last[0]


@T.macro
def wait_for_state(s):
    T.wait_wgmma(0)
    T.warpgroup_fence_operand(s.S0, num_regs=32)
    T.warpgroup_fence_operand(s.S1, num_regs=32)


@T.macro
def forward_role(cfg, s, tiles, state_ring, num_chunks, tx):
    for i in T.serial(num_chunks):
        tiles.wait(i)
        issue_state_product(s, i % cfg.stages, s.U, tx)
        hand_state(s, i, state_ring, tx)
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
        T.wgmma_gemm(s.W, s.k[i % cfg.stages, :, 0:HALF], s.S0, policy=FULL_ROW)
        T.wgmma_gemm(s.W, s.k[i % cfg.stages, :, HALF:HEAD_DIM], s.S1, policy=FULL_ROW)
        wait_for_state(s)
        tiles.release(i)


@T.macro
def reverse_role(cfg, s, tiles, p_ring, state_ring, num_chunks, tx):
    for i in T.serial(num_chunks):
        tiles.wait(i)
        issue_state_product(s, i % cfg.stages, s.U, tx)
        hand_state(s, i, state_ring, tx)
        T.call_extern("int32", "qla_load_transposed", T.access_ptr(s.x[i % cfg.stages, 0, 0], "r"), s.Xt.data, tx)
        decay_state(s, i % cfg.stages)
        # dS^T += (s dO^T diag(gamma)) Q
        for v, c in T.Parallel(s.block_v, CHUNK):
            s.W[v, c] = s.Xt[c, v] * s.scale_gamma[i % cfg.stages, c]
        T.wgmma_gemm(s.W, s.q[i % cfg.stages, :, 0:HALF], s.S0, policy=FULL_ROW)
        T.wgmma_gemm(s.W, s.q[i % cfg.stages, :, HALF:HEAD_DIM], s.S1, policy=FULL_ROW)
        T.wait_wgmma(2)
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
        T.wgmma_gemm(s.W, s.k[i % cfg.stages, :, 0:HALF], s.S0, policy=FULL_ROW)
        T.wgmma_gemm(s.W, s.k[i % cfg.stages, :, HALF:HEAD_DIM], s.S1, policy=FULL_ROW)
        wait_for_state(s)
        tiles.release(i)


@T.macro
def issue_loads(cfg, s, Q, K, X, A, barrier, index, t, row, hk, hv, v0):
    T.tma_copy(K[row : row + CHUNK, hk, 0:HEAD_DIM], s.k[t, :, :], barrier=barrier[index])
    T.tma_copy(X[row : row + CHUNK, hv, v0 : v0 + s.block_v], s.x[t, :, :], barrier=barrier[index])
    T.tma_copy(A[row : row + CHUNK, hv, 0:CHUNK], s.a[t, :, :], barrier=barrier[index])
    if cfg.reverse:
        T.tma_copy(Q[row : row + CHUNK, hk, 0:HEAD_DIM], s.q[t, :, :], barrier=barrier[index])


@T.macro
def load_warp(cfg, s, tiles, tail, Q, K, X, A, begin, length, hk, hv, v0, num_chunks, lane):
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
            T.call_extern("int32", "qla_zero_rows", T.address_of(s.k[i % cfg.stages, 0, 0]), HEAD_DIM // 64, length - first, lane)
            T.call_extern("int32", "qla_zero_rows", T.address_of(s.x[i % cfg.stages, 0, 0]), cfg.block_v // 64, length - first, lane)
            T.call_extern("int32", "qla_zero_rows", T.address_of(s.a[i % cfg.stages, 0, 0]), 1, length - first, lane)
            if cfg.reverse:
                T.call_extern("int32", "qla_zero_rows", T.address_of(s.q[i % cfg.stages, 0, 0]), HEAD_DIM // 64, length - first, lane)
            T.fence_proxy_async()
        tiles.commit(i)


@T.macro
def gate_warp(cfg, s, tiles, G, Beta, begin, length, hv, log2_scale, num_chunks):
    for i in T.serial(num_chunks):
        first = (num_chunks - 1 - i if cfg.reverse else i) * CHUNK
        tiles.acquire(i)
        # past the end the gate stays at the last token's value and beta is zero
        s.g_last[0] = G[begin + T.min(first + CHUNK, length) - 1, hv]
        for c in T.Parallel(CHUNK):
            s.gf[c] = G[begin + T.min(first + c, length - 1), hv]
        for c in T.Parallel(CHUNK):
            s.bf[c] = Beta[begin + T.min(first + c, length - 1), hv]
        for c in T.Parallel(CHUNK):
            s.bf[c] = T.if_then_else(first + c < length, s.bf[c], 0.0)
        for c in T.Parallel(CHUNK):
            s.beta_gamma[i % cfg.stages, c] = s.bf[c] * T.exp2(s.gf[c])
            s.gamma_rest[i % cfg.stages, c] = T.exp2(s.g_last[0] - s.gf[c])
            if cfg.reverse:
                s.g[i % cfg.stages, c] = s.gf[c]
                s.g_scaled[i % cfg.stages, c] = s.gf[c] + log2_scale
                s.scale_gamma[i % cfg.stages, c] = T.exp2(s.gf[c] + log2_scale)
            else:
                s.beta[i % cfg.stages, c] = s.bf[c]
        s.decay[i % cfg.stages] = T.exp2(s.g_last[0])
        tiles.commit(i)


@T.macro
def store_warp(cfg, s, state_ring, States, slot0, head, v0, num_chunks):
    for i in T.serial(num_chunks):
        slot = slot0 + (num_chunks - 1 - i if cfg.reverse else i)
        state_ring.wait(i)
        T.fence_proxy_async()
        T.tma_copy(s.state0, States[slot, head, v0 : v0 + cfg.block_v, 0:HALF])
        T.tma_copy(s.state1, States[slot, head, v0 : v0 + cfg.block_v, HALF:HEAD_DIM])
        T.tma_store_wait(0)
        state_ring.release(i)


def buffers(cfg: ScanConfig) -> SimpleNamespace:
    """Shared memory and fragments, allocated in the kernel being traced."""
    st, bv, dt, f32 = cfg.stages, cfg.block_v, cfg.dtype, "float32"

    def gates():
        return T.alloc_shared((st, CHUNK), f32, scope="shared")

    s = SimpleNamespace(
        block_v=bv,
        k=T.alloc_shared((st, CHUNK, HEAD_DIM), dt),
        x=T.alloc_shared((st, CHUNK, bv), dt),
        a=T.alloc_shared((st, CHUNK, CHUNK), dt),
        state0=T.alloc_shared((bv, HALF), dt),
        state1=T.alloc_shared((bv, HALF), dt),
        beta_gamma=gates(),
        gamma_rest=gates(),  # gamma_L / gamma
        decay=T.alloc_shared((st,), f32, scope="shared"),  # gamma_L
        S0=T.alloc_fragment((bv, HALF), f32),
        S1=T.alloc_fragment((bv, HALF), f32),
        Sb0=T.alloc_fragment((bv, HALF), dt),
        Sb1=T.alloc_fragment((bv, HALF), dt),
        U=T.alloc_fragment((bv, CHUNK), f32),  # in reverse dVd
        Xt=T.alloc_fragment((CHUNK, bv), dt),
        W=T.alloc_fragment((bv, CHUNK), dt),
        Vd=T.alloc_fragment((bv, CHUNK), f32),  # in reverse dW
        last=T.alloc_local((1,), f32),
        g_last=T.alloc_local((1,), f32),
        gf=T.alloc_fragment((CHUNK,), f32),
        bf=T.alloc_fragment((CHUNK,), f32),
    )
    if cfg.reverse:
        s.q = T.alloc_shared((st, CHUNK, HEAD_DIM), dt)
        s.p = T.alloc_shared((CHUNK, CHUNK), dt)
        s.g, s.g_scaled, s.scale_gamma = gates(), gates(), gates()  # g_scaled: g + log2 s
        s.Xv = T.alloc_fragment((bv, CHUNK), dt)
        s.P = T.alloc_fragment((CHUNK, CHUNK), f32)
        s.Pb = T.alloc_fragment((CHUNK, CHUNK), dt)
    else:
        s.beta = gates()
    return s


def prim_func(cfg: ScanConfig):
    """The kernel of one config, for `tilelang.compile` or for lowering without a GPU."""
    N, H, HV = T.dynamic("N, H, HV")
    slots, heads = T.dynamic("slots, heads")
    cu_size, h0_size, ht_size = T.dynamic("cu_size, h0_size, ht_size")
    f32 = "float32"
    st, bv, dt = cfg.stages, cfg.block_v, cfg.dtype

    @T.prim_func
    def scan_kernel(
        Q: T.Tensor((N, H, HEAD_DIM), dt),
        K: T.Tensor((N, H, HEAD_DIM), dt),
        X: T.Tensor((N, HV, HEAD_DIM), dt),
        A: T.Tensor((N, HV, CHUNK), dt),
        G: T.Tensor((N, HV), f32),
        Beta: T.Tensor((N, HV), f32),
        States: T.Tensor((slots, heads, HEAD_DIM, HEAD_DIM), dt),
        H0: T.Tensor((h0_size,), f32),  # where the scan begins: the initial state, in reverse the final state's gradient
        HT: T.Tensor((ht_size,), f32),
        Cu: T.Tensor((cu_size,), "int32"),
        # run-time
        head0: T.int32,
        num_seqs: T.int32,
        seq_len: T.int32,  # 0: lengths are in Cu
        log2_scale: T.float32,
        use_h0: T.int32,
        use_ht: T.int32,
        v_first: T.int32,
    ):
        with T.Kernel(num_seqs * heads * (HEAD_DIM // bv), threads=cfg.threads) as bid:
            T.import_source(device_source(__file__))
            s = buffers(cfg)
            T.annotate_layout({
                s.Xt: state_fragment(CHUNK, bv), s.x: make_full_bank_swizzled_layout(s.x), s.a: make_full_bank_swizzled_layout(s.a),
                s.state0: make_full_bank_swizzled_layout(s.state0), s.state1: make_full_bank_swizzled_layout(s.state1),
            })  # fmt: skip
            p_ring = Ring(1, producers=WARPGROUP, consumers=cfg.state_threads, name="p_ring") if cfg.reverse else None
            tiles = Ring(st, producers=2 * WARP, consumers=cfg.state_threads + cfg.score_threads, name="tiles")
            state_ring = Ring(1, producers=cfg.state_threads, consumers=WARP, name="state_ring")
            tail = T.alloc_barrier([WARP])

            tx = T.get_thread_binding()
            item = bid // (HEAD_DIM // bv)
            v0 = bid % (HEAD_DIM // bv) * bv
            seq = T.truncdiv(item, heads)
            # variables: an expression would be worked out anew, in 64 bits, wherever it is used
            head = T.alloc_var("int32")
            hv = T.alloc_var("int32")
            hk = T.alloc_var("int32")
            begin = T.alloc_var("int32")
            length = T.alloc_var("int32")
            slot0 = T.alloc_var("int32")
            head = T.truncmod(item, heads)
            hv = head0 + head
            hk = T.truncdiv(hv, T.truncdiv(HV, H))
            if seq_len > 0:
                begin = seq * seq_len
                length = seq_len
                slot0 = seq * T.ceildiv(seq_len, CHUNK)
            else:
                # both ends clamped on their own: the difference of raw offsets may overflow
                begin = T.max(T.min(Cu[seq], N), 0)
                length = T.max(T.max(T.min(Cu[seq + 1], N), 0) - begin, 0)
                slot0 = begin // CHUNK + seq
            num_chunks = T.ceildiv(length, CHUNK)

            if tx < cfg.state_threads:
                T.set_max_nreg(cfg.regs[Role.STATE], 1)
                base = (T.cast(seq, "int64") * HV + hv) * (HEAD_DIM * HEAD_DIM)
                load_state(s, H0, base, v0, v_first, use_h0, tx)
                if cfg.reverse:
                    reverse_role(cfg, s, tiles, p_ring, state_ring, num_chunks, tx)
                else:
                    forward_role(cfg, s, tiles, state_ring, num_chunks, tx)
                if use_ht != 0:
                    store_state(s, HT, base, v0, v_first, tx)
            elif tx >= cfg.threads - WARPGROUP:
                T.set_max_nreg(cfg.regs[Role.IO], 0)
                if tx < cfg.threads - 3 * WARP:
                    load_warp(cfg, s, tiles, tail, Q, K, X, A, begin, length, hk, hv, v0, num_chunks, tx % WARP)
                elif tx < cfg.threads - 2 * WARP:
                    gate_warp(cfg, s, tiles, G, Beta, begin, length, hv, log2_scale, num_chunks)
                elif tx < cfg.threads - WARP:
                    store_warp(cfg, s, state_ring, States, slot0, head, v0, num_chunks)
            elif cfg.reverse:
                T.set_max_nreg(REGS[bv][Role.SCORE], 0)
                score_role(cfg, s, tiles, p_ring, num_chunks)

    return scan_kernel


@functools.cache
def build(cfg: ScanConfig):
    """The compiled kernel of a config."""
    return compile_kernel(lambda: prim_func(cfg), PASS_CONFIGS)


def num_slots(tokens: int, num_seqs: int, seq_len: int) -> int:
    """Chunk slots, empty ones included, from what the host knows; ws.cuh numbers them in the same way."""
    return num_seqs * -(-seq_len // CHUNK) if seq_len > 0 else tokens // CHUNK + num_seqs + 1


def scan_states(k, v, g_cum, beta, A, states, head0, initial_state, cu_seqlens, num_seqs, seq_len, state_v_first, num_sms) -> None:
    """Writes the state that enters each chunk; one launch on the current stream.

    Args:
        k: [N, H, 128] bf16 or fp16, contiguous, 16-byte aligned. N tokens of all sequences, packed.
        v: [N, HV, 128], dtype of k.
        g_cum, beta: [N, HV] fp32; log2 gates summed within the chunk (`kkt_solve`).
        A: [N, HV, 64], dtype of k, gated inverse (`kkt_solve`).
        states: [num_slots(...), heads, 128, 128], dtype of k, of value heads head0 .. head0 + heads - 1; [V, K], written in the slots of
            all chunks.
        initial_state: fp32 [num_seqs, HV, 128, 128] or None; [K, V], with state_v_first [V, K].
        cu_seqlens: int32 [num_seqs + 1] on the device, or None for num_seqs sequences of seq_len tokens.
        num_sms: multiprocessors of the device.
    """
    _launch(False, k, k, v, g_cum, beta, A, states, head0, initial_state, None, 1.0, cu_seqlens, num_seqs, seq_len, state_v_first, num_sms)


def scan_state_gradients(
    q, k, do, g_cum, beta, A, states, head0, final_grad, initial_grad, scale, cu_seqlens, num_seqs, seq_len, state_v_first, num_sms
) -> None:
    """Writes the gradient of the state that leaves each chunk, and of the initial state; one launch on the current stream.

    Args as of `scan_states`, and:
        q: as k. do: gradient of o, as v.
        states: written with the gradients.
        final_grad, initial_grad: gradients of the final state (None: zero) and of the initial one (None: not wanted), as initial_state.
        scale: run-time float, finite and >= 0.
    """
    place = (cu_seqlens, num_seqs, seq_len)
    _launch(True, q, k, do, g_cum, beta, A, states, head0, final_grad, initial_grad, scale, *place, state_v_first, num_sms)


def _launch(
    reverse, q, k, x, g_cum, beta, A, states, head0, begin, end, scale, cu_seqlens, num_seqs, seq_len, state_v_first, num_sms
) -> None:
    block_v = choose_block_v(num_seqs * states.shape[1], num_sms)
    cfg = ScanConfig(reverse, block_v, str(k.dtype).removeprefix("torch."))
    nothing = torch.empty(1, dtype=torch.float32, device=k.device) if begin is None or end is None else None
    build(cfg)(
        q,
        k,
        x,
        A,
        g_cum,
        beta,
        states,
        nothing if begin is None else begin.view(-1),
        nothing if end is None else end.view(-1),
        torch.empty(1, dtype=torch.int32, device=k.device) if cu_seqlens is None else cu_seqlens,
        head0,
        num_seqs,
        0 if cu_seqlens is not None else seq_len,
        math.log2(scale) if scale > 0 else -math.inf,
        int(begin is not None),
        int(end is not None),
        int(state_v_first),
    )
