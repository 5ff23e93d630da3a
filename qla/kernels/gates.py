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
import torch

from qla.kernels import ws
from qla.kernels.ws import compile_kernel, device_source, once_per_config

THREADS = 256
QUAD = 4  # heads of a thread, where HV is a multiple
TOKENS_AT_ONCE = 2  # of a thread, forward
ACTIVATE_GATE, HAS_BIAS, ACTIVATE_BETA, TWICE = 1, 2, 4, 8  # options; gates.cuh names the same
TYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}  # of elements; gates.cuh names the same

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
        return 3 if self.backward else 4


CONFIGS = (GatesConfig(), GatesConfig(backward=True))


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
            shared = T.alloc_shared((2 * THREADS * QUAD,), "float32", scope="shared")
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


def _grid(tokens: int, heads: int, tokens_of_thread: int) -> tuple[int, int]:
    """Blocks for all tokens, and for all heads."""
    units = heads // QUAD if heads % QUAD == 0 else heads
    return -(-tokens // (THREADS // min(THREADS, units) * tokens_of_thread)), -(-units // THREADS)


def _bytes(x: torch.Tensor) -> torch.Tensor:
    return x.view(-1).view(torch.uint8)


def _arguments(raw_g, raw_beta, A_log, dt_bias, cu_seqlens, options):
    """Tensors, and the values that go with them, as both kernels take them; unused ones are not read."""
    if A_log is not None:
        options |= ACTIVATE_GATE
    if dt_bias is not None:
        options |= HAS_BIAS
    unused = torch.empty(1, dtype=torch.float32, device=raw_g.device)
    A_log, dt_bias = (unused if x is None else x for x in (A_log, dt_bias))
    tensors = (raw_g, raw_beta, A_log, dt_bias)
    cu = unused.view(torch.int32) if cu_seqlens is None else cu_seqlens
    num_seqs = -1 if cu_seqlens is None else len(cu_seqlens) - 1
    return [_bytes(x) for x in tensors], cu, (options, *(TYPES[x.dtype] for x in tensors), num_seqs)


def gates(raw_g, raw_beta, A_log, dt_bias, cu_seqlens, options) -> tuple[torch.Tensor, torch.Tensor]:
    """g and beta, [N, HV] fp32; one launch on the current stream.

    Args:
        raw_g, raw_beta: [N, HV], contiguous and 16-byte aligned, N > 0, each fp32, bf16 or fp16.
        A_log: [HV], likewise, or None: then g is raw_g. dt_bias: [HV], likewise, or None.
        cu_seqlens: int32 [S + 1] on the device, or None: then every row is owned.
        options: ACTIVATE_BETA for the sigmoid of beta, with TWICE for twice that; 0 for raw_beta itself.
    """
    g, beta = (torch.empty(raw_g.shape, dtype=torch.float32, device=raw_g.device) for _ in range(2))
    tensors, cu, form = _arguments(raw_g, raw_beta, A_log, dt_bias, cu_seqlens, options)
    build(GatesConfig())(*tensors, cu, g, beta, *form, *_grid(*raw_g.shape, TOKENS_AT_ONCE))
    return g, beta


def gates_backward(
    dg, dbeta, raw_g, raw_beta, A_log, dt_bias, cu_seqlens, options, num_sms
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
    """Gradients of raw_g and raw_beta in their dtypes, and of A_log and dt_bias in fp32 (None without them).

    One launch on the current stream, and a sum over its blocks if there is an A_log.

    Args:
        dg, dbeta: [N, HV] fp32, contiguous and 16-byte aligned: gradients of the results of `gates`.
        num_sms: multiprocessors of the device.
        The others as given to `gates`.
    """
    draw_g, draw_beta = torch.empty_like(raw_g), torch.empty_like(raw_beta)
    tensors, cu, form = _arguments(raw_g, raw_beta, A_log, dt_bias, cu_seqlens, options)
    cfg = GatesConfig(backward=True)
    blocks, groups = _grid(*raw_g.shape, 1)
    blocks = min(blocks, cfg.blocks_per_sm * num_sms)
    sums = torch.empty(blocks, 2, raw_g.shape[1], dtype=torch.float32, device=raw_g.device)
    build(cfg)(dg, dbeta, *tensors, cu, _bytes(draw_g), _bytes(draw_beta), sums, *form, groups)
    if A_log is None:
        return draw_g, draw_beta, None, None
    dA_log, dbias = sums.sum(0)
    return draw_g, draw_beta, dA_log, None if dt_bias is None else dbias
