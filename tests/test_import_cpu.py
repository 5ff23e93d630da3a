"""Importing the package is light: no GPU is needed or touched, and TileLang stays out until a kernel runs."""

from __future__ import annotations

import os
import subprocess
import sys

import torch

import qla
from qla import checks


def run_python(code: str) -> str:
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment, timeout=300)
    assert result.returncode == 0, result.stderr
    return result.stdout


def test_import_makes_no_cuda_context_and_loads_no_tilelang():
    out = run_python(
        "import sys, torch, qla\n"
        "assert not torch.cuda.is_initialized()\n"
        "loaded = [name for name in ('tilelang', 'tvm', 'tvm_ffi', 'qla.kernels') if name in sys.modules]\n"
        "print(loaded)"
    )
    assert out.strip() == "[]"


def test_launching_needs_no_tilelang():
    """Only what is not carried does."""
    out = run_python(
        "import sys, torch\n"
        "from qla.kernels import carried, launch\n"
        "print(carried.usable(), [name for name in ('tilelang', 'tvm', 'tvm_ffi') if name in sys.modules])"
    )
    assert out.strip() == "{} []"


def test_import_leaves_torchs_compiler_alone():
    """It takes longer than all else in the package; what marks a function for it is set by hand, and is what its decorator sets."""
    assert run_python("import sys, torch, qla\nprint('torch._dynamo' in sys.modules)").strip() == "False"

    def marked() -> None: ...

    assert vars(torch.compiler.assume_constant_result(marked)) == vars(checks._compute_capability) != {}


def test_every_module_imports_without_a_gpu():
    out = run_python(
        "import importlib, pkgutil, torch, qla\n"
        "names = [m.name for m in pkgutil.walk_packages(qla.__path__, 'qla.')]\n"
        "for name in names: importlib.import_module(name)\n"
        "assert not torch.cuda.is_initialized()\n"
        "print(*names)"
    )
    host = ("activations", "api", "autocp", "autograd", "checks", "costs", "demo", "device", "ops", "reference", "startup")
    others = ("integrations.fla", "integrations.transformers", "kernels")
    assert {f"qla.{name}" for name in (*host, *others)} <= set(out.split())


def test_public_names():
    assert {"chunk_gated_delta_rule", "chunk_gated_delta_rule_fwd", "unsupported_reason", "__version__"} <= set(qla.__all__)
    for name in qla.__all__:
        assert getattr(qla, name) is not None
    assert qla.chunk_gdn is qla.chunk_gated_delta_rule
