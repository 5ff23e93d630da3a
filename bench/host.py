"""Host time of a forward call without a CUDA graph: what Python, the checks and the launches take while the GPU is ahead. JSON lines.

    python bench/host.py [--providers qla,fla,flash_qla] [--results FILE]

Calls are made one after the other and never waited for, few enough at a time for the queue of launches not to fill; the time is the median
of such batches. The shapes are short, as in serving: there the GPU would otherwise wait for the host.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import torch

if not __package__:  # run as a file: the repository root belongs on the path, this folder does not
    sys.path[0] = str(Path(__file__).resolve().parents[1])

from bench.cases import make_case  # noqa: E402
from bench.facts import append_line, environment  # noqa: E402
from bench.providers import PROVIDERS, use_own_path_of_fla  # noqa: E402
from bench.shapes import parse_shape  # noqa: E402

RESULTS = Path(__file__).resolve().parent / "results" / "host.jsonl"
SHAPES = ("2/8:2048", "16/64:2048", "2/8:1024x8", "2/8:8192")
CALLS, BATCHES = 20, 30


def microseconds(function) -> float:  # type: ignore[no-untyped-def]
    """Of a call, the median over batches."""
    for _ in range(3):
        function()
    samples = []
    for _ in range(BATCHES):
        torch.cuda.synchronize()
        started = time.perf_counter()
        for _ in range(CALLS):
            function()
        samples.append((time.perf_counter() - started) / CALLS * 1e6)
    torch.cuda.synchronize()
    return statistics.median(samples)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Times what the host does for a call.")
    parser.add_argument("--providers", default="qla,flash_qla", help=f"comma-separated, of {', '.join(PROVIDERS)}")
    parser.add_argument("--results", type=Path, default=RESULTS, help=f"JSON lines are appended here (default: {RESULTS.name} in results)")
    args = parser.parse_args(argv)
    if not torch.cuda.is_available():
        print("needs a CUDA device")
        return 2
    use_own_path_of_fla()
    facts = environment()
    for text in SHAPES:
        shape = parse_shape(text)
        case = make_case(shape, "fast", "cuda")
        for name in args.providers.split(","):
            with torch.no_grad():
                us = microseconds(PROVIDERS[name].prepare(case).start())
            row = {"provider": name, "hk": shape.hk, "hv": shape.hv, "lengths": shape.lengths, "host_us": round(us, 1)}
            append_line(args.results, {**row, **facts, "provider_version": PROVIDERS[name].version})
            print(f"{text:<14}{name:<12}{us:8.1f} us", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
