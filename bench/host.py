"""Host time of a forward call without a CUDA graph: what Python, the checks and the launches take while the GPU is ahead. JSON lines.

    python bench/host.py [--providers qla,fla,flash_qla] [--results FILE]
    python bench/host.py --dry                                  # anywhere: qla's own Python, with launches that do nothing, on a CPU

Calls are made one after the other and never waited for, few enough at a time for the queue of launches not to fill; the time is the median
of such batches. The shapes are short, as in serving: there the GPU would otherwise wait for the host.
"""

from __future__ import annotations

import argparse
import contextlib
import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from unittest import mock

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
DRY_SHAPES = ("2/8:64", "2/8:32x2")  # no larger than needed: on a CPU an allocation takes the longer the larger it is
DRY_BATCHES = 300


def microseconds(function, batches: int = BATCHES) -> float:  # type: ignore[no-untyped-def]
    """Of a call, the median over batches."""
    synchronise = torch.cuda.synchronize if torch.cuda.is_available() else lambda: None
    for _ in range(3):
        function()
    samples = []
    for _ in range(batches):
        synchronise()
        started = time.perf_counter()
        for _ in range(CALLS):
            function()
        samples.append((time.perf_counter() - started) / CALLS * 1e6)
    synchronise()
    return statistics.median(samples)


@contextlib.contextmanager
def launches_that_do_nothing() -> Iterator[None]:
    """Context in which qla takes tensors on a CPU for those of a Hopper GPU, and its kernels compute nothing."""
    from qla.device import DeviceSpec

    def nothing(*arguments: object) -> None:
        pass

    hopper = DeviceSpec(index=0, capability=(9, 0), sm_count=132)
    with contextlib.ExitStack() as patches:
        patches.enter_context(mock.patch("qla.api.unsupported_reason", lambda q, k, v: None))
        patches.enter_context(mock.patch("qla.autograd.device_spec", lambda device: hopper))
        patches.enter_context(mock.patch("qla.kernels.launch.launcher", lambda kernel, *form: nothing))
        yield


def dry() -> None:
    """Prints the microseconds that qla's own Python takes for a call, PyTorch's allocations and views on a CPU included."""
    import qla

    for text in DRY_SHAPES:
        x = make_case(parse_shape(text), "fast", "cpu")
        with launches_that_do_nothing(), torch.no_grad():
            call = lambda x=x: qla.chunk_gated_delta_rule(  # noqa: E731
                x.q, x.k, x.v, x.g, x.beta, output_final_state=True, cu_seqlens=x.cu_seqlens
            )
            print(f"{text:<14}{'qla, dry':<12}{microseconds(call, DRY_BATCHES):8.1f} us", flush=True)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Times what the host does for a call.")
    parser.add_argument("--providers", default="qla,flash_qla", help=f"comma-separated, of {', '.join(PROVIDERS)}")
    parser.add_argument("--results", type=Path, default=RESULTS, help=f"JSON lines are appended here (default: {RESULTS.name} in results)")
    parser.add_argument("--dry", action="store_true", help="launches that do nothing, on a CPU; nothing is recorded")
    args = parser.parse_args(argv)
    if args.dry:
        dry()
        return 0
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
