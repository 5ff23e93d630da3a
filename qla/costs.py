"""Sizes of calls, plans for cutting them, and the model that predicts what they cost. ``qla.autocp`` searches with it.

The cost of a kernel, and of launching the call, is a sum of coefficients (microseconds, autocp_coefficients.json) times features: counts
that follow from lengths, heads, plan and gates alone. bench/fit_autocp.py fits the coefficients to measured times. In the model blocks
start in the order (sequence, segment, value head, half of V), serial ones before all others, each on the SM that is free first.
Heads are of 128 here, as they were measured: ``qla.autograd.choose_plan`` says what others count as.
Nothing here touches torch or a GPU.
"""

from __future__ import annotations

import heapq
import json
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache, lru_cache
from importlib import resources
from itertools import groupby

CHUNK = 64
MAX_TOKENS = 2**31 - 1  # token rows and grid sizes are int32 in the kernels
PLAN_THREADS = 1024  # of cp_plan, one for each segment number, value head and direction
PLAN_LOADS = 8  # that a thread of cp_plan has in flight
OWN_LOADS = 16  # that a block of the fused kernel has in flight where it finds its segment itself
PLAN_PIECES = 8  # into which it divides a segment to see whether a transition may grow

# What segments start from is kept for the backward pass while it is at most this share of what is saved anyway.
KEPT_SHARE = 0.25
STATE_BYTES = 64 << 10  # of a segment and value head: a state, or a transition in two parts; K = V = 128, as all coefficients

# Weights of the list scheduling, in tenths of a microsecond: of a chunk by the split of V (as in choose_block_v), and of a block.
CHUNK_WEIGHT = {1: 20, 2: 13}
BLOCK_WEIGHT = 15
CUT_CHUNK = {1: "chunk_1", 2: "chunk_half"}  # features of a chunk of the fused kernel in a cut call, by the split
MAX_RUNS = 128  # runs of equal blocks that are scheduled one by one
MAX_GROUPS = 24  # groups of equal neighbouring sequences that are kept apart
# The share of SMs on which scans use all of the memory's bandwidth: 1.0 us a chunk alone and 2.4 on a full card.
SATURATION = 0.4

FEATURES: Mapping[str, tuple[str, ...]] = {
    "kkt_solve": ("base", "chunk_value_head", "chunk_key_head", "bound"),
    "fwd_fused": ("base", "chunk_1", "crowding_1", "chunk_2", "chunk_half", "crowding_2", "block", "leave"),
    "cp_plan": ("base", "segment_head", "look"),
    "cp_prep": ("base", "chunk_1", "chunk_2", "crowding", "block", "leave"),
    "cp_prep_gradients": ("base", "chunk_1", "chunk_2", "crowding", "block", "leave"),
    "cp_merge": ("base", "block", "step"),
    "cp_merge_gradients": ("base", "block", "step"),
    "scan_states": ("base", "chunk_1", "chunk_2", "traffic", "block", "leave"),
    "scan_state_gradients": ("base", "chunk_1", "chunk_2", "traffic", "block", "leave"),
    "bwd_fused": ("base", "chunk_value_head"),
    "fwd_spare": ("base", "leave"),
    "launch": ("call", "kernel"),
}


def check_int(name: str, value: object, least: int, most: int = MAX_TOKENS) -> None:
    """ValueError unless ``value`` is an integer of [least, most]."""
    if not isinstance(value, int) or isinstance(value, bool) or not least <= value <= most:
        raise ValueError(f"{name} must be an integer from {least} to {most}, got {value!r}")


@dataclass(frozen=True)
class Problem:
    """The size of one call, as far as the host knows it.

    key_heads, value_heads: H and HV, HV a multiple of H.
    num_seqs: number of sequences S, 0 or more.
    tokens: of all sequences together, with rows past the last sequence.
    seq_len: tokens of each sequence when all are equally long (S * seq_len = tokens), or 0 (default).
    lengths: tokens of each sequence, S of them, when the host knows them; None (default) when only the device does.
    Raises ValueError.
    """

    key_heads: int
    value_heads: int
    num_seqs: int
    tokens: int
    seq_len: int = 0
    lengths: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        check_int("key_heads", self.key_heads, 1)
        check_int("value_heads", self.value_heads, 1)
        check_int("num_seqs", self.num_seqs, 0)
        check_int("tokens", self.tokens, 0)
        check_int("seq_len", self.seq_len, 0)
        if self.value_heads % self.key_heads:
            raise ValueError(f"value_heads must be a multiple of key_heads = {self.key_heads}, got {self.value_heads}")
        if self.seq_len and self.seq_len * self.num_seqs != self.tokens:
            raise ValueError(f"seq_len must be tokens / num_seqs = {self.tokens} / {self.num_seqs} or 0, got {self.seq_len}")
        if self.lengths is not None:
            self._check_lengths(self.lengths)

    def _check_lengths(self, lengths: tuple[int, ...]) -> None:
        if not isinstance(lengths, tuple):
            raise ValueError(f"lengths must be a tuple of integers or None, got {type(lengths).__name__}")
        for length in lengths:
            check_int("lengths", length, 0)
        if len(lengths) != self.num_seqs:
            raise ValueError(f"lengths must have num_seqs = {self.num_seqs} elements, got {len(lengths)}")
        if sum(lengths) > self.tokens:
            raise ValueError(f"lengths must sum to at most tokens = {self.tokens}, got {sum(lengths)}")
        if self.seq_len and any(length != self.seq_len for length in lengths):
            raise ValueError(f"lengths must all be seq_len = {self.seq_len}, got {lengths}")


@dataclass(frozen=True)
class Gates:
    """What a prediction assumes of the gates.

    warmup: chunks of warm-up that a fast head needs, 0 or more; default 1.
    slow: share of the value heads that no warm-up serves, in [0, 1]; default 0.
    Raises ValueError.
    """

    warmup: int = 1
    slow: float = 0.0

    def __post_init__(self) -> None:
        check_int("warmup", self.warmup, 0)
        if not isinstance(self.slow, (int, float)) or not 0 <= self.slow <= 1:
            raise ValueError(f"slow must be a share from 0 to 1, got {self.slow!r}")


FAST = Gates()


@dataclass(frozen=True)
class Plan:
    """How the sequences of a call are cut. Lengths in chunks.

    chunks_per_segment: most chunks of a segment; 0 leaves the sequences whole, and then only split counts of the rest.
    split: blocks of the fused kernel that share the columns of V of an item, 1 or 2; serial heads and the scans have rules of their own. 0,
        only for whole sequences: as the launcher chooses from the number of heads (``whole_split``).
    inline_warmup: longest warm-up inside the fused kernel and the scans, 0 to max_warmup.
    max_warmup: longest warm-up at all.
    max_transition_heads: most (sequence, value head) pairs that go through transition matrices.
    threshold: what a warm-up neglects of the state before it is below exp(-threshold) of it.
    whole_backward: whether the backward pass leaves the sequences whole; if not (default), it goes by the same segments.
    max_serial_heads: most pairs that are walked as a whole beside others that are cut; if the device finds more, all sequences stay whole,
        by a launch that otherwise has nothing to do. As many as there are by default, without such a launch.
    whole_split: the split of V if they stay whole, as split without a cut.
    Raises ValueError.
    """

    chunks_per_segment: int
    split: int
    inline_warmup: int
    max_warmup: int
    max_transition_heads: int
    threshold: float = 10.0
    whole_backward: bool = False
    max_serial_heads: int = MAX_TOKENS
    whole_split: int = 0

    def __post_init__(self) -> None:
        check_int("chunks_per_segment", self.chunks_per_segment, 0)
        check_int("split", self.split, 1 if self.chunks_per_segment else 0, 2)
        check_int("inline_warmup", self.inline_warmup, 0)
        check_int("max_warmup", self.max_warmup, 0)
        check_int("max_transition_heads", self.max_transition_heads, 0)
        check_int("max_serial_heads", self.max_serial_heads, 0)
        check_int("whole_split", self.whole_split, 0, 2)
        if self.inline_warmup > self.max_warmup:
            raise ValueError(f"inline_warmup must be at most max_warmup = {self.max_warmup}, got {self.inline_warmup}")
        if not 0 < self.threshold < math.inf:
            raise ValueError(f"threshold must be positive and finite, got {self.threshold}")

    @property
    def of_backward(self) -> Plan:
        """What the backward pass goes by."""
        return WHOLE if self.whole_backward else self

    @property
    def needs_states(self) -> bool:
        """Whether segments may start from states in memory, which cp_prep makes."""
        return self.max_transition_heads > 0 or self.inline_warmup < self.max_warmup

    @property
    def needs_tables(self) -> bool:
        """Whether the forward pass of a cut call takes its items from cp_plan. Where two blocks share V and all warm-up is in the fused
        kernel, blocks find the segment that they walk themselves, and slow heads cost next to nothing more than uncut."""
        return self.split == 1 or self.needs_states or self.may_stay_whole

    @property
    def blocks_an_item(self) -> int:
        """Blocks of the fused kernel for each item of a cut call, at most: two where two share V, or may share that of serial pairs."""
        return 1 if self.split == 1 and self.max_serial_heads == 0 else 2

    @property
    def may_stay_whole(self) -> bool:
        """Whether the device may find that the sequences of a cut call are better left whole."""
        return self.chunks_per_segment > 0 and self.max_serial_heads < MAX_TOKENS

    def num_segments(self, num_seqs: int, tokens: int, seq_len: int) -> int:
        """Segment numbers of a call, used or not: what grids and tables are made of.

        num_seqs: S. tokens: of all sequences together. seq_len: of each sequence, or 0 when they are packed with lengths that the host
        may not know; then numbers are given by ``packed_segment_base`` and some stay unused.
        """
        if not self.chunks_per_segment:
            return num_seqs
        if seq_len:
            return num_seqs * -(-num_chunks(seq_len) // self.chunks_per_segment)
        return packed_segment_base(tokens, num_seqs, self.chunks_per_segment) + 1


WHOLE = Plan(0, 0, 0, 0, 0)


@dataclass(frozen=True, eq=False)
class Coefficients:
    """Microseconds for each unit of each feature: ``us[kernel][feature]``, with the names of FEATURES.

    Each is 0 or more, and a chunk of fwd_fused takes more than 0. Raises ValueError for other names and other values.
    """

    us: Mapping[str, Mapping[str, float]]

    def __post_init__(self) -> None:
        if {kernel: set(row) for kernel, row in self.us.items()} != {kernel: set(names) for kernel, names in FEATURES.items()}:
            raise ValueError(f"coefficients must have the kernels and features of {dict(FEATURES)}, got {self.us}")
        for kernel, row in self.us.items():
            for name, value in row.items():
                positive = kernel == "fwd_fused" and name.startswith("chunk_")
                if not (math.isfinite(value) and (value > 0 if positive else value >= 0)):
                    raise ValueError(
                        f"coefficients must be finite and {'above 0' if positive else '0 or more'}, got {value!r} for {name} of {kernel}"
                    )

    @staticmethod
    def load() -> Coefficients:
        """Those of autocp_coefficients.json beside this module, read once."""
        return _load_coefficients()

    def time(self, kernel: str, counts: Mapping[str, float]) -> float:
        """Predicted microseconds of a launch with these features."""
        row = self.us[kernel]
        return sum(row[name] * count for name, count in counts.items())


@cache
def _load_coefficients() -> Coefficients:
    return Coefficients(json.loads(resources.files(__package__).joinpath("autocp_coefficients.json").read_text()))


@dataclass(frozen=True)
class Prediction:
    """Predicted microseconds of a call: ``us`` by kernel, in the order of their launch, then "beside" (backward), the negative of what
    kernels save that run side by side, and "launch", which is what the call takes beyond its kernels; ``total`` of them all."""

    us: Mapping[str, float]

    @property
    def total(self) -> float:
        return sum(self.us.values())


# Segments


def num_chunks(tokens: int) -> int:
    return -(-tokens // CHUNK)


def segments(chunks: int, chunks_per_segment: int) -> list[tuple[int, int]]:
    """(first chunk, end) of the segments of one sequence: as few as the limit allows, their lengths differing by at most 1.

    chunks: of the sequence. An empty one has a single empty segment, through which its state passes.
    chunks_per_segment: most chunks of a segment, or 0 for one segment.
    """
    count = max(1, -(-chunks // chunks_per_segment)) if chunks_per_segment else 1
    return [(j * chunks // count, (j + 1) * chunks // count) for j in range(count)]


def packed_segment_base(first_token: int, seq: int, chunks_per_segment: int) -> int:
    """The number of a packed sequence's first segment; the device finds it from cu_seqlens without a sum over the sequences before it.

    first_token: the sequence's first row. seq: its number. chunks_per_segment: 1 or more.
    A sequence of c chunks that begins in chunk x of the packed rows ends in chunk x + c - 1 at least, so the next one's base is higher by
    floor(c / chunks_per_segment) + 1 at least: numbers may be left out, but never occur twice.
    """
    return (first_token // CHUNK + seq) // chunks_per_segment + seq


# Work of a call: blocks in grid order, as runs of equal ones

Sequences = tuple[tuple[int, int], ...]  # (chunks, number of neighbouring sequences with that many)
Run = tuple[int, int, int]  # (chunks a block walks, split, number of such blocks)


@dataclass(frozen=True)
class _Busy:
    """What the blocks of a launch amount to.

    serial: chunks on the SM that ends last, by split. blocks: its blocks.
    load: chunks of all blocks over the number of SMs, by split.
    """

    serial: Mapping[int, float]
    load: Mapping[int, float]
    blocks: float


def _schedule(runs: Sequence[Run], num_sms: int) -> _Busy:
    """List scheduling: each block, in order, on the SM that is free first. Blocks with equal chunks are handled together.

    More than MAX_RUNS runs are put together by kind, longest first; more kinds than that are taken as the load plus the longest block.
    """
    merged: list[Run] = []
    for kind, group in groupby(runs, key=lambda run: run[:2]):
        number = sum(run[2] for run in group)
        if number:
            merged.append((*kind, number))
    load = {split: sum(run[0] * run[2] for run in merged if run[1] == split) / num_sms for split in (1, 2)}
    if len(merged) > MAX_RUNS:
        kinds: Counter[tuple[int, int]] = Counter()
        for chunks, split, number in merged:
            kinds[chunks, split] += number
        merged = [(*kind, kinds[kind]) for kind in sorted(kinds, key=lambda kind: -CHUNK_WEIGHT[kind[1]] * kind[0])]
    if len(merged) > MAX_RUNS:
        chunks, split, _ = merged[0]
        blocks = sum(run[2] for run in merged) / num_sms + 1
        return _Busy({**load, split: load[split] + chunks}, load, blocks)

    # SMs in the same condition (time, chunks with split 1, chunks with split 2, blocks) are counted together.
    sms = {(0, 0, 0, 0): num_sms}
    order = [(0, 0, 0, 0)]
    for chunks, split, number in merged:
        weight = CHUNK_WEIGHT[split] * chunks + BLOCK_WEIGHT
        step = (weight, chunks * (split == 1), chunks * (split == 2), 1)
        if number >= num_sms and max(order)[0] - order[0][0] <= weight:
            # The SMs are within a block of each other, so that each gets one in turn: whole rounds at once.
            rounds, number = divmod(number, num_sms)
            sms = {_after(state, step, rounds): count for state, count in sms.items()}
            order = list(sms)
            heapq.heapify(order)
        while number:
            state = heapq.heappop(order)
            count = sms.pop(state)
            taken = min(count, number)
            number -= taken
            for left, many in ((state, count - taken), (_after(state, step, 1), taken)):
                if many and left not in sms:
                    heapq.heappush(order, left)
                if many:
                    sms[left] = sms.get(left, 0) + many
    _, whole, half, blocks = max(order)
    return _Busy({1: whole, 2: half}, load, blocks)


def _after(state: tuple[int, int, int, int], step: tuple[int, int, int, int], rounds: int) -> tuple[int, int, int, int]:
    return (state[0] + rounds * step[0], state[1] + rounds * step[1], state[2] + rounds * step[2], state[3] + rounds * step[3])


def whole_split(items: int, num_sms: int) -> int:
    """Blocks for each whole (sequence, value head): 2 where that does not add waves, as choose_block_v in kernels/launch.py has it."""
    whole, half = (math.ceil(split * items / num_sms) * CHUNK_WEIGHT[split] for split in (1, 2))
    return 2 if half < whole else 1


@dataclass(frozen=True)
class _Work:
    """What a call with a plan does: blocks of the recurrences and of cp_prep, and what the small kernels count.

    num_sms: of the card. chunks: of all sequences. cut: whether sequences are cut, tables: and items come from cp_plan, stays_whole:
        which leaves them whole. segment_heads: segment numbers times value heads.
    whole_heads: sequences times value heads.
    walk_runs: of the fused kernel; the scans take the same items. prep_runs: of cp_prep. reverse_runs: of cp_prep_gradients.
    transitions: whether the plan lets any pair take them. steps: of cp_merge, for each pair that does. pairs: such pairs.
    look: chunks that a thread of cp_plan looks at, one after the other, in units of PLAN_LOADS. blocks_an_item: as the plan has it.
    """

    num_sms: int
    chunks: int
    cut: bool
    tables: bool
    segment_heads: int
    whole_heads: int
    walk_runs: tuple[Run, ...]
    prep_runs: tuple[Run, ...] = ()
    reverse_runs: tuple[Run, ...] = ()
    transitions: bool = False
    steps: int = 0
    pairs: int = 0
    look: int = 0
    stays_whole: bool = False
    blocks_an_item: int = 2

    @property
    def scan_split(self) -> int:
        """Blocks that share an item of a scan, cut or not: as many as an uncut call would have, which is what serial heads are."""
        return whole_split(self.whole_heads, self.num_sms)

    @property
    def prep_split(self) -> int:
        """Blocks that share a segment in cp_prep: as the launcher chooses from the number of segments."""
        return whole_split(self.segment_heads, self.num_sms)

    def scan_runs(self, runs: Sequence[Run]) -> list[Run]:
        """The same items as blocks of a scan."""
        split = self.scan_split
        return [(chunks, split, number // of_run * split) for chunks, of_run, number in runs]

    def leaving(self, runs: Sequence[Run], busy: _Busy, blocks_an_item: int) -> float:
        """Blocks over SMs that have nothing to do, of a grid with so many for each item: as many as find no SM idle.

        busy: what the other blocks, in runs, amount to. An SM is idle for as long as it has fewer chunks than the one that ends last.
        """
        if not self.cut:
            return 0.0
        blocks = max(0, blocks_an_item * self.segment_heads - sum(run[2] for run in runs)) / self.num_sms
        serial = sum(busy.serial.values())
        return blocks * min(1.0, sum(busy.load.values()) / serial) if serial else blocks


def _spread(sequences: Sequences, chunks_per_segment: int, pairs: int) -> list[tuple[int, int, int]]:
    """(chunks, sequences, slow heads of each): the slow pairs spread evenly over the sequences that are cut."""
    cut = sum(count for chunks, count in sequences if chunks > chunks_per_segment)
    each, more = divmod(pairs, max(cut, 1))
    spread = []
    for chunks, count in sequences:
        if chunks <= chunks_per_segment:
            spread.append((chunks, count, 0))
            continue
        first = min(more, count)
        more -= first
        spread += [(chunks, number, heads) for number, heads in ((first, each + 1), (count - first, each)) if number]
    return spread


@dataclass(frozen=True)
class _Kind:
    """Segments of one sequence that are alike.

    chunks: of the segment. before: of the segment before it. reach: chunks from the sequence's start, the longest warm-up there is.
    scans: what the transition needs of the segment before: nothing for the first segment, its end state from the initial state for the
    second (1), its end state from zero and its transition matrix for the others (2).
    number: of such segments.
    """

    chunks: int
    before: int
    reach: int
    scans: int
    number: int


@lru_cache(maxsize=1024)
def _kinds(chunks: int, chunks_per_segment: int) -> list[_Kind]:
    """The segments in order; of more than MAX_RUNS those after the second are put together by length, whatever their reach."""
    number = max(1, -(-chunks // chunks_per_segment))
    if number <= MAX_RUNS:
        cuts = segments(chunks, chunks_per_segment)
        return [_Kind(end - first, first - cuts[max(j - 1, 0)][0], first, min(j, 2), 1) for j, (first, end) in enumerate(cuts)]
    short, longer = divmod(chunks, number)
    kinds = [_Kind(short, 0, 0, 0, 1), _Kind(short, short, short, 1, 1)]
    kinds += [_Kind(short + 1, short + 1, chunks, 2, longer), _Kind(short, short, chunks, 2, number - longer - 2)]
    return [kind for kind in kinds if kind.number > 0]


def _work(sequences: Sequences, value_heads: int, num_segments: int, num_sms: int, plan: Plan, gates: Gates) -> _Work:
    """The work of a call whose sequences have these lengths; num_segments: of the grid."""
    total = sum(chunks * count for chunks, count in sequences)
    segment_heads = num_segments * value_heads
    limit = plan.chunks_per_segment
    if not limit:
        split = plan.split or whole_split(segment_heads, num_sms)
        walk = tuple((chunks, split, count * value_heads * split) for chunks, count in sequences)
        return _Work(num_sms, total, False, False, segment_heads, segment_heads, walk)

    pairs = value_heads * sum(count for chunks, count in sequences if chunks > limit)
    # For each group of sequences: chunks, number, and of its slow and its fast heads: how many, their warm-up, whether it is too long.
    groups: list[tuple[int, int, list[tuple[int, int, bool]]]] = []
    for chunks, count, slow_heads in _spread(sequences, limit, round(gates.slow * pairs)):
        # A warm-up that reaches the sequence's start is exact, so none is longer than the way from there to the last segment.
        last = _kinds(chunks, limit)[-1].reach
        both = ((slow_heads, last), (value_heads - slow_heads, min(gates.warmup, last)))
        groups.append((chunks, count, [(heads, warmup, warmup > plan.max_warmup) for heads, warmup in both if heads]))
    slow = sum(count * heads for _, count, classes in groups for heads, _, too_long in classes if too_long)
    transition = slow <= plan.max_transition_heads
    serial_split = 2 if 2 * slow <= num_sms or not plan.needs_tables else 1
    stays_whole = plan.may_stay_whole and not transition and slow > plan.max_serial_heads
    if stays_whole:
        serial_split = plan.whole_split or whole_split(value_heads * sum(count for _, count in sequences), num_sms)
        groups = [(chunks, count, [(value_heads, 0, True)]) for chunks, count, _ in groups]
    prep_split = whole_split(segment_heads, num_sms)

    runs: dict[str, list[Run]] = {"serial": [], "walk": [], "prep": [], "reverse": []}
    steps = 0
    for chunks, count, classes in groups:
        of_one: dict[str, list[Run]] = {name: [] for name in runs}
        for kind in _kinds(chunks, limit):
            for heads, warmup, too_long in classes:
                if too_long and not transition:
                    if not kind.scans:
                        of_one["serial"].append((chunks, serial_split, heads * serial_split))
                    continue
                need = 0 if too_long else min(warmup, kind.reach)
                inline = need if need <= plan.inline_warmup else 0
                of_one["walk"].append((kind.chunks + inline, plan.split, heads * plan.split * kind.number))
                if too_long:
                    of_one["prep"].append((kind.before, prep_split, heads * kind.scans * kind.number * prep_split))
                    of_one["reverse"].append((kind.before, prep_split, heads * min(kind.scans, 1) * kind.number * prep_split))
                elif need > inline:
                    of_one["prep"].append((need, prep_split, heads * kind.number * prep_split))
        if transition and any(too_long for _, _, too_long in classes):
            steps = max(steps, -(-chunks // limit) - 2)
        for name, added in of_one.items():
            if len(added) * count > MAX_RUNS:
                runs[name] += [(length, split, number * count) for length, split, number in added]
            else:
                runs[name] += added * count

    longest = max((warmup for _, _, classes in groups for _, warmup, _ in classes), default=0)
    looked = plan.max_warmup if stays_whole else min(plan.max_warmup, longest)
    grows = slow > 0 and plan.max_transition_heads > 0
    return _Work(
        num_sms,
        total,
        True,
        plan.needs_tables,
        segment_heads,
        value_heads * sum(count for _, count in sequences),
        (*runs["serial"], *runs["walk"]),
        tuple(runs["prep"]),
        tuple(runs["reverse"]),
        transitions=plan.max_transition_heads > 0,
        steps=steps,
        pairs=slow if transition else 0,
        look=-(-looked // PLAN_LOADS) + grows * -(-limit // (PLAN_LOADS * PLAN_PIECES)),
        stays_whole=stays_whole,
        blocks_an_item=plan.blocks_an_item,
    )


# Costs


def features_of_work(kernel: str, problem: Problem, num_sms: int, work: _Work) -> dict[str, float]:
    value_chunks = work.chunks * problem.value_heads
    if kernel == "kkt_solve":
        return {
            "base": 1,
            "chunk_value_head": value_chunks,
            "chunk_key_head": work.chunks * problem.key_heads,
            "bound": value_chunks if work.cut else 0,
        }
    if kernel == "fwd_fused":
        walk = _schedule(work.walk_runs, num_sms)
        half = "chunk_half" if work.tables and not work.stays_whole else "chunk_2"
        row = {"base": 1, "chunk_1": walk.serial[1], "chunk_2": 0.0, "chunk_half": 0.0, "block": walk.blocks}
        row |= {half: walk.serial[2], "crowding_1": walk.load[1], "crowding_2": walk.load[2]}
        return row | {"leave": 0.0 if work.stays_whole else work.leaving(work.walk_runs, walk, work.blocks_an_item)}
    if kernel == "fwd_spare":
        whole_blocks = work.whole_heads * whole_split(work.whole_heads, num_sms)
        return {"base": 1, "leave": (work.blocks_an_item * work.segment_heads if work.stays_whole else whole_blocks) / num_sms}
    if kernel in ("scan_states", "scan_state_gradients"):
        runs = work.scan_runs(work.walk_runs)
        scan = _schedule(runs, num_sms)
        # Half of V is half of the traffic, and of the time of a block's chunk as in CHUNK_WEIGHT.
        alone = scan.serial[1] + scan.serial[2] * CHUNK_WEIGHT[2] / CHUNK_WEIGHT[1]
        return {
            "base": 1,
            "chunk_1": scan.serial[1],
            "chunk_2": scan.serial[2],
            "traffic": max(0.0, scan.load[1] + scan.load[2] / 2 - SATURATION * alone),
            "block": scan.blocks,
            "leave": work.leaving(runs, scan, work.scan_split),
        }
    if kernel in ("cp_prep", "cp_prep_gradients"):
        forward = kernel == "cp_prep"
        runs = list(work.prep_runs if forward else work.reverse_runs)
        prep = _schedule(runs, num_sms)
        return {
            "base": 1,
            "chunk_1": prep.serial[1],
            "chunk_2": prep.serial[2],
            "crowding": prep.load[1] + prep.load[2] / 2,
            "block": prep.blocks,
            "leave": work.leaving(runs, prep, work.prep_split * (2 if forward and work.transitions else 1)),
        }
    if kernel == "cp_plan":
        return {"base": 1, "segment_head": work.segment_heads, "look": work.look * -(-2 * work.segment_heads // PLAN_THREADS)}
    if kernel in ("cp_merge", "cp_merge_gradients"):
        rounds = -(-2 * work.pairs // num_sms) if work.steps > 0 else 0
        return {"base": 1, "block": rounds, "step": rounds * max(work.steps, 0)}
    if kernel == "bwd_fused":
        return {"base": 1, "chunk_value_head": value_chunks / num_sms}
    raise ValueError(f"kernel must be one of {', '.join(FEATURES)}, got {kernel!r}")


def features(
    kernel: str, problem: Problem, num_sms: int, plan: Plan, gates: Gates = FAST, backward: bool = False, kept: bool | None = None
) -> dict[str, float]:
    """What one launch of a kernel counts; its predicted time is the sum of these times the coefficients of the same names.

    base: 1. block: blocks of the SM that ends last.
    chunk_1, chunk_2: its chunks, with V in one block and in two. chunk_half: the same as chunk_2 where sequences are cut, and the blocks of
        the fused kernel are made for the whole V.
    crowding_1, crowding_2: chunks of all blocks over SMs: what chunks cost more when the other SMs are busy too. crowding: of both, a half
        of V as half a chunk.
    traffic: by how much the latter is above SATURATION of the last SM's chunks: scans wait for memory.
    leave: blocks over SMs that have nothing to do and find no idle SM. Of fwd_spare, the launch of the fused kernel for sequences that
        are cut or for those that are not, whichever has nothing to do, all of its blocks.
    step: of the chains of segments in cp_merge, its blocks one after the other.
    segment_head: segment numbers times value heads. look: times that a thread of cp_plan waits for bounds, in all rounds of its block.
    chunk_value_head, chunk_key_head: chunks of all sequences times heads, in bwd_fused over SMs. bound: the former, where there is a cut.
    call: 1, kernel: launches: what a timed call takes beyond its kernels.
    kernel: a key of FEATURES. num_sms: 1 or more. Lengths that the host does not know are taken as equal.
    backward: for "launch", whether the call is a backward one. kept: for that, whether what segments start from was kept; None
        (default) as ``keeps_segment_states`` has it. Raises ValueError.
    """
    if kernel not in FEATURES:
        raise ValueError(f"kernel must be one of {', '.join(FEATURES)}, got {kernel!r}")
    check_int("num_sms", num_sms, 1)
    if backward:
        plan = plan.of_backward
    if kernel == "launch":
        kept = keeps_segment_states(problem, plan) if kept is None else kept
        return {"call": 1, "kernel": len(launches(plan, backward, kept))}
    return features_of_work(kernel, problem, num_sms, work_of(problem, possible_lengths(problem)[0], num_sms, plan, gates))


def work_of(problem: Problem, sequences: Sequences, num_sms: int, plan: Plan, gates: Gates) -> _Work:
    num_segments = plan.num_segments(problem.num_seqs, problem.tokens, problem.seq_len)
    return _work(sequences, problem.value_heads, num_segments, num_sms, plan, gates)


def keeps_segment_states(problem: Problem, plan: Plan) -> bool:
    """Whether the forward pass of a cut call keeps what its segments start from, by sizes (``qla.autograd`` goes by the bytes)."""
    if plan.whole_backward or not plan.needs_states:
        return False
    taken = STATE_BYTES * (2 if plan.max_transition_heads > 0 else 1) * problem.value_heads
    taken *= plan.num_segments(problem.num_seqs, problem.tokens, problem.seq_len)
    saved = 392 * problem.value_heads + 512 * problem.key_heads  # bytes a token, as the autograd function says
    return taken <= KEPT_SHARE * problem.tokens * saved


def launches(plan: Plan, backward: bool, kept: bool = False) -> list[str]:
    """Kernels of a call in the order of their launch, keys of FEATURES.

    The backward prepares both the states, unless they were kept, and their gradients.
    """
    plan = plan.of_backward if backward else plan
    cut = plan.chunks_per_segment > 0
    states = ["cp_prep"] if cut and plan.needs_states else []
    transitions = cut and plan.max_transition_heads > 0
    states += ["cp_merge"] if transitions else []
    if backward:
        gradients = ["cp_prep_gradients", "cp_merge_gradients"] if transitions else []
        tables = ["cp_plan"] if cut and not plan.needs_tables else []
        return [*tables, *([] if kept else states), *gradients, "scan_states", "scan_state_gradients", "bwd_fused"]
    spare = ["fwd_spare"] if plan.may_stay_whole else []
    return ["kkt_solve", *(["cp_plan", *states] if cut and plan.needs_tables else []), "fwd_fused", *spare]


def predict_sequences(
    problem: Problem, sequences: Sequences, num_sms: int, plan: Plan, gates: Gates, backward: bool, coefficients: Coefficients
) -> Prediction:
    plan = plan.of_backward if backward else plan
    work, kernels = work_of(problem, sequences, num_sms, plan, gates), launches(plan, backward, keeps_segment_states(problem, plan))
    us = {name: coefficients.time(name, features_of_work(name, problem, num_sms, work)) for name in kernels}
    if backward:
        us["beside"] = -_saved_beside(work, us)
    return Prediction(us | {"launch": coefficients.time("launch", {"call": 1, "kernel": len(kernels)})})


def _saved_beside(work: _Work, us: Mapping[str, float]) -> float:
    """What it saves that the scan of the states runs beside that of their gradients, and what comes before the latter.

    All of it takes as long as the longer way, or as the card takes for both, if that is more: preparations for the share of the SMs that
    they keep busy, chains hardly any, scans for the share of the time in which their blocks use all of the memory.
    """
    scan = _schedule(work.scan_runs(work.walk_runs), work.num_sms)
    load, serial = scan.load[1] + scan.load[2] / 2, scan.serial[1] + scan.serial[2]
    scan_share = min(1.0, load / (SATURATION * serial)) if serial else 1.0
    busy_in = {}
    for kernel, runs in (("cp_prep", work.prep_runs), ("cp_prep_gradients", work.reverse_runs)):
        prep = _schedule(runs, work.num_sms)
        serial = sum(prep.serial.values())
        busy_in[kernel] = us.get(kernel, 0.0) * (min(1.0, sum(prep.load.values()) / serial) if serial else 0.0)

    of_states = [us.get("cp_merge", 0.0), us["scan_states"]]
    of_gradients = [us.get("cp_merge_gradients", 0.0), us["scan_state_gradients"]]
    first, prep_gradients = us.get("cp_prep", 0.0), us.get("cp_prep_gradients", 0.0)
    saved = 0.0
    if first:  # made again: both preparations come before the rest
        saved = first + prep_gradients - max(first, prep_gradients, sum(busy_in.values()))
    else:
        of_gradients.append(prep_gradients)
    busy = scan_share * (us["scan_states"] + us["scan_state_gradients"]) + (0.0 if first else busy_in["cp_prep_gradients"])
    ways = sum(of_states), sum(of_gradients)
    return saved + sum(ways) - max(*ways, busy)


def possible_lengths(problem: Problem) -> list[Sequences]:
    """What the lengths may be: as given; else all equal, and one sequence with everything.

    More than MAX_GROUPS groups of equal neighbours are rounded to 4 significant bits and sorted, longest first.
    """
    seqs, tokens = problem.num_seqs, problem.tokens
    if not seqs:
        return [()]
    if problem.seq_len:
        return [((num_chunks(problem.seq_len), seqs),)]
    if problem.lengths is None:
        equal = ((num_chunks(-(-tokens // seqs)), seqs),)
        return [equal] if seqs == 1 else [equal, ((num_chunks(tokens), 1), (0, seqs - 1))]
    chunks = [num_chunks(length) for length in problem.lengths]
    groups = tuple((number, len(list(group))) for number, group in groupby(chunks))
    if len(groups) > MAX_GROUPS:
        groups = tuple(sorted(Counter(map(_rounded, chunks)).items(), reverse=True))
    return [groups]


def _rounded(chunks: int) -> int:
    shift = max(0, chunks.bit_length() - 4)
    return (chunks + (1 << shift >> 1)) >> shift << shift


def predict(
    problem: Problem,
    num_sms: int,
    plan: Plan,
    gates: Gates = FAST,
    backward: bool = False,
    coefficients: Coefficients | None = None,
) -> Prediction:
    """Predicted time of a forward call, or of its backward, by kernel; the total is what the call takes in a replayed CUDA graph.

    num_sms: multiprocessors of the card, 1 or more. gates: what to assume of them; fast ones by default.
    coefficients: those of autocp_coefficients.json by default. Lengths that the host does not know are taken as equal.
    Raises ValueError.
    """
    check_int("num_sms", num_sms, 1)
    return predict_sequences(problem, possible_lengths(problem)[0], num_sms, plan, gates, backward, coefficients or Coefficients.load())
