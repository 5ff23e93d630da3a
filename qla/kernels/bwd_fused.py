"""Fused gradients of the gated delta rule: dQ, dK, dV, dg and dbeta of one chunk of one key head and all its value heads.

Chunks do not wait for each other: the state S that enters a chunk with Vd, and the gradient dS of the state that leaves it with dW, come
from the scans of ``cp_prep``. A persistent block takes units (chunk, key head) and loops over the value heads of the group; dQ and dK are
summed over the group in registers. Algebra of one head (gates g cumulative, in log2 units; gamma = 2^g; L the last token; s the scale;
A = (I + N)^-1 the gated inverse of ``kkt_solve``, N = StrictLower(diag(beta) (Gamma * K K^T))):
    U   = K S            W = diag(beta) (V - diag(gamma) U)          Vd = A W                         (the forward scan)
    R   = diag(gamma_L/gamma) K dS          dVd = R + P^T dO         dW = A^T dVd                     (the reverse scan)
    dV  = diag(beta) dW                     dU  = -diag(gamma) dV
    dP  = dO Vd^T                           dN  = -StrictLower(dW Vd^T), since A^T (dVd W^T) A^T = (A^T dVd) (A W)^T
    dQ  = s diag(gamma) dO S^T + E K        E   = s Lower(Gamma * dP)                     F = diag(beta) (Gamma * dN)
    dK  = diag(gamma_L/gamma) Vd dS^T + dU S^T + E^T Q + (F + F^T) K
    dbeta = rows of dW * V - diag(gamma) K * (dW S^T) and of Gamma * dN * K K^T
    dg_t: what tokens from t on read of S (rows of K * (dU S^T) and of Q * first term of dQ), what tokens before t leave in the next state
          (rows of K * first term of dK), gamma_L <S, dS>, and the pairs on both sides of t, in StrictLower(dP * P) and dN * N: sums of
          what passes the gate, so that strong gates leave small sums and not small differences.
Nothing is divided by gamma or beta.

Shapes   Q, K, dQ, dK [N, H, K], V, dO, dW, dV [N, HV, V] 16-bit; G (cumulative gate), Beta, dG, dBeta [N, HV] fp32;
         S, dS [slots, heads, V, K] 16-bit, V-first, and Vd [N, heads, V], of heads head0 .. head0 + heads - 1 (whole groups).
         dV may be dW's memory. K and V, 64 or 128 each, are fixed at compile time; heads, lengths and scale are run-time values.
Roles
    role     threads   regs   work
    QUERIES  0-127      216   E, F, dQ
    KEYS     128-255    192   dK
    VALUES   256-383     64   dV, <S, dS>
    IO       384-511     40   warp 0: TMA loads of tiles; warp 1: gates, TMA loads of states; warp 2: dQ, dK to memory; warp 3: dg, dbeta
Shared memory        bytes
    s   [V, K]       2 V K   S
    ds  [V, K]       2 V K   dS
    q   [2, 64, K]   256 K   Q, at the end of a unit dQ, which leaves from here
    k   [2, 64, K]   256 K   K, then dK
    vd  [2, 64, V]   256 V   Vd
    do  [1, 64, V]   128 V
    dw  [1, 64, V]   128 V
    e   [64, 64]      8192
    f   [64, 64]      8192
    sums [2, 904] fp32, gates and betas [4, 64] fp32 each     9280   (static, with the barriers and the flags of units)
Barriers
    name         signalled by   waited by         count
    keys.full    IO 0           QUERIES, KEYS     32, and the bytes of the TMA loads; one fill a unit, and one more says: no more
    keys.empty   IO 2           IO 0              32
    gates.full   IO 1           all but IO 0-2    32; one fill a head, as for what follows
    gates.empty  all but IO 0-2 IO 1              416
    vd.full      IO 0           QUERIES, KEYS     32, and the bytes
    vd.empty     QUERIES, KEYS  IO 0              256
    dw.full      IO 0           all but IO        32, and the bytes
    dw.empty     all but IO     IO 0              384
    do.full      IO 0           QUERIES           32, and the bytes
    do.empty     QUERIES        IO 0              128
    ds.full      IO 1           KEYS, VALUES      32, and the bytes
    ds.empty     KEYS, VALUES   IO 1              256
    s.full       IO 1           all but IO        32, and the bytes
    s.empty      all but IO     IO 1              384
    pairs.full   QUERIES        KEYS              128
    pairs.empty  KEYS           QUERIES           128
    sums.full    all but IO     IO 3              384
    sums.empty   IO 3           all but IO        32
    q_read       QUERIES, KEYS  QUERIES           256: of a unit's q nothing more is read, as dQ is about to take its place
    k_read       QUERIES, KEYS  KEYS              256
    out_ready    QUERIES, KEYS  IO 2              256; one for each place of keys
    tail         IO 0           IO 0              32: tiles of a chunk that is not whole are cleaned before they are handed on
Schedule of one head (| separates what runs while wgmma is in flight; with K = 64 there is one half, and s, ds and vd are released as soon
as its products are done)
    QUERIES  wait gates, vd, dw | dW to registers, dW Vd^T, release dw, K K^T | F, sums | wait do | dO to registers, dP, release do, Q K^T |
             wait pairs, F to f | release vd | E, sums, E to e, commit pairs | dQ += E K, wait s, dO S^T by halves of K |
             dQ +=, sums | release s, gates, store and commit sums
    KEYS     wait gates, vd, ds | Vd dS^T by halves of K | dK +=, sums | release gates, ds, vd, wait dw, dW to registers, wait s,
             dW S^T by halves, release dw | dK +=, dK -=, sums | release s, store and commit sums | wait pairs | dK += E^T Q + F K + F^T K |
             release pairs
    VALUES   load V | wait gates, dw | dV, sums | release dw, gates, wait ds, s | <S, dS> | release ds, s, commit sums
    IO 0     at the beginning of a unit q and k, then for each head, as places become free: vd | dw | do; IO 1: gates | ds | s
    At the end of a unit: QUERIES q_read, k_read | wait q_read | dQ to q | out_ready
             KEYS q_read, as soon as E^T Q is done, k_read | wait k_read | dK to k | out_ready
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
    HEAD_DIMS,
    PASS_CONFIGS,
    WARP,
    WARPGROUP,
    KernelConfig,
    Ring,
    compile_kernel,
    device_source,
    once_per_config,
)

COMPUTING = 3 * WARPGROUP
SUMS = 904  # floats of sums that are left for a head; bwd_fused.cuh says which


class Role(IntEnum):
    QUERIES = 0
    KEYS = 1
    VALUES = 2
    IO = 3


REGS = {Role.QUERIES: 216, Role.KEYS: 192, Role.VALUES: 64, Role.IO: 40}


@dataclass(frozen=True)
class BwdConfig(KernelConfig):
    """Everything fixed at compile time. Equal configs share one compiled kernel."""

    dtype: str = "bfloat16"  # of all but gates, beta and their gradients
    head_k: int = 128  # K
    head_v: int = 128  # V

    def __post_init__(self):
        if self.head_v not in HEAD_DIMS:
            raise ValueError(f"head_v must be one of {HEAD_DIMS}, got {self.head_v}")
        self.check()

    @property
    def k_halves(self) -> int:
        """Columns of K, in tiles of 64: what belongs to a second one is left out where there is none."""
        return self.head_k // HALF

    @property
    def v_halves(self) -> int:
        """The same of V."""
        return self.head_v // HALF

    @property
    def products_of_second_half(self) -> int:
        """Of a product over V, how many are in flight for the second half of K when those for the first are waited for."""
        return self.v_halves if self.k_halves == 2 else 0

    @property
    def explained_spills(self) -> int:
        """Loads and stores of local memory in a computing role: ptxas 13.0 needs 28 among 1100 instructions of KEYS and 8 among 2300 of
        QUERIES, for what is carried around the loop over heads next to four accumulators of 32 registers that lie in fixed places."""
        return 40

    @property
    def regs(self) -> dict[Role, int]:
        return REGS

    def smem_table(self) -> dict[str, int]:
        return {
            "s": self.head_v * self.head_k * 2,
            "ds": self.head_v * self.head_k * 2,
            "q": 2 * CHUNK * self.head_k * 2,
            "k": 2 * CHUNK * self.head_k * 2,
            "vd": 2 * CHUNK * self.head_v * 2,
            "do": CHUNK * self.head_v * 2,
            "dw": CHUNK * self.head_v * 2,
            "e": CHUNK * CHUNK * 2,
            "f": CHUNK * CHUNK * 2,
        }

    @property
    def name(self) -> str:
        return f"bwd_fused_k{self.head_k}_v{self.head_v}_{self.dtype}"


CONFIGS = tuple(BwdConfig(dtype, k, v) for dtype in ("bfloat16", "float16") for k in HEAD_DIMS for v in HEAD_DIMS)


def device(function: str, *args):
    """Call of a function of bwd_fused.cuh; to be wrapped in T.evaluate where it stands."""
    return T.call_extern("int32", f"qla_bwd::{function}", *args)


def at(buffer, *index):
    """Address of an element of shared memory; "r" also where it is written, for otherwise TileLang adds fences of its own."""
    return T.access_ptr(buffer[index], "r")


def tile(buffer, i, *stage):
    """Address of the i-th [64, 64] tile of a 16-bit buffer, or of one of its stages."""
    return T.call_extern("handle", "qla_tile", at(buffer, *stage, 0, 0), i)


def anew(stage):
    """The same stage, of which the compiler knows nothing: addresses worked out from another one are not kept for it."""
    return T.call_extern("int32", "qla_bwd::opaque", stage)


@T.macro
def ready(x, in_flight):
    """Of the products issued so far all but the last `in_flight` are done, and x can be read."""
    T.wait_wgmma(in_flight)
    T.warpgroup_fence_operand(x, num_regs=32)


@T.macro
def queries_head(cfg, s, x, rings, last, n, hh, tx):
    """F and E of one head for everybody, then its dQ."""
    rings.gates.wait(hh)
    T.evaluate(device("read_rows", at(s.g, hh % 4, 0), at(s.beta, hh % 4, 0), x.rows.data, x.sums.data, tx))
    rings.vd.wait(hh)
    rings.dw.wait(hh)
    T.call_extern("int32", "qla_load_plain", tile(s.dw, 0, 0), x.A0.data, tx)
    if cfg.v_halves == 2:
        T.call_extern("int32", "qla_load_plain", tile(s.dw, 1, 0), x.A1.data, tx)
    T.wgmma_gemm(x.A0, s.vd[hh % 2, :, 0:HALF], x.X, transpose_B=True, policy=FULL_ROW, clear_accum=True)
    if cfg.v_halves == 2:
        T.wgmma_gemm(x.A1, s.vd[hh % 2, :, HALF : 2 * HALF], x.X, transpose_B=True, policy=FULL_ROW)
    rings.dw.release(hh)  # not before the products have it: what is still on its way to registers, TMA would overwrite
    T.wgmma_gemm(s.k[n % 2, :, :], s.k[n % 2, :, :], x.Y, transpose_B=True, policy=FULL_ROW, clear_accum=True)
    rings.sums.acquire(hh)
    ready(x.X, 0)
    T.warpgroup_fence_operand(x.Y, num_regs=32)
    gates = (at(s.g, hh % 4, 0),)
    kept = (x.rows.data, x.P.data, x.sums.data, at(s.sums, hh % 2, 0), tx)
    T.evaluate(device(f"pair_inverse<{cfg.is_half}>", x.X.data, x.Y.data, *gates, *kept))
    rings.do.wait(hh)
    T.call_extern("int32", "qla_load_plain", tile(s.do, 0, 0), x.A0.data, tx)
    if cfg.v_halves == 2:
        T.call_extern("int32", "qla_load_plain", tile(s.do, 1, 0), x.A1.data, tx)
    head = anew(hh % 2)
    unit = anew(n % 2)
    T.wgmma_gemm(x.A0, s.vd[head, :, 0:HALF], x.X, transpose_B=True, policy=FULL_ROW, clear_accum=True)  # dP
    if cfg.v_halves == 2:
        T.wgmma_gemm(x.A1, s.vd[head, :, HALF : 2 * HALF], x.X, transpose_B=True, policy=FULL_ROW)
    rings.do.release(hh)
    T.wgmma_gemm(s.q[unit, :, :], s.k[unit, :, :], x.Y, transpose_B=True, policy=FULL_ROW, clear_accum=True)
    rings.pairs.acquire(hh)
    T.call_extern("int32", "qla_store_plain", x.P.data, tile(s.f, 0), tx)
    ready(x.X, 0)
    T.warpgroup_fence_operand(x.Y, num_regs=32)
    rings.vd.release(hh)
    T.evaluate(device(f"pair_scores<{cfg.is_half}>", x.X.data, x.Y.data, *gates, s.log2_scale, *kept))
    T.call_extern("int32", "qla_store_plain", x.P.data, tile(s.e, 0), tx)
    rings.pairs.commit(hh)
    place = anew(n % 2)
    T.wgmma_gemm(x.P, s.k[place, :, 0:HALF], x.D0, policy=FULL_ROW)
    if cfg.k_halves == 2:
        T.wgmma_gemm(x.P, s.k[place, :, HALF : 2 * HALF], x.D1, policy=FULL_ROW)
    rings.s.wait(hh)
    T.wgmma_gemm(x.A0, s.s[0:HALF, 0:HALF], x.X, policy=FULL_ROW, clear_accum=True)
    if cfg.v_halves == 2:
        T.wgmma_gemm(x.A1, s.s[HALF : 2 * HALF, 0:HALF], x.X, policy=FULL_ROW)
    if cfg.k_halves == 2:
        T.wgmma_gemm(x.A0, s.s[0:HALF, HALF : 2 * HALF], x.Y, policy=FULL_ROW, clear_accum=True)
        if cfg.v_halves == 2:
            T.wgmma_gemm(x.A1, s.s[HALF : 2 * HALF, HALF : 2 * HALF], x.Y, policy=FULL_ROW)
    ready(x.X, cfg.products_of_second_half)
    T.warpgroup_fence_operand(x.D0, num_regs=32)
    if cfg.k_halves == 2:
        T.warpgroup_fence_operand(x.D1, num_regs=32)
    else:
        rings.s.release(hh)
    query = (x.rows.data, x.sums.data, s.log2_scale, tx)
    T.evaluate(device(f"add_query<{cfg.is_half}>", x.D0.data, x.X.data, tile(s.q, 0, place), *query))
    if cfg.k_halves == 2:
        ready(x.Y, 0)
        rings.s.release(hh)
        T.evaluate(device(f"add_query<{cfg.is_half}>", x.D1.data, x.Y.data, tile(s.q, 1, place), *query))
    rings.gates.release(hh)
    T.evaluate(device("store_query_sums", x.sums.data, at(s.sums, hh % 2, 0), tx))
    rings.sums.commit(hh)
    if last:
        T.barrier_arrive(s.q_read[0])
        T.barrier_arrive(s.k_read[0])


@T.macro
def keys_head(cfg, s, x, rings, last, n, hh, tx):
    """dK of one head."""
    rings.gates.wait(hh)
    T.evaluate(device("read_rows", at(s.g, hh % 4, 0), at(s.beta, hh % 4, 0), x.rows.data, x.sums.data, tx))
    rings.vd.wait(hh)
    rings.ds.wait(hh)
    T.wgmma_gemm(s.vd[hh % 2, :, :], s.ds[:, 0:HALF], x.X, policy=FULL_ROW, clear_accum=True)
    if cfg.k_halves == 2:
        T.wgmma_gemm(s.vd[hh % 2, :, :], s.ds[:, HALF : 2 * HALF], x.Y, policy=FULL_ROW, clear_accum=True)
    ready(x.X, cfg.k_halves - 1)
    if cfg.k_halves == 1:
        rings.ds.release(hh)
        rings.vd.release(hh)
    key = (x.rows.data, x.sums.data, tx)
    T.evaluate(device(f"add_written<{cfg.is_half}>", x.D0.data, x.X.data, tile(s.k, 0, n % 2), *key))
    rings.gates.release(hh)
    if cfg.k_halves == 2:
        ready(x.Y, 0)
        rings.ds.release(hh)
        rings.vd.release(hh)
    rings.dw.wait(hh)
    T.call_extern("int32", "qla_load_plain", tile(s.dw, 0, 0), x.A0.data, tx)
    if cfg.v_halves == 2:
        T.call_extern("int32", "qla_load_plain", tile(s.dw, 1, 0), x.A1.data, tx)
    rings.s.wait(hh)
    T.wgmma_gemm(x.A0, s.s[0:HALF, 0:HALF], x.X, policy=FULL_ROW, clear_accum=True)
    if cfg.v_halves == 2:
        T.wgmma_gemm(x.A1, s.s[HALF : 2 * HALF, 0:HALF], x.X, policy=FULL_ROW)
    rings.dw.release(hh)
    if cfg.k_halves == 2:
        T.evaluate(device(f"add_written<{cfg.is_half}>", x.D1.data, x.Y.data, tile(s.k, 1, n % 2), *key))
        T.wgmma_gemm(x.A0, s.s[0:HALF, HALF : 2 * HALF], x.Y, policy=FULL_ROW, clear_accum=True)
        if cfg.v_halves == 2:
            T.wgmma_gemm(x.A1, s.s[HALF : 2 * HALF, HALF : 2 * HALF], x.Y, policy=FULL_ROW)
    ready(x.X, cfg.products_of_second_half)
    if cfg.k_halves == 1:
        rings.s.release(hh)
    T.evaluate(device(f"add_read<{cfg.is_half}>", x.D0.data, x.X.data, tile(s.k, 0, n % 2), *key))
    if cfg.k_halves == 2:
        ready(x.Y, 0)
        rings.s.release(hh)
        T.evaluate(device(f"add_read<{cfg.is_half}>", x.D1.data, x.Y.data, tile(s.k, 1, n % 2), *key))
    rings.sums.acquire(hh)
    T.evaluate(device("store_key_sums", x.sums.data, at(s.sums, hh % 2, 0), tx))
    rings.sums.commit(hh)
    rings.pairs.wait(hh)
    unit = anew(n % 2)
    T.call_extern("int32", "qla_load_transposed", tile(s.e, 0), x.A0.data, tx)
    T.wgmma_gemm(x.A0, s.q[unit, :, 0:HALF], x.D0, policy=FULL_ROW)
    if cfg.k_halves == 2:
        T.wgmma_gemm(x.A0, s.q[unit, :, HALF : 2 * HALF], x.D1, policy=FULL_ROW)
    T.call_extern("int32", "qla_load_plain", tile(s.f, 0), x.A1.data, tx)
    T.wgmma_gemm(x.A1, s.k[unit, :, 0:HALF], x.D0, policy=FULL_ROW)
    if cfg.k_halves == 2:
        T.wgmma_gemm(x.A1, s.k[unit, :, HALF : 2 * HALF], x.D1, policy=FULL_ROW)
    T.wait_wgmma(cfg.k_halves)
    if last:
        T.barrier_arrive(s.q_read[0])
    T.call_extern("int32", "qla_load_transposed", tile(s.f, 0), x.A0.data, tx)
    T.wgmma_gemm(x.A0, s.k[unit, :, 0:HALF], x.D0, policy=FULL_ROW)
    if cfg.k_halves == 2:
        T.wgmma_gemm(x.A0, s.k[unit, :, HALF : 2 * HALF], x.D1, policy=FULL_ROW)
    rings.pairs.release(hh)
    ready(x.D0, 0)
    if cfg.k_halves == 2:
        T.warpgroup_fence_operand(x.D1, num_regs=32)
    if last:
        T.barrier_arrive(s.k_read[0])


@T.macro
def hand_out(cfg, s, x, tiles, read, n, tx):
    """dQ or dK takes the place of its unit's q or k, once nobody reads that."""
    T.barrier_wait(read[0], n % 2)
    T.evaluate(device(f"store_rounded<{cfg.is_half}>", x.D0.data, tile(tiles, 0, n % 2), tx))
    if cfg.k_halves == 2:
        T.evaluate(device(f"store_rounded<{cfg.is_half}>", x.D1.data, tile(tiles, 1, n % 2), tx))
    T.barrier_arrive(s.out_ready[n % 2])


@T.macro
def queries_role(cfg, s, x, rings, n, ratio, tx):
    """One unit."""
    T.clear(x.D0)
    if cfg.k_halves == 2:
        T.clear(x.D1)
    for h in T.serial(ratio):
        queries_head(cfg, s, x, rings, h + 1 == ratio, n, n * ratio + h, tx)
    hand_out(cfg, s, x, s.q, s.q_read, n, tx)


@T.macro
def keys_role(cfg, s, x, rings, n, ratio, tx):
    """One unit."""
    T.clear(x.D0)
    if cfg.k_halves == 2:
        T.clear(x.D1)
    for h in T.serial(ratio):
        keys_head(cfg, s, x, rings, h + 1 == ratio, n, n * ratio + h, tx)
    hand_out(cfg, s, x, s.k, s.k_read, n, tx)


@T.macro
def values_role(cfg, s, x, rings, V, dV, hk0, n, ratio, HV, tx):
    """One unit: dV, what beta's gradient has of V, and the product of the states."""
    for h in T.serial(ratio):
        hh = n * ratio + h
        hv = (hk0 + s.unit[2]) * ratio + h
        stride = T.cast(HV * cfg.head_v, "int64")
        T.evaluate(device(f"load_values<{cfg.head_v}>", T.address_of(V[s.unit[1], hv, 0]), stride, s.unit[0], x.values.data, tx))
        rings.gates.wait(hh)
        rings.sums.acquire(hh)
        rings.dw.wait(hh)
        out = (T.address_of(dV[s.unit[1], hv, 0]), stride, s.unit[0])
        inputs = (tile(s.dw, 0, 0), x.values.data, at(s.beta, hh % 4, 0))
        T.evaluate(device(f"finish_values<{cfg.head_v}, {cfg.is_half}>", *inputs, *out, at(s.sums, hh % 2, 0), tx))
        rings.dw.release(hh)
        rings.gates.release(hh)
        rings.ds.wait(hh)
        rings.s.wait(hh)
        T.evaluate(device(f"dot_states<{cfg.head_k * cfg.head_v}, {cfg.is_half}>", tile(s.s, 0), tile(s.ds, 0), at(s.sums, hh % 2, 0), tx))
        rings.ds.release(hh)
        rings.s.release(hh)
        rings.sums.commit(hh)


@T.macro
def wait_for_tail(s, tail):
    T.barrier_arrive(tail[0])
    T.barrier_wait(tail[0], s.count[1] % 2)
    s.count[1] += 1


@T.macro
def clean(tiles, count, rows, lane):
    T.call_extern("int32", "qla_zero_rows", tiles, count, rows, lane)
    T.fence_proxy_async()


@T.macro
def load_tile(cfg, s, ring, tail, X, buffer, tiles, stage, row, rows, head, hh, lane):
    """A [64, V] tile of one head. Rows past the end of the sequence are somebody else's, or nobody's: they become zero before anyone
    reads them."""
    ring.acquire(hh)
    if rows == CHUNK:
        T.tma_copy(X[row : row + CHUNK, head, 0 : cfg.head_v], buffer[stage, :, :], barrier=ring.full[stage])
    else:
        T.tma_copy(X[row : row + CHUNK, head, 0 : cfg.head_v], buffer[stage, :, :], barrier=tail[0])
        wait_for_tail(s, tail)
        clean(tiles, cfg.v_halves, rows, lane)
    ring.commit(hh)


@T.macro
def load_unit(cfg, s, rings, tail, Q, K, Vd, dO, dW, hk0, head0, n, ratio, lane):
    """IO 0: the tiles of one unit, in the order in which places become free."""
    rows = s.unit[0]
    row = s.unit[1]
    hk = hk0 + s.unit[2]
    rings.keys.acquire(n)
    s.more[n % 2] = 1
    if rows == CHUNK:
        T.tma_copy(K[row : row + CHUNK, hk, 0 : cfg.head_k], s.k[n % 2, :, :], barrier=rings.keys.full[n % 2])
        T.tma_copy(Q[row : row + CHUNK, hk, 0 : cfg.head_k], s.q[n % 2, :, :], barrier=rings.keys.full[n % 2])
    else:
        T.tma_copy(K[row : row + CHUNK, hk, 0 : cfg.head_k], s.k[n % 2, :, :], barrier=tail[0])
        T.tma_copy(Q[row : row + CHUNK, hk, 0 : cfg.head_k], s.q[n % 2, :, :], barrier=tail[0])
        wait_for_tail(s, tail)
        clean(tile(s.q, 0, n % 2), cfg.k_halves, rows, lane)
        clean(tile(s.k, 0, n % 2), cfg.k_halves, rows, lane)
    rings.keys.commit(n)
    for h in T.serial(ratio):
        hh = n * ratio + h
        hv = hk * ratio + h
        load_tile(cfg, s, rings.vd, tail, Vd, s.vd, tile(s.vd, 0, hh % 2), hh % 2, row, rows, hv - head0, hh, lane)
        load_tile(cfg, s, rings.dw, tail, dW, s.dw, tile(s.dw, 0, 0), 0, row, rows, hv, hh, lane)
        load_tile(cfg, s, rings.do, tail, dO, s.do, tile(s.do, 0, 0), 0, row, rows, hv, hh, lane)


@T.macro
def find_unit(s, index, key_heads, Cu, num_seqs, seq_len, N, lane):
    """Rows, first row and key head of a unit into s.unit."""
    T.evaluate(device("find_unit", index, key_heads, Cu.data, num_seqs, seq_len, N, s.unit.data, lane))


@T.macro
def load_states(cfg, s, rings, S, dS, G, Beta, slot, hk0, head0, n, ratio, HV, lane):
    """IO 1: gates, beta and states of one unit's heads."""
    for h in T.serial(ratio):
        hh = n * ratio + h
        hv = (hk0 + s.unit[2]) * ratio + h
        rings.gates.acquire(hh)
        T.evaluate(
            device(
                "read_gates", T.address_of(G[s.unit[1], hv]), T.address_of(Beta[s.unit[1], hv]), T.cast(HV, "int64"), s.unit[0],
                at(s.g, hh % 4, 0), at(s.beta, hh % 4, 0), lane,
            )
        )  # fmt: skip
        rings.gates.commit(hh)
        rings.ds.acquire(hh)
        T.tma_copy(dS[slot, hv - head0, 0 : cfg.head_v, 0 : cfg.head_k], s.ds, barrier=rings.ds.full[0])
        rings.ds.commit(hh)
        rings.s.acquire(hh)
        T.tma_copy(S[slot, hv - head0, 0 : cfg.head_v, 0 : cfg.head_k], s.s, barrier=rings.s.full[0])
        rings.s.commit(hh)


@T.macro
def store_unit(cfg, s, rings, dQ, dK, hk0, n, H, lane):
    """IO 2: dQ and dK out of the places of q and k."""
    hk = hk0 + s.unit[2]
    T.barrier_wait(s.out_ready[n % 2], n // 2 % 2)
    T.fence_proxy_async()
    if s.unit[0] == CHUNK:
        T.tma_copy(s.q[n % 2, :, :], dQ[s.unit[1] : s.unit[1] + CHUNK, hk, 0 : cfg.head_k])
        T.tma_copy(s.k[n % 2, :, :], dK[s.unit[1] : s.unit[1] + CHUNK, hk, 0 : cfg.head_k])
        T.tma_store_wait(0)
    else:
        to = (cfg.k_halves, s.unit[0], T.cast(H * cfg.head_k, "int64"), lane)
        T.call_extern("int32", "qla_store_rows", T.address_of(dQ[s.unit[1], hk, 0]), tile(s.q, 0, n % 2), *to)
        T.call_extern("int32", "qla_store_rows", T.address_of(dK[s.unit[1], hk, 0]), tile(s.k, 0, n % 2), *to)
    rings.keys.release(n)


@T.macro
def zero_unit(cfg, s, dQ, dK, dV, hk0, ratio, H, HV, lane):
    """IO 2: gradients of rows that no sequence owns."""
    hk = hk0 + s.unit[2]
    stride = T.cast(H * (cfg.head_k * 2), "int64")
    T.evaluate(device("zero", T.address_of(dQ[s.unit[1], hk, 0]), -s.unit[0], cfg.head_k * 2, stride, lane))
    T.evaluate(device("zero", T.address_of(dK[s.unit[1], hk, 0]), -s.unit[0], cfg.head_k * 2, stride, lane))
    wide = T.cast(HV * (cfg.head_v * 2), "int64")
    T.evaluate(device("zero", T.address_of(dV[s.unit[1], hk * ratio, 0]), -s.unit[0], cfg.head_v * 2 * ratio, wide, lane))


@T.macro
def finish_gates(s, rings, dG, dBeta, hk0, n, ratio, HV, lane):
    """IO 3: dg and dbeta of one unit's heads."""
    for h in T.serial(ratio):
        hh = n * ratio + h
        hv = (hk0 + s.unit[2]) * ratio + h
        rings.sums.wait(hh)
        T.evaluate(
            device(
                "finish_gates", at(s.sums, hh % 2, 0), at(s.g, hh % 4, 0), T.address_of(dG[s.unit[1], hv]),
                T.address_of(dBeta[s.unit[1], hv]), T.cast(HV, "int64"), s.unit[0], lane,
            )
        )  # fmt: skip
        rings.sums.release(hh)
        rings.gates.release(hh)


@T.macro
def zero_gates(s, dG, dBeta, hk0, ratio, HV, lane):
    """IO 3: gradients of rows that no sequence owns."""
    hv = (hk0 + s.unit[2]) * ratio
    stride = T.cast(HV * 4, "int64")
    T.evaluate(device("zero", T.address_of(dG[s.unit[1], hv]), -s.unit[0], 4 * ratio, stride, lane))
    T.evaluate(device("zero", T.address_of(dBeta[s.unit[1], hv]), -s.unit[0], 4 * ratio, stride, lane))


def warpgroup(cfg) -> SimpleNamespace:
    """Registers of QUERIES or KEYS: dQ or dK by halves of K, two accumulators for products on their way there, and left operands, tiles of
    64 columns (P: E, then F), because products that have one in registers read half as much shared memory."""
    D0, D1, X, Y = (T.alloc_fragment((CHUNK, HALF), "float32") for _ in range(4))
    A0, A1, P = (T.alloc_fragment((CHUNK, CHUNK), cfg.dtype) for _ in range(3))
    rows, sums = T.alloc_local((5,), "float32"), T.alloc_local((6,), "float32")
    return SimpleNamespace(D0=D0, D1=D1, X=X, Y=Y, A0=A0, A1=A1, P=P, rows=rows, sums=sums)


def prim_func(cfg: BwdConfig):
    """The kernel of one config, for `tilelang.compile` or for lowering without a GPU."""
    N, H, HV = T.dynamic("N, H, HV")
    slots, heads, cu_size = T.dynamic("slots, heads, cu_size")
    f32, dt = "float32", cfg.dtype

    @T.prim_func
    def bwd_fused_kernel(
        Q: T.Tensor((N, H, cfg.head_k), dt),
        K: T.Tensor((N, H, cfg.head_k), dt),
        V: T.Tensor((N, HV, cfg.head_v), dt),
        Vd: T.Tensor((N, heads, cfg.head_v), dt),
        G: T.Tensor((N, HV), f32),
        Beta: T.Tensor((N, HV), f32),
        dO: T.Tensor((N, HV, cfg.head_v), dt),
        dW: T.Tensor((N, HV, cfg.head_v), dt),
        S: T.Tensor((slots, heads, cfg.head_v, cfg.head_k), dt),
        dS: T.Tensor((slots, heads, cfg.head_v, cfg.head_k), dt),
        dQ: T.Tensor((N, H, cfg.head_k), dt),
        dK: T.Tensor((N, H, cfg.head_k), dt),
        dV: T.Tensor((N, HV, cfg.head_v), dt),
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
                s=T.alloc_shared((cfg.head_v, cfg.head_k), dt),
                ds=T.alloc_shared((cfg.head_v, cfg.head_k), dt),
                q=T.alloc_shared((2, CHUNK, cfg.head_k), dt),
                k=T.alloc_shared((2, CHUNK, cfg.head_k), dt),
                vd=T.alloc_shared((2, CHUNK, cfg.head_v), dt),
                do=T.alloc_shared((1, CHUNK, cfg.head_v), dt),
                dw=T.alloc_shared((1, CHUNK, cfg.head_v), dt),
                e=T.alloc_shared((CHUNK, CHUNK), dt),
                f=T.alloc_shared((CHUNK, CHUNK), dt),
                sums=T.alloc_shared((2, SUMS), f32, scope="shared"),
                g=T.alloc_shared((4, CHUNK), f32, scope="shared"),
                beta=T.alloc_shared((4, CHUNK), f32, scope="shared"),
                more=T.alloc_shared((2,), "int32", scope="shared"),
                unit=T.alloc_local((4,), "int32"),
                count=T.alloc_local((2,), "int32"),  # units and tails so far
                q_read=T.alloc_barrier([2 * WARPGROUP]),
                k_read=T.alloc_barrier([2 * WARPGROUP]),
                out_ready=T.alloc_barrier([2 * WARPGROUP] * 2),
            )
            T.annotate_layout({
                buffer: make_full_bank_swizzled_layout(buffer)
                for buffer in (s.s, s.ds, s.q, s.k, s.vd, s.do, s.dw, s.e, s.f)
            })  # fmt: skip
            queries = warpgroup(cfg)
            keys = warpgroup(cfg)
            values = SimpleNamespace(values=T.alloc_local((cfg.head_v // 4,), "uint32"))
            rings = SimpleNamespace(
                keys=Ring(2, producers=WARP, consumers=WARP, name="keys"),
                gates=Ring(4, producers=WARP, consumers=COMPUTING + WARP, name="gates"),
                vd=Ring(2, producers=WARP, consumers=2 * WARPGROUP, name="vd"),
                s=Ring(1, producers=WARP, consumers=COMPUTING, name="s"),
                ds=Ring(1, producers=WARP, consumers=2 * WARPGROUP, name="ds"),
                do=Ring(1, producers=WARP, consumers=WARPGROUP, name="do"),
                dw=Ring(1, producers=WARP, consumers=COMPUTING, name="dw"),
                pairs=Ring(1, producers=WARPGROUP, consumers=WARPGROUP, name="pairs"),
                sums=Ring(2, producers=COMPUTING, consumers=WARP, name="sums"),
            )
            tail = T.alloc_barrier([WARP])
            tx = T.get_thread_binding()
            lane = tx % WARP
            n = T.alloc_var("int32", 0)
            key_heads = T.truncdiv(heads, ratio)
            hk0 = T.truncdiv(head0, ratio)
            num_units = T.ceildiv(slots * key_heads - bid, num_blocks)

            if tx < WARPGROUP:
                T.set_max_nreg(REGS[Role.QUERIES], 1)
                rings.keys.wait(0)
                while s.more[n % 2] != 0:
                    queries_role(cfg, s, queries, rings, n, ratio, tx)
                    n += 1
                    rings.keys.wait(n)
            elif tx < 2 * WARPGROUP:
                T.set_max_nreg(REGS[Role.KEYS], 1)
                rings.keys.wait(0)
                while s.more[n % 2] != 0:
                    keys_role(cfg, s, keys, rings, n, ratio, tx - WARPGROUP)
                    n += 1
                    rings.keys.wait(n)
            elif tx < COMPUTING:
                T.set_max_nreg(REGS[Role.VALUES], 0)
                s.unit[3] = 0
                for u in T.serial(num_units):
                    find_unit(s, bid + u * num_blocks, key_heads, Cu, num_seqs, seq_len, N, lane)
                    if s.unit[0] > 0:
                        values_role(cfg, s, values, rings, V, dV, hk0, n, ratio, HV, tx - 2 * WARPGROUP)
                        n += 1
            else:
                T.set_max_nreg(REGS[Role.IO], 0)
                s.unit[3] = 0
                s.count[0] = 0
                s.count[1] = 0
                for u in T.serial(num_units):
                    index = bid + u * num_blocks
                    find_unit(s, index, key_heads, Cu, num_seqs, seq_len, N, lane)
                    if s.unit[0] > 0:
                        if tx < COMPUTING + WARP:
                            load_unit(cfg, s, rings, tail, Q, K, Vd, dO, dW, hk0, head0, s.count[0], ratio, lane)
                        elif tx < COMPUTING + 2 * WARP:
                            slot = T.truncdiv(index, key_heads)
                            load_states(cfg, s, rings, S, dS, G, Beta, slot, hk0, head0, s.count[0], ratio, HV, lane)
                        elif tx < COMPUTING + 3 * WARP:
                            store_unit(cfg, s, rings, dQ, dK, hk0, s.count[0], H, lane)
                        else:
                            finish_gates(s, rings, dG, dBeta, hk0, s.count[0], ratio, HV, lane)
                        s.count[0] += 1
                    elif s.unit[0] < 0:
                        if tx >= COMPUTING + 3 * WARP:
                            zero_gates(s, dG, dBeta, hk0, ratio, HV, lane)
                        elif tx >= COMPUTING + 2 * WARP:
                            zero_unit(cfg, s, dQ, dK, dV, hk0, ratio, H, HV, lane)
                if tx < COMPUTING + WARP:
                    rings.keys.acquire(s.count[0])
                    s.more[s.count[0] % 2] = 0
                    rings.keys.commit(s.count[0])

    return bwd_fused_kernel


@once_per_config
def build(cfg: BwdConfig):
    """The compiled kernel of a config."""
    return compile_kernel(lambda: prim_func(cfg), PASS_CONFIGS)


@functools.cache
def config_for(dtype: torch.dtype, head_k: int, head_v: int) -> BwdConfig:
    return BwdConfig(str(dtype).removeprefix("torch."), head_k, head_v)
