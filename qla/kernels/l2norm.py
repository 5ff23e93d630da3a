"""Rows of q and k divided by their norms, and the gradient of that, both tensors in one launch.

    y  = x r,  r = (sum of x^2 + eps)^-1/2                          of each token and key head, in fp32, y rounded to 16 bits
    dx = r (dy - y (y . dy))                                        with the rounded y; eps is in it: x r^3 (x . dy) = r y (y . dy)

Rows that no sequence owns are not read forward: y = 0 and r = 0 there, and so dx = 0.

Shapes   x, y, dy, dx [N, H, K] bf16 or fp16; r [N, H] fp32; cu [S + 1] int32. x may have any strides between tokens and heads that are
         multiples of 8 elements (slices of a joint projection are read in place); the others are contiguous. N, H, K (64 or 128), S,
         strides and eps are run-time values.
Roles    one: 256 threads, K / 8 lanes a row with 16 bytes each; four rows of a group of lanes are loaded before the first is worked on.
         blockIdx.y picks q or k; blocks walk the rows with stride gridDim.x
Shared memory    none
Barriers         none: a row is summed by shuffles
Schedule of four rows    load (and y, r) | sum of squares (y . dy) | scale | store
"""

import functools
from dataclasses import dataclass

import tilelang.language as T
import torch

from qla.kernels.ws import PASS_CONFIGS, compile_kernel, device_source, once_per_config

THREADS = 256


@dataclass(frozen=True)
class L2NormConfig:
    """Everything fixed at compile time. Equal configs share one compiled kernel."""

    dtype: str = "bfloat16"
    backward: bool = False

    def __post_init__(self) -> None:
        if self.dtype not in ("bfloat16", "float16"):
            raise ValueError(f"dtype must be bfloat16 or float16, got {self.dtype}")

    @property
    def name(self) -> str:
        return f"l2norm_{'bwd' if self.backward else 'fwd'}_{'bf16' if self.dtype == 'bfloat16' else 'f16'}"

    threads = THREADS
    smem_bytes = 0


CONFIGS = tuple(L2NormConfig(dtype, backward) for dtype in ("bfloat16", "float16") for backward in (False, True))


def prim_func(cfg: L2NormConfig):
    """The kernel, for `tilelang.compile` or for lowering without a GPU."""
    return backward_func(cfg) if cfg.backward else forward_func(cfg)


def forward_func(cfg: L2NormConfig):
    N, H, D, q_size, k_size, cu_size = T.dynamic("N, H, D, q_size, k_size, cu_size")
    function = f"qla_l2norm::normalize<{str(cfg.dtype == 'float16').lower()}>"

    @T.prim_func
    def l2norm_kernel(
        Q: T.Tensor((q_size,), cfg.dtype),
        K: T.Tensor((k_size,), cfg.dtype),
        Cu: T.Tensor((cu_size,), "int32"),
        Yq: T.Tensor((N, H, D), cfg.dtype),
        Yk: T.Tensor((N, H, D), cfg.dtype),
        Rq: T.Tensor((N, H), "float32"),
        Rk: T.Tensor((N, H), "float32"),
        # run-time; num_seqs -1: every row is owned
        q_token: T.int64,
        q_head: T.int32,
        k_token: T.int64,
        k_head: T.int32,
        num_seqs: T.int32,
        eps: T.float32,
        num_blocks: T.int32,
    ):
        with T.Kernel(num_blocks, 2, threads=THREADS) as (block, which):
            T.import_source(device_source(__file__))
            place = (num_seqs, N, H, D, eps, block, num_blocks, T.get_thread_binding())
            if which == 0:
                own = (T.access_ptr(Q, "r"), q_token, q_head, T.access_ptr(Yq, "w"), T.access_ptr(Rq, "w"), T.access_ptr(Cu, "r"))
                T.evaluate(T.call_extern("int32", function, *own, *place))
            else:
                own = (T.access_ptr(K, "r"), k_token, k_head, T.access_ptr(Yk, "w"), T.access_ptr(Rk, "w"), T.access_ptr(Cu, "r"))
                T.evaluate(T.call_extern("int32", function, *own, *place))

    return l2norm_kernel


def backward_func(cfg: L2NormConfig):
    N, H, D = T.dynamic("N, H, D")
    rows = (N, H, D)
    function = f"qla_l2norm::differentiate<{str(cfg.dtype == 'float16').lower()}>"

    @T.prim_func
    def l2norm_backward_kernel(
        DYq: T.Tensor(rows, cfg.dtype),
        DYk: T.Tensor(rows, cfg.dtype),
        Yq: T.Tensor(rows, cfg.dtype),
        Yk: T.Tensor(rows, cfg.dtype),
        Rq: T.Tensor((N, H), "float32"),
        Rk: T.Tensor((N, H), "float32"),
        DQ: T.Tensor(rows, cfg.dtype),
        DK: T.Tensor(rows, cfg.dtype),
        num_blocks: T.int32,
    ):
        with T.Kernel(num_blocks, 2, threads=THREADS) as (block, which):
            T.import_source(device_source(__file__))
            place = (N * H, D, block, num_blocks, T.get_thread_binding())
            if which == 0:
                inputs = (T.access_ptr(DYq, "r"), T.access_ptr(Yq, "r"), T.access_ptr(Rq, "r"))
                T.evaluate(T.call_extern("int32", function, *inputs, T.access_ptr(DQ, "w"), *place))
            else:
                inputs = (T.access_ptr(DYk, "r"), T.access_ptr(Yk, "r"), T.access_ptr(Rk, "r"))
                T.evaluate(T.call_extern("int32", function, *inputs, T.access_ptr(DK, "w"), *place))

    return l2norm_backward_kernel


@once_per_config
def build(cfg: L2NormConfig):
    """The compiled kernel of a config."""
    return compile_kernel(lambda: prim_func(cfg), PASS_CONFIGS)


@functools.cache
def config_for(dtype: torch.dtype, backward: bool) -> L2NormConfig:
    return L2NormConfig(str(dtype).removeprefix("torch."), backward)
