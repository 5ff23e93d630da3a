"""AutoCP: into how many segments the sequences of a call are cut, so that few heads fill the card (intra-card context parallelism).

The fused kernel gives a block one (sequence, value head) and walks its chunks one after the other; with fewer of these pairs than SMs
the card is partly idle. A cut gives a block one (sequence, value head, segment). What a segment starts from is found on the device,
for each pair:

- warm-up: the block starts some chunks earlier from a zero state, where the gates forget fast enough. Up to `inline_warmup` chunks the
  fused kernel does it, up to `max_warmup` cp_prep does.
- transition: cp_prep scans each segment from zero and for its transition matrix, cp_merge combines them segment by segment. For pairs
  that need a longer warm-up ("slow"), as long as no more than `max_transition_heads` pairs do.
- serial: the first block walks the whole sequence and the others leave, for slow pairs when there are more. With more than
  `max_serial_heads` of them no sequence is cut: a second launch of the fused kernel, which otherwise leaves, takes them whole.

A plan without transitions and with every warm-up in the fused kernel launches neither cp_prep nor cp_merge. If, moreover, two blocks share
V, as they do where whole sequences leave SMs idle, each block finds its segment itself: nothing is launched that an uncut call would not,
and slow heads cost next to nothing.

The host does not know the gates, so a plan has to pay where they are fast and must not harm where they are slow.

The rule L = lambda * sqrt(N) for the length of a segment and the warm-up are those of FlashQLA (https://github.com/QwenLM/FlashQLA);
the search around it is ours. Nothing here touches torch or a GPU.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import lru_cache
from typing import TYPE_CHECKING

from qla.costs import (
    CUT_CHUNK,
    FAST,
    MAX_TOKENS,
    OWN_LOADS,
    PLAN_LOADS,
    WHOLE,
    Coefficients,
    Gates,
    Plan,
    Problem,
    Sequences,
    check_int,
    features_of_work,
    num_chunks,
    possible_lengths,
    predict_sequences,
    work_of,
)

if TYPE_CHECKING:
    from qla.device import DeviceSpec

__all__ = ["FAST", "WHOLE", "Coefficients", "Gates", "Plan", "Problem", "explain_plan", "plan", "start_value"]

MAX_SEGMENT_HEADS = 2**13  # (segment, value head) pairs of a plan made here: 64 KiB each for the start state, 512 MiB at most
MAX_WARMUP = 64  # chunks; cp_plan looks at as many one after the other
MIN_SEGMENT = 2  # chunks; a segment of one chunk would spend as much on its warm-up as on its own work
MAX_TRIES = 12  # candidates for which the limits on warm-up and transitions are worked out

# What a cut must gain with fast gates, and what it may lose with slow ones, as a share of the time of whole sequences.
MIN_GAIN = 0.03
MAX_LOSS = 0.01
MAX_LOSS_US = 1.5  # and so many microseconds,
LOSS_FOR_GAIN = 0.1  # and this share of what it gains with fast gates
MAX_LOSS_UNKNOWN = 0.25  # of each of two hypotheses, where the host does not know the lengths
SLOW_SHARES = (0.25, 0.5, 1.0)  # shares of slow heads for which the loss is looked at
SERIAL_GAIN = 0.08  # what a cut with serial pairs must gain over whole sequences, else the device undoes it
SLOW_WEIGHT = 1.0  # what a microsecond with slow heads (the mean of SLOW_SHARES) counts against one with fast gates


def start_value(problem: Problem, num_sms: int, split: int, coefficients: Coefficients | None = None) -> tuple[float, float]:
    """(lambda, L = lambda * sqrt(N)): the length of a segment that minimises a * L + b * N / L, for N chunks of the longest sequence.

    a: what a chunk adds to the last block's time, in the fused kernel and in cp_prep.
    b: what a further segment adds: a step of cp_merge, and its pairs' share of the SMs for one block and one chunk of warm-up.
    split: 1 or 2.
    """
    us = (coefficients or Coefficients.load()).us
    fused, longest = us["fwd_fused"], max((chunks for chunks, _ in possible_lengths(problem)[-1]), default=0)
    chunk = fused[CUT_CHUNK[split]]
    a = chunk + us["cp_prep"]["chunk_1"]
    b = us["cp_merge"]["step"] + (fused["block"] + chunk) * split * problem.num_seqs * problem.value_heads / num_sms
    factor = math.sqrt(b / a) if a else 1.0
    return factor, factor * math.sqrt(longest)


def _candidates(problem: Problem, hypotheses: Sequence[Sequences], num_sms: int, coefficients: Coefficients) -> list[Plan]:
    """Plans with a cut and a warm-up of one chunk: lengths around the start value, and those that fill whole waves of blocks."""
    plans: dict[tuple[int, tuple[int, ...]], Plan] = {}
    for split in (1, 2):
        start = start_value(problem, num_sms, split, coefficients)[1]
        lengths = {round(start * factor) for factor in (0.5, 0.7, 1.0, 1.4, 2.0)}
        for sequences in hypotheses:
            longest = max((chunks for chunks, _ in sequences), default=0)
            waves = -(-split * problem.value_heads * problem.num_seqs // num_sms)
            for blocks in range(waves * num_sms, (waves + 6) * num_sms, num_sms):
                lengths.add(_shortest(sequences, longest, blocks // (split * problem.value_heads)))
        longest = max(chunks for sequences in hypotheses for chunks, _ in sequences)
        for length in sorted(lengths):
            plan = Plan(min(max(length, MIN_SEGMENT), MAX_TOKENS), split, 1, 1, 0)
            numbers = plan.num_segments(problem.num_seqs, problem.tokens, problem.seq_len)
            if plan.chunks_per_segment < longest and numbers * problem.value_heads <= MAX_SEGMENT_HEADS:
                # Of lengths that make the same cuts the longest one needs the smallest tables.
                cuts = tuple(-(-chunks // plan.chunks_per_segment) for sequences in hypotheses for chunks, _ in sequences)
                plans[split, cuts] = plan
    return list(plans.values())


def _shortest(sequences: Sequences, longest: int, most: int) -> int:
    """The least chunks_per_segment with which these sequences have at most this many segments; `longest` if none has."""

    def fits(length: int) -> bool:
        return sum(count * max(1, -(-chunks // length)) for chunks, count in sequences) <= most

    lengths = range(MIN_SEGMENT, max(longest, MIN_SEGMENT))
    return MIN_SEGMENT + bisect_left(lengths, True, key=fits)


def _last(holds: Callable[[int], bool], least: int, most: int) -> int:
    """The last n of [least, most] up to which ``holds`` is true: by doubling distances, then bisection. ``least`` is taken for granted."""
    good, distance = least, 1
    while good < most and holds(min(good + distance, most)):
        good = min(good + distance, most)
        distance *= 2
    bad = min(good + distance, most)
    while bad - good > 1:
        middle = (good + bad) // 2
        good, bad = (middle, bad) if holds(middle) else (good, middle)
    return good


def _limits(problem: Problem, sequences: Sequences, num_sms: int, plan: Plan, coefficients: Coefficients, lean: bool) -> Plan:
    """The plan with its limits on warm-up and transitions, for sequences of these lengths.

    max_warmup: as long as warm-up of all heads is predicted faster than the transitions or the serial walk of all; at most 2 segments
        and MAX_WARMUP chunks, or as many as a block that finds its segment itself has in flight: it looks at them before it begins.
    inline_warmup: as long as it is predicted no slower in the fused kernel than in cp_prep.
    max_transition_heads: as long as the transitions of so many pairs are predicted faster than their serial walk, the others being fast.
    lean: whether to do without cp_prep and cp_merge: no transitions, all warm-up in the fused kernel.
    """

    def us(plan: Plan, gates: Gates) -> float:
        return predict_sequences(problem, sequences, num_sms, plan, gates, False, coefficients).total

    pairs = problem.value_heads * sum(count for chunks, count in sequences if chunks > plan.chunks_per_segment)
    if not pairs:
        return replace(plan, inline_warmup=MAX_TOKENS, max_warmup=MAX_TOKENS, max_transition_heads=0 if lean else MAX_TOKENS)
    most = min(2 * plan.chunks_per_segment, OWN_LOADS if lean and plan.split == 2 else MAX_WARMUP)

    def inline_wins(warmup: int) -> bool:
        limited = replace(plan, inline_warmup=warmup, max_warmup=warmup)
        return us(limited, Gates(warmup)) <= us(replace(limited, inline_warmup=0), Gates(warmup))

    inline = most if lean else _last(inline_wins, 1, most)
    slow = Gates(slow=1.0)
    other = us(plan, slow) if lean else min(us(plan, slow), us(replace(plan, max_transition_heads=pairs), slow))
    longest = _last(lambda warmup: us(replace(plan, inline_warmup=min(inline, warmup), max_warmup=warmup), Gates(warmup)) < other, 1, most)
    plan = replace(plan, inline_warmup=min(inline, longest), max_warmup=longest)
    if lean:
        return plan

    def transition_wins(number: int) -> bool:
        gates = Gates(slow=number / pairs)
        return us(replace(plan, max_transition_heads=pairs), gates) < us(plan, gates)

    return replace(plan, max_transition_heads=_last(transition_wins, 0, pairs))


def _with_way_back(
    problem: Problem, hypotheses: Sequence[Sequences], num_sms: int, plan: Plan, uncut: Plan, coefficients: Coefficients
) -> Plan:
    """The cut, left to the device to undo where more pairs are serial than pay: beside blocks of cut pairs they take longer than alone."""

    def most(sequences: Sequences) -> int:
        def us(plan: Plan, gates: Gates) -> float:
            return predict_sequences(problem, sequences, num_sms, plan, gates, False, coefficients).total

        pairs = problem.value_heads * sum(count for chunks, count in sequences if chunks > plan.chunks_per_segment)
        limit = (1 - SERIAL_GAIN) * us(uncut, FAST)
        return _last(lambda number: us(plan, Gates(slow=number / pairs)) < limit, 0, pairs) if pairs else 0

    warmup = min(plan.max_warmup, PLAN_LOADS)  # cp_plan looks at no more than it has in flight
    plan = replace(plan, inline_warmup=warmup, max_warmup=warmup)
    return replace(plan, max_serial_heads=min(map(most, hypotheses)), whole_split=uncut.split)


def _variants(
    problem: Problem, hypotheses: Sequence[Sequences], num_sms: int, plan: Plan, uncut: Plan, coefficients: Coefficients
) -> list[Plan]:
    """The cut with and without cp_prep and cp_merge, and without them but with a way back to whole sequences."""

    def us(plan: Plan) -> list[float]:
        return [predict_sequences(problem, sequences, num_sms, plan, FAST, False, coefficients).total for sequences in hypotheses]

    variants: list[Plan] = []
    gains = [whole - cut for whole, cut in zip(us(WHOLE), us(plan), strict=True)]
    for lean in (True, False):
        limits = [_limits(problem, sequences, num_sms, plan, coefficients, lean) for sequences in hypotheses]
        # Transitions are for the lengths that gain most: where pairs are fewer and longer.
        variants.append(
            replace(
                plan,
                inline_warmup=min(limit.inline_warmup for limit in limits),
                max_warmup=min(limit.max_warmup for limit in limits),
                max_transition_heads=limits[gains.index(max(gains))].max_transition_heads,
            )
        )
    return [*variants, _with_way_back(problem, hypotheses, num_sms, variants[0], uncut, coefficients)]


def _weighed(problem: Problem, hypotheses: Sequence[Sequences], num_sms: int, plan: Plan, coefficients: Coefficients) -> float:
    """What a plan takes in all, microseconds with slow heads counting SLOW_WEIGHT: a short call is not worth two more launches."""

    def us(gates: Gates) -> float:
        return sum(predict_sequences(problem, sequences, num_sms, plan, gates, False, coefficients).total for sequences in hypotheses)

    return us(FAST) + SLOW_WEIGHT * sum(us(Gates(slow=share)) for share in SLOW_SHARES) / len(SLOW_SHARES)


def _allowed(problem: Problem, sequences: Sequences, num_sms: int, cut: Plan, uncut: Plan, coefficients: Coefficients) -> float:
    """Microseconds that a call with slow heads may take."""
    known = problem.seq_len > 0 or problem.lengths is not None or problem.num_seqs == 1
    whole, fast = (predict_sequences(problem, sequences, num_sms, plan, FAST, False, coefficients).total for plan in (uncut, cut))
    return (1 + (MAX_LOSS if known else MAX_LOSS_UNKNOWN)) * whole + MAX_LOSS_US + LOSS_FOR_GAIN * max(0.0, whole - fast)


def _may_be_harmless(problem: Problem, sequences: Sequences, num_sms: int, cut: Plan, uncut: Plan, coefficients: Coefficients) -> bool:
    """Whether some limits on warm-up and transitions might make a cut ``_harmless``: all heads slow, by transitions, serial or whole."""
    ways = (cut, replace(cut, max_transition_heads=MAX_TOKENS), replace(cut, max_serial_heads=0, whole_split=uncut.split))
    slow = [predict_sequences(problem, sequences, num_sms, way, Gates(slow=1.0), False, coefficients).total for way in ways]
    return min(slow) <= _allowed(problem, sequences, num_sms, cut, uncut, coefficients)


def _harmless(problem: Problem, sequences: Sequences, num_sms: int, plan: Plan, uncut: Plan, coefficients: Coefficients) -> bool:
    """Whether slow heads cost no more than the rule of the function ``plan`` allows, for sequences of these lengths."""
    allowed = _allowed(problem, sequences, num_sms, plan, uncut, coefficients)
    slow = (predict_sequences(problem, sequences, num_sms, plan, Gates(slow=share), False, coefficients).total for share in SLOW_SHARES)
    return all(time <= allowed for time in slow)


def _least_cut(problem: Problem, sequences: Sequences, num_sms: int, coefficients: Coefficients) -> float:
    """Microseconds that no cut can be faster than: its launches, and its chunks spread over the SMs without loss."""
    us = coefficients.us
    work = work_of(problem, sequences, num_sms, WHOLE, FAST)
    per_chunk = min(split * (us["fwd_fused"][CUT_CHUNK[split]] + us["fwd_fused"][f"crowding_{split}"]) for split in (1, 2))
    bases = us["fwd_fused"]["base"] + us["launch"]["call"] + 2 * us["launch"]["kernel"]
    solve = coefficients.time("kkt_solve", features_of_work("kkt_solve", problem, num_sms, work))
    return solve + bases + per_chunk * work.chunks * problem.value_heads / num_sms


def _cut_pays_backward(problem: Problem, hypotheses: Sequence[Sequences], num_sms: int, cut: Plan, coefficients: Coefficients) -> bool:
    """Whether the backward pass gains by the cut, too, as the rule of the function ``plan`` has it."""

    def us(plan: Plan, gates: Gates) -> list[float]:
        return [predict_sequences(problem, sequences, num_sms, plan, gates, True, coefficients).total for sequences in hypotheses]

    fast, whole = us(cut, FAST), us(WHOLE, FAST)
    worst_cut, worst_whole = (max(time / min(both) for time, *both in zip(times, fast, whole, strict=True)) for times in (fast, whole))
    if worst_cut >= (1 - MIN_GAIN) * worst_whole:
        return False
    loss = MAX_LOSS if len(hypotheses) == 1 else MAX_LOSS_UNKNOWN
    return all(time <= (1 + loss) * before for share in SLOW_SHARES for time, before in zip(us(cut, Gates(slow=share)), whole, strict=True))


def _uncut(problem: Problem, hypotheses: Sequence[Sequences], num_sms: int, coefficients: Coefficients) -> Plan:
    """Whole sequences, with another split of V than the number of heads suggests where ragged lengths want it."""

    def us(plan: Plan) -> list[float]:
        return [predict_sequences(problem, sequences, num_sms, plan, FAST, False, coefficients).total for sequences in hypotheses]

    uncut, whole = WHOLE, us(WHOLE)
    for split in (1, 2):
        times = us(replace(WHOLE, split=split))
        if all(time < (1 - MIN_GAIN) * before - 1 for time, before in zip(times, whole, strict=True)):  # and a microsecond at least
            uncut, whole = replace(WHOLE, split=split), times
    return uncut


@lru_cache(maxsize=4096)
def _plan(problem: Problem, num_sms: int, coefficients: Coefficients) -> Plan:
    hypotheses = possible_lengths(problem)

    def fast_us(plan: Plan) -> list[float]:
        return [predict_sequences(problem, sequences, num_sms, plan, FAST, False, coefficients).total for sequences in hypotheses]

    if not problem.num_seqs:
        return WHOLE
    uncut = _uncut(problem, hypotheses, num_sms, coefficients)
    whole = fast_us(uncut)
    if all(
        (1 - MIN_GAIN) * time <= _least_cut(problem, sequences, num_sms, coefficients)
        for sequences, time in zip(hypotheses, whole, strict=True)
    ):
        return uncut
    us = {plan: fast_us(plan) for plan in _candidates(problem, hypotheses, num_sms, coefficients)}
    best = [min(times) for times in zip(whole, *us.values(), strict=True)]

    def regret(times: list[float]) -> float:
        """The worst ratio to the best plan over the hypotheses; with one hypothesis the order is that of the times."""
        ratios: list[float] = [time / least for time, least in zip(times, best, strict=True)]
        return max(ratios)

    def pays(times: list[float]) -> bool:
        return regret(times) < (1 - MIN_GAIN) * regret(whole)

    paying = [cut for cut, times in us.items() if pays(times)]
    candidates = sorted(paying, key=lambda cut: (regret(us[cut]), -cut.chunks_per_segment, cut.split))
    found: list[Plan] = []
    for candidate in candidates[:MAX_TRIES]:
        if not all(_may_be_harmless(problem, sequences, num_sms, candidate, uncut, coefficients) for sequences in hypotheses):
            continue
        for variant in _variants(problem, hypotheses, num_sms, candidate, uncut, coefficients):
            harmless = (_harmless(problem, sequences, num_sms, variant, uncut, coefficients) for sequences in hypotheses)
            if pays(fast_us(variant)) and all(harmless):
                found.append(variant)
    if not found:
        return uncut
    best_cut = min(found, key=lambda cut: _weighed(problem, hypotheses, num_sms, cut, coefficients))
    cut_too = _cut_pays_backward(problem, hypotheses, num_sms, best_cut, coefficients)
    return best_cut if cut_too else replace(best_cut, whole_backward=True)


def plan(problem: Problem, device: DeviceSpec, coefficients: Coefficients | None = None) -> Plan:
    """The plan of a call, kept for the next call of the same size.

    problem: its size. device: the card; only its sm_count matters. coefficients: those of autocp_coefficients.json by default.

    Of the candidates (uncut, with V split as the number of heads suggests or, where that gains 3 %, the other way; cuts into segments of
    two chunks or more with V in one block or in two) the cuts with the least predicted forward times for fast gates, with a warm-up of one
    chunk, are looked at more closely: with cp_prep and cp_merge, without them, and without them but so that the device may leave the
    sequences whole. A cut has to gain 3 % over uncut with fast gates. With a quarter, a half or all of the heads slow it may cost at most
    1 % more than uncut, 1.5 us, and a tenth of what it gains with fast ones. Of those that keep to this, it is the one that takes least
    with fast gates and SLOW_WEIGHT times the mean of the three slow ones; if none does, the sequences stay whole. The backward pass is
    cut as well if it gains 3 % and costs at most 1 % with slow heads.
    When the host does not know the lengths, they may be equal, or one sequence may hold all tokens: then it is the plan whose worst ratio
    to the best one for each of the two is least, and with slow heads it may cost 25 % more than uncut for either.
    """
    return _plan(problem, device.sm_count, coefficients or Coefficients.load())


def explain_plan(key_heads: int, value_heads: int, lengths: Sequence[int], num_sms: int = 132, backward: bool = False) -> str:
    """A table of what a call could be cut into, with predicted times, and why the plan is what it is.

    key_heads, value_heads: H and HV, of heads of 128 (two value heads of 64 columns cost what one of 128 does). lengths: tokens of each
    sequence; equal ones count as a batch.
    num_sms: multiprocessors of the card, default 132 (H100 SXM, H200). backward: whether the times are those of the backward; the plan is
    made for the forward in either case. Raises ValueError.
    """
    check_int("num_sms", num_sms, 1)
    lengths = tuple(lengths)
    for length in lengths:
        check_int("lengths", length, 0)
    tokens = sum(lengths)
    seq_len = lengths[0] if len(set(lengths)) == 1 else 0
    problem = Problem(key_heads, value_heads, len(lengths), tokens, seq_len, lengths)
    coefficients = Coefficients.load()
    chosen = _plan(problem, num_sms, coefficients)
    forward = replace(chosen, whole_backward=False)  # as the candidates, of which it is one
    hypotheses = possible_lengths(problem)
    cuts = _candidates(problem, hypotheses, num_sms, coefficients) if tokens else []
    uncut = _uncut(problem, hypotheses, num_sms, coefficients) if tokens else WHOLE
    rows = [WHOLE] if chosen.chunks_per_segment or chosen == WHOLE else [WHOLE, chosen]
    for cut in cuts:
        variants = _variants(problem, hypotheses, num_sms, cut, uncut, coefficients)
        better = min(variants, key=lambda plan: _weighed(problem, hypotheses, num_sms, plan, coefficients))
        rows.append(forward if forward in variants else better)

    def us(plan: Plan, gates: Gates, backward: bool = backward) -> float:
        return predict_sequences(problem, hypotheses[0], num_sms, plan, gates, backward, coefficients).total

    def name(plan: Plan) -> str:
        split = f", split {plan.split}" if plan.split else ""
        return (f"segments of {plan.chunks_per_segment}" if plan.chunks_per_segment else "uncut") + split

    longest = max((num_chunks(length) for length in lengths), default=0)
    lines = [
        f"sequences: {len(lengths)}, chunks of the longest: {longest}, value heads: {value_heads}, SMs: {num_sms}",
        f"predicted us of the {'backward' if backward else 'forward'}; lengths of segments in chunks",
    ]
    for split in (1, 2):
        factor, start = start_value(problem, num_sms, split, coefficients)
        lines.append(f"lambda * sqrt(N), split {split}: {factor:.2f} * sqrt({longest}) = {start:.1f} chunks a segment")
    lines.append(f"  {'plan':<28}{'fast gates':>12}{'slow gates':>12}")
    for row in sorted(rows, key=lambda plan: us(plan, FAST)):
        mark = "*" if row == (chosen.of_backward if backward and chosen.whole_backward else forward) else " "
        lines.append(f"{mark} {name(row):<28}{us(row, FAST):12.1f}{us(row, Gates(slow=1.0)):12.1f}")
    whole, fast = us(WHOLE, FAST, False), us(chosen, FAST, False)
    if chosen.chunks_per_segment:
        reason = (
            f"least forward time for fast gates within the limits for slow ones, {fast:.1f} us, {whole / fast:.2f} times as fast as uncut"
        )
        reason += f"; warm-up in the fused kernel up to {chosen.inline_warmup} chunks and at most {chosen.max_warmup}"
        reason += f", transition matrices for at most {chosen.max_transition_heads} slow pairs"
        if chosen.may_stay_whole:
            reason += f", all whole after all if more than {chosen.max_serial_heads} pairs are serial"
        reason += "; the backward pass, which gains less, stays uncut" if chosen.whole_backward else ""
    else:
        reason = f"no cut gains {MIN_GAIN:.0%} over {whole:.1f} us for fast gates and stays within the limits for slow ones"
    return "\n".join([*lines, f"Chosen: {name(chosen)}: {reason}."])
