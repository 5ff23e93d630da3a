"""Times of a decoding step beside fla's: JSON lines and a table.

    python bench/decode.py                                         batches 1 to 256, 16/64 and 2/8 heads, 1 and 4 tokens
    python bench/decode.py --batches 1,256 --heads 16/64 --tokens 1 --warps 1,2,8
    python bench/decode.py --show bench/results/decode.jsonl       the table of what was recorded; needs no GPU

A step has a state [128, 128] in float32 for each sequence and value head, read and written once; q and k are normalised in the kernel.
Times are those of bench/timing.py, host_us is what a call costs the host outside a graph. Each provider's o and final state are checked
against float64 on the first and the last sequence before anything is timed: a row on which qla fails is not reported, and the exit status
is 1; a peer that fails is noted and left out. GB/s counts the states and the inputs, once each way. --warps times our kernel with other
numbers of warps a block as well ("qla:2").
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

if not __package__:  # run as a file: the repository root belongs on the path, this folder does not
    sys.path[0] = str(Path(__file__).resolve().parents[1])

from bench.cases import relative_error  # noqa: E402
from bench.facts import append_line, environment, package_version, read_lines  # noqa: E402
from bench.timing import Timing, at_once, make_runnable, time_interleaved  # noqa: E402

RESULTS = Path(__file__).resolve().parent / "results" / "decode.jsonl"
OWN = "qla"
DIM = 128
TOLERANCE = {"o": 4e-3, "state": 2e-5}  # o is rounded to bf16 once; the rest is fp32
HOST_CALLS = 50
DISTRIBUTIONS = {"qla": ("qla",), "fla": ("fla-core", "flash-linear-attention")}

Step = Callable[[], tuple[Tensor, Tensor]]


@dataclass(frozen=True)
class DecodeCase:
    """q, k [B, T, H, 128], v [B, T, HV, 128] bf16, g, beta [B, T, HV] fp32, state [B, HV, 128, 128] fp32."""

    q: Tensor
    k: Tensor
    v: Tensor
    g: Tensor
    beta: Tensor
    state: Tensor

    @property
    def bytes(self) -> int:
        """Read and written by a step."""
        inputs = sum(x.nbytes for x in (self.q, self.k, self.v, self.g, self.beta))
        return 2 * self.state.nbytes + inputs + self.v.nbytes


def make_case(batch: int, tokens: int, heads: tuple[int, int], device: str = "cuda") -> DecodeCase:
    generator = torch.Generator(device=device).manual_seed(0)

    def normal(*shape: int) -> Tensor:
        return torch.randn(batch, *shape, generator=generator, device=device)

    h, hv = heads
    q, k = (normal(tokens, h, DIM).bfloat16() for _ in range(2))
    v = normal(tokens, hv, DIM).bfloat16()
    g = torch.nn.functional.logsigmoid(normal(tokens, hv))
    return DecodeCase(q, k, v, g, normal(tokens, hv).sigmoid(), normal(hv, DIM, DIM))


def step_of(provider: str, case: DecodeCase) -> Step:
    """The step as a call of the provider's public function; "qla:2" is our kernel with 2 warps a block."""
    name, _, warps = provider.partition(":")
    if name == OWN and warps:
        from qla.kernels.launch import recurrent

        o, final_state = torch.empty_like(case.v), torch.empty_like(case.state)
        batch, tokens = case.v.shape[:2]

        def launch() -> tuple[Tensor, Tensor]:
            recurrent(
                case.q, case.k, case.v, case.g, case.beta, None, None, None, None, o, case.state, final_state, None, batch, tokens,
                DIM**-0.5, False, True, False, False, int(warps),
            )  # fmt: skip
            return o, final_state

        return launch
    if name == OWN:
        from qla import fused_recurrent_gated_delta_rule as function
    elif name == "fla":
        from fla.ops.gated_delta_rule import fused_recurrent_gated_delta_rule as function
    else:
        raise ValueError(f"providers must be among qla, qla:WARPS and fla, got {provider!r}")
    options = {"initial_state": case.state, "output_final_state": True, "use_qk_l2norm_in_kernel": True, "scale": DIM**-0.5}
    return partial(function, case.q, case.k, case.v, case.g, beta=case.beta, **options)


def errors_of(case: DecodeCase, result: tuple[Tensor, Tensor]) -> dict[str, float]:
    """Relative errors of the first and the last sequence, the larger of the two; not finite counts for all of them."""
    from qla.reference import recurrent_gated_delta_rule

    found = {"o": 0.0, "state": 0.0}
    for n in {0, len(case.q) - 1}:
        q, k, v, g, beta, state = (x[n : n + 1].double() for x in (case.q, case.k, case.v, case.g, case.beta, case.state))
        q, k = (x / (x.square().sum(-1, keepdim=True) + 1e-6).sqrt() for x in (q, k))
        expected = recurrent_gated_delta_rule(q, k, v, g, beta, DIM**-0.5, state, True)
        for name, x, wanted in zip(found, result, expected, strict=True):
            assert wanted is not None
            finite = bool(torch.isfinite(x).all())
            found[name] = max(found[name], relative_error(x[n : n + 1], wanted) if finite else float("inf"))
    return found


def host_us(step: Step) -> float:
    """Microseconds that a call takes the host, which runs ahead of the GPU; the least of three measurements."""
    least = float("inf")
    for _ in range(3):
        torch.cuda.synchronize()
        started = time.perf_counter()
        for _ in range(HOST_CALLS):
            step()
        least = min(least, (time.perf_counter() - started) / HOST_CALLS * 1e6)
        torch.cuda.synchronize()
    return least


def make_record(
    heads: tuple[int, int], batch: int, tokens: int, provider: str, timing: Timing, size: int, host: float, errors: Mapping[str, float],
    facts: Mapping[str, Any],
) -> dict[str, Any]:  # fmt: skip
    """One line of the results file."""
    return {
        "direction": "decode",
        "hk": heads[0],
        "hv": heads[1],
        "batch": batch,
        "tokens": tokens,
        "provider": provider,
        "us": round(timing.ms * 1e3, 2),
        "us_min": round(timing.ms_min * 1e3, 2),
        "us_max": round(timing.ms_max * 1e3, 2),
        "gb_s": round(size / timing.ms / 1e6, 1),
        "host_us": round(host, 1),
        **{f"error_{name}": float(f"{error:.2e}") for name, error in errors.items()},
        "provider_version": package_version(*DISTRIBUTIONS.get(provider.partition(":")[0], ())),
        "mode": timing.mode,
        "sm_mhz": timing.sm_mhz,
        **facts,
    }


def format_table(records: Sequence[Mapping[str, Any]]) -> str:
    """Microseconds by row and provider, our bandwidth, and fla's time over ours; of a row measured again the last lines count."""
    providers = list(dict.fromkeys(record["provider"] for record in records))
    rows: dict[tuple[str, int, int], dict[str, Mapping[str, Any]]] = {}
    for record in records:
        rows.setdefault((f"{record['hk']}/{record['hv']}", record["batch"], record["tokens"]), {})[record["provider"]] = record
    lines = [f"{'heads':>6} {'batch':>5} {'tokens':>6}" + "".join(f" {name + ' us':>10}" for name in providers) + "    GB/s  ratio"]
    for (heads, batch, tokens), row in rows.items():
        times = "".join(f" {row[name]['us']:10.1f}" if name in row else f" {'-':>10}" for name in providers)
        own, peer = row.get(OWN), row.get("fla")
        tail = f" {own['gb_s']:7.0f}" if own else f" {'-':>7}"
        tail += f" {peer['us'] / own['us']:6.2f}" if own and peer else f" {'-':>6}"
        lines.append(f"{heads:>6} {batch:5} {tokens:6}{times}{tail}")
    return "\n".join(lines)


def measure_row(
    heads: tuple[int, int], batch: int, tokens: int, providers: Sequence[str], reps: int, facts: Mapping[str, Any]
) -> list[dict[str, Any]]:
    """The records of one row. Raises RuntimeError if our result is wrong; notes on peers go to stderr."""
    case = make_case(batch, tokens, heads)
    steps: dict[str, Step] = {}
    errors: dict[str, dict[str, float]] = {}
    for provider in providers:
        try:
            steps[provider] = step_of(provider, case)
            errors[provider] = errors_of(case, steps[provider]())
        except Exception as error:  # peers fail in many ways, and the row stands without them
            if provider.partition(":")[0] == OWN:
                raise
            print(f"{provider} left out: {type(error).__name__}: {error}".splitlines()[0], file=sys.stderr, flush=True)
            steps.pop(provider, None)
            continue
        wrong = {name: error for name, error in errors[provider].items() if not error <= TOLERANCE[name]}
        if wrong and provider.partition(":")[0] == OWN:
            raise RuntimeError(f"{provider} is wrong at {heads} heads, batch {batch}, {tokens} tokens: {wrong}")
        if wrong:
            print(f"{provider} left out: errors {wrong}", file=sys.stderr, flush=True)
            del steps[provider]
    hosts = {provider: host_us(step) for provider, step in steps.items()}
    timings = time_interleaved({provider: make_runnable(at_once(step)) for provider, step in steps.items()}, reps)
    return [
        make_record(heads, batch, tokens, provider, timing, case.bytes, hosts[provider], errors[provider], facts)
        for provider, timing in timings.items()
    ]


def _numbers(text: str) -> list[int]:
    return [int(part) for part in text.split(",")]


def _heads(text: str) -> list[tuple[int, int]]:
    pairs = [part.split("/") for part in text.split(",")]
    return [(int(h), int(hv)) for h, hv in pairs]


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--heads", type=_heads, default="16/64,2/8", metavar="H/HV,..")
    parser.add_argument("--batches", type=_numbers, default="1,4,16,64,256", metavar="B,..")
    parser.add_argument("--tokens", type=_numbers, default="1,4", metavar="T,..")
    parser.add_argument("--providers", default="qla,fla", metavar="NAME,..")
    parser.add_argument("--warps", type=_numbers, default=[], metavar="N,..", help="our kernel with so many warps a block as well")
    parser.add_argument("--reps", type=int, default=50)
    parser.add_argument("--results", type=Path, default=RESULTS, metavar="FILE")
    parser.add_argument("--show", type=Path, default=None, metavar="FILE", help="print the table of recorded lines and stop")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    args = make_parser().parse_args(argv)
    if args.show:
        print(format_table(list(read_lines([args.show]))))
        return 0
    facts = environment()
    providers = [*args.providers.split(","), *(f"{OWN}:{n}" for n in args.warps)]
    records: list[dict[str, Any]] = []
    failed = False
    with torch.no_grad():
        for heads in args.heads:
            for tokens in args.tokens:
                for batch in args.batches:
                    try:
                        row = measure_row(heads, batch, tokens, providers, args.reps, facts)
                    except RuntimeError as error:
                        print(f"not reported: {error}", file=sys.stderr, flush=True)
                        failed = True
                        continue
                    for record in row:
                        append_line(args.results, record)
                    records += row
                    print(format_table(row).splitlines()[-1] if row else "nothing timed", file=sys.stderr, flush=True)
    print(format_table(records))
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
