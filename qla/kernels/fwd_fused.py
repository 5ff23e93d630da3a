"""Fused forward of the gated delta rule: U, W, Vd, S and O of the chunks of one work item: (sequence or segment of one, value head).

The state is kept V-first, S^T [V, K], in the accumulators of the STATE warpgroups (64 rows of V each), and every
product of the recurrence is transposed so that its left operand comes from registers and its right one is a tile of
shared memory as loaded. The chain of one warpgroup never leaves it. Algebra of one chunk (gates g cumulative, in log2
units; gamma = 2^g; L the last token; s the scale; A the gated inverse of ``kkt_solve``):
    U  = K S                          W  = diag(beta) V - diag(beta gamma) U            Vd = A W
    P  = s Lower(Gamma * Q K^T)       O  = s diag(gamma) Q S + P Vd                     S' = gamma_L S + K^T diag(gamma_L/gamma) Vd

Without items a block has a whole sequence, all of V or half of it (block_v); in a call that ``cp_plan`` may leave whole, only if it did.
With OWN_SEGMENTS (block_v = 64) it finds its segment, and the warm-up before it, from the bounds of the chunks: as ``cp_plan`` does where
no transition is allowed, but each head of a sequence for itself. With items (``cp_plan``; block_v = V) it has one of
those that Order lists: its state starts from zero, from the sequence's initial state or from Segments, its first `skip` chunks only warm
the state up (their O is not stored), and it stores the final state if it walks to the sequence's end. With V = 128 an item may be split:
two blocks take half of V each, and in each the warpgroup of the other half leaves. Blocks past the last item have no chunks.

Shapes   Q, K [N, H, K], V, O [N, HV, V], A [N, HV, 64] 16-bit; G (cumulative gate), Beta [N, HV] fp32; states fp32 [S, HV, K, V].
         Items [segments, HV, 4], Order [2 segments HV + 1] int32 (``cp_plan``), of which a launch without items has the last element or
         none; Segments [segments, HV, V K] fp32, in accumulators' order, or with OWN_SEGMENTS bounds [slots, HV] (``kkt_solve``).
         K (64 or 128) is fixed at compile time. N tokens, H and HV heads, sequences, segments, scale, initial/final state, their layout
         and, with block_v = 64, V (64 or 128): run-time values.
Roles    (registers a thread; block_v = 128 | 64)
    role    threads          regs        work
    STATE   0-255 | 0-127    208 | 208   the recurrence and O (two warpgroups | one)
    SCORE   next 128          64 | 128   P, one chunk ahead
    IO      last 128          32 | 40    warp 0: TMA loads; warp 1: gates; warp 2: O to memory
Shared memory                             bytes (block_v = 128 | 64)
    q        [3, 64, K]                   384 K
    k        [3, 64, K]                   384 K
    v        [3, block_v/64, 64, 64]      49152 | 24576     halves of V apart, so that a split item loads its own
    a        [3, 64, 64]                  24576
    p        [64, 64]                      8192
    o        [block_v/64, 64, 64]         16384 | 8192
    gates    6 x [3, 64] fp32              4608             (static, with the barriers)
    decay    [3] fp32                        16             (static)
    place    [12] int32                      48             (static) what the block works on: fields in ws.py
Barriers
    name          signalled by   waited by      count
    tiles.full    IO 0, IO 1     STATE, SCORE   64, and the bytes of the TMA loads
    tiles.empty   STATE, SCORE   IO 0, IO 1     STATE threads + 128
    p_ring.full   SCORE          STATE          128
    p_ring.empty  STATE          SCORE          STATE threads
    o_ring.full   STATE          IO 2           STATE threads
    o_ring.empty  IO 2           STATE          32
    tail          IO 0           IO 0           32: a last chunk that is not whole is cleaned before it is handed on
    block sync, twice, before the roles: the barriers are ready; the place, which thread 0 writes, can be read
    In a block of 128 columns that has half of V, each STATE thread left arrives twice (``qla_arrive``), so the counts stay.
Schedule of chunk i (| separates what runs while wgmma is in flight)
    IO 0    acquire tiles | TMA K, V, A, Q | commit
    IO 1    take gates of chunk i, start loads of those of i + 1 | acquire tiles | gates, decay -> shared | commit
    SCORE   wait tiles | P = s Gamma * (Q K^T) | acquire p | store | commit p | release tiles
    STATE   S += K^T Vd | wait p, o and tiles i + 1 at once | O += P Vd | U of chunk i + 1 by halves of K (K = 64: one), as those of S come
            release tiles i | release p | store O | commit o | O = S Q | W | Vd = A W | decay S, scale O
    IO 2    wait o | from chunk `skip` on: fence | TMA O (rows one by one in a last chunk that is not whole) | release o
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
    KEY_HEAD,
    NO_ITEMS,
    OWN_SEGMENTS,
    PART_OF_V,
    PASS_CONFIGS,
    PLACE_FIELDS,
    ROW,
    ROWS,
    SKIP,
    VALUE_HEAD,
    WARP,
    WARPGROUP,
    KernelConfig,
    Ring,
    compile_kernel,
    device_source,
    fetch_gates,
    load_state,
    once_per_config,
    score_role,
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
    64: {Role.STATE: 208, Role.SCORE: 128, Role.IO: 40},
}


@dataclass(frozen=True)
class FwdConfig(KernelConfig):
    """Everything fixed at compile time. Equal configs share one compiled kernel."""

    block_v: int = 128  # columns of V a block owns
    dtype: str = "bfloat16"  # of q, k, v, A, o
    head_k: int = 128  # K
    stages: int = 3  # chunks in flight

    def __post_init__(self):
        if self.block_v not in REGS:
            raise ValueError(f"block_v must be one of {tuple(REGS)}, got {self.block_v}")
        self.check()

    @property
    def regs(self) -> dict[Role, int]:
        return REGS[self.block_v]

    @property
    def state_threads(self) -> int:
        return self.block_v // 64 * WARPGROUP

    def role_threads(self, role: Role) -> int:
        return self.state_threads if role == Role.STATE else WARPGROUP

    def smem_table(self) -> dict[str, int]:
        return {
            "q": self.stages * CHUNK * self.head_k * 2,
            "k": self.stages * CHUNK * self.head_k * 2,
            "v": self.stages * CHUNK * self.block_v * 2,
            "a": self.stages * CHUNK * CHUNK * 2,
            "p": CHUNK * CHUNK * 2,
            "o": CHUNK * self.block_v * 2,
        }

    @property
    def halves(self) -> int:
        """Fragments of the state, 64 columns of K each."""
        return self.head_k // HALF

    @property
    def name(self) -> str:
        return f"fwd_fused_k{self.head_k}_v{self.block_v}_{self.dtype}"


CONFIGS = tuple(FwdConfig(v, dtype, k) for dtype in ("bfloat16", "float16") for k in HEAD_DIMS for v in (128, 64))


@T.macro
def load_values(s, t, tx):
    # early: shared memory answers late while products queue for the tensor cores
    T.call_extern("int32", "qla_load_transposed", T.access_ptr(s.v[t, 0, 0, 0], "r"), s.Vt.data, tx)


@T.macro
def issue_u_first(s, t):
    # U^T = S^T K^T, first half of K
    T.copy(s.S0, s.Sb0)
    T.wgmma_gemm(s.Sb0, s.k[t, :, 0:HALF], s.U, transpose_B=True, policy=FULL_ROW, clear_accum=True)


@T.macro
def issue_u_second(s, t):
    if s.S1 is not None:
        T.copy(s.S1, s.Sb1)
        T.wgmma_gemm(s.Sb1, s.k[t, :, HALF : 2 * HALF], s.U, transpose_B=True, policy=FULL_ROW)


@T.macro
def issue_qs(s, t):
    # O^T = S^T Q^T
    T.wgmma_gemm(s.Sb0, s.q[t, :, 0:HALF], s.O, transpose_B=True, policy=FULL_ROW, clear_accum=True)
    if s.S1 is not None:
        T.wgmma_gemm(s.Sb1, s.q[t, :, HALF : 2 * HALF], s.O, transpose_B=True, policy=FULL_ROW)


@T.macro
def correct_values(cfg, s, t, tx):
    # in flight: U, O = S Q. Leaves nothing in flight: Vd, O scaled and S decayed.
    T.wait_wgmma(cfg.halves)
    T.warpgroup_fence_operand(s.U, num_regs=32)
    # W = diag(beta) V - diag(beta gamma) U
    for v, c in T.Parallel(s.block_v, CHUNK):
        s.W[v, c] = s.beta[t, c] * s.Vt[c, v] - s.beta_gamma[t, c] * s.U[v, c]
    # Vd^T = W^T A^T
    T.wgmma_gemm(s.W, s.a[t, :, :], s.Vd, transpose_B=True, policy=FULL_ROW, clear_accum=True)
    s.last[0] = s.decay[t]
    for v, k in T.Parallel(s.block_v, HALF):
        s.S0[v, k] *= s.last[0]
    if s.S1 is not None:
        for v, k in T.Parallel(s.block_v, HALF):
            s.S1[v, k] *= s.last[0]
    T.wait_wgmma(1)
    T.warpgroup_fence_operand(s.O, num_regs=32)
    for v, c in T.Parallel(s.block_v, CHUNK):
        s.O[v, c] *= s.scale_gamma[t, c]
    T.wait_wgmma(0)
    T.warpgroup_fence_operand(s.Vd, num_regs=32)


@T.macro
def issue_state(s, t):
    # S^T += (Vd^T diag(gamma_L/gamma)) K, in halves
    for v, c in T.Parallel(s.block_v, CHUNK):
        s.Vdn[v, c] = s.Vd[v, c] * s.gamma_rest[t, c]
    T.wgmma_gemm(s.Vdn, s.k[t, :, 0:HALF], s.S0, policy=FULL_ROW)
    if s.S1 is not None:
        T.wgmma_gemm(s.Vdn, s.k[t, :, HALF : 2 * HALF], s.S1, policy=FULL_ROW)
    T.copy(s.Vd, s.Vdb)


@T.macro
def issue_output(s):
    # O^T += Vd^T P^T
    T.wgmma_gemm(s.Vdb, s.p, s.O, transpose_B=True, policy=FULL_ROW)


@T.macro
def arrive(cfg, barrier, index, arrivals):
    # for the other warpgroup too, where its half of V is another block's
    if cfg.block_v == HALF:
        T.barrier_arrive(barrier[index])
    else:
        T.call_extern("int32", "qla_arrive", barrier[index], arrivals)


@T.macro
def hand_output(cfg, s, i, p_ring, o_ring, arrivals, tx):
    T.warpgroup_fence_operand(s.O, num_regs=32)
    arrive(cfg, p_ring.empty, 0, arrivals)
    # the store warp fences: that orders these stores before its TMA store, and costs nothing here
    T.call_extern("int32", f"qla_store_transposed_rounded<{cfg.is_half}>", s.O.data, T.access_ptr(s.o[0, 0, 0], "r"), tx)
    arrive(cfg, o_ring.full, 0, arrivals)


@T.macro
def state_role(cfg, s, tiles, p_ring, o_ring, num_chunks, arrivals, tx):
    tiles.wait(0)
    load_values(s, 0, tx)
    issue_u_first(s, 0)
    issue_u_second(s, 0)
    issue_qs(s, 0)
    correct_values(cfg, s, 0, tx)
    for i in T.serial(num_chunks - 1):
        issue_state(s, i % cfg.stages)
        T.call_extern(
            "int32", "qla_wait_all", p_ring.full[0], i % 2, o_ring.empty[0], (i + 1) % 2,
            tiles.full[(i + 1) % cfg.stages], (i + 1) // cfg.stages % 2,
        )  # fmt: skip
        issue_output(s)
        # each wait leaves in flight what was issued behind the product that is needed: one for O, one for each half of S or U
        T.wait_wgmma(cfg.halves)
        T.warpgroup_fence_operand(s.S0, num_regs=32)
        load_values(s, (i + 1) % cfg.stages, tx)
        issue_u_first(s, (i + 1) % cfg.stages)
        if s.S1 is not None:
            T.wait_wgmma(2)
            T.warpgroup_fence_operand(s.S1, num_regs=32)
        arrive(cfg, tiles.empty, i % cfg.stages, arrivals)
        issue_u_second(s, (i + 1) % cfg.stages)
        T.wait_wgmma(cfg.halves)
        hand_output(cfg, s, i, p_ring, o_ring, arrivals, tx)
        issue_qs(s, (i + 1) % cfg.stages)
        correct_values(cfg, s, (i + 1) % cfg.stages, tx)
    issue_state(s, T.truncmod(num_chunks - 1, cfg.stages))
    p_ring.wait(num_chunks - 1)
    o_ring.acquire(num_chunks - 1)
    issue_output(s)
    T.wait_wgmma(0)
    T.warpgroup_fence_operand(s.S0, num_regs=32)
    if s.S1 is not None:
        T.warpgroup_fence_operand(s.S1, num_regs=32)
    hand_output(cfg, s, num_chunks - 1, p_ring, o_ring, arrivals, tx)


@T.macro
def issue_loads(s, Q, K, V, A, barrier, index, t, row, hk, hv, v0, half):
    T.tma_copy(K[row : row + CHUNK, hk, 0 : s.head_k], s.k[t, :, :], barrier=barrier[index])
    for n in T.unroll(s.block_v // HALF):
        if half < 0 or half == n:
            T.tma_copy(V[row : row + CHUNK, hv, v0 + n * HALF : v0 + (n + 1) * HALF], s.v[t, n, :, :], barrier=barrier[index])
    T.tma_copy(A[row : row + CHUNK, hv, 0:CHUNK], s.a[t, :, :], barrier=barrier[index])
    T.tma_copy(Q[row : row + CHUNK, hk, 0 : s.head_k], s.q[t, :, :], barrier=barrier[index])


@T.macro
def load_warp(cfg, s, tiles, tail, Q, K, V, A, v0, lane):
    begin = s.place[ROW]
    length = s.place[ROWS]
    hk = s.place[KEY_HEAD]
    hv = s.place[VALUE_HEAD]
    half = s.place[PART_OF_V]
    num_chunks = s.place[CHUNKS]
    for i in T.serial(num_chunks):
        tiles.acquire(i)
        if (i + 1) * CHUNK <= length:
            issue_loads(s, Q, K, V, A, tiles.full, i % cfg.stages, i % cfg.stages, begin + i * CHUNK, hk, hv, v0, half)
        else:
            # rows past the end are somebody else's, or nobody's: they become zero before anyone reads them
            issue_loads(s, Q, K, V, A, tail, 0, i % cfg.stages, begin + i * CHUNK, hk, hv, v0, half)
            T.barrier_arrive(tail[0])
            T.barrier_wait(tail[0], 0)
            T.call_extern("int32", "qla_zero_rows", T.address_of(s.k[i % cfg.stages, 0, 0]), cfg.halves, length - i * CHUNK, lane)
            T.call_extern("int32", "qla_zero_rows", T.address_of(s.v[i % cfg.stages, 0, 0, 0]), cfg.block_v // 64, length - i * CHUNK, lane)
            T.call_extern("int32", "qla_zero_rows", T.address_of(s.a[i % cfg.stages, 0, 0]), 1, length - i * CHUNK, lane)
            T.fence_proxy_async()
        tiles.commit(i)


@T.macro
def gate_warp(cfg, s, tiles, G, Beta, log2_scale, lane):
    begin = s.place[ROW]
    length = s.place[ROWS]
    hv = s.place[VALUE_HEAD]
    num_chunks = s.place[CHUNKS]
    if num_chunks > 0:
        fetch_gates(s, G, Beta, begin, length, hv, 0, lane)
    for i in T.serial(num_chunks):
        # the next chunk's loads are under way while this one waits for its slot
        take_gates(s, i * CHUNK, length, lane)
        if i + 1 < num_chunks:
            fetch_gates(s, G, Beta, begin, length, hv, (i + 1) * CHUNK, lane)
        tiles.acquire(i)
        for c in T.Parallel(CHUNK):
            s.g[i % cfg.stages, c] = s.gf[c]
            s.g_scaled[i % cfg.stages, c] = s.gf[c] + log2_scale
            s.beta[i % cfg.stages, c] = s.bf[c]
            s.beta_gamma[i % cfg.stages, c] = s.bf[c] * T.exp2(s.gf[c])
            s.scale_gamma[i % cfg.stages, c] = T.exp2(s.gf[c] + log2_scale)
            s.gamma_rest[i % cfg.stages, c] = T.exp2(s.g_last[0] - s.gf[c])
        s.decay[i % cfg.stages] = T.exp2(s.g_last[0])
        tiles.commit(i)


@T.macro
def store_warp(cfg, s, o_ring, O, v0, row_stride, lane):
    begin = s.place[ROW]
    length = s.place[ROWS]
    hv = s.place[VALUE_HEAD]
    skip = s.place[SKIP]  # the first chunks only warm the state up
    half = s.place[PART_OF_V]
    num_chunks = s.place[CHUNKS]
    for i in T.serial(num_chunks):
        o_ring.wait(i)
        if i >= skip:
            T.fence_proxy_async()
            if (i + 1) * CHUNK <= length:
                for n in T.unroll(cfg.block_v // HALF):
                    if half < 0 or half == n:
                        T.tma_copy(s.o[n, :, :], O[begin + i * CHUNK : begin + (i + 1) * CHUNK, hv, v0 + n * HALF : v0 + (n + 1) * HALF])
                T.tma_store_wait(0)
            else:
                for n in T.unroll(cfg.block_v // HALF):
                    if half < 0 or half == n:
                        T.call_extern(
                            "int32", "qla_store_rows", T.address_of(O[begin + i * CHUNK, hv, v0 + n * HALF]), T.address_of(s.o[n, 0, 0]),
                            1, length - i * CHUNK, T.cast(row_stride, "int64"), lane,
                        )  # fmt: skip
        o_ring.release(i)


def prim_func(cfg: FwdConfig):
    """The kernel of one config, for `tilelang.compile` or for lowering without a GPU."""
    N, H, HV = T.dynamic("N, H, HV")
    DV = T.dynamic("DV") if cfg.block_v == HALF else cfg.block_v  # V
    cu_size, h0_size, ht_size, items_size, order_size, segments_size = T.dynamic(
        "cu_size, h0_size, ht_size, items_size, order_size, segments_size"
    )
    f32 = "float32"
    st, bv, dt = cfg.stages, cfg.block_v, cfg.dtype

    @T.prim_func
    def fwd_fused_kernel(
        Q: T.Tensor((N, H, cfg.head_k), dt),
        K: T.Tensor((N, H, cfg.head_k), dt),
        V: T.Tensor((N, HV, DV), dt),
        A: T.Tensor((N, HV, CHUNK), dt),
        G: T.Tensor((N, HV), f32),
        Beta: T.Tensor((N, HV), f32),
        O: T.Tensor((N, HV, DV), dt),
        H0: T.Tensor((h0_size,), f32),
        HT: T.Tensor((ht_size,), f32),
        Cu: T.Tensor((cu_size,), "int32"),
        Items: T.Tensor((items_size,), "int32"),
        Order: T.Tensor((order_size,), "int32"),
        Segments: T.Tensor((segments_size,), f32),
        # run-time
        num_rows: T.int32,  # sequences, or with use_items segments
        use_items: T.int32,  # NO_ITEMS, OWN_ITEMS, or with block_v = 64 OWN_SEGMENTS
        seq_len: T.int32,  # 0: lengths are in Cu
        log2_scale: T.float32,
        use_h0: T.int32,
        use_ht: T.int32,
        v_first: T.int32,
        # of OWN_SEGMENTS, as of cp_plan
        num_seqs: T.int32,
        segment_chunks: T.int32,
        max_warmup: T.int32,
        threshold: T.float32,
    ):
        wide = DV // (2 * HALF) if bv == HALF else 0  # 1: two blocks share V
        with T.Kernel(num_rows * HV * (1 + T.max(wide, use_items % OWN_SEGMENTS)), threads=cfg.threads) as bid:
            T.import_source(device_source(__file__, "segments.cuh"))
            s = SimpleNamespace(
                block_v=bv,
                head_k=cfg.head_k,
                value_dim=DV,
                q=T.alloc_shared((st, CHUNK, cfg.head_k), dt),
                k=T.alloc_shared((st, CHUNK, cfg.head_k), dt),
                v=T.alloc_shared((st, bv // HALF, CHUNK, HALF), dt),
                a=T.alloc_shared((st, CHUNK, CHUNK), dt),
                p=T.alloc_shared((CHUNK, CHUNK), dt),
                o=T.alloc_shared((bv // HALF, CHUNK, HALF), dt),
                g=T.alloc_shared((st, CHUNK), f32, scope="shared"),
                g_scaled=T.alloc_shared((st, CHUNK), f32, scope="shared"),  # g + log2 s
                beta=T.alloc_shared((st, CHUNK), f32, scope="shared"),
                beta_gamma=T.alloc_shared((st, CHUNK), f32, scope="shared"),
                scale_gamma=T.alloc_shared((st, CHUNK), f32, scope="shared"),
                gamma_rest=T.alloc_shared((st, CHUNK), f32, scope="shared"),  # gamma_L / gamma
                decay=T.alloc_shared((st,), f32, scope="shared"),  # gamma_L
                S0=T.alloc_fragment((bv, HALF), f32),
                S1=T.alloc_fragment((bv, HALF), f32) if cfg.halves == 2 else None,
                Sb0=T.alloc_fragment((bv, HALF), dt),
                Sb1=T.alloc_fragment((bv, HALF), dt) if cfg.halves == 2 else None,
                U=T.alloc_fragment((bv, CHUNK), f32),
                Vt=T.alloc_fragment((CHUNK, bv), dt),
                W=T.alloc_fragment((bv, CHUNK), dt),
                Vd=T.alloc_fragment((bv, CHUNK), f32),
                Vdb=T.alloc_fragment((bv, CHUNK), dt),
                Vdn=T.alloc_fragment((bv, CHUNK), dt),
                O=T.alloc_fragment((bv, CHUNK), f32),
                last=T.alloc_local((1,), f32),
                place=T.alloc_shared((PLACE_FIELDS,), "int32", scope="shared"),
                value_heads=HV,
                P=T.alloc_fragment((CHUNK, CHUNK), f32),
                Pb=T.alloc_fragment((CHUNK, CHUNK), dt),
                g_last=T.alloc_local((1,), f32),
                gf=T.alloc_fragment((CHUNK,), f32),
                bf=T.alloc_fragment((CHUNK,), f32),
                next_gates=T.alloc_local((4,), f32),
            )
            T.annotate_layout({
                s.Vt: state_fragment(CHUNK, bv), s.o: make_full_bank_swizzled_layout(s.o),
                s.v: make_full_bank_swizzled_layout(s.v), s.a: make_full_bank_swizzled_layout(s.a),
            })  # fmt: skip
            tiles = Ring(st, producers=2 * WARP, consumers=cfg.state_threads + WARPGROUP, name="tiles")
            p_ring = Ring(1, producers=WARPGROUP, consumers=cfg.state_threads, name="p_ring")
            o_ring = Ring(1, producers=cfg.state_threads, consumers=WARP, name="o_ring")
            tail = T.alloc_barrier([WARP])

            tx = T.get_thread_binding()
            v0 = (bid & wide) * HALF if bv == HALF else 0
            if bv == HALF and use_items == OWN_SEGMENTS:
                if tx < WARP:
                    own = bid >> wide
                    problem = (num_seqs, seq_len, N, T.truncdiv(own, HV), T.truncmod(own, HV), HV, T.truncdiv(HV, H))
                    rule = (segment_chunks, max_warmup, threshold, use_h0, tx)
                    tables = (T.access_ptr(s.place, "w"), T.access_ptr(Segments, "r"), T.access_ptr(Cu, "r"))
                    T.call_extern("int32", "qla_locate_segment", *tables, *problem, *rule)
            elif tx == 0:
                item = T.alloc_var("int32", bid >> wide if bv == HALF else bid)
                part = T.alloc_var("int32", 0)
                if use_items != NO_ITEMS:
                    part = Order[bid] & 1
                    item = Order[bid] >> 1  # -1 stays -1: nothing to do
                elif order_size > 0:
                    if Order[0] == 0:
                        item = -1
                problem = (seq_len, N, item, part, 0, HV, HV, T.truncdiv(HV, H), use_h0)
                tables = (T.access_ptr(s.place, "w"), T.access_ptr(Items, "r"), use_items, False, T.access_ptr(Cu, "r"))
                T.call_extern("int32", "qla_locate", *tables, *problem)
            T.sync_threads()

            if tx < cfg.state_threads:
                T.set_max_nreg(cfg.regs[Role.STATE], 1)
                num_chunks = uniform(s.place[CHUNKS])
                half = uniform(s.place[PART_OF_V])
                if half < 0 or half == uniform(tx // WARPGROUP):
                    load_state(s, H0, Segments, v0, v_first, tx)
                    if num_chunks > 0:
                        state_role(cfg, s, tiles, p_ring, o_ring, num_chunks, T.if_then_else(half < 0, 1, 2), tx)
                    if use_ht * s.place[ENDS] != 0:
                        store_state(s, HT, state_at(s), v0, v_first, tx)
            elif tx < cfg.state_threads + WARPGROUP:
                T.set_max_nreg(cfg.regs[Role.SCORE], 0)
                score_chunks = s.place[CHUNKS]
                score_role(cfg, s, tiles, p_ring, score_chunks)
            else:
                T.set_max_nreg(cfg.regs[Role.IO], 0)
                if tx < cfg.state_threads + WARPGROUP + WARP:
                    load_warp(cfg, s, tiles, tail, Q, K, V, A, v0, tx % WARP)
                elif tx < cfg.state_threads + WARPGROUP + 2 * WARP:
                    gate_warp(cfg, s, tiles, G, Beta, log2_scale, tx % WARP)
                elif tx < cfg.state_threads + WARPGROUP + 3 * WARP:
                    store_warp(cfg, s, o_ring, O, v0, HV * DV, tx % WARP)

    return fwd_fused_kernel


@once_per_config
def build(cfg: FwdConfig):
    """The compiled kernel of a config."""
    return compile_kernel(lambda: prim_func(cfg), PASS_CONFIGS)


@functools.cache
def config_for(block_v: int, dtype: torch.dtype, head_k: int) -> FwdConfig:
    return FwdConfig(block_v, str(dtype).removeprefix("torch."), head_k)
