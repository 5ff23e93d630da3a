"""The training comparison without a GPU: the task, that every provider starts alike, that it learns, what is read and drawn."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest
import torch
from torch.testing import assert_close

from bench import recall, train_curves
from bench.recall import Model, Task, make_batch
from bench.train_curves import Settings

TINY = ["--steps", "3", "--length", "128", "--width", "64", "--heads", "1/2", "--batch", "2", "--device", "cpu"]


@pytest.mark.parametrize("change", [0.0, 0.3, 1.0])
def test_the_task_is_as_described(change):
    task, batch = Task(length=120, keys=8, values=9, change=change), 5
    tokens, targets = make_batch(task, batch, seed=5, step=7)
    assert tokens.shape == targets.shape == (batch, 120) and tokens.dtype == targets.dtype == torch.int64
    for row in range(batch):
        table: dict[int, int] = {}
        kept, seen = 0, 0
        for t in range(0, 120, 2):
            key, value = tokens[row, t : t + 2].tolist()
            assert 0 <= key < 8 <= value < 17
            target, after = targets[row, t : t + 2].tolist()
            assert after == -100 and target in ({-100, value} if table.get(key) == value else {-100}), "only what is known is asked for"
            seen, kept = seen + (key in table), kept + (target >= 0)
            table[key] = value
        assert len(table) == (8, 4, 2, 1)[row % 4]
        assert kept == seen if change == 0.0 else 0 < kept < seen if change < 1.0 else kept == 0


def test_batches_follow_from_seed_and_step():
    task = Task(length=64)
    first = make_batch(task, 3, 0, 0)[0]
    assert torch.equal(first, make_batch(task, 3, 0, 0)[0])
    assert not any(torch.equal(first, make_batch(task, 3, *other)[0]) for other in ((0, 1), (1, 0)))
    for wrong in ({"length": 2}, {"length": 7}, {"keys": 0}, {"keys": 12}):
        with pytest.raises(ValueError, match=next(iter(wrong))):
            Task(**wrong)


def make_model(seed: int = 0, length: int = 64) -> Model:
    torch.manual_seed(seed)
    return Model(Task(length=length), train_curves.OPERATIONS["torch"](), 64, (1, 2))


def test_the_model_is_causal_and_uses_every_weight():
    model, (tokens, targets) = make_model(), make_batch(Task(length=64), 2, 0, 0)
    logits = model(tokens)
    changed = tokens.clone()
    changed[:, 40:] = 0
    assert_close(model(changed)[:, :40], logits[:, :40])
    model.loss(tokens, targets).backward()
    assert all(x.grad is not None and x.grad.norm() > 0 for x in model.parameters())


def test_the_loss_counts_what_can_be_known():
    model, (tokens, targets) = make_model(), make_batch(Task(length=64), 2, 0, 0)
    logs = model(tokens).log_softmax(-1)
    counted = [-logs[b, t, targets[b, t]] for b in range(2) for t in range(64) if targets[b, t] >= 0]
    assert_close(model.loss(tokens, targets), torch.stack(counted).mean())


def test_the_short_convolution():
    module, x = recall.ShortConvolution(3), torch.randn(2, 9, 3)
    weight = module.weight.T.unsqueeze(1)  # [3, 1, CONV]
    padded = torch.nn.functional.pad(x.transpose(1, 2), (recall.CONV - 1, 0))
    expected = torch.nn.functional.silu(torch.nn.functional.conv1d(padded, weight, groups=3)).transpose(1, 2)
    assert_close(module(x), expected)


@pytest.mark.filterwarnings("ignore:qla runs this call through PyTorch")
def test_a_run_is_recorded_compared_and_drawn(tmp_path, capsys):
    pytest.importorskip("matplotlib")
    assert train_curves.main(["--provider", "torch", "--provider", "qla", *TINY, "--results", str(tmp_path)]) == 0
    assert train_curves.main(["--provider", "torch", "--seed", "1", *TINY, "--results", str(tmp_path)]) == 0
    lines = [json.loads(line) for line in (tmp_path / "train_curves.jsonl").read_text().splitlines()]
    assert [(line["provider"], line["seed"], line["step"]) for line in lines] == [
        (provider, seed, step) for provider, seed in (("torch", 0), ("qla", 0), ("torch", 1)) for step in range(3)
    ]
    assert {"gpu", "torch", "tilelang", "commit", "date", "provider_version", "settings"} <= set(lines[0])
    assert all(math.isfinite(line["loss"]) for line in lines)
    assert lines[0]["loss"] == pytest.approx(lines[3]["loss"], abs=1e-4) and lines[0]["loss"] != lines[6]["loss"]
    capsys.readouterr()
    assert train_curves.main(["--plot", "--results", str(tmp_path)]) == 0
    said = capsys.readouterr().out
    assert "remembers nothing: 3.466" in said and "qla and torch, seed 0: smoothed curves apart by at most 0.0000" in said
    assert "torch, seeds 0 and 1: smoothed curves apart" in said and said.count("final loss") == 3
    assert (tmp_path / "train_curves.png").read_bytes().startswith(b"\x89PNG")


def records(provider: str, losses: list[float], date: str, seed: int = 0, **settings) -> list[dict]:
    settings = {"steps": len(losses), "length": 128} | settings
    return [{"step": i, "loss": x, "provider": provider, "seed": seed, "date": date, "settings": settings} for i, x in enumerate(losses)]


def test_which_runs_are_compared():
    lines = [*records("qla", [9, 9], "1"), *records("fla", [1, 2], "2", length=256), *records("fla", [3, 4], "3")]
    lines += [*records("qla", [5, 6], "4"), *records("qla", [7, 8], "5")[:1]]
    curves, settings = train_curves.recorded_curves(lines)
    assert {key: losses.tolist() for key, losses in curves.items()} == {("qla", 0): [5, 6], ("fla", 0): [3, 4]}, "the last complete runs"
    assert settings["length"] == 128
    assert train_curves.recorded_curves([]) == ({}, {})


def test_differences_of_smoothed_curves():
    steps = np.arange(30.0)
    curves = {("fla", 0): steps, ("qla", 0): steps + 0.5, ("qla", 1): steps + 2.0}
    assert train_curves.smoothed(steps).tolist() == pytest.approx((steps[9:] - 4.5).tolist())
    text = train_curves.summary(curves, 3.0)
    assert "fla seed 0: final loss 24.5000" in text
    assert "fla and qla, seed 0: smoothed curves apart by at most 0.5000" in text and "on average 0.5000" in text
    assert "qla, seeds 0 and 1: smoothed curves apart by at most 1.5000" in text
    assert text.count("apart") == 2, "runs that differ in both say nothing"


def test_nothing_to_draw(tmp_path, capsys):
    assert train_curves.main(["--plot", "--results", str(tmp_path)]) == 2
    assert "no complete run" in capsys.readouterr().out


def test_learning_rate():
    settings = Settings(steps=100, warmup=10, rate=1.0)
    rates = [settings.rate_at(step) for step in range(100)]
    assert rates[0] == pytest.approx(0.1) and max(rates) == rates[10] == pytest.approx(1.0) and rates[-1] == pytest.approx(0.11, abs=0.01)
    assert all(Settings(steps=3).rate_at(step) > 0 for step in range(3))


@pytest.mark.parametrize("bad", ["", "--provider nobody", "--plot --heads 2", "--plot --heads 2/3", "--plot --length 5"])
def test_wrong_arguments(bad):
    with pytest.raises(SystemExit):
        train_curves.main(bad.split())


def test_it_learns():
    """At a size for this test: from the loss of guessing, ln(8) = 2.08, to a fifth of it."""
    task, settings = Task(length=64, keys=8, values=8), Settings(steps=120, batch=8, length=64, width=64, heads="1/1", rate=4e-3)
    losses = list(train_curves.train(settings, task, train_curves.OPERATIONS["torch"](), 0, "cpu"))
    assert losses[0] > task.guess and train_curves.final_loss(np.array(losses)) < task.guess / 5
