"""How far two tensors are apart, as a whole and on the worst (head, chunk) tile."""

from __future__ import annotations

from dataclasses import dataclass

import torch

CHUNK = 64


def relative_error(actual: torch.Tensor, expected: torch.Tensor) -> float:
    """Relative Frobenius error ``|actual - expected| / |expected|`` in float64.

    Zero against zero is 0; anything against an all-zero ``expected`` is the plain norm of ``actual``, so it
    still fails a tolerance. A NaN or infinity in ``actual`` only gives ``inf``.
    """
    assert actual.shape == expected.shape, f"shapes differ: {tuple(actual.shape)} and {tuple(expected.shape)}"
    a = actual.detach().to("cpu", torch.float64)
    e = expected.detach().to("cpu", torch.float64)
    if not bool(torch.isfinite(a).all()):
        return float("inf")
    norm = float(e.norm())
    return float((a - e).norm()) / (norm if norm > 0 else 1.0)


@dataclass(frozen=True)
class Tile:
    """The worst tile of a comparison: which batch row, head and chunk, and how far it is off."""

    error: float
    batch: int
    head: int
    chunk: int


def worst_tile(actual: torch.Tensor, expected: torch.Tensor, chunk: int = CHUNK) -> Tile:
    """Relative error of each [chunk, D] tile of two [B, T, H, D] (or [B, T, H]) tensors; returns the worst.

    A tile is measured against the larger of its own norm and 5 % of the head's root-mean-square tile norm: a
    tile whose values nearly vanish is not judged by digits that no bf16 kernel could keep.
    """
    assert actual.shape == expected.shape, f"shapes differ: {tuple(actual.shape)} and {tuple(expected.shape)}"
    a, e = (x.detach().to("cpu", torch.float64) for x in (actual, expected))
    if a.dim() == 3:
        a, e = a.unsqueeze(-1), e.unsqueeze(-1)
    batch, tokens, heads, dim = a.shape
    if a.numel() == 0:
        return Tile(0.0, 0, 0, 0)
    pad = -tokens % chunk
    diff = torch.nn.functional.pad(a - e, (0, 0, 0, 0, 0, pad)).reshape(batch, -1, chunk, heads, dim)
    ref = torch.nn.functional.pad(e, (0, 0, 0, 0, 0, pad)).reshape(batch, -1, chunk, heads, dim)
    diff_norm, ref_norm = diff.square().sum((2, 4)).sqrt(), ref.square().sum((2, 4)).sqrt()  # [B, chunks, H]
    floor = 0.05 * ref_norm.square().mean(1, keepdim=True).sqrt()
    errors = diff_norm / torch.maximum(ref_norm, floor).clamp_min(torch.finfo(torch.float64).tiny)
    errors = torch.where(diff_norm == 0, torch.zeros_like(errors), errors).nan_to_num(nan=float("inf"))
    index = int(errors.argmax())
    b, c, h = index // (errors.shape[1] * heads), index // heads % errors.shape[1], index % heads
    return Tile(float(errors[b, c, h]), b, h, c)


def assert_close(actual: torch.Tensor, expected: torch.Tensor, tolerance: float, name: str = "tensor") -> None:
    """Relative Frobenius error of the whole tensor at most ``tolerance``."""
    error = relative_error(actual, expected)
    assert error <= tolerance, f"{name}: relative error {error:.3e} > {tolerance:.1e}"


def assert_tiles_close(actual: torch.Tensor, expected: torch.Tensor, tolerance: float, name: str = "tensor", chunk: int = CHUNK) -> None:
    """``assert_close`` on the worst (head, chunk) tile, which names the tile when it fails."""
    tile = worst_tile(actual, expected, chunk)
    assert tile.error <= tolerance, (
        f"{name}: relative error {tile.error:.3e} > {tolerance:.1e} in batch {tile.batch}, head {tile.head}, chunk {tile.chunk}"
    )


def assert_bitwise_equal(actual: torch.Tensor, expected: torch.Tensor, name: str = "tensor") -> None:
    """Same shape, dtype and bits; NaNs with the same bits are equal, 0.0 and -0.0 are not."""
    assert actual.shape == expected.shape, f"{name}: shapes differ: {tuple(actual.shape)} and {tuple(expected.shape)}"
    assert actual.dtype == expected.dtype, f"{name}: dtypes differ: {actual.dtype} and {expected.dtype}"
    integer = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[actual.element_size()]
    a = actual.detach().cpu().contiguous().view(integer)
    e = expected.detach().cpu().contiguous().view(integer)
    different = (a != e).flatten()
    count = int(different.sum())
    if count:
        first = int(different.nonzero()[0])
        raise AssertionError(
            f"{name}: {count} of {different.numel()} elements differ in bits; first at flat index {first}: "
            f"{actual.detach().cpu().flatten()[first].item()!r} and {expected.detach().cpu().flatten()[first].item()!r}"
        )


def count_mismatched_bits(actual: torch.Tensor, expected: torch.Tensor) -> int:
    """Number of elements whose bits differ."""
    integer = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[actual.element_size()]
    return int((actual.detach().contiguous().view(integer) != expected.detach().contiguous().view(integer)).sum())
