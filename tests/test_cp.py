"""Sequences cut into segments: every way to find a segment's start, both passes, against the uncut call and float64; items; graphs.

A cut call may not be less accurate than the uncut one: 1.1 times its error at most, as a whole, for o, the final state and each gradient.
"""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch
from gradients import (
    FLOORS,
    Losses,
    assert_gradients_accurate,
    assert_same_gradients,
    exact_gradients,
    gradients_of,
    make_losses,
    without_noise,
)
from problems import (
    DEVICE,
    NAN_FILLED,
    NARROW,
    Inputs,
    assert_accurate,
    assert_same_bits,
    gpu_marks,
    make_inputs,
    nan_filled_empty,  # noqa: F401
    relative,
    sync_is_an_error,  # noqa: F401
)

import qla
from qla.autocp import WHOLE, Plan
from qla.costs import packed_segment_base, segments

pytestmark = gpu_marks(NAN_FILLED)

ALLOWED = 1.1
ANY = 10**6  # pairs: whoever is slow takes the transition
PLANS = {
    "warm-up": Plan(4, 1, 16, 16, 0),
    "split": Plan(4, 2, 16, 16, 0),
    "prepared warm-up": Plan(4, 1, 0, 16, 0),
    "transition": Plan(4, 1, 1, 2, ANY),
    "split transition": Plan(3, 2, 0, 1, ANY),
    "serial": Plan(4, 1, 1, 2, 0),
    "all three": Plan(4, 2, 1, 2, 4),
    "way back": Plan(4, 1, 8, 8, 0, max_serial_heads=0),
    "way back from many": Plan(3, 1, 1, 2, 2, max_serial_heads=4, whole_split=2),
}
GATES = {
    "none": lambda g: g * 0,
    "-1e-6": lambda g: g * 0 - 1e-6,
    "-1e-4": lambda g: g * 0 - 1e-4,
    "medium": lambda g: g * 0.03,
    "fast": lambda g: g,
    "mixed": lambda g: torch.where(torch.arange(g.shape[-1], device=g.device) % 4 == 0, 0.0, g),
}
LENGTHS = ([1600], [700, 0, 64, 1, 77, 900])


def gated(rng, gates, lengths, heads=(2, 4), **options) -> Inputs:
    x = make_inputs(rng, lengths[0] if len(lengths) == 1 else lengths, heads, **options)
    return x.with_(g=GATES[gates](x.g))


def assert_as_accurate(got, whole, exact, names):
    """No result is further from float64 than 1.1 times what the uncut call gives."""
    failures = []
    for name, a, w, e in zip(names, got, whole, exact, strict=True):
        error, limit = relative(a, e), ALLOWED * relative(w, e)
        if not error <= limit + 1e-7:
            failures.append(f"{name}: error {error:.3e} > {limit:.3e}")
    assert not failures, "; ".join(failures)


@pytest.mark.parametrize("plan", PLANS.values(), ids=PLANS)
@pytest.mark.parametrize("gates", GATES)
@pytest.mark.parametrize("lengths", LENGTHS, ids=["one", "packed"])
def test_forward_is_as_accurate_as_uncut(lengths, gates, plan, rng):
    x = gated(rng, gates, lengths)
    got, whole = x.run(auto_cp=plan), x.run(auto_cp=False)
    exact = x.exact(chunked=True)
    assert_as_accurate(got, whole, exact, ("o", "state"))
    assert_accurate(x, got, expected=exact)


@pytest.mark.parametrize("plan", PLANS.values(), ids=PLANS)
@pytest.mark.parametrize("gates", GATES)
def test_gradients_are_as_accurate_as_uncut(gates, plan, rng):
    x = gated(rng, gates, LENGTHS[1])
    losses = make_losses(rng, x)
    assert_gradients_as_accurate(x, losses, plan)


def assert_gradients_as_accurate(x: Inputs, losses: Losses, plan: Plan) -> None:
    got, whole = (gradients_of(x, losses, lambda y, p=p: y.run(auto_cp=p)) for p in (plan, False))
    exact = exact_gradients(x, losses)
    names = [name for name in exact if name != "g"]  # see test_gate_gradients_are_as_accurate_as_uncut
    assert_as_accurate(*([d[name] for name in names] for d in (got, whole, exact)), [f"d{name}" for name in names])
    assert_gradients_accurate(x, losses, got, expected=exact, floors=FLOORS[x.q.dtype] | {"g": 0.1})


@pytest.mark.parametrize("plan", ["transition", "split transition", "all three"])
def test_gate_gradients_are_as_accurate_as_uncut(plan, rng):
    """A gate of a head that never decays has the products of all later tokens in its gradient: its error is nearly one number a head, and
    the ratio of two runs' errors a matter of luck. So it is the geometric mean over many inputs that may not pass the limit."""
    logs = []
    for gates in ("-1e-4", "mixed", "none"):
        for _ in range(12):
            x = gated(rng, gates, [1600])
            losses = make_losses(rng, x)
            exact = exact_gradients(x, losses)
            got, whole = (gradients_of(x, losses, lambda y, p=p: y.run(auto_cp=p))["g"] for p in (PLANS[plan], False))
            errors = [relative(without_noise("g", d, exact), exact["g"]) for d in (got, whole)]
            logs.append(math.log(errors[0] / errors[1]))
    assert math.exp(sum(logs) / len(logs)) <= ALLOWED


@pytest.mark.parametrize("plan", PLANS.values(), ids=PLANS)
@pytest.mark.parametrize("gates", ["none", "medium", "fast", "mixed"])
@pytest.mark.parametrize("dims", NARROW, ids=str)
def test_narrow_heads(dims, gates, plan, rng):
    """A transition is K x K: with K and V of two sizes its blocks, and the merge's, are not those of a state."""
    x = gated(rng, gates, LENGTHS[1], dims=dims)
    got, whole = x.run(auto_cp=plan), x.run(auto_cp=False)
    exact = x.exact(chunked=True)
    assert_as_accurate(got, whole, exact, ("o", "state"))
    assert_accurate(x, got, expected=exact)
    assert_gradients_as_accurate(x, make_losses(rng, x), plan)


@pytest.mark.parametrize("dims", [(60, 100), (100, 60)], ids=str)
def test_padded_heads(dims, rng):
    x = gated(rng, "mixed", LENGTHS[1], dims=dims)
    plan = PLANS["all three"]
    assert_as_accurate(x.run(auto_cp=plan), x.run(auto_cp=False), x.exact(chunked=True), ("o", "state"))
    assert_gradients_as_accurate(x, make_losses(rng, x), plan)


@pytest.mark.parametrize("heads", [(4, 4), (1, 8), (2, 6)], ids=str)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_head_ratios_and_dtypes(dtype, heads, rng):
    x = gated(rng, "mixed", LENGTHS[1], heads, dtype=dtype)
    losses = make_losses(rng, x)
    plan = PLANS["all three"]
    assert_as_accurate(x.run(auto_cp=plan), x.run(auto_cp=False), x.exact(chunked=True), ("o", "state"))
    assert_gradients_as_accurate(x, losses, plan)


@pytest.mark.parametrize("size", [1e3, 1e-3])
@pytest.mark.parametrize("plan", ["prepared warm-up", "transition", "all three"])
def test_initial_states_of_any_size(plan, size, rng):
    x = gated(rng, "mixed", LENGTHS[0])
    x = x.with_(h0=x.h0 * size)
    assert_as_accurate(x.run(auto_cp=PLANS[plan]), x.run(auto_cp=False), x.exact(chunked=True), ("o", "state"))


@pytest.mark.parametrize("norm", [0.5, 1.2, 1.5])
@pytest.mark.parametrize("gates", ["fast", "medium", "none"])
@pytest.mark.parametrize("plan", ["prepared warm-up", "transition", "all three"])
def test_keys_of_other_norms(plan, gates, norm, rng):
    """From norm 1.42 on (beta near 1) a token may make the state grow: the bound counts it, and such heads do not take the transition."""
    x = gated(rng, gates, LENGTHS[0])
    x = x.with_(k=(x.k.float() * norm).to(x.k.dtype))
    whole, exact = x.run(auto_cp=False), x.exact(chunked=True)
    assert_as_accurate(x.run(auto_cp=PLANS[plan]), whole, exact, ("o", "state"))


@pytest.mark.parametrize("batch, tokens", [(1, 64), (3, 65), (2, 1000), (5, 1)])
def test_batches_and_short_sequences(batch, tokens, rng):
    x = make_inputs(rng, tokens, batch=batch, gates="mixed")
    losses = make_losses(rng, x)
    for name in ("warm-up", "all three"):
        assert_as_accurate(x.run(auto_cp=PLANS[name]), x.run(auto_cp=False), x.exact(chunked=True), ("o", "state"))
        assert_gradients_as_accurate(x, losses, PLANS[name])


@pytest.mark.parametrize("dims", [(128, 128), *NARROW], ids=str)
def test_states_in_either_layout(dims, rng):
    x = gated(rng, "mixed", LENGTHS[1], dims=dims)
    turned = x.with_(h0=x.h0.transpose(2, 3).contiguous())
    for plan in PLANS.values():
        o, state = x.run(auto_cp=plan)
        o_v, state_v = turned.run(auto_cp=plan, state_v_first=True)
        assert_same_bits((o_v, state_v.transpose(2, 3)), (o, state), "state_v_first")


def test_rows_past_the_end_stay_zero(rng):
    x = gated(rng, "mixed", LENGTHS[1])
    extra = Inputs(*(torch.cat([t, torch.full_like(t[:, :70], math.nan)], 1) for t in x.tensors), x.h0, x.cu)
    for plan in PLANS.values():
        o, state = extra.run(auto_cp=plan)
        assert (o[:, -70:] == 0).all()
        assert_same_bits((o[:, :-70], state), x.run(auto_cp=plan), "garbage past the end")


@pytest.mark.parametrize("plan", ["warm-up", "all three", "transition"])
def test_repeats(plan, rng):
    x = gated(rng, "mixed", LENGTHS[1])
    losses = make_losses(rng, x)
    expected = x.run(auto_cp=PLANS[plan])
    gradients = gradients_of(x, losses, lambda y: y.run(auto_cp=PLANS[plan]))
    for _ in range(200 if DEVICE != "cpu" else 2):
        assert_same_bits(x.run(auto_cp=PLANS[plan]), expected, "forward")
    for _ in range(50 if DEVICE != "cpu" else 1):
        assert_same_gradients(gradients_of(x, losses, lambda y: y.run(auto_cp=PLANS[plan])), gradients, "backward")


def test_uncut_is_uncut(rng):
    x = gated(rng, "fast", LENGTHS[1])
    assert_same_bits(x.run(auto_cp=WHOLE), x.run(auto_cp=False), "WHOLE")
    for split in (1, 2):
        assert_accurate(x, x.run(auto_cp=Plan(0, split, 0, 0, 0)))


@pytest.mark.parametrize("plan", ["prepared warm-up", "transition", "all three"])
def test_kept_states_are_those_made_again(plan, rng, monkeypatch):
    """The backward pass goes by the forward pass's segment states, or makes the same ones."""
    x = gated(rng, "mixed", LENGTHS[1])
    losses = make_losses(rng, x)
    found = []
    for share in (0.0, 1e6):
        monkeypatch.setattr("qla.costs.KEPT_SHARE", share)
        found.append(gradients_of(x, losses, lambda y: y.run(auto_cp=PLANS[plan])))
    assert_same_gradients(*found, "kept")


@pytest.mark.parametrize("plan", ["split", "all three"])
def test_whole_backward_of_a_cut_forward(plan, rng):
    """The results are those of the cut, the gradients the bits of an uncut call."""
    x = gated(rng, "mixed", LENGTHS[1])
    losses = make_losses(rng, x)
    mixed = dataclasses.replace(PLANS[plan], whole_backward=True)
    assert_same_bits(x.run(auto_cp=mixed), x.run(auto_cp=PLANS[plan]), "forward")
    whole = gradients_of(x, losses, lambda y: y.run(auto_cp=False))
    assert_same_gradients(gradients_of(x, losses, lambda y: y.run(auto_cp=mixed)), whole, "backward")


@pytest.mark.parametrize("gates", ["none", "mixed", "fast"])
def test_default_on_a_long_sequence(gates, rng):
    x = gated(rng, gates, [32768 if DEVICE != "cpu" else 500], (2, 8))
    got, whole = x.run(), x.run(auto_cp=False)
    assert_as_accurate(got, whole, x.exact(chunked=True), ("o", "state"))


def test_nothing_waits_for_the_gpu(rng, sync_is_an_error):  # noqa: F811
    x = gated(rng, "mixed", LENGTHS[1])
    losses = make_losses(rng, x)
    for plan in (True, PLANS["all three"]):
        gradients_of(x, losses, lambda y, p=plan: y.run(auto_cp=p))
        with sync_is_an_error():
            gradients_of(x, losses, lambda y, p=plan: y.run(auto_cp=p))


@pytest.mark.skipif(DEVICE == "cpu", reason="needs a CUDA device")
@pytest.mark.parametrize("plan", ["warm-up", "all three", "transition"])
def test_graphs_replay_with_other_lengths_and_gates(plan, rng):
    """The same graph, other lengths and gates in the same buffers: other segments, other ways."""
    x = gated(rng, "fast", LENGTHS[1])
    buffers = dataclasses.replace(x, g=x.g.clone(), cu=x.cu.clone())
    buffers.run(auto_cp=PLANS[plan])
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        o, state = buffers.run(auto_cp=PLANS[plan])
    total = sum(LENGTHS[1])
    for lengths in (LENGTHS[1], [1, 0, total - 1, 0, 0, 0], [300, 300, 300, 300, 300, total - 1500]):
        for gates in ("none", "mixed", "medium", "fast"):
            cu = torch.tensor([0, *lengths], device=DEVICE).cumsum(0).int()
            buffers.g.copy_(GATES[gates](x.g))
            buffers.cu.copy_(cu)
            graph.replay()
            expected = x.with_(g=GATES[gates](x.g), cu=cu).run(auto_cp=PLANS[plan])
            assert_same_bits((o, state), expected, f"{lengths}, {gates}")


# ---------------------------------------------------------------------------------------------------------------- items

NOTHING = (0, 0, -1, 0)


def expected_items(bound, lengths, plan: Plan, serial_split_up_to: int):
    """What cp_plan's head says, in Python: {(sequence, segment, head): (forward, reverse)} and the ways. bound: [sequence][chunk][head]."""
    from qla.kernels.ws import FROM_SEGMENT, FROM_STATE, PREP_FROM_STATE, SPLIT, WITH_TRANSITION

    threshold = plan.threshold / math.log(2)

    def reach(sums):
        total = 0.0
        for w, x in enumerate(sums[: plan.max_warmup], 1):
            total += x
            if total <= -threshold:
                return w
        return len(sums) if len(sums) <= plan.max_warmup else -1

    def grows(sums):
        pieces = [sums[piece * len(sums) // 8 : (piece + 1) * len(sums) // 8] for piece in range(8)]
        return any(sum(max(x, 0.0) for x in piece) > 1 for piece in pieces)

    cuts = {n: segments(len(b), plan.chunks_per_segment) if b else [(0, 0)] for n, b in enumerate(bound)}
    heads = next(len(b[0]) for b in bound if b)
    reaches, ways = {}, {}
    for n, b in enumerate(bound):
        for h in range(heads):
            sums, marks = [row[h] for row in b], set()
            for j, (first, end) in enumerate(cuts[n]):
                before = reach(sums[:first][::-1]) if j else 0
                after = reach(sums[end:]) if j + 1 < len(cuts[n]) else 0
                reaches[n, j, h] = before, after
                if min(before, after) < 0:
                    marks.add("slow")
            inner = cuts[n][1:-1] if plan.max_transition_heads else []
            if marks and any(grows(sums[first:end]) for first, end in inner):
                marks.add("growing")
            ways[n, h] = "serial" if "growing" in marks else "slow" if marks else "warm-up"
    slow = sum(way == "slow" for way in ways.values())
    transitions = slow <= plan.max_transition_heads
    ways = {key: ("transition" if transitions else "serial") if way == "slow" else way for key, way in ways.items()}
    serial = sum(way == "serial" for way in ways.values())
    serial_flag = SPLIT if serial <= serial_split_up_to else 0
    if serial > plan.max_serial_heads:
        ways = dict.fromkeys(ways, "serial")
    items = {}
    for (n, j, h), (before, after) in reaches.items():
        cut, way, whole, chunks = cuts[n], ways[n, h], SPLIT if plan.split == 2 else 0, len(bound[n])
        first, end = cut[j]
        last = len(cut) - 1
        if way == "serial" or not chunks:
            flags = FROM_STATE | serial_flag
            items[n, j, h] = (NOTHING, NOTHING) if j else ((0, 0, chunks, flags), (chunks, 0, chunks, flags))
            continue
        start, flags = first - before, whole
        if j == 0:
            start, flags = 0, whole | FROM_STATE
        elif way == "transition":
            start, flags = cut[j - 1][0], whole | FROM_SEGMENT | (PREP_FROM_STATE if j == 1 else WITH_TRANSITION)
        elif before > plan.inline_warmup:
            flags |= FROM_SEGMENT | (PREP_FROM_STATE if start == 0 else 0)
        elif start == 0:
            flags |= FROM_STATE
        forward = (start, first, end, flags)
        start, flags = end + after, whole
        if j == last:
            start, flags = end, whole | FROM_STATE
        elif way == "transition":
            start, flags = cut[j + 1][1], whole | FROM_SEGMENT | (PREP_FROM_STATE if j == last - 1 else WITH_TRANSITION)
        elif start == chunks:
            flags |= FROM_STATE
        items[n, j, h] = (forward, (start, first, end, flags))
    return items, ways, serial > plan.max_serial_heads


@pytest.mark.skipif(DEVICE == "cpu", reason="needs a CUDA device")
@pytest.mark.parametrize("packed", [True, False], ids=["packed", "equal"])
@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("value_dim", [128, 64])
@pytest.mark.parametrize("plan", PLANS.values(), ids=PLANS)
def test_items(plan, value_dim, seed, packed):
    """cp_plan against its description: random lengths, random bounds of which some grow, gaps of the numbering without work."""
    from qla.kernels.launch import cp_plan, num_slots
    from qla.kernels.ws import SEQ_SHIFT, SPLIT

    rng = torch.Generator().manual_seed(seed)
    heads = 5
    lengths = torch.randint(0, 1500, (6,), generator=rng).tolist() if packed else [1 + 400 * seed] * 3
    lengths[0] *= 1 if packed and seed else 0 if packed else 1
    chunks = [-(-length // 64) for length in lengths]
    kind = torch.tensor([0.0, -30.0, -6.0, -2.0, 1.0])[torch.randint(0, 5, (len(lengths), heads), generator=rng)]
    bound = [kind[n] + 0.5 * torch.randn(count, heads, generator=rng) for n, count in enumerate(chunks)]
    tokens, cu = sum(lengths) + (33 if packed else 0), torch.tensor([0, *lengths]).cumsum(0).int()
    seq_len = 0 if packed else lengths[0]
    slots = torch.full((num_slots(tokens, len(lengths), seq_len), heads), math.nan)
    for n, count in enumerate(chunks):
        first = int(cu[n]) // 64 + n if packed else n * count
        slots[first : first + count] = bound[n]
    num_segments = plan.num_segments(len(lengths), tokens, seq_len)
    threshold = plan.threshold / math.log(2)
    *got, order = cp_plan(
        slots.to(DEVICE), cu.to(DEVICE) if packed else None, tokens, len(lengths), seq_len, num_segments, plan.chunks_per_segment,
        plan.split == 2, plan.inline_warmup, plan.max_warmup, plan.max_transition_heads, plan.max_serial_heads, threshold, 24,
        value_dim,
    )  # fmt: skip
    rule = (plan, 12) if value_dim == 128 else (dataclasses.replace(plan, split=1), -1)
    expected, ways, whole = expected_items([b.tolist() for b in bound], lengths, *rule)
    used, serial = set(), set()
    for (n, j, h), pair in expected.items():
        base = packed_segment_base(int(cu[n]), n, plan.chunks_per_segment) if packed else n * -(-chunks[n] // plan.chunks_per_segment)
        number = base + j
        used.add((number, h))
        if ways[n, h] == "serial":
            serial.add(number * heads + h)
        for direction, item in zip(("forward", "reverse"), pair, strict=True):
            found = got[direction == "reverse"][number, h].tolist()
            flags = (1 << SEQ_SHIFT) - 1
            assert found[3] >> SEQ_SHIFT == n and (*found[:3], found[3] & flags) == item, f"{direction} {n, j, h}: {found} is not {item}"
    for number in range(num_segments):
        for h in range(heads):
            assert (number, h) in used or all(table[number, h, 2] == -1 for table in got), (number, h)
    *order, stays_whole = order.tolist()
    assert len(order) == 2 * num_segments * heads and stays_whole == whole
    if whole:
        assert set(order) == {-1}
        return
    blocks = [entry for entry in order if entry >= 0]
    rows = got[0].flatten(0, 1)
    expected_blocks = [2 * i + part for i, row in enumerate(rows.tolist()) if row[2] >= 0 for part in range(2 if row[3] & SPLIT else 1)]
    assert sorted(blocks) == expected_blocks and order[: len(blocks)] == blocks
    later = [entry // 2 not in serial for entry in blocks]
    assert later == sorted(later), "serial heads come first"


def test_plans_are_checked(rng):
    x = make_inputs(rng, 64)
    with pytest.raises(TypeError, match="auto_cp"):
        qla.chunk_gated_delta_rule(*x.tensors, auto_cp="yes")
