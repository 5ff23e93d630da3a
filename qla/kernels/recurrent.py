"""The recurrence token by token, for decoding: one pass over the states, which is all that counts.

    S = exp(g + gk + gv) S     per head, per row (K) and per column (V)
    p = S^T k,   r = S^T q     both from the same state: one round of sums over K a token
    u = beta (v - p)
    S = S + k u^T
    o = r + (k . q) u          which is S^T q of the new state; q holds the scale

All in fp32. Norms of k and q are factors of p, r and k . q, so they are summed in the same round: it takes k and q as they come. The sums
of four columns are twelve with these three. Every step of theirs over lanes leaves a lane half of them, so that four lanes of sixteen end
up with each column, work out its u and o, and tell the others u.

Sixteen lanes own four columns of V of one state, all of K, in their registers: warps never wait for each other. Both layouts give a lane
the same elements, so that sums have one order and results are the transpose bit for bit. Rows of K and V are counted in quads of four: K
and V are multiples of 4, narrower than 128 by masks. From launch to store is one chain. With few sequences it is all the time there is,
with many it is how long registers are taken: so there is no division, and nothing waits before the first token's loads.

Shapes   Q, K [tokens, H, K], V [tokens, HV, V], O [tokens, HV, V] in the inputs' dtype, flat, rows of Q, K and V a given stride apart;
         H0, HT [S, HV, K, V] (V-first: [S, HV, V, K]) fp32. g, beta [tokens, HV] (beta also [tokens, HV, V]), gk [tokens, HV, K],
         gv [tokens, HV, V], A_log and dt_bias [HV], cu [S + 1]: as addresses, 0 for what is absent, with their kinds, so that no dtype and
         no presence is a variant of its own or costs a conversion. Sizes, strides, flags: run-time values.
Roles    four warps a block, alike; block = (32 columns of V, value head, sequence), columns fastest: together a cache line of a K-first row
Lane     with b = lane % 16: rows 64 i + 4 b + e for i < 2, e < 4        columns 4 c + r for r < 4, quad c the block's lane / 16
         loads and stores of states are 16 bytes: four columns of a row (K-first), four rows of a column (V-first)
         after the sums: column r = b / 4 of the four
Shared memory, barriers    none
Schedule of a block
    state -> registers | inputs of the first token -> registers
    token t     inputs of token t + 1 -> registers | decay | p, r, k . k, q . q, k . q | sums over 16 lanes | norms | u, o | S
    state -> HT | zeros into rows that no sequence owns: row i past the last one by sequence i % S
"""

import functools
from dataclasses import dataclass
from types import SimpleNamespace

import tilelang
import tilelang.language as T
import torch

from qla.kernels.launch import (
    A_LOG,
    BETA,
    BETA_PER_COLUMN,
    COLUMNS,
    DOUBLE,
    DT_BIAS,
    GK,
    GV,
    KIND_BITS,
    KINDS,
    NORMALISE,
    QUAD,
    SIGMOID,
    WARPS,
    WIDE_OFFSETS,
    WITH_FINAL,
    WITH_STATE,
    G,
)
from qla.kernels.ws import HEAD_DIMS, REGS_PER_SM, WARP, compile_kernel, device_source, once_per_config

ROW_BITS = 4
ROW_LANES = 1 << ROW_BITS  # lanes that share columns
COLUMN_LANES = ROW_LANES // QUAD  # lanes of those that go on with one of the columns when sums are done
TILES = max(HEAD_DIMS) // (ROW_LANES * QUAD)  # of 4 x 4 elements of a state a lane owns
# Registers a thread may have at blocks_per_sm: with fewer it spills, with more there are fewer warps, and loads in flight.
REGS = {"bfloat16": 96, "float16": 96, "float32": 128}
P, R, OTHER, SUMS = range(4)  # sums that column r's lanes end up with; OTHER is k . k, q . q, k . q in the first, second and third of them
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
    def kind(self) -> int:
        """Of the elements of q, k, v and o."""
        return KINDS[getattr(torch, self.dtype)]

    @property
    def words(self) -> int:
        """Of 4 bytes in a quad of q, k, v or o."""
        return QUAD if self.dtype == "float32" else QUAD // 2

    @property
    def load_quad(self) -> str:
        return f"load_quad<{4 if self.dtype == 'float32' else 2}>"

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

    def element(self, n, r):
        """Place in a lane's registers of row n of its own, 64 i + 4 b + e for n = 4 i + e, and column r: four of a load side by side."""
        return (n // QUAD * QUAD + r) * QUAD + n % QUAD if self.state_v_first else n * QUAD + r


CONFIGS = tuple(RecurrentConfig(dtype, v_first) for dtype in ("bfloat16", "float16", "float32") for v_first in (False, True))


def device(function: str, dtype: str, *args):
    return T.call_extern(dtype, f"qla_recurrent::{function}", *args)


def quad_at(x, access, number):
    """Address of a quad."""
    return device("quad_at", "int64", T.access_ptr(x, access), number)


def read(z, which, index):
    return device("read", "float32", z.addresses[which], kind(z, which), index)


def kind(z, which):
    return (z.kinds >> (KIND_BITS * which)) & ((1 << KIND_BITS) - 1)


def wants(z, flag):
    return (z.flags & flag) != 0


def first_quad(cfg, b, c, k_quads, v_quads):
    """Number, in its state, of the quad that a lane's first load takes."""
    return c * QUAD * k_quads + b if cfg.state_v_first else b * QUAD * v_quads + c


def quads_further(cfg, z, i, j):
    """From there to the quad of tile i and column j (V-first) or row j (K-first)."""
    return j * z.k_quads + ROW_LANES * i if cfg.state_v_first else (ROW_LANES * QUAD * i + j) * z.v_quads


def has_row(z, i):
    """Whether rows 64 i + 4 b up to the next quad exist."""
    return ROW_LANES * i + z.b < z.k_quads


def has_columns(z):
    return z.c < z.v_quads


@T.macro
def load_state(cfg, z, s, H0):
    first = quad_at(H0, "r", z.state)
    for i in T.unroll(TILES):
        for j in T.unroll(QUAD):
            wanted = wants(z, WITH_STATE) & has_row(z, i) & has_columns(z)
            device("load_state", "int32", s.S.data, (i * QUAD + j) * QUAD, first, quads_further(cfg, z, i, j), wanted)


@T.macro
def store_state(cfg, z, s, HT):
    if wants(z, WITH_FINAL):
        first = quad_at(HT, "w", z.state)
        for i in T.unroll(TILES):
            for j in T.unroll(QUAD):
                wanted = has_row(z, i) & has_columns(z)
                device("store_state", "int32", s.S.data, (i * QUAD + j) * QUAD, first, quads_further(cfg, z, i, j), wanted)


@T.macro
def fetch(cfg, z, s, Q, K, V, row):
    """Starts the loads of a token's inputs."""
    k = quad_at(K, "r", device("index", "int64", row, z.k_stride, z.k_first))
    q = quad_at(Q, "r", device("index", "int64", row, z.q_stride, z.k_first))
    for i in T.unroll(TILES):
        device(cfg.load_quad, "int32", s.next_k.data, i, k, ROW_LANES * i, has_row(z, i))
    for i in T.unroll(TILES):
        device(cfg.load_quad, "int32", s.next_q.data, i, q, ROW_LANES * i, has_row(z, i))
    v = device("index", "int64", row, z.v_stride * QUAD, z.v_first * QUAD + z.column)
    device("load_one", "int32", s.next_v.data, T.access_ptr(V, "r"), v, has_columns(z))
    device("fetch_number", "int32", s.next_number.data, z.number_at, z.number_kind, row, z.number_stride)


@T.macro
def take(cfg, z, s):
    """The token's inputs, which have come, in fp32: s.k, s.q, s.v; activated: its log gate s.gate, and beta in some lanes' s.number."""
    device(f"widen<{cfg.kind}>", "int32", s.next_k.data, s.k.data, QUAD * TILES)
    device(f"widen<{cfg.kind}>", "int32", s.next_q.data, s.q.data, QUAD * TILES)
    device(f"widen<{cfg.kind}>", "int32", s.next_v.data, s.v.data, 1)
    s.number[0] = device("number", "float32", s.next_number[0], s.next_number[1], z.number_kind)
    if (z.addresses[BETA] == 0) & (z.b >= BETA):
        s.number[0] = 1.0
    s.gate[0] = of_lane(s.number[0], G)
    if z.addresses[A_LOG] != 0:
        s.gate[0] = device("activated", "float32", s.gate[0] + of_lane(s.number[0], DT_BIAS), of_lane(s.number[0], A_LOG))
    if wants(z, SIGMOID):
        s.number[0] = device("sigmoid", "float32", s.number[0], T.if_then_else(wants(z, DOUBLE), 2.0, 1.0))


def of_lane(x, lane):
    """x in one of the sixteen lanes."""
    return device(f"of_lane<{ROW_LANES}>", "float32", x, lane)


@T.macro
def decay(cfg, z, s, row):
    factor = T.exp(s.gate[0])
    for n in T.unroll(QUAD * QUAD * TILES):
        s.S[n] *= factor
    if z.addresses[GK] != 0:
        of_row = device("index", "int64", row, z.heads * z.k_quads, z.head * z.k_quads + z.b)
        for n in T.unroll(QUAD * TILES):
            if has_row(z, n // QUAD):
                by_row = T.exp(read(z, GK, (of_row + ROW_LANES * (n // QUAD)) * QUAD + n % QUAD))
                for r in T.unroll(QUAD):
                    s.S[cfg.element(n, r)] *= by_row
    if z.addresses[GV] != 0:
        of_columns = device("index", "int64", row, z.heads * z.v_quads, z.v_first)
        if has_columns(z):
            for r in T.unroll(QUAD):
                by_column = T.exp(read(z, GV, of_columns * QUAD + r))
                for n in T.unroll(QUAD * TILES):
                    s.S[cfg.element(n, r)] *= by_column


@T.macro
def step(cfg, z, s, O, row):
    for n in T.unroll(SUMS * QUAD):
        s.sums[n] = 0.0
    for n in T.unroll(QUAD * TILES):
        for r in T.unroll(QUAD):
            s.sums[SUMS * r + P] += s.S[cfg.element(n, r)] * s.k[n]
            s.sums[SUMS * r + R] += s.S[cfg.element(n, r)] * s.q[n]
        s.sums[OTHER] += s.k[n] * s.k[n]
        s.sums[SUMS + OTHER] += s.q[n] * s.q[n]
        s.sums[2 * SUMS + OTHER] += s.k[n] * s.q[n]
    sum_over_rows(z, s.sums)
    s.k_factor[0] = 1.0
    s.q_factor[0] = z.scale
    if wants(z, NORMALISE):
        s.k_factor[0] = T.rsqrt(of_column(s.sums[OTHER], 0) + L2NORM_EPS)
        s.q_factor[0] *= T.rsqrt(of_column(s.sums[OTHER], 1) + L2NORM_EPS)
    s.u[0] = of_lane(s.number[0], BETA + z.column) * (s.v[0] - s.sums[P] * s.k_factor[0])
    s.out[0] = s.q_factor[0] * (s.sums[R] + s.u[0] * (of_column(s.sums[OTHER], 2) * s.k_factor[0]))
    write(z, s, O, row)
    s.u[0] *= s.k_factor[0]
    for r in T.unroll(QUAD):
        s.all_u[r] = of_column(s.u[0], r)
    for n in T.unroll(QUAD * TILES):
        for r in T.unroll(QUAD):
            s.S[cfg.element(n, r)] += s.k[n] * s.all_u[r]


def of_column(x, r):
    """x in the lanes of column r."""
    return of_lane(x, COLUMN_LANES * r)


@T.macro
def sum_over_rows(z, x):
    """Over the lanes that share columns. Two steps leave a lane half of the sums each: those of its column, from SUMS r on, come first."""
    for bit in T.unroll(2):
        for n in T.unroll(SUMS * QUAD >> (bit + 1)):
            upper = (z.b & (ROW_LANES >> (bit + 1))) != 0
            x[n] = device("halved", "float32", x[n], x[(SUMS * QUAD >> (bit + 1)) + n], upper, ROW_LANES >> (bit + 1))
    for bit in T.unroll(ROW_BITS - 2):
        for n in T.unroll(SUMS):
            x[n] += T.shfl_xor(x[n], COLUMN_LANES >> (bit + 1))


@T.macro
def write(z, s, O, row):
    """s.out of its column, by one lane of it."""
    place = device("index", "int64", row, z.heads * z.v_quads * QUAD, z.v_first * QUAD + z.column)
    device("store_one", "int32", T.access_ptr(O, "w"), place, s.out[0], ((z.b & (COLUMN_LANES - 1)) == 0) & has_columns(z))


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
        a_log: T.int64,
        dt_bias: T.int64,
        gk: T.int64,
        beta: T.int64,
        gv: T.int64,
        cu: T.int64,
        kinds: T.int32,
        flags: T.int32,
        q_stride: T.int32,  # strides and head sizes in quads
        k_stride: T.int32,
        v_stride: T.int32,
        k_quads: T.int32,
        v_quads: T.int32,
        heads: T.int32,
        share: T.int32,  # key_share
        num_seqs: T.int32,
        first_seq: T.int32,  # of this launch, and how many
        seqs: T.int32,
        seq_len: T.int32,  # without cu
        tokens: T.int32,
        parts: T.int32,  # blocks a state
        scale: T.float32,
    ):
        with T.Kernel(parts, heads, seqs, threads=cfg.threads) as (part, head, number_of_seq):
            T.import_source(device_source(__file__))
            T.annotate_min_blocks_per_sm(cfg.blocks_per_sm)
            s = SimpleNamespace(
                S=T.alloc_local((QUAD * QUAD * TILES,), f32),
                **{name: T.alloc_local((cfg.words * TILES,), "uint32") for name in ("next_k", "next_q")},
                next_v=T.alloc_local((1,), "uint32"),
                next_number=T.alloc_local((2,), "uint32"),
                **{name: T.alloc_local((QUAD * TILES,), f32) for name in ("k", "q")},
                **{name: T.alloc_local((1,), f32) for name in ("number", "gate", "k_factor", "q_factor", "v", "u", "out")},
                sums=T.alloc_local((SUMS * QUAD,), f32),
                all_u=T.alloc_local((QUAD,), f32),
            )
            tx = T.get_thread_binding()
            # in variables: an expression would be worked out anew wherever it is used
            seq = T.alloc_var("int32", init=first_seq + number_of_seq)
            b = T.alloc_var("int32", init=tx & (ROW_LANES - 1))
            c = T.alloc_var("int32", init=part * (cfg.columns // QUAD) + (tx >> ROW_BITS))
            column = T.alloc_var("int32", init=b >> (ROW_BITS - 2))
            key_head = T.cast(device("index", int64, 4 * head + 2, share, 0) >> 32, "int32")
            pair = T.alloc_var("int32", init=seq * heads + head)
            in_state = T.alloc_var("int32", init=first_quad(cfg, b, c, k_quads, v_quads))
            state = T.alloc_var(int64, init=device("once", int64, device("index", int64, pair, k_quads * v_quads * QUAD, in_state)))
            k_first = T.alloc_var("int32", init=key_head * k_quads + b)
            v_first = T.alloc_var("int32", init=head * v_quads + c)
            # what a lane reads of a token's numbers
            per_column = ((flags & BETA_PER_COLUMN) != 0) & (b >= BETA)
            columns = T.if_then_else(per_column, v_quads * QUAD, 1)
            number_kind = T.alloc_var("int32", init=(kinds >> (KIND_BITS * T.min(b, BETA))) & ((1 << KIND_BITS) - 1))
            number_first = head * columns + T.if_then_else(per_column, QUAD * c + b - BETA, 0)
            array = device("array_of_lane", int64, b, g, a_log, dt_bias, T.if_then_else(c < v_quads, beta, T.cast(0, int64)))
            number_at = T.alloc_var(int64, init=device("number_at", int64, array, number_kind, number_first))
            token_bytes = heads * columns << device("log_bytes", "int32", number_kind)
            number_stride = T.alloc_var("int32", init=T.if_then_else((b == A_LOG) | (b == DT_BIAS), 0, token_bytes))
            z = SimpleNamespace(
                addresses=(g, a_log, dt_bias, gk, beta, gv), kinds=kinds, flags=flags, q_stride=q_stride, k_stride=k_stride,
                v_stride=v_stride, k_quads=k_quads, v_quads=v_quads, heads=heads, head=head, scale=scale, b=b, c=c, column=column,
                state=state, k_first=k_first, v_first=v_first, number_at=number_at, number_kind=number_kind, number_stride=number_stride,
            )  # fmt: skip

            # everything is asked for before anything is waited for: the state first, which does not depend on cu
            load_state(cfg, z, s, H0)
            row = T.alloc_var("int32", init=seq * seq_len)
            end = T.alloc_var("int32", init=seq * seq_len + seq_len)
            if cu != 0:
                row = device("offset", "int32", cu, flags & WIDE_OFFSETS, seq, tokens)
                end = device("offset", "int32", cu, flags & WIDE_OFFSETS, seq + 1, tokens)
            if row < end:
                fetch(cfg, z, s, Q, K, V, row)
            while row < end:
                take(cfg, z, s)
                if row + 1 < end:
                    fetch(cfg, z, s, Q, K, V, row + 1)
                decay(cfg, z, s, row)
                step(cfg, z, s, O, row)
                row += 1
            store_state(cfg, z, s, HT)
            if cu != 0:
                s.out[0] = 0.0
                row = device("offset", "int32", cu, flags & WIDE_OFFSETS, num_seqs, tokens) + seq
                while row < tokens:
                    write(z, s, O, row)
                    row += num_seqs

    return recurrent_kernel


@once_per_config
def build(cfg: RecurrentConfig):
    """The compiled kernel of a config."""
    return compile_kernel(lambda: prim_func(cfg), PASS_CONFIGS)


@functools.cache
def config_for(dtype: torch.dtype, state_v_first: bool, warps: int) -> RecurrentConfig:
    return RecurrentConfig(str(dtype).removeprefix("torch."), state_v_first, warps)
