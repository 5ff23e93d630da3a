"""Times of the forward or the backward pass beside its peers: JSON lines and a table.

    python bench/run.py --set targets --providers qla,fla,flash_qla,flashinfer --gates fast
    python bench/run.py --shape 16/64:8192x4 --providers qla,flash_qla_nocp --kernels
    python bench/run.py --direction bwd --set targets --providers qla,fla,flash_qla
    python bench/run.py --set sweep --providers qla,fla,flash_qla,flashinfer --gates fast,slow,mixed --resume
    python bench/run.py --show bench/results/fwd_targets.jsonl        the table of what was recorded; needs no GPU

bench/prepare.py compiles the peers' kernels ahead, bench/report.py makes README's table and the plots.

"bwd" is the backward pass alone: the gradients of q, k, v, g and beta from o's gradient, through autograd for every provider.
What a provider computes or keeps in its forward pass for it is not in this time.

Every provider's o and final state are checked against float64 on two heads before anything of the row is timed; backward,
the gradients on the first and the last key head and the value heads that read them. A row on which qla fails is not
reported and the exit status is 1; a peer that fails or raises is noted and left out. Lines go to RESULTS/NAME.jsonl as
they are measured, so a run that is cut short keeps what it has. With --resume it goes on: what the file already has from
this commit, GPU and provider is shown and not measured again.

RESULTS/NAME.jsonl is published, so that it is written only when the GPU tests of the commit are green (bench/tested.py; --tests
names the file that says so). Otherwise nothing is measured, unless --unpublished sends the lines to
RESULTS/NAME.unpublished.jsonl, which bench/report.py does not read.

The sweep is 171 rows, three gate regimes and two directions. What keeps a row short: the gate regimes of a shape share its
tensors and go through float64 together (a reference on the GPU, whose time is launches); memory is given back to the driver
only after float64 and when much is held; rounds end when the times have settled (--settled, bench/timing.py). None of it
changes what is timed. The last lines say where the time went.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import math
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch

if not __package__:  # run as a file: the repository root belongs on the path, this folder does not
    sys.path[0] = str(Path(__file__).resolve().parents[1])

from bench.cases import Case, make_cases  # noqa: E402
from bench.directions import DIRECTIONS, Direction, limit_of  # noqa: E402
from bench.facts import append_line, environment  # noqa: E402
from bench.kernels import ASSUMED, PROTOTYPE_US, backward_kernel_calls, kernel_calls, problem_of, us_per_chunk  # noqa: E402
from bench.providers import PROVIDERS, Provider, use_own_path_of_fla  # noqa: E402
from bench.records import (  # noqa: E402
    OURS,
    OWN,
    RESULTS,
    Row,
    RowKey,
    all_names,
    format_row,
    format_table,
    known_times,
    make_record,
    recorded_rows,
    times_of_this_version,
)
from bench.shapes import GATES, SETS, Shape, parse_shape  # noqa: E402
from bench.tested import TESTS, verdict  # noqa: E402
from bench.timing import Runnable, Start, Timing, at_once, make_runnable, time_interleaved  # noqa: E402
from qla import autocp, costs  # noqa: E402
from qla.autocp import WHOLE, Plan  # noqa: E402

GIVE_BACK_ABOVE = 0.25  # of the GPU's memory: held by PyTorch and not in use, before it goes back to the driver


class OutOfBudget(Exception):
    """The time given with --budget is over."""


@dataclass(frozen=True)
class Ready:
    """A provider that passed its check on a row: what to time, and its errors by name."""

    runnable: Runnable
    errors: Mapping[str, float]


def show(paths: Sequence[Path]) -> None:
    """Prints a table for each direction that these results files have."""
    for direction in DIRECTIONS:
        rows = recorded_rows(paths, direction)
        if rows:
            print(f"{direction}, milliseconds\n{format_table(rows, all_names(rows, [OWN]))}")


def check_and_prepare(direction: Direction, provider: Provider, case: Case, expected: Any, ready_up: Callable[[Start], Runnable]) -> Ready:
    """Runs the provider, compares with float64, makes it ready for timing. Raises ValueError where it is wrong."""
    prepare = direction.prepare(provider)
    assert prepare is not None, f"{provider.name} was to be left out"
    call = prepare(case)
    timed = call.start()
    timed()  # what is checked is a repetition, as what is timed: a backward pass might spoil what its forward pass saved
    found = direction.errors(expected, call.outputs(timed()))
    del timed  # and the memory that it holds
    limits = {name: limit_of(name, provider.name in OURS) for name in found}
    wrong = [f"error of {name} {error:.2e}, allowed {limits[name]:.0e}" for name, error in found.items() if error > limits[name]]
    if wrong:
        raise ValueError(f"wrong: {'; '.join(wrong)}")
    return Ready(ready_up(call.start), found)


@dataclass
class Progress:
    """How far a run is: rows shown, and of those to be measured, how many are and since when (`clock` gives seconds)."""

    total: int
    to_measure: int
    clock: Callable[[], float] = time.monotonic
    shown: int = 0
    measured: int = 0

    def __post_init__(self) -> None:
        self.started = self.clock()

    def next(self, was_measured: bool) -> str:
        """Counts one more row, and says which it is and how long the others may take."""
        self.shown += 1
        self.measured += was_measured
        left = f", {self.seconds_left() / 60:.1f} min left" if self.measured else ""
        return f"[{self.shown}/{self.total}{left}]"

    def seconds_left(self) -> float:
        return (self.clock() - self.started) / self.measured * (self.to_measure - self.measured)


@dataclass
class Bench:
    """One run: what to time, where the lines go, and what came out."""

    providers: Sequence[Provider]
    path: Path
    facts: Mapping[str, Any]
    deadline: float
    direction: str = "fwd"
    reps: int = 30
    kernels: bool = False
    known: Mapping[tuple[int, int, str, str, str], float] = field(default_factory=dict)
    done: Mapping[RowKey, Mapping[str, float]] = field(default_factory=dict)  # recorded by an earlier run of this version
    progress: Progress | None = None
    device: str = "cuda"
    ready_up: Callable[[Start], Runnable] = make_runnable
    timer: Callable[..., dict[str, Timing]] = time_interleaved
    rows: list[Row] = field(default_factory=list)
    failed: list[str] = field(default_factory=list)
    seconds: dict[str, float] = field(default_factory=lambda: collections.defaultdict(float))  # by what they were spent on

    def check_budget(self) -> None:
        if time.monotonic() > self.deadline:
            raise OutOfBudget

    def left_to_do(self, key: RowKey) -> list[Provider]:
        return [provider for provider in self.providers if provider.name not in self.done.get(key, {})]

    def run_shape(self, shape: Shape, regimes: Sequence[str]) -> None:
        """The rows of a shape with each of these gate regimes; what was measured before the budget ran out stays."""
        rows = [Row(shape, gates, dict(self.done.get((shape.hk, shape.hv, shape.lengths, gates), {}))) for gates in regimes]
        missing = [row for row in rows if self.left_to_do(row.key)]
        if missing:
            self.check_budget()
            self.free_memory(GIVE_BACK_ABOVE)
            with self.spent_on("inputs"):
                cases = make_cases(shape, [row.gates for row in missing], self.device)
            with self.spent_on("float64"):
                expected = DIRECTIONS[self.direction].expected(cases)
                self.free_memory(0)  # what float64 took: graphs have memory of their own and could not use it
        for row in rows:
            if row in missing:
                i = missing.index(row)
                self.run_row(row, cases[i], expected[i])
            else:
                self.rows.append(row)
                self.show_row(row, measured=False)

    def run_row(self, row: Row, case: Case, expected: Any) -> None:
        """Checks, then times, then records one row."""
        self.check_budget()
        self.free_memory(GIVE_BACK_ABOVE)  # graphs of the rows before kept memory of their own
        to_do = self.left_to_do(row.key)
        ready = self.prepare_all(row, case, expected, to_do)
        if OWN not in ready and any(provider.name == OWN for provider in to_do):
            self.failed.append(row.name)
            self.show_row(row, measured=True, instead=f"REFUSED {row.name}: {'; '.join(row.notes)}")
            return
        if not ready and not row.ms:
            self.show_row(row, measured=True, instead=f"nothing to show for {row.name}")
            return
        self.rows.append(row)
        with self.spent_on("timing"):
            timings = self.timer({name: entry.runnable for name, entry in ready.items()}, reps=self.reps)
        kernels = self.kernels and OWN in ready
        plan, planned = self.plan_of(row, case) if kernels else (WHOLE, {})
        for name, timing in timings.items():
            version = next(provider.version for provider in self.providers if provider.name == name)
            errors = {f"err_{result}": error for result, error in ready[name].errors.items()}
            self.record(row, name, version, timing, errors | (planned if name == OWN else {}))
        ready.clear()
        self.show_row(row, measured=True)
        if kernels:
            with self.spent_on("kernels"):
                self.run_kernels(row, case, plan)

    def show_row(self, row: Row, measured: bool, instead: str = "") -> None:
        """One line: how far the run is, and the row with its known times filled in, or `instead`."""
        for (*key, name), ms in self.known.items():
            if tuple(key) == row.key:
                row.ms.setdefault(name, ms)
        text = instead or format_row(row) + ("" if measured else " (recorded)")
        print(f"{self.progress.next(measured)} {text}" if self.progress else text, flush=True)

    @contextlib.contextmanager
    def spent_on(self, what: str) -> Iterator[None]:
        """Adds the time inside to `seconds`, the GPU's with it."""
        started = time.monotonic()
        try:
            yield
            if self.device != "cpu":
                torch.cuda.synchronize()
        finally:
            self.seconds[what] += time.monotonic() - started

    def free_memory(self, above: float) -> None:
        """Gives what PyTorch keeps for later back to the driver, if all that it holds is more than this fraction of the GPU's memory."""
        if self.device != "cpu" and torch.cuda.memory_reserved() > above * torch.cuda.mem_get_info()[1]:
            torch.cuda.empty_cache()

    def prepare_all(self, row: Row, case: Case, expected: Any, providers: Sequence[Provider]) -> dict[str, Ready]:
        ready: dict[str, Ready] = {}
        for provider in providers:
            self.check_budget()
            started = time.monotonic()
            try:
                ready[provider.name] = check_and_prepare(DIRECTIONS[self.direction], provider, case, expected, self.ready_up)
            except Exception as error:  # a provider that cannot do a row must not end the run
                row.notes.append(f"{provider.name}: {type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"[:300])
                print(f"  note {row.name}: {row.notes[-1]}", flush=True)
            took = time.monotonic() - started
            self.seconds[f"{provider.name} made ready"] += took
            if took > 5:
                print(f"  {provider.name} took {took:.0f} s to get ready", flush=True)
        return ready

    def record(self, row: Row, name: str, version: str | None, timing: Timing, extra: Mapping[str, Any]) -> None:
        row.ms[name] = timing.ms
        line = make_record(row.shape, row.gates, name, version, timing, self.facts, self.direction)
        append_line(self.path, line | dict(extra))

    def plan_of(self, row: Row, case: Case) -> tuple[Plan, dict[str, Any]]:
        """The plan that our own call takes, and what is recorded of it."""
        from qla.device import device_spec

        device, problem = device_spec(case.q.device), problem_of(row.shape)
        plan = autocp.plan(problem, device)
        us = costs.predict(problem, device.sm_count, plan, ASSUMED[row.gates], self.direction == "bwd").total
        row.predicted_ms = us / 1e3
        return plan, {"plan": asdict(plan), "predicted_us": round(us, 2)}

    def run_kernels(self, row: Row, case: Case, plan: Plan) -> None:
        """Times each of our kernels apart; of uncut sequences also prints the fused kernel's time a chunk and block."""
        from qla.device import device_spec

        version = next(provider.version for provider in self.providers if provider.name == OWN)
        forward = self.direction == "fwd"
        calls = kernel_calls(case, plan) if forward else backward_kernel_calls(case, plan)
        timings = self.timer({name: self.ready_up(at_once(call)) for name, call in calls.items()}, reps=self.reps)
        fused, of_fused = "", {}
        if forward and plan == WHOLE:
            columns, us = us_per_chunk(case, timings["fwd_fused"].ms, device_spec(case.q.device).sm_count)
            of_fused = {"block_v": columns, "us_per_chunk": round(us, 4)}
            fused = f"; fused {us:.2f} us a chunk and block of V={columns} (prototype {PROTOTYPE_US[columns]})"
        for name, timing in timings.items():
            self.record(row, f"{OWN}:{name}", version, timing, of_fused if name == "fwd_fused" else {})
        print(f"    {', '.join(f'{name} {timing.ms * 1e3:.1f} us' for name, timing in timings.items())}{fused}", flush=True)


def usable_providers(names: Sequence[str], direction: str = "fwd") -> list[Provider]:
    """The named providers that have the direction and import; the others are noted."""
    usable = []
    for name in names:
        has_it = DIRECTIONS[direction].prepare(PROVIDERS[name]) is not None
        problem = PROVIDERS[name].import_error() if has_it else "has no backward pass"
        if problem:
            print(f"skipped {name}: {problem}", flush=True)
        else:
            usable.append(PROVIDERS[name])
    return usable


def list_of(allowed: Iterable[str]) -> Callable[[str], list[str]]:
    """A type for argparse: names from these, separated by commas."""

    def parse(text: str) -> list[str]:
        names = [name for name in text.split(",") if name]
        unknown = [name for name in names if name not in allowed]
        if unknown or not names:
            raise argparse.ArgumentTypeError(f"{unknown or text!r}: choose from {', '.join(allowed)}")
        return names

    return parse


def _shape(text: str) -> Shape:
    try:
        return parse_shape(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="bench/run.py", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--set", choices=list(SETS), default=None, help="named rows (default: quick, unless --shape is given)")
    parser.add_argument("--shape", type=_shape, action="append", default=[], help="one more row, as hk/hv:lengths; may be repeated")
    parser.add_argument("--heads", default=None, help="of the set, only these head counts, for example 16/64")
    parser.add_argument("--providers", type=list_of(PROVIDERS), default=[OWN], help=f"from {', '.join(PROVIDERS)} (default: {OWN})")
    parser.add_argument("--gates", type=list_of(GATES), default=["fast"], help=f"from {', '.join(GATES)} (default: fast)")
    parser.add_argument("--direction", choices=list(DIRECTIONS), default="fwd", help="which pass to time (default: fwd)")
    parser.add_argument("--kernels", action="store_true", help="also time each of our kernels apart")
    parser.add_argument("--reps", type=int, default=30, help="timed rounds at most (default: 30)")
    parser.add_argument(
        "--settled", type=float, default=0.01, help="fewer rounds where the middle half of the times is this close together (default: 0.01)"
    )
    parser.add_argument("--budget", type=float, default=math.inf, help="seconds after which no further measurement begins")
    parser.add_argument("--name", default=None, help="results go to RESULTS/NAME.jsonl (default: DIRECTION_SET)")
    parser.add_argument("--results", type=Path, default=RESULTS, help=f"folder of the results (default: {RESULTS.name} beside this file)")
    parser.add_argument("--known", type=Path, nargs="*", default=[], help="results files whose times fill in providers not run now")
    parser.add_argument("--show", type=Path, nargs="+", default=None, help="measure nothing: print the tables of these results files")
    parser.add_argument("--resume", action="store_true", help="measure only what the file lacks of this commit, GPU and provider")
    parser.add_argument("--tests", type=Path, default=TESTS, help=f"lines of the GPU tests (default: RESULTS/{TESTS.name})")
    parser.add_argument("--unpublished", action="store_true", help="write to RESULTS/NAME.unpublished.jsonl, whatever the tests say")
    return parser


def parse_arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = make_parser()
    args = parser.parse_args(argv)
    return args


def chosen_shapes(args: argparse.Namespace) -> list[Shape]:
    sets = DIRECTIONS[args.direction].sets
    shapes = list(sets[args.set]) if args.set else ([] if args.shape else list(sets["quick"]))
    if args.heads:
        shapes = [shape for shape in shapes if shape.heads == args.heads]
    return shapes + args.shape


def results_path(args: argparse.Namespace, published: bool) -> Path:
    name = args.name or f"{args.direction}_{args.set or ('shapes' if args.shape else 'quick')}"
    return args.results / f"{name}{'' if published else '.unpublished'}.jsonl"


def run(bench: Bench, shapes: Sequence[Shape], regimes: Sequence[str]) -> bool:
    """Measures until all is done (True) or the budget is over (False)."""
    keys = [(shape.hk, shape.hv, shape.lengths, gates) for shape in shapes for gates in regimes]
    bench.progress = Progress(len(keys), sum(bool(bench.left_to_do(key)) for key in keys))
    try:
        with torch.no_grad():
            for shape in shapes:
                bench.run_shape(shape, regimes)
    except OutOfBudget:
        return False
    return True


def main(argv: Sequence[str] | None = None) -> int:
    started = time.monotonic()
    args = parse_arguments(argv)
    if args.show:
        show(args.show)
        return 0
    use_own_path_of_fla()
    if not torch.cuda.is_available():
        print("needs a CUDA device")
        return 2
    facts = environment()
    tests = verdict(facts["commit"], args.tests)
    print(tests.reason if tests.green else f"not published: {tests.reason}", flush=True)
    if not tests.green and not args.unpublished:
        print("nothing measured; --unpublished measures all the same, into a file that is not reported")
        return 2
    path = results_path(args, published=not args.unpublished)
    bench = Bench(
        providers=usable_providers(args.providers, args.direction),
        path=path,
        facts={**facts, "tested": None if args.unpublished else tests.tested},
        deadline=started + args.budget,
        direction=args.direction,
        reps=args.reps,
        kernels=args.kernels,
        known=known_times(args.known, args.direction),
        done=times_of_this_version(path, args.direction, facts) if args.resume else {},
        timer=partial(time_interleaved, settled=args.settled),
    )
    shapes = chosen_shapes(args)
    if not run(bench, shapes, args.gates):
        rows = f"{len(bench.rows)} of {len(shapes) * len(args.gates)} rows"
        print(f"stopped after {args.budget:.0f} s: {rows}; the same command with --resume goes on from there")
    print(format_table(bench.rows, all_names(bench.rows, [provider.name for provider in bench.providers])))
    print(f"{len(bench.rows)} rows on {facts['gpu']}, commit {facts['commit']}, lines in {path}")
    print(f"seconds: {', '.join(f'{what} {seconds:.1f}' for what, seconds in sorted(bench.seconds.items(), key=lambda item: -item[1]))}")
    if bench.failed:
        print(f"{OWN} failed its check on: {', '.join(bench.failed)}")
    return 1 if bench.failed else 0


if __name__ == "__main__":
    sys.exit(main())
