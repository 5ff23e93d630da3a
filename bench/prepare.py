"""Compiles the peers' kernels for a set of rows in parallel, so that the timed run finds them in their caches on disk.

    python bench/prepare.py --jobs 16
    python bench/prepare.py --jobs 16 --set targets --providers fla --directions bwd

fla and flash-qla compile anew for each head configuration, in one thread: 60 s and more a configuration. Here each of --jobs
processes takes head configurations from the set and calls a peer on a few of their lengths, one sequence and packed, long and
short. What they compile is what any first call would have compiled; the processes only share the work.

No peer is at a disadvantage: nothing that depends on time is kept. fla tunes its Triton kernels by timing candidates, and by
itself keeps the winners in Triton's cache folder. Times taken while many processes share the GPU would be worth nothing. So
here fla is told to keep no results (FLA_CACHE_RESULTS=0), and each candidate is launched once instead of being timed. The
timed run, alone on the GPU and with fla's own defaults, then tunes as ever and only finds the candidates compiled; its
winners stay in the cache for later runs. flash-qla and flashinfer choose by rules and tune nothing.

Which caches: TRITON_CACHE_DIR, TILELANG_CACHE_DIR, FLASHINFER_WORKSPACE_BASE where they are set, for both commands alike; what a
peer keeps in memory only gains nothing. A peer that fails here is noted, and may do better in the timed run.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import math
import multiprocessing
import os
import sys
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

if not __package__:  # run as a file: the repository root belongs on the path, this folder does not
    sys.path[0] = str(Path(__file__).resolve().parents[1])

import torch  # noqa: E402

from bench.cases import make_case  # noqa: E402
from bench.directions import DIRECTIONS  # noqa: E402
from bench.providers import PROVIDERS, use_own_path_of_fla  # noqa: E402
from bench.records import OURS  # noqa: E402
from bench.run import list_of  # noqa: E402
from bench.shapes import Shape  # noqa: E402

PEERS = [name for name in PROVIDERS if name not in OURS]


@dataclass(frozen=True)
class Task:
    """What one process does in one go: a provider's passes on shapes of one head configuration."""

    provider: str
    shapes: tuple[Shape, ...]
    directions: tuple[str, ...]

    @property
    def name(self) -> str:
        return f"{self.provider} {self.shapes[0].heads} {', '.join(shape.lengths for shape in self.shapes)}"


def make_tasks(shapes: Iterable[Shape], providers: Iterable[str], directions: Sequence[str]) -> list[Task]:
    """A task for each provider, head configuration and form, one sequence or packed, with the longest and the shortest lengths of it.

    The two forms are other variants of most kernels, so that tasks hardly compile the same; a peer may cut long sequences and not
    short ones, so that both lengths are called. Tasks start in the order in which the providers are named.
    """
    forms: dict[tuple[str, bool], list[Shape]] = {}
    for shape in shapes:
        forms.setdefault((shape.heads, len(shape.sequence_lengths) > 1), []).append(shape)
    tasks = []
    for provider in providers:
        usable = tuple(name for name in directions if DIRECTIONS[name].prepare(PROVIDERS[provider]) is not None)
        for of_form in forms.values():
            by_length = sorted(of_form, key=lambda shape: max(shape.sequence_lengths))
            if usable:
                tasks.append(Task(provider, tuple(dict.fromkeys([by_length[-1], by_length[0]])), usable))
    return tasks


def keep_no_tuning() -> None:
    """fla's and Triton's tuning results stay out of the cache on disk; read when fla and Triton are imported."""
    os.environ["FLA_CACHE_RESULTS"] = "0"
    os.environ.pop("TRITON_CACHE_AUTOTUNING", None)


def launch_once(call: Any, *args: object, quantiles: Sequence[float] | None = None, **options: object) -> object:
    """Takes the place of triton.testing.do_bench: launches, so that it compiles, and measures nothing."""
    call()
    return [1.0] * len(quantiles) if quantiles else 1.0


def start_worker() -> None:
    """Of every process, before anything of a peer is imported."""
    keep_no_tuning()
    use_own_path_of_fla()
    try:
        import triton.testing
    except ImportError:  # peers without Triton
        return
    triton.testing.do_bench = launch_once


def do_task(task: Task, device: str = "cuda") -> str:
    """Calls the provider; what went wrong, or an empty string."""
    problems = []
    for shape in task.shapes:
        for name in task.directions:
            try:
                prepare = DIRECTIONS[name].prepare(PROVIDERS[task.provider])
                assert prepare is not None
                with torch.no_grad():
                    prepare(make_case(shape, "fast", device)).start()()
                if device != "cpu":
                    torch.cuda.synchronize()
                    torch.cuda.empty_cache()  # the processes share the GPU's memory
            except Exception as error:  # peers fail in many ways; the next shape may do
                problems.append(f"{shape.lengths} {name}: {type(error).__name__}: {error}".splitlines()[0][:200])
    return "; ".join(problems)


def run_tasks(tasks: Sequence[Task], jobs: int, budget: float = math.inf) -> list[str]:
    """Does them in this many processes; names of those that failed, or that the budget (seconds) left no time for."""
    started = time.monotonic()
    context = multiprocessing.get_context("spawn")  # a forked process cannot use CUDA
    executor = concurrent.futures.ProcessPoolExecutor(jobs, mp_context=context, initializer=start_worker)
    left = {executor.submit(do_task, task): task for task in tasks}
    unfinished = []
    try:
        for future in concurrent.futures.as_completed(list(left), None if math.isinf(budget) else budget):
            task, error = left.pop(future), future.exception()
            problem = repr(error) if error else future.result()  # a process that dies takes the others' tasks along
            if problem:
                unfinished.append(task.name)
            print(f"{time.monotonic() - started:.0f} s: {task.name}: {problem or 'done'}", flush=True)
    except concurrent.futures.TimeoutError:
        for process in multiprocessing.active_children():
            process.terminate()  # what they have compiled so far is in the caches
    executor.shutdown(cancel_futures=True)
    return unfinished + [task.name for task in left.values()]


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="bench/prepare.py", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="processes (default: as many as there are CPUs)")
    parser.add_argument("--set", choices=list(DIRECTIONS["fwd"].sets), default="sweep", help="rows to prepare for (default: sweep)")
    parser.add_argument("--heads", default=None, help="only these head counts, for example 16/64")
    parser.add_argument("--providers", type=list_of(PEERS), default=["fla", "flash_qla", "flashinfer"], help=f"from {', '.join(PEERS)}")
    parser.add_argument("--directions", type=list_of(DIRECTIONS), default=list(DIRECTIONS), help="fwd, bwd or fwd,bwd (default: both)")
    parser.add_argument("--budget", type=float, default=math.inf, help="seconds after which it ends, whatever is left")
    args = parser.parse_args(argv)
    if not torch.cuda.is_available():
        print("needs a CUDA device")
        return 2
    shapes = dict.fromkeys(shape for name in args.directions for shape in DIRECTIONS[name].sets[args.set])
    tasks = make_tasks((shape for shape in shapes if args.heads in (None, shape.heads)), args.providers, args.directions)
    unfinished = run_tasks(tasks, max(1, min(args.jobs, len(tasks))), args.budget)
    print(f"{len(tasks) - len(unfinished)} of {len(tasks)} prepared" + (f"; not: {'; '.join(unfinished)}" if unfinished else ""))
    return 0


if __name__ == "__main__":
    sys.exit(main())
