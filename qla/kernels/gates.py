"""Gates and beta from their raw values, and the gradients of that, each in one launch.

    g    = -exp(A_log) softplus(raw g + dt_bias)        or raw g itself         "Gated Delta Networks", arXiv 2412.06464; as in Mamba 2
    beta = sigmoid(raw beta), or twice that             or raw beta itself
    d raw g = -exp(A_log) sigmoid(raw g + dt_bias) dg,  dA_log = sum of dg g,  d dt_bias = sum of d raw g,    d raw beta = dbeta beta'

All in fp32. g, beta and the gradients are 0 in rows that no sequence owns, whatever the inputs hold there.

Shapes   raw g, raw beta [N, HV] and A_log, dt_bias [HV] fp32, bf16 or fp16, each of its own, as bytes; g, beta, dg, dbeta [N, HV] fp32;
         gradients of the raw values in their types; sums [blocks, 2, HV] fp32, of dA_log and d dt_bias by block; cu [S + 1] int32.
         Types, options, N, HV, S are run-time values.
Roles    one: 256 threads, each four heads (one if HV is no multiple of 4) of two tokens, backward of every so many; blockIdx.y picks 256
         such fours (ones)
Shared memory, bytes
    shared [2, 256, 4] fp32    8192 (static), backward: sums of a block's threads
Barriers
    block sync, backward: before threads of one head are summed, in their order
Schedule
    forward     load | activate | store
    backward    token: load the next one | differentiate and add to the thread's sums | store
"""

from dataclasses import dataclass

import tilelang
import tilelang.language as T

from qla.kernels import ws
from qla.kernels.launch import GATES_BLOCKS_PER_SM, GATES_QUAD
from qla.kernels.launch import GATES_THREADS as THREADS
from qla.kernels.ws import compile_kernel, device_source, once_per_config

# Exponentials to the last bits: those of fast math lose them in large arguments.
PASS_CONFIGS = {**ws.PASS_CONFIGS, tilelang.PassConfigKey.TL_ENABLE_FAST_MATH: False}


@dataclass(frozen=True)
class GatesConfig:
    """Everything fixed at compile time. Equal configs share one compiled kernel."""

    backward: bool = False

    @property
    def name(self) -> str:
        return f"gates_{'bwd' if self.backward else 'fwd'}"

    threads = THREADS
    smem_bytes = 0

    @property
    def blocks_per_sm(self) -> int:
        """What registers have room for; backward also the number of blocks, of which each is a row in the sum over them."""
        return GATES_BLOCKS_PER_SM if self.backward else 4


CONFIGS = (GatesConfig(), GatesConfig(backward=True))
config_for = GatesConfig


def prim_func(cfg: GatesConfig):
    """The kernel, for `tilelang.compile` or for lowering without a GPU."""
    return backward_func() if cfg.backward else forward_func()


def forward_func():
    N, HV, g_size, beta_size, A_size, bias_size, cu_size = T.dynamic("N, HV, g_size, beta_size, A_size, bias_size, cu_size")

    @T.prim_func
    def gates_kernel(
        RawG: T.Tensor((g_size,), "uint8"),
        RawBeta: T.Tensor((beta_size,), "uint8"),
        ALog: T.Tensor((A_size,), "uint8"),
        DtBias: T.Tensor((bias_size,), "uint8"),
        Cu: T.Tensor((cu_size,), "int32"),
        G: T.Tensor((N, HV), "float32"),
        Beta: T.Tensor((N, HV), "float32"),
        # run-time; num_seqs -1: every row is owned
        options: T.int32,
        g_type: T.int32,
        beta_type: T.int32,
        A_type: T.int32,
        bias_type: T.int32,
        num_seqs: T.int32,
        num_blocks: T.int32,
        groups: T.int32,
    ):
        with T.Kernel(num_blocks, groups, threads=THREADS) as (block, group):
            T.import_source(device_source(__file__))
            T.annotate_min_blocks_per_sm(GatesConfig().blocks_per_sm)
            inputs = [T.access_ptr(x, "r") for x in (RawG, RawBeta, ALog, DtBias)]
            outputs = [T.access_ptr(x, "w") for x in (G, Beta)]
            form = (options, g_type, beta_type, A_type, bias_type)
            place = (num_seqs, N, HV, group, block, num_blocks, T.get_thread_binding())
            T.evaluate(T.call_extern("int32", "qla_gates::activate", *inputs, *outputs, T.access_ptr(Cu, "r"), *form, *place))

    return gates_kernel


def backward_func():
    N, HV, g_size, beta_size, A_size, bias_size, cu_size = T.dynamic("N, HV, g_size, beta_size, A_size, bias_size, cu_size")
    num_blocks = T.dynamic("num_blocks")

    @T.prim_func
    def gates_backward_kernel(
        DG: T.Tensor((N, HV), "float32"),
        DBeta: T.Tensor((N, HV), "float32"),
        RawG: T.Tensor((g_size,), "uint8"),
        RawBeta: T.Tensor((beta_size,), "uint8"),
        ALog: T.Tensor((A_size,), "uint8"),
        DtBias: T.Tensor((bias_size,), "uint8"),
        Cu: T.Tensor((cu_size,), "int32"),
        DRawG: T.Tensor((g_size,), "uint8"),
        DRawBeta: T.Tensor((beta_size,), "uint8"),
        Sums: T.Tensor((num_blocks, 2, HV), "float32"),
        # run-time; num_seqs -1: every row is owned
        options: T.int32,
        g_type: T.int32,
        beta_type: T.int32,
        A_type: T.int32,
        bias_type: T.int32,
        num_seqs: T.int32,
        groups: T.int32,
    ):
        with T.Kernel(num_blocks, groups, threads=THREADS) as (block, group):
            T.import_source(device_source(__file__))
            T.annotate_min_blocks_per_sm(GatesConfig(backward=True).blocks_per_sm)
            shared = T.alloc_shared((2 * THREADS * GATES_QUAD,), "float32", scope="shared")
            inputs = [T.access_ptr(x, "r") for x in (DG, DBeta, RawG, RawBeta, ALog, DtBias)]
            outputs = [*(T.access_ptr(x, "w") for x in (DRawG, DRawBeta, Sums)), shared.data]
            form = (options, g_type, beta_type, A_type, bias_type)
            place = (num_seqs, N, HV, group, block, num_blocks, T.get_thread_binding())
            T.evaluate(T.call_extern("int32", "qla_gates::differentiate", *inputs, *outputs, T.access_ptr(Cu, "r"), *form, *place))

    return gates_backward_kernel


@once_per_config
def build(cfg: GatesConfig):
    """The compiled kernel of a config."""
    return compile_kernel(lambda: prim_func(cfg), PASS_CONFIGS)
