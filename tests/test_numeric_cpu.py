"""The yardsticks themselves."""

from __future__ import annotations

import math

import pytest
import torch
from numeric import assert_bitwise_equal, assert_close, assert_tiles_close, count_mismatched_bits, relative_error, worst_tile


def test_relative_error():
    x = torch.tensor([3.0, 4.0])
    assert relative_error(x, x) == 0
    assert relative_error(x * 1.1, x) == pytest.approx(0.1, rel=1e-6)
    assert relative_error(torch.zeros(3), torch.zeros(3)) == 0
    assert relative_error(torch.ones(4), torch.zeros(4)) == 2
    assert relative_error(torch.tensor([1.0, math.nan]), torch.ones(2)) == math.inf
    with pytest.raises(AssertionError, match="shapes differ"):
        relative_error(torch.ones(2), torch.ones(3))


def test_a_single_wrong_tile_is_found(rng):
    expected = torch.randn(2, 150, 3, 8, generator=rng)
    actual = expected.clone()
    actual[1, 128:, 2] *= 1.5
    tile = worst_tile(actual, expected)
    assert (tile.batch, tile.head, tile.chunk) == (1, 2, 2) and tile.error == pytest.approx(0.5, rel=1e-4)
    assert_close(actual, expected, 0.2)
    with pytest.raises(AssertionError, match="batch 1, head 2, chunk 2"):
        assert_tiles_close(actual, expected, 0.2)
    actual[0, 0, 0, 0] = math.nan
    assert worst_tile(actual, expected).error == math.inf


def test_a_vanishing_tile_is_judged_by_its_head():
    expected = torch.ones(1, 128, 1, 4)
    expected[:, 64:] = 1e-9
    assert worst_tile(expected + 1e-4, expected).error < 1e-2


def test_bits():
    x = torch.tensor([0.0, math.nan, 1.0])
    assert_bitwise_equal(x, x.clone())
    assert count_mismatched_bits(x, torch.tensor([-0.0, math.nan, 1.0])) == 1
    with pytest.raises(AssertionError, match="1 of 3 elements differ in bits; first at flat index 0"):
        assert_bitwise_equal(x, torch.tensor([-0.0, math.nan, 1.0]))
    with pytest.raises(AssertionError, match="dtypes differ"):
        assert_bitwise_equal(x, x.double())
