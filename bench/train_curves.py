"""Loss curves of one small language model, trained with each implementation of the operation: do they learn alike?

    python bench/train_curves.py --provider qla
    python bench/train_curves.py --provider fla
    python bench/train_curves.py --plot                 the picture and the differences; needs no GPU

The task is recall. A sequence is a stream of key-value pairs, "k v k v ..", with a table of its own: a key comes back
with the value that it had last, except that one time in ten it comes with a new one. The model has to give the value after
each key that it has seen before, so it must store pairs, replace them, and read them over hundreds of tokens: what the
operation is for. A model that remembers nothing stays at ln(32) = 3.47. A sequence uses 4, 8, 16 or 32 keys: those with few
are learnt first and lead to the others, so that the loss falls early in the run, to nearly nothing.

The model has two layers (norm, Gated DeltaNet with short convolutions and output gate, norm, MLP), float32 weights, bfloat16
autocast on a GPU, AdamW. Everything but the operation is PyTorch; one seed gives the same first weights and the same batches
to every provider. Without arguments: 300 steps of 16 sequences of 1024 tokens, width 256, 2/4 heads of 128.

How to read it: each step is one line in RESULTS/train_curves.jsonl, with GPU, versions and commit. --plot draws the last
recorded run of each provider and seed and prints, of curves smoothed over ten steps, the largest and the mean distance of two
providers with one seed. Rounding differs, so the curves are not the same bit for bit, and while the loss falls steeply a
lead of one or two steps is a visible distance. Another seed shows how far apart equally right curves lie: two
implementations are alike when they are closer than one implementation is to itself with another seed, and end as low.
"""

from __future__ import annotations

import argparse
import itertools
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

if not __package__:  # run as a file: the repository root belongs on the path, this folder does not
    sys.path[0] = str(Path(__file__).resolve().parents[1])

from bench.facts import append_line, environment, read_lines  # noqa: E402
from bench.providers import PROVIDERS, use_own_path_of_fla  # noqa: E402
from bench.recall import Model, Operation, Task, make_batch  # noqa: E402

RESULTS = Path(__file__).resolve().parent / "results"
NAME = "train_curves"
SMOOTHED_OVER = 10  # steps


@dataclass(frozen=True)
class Settings:
    """What two runs must share to be compared, besides the seed.

    steps, batch, length, width, heads ("hk/hv"): sizes. rate: the learning rate after the warm-up; it then falls to a tenth.
    """

    steps: int = 300
    batch: int = 16
    length: int = 1024
    width: int = 256
    heads: str = "2/4"
    rate: float = 2e-3
    warmup: int = 20

    @property
    def head_counts(self) -> tuple[int, int]:
        hk, _, hv = self.heads.partition("/")
        if not (hk.isdigit() and hv.isdigit()) or int(hk) < 1 or int(hv) < 1 or int(hv) % int(hk):
            raise ValueError(f"heads must look like 2/4, the second a multiple of the first, got {self.heads!r}")
        return int(hk), int(hv)

    def rate_at(self, step: int) -> float:
        """Rises over `warmup` steps, then falls on a straight line to a tenth."""
        if step < self.warmup:
            return self.rate * (step + 1) / self.warmup
        return self.rate * (1 - 0.9 * (step - self.warmup) / max(self.steps - self.warmup, 1))


def _load_qla() -> Operation:
    from qla import chunk_gated_delta_rule

    return chunk_gated_delta_rule


def _load_fla() -> Operation:
    use_own_path_of_fla()
    from fla.ops.gated_delta_rule import chunk_gated_delta_rule

    return chunk_gated_delta_rule


def _load_torch() -> Operation:
    from qla.reference import chunked_gated_delta_rule

    return chunked_gated_delta_rule


OPERATIONS: dict[str, Callable[[], Operation]] = {"qla": _load_qla, "fla": _load_fla, "torch": _load_torch}


def train(settings: Settings, task: Task, operation: Operation, seed: int, device: str) -> Iterator[float]:
    """The loss of each step, before its update."""
    torch.manual_seed(seed)
    on_gpu = device != "cpu"
    # Weights are drawn on the CPU: the same on every machine.
    model = Model(task, operation, settings.width, settings.head_counts, dtype=torch.bfloat16 if on_gpu else torch.float32).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=settings.rate, betas=(0.9, 0.95), weight_decay=0.01)
    for step in range(settings.steps):
        tokens, targets = (x.to(device) for x in make_batch(task, settings.batch, seed, step))
        for group in optimizer.param_groups:
            group["lr"] = settings.rate_at(step)
        with torch.autocast(device, dtype=torch.bfloat16, enabled=on_gpu):
            loss = model.loss(tokens, targets)
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        yield loss.item()


def record_run(path: Path, provider: str, settings: Settings, seed: int, device: str) -> list[float]:
    """Trains and appends a line for each step; the run's date tells its lines from those of a later run."""
    task = Task(length=settings.length)
    operation = OPERATIONS[provider]()
    version = PROVIDERS[provider].version if provider in PROVIDERS else torch.__version__
    facts = {**environment(), "provider_version": version, "settings": asdict(settings)}
    losses: list[float] = []
    for step, loss in enumerate(train(settings, task, operation, seed, device)):
        losses.append(loss)
        append_line(path, {"step": step, "loss": round(loss, 6), "provider": provider, "seed": seed, **facts})
        if step % 25 == 0 or step == settings.steps - 1:
            print(f"{provider} seed {seed} step {step}: loss {loss:.4f}", flush=True)
    return losses


Curves = dict[tuple[str, int], np.ndarray]  # by provider and seed: the loss of each step


def recorded_curves(records: Iterable[Mapping[str, Any]]) -> tuple[Curves, dict[str, Any]]:
    """The last complete run of each provider and seed that has the settings of the last complete run of all, and these settings."""
    runs: dict[tuple[str, int, str], list[Mapping[str, Any]]] = {}
    for record in records:
        runs.setdefault((record["provider"], record["seed"], record["date"]), []).append(record)
    complete = {key: lines for key, lines in runs.items() if len(lines) == lines[0]["settings"]["steps"]}
    if not complete:
        return {}, {}
    settings = dict(next(reversed(complete.values()))[0]["settings"])
    return {
        (provider, seed): np.array([line["loss"] for line in lines])
        for (provider, seed, _), lines in complete.items()
        if lines[0]["settings"] == settings
    }, settings


def smoothed(losses: np.ndarray) -> np.ndarray:
    """Means of SMOOTHED_OVER steps in a row."""
    window = min(SMOOTHED_OVER, len(losses))
    return np.convolve(losses, np.full(window, 1 / window), mode="valid")


def final_loss(losses: np.ndarray) -> float:
    return float(smoothed(losses)[-1])


def comparable(curves: Curves) -> list[tuple[tuple[str, int], tuple[str, int]]]:
    """Pairs of runs that differ in the provider alone, then those that differ in the seed alone."""
    pairs = list(itertools.combinations(sorted(curves), 2))
    return [pair for pair in pairs if pair[0][1] == pair[1][1]] + [pair for pair in pairs if pair[0][0] == pair[1][0]]


def summary(curves: Curves, guess: float) -> str:
    """Final losses, and distances of the smoothed curves."""
    lines = [f"a model that remembers nothing: {guess:.3f}"]
    lines += [f"{name} seed {seed}: final loss {final_loss(losses):.4f}" for (name, seed), losses in sorted(curves.items())]
    for one, other in comparable(curves):
        apart = np.abs(smoothed(curves[one]) - smoothed(curves[other]))
        what = f"{one[0]} and {other[0]}, seed {one[1]}" if one[1] == other[1] else f"{one[0]}, seeds {one[1]} and {other[1]}"
        lines.append(f"{what}: smoothed curves apart by at most {apart.max():.4f} (step {apart.argmax()}), on average {apart.mean():.4f}")
    return "\n".join(lines)


def draw(curves: Curves, guess: float, path: Path) -> None:
    """Losses as measured (thin) and smoothed (thick) over the steps; the loss of guessing dashed."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(8, 4.5), dpi=150)
    styles = itertools.cycle(["-", "--", ":", "-."])  # curves that lie on one another stay visible
    for (provider, seed), losses in sorted(curves.items()):
        (thin,) = axes.plot(losses, linewidth=0.6, alpha=0.35)
        smooth = smoothed(losses)
        steps = np.arange(len(smooth)) + (len(losses) - len(smooth)) / 2
        label = f"{provider}, seed {seed}: {final_loss(losses):.4f} at the end"
        axes.plot(steps, smooth, linewidth=1.8, linestyle=next(styles), color=thin.get_color(), label=label)
    axes.axhline(guess, color="grey", linestyle=(0, (5, 5)), linewidth=0.8, label=f"remembering nothing: {guess:.2f}")
    axes.set(xlabel="step", ylabel="loss (nats for each value)", ylim=(0, None))
    axes.legend(frameon=False)
    figure.tight_layout()
    figure.savefig(path)
    pyplot.close(figure)


def plot(path: Path) -> int:
    """Draws and compares what was recorded in a file; 2 where there is nothing."""
    curves, settings = recorded_curves(read_lines([path])) if path.exists() else ({}, {})
    if not curves:
        print(f"no complete run in {path}")
        return 2
    guess = Task(length=settings["length"]).guess
    picture = path.with_suffix(".png")
    draw(curves, guess, picture)
    print(", ".join(f"{name} {value}" for name, value in settings.items()))
    print(summary(curves, guess))
    print(f"drawn in {picture}")
    return 0


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog=f"bench/{NAME}.py", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--provider", choices=list(OPERATIONS), action="append", default=[], help="train with it; may be repeated")
    parser.add_argument("--plot", action="store_true", help="draw and compare what was recorded")
    parser.add_argument("--seed", type=int, default=0, help="of the weights and the data (default: 0)")
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--results", type=Path, default=RESULTS, help=f"folder of the results (default: {RESULTS.name} beside this file)")
    for name, value in asdict(Settings()).items():
        parser.add_argument(f"--{name}", type=type(value), default=value, help=f"default: {value}")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    parser = make_parser()
    args = parser.parse_args(argv)
    if not (args.provider or args.plot):
        parser.error("nothing to do: give --provider or --plot")
    settings = Settings(**{name: getattr(args, name) for name in asdict(Settings())})
    try:
        settings.head_counts, Task(length=settings.length)  # noqa: B018
    except ValueError as error:
        parser.error(str(error))
    path = args.results / f"{NAME}.jsonl"
    for provider in args.provider:
        started = time.monotonic()
        losses = record_run(path, provider, settings, args.seed, args.device)
        took = time.monotonic() - started
        print(f"{provider}: {settings.steps} steps in {took:.1f} s, final loss {final_loss(np.array(losses)):.4f}, lines in {path}")
    return plot(path) if args.plot else 0


if __name__ == "__main__":
    sys.exit(main())
