"""The decoding benchmark without a GPU: the check before timing, records, the table."""

from __future__ import annotations

import json

import pytest
import torch

from bench import decode
from bench.timing import Runnable, Timing

FACTS = {"gpu": "a GPU", "torch": "2", "tilelang": "0.1.15", "commit": "abc", "date": "2026-01-01T00:00:00Z"}


@pytest.fixture(autouse=True)
def no_gpu(monkeypatch):
    """Cases on the CPU, and times by provider."""
    make_case = decode.make_case
    monkeypatch.setattr(decode, "make_case", lambda *args: make_case(*args, device="cpu"))
    monkeypatch.setattr(decode, "host_us", lambda step: 12.3)
    monkeypatch.setattr(decode, "make_runnable", lambda start: Runnable(start(), "graph"))
    monkeypatch.setattr(
        decode,
        "time_interleaved",
        lambda runnables, reps: {name: Timing(0.01 * (i + 1), 0.01, 0.02, "graph") for i, name in enumerate(runnables)},
    )
    monkeypatch.setattr(decode, "environment", lambda: FACTS)


def test_a_right_row_is_recorded_and_shown(tmp_path, capsys):
    out = tmp_path / "decode.jsonl"
    assert decode.main(["--heads", "1/2", "--batches", "1,3", "--tokens", "2", "--providers", "qla", "--results", str(out)]) == 0
    lines = [json.loads(line) for line in out.read_text().splitlines()]
    assert [(x["hk"], x["hv"], x["batch"], x["tokens"], x["provider"], x["us"]) for x in lines] == [
        (1, 2, 1, 2, "qla", 10.0), (1, 2, 3, 2, "qla", 10.0),
    ]  # fmt: skip
    assert all(x["error_o"] < 4e-3 and x["error_state"] < 1e-6 and x["commit"] == "abc" and x["host_us"] == 12.3 for x in lines)
    size = 3 * (2 * 2 * 128 * 128 * 4 + 2 * (2 * 128 * 2 + 2 * 2 * 128 * 2 + 2 * 2 * 4))
    assert lines[1]["gb_s"] == round(size / 1e-5 / 1e9, 1)
    assert decode.main(["--show", str(out)]) == 0
    assert len(capsys.readouterr().out.splitlines()) == 2 * 3


def test_a_wrong_row_is_not(tmp_path, monkeypatch, capsys):
    right = decode.step_of

    def wrong(provider, case):
        return lambda: tuple(x * (1.1 if provider == "qla" else 1) for x in right("qla", case)())

    monkeypatch.setattr(decode, "step_of", wrong)
    out = tmp_path / "decode.jsonl"
    assert decode.main(["--heads", "1/1", "--batches", "1", "--tokens", "1", "--results", str(out)]) == 1
    assert not out.exists() and "qla is wrong at (1, 1) heads, batch 1, 1 tokens" in capsys.readouterr().err


def test_a_peer_that_fails_is_left_out(tmp_path, monkeypatch, capsys):
    right = decode.step_of

    def step_of(provider, case):
        if provider == "fla":
            raise ImportError("no such package")
        return right("qla", case) if provider == "qla" else lambda: tuple(x * torch.nan for x in right("qla", case)())

    monkeypatch.setattr(decode, "step_of", step_of)
    out = tmp_path / "decode.jsonl"
    options = ["--heads", "1/1", "--batches", "1", "--tokens", "1", "--providers", "qla,fla,another", "--results", str(out)]
    assert decode.main(options) == 0
    assert [json.loads(line)["provider"] for line in out.read_text().splitlines()] == ["qla"]
    err = capsys.readouterr().err
    assert "fla left out: ImportError: no such package" in err and "another left out: errors" in err


def test_unknown_provider():
    with pytest.raises(ValueError, match="providers must be among qla, qla:WARPS and fla, got 'other'"):
        decode.step_of("other", decode.make_case(1, 1, (1, 1)))


def test_table():
    def record(provider, us, batch=1):
        return decode.make_record((2, 8), batch, 1, provider, Timing(us / 1e3, 0, 0, "graph"), 10**6, 1.0, {"o": 1e-3}, FACTS)

    header, first, second = decode.format_table([record("qla", 10), record("fla", 99), record("fla", 20), record("fla", 5, 4)]).splitlines()
    assert header.split() == ["heads", "batch", "tokens", "qla", "us", "fla", "us", "GB/s", "ratio"]
    assert first.split() == ["2/8", "1", "1", "10.0", "20.0", "100", "2.00"]
    assert second.split() == ["2/8", "4", "1", "-", "5.0", "-", "-"]
