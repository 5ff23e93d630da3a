"""The chain along a sequence's segments: S_j = S*_j + M_{j-1} S_{j-1}, in place, for the heads that take the transition (``cp_plan``).

``cp_prep`` leaves at segment j what the segment before it makes of a zero state, S*_j, and that segment's
transition M_{j-1}; at segment 1, exactly, what it starts from. Segment 0 starts from the sequence's own state and has no part in this.
In reverse the same with gradients, from the end: dS_j = dS*_j + M_{j+1}^T dS_{j+1}, where dS_j is the gradient of the state that leaves
segment j. States are kept V-first in accumulators, M as M^T [in, out]. Both are split into a high and a low bf16 part, and all products
but low times low are taken: what is left out is below 2^-16 of the result, so that the chain adds nothing to the error of the scans.

Shapes   Segments [segments, HV, V K] fp32, in accumulators' order; Transitions [segments, HV, 2, K, K] bf16, M_{j-1}^T at segment
         j, high part first; Items [segments, HV, 4] int32, forward ones in both directions; Cu [S + 1] int32. K (64 or 128) is fixed at
         compile time. Segments, heads, V (64 or 128), sequences, lengths: run-time values. One block a (sequence, head, 64 columns of V);
         it leaves if the head takes no transition.
Roles    (registers a thread)
    role    threads   regs   work
    STATE   0-127     232    the chain
    IO      128-255    24    warp 0: TMA loads
Shared memory                bytes
    m0      [4, K, 64]       512 K   M^T, columns 0-63 (out) of it: two stages of a high and a low part
    m1      [4, K, 64]       512 K   the others, with K = 128
    place   [2] int32           16   (static, with the barriers) segment of the first state, number of steps
Barriers
    name          signalled by   waited by   count
    m_ring.full   IO 0           STATE       32, and the bytes of the TMA loads
    m_ring.empty  STATE          IO 0        128
    block sync, twice, before the roles: the barriers are ready; the place, which thread 0 writes, can be read
Schedule of step i (segment first + 1 + i; in reverse first - 1 - i)
    IO 0    acquire m_ring | TMA both parts of all of M, up to two steps ahead | commit
    STATE   load S* | split S into parts | wait m_ring | low S high M + high S low M + high S high M, by halves of in and out (K = 64: one)
            release m_ring | add S* | store S
"""

import functools
from dataclasses import dataclass
from enum import IntEnum
from types import SimpleNamespace

import tilelang.language as T
from tilelang.layout import make_full_bank_swizzled_layout

from qla.kernels.ws import (
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
    halves_of,
    once_per_config,
    uniform,
)


class Role(IntEnum):
    STATE = 0
    IO = 1


REGS = {Role.STATE: 232, Role.IO: 24}
FIRST, STEPS = range(2)  # place of a block: segment of the first state, steps from there on


@dataclass(frozen=True)
class MergeConfig(KernelConfig):
    """Everything fixed at compile time. Equal configs share one compiled kernel."""

    reverse: bool = False
    head_k: int = 128  # K
    stages: int = 2  # transitions in flight
    dtype: str = "bfloat16"  # of the parts, whatever the inputs' dtype: a transition has no bound that fp16 could rely on

    def __post_init__(self):
        if self.stages < 1:
            raise ValueError(f"stages must be at least 1, got {self.stages}")
        self.check()

    @property
    def regs(self) -> dict[Role, int]:
        return REGS

    @property
    def halves(self) -> int:
        """Fragments of the state, 64 columns of K each."""
        return self.head_k // HALF

    def smem_table(self) -> dict[str, int]:
        return {f"m{n}": self.stages * 2 * self.head_k * HALF * 2 for n in range(self.halves)}

    @property
    def name(self) -> str:
        return f"merge_{'reverse' if self.reverse else 'forward'}_k{self.head_k}"


CONFIGS = tuple(MergeConfig(reverse, k) for k in HEAD_DIMS for reverse in (False, True))


@T.macro
def split(S, high, low):
    T.copy(S, high)
    for v, k in T.Parallel(HALF, HALF):
        low[v, k] = S[v, k] - T.cast(high[v, k], "float32")


@T.macro
def multiply(cfg, a, m, part, n, k, out, clear):
    # half n of the result += a (half k of what is summed over) times a part of M; out is [V, out] forward, [V, in] in reverse
    if cfg.reverse:
        T.wgmma_gemm(a, m[k][part, n * HALF : (n + 1) * HALF, :], out, transpose_B=True, policy=FULL_ROW, clear_accum=clear)
    else:
        T.wgmma_gemm(a, m[n][part, k * HALF : (k + 1) * HALF, :], out, policy=FULL_ROW, clear_accum=clear)


@T.macro
def multiply_half(cfg, s, t, n, out):
    # small terms first
    m = (s.m0, s.m1)
    multiply(cfg, s.L0, m, 2 * t, n, 0, out, True)
    if cfg.halves == 2:
        multiply(cfg, s.L1, m, 2 * t, n, 1, out, False)
    multiply(cfg, s.H0, m, 2 * t + 1, n, 0, out, False)
    if cfg.halves == 2:
        multiply(cfg, s.H1, m, 2 * t + 1, n, 1, out, False)
    multiply(cfg, s.H0, m, 2 * t, n, 0, out, False)
    if cfg.halves == 2:
        multiply(cfg, s.H1, m, 2 * t, n, 1, out, False)


@T.macro
def state_role(cfg, s, ring, Segments, heads, head, value_dim, v0, tx):
    first = uniform(s.place[FIRST])
    steps = uniform(s.place[STEPS])
    load = f"qla_load_segment<{cfg.head_k}>"
    start = state_at(cfg, first, heads, head, value_dim)
    T.call_extern("int32", load, T.address_of(Segments[start]), value_dim, v0, *halves_of(s), tx)
    for i in T.serial(steps):
        at = state_at(cfg, first - 1 - i if cfg.reverse else first + 1 + i, heads, head, value_dim)
        added = (s.X0.data, (s.X0 if s.X1 is None else s.X1).data)
        T.call_extern("int32", load, T.address_of(Segments[at]), value_dim, v0, *added, tx)
        split(s.S0, s.H0, s.L0)
        if cfg.halves == 2:
            split(s.S1, s.H1, s.L1)
        ring.wait(i)
        multiply_half(cfg, s, i % cfg.stages, 0, s.S0)
        if cfg.halves == 2:
            multiply_half(cfg, s, i % cfg.stages, 1, s.S1)
        T.wait_wgmma(0)
        T.warpgroup_fence_operand(s.S0, num_regs=32)
        if cfg.halves == 2:
            T.warpgroup_fence_operand(s.S1, num_regs=32)
        ring.release(i)
        for v, k in T.Parallel(HALF, HALF):
            s.S0[v, k] += s.X0[v, k]
        if cfg.halves == 2:
            for v, k in T.Parallel(HALF, HALF):
                s.S1[v, k] += s.X1[v, k]
        T.call_extern("int32", f"qla_store_segment<{cfg.head_k}>", T.address_of(Segments[at]), value_dim, v0, *halves_of(s), tx)


@T.macro
def load_warp(cfg, s, ring, Transitions, head):
    first = s.place[FIRST]
    steps = s.place[STEPS]
    for i in T.serial(steps):
        at = first + 1 - i if cfg.reverse else first + 1 + i
        ring.acquire(i)
        for part in T.unroll(2):
            to = i % cfg.stages * 2 + part
            T.tma_copy(Transitions[at, head, part, :, 0:HALF], s.m0[to, :, :], barrier=ring.full[i % cfg.stages])
            if cfg.halves == 2:
                T.tma_copy(Transitions[at, head, part, :, HALF : 2 * HALF], s.m1[to, :, :], barrier=ring.full[i % cfg.stages])
        ring.commit(i)


def state_at(cfg, segment, heads, head, value_dim):
    return (T.cast(segment, "int64") * heads + head) * (cfg.head_k * value_dim)


def buffers(cfg: MergeConfig) -> SimpleNamespace:
    """Shared memory and fragments, allocated in the kernel being traced; those of a second half of K are None where there is none."""

    def tiles(half):
        return T.alloc_shared((cfg.stages * 2, cfg.head_k, HALF), "bfloat16") if half < cfg.halves else None

    def fragments(name, dtype):
        return {f"{name}{half}": T.alloc_fragment((HALF, HALF), dtype) if half < cfg.halves else None for half in range(2)}

    return SimpleNamespace(
        m0=tiles(0),
        m1=tiles(1),
        place=T.alloc_shared((2,), "int32", scope="shared"),
        **fragments("S", "float32"),
        **fragments("X", "float32"),
        **fragments("H", "bfloat16"),
        **fragments("L", "bfloat16"),
    )


def prim_func(cfg: MergeConfig):
    """The kernel of one config, for `tilelang.compile` or for lowering without a GPU."""
    segments, heads, cu_size, segments_size = T.dynamic("segments, heads, cu_size, segments_size")
    f32, bf16, int32 = "float32", "bfloat16", "int32"

    @T.prim_func
    def merge_kernel(
        Segments: T.Tensor((segments_size,), f32),
        Transitions: T.Tensor((segments, heads, 2, cfg.head_k, cfg.head_k), bf16),
        Items: T.Tensor((segments, heads, 4), int32),
        Cu: T.Tensor((cu_size,), int32),
        # run-time
        value_dim: T.int32,
        num_seqs: T.int32,
        seq_len: T.int32,  # 0: lengths are in Cu
        tokens: T.int32,
        segment_chunks: T.int32,
    ):
        wide = value_dim // (2 * HALF)  # 1: two halves of V
        with T.Kernel(num_seqs * heads * (1 + wide), threads=cfg.threads) as bid:
            T.import_source(device_source(__file__))
            s = buffers(cfg)
            T.annotate_layout({
                **{m: make_full_bank_swizzled_layout(m) for m in (s.m0, s.m1) if m is not None},
                **{x: accumulator() for x in (s.X0, s.X1) if x is not None},
            })  # fmt: skip
            ring = Ring(cfg.stages, producers=WARP, consumers=WARPGROUP, name="m_ring")

            tx = T.get_thread_binding()
            v0 = (bid & wide) * HALF
            head = T.truncmod(bid >> wide, heads)
            if tx == 0:
                seq = T.truncdiv(bid >> wide, heads)
                tables = (T.access_ptr(s.place, "w"), T.access_ptr(Items, "r"), cfg.reverse, T.access_ptr(Cu, "r"))
                T.call_extern(int32, "qla_locate_chain", *tables, seq, seq_len, tokens, segment_chunks, head, heads)
            T.sync_threads()

            if tx < WARPGROUP:
                T.set_max_nreg(REGS[Role.STATE], 1)
                if s.place[STEPS] > 0:
                    state_role(cfg, s, ring, Segments, heads, head, value_dim, v0, tx)
            else:
                T.set_max_nreg(REGS[Role.IO], 0)
                if tx < WARPGROUP + WARP:
                    load_warp(cfg, s, ring, Transitions, head)

    return merge_kernel


def accumulator() -> T.Fragment:
    """Layout of a wgmma accumulator [64, 64]."""
    return T.Fragment(
        (HALF, HALF),
        forward_thread_fn=lambda r, c: (r // 16) * 32 + (r % 8) * 4 + (c % 8) // 2,
        forward_index_fn=lambda r, c: (c // 8) * 4 + ((r // 8) % 2) * 2 + c % 2,
    )


@once_per_config
def build(cfg: MergeConfig):
    """The compiled kernel of a config."""
    return compile_kernel(lambda: prim_func(cfg), PASS_CONFIGS)


@functools.cache
def config_for(reverse: bool, head_k: int) -> MergeConfig:
    return MergeConfig(reverse, head_k)
