"""Times of the forward or the backward pass beside its peers: JSON lines and a table.

    python bench/run.py --set targets --providers qla,fla,flash_qla,flashinfer --gates fast
    python bench/run.py --shape 16/64:8192x4 --providers qla,flash_qla_nocp --kernels
    python bench/run.py --direction bwd --set targets --providers qla,fla,flash_qla
    python bench/run.py --show bench/results/fwd_targets.jsonl        the table of what was recorded; needs no GPU

"bwd" is the backward pass alone: the gradients of q, k, v, g and beta from o's gradient, through autograd for every provider.
What a provider computes or keeps in its forward pass for it is not in this time.

Every provider's o and final state are checked against float64 on two heads before anything of the row is timed; backward,
the gradients on the first and the last key head and the value heads that read them. A row on which qla fails is not
reported and the exit status is 1; a peer that fails or raises is noted and left out. Lines go to RESULTS/NAME.jsonl as
they are measured, so a run that is cut short keeps what it has.
"""

from __future__ import annotations

import argparse
import math
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

if not __package__:  # run as a file: the repository root belongs on the path, this folder does not
    sys.path[0] = str(Path(__file__).resolve().parents[1])

from bench.cases import Case, make_case  # noqa: E402
from bench.directions import DIRECTIONS, Direction, limit_of  # noqa: E402
from bench.facts import append_line, environment, read_lines  # noqa: E402
from bench.kernels import ASSUMED, PROTOTYPE_US, backward_kernel_calls, kernel_calls, problem_of, us_per_chunk  # noqa: E402
from bench.providers import PROVIDERS, Provider, use_own_path_of_fla  # noqa: E402
from bench.shapes import GATES, SETS, Shape, parse_shape  # noqa: E402
from bench.timing import Runnable, Start, Timing, at_once, make_runnable, time_interleaved  # noqa: E402
from qla import autocp  # noqa: E402
from qla.autocp import WHOLE, Plan  # noqa: E402

RESULTS = Path(__file__).resolve().parent / "results"
OWN = "qla"
OURS = (OWN, "qla_whole")


class OutOfBudget(Exception):
    """The time given with --budget is over."""


@dataclass(frozen=True)
class Ready:
    """A provider that passed its check on a row: what to time, and its errors by name."""

    runnable: Runnable
    errors: Mapping[str, float]


@dataclass
class Row:
    """What one row of the table shows: times by provider, notes, and the milliseconds that AutoCP predicts for ours, where asked for."""

    shape: Shape
    gates: str
    ms: dict[str, float] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    predicted_ms: float | None = None

    @property
    def best_peer(self) -> tuple[str, float] | None:
        # A package without its context parallelism is the same package held back: no peer of its own.
        peers = {name: ms for name, ms in self.ms.items() if name.partition(":")[0] not in (*OURS, "flash_qla_nocp")}
        return min(peers.items(), key=lambda item: item[1]) if peers else None

    @property
    def ratio(self) -> float | None:
        """Best peer's time over ours: above 1 we are faster."""
        best = self.best_peer
        return best[1] / self.ms[OWN] if best and OWN in self.ms else None


def make_record(
    shape: Shape, gates: str, provider: str, version: str | None, timing: Timing, facts: Mapping[str, Any], direction: str = "fwd"
) -> dict[str, Any]:
    """One line of a results file."""
    return {
        "direction": direction,
        "hk": shape.hk,
        "hv": shape.hv,
        "lengths": shape.lengths,
        "gates": gates,
        "provider": provider,
        "ms": round(timing.ms, 5),
        "ms_min": round(timing.ms_min, 5),
        "ms_max": round(timing.ms_max, 5),
        "gpu": facts.get("gpu"),
        "torch": facts.get("torch"),
        "tilelang": facts.get("tilelang"),
        "provider_version": version,
        "commit": facts.get("commit"),
        "date": facts.get("date"),
        "mode": timing.mode,
        "sm_mhz": timing.sm_mhz,
    }


def format_table(rows: Sequence[Row], providers: Sequence[str]) -> str:
    """Milliseconds by row and provider, the best peer and the ratio to it; below, geometric mean and worst ratio."""
    header = ["heads", "lengths", "gates", *providers, "best peer", "ratio"]
    lines = [header]
    for row in rows:
        times = [f"{row.ms[name]:.4f}" if name in row.ms else "-" for name in providers]
        best = row.best_peer
        ratio = f"{row.ratio:.2f}" if row.ratio else "-"
        lines.append([row.shape.heads, row.shape.lengths, row.gates, *times, best[0] if best else "-", ratio])
    widths = [max(len(line[i]) for line in lines) for i in range(len(header))]
    text = ["  ".join(cell.rjust(width) for cell, width in zip(line, widths, strict=True)) for line in lines]
    ratios = [row.ratio for row in rows if row.ratio]
    if ratios:
        geomean = math.exp(sum(map(math.log, ratios)) / len(ratios))
        text.append(f"best peer / {OWN}: geometric mean {geomean:.2f}, worst {min(ratios):.2f}, rows {len(ratios)}")
    return "\n".join(text)


def known_times(paths: Iterable[Path], direction: str = "fwd") -> dict[tuple[int, int, str, str, str], float]:
    """Recorded times by (hk, hv, lengths, gates, provider); later lines win."""
    return {
        (r["hk"], r["hv"], r["lengths"], r["gates"], r["provider"]): r["ms"] for r in read_lines(paths) if r.get("direction") == direction
    }


def recorded_rows(paths: Iterable[Path], direction: str = "fwd") -> list[Row]:
    """Rows of what was recorded, in the order in which they first appear."""
    rows: dict[tuple[int, int, str, str], Row] = {}
    for (hk, hv, lengths, gates, provider), ms in known_times(paths, direction).items():
        rows.setdefault((hk, hv, lengths, gates), Row(Shape(hk, hv, lengths), gates)).ms[provider] = ms
    return list(rows.values())


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
    device: str = "cuda"
    ready_up: Callable[[Start], Runnable] = make_runnable
    timer: Callable[..., dict[str, Timing]] = time_interleaved
    rows: list[Row] = field(default_factory=list)
    failed: list[str] = field(default_factory=list)

    def check_budget(self) -> None:
        if time.monotonic() > self.deadline:
            raise OutOfBudget

    def run_row(self, shape: Shape, gates: str) -> None:
        """Checks, then times, then records one row. What was measured before the budget ran out stays."""
        self.check_budget()
        self.free_memory()  # graphs of the row before kept memory of their own
        row = Row(shape, gates)
        case = make_case(shape, gates, self.device)
        expected = DIRECTIONS[self.direction].expected(case)
        self.free_memory()  # what float64 took
        ready = self.prepare_all(row, case, expected)
        if OWN not in ready and any(provider.name == OWN for provider in self.providers):
            self.failed.append(f"{shape.heads} {shape.lengths} {gates}")
            print(f"REFUSED {self.failed[-1]}: {'; '.join(row.notes)}", flush=True)
            return
        if not ready:
            return
        self.rows.append(row)
        timings = self.timer({name: entry.runnable for name, entry in ready.items()}, reps=self.reps)
        kernels = self.kernels and OWN in ready
        plan, planned = self.plan_of(row, case) if kernels else (WHOLE, {})
        for name, timing in timings.items():
            version = next(provider.version for provider in self.providers if provider.name == name)
            errors = {f"err_{result}": error for result, error in ready[name].errors.items()}
            self.record(row, name, version, timing, errors | (planned if name == OWN else {}))
        for (hk, hv, lengths, of_gates, name), ms in self.known.items():
            if (hk, hv, lengths, of_gates) == (shape.hk, shape.hv, shape.lengths, gates):
                row.ms.setdefault(name, ms)
        print(format_row(row), flush=True)
        ready.clear()
        if kernels:
            self.run_kernels(row, case, plan)

    def free_memory(self) -> None:
        if self.device != "cpu":
            torch.cuda.empty_cache()

    def prepare_all(self, row: Row, case: Case, expected: Any) -> dict[str, Ready]:
        ready: dict[str, Ready] = {}
        for provider in self.providers:
            self.check_budget()
            started = time.monotonic()
            try:
                ready[provider.name] = check_and_prepare(DIRECTIONS[self.direction], provider, case, expected, self.ready_up)
            except Exception as error:  # a provider that cannot do a row must not end the run
                row.notes.append(f"{provider.name}: {type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"[:300])
                print(f"  note {row.shape.heads} {row.shape.lengths} {row.gates}: {row.notes[-1]}", flush=True)
            took = time.monotonic() - started
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
        us = autocp.predict(problem, device.sm_count, plan, ASSUMED[row.gates], self.direction == "bwd").total
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


def format_row(row: Row) -> str:
    times = ", ".join(f"{name} {ms:.4f}" for name, ms in row.ms.items())
    ratio = f", best peer / {OWN} {row.ratio:.2f}" if row.ratio else ""
    predicted = ""
    if row.predicted_ms is not None:
        predicted = f", predicted {row.predicted_ms * 1e3:.1f} us, off by {row.predicted_ms / row.ms[OWN] - 1:+.1%}"
    return f"{row.shape.heads} {row.shape.lengths} {row.gates}: {times} ms{ratio}{predicted}"


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


def _list_of(allowed: Iterable[str]) -> Callable[[str], list[str]]:
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
    parser.add_argument("--providers", type=_list_of(PROVIDERS), default=[OWN], help=f"from {', '.join(PROVIDERS)} (default: {OWN})")
    parser.add_argument("--gates", type=_list_of(GATES), default=["fast"], help=f"from {', '.join(GATES)} (default: fast)")
    parser.add_argument("--direction", choices=list(DIRECTIONS), default="fwd", help="which pass to time (default: fwd)")
    parser.add_argument("--kernels", action="store_true", help="also time each of our kernels apart")
    parser.add_argument("--reps", type=int, default=30, help="timed rounds (default: 30)")
    parser.add_argument("--budget", type=float, default=math.inf, help="seconds after which no further measurement begins")
    parser.add_argument("--name", default=None, help="results go to RESULTS/NAME.jsonl (default: DIRECTION_SET)")
    parser.add_argument("--results", type=Path, default=RESULTS, help=f"folder of the results (default: {RESULTS.name} beside this file)")
    parser.add_argument("--known", type=Path, nargs="*", default=[], help="results files whose times fill in providers not run now")
    parser.add_argument("--show", type=Path, nargs="+", default=None, help="measure nothing: print the tables of these results files")
    return parser


def parse_arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = make_parser()
    args = parser.parse_args(argv)
    return args


def all_names(rows: Iterable[Row], first: Sequence[str]) -> list[str]:
    """Columns of the table: `first`, then whatever else the rows have."""
    return [*first, *sorted({name for row in rows for name in row.ms} - set(first))]


def chosen_shapes(args: argparse.Namespace) -> list[Shape]:
    sets = DIRECTIONS[args.direction].sets
    shapes = list(sets[args.set]) if args.set else ([] if args.shape else list(sets["quick"]))
    if args.heads:
        shapes = [shape for shape in shapes if shape.heads == args.heads]
    return shapes + args.shape


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
    name = args.name or f"{args.direction}_{args.set or ('shapes' if args.shape else 'quick')}"
    bench = Bench(
        providers=usable_providers(args.providers, args.direction),
        path=args.results / f"{name}.jsonl",
        facts=environment(),
        deadline=started + args.budget,
        direction=args.direction,
        reps=args.reps,
        kernels=args.kernels,
        known=known_times(args.known, args.direction),
    )
    plan = [(shape, gates) for shape in chosen_shapes(args) for gates in args.gates]
    try:
        with torch.no_grad():
            for shape, gates in plan:
                bench.run_row(shape, gates)
    except OutOfBudget:
        print(f"stopped after {args.budget:.0f} s: {len(bench.rows)} of {len(plan)} rows")
    print(format_table(bench.rows, all_names(bench.rows, [provider.name for provider in bench.providers])))
    print(f"{len(bench.rows)} rows on {bench.facts['gpu']}, commit {bench.facts['commit']}, lines in {bench.path}")
    if bench.failed:
        print(f"{OWN} failed its check on: {', '.join(bench.failed)}")
    return 1 if bench.failed else 0


if __name__ == "__main__":
    sys.exit(main())
