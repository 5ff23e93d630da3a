"""The least time that a row can take on an H200: that of its matrix products, or of its memory traffic.

The rates are what a large bf16 matrix product and a device copy reach there. A floor is for all multiprocessors busy all the
time: one long sequence of few heads, a chain of chunks, cannot come near it without being cut.
"""

from __future__ import annotations

from bench.shapes import HEAD_DIM, Shape

FLOPS = 790e12  # a second
BYTES = 4.3e12  # a second
CHUNK = 64
# Floating-point operations a chunk and value head. Forward with Q K^T and K K^T counted once a key head; backward with the
# states computed again.
FLOP_A_CHUNK = {"fwd": 9.3e6, "bwd": 32.4e6}
# How often each kind of tensor is read or written: bf16 rows of 128 a key head (q, k, and backward dq, dk), a value head (v, o;
# backward v, do, dv), and fp32 numbers a value head (g, beta; backward dg, dbeta as well).
TRAFFIC = {"fwd": (2, 2, 2), "bwd": (4, 3, 4)}


def tensor_core_ms(shape: Shape, direction: str) -> float:
    chunks = sum(-(-length // CHUNK) for length in shape.sequence_lengths)
    return 1e3 * chunks * shape.hv * FLOP_A_CHUNK[direction] / FLOPS


def memory_ms(shape: Shape, direction: str) -> float:
    of_key_heads, of_value_heads, of_gates = TRAFFIC[direction]
    row = 2 * HEAD_DIM
    a_token = row * (of_key_heads * shape.hk + of_value_heads * shape.hv) + 4 * of_gates * shape.hv
    return 1e3 * shape.tokens * a_token / BYTES


def floor_ms(shape: Shape, direction: str) -> float:
    """The larger of both."""
    return max(tensor_core_ms(shape, direction), memory_ms(shape, direction))
