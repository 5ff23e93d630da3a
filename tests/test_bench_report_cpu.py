"""README's performance table and the plots: which lines count, what is summed up, and that the README says what the files give."""

from __future__ import annotations

import math

import pytest

from bench import facts, plots, records, report, timing
from bench.floors import floor_ms, memory_ms, tensor_core_ms
from bench.shapes import GATES, SETS, Shape

GREEN, RED = "abcdef0", "bbbbbb1"
RUNS = [
    {"commit": GREEN, "passed": 5, "failed": 0, "date": "2026-01-01T00:00:00Z"},
    {"commit": RED, "passed": 5, "failed": 1, "date": "2026-01-01T00:00:00Z"},
]
LONG, MANY = Shape(16, 64, "32768"), Shape(2, 8, "8192x4")


def a_line(shape, provider, ms, gates="fast", day=1, **changes):
    of_run = {"gpu": "NVIDIA H200", "commit": GREEN, "date": f"2026-01-{day:02}T00:00:00Z"}
    line = records.make_record(shape, gates, provider, "1.0", timing.Timing(ms, ms, ms, "graph"), of_run, changes.pop("direction", "fwd"))
    return line | changes


def rows_of(lines, direction="fwd"):
    return {row.key: row.ms for row in report.make_report(direction, lines, RUNS).rows}


# Floors


@pytest.mark.parametrize(
    "heads, lengths, ms", [((2, 8), "32768", 0.048), ((8, 32), "1024x8", 0.048), ((16, 48), "2048", 0.018), ((16, 64), "8192x4", 0.39)]
)
def test_forward_floors(heads, lengths, ms):
    shape = Shape(*heads, lengths)
    assert tensor_core_ms(shape, "fwd") == pytest.approx(ms, rel=0.05)
    assert memory_ms(shape, "fwd") < floor_ms(shape, "fwd") == tensor_core_ms(shape, "fwd")


def test_other_floors():
    assert tensor_core_ms(Shape(16, 32, "32768"), "bwd") == pytest.approx(0.67, rel=0.01)
    assert tensor_core_ms(Shape(1, 1, "65"), "fwd") == pytest.approx(2 * 9.3e6 / 790e12 * 1e3), "a begun chunk is a chunk"
    by_hand = 2048 * (2 * 16 * 256 + 2 * 16 * 256 + 2 * 16 * 4) / 4.3e12 * 1e3
    assert memory_ms(Shape(16, 16, "2048"), "fwd") == pytest.approx(by_hand)
    assert floor_ms(Shape(16, 1 * 16, "1x64"), "fwd") == pytest.approx(tensor_core_ms(Shape(16, 16, "1x64"), "fwd"))


# Which lines count


def test_the_newest_line_counts_and_older_peers_fill_in():
    lines = [
        a_line(LONG, "qla", 0.5, day=2),
        a_line(LONG, "qla", 9.0, day=1),  # older, though later in the files
        a_line(LONG, "fla", 2.0, day=1, commit="0000000"),
        a_line(LONG, "flash_qla_nocp", 0.1),
        a_line(LONG, "qla:fwd_fused", 0.1),
        a_line(LONG, "qla", 0.1, day=3, direction="bwd"),
        a_line(MANY, "fla", 1.0),
    ]
    assert rows_of(lines) == {(16, 64, "32768", "fast"): {"qla": 0.5, "fla": 2.0}}
    made = report.make_report("fwd", lines, RUNS)
    assert made.commits == {"qla": [GREEN], "fla": ["0000000"]} and made.gpu == "NVIDIA H200" and not made.left_out


def test_lines_of_ours_need_green_tests():
    lines = [
        a_line(LONG, "qla", 0.5),
        a_line(LONG, "qla", 0.1, day=2, commit=RED),
        a_line(LONG, "qla", 0.1, day=3, commit="ccccccc"),
        a_line(LONG, "qla", 0.4, day=4, commit="ddddddd", tested=GREEN),  # another commit with the same code
        a_line(LONG, "fla", 0.8, day=2, commit=RED),
    ]
    assert rows_of(lines) == {(16, 64, "32768", "fast"): {"qla": 0.4, "fla": 0.8}}
    assert not report.make_report("fwd", lines, RUNS).left_out
    newer = report.make_report("fwd", [*lines, a_line(LONG, "qla", 0.1, day=5, commit=RED)], RUNS)
    assert not newer.rows and list(newer.left_out.values()) == [1], "older figures would not be what the code does"
    refused = report.make_report("fwd", [lines[1], lines[1], a_line(MANY, "qla", 0.1, commit="ccccccc")], RUNS)
    assert not refused.rows and sorted(refused.left_out.values()) == [1, 1]
    assert any("failed" in reason for reason in refused.left_out) and any("no GPU tests" in reason for reason in refused.left_out)


def test_rows_of_one_gpu_are_compared():
    lines = [a_line(LONG, "qla", 0.5, day=2), a_line(MANY, "qla", 0.1, gpu="another"), a_line(LONG, "fla", 0.1, day=3, gpu="another")]
    assert rows_of(lines) == {(16, 64, "32768", "fast"): {"qla": 0.5}}


def test_unpublished_files_are_not_read(tmp_path):
    for name in ("fwd_x.jsonl", "fwd_x.unpublished.jsonl", "bwd_y.jsonl", "gpu_tests.jsonl", "autocp_rows.jsonl"):
        (tmp_path / name).write_text("")
    assert [path.name for path in report.results_files(tmp_path)] == ["bwd_y.jsonl", "fwd_x.jsonl"]


# What is written


def three_rows():
    return [
        a_line(LONG, "qla", 0.5), a_line(LONG, "fla", 2.0), a_line(LONG, "flashinfer", 1.0),
        a_line(MANY, "qla", 0.5), a_line(MANY, "fla", 0.25),
        a_line(LONG, "qla", 0.5, "slow"),
    ]  # fmt: skip


def test_summary():
    made = report.make_report("fwd", three_rows(), RUNS)
    summary = report.summarise(made.of("fast"))
    assert summary.rows == 2 and summary.mean == pytest.approx(1.0) and summary.worst.shape == MANY
    assert [row.shape for row in summary.slower] == [MANY]
    assert report.summarise(made.of("slow")) is None, "no peer was measured"
    (line,) = report.summary_lines([made])
    assert line == "forward, fast gates: 2 rows, best peer / qla geometric mean 1.00, worst 2/8 8192x4 (0.50), 1 slower: 2/8 8192x4 (0.50)"


def test_table():
    made = report.make_report("fwd", three_rows(), RUNS)
    text = report.format_reports([made], ["bench/results/fwd_ratio.png"])
    assert "| forward | fast | 2 | 1.00 | 2/8 8192x4 (0.50) | 1: 2/8 8192x4 (0.50) |" in text
    assert "| hk/hv | lengths | qla | fla | flashinfer | floor | fast | slow | mixed |" in text
    assert "| 16/64 | 32768 | 0.500 | 2.000 | 1.000 | 0.386 | 2.00 | - | - |" in text
    assert "| 2/8 | 8192x4 | 0.500 | 0.250 | - | 0.048 | 0.50 | - | - |" in text
    assert f"qla at {GREEN}; fla 1.0 (measured at {GREEN})" in text and "[fwd ratio](bench/results/fwd_ratio.png)" in text
    assert report.format_reports([report.Report("fwd")]) == "Nothing was measured yet."
    left_out = report.make_report("fwd", [*three_rows(), a_line(MANY, "qla", 0.1, "slow", commit=RED)], RUNS)
    assert "Rows left out: forward, 1: 1 GPU tests" in report.format_reports([left_out])


def test_the_text_stands_between_the_markers():
    readme = f"before\n{report.BEGIN}\nold\n{report.END}\nafter\n"
    new = report.insert(readme, "new")
    assert new == f"before\n{report.BEGIN}\nnew\n{report.END}\nafter\n" and report.insert(new, "new") == new
    for bad in ("nothing", f"{report.BEGIN} alone", f"{report.END} {report.BEGIN}", readme + readme):
        with pytest.raises(ValueError, match="README"):
            report.insert(bad, "new")


def write_files(folder, lines):
    for line in lines:
        facts.append_line(folder / f"{line['direction']}_x.jsonl", line)
    for line in RUNS:
        facts.append_line(folder / "gpu_tests.jsonl", line)


def test_check_says_whether_the_readme_is_up_to_date(tmp_path, capsys):
    write_files(tmp_path, three_rows())
    readme = tmp_path / "README.md"
    readme.write_text(f"# x\n{report.BEGIN}\n{report.END}\n")
    arguments = ["--results", str(tmp_path), "--tests", str(tmp_path / "gpu_tests.jsonl"), "--readme", str(readme)]
    assert report.main([*arguments, "--check"]) == 1 and "16/64" not in readme.read_text()
    assert "out of date" in capsys.readouterr().out
    assert report.main([*arguments, "--no-plots"]) == 0 and "16/64" in readme.read_text()
    assert report.main([*arguments, "--check"]) == 0
    assert not list(tmp_path.glob("*.png"))


def test_the_readme_says_what_the_files_give(capsys):
    assert report.main(["--check"]) == 0, "run python bench/report.py"


def test_every_plot_that_the_readme_links_is_there():
    for path in report.plot_paths(report.read_reports(report.RESULTS, report.TESTS), report.RESULTS):
        assert 0 < path.stat().st_size < 200_000


def test_plots_of_the_whole_sweep_stay_small(tmp_path):
    pytest.importorskip("matplotlib")
    lines = []
    for i, shape in enumerate(SETS["sweep"]):
        for j, gates in enumerate(GATES):
            floor = floor_ms(shape, "fwd")
            lines += [a_line(shape, "qla", 2 * floor, gates)]
            lines += [a_line(shape, name, floor * (2 + (i + k + j) % 7), gates) for k, name in enumerate(report.PEERS)]
    made = report.make_report("fwd", lines, RUNS)
    assert len(made.rows) == 3 * 171
    plots.draw_all([made], tmp_path)
    sizes = {path.name: path.stat().st_size for path in tmp_path.iterdir()}
    assert set(sizes) == {"fwd_latency.png", "fwd_ratio.png", "fwd_floor.png"} and max(sizes.values()) < 200_000


def test_plots_take_whatever_rows_there_are(tmp_path):
    pytest.importorskip("matplotlib")
    lines = [a_line(MANY, "qla", 0.5, "slow", direction="bwd")]  # no single sequence, no fast gates, no peer
    plots.draw_all([report.make_report("bwd", lines, RUNS)], tmp_path)
    assert len(list(tmp_path.iterdir())) == 3


def test_ratio_grid():
    rows = [records.Row(LONG, "fast", {"qla": 0.5, "fla": 1.0}), records.Row(MANY, "fast", {"qla": 0.5})]
    (first, second) = plots.ratio_grid(rows, ["16/64", "2/8"], ["32768", "8192x4"])
    assert first[0] == 2.0 and all(math.isnan(x) for x in (first[1], *second))
