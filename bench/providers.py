"""How each implementation is called on a case. Only public entry points; what a caller would convert once is converted before timing."""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from bench.cases import Case
from bench.facts import package_version

Outputs = tuple[Tensor, Tensor]  # o [1, T, HV, 128], final state [S, HV, 128, 128] with K first


@dataclass(frozen=True)
class Call:
    """`run` is what is timed; `outputs` turns its result into (o, K-first final state)."""

    run: Callable[[], object]
    outputs: Callable[[object], Outputs]


@dataclass(frozen=True)
class Provider:
    """name, the distributions whose version stands for it, the module that must import, and how to prepare a case."""

    name: str
    distributions: tuple[str, ...]
    module: str
    prepare: Callable[[Case], Call]

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


def _as_pair(result: object) -> Outputs:
    o, state = result  # type: ignore[misc]
    return o, state


def _prepare_qla(case: Case) -> Call:
    from qla import chunk_gated_delta_rule

    arguments = (case.q, case.k, case.v, case.g, case.beta)
    cu_seqlens = None if case.cu_seqlens is None else case.cu_seqlens.int()  # what the kernels read; int64 is converted in each call
    return Call(lambda: chunk_gated_delta_rule(*arguments, scale=case.scale, output_final_state=True, cu_seqlens=cu_seqlens), _as_pair)


def _prepare_fla(case: Case) -> Call:
    from fla.ops.gated_delta_rule import chunk_gated_delta_rule

    arguments = (case.q, case.k, case.v, case.g, case.beta)
    return Call(lambda: chunk_gated_delta_rule(*arguments, scale=case.scale, output_final_state=True, cu_seqlens=case.cu_seqlens), _as_pair)


def _prepare_flash_qla(case: Case, auto_cp: bool = True) -> Call:
    from flash_qla import chunk_gated_delta_rule

    def run() -> object:
        return chunk_gated_delta_rule(
            *(case.q, case.k, case.v, case.g, case.beta),
            scale=case.scale,
            output_final_state=True,
            cu_seqlens=case.cu_seqlens,
            auto_cp=auto_cp,
        )

    return Call(run, _as_pair)


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
        o, state = _as_pair(result)
        return o.unsqueeze(0), state.transpose(-1, -2)

    return Call(run, outputs)


def use_own_path_of_fla() -> None:
    """fla hands over to flash-qla where that is installed; the switch is read when fla is imported or first called."""
    os.environ["FLA_FLASH_QLA"] = "0"


PROVIDERS: dict[str, Provider] = {
    provider.name: provider
    for provider in (
        Provider("qla", ("qla",), "qla", _prepare_qla),
        Provider("fla", ("fla-core", "flash-linear-attention"), "fla.ops.gated_delta_rule", _prepare_fla),
        Provider("flash_qla", ("flash-qla",), "flash_qla", _prepare_flash_qla),
        Provider("flash_qla_nocp", ("flash-qla",), "flash_qla", lambda case: _prepare_flash_qla(case, auto_cp=False)),
        Provider("flashinfer", ("flashinfer-python",), "flashinfer.gdn_prefill", _prepare_flashinfer),
    )
}
