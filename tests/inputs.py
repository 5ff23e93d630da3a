"""Random inputs of a call, drawn on the CPU from a seeded generator."""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

LENGTHS_WITH_GAPS = (0, 64, 0, 1, 100, 63, 0)


class Inputs(NamedTuple):
    """The five tensors every call needs, in the order of ``chunk_gated_delta_rule``."""

    q: Tensor
    k: Tensor
    v: Tensor
    g: Tensor
    beta: Tensor

    def to(self, dtype: torch.dtype) -> Inputs:
        return Inputs(*(x.to(dtype) for x in self))

    def rows(self, begin: int, end: int) -> Inputs:
        """Tokens begin to end - 1."""
        return Inputs(*(x[:, begin:end] for x in self))

    def leaves(self) -> Inputs:
        """Copies that ask for gradients."""
        return Inputs(*(x.detach().clone().requires_grad_() for x in self))


def make_inputs(
    rng: torch.Generator,
    tokens: int,
    batch: int = 1,
    key_heads: int = 2,
    value_heads: int = 4,
    key_dim: int = 16,
    value_dim: int = 24,
    dtype: torch.dtype = torch.float64,
) -> Inputs:
    """q and k normalised, g = logsigmoid(normal), beta = sigmoid(normal)."""

    def draw(*shape: int) -> Tensor:
        return torch.randn(batch, tokens, *shape, generator=rng, dtype=torch.float64)

    q, k = (F.normalize(draw(key_heads, key_dim), dim=-1) for _ in range(2))
    v = draw(value_heads, value_dim)
    return Inputs(q, k, v, F.logsigmoid(draw(value_heads)), draw(value_heads).sigmoid()).to(dtype)


def make_state(rng: torch.Generator, inputs: Inputs, num_seqs: int | None = None) -> Tensor:
    """A normal initial state [S, HV, K, V] in the inputs' dtype."""
    shape = (len(inputs.q) if num_seqs is None else num_seqs, inputs.v.shape[2], inputs.q.shape[3], inputs.v.shape[3])
    return torch.randn(shape, generator=rng, dtype=torch.float64).to(inputs.q.dtype)


def cu_seqlens_of(lengths: tuple[int, ...] | list[int], dtype: torch.dtype = torch.int32) -> Tensor:
    """Cumulative lengths, starting with 0."""
    return F.pad(torch.tensor(lengths, dtype=torch.int64).cumsum(0), (1, 0)).to(dtype)
