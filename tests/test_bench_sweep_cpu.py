"""The benchmark's sweep without a GPU: shared cases, going on where a run was cut short, the gate of green tests."""

from __future__ import annotations

import json
import math
import subprocess

import pytest
import torch
from test_bench_cpu import FACTS, SMALL, fake_provider, make_bench

from bench import facts, records, run, tested, timing
from bench.cases import expected_slices, make_case, make_cases
from bench.gradients import expected_gradients
from bench.shapes import GATES, Shape

# Cases of one shape


def test_the_gate_regimes_of_a_shape_share_their_tensors():
    cases = make_cases(SMALL, GATES, "cpu")
    assert [case.gates for case in cases] == list(GATES)
    for case in cases:
        alone = make_case(SMALL, case.gates, "cpu")
        for name in ("q", "k", "v", "g", "beta", "cu_seqlens", "do"):
            assert torch.equal(getattr(case, name), getattr(alone, name)), "the same as made alone"
        assert case.q is cases[0].q and case.v is cases[0].v and case.beta is cases[0].beta
    assert not torch.equal(cases[0].g, cases[1].g)


@pytest.mark.parametrize("heads", [(1, 1), (2, 6)])
def test_cases_go_through_float64_together(heads):
    cases = make_cases(Shape(*heads, "70+64"), GATES, "cpu")
    for together, case in zip(expected_slices(cases), cases, strict=True):
        (alone,) = expected_slices([case])
        assert together.heads == alone.heads == tuple(sorted({0, heads[1] - 1}))
        torch.testing.assert_close(together.o, alone.o, rtol=1e-12, atol=1e-14)
        torch.testing.assert_close(together.state, alone.state, rtol=1e-12, atol=1e-14)
    for together, case in zip(expected_gradients(cases), cases, strict=True):
        (alone,) = expected_gradients([case])
        assert (together.key_heads, together.value_heads) == (alone.key_heads, alone.value_heads)
        for x, y in zip(together.gradients, alone.gradients, strict=True):
            torch.testing.assert_close(x, y, rtol=1e-10, atol=1e-12)


# Rounds


def test_relative_spread():
    assert timing.relative_spread([2.0]) == math.inf
    assert timing.relative_spread([1.0] * 10) == 0
    assert timing.relative_spread([1.0, 1.0, 1.0, 1.0, 50.0]) == 0, "one outlier is no spread"
    assert timing.relative_spread([1.0, 2.0, 3.0, 4.0, 5.0]) == pytest.approx(2 / 3)


class FakeEvents:
    """Stands in for CUDA events: a runnable's run sets what the time between its two events is."""

    def __init__(self, monkeypatch) -> None:
        self.ms, self.runs, clock = 0.0, 0, self

        class Event:
            def __init__(self, enable_timing):
                self.at = 0.0

            def record(self):
                self.at = clock.ms

            def elapsed_time(self, end):
                return end.at - self.at

        empty = torch.empty
        monkeypatch.setattr(torch, "empty", lambda *shape, **options: empty(1))
        monkeypatch.setattr(torch.cuda, "Event", Event)
        monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)

    def runnable(self, times) -> timing.Runnable:
        def replay():
            self.ms += times[self.runs % len(times)]
            self.runs += 1

        return timing.Runnable(replay, "graph")


@pytest.mark.parametrize(
    "times, settled, rounds",
    [([2.0], 0.01, 10), ([2.0], 0.0, 25), ([1.0, 2.0, 3.0], 0.01, 25), ([2.0, 2.01], 0.01, 10), ([2.0, 2.1], 0.01, 25)],
)
def test_rounds_end_when_the_times_have_settled(times, settled, rounds, monkeypatch):
    fake = FakeEvents(monkeypatch)
    result = timing.time_interleaved({"x": fake.runnable(times)}, reps=25, warmups=3, settled=settled)["x"]
    assert result.reps == rounds and fake.runs == rounds + 3, "warm-up rounds run once and are not counted"
    assert min(times) - 1e-9 <= result.ms <= max(times) + 1e-9


def test_all_runnables_must_have_settled(monkeypatch):
    fake = FakeEvents(monkeypatch)
    steady, shaky = fake.runnable([2.0]), FakeEvents.runnable(fake, [1.0, 2.0, 3.0, 4.0, 5.0])
    results = timing.time_interleaved({"steady": steady, "shaky": shaky}, reps=20, settled=0.01)
    assert {result.reps for result in results.values()} == {20}


# Going on where a run was cut short


def lines_of(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_a_run_goes_on_where_it_was_cut_short(tmp_path, capsys):
    providers, times = [fake_provider("qla"), fake_provider("fla")], {"qla": 0.5, "fla": 1.0}
    first = make_bench(tmp_path, providers, times)
    first.run_shape(SMALL, ["fast"])
    facts.append_line(first.path, {**lines_of(first.path)[0], "gates": "slow", "ms": 7.0})  # cut before fla's line
    facts.append_line(first.path, {**lines_of(first.path)[1], "gates": "mixed", "commit": "another"})
    facts.append_line(first.path, {**lines_of(first.path)[1], "gates": "mixed", "gpu": "another"})
    facts.append_line(first.path, {**lines_of(first.path)[1], "gates": "mixed", "direction": "bwd"})
    capsys.readouterr()

    done = records.times_of_this_version(first.path, "fwd", FACTS)
    again = make_bench(tmp_path, providers, {"qla": 0.25, "fla": 2.0}, done=done)
    before = len(lines_of(first.path))
    assert run.run(again, [SMALL], GATES)
    new = [(line["gates"], line["provider"]) for line in lines_of(first.path)[before:]]
    assert new == [("slow", "fla"), ("mixed", "qla"), ("mixed", "fla")]
    assert [row.ms for row in again.rows] == [{"qla": 0.5, "fla": 1.0}, {"qla": 7.0, "fla": 2.0}, {"qla": 0.25, "fla": 2.0}]
    said = capsys.readouterr().out.splitlines()
    assert said[0].startswith("[1/3] ") and said[0].endswith("(recorded)")
    assert said[1].startswith("[2/3, ") and "min left] 1/2 70+64 slow: qla 7.0000, fla 2.0000" in said[1]
    assert said[2].startswith("[3/3, 0.0 min left]") and "(recorded)" not in said[2]


def test_what_is_recorded_costs_nothing_even_without_budget(tmp_path):
    path = tmp_path / "r" / "fwd_x.jsonl"
    facts.append_line(path, records.make_record(SMALL, "fast", "qla", "1", timing.Timing(3.0, 3.0, 3.0, "graph"), FACTS))
    done = records.times_of_this_version(path, "fwd", FACTS)
    bench = make_bench(tmp_path, [fake_provider("qla", raises=RuntimeError("must not run"))], {}, done=done, deadline=-math.inf)
    assert run.run(bench, [SMALL], ["fast"]) and bench.rows[0].ms == {"qla": 3.0}
    assert not run.run(bench, [SMALL], ["slow"]), "stopped by the budget"


@pytest.mark.parametrize("commit", [None, "unknown", "abc-dirty"])
def test_nothing_is_skipped_where_no_commit_says_what_was_measured(commit, tmp_path):
    path, of_changed_files = tmp_path / "x.jsonl", {**FACTS, "commit": commit}
    facts.append_line(path, records.make_record(SMALL, "fast", "qla", "1", timing.Timing(3.0, 3.0, 3.0, "graph"), of_changed_files))
    assert records.times_of_this_version(path, "fwd", of_changed_files) == {}
    assert records.times_of_this_version(tmp_path / "no.jsonl", "fwd", FACTS) == {}


def test_progress_counts_measured_rows_only():
    now = [0.0]
    progress = run.Progress(total=4, to_measure=3, clock=lambda: now[0])
    assert progress.next(False) == "[1/4]"
    now[0] = 60.0
    assert progress.next(True) == "[2/4, 2.0 min left]"


def test_a_failing_peer_does_not_hide_a_recorded_row(tmp_path):
    bench = make_bench(
        tmp_path, [fake_provider("qla"), fake_provider("fla", factor=2.0)], {"qla": 0.5}, done={(1, 2, "70+64", "fast"): {"qla": 3.0}}
    )
    bench.run_shape(SMALL, ["fast"])
    assert bench.rows[0].ms == {"qla": 3.0} and bench.rows[0].notes and not bench.failed and not bench.path.exists()


def test_seconds_are_told_apart(tmp_path):
    bench = make_bench(tmp_path, [fake_provider("qla")], {"qla": 0.5})
    bench.run_shape(SMALL, ["fast", "slow"])
    assert set(bench.seconds) == {"inputs", "float64", "qla made ready", "timing"} and min(bench.seconds.values()) >= 0


# Green tests


def a_run(commit, passed=5, failed=0, date="2026-01-01T00:00:00Z"):
    return {"commit": commit, "passed": passed, "failed": failed, "skipped": 0, "date": date}


LATER = "2026-01-02T00:00:00Z"


@pytest.mark.parametrize(
    "runs, green, reason",
    [
        ([a_run("abcdef0")], True, "passed"),
        ([a_run("abcdef0123")], True, "passed"),
        ([], False, "no GPU tests of commit abcdef0 are recorded"),
        ([a_run("1234567")], False, "are recorded"),
        ([a_run("abcdef0-dirty")], False, "are recorded"),
        ([a_run("abcdef0", passed=0)], False, "0 GPU tests of commit abcdef0 passed"),
        ([a_run("abcdef0") | {"unfinished": 3}], False, "0 GPU tests of commit abcdef0 passed"),
        ([a_run("1234567", passed=100), a_run("abcdef0", passed=50, date=LATER)], False, "50 GPU tests of commit abcdef0 passed"),
        ([a_run("1234567", passed=100), a_run("abcdef0", passed=50, date=LATER), a_run("abcdef0", passed=45, date=LATER)], True, "passed"),
        ([a_run("abcdef0", passed=50), a_run("1234567", passed=100, date=LATER)], True, "passed"),
        ([a_run("abcdef0", failed=2)], False, "2 GPU tests of commit abcdef0 failed"),
        ([a_run("abcdef0"), a_run("abcdef0", failed=1, date=LATER)], False, "failed"),
        ([a_run("abcdef0", failed=1, date=LATER), a_run("abcdef0")], False, "failed"),  # the date counts, not the place
        ([a_run("abcdef0", failed=1), a_run("abcdef0", date=LATER)], True, "passed"),
        ([a_run("abcdef0", failed=1), a_run("abcdef0", passed=0, date=LATER)], False, "none passed later"),
    ],
)
def test_verdicts(runs, green, reason):
    verdict = tested.verdict_on("abcdef0", runs, tested.same_name)
    assert verdict.green is green and reason in verdict.reason
    assert (verdict.tested is not None) is green


@pytest.mark.parametrize("commit", [None, "", "unknown", "abcdef0-dirty"])
def test_changed_files_are_never_green(commit):
    runs = [a_run(str(commit)), a_run("abcdef0")]
    assert not tested.verdict_on(commit, runs, lambda one, other: True).green


def test_names_of_commits():
    assert tested.same_name("abcdef0", "abcdef0123") and tested.same_name("v1", "v1")
    assert not tested.same_name("abc", "abcdef0") and not tested.same_name("abcdef1", "abcdef0123")


@pytest.fixture
def checkout(tmp_path, monkeypatch):
    """A repository of three commits: the first, one that changes a page, one that changes qla."""

    def git(*args):
        identity = ("-c", "user.name=n", "-c", "user.email=n@example.com")
        return subprocess.run(["git", "-C", str(tmp_path), *identity, *args], capture_output=True, text=True, check=True).stdout.strip()

    def commit(path, text):
        (tmp_path / path).parent.mkdir(exist_ok=True)
        (tmp_path / path).write_text(text)
        git("add", "-A")
        git("commit", "-q", "-m", path)
        return git("rev-parse", "--short=12", "HEAD")

    try:
        git("init", "-q")
    except FileNotFoundError:
        pytest.skip("needs git")
    monkeypatch.setattr(tested, "ROOT", tmp_path)
    tested.same_code.cache_clear()
    yield [commit("qla/a.py", "1"), commit("README.md", "2"), commit("qla/a.py", "3")]
    tested.same_code.cache_clear()


def test_a_commit_that_changes_pages_alone_needs_no_tests_of_its_own(checkout, tmp_path):
    first, page, code = checkout
    path = tmp_path / "tests.jsonl"
    facts.append_line(path, a_run(first[:7]))
    verdict = tested.verdict(page, path)
    assert verdict.green and verdict.tested == first[:7]
    assert not tested.verdict(code, path).green
    assert not tested.verdict("0" * 12, path).green, "of a commit that git does not know, equal names alone say that it is the same"
    facts.append_line(path, a_run(page, failed=1, date=LATER))
    assert not tested.verdict(first, path).green, "the same code failed later"
    assert not tested.verdict(first, tmp_path / "none.jsonl").green


@pytest.fixture
def pretended_gpu(monkeypatch):
    """run.main as on a GPU, but the one row is written without measuring; the commit is abcdef0."""
    monkeypatch.setenv("QLA_COMMIT", "abcdef0")
    monkeypatch.setenv("FLA_FLASH_QLA", "")  # main sets it
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "a GPU")

    def run_shape(bench, shape, regimes):
        for gates in regimes:
            row = records.Row(shape, gates)
            bench.record(row, "qla", "1", timing.Timing(1.0, 1.0, 1.0, "graph"), {})
            bench.rows.append(row)

    monkeypatch.setattr(run.Bench, "run_shape", run_shape)


def test_red_tests_keep_figures_unpublished(pretended_gpu, tmp_path, capsys):
    path = tmp_path / "tests.jsonl"
    arguments = ["--shape", "1/2:64", "--name", "x", "--results", str(tmp_path / "r"), "--tests", str(path)]
    facts.append_line(path, a_run("abcdef0", failed=1))
    assert run.main(arguments) == 2
    assert "not published: 1 GPU tests of commit abcdef0 failed" in capsys.readouterr().out and not (tmp_path / "r").exists()
    assert run.main([*arguments, "--unpublished"]) == 0
    assert [file.name for file in (tmp_path / "r").iterdir()] == ["x.unpublished.jsonl"]
    assert "tested" not in lines_of(tmp_path / "r" / "x.unpublished.jsonl")[0]
    assert "not published" in capsys.readouterr().out

    facts.append_line(path, a_run("abcdef0", date=LATER))
    assert run.main(arguments) == 0
    (line,) = lines_of(tmp_path / "r" / "x.jsonl")
    assert line["commit"] == line["tested"] == "abcdef0"


def test_without_tests_nothing_is_published(pretended_gpu, tmp_path, capsys):
    assert run.main(["--shape", "1/2:64", "--results", str(tmp_path / "r"), "--tests", str(tmp_path / "none.jsonl")]) == 2
    assert "no GPU tests of commit abcdef0 are recorded" in capsys.readouterr().out
