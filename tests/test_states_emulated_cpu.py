"""Device functions that move states between memory and accumulators, on a CPU: every head size, layout and half of V."""

from __future__ import annotations

import ctypes
import itertools
import subprocess
from pathlib import Path

import pytest
import torch

pytest.importorskip("tilelang")
from qla.kernels import ws  # noqa: E402
from tests.emulated import COMPILER, PRELUDE  # noqa: E402

pytestmark = pytest.mark.skipif(COMPILER is None, reason="needs g++")

DIMS = pytest.mark.parametrize(("key_dim", "value_dim"), list(itertools.product(ws.HEAD_DIMS, ws.HEAD_DIMS)))

CALLS = r"""
template <int K> static void call(int what, float* h, unsigned short* parts, int width, int v0, int v_first, float* s, int threads) {
  for (int t = 0; t < threads; ++t) {
    float *s0 = s + 64 * t, *s1 = K == 128 ? s0 + 32 : nullptr;
    if (what == 0) qla_load_state<K>(h, width, v0, v_first, s0, s1, t);
    if (what == 1) qla_store_state<K>(h, width, v0, v_first, s0, s1, t);
    if (what == 2) qla_load_segment<K>(h, width, v0, s0, s1, t);
    if (what == 3) qla_store_segment<K>(h, width, v0, s0, s1, t);
    if (what == 4) qla_identity<K>(v0, s0, s1, t);
    if (what == 5) qla_store_split<K>(parts, 1, v0, s0, s1, t);
  }
}
extern "C" void run(int what, int K, float* h, unsigned short* parts, int width, int v0, int v_first, float* s, int threads) {
  (K == 64 ? call<64> : call<128>)(what, h, parts, width, v0, v_first, s, threads);
}
"""
LOAD_STATE, STORE_STATE, LOAD_SEGMENT, STORE_SEGMENT, IDENTITY, STORE_SPLIT = range(6)


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    text = Path(ws.__file__).with_suffix(".cuh").read_text()
    states = text[text.index("// state of one head, [V, K] or [K, V]") : text.index("// rows from `valid` on of")]
    source = tmp_path_factory.mktemp("states") / "states.cpp"
    source.write_text("\n".join([PRELUDE, states, CALLS]))
    library = source.with_suffix(".so")
    command = [COMPILER, "-std=c++20", "-O1", "-fno-strict-aliasing", "-w", "-shared", "-fPIC", str(source), "-o", str(library)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-2000:]
    function = ctypes.CDLL(str(library)).run

    def call(what, key_dim, memory, fragments, width=128, v0=0, v_first=1):
        address = ctypes.c_void_p(memory.data_ptr())
        function(what, key_dim, address, address, width, v0, v_first, ctypes.c_void_p(fragments.data_ptr()), len(fragments))

    return call


def blocks(rows):
    """(first row, threads) of what blocks of either width own of 64 or 128 rows."""
    return [[(v0, 128) for v0 in range(0, rows, 64)], *([[(0, 256)]] if rows == 128 else [])]


def accumulators(state, v0, threads):
    """What each thread holds of a V-first state: wgmma's layout, a half of K in 32 numbers."""
    thread, i = torch.arange(threads).view(-1, 1, 1), torch.arange(32)
    rows = v0 + thread // 32 * 16 + thread % 32 // 4 + i // 2 % 2 * 8
    columns = torch.arange(0, state.shape[1], 64).view(-1, 1) + thread % 4 * 2 + i // 4 * 8 + i % 2
    return state[rows.expand_as(columns), columns]


def empty(threads):
    return torch.full((threads, 2, 32), torch.nan)


@DIMS
@pytest.mark.parametrize("v_first", [0, 1])
def test_states(run, key_dim, value_dim, v_first):
    state = torch.randn(value_dim, key_dim)
    memory = state.clone() if v_first else state.t().contiguous()
    for parts in blocks(value_dim):
        written = torch.full_like(memory, torch.nan)
        for v0, threads in parts:
            held = empty(threads)
            run(LOAD_STATE, key_dim, memory, held, value_dim, v0, v_first)
            assert torch.equal(held[:, : key_dim // 64], accumulators(state, v0, threads))
            assert held[:, key_dim // 64 :].isnan().all(), "there is no second half"
            run(STORE_STATE, key_dim, written, held, value_dim, v0, v_first)
        assert torch.equal(written, memory)


@DIMS
def test_segments_have_one_order_for_both_widths(run, key_dim, value_dim):
    state = torch.randn(value_dim, key_dim)
    orders = []
    for parts in blocks(value_dim):
        memory = torch.full((key_dim * value_dim,), torch.nan)
        for v0, threads in parts:
            held = empty(threads)
            held[:, : key_dim // 64] = accumulators(state, v0, threads)
            run(STORE_SEGMENT, key_dim, memory, held, value_dim, v0)
        for v0, threads in parts:
            held = empty(threads)
            run(LOAD_SEGMENT, key_dim, memory, held, value_dim, v0)
            assert torch.equal(held[:, : key_dim // 64], accumulators(state, v0, threads))
        orders.append(memory)
    assert all(torch.equal(order, orders[0]) and not order.isnan().any() for order in orders)


@pytest.mark.parametrize("key_dim", ws.HEAD_DIMS)
def test_transitions_begin_as_the_identity_and_are_stored_in_two_parts(run, key_dim):
    values = torch.randn(key_dim, key_dim)
    for parts in blocks(key_dim):
        memory = torch.full((2, 2, key_dim, key_dim), torch.nan, dtype=torch.bfloat16)  # of two items; the second is written
        for v0, threads in parts:
            held = empty(threads)
            run(IDENTITY, key_dim, memory, held, v0=v0)
            assert torch.equal(held[:, : key_dim // 64], accumulators(torch.eye(key_dim), v0, threads))
            held[:, : key_dim // 64] = accumulators(values, v0, threads)
            run(STORE_SPLIT, key_dim, memory, held, v0=v0)
        high = values.bfloat16()
        assert memory[0].isnan().all() and torch.equal(memory[1, 0], high) and torch.equal(memory[1, 1], (values - high.float()).bfloat16())
