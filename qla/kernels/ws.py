"""Shared vocabulary of the warp-specialised kernels: limits, rings, the compile target, device helpers.

Every helper that emits device code is a ``T.macro`` or ``T.inline`` method. A plain Python helper would trace to
nothing: the arrive inside it is dropped without an error and the kernel hangs.
"""

import contextlib
import functools
import threading
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import tilelang
import tilelang.language as T
from tilelang.cuda.intrinsics.macro.wgmma_macro_generator import TensorCoreIntrinEmitter
from tvm import DataType

from qla.kernels.launch import CHUNK, HEAD_DIMS
from qla.kernels.launch import HALF as HALF
from qla.kernels.launch import NO_ITEMS as NO_ITEMS
from qla.kernels.launch import OWN_ITEMS as OWN_ITEMS
from qla.kernels.launch import OWN_SEGMENTS as OWN_SEGMENTS
from qla.kernels.launch import PREP_STATE as PREP_STATE
from qla.kernels.launch import PREP_TRANSITION as PREP_TRANSITION

WARP = 32
WARPGROUP = 128  # threads
SMEM_LIMIT_SM90 = 232448  # bytes a block may opt in to
REGS_PER_SM = 65536
TARGET = {"kind": "cuda", "arch": "sm_90a"}
FULL_ROW = T.GemmWarpPolicy.FullRow
# Flags of a work item (cp_plan), sources of a state, fields of a block's place: ws.cuh names the same.
FROM_STATE, FROM_SEGMENT, IDENTITY, PREP_FROM_STATE, WITH_TRANSITION, SPLIT, SEQ_SHIFT = 1, 2, 3, 4, 8, 16, 8
ITEM, SEQ, VALUE_HEAD, KEY_HEAD, ROW, ROWS, CHUNKS, SKIP, SOURCE, ENDS, PART_OF_V, SLOT = range(12)
PLACE_FIELDS = 12
_BUILDING = threading.RLock()
PASS_CONFIGS = {  # of the warp-specialised kernels
    tilelang.PassConfigKey.TL_ENABLE_FAST_MATH: True,
    tilelang.PassConfigKey.TL_DISABLE_THREAD_STORAGE_SYNC: True,  # every barrier is ours
    tilelang.PassConfigKey.TL_DISABLE_SAFE_MEMORY_ACCESS: True,  # bounds too: checks cost registers where none are left
    tilelang.PassConfigKey.TL_DISABLE_BUFFER_INIT_CHECK: True,  # fragments filled by device functions look unwritten to it
}


def launch_registers(threads: int) -> int:
    """Registers that a block of so many threads is launched with, one block an SM: what its roles may have together.

    A role that asks for more than the others have given back waits for ever.
    """
    return min(255, REGS_PER_SM // threads) // 8 * 8 * threads


class KernelConfig:
    """What the configs of the warp-specialised kernels have in common; a config gives `dtype`, `head_k`, `regs` by role and
    `smem_table()`."""

    dtype: str
    head_k: int  # K
    regs: Mapping[Any, int]

    def smem_table(self) -> dict[str, int]:
        raise NotImplementedError

    def role_threads(self, role: Any) -> int:
        return WARPGROUP

    def check(self) -> None:
        """ValueError unless dtype and head size are known ones, the roles have the registers they ask for, and the shared memory fits into
        a block."""
        if self.dtype not in ("bfloat16", "float16"):
            raise ValueError(f"dtype must be bfloat16 or float16, got {self.dtype}")
        if self.head_k not in HEAD_DIMS:
            raise ValueError(f"head_k must be one of {HEAD_DIMS}, got {self.head_k}")
        registers = sum(count * self.role_threads(role) for role, count in self.regs.items())
        if registers > launch_registers(self.threads):
            raise ValueError(f"registers {registers} > {launch_registers(self.threads)}: {self.regs}")
        if self.smem_bytes > SMEM_LIMIT_SM90:
            raise ValueError(f"shared memory {self.smem_bytes} B > {SMEM_LIMIT_SM90} B: {self.smem_table()}")

    @property
    def is_half(self) -> str:
        """Template argument of the device functions."""
        return str(self.dtype == "float16").lower()

    @property
    def threads(self) -> int:
        return sum(self.role_threads(role) for role in self.regs)

    @property
    def smem_bytes(self) -> int:
        return sum(self.smem_table().values())


@T.meta_class
class Ring:
    """`depth` buffer slots guarded by a full and an empty mbarrier each; `i` is the running count of fills.

    `producers` and `consumers` are the numbers of threads that arrive for one fill and for one release.
    """

    def __init__(self, depth: int, producers: int, consumers: int, name: str):
        self.depth = depth
        self.full = T.alloc_barrier([producers] * depth)
        self.empty = T.alloc_barrier([consumers] * depth)

    @T.inline
    def acquire(self, i):  # producer: wait until slot i may be overwritten
        T.barrier_wait(self.empty[i % self.depth], (i // self.depth + 1) % 2)

    @T.inline
    def commit(self, i):  # producer: slot i is filled
        T.barrier_arrive(self.full[i % self.depth])

    @T.inline
    def wait(self, i):  # consumer: wait until slot i is filled
        T.barrier_wait(self.full[i % self.depth], (i // self.depth) % 2)

    @T.inline
    def release(self, i):  # consumer: slot i may be overwritten
        T.barrier_arrive(self.empty[i % self.depth])


def uniform(x):
    """x, which is the same in all lanes, in such a way that the compiler knows."""
    return T.call_extern("int32", "qla_uniform", x)


def state_at(s):
    """First element of the state of the place's sequence and head, among those of all value heads."""
    return (T.cast(s.place[SEQ], "int64") * s.value_heads + s.place[VALUE_HEAD]) * (s.head_k * s.value_dim)


def segment_at(s):
    return T.cast(s.place[ITEM], "int64") * (s.head_k * s.value_dim)


def halves_of(s):
    """The state's fragments as device functions take them. With K = 64 there is one, and the second pointer is not followed."""
    return s.S0.data, (s.S0 if s.S1 is None else s.S1).data


@T.macro
def clear_state(s):
    T.clear(s.S0)
    if s.S1 is not None:
        T.clear(s.S1)


@T.macro
def load_state(s, H0, Segments, v0, v_first, tx):
    """S^T [V, K] into the fragments s.S0 and s.S1: zero, or from H0 of the place's sequence, or from the state of its item."""
    clear_state(s)
    if s.place[SOURCE] == FROM_STATE:
        layout = (s.value_dim, v0, v_first)
        T.call_extern("int32", f"qla_load_state<{s.head_k}>", T.address_of(H0[state_at(s)]), *layout, *halves_of(s), tx)
    if s.place[SOURCE] == FROM_SEGMENT:
        T.call_extern("int32", f"qla_load_segment<{s.head_k}>", T.address_of(Segments[segment_at(s)]), s.value_dim, v0, *halves_of(s), tx)


@T.macro
def store_state(s, HT, at, v0, v_first, tx):
    T.call_extern("int32", f"qla_store_state<{s.head_k}>", T.address_of(HT[at]), s.value_dim, v0, v_first, *halves_of(s), tx)


@T.macro
def fetch_gates(s, G, Beta, begin, length, hv, first, lane):
    """Starts the loads of a chunk's gates and beta, two tokens a lane; past the end the gate stays at the last token's value."""
    place = (begin, first, length, s.value_heads, hv)
    T.call_extern("int32", "qla_fetch_gates", T.access_ptr(G, "r"), T.access_ptr(Beta, "r"), *place, s.next_gates.data, lane)


@T.macro
def take_gates(s, first, length, lane):
    """The chunk's values, which have come meanwhile, into s.gf and s.bf; past the end beta is zero. The last gate into s.g_last."""
    T.call_extern("int32", "qla_take_gates", s.next_gates.data, first, length, s.gf.data, s.bf.data, s.g_last.data, lane)


@T.macro
def score_role(cfg, s, tiles, p_ring, num_chunks):
    """P = s Lower(Gamma * Q K^T) of every chunk, into s.p."""
    for i in T.serial(num_chunks):
        tiles.wait(i)
        # the mask comes after the exponential, where an upper entry may be infinite
        T.wgmma_gemm(s.q[i % cfg.stages, :, :], s.k[i % cfg.stages, :, :], s.P, transpose_B=True, policy=FULL_ROW, clear_accum=True)
        T.wait_wgmma(0)
        T.warpgroup_fence_operand(s.P, num_regs=32)
        for r, c in T.Parallel(CHUNK, CHUNK):
            s.P[r, c] *= T.exp2(s.g_scaled[i % cfg.stages, r] - s.g[i % cfg.stages, c])
        for r, c in T.Parallel(CHUNK, CHUNK):
            s.Pb[r, c] = T.if_then_else(r >= c, s.P[r, c], 0.0)
        p_ring.acquire(i)
        T.copy(s.Pb, s.p)
        T.fence_proxy_async()
        p_ring.commit(i)
        tiles.release(i)


def state_fragment(rows: int, cols: int) -> T.Fragment:
    """Layout of a wgmma accumulator [cols, rows] (64 rows of it a warpgroup) seen as its transpose [rows, cols].

    It says where ldmatrix.trans leaves a [token, V] tile of shared memory in the registers of a product kept as [V, token].
    """
    return T.Fragment(
        (rows, cols),
        forward_thread_fn=lambda r, c: (c // 16) * 32 + (c % 8) * 4 + (r % 8) // 2,
        forward_index_fn=lambda r, c: (r // 8) * 4 + ((c // 8) % 2) * 2 + r % 2,
    )


@contextlib.contextmanager
def lowering() -> Iterator[None]:
    """Context in which kernels are traced and lowered: sizes the accumulator fence of a wgmma by what one thread owns.

    TileLang 0.1.15 counts the rows of all warpgroups that share the product, so with M = 128 over two warpgroups the
    fence names twice the registers of the local array: out of bounds, and ptxas then spills phantom registers.
    One thread at a time: another's exit would take the patch away.
    """
    with _BUILDING:
        original = TensorCoreIntrinEmitter.wgmma_accum_regs
        TensorCoreIntrinEmitter.wgmma_accum_regs = property(
            lambda e: e.wgmma_num_inst_m * e.warp_cols * e.local_size_out * DataType(e.accum_dtype).bits // 32
        )
        try:
            yield
        finally:
            TensorCoreIntrinEmitter.wgmma_accum_regs = original


def once_per_config(build: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """`build`, remembering the kernel of each config. Of threads that want one at the same time the first builds it, the others wait."""
    kernels: dict[Any, Any] = {}

    def build_or_wait(cfg):
        with _BUILDING:
            if cfg not in kernels:
                kernels[cfg] = build(cfg)
            return kernels[cfg]

    # functools.cache alone would let each of them build; in front of the lock it keeps later launches cheap.
    return functools.cache(functools.wraps(build)(build_or_wait))


def compile_kernel(trace: Callable[[], Any], pass_configs: Mapping[tilelang.PassConfigKey, Any]) -> Callable[..., None]:
    """The kernel that `trace` returns as a prim_func, for sm_90a: from TileLang's cache on disk, or compiled, and kept there."""
    with lowering():
        return tilelang.compile(trace(), target=TARGET, execution_backend="tvm_ffi", pass_configs=dict(pass_configs))


@functools.cache
def device_source(kernel_file: str, *some_share: str) -> str:
    """CUDA C++ that TileLang has no words for: what the kernel files share, what some of them do, then NAME.cuh beside NAME.py, if any."""
    own = Path(kernel_file).with_suffix(".cuh")
    files = (Path(__file__).with_suffix(".cuh"), *(own.with_name(name) for name in some_share), own)
    return "\n".join(path.read_text() for path in files if path.exists())
