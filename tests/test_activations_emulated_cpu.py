"""The generated code of l2norm and gates on a CPU (``emulated``): what test_activations.py asks of the kernels, on small shapes."""

from __future__ import annotations

import contextlib
import functools

import pytest
import test_activations as on_gpu
import torch
from problems import NAN_FILLED, nan_filled_empty  # noqa: F401

from qla import activations
from qla.device import DeviceSpec

pytest.importorskip("tilelang")
from qla.kernels import gates, l2norm, launch  # noqa: E402
from tests.emulated import COMPILER, Emulated  # noqa: E402

pytestmark = [NAN_FILLED, pytest.mark.skipif(COMPILER is None, reason="needs g++")]

DTYPES = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
GRIDS = {
    l2norm: lambda values: (values["num_blocks"], 2, 1),
    gates: lambda values: (values["num_blocks"], values["groups"], 1),
}


def sizes(values):
    """What the kernels take from their tensors' shapes."""
    shaped = next(values[name] for name in ("Yq", "G", "DG") if name in values)
    blocks = {"num_blocks": len(values["Sums"])} if "Sums" in values else {}
    dim = {"D": shaped.shape[2]} if "Yq" in values else {}
    return {"N": shaped.shape[0], "H" if "Yq" in values else "HV": shaped.shape[1], **dim, **blocks}


@pytest.fixture(scope="module")
def emulate(tmp_path_factory):
    """launcher() of emulated kernels."""

    @functools.cache
    def launcher(kernel, *form):
        module = {"l2norm": l2norm, "gates": gates}[kernel]
        return Emulated(module, module.config_for(*form), tmp_path_factory.mktemp("emulated"), GRIDS[module], sizes)

    return launcher


@pytest.fixture(autouse=True)
def on_the_cpu(monkeypatch, emulate):
    monkeypatch.setattr(on_gpu, "DEVICE", "cpu")
    monkeypatch.setattr(launch, "launcher", emulate)
    monkeypatch.setattr(activations, "device_spec", lambda device: DeviceSpec(index=0, capability=(9, 0), sm_count=2))
    monkeypatch.setattr(torch.cuda, "device", lambda device: contextlib.nullcontext())


@DTYPES
@pytest.mark.parametrize("dim", [128, 64])
@pytest.mark.parametrize("shape", [(1, 1, 1), (2, 35, 2), (1, 9, 5)], ids=str)
def test_norms(shape, dim, dtype, rng):
    on_gpu.test_norms(shape, dim, dtype, rng)


@pytest.mark.parametrize("dim", [128, 64])
def test_norms_of_slices_of_a_projection(dim, rng):
    on_gpu.test_norms_of_slices_of_a_projection(dim, torch.bfloat16, rng)


@DTYPES
def test_rows_of_zeros_and_extreme_rows(dtype, rng):
    on_gpu.test_rows_of_zeros_and_extreme_rows(dtype, rng)


@pytest.mark.parametrize("offsets", [[0, 40, 40, 90], [0], [0, 130]], ids=str)
def test_rows_without_owner(offsets, rng):
    on_gpu.test_rows_without_owner(offsets, rng)


@pytest.mark.parametrize("with_bias", [True, False], ids=["dt_bias", "no dt_bias"])
@pytest.mark.parametrize("twice", [False, True], ids=["beta", "2 beta"])
@pytest.mark.parametrize("shape", [(1, 1, 1), (2, 70, 3), (1, 40, 48), (1, 5, 300), (1, 3, 1028), (1, 2100, 8)], ids=str)
def test_gates_and_beta(shape, twice, with_bias, rng):
    on_gpu.test_gates_and_beta(shape, twice, with_bias, rng)


@pytest.mark.parametrize("g_dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64], ids=str)
def test_dtypes_are_each_their_own(g_dtype, dtype, rng):
    on_gpu.test_dtypes_are_each_their_own(g_dtype, dtype, rng)


def test_extreme_gates(rng):
    on_gpu.test_extreme_gates(rng)


def test_only_beta(rng):
    on_gpu.test_only_beta(rng)
