"""CPU-only: cp_plan lowers for sm_90a, and the constants that the device code shares with Python mean the same in both."""

import inspect
import re
from pathlib import Path

import pytest

pytest.importorskip("tilelang")
from qla import costs  # noqa: E402
from qla.kernels import cp_plan as plan  # noqa: E402
from qla.kernels import ws  # noqa: E402
from tests.lowered import generated  # noqa: E402

SHARED = Path(ws.__file__).with_suffix(".cuh").read_text()
OWN = Path(plan.__file__).with_suffix(".cuh").read_text()
SEGMENTS = Path(plan.__file__).with_name("segments.cuh").read_text()
FUSED = Path(plan.__file__).with_name("fwd_fused.cuh").read_text()


@pytest.fixture(scope="module")
def kernel():
    """(bytes of dynamic shared memory, text) of the kernel."""
    return generated(plan, plan.CONFIGS[0])


def parameters(source, function):
    """Names of a device function's parameters, in their order."""
    text = re.search(rf"__forceinline__ int {function}\((.*?)\) \{{", source, re.S)[1]
    return [re.search(r"(\w+)$", parameter.strip())[1] for parameter in text.split(",")]


def constants(source):
    """{name: value} of what `constexpr int` declares."""
    lines = re.findall(r"constexpr int (.*?);", source)
    return {name: int(value) for line in lines for name, value in re.findall(r"(k\w+) = (\d+)(?=,|$)", line)}


def enum(source, name):
    return re.findall(r"k\w+", re.search(rf"enum {name} \{{(.*?)\}}", source)[1])


def test_one_block_of_one_function(kernel):
    smem, code = kernel
    assert code.startswith(f"__launch_bounds__({plan.THREADS}, 1)")
    assert [(cfg.threads, cfg.smem_bytes) for cfg in plan.CONFIGS] == [(plan.THREADS, 0)]
    assert smem == 0 and "__shared__" not in code
    (call,) = re.findall(r"qla_plan::plan\((.*)\);", code)
    arguments = [re.sub(r"\(&\((\w+)\[0\]\)\)", r"\1", argument).lower() for argument in call.split(", ")]
    assert arguments == parameters(OWN, "plan"), "each value goes where its name is"


def test_places_are_located_with_values_in_their_order():
    """Of calls in the kernel files, by the names of what they pass: so many integers in a row are easily confused."""
    names = parameters(SHARED, "qla_locate")
    tables, problem = "place items use reverse cu", "seq_len tokens item part head0 heads value_heads ratio use_state"
    assert " ".join(names) == f"{tables} {problem}"
    folder = Path(ws.__file__).parent
    for file, passed in (
        ("fwd_fused.py", "seq_len, N, item, part, 0, HV, HV, T.truncdiv(HV, H), use_h0"),
        ("cp_prep.py", "seq_len, N, item, 0, head0, heads, HV, T.truncdiv(HV, H), use_h0"),
    ):
        assert f"problem = ({passed})" in (folder / file).read_text()
    own = "num_seqs seq_len tokens number head heads ratio segment_chunks max_warmup threshold use_state lane"
    assert " ".join(parameters(FUSED, "qla_locate_segment")) == f"place bound cu {own}"
    fused = (folder / "fwd_fused.py").read_text()
    assert "problem = (num_seqs, seq_len, N, T.truncdiv(own, HV), T.truncmod(own, HV), HV, T.truncdiv(HV, H))" in fused
    assert "rule = (segment_chunks, max_warmup, threshold, use_h0, tx)" in fused
    merge = (folder / "cp_merge.cuh").read_text()
    assert parameters(merge, "qla_locate_chain")[4:] == ["seq", "seq_len", "tokens", "segment_chunks", "head", "heads"]
    assert "*tables, seq, seq_len, tokens, segment_chunks, head, heads)" in (folder / "cp_merge.py").read_text()


def test_fields_of_a_place_agree():
    in_python = {"kHalf": ws.PART_OF_V} | {f"k{name.title().replace('_', '')}": getattr(ws, name) for name in (
        "ITEM", "SEQ", "VALUE_HEAD", "KEY_HEAD", "ROW", "ROWS", "CHUNKS", "SKIP", "SOURCE", "ENDS", "SLOT",
    )}  # fmt: skip
    fields = enum(SHARED, "QlaPlace")
    assert in_python == {name: i for i, name in enumerate(fields)}
    assert len(fields) == ws.PLACE_FIELDS
    body = SHARED[SHARED.index("int qla_place(") :]
    assert re.findall(r"place\[(k\w+)\] = ", body) == fields, "all of them are written"


def test_flags_of_an_item_agree():
    assert constants(SHARED) == {
        "kFromState": ws.FROM_STATE, "kFromSegment": ws.FROM_SEGMENT, "kIdentity": ws.IDENTITY, "kPrepFromState": ws.PREP_FROM_STATE,
        "kWithTransition": ws.WITH_TRANSITION, "kSplit": ws.SPLIT, "kSeqShift": ws.SEQ_SHIFT,
    }  # fmt: skip
    flags = (ws.FROM_STATE, ws.FROM_SEGMENT, ws.PREP_FROM_STATE, ws.WITH_TRANSITION, ws.SPLIT)
    assert all(flag & (flag - 1) == 0 for flag in flags) and len(set(flags)) == len(flags)
    assert sum(flags) < 1 << ws.SEQ_SHIFT, "the sequence's number stands above the flags"
    assert len({ws.FROM_STATE, ws.FROM_SEGMENT, ws.IDENTITY, 0}) == 4, "sources of a state"


def test_uses_of_items_agree():
    uses = [ws.NO_ITEMS, ws.OWN_ITEMS, ws.PREP_STATE, ws.PREP_TRANSITION, ws.OWN_SEGMENTS]
    assert enum(SHARED, "QlaUse") == ["kNoItems", "kOwnItems", "kPrepState", "kPrepTransition", "kOwnSegments"] and uses == list(range(5))
    assert ws.PREP_TRANSITION == ws.PREP_STATE + 1, "the grid's second kind"


def test_ways_agree():
    found = constants(OWN)
    assert [found[name] for name in ("kWarmup", "kTransition", "kSerial")] == [plan.WARMUP, plan.TRANSITION, plan.SERIAL]
    assert found["kSlow"] & found["kGrowing"] == 0
    assert "ways[i] = whole ? kSerial : marks == 0 ? kWarmup : " in OWN


def test_numbers_in_the_docstring():
    growth = float(re.search(r"constexpr float kGrowth = ([\d.]+)f", OWN)[1])
    pieces = constants(OWN)["kPieces"]
    assert growth / pieces == 1 and pieces == 8
    assert re.search(r"multiply to more than 2 within an eighth of a segment", " ".join(plan.__doc__.split()))
    flags = re.findall(r"^ +(?:flags +)?(\d+) +(?:starts|\.\.|two)", plan.__doc__, re.M)
    assert [int(flag) for flag in flags] == [ws.FROM_STATE, ws.FROM_SEGMENT, ws.PREP_FROM_STATE, ws.WITH_TRANSITION, ws.SPLIT]
    assert f"flags | sequence << {ws.SEQ_SHIFT}" in plan.__doc__
    assert f"one block of {plan.THREADS} threads" in plan.__doc__ and costs.PLAN_THREADS == plan.THREADS
    assert constants(OWN)["kAtOnce"] == costs.PLAN_LOADS and constants(FUSED)["kBoundsAtOnce"] == costs.OWN_LOADS


def test_shared_memory_and_barriers_in_docstring():
    arrays = re.findall(r"(\w+)\[(\d+)\]", re.search(r"__shared__ int (.*);", OWN)[1])
    rows = re.findall(r"^    (\w+) \[(\d+)\] +(\d+) \(static\)", plan.__doc__, re.M)
    assert [(name, length) for name, length, _ in rows] == arrays
    assert all(int(size) == 4 * int(length) for _, length, size in rows)
    steps = re.findall(r"^    (\d)   \w", plan.__doc__[plan.__doc__.index("\nSchedule") :], re.M)
    assert [int(step) for step in steps] == list(range(1, OWN.count("__syncthreads()") + 2))


def test_numbers_of_segments_are_those_of_the_host():
    """One formula at three places: here the two of device code as text, in tests/test_autocp_cpu.py that of the host by its values."""
    assert "return ((offset(p, n) >> 6) + n) / p.segment_chunks + n;" in SEGMENTS
    merge = (Path(ws.__file__).parent / "cp_merge.cuh").read_text()
    assert "seq_len > 0 ? seq * count : ((begin >> 6) + seq) / segment_chunks + seq;" in merge
    assert "(first_token // CHUNK + seq) // chunks_per_segment + seq" in inspect.getsource(costs.packed_segment_base)
    assert "(int)((long long)j * chunks / count)" in SEGMENTS and "j * chunks // count" in inspect.getsource(costs.segments)
