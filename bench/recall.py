"""A recall task and a small Gated DeltaNet language model that learns it in some hundred steps; for ``bench/train_curves.py``."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

HEAD_DIM = 128
SIZES = 4  # a sequence has all keys, or a half, a quarter, an eighth of them
CONV = 4  # tokens that the short convolution sees, as in Qwen3-Next
Operation = Callable[..., tuple[Tensor, Tensor | None]]  # (q, k, v, g, beta) to (o, None)


@dataclass(frozen=True)
class Task:
    """Streams of key-value pairs: k v k v ..; keys are tokens 0 .. keys - 1, values the ones after them.

    length: tokens of a sequence, even.
    keys, values: how many there are; a multiple of 8 keys. One sequence in four uses all keys, the others 1/2, 1/4 and 1/8 of them.
    change: how often a key that has been seen comes back with a new value, from 0 to 1.
    """

    length: int = 1024
    keys: int = 32
    values: int = 32
    change: float = 0.1

    def __post_init__(self) -> None:
        if self.length < 4 or self.length % 2:
            raise ValueError(f"length must be even and at least 4, got {self.length}")
        if self.keys < 1 or self.keys % 2 ** (SIZES - 1):
            raise ValueError(f"keys must be a multiple of {2 ** (SIZES - 1)}, got {self.keys}")

    @property
    def guess(self) -> float:
        """The loss of a model that knows the values but remembers nothing, in nats."""
        return math.log(self.values)


def make_batch(task: Task, batch: int, seed: int, step: int) -> tuple[Tensor, Tensor]:
    """Tokens [batch, length] and targets [batch, length], int64: the value that follows a key, -100 where it cannot be known.

    A value can be known when its key was seen before and has kept its value. The batch follows from seed and step alone.
    """
    rng = np.random.default_rng([seed, step])
    shape = (batch, task.length // 2)
    drawn, renewed = rng.integers(task.values, size=shape) + task.keys, rng.random(shape) < task.change
    in_use = rng.permuted(np.tile(np.arange(task.keys), (batch, 1)), axis=1)  # row by row, the first ones are the sequence's keys
    how_many = task.keys >> np.arange(batch)[:, None] % SIZES
    keys = np.take_along_axis(in_use, rng.integers(how_many, size=shape), axis=1)

    # Each key's pairs side by side, in time: a pair has the value drawn at the last one that is new.
    order = np.argsort(keys, axis=1, kind="stable")
    by_key, new = (np.take_along_axis(x, order, axis=1) for x in (keys, renewed))
    new[:, 0] = True
    new[:, 1:] |= by_key[:, 1:] != by_key[:, :-1]
    source = np.maximum.accumulate(np.where(new, np.arange(shape[1]), 0), axis=1)
    values, unknown = np.empty(shape, np.int64), np.empty(shape, bool)
    np.put_along_axis(values, order, np.take_along_axis(np.take_along_axis(drawn, order, axis=1), source, axis=1), axis=1)
    np.put_along_axis(unknown, order, new, axis=1)

    tokens = np.stack([keys, values], axis=-1).reshape(batch, task.length)
    targets = np.full_like(tokens, -100)
    targets[:, ::2] = np.where(unknown, -100, values)
    return torch.from_numpy(tokens), torch.from_numpy(targets)


class ShortConvolution(nn.Module):
    """Each channel's weighted sum over its last CONV tokens, then SiLU; x [B, T, C]."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(CONV, channels).uniform_(-1, 1) * CONV**-0.5)

    def forward(self, x: Tensor) -> Tensor:
        padded = F.pad(x, (0, 0, CONV - 1, 0))
        return F.silu(sum(padded[:, i : i + x.shape[1]] * self.weight[i] for i in range(CONV)))


class Mixer(nn.Module):
    """Gated DeltaNet layer: projections, short convolutions, the operation, norm and output gate.

    width: channels of the model. heads: (key heads, value heads). dtype: of q, k and v, as the operation gets them.
    """

    def __init__(self, width: int, heads: tuple[int, int], operation: Operation, dtype: torch.dtype) -> None:
        super().__init__()
        self.heads, self.operation, self.dtype = heads, operation, dtype
        keys, values = (n * HEAD_DIM for n in heads)
        self.qkv = nn.Linear(width, 2 * keys + values, bias=False)
        self.convolution = ShortConvolution(2 * keys + values)
        self.gates = nn.Linear(width, 2 * heads[1], bias=False)
        self.A_log = nn.Parameter(torch.empty(heads[1]).uniform_(0.1, 2).log())  # slow: recall needs a long memory
        step = torch.exp(torch.empty(heads[1]).uniform_(math.log(0.001), math.log(0.1)))
        self.dt_bias = nn.Parameter(step + torch.log(-torch.expm1(-step)))  # softplus of it is step
        self.norm = nn.RMSNorm(HEAD_DIM, eps=1e-6)
        self.output_gate = nn.Linear(width, values, bias=False)
        self.out = nn.Linear(values, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        hk, hv = self.heads
        q, k, v = self.convolution(self.qkv(x)).unflatten(-1, (-1, HEAD_DIM)).split([hk, hk, hv], dim=2)
        q, k = (F.normalize(part.float(), dim=-1) for part in (q, k))
        raw, beta = self.gates(x).float().chunk(2, dim=-1)
        g = -self.A_log.exp() * F.softplus(raw + self.dt_bias)
        o, _ = self.operation(*(part.to(self.dtype).contiguous() for part in (q, k, v)), g, beta.sigmoid())
        return self.out((self.norm(o.float()) * F.silu(self.output_gate(x).unflatten(-1, (hv, HEAD_DIM)))).flatten(2))


class Mlp(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.into, self.out = nn.Linear(width, 4 * width, bias=False), nn.Linear(2 * width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.into(x).chunk(2, dim=-1)
        return self.out(F.silu(gate) * up)


class Model(nn.Module):
    """Embedding, `layers` times mixer and MLP (each on the RMS norm of the stream, added to it), norm, logits over all tokens."""

    def __init__(
        self, task: Task, operation: Operation, width: int, heads: tuple[int, int], layers: int = 2, dtype: torch.dtype = torch.float32
    ) -> None:
        super().__init__()
        vocabulary = task.keys + task.values
        self.embedding = nn.Embedding(vocabulary, width)
        self.parts = nn.ModuleList(part for _ in range(layers) for part in (Mixer(width, heads, operation, dtype), Mlp(width)))
        self.norms = nn.ModuleList(nn.RMSNorm(width, eps=1e-6) for _ in range(2 * layers + 1))
        self.head = nn.Linear(width, vocabulary, bias=False)
        nn.init.normal_(self.embedding.weight, std=0.5)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for part, norm in zip(self.parts, self.norms, strict=False):
            x = x + part(norm(x))
        return self.head(self.norms[-1](x))

    def loss(self, tokens: Tensor, targets: Tensor) -> Tensor:
        """Mean cross-entropy over the targets that can be known."""
        return F.cross_entropy(self(tokens).float().flatten(0, 1), targets.flatten())
