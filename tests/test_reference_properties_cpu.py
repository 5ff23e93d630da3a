"""The two reference forms on inputs that hypothesis makes up: any packing, any gates."""

from __future__ import annotations

import math

import pytest
import torch
from inputs import cu_seqlens_of, make_inputs, make_state
from numeric import assert_bitwise_equal, assert_close

from qla.reference import chunked_gated_delta_rule, recurrent_gated_delta_rule

hypothesis = pytest.importorskip("hypothesis")
st = pytest.importorskip("hypothesis.strategies")

SETTINGS = hypothesis.settings(max_examples=40, deadline=None, derandomize=True, database=None)
LENGTHS = st.lists(st.one_of(st.just(0), st.integers(1, 5), st.sampled_from([15, 16, 17, 40])), min_size=0, max_size=6)
GATES = st.sampled_from([0.0, -1e-6, -0.1, -3.0, -30.0, -300.0, -1e4, -math.inf, 0.05])


@hypothesis.given(
    lengths=LENGTHS,
    padding=st.integers(0, 20),
    ratio=st.sampled_from([1, 2, 3]),
    chunk_size=st.sampled_from([1, 7, 16]),
    gates=st.lists(GATES, min_size=1, max_size=7),
    seed=st.integers(0, 2**31),
)
@SETTINGS
def test_any_packing_and_any_gates(lengths, padding, ratio, chunk_size, gates, seed):
    rng = torch.Generator().manual_seed(seed)
    tokens = sum(lengths) + padding
    inputs = make_inputs(rng, tokens, key_heads=2, value_heads=2 * ratio, key_dim=4, value_dim=3)
    pick = torch.randint(len(gates), inputs.g.shape, generator=rng)
    inputs = inputs._replace(g=torch.tensor(gates, dtype=torch.float64)[pick])
    for x in inputs:
        x[:, sum(lengths) :] = math.nan
    options = {
        "initial_state": make_state(rng, inputs, len(lengths)),
        "output_final_state": True,
        "cu_seqlens": cu_seqlens_of(lengths),
    }
    o, final = recurrent_gated_delta_rule(*inputs, **options)
    o_chunked, final_chunked = chunked_gated_delta_rule(*inputs, chunk_size=chunk_size, **options)
    assert torch.isfinite(o).all() and o[:, sum(lengths) :].count_nonzero() == 0
    assert_close(o_chunked, o, 1e-11, "o")
    assert_close(final_chunked, final, 1e-11, "final state")
    for n, length in enumerate(lengths):
        if length == 0:
            assert_bitwise_equal(final[n], options["initial_state"][n])


@hypothesis.given(lengths=st.lists(st.integers(0, 20), min_size=1, max_size=4), seed=st.integers(0, 2**31))
@SETTINGS
def test_gradients_of_any_packing(lengths, seed):
    rng = torch.Generator().manual_seed(seed)
    inputs = make_inputs(rng, sum(lengths), key_heads=1, value_heads=2, key_dim=3, value_dim=2)
    state = make_state(rng, inputs, len(lengths))
    grads = []
    for form in (recurrent_gated_delta_rule, chunked_gated_delta_rule):
        leaves = [*inputs.leaves(), state.clone().requires_grad_()]
        o, final = form(*leaves[:5], initial_state=leaves[5], output_final_state=True, cu_seqlens=cu_seqlens_of(lengths))
        grads.append(torch.autograd.grad(o.square().sum() + final.square().sum(), leaves, materialize_grads=True))
    for expected, actual in zip(*grads, strict=True):
        assert_close(actual, expected, 1e-10)
