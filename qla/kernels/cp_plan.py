"""The work items of a call whose sequences are cut into segments: who starts where, and from what, decided on the device.

A sequence of n chunks has s = ceil(n / L) segments, segment j the chunks [j n / s, (j + 1) n / s). What a segment starts from is found in
one of three ways, the same for all segments of a (sequence, value head), both directions together:
    warm-up      `w` chunks before it, from a zero state: as many as it takes until 2^(sum of their transition bounds) is at most
                 2^-threshold, at most max_warmup; from the sequence's own state where they reach its start, which is exact.
                 Forward ones of more than inline_warmup chunks are left to `cp_prep`; the others, and all reverse ones, are the item's own
    transition   S* of the segment before, from zero, and its transition M (`cp_prep`), then S = S* + M S_before along the sequence
                 (`cp_merge`); exact for the segment after the first one (reverse: before the last)
    serial       the first item walks the whole sequence, the others have nothing to do
A (sequence, head) is slow if a segment's warm-up would be longer than max_warmup in either direction. Of slow ones, those whose
transition may grow (bounds above 1 that multiply to more than 2 within an eighth of a segment) are serial. The others take the
transition if they are max_transition_heads at most, else they are serial too. With more than max_serial_heads serial ones all are serial,
and left to a launch of `fwd_fused` without items: the sequences stay whole.

Shapes   bound [slots, HV] fp32 (`kkt_solve`); cu [S + 1] int32; forward, reverse [segments, HV, 4], order [2 segments HV + 1], ways [S, HV]
         int32. S, HV, lengths and the rule are run-time values. Segments of packed sequence n have the numbers from
         (cu[n] / 64 + n) / L + n on (equal lengths: the segments in order); numbers without a segment have items without work.
Item     (start, first, end, flags | sequence << 8), in chunks of the sequence. end < 0: nothing to do.
         forward  walks [start, end) and owns [first, end); reverse walks [first, start) from its end and owns [first, end).
         flags    1   starts from the sequence's initial state (reverse: the final state's gradient)
                  2   starts from a state that cp_prep makes of [start, first) (reverse: of [end, start)), and only owns what it walks
                  4   .. which begins with the sequence's own state
                  8   .. to which the transition over these chunks, times what the neighbour starts from, is added
                  16  two blocks share it, each a half of V
         An empty sequence has one item without chunks, through which its state passes. Scans take no notice of flag 16.
Order    of the blocks of `fwd_fused`: 2 (row of an item) + half of V, items of serial heads first, then the others, then -1. Serial items
         are split if there are no more than split_serial_up_to of them, the others if `split` says so; with V = 64 none is.
Roles    one block of 1024 threads: an item each, and as many rounds as it takes
Shared memory    bytes
    counts [2]   8 (static)    slow and growing (sequence, head) pairs
    placed [2]   8 (static)    blocks of serial and of other items that have their place in order
Barriers
    block sync, five: before each step of the schedule but the first
Schedule
    1   order and ways are cleared
    2   warm-ups of all items in both directions, left in the items' rows; ways: who is slow
    3   ways: whose transition may grow, by eighths of a segment
    4   counts
    5   ways: from marks to warm-up, transition or serial
    6   items of both directions, and the order
"""

from dataclasses import dataclass

import tilelang.language as T

from qla.kernels.ws import PASS_CONFIGS, compile_kernel, device_source, once_per_config

THREADS = 1024
WARMUP, TRANSITION, SERIAL = range(3)  # ways; cp_plan.cuh names the same


@dataclass(frozen=True)
class PlanConfig:
    """One variant."""

    name: str = "cp_plan"
    threads: int = THREADS
    smem_bytes: int = 0


CONFIGS = (PlanConfig(),)
config_for = PlanConfig


def prim_func(cfg: PlanConfig):
    """The kernel, for `tilelang.compile` or for lowering without a GPU."""
    slots, heads, cu_size, num_segments, num_seqs, num_blocks = T.dynamic("slots, heads, cu_size, num_segments, num_seqs, num_blocks")
    int32 = "int32"

    @T.prim_func
    def cp_plan_kernel(
        Bound: T.Tensor((slots, heads), "float32"),
        Cu: T.Tensor((cu_size,), int32),
        Forward: T.Tensor((num_segments, heads, 4), int32),
        Reverse: T.Tensor((num_segments, heads, 4), int32),
        Order: T.Tensor((num_blocks,), int32),
        Ways: T.Tensor((num_seqs, heads), int32),
        # run-time
        seq_len: T.int32,  # 0: lengths are in Cu
        tokens: T.int32,
        segment_chunks: T.int32,
        split: T.int32,
        inline_warmup: T.int32,
        max_warmup: T.int32,
        max_transition_heads: T.int32,
        max_serial_heads: T.int32,
        split_serial_up_to: T.int32,
        threshold: T.float32,
    ):
        with T.Kernel(1, threads=THREADS):
            T.import_source(device_source(__file__, "segments.cuh"))
            tables = [T.access_ptr(table, "w") for table in (Forward, Reverse, Order, Ways)]
            problem = (num_segments, num_seqs, seq_len, tokens, heads, segment_chunks)
            rule = (split, inline_warmup, max_warmup, max_transition_heads, max_serial_heads, split_serial_up_to, threshold)
            inputs = (T.access_ptr(Bound, "r"), T.access_ptr(Cu, "r"))
            T.evaluate(T.call_extern(int32, "qla_plan::plan", *inputs, *tables, *problem, *rule))

    return cp_plan_kernel


@once_per_config
def build(cfg: PlanConfig):
    """The compiled kernel of a config."""
    return compile_kernel(lambda: prim_func(cfg), PASS_CONFIGS)
