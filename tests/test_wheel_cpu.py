"""What gets installed: the package's own files and nothing else, with the pins that were tested."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Mapping
from email.parser import Parser
from pathlib import Path
from types import MappingProxyType

import pytest

import qla
from qla.kernels import carried

ROOT = Path(__file__).resolve().parents[1]
COMPILED = "qla/kernels/compiled"
NEEDED_TO_BUILD = ("pyproject.toml", "setup.py", "README.md", "LICENSE")


def build_wheel(tmp_path_factory: pytest.TempPathFactory, carries: Mapping[str, bytes] = MappingProxyType({})) -> zipfile.ZipFile:
    """A wheel of a copy of the tree, built with the environment's own setuptools; with files where `make wheel` puts its kernels."""
    pytest.importorskip("setuptools")
    source, out = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("wheel")
    for name in NEEDED_TO_BUILD:
        shutil.copy(ROOT / name, source)
    shutil.copytree(ROOT / "qla", source / "qla", ignore=shutil.ignore_patterns("__pycache__"))
    for name, content in carries.items():
        (source / COMPILED).mkdir(exist_ok=True)
        (source / COMPILED / name).write_bytes(content)
    # Folders that must stay out, as they stand in a checkout.
    for folder in ("tests", "bench"):
        (source / folder).mkdir()
        (source / folder / "__init__.py").touch()
    options = ["--no-build-isolation", "--no-deps", "--no-index", "--wheel-dir", str(out)]
    command = [sys.executable, "-m", "pip", "wheel", *options, str(source)]
    result = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert result.returncode == 0, result.stdout + result.stderr
    (path,) = out.glob("*.whl")
    return zipfile.ZipFile(path)


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> zipfile.ZipFile:
    return build_wheel(tmp_path_factory)


def test_kernels_are_carried_where_they_are_looked_for(tmp_path_factory, wheel):
    files = {"facts.json": b"{}", "cp_plan.so": b"kernel"}
    carrying = build_wheel(tmp_path_factory, files)
    assert {name: carrying.read(f"{COMPILED}/{name}") for name in files} == files
    assert {*carrying.namelist()} - {*wheel.namelist()} == {f"{COMPILED}/{name}" for name in files}
    assert carried.FOLDER == ROOT / COMPILED and carried.FACTS in files
    recipe = (ROOT / "Makefile").read_text().partition("\nwheel:")[2].partition("\n\n")[0]
    assert f"--pack build/wheel/{COMPILED}\n" in recipe and all(name in recipe for name in NEEDED_TO_BUILD)


def test_files_are_the_packages(wheel):
    packed = {name for name in wheel.namelist() if ".dist-info/" not in name}
    files = {path.relative_to(ROOT).as_posix() for path in (ROOT / "qla").rglob("*") if path.is_file() and "__pycache__" not in path.parts}
    assert packed == files
    assert {path.rsplit(".", 1)[-1] for path in packed} <= {"py", "typed", "cuh", "json"}, "no stray kind of file"


def test_metadata(wheel):
    (name,) = [name for name in wheel.namelist() if name.endswith("METADATA")]
    metadata = Parser().parsestr(wheel.read(name).decode())
    assert (metadata["Name"], metadata["Version"]) == ("qla", qla.__version__)
    assert metadata["License-Expression"] == "MIT"
    required = [re.split(r"\s*;", line)[0] for line in metadata.get_all("Requires-Dist") if "extra ==" not in line]
    assert sorted(required) == ["apache-tvm-ffi<0.1.13,>=0.1.12", "numpy>=1.24", "tilelang<0.1.16,>=0.1.15", "torch>=2.8"]


def test_every_module_of_the_wheel_imports(wheel, tmp_path):
    wheel.extractall(tmp_path)
    modules = sorted(
        name.removesuffix(".py").removesuffix("/__init__").replace("/", ".") for name in wheel.namelist() if name.endswith(".py")
    )
    code = "\n".join([
        "import importlib, qla",
        f"assert qla.__file__.startswith({str(tmp_path)!r})",
        f"for name in {modules!r}: importlib.import_module(name)",
    ])  # fmt: skip
    result = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, timeout=300)
    assert result.returncode == 0, result.stderr
