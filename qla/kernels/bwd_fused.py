"""Fused gradients of the gated delta rule: dQ, dK, dV, dg and dbeta of one chunk of one key head and all its value heads.

Chunks do not wait for each other: the state S that enters a chunk and the gradient dS of the state that leaves it come from the scans
of ``cp_prep``. A persistent block takes units (chunk, key head) and loops over the value heads of the group; dQ and dK are summed over
the group in registers. Two warpgroups divide the columns: of V while they retrace the chunk, of K for dQ and dK. Algebra of one head
(gates g cumulative, in log2 units; gamma = 2^g; L the last token; s the scale; A = (I + N)^-1 the gated inverse of ``kkt_solve``,
N = StrictLower(diag(beta) (Gamma * K K^T))):
    U   = K S                                   W   = diag(beta) V - diag(beta gamma) U       Vd = A W
    R   = diag(gamma_L/gamma) K dS              P   = s Lower(Gamma * Q K^T)                  dVd = R + P^T dO
    dW  = A^T dVd                               dV  = diag(beta) dW                           dU = -diag(gamma) dV
    dP  = dO Vd^T                               dN  = -StrictLower(dW Vd^T), since A^T (dVd W^T) A^T = (A^T dVd) (A W)^T
    dQ  = s diag(gamma) dO S^T + E K            E   = s Lower(Gamma * dP)                     F = diag(beta) (Gamma * dN)
    dK  = diag(gamma_L/gamma) Vd dS^T + dU S^T + E^T Q + (F + F^T) K
    dbeta = rows of dW * (V - diag(gamma) U) and of Gamma * dN * K K^T
    dg_t: what tokens from t on read of S (rows of dU * U and of Q * first term of dQ), what tokens before t leave in the next state
          (rows of Vd * R), gamma_L <S, dS>, and the pairs on both sides of t, in StrictLower(dP * P) and dN * N: sums of what
          passes the gate, so that strong gates leave small sums and not small differences.
Nothing is divided by gamma or beta.

Shapes   Q, K, dQ, dK [N, H, 128], V, dO, dV [N, HV, 128], A [N, HV, 64] 16-bit; G (cumulative gate), Beta, dG, dBeta [N, HV] fp32;
         S, dS [slots, heads, 128, 128] 16-bit, V-first, of heads head0 .. head0 + heads - 1 (whole groups). Heads, lengths and scale
         are run-time values.
Roles
    role     threads   regs   work
    LEFT     0-127      232   columns 0-63 of V, then of K; P, dP, E
    RIGHT    128-255    232   columns 64-127; dN, F
    IO       256-383     40   warp 0: TMA loads; warp 1: gates; warp 2: dV, dQ, dK to memory; warp 3: dg, dbeta
Shared memory        bytes
    s   [128, 128]   32768   S
    ds  [128, 128]   32768   dS
    q   [64, 128]    16384
    k   [64, 128]    16384
    v   [2, 64, 128] 32768   V, then W, then dV, which leaves from here
    do  [2, 64, 128] 32768
    a   [2, 64, 64]  16384
    vd  [64, 128]    16384   Vd, then E and E^T; at the end of a unit dQ
    dvd [64, 128]    16384   dVd, then dW, then F and F^T; at the end of a unit dK
    p   [64, 64]      8192   P^T
    sums [2, 448] fp32, dots [8] fp32, gates and betas [2, 64] fp32 each  4640  (static, with the barriers and the flag of a unit)
Barriers
    name            signalled by   waited by            count
    keys.full       IO 0           LEFT, RIGHT          32, and the bytes of the TMA loads; one fill a unit, and one more says: no more
    keys.empty      LEFT, RIGHT    IO 0                 256
    states.full     IO 0           LEFT, RIGHT          32, and the bytes; one fill a head, as for what follows
    states.empty    LEFT, RIGHT    IO 0                 256
    tiles.full      IO 0, IO 1     LEFT, RIGHT          64, and the bytes
    tiles.empty     all but IO 0,1 IO 0, IO 1           320
    p_ready         LEFT           LEFT, RIGHT          128
    dv_ready        LEFT, RIGHT    IO 2                 256
    sums.full       LEFT, RIGHT    IO 3                 256
    sums.empty      IO 3           LEFT, RIGHT          32
    out.full        LEFT, RIGHT    IO 2                 256
    out.empty       IO 2           LEFT, RIGHT          32
    tail            IO 0           IO 0                 32: tiles of a chunk that is not whole are cleaned before they are handed on
    named 1         LEFT, RIGHT    LEFT, RIGHT          256: both, four times a head and once a unit
    named 2, 3      LEFT | RIGHT   the same             128: a warpgroup alone
Schedule of one head (= both wait for each other, | separates what runs while wgmma is in flight)
    both    wait states | U, R | wait tiles and sums, <S, dS> | W to v (own) | Vd | scale R | = vd and dvd are free | Vd to vd, its
            products with R | wait P | R + P^T dO | A^T to registers | dVd to dvd (own) | dW | dV to v, dW to dvd, commit dV, sums = |
            Vd dS^T, dW S^T | dK += | dO S^T | dK -=, sums | LEFT dP, RIGHT dW Vd^T | release states, dQ +=, sums | LEFT Q K^T,
            RIGHT K K^T | E (LEFT), F (RIGHT), sums = to vd, to dvd = | dQ += E K, dK += E^T Q + F K + F^T K | LEFT P of the next
            head | store and commit sums | release tiles
    (own): a warpgroup waits for itself. At the end of a unit: release keys = dQ, dK to vd, dvd | commit out
    IO 0    for each head, as places become free: tiles (a head ahead), states, at the first head of a unit q and k
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
    FULL_ROW,
    HALF,
    HEAD_DIM,
    PASS_CONFIGS,
    WARP,
    WARPGROUP,
    KernelConfig,
    Ring,
    compile_kernel,
    device_source,
    once_per_config,
)

BOTH = 2 * WARPGROUP
SUMS = 7 * CHUNK  # floats of sums that a warpgroup leaves for a head; bwd_fused.cuh says which


class Role(IntEnum):
    LEFT = 0
    RIGHT = 1
    IO = 2


REGS = {Role.LEFT: 232, Role.RIGHT: 232, Role.IO: 40}


@dataclass(frozen=True)
class BwdConfig(KernelConfig):
    """Everything fixed at compile time. Equal configs share one compiled kernel."""

    dtype: str = "bfloat16"  # of all but gates, beta and their gradients

    def __post_init__(self):
        self.check()

    @property
    def explained_spills(self) -> int:
        """Loads and stores of local memory in the computing roles together: ptxas 13.0 needs 86 among 5700 instructions, for what is
        carried around the loop over heads next to four accumulators of 32 registers that lie in fixed places."""
        return 100

    @property
    def regs(self) -> dict[Role, int]:
        return REGS

    def smem_table(self) -> dict[str, int]:
        return {
            "s": HEAD_DIM * HEAD_DIM * 2,
            "ds": HEAD_DIM * HEAD_DIM * 2,
            "q": CHUNK * HEAD_DIM * 2,
            "k": CHUNK * HEAD_DIM * 2,
            "v": 2 * CHUNK * HEAD_DIM * 2,
            "do": 2 * CHUNK * HEAD_DIM * 2,
            "a": 2 * CHUNK * CHUNK * 2,
            "vd": CHUNK * HEAD_DIM * 2,
            "dvd": CHUNK * HEAD_DIM * 2,
            "p": CHUNK * CHUNK * 2,
        }

    @property
    def name(self) -> str:
        return f"bwd_fused_{self.dtype}"


CONFIGS = (BwdConfig("bfloat16"), BwdConfig("float16"))


def device(function: str, *args):
    """Call of a function of bwd_fused.cuh; to be wrapped in T.evaluate where it stands."""
    return T.call_extern("int32", f"qla_bwd::{function}", *args)


def at(buffer, *index):
    """Address of an element of shared memory; "r" also where it is written, for otherwise TileLang adds fences of its own."""
    return T.access_ptr(buffer[index], "r")


def tile(buffer, i, *stage):
    """Address of the i-th [64, 64] tile of a 16-bit buffer, or of one of its stages."""
    return T.call_extern("handle", "qla_tile", at(buffer, *stage, 0, 0), i)


@T.macro
def meet():
    T.sync_threads(1, BOTH)


@T.macro
def settle(x):
    """Nothing in flight, and x can be read."""
    T.wait_wgmma(0)
    T.warpgroup_fence_operand(x, num_regs=32)


@T.macro
def retrace(cfg, s, x, w, first, rings, n, hh, tx):
    """From the states to Vd, dW and dV of the warpgroup's columns of V."""
    rings.states.wait(hh)
    T.wgmma_gemm(s.k, s.s[x.lo : x.hi, :], x.U, transpose_B=True, policy=FULL_ROW, clear_accum=True)
    T.wgmma_gemm(s.k, s.ds[x.lo : x.hi, :], x.R, transpose_B=True, policy=FULL_ROW, clear_accum=True)
    rings.tiles.wait(hh)
    T.evaluate(device("read_rows", at(s.g, hh % 2, 0), at(s.beta, hh % 2, 0), x.rows.data, x.sums.data, tx))
    rings.sums.acquire(hh)
    T.evaluate(device(f"dot_states<{cfg.is_half}>", tile(s.s, 2 * w), tile(s.ds, 2 * w), at(s.dots, w * 4), tx))
    T.wait_wgmma(1)
    T.warpgroup_fence_operand(x.U, num_regs=32)
    T.evaluate(device(f"make_w<{cfg.is_half}>", x.U.data, tile(s.v, w, hh % 2), x.rows.data, x.v.data, tx))
    T.sync_threads(2 + w, WARPGROUP)
    # Vd = A W
    T.wgmma_gemm(s.a[hh % 2, :, :], s.v[hh % 2, :, x.lo : x.hi], x.U, policy=FULL_ROW, clear_accum=True)
    T.wait_wgmma(1)
    T.warpgroup_fence_operand(x.R, num_regs=32)
    T.evaluate(device("scale_rest", x.R.data, x.rows.data))
    settle(x.U)
    if first:
        rings.out.acquire(n)
    meet()  # the last head's E and F are dead
    T.evaluate(device(f"finish_vd<{cfg.is_half}>", x.U.data, x.R.data, x.sums.data, tile(s.vd, w), tx))
    T.barrier_wait(s.p_ready[0], hh % 2)
    # dVd = diag(gamma_L / gamma) K dS + P^T dO
    T.wgmma_gemm(s.p, s.do[hh % 2, :, x.lo : x.hi], x.R, policy=FULL_ROW)
    T.call_extern("int32", "qla_load_transposed", tile(s.a, 0, hh % 2), x.At.data, tx)
    settle(x.R)
    T.evaluate(device(f"store_rounded<{cfg.is_half}>", x.R.data, tile(s.dvd, w), tx))
    T.sync_threads(2 + w, WARPGROUP)
    # dW = A^T dVd
    T.wgmma_gemm(x.At, s.dvd[:, x.lo : x.hi], x.R, policy=FULL_ROW, clear_accum=True)
    settle(x.R)
    kept = (x.v.data, x.rows.data, x.sums.data)
    T.evaluate(device(f"finish_dw<{cfg.is_half}>", x.R.data, *kept, tile(s.dvd, w), tile(s.v, w, hh % 2), tx))
    T.barrier_arrive(s.dv_ready[hh % 2])
    meet()  # Vd and dW are there


@T.macro
def collect(cfg, s, x, w, rings, hh, tx):
    """What the state and its gradient add to dQ and dK, by the warpgroup's columns of K, while the products of `pairs` follow."""
    T.wgmma_gemm(s.vd, s.ds[:, x.lo : x.hi], x.U, policy=FULL_ROW, clear_accum=True)
    T.wgmma_gemm(s.dvd, s.s[:, x.lo : x.hi], x.R, policy=FULL_ROW, clear_accum=True)
    T.wait_wgmma(1)
    T.warpgroup_fence_operand(x.U, num_regs=32)
    T.evaluate(device("add_written", x.dK.data, x.U.data, x.rows.data))
    T.wgmma_gemm(s.do[hh % 2, :, :], s.s[:, x.lo : x.hi], x.U, policy=FULL_ROW, clear_accum=True)
    T.wait_wgmma(1)
    T.warpgroup_fence_operand(x.R, num_regs=32)
    T.evaluate(device(f"add_read<{cfg.is_half}>", x.dK.data, x.R.data, tile(s.k, w), x.rows.data, x.sums.data, tx))
    if w == 0:
        T.wgmma_gemm(s.do[hh % 2, :, :], s.vd, x.R, transpose_B=True, policy=FULL_ROW, clear_accum=True)  # dP
    else:
        T.wgmma_gemm(s.dvd, s.vd, x.R, transpose_B=True, policy=FULL_ROW, clear_accum=True)  # dW Vd^T
    T.wait_wgmma(1)
    T.warpgroup_fence_operand(x.U, num_regs=32)
    rings.states.release(hh)
    T.evaluate(device(f"add_query<{cfg.is_half}>", x.dQ.data, x.U.data, tile(s.q, w), x.rows.data, x.sums.data, s.log2_scale, tx))
    if w == 0:
        T.wgmma_gemm(s.q, s.k, x.U, transpose_B=True, policy=FULL_ROW, clear_accum=True)
    else:
        T.wgmma_gemm(s.k, s.k, x.U, transpose_B=True, policy=FULL_ROW, clear_accum=True)
    settle(x.U)
    T.warpgroup_fence_operand(x.R, num_regs=32)


@T.macro
def pairs(cfg, s, x, w, last, rings, hh, tx):
    """LEFT: E from dP, RIGHT: F from dN; their products with Q and K, while LEFT makes P of the next head from Q K^T."""
    kept = (x.rows.data, x.v.data, x.sums.data)
    if w == 0:
        T.evaluate(
            device(
                f"pair_scores<{cfg.is_half}>", x.R.data, x.U.data, at(s.g, hh % 2, 0), s.log2_scale, *kept, at(s.sums, 0, 0), tx
            )
        )  # fmt: skip
    else:
        T.evaluate(device(f"pair_inverse<{cfg.is_half}>", x.R.data, x.U.data, at(s.g, hh % 2, 0), *kept, at(s.sums, 1, 0), tx))
    meet()  # Vd and dW are dead
    if w == 0:
        T.evaluate(device("store_both", x.v.data, tile(s.vd, 0), tile(s.vd, 1), tx))
    else:
        T.evaluate(device("store_both", x.v.data, tile(s.dvd, 0), tile(s.dvd, 1), tx))
    meet()
    T.wgmma_gemm(s.vd[:, 0:HALF], s.k[:, x.lo : x.hi], x.dQ, policy=FULL_ROW)
    T.wgmma_gemm(s.vd[:, HALF:HEAD_DIM], s.q[:, x.lo : x.hi], x.dK, policy=FULL_ROW)
    T.wgmma_gemm(s.dvd[:, 0:HALF], s.k[:, x.lo : x.hi], x.dK, policy=FULL_ROW)
    T.wgmma_gemm(s.dvd[:, HALF:HEAD_DIM], s.k[:, x.lo : x.hi], x.dK, policy=FULL_ROW)
    if w == 0:
        if not last:
            rings.tiles.wait(hh + 1)
            T.evaluate(device(f"make_p<{cfg.is_half}>", x.U.data, at(s.g, (hh + 1) % 2, 0), s.log2_scale, tile(s.p, 0), tx))
            T.barrier_arrive(s.p_ready[0])
    T.evaluate(device("store_sums", x.sums.data, at(s.sums, w, 0), tx))
    rings.sums.commit(hh)
    settle(x.dQ)
    T.warpgroup_fence_operand(x.dK, num_regs=32)
    rings.tiles.release(hh)


@T.macro
def finish_unit(cfg, s, x, w, rings, n, tx):
    """dQ and dK to their tiles."""
    rings.keys.release(n)
    meet()  # E and F are dead
    T.evaluate(device(f"store_rounded<{cfg.is_half}>", x.dQ.data, tile(s.vd, w), tx))
    T.evaluate(device(f"store_rounded<{cfg.is_half}>", x.dK.data, tile(s.dvd, w), tx))
    rings.out.commit(n)


@T.macro
def first_scores(cfg, s, x, rings, hh, tx):
    """LEFT: P of a unit's first head."""
    T.wgmma_gemm(s.q, s.k, x.U, transpose_B=True, policy=FULL_ROW, clear_accum=True)
    rings.tiles.wait(hh)
    settle(x.U)
    T.evaluate(device(f"make_p<{cfg.is_half}>", x.U.data, at(s.g, hh % 2, 0), s.log2_scale, tile(s.p, 0), tx))
    T.barrier_arrive(s.p_ready[0])


@T.macro
def gradient_role(cfg, s, x, w, rings, n, ratio, tx):
    """One unit of LEFT (w = 0) or RIGHT (w = 1)."""
    T.clear(x.dQ)
    T.clear(x.dK)
    if w == 0:
        first_scores(cfg, s, x, rings, n * ratio, tx)
    for h in T.serial(ratio):
        retrace(cfg, s, x, w, h == 0, rings, n, n * ratio + h, tx)
        collect(cfg, s, x, w, rings, n * ratio + h, tx)
        pairs(cfg, s, x, w, h + 1 == ratio, rings, n * ratio + h, tx)
    finish_unit(cfg, s, x, w, rings, n, tx)


@T.macro
def load_tiles(s, V, dO, A, barrier, index, t, row, hv):
    T.tma_copy(V[row : row + CHUNK, hv, 0:HEAD_DIM], s.v[t, :, :], barrier=barrier[index])
    T.tma_copy(dO[row : row + CHUNK, hv, 0:HEAD_DIM], s.do[t, :, :], barrier=barrier[index])
    T.tma_copy(A[row : row + CHUNK, hv, 0:CHUNK], s.a[t, :, :], barrier=barrier[index])


@T.macro
def load_keys(s, Q, K, barrier, row, hk):
    T.tma_copy(K[row : row + CHUNK, hk, 0:HEAD_DIM], s.k, barrier=barrier[0])
    T.tma_copy(Q[row : row + CHUNK, hk, 0:HEAD_DIM], s.q, barrier=barrier[0])


@T.macro
def wait_for_tail(s, tail):
    T.barrier_arrive(tail[0])
    T.barrier_wait(tail[0], s.count[1] % 2)
    s.count[1] += 1


@T.macro
def load_unit(s, rings, tail, Q, K, V, dO, A, S, dS, slot, hk0, head0, n, ratio, lane):
    """IO 0: everything of one unit, in the order in which its buffers become free. Rows past the end of the sequence are somebody else's,
    or nobody's: they become zero before anyone reads them."""
    rows = s.unit[0]
    row = s.unit[1]
    hk = hk0 + s.unit[2]
    for h in T.serial(ratio):
        hh = n * ratio + h
        hv = hk * ratio + h
        rings.tiles.acquire(hh)
        if rows == CHUNK:
            load_tiles(s, V, dO, A, rings.tiles.full, hh % 2, hh % 2, row, hv)
        else:
            load_tiles(s, V, dO, A, tail, 0, hh % 2, row, hv)
            wait_for_tail(s, tail)
            T.call_extern("int32", "qla_zero_rows", tile(s.v, 0, hh % 2), 2, rows, lane)
            T.call_extern("int32", "qla_zero_rows", tile(s.do, 0, hh % 2), 2, rows, lane)
            T.call_extern("int32", "qla_zero_rows", tile(s.a, 0, hh % 2), 1, rows, lane)
            T.fence_proxy_async()
        rings.tiles.commit(hh)
        rings.states.acquire(hh)
        T.tma_copy(S[slot, hv - head0, 0:HEAD_DIM, 0:HEAD_DIM], s.s, barrier=rings.states.full[0])
        T.tma_copy(dS[slot, hv - head0, 0:HEAD_DIM, 0:HEAD_DIM], s.ds, barrier=rings.states.full[0])
        rings.states.commit(hh)
        if h == 0:
            rings.keys.acquire(n)
            s.more[0] = 1
            if rows == CHUNK:
                load_keys(s, Q, K, rings.keys.full, row, hk)
            else:
                load_keys(s, Q, K, tail, row, hk)
                wait_for_tail(s, tail)
                T.call_extern("int32", "qla_zero_rows", tile(s.q, 0), 2, rows, lane)
                T.call_extern("int32", "qla_zero_rows", tile(s.k, 0), 2, rows, lane)
                T.fence_proxy_async()
            rings.keys.commit(n)


@T.macro
def load_gates(s, rings, G, Beta, hk0, n, ratio, HV, lane):
    """IO 1: gates and beta of one unit's heads."""
    for h in T.serial(ratio):
        hh = n * ratio + h
        hv = (hk0 + s.unit[2]) * ratio + h
        rings.tiles.acquire(hh)
        T.evaluate(
            device(
                "read_gates", T.address_of(G[s.unit[1], hv]), T.address_of(Beta[s.unit[1], hv]), T.cast(HV, "int64"), s.unit[0],
                at(s.g, hh % 2, 0), at(s.beta, hh % 2, 0), lane,
            )
        )  # fmt: skip
        rings.tiles.commit(hh)


@T.macro
def store_unit(s, rings, dQ, dK, dV, hk0, n, ratio, H, HV, lane):
    """IO 2: dV of each head out of V's place, then dQ and dK."""
    hk = hk0 + s.unit[2]
    for h in T.serial(ratio):
        hh = n * ratio + h
        T.barrier_wait(s.dv_ready[hh % 2], hh // 2 % 2)
        T.fence_proxy_async()
        if s.unit[0] == CHUNK:
            T.tma_copy(s.v[hh % 2, :, :], dV[s.unit[1] : s.unit[1] + CHUNK, hk * ratio + h, 0:HEAD_DIM])
            T.tma_store_wait(0)
        else:
            T.call_extern(
                "int32", "qla_store_rows", T.address_of(dV[s.unit[1], hk * ratio + h, 0]), tile(s.v, 0, hh % 2), 2, s.unit[0],
                T.cast(HV * HEAD_DIM, "int64"), lane,
            )  # fmt: skip
        rings.tiles.release(hh)
    rings.out.wait(n)
    T.fence_proxy_async()
    if s.unit[0] == CHUNK:
        T.tma_copy(s.vd, dQ[s.unit[1] : s.unit[1] + CHUNK, hk, 0:HEAD_DIM])
        T.tma_copy(s.dvd, dK[s.unit[1] : s.unit[1] + CHUNK, hk, 0:HEAD_DIM])
        T.tma_store_wait(0)
    else:
        stride = T.cast(H * HEAD_DIM, "int64")
        T.call_extern("int32", "qla_store_rows", T.address_of(dQ[s.unit[1], hk, 0]), tile(s.vd, 0), 2, s.unit[0], stride, lane)
        T.call_extern("int32", "qla_store_rows", T.address_of(dK[s.unit[1], hk, 0]), tile(s.dvd, 0), 2, s.unit[0], stride, lane)
    rings.out.release(n)


@T.macro
def zero_unit(s, dQ, dK, dV, hk0, ratio, H, HV, lane):
    """IO 2: gradients of rows that no sequence owns."""
    hk = hk0 + s.unit[2]
    stride = T.cast(H * (HEAD_DIM * 2), "int64")
    T.evaluate(device("zero", T.address_of(dQ[s.unit[1], hk, 0]), -s.unit[0], HEAD_DIM * 2, stride, lane))
    T.evaluate(device("zero", T.address_of(dK[s.unit[1], hk, 0]), -s.unit[0], HEAD_DIM * 2, stride, lane))
    wide = T.cast(HV * (HEAD_DIM * 2), "int64")
    T.evaluate(device("zero", T.address_of(dV[s.unit[1], hk * ratio, 0]), -s.unit[0], HEAD_DIM * 2 * ratio, wide, lane))


@T.macro
def finish_gates(s, rings, dG, dBeta, hk0, n, ratio, HV, lane):
    """IO 3: dg and dbeta of one unit's heads."""
    for h in T.serial(ratio):
        hh = n * ratio + h
        hv = (hk0 + s.unit[2]) * ratio + h
        rings.sums.wait(hh)
        T.evaluate(
            device(
                "finish_gates", at(s.sums, 0, 0), at(s.dots, 0), at(s.g, hh % 2, 0), T.address_of(dG[s.unit[1], hv]),
                T.address_of(dBeta[s.unit[1], hv]), T.cast(HV, "int64"), s.unit[0], lane,
            )
        )  # fmt: skip
        rings.sums.release(hh)
        rings.tiles.release(hh)


@T.macro
def zero_gates(s, dG, dBeta, hk0, ratio, HV, lane):
    """IO 3: gradients of rows that no sequence owns."""
    hv = (hk0 + s.unit[2]) * ratio
    stride = T.cast(HV * 4, "int64")
    T.evaluate(device("zero", T.address_of(dG[s.unit[1], hv]), -s.unit[0], 4 * ratio, stride, lane))
    T.evaluate(device("zero", T.address_of(dBeta[s.unit[1], hv]), -s.unit[0], 4 * ratio, stride, lane))


def warpgroup(w, cfg):
    """Registers of LEFT (w = 0) or RIGHT (w = 1)."""

    def accumulator():
        return T.alloc_fragment((CHUNK, HALF), "float32")

    return SimpleNamespace(
        lo=w * HALF,
        hi=(w + 1) * HALF,
        dQ=accumulator(),
        dK=accumulator(),
        U=accumulator(),
        R=accumulator(),
        At=T.alloc_fragment((CHUNK, CHUNK), cfg.dtype),
        v=T.alloc_local((16,), "uint32"),  # V, later E or F, packed
        rows=T.alloc_local((5,), "float32"),
        sums=T.alloc_local((6,), "float32"),
    )


def prim_func(cfg: BwdConfig):
    """The kernel of one config, for `tilelang.compile` or for lowering without a GPU."""
    N, H, HV = T.dynamic("N, H, HV")
    slots, heads, cu_size = T.dynamic("slots, heads, cu_size")
    f32, dt = "float32", cfg.dtype

    @T.prim_func
    def bwd_fused_kernel(
        Q: T.Tensor((N, H, HEAD_DIM), dt),
        K: T.Tensor((N, H, HEAD_DIM), dt),
        V: T.Tensor((N, HV, HEAD_DIM), dt),
        A: T.Tensor((N, HV, CHUNK), dt),
        G: T.Tensor((N, HV), f32),
        Beta: T.Tensor((N, HV), f32),
        dO: T.Tensor((N, HV, HEAD_DIM), dt),
        S: T.Tensor((slots, heads, HEAD_DIM, HEAD_DIM), dt),
        dS: T.Tensor((slots, heads, HEAD_DIM, HEAD_DIM), dt),
        dQ: T.Tensor((N, H, HEAD_DIM), dt),
        dK: T.Tensor((N, H, HEAD_DIM), dt),
        dV: T.Tensor((N, HV, HEAD_DIM), dt),
        dG: T.Tensor((N, HV), f32),
        dBeta: T.Tensor((N, HV), f32),
        Cu: T.Tensor((cu_size,), "int32"),
        # run-time
        head0: T.int32,
        ratio: T.int32,
        num_seqs: T.int32,
        seq_len: T.int32,  # 0: lengths are in Cu
        log2_scale: T.float32,
        num_blocks: T.int32,
    ):
        with T.Kernel(num_blocks, threads=cfg.threads) as bid:
            T.import_source(device_source(__file__))
            s = SimpleNamespace(
                log2_scale=log2_scale,
                s=T.alloc_shared((HEAD_DIM, HEAD_DIM), dt),
                ds=T.alloc_shared((HEAD_DIM, HEAD_DIM), dt),
                q=T.alloc_shared((CHUNK, HEAD_DIM), dt),
                k=T.alloc_shared((CHUNK, HEAD_DIM), dt),
                v=T.alloc_shared((2, CHUNK, HEAD_DIM), dt),
                do=T.alloc_shared((2, CHUNK, HEAD_DIM), dt),
                a=T.alloc_shared((2, CHUNK, CHUNK), dt),
                vd=T.alloc_shared((CHUNK, HEAD_DIM), dt),
                dvd=T.alloc_shared((CHUNK, HEAD_DIM), dt),
                p=T.alloc_shared((CHUNK, CHUNK), dt),
                sums=T.alloc_shared((2, SUMS), f32, scope="shared"),
                dots=T.alloc_shared((8,), f32, scope="shared"),
                g=T.alloc_shared((2, CHUNK), f32, scope="shared"),
                beta=T.alloc_shared((2, CHUNK), f32, scope="shared"),
                more=T.alloc_shared((1,), "int32", scope="shared"),
                unit=T.alloc_local((4,), "int32"),
                count=T.alloc_local((2,), "int32"),  # units and tails so far
                p_ready=T.alloc_barrier([WARPGROUP]),
                dv_ready=T.alloc_barrier([BOTH] * 2),
            )
            T.annotate_layout({
                buffer: make_full_bank_swizzled_layout(buffer)
                for buffer in (s.s, s.ds, s.q, s.k, s.v, s.do, s.a, s.vd, s.dvd, s.p)
            })  # fmt: skip
            left = warpgroup(0, cfg)
            right = warpgroup(1, cfg)
            rings = SimpleNamespace(
                keys=Ring(1, producers=WARP, consumers=BOTH, name="keys"),
                states=Ring(1, producers=WARP, consumers=BOTH, name="states"),
                tiles=Ring(2, producers=2 * WARP, consumers=BOTH + 2 * WARP, name="tiles"),
                sums=Ring(1, producers=BOTH, consumers=WARP, name="sums"),
                out=Ring(1, producers=BOTH, consumers=WARP, name="out"),
            )
            tail = T.alloc_barrier([WARP])
            tx = T.get_thread_binding()
            lane = tx % WARP
            n = T.alloc_var("int32", 0)
            key_heads = T.truncdiv(heads, ratio)
            hk0 = T.truncdiv(head0, ratio)
            num_units = T.ceildiv(slots * key_heads - bid, num_blocks)

            if tx < WARPGROUP:
                T.set_max_nreg(REGS[Role.LEFT], 1)
                rings.keys.wait(0)
                while s.more[0] != 0:
                    gradient_role(cfg, s, left, 0, rings, n, ratio, tx)
                    n += 1
                    rings.keys.wait(n)
            elif tx < BOTH:
                T.set_max_nreg(REGS[Role.RIGHT], 1)
                rings.keys.wait(0)
                while s.more[0] != 0:
                    gradient_role(cfg, s, right, 1, rings, n, ratio, tx - WARPGROUP)
                    n += 1
                    rings.keys.wait(n)
            else:
                T.set_max_nreg(REGS[Role.IO], 0)
                s.unit[3] = 0
                s.count[0] = 0
                s.count[1] = 0
                for u in T.serial(num_units):
                    index = bid + u * num_blocks
                    T.evaluate(device("find_unit", index, key_heads, Cu.data, num_seqs, seq_len, N, s.unit.data, lane))
                    if s.unit[0] > 0:
                        if tx < BOTH + WARP:
                            slot = T.truncdiv(index, key_heads)
                            load_unit(s, rings, tail, Q, K, V, dO, A, S, dS, slot, hk0, head0, s.count[0], ratio, lane)
                        elif tx < BOTH + 2 * WARP:
                            load_gates(s, rings, G, Beta, hk0, s.count[0], ratio, HV, lane)
                        elif tx < BOTH + 3 * WARP:
                            store_unit(s, rings, dQ, dK, dV, hk0, s.count[0], ratio, H, HV, lane)
                        else:
                            finish_gates(s, rings, dG, dBeta, hk0, s.count[0], ratio, HV, lane)
                        s.count[0] += 1
                    elif s.unit[0] < 0:
                        if tx >= BOTH + 3 * WARP:
                            zero_gates(s, dG, dBeta, hk0, ratio, HV, lane)
                        elif tx >= BOTH + 2 * WARP:
                            zero_unit(s, dQ, dK, dV, hk0, ratio, H, HV, lane)
                if tx < BOTH + WARP:
                    rings.keys.acquire(s.count[0])
                    s.more[0] = 0
                    rings.keys.commit(s.count[0])

    return bwd_fused_kernel


@once_per_config
def build(cfg: BwdConfig):
    """The compiled kernel of a config."""
    return compile_kernel(lambda: prim_func(cfg), PASS_CONFIGS)


@functools.cache
def config_for(dtype: torch.dtype) -> BwdConfig:
    return BwdConfig(str(dtype).removeprefix("torch."))
