"""Building every kernel variant before it is needed: ``warmup`` in a process that will use them; ``python -m qla.aot`` for a folder."""

from __future__ import annotations

import contextlib
import importlib
import logging
import os
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Container, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Lock
from typing import Any

KERNELS = ("l2norm", "gates", "kkt_solve", "cp_plan", "cp_prep", "cp_merge", "fwd_fused", "bwd_fused", "recurrent")
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
    jobs: processes that compile at a time; by default one for each CPU. verbose: whether to write a line of progress to stderr.

    What the package does not carry, and TileLang's cache on disk (TILELANG_CACHE_DIR) does not hold, is compiled in processes of their own;
    several programs may do so at once. Returns the number of variants. Raises RuntimeError with their names and the compiler's last lines
    if some cannot be built.
    """
    _check_jobs(jobs)
    from qla.kernels import carried, launch

    names, found = list(launch.names(only)), set()
    with Progress("kernels", len(names), verbose and bool(carried.usable())) as progress:
        for name in names:
            if carried.function(name) is not None:
                found.add(name)
                progress.step()
    if len(found) < len(names):  # else there is no need of TileLang
        build_all(only, jobs, verbose, found)
    return len(names)


def _check_jobs(jobs: int | None) -> None:
    if jobs is not None and jobs < 1:
        raise ValueError(f"jobs must be at least 1, got {jobs}")


def build_all(only: str = "", jobs: int | None = None, verbose: bool = True, but: Container[str] = ()) -> dict[str, float]:
    """Compiles all variants that TileLang's cache does not hold, but for those named, and returns the seconds that each took."""
    _check_jobs(jobs)
    todo = [(module, cfg) for module, cfg in variants(only) if cfg.name not in but]
    seconds: dict[str, float] = {}
    with _without_tilelangs_lines(), Progress("kernels", len(todo), verbose) as progress:
        for number, (module, cfg) in enumerate(todo):
            started = time.monotonic()
            try:
                module.build(cfg)
            except Exception as error:
                raise _failed({cfg.name: repr(error)}) from error
            seconds[cfg.name] = time.monotonic() - started
            progress.step()
            rest = [cfg.name for _, cfg in todo[number + 1 :]]
            if rest and seconds[cfg.name] > COMPILED_SECONDS:
                seconds |= _compile_elsewhere(rest, jobs or cpus(), progress.step)
                for module, cfg in todo[number + 1 :]:
                    module.build(cfg)
                break
    return seconds


def cpus() -> int:
    """CPUs that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


class Progress:
    """One line on stderr, "qla: 3 of 21 kernels in 9 s": redrawn as it grows on a terminal, written once, at the end, elsewhere."""

    def __init__(self, what: str, total: int, verbose: bool) -> None:
        self._what, self._total, self._verbose = what, total, verbose and total > 0
        self._done, self._started, self._lock = 0, time.monotonic(), Lock()

    def __enter__(self) -> Progress:
        return self

    def __exit__(self, *_: object) -> None:
        if self._verbose:
            self._write("\n")

    def step(self) -> None:
        with self._lock:
            self._done += 1
            if self._verbose and sys.stderr.isatty():
                self._write("")

    def _write(self, end: str) -> None:
        start = "\r" if sys.stderr.isatty() else ""
        seconds = time.monotonic() - self._started
        print(f"{start}qla: {self._done} of {self._total} {self._what} in {seconds:.0f} s", end=end, file=sys.stderr, flush=True)


@contextlib.contextmanager
def _without_tilelangs_lines() -> Iterator[None]:
    """Context in which TileLang does not log each kernel that it begins and completes."""
    logger = logging.getLogger("tilelang.jit.kernel")
    level = logger.level
    logger.setLevel(logging.WARNING)
    try:
        yield
    finally:
        logger.setLevel(level)


BUILT, FAILED = "qla built: ", "qla failed: "  # how a process that compiles begins its answers


def serve() -> None:
    """Compiles the variants named on stdin, one a line, into TileLang's cache; answers each on stdout, a failure after its traceback."""
    known = {cfg.name: (module, cfg) for module, cfg in variants()}
    for line in sys.stdin:
        name, started = line.strip(), time.monotonic()
        try:
            module, cfg = known[name]
            module.build(cfg)
        except Exception:
            traceback.print_exc(file=sys.stdout)
            print(f"{FAILED}{name}", flush=True)
        else:
            print(f"{BUILT}{time.monotonic() - started}", flush=True)


def _compile_elsewhere(names: Sequence[str], jobs: int, step: Callable[[], None]) -> dict[str, float]:
    """Compiles in up to ``jobs`` processes, which leave the results in TileLang's cache; returns seconds by name.

    Each process takes the next name when it is done with one, from the end of the list, where those stand that take longest. ``step`` is
    called after each.
    """
    queue = list(names)
    environment = dict(os.environ)
    paths = [str(Path(__file__).resolve().parents[1]), environment.get("PYTHONPATH", "")]
    # The package that runs here, even where the current folder holds another (Python 3.11 and later).
    environment |= {"PYTHONPATH": os.pathsep.join(filter(None, paths)), "PYTHONSAFEPATH": "1", "TILELANG_PRINT_ON_COMPILATION": "0"}
    command = [sys.executable, "-c", "from qla.startup import serve; serve()"]
    seconds: dict[str, float] = {}
    failures: dict[str, str] = {}

    def work(_: int) -> None:
        pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
        # Closing the pipe to a process that is gone may fail as writing to it does; its output says why it is gone.
        with contextlib.suppress(BrokenPipeError), subprocess.Popen(command, env=environment, text=True, **pipes) as process:
            assert process.stdin is not None and process.stdout is not None
            while True:
                try:
                    name = queue.pop()  # atomic
                except IndexError:
                    break
                with contextlib.suppress(BrokenPipeError):
                    process.stdin.write(name + "\n")
                    process.stdin.flush()
                lines: list[str] = []
                for line in process.stdout:
                    if line.startswith((BUILT, FAILED)):
                        break
                    lines.append(line)
                else:  # it ended without an answer
                    failures[name] = "".join(lines[-20:]) + f"exit status {process.wait()}"
                    break
                if line.startswith(BUILT):
                    seconds[name] = float(line.removeprefix(BUILT))
                    step()
                else:
                    failures[name] = "".join(lines[-20:])

    count = min(jobs, len(names))
    with ThreadPoolExecutor(count) as pool:
        list(pool.map(work, range(count)))
    if failures:
        # A name is left over only where every process ended early.
        raise _failed(failures | dict.fromkeys(queue, "not begun"))
    return seconds


def _failed(failures: dict[str, str]) -> RuntimeError:
    first = next(iter(failures.values()))
    return RuntimeError(f"qla could not build {', '.join(failures)}:\n{first}")
