"""cp_plan's generated code on a CPU (``emulated``) against its description in Python, which test_cp.py holds against the GPU."""

from __future__ import annotations

import pytest
import test_cp as on_gpu

pytest.importorskip("tilelang")
from qla.kernels import cp_plan, launch  # noqa: E402
from tests.emulated import COMPILER, Emulated  # noqa: E402

pytestmark = pytest.mark.skipif(COMPILER is None, reason="needs g++")


def sizes(values):
    """What the kernel takes from its tensors' shapes."""
    (segments, heads, _), (seqs, _) = values["Forward"].shape, values["Ways"].shape
    return {"num_segments": segments, "heads": heads, "num_seqs": seqs}


@pytest.fixture(scope="module")
def emulated(tmp_path_factory):
    return Emulated(cp_plan, cp_plan.CONFIGS[0], tmp_path_factory.mktemp("emulated"), lambda values: (1, 1, 1), sizes)


@pytest.mark.parametrize("packed", [True, False], ids=["packed", "equal"])
@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("value_dim", [128, 64])
@pytest.mark.parametrize("plan", on_gpu.PLANS.values(), ids=on_gpu.PLANS)
def test_items(plan, value_dim, seed, packed, emulated, monkeypatch):
    monkeypatch.setattr(on_gpu, "DEVICE", "cpu")
    monkeypatch.setattr(launch, "launcher", lambda kernel: emulated)
    on_gpu.test_items(plan, value_dim, seed, packed)
