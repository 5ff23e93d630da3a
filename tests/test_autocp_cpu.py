"""AutoCP without a GPU: the cuts, the numbering of segments, the cost model, the choice of a plan, the fit of the coefficients."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import fields, replace
from pathlib import Path

import pytest

from bench import fit_autocp, timing
from bench.kernels import ASSUMED
from bench.kernels import problem_of as problem_of_shape
from bench.shapes import Shape
from qla import autocp, costs
from qla.autocp import FAST, WHOLE, Coefficients, Gates, Plan, Problem, explain_plan, plan
from qla.costs import CHUNK, packed_segment_base, predict, segments
from qla.device import DeviceSpec

hypothesis = pytest.importorskip("hypothesis")
st = pytest.importorskip("hypothesis.strategies")

SETTINGS = hypothesis.settings(max_examples=60, deadline=None, derandomize=True, database=None)
H200 = DeviceSpec(index=0, capability=(9, 0), sm_count=132)
LENGTHS = st.lists(st.one_of(st.just(0), st.integers(1, 300), st.sampled_from([64, 2048, 24576])), min_size=1, max_size=12)
HEADS = st.sampled_from([(1, 1), (2, 8), (16, 48), (16, 64), (128, 128)])
PLANS = st.builds(
    lambda length, split, inline, longer, pairs: Plan(length, split, inline, inline + longer, pairs),
    st.integers(1, 40),
    st.sampled_from([1, 2]),
    st.integers(0, 8),
    st.integers(0, 20),
    st.sampled_from([0, 10**6]),  # never or always: another way for the slow pairs may be cheaper
)
GATES = st.sampled_from([FAST, Gates(0), Gates(5), Gates(30), Gates(slow=0.25), Gates(3, 1.0)])


def problem_of(key_heads: int, value_heads: int, lengths: list[int] | tuple[int, ...], padding: int = 0) -> Problem:
    return Problem(key_heads, value_heads, len(lengths), sum(lengths) + padding, 0, tuple(lengths))


def batch_of(key_heads: int, value_heads: int, num_seqs: int, seq_len: int) -> Problem:
    return Problem(key_heads, value_heads, num_seqs, num_seqs * seq_len, seq_len)


def us(problem: Problem, plan: Plan, gates: Gates = FAST, backward: bool = False) -> float:
    return predict(problem, H200.sm_count, plan, gates, backward).total


# Cuts and numbers


@hypothesis.given(chunks=st.integers(0, 5000), limit=st.integers(0, 600))
@SETTINGS
def test_segments_cover_a_sequence_once(chunks, limit):
    cuts = segments(chunks, limit)
    assert [chunk for first, end in cuts for chunk in range(first, end)] == list(range(chunks))
    lengths = [end - first for first, end in cuts]
    assert max(lengths) - min(lengths) <= 1
    assert len(cuts) == (max(1, -(-chunks // limit)) if limit else 1)
    if chunks:
        assert min(lengths) > 0 and (not limit or max(lengths) <= limit)


@hypothesis.given(lengths=LENGTHS, padding=st.integers(0, 500), limit=st.integers(1, 50))
@SETTINGS
def test_packed_numbers_never_overlap(lengths, padding, limit):
    cut = Plan(limit, 1, 0, 0, 0)
    free, first_token = 0, 0
    for seq, length in enumerate(lengths):
        base = packed_segment_base(first_token, seq, limit)
        assert base >= free
        free, first_token = base + len(segments(-(-length // CHUNK), limit)), first_token + length
    assert free <= cut.num_segments(len(lengths), sum(lengths) + padding, 0)


@hypothesis.given(num_seqs=st.integers(1, 50), seq_len=st.integers(1, 20000), limit=st.integers(1, 400))
@SETTINGS
def test_equal_lengths_leave_no_number_out(num_seqs, seq_len, limit):
    count = len(segments(-(-seq_len // CHUNK), limit))
    assert Plan(limit, 1, 0, 0, 0).num_segments(num_seqs, num_seqs * seq_len, seq_len) == num_seqs * count
    assert WHOLE.num_segments(num_seqs, num_seqs * seq_len, seq_len) == num_seqs


# The cost model


def list_scheduling(chunks: list[int], num_sms: int) -> int:
    free = [0] * num_sms
    for item in chunks:
        free[free.index(min(free))] += item + 1
    return max(free)


@hypothesis.given(runs=st.lists(st.tuples(st.integers(0, 30), st.integers(1, 40)), max_size=12), num_sms=st.integers(1, 20))
@SETTINGS
def test_schedule_is_list_scheduling(runs, num_sms):
    # In units in which a block costs as much as a chunk.
    weights = {1: costs.BLOCK_WEIGHT}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(costs, "CHUNK_WEIGHT", weights)
        busy = costs._schedule([(chunks, 1, number) for chunks, number in runs], num_sms)
    blocks = [chunks for chunks, number in runs for _ in range(number)]
    assert busy.serial[1] + busy.blocks == list_scheduling(blocks, num_sms)
    assert busy.load[1] == pytest.approx(sum(blocks) / num_sms)


@hypothesis.given(lengths=LENGTHS, limit=st.integers(4, 40), split=st.sampled_from([1, 2]), warmup=st.integers(0, 3))
@SETTINGS
def test_a_cut_walks_every_chunk_and_its_warmups(lengths, limit, split, warmup):
    problem = problem_of(1, 3, lengths)
    counted = costs.features("fwd_fused", problem, 1, Plan(limit, split, 3, 3, 0), Gates(warmup))
    cuts = [cut for length in lengths for cut in segments(-(-length // CHUNK), limit)]
    chunks = sum(end - first + min(first, warmup) for first, end in cuts)
    of_split = {1: "chunk_1", 2: "chunk_2"}[split]  # blocks that find their halves themselves are those of whole sequences
    assert counted[of_split] == counted[f"crowding_{split}"] == chunks * 3 * split
    assert counted["chunk_half"] == 0
    assert counted["block"] == len(cuts) * 3 * split
    assert counted["leave"] == 2 * 3 * Plan(limit, 1, 0, 0, 0).num_segments(len(lengths), sum(lengths), 0) - counted["block"]


def test_slow_heads_are_served_as_the_plan_says():
    problem, slow = batch_of(1, 4, 1, 64 * 64), Gates(slow=1.0)
    serial = Plan(16, 1, 2, 4, 0)
    assert costs.features("fwd_fused", problem, 132, serial, slow)["chunk_half"] == 64
    assert costs.features("cp_prep", problem, 132, serial, slow)["chunk_2"] == 0
    assert costs.features("fwd_fused", problem, 4, serial, slow)["chunk_1"] == 64, "no two blocks a head on four SMs"
    transition = replace(serial, max_transition_heads=4)
    assert costs.features("fwd_fused", problem, 132, transition, slow)["chunk_1"] == 16
    assert costs.features("cp_prep", problem, 132, transition, slow)["crowding"] * 132 == pytest.approx(4 * (1 + 2 + 2) * 16)
    assert costs.features("cp_prep_gradients", problem, 132, transition, slow)["crowding"] * 132 == pytest.approx(4 * 3 * 16)
    # The second segment's state is exact, so that the chain has two steps; a head has a block for each half of V.
    assert costs.features("cp_merge", problem, 132, transition, slow) == {"base": 1, "block": 1, "step": 2}
    assert costs.features("cp_merge_gradients", problem, 4, transition, slow) == {"base": 1, "block": 2, "step": 4}
    assert costs.features("cp_merge", problem, 132, replace(transition, max_transition_heads=3), slow)["block"] == 0
    # Warm-up that reaches the start of the sequence serves any gates.
    assert costs.features("cp_prep", problem, 132, Plan(32, 1, 2, 32, 0), slow)["chunk_2"] == 32
    prepared = costs.features("cp_prep", problem, 132, serial, Gates(3))
    assert prepared["crowding"] * 132 == pytest.approx(4 * 3 * 3)


def test_blocks_that_find_their_segments_are_those_of_whole_sequences():
    """Slow heads of theirs are walked as in an uncut call, by two blocks each however many they are."""
    problem, slow = batch_of(1, 4, 1, 64 * 64), Gates(slow=1.0)
    own, listed = Plan(16, 2, 4, 4, 0), Plan(16, 2, 2, 4, 0)
    assert not own.needs_tables and listed.needs_tables
    assert costs.features("fwd_fused", problem, 132, own)["chunk_2"] == 17
    assert costs.features("fwd_fused", problem, 132, listed)["chunk_half"] == 17
    for num_sms in (132, 4):
        counted, whole = (costs.features("fwd_fused", problem, num_sms, plan, slow) for plan in (own, Plan(0, 2, 0, 0, 0)))
        assert counted | {"leave": 0.0} == whole


def test_a_cut_that_the_device_may_undo():
    problem = batch_of(2, 8, 1, 64 * 64)
    cut = Plan(16, 1, 4, 4, 0, max_serial_heads=3, whole_split=2)
    assert cut.may_stay_whole and cut.needs_tables and cut.blocks_an_item == 2
    some, many = Gates(slow=3 / 8), Gates(slow=0.5)
    assert costs.features("fwd_fused", problem, 132, cut, some)["chunk_half"] == 64
    assert costs.features("fwd_spare", problem, 132, cut, some) == {"base": 1, "leave": 16 / 132}, "the blocks of whole sequences"
    counted, whole = (costs.features("fwd_fused", problem, 132, plan, many) for plan in (cut, Plan(0, 2, 0, 0, 0)))
    assert counted == whole and counted["chunk_2"] == 64
    assert costs.features("fwd_spare", problem, 132, cut, many) == {"base": 1, "leave": 2 * 4 * 8 / 132}
    all_or_none = replace(cut, max_serial_heads=0)
    assert all_or_none.blocks_an_item == 1
    assert costs.features("fwd_spare", problem, 132, all_or_none, many)["leave"] == 4 * 8 / 132
    # The scans of the backward pass take all pairs as serial.
    scans = costs.features("scan_states", problem, 132, cut, many)
    assert scans["chunk_2"] == 64


@hypothesis.given(heads=HEADS, lengths=LENGTHS, plan=PLANS, gates=GATES, backward=st.booleans())
@SETTINGS
def test_more_work_is_never_predicted_cheaper(heads, lengths, plan, gates, backward):
    problem = problem_of(*heads, lengths)
    # Of twice the tokens the segments are no shorter; list scheduling may gain a little from a better order, and more with serial blocks.
    longer = problem_of(*heads, [2 * length for length in lengths])
    assert us(longer, WHOLE, gates, backward) >= us(problem, WHOLE, gates, backward)
    for share in (FAST, Gates(2)):
        roomy = replace(plan, inline_warmup=2, max_warmup=2)
        assert us(longer, roomy, share, backward) >= 0.97 * us(problem, roomy, share, backward)
        # With one more sequence or twice the heads, scans may have whole heads a block, which is less work than two halves.
        more = problem_of(*heads, [*lengths, 640])
        if not backward or same_split(more, problem):
            assert us(more, roomy, share, backward) >= 0.97 * us(problem, roomy, share, backward)
    more = problem_of(heads[0], 2 * heads[1], lengths)
    if not backward or same_split(more, problem):
        assert us(more, plan, gates, backward) >= 0.97 * us(problem, plan, gates, backward)


def same_split(a, b):
    return len({costs.whole_split(problem.num_seqs * problem.value_heads, 132) for problem in (a, b)}) == 1


def test_kernels_of_a_call():
    problem, cut = batch_of(2, 8, 1, 32768), Plan(32, 1, 1, 8, 8)
    lean, prepared = replace(cut, max_warmup=1, max_transition_heads=0), replace(cut, max_transition_heads=0)
    own = replace(lean, split=2)
    before, scans = ["cp_prep", "cp_merge", "cp_prep_gradients", "cp_merge_gradients"], ["scan_states", "scan_state_gradients", "bwd_fused"]
    for backward, kernels in (
        (False, {WHOLE: [], lean: ["cp_plan"], prepared: ["cp_plan", "cp_prep"], cut: ["cp_plan", "cp_prep", "cp_merge"], own: []}),
        # States and transitions of so few segments are kept, and tables, where the forward pass has any.
        (True, {WHOLE: [], lean: [], prepared: [], cut: before[2:], own: ["cp_plan"]}),
    ):
        for of_plan, added in kernels.items():
            expected = [*added, *scans] if backward else ["kkt_solve", *added, "fwd_fused"]
            more = ["beside", "launch"] if backward else ["launch"]
            assert list(predict(problem, 132, of_plan, backward=backward).us) == [*expected, *more]
            assert costs.features("launch", problem, 132, of_plan, FAST, backward) == {"call": 1, "kernel": len(expected)}
    assert costs.launches(cut, backward=True) == [*before, *scans]
    short = replace(cut, chunks_per_segment=2)
    assert list(predict(problem, 132, short, backward=True).us) == [*before, *scans, "beside", "launch"]
    assert costs.launches(replace(lean, max_serial_heads=0), backward=False) == ["kkt_solve", "cp_plan", "fwd_fused", "fwd_spare"]
    assert {*before, *scans, "kkt_solve", "cp_plan", "fwd_fused", "fwd_spare", "launch"} == set(costs.FEATURES)
    whole = predict(problem, 132, WHOLE)
    for kernel, time in whole.us.items():
        assert time == pytest.approx(Coefficients.load().time(kernel, costs.features(kernel, problem, 132, WHOLE)))
    assert whole.total == pytest.approx(sum(whole.us.values()))


def test_scans_share_items_as_their_launcher_does():
    """By the number of heads, whatever the plan: two blocks for each item where that does not add waves to an uncut call."""
    for value_heads, length, blocks in ((8, 32, 2), (8, 64, 2), (72, 64, 1)):
        for split in (1, 2):
            counted = costs.features("scan_states", batch_of(2, value_heads, 1, 32768), 132, Plan(length, split, 1, 1, 0))
            assert counted[f"chunk_{blocks}"] > length and counted[f"chunk_{3 - blocks}"] == 0


def test_what_the_small_kernels_count():
    problem, slow = batch_of(8, 32, 1, 32768), Gates(slow=1.0)
    cut = Plan(128, 1, 1, 48, 0)
    assert costs.features("cp_plan", problem, 132, cut)["look"] == 1, "both directions at once"
    assert costs.features("cp_plan", problem, 132, cut, slow)["look"] == 6
    assert costs.features("cp_plan", problem, 132, replace(cut, max_transition_heads=1), slow)["look"] == 6 + 2, "does it grow?"
    assert costs.features("kkt_solve", problem, 132, WHOLE)["bound"] == 0
    assert costs.features("kkt_solve", problem, 132, cut)["bound"] == 512 * 32
    # Blocks with nothing to do cost nothing while SMs are idle.
    assert costs.features("fwd_fused", problem, 132, cut, slow)["leave"] == pytest.approx((256 - 64) / 132 * 64 / 132)


@hypothesis.given(items=st.integers(1, 3000), num_sms=st.integers(1, 200))
@SETTINGS
def test_split_of_whole_sequences_is_the_launchers(items, num_sms):
    half, whole = -(-2 * items // num_sms) * 1.3, -(-items // num_sms) * 2.0
    if half != pytest.approx(whole):
        assert costs.whole_split(items, num_sms) == (2 if half < whole else 1)


# The choice


def check_plan(problem: Problem) -> Plan:
    """What holds for every plan made by the planner."""
    made = plan(problem, H200)
    assert made == autocp._plan.__wrapped__(problem, H200.sm_count, Coefficients.load())
    if not made.chunks_per_segment:
        assert us(problem, made) <= us(problem, WHOLE)
        return made
    assert made.chunks_per_segment >= autocp.MIN_SEGMENT and 1 <= made.max_warmup <= 2 * made.chunks_per_segment
    numbers = made.num_segments(problem.num_seqs, problem.tokens, problem.seq_len)
    assert numbers * problem.value_heads <= autocp.MAX_SEGMENT_HEADS and numbers * problem.value_heads * 2 < 2**31
    whole, known = us(problem, WHOLE), problem.lengths is not None or problem.seq_len > 0 or problem.num_seqs == 1
    if known:
        assert us(problem, made) <= 0.97 * whole
    backward = us(problem, WHOLE, FAST, True)
    if known:
        assert us(problem, made, FAST, True) <= (1 if made.whole_backward else 0.97) * backward + 1e-6
    gain = whole - us(problem, made)
    for share in autocp.SLOW_SHARES:
        allowed = 1.01 if known else 1.25
        assert us(problem, made, Gates(slow=share)) <= allowed * whole + 1.5 + 0.1 * max(gain, 0) + 1e-6
        assert us(problem, made, Gates(slow=share), True) <= allowed * backward + 1e-6
    return made


@hypothesis.given(heads=HEADS, lengths=LENGTHS, known=st.booleans())
@hypothesis.settings(SETTINGS, max_examples=30)
def test_plans_keep_the_rules(heads, lengths, known):
    problem = problem_of(*heads, lengths, padding=10)
    check_plan(problem if known else replace(problem, lengths=None))


@pytest.mark.parametrize("heads", [(1, 1), (2, 8), (128, 128)])
@pytest.mark.parametrize(
    "num_seqs, tokens, seq_len",
    [
        (0, 0, 0),
        (3, 0, 0),
        (1, 1, 1),
        (1, 1, 0),
        (1, 2**24, 2**24),
        (1000, 2**24, 0),
        (1000, 1000, 1),
        (2, 2**31 - 1, 0),
        (1, 2**31 - 1, 2**31 - 1),
    ],
)
def test_hostile_shapes(heads, num_seqs, tokens, seq_len):
    check_plan(Problem(*heads, num_seqs, tokens, seq_len))


def test_a_thousand_ragged_sequences():
    lengths = [37 * n % 4999 for n in range(1000)]
    check_plan(problem_of(1, 1, lengths))
    check_plan(problem_of(2, 8, [*[100] * 500, 65536, *[0] * 499]))


@pytest.mark.parametrize("num_sms", [1, 2, 78, 132])
def test_other_cards(num_sms):
    made = plan(batch_of(1, 1, 1, 65536), DeviceSpec(0, (9, 0), num_sms))
    assert (made == WHOLE) == (num_sms == 1)


@pytest.mark.parametrize("value_heads, seq_len", [(8, 32768), (8, 8192), (32, 32768), (1, 65536)])
def test_few_heads_are_cut(value_heads, seq_len):
    made = check_plan(batch_of(1, value_heads, 1, seq_len))
    assert made.chunks_per_segment > 0
    assert us(batch_of(1, value_heads, 1, seq_len), made) < 0.9 * us(batch_of(1, value_heads, 1, seq_len), WHOLE)


def test_what_slow_heads_would_lose_decides_on_transitions():
    """Two launches are nothing beside the serial walk of a long call; with many heads that walk fills the card, and is no loss."""
    long = plan(batch_of(2, 8, 1, 32768), H200)
    assert long.max_transition_heads == 8 and long.max_warmup > long.inline_warmup


def test_full_cards_stay_whole():
    for heads, num_seqs in ((64, 4), (32, 4), (48, 8), (66, 2)):
        assert plan(batch_of(1, heads, num_seqs, 8192), H200) == WHOLE


def test_one_long_sequence_among_many():
    known = check_plan(problem_of(2, 8, [24576, 8192]))
    unknown = plan(Problem(2, 8, 2, 32768), H200)
    assert known.chunks_per_segment > 0 and unknown.chunks_per_segment > 0
    # What the host does not know costs little where it can be foreseen.
    for lengths in ([16384, 16384], [32768, 0]):
        problem = problem_of(2, 8, lengths)
        assert us(problem, unknown) < 1.1 * us(problem, plan(problem, H200))


def test_start_value_follows_the_costs():
    """A dearer step of cp_merge makes longer segments."""
    problem, table = batch_of(2, 8, 1, 32768), {kernel: dict(row) for kernel, row in Coefficients.load().us.items()}
    factor, start = autocp.start_value(problem, 132, 1)
    assert start == pytest.approx(factor * 512**0.5)
    table["cp_merge"]["step"] += 5.0
    assert autocp.start_value(problem, 132, 1, Coefficients(table))[0] > factor


def test_explanation():
    text = explain_plan(2, 8, [32768])
    made = plan(problem_of(2, 8, [32768]), H200)
    assert "uncut" in text and "lambda * sqrt(N)" in text
    assert f"Chosen: segments of {made.chunks_per_segment}, split {made.split}" in text
    assert sum(line.startswith("* segments") for line in text.splitlines()) == 1
    for lengths in ([8192] * 4, [], [0, 0], [1]):
        text = explain_plan(16, 64, lengths)
        assert "Chosen: uncut" in text and "* uncut" in text
    assert "backward" in explain_plan(2, 8, [24576, 8192], backward=True)


def test_explanation_where_the_backward_stays_uncut():
    """Its row is marked in either table: the cut in that of the forward pass, uncut in that of the backward one."""
    made = plan(batch_of(8, 32, 1, 32768), H200)
    assert made.chunks_per_segment and made.whole_backward and made.of_backward == WHOLE
    for backward, name in ((False, f"segments of {made.chunks_per_segment}, split {made.split}"), (True, "uncut")):
        text = explain_plan(8, 32, [32768], backward=backward)
        (marked,) = (line for line in text.splitlines() if line.startswith("* "))
        assert marked.startswith(f"* {name} ") and "the backward pass, which gains less, stays uncut" in text


# Bad input


@pytest.mark.parametrize(
    "make, name",
    [
        (lambda: Plan(-1, 1, 0, 0, 0), "chunks_per_segment"),
        (lambda: Plan(2, 3, 0, 0, 0), "split"),
        (lambda: Plan(2, 0, 0, 0, 0), "split"),
        (lambda: Plan(2, 1, 2, 1, 0), "inline_warmup"),
        (lambda: Plan(2, 1, 0, -1, 0), "max_warmup"),
        (lambda: Plan(2, 1, 0, 1.5, 0), "max_warmup"),
        (lambda: Plan(2, 1, 0, 0, 2**31), "max_transition_heads"),
        (lambda: Problem(0, 8, 1, 64), "key_heads"),
        (lambda: Problem(3, 8, 1, 64), "value_heads"),
        (lambda: Problem(1, 8, -1, 64), "num_seqs"),
        (lambda: Problem(1, 8, 1, 2**31), "tokens"),
        (lambda: Problem(1, 8, 2, 64, 64), "seq_len"),
        (lambda: Problem(1, 8, 2, 64, 0, (64,)), "lengths"),
        (lambda: Problem(1, 8, 2, 64, 0, (64, 1)), "lengths"),
        (lambda: Problem(1, 8, 2, 64, 0, (64, -1)), "lengths"),
        (lambda: Problem(1, 8, 2, 64, 0, [32, 32]), "lengths"),
        (lambda: Problem(1, 8, 2, 64, 32, (33, 31)), "lengths"),
        (lambda: Gates(-1), "warmup"),
        (lambda: Gates(slow=1.1), "slow"),
        (lambda: predict(Problem(1, 1, 1, 64), 0, WHOLE), "num_sms"),
        (lambda: costs.features("other", Problem(1, 1, 1, 64), 132, WHOLE), "kernel"),
        (lambda: explain_plan(1, 1, [64], num_sms=0), "num_sms"),
        (lambda: explain_plan(1, 1, ["64"]), "lengths"),
        (lambda: Coefficients({}), "coefficients"),
        (lambda: Coefficients({**Coefficients.load().us, "cp_plan": {"base": 1.0, "segment_head": 0.0, "look": -1.0}}), "look of cp_plan"),
    ],
)
def test_bad_input(make, name):
    with pytest.raises(ValueError, match=name):
        make()


def test_imports_neither_torch_nor_tilelang():
    code = (
        "import sys, types\n"
        "package = sys.modules['qla'] = types.ModuleType('qla')\n"  # without what qla/__init__.py imports
        f"package.__path__ = [{str(Path(autocp.__file__).parent)!r}]\n"
        "from qla import autocp, costs\n"
        "assert costs.segments(5, 2) == [(0, 1), (1, 3), (3, 5)]\n"
        "print([name for name in ('torch', 'tilelang', 'tvm', 'numpy') if name in sys.modules])"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert result.returncode == 0, result.stderr
    assert result.stdout.strip() == "[]"


# The fit


def synthetic_rows(table: dict[str, dict[str, float]]) -> list[dict[str, object]]:
    """Times that follow the model exactly, for every kernel and all of its features."""
    rows: list[dict[str, object]] = []
    for kernel, names in costs.FEATURES.items():
        for hk, hv, lengths in (
            (2, 8, [32768]),
            (8, 32, [8192]),
            (16, 64, [2048]),
            (16, 48, [24576, 8192]),
            (2, 8, [100, 0, 5000]),
            (1, 64, [4096] * 5),
        ):
            for cut in (WHOLE, Plan(16, 1, 1, 4, 8), Plan(16, 2, 1, 4, 0), Plan(32, 1, 0, 8, 10**6), Plan(7, 1, 0, 3, 10**6)):
                for gates in (FAST, Gates(6), Gates(2, 0.5), Gates(slow=1.0)):
                    row = {"kernel": kernel, "hk": hk, "hv": hv, "lengths": lengths, "backward": False}
                    row |= {
                        "plan": {field.name: getattr(cut, field.name) for field in fields(cut)},
                        "gates": {"warmup": gates.warmup, "slow": gates.slow},
                    }
                    counts = fit_autocp.row_features(row)
                    assert set(counts) == set(names)
                    rows.append({**row, "us": sum(table[kernel][name] * count for name, count in counts.items())})
    return rows


def test_fit_recovers_known_coefficients(tmp_path, capsys):
    table = {kernel: {name: 0.3 + 0.1 * n for n, name in enumerate(names)} for kernel, names in costs.FEATURES.items()}
    rows = synthetic_rows(table)
    fitted = fit_autocp.fit(rows)
    for kernel, row in table.items():
        assert fitted[kernel] == pytest.approx(row, rel=1e-4)
    path, out = tmp_path / "rows.jsonl", tmp_path / "coefficients.json"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert fit_autocp.main(["--fit", str(path), "--out", str(out)]) == 0
    assert Coefficients(json.loads(out.read_text())).us["fwd_fused"] == pytest.approx(table["fwd_fused"], rel=1e-4)
    assert "worst   0.0%" in capsys.readouterr().out


def test_fit_keeps_what_was_not_measured_and_is_never_negative():
    start = Coefficients.load()
    rows = [{"kernel": "cp_merge", "hk": 1, "hv": 1, "lengths": [6400], "plan": vars(Plan(10, 1, 1, 1, 0)), "us": us} for us in (4.0, 6.0)]
    fitted = fit_autocp.fit(rows)
    assert fitted["cp_merge"]["step"] == start.us["cp_merge"]["step"] and 4 < fitted["cp_merge"]["base"] < 6
    assert fitted["fwd_fused"] == start.us["fwd_fused"]
    falling = [{**rows[0], "kernel": "bwd_fused", "lengths": [64 * n], "us": 100.0 / n} for n in (1, 2, 4)]
    assert fit_autocp.fit(falling)["bwd_fused"]["chunk_value_head"] == 0
    with pytest.raises(ValueError, match="measured_us must be above 0"):
        fit_autocp.fit([{**rows[0], "us": 0}])


def test_errors_are_relative_to_what_was_measured():
    """Of a launch with nothing to do a tenth of a microsecond is left: it must not outweigh the others."""
    rows = [
        {"kernel": "bwd_fused", "hk": 1, "hv": 1, "lengths": [64 * n], "plan": vars(WHOLE), "us": us, "measured_us": us + 4.0}
        for n, us in ((1, 0.1), (1, 0.1), (13200, 10000.0))
    ]
    fitted = fit_autocp.fit(rows)
    assert fitted["bwd_fused"]["chunk_value_head"] == pytest.approx(100.0, rel=0.1)
    assert max(fit_autocp.relative_errors(rows, fitted)["bwd_fused"]) < 0.2
    alone = fit_autocp.fit({**row, "measured_us": row["us"]} for row in rows)
    assert alone["bwd_fused"]["chunk_value_head"] < 50


def test_rows_from_the_lines_of_a_benchmark(tmp_path):
    """A factor for each kernel from what its last measurement found."""
    shape = {"direction": "bwd", "hk": 2, "hv": 8, "lengths": "24576+8192", "gates": "slow"}
    facts = {"gpu": "H200", "torch": "2", "tilelang": "0", "commit": "new", "date": "2026-02-01"}
    cut = Plan(32, 1, 9, 64, 8)
    lines = [
        {**shape, **facts, "provider": "qla", "ms": 0.5, "plan": vars(cut)},
        *({**shape, **facts, "provider": f"qla:{kernel}", "ms": 0.1} for kernel in ("cp_prep_gradients", "scan_states", "bwd_fused")),
        {**shape, **facts, "lengths": "2048", "provider": "qla", "ms": 0.1},
        {**shape, **facts, "lengths": "2048", "provider": "qla:bwd_fused", "ms": 0.05},
    ]
    (tmp_path / "lines").write_text("\n".join(map(json.dumps, lines)))
    old = {"kernel": "bwd_fused", "hk": 2, "hv": 8, "lengths": [64], "plan": vars(WHOLE), "us": 9e9, "backward": True, "commit": "old",
           "date": "2026-01-01", "idle_us": 4.0}  # fmt: skip
    results = tmp_path / "rows"
    results.write_text(json.dumps(old) + "\n")
    assert fit_autocp.main(["--lines", str(tmp_path / "lines"), "--results", str(results)]) == 0
    rows = [json.loads(line) for line in results.read_text().splitlines()]
    assert [(row["kernel"], row["lengths"]) for row in rows[1:]] == [
        ("scan_states", [24576, 8192]), ("bwd_fused", [24576, 8192]), ("bwd_fused", [2048]),
    ]  # fmt: skip
    assert [row["us"] for row in rows[1:]] == [96.0, 96.0, 46.0] and Plan(**rows[1]["plan"]) == cut and Plan(**rows[3]["plan"]) == WHOLE
    last = fit_autocp.last_measured(rows)
    assert rows[0] not in last and len(last) == 3
    start, table = Coefficients.load(), fit_autocp.scaled(last)
    expected = costs.features("scan_states", problem_of_shape(Shape(2, 8, "24576+8192")), 132, cut, ASSUMED["slow"], True)
    factor = 96.0 / sum(start.us["scan_states"][name] * count for name, count in expected.items())
    assert table["scan_states"] == pytest.approx({name: value * factor for name, value in start.us["scan_states"].items()})
    assert table["fwd_fused"] == start.us["fwd_fused"]


# Measuring, with stand-ins for GPU and timer


def test_what_is_measured_for_a_shape():
    for shape in fit_autocp.SHAPES:
        problem = problem_of_shape(shape)
        rows = fit_autocp.plans_of(problem, H200)
        assert len(rows) == len(set(rows)) >= 9 and rows[0] == ("fast", WHOLE)
        assert {gates for gates, _ in rows} == {"fast", "slow", "mixed"}
        assert plan(problem, H200) in [made for _, made in rows]
        assert {made.split for _, made in rows if not made.chunks_per_segment} == {0, 1, 2}
        cuts = [made for _, made in rows if made.chunks_per_segment]
        longest = max(-(-length // CHUNK) for length in shape.sequence_lengths)
        assert all(autocp.MIN_SEGMENT <= cut.chunks_per_segment < longest for cut in cuts)
        slow = [cut for gates, cut in rows if gates == "slow"]
        assert {cut.max_transition_heads > 0 for cut in slow} == {True, False}
        assert {cut.split for cut in cuts} == {1, 2}


@pytest.mark.parametrize("backward", [False, True])
def test_measured_rows_are_what_the_fit_reads(backward, tmp_path, monkeypatch):
    """Times that follow the model come back as its coefficients; a kernel that counts the same is timed once for a shape."""
    coefficients, shape, timed = Coefficients.load(), Shape(2, 8, "1024+512"), []
    state = {}

    def calls_of(direction):
        def calls(case, cut):
            state.update(plan=cut, gates=ASSUMED[case.gates], backward=direction)
            return {kernel: lambda kernel=kernel: kernel for kernel in costs.launches(cut, direction)}

        return calls

    def timer(runnables, reps):
        timed.append(set(runnables))
        if set(runnables) == {"idle"}:
            return {"idle": timing.summarise([4e-3], "graph")}
        predicted = predict(problem_of_shape(shape), 132, state["plan"], state["gates"], state["backward"], coefficients)
        us = {name: predicted.total if name == "launch" else predicted.us[name] + 4.0 for name in runnables}
        return {name: timing.summarise([value / 1e3], "graph") for name, value in us.items()}

    monkeypatch.setattr(fit_autocp, "kernel_calls", calls_of(False))
    monkeypatch.setattr(fit_autocp, "backward_kernel_calls", calls_of(True))
    monkeypatch.setattr(fit_autocp, "BACKWARD_HEADS", (shape.heads,) if backward else ())
    path = tmp_path / "rows.jsonl"
    ready_up = lambda start: timing.Runnable(start, "graph")  # noqa: E731
    measurement = fit_autocp.Measurement(path, {"gpu": "a GPU", "commit": "abc"}, H200, place="cpu", ready_up=ready_up, timer=timer)
    measurement.run([shape])
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    assert len(rows) == measurement.lines and measurement.idle_us == pytest.approx(4.0)
    assert {row["backward"] for row in rows} == ({False, True} if backward else {False})
    assert all(row["gpu"] == "a GPU" and row["seq_len"] == 0 and row["lengths"] == [1024, 512] for row in rows)
    table = {kernel: dict(row) for kernel, row in coefficients.us.items()}
    assert max(error for errors in fit_autocp.relative_errors(rows, table).values() for error in errors) < 1e-3
    assert sum("kkt_solve" in names for names in timed) == 2, "with and without bounds"
    assert sum("bwd_fused" in names for names in timed) == int(backward)


def test_the_budget_ends_the_measuring(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(fit_autocp.torch.cuda, "is_available", lambda: False)
    assert fit_autocp.main(["--measure"]) == 2 and "CUDA" in capsys.readouterr().out
    monkeypatch.setattr(fit_autocp.torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(fit_autocp, "device_spec", lambda device: H200)
    monkeypatch.setattr(fit_autocp, "environment", dict)
    monkeypatch.setattr(fit_autocp.Measurement, "time", lambda self, starts, rounds=1: {"idle": 4.0})
    monkeypatch.setattr(fit_autocp.torch, "empty", lambda *args, **kwargs: None)
    assert fit_autocp.main(["--measure", "--budget", "-1", "--results", str(tmp_path / "rows.jsonl")]) == 0
    assert "stopped" in capsys.readouterr().out and not (tmp_path / "rows.jsonl").exists()


def test_coefficients_file_is_in_the_form_that_the_fit_writes():
    path = Path(autocp.__file__).with_name("autocp_coefficients.json")
    assert fit_autocp.format_table(json.loads(path.read_text())) == path.read_text()
