"""Plots of what was measured: latency over length, ratio to the best peer, distance to the floor."""

from __future__ import annotations

import io
import math
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bench.floors import floor_ms
from bench.records import OWN, Row
from bench.shapes import GATES

if TYPE_CHECKING:
    from bench.report import Report

COLORS = {OWN: "#c0392b", "fla": "#7f8c8d", "flash_qla": "#2471a3", "flashinfer": "#229954"}
TITLES = {"fwd": "forward", "bwd": "backward"}
LEVELS = (0.5, 0.75, 0.9, 1.0, 1.1, 1.25, 1.5, 2.0, 3.0)  # where the color of a ratio changes; beyond the ends as at them


def draw_all(reports: Iterable[Report], folder: Path) -> None:
    """Three PNG files for each report, DIRECTION_latency, DIRECTION_ratio and DIRECTION_floor."""
    for report in reports:
        for kind, draw in (("latency", draw_latency), ("ratio", draw_ratios), ("floor", draw_floor)):
            _save(draw(report), folder / f"{report.direction}_{kind}.png")


def _figure(rows: int, columns: int, size: tuple[float, float], **options: Any) -> tuple[Any, Any]:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    return pyplot.subplots(rows, columns, figsize=size, squeeze=False, layout="constrained", **options)


def _save(figure: Any, path: Path) -> None:
    """As a PNG of 64 colours: a third of the size."""
    from matplotlib import pyplot
    from PIL import Image

    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=100)
    pyplot.close(figure)
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.open(buffer).convert("RGB").quantize(64, dither=Image.Dither.NONE).save(path, optimize=True)


def _legend(figure: Any, panel: Any) -> None:
    """One for the whole figure, beside it."""
    figure.legend(*panel.get_legend_handles_labels(), loc="outside right upper", frameon=False, fontsize=8)


def unique(values: Iterable[Any]) -> list[Any]:
    return list(dict.fromkeys(values))


def shown_gates(report: Report) -> str:
    """The gate regime of a plot that shows one: fast where it was measured."""
    return next(gates for gates in GATES if report.of(gates))


def draw_latency(report: Report) -> Any:
    """A panel for each head configuration: milliseconds of one sequence over its length, by provider, and the floor."""
    from matplotlib.ticker import NullLocator

    gates = shown_gates(report)
    rows = report.of(gates)
    single = [row for row in rows if len(row.shape.sequence_lengths) == 1] or rows
    heads = unique(row.shape.heads for row in single)
    columns = min(3, len(heads))
    figure, panels = _figure(math.ceil(len(heads) / columns), columns, (3.9 * columns, 2.9 * math.ceil(len(heads) / columns)))
    for panel, name in zip(panels.flat, heads, strict=False):
        of_heads = sorted((row for row in single if row.shape.heads == name), key=lambda row: row.shape.tokens)
        for provider, color in COLORS.items():
            points = [(row.shape.tokens, row.ms[provider]) for row in of_heads if provider in row.ms]
            if points:
                panel.plot(*zip(*points, strict=True), marker="o", markersize=3, color=color, label=provider)
        tokens = [row.shape.tokens for row in of_heads]
        floors = [floor_ms(row.shape, report.direction) for row in of_heads]
        panel.plot(tokens, floors, color="black", linestyle=":", linewidth=1, label="floor")
        panel.set(xscale="log", yscale="log", title=f"heads {name}")
        panel.set_xticks(unique(tokens), [f"{n // 1024}k" if n % 1024 == 0 else str(n) for n in unique(tokens)], minor=False)
        panel.xaxis.set_minor_locator(NullLocator())
        panel.yaxis.set_major_formatter("{x:g}")
        panel.grid(alpha=0.25)
    for panel in panels.flat[len(heads) :]:
        panel.set_axis_off()
    _legend(figure, panels.flat[0])
    figure.supxlabel("tokens of one sequence")
    figure.supylabel("milliseconds")
    figure.suptitle(f"{TITLES[report.direction]}, {gates} gates, {report.gpu}")
    return figure


def ratio_grid(rows: Sequence[Row], heads: Sequence[str], lengths: Sequence[str]) -> list[list[float]]:
    """Ratios by head configuration and lengths; NaN where there is none."""
    ratios = {(row.shape.heads, row.shape.lengths): row.ratio for row in rows}
    return [[ratios.get((head, length)) or math.nan for length in lengths] for head in heads]


def draw_ratios(report: Report) -> Any:
    """A heat map for each gate regime: best peer's time over ours, head configurations by lengths. Red: a peer is faster."""
    from matplotlib.colors import BoundaryNorm, ListedColormap

    regimes = [gates for gates in GATES if report.of(gates)]
    heads, lengths = (unique(getattr(row.shape, what) for row in report.rows) for what in ("heads", "lengths"))
    size = (2.2 + 0.62 * len(lengths), 1.3 + (1.0 + 0.3 * len(heads)) * len(regimes))
    figure, panels = _figure(len(regimes), 1, size, sharex=True)
    # A color for each step between levels and for what lies beyond them: reds below 1, greens above.
    colors = ["#d73027", "#f46d43", "#fdae61", "#ffe0a8", "#eef8cf", "#d3eda0", "#a6d96a", "#66bd63", "#2b9a4f", "#1a8a48"]
    color_map = ListedColormap(colors)
    norm = BoundaryNorm(LEVELS, len(colors), extend="both")
    for panel, gates in zip(panels.flat, regimes, strict=True):
        grid = ratio_grid(report.of(gates), heads, lengths)
        image = panel.imshow(grid, norm=norm, cmap=color_map, aspect="auto")
        for y, line in enumerate(grid):
            for x, ratio in enumerate(line):
                if not math.isnan(ratio):
                    panel.text(x, y, f"{ratio:.2f}", ha="center", va="center", fontsize=7)
        panel.set_yticks(range(len(heads)), heads, fontsize=8)
        panel.set_xticks(range(len(lengths)), lengths, rotation=45, ha="right", fontsize=8)
        panel.set_title(f"{gates} gates", fontsize=9)
    figure.colorbar(image, ax=list(panels.flat), shrink=0.6, label="best peer / qla", ticks=LEVELS)
    figure.suptitle(f"{TITLES[report.direction]}: time of the best peer over qla's, {report.gpu}", fontsize=10)
    return figure


def draw_floor(report: Report) -> Any:
    """Each row's time over its floor, against the floor, by provider, a panel for each gate regime."""
    regimes = [gates for gates in GATES if report.of(gates)]
    figure, panels = _figure(1, len(regimes), (1 + 4 * len(regimes), 4), sharey=True)
    for panel, gates in zip(panels.flat, regimes, strict=True):
        for provider, color in COLORS.items():
            points = [(floor_ms(row.shape, report.direction), row.ms[provider]) for row in report.of(gates) if provider in row.ms]
            if points:
                distances = [(floor, ms / floor) for floor, ms in points]
                panel.scatter(*zip(*distances, strict=True), s=14, color=color, alpha=0.7, linewidths=0, label=provider)
        panel.axhline(1, color="black", linestyle=":", linewidth=1)
        panel.set(xscale="log", yscale="log", xlabel="floor, milliseconds", title=f"{gates} gates")
        panel.grid(alpha=0.25)
    panels.flat[0].set_ylabel("time / floor")
    _legend(figure, panels.flat[0])
    figure.suptitle(f"{TITLES[report.direction]}: distance to the floor, {report.gpu}")
    return figure
