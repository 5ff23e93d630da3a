"""The recurrence token by token, for decoding: one pass over the states, which is all that counts.

    S = exp(g + gk + gv) S     per head, per row (K) and per column (V)
    p = S^T k,   r = S^T q     both from the same state: one round of sums over K a token
    u = beta (v - p)
    S = S + k u^T
    o = r + (k . q) u          which is S^T q of the new state; q holds the scale

All in fp32. A warp owns 16 columns of V of one state, all of K, in its registers: warps never wait for each other. Lane l owns of them
columns by a = l / 8 and rows by b = l % 8, the same ones in both layouts, so that sums have one order and results are the transpose bit
for bit. Rows of K and V are counted in quads of four: K and V are multiples of 4, narrower than 128 by masks.

Shapes   Q, K [tokens, H, K], V [tokens, HV, V], O [tokens, HV, V] in the inputs' dtype, flat, rows of Q, K and V a given stride apart;
         H0, HT [S, HV, K, V] (V-first: [S, HV, V, K]) fp32. g, beta [tokens, HV] (beta also [tokens, HV, V]), gk [tokens, HV, K],
         gv [tokens, HV, V], A_log and dt_bias [HV], cu [S + 1]: as addresses, 0 for what is absent, with their kinds, so that no dtype and
         no presence is a variant of its own or costs a conversion. Sizes, strides, flags: run-time values.
Roles    two warps a block, alike; block = (sequence, value head, 32 columns of V), columns fastest: together a cache line of a K-first row
Lane     row 32 i + 4 b + e for i, e < 4        columns r < 4: 4 a + r (K-first), a + 4 r (V-first)
         loads and stores of states are 16 bytes: four columns of a row (K-first), four rows of a column (V-first)
Shared memory, barriers    none
Schedule of a block
    state -> registers | inputs of the first token -> registers
    token t     inputs of token t + 1 -> registers | norms, gates | decay | p, r, k . q | sums over 8 lanes | o | S
    state -> HT | zeros into rows that no sequence owns: row i past the last one by sequence i % S
"""

import functools
from dataclasses import dataclass
from types import SimpleNamespace

import tilelang
import tilelang.language as T
import torch

from qla.kernels.launch import (
    BETA_PER_COLUMN,
    COLUMNS,
    DOUBLE,
    KIND_BITS,
    NORMALISE,
    QUAD,
    SIGMOID,
    WARPS,
    WIDE_OFFSETS,
    WITH_FINAL,
    WITH_STATE,
)
from qla.kernels.ws import HEAD_DIM, REGS_PER_SM, WARP, compile_kernel, device_source, once_per_config

# Registers a thread may have at blocks_per_sm: with fewer it spills, with more there are fewer warps, and loads in flight.
REGS = {"bfloat16": 168, "float16": 168, "float32": 248}
G, BETA, GK, GV, A_LOG, DT_BIAS = range(6)  # places of kinds
L2NORM_EPS = 1e-6

PASS_CONFIGS = {
    tilelang.PassConfigKey.TL_DISABLE_THREAD_STORAGE_SYNC: True,
    tilelang.PassConfigKey.TL_DISABLE_SAFE_MEMORY_ACCESS: True,  # the masks are ours
    tilelang.PassConfigKey.TL_DISABLE_BUFFER_INIT_CHECK: True,
}


@dataclass(frozen=True)
class RecurrentConfig:
    """Everything fixed at compile time. Equal configs share one compiled kernel."""

    dtype: str = "bfloat16"
    state_v_first: bool = False
    warps: int = WARPS

    def __post_init__(self):
        if self.dtype not in ("bfloat16", "float16", "float32"):
            raise ValueError(f"dtype must be bfloat16, float16 or float32, got {self.dtype}")
        if self.warps not in (1, 2, 4, 8):
            raise ValueError(f"warps must be 1, 2, 4 or 8, got {self.warps}")

    @property
    def name(self) -> str:
        warps = "" if self.warps == WARPS else f"_{self.warps}warps"
        return f"recurrent_{'v' if self.state_v_first else 'k'}first_{self.dtype}{warps}"

    @property
    def threads(self) -> int:
        return self.warps * WARP

    @property
    def columns(self) -> int:
        """Of V a block owns."""
        return self.warps * COLUMNS

    @property
    def blocks_per_sm(self) -> int:
        return REGS_PER_SM // (REGS[self.dtype] * self.threads)

    @property
    def smem_bytes(self) -> int:
        return 0

    def column(self, a, r):
        """Column r of a lane, among those of its warp."""
        return a + QUAD * r if self.state_v_first else QUAD * a + r

    def element(self, i, e, r):
        """Place of the element in row 32 i + 4 b + e and column r in a lane's registers: four of a load next to each other."""
        return (i * QUAD + r) * QUAD + e if self.state_v_first else (i * QUAD + e) * QUAD + r


CONFIGS = tuple(RecurrentConfig(dtype, v_first) for dtype in ("bfloat16", "float16", "float32") for v_first in (False, True))


def device(function: str, dtype: str, *args):
    return T.call_extern(dtype, f"qla_recurrent::{function}", *args)


def bits(z, which, index):
    return device("bits", "uint32", z.addresses[which], kind(z, which), index)


def number(z, which, word):
    return device("number", "float32", word, kind(z, which))


def read(z, which, index):
    return device("read", "float32", z.addresses[which], kind(z, which), index)


def kind(z, which):
    return (z.kinds >> (KIND_BITS * which)) & ((1 << KIND_BITS) - 1)


def wants(z, flag):
    return (z.flags & flag) != 0


def place(call, tx, bid, pair):
    """call with a lane's place in it: a, b, first column of its warp, and first quad of its state."""
    v0 = (bid - pair * call.parts) * call.columns + T.truncdiv(tx, WARP) * COLUMNS
    state = T.cast(pair, "int64") * (call.k_quads * call.v_quads * QUAD)
    return SimpleNamespace(**vars(call), a=T.truncdiv(T.truncmod(tx, WARP), 8), b=T.truncmod(tx, 8), v0=v0, state=state)


def state_quad(cfg, z, i, e, r):
    """Number of the quad in the states that a load of a lane takes: its columns (K-first) or its rows (V-first), for which e or r is 0."""
    if cfg.state_v_first:
        return z.state + T.cast(z.v0 + cfg.column(z.a, r), "int64") * z.k_quads + 8 * i + z.b
    return z.state + T.cast(32 * i + 4 * z.b + e, "int64") * z.v_quads + T.truncdiv(z.v0, QUAD) + z.a


def has_row(z, i):
    """Whether rows 32 i + 4 b up to the next quad exist."""
    return 8 * i + z.b < z.k_quads


def has_column(cfg, z, r):
    return z.v0 + cfg.column(z.a, r) < z.v_quads * QUAD


@T.macro
def load_state(cfg, z, s, H0):
    for n in T.unroll(HEAD_DIM * COLUMNS // WARP):
        s.S[n] = 0.0
    if wants(z, WITH_STATE):
        for i in T.unroll(QUAD):
            for j in T.unroll(QUAD):
                if has_row(z, i) & has_column(cfg, z, j if cfg.state_v_first else 0):
                    for x in T.vectorized(QUAD):
                        s.S[(i * QUAD + j) * QUAD + x] = H0[state_quad(cfg, z, i, j, j) * QUAD + x]


@T.macro
def store_state(cfg, z, s, HT):
    if wants(z, WITH_FINAL):
        for i in T.unroll(QUAD):
            for j in T.unroll(QUAD):
                if has_row(z, i) & has_column(cfg, z, j if cfg.state_v_first else 0):
                    n = (i * QUAD + j) * QUAD
                    values = (s.S[n], s.S[n + 1], s.S[n + 2], s.S[n + 3])
                    device("store_quad", "int32", T.access_ptr(HT, "w"), state_quad(cfg, z, i, j, j), *values)


@T.macro
def fetch(cfg, z, s, Q, K, V, row):
    """Starts the loads of a token's inputs."""
    q_row = T.cast(row, "int64") * z.q_stride + z.key_head * z.k_quads
    k_row = T.cast(row, "int64") * z.k_stride + z.key_head * z.k_quads
    v_row = (T.cast(row, "int64") * z.v_stride + z.head * z.v_quads) * QUAD
    number_of = T.cast(row, "int64") * z.heads + z.head
    for i in T.unroll(QUAD):
        if has_row(z, i):
            for e in T.vectorized(QUAD):
                s.next_k[i * QUAD + e] = K[(k_row + 8 * i + z.b) * QUAD + e]
            for e in T.vectorized(QUAD):
                s.next_q[i * QUAD + e] = Q[(q_row + 8 * i + z.b) * QUAD + e]
    for r in T.unroll(QUAD):
        if has_column(cfg, z, r):
            s.next_v[r] = V[v_row + z.v0 + cfg.column(z.a, r)]
    s.next_g[0] = bits(z, G, number_of)
    if wants(z, BETA_PER_COLUMN):
        for r in T.unroll(QUAD):
            if has_column(cfg, z, r):
                s.next_beta[r] = bits(z, BETA, number_of * (z.v_quads * QUAD) + z.v0 + cfg.column(z.a, r))
    else:
        s.next_beta[0] = bits(z, BETA, number_of)
        for r in T.unroll(QUAD - 1):
            s.next_beta[r + 1] = s.next_beta[0]


@T.macro
def take(cfg, z, s, exp_a, bias):
    """The token's inputs, which have come, in fp32 and activated: s.k, s.q (times the scale), s.v, s.beta, and its log gate s.gate."""
    for n in T.unroll(QUAD * QUAD):
        s.k[n] = T.cast(s.next_k[n], "float32")
        s.q[n] = T.cast(s.next_q[n], "float32")
    s.scales[0] = 1.0
    s.scales[1] = z.scale
    if wants(z, NORMALISE):
        s.sums[0] = 0.0
        s.sums[1] = 0.0
        for n in T.unroll(QUAD * QUAD):
            s.sums[0] += s.k[n] * s.k[n]
            s.sums[1] += s.q[n] * s.q[n]
        sum_over_rows(s.sums, 2)
        for n in T.unroll(2):
            s.scales[n] *= T.rsqrt(s.sums[n] + L2NORM_EPS)
        for n in T.unroll(QUAD * QUAD):
            s.k[n] *= s.scales[0]
    for n in T.unroll(QUAD * QUAD):
        s.q[n] *= s.scales[1]
    s.gate[0] = number(z, G, s.next_g[0])
    if z.addresses[A_LOG] != 0:
        s.gate[0] = device("activated", "float32", s.gate[0] + bias, exp_a)
    for r in T.unroll(QUAD):
        s.v[r] = T.cast(s.next_v[r], "float32")
        s.beta[r] = 1.0
        if z.addresses[BETA] != 0:
            s.beta[r] = number(z, BETA, s.next_beta[r])
        if wants(z, SIGMOID):
            s.beta[r] = T.if_then_else(wants(z, DOUBLE), 2.0, 1.0) / (1.0 + T.exp(-s.beta[r]))


@T.macro
def sum_over_rows(x, count):
    """Of every element, over the eight lanes that share columns."""
    for n in T.unroll(count):
        x[n] += T.shfl_xor(x[n], 4)
    for n in T.unroll(count):
        x[n] += T.shfl_xor(x[n], 2)
    for n in T.unroll(count):
        x[n] += T.shfl_xor(x[n], 1)


@T.macro
def decay(cfg, z, s, row):
    number_of = T.cast(row, "int64") * z.heads + z.head
    factor = T.exp(s.gate[0])
    for n in T.unroll(HEAD_DIM * COLUMNS // WARP):
        s.S[n] *= factor
    if z.addresses[GK] != 0:
        for i in T.unroll(QUAD):
            for e in T.unroll(QUAD):
                if has_row(z, i):
                    of_row = T.exp(read(z, GK, (number_of * z.k_quads + 8 * i + z.b) * QUAD + e))
                    for r in T.unroll(QUAD):
                        s.S[cfg.element(i, e, r)] *= of_row
    if z.addresses[GV] != 0:
        for r in T.unroll(QUAD):
            if has_column(cfg, z, r):
                of_column = T.exp(read(z, GV, number_of * (z.v_quads * QUAD) + z.v0 + cfg.column(z.a, r)))
                for n in T.unroll(QUAD * QUAD):
                    s.S[cfg.element(n // QUAD, n % QUAD, r)] *= of_column


@T.macro
def step(cfg, z, s, O, row):
    # p, r and k . q in one array, so that their sums go through the shuffles together
    for n in T.unroll(2 * QUAD + 1):
        s.dots[n] = 0.0
    for n in T.unroll(QUAD * QUAD):
        for r in T.unroll(QUAD):
            s.dots[r] += s.S[cfg.element(n // QUAD, n % QUAD, r)] * s.k[n]
            s.dots[QUAD + r] += s.S[cfg.element(n // QUAD, n % QUAD, r)] * s.q[n]
        s.dots[2 * QUAD] += s.k[n] * s.q[n]
    sum_over_rows(s.dots, 2 * QUAD + 1)
    for r in T.unroll(QUAD):
        s.u[r] = s.beta[r] * (s.v[r] - s.dots[r])
    # lane b < 4 writes column b of its four
    s.out[0] = 0.0
    for r in T.unroll(QUAD):
        s.out[0] = T.if_then_else(z.b == r, s.dots[QUAD + r] + s.u[r] * s.dots[2 * QUAD], s.out[0])
    write(cfg, z, O, row, s.out[0])
    for n in T.unroll(QUAD * QUAD):
        for r in T.unroll(QUAD):
            s.S[cfg.element(n // QUAD, n % QUAD, r)] += s.k[n] * s.u[r]


@T.macro
def write(cfg, z, O, row, value):
    if (z.b < QUAD) & has_column(cfg, z, z.b):
        O[(T.cast(row, "int64") * z.heads + z.head) * (z.v_quads * QUAD) + z.v0 + cfg.column(z.a, z.b)] = T.cast(value, cfg.dtype)


def prim_func(cfg: RecurrentConfig):
    """The kernel of one config, for `tilelang.compile` or for lowering without a GPU."""
    q_size, k_size, v_size, o_size, h0_size, ht_size = T.dynamic("q_size, k_size, v_size, o_size, h0_size, ht_size")
    f32, int64 = "float32", "int64"

    @T.prim_func
    def recurrent_kernel(
        Q: T.Tensor((q_size,), cfg.dtype),
        K: T.Tensor((k_size,), cfg.dtype),
        V: T.Tensor((v_size,), cfg.dtype),
        O: T.Tensor((o_size,), cfg.dtype),
        H0: T.Tensor((h0_size,), f32),
        HT: T.Tensor((ht_size,), f32),
        # run-time
        g: T.int64,  # addresses
        beta: T.int64,
        gk: T.int64,
        gv: T.int64,
        a_log: T.int64,
        dt_bias: T.int64,
        cu: T.int64,
        kinds: T.int32,
        flags: T.int32,
        q_stride: T.int64,  # strides and head sizes in quads
        k_stride: T.int64,
        v_stride: T.int64,
        k_quads: T.int32,
        v_quads: T.int32,
        heads: T.int32,
        ratio: T.int32,
        num_seqs: T.int32,
        seq_len: T.int32,  # without cu
        tokens: T.int32,
        parts: T.int32,  # blocks a state
        scale: T.float32,
    ):
        with T.Kernel(num_seqs * heads * parts, threads=cfg.threads) as bid:
            T.import_source(device_source(__file__))
            T.annotate_min_blocks_per_sm(cfg.blocks_per_sm)
            s = SimpleNamespace(
                S=T.alloc_local((HEAD_DIM * COLUMNS // WARP,), f32),
                **{name: T.alloc_local((QUAD * QUAD,), cfg.dtype) for name in ("next_k", "next_q")},
                next_v=T.alloc_local((QUAD,), cfg.dtype),
                next_g=T.alloc_local((1,), "uint32"),
                next_beta=T.alloc_local((QUAD,), "uint32"),
                **{name: T.alloc_local((QUAD * QUAD,), f32) for name in ("k", "q")},
                **{name: T.alloc_local((QUAD,), f32) for name in ("v", "beta", "u")},
                **{name: T.alloc_local((2,), f32) for name in ("sums", "scales")},
                **{name: T.alloc_local((1,), f32) for name in ("gate", "out")},
                dots=T.alloc_local((2 * QUAD + 1,), f32),
            )
            # in variables: an expression would be worked out anew, with its divisions, wherever it is used
            pair = T.alloc_var("int32", init=T.truncdiv(bid, parts))
            seq = T.alloc_var("int32", init=T.truncdiv(pair, heads))
            head = T.alloc_var("int32", init=pair - seq * heads)
            key_head = T.alloc_var("int32", init=T.truncdiv(head, ratio))
            tx = T.get_thread_binding()
            call = SimpleNamespace(
                addresses=(g, beta, gk, gv, a_log, dt_bias), kinds=kinds, flags=flags, q_stride=q_stride, k_stride=k_stride,
                v_stride=v_stride, k_quads=k_quads, v_quads=v_quads, heads=heads, head=head, key_head=key_head, scale=scale,
                parts=parts, columns=cfg.columns,
            )  # fmt: skip
            z = place(call, tx, bid, pair)

            # everything is asked for before anything is waited for: the state first, which does not depend on cu
            load_state(cfg, z, s, H0)
            a_bits = bits(z, A_LOG, head)
            bias_bits = bits(z, DT_BIAS, head)
            begin = T.alloc_var("int32", init=seq * seq_len)
            end = T.alloc_var("int32", init=seq * seq_len + seq_len)
            if cu != 0:
                begin = device("offset", "int32", cu, flags & WIDE_OFFSETS, seq, tokens)
                end = device("offset", "int32", cu, flags & WIDE_OFFSETS, seq + 1, tokens)
            for n in T.unroll(QUAD * QUAD):
                s.next_k[n] = T.cast(0, cfg.dtype)
                s.next_q[n] = T.cast(0, cfg.dtype)
            for r in T.unroll(QUAD):
                s.next_v[r] = T.cast(0, cfg.dtype)
                s.next_beta[r] = T.cast(0, "uint32")
            if begin < end:
                fetch(cfg, z, s, Q, K, V, begin)
            exp_a = T.exp(number(z, A_LOG, a_bits))
            bias = number(z, DT_BIAS, bias_bits)
            for t in T.serial(end - begin):
                take(cfg, z, s, exp_a, bias)
                if begin + t + 1 < end:
                    fetch(cfg, z, s, Q, K, V, begin + t + 1)
                decay(cfg, z, s, begin + t)
                step(cfg, z, s, O, begin + t)
            # where the block is, worked out anew: kept until here, it would be spilled
            lane_again = T.alloc_var("int32", init=device("anew", "int32", tx))
            block_again = T.alloc_var("int32", init=device("anew", "int32", bid))
            pair_again = T.alloc_var("int32", init=T.truncdiv(block_again, parts))
            store_state(cfg, place(call, lane_again, block_again, pair_again), s, HT)
            if cu != 0:
                owned = device("offset", "int32", cu, flags & WIDE_OFFSETS, num_seqs, tokens) + T.truncdiv(pair_again, heads)
                for t in T.serial(T.truncdiv(tokens - owned + num_seqs - 1, num_seqs)):
                    write(cfg, z, O, owned + t * num_seqs, 0.0)

    return recurrent_kernel


@once_per_config
def build(cfg: RecurrentConfig):
    """The compiled kernel of a config."""
    return compile_kernel(lambda: prim_func(cfg), PASS_CONFIGS)


@functools.cache
def config_for(dtype: torch.dtype, state_v_first: bool, warps: int) -> RecurrentConfig:
    return RecurrentConfig(str(dtype).removeprefix("torch."), state_v_first, warps)
