"""How blocks of the fused forward find the segments that they walk, without a table: the device code on a CPU (``emulated``)."""

from __future__ import annotations

import ctypes
import math
import re
import subprocess
from pathlib import Path

import pytest
import torch

pytest.importorskip("tilelang")
from qla.costs import Plan, packed_segment_base, segments  # noqa: E402
from qla.kernels import ws  # noqa: E402
from tests.emulated import COMPILER, DRIVER, PRELUDE  # noqa: E402

pytestmark = pytest.mark.skipif(COMPILER is None, reason="needs g++")

VOTES = """
static int most_of(int x) {
  int most = x;
  for (int i = 0; i < 32; ++i) most = max(most, (int)from_lane(x, i));
  return most;
}
static bool __any_sync(unsigned, bool x) { return most_of(x) > 0; }
static int __reduce_max_sync(unsigned, int x) { return most_of(x); }
"""
CALL = """qla_locate_segment((int*)arguments[0] + blockIdx.x * 12, (const float*)arguments[1], (const int*)arguments[2],
    number(3), number(4), number(5), blockIdx.x / number(6), blockIdx.x % number(6), number(6), number(7),
    number(8), number(9), *(float*)arguments[10], number(11), threadIdx.x)"""


@pytest.fixture(scope="module")
def locate(tmp_path_factory):
    """The function for all blocks of a grid of one warp each."""
    folder = Path(ws.__file__).parent
    shared = (folder / "ws.cuh").read_text()
    used = [*re.findall(r"^constexpr .*;$", shared, re.M), *re.findall(r"^enum Qla\w+ \{.*\};$", shared, re.M)]
    (place,) = re.findall(r"^static __device__ __forceinline__ int qla_place\(.*?^\}$", shared, re.M | re.S)
    device = [(folder / name).read_text() for name in ("segments.cuh", "fwd_fused.cuh")]
    numbers = "static int number(int i) { return *(const int*)arguments[i]; }\n"
    driver = DRIVER.replace("static void thread_main", numbers + "static void thread_main").replace("KERNEL_CALL", CALL)
    source = tmp_path_factory.mktemp("emulated") / "locate.cpp"
    source.write_text("\n".join([PRELUDE, VOTES, *used, place, *device, driver]))
    library = source.with_suffix(".so")
    command = [COMPILER, "-std=c++20", "-O1", "-w", "-shared", "-fPIC", str(source), "-o", str(library)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    return ctypes.CDLL(str(library)).launch


FIELDS = ("ITEM", "SEQ", "VALUE_HEAD", "KEY_HEAD", "ROW", "ROWS", "CHUNKS", "SKIP", "SOURCE", "ENDS", "PART_OF_V", "SLOT")


@pytest.mark.parametrize("with_state", [False, True])
@pytest.mark.parametrize("packed", [True, False], ids=["packed", "equal"])
@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("length_of_segment", [1, 3, 4])
def test_blocks_find_their_segments(length_of_segment, seed, packed, with_state, locate):
    """Against a description in Python: random lengths, of which the longest has more segments than a warp has lanes; NaN is slow."""
    rng = torch.Generator().manual_seed(seed)
    heads, ratio, plan = 4, 2, Plan(length_of_segment, 2, 5, 5, 0)
    lengths = [0, *torch.randint(0, 900, (4,), generator=rng).tolist(), 2500, 0] if packed else [1 + 400 * seed] * 3
    chunks = [-(-length // 64) for length in lengths]
    kind = torch.tensor([0.0, -30.0, -6.0, -3.0, math.nan])[torch.randint(0, 5, (len(lengths), heads), generator=rng)]
    bound = [kind[n] + 0.5 * torch.randn(count, heads, generator=rng) for n, count in enumerate(chunks)]
    tokens, cu = sum(lengths) + (33 if packed else 0), torch.tensor([0, *lengths]).cumsum(0).int()
    seq_len = 0 if packed else lengths[0]
    bases = [int(cu[n]) // 64 + n if packed else n * count for n, count in enumerate(chunks)]
    slots = torch.full((max(b + c for b, c in zip(bases, chunks, strict=True)) + 1, heads), math.nan)
    for n, count in enumerate(chunks):
        slots[bases[n] : bases[n] + count] = bound[n]
    number = plan.num_segments(len(lengths), tokens, seq_len)
    places = torch.full((number * heads, len(FIELDS)), -7, dtype=torch.int32)
    threshold = plan.threshold / math.log(2)
    integers = (len(lengths), seq_len, tokens, heads, ratio, plan.chunks_per_segment, plan.max_warmup)
    kept = [*map(ctypes.c_int32, integers), ctypes.c_float(threshold), ctypes.c_int32(with_state)]
    pointers = [ctypes.c_void_p(x.data_ptr()) for x in (places, slots, cu)]
    pointers += [ctypes.cast(ctypes.pointer(x), ctypes.c_void_p) for x in kept]
    locate((ctypes.c_void_p * len(pointers))(*pointers), number * heads, 1, 1, 32)

    def reach(sums):
        total = 0.0
        for w, x in enumerate(sums[: plan.max_warmup], 1):
            total += x
            if total <= -threshold:
                return w
        return len(sums) if len(sums) <= plan.max_warmup else None

    expected, kinds = {}, set()
    for n, count in enumerate(chunks):
        cuts = segments(count, plan.chunks_per_segment)
        base = packed_segment_base(int(cu[n]), n, plan.chunks_per_segment) if packed else n * len(cuts)
        for h in range(heads):
            warmups = [reach(bound[n][:first, h].flip(0).tolist()) if j else 0 for j, (first, _) in enumerate(cuts)]
            slow = None in warmups
            kinds.add(slow)
            for j, (first, end) in enumerate(cuts):
                start, first, end = (0, 0, count if j == 0 else 0) if slow else (first - warmups[j], first, end)
                if not slow or j == 0:
                    source = ws.FROM_STATE if with_state and start == 0 else 0
                    last = int(end == count)
                    rows = min(lengths[n], end * 64) - start * 64
                    row = int(cu[n]) + start * 64
                    expected[base + j, h] = (n, h, h // ratio, row, rows, end - start, first - start, source, last, -1, bases[n] + start)
    assert kinds == {True, False} or not packed
    for i in range(number):
        for h in range(heads):
            place = dict(zip(FIELDS, places[i * heads + h].tolist(), strict=True))
            found = tuple(place[name] for name in FIELDS[1:])
            if (i, h) in expected:
                assert found == expected[i, h], (i, h)
            else:
                assert (place["CHUNKS"], place["SKIP"], place["SOURCE"], place["ENDS"]) == (0, 0, 0, 0), (i, h)
