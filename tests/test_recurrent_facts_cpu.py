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
    assert cfg.blocks_per_sm * cfg.warps == (16 if cfg.dtype == "float32" else 20)


def test_accesses_are_wide(kernel):
    """States 16 bytes at a time, four elements of q and k; all of them in unrolled loops."""
    cfg, _, code = kernel
    assert code.count("::load_state(") == code.count("::store_state(") == 1
    quads = f"::load_quad<{4 if cfg.dtype == 'float32' else 2}>("
    assert code.count(quads) == code.count("::load_quad") == 4, "of q and k, of the first token, of the next"
    assert code.count("::load_one(") == 2 and code.count("::store_one(") == 2, "of v; of o, of a token and of a row that no sequence owns"
    assert not re.search(r"\b(?:Q|K|V|O|H0|HT)\[(?!0\]\))", code), "addresses of the first elements and nothing else"
    loops = re.findall(r"(#pragma unroll\s+)?for \(int ", code)
    assert all(loops) and len(re.findall(r"\bwhile \(", code)) == 2, "tokens, and rows that no sequence owns"


def test_state_is_asked_for_before_anything_else(kernel):
    """Nothing that waits for memory stands before the state's loads, and no division anywhere."""
    _, _, code = kernel
    before = code[: code.index("::load_state(")]
    called = set(re.findall(r"qla_recurrent::(\w+)", before.rpartition("\n")[0]))
    assert called == {"index", "once", "quad_at", "number_at", "array_of_lane", "log_bytes"}
    assert not re.search(r" [/%] ", re.sub(r"/\*.*?\*/", "", code))


@pytest.mark.parametrize("warps", [1, 4])
@pytest.mark.parametrize("v_first", [False, True])
def test_lanes_share_a_state_without_overlap(v_first, warps):
    """Every element of a block's columns belongs to one register of one thread; a load takes neighbours; both layouts the same rows."""
    cfg = recurrent.RecurrentConfig(state_v_first=v_first, warps=warps)
    owners = {}
    for thread, n, r in product(range(cfg.threads), range(8), range(4)):
        b, c = thread % 16, thread // 16
        element = (64 * (n // 4) + 4 * b + n % 4, 4 * c + r)
        assert element not in owners
        owners[element] = (thread, cfg.element(n, r))
    assert len(owners) == len(set(owners.values())) == 128 * cfg.columns
    for thread, i, j in product(range(cfg.threads), range(2), range(4)):
        # the quad that a load brings into registers 4 n .. 4 n + 3, as elements of the state
        z = SimpleNamespace(b=thread % 16, c=thread // 16, k_quads=32, v_quads=32)
        begin = 4 * (recurrent.first_quad(cfg, z.b, z.c, 32, 32) + recurrent.quads_further(cfg, z, i, j))
        for x in range(4):
            element = ((begin + x) % 128, (begin + x) // 128) if v_first else ((begin + x) // 128, (begin + x) % 128)
            assert owners[element] == (thread, (i * 4 + j) * 4 + x)


def test_key_heads():
    """The launcher's share, and the product in the kernel, give the key head of every head."""
    for key_heads, ratio in product((1, 2, 3, 7, 16, 100), (1, 2, 3, 4, 5, 7, 12, 100)):
        share = launch.key_share(key_heads, key_heads * ratio)
        assert 0 < share < 2**31
        assert all(((4 * head + 2) * share) >> 32 == head // ratio for head in range(key_heads * ratio))


def test_kinds_agree_with_device_code():
    source = Path(recurrent.__file__).with_suffix(".cuh").read_text()
    names = re.search(r"enum Kind \{ (.*?) \}", source)[1].split(", ")
    assert names == [f"k{str(dtype).removeprefix('torch.').title()}" for dtype in launch.KINDS]
    assert list(launch.KINDS.values()) == [0, 1, 2]
    lanes = re.search(r"b == (\d) \? g : b == (\d) \? a_log : b == (\d) \? dt_bias.*b >= (\d) && b < (\d) ", source, re.S)
    assert [int(n) for n in lanes.groups()] == [launch.G, launch.A_LOG, launch.DT_BIAS, launch.BETA, launch.BETA + 4]


def test_docstring():
    text = recurrent.__doc__
    assert "Sixteen lanes own four columns of V" in text and recurrent.ROW_LANES == 16 and "sums over 16 lanes" in text
    assert "four warps a block" in text and recurrent.WARPS == 4 and f"({recurrent.RecurrentConfig().columns} columns of V" in text
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
        assert len(re.findall(r"\bSTG?\.E\.128\b", text)) == 8
        assert len(re.findall(r"\bLDG\.E\.(?:64|128)\.CONSTANT\b", text)) >= 16, "the state; q and k, of the first token, of the next"
