"""qla.warmup: what is in the cache is loaded, the rest compiled in other processes, which may share one empty cache."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

import qla
from qla import startup

ROOT = Path(__file__).resolve().parents[1]


@pytest.fixture
def cache(monkeypatch):
    """Stand-ins for ten variants and TileLang's cache: names of what is on disk, and (name, was it there) of each build."""
    state = SimpleNamespace(disk=set(), builds=[], shares=[])
    clock = [0.0]

    def build(cfg):
        state.builds.append((cfg.name, cfg.name in state.disk))
        clock[0] += 0.1 if cfg.name in state.disk else 5.0
        state.disk.add(cfg.name)

    module = SimpleNamespace(build=build)
    configs = [SimpleNamespace(name=f"variant {i}") for i in range(10)]
    monkeypatch.setattr(startup, "variants", lambda only="": [(module, cfg) for cfg in configs if only in cfg.name])
    monkeypatch.setattr(startup.time, "monotonic", lambda: clock[0])

    def elsewhere(names, jobs, total, verbose):
        state.shares.append((names, jobs))
        state.disk.update(names)

    monkeypatch.setattr(startup, "_compile_elsewhere", elsewhere)
    return state


def test_what_is_there_is_loaded(cache):
    cache.disk.update(f"variant {i}" for i in range(10))
    assert qla.warmup(verbose=False) == 10
    assert cache.builds == [(f"variant {i}", True) for i in range(10)] and cache.shares == []


@pytest.mark.parametrize("there", [0, 3])
def test_the_rest_is_compiled_elsewhere(cache, there, capsys):
    cache.disk.update(f"variant {i}" for i in range(there))
    assert qla.warmup(jobs=4) == 10
    assert [name for name, found in cache.builds if not found] == [f"variant {there}"], "one here, to see that the cache lacks it"
    assert cache.shares == [([f"variant {i}" for i in range(there + 1, 10)], 4)]
    assert [name for name, _ in cache.builds] == [f"variant {i}" for i in range(10)]
    assert f"qla: {there + 1} of 10 kernels" in capsys.readouterr().err


def test_some_variants(cache):
    assert qla.warmup("variant 7", verbose=False) == 1 and cache.builds == [("variant 7", False)] and cache.shares == []
    assert qla.warmup("nothing of that name") == 0


def test_bad_jobs():
    with pytest.raises(ValueError, match="jobs must be at least 1, got 0"):
        qla.warmup(jobs=0)


def test_processes_share_one_empty_cache(tmp_path):
    pytest.importorskip("tilelang")
    environment = os.environ | {"TILELANG_CACHE_DIR": str(tmp_path), "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", "import sys; from qla.startup import build; build(sys.argv[1:])", "cp_plan"]
    processes = [subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) for _ in range(4)]
    for process in processes:
        text, _ = process.communicate(timeout=300)
        assert process.returncode == 0 and text.splitlines()[-1] == "cp_plan", text


def test_compiling_elsewhere_leaves_results_in_the_cache(tmp_path, monkeypatch, capsys):
    pytest.importorskip("tilelang")
    monkeypatch.setenv("TILELANG_CACHE_DIR", str(tmp_path))
    startup._compile_elsewhere(["cp_plan"], 3, 5, verbose=True)
    assert "qla: 5 of 5 kernels" in capsys.readouterr().err
    assert any(path.suffix in (".so", ".cubin", ".cu", ".json") for path in tmp_path.rglob("*")), "something was cached"
    with pytest.raises(RuntimeError, match="could not build its kernels(.|\\n)*KeyError"):
        startup._compile_elsewhere(["no such variant"], 1, 1, verbose=False)
