"""The same call gives the same bits: again and again, while the GPU does other things, and after other shapes."""

from __future__ import annotations

import pytest
import torch
from problems import DEVICE, NARROW, Inputs, assert_same_bits, gpu_marks, make_inputs, side_load

pytestmark = gpu_marks()

REPEATS = 200 if DEVICE != "cpu" else 3
# A few items with tails; a full card of whole and ragged chunks; several waves.
SHAPES = [([130, 65, 1], (2, 4)), ([700, 512, 1000], (16, 64)), ([64] * 40, (2, 16))]
if DEVICE == "cpu":
    SHAPES = SHAPES[:1]


def count_differences(got: tuple[torch.Tensor, torch.Tensor], expected: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    """Number of elements with other bits, without waiting for it."""
    o, state = ((a.view(dtype) != b.view(dtype)).sum() for a, b, dtype in zip(got, expected, (torch.int16, torch.int32), strict=True))
    return o + state


def repeat(x: Inputs, expected: tuple[torch.Tensor, torch.Tensor], count: int) -> int:
    return int(torch.stack([count_differences(x.run(), expected) for _ in range(count)]).sum())


@pytest.mark.parametrize("lengths, heads", SHAPES, ids=str)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_repeats(dtype, lengths, heads, rng):
    x = make_inputs(rng, lengths, heads, dtype=dtype)
    expected = x.run()
    assert repeat(x, expected, REPEATS) == 0


@pytest.mark.parametrize("dims", NARROW, ids=str)
@pytest.mark.parametrize("lengths, heads", SHAPES[:2], ids=str)
def test_repeats_of_narrow_heads(lengths, heads, dims, rng):
    x = make_inputs(rng, lengths, heads, dims=dims)
    expected = x.run()
    assert repeat(x, expected, REPEATS) == 0


@pytest.mark.parametrize("lengths, heads", SHAPES, ids=str)
def test_repeats_under_load(lengths, heads, rng):
    """Matrix products on another stream take SMs, L2 and bandwidth away at changing times."""
    if DEVICE == "cpu":
        pytest.skip("needs a CUDA device")
    x = make_inputs(rng, lengths, heads)
    expected = x.run()
    load = side_load()
    differences = []
    for number in range(REPEATS):
        load(number)
        differences.append(count_differences(x.run(), expected))
    total = int(torch.stack(differences).sum())
    torch.cuda.synchronize()
    assert total == 0


def test_other_shapes_in_between(rng):
    """What an earlier launch left in shared memory or in freed buffers has no say."""
    x = make_inputs(rng, [130, 65, 1])
    others = [make_inputs(rng, lengths, heads) for lengths, heads in SHAPES]
    others += [make_inputs(rng, 77, (1, 3), batch=2, dtype=torch.float16), make_inputs(rng, 64, (3, 3), gates="none")]
    nan = Inputs(*(torch.full_like(t, float("nan")) for t in others[0].tensors), others[0].h0, others[0].cu)
    expected = x.run()
    for other in (*others, nan):
        other.run()
        assert_same_bits(x.run(), expected, "after another shape")
