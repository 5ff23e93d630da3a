"""qla as a backend of flash-linear-attention (fla).

After ``qla.integrations.fla.enable()``, fla's ``chunk_gated_delta_rule`` runs through qla's kernels where they take the call. fla
asks its backends in the order of their priorities, and the first whose verifier accepts a call gets it; the interface is that of
``fla.backends`` in fla 0.6 and of ``fla.ops.backends`` in fla 0.5.2 (https://github.com/fla-org/flash-linear-attention). Before
0.5.2 fla asks nobody about this function.
"""

from __future__ import annotations

import inspect
import os
import re
import threading
import warnings
from importlib import import_module
from typing import Any, ClassVar

from torch import Tensor

from qla import api
from qla.checks import check_inputs, check_scale, unsupported_reason

OPERATION = "gated_delta_rule"
ENTRY_POINT = "chunk_gated_delta_rule"
SWITCH = "FLA_QLA"
FIRST_VERSION, END_OF_VERSIONS = (0, 5, 2), (0, 7)

_TENSORS = ("q", "k", "v", "g", "beta")
# What fla takes through its own **kwargs, and qla through its.
_HONOURED_KEYWORDS = ("use_gate_in_kernel", "A_log", "dt_bias", "chunk_size", "transpose_state_layout")
_HONOURED = {*inspect.signature(api.chunk_gated_delta_rule).parameters, *_HONOURED_KEYWORDS} - {"kwargs"}

_lock = threading.RLock()
_enabled = False


def enable() -> None:
    """Makes qla a backend of fla's ``chunk_gated_delta_rule``, asked before flash_qla.

    A call goes to qla, with every argument as given, unless ``FLA_QLA=0`` is in the environment (read at each call) or there is a reason
    against it: one of ``unsupported_reason`` (not on Hopper, float32 or float64, heads larger than 128), ``cp_context``, a keyword
    that qla does not know, or arguments that qla's checks refuse. Then fla goes on to its other backends and its own kernels, and
    logs a reason once (level INFO).

    Imports fla. May be called again and from several threads.

    Raises ImportError without fla, and RuntimeError for another fla than 0.5.2 and 0.6. Warns with a RuntimeWarning when
    FLA_DISABLE_BACKEND_DISPATCH=1 is in the environment, with which fla asks no backend.
    """
    global _enabled
    if os.environ.get("FLA_DISABLE_BACKEND_DISPATCH") == "1":
        warnings.warn("FLA_DISABLE_BACKEND_DISPATCH=1: fla asks no backend, so no call reaches qla", RuntimeWarning, stacklevel=2)
    with _lock:
        if not _enabled:
            _register()
            _enabled = True


def disable() -> None:
    """Ends what ``enable`` began: no call of fla's goes to qla any more. Calls on their way in other threads are not disturbed.

    The entry in fla's registry stays, switched off. Does nothing if qla is not enabled, and does not import fla.
    """
    global _enabled
    with _lock:
        _enabled = False


class _Backend:
    """What qla's backend adds to fla's ``BaseBackend``, from which it gets the rest (``_register``)."""

    backend_type = "qla"
    package_name = "qla"
    env_var = SWITCH
    priority = 1  # lower goes first; flash_qla has 3
    positional: ClassVar[tuple[str, ...]]  # names of the arguments of fla's function, in its order

    @classmethod
    def is_enabled(cls) -> bool:
        """Whether fla asks at all. A class method: fla 0.5.2 calls it on the class, 0.6 on an object."""
        return _enabled and os.environ.get(SWITCH, "1") != "0"

    def chunk_gated_delta_rule_verifier(self, *args: Any, **kwargs: Any) -> tuple[bool, str | None]:
        """(True, None), or False and why qla does not serve this call. Arguments as fla's function got them."""
        reason = self._refusal(args, kwargs)
        return reason is None, reason

    def chunk_gated_delta_rule(self, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor | None]:
        """``qla.chunk_gated_delta_rule``; by name, as its order is that of fla 0.6 only."""
        return api.chunk_gated_delta_rule(**dict(zip(self.positional, args, strict=False)), **kwargs)

    def _refusal(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> str | None:
        """Never launches anything. A call that is wrong goes on to fla as well, so that its errors are fla's."""
        if len(args) > len(self.positional):
            return f"{ENTRY_POINT} takes {len(self.positional)} arguments by position, got {len(args)}"
        call = {**dict(zip(self.positional, args, strict=False)), **kwargs}
        if len(call) < len(args) + len(kwargs):
            twice = [name for name in self.positional[: len(args)] if name in kwargs]
            return f"given by position and by name: {', '.join(twice)}"
        for name in call:
            if name not in _HONOURED:
                return f"qla does not know the argument {name}"
        missing = [name for name in _TENSORS if name not in call]
        if missing:
            return f"missing arguments: {', '.join(missing)}"
        if call.get("cp_context") is not None:
            return "qla does not support context parallelism over several GPUs (cp_context)"

        q, k, v, g, beta = (call[name] for name in _TENSORS)
        initial_state, cu_seqlens, cu_seqlens_cpu = (call.get(name) for name in ("initial_state", "cu_seqlens", "cu_seqlens_cpu"))
        state_v_first = bool(call.get("state_v_first", False) or call.get("transpose_state_layout", False))
        try:
            problem = check_inputs(q, k, v, g, beta, initial_state, state_v_first, cu_seqlens, cu_seqlens_cpu)
            check_scale(call.get("scale"), problem.key_dim)
        except (TypeError, ValueError) as error:
            return f"qla's checks: {error}"
        return unsupported_reason(q, k, v)


def _register() -> None:
    fla: Any = import_module("fla")
    version = str(getattr(fla, "__version__", "unknown"))
    number = re.match(r"(\d+)\.(\d+)(?:\.(\d+))?", version)
    if number is None or not FIRST_VERSION <= tuple(int(part or 0) for part in number.groups()) < END_OF_VERSIONS:
        raise RuntimeError(f"qla.integrations.fla supports fla 0.5.2 and 0.6, got fla {version}")

    function: Any = getattr(import_module(f"fla.ops.{OPERATION}"), ENTRY_POINT)
    parameters = inspect.signature(function).parameters.values()
    positional = tuple(p.name for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD)
    try:
        backends: Any = import_module("fla.backends")
    except ModuleNotFoundError as error:
        if error.name != "fla.backends":
            raise
        registry: Any = import_module(f"fla.ops.{OPERATION}.backends").gdr_registry
        registry.register(_backend_class(import_module("fla.ops.backends"), positional)())
    else:
        backends.register(OPERATION)(_backend_class(backends, positional))


def _backend_class(backends: Any, positional: tuple[str, ...]) -> type[Any]:
    """The class that fla gets, derived from the ``BaseBackend`` of its module ``backends``."""
    return type("QlaBackend", (_Backend, backends.BaseBackend), {"positional": positional})
