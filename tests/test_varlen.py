"""Packed sequences: empty ones, padding rows, independence of the neighbours, very many and very long ones."""

from __future__ import annotations

import pytest
import torch
from problems import (
    DEVICE,
    FLOOR,
    NAN_FILLED,
    Inputs,
    assert_accurate,
    assert_same_bits,
    cu_of,
    device_rng,
    free_gigabytes,
    gpu_marks,
    make_inputs,
    nan_filled_empty,  # noqa: F401
    relative,
    synchronise,
    with_garbage_rows,
)

from qla.reference import chunked_gated_delta_rule

pytestmark = gpu_marks(NAN_FILLED)


@pytest.mark.parametrize("state", [True, False], ids=["h0", "no h0"])
@pytest.mark.parametrize("lengths", [[0, 64], [64, 0, 64], [0], [0, 0, 0], [0, 1, 0, 0, 65, 0], [128, 0]], ids=str)
def test_empty_sequences(lengths, state, rng):
    x = make_inputs(rng, lengths, state=state)
    o, final = x.run()
    assert_accurate(x, (o, final))
    for n, length in enumerate(lengths):
        if length == 0:
            expected = x.h0[n] if state else torch.zeros_like(final[n])
            assert torch.equal(final[n], expected), f"final state of the empty sequence {n}"
        else:
            begin, end = x.bounds[n]
            assert_same_bits((o[:, begin:end], final[n : n + 1]), x.sequence(n).run(), f"neighbour {n} of an empty sequence")


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64], ids=str)
def test_all_rows_unowned(dtype, rng):
    x = make_inputs(rng, 70)
    x = x.with_(cu=torch.zeros(2, dtype=dtype, device=DEVICE))
    o, final = x.run()
    assert bool((o == 0).all())
    assert torch.equal(final, x.h0)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), 1e4])
@pytest.mark.parametrize("count", [1, 27, 63, 64, 65, 200, 5000])
@pytest.mark.parametrize("lengths", [[100], [64, 37]], ids=str)
def test_rows_past_the_last_sequence(lengths, count, value, rng):
    """They may hold anything; their o is 0 and nobody's bits change."""
    x = make_inputs(rng, lengths, (1, 4))
    owned = sum(lengths)
    o, final = with_garbage_rows(x, count, value).run()
    assert bool((o[:, owned:] == 0).all())
    assert_same_bits((o[:, :owned], final), x.run(), f"{count} rows of {value} behind")


@pytest.mark.parametrize("neighbour", [0, 1])
def test_nan_stays_in_its_sequence(neighbour, rng):
    """Tiles reach over a sequence's end into the next one's rows: those must not leak."""
    x = make_inputs(rng, [70, 70])
    clean = x.run()
    begin, end = x.bounds[neighbour]
    dirty = [t.clone() for t in x.tensors]
    for t in dirty:
        t[:, begin:end] = float("nan")
    o, final = Inputs(*dirty, x.h0, x.cu).run()
    other = 1 - neighbour
    begin, end = x.bounds[other]
    assert_same_bits(
        (o[:, begin:end], final[other : other + 1]), (clean[0][:, begin:end], clean[1][other : other + 1]), "a neighbour of NaN"
    )


@pytest.mark.parametrize("heads", [(2, 4), (2, 2), (1, 3)], ids=str)
@pytest.mark.parametrize("lengths", [[64, 64], [1, 63, 64, 65, 200], [129, 3, 0, 70]], ids=str)
def test_packed_equals_separate(lengths, heads, rng):
    x = make_inputs(rng, lengths, heads)
    o, final = x.run()
    assert_accurate(x, (o, final))
    for n in range(len(lengths)):
        begin, end = x.bounds[n]
        assert_same_bits((o[:, begin:end], final[n : n + 1]), x.sequence(n).run(), f"sequence {n} alone")


@pytest.mark.parametrize("tokens", [64, 100])
def test_batch_equals_packed(tokens, rng):
    x = make_inputs(rng, tokens, batch=5)
    packed = Inputs(*(t.flatten(0, 1).unsqueeze(0) for t in x.tensors), x.h0, cu_of([tokens] * 5))
    o, final = packed.run()
    assert_same_bits((o.view_as(x.v), final), x.run(), "[B, T] and packed")


@pytest.mark.parametrize("state", [True, False], ids=["h0", "no h0"])
def test_thousands_of_short_sequences(state, rng):
    lengths = torch.randint(0, 10, (2048,), generator=rng).tolist()
    x = make_inputs(rng, lengths, (1, 2), state=state)
    assert_accurate(x, x.run())


@pytest.mark.parametrize("packed", [True, False], ids=["packed", "batch"])
def test_more_sequences_than_a_grid_axis_holds(packed, rng):
    """70,000 sequences of one token, no states: o = scale beta (q k) v."""
    count = 70_000 if DEVICE != "cpu" else 700
    x = make_inputs(rng, count, (1, 1), state=False)
    x = x.with_(cu=cu_of([1] * count)) if packed else Inputs(*(t.transpose(0, 1) for t in x.tensors))
    o, none = x.run(output_final_state=False)
    assert none is None
    q, k, v, _, beta = (t.double() for t in x.tensors)
    expected = 128**-0.5 * beta.unsqueeze(-1) * (q * k).sum(-1, keepdim=True) * v
    assert relative(o, expected) < FLOOR[torch.bfloat16]


@pytest.mark.parametrize("gates", ["fast", "mixed"])
def test_one_long_and_thirty_short(gates, rng):
    lengths = torch.randint(1, 81, (31,), generator=rng).tolist()
    lengths[11] = 5000 if DEVICE != "cpu" else 500
    x = make_inputs(rng, lengths, (2, 8), gates=gates)
    assert_accurate(x, x.run(), expected=x.exact(chunked=True))


def test_tokens_past_two_to_the_31_elements(seed):
    """300,001 tokens of 64 heads of 128: 2.46e9 elements in each of q, k, v and o, 1.2e9 in A."""
    if DEVICE == "cpu" or free_gigabytes() < 60:
        pytest.skip("needs 60 GB of free GPU memory")
    tokens, cut, heads = 300_001, 299_000, 64
    rng = device_rng(seed)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(1, tokens, heads, *shape, generator=rng, device=DEVICE, dtype=torch.bfloat16)

    q, k, v = normal(128), normal(128), normal(128)
    for t in (q, k):
        t.div_(t.norm(dim=-1, keepdim=True))
    g, beta = torch.nn.functional.logsigmoid(normal().float()), normal().float().sigmoid()
    x = Inputs(q, k, v, g, beta, cu=cu_of([cut, tokens - cut]))
    o, final = x.run()
    # Fast gates forget within some hundred tokens (e^-0.8 each): windows of 1024 tokens from a zero state are exact at their end.
    # Rows 262144 +- 512 stand on either side of element 2^31, the last window on the second sequence's tail.
    some = [0, 31, 63]
    for begin, end, first in ((262144 - 512, 262144 + 512, 400), (cut - 1024, cut, 400), (cut, tokens, 0)):
        window = Inputs(*(t[:, begin:end] for t in x.tensors)).heads(some)
        expected, state = window.exact(chunked=True)
        assert relative(o[:, begin + first : end, some], expected[:, first:]) < FLOOR[torch.bfloat16], f"o of rows {begin} to {end}"
        if end in (cut, tokens):
            assert relative(final[[cut, tokens].index(end), some].unsqueeze(0), state) < FLOOR[torch.bfloat16], f"state after row {end}"
    assert bool(torch.isfinite(o[:, ::97]).all())


def test_states_past_two_to_the_31_elements(seed):
    """2100 sequences of 64 heads: 2.2e9 elements in each of the initial and the final states."""
    if DEVICE == "cpu" or free_gigabytes() < 60:
        pytest.skip("needs 60 GB of free GPU memory")
    sequences, heads = 2100, 64
    rng = device_rng(seed)
    x = make_inputs(rng, 1, (16, heads), batch=sequences, state=False)
    h0 = torch.randn(sequences, heads, 128, 128, generator=rng, device=DEVICE)
    x = x.with_(h0=h0)
    o, final = x.run()
    last = slice(sequences - 3, sequences)  # beyond element 2^31, which is in sequence 2048
    for part in (slice(0, 3), slice(2046, 2050), last):
        some = Inputs(*(t[part] for t in x.tensors), h0[part])
        assert_accurate(some, (o[part], final[part]))


@pytest.mark.parametrize(
    "values", [[0, 50, 20, 128], [0, 300], [-64, 128], [5, 70, 128], [0, 128, 128, 4000], [2**31 - 1, -(2**31)], [100, 0, 100]], ids=str
)
def test_bad_offsets_on_the_device_do_no_harm(values, rng):
    """What the host cannot check without waiting may give any o, but no crash, no hang, nothing overwritten. (sanitize.py looks closer.)"""
    if DEVICE == "cpu":
        pytest.skip("offsets on the CPU are checked")
    x = make_inputs(rng, 128, state=False)
    clean = x.run()
    kept = [t.clone() for t in x.tensors]
    h0 = torch.ones(len(values) - 1, 4, 128, 128, device=DEVICE)
    o, final = x.with_(h0=h0, cu=torch.tensor(values, dtype=torch.int32, device=DEVICE)).run()
    synchronise()
    assert o.shape == x.v.shape and final.shape == h0.shape
    assert all(torch.equal(a, b) for a, b in zip(x.tensors, kept, strict=True)) and bool((h0 == 1).all())
    assert_same_bits(x.run(), clean, "a good call after a bad one")


def test_sequence_lengths_change_nothing_but_their_own_rows(rng):
    """The same packed tokens cut in two ways: where a sequence begins alike in both, its first rows are the same."""
    x = make_inputs(rng, 300, state=False)
    o_a, _ = x.with_(cu=cu_of([100, 200])).run()
    o_b, _ = x.with_(cu=cu_of([100, 64, 136])).run()
    assert_same_bits((o_a[:, :164], None), (o_b[:, :164], None), "rows before the second cut")
    expected, _ = chunked_gated_delta_rule(*(t.double() for t in x.tensors), cu_seqlens=cu_of([100, 64, 136]))
    assert relative(o_b, expected) < FLOOR[torch.bfloat16]
