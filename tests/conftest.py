"""Shared fixtures: reproducible random numbers, the GPU gate, and a last line that says what was not run."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator

import pytest
import torch

HOPPER = (9, 0)
_GPU_TESTS_NOT_RUN = pytest.StashKey[int]()


def hopper_available() -> bool:
    """True when the current CUDA device runs the kernels (compute capability 9.0)."""
    return torch.cuda.is_available() and torch.cuda.get_device_capability() == HOPPER


def pytest_configure(config: pytest.Config) -> None:
    config.stash[_GPU_TESTS_NOT_RUN] = 0
    worker = os.environ.get("PYTEST_XDIST_WORKER", "")
    if not worker.startswith("gw"):
        return
    # Threads of several workers on one core wait for each other far longer than they compute.
    torch.set_num_threads(max(1, (os.cpu_count() or 1) // int(os.environ["PYTEST_XDIST_WORKER_COUNT"])))
    if torch.cuda.is_available():
        # One GPU a worker, so that tests in parallel do not time or exhaust each other's memory.
        torch.cuda.set_device(int(worker[2:]) % torch.cuda.device_count())


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Skips tests marked ``gpu`` where the kernels cannot run, unless QLA_TEST_DEVICE=cpu asks for them on the PyTorch path."""
    gpu_items = [item for item in items if item.get_closest_marker("gpu")]
    if not gpu_items or hopper_available() or os.environ.get("QLA_TEST_DEVICE") == "cpu":
        return
    skip = pytest.mark.skip(reason="needs a CUDA device of compute capability 9.0")
    for item in gpu_items:
        item.add_marker(skip)


def pytest_deselected(items: list[pytest.Item]) -> None:
    """Counts GPU tests taken out by ``-m "not gpu"`` and the like: they were not run either."""
    for item in items:
        if item.get_closest_marker("gpu"):
            item.config.stash[_GPU_TESTS_NOT_RUN] += 1


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    skipped = [report for report in terminalreporter.stats.get("skipped", []) if "gpu" in getattr(report, "keywords", {})]
    not_run = len(skipped) + config.stash[_GPU_TESTS_NOT_RUN]
    terminalreporter.write_line(f"{not_run} tests need a GPU of compute capability 9.0 (Hopper) and were not run.")


def _seed_of(node_id: str) -> int:
    """A seed that depends on the test's name alone, so that one test replays without the others."""
    return int.from_bytes(hashlib.sha256(node_id.encode()).digest()[:4], "little")


@pytest.fixture
def seed(request: pytest.FixtureRequest) -> int:
    """The test's own seed, from its node id."""
    return _seed_of(request.node.nodeid)


@pytest.fixture(autouse=True)
def _seeded_global_rng(seed: int) -> Iterator[None]:
    """Every test starts from its own seed; nothing leaks to the next one."""
    with torch.random.fork_rng(devices=range(torch.cuda.device_count()) if torch.cuda.is_available() else []):
        torch.manual_seed(seed)
        yield


@pytest.fixture
def rng(seed: int) -> torch.Generator:
    """A CPU generator with the test's own seed. Draw on the CPU and move: the same bits on every machine."""
    return torch.Generator().manual_seed(seed)
