"""Gate sums and gated triangular inverses of all chunks, in one launch.

    g_cum_i = sum over j <= i within the chunk of g_j log2(e)                          fp32, log2 units
    bound   = g_cum_L + sum of log2 max(1, |1 - beta_i norm(k_i)^2|)                   of each chunk, L its last token
    A       = Gamma * (I + StrictLower(diag(beta) K K^T))^-1,   Gamma_ij = 2^(g_cum_i - g_cum_j) for i >= j, else 0

The inverse is made without gates, which are multiplied in last: 16x16 diagonal blocks by fp32 forward substitution, the blocks below them
as products of bf16 pairs, a high and a low part: what that leaves out is below the rounding of A, for nearly equal keys and beta = 2 too.
So the inverse without gates has to stay within fp32: always with normalised keys and 0 <= beta <= 2.

2^bound is an upper bound of what a chunk leaves of the state that enters it: the norm of a token's transition
exp(g) (I - beta k k^T) is exp(g) max(1, |1 - beta norm(k)^2|), and norm(k)^2 stands on the diagonal of K K^T. ``cp_plan`` decides by it;
it is computed only where that runs.

Shapes   k [N, H, K], o [N, HV, V], A [N, HV, 64] bf16 or fp16; g, beta, g_cum [N, HV], bound [slots, HV] fp32; cu [S + 1] int32.
         The chunks of sequence n have the slots from cu[n] / 64 + n on (equal lengths: the chunks in order).
         K (64 or 128) is fixed at compile time; N, H, HV, V (64 or 128), S are run-time values. Chunks have 64 tokens and begin at the
         start of each sequence. A unit is one chunk and up to four neighbouring value heads; blocks are persistent and walk the units
         with stride gridDim.x, heads fastest.
Roles    (all four warps do K K^T together; 168 and 255 registers a thread are the caps of three and two blocks an SM)
    warp   before "kk ready"                        after it
    0      sum of the gates, g_cum                  gates of the next unit | inverse of head 0
    1      beta                                     beta of the next unit  | inverse of head 1
    2                                               inverse of head 2
    3      find the next unit with rows             keys of the next unit  | inverse of head 3
Shared memory, bytes (K = 128; 64: half the keys)   kk2 (H < HV)   kk4 (H == HV)
    gates   [2, 4, 2, 64] fp32                        4096           4096   double buffer, head, (g_cum, beta), token
    keys    [tiles, 64, K]                           16384          32768   one tile (kk2) or two (kk4) of a unit's key heads
    kk      [slots, 10496] bytes, rounded up         21504          41984   K K^T, one slot a key head; rounded to 1 KB
    stage   [4, 64, 64]                              32768          32768   D and then A of a head, a warp each
    units   [4, 12] int32                              192            192   ring of unit records, 9 fields each and room to align
    total                                            74944         111808   three and two blocks an SM
Barriers
    keys_full    signalled by warp 3 (32) and TMA, awaited by all: a tile set of keys has landed
    kk_free      block sync: everybody has left the previous unit's K K^T and this unit's first tile set. Not needed if all units span one
                 key head (HV / H a multiple of 4): then the two slots are a double buffer
    kk_ready     block sync: K K^T, gates and the next unit's record can be read, the tiles can be overwritten
    stage        no barrier: a warp waits for its own TMA store (wait_group.read)
Schedule of unit i (spans more than `tiles` key heads: step 1 in brackets)
    all     gates -> shared | wait keys_full | K K^T by wgmma | [kk_free] | K K^T -> slots | [wait keys_full | K K^T | -> slots] | kk_ready
    warp 3  find unit i + 1 (during the gate sum) | [TMA keys of step 1 after kk_free] | TMA keys of unit i + 1 after kk_ready
    all     gates of unit i + 1 -> registers | bound, if wanted | inverse | A by TMA if the chunk is whole, else its rows by plain stores
Rows past the end of a sequence in its last chunk belong to others and may hold anything: K K^T is cleared there by a select, beta and g
read as 0, and they are not written. Rows that no sequence owns come as units of their own (negative row count): A, g_cum and o are zeroed.
"""

import functools
from dataclasses import dataclass

import tilelang
import tilelang.language as T
import torch
from tilelang.layout import make_full_bank_swizzled_layout

from qla.kernels.launch import KKT_BLOCKS_PER_SM
from qla.kernels.launch import UNIT_HEADS as HEADS
from qla.kernels.ws import CHUNK, HEAD_DIMS, WARP, compile_kernel, device_source, once_per_config

LAST_WARP = (HEADS - 1) * WARP
KK_SLOT_BYTES = 10496
SMEM_LIMIT_SM = 233472  # of an SM, including 1 KB that each block costs besides its own
ROWS, ROW0, HEAD, KEY, KEYS, PHASE, INDEX, SEQ, CHUNK_SLOT = range(9)  # fields of a unit record; the same enum is in kkt_solve.cuh
UNIT_FIELDS = 12
UNITS = 4  # ring: record i + 1 is written while some warps still read record i - 1

PASS_CONFIGS = {
    tilelang.PassConfigKey.TL_DISABLE_THREAD_STORAGE_SYNC: True,  # every barrier is ours
    tilelang.PassConfigKey.TL_DISABLE_SHARED_MEMORY_REUSE: True,
}


@dataclass(frozen=True)
class KktConfig:
    """Everything fixed at compile time. Equal configs share one compiled kernel."""

    dtype: str = "bfloat16"
    kk_slots: int = 2  # 2: a unit's four value heads span at most two key heads (HV >= 2 H); 4: HV == H
    head_k: int = 128  # K

    def __post_init__(self) -> None:
        if self.dtype not in ("bfloat16", "float16"):
            raise ValueError(f"dtype must be bfloat16 or float16, got {self.dtype}")
        if self.head_k not in HEAD_DIMS:
            raise ValueError(f"head_k must be one of {HEAD_DIMS}, got {self.head_k}")
        if self.kk_slots not in (2, 4):
            raise ValueError(f"kk_slots must be 2 or 4, got {self.kk_slots}")
        if self.blocks_per_sm * (self.smem_bytes + 2048) > SMEM_LIMIT_SM:
            raise ValueError(f"{self.blocks_per_sm} blocks of {self.smem_bytes} B do not fit into {SMEM_LIMIT_SM} B: {self.smem_table()}")

    @property
    def name(self) -> str:
        return f"kkt_solve_k{self.head_k}_{'bf16' if self.dtype == 'bfloat16' else 'f16'}_kk{self.kk_slots}"

    @property
    def threads(self) -> int:
        return HEADS * WARP

    @property
    def tiles(self) -> int:
        """Key tiles that are loaded at once; the rest of a unit's span follows in a second step."""
        return self.kk_slots // 2

    @property
    def blocks_per_sm(self) -> int:
        return KKT_BLOCKS_PER_SM[self.kk_slots]

    def smem_table(self) -> dict[str, int]:
        return {
            "gates": 2 * HEADS * 2 * CHUNK * 4,
            "keys": self.tiles * CHUNK * self.head_k * 2,
            "kk": -(-self.kk_slots * KK_SLOT_BYTES // 1024) * 1024,  # the swizzled buffer behind it begins at a multiple of 1024
            "stage": HEADS * CHUNK * CHUNK * 2,
            "units": UNITS * UNIT_FIELDS * 4,
        }

    @property
    def smem_bytes(self) -> int:
        return sum(self.smem_table().values())


CONFIGS = tuple(KktConfig(dtype, slots, k) for dtype in ("bfloat16", "float16") for k in HEAD_DIMS for slots in (2, 4))
REGS = {2: 168, 4: 255}  # kk_slots -> registers a thread may have at blocks_per_sm


def device(function: str, *args):
    """Call of a function of kkt_solve.cuh; to be wrapped in T.evaluate where it stands."""
    return T.call_extern("int32", f"qla_kkt::{function}", *args)


def record(units_s, at):
    return T.address_of(units_s[at, 0])


@T.macro
def load_keys(cfg, step, units_s, at, k, keys_s, keys_full):
    """One warp: the step's key tiles. Rows past N arrive as zeros, rows of other sequences are masked after the product."""
    row0 = units_s[at, ROW0]
    key = units_s[at, KEY] + step * cfg.tiles
    left = units_s[at, KEYS] - step * cfg.tiles
    T.tma_copy(k[row0 : row0 + CHUNK, key, 0 : cfg.head_k], keys_s[0, :, :], barrier=keys_full[0])
    if cfg.tiles == 2:
        if left > 1:
            T.tma_copy(k[row0 : row0 + CHUNK, key + 1, 0 : cfg.head_k], keys_s[1, :, :], barrier=keys_full[0])
    T.barrier_arrive(keys_full[0])


@T.macro
def multiply_keys(tile, keys_s, kk):
    """kk = K K^T of one tile."""
    T.wgmma_gemm(keys_s[tile, :, :], keys_s[tile, :, :], kk, transpose_B=True, policy=T.GemmWarpPolicy.FullRow, clear_accum=True)
    T.wait_wgmma(0)
    T.warpgroup_fence_operand(kk, num_regs=32)


@T.macro
def keep_kk(rows, kk, kk_s, slot):
    if rows < CHUNK:
        T.evaluate(device("mask_tail", kk.data, rows))
    T.evaluate(device("store_kk", kk.data, T.address_of(kk_s[slot * KK_SLOT_BYTES])))


@T.macro
def multiply_unit(cfg, units_s, at, rows, keys, phase, buffer, one_key, k, keys_s, keys_full, kk, kk_1, kk_s, tx):
    """K K^T of all key heads that the unit spans, into the slots."""
    T.barrier_wait(keys_full[0], phase & 1)
    multiply_keys(0, keys_s, kk)
    if cfg.tiles == 2:
        multiply_keys(1, keys_s, kk_1)  # without a second head a product of old bytes, into a slot that nobody reads
    if one_key == 0:
        T.sync_threads()  # kk_free
    if keys > cfg.tiles:
        if tx >= LAST_WARP:
            load_keys(cfg, 1, units_s, at, k, keys_s, keys_full)
    keep_kk(rows, kk, kk_s, buffer & one_key)
    if cfg.tiles == 2:
        keep_kk(rows, kk_1, kk_s, 1)
    if keys > cfg.tiles:
        T.barrier_wait(keys_full[0], (phase + 1) & 1)
        multiply_keys(0, keys_s, kk)
        keep_kk(rows, kk, kk_s, cfg.tiles)
        if cfg.tiles == 2:
            multiply_keys(1, keys_s, kk_1)
            keep_kk(rows, kk_1, kk_s, 3)


@T.macro
def fetch_unit(cfg, units_s, at, k, g, beta, keys_s, keys_full, gates, num_value_heads, wide_gates, tx):
    """Start what a unit needs from memory: keys by TMA, gates into registers."""
    if units_s[at, ROWS] > 0:
        if tx >= LAST_WARP:
            load_keys(cfg, 0, units_s, at, k, keys_s, keys_full)
        T.evaluate(device("load_gates", g.data, beta.data, gates.data, record(units_s, at), num_value_heads, wide_gates))


@T.macro
def store_inverse(units_s, at, A, stage_s, num_value_heads, tx):
    """Whole chunk: a warp stores its own head. One branch a warp, because each elects the lane that stores."""
    row0 = units_s[at, ROW0]
    head = units_s[at, HEAD]
    if tx < WARP:
        T.tma_copy(stage_s[0, :, :], A[row0 : row0 + CHUNK, head, 0:CHUNK])
    elif tx < 2 * WARP:
        if head + 1 < num_value_heads:
            T.tma_copy(stage_s[1, :, :], A[row0 : row0 + CHUNK, head + 1, 0:CHUNK])
    elif tx < 3 * WARP:
        if head + 2 < num_value_heads:
            T.tma_copy(stage_s[2, :, :], A[row0 : row0 + CHUNK, head + 2, 0:CHUNK])
    else:
        if head + 3 < num_value_heads:
            T.tma_copy(stage_s[3, :, :], A[row0 : row0 + CHUNK, head + 3, 0:CHUNK])


def prim_func(cfg: KktConfig):
    # run-time
    N, H, HV, DV, S1, slots = T.dynamic("N, H, HV, DV, S1, slots")
    half = "true" if cfg.dtype == "float16" else "false"

    @T.prim_func
    def kkt_solve(
        k: T.Tensor((N, H, cfg.head_k), cfg.dtype),
        g: T.Tensor((N, HV), "float32"),
        beta: T.Tensor((N, HV), "float32"),
        cu: T.Tensor((S1,), "int32"),
        A: T.Tensor((N, HV, CHUNK), cfg.dtype),
        g_cum: T.Tensor((N, HV), "float32"),
        bound: T.Tensor((slots, HV), "float32"),
        o: T.Tensor((N, HV, DV), cfg.dtype),
        ratio: T.int32,
        num_seqs: T.int32,
        seq_len: T.int32,
        wide_gates: T.int32,
        with_bound: T.int32,
        num_blocks: T.int32,
    ):
        with T.Kernel(num_blocks, threads=cfg.threads) as bid:
            T.import_source(device_source(__file__))
            T.annotate_min_blocks_per_sm(cfg.blocks_per_sm)
            gates_s = T.alloc_shared((2, HEADS * 2 * CHUNK), "float32")
            keys_s = T.alloc_shared((cfg.tiles, CHUNK, cfg.head_k), cfg.dtype)
            kk_s = T.alloc_shared((cfg.smem_table()["kk"],), "uint8")
            stage_s = T.alloc_shared((HEADS, CHUNK, CHUNK), cfg.dtype)
            units_s = T.alloc_shared((UNITS, UNIT_FIELDS), "int32")
            T.annotate_layout({stage_s: make_full_bank_swizzled_layout(stage_s)})
            kk = T.alloc_fragment((CHUNK, CHUNK), "float32")
            kk_1 = T.alloc_fragment((CHUNK, CHUNK), "float32")  # second tile; unused and dropped with one
            gates = T.alloc_local((8,), "float32")
            keys_full = T.alloc_barrier(arrive_count=WARP)
            i = T.alloc_var("int32", 0)
            tx = T.get_thread_binding()
            # 1 if every unit lies within one key head: the two slots are then a double buffer
            one_key = 1 - T.min(ratio % HEADS, 1) if cfg.kk_slots == 2 else 0

            problem = (cu.data, N, HV, ratio, num_seqs, seq_len, num_blocks)

            if tx >= LAST_WARP:
                T.evaluate(device("find_unit", record(units_s, 0), bid, 0, 0, *problem))
            T.sync_threads()
            fetch_unit(cfg, units_s, 0, k, g, beta, keys_s, keys_full, gates, HV, wide_gates, tx)

            while units_s[i & 3, ROWS] != 0:
                if tx >= LAST_WARP:
                    T.evaluate(device("next_unit", record(units_s, (i + 1) & 3), record(units_s, i & 3), cfg.tiles, *problem))
                rows = units_s[i & 3, ROWS]
                keys = units_s[i & 3, KEYS]
                phase = units_s[i & 3, PHASE]
                if rows > 0:
                    places = (gates.data, T.access_ptr(g_cum, "w"), T.address_of(gates_s[i & 1, 0]))
                    T.evaluate(device("finish_gates", *places, record(units_s, i & 3), HV, wide_gates))
                    multiply_unit(cfg, units_s, i & 3, rows, keys, phase, i & 1, one_key, k, keys_s, keys_full, kk, kk_1, kk_s, tx)
                T.sync_threads()  # kk_ready
                fetch_unit(cfg, units_s, (i + 1) & 3, k, g, beta, keys_s, keys_full, gates, HV, wide_gates, tx)
                if rows > 0:
                    if units_s[i & 3, HEAD] + tx // WARP < HV:
                        slot = device("kk_slot", record(units_s, i & 3), ratio, i & 1) if cfg.kk_slots == 2 else tx // WARP
                        places = (kk_s.data, slot, T.address_of(gates_s[i & 1, 0]))
                        if with_bound != 0:
                            T.evaluate(device("store_bound", *places, T.access_ptr(bound, "w"), record(units_s, i & 3), HV))
                        T.evaluate(device(f"solve_head<{half}>", *places, stage_s.data))
                    if units_s[i & 3, ROWS] == CHUNK:
                        store_inverse(units_s, i & 3, A, stage_s, HV, tx)
                    else:
                        T.evaluate(device("store_tail", stage_s.data, T.access_ptr(A, "w"), record(units_s, i & 3), HV))
                else:
                    outputs = (T.access_ptr(A, "w"), T.access_ptr(g_cum, "w"), T.access_ptr(o, "w"))
                    T.evaluate(device("zero_rows", *outputs, record(units_s, i & 3), HV, DV))
                i += 1
            T.evaluate(device("wait_stores"))

    return kkt_solve


@once_per_config
def build(cfg: KktConfig):
    """The compiled kernel of a config."""
    return compile_kernel(lambda: prim_func(cfg), PASS_CONFIGS)


@functools.cache
def config_for(dtype: torch.dtype, ratio: int, head_k: int) -> KktConfig:
    return KktConfig(str(dtype).removeprefix("torch."), 4 if ratio == 1 else 2, head_k)
