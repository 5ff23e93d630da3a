"""What a results file holds: its lines, the rows that they make, and the table of rows."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bench.facts import read_lines
from bench.shapes import Shape
from bench.tested import is_a_version
from bench.timing import Timing

OWN = "qla"
OURS = (OWN, "qla_whole")
RESULTS = Path(__file__).resolve().parent / "results"

RowKey = tuple[int, int, str, str]  # hk, hv, lengths, gates


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

    @property
    def key(self) -> RowKey:
        return self.shape.hk, self.shape.hv, self.shape.lengths, self.gates

    @property
    def name(self) -> str:
        return f"{self.shape.heads} {self.shape.lengths} {self.gates}"


def make_record(
    shape: Shape, gates: str, provider: str, version: str | None, timing: Timing, facts: Mapping[str, Any], direction: str = "fwd"
) -> dict[str, Any]:
    """One line of a results file. "tested", where it is there: the commit whose GPU tests let the line be published."""
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
        **({"tested": facts["tested"]} if facts.get("tested") else {}),
        "date": facts.get("date"),
        "mode": timing.mode,
        "sm_mhz": timing.sm_mhz,
        "reps": timing.reps,
    }


def geometric_mean(ratios: Sequence[float]) -> float:
    return math.exp(sum(map(math.log, ratios)) / len(ratios))


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
        text.append(f"best peer / {OWN}: geometric mean {geometric_mean(ratios):.2f}, worst {min(ratios):.2f}, rows {len(ratios)}")
    return "\n".join(text)


def format_row(row: Row) -> str:
    times = ", ".join(f"{name} {ms:.4f}" for name, ms in row.ms.items())
    ratio = f", best peer / {OWN} {row.ratio:.2f}" if row.ratio else ""
    predicted = ""
    if row.predicted_ms is not None:
        predicted = f", predicted {row.predicted_ms * 1e3:.1f} us, off by {row.predicted_ms / row.ms[OWN] - 1:+.1%}"
    return f"{row.name}: {times} ms{ratio}{predicted}"


def key_of(record: Mapping[str, Any]) -> RowKey:
    """The row that a line belongs to."""
    return record["hk"], record["hv"], record["lengths"], record["gates"]


def known_times(paths: Iterable[Path], direction: str = "fwd") -> dict[tuple[int, int, str, str, str], float]:
    """Recorded times by (hk, hv, lengths, gates, provider); later lines win."""
    return {(*key_of(r), r["provider"]): r["ms"] for r in read_lines(paths) if r.get("direction") == direction}


def times_of_this_version(path: Path, direction: str, facts: Mapping[str, Any]) -> dict[RowKey, dict[str, float]]:
    """By row and provider, what the file has from this commit on this GPU; nothing where no commit says what the code is."""
    times: dict[RowKey, dict[str, float]] = {}
    if is_a_version(facts.get("commit")) and path.exists():
        for r in read_lines([path]):
            if (r.get("direction"), r.get("commit"), r.get("gpu")) == (direction, facts.get("commit"), facts.get("gpu")):
                times.setdefault(key_of(r), {})[r["provider"]] = r["ms"]
    return times


def recorded_rows(paths: Iterable[Path], direction: str = "fwd") -> list[Row]:
    """Rows of what was recorded, in the order in which they first appear."""
    rows: dict[RowKey, Row] = {}
    for (hk, hv, lengths, gates, provider), ms in known_times(paths, direction).items():
        rows.setdefault((hk, hv, lengths, gates), Row(Shape(hk, hv, lengths), gates)).ms[provider] = ms
    return list(rows.values())


def all_names(rows: Iterable[Row], first: Sequence[str]) -> list[str]:
    """Columns of the table: `first`, then whatever else the rows have."""
    return [*first, *sorted({name for row in rows for name in row.ms} - set(first))]
