"""Named sets of benchmark rows: head counts, packed lengths and gate regimes.

A row's lengths are written as in the results: "8192" is one sequence, "24576+8192" two packed ones, "8192x4" four of 8192.
"""

from __future__ import annotations

from dataclasses import dataclass

GATES = ("fast", "slow", "mixed")
HEAD_DIM = 128


@dataclass(frozen=True)
class Shape:
    """One benchmark row without its gates: key heads, value heads, lengths of the packed sequences."""

    hk: int
    hv: int
    lengths: str

    def __post_init__(self) -> None:
        if self.hk < 1 or self.hv % self.hk:
            raise ValueError(f"hv must be a multiple of hk, got hk={self.hk}, hv={self.hv}")
        parse_lengths(self.lengths)

    @property
    def sequence_lengths(self) -> tuple[int, ...]:
        return parse_lengths(self.lengths)

    @property
    def tokens(self) -> int:
        return sum(self.sequence_lengths)

    @property
    def heads(self) -> str:
        return f"{self.hk}/{self.hv}"


def parse_lengths(text: str) -> tuple[int, ...]:
    """Lengths of the sequences: "8192", "24576+8192" or "8192x4" (four of 8192), also mixed: "100+64x3"."""
    lengths: list[int] = []
    for part in text.split("+"):
        length, _, count = part.partition("x")
        if not length.isdigit() or (count and not count.isdigit()) or part.endswith("x"):
            raise ValueError(f"lengths must look like 8192, 24576+8192 or 8192x4, got {text!r}")
        lengths += [int(length)] * (int(count) if count else 1)
    if min(lengths) < 1:
        raise ValueError(f"lengths must be positive, got {text!r}")
    return tuple(lengths)


def parse_shape(text: str) -> Shape:
    """A shape from "hk/hv:lengths", for example "16/64:8192x4"."""
    heads, colon, lengths = text.partition(":")
    hk, slash, hv = heads.partition("/")
    if not (colon and slash and hk.isdigit() and hv.isdigit()):
        raise ValueError(f"a shape must look like 16/64:8192x4, got {text!r}")
    return Shape(int(hk), int(hv), lengths)


_TARGET_HEADS = ((2, 8), (8, 32), (16, 48), (16, 64))
_TARGET_LENGTHS = ("32768", "8192", "2048", "24576+8192", "8192x4", "4096x8", "1024x8")
_SWEEP_HEADS = ((2, 8), (4, 16), (8, 32), (16, 64), (16, 32), (8, 24), (16, 48), (16, 16), (32, 32))
_SWEEP_LENGTHS = (
    *("32768", "16384", "8192", "4096", "2048"),
    *("28672+4096", "24576+8192", "16384+16384", "8192+24576", "4096+28672"),
    *("12288+4096", "6144+2048", "4096+4096", "2048+6144", "1024+7168"),
    *("8192x4", "4096x8", "2048x4", "1024x8"),
)

_CP_LENGTHS = ("32768", "8192", "2048", "24576+8192")
_CP_ROWS = tuple(Shape(*heads, lengths) for heads in _TARGET_HEADS for lengths in _CP_LENGTHS)

_BACKWARD_HEADS = ((16, 32), (8, 16), (4, 8), (2, 4))
_BACKWARD_LENGTHS = ("8192", "4096x2", "2048x4", "1024x8", "32768", "16384x2", "8192x4", "4096x8")

# Rows of the forward pass.
SETS: dict[str, tuple[Shape, ...]] = {
    "targets": tuple(Shape(*heads, lengths) for heads in _TARGET_HEADS for lengths in _TARGET_LENGTHS),
    "sweep": tuple(Shape(*heads, lengths) for heads in _SWEEP_HEADS for lengths in _SWEEP_LENGTHS),
    # Few long sequences: those that AutoCP may cut.
    "cp": _CP_ROWS,
    # One head configuration (a peer's first call is slow for each): many items, one item, ragged.
    "quick": tuple(Shape(16, 64, lengths) for lengths in ("8192x4", "32768", "24576+8192", "1024x8")),
}

# Of the backward pass: the rows on which peers publish it.
BACKWARD_SETS: dict[str, tuple[Shape, ...]] = {
    "targets": tuple(Shape(*heads, lengths) for heads in _BACKWARD_HEADS for lengths in _BACKWARD_LENGTHS),
    "sweep": SETS["sweep"],
    "cp": _CP_ROWS,
    "quick": tuple(Shape(16, 32, lengths) for lengths in ("32768", "8192x4", "8192", "1024x8")),
}
