"""The forward pass against float64: head counts, dtypes, block widths, head sizes, states, tails, and the low-level entry."""

from __future__ import annotations

import pytest
import torch
from problems import (
    DEVICE,
    FLOOR,
    GATES,
    NAN_FILLED,
    NARROW,
    Inputs,
    assert_accurate,
    assert_same_bits,
    cu_of,
    gpu_marks,
    make_inputs,
    nan_filled_empty,  # noqa: F401
    relative,
    with_garbage_rows,
    worst_state,
)

import qla
from qla.autocp import Plan
from qla.reference import chunk_gate_sum_and_inverse

pytestmark = gpu_marks(NAN_FILLED)

HEADS = [(1, 1), (1, 2), (1, 3), (1, 4), (1, 5), (1, 8), (2, 6), (3, 3), (2, 16), (4, 32), (16, 16)]


@pytest.mark.parametrize("heads", HEADS, ids=str)
def test_head_counts(heads, rng):
    x = make_inputs(rng, 150, heads, batch=2)
    assert_accurate(x, x.run())


@pytest.mark.parametrize("heads", [(1, 3), (2, 2), (2, 8)], ids=str)
def test_head_counts_fp16_packed(heads, rng):
    x = make_inputs(rng, [70, 1, 129], heads, dtype=torch.float16)
    assert_accurate(x, x.run())


@pytest.mark.parametrize("gates", GATES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_long_sequence(dtype, gates, rng):
    x = make_inputs(rng, 8192 + 37, (1, 2), dtype=dtype, gates=gates)
    assert_accurate(x, x.run(), expected=x.exact(chunked=True))


BATCHES = (2, 33, 40, 140)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("batch", BATCHES)
def test_block_widths_and_waves(batch, dtype, rng):
    """Few items, a full card, and several waves; both widths of V are run."""
    if DEVICE == "cuda":
        from qla.kernels.launch import choose_block_v

        sms = torch.cuda.get_device_properties(0).multi_processor_count
        widths = {choose_block_v(4 * n, sms) for n in BATCHES}
        assert widths == {64, 128}, "the batches of this test no longer reach both block widths"
    x = make_inputs(rng, 100, (2, 4), batch=batch, dtype=dtype)
    assert_accurate(x, x.run())


def test_both_widths_give_the_same_bits(rng):
    """A head's result does not depend on how many other heads share the card."""
    x = make_inputs(rng, 130, (2, 4), batch=140)
    o, state = x.run()
    for n in (0, 77, 139):
        assert_same_bits(x.sequence(n).run(), (o[n : n + 1], state[n : n + 1]), f"batch row {n} alone")


def test_buffers_are_poisoned_and_overwritten(nan_filled_empty, rng):  # noqa: F811
    x = make_inputs(rng, 100)
    o, state = x.run()
    assert DEVICE == "cpu" or len(nan_filled_empty) >= 4, "expected g_cum, A, o and the final state to be allocated by qla"
    assert torch.isfinite(o).all() and torch.isfinite(state).all()


DIMS = [*NARROW, (96, 96), (96, 128), (128, 96), (80, 112), (32, 16), (60, 60), (100, 60), (60, 100)]


@pytest.mark.parametrize("dims", DIMS, ids=str)
def test_head_sizes(dims, rng):
    x = make_inputs(rng, [100, 64], dims=dims)
    assert DEVICE == "cpu" or qla.unsupported_reason(*x.tensors) is None
    assert_accurate(x, x.run())
    o, state = x.run(state_v_first=True, initial_state=x.h0.transpose(-1, -2))
    assert_same_bits((o, state.transpose(-1, -2)), x.run(), f"V-first state, head sizes {dims}")


@pytest.mark.parametrize("gates", GATES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("dims", NARROW, ids=str)
def test_narrow_heads(dims, dtype, gates, rng):
    """Ragged lengths, grouped heads; batches of which some fill the card, so that both widths of a block of 128 columns are run."""
    for heads in ((2, 8), (3, 3)):
        x = make_inputs(rng, [130, 0, 1, 64, 63, 300], heads, dims=dims, dtype=dtype, gates=gates)
        assert_accurate(x, x.run())
    for batch in BATCHES[:1] if DEVICE == "cpu" else BATCHES:
        x = make_inputs(rng, 100, (2, 4), batch=batch, dims=dims, dtype=dtype, gates=gates)
        assert_accurate(x, x.run())


@pytest.mark.parametrize("plan", [False, Plan(4, 2, 1, 2, 4)], ids=["whole", "cut"])
@pytest.mark.parametrize("dims", [*NARROW, (60, 60)], ids=str)
def test_narrow_heads_give_the_bits_of_padded_ones(dims, plan, rng):
    """Zeros up to 128 add nothing: what is left out is all that a smaller kernel leaves out."""
    x = make_inputs(rng, [700, 0, 1, 64, 900], (2, 4), dims=dims, gates="mixed")
    key_dim, value_dim = dims

    def wide(t: torch.Tensor, *dims: int) -> torch.Tensor:
        return torch.nn.functional.pad(t, [n for size in reversed(dims) for n in (0, 128 - size)])

    padded = x.with_(q=wide(x.q, key_dim), k=wide(x.k, key_dim), v=wide(x.v, value_dim), h0=wide(x.h0, key_dim, value_dim))
    o, state = padded.run(auto_cp=plan, scale=key_dim**-0.5)
    assert bool((o[..., value_dim:] == 0).all()) and bool((state[:, :, key_dim:] == 0).all())
    assert_same_bits(x.run(auto_cp=plan), (o[..., :value_dim], state[:, :, :key_dim, :value_dim]), "padded by the caller")


def test_rows_without_owner_of_narrow_heads(rng):
    for dims in NARROW:
        x = make_inputs(rng, [70, 64], dims=dims)
        longer = with_garbage_rows(x, 70, torch.nan)
        o, state = longer.run()
        assert bool((o[:, 134:] == 0).all())
        assert_same_bits((o[:, :134], state), x.run(), f"garbage past the end, head sizes {dims}")


@pytest.mark.parametrize("tokens", [130, [64, 0, 77]], ids=str)
def test_state_layouts_are_transposes(tokens, rng):
    x = make_inputs(rng, tokens)
    o, state = x.run()
    o_t, state_t = x.run(state_v_first=True, initial_state=x.h0.transpose(-1, -2).contiguous())
    assert_same_bits((o_t, state_t.transpose(-1, -2)), (o, state), "V-first")
    without = x.with_(h0=None)
    o, state = without.run()
    o_t, state_t = without.run(state_v_first=True)
    assert_same_bits((o_t, state_t.transpose(-1, -2)), (o, state), "V-first, no initial state")


@pytest.mark.parametrize("tokens", [100, [64, 100]], ids=str)
def test_output_does_not_depend_on_the_final_state(tokens, rng):
    x = make_inputs(rng, tokens)
    o, state = x.run()
    assert state is not None
    o_alone, none = x.run(output_final_state=False)
    assert none is None
    assert_same_bits((o_alone, None), (o, None), "without final state")
    zero = x.with_(h0=torch.zeros_like(x.h0))
    assert_same_bits(x.with_(h0=None).run(), zero.run(), "no initial state and a zero one")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_final_state_of_every_tail_length(dtype, rng):
    """64 n + r tokens for every r: the last gate is the last valid token's, and a tail is as accurate as whole chunks."""
    lengths = [64 * (r % 3) + r for r in range(1, 64)]
    x = make_inputs(rng, lengths, (1, 2), dtype=dtype)
    got = x.run()
    expected = x.exact()
    assert_accurate(x, got, expected=expected)
    bad = {}
    for n, (begin, end) in enumerate(x.bounds):
        errors = relative(got[0][:, begin:end], expected[0][:, begin:end]), worst_state(got[1][n : n + 1], expected[1][n : n + 1])
        if max(errors) > 2 * FLOOR[dtype]:
            bad[lengths[n]] = errors
    assert not bad, f"tokens: (error of o, of the state) {bad}"


@pytest.mark.parametrize("tokens", [1, 2, 63, 64, 65, 127, 128, 129, 191])
def test_equal_lengths_with_tails(tokens, rng):
    x = make_inputs(rng, tokens, (1, 4), batch=3)
    assert_accurate(x, x.run())


def split_run(x: Inputs, lengths: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
    """The same tokens in pieces, the state carried from one to the next."""
    begin, state, outputs = 0, x.h0, []
    for length in lengths:
        o, state = x.rows(begin, begin + length).with_(h0=state).run()
        outputs.append(o)
        begin += length
    return torch.cat(outputs, 1), state


@pytest.mark.parametrize("gates", GATES)
@pytest.mark.parametrize("lengths", [[128, 128], [100, 156], [64, 1], [1] * 70, [1, 255], [63, 2, 191]], ids=lambda x: str(x)[:20])
def test_carried_state(lengths, gates, rng):
    x = make_inputs(rng, sum(lengths), gates=gates)
    whole = x.run()
    pieces = split_run(x, lengths)
    assert_accurate(x, pieces)
    if all(length % 64 == 0 for length in lengths[:-1]):
        assert_same_bits(pieces, whole, "cut between chunks: the state is carried in fp32")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("heads", [(2, 8), (2, 2), (1, 3)], ids=str)
def test_low_level_entry(heads, dtype, rng):
    """g_cum and A against float64, and zero wherever a chunk or a sequence ends."""
    x = make_inputs(rng, [100, 0, 64, 3, 129], heads, dtype=dtype)
    g_cum, A, o, state = qla.chunk_gated_delta_rule_fwd(*x.tensors, None, x.h0, True, x.cu)
    assert_same_bits((o, state), x.run(), "low-level and public entry")
    exact_g, exact_A = chunk_gate_sum_and_inverse(x.k.double(), x.g.double(), x.beta.double(), x.cu)
    assert g_cum.dtype == torch.float32 and A.dtype == dtype
    assert relative(g_cum, exact_g) < 1e-6
    rounding = relative(exact_A.to(dtype), exact_A)
    assert relative(A, exact_A) <= rounding + 1e-3
    assert bool((A[exact_A == 0] == 0).all()), "above the diagonal and past a sequence's end A is 0"


def test_low_level_entry_with_unowned_rows(rng):
    x = make_inputs(rng, 200, (2, 4), state=False).with_(cu=cu_of([100]))
    garbage = [torch.where((torch.arange(200, device=t.device) < 100).view(1, -1, *[1] * (t.dim() - 2)), t, torch.nan) for t in x.tensors]
    g_cum, A, o, _ = qla.chunk_gated_delta_rule_fwd(*garbage, None, None, False, x.cu)
    for name, t in (("g_cum", g_cum), ("A", A), ("o", o)):
        assert bool((t[:, 100:] == 0).all()), f"{name} of rows that no sequence owns"
        assert bool(torch.isfinite(t).all()), name
