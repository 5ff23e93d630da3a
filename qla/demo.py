"""``python -m qla.demo``: one forward pass on this machine, checked against float64.

On a Hopper GPU: 32768 tokens, 16 key and 64 value heads, through the kernels. Elsewhere: a small input, through PyTorch.
"""

from __future__ import annotations

import statistics
import time
import warnings

import torch
import torch.nn.functional as F
from torch import Tensor

from qla.api import chunk_gated_delta_rule
from qla.checks import unsupported_reason
from qla.reference import chunked_gated_delta_rule, recurrent_gated_delta_rule

HEAD_DIM = 128
CHECKED_TOKENS = 1024  # of o, by the recurrence; o depends on no later token
TOLERANCE = 1e-2  # bfloat16 gives about 4e-3

Inputs = tuple[Tensor, Tensor, Tensor, Tensor, Tensor]  # q, k, v, g, beta


def make_inputs(tokens: int, key_heads: int, value_heads: int, device: str) -> Inputs:
    """q, k, v [1, tokens, heads, 128] in bfloat16 with q and k normalised, g and beta [1, tokens, value_heads] in float32."""
    generator = torch.Generator(device).manual_seed(0)

    def draw(heads: int, *dims: int) -> Tensor:
        return torch.randn(1, tokens, heads, *dims, generator=generator, device=device)

    q, k = (F.normalize(draw(key_heads, HEAD_DIM), dim=-1).bfloat16() for _ in range(2))
    v = draw(value_heads, HEAD_DIM).bfloat16()
    return q, k, v, F.logsigmoid(draw(value_heads)), draw(value_heads).sigmoid()


def run(inputs: Inputs) -> tuple[Tensor, Tensor]:
    """The call this demo is about."""
    q, k, v, g, beta = inputs
    o, final_state = chunk_gated_delta_rule(q, k, v, g, beta, output_final_state=True)
    assert final_state is not None
    return o, final_state


def relative_error(actual: Tensor, expected: Tensor) -> float:
    """Relative Frobenius error in float64."""
    return float((actual.double() - expected).norm() / expected.norm())


def first_and_last_group(key_heads: int, value_heads: int) -> tuple[list[int], list[int]]:
    """The first and the last key head, and the value heads that read them."""
    ratio = value_heads // key_heads
    keys = sorted({0, key_heads - 1})
    return keys, [h * ratio + i for h in keys for i in range(ratio)]


def errors_against_float64(inputs: Inputs, o: Tensor, final_state: Tensor) -> tuple[float, float]:
    """Errors of o (first tokens, by the recurrence) and of the final state (all tokens, by the chunked form) on two groups of heads."""
    keys, values = first_and_last_group(inputs[0].shape[2], inputs[2].shape[2])
    q, k = (x[:, :, keys].double() for x in inputs[:2])
    v, g, beta = (x[:, :, values].double() for x in inputs[2:])
    head = slice(CHECKED_TOKENS)
    o_exact, _ = recurrent_gated_delta_rule(q[:, head], k[:, head], v[:, head], g[:, head], beta[:, head])
    _, state_exact = chunked_gated_delta_rule(q, k, v, g, beta, output_final_state=True)
    assert state_exact is not None
    return relative_error(o[:, head, values], o_exact), relative_error(final_state[:, values], state_exact)


def median_seconds(inputs: Inputs, repeats: int) -> float:
    """Median wall-clock time of a call, the device idle before and after; the caller has warmed up."""
    on_gpu = inputs[0].is_cuda
    times = []
    for _ in range(repeats):
        if on_gpu:
            torch.cuda.synchronize()
        start = time.perf_counter()
        run(inputs)
        if on_gpu:
            torch.cuda.synchronize()
        times.append(time.perf_counter() - start)
    return statistics.median(times)


def main() -> int:
    """Runs the demo; the exit status is 1 when an error is larger than bfloat16 explains."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    probe = make_inputs(1, 1, 1, device)
    reason = unsupported_reason(*probe)
    tokens, key_heads, value_heads = (32768, 16, 64) if reason is None else (1024, 2, 4)
    inputs = make_inputs(tokens, key_heads, value_heads, device)

    print(f"device       {torch.cuda.get_device_name() if device == 'cuda' else 'CPU'}")
    print(f"path         {'qla kernels' if reason is None else f'PyTorch ({reason})'}")
    start = time.perf_counter()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # the path is printed above
        o, final_state = run(inputs)
    o_error, state_error = errors_against_float64(inputs, o, final_state)
    first = time.perf_counter() - start

    print(f"q, k         {list(inputs[0].shape)} bfloat16")
    print(f"v, o         {list(o.shape)} bfloat16")
    print(f"final state  {list(final_state.shape)} float32")
    print(f"error        o {o_error:.2e}, final state {state_error:.2e} (relative to float64)")
    print(f"time         {median_seconds(inputs, repeats=10) * 1e3:.3f} ms a call (median of 10; first call and check took {first:.1f} s)")
    ok = max(o_error, state_error) < TOLERANCE
    print("result       " + ("ok" if ok else f"WRONG: an error above {TOLERANCE}"))
    return 0 if ok else 1


if __name__ == "__main__":
    raise SystemExit(main())
