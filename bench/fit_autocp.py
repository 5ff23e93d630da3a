"""Coefficients of AutoCP's cost model (qla/costs.py) from measured times of the kernels.

    python bench/fit_autocp.py --measure --budget 120           on a Hopper GPU; appends to bench/results/autocp_rows.jsonl
    python bench/fit_autocp.py --lines FILE ..                  as well from what bench/run.py --direction bwd --kernels recorded
    python bench/fit_autocp.py --fit bench/results/autocp_rows.jsonl --out qla/autocp_coefficients.json

A row is one kernel of one call, or what the call takes beyond its kernels ("launch"), a JSON object with the keys

    kernel       a key of qla.costs.FEATURES
    hk, hv       key heads and value heads
    lengths      tokens of each sequence, a list
    plan         the fields of qla.autocp.Plan
    us           microseconds that the features are to explain
    measured_us  what was timed for it, above 0; us if missing. Errors are relative to this. Of a kernel alone it is more than us by what a
                 graph of a kernel that does nothing takes ("idle_us"); of "launch" it is the whole call, and us what is left of it
                 without the us of its kernels
    gates        the fields of qla.autocp.Gates; fast ones if missing
    seq_len      that of qla.autocp.Problem: the length when the sequences are a batch, 0 (default) when they are packed
    backward     whether the call is a backward pass; false if missing
    kept         whether it found kept what segments start from; false if missing
    num_sms      multiprocessors of the card; 132 if missing

and any others; commit and date say which rows are those of a kernel's last measurement, and only these are fitted.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import sys
import time
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

if not __package__:  # run as a file: the repository root belongs on the path, this folder does not
    sys.path[0] = str(Path(__file__).resolve().parents[1])

from bench.cases import Case, make_case  # noqa: E402
from bench.facts import append_line, environment, read_lines  # noqa: E402
from bench.kernels import ASSUMED, backward_kernel_calls, kernel_calls, problem_of  # noqa: E402
from bench.providers import own_call  # noqa: E402
from bench.shapes import Shape, parse_shape  # noqa: E402
from bench.timing import Runnable, Start, Timing, at_once, make_runnable, time_interleaved  # noqa: E402
from qla import autocp, costs  # noqa: E402
from qla.autocp import WHOLE, Coefficients, Gates, Plan, Problem  # noqa: E402
from qla.costs import FEATURES, MAX_TOKENS, features, keeps_segment_states  # noqa: E402
from qla.device import DeviceSpec, device_spec  # noqa: E402

RESULTS = Path(__file__).resolve().parent / "results" / "autocp_rows.jsonl"
SHAPES = tuple(
    Shape(*heads, lengths)
    for lengths in ("32768", "2048", "24576+8192", "8192")
    for heads in ((2, 8), (8, 32), (16, 48), (16, 64), (16, 32), (4, 8))
)
# Those whose backward pass is measured, too: one slice of heads in each, as its kernels are timed.
BACKWARD_HEADS = ("2/8", "16/32")
EVERY_BACKWARD = ("scan_states", "scan_state_gradients", "bwd_fused")  # kernels

Table = dict[str, dict[str, float]]


def row_features(row: Mapping[str, Any]) -> dict[str, float]:
    """The features of a measured row, by the name of their coefficient."""
    lengths = tuple(row["lengths"])
    problem = Problem(row["hk"], row["hv"], len(lengths), sum(lengths), row.get("seq_len", 0), lengths)
    gates = Gates(**row.get("gates", {}))
    place = (problem, row.get("num_sms", 132), Plan(**row["plan"]), gates)
    return features(row["kernel"], *place, row.get("backward", False), row.get("kept", False))


def measured_us(row: Mapping[str, Any]) -> float:
    return float(row.get("measured_us", row["us"]))


def fit_kernel(counts: np.ndarray, us: np.ndarray, measured: np.ndarray) -> np.ndarray:
    """Coefficients [F] of 0 or more that fit counts [N, F] to us [N] by least squares of the error relative to measured [N].

    Negative ones are set to 0 one at a time, the most negative (by what it adds to the times) first, and the rest fitted again.
    """
    relative = counts / measured[:, None]
    scale = np.linalg.norm(relative, axis=0)
    kept = [column for column in range(counts.shape[1]) if scale[column] > 0]
    fitted = np.zeros(counts.shape[1])
    while kept:
        solution = np.linalg.lstsq(relative[:, kept] / scale[kept], us / measured, rcond=None)[0]
        worst = int(np.argmin(solution))
        if solution[worst] >= 0:
            fitted[kept] = solution / scale[kept]
            break
        del kept[worst]
    return fitted


def fit(rows: Iterable[Mapping[str, Any]], start: Coefficients | None = None) -> Table:
    """Coefficients fitted to measured rows, in the form of the coefficients file.

    start: those of kernels without a row, and of features that are 0 in all rows of theirs; the coefficients file by default.
    Raises ValueError for a row whose measured time is not positive.
    """
    table: Table = {kernel: dict(row) for kernel, row in (start or Coefficients.load()).us.items()}
    rows = list(rows)
    for row in rows:
        if not measured_us(row) > 0:
            raise ValueError(f"measured_us must be above 0, got {measured_us(row)} for {row['kernel']}")
    for kernel, names in FEATURES.items():
        measured = [row for row in rows if row["kernel"] == kernel]
        if not measured:
            continue
        counted = [row_features(row) for row in measured]
        counts = np.array([[row[name] for name in names] for row in counted], dtype=np.float64)
        us = np.array([row["us"] for row in measured], dtype=np.float64)
        fitted = fit_kernel(counts, us, np.array([measured_us(row) for row in measured]))
        table[kernel] |= {name: float(value) for name, value, seen in zip(names, fitted, counts.any(axis=0), strict=True) if seen}
    return table


def relative_errors(rows: Iterable[Mapping[str, Any]], table: Table) -> dict[str, list[float]]:
    """|predicted - us| / measured_us of the rows of each kernel that has some."""
    errors: dict[str, list[float]] = {}
    for row in rows:
        predicted = sum(table[row["kernel"]][name] * count for name, count in row_features(row).items())
        errors.setdefault(row["kernel"], []).append(abs(predicted - row["us"]) / measured_us(row))
    return errors


def format_table(table: Table) -> str:
    """The text of a coefficients file: one kernel a line, 5 significant digits."""
    rounded = {kernel: {name: float(f"{value:.5g}") for name, value in row.items()} for kernel, row in table.items()}
    return "{\n" + ",\n".join(f'  "{kernel}": {json.dumps(row)}' for kernel, row in rounded.items()) + "\n}\n"


# Measuring


def plans_of(problem: Problem, device: DeviceSpec) -> list[tuple[str, Plan]]:
    """(gates, plan) of what is measured for a shape: uncut, the planner's cut and its neighbours, slow heads by transition and serial.

    Where the planner leaves the sequences whole, its start value stands for its cut.
    """
    chosen = autocp.plan(problem, device)
    length, split = chosen.chunks_per_segment, chosen.split or 1
    if not length:
        length = round(autocp.start_value(problem, device.sm_count, 1)[1])
    cut = Plan(max(length, autocp.MIN_SEGMENT), split, 1, 1, 0)
    length = cut.chunks_per_segment
    transitions = replace(cut, max_transition_heads=MAX_TOKENS)
    rows = [("fast", WHOLE), *[("fast", replace(WHOLE, split=number)) for number in (1, 2)], ("fast", chosen)]
    rows += [("fast", cut), ("fast", replace(cut, split=3 - split))]
    rows += [("fast", replace(cut, chunks_per_segment=number)) for number in (length // 2, 2 * length)]
    rows += [("fast", replace(cut, inline_warmup=0)), ("fast", transitions)]
    rows += [(gates, plan) for gates in ("slow", "mixed") for plan in (cut, transitions)]
    rows += [("slow", replace(transitions, chunks_per_segment=2 * length))]

    def fits(plan: Plan) -> bool:
        if not plan.chunks_per_segment:
            return True
        longest = max(problem.lengths or (problem.seq_len,))
        numbers = plan.num_segments(problem.num_seqs, problem.tokens, problem.seq_len)
        large = numbers * problem.value_heads > autocp.MAX_SEGMENT_HEADS
        return autocp.MIN_SEGMENT <= plan.chunks_per_segment < -(-longest // costs.CHUNK) and not large

    return [row for row in dict.fromkeys(rows) if fits(row[1])]


class OutOfBudget(Exception):
    """The time given with --budget is over."""


@dataclass
class Measurement:
    """One run of --measure.

    path, facts: where lines go, and what each of them carries. deadline: of time.monotonic(); no measurement begins after it.
    reps: timed rounds. idle_us: microseconds of a graph of a kernel that does nothing.
    """

    path: Path
    facts: Mapping[str, Any]
    device: DeviceSpec
    deadline: float = math.inf
    reps: int = 7
    place: str = "cuda"
    ready_up: Callable[[Start], Runnable] = make_runnable
    timer: Callable[..., dict[str, Timing]] = time_interleaved
    idle_us: float = 0.0
    lines: int = 0
    known: dict[tuple[object, ...], float] = field(default_factory=dict)

    def time(self, starts: Mapping[str, Start], rounds: int = 1) -> dict[str, float]:
        """Microseconds of each, interleaved, in so many times `reps` rounds."""
        timings = self.timer({name: self.ready_up(start) for name, start in starts.items()}, reps=rounds * self.reps)
        return {name: timing.ms * 1e3 for name, timing in timings.items()}

    def run(self, shapes: Sequence[Shape]) -> None:
        nothing = torch.empty(1, device=self.place)
        self.idle_us = self.time({"idle": at_once(lambda: nothing.fill_(0.0))}, rounds=8)["idle"]
        for shape in shapes:
            self.known.clear()
            cases: dict[str, Case] = {}
            for gates, plan in plans_of(problem_of(shape), self.device):
                for backward in (False, True) if shape.heads in BACKWARD_HEADS else (False,):
                    if time.monotonic() > self.deadline:
                        raise OutOfBudget
                    if gates not in cases:
                        cases[gates] = make_case(shape, gates, self.place)
                    self.run_row(cases[gates], plan, backward)
            print(f"{shape.heads} {shape.lengths}: {self.lines} lines so far", flush=True)

    def run_row(self, case: Case, plan: Plan, backward: bool) -> None:
        """Times the kernels of a call, but for those timed before with this shape and the same features, and the whole call."""
        if self.place == "cuda":
            torch.cuda.empty_cache()  # graphs of the row before kept memory of their own
        problem, assumed = problem_of(case.shape), ASSUMED[case.gates]
        calls = (backward_kernel_calls if backward else kernel_calls)(case, plan)
        keys = {kernel: (kernel, *features(kernel, problem, self.device.sm_count, plan, assumed).values()) for kernel in calls}
        new = {kernel: at_once(call) for kernel, call in calls.items() if keys[kernel] not in self.known}
        # Kernels of a backward pass run beside each other: what it takes beyond them cannot be told from the whole.
        measured = self.time(new if backward else {**new, "launch": own_call(case, plan, backward).start})
        row = {"hk": problem.key_heads, "hv": problem.value_heads, "lengths": list(case.shape.sequence_lengths), "seq_len": problem.seq_len}
        row |= {"gates": asdict(assumed), "plan": asdict(plan), "backward": backward, "num_sms": self.device.sm_count}
        row["kept"] = backward and keeps_segment_states(problem, plan)
        self.known |= {keys[kernel]: measured[kernel] - self.idle_us for kernel in new}
        us = {kernel: self.known[keys[kernel]] for kernel in new}
        if not backward:
            us["launch"] = measured["launch"] - sum(self.known[key] for key in keys.values())
        for kernel, value in us.items():
            times = {"us": round(value, 3), "measured_us": round(measured[kernel], 3), "idle_us": round(self.idle_us, 3)}
            append_line(self.path, {"kernel": kernel, **row, **times, **self.facts})
            self.lines += 1


def measure(path: Path, budget: float) -> int:
    """--measure: appends to path until all is measured or the budget of seconds is used up."""
    if not torch.cuda.is_available():
        print("needs a CUDA device")
        return 2
    measurement = Measurement(path, environment(), device_spec("cuda"), time.monotonic() + budget)
    try:
        with torch.no_grad():
            measurement.run(SHAPES)
    except OutOfBudget:
        print(f"stopped after {budget:.0f} s")
    print(f"{measurement.lines} lines in {path}")
    return 0


def rows_of_lines(lines: Iterable[Mapping[str, Any]], idle_us: float) -> list[dict[str, Any]]:
    """Rows of the kernels that every backward pass has, from lines of bench/run.py --direction bwd --kernels: that of a call, which has
    its plan, stands before those of its kernels.

    idle_us: what a graph of a kernel that does nothing takes.
    """
    rows, plan = [], WHOLE
    for line in lines:
        name, _, kernel = line["provider"].partition(":")
        if name == "qla" and not kernel:
            plan = Plan(**line["plan"]).of_backward if "plan" in line else WHOLE
        if kernel not in EVERY_BACKWARD:
            continue
        shape = parse_shape(f"{line['hk']}/{line['hv']}:{line['lengths']}")
        problem, lengths = problem_of(shape), list(shape.sequence_lengths)
        us = line["ms"] * 1e3
        rows.append({
            "kernel": kernel, "hk": line["hk"], "hv": line["hv"], "lengths": lengths, "seq_len": problem.seq_len,
            "gates": asdict(ASSUMED[line["gates"]]), "plan": asdict(plan), "backward": True, "kept": keeps_segment_states(problem, plan),
            "us": round(us - idle_us, 3), "measured_us": round(us, 3), "idle_us": idle_us,
            **{key: line[key] for key in ("gpu", "torch", "tilelang", "commit", "date")},
        })  # fmt: skip
    return rows


def add_lines(paths: Sequence[Path], results: Path) -> int:
    """--lines: appends rows to `results`, which has the time of an idle kernel."""
    idle_us = [row["idle_us"] for row in read_lines([results]) if "idle_us" in row][-1]
    rows = rows_of_lines(read_lines(paths), idle_us)
    for row in rows:
        append_line(results, row)
    print(f"{len(rows)} lines in {results}")
    return 0


def last_measured(rows: Iterable[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """The rows of the commit at which each kernel, of either direction, was measured last."""
    kept: dict[tuple[Any, ...], list[Mapping[str, Any]]] = {}
    for row in sorted(rows, key=lambda row: row.get("date", "")):
        of_kernel = kept.setdefault((row["kernel"], row.get("backward", False)), [])
        if of_kernel and of_kernel[-1].get("commit") != row.get("commit"):
            of_kernel.clear()
        of_kernel.append(row)
    return [row for of_kernel in kept.values() for row in of_kernel]


def scaled(rows: Sequence[Mapping[str, Any]], start: Coefficients | None = None) -> Table:
    """The coefficients with one factor for all of a kernel: the mean of what its rows took over what was expected of them.

    For a kernel that changed and was measured on too few kinds of shapes for each coefficient by itself.
    """
    table: Table = {kernel: dict(row) for kernel, row in (start or Coefficients.load()).us.items()}
    for kernel, before in table.items():
        ratios = [
            row["us"] / sum(before[name] * count for name, count in row_features(row).items()) for row in rows if row["kernel"] == kernel
        ]
        if ratios:
            table[kernel] = {name: value * statistics.fmean(ratios) for name, value in before.items()}
    return table


def write_fit(rows: Sequence[Mapping[str, Any]], out: Path | None, kernels: Container[str] = FEATURES, scale: bool = False) -> int:
    """--fit: the coefficients into `out`, or printed."""
    rows = [row for row in last_measured(rows) if row["kernel"] in kernels]
    text = format_table(scaled(rows) if scale else fit(rows))
    table = json.loads(text)
    Coefficients(table)  # refuses what the planner would not load
    for kernel, errors in relative_errors(rows, table).items():
        print(f"{kernel:<22}{len(errors):5} rows, error median {statistics.median(errors):6.1%}, worst {max(errors):6.1%}")
    if out:
        out.write_text(text)
    else:
        print(text, end="")
    return 0


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Measures what AutoCP's cost model is made of, and fits its coefficients.")
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--measure", action="store_true", help="time kernels and calls on this GPU")
    what.add_argument("--lines", type=Path, nargs="+", metavar="FILE", help="lines of bench/run.py --direction bwd --kernels")
    what.add_argument("--fit", type=Path, metavar="ROWS", help="JSON lines, one measured kernel each")
    parser.add_argument("--results", type=Path, default=RESULTS, help=f"where --measure and --lines append (default: {RESULTS.name})")
    parser.add_argument("--kernels", default=",".join(FEATURES), help="the kernels that --fit fits; coefficients of others stay")
    parser.add_argument("--scale", action="store_true", help="--fit fits one factor for each kernel, on the coefficients as they are")
    parser.add_argument("--budget", type=float, default=math.inf, help="seconds after which --measure begins no further measurement")
    parser.add_argument("--out", type=Path, help="coefficients file for --fit to write; without it they are printed")
    args = parser.parse_args(argv)
    if args.lines:
        return add_lines(args.lines, args.results)
    return (
        measure(args.results, args.budget)
        if args.measure
        else write_fit(list(read_lines([args.fit])), args.out, args.kernels.split(","), args.scale)
    )


if __name__ == "__main__":
    sys.exit(main())
