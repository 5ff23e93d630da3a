"""Times of the activations, forward and backward: qla's kernels beside the same as PyTorch operations. JSON lines and a table.

    python bench/activations.py [--results FILE]

"l2norm" takes q and k as slices of one projection, as a layer has them; "gates" makes g and beta from bfloat16 values, with A_log and
dt_bias. Results are compared before they are timed.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from torch import Tensor

if not __package__:  # run as a file: the repository root belongs on the path, this folder does not
    sys.path[0] = str(Path(__file__).resolve().parents[1])

from bench.facts import append_line, environment  # noqa: E402
from bench.timing import Start, at_once, make_runnable, time_interleaved  # noqa: E402
from qla import activations  # noqa: E402

RESULTS = Path(__file__).resolve().parent / "results" / "activations.jsonl"
SHAPES = ((16, 64, 32768), (2, 8, 32768), (16, 64, 2048), (2, 8, 2048))
PROVIDERS = ("qla", "torch")
TOLERANCE = 2e-2  # of gradients in bfloat16, which PyTorch takes through unrounded values

Inputs = tuple[Tensor, ...]
Function = Callable[[Inputs], tuple[Tensor, Tensor]]


def cases(h: int, hv: int, tokens: int) -> dict[str, tuple[Inputs, dict[str, Function]]]:
    """Inputs of each activation, and its function by provider."""
    joint = torch.randn(1, tokens, (2 * h + hv) * 128, device="cuda", dtype=torch.bfloat16)
    q, k = (joint[..., i * h * 128 : (i + 1) * h * 128].unflatten(-1, (h, 128)) for i in range(2))
    raw_g, raw_beta = (torch.randn(1, tokens, hv, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    A_log, dt_bias = (torch.randn(hv, device="cuda") for _ in range(2))
    options = activations.GateOptions(sigmoid=True)
    return {
        "l2norm": ((q, k), {
            "qla": lambda x: activations.l2norm_by_kernel(*x, None),
            "torch": lambda x: activations.l2norm(*x, None),
        }),
        "gates": ((raw_g, raw_beta, A_log, dt_bias), {
            "qla": lambda x: activations.gates_by_kernel(*x, None, options),
            "torch": lambda x: activations.gates(*x, None, options),
        }),
    }  # fmt: skip


def backward_of(function: Function, inputs: Inputs, grads: Inputs) -> Start:
    def start() -> Callable[[], object]:
        leaves = [x.detach().requires_grad_() for x in inputs]
        results = function(tuple(leaves))
        return lambda: torch.autograd.grad(results, leaves, grads, retain_graph=True)

    return start


def check(name: str, found: dict[str, tuple[Tensor, ...]]) -> None:
    for ours, theirs in zip(found["qla"], found["torch"], strict=True):
        error = float((ours.double() - theirs.double()).norm() / theirs.double().norm())
        if not error <= TOLERANCE:
            raise SystemExit(f"{name}: relative difference {error:.1e} > {TOLERANCE}")


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Times the activations of q, k, g and beta.")
    parser.add_argument("--results", type=Path, default=RESULTS, help=f"JSON lines are appended here (default: {RESULTS.name} in results)")
    args = parser.parse_args(argv)
    if not torch.cuda.is_available():
        print("needs a CUDA device")
        return 2
    facts = environment()
    print(f"{'heads':>7}{'tokens':>8}  {'':<14}{'qla':>9}{'torch':>9} ms")
    for h, hv, tokens in SHAPES:
        for name, (inputs, functions) in cases(h, hv, tokens).items():
            grads = tuple(torch.randn_like(x) for x in functions["torch"](inputs))
            starts = {
                "fwd": {provider: at_once(lambda f=functions[provider], x=inputs: f(x)) for provider in PROVIDERS},
                "bwd": {provider: backward_of(functions[provider], inputs, grads) for provider in PROVIDERS},
            }
            for direction, of_provider in starts.items():
                check(f"{name} {direction}", {provider: start()() for provider, start in of_provider.items()})  # type: ignore[misc]
                timings = time_interleaved({provider: make_runnable(start) for provider, start in of_provider.items()})
                for provider, timing in timings.items():
                    row = {"kernel": name, "direction": direction, "provider": provider, "hk": h, "hv": hv, "tokens": tokens}
                    append_line(args.results, {**row, "ms": timing.ms, "ms_min": timing.ms_min, "mode": timing.mode, **facts})
                times = "".join(f"{timings[provider].ms:9.4f}" for provider in PROVIDERS)
                print(f"{h:>4}/{hv:<2}{tokens:>8}  {name + ' ' + direction:<14}{times}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
