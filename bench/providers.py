"""How each implementation is called on a case. Only public entry points; what a caller would convert once is converted before timing."""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from bench.cases import Case
from bench.facts import package_version
from bench.timing import Start, at_once
from qla.autocp import Plan

# Forward: o [1, T, HV, 128], final state [S, HV, 128, 128] with K first. Backward: dq, dk, dv, dg, dbeta in the inputs' shapes.
Outputs = tuple[Tensor, ...]
Operation = Callable[..., tuple[Tensor, Tensor]]  # (q, k, v, g, beta, output_final_state=...) to (o, final state)


@dataclass(frozen=True)
class Call:
    """`start` does what comes before and returns what is timed; `outputs` turns the result of that into what is checked."""

    start: Start
    outputs: Callable[[object], Outputs]


@dataclass(frozen=True)
class Provider:
    """name, the distributions whose version stands for it, the module that must import, and how to prepare a case.

    prepare_backward: the same for the backward pass; None where there is none.
    """

    name: str
    distributions: tuple[str, ...]
    module: str
    prepare: Callable[[Case], Call]
    prepare_backward: Callable[[Case], Call] | None = None

    @property
    def version(self) -> str | None:
        """Version of the distribution, else the module's own __version__ (packages unpacked without metadata)."""
        return package_version(*self.distributions) or getattr(importlib.import_module(self.module.split(".")[0]), "__version__", None)

    def import_error(self) -> str | None:
        """Why the provider cannot be used, or None."""
        try:
            importlib.import_module(self.module)
        except Exception as error:  # peers fail at import in many ways: no driver, a missing library, a version check
            return f"{type(error).__name__}: {error}".splitlines()[0]
        return None


def _as_tuple(result: object) -> Outputs:
    return tuple(result)  # type: ignore[call-overload, no-any-return]


def _forward(operation: Operation, case: Case) -> Call:
    return Call(at_once(lambda: operation(case.q, case.k, case.v, case.g, case.beta, output_final_state=True)), _as_tuple)


def _backward(operation: Operation, case: Case) -> Call:
    """The backward pass alone, from o's gradient; nothing flows through the final state, which is not asked for."""

    def start() -> Callable[[], object]:
        # Leaves of this forward pass alone: autograd remembers the stream on which a leaf was first used.
        leaves = [x.detach().requires_grad_() for x in (case.q, case.k, case.v, case.g, case.beta)]
        with torch.enable_grad():
            o, _ = operation(*leaves, output_final_state=False)
        return lambda: torch.autograd.grad(o, leaves, case.do, retain_graph=True)

    return Call(start, _as_tuple)


def _both(name: str, distributions: tuple[str, ...], module: str, operation: Callable[[Case], Operation]) -> Provider:
    """A provider that is called alike in both directions: `operation` gives its function, with the options of the case set."""
    return Provider(
        name,
        distributions,
        module,
        lambda case: _forward(operation(case), case),
        lambda case: _backward(operation(case), case),
    )


def _qla(case: Case, auto_cp: bool | Plan = True) -> Operation:
    from qla import chunk_gated_delta_rule

    cu_seqlens = None if case.cu_seqlens is None else case.cu_seqlens.int()  # what the kernels read; int64 is converted in each call
    cu_seqlens_cpu = None if cu_seqlens is None else cu_seqlens.cpu()  # the planner then knows the lengths
    return partial(chunk_gated_delta_rule, scale=case.scale, cu_seqlens=cu_seqlens, cu_seqlens_cpu=cu_seqlens_cpu, auto_cp=auto_cp)


def own_call(case: Case, plan: Plan, backward: bool) -> Call:
    """Our forward or backward pass with this plan."""
    operation = _qla(case, plan)
    return _backward(operation, case) if backward else _forward(operation, case)


def _fla(case: Case) -> Operation:
    from fla.ops.gated_delta_rule import chunk_gated_delta_rule

    return partial(chunk_gated_delta_rule, scale=case.scale, cu_seqlens=case.cu_seqlens)


def _flash_qla(case: Case, auto_cp: bool = True) -> Operation:
    from flash_qla import chunk_gated_delta_rule

    return partial(chunk_gated_delta_rule, scale=case.scale, cu_seqlens=case.cu_seqlens, auto_cp=auto_cp)


def _prepare_flashinfer(case: Case) -> Call:
    from flashinfer.gdn_prefill import chunk_gated_delta_rule

    # Packed [T, heads, D] tensors, linear gates, and offsets also for one sequence; its state is V first.
    q, k, v = (x[0].contiguous() for x in (case.q, case.k, case.v))
    alpha, beta = case.g[0].exp().contiguous(), case.beta[0].contiguous()
    cu_seqlens, longest = case.packed_cu_seqlens, max(case.shape.sequence_lengths)

    def run() -> object:
        return chunk_gated_delta_rule(
            *(q, k, v, alpha, beta),
            scale=case.scale,
            output_final_state=True,
            cu_seqlens=cu_seqlens,
            use_cp="auto",
            max_seqlen=longest,
        )

    def outputs(result: object) -> Outputs:
        o, state = _as_tuple(result)
        return o.unsqueeze(0), state.transpose(-1, -2)

    return Call(at_once(run), outputs)


def use_own_path_of_fla() -> None:
    """fla hands over to flash-qla where that is installed; the switch is read when fla is imported or first called."""
    os.environ["FLA_FLASH_QLA"] = "0"


PROVIDERS: dict[str, Provider] = {
    provider.name: provider
    for provider in (
        _both("qla", ("qla",), "qla", _qla),
        _both("qla_whole", ("qla",), "qla", partial(_qla, auto_cp=False)),  # no sequence cut
        _both("fla", ("fla-core", "flash-linear-attention"), "fla.ops.gated_delta_rule", _fla),
        _both("flash_qla", ("flash-qla",), "flash_qla", _flash_qla),
        _both("flash_qla_nocp", ("flash-qla",), "flash_qla", partial(_flash_qla, auto_cp=False)),
        Provider("flashinfer", ("flashinfer-python",), "flashinfer.gdn_prefill", _prepare_flashinfer),
    )
}
