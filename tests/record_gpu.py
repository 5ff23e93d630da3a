"""pytest plugin: one JSON line for a run of the GPU tests.

    python -m pytest -p tests.record_gpu -m gpu --record bench/results/gpu_tests.jsonl

The line has commit (QLA_COMMIT where there is no git checkout), gpu, torch, tilelang, date, passed, failed, skipped and
seconds; failed counts errors outside a test's own code too. A run that is ended before its time, by Ctrl-C or by a limit that
sends SIGTERM, leaves its line as well, with the number of tests that were not run as "unfinished"; one that was killed, or
collects nothing, leaves none.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from bench.facts import append_line, environment

_STARTED = pytest.StashKey[float]()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.getgroup("qla").addoption("--record", type=Path, default=None, metavar="FILE", help="append one JSON line about the run")


def pytest_configure(config: pytest.Config) -> None:
    config.stash[_STARTED] = time.monotonic()
    if config.getoption("--record") is not None and not hasattr(config, "workerinput"):
        signal.signal(signal.SIGTERM, signal.default_int_handler)  # as Ctrl-C, on which pytest still reports


def make_line(stats: Mapping[str, Sequence[Any]], seconds: float, facts: Mapping[str, Any], collected: int = 0) -> dict[str, Any]:
    """The record of a run from the terminal reporter's lists of reports; collected: tests that were to run."""
    counts = {
        "passed": len(stats.get("passed", [])),
        "failed": len(stats.get("failed", [])) + len(stats.get("error", [])),
        "skipped": len(stats.get("skipped", [])),
    }
    # An error may come besides a test's own report.
    unfinished = collected - counts["passed"] - counts["skipped"] - len(stats.get("failed", [])) - len(stats.get("error", []))
    order = ("commit", "gpu", "torch", "tilelang")
    line = {**{key: facts.get(key) for key in order}, **counts, "seconds": round(seconds, 1), "date": facts.get("date")}
    return line | ({"unfinished": unfinished} if unfinished > 0 else {})


def _collected(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> int:
    """Tests that were to run: pytest-xdist's controller knows from its workers."""
    distributed = config.pluginmanager.get_plugin("dsession")
    if distributed is not None:
        return len(getattr(getattr(distributed, "sched", None), "collection", None) or [])
    return terminalreporter._numcollected - len(terminalreporter.stats.get("deselected", []))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    path = config.getoption("--record")
    if path is None or hasattr(config, "workerinput"):  # pytest-xdist: the controller has the reports of all workers
        return
    line = make_line(terminalreporter.stats, time.monotonic() - config.stash[_STARTED], environment(), _collected(terminalreporter, config))
    if line["passed"] + line["failed"] + line["skipped"] == 0:
        return
    append_line(path, line)
    terminalreporter.write_line(f"recorded in {path}: {line['passed']} passed, {line['failed']} failed, {line['skipped']} skipped")
