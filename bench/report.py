"""README's performance table and the plots, from the results files; needs no GPU.

    python bench/report.py                 writes the part of README.md between its markers, and plots into bench/results/
    python bench/report.py --check         writes nothing; exit status 1 if README.md does not say what the files give

Read are RESULTS/fwd_*.jsonl and bwd_*.jsonl, except *.unpublished.jsonl. Of each row and provider the newest line counts. A row is
left out if the GPU tests of that line's commit of qla are not green (bench/tested.py, RESULTS/gpu_tests.jsonl; a line may name the
tested commit that stood for its own): older figures would not be what the code does. Peers do not change with qla: theirs may come
from a run at an older commit. The table names the commits. What it says follows from the files alone, not from git or the machine.
"""

from __future__ import annotations

import argparse
import collections
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

if not __package__:  # run as a file: the repository root belongs on the path, this folder does not
    sys.path[0] = str(Path(__file__).resolve().parents[1])

from bench.directions import DIRECTIONS  # noqa: E402
from bench.facts import ROOT, read_lines  # noqa: E402
from bench.floors import floor_ms  # noqa: E402
from bench.records import OWN, RESULTS, Row, RowKey, geometric_mean, key_of  # noqa: E402
from bench.shapes import BACKWARD_SETS, GATES, SETS, Shape  # noqa: E402
from bench.tested import TESTS, Verdict, same_name, verdict_on  # noqa: E402

BEGIN, END = "<!-- performance:begin -->", "<!-- performance:end -->"
PEERS = {"fla": "fla", "flash_qla": "flash-qla", "flashinfer": "flashinfer"}  # a provider's name, and the package's
PASSES = {"fwd": "Forward", "bwd": "Backward"}
NAMED = 3  # rows named in the summary, of those that are slower than a peer

ORDER = {shape: i for i, shape in enumerate(dict.fromkeys([*SETS["sweep"], *BACKWARD_SETS["targets"]]))}


@dataclass
class Report:
    """What is shown of one direction.

    rows: those with a time of ours. commits, versions: by provider. left_out: by reason, how many rows have no line of ours that
    may be published.
    """

    direction: str
    gpu: str = ""
    rows: list[Row] = field(default_factory=list)
    commits: dict[str, list[str]] = field(default_factory=dict)
    versions: dict[str, list[str]] = field(default_factory=dict)
    left_out: dict[str, int] = field(default_factory=dict)

    def of(self, gates: str) -> list[Row]:
        return [row for row in self.rows if row.gates == gates]

    def row(self, shape: Shape, gates: str) -> Row | None:
        return next((row for row in self.rows if (row.shape, row.gates) == (shape, gates)), None)


def results_files(folder: Path) -> list[Path]:
    return sorted(path for name in PASSES for path in folder.glob(f"{name}_*.jsonl") if not path.name.endswith(".unpublished.jsonl"))


def make_report(direction: str, lines: Iterable[Mapping[str, Any]], runs: Sequence[Mapping[str, Any]]) -> Report:
    """From lines of results files and of runs of the GPU tests. Rows of one GPU only: that of our newest line."""
    report = Report(direction)
    verdicts: dict[str | None, Verdict] = {}
    kept = [line for line in lines if line.get("direction") == direction and line["provider"] in (OWN, *PEERS)]
    kept.sort(key=lambda line: line.get("date") or "")
    refused: dict[RowKey, str] = {}
    for line in {key_of(line): line for line in kept if line["provider"] == OWN}.values():
        commit = line.get("tested") or line.get("commit")
        verdict = verdicts.setdefault(commit, verdict_on(commit, runs, same_name))
        if not verdict.green:
            refused[key_of(line)] = verdict.reason
    report.left_out = dict(collections.Counter(refused.values()))
    kept = [line for line in kept if key_of(line) not in refused]
    of_ours = [line for line in kept if line["provider"] == OWN]
    if not of_ours:
        return report
    report.gpu = of_ours[-1]["gpu"]
    newest = {(key_of(line), line["provider"]): line for line in kept if line["gpu"] == report.gpu}
    rows: dict[RowKey, Row] = {
        key: Row(Shape(*key[:3]), key[3], {OWN: line["ms"]}) for (key, provider), line in newest.items() if provider == OWN
    }
    for (key, provider), line in newest.items():
        if key not in rows:
            continue
        rows[key].ms[provider] = line["ms"]
        for names, name in ((report.commits, line["commit"]), (report.versions, line["provider_version"])):
            if name not in names.setdefault(provider, []):
                names[provider].append(name)
    last = len(ORDER)
    report.rows = sorted(rows.values(), key=lambda row: (GATES.index(row.gates), ORDER.get(row.shape, last), row.key))
    return report


def read_reports(folder: Path, tests: Path) -> list[Report]:
    lines = list(read_lines(results_files(folder)))
    runs = list(read_lines([tests])) if tests.exists() else []
    return [make_report(direction, lines, runs) for direction in PASSES]


@dataclass(frozen=True)
class Summary:
    """Of the rows of one direction and gate regime that have a peer: ratios of the best peer's time to ours."""

    rows: int
    mean: float
    worst: Row
    slower: tuple[Row, ...]


def summarise(rows: Iterable[Row]) -> Summary | None:
    compared = sorted((row for row in rows if row.ratio), key=lambda row: row.ratio or 0.0)
    if not compared:
        return None
    ratios = [row.ratio or 0.0 for row in compared]
    return Summary(len(compared), geometric_mean(ratios), compared[0], tuple(row for row in compared if (row.ratio or 0.0) < 1))


def _named(rows: Sequence[Row], most: int) -> str:
    names = ", ".join(f"{row.shape.heads} {row.shape.lengths} ({row.ratio:.2f})" for row in rows[:most])
    return names + (f" and {len(rows) - most} more" if len(rows) > most else "")


def summary_lines(reports: Sequence[Report]) -> list[str]:
    """One line for each direction and gate regime, every slower row named."""
    lines = []
    for report in reports:
        for gates in GATES:
            if summary := summarise(report.of(gates)):
                slower = f"{len(summary.slower)} slower" + (f": {_named(summary.slower, len(summary.slower))}" if summary.slower else "")
                lines.append(
                    f"{PASSES[report.direction].lower()}, {gates} gates: {summary.rows} rows, best peer / {OWN} geometric mean "
                    f"{summary.mean:.2f}, worst {_named([summary.worst], 1)}, {slower}"
                )
        lines += [f"{PASSES[report.direction].lower()}: {count} rows left out: {reason}" for reason, count in report.left_out.items()]
    return lines


def _table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    return [f"| {' | '.join(cells)} |" for cells in (header, ["---"] * len(header), *rows)]


def _summary_table(reports: Sequence[Report]) -> list[str]:
    rows = []
    for report in reports:
        for gates in GATES:
            if summary := summarise(report.of(gates)):
                slower = f"{len(summary.slower)}" + (f": {_named(summary.slower, NAMED)}" if summary.slower else "")
                name = PASSES[report.direction].lower()
                rows.append([name, gates, str(summary.rows), f"{summary.mean:.2f}", _named([summary.worst], 1), slower])
    return _table(["pass", "gates", "rows", "geometric mean", "worst row", "slower than the best peer"], rows)


def _sources(report: Report) -> str:
    """Which commit and which versions the times are from."""
    parts = [f"qla at {', '.join(report.commits[OWN])}"]
    for provider, name in PEERS.items():
        if provider in report.commits:
            versions, commits = ", ".join(map(str, report.versions[provider])), ", ".join(report.commits[provider])
            parts.append(f"{name} {versions} (measured at {commits})")
    return "; ".join(parts)


def _rows_table(report: Report) -> list[str]:
    """Rows of the sets "targets" and "cp" that were measured: times with fast gates, and the ratio in each gate regime."""
    sets = DIRECTIONS[report.direction].sets
    peers = [provider for provider in PEERS if provider in report.commits]
    rows = []
    for shape in sorted({*sets["targets"], *sets["cp"]}, key=ORDER.__getitem__):
        by_gates = {gates: report.row(shape, gates) for gates in GATES}
        if not any(by_gates.values()):
            continue
        fast = by_gates["fast"]
        times = [f"{fast.ms[name]:.3f}" if fast and name in fast.ms else "-" for name in (OWN, *peers)]
        ratios = [f"{row.ratio:.2f}" if row and row.ratio else "-" for row in by_gates.values()]
        rows.append([shape.heads, shape.lengths, *times, f"{floor_ms(shape, report.direction):.3f}", *ratios])
    return _table(["hk/hv", "lengths", OWN, *(PEERS[name] for name in peers), "floor", *GATES], rows)


def format_reports(reports: Sequence[Report], plots: Sequence[str] = ()) -> str:
    """What stands between the markers of README.md. plots: paths from there of those to link."""
    shown = [report for report in reports if report.rows]
    if not shown:
        return "Nothing was measured yet."
    lines = ["Time over qla's of the best peer that was measured on the row (above 1: qla is faster):", "", *_summary_table(shown)]
    for report in shown:
        heading = f"{PASSES[report.direction]} on {report.gpu}, milliseconds with fast gates; then best peer / qla with each kind of gates."
        lines += ["", heading, f"{_sources(report)}.", "", *_rows_table(report)]
    left_out = [f"{PASSES[report.direction].lower()}, {count}: {reason}" for report in reports for reason, count in report.left_out.items()]
    if left_out:
        lines += ["", f"Rows left out: {'; '.join(left_out)}."]
    if plots:
        lines += ["", "Plots: " + ", ".join(f"[{Path(path).stem.replace('_', ' ')}]({path})" for path in plots) + "."]
    return "\n".join(lines)


def insert(readme: str, text: str) -> str:
    """The README with this text between the markers. Raises ValueError where there is not one pair of them."""
    if readme.count(BEGIN) != 1 or readme.count(END) != 1 or readme.index(BEGIN) > readme.index(END):
        raise ValueError(f"the README must have {BEGIN} and, after it, {END}, once each")
    before, rest = readme.split(BEGIN)
    return f"{before}{BEGIN}\n{text}\n{END}{rest.split(END)[1]}"


def plot_paths(reports: Iterable[Report], results: Path) -> list[Path]:
    """The plots that these reports have, whether drawn yet or not."""
    return [results / f"{report.direction}_{kind}.png" for report in reports if report.rows for kind in ("latency", "ratio", "floor")]


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="bench/report.py", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="write nothing; exit status 1 if the README does not say what the files give")
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder of the results files and of the plots")
    parser.add_argument("--tests", type=Path, default=TESTS, help="lines of the GPU tests")
    parser.add_argument("--readme", type=Path, default=ROOT / "README.md", help="the file with the markers")
    parser.add_argument("--no-plots", action="store_true", help="write the table alone")
    args = parser.parse_args(argv)
    reports = read_reports(args.results, args.tests)
    print("\n".join(summary_lines(reports)))
    pictures = plot_paths(reports, args.results)
    folder = args.readme.resolve().parent
    links = [path.resolve().relative_to(folder).as_posix() for path in pictures if path.resolve().is_relative_to(folder)]
    old = args.readme.read_text(encoding="utf-8")
    new = insert(old, format_reports(reports, links))
    if args.check:
        print(f"{args.readme.name} {'says what the files give' if new == old else 'is out of date: run python bench/report.py'}")
        return int(new != old)
    args.readme.write_text(new, encoding="utf-8")
    if not args.no_plots:
        from bench.plots import draw_all

        draw_all([report for report in reports if report.rows], args.results)
    return 0


if __name__ == "__main__":
    sys.exit(main())
