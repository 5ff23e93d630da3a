"""Compiling the peers' kernels ahead: what is called in which process, and that no tuning result is kept."""

from __future__ import annotations

import os
import sys
from types import SimpleNamespace

import pytest
import torch
from test_bench_cpu import SMALL, fake_provider

from bench import prepare
from bench.providers import PROVIDERS
from bench.shapes import BACKWARD_SETS, SETS, Shape


def test_tasks_cover_head_counts_and_forms():
    tasks = prepare.make_tasks(SETS["sweep"], ["fla", "flashinfer"], ["fwd", "bwd"])
    assert len(tasks) == 2 * 9 * 2
    assert {(task.provider, task.directions) for task in tasks} == {("fla", ("fwd", "bwd")), ("flashinfer", ("fwd",))}
    for task in tasks:
        assert len({(shape.heads, len(shape.sequence_lengths) > 1) for shape in task.shapes}) == 1
        longest, shortest = (max(shape.sequence_lengths) for shape in task.shapes)
        assert longest > shortest
    assert prepare.make_tasks([Shape(1, 2, "64")], ["flashinfer"], ["bwd"]) == []
    assert prepare.make_tasks([Shape(1, 2, "64")], ["fla"], ["bwd"]) == [prepare.Task("fla", (Shape(1, 2, "64"),), ("bwd",))]
    assert len(prepare.make_tasks(BACKWARD_SETS["cp"], ["fla"], ["bwd"])) == 8


def test_no_tuning_is_kept(monkeypatch):
    """fla keeps no results, and a candidate is launched and not timed."""
    monkeypatch.setenv("TRITON_CACHE_AUTOTUNING", "1")
    monkeypatch.setenv("FLA_CACHE_RESULTS", "1")
    monkeypatch.setenv("FLA_FLASH_QLA", "1")
    triton_testing = SimpleNamespace(do_bench=None)
    monkeypatch.setitem(sys.modules, "triton", SimpleNamespace(testing=triton_testing))
    monkeypatch.setitem(sys.modules, "triton.testing", triton_testing)
    prepare.start_worker()
    assert os.environ["FLA_CACHE_RESULTS"] == os.environ["FLA_FLASH_QLA"] == "0" and "TRITON_CACHE_AUTOTUNING" not in os.environ
    calls: list = []
    assert triton_testing.do_bench(lambda: calls.append(1), quantiles=(0.5, 0.2, 0.8)) == [1.0] * 3
    assert triton_testing.do_bench(lambda: calls.append(1), warmup=5) == 1.0 and len(calls) == 2


@pytest.mark.filterwarnings("ignore:qla runs this call through PyTorch")
def test_a_task_calls_its_provider_and_notes_what_fails(monkeypatch):
    shapes = (SMALL, Shape(1, 2, "64"))
    assert prepare.do_task(prepare.Task("qla", shapes, ("fwd", "bwd")), "cpu") == ""
    monkeypatch.setitem(PROVIDERS, "fla", fake_provider("fla", raises=RuntimeError("cannot\nat all")))
    assert prepare.do_task(prepare.Task("fla", shapes, ("fwd",)), "cpu") == "70+64 fwd: RuntimeError: cannot; 64 fwd: RuntimeError: cannot"


def test_processes_report_and_the_budget_ends_them(capsys):
    """Here every call fails, for want of a GPU or of the package: what counts is that each task is accounted for."""
    tasks = [prepare.Task("flash_qla_nocp", (Shape(1, 2, str(length)),), ("fwd",)) for length in (64, 65)]
    if not torch.cuda.is_available():
        assert prepare.run_tasks(tasks, 1) == [task.name for task in tasks]
        assert "flash_qla_nocp 1/2 64: 64 fwd: " in capsys.readouterr().out
    assert prepare.run_tasks(tasks, 1, budget=0.01) == [task.name for task in tasks]
