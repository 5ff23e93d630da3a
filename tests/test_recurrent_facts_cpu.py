"""CPU-only: every variant of the recurrent kernel lowers for sm_90a and agrees with the text at the head of its file."""

import re
from itertools import product
from pathlib import Path
from types import SimpleNamespace

import pytest

pytest.importorskip("tilelang")
from qla import aot  # noqa: E402
from qla.kernels import launch, recurrent  # noqa: E402
from qla.kernels.ws import REGS_PER_SM  # noqa: E402
from tests.lowered import generated  # noqa: E402


@pytest.fixture(scope="module", params=recurrent.CONFIGS, ids=lambda cfg: cfg.name)
def kernel(request):
    return request.param, *generated(recurrent, request.param)


def test_launch_shape(kernel):
    cfg, smem, code = kernel
    assert code.startswith(f"__launch_bounds__({cfg.threads}, {cfg.blocks_per_sm})")
    assert smem == cfg.smem_bytes == 0 and "__shared__" not in code
    assert "__syncthreads" not in code and "__syncwarp" not in code, "warps do not wait for each other"
    assert cfg.blocks_per_sm * cfg.threads * recurrent.REGS[cfg.dtype] <= REGS_PER_SM
    assert cfg.blocks_per_sm * cfg.warps == (8 if cfg.dtype == "float32" else 12)


def test_accesses_are_wide(kernel):
    """States 16 bytes at a time, four elements of q and k; all of them in unrolled loops."""
    cfg, _, code = kernel
    quad = {"bfloat16": "uint2", "float16": "uint2", "float32": "float4"}[cfg.dtype]
    assert len(re.findall(r"\*\(float4\*\)\(\w+ \+ .*?\) = \*\(float4\*\)\(H0 \+ ", code)) == 1
    assert code.count("store_quad((&(HT[0])), ") == 1 and " HT[" not in code and "H0[" not in code
    for name in ("Q", "K"):
        assert len(re.findall(rf"\*\({quad}\*\)\(\w+ \+ .*?\) = \*\({quad}\*\)\({name} \+ ", code)) == 2, "of the first token, of the next"
        assert not re.search(rf"\b{name}\[", code)
    loops = re.findall(r"(#pragma unroll\s+)?for \(int (\w+) = 0; (.*?);", code)
    rolled = [limit for unrolled, _, limit in loops if not unrolled]
    assert len(rolled) == 2, "tokens, and rows that no sequence owns"


def test_state_is_asked_for_before_anything_else(kernel):
    """Nothing that waits for memory stands before the state's loads."""
    _, _, code = kernel
    before = code[: code.index("*(float4*)(H0 + ")]
    assert not re.search(r"qla_recurrent::(?!anew)|= \*\(", before.rpartition("\n")[0])


@pytest.mark.parametrize("v_first", [False, True])
def test_lanes_share_a_state_without_overlap(v_first):
    """Every element of a warp's 128 x 16 part belongs to one register of one lane; a load takes neighbours; both layouts the same rows."""
    cfg = recurrent.RecurrentConfig(state_v_first=v_first)
    owners, rows = {}, {}
    for lane, i, e, r in product(range(32), range(4), range(4), range(4)):
        a, b = lane // 8, lane % 8
        element = (32 * i + 4 * b + e, cfg.column(a, r))
        assert element not in owners
        owners[element] = (lane, cfg.element(i, e, r))
        rows.setdefault(b, []).append(element[0])
    assert len(owners) == 128 * 16 and len({place for place in owners.values()}) == 128 * 16
    assert all(sorted(set(of_lane)) == [32 * i + 4 * b + e for i in range(4) for e in range(4)] for b, of_lane in rows.items())
    for lane, i, j in product(range(32), range(4), range(4)):
        # the quad that a load brings into registers 4 n .. 4 n + 3, as elements of the state, starting where state_quad says
        z = SimpleNamespace(state=0, v0=0, a=lane // 8, b=lane % 8, k_quads=32, v_quads=32)
        first = 32 * i + 4 * z.b + (0 if v_first else j), cfg.column(z.a, j if v_first else 0)
        begin = first[1] * 128 + first[0] if v_first else first[0] * 128 + first[1]
        assert begin % 4 == 0
        for x in range(4):
            element = (first[0] + x, first[1]) if v_first else (first[0], first[1] + x)
            assert owners[element] == (lane, (i * 4 + j) * 4 + x)


def test_kinds_agree_with_device_code():
    source = Path(recurrent.__file__).with_suffix(".cuh").read_text()
    names = re.search(r"enum Kind \{ (.*?) \}", source)[1].split(", ")
    assert names == [f"k{str(dtype).removeprefix('torch.').title()}" for dtype in launch.KINDS]
    assert list(launch.KINDS.values()) == [0, 1, 2]


def test_docstring():
    text = recurrent.__doc__
    assert f"A warp owns {recurrent.COLUMNS} columns of V" in text
    assert "two warps a block" in text and recurrent.WARPS == 2 and f"{recurrent.WARPS * recurrent.COLUMNS} columns of V" in text
    assert "Shared memory, barriers    none" in text


def test_config_rejects_what_it_cannot_do():
    with pytest.raises(ValueError, match="dtype must be bfloat16, float16 or float32, got float64"):
        recurrent.RecurrentConfig("float64")
    with pytest.raises(ValueError, match="warps must be 1, 2, 4 or 8, got 3"):
        recurrent.RecurrentConfig(warps=3)


def test_variants_are_distinct():
    assert len({cfg.name for cfg in recurrent.CONFIGS}) == len(recurrent.CONFIGS) == 6


@pytest.mark.skipif(aot.find_tool("nvcc") is None, reason="needs nvcc")
@pytest.mark.parametrize(
    "cfg", [recurrent.RecurrentConfig("bfloat16", True), recurrent.RecurrentConfig("float32")], ids=lambda cfg: cfg.name
)
def test_registers(cfg, tmp_path):
    """What the tightest variants compile to: no spills, and wide loads and stores all the way down."""
    _, code = generated(recurrent, cfg, whole=True)
    resources, _ = aot.inspect_source(code, recurrent.PASS_CONFIGS, {}, tmp_path, cfg.name)
    assert resources.registers <= recurrent.REGS[cfg.dtype]
    assert resources.spills == 0 and resources.stack == 0
    sass = tmp_path / f"{cfg.name}.sass"
    if sass.exists():
        text = sass.read_text()
        assert len(re.findall(r"\bSTG\.E\.128\b", text)) == 16
        assert len(re.findall(r"\bLDG\.E\.128\b", text)) == 16 + (16 if cfg.dtype == "float32" else 0)
