"""What a call may look like: checks of the arguments, and whether the kernels take it.

Every check runs on the host before any launch and reads shapes, dtypes and devices only; the contents of cu_seqlens are
looked at when they are on the CPU anyway, or when the environment variable QLA_DEBUG is 1 (which waits for the device).
"""

from __future__ import annotations

import math
import numbers
import os
import warnings
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from qla.device import device_spec

KERNEL_CAPABILITY = "9.0"
KERNEL_DTYPES = (torch.bfloat16, torch.float16)
RECURRENT_DTYPES = (*KERNEL_DTYPES, torch.float32)
KERNEL_DIMS = (64, 128)  # head sizes K and V of the kernels, each by itself
MAX_TOKENS = 2**31 - 1  # token rows are int32 in the kernels; element offsets are 64-bit
MAX_RECURRENT_HEADS = 2**16 - 1  # of values: a dimension of the recurrent kernel's grid


@dataclass(frozen=True)
class Problem:
    """The size of one call, after the checks: plain numbers, no tensors.

    dtype: of q, k, v and o.
    batch, tokens: B and T of the inputs as given; batch is 1 when varlen.
    key_heads, value_heads: H and HV.
    key_dim, value_dim: K and V as given, before padding.
    num_seqs: number of sequences S: batch, or the packed sequences of cu_seqlens.
    varlen: whether cu_seqlens is given.
    """

    dtype: torch.dtype
    batch: int
    tokens: int
    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    num_seqs: int
    varlen: bool

    @property
    def seq_len(self) -> int:
        """Tokens of each sequence, or 0 when cu_seqlens tells."""
        return 0 if self.varlen else self.tokens

    def state_shape(self, state_v_first: bool) -> tuple[int, int, int, int]:
        """[S, HV, K, V], or [S, HV, V, K] if state_v_first."""
        inner = (self.value_dim, self.key_dim) if state_v_first else (self.key_dim, self.value_dim)
        return (self.num_seqs, self.value_heads, *inner)


def kernel_dim(size: int) -> int:
    """The head size of the kernels that one of ``size``, up to 128, is padded to: the least that holds it."""
    return next(dim for dim in KERNEL_DIMS if size <= dim)


def _compute_capability(device: torch.device) -> str:
    """Such as "9.0"."""
    return "{}.{}".format(*device_spec(device).capability)


# torch.compile calls it while it traces; a string it can compare. The decorator that says so, torch.compiler.assume_constant_result, sets
# this attribute and no more (tested), but imports torch's compiler, at every start, needed or not.
_compute_capability._dynamo_marked_constant = True  # type: ignore[attr-defined]


def unsupported_reason(q: Tensor, k: Tensor, v: Tensor, *_arguments: object, **_options: object) -> str | None:
    """Why the kernels do not take these inputs, or None if they do. Never launches anything.

    q, k: [B, T, H, K]; v: [B, T, HV, V]. The other arguments of ``chunk_gated_delta_rule`` may follow; they do not matter.
    A call with a reason runs through PyTorch instead, with one warning for each reason.
    """
    if type(q) is Tensor and not torch.compiler.is_compiling():
        return _reason_kept(device_spec, q.device, q.dtype, k.shape[-1], v.shape[-1], KERNEL_DTYPES)
    return _reason_of(q.device, q.dtype, k.shape[-1], v.shape[-1], KERNEL_DTYPES)


def recurrent_unsupported_reason(q: Tensor, k: Tensor, v: Tensor) -> str | None:
    """The same for ``fused_recurrent_gated_delta_rule``, whose kernel takes float32 as well."""
    if type(q) is Tensor and not torch.compiler.is_compiling():
        return _reason_kept(device_spec, q.device, q.dtype, k.shape[-1], v.shape[-1], RECURRENT_DTYPES)
    return _reason_of(q.device, q.dtype, k.shape[-1], v.shape[-1], RECURRENT_DTYPES)


def _reason_of(device: torch.device, dtype: torch.dtype, key_dim: int, value_dim: int, dtypes: tuple[torch.dtype, ...]) -> str | None:
    if device.type != "cuda":
        return f"the kernels need a CUDA device, and q is on {device}"
    capability = _compute_capability(device)
    if capability != KERNEL_CAPABILITY:
        return f"the kernels need compute capability {KERNEL_CAPABILITY} (Hopper), and {device} has {capability}"
    if dtype not in dtypes:
        *others, last = (_name(taken) for taken in dtypes)
        return f"the kernels take {', '.join(others)} and {last}, and q is {_name(dtype)}"
    for dim, size in (("K", key_dim), ("V", value_dim)):
        if size > KERNEL_DIMS[-1]:
            return f"the kernels take head sizes up to {KERNEL_DIMS[-1]}, and {dim} is {size}"
    return None


@lru_cache(maxsize=1024)
def _reason_kept(
    spec: object, device: torch.device, dtype: torch.dtype, key_dim: int, value_dim: int, dtypes: tuple[torch.dtype, ...]
) -> str | None:
    """``_reason_of``, once for each form of a call; spec: where the facts of a device come from."""
    return _reason_of(device, dtype, key_dim, value_dim, dtypes)


def check_inputs(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    initial_state: Tensor | None,
    state_v_first: bool,
    cu_seqlens: Tensor | None,
    cu_seqlens_cpu: Tensor | None,
) -> Problem:
    """Checks the tensors of one call and returns its size.

    The shapes are those of ``chunk_gated_delta_rule``. Raises TypeError for something that is not a tensor or has a
    wrong dtype, ValueError for a wrong shape, device or value; the message names the argument, the rule and what it got.

    Tensors with the shapes, dtypes and devices of a call that passed are not checked again, but for the values in cu_seqlens.
    """
    passed = None
    if (
        type(q) is type(k) is type(v) is type(g) is type(beta) is Tensor
        and (initial_state is None or type(initial_state) is Tensor)
        and (cu_seqlens is None or type(cu_seqlens) is Tensor)
        and (cu_seqlens_cpu is None or type(cu_seqlens_cpu) is Tensor)
        and not torch.compiler.is_compiling()
    ):
        passed = _passed(
            q.shape, q.dtype, q.device, k.shape, k.dtype, k.device, v.shape, v.dtype, v.device,
            g.shape, g.dtype, g.device, beta.shape, beta.dtype, beta.device,
            None if initial_state is None else (initial_state.shape, initial_state.dtype, initial_state.device, bool(state_v_first)),
            None if cu_seqlens is None else (cu_seqlens.shape, cu_seqlens.dtype, cu_seqlens.device),
            None if cu_seqlens_cpu is None else (cu_seqlens_cpu.shape, cu_seqlens_cpu.dtype, cu_seqlens_cpu.device),
        )  # fmt: skip
        if passed:
            if cu_seqlens is not None:
                _check_values_of_cu_seqlens(cu_seqlens, cu_seqlens_cpu, q.shape[1])
            return passed[0]
    _check_heads(q, k, v)
    for name, x in (("g", g), ("beta", beta)):
        _check_part(name, x, "[B, T, HV]", tuple(v.shape[:3]), q)
    problem = _check_sequences(q, v, initial_state, state_v_first, cu_seqlens, cu_seqlens_cpu)
    if passed is not None:
        passed.append(problem)
    return problem


@lru_cache(maxsize=1024)
def _passed(*facts: object) -> list[Problem]:
    """For one form of a call, a list that is empty until a call of that form has passed the checks, and then holds its size."""
    return []


def check_recurrent_inputs(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None,
    gk: Tensor | None,
    gv: Tensor | None,
    beta: Tensor | None,
    initial_state: Tensor | None,
    state_v_first: bool,
    cu_seqlens: Tensor | None,
    cu_seqlens_cpu: Tensor | None,
) -> Problem:
    """The same for the arguments of ``fused_recurrent_gated_delta_rule``."""
    _check_heads(q, k, v)
    if v.shape[2] > MAX_RECURRENT_HEADS:
        raise ValueError(f"v must have HV <= {MAX_RECURRENT_HEADS}, got HV = {v.shape[2]}")
    rows = tuple(v.shape[:3])
    for name, x, form, shape in (
        ("g", g, "[B, T, HV]", rows),
        ("gk", gk, "[B, T, HV, K]", (*rows, k.shape[3])),
        ("gv", gv, "[B, T, HV, V]", tuple(v.shape)),
    ):
        if x is not None:
            _check_part(name, x, form, shape, q)
    if beta is not None:
        per_column = isinstance(beta, Tensor) and beta.dim() == 4
        _check_part("beta", beta, "[B, T, HV, V]" if per_column else "[B, T, HV]", tuple(v.shape) if per_column else rows, q)
    return _check_sequences(q, v, initial_state, state_v_first, cu_seqlens, cu_seqlens_cpu)


def check_per_head(name: str, x: object, heads: int, device: torch.device) -> None:
    """TypeError unless ``x`` is a floating-point tensor, ValueError unless it has an element for each value head and lies on g's device."""
    _check_floating(name, x)
    assert isinstance(x, Tensor)
    if x.numel() != heads:
        raise ValueError(f"{name} must have HV = {heads} elements, got shape {list(x.shape)}")
    if x.device != device:
        raise ValueError(f"{name} must be on the device of g, {device}, got {x.device}")


def _check_sequences(
    q: Tensor, v: Tensor, initial_state: Tensor | None, state_v_first: bool, cu_seqlens: Tensor | None, cu_seqlens_cpu: Tensor | None
) -> Problem:
    batch, tokens, key_heads, key_dim = q.shape
    num_seqs = batch if cu_seqlens is None else _check_cu_seqlens(q, cu_seqlens, cu_seqlens_cpu)
    if cu_seqlens is None and cu_seqlens_cpu is not None:
        raise ValueError("cu_seqlens_cpu is a copy of cu_seqlens and needs it, got cu_seqlens=None")
    problem = Problem(q.dtype, batch, tokens, key_heads, v.shape[2], key_dim, v.shape[3], num_seqs, cu_seqlens is not None)
    if initial_state is not None:
        _check_initial_state(initial_state, problem, q, state_v_first)
    return problem


def check_shape(name: str, x: object, shape: tuple[int, ...], device: torch.device) -> None:
    """TypeError unless ``x`` is a floating-point tensor, ValueError unless it has this shape and lies on this device."""
    _check_floating(name, x)
    assert isinstance(x, Tensor)
    if tuple(x.shape) != shape:
        raise ValueError(f"{name} must have shape {list(shape)}, got {list(x.shape)}")
    if x.device != device:
        raise ValueError(f"{name} must be on the device of q, {device}, got {x.device}")


def check_scale(scale: object, key_dim: int) -> float:
    """The scale as a float; K^-0.5 for None. TypeError or ValueError unless it is a finite number."""
    if scale is None:
        return math.pow(key_dim, -0.5)
    if not isinstance(scale, numbers.Real):
        raise TypeError(f"scale must be a number or None, got {type(scale).__name__}")
    value = float(scale)
    if not math.isfinite(value):
        raise ValueError(f"scale must be finite, got {value}")
    return value


def check_cu_seqlens_values(values: list[int], tokens: int, name: str = "cu_seqlens") -> None:
    """ValueError unless the values start at 0, never fall and end at or before ``tokens``."""
    if values[0] != 0:
        raise ValueError(f"{name} must start with 0, got {values[0]}")
    for n, (begin, end) in enumerate(zip(values, values[1:], strict=False)):
        if end < begin:
            raise ValueError(f"{name} must not decrease, got {begin} and then {end} at index {n + 1}")
    if values[-1] > tokens:
        raise ValueError(f"{name} must end at or before the number of tokens, {tokens}, got {values[-1]}")


_warned: set[str] = set()


def warn_once(message: str) -> None:
    """A RuntimeWarning the first time this message comes up in the process; it points at the caller of the calling function."""
    if message not in _warned:
        _warned.add(message)
        warnings.warn(message, RuntimeWarning, stacklevel=3)


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _check_floating(name: str, x: object) -> None:
    if not isinstance(x, Tensor):
        raise TypeError(f"{name} must be a tensor, got {type(x).__name__}")
    if x.dtype not in (torch.bfloat16, torch.float16, torch.float32, torch.float64):
        raise TypeError(f"{name} must be bfloat16, float16, float32 or float64, got {_name(x.dtype)}")


def _check_device(name: str, x: Tensor, q: Tensor) -> None:
    if x.device != q.device:
        raise ValueError(f"{name} must be on the device of q, {q.device}, got {x.device}")


def _check_shape(name: str, x: Tensor, form: str, expected: tuple[int, ...]) -> None:
    if tuple(x.shape) != expected:
        raise ValueError(f"{name} must have shape {form} = {list(expected)}, got {list(x.shape)}")


def _check_part(name: str, x: object, form: str, expected: tuple[int, ...], q: Tensor) -> None:
    _check_floating(name, x)
    assert isinstance(x, Tensor)
    _check_shape(name, x, form, expected)
    _check_device(name, x, q)


def _check_heads(q: Tensor, k: Tensor, v: Tensor) -> None:
    """q, k and v: dtypes, shapes and devices."""
    for name, x in (("q", q), ("k", k), ("v", v)):
        _check_floating(name, x)
    for name, x in (("k", k), ("v", v)):
        if x.dtype != q.dtype:
            raise TypeError(f"{name} must have the dtype of q, {_name(q.dtype)}, got {_name(x.dtype)}")
    for name, x, form in (("q", q, "[B, T, H, K]"), ("v", v, "[B, T, HV, V]")):
        if x.dim() != 4:
            raise ValueError(f"{name} must have shape {form}, got {list(x.shape)}")
    batch, tokens, heads, key_dim = q.shape
    value_heads, value_dim = v.shape[2:]
    _check_shape("k", k, "[B, T, H, K]", (batch, tokens, heads, key_dim))
    _check_shape("v", v, "[B, T, HV, V]", (batch, tokens, value_heads, value_dim))
    for name, form, size in (("q", "H", heads), ("q", "K", key_dim), ("v", "HV", value_heads), ("v", "V", value_dim)):
        if size < 1:
            raise ValueError(f"{name} must have {form} >= 1, got {form} = {size}")
    if value_heads % heads:
        raise ValueError(f"v must have a number of heads HV that is a multiple of q's H = {heads}, got HV = {value_heads}")
    if batch * tokens > MAX_TOKENS:
        raise ValueError(f"q must have B * T <= {MAX_TOKENS}, got {batch * tokens}")
    for name, x in (("k", k), ("v", v)):
        _check_device(name, x, q)


def _check_cu_seqlens(q: Tensor, cu_seqlens: Tensor, cu_seqlens_cpu: Tensor | None) -> int:
    """Checks cu_seqlens against q [1, T, H, K]; returns the number of sequences."""
    for name, x in (("cu_seqlens", cu_seqlens), ("cu_seqlens_cpu", cu_seqlens_cpu)):
        if name == "cu_seqlens_cpu" and x is None:
            continue
        if not isinstance(x, Tensor):
            raise TypeError(f"{name} must be a tensor, got {type(x).__name__}")
        if x.dtype not in (torch.int32, torch.int64):
            raise TypeError(f"{name} must be int32 or int64, got {_name(x.dtype)}")
        if x.dim() != 1 or x.numel() < 1:
            raise ValueError(f"{name} must have shape [S + 1], got {list(x.shape)}")
    if q.shape[0] != 1:
        raise ValueError(f"q must have B = 1 when cu_seqlens is given (sequences packed along T), got B = {q.shape[0]}")
    if cu_seqlens.device.type != "cpu":
        _check_device("cu_seqlens", cu_seqlens, q)

    if cu_seqlens_cpu is not None:
        if cu_seqlens_cpu.device.type != "cpu":
            raise ValueError(f"cu_seqlens_cpu must be on the CPU, got {cu_seqlens_cpu.device}")
        _check_shape("cu_seqlens_cpu", cu_seqlens_cpu, "cu_seqlens's", tuple(cu_seqlens.shape))
    if not torch.compiler.is_compiling():  # there are no values while torch.compile traces
        _check_values_of_cu_seqlens(cu_seqlens, cu_seqlens_cpu, q.shape[1])
    return cu_seqlens.numel() - 1


def _check_values_of_cu_seqlens(cu_seqlens: Tensor, cu_seqlens_cpu: Tensor | None, tokens: int) -> None:
    """Where they are on the CPU, or QLA_DEBUG asks for it."""
    if cu_seqlens_cpu is not None:
        check_cu_seqlens_values(cu_seqlens_cpu.tolist(), tokens, "cu_seqlens_cpu")
    if cu_seqlens.device.type == "cpu" or os.environ.get("QLA_DEBUG") == "1":
        values = cu_seqlens.tolist()
        check_cu_seqlens_values(values, tokens)
        if cu_seqlens_cpu is not None and values != cu_seqlens_cpu.tolist():
            raise ValueError(f"cu_seqlens_cpu must equal cu_seqlens, {values}, got {cu_seqlens_cpu.tolist()}")


def _check_initial_state(initial_state: Tensor, problem: Problem, q: Tensor, state_v_first: bool) -> None:
    _check_floating("initial_state", initial_state)
    form = "[S, HV, V, K]" if state_v_first else "[S, HV, K, V]"
    _check_shape("initial_state", initial_state, form, problem.state_shape(state_v_first))
    _check_device("initial_state", initial_state, q)
