"""Building every kernel variant before it is needed: ``warmup`` in a process that will use them; ``python -m qla.aot`` for a folder."""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

KERNELS = ("kkt_solve", "cp_plan", "cp_prep", "cp_merge", "fwd_fused", "bwd_fused", "recurrent")
COMPILED_SECONDS = 1.0  # loading a variant from TileLang's cache takes less, compiling it more


def variants(only: str = "") -> Iterator[tuple[Any, Any]]:
    """(kernel module, config) of every variant whose name holds ``only``."""
    for kernel in KERNELS:
        module = importlib.import_module(f"qla.kernels.{kernel}")
        for cfg in module.CONFIGS:
            if only in cfg.name:
                yield module, cfg


def warmup(only: str = "", jobs: int | None = None, verbose: bool = True) -> int:
    """Compiles or loads all kernels, so that no later call has to. Needs no GPU.

    only: just the variants whose name holds it; "bfloat16" and "float16" are parts of the names of most, see ``python -m qla.aot``.
    jobs: processes that compile at a time; by default one for each CPU. verbose: whether to print a line of progress to stderr.

    What TileLang's cache on disk (TILELANG_CACHE_DIR) does not hold is compiled in processes of their own; several programs may do so
    at once. Returns the number of variants. Raises RuntimeError with the compiler's last lines if one cannot be built.
    """
    if jobs is not None and jobs < 1:
        raise ValueError(f"jobs must be at least 1, got {jobs}")
    todo = list(variants(only))
    for number, (module, cfg) in enumerate(todo):
        started = time.monotonic()
        module.build(cfg)
        rest = [cfg.name for _, cfg in todo[number + 1 :]]
        _progress(verbose, len(todo) - len(rest), len(todo))
        if rest and time.monotonic() - started > COMPILED_SECONDS:
            _compile_elsewhere(rest, jobs or os.cpu_count() or 1, len(todo), verbose)
            for module, cfg in todo[number + 1 :]:
                module.build(cfg)
            break
    if verbose and todo:
        print(file=sys.stderr, flush=True)
    return len(todo)


def build(names: Sequence[str]) -> None:
    """Compiles the named variants into TileLang's cache, and prints each name when it is there."""
    by_name = {cfg.name: (module, cfg) for module, cfg in variants()}
    for name in names:
        module, cfg = by_name[name]
        module.build(cfg)
        print(name, flush=True)


def _compile_elsewhere(names: Sequence[str], jobs: int, total: int, verbose: bool) -> None:
    """Compiles in up to ``jobs`` processes, each its share; they leave the results in TileLang's cache."""
    shares = [share for i in range(jobs) if (share := names[i::jobs])]
    environment = dict(os.environ)
    paths = [str(Path(__file__).resolve().parents[1]), environment.get("PYTHONPATH", "")]
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, paths))
    done = [total - len(names)]

    def run(share: Sequence[str]) -> str | None:
        command = [sys.executable, "-c", "import sys; from qla.startup import build; build(sys.argv[1:])", *share]
        process = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        lines = []
        assert process.stdout is not None
        for line in process.stdout:
            lines.append(line)
            if line.strip() in share:
                done[0] += 1
                _progress(verbose, done[0], total)
        return None if process.wait() == 0 else "".join(lines[-20:])

    with ThreadPoolExecutor(len(shares)) as pool:
        failures = [text for text in pool.map(run, shares) if text is not None]
    if failures:
        raise RuntimeError(f"qla could not build its kernels:\n{failures[0]}")


def _progress(verbose: bool, done: int, total: int) -> None:
    if verbose:
        print(f"\rqla: {done} of {total} kernels", end="", file=sys.stderr, flush=True)
