"""CPU-only: every variant of bwd_fused lowers for sm_90a and agrees with the tables at the head of its file."""

import re
from math import prod

import pytest

pytest.importorskip("tilelang")
from qla.kernels import bwd_fused as bwd  # noqa: E402
from qla.kernels.ws import launch_registers  # noqa: E402
from tests.lowered import assert_products_are_waited_for, by_role, generated  # noqa: E402

Role = bwd.Role


@pytest.fixture(scope="module", params=bwd.CONFIGS, ids=lambda cfg: cfg.name)
def kernel(request):
    return request.param, *generated(bwd, request.param)


def test_threads_registers_and_shared_memory(kernel):
    cfg, smem, code = kernel
    assert smem == cfg.smem_bytes
    assert code.startswith(f"__launch_bounds__({cfg.threads}, 1)")
    assert [int(x) for x in re.findall(r"warpgroup_reg_\w+<(\d+)>", code)] == [bwd.REGS[role] for role in Role]
    assert sum(bwd.REGS.values()) * 128 <= launch_registers(cfg.threads)


RINGS = {  # consumers, and whether gates' warp or the tiles' warp fills them
    "keys": 32, "gates": 416, "vd": 256, "dw": 384, "do": 128, "ds": 256, "s": 384, "pairs": 128, "sums": 32,
}  # fmt: skip
PRODUCERS = dict.fromkeys(RINGS, 32) | {"pairs": 128, "sums": 384}
DEPTHS = dict.fromkeys(RINGS, 1) | {"keys": 2, "gates": 4, "vd": 2, "sums": 2}


def test_barriers(kernel):
    _, _, code = kernel
    inits = re.findall(r"(\w+)\[\d\]\.init\((\d+)\)", code)
    for name, consumers in RINGS.items():
        full, empty = (sorted(int(count) for found, count in inits if found == f"{name}_{side}") for side in ("full", "empty"))
        assert full == [PRODUCERS[name]] * DEPTHS[name], name
        assert empty == [consumers] * DEPTHS[name], name
    others = [(name, int(count)) for name, count in inits if name.rpartition("_")[0] not in RINGS]
    assert sorted(count for _, count in others) == [32, 256, 256, 256, 256], "tail, q_read, k_read, out_ready"
    assert code.count("__syncthreads()") == 1, "only after barrier initialisation: between roles it would deadlock"
    assert "__sync_thread_partial" not in code


def signals(part, kind):
    """How often a role's code arrives at (or waits for) each barrier of a ring."""
    found = re.findall(rf"(\w+)\[[^;]*?\]\.{kind}\(", part)
    return {name: found.count(name) for name in found if name.rpartition("_")[0] in RINGS}


def test_roles_signal_what_the_table_says(kernel):
    _, _, code = kernel
    part = by_role(code, Role)
    assert signals(part[Role.QUERIES], "arrive") == dict.fromkeys(
        ("gates_empty", "vd_empty", "dw_empty", "do_empty", "s_empty", "pairs_full", "sums_full"), 1
    )
    assert signals(part[Role.KEYS], "arrive") == dict.fromkeys(
        ("gates_empty", "vd_empty", "dw_empty", "ds_empty", "s_empty", "pairs_empty", "sums_full"), 1
    )
    assert signals(part[Role.VALUES], "arrive") == dict.fromkeys(("gates_empty", "dw_empty", "ds_empty", "s_empty", "sums_full"), 1)
    io = signals(part[Role.IO], "arrive")
    filled = {f"{name}_full" for name in ("keys", "gates", "vd", "dw", "do", "ds", "s")}
    assert set(io) == filled | {"keys_empty", "gates_empty", "sums_empty"}
    assert io.pop("keys_full") == 2, "once a unit, and once to say that there is none"
    assert set(io.values()) == {1}


def test_products_of_a_head(kernel):
    """64x64x16 products by role; more of them is time that no schedule gives back."""
    cfg, _, code = kernel
    part = by_role(code, Role)
    groups = {role: re.findall(r"for \(int ki\w* = 0; ki\w* < (\d+); \+\+ki\w*\) \{\s*tl::wgmma_(?:ss|rs)<", part[role]) for role in Role}
    k, v = cfg.k_halves, cfg.v_halves
    assert {role: sum(map(int, steps)) // 4 for role, steps in groups.items()} == {
        Role.QUERIES: 2 * v + 2 * k + k + k * v,  # dW Vd^T and dP; K K^T and Q K^T; E K; dO S^T
        Role.KEYS: k * v + k * v + 3 * k,  # Vd dS^T; dW S^T; E^T Q, F K and F^T K
        Role.VALUES: 0,
        Role.IO: 0,
    }


def test_results_are_waited_for(kernel):
    _, _, code = kernel
    for role in (Role.QUERIES, Role.KEYS):
        text = by_role(code, Role)[role]
        loop = re.search(r"^( *)for \(int (\w+) = 0; \2 < ratio; \+\+\2\) \{\n(.*?)^\1\}$", text, re.M | re.S)
        assert_products_are_waited_for(text[: loop.start()], loop[3], loop[3], text[loop.end() :])


def test_waits_leave_in_flight_what_is_not_read_yet(kernel):
    """Products in flight behind each wait: an earlier one's of the second half of K; with K = 64 there are none, and all are done."""
    cfg, _, code = kernel
    part = by_role(code, Role)
    second = cfg.v_halves if cfg.k_halves == 2 else 0
    rest = [0] * (cfg.k_halves - 1)
    waits = {role: [int(n) for n in re.findall(r"wait_wgmma<(\d)>", part[role])] for role in Role}
    assert waits == {
        Role.QUERIES: [0, 0, second, *rest],
        Role.KEYS: [cfg.k_halves - 1, *rest, second, *rest, cfg.k_halves, 0],
        Role.VALUES: [],
        Role.IO: [],
    }


def test_tiles_in_registers_are_released_when_products_have_them(kernel):
    """An arrival does not wait for ldmatrix, and TMA overwrites a tile as soon as all have arrived."""
    cfg, _, code = kernel
    part = by_role(code, Role)
    for role, rings in ((Role.QUERIES, ("dw", "do")), (Role.KEYS, ("dw", "pairs"))):
        for ring in rings:
            (release,) = [found.start() for found in re.finditer(rf"{ring}_empty\[[^;{{}}]*\]\.arrive\(\)", part[role])]
            loaded = max(part[role].rfind(f"qla_load_{way}(", 0, release) for way in ("plain", "transposed"))
            products = cfg.k_halves if ring == "pairs" else cfg.v_halves
            assert len(re.findall(r"wgmma_rs<", part[role][loaded:release])) == products, (role, ring)


def test_accumulator_fence_covers_what_a_thread_owns(kernel):
    _, _, code = kernel
    sizes = set(re.findall(r"warpgroup_fence_operand\(reinterpret_cast<float\*>\(\w+ \+ 0\), (\d+)\)", code))
    assert sizes == {"32"}, "a wider fence names registers that do not exist"


def test_table_in_docstring():
    rows = re.findall(r"^    (\w+) +\[([\dVK, ]+)\] +([\dVK ]*[\dVK])(?:  |$)", bwd.__doc__, re.M)
    for cfg in bwd.CONFIGS:
        extents = {"V": cfg.head_v, "K": cfg.head_k}
        shapes = {name: [extents.get(n) or int(n) for n in shape.split(", ")] for name, shape, _ in rows}
        assert {name: 2 * prod(shape) for name, shape in shapes.items()} == cfg.smem_table()
        assert {name: prod(extents.get(n) or int(n) for n in size.split()) for name, _, size in rows} == cfg.smem_table()
    roles_documented = re.findall(r"^    (QUERIES|KEYS|VALUES|IO) +[\d-]+ +(\d+) ", bwd.__doc__, re.M)
    assert {(name, int(registers)) for name, registers in roles_documented} == {(role.name, bwd.REGS[role]) for role in Role}


def test_config_rejects_what_it_cannot_do():
    with pytest.raises(ValueError, match="dtype must be bfloat16 or float16, got float32"):
        bwd.BwdConfig("float32")
    with pytest.raises(ValueError, match=r"head_k must be one of \(64, 128\), got 96"):
        bwd.BwdConfig(head_k=96)
    with pytest.raises(ValueError, match=r"head_v must be one of \(64, 128\), got 32"):
        bwd.BwdConfig(head_v=32)


def test_tiles_are_announced_and_cleaned(kernel):
    cfg, _, code = kernel
    load, table = by_role(code, Role)[Role.IO], cfg.smem_table()
    stages = {"q": 2, "k": 2, "vd": 2}
    for names, ring in ((("q", "k"), "keys"), (("vd",), "vd"), (("dw",), "dw"), (("do",), "do"), (("ds",), "ds"), (("s",), "s")):
        sizes = sorted(table[name] // stages.get(name, 1) for name in names)
        assert sorted(map(int, re.findall(rf"\b{ring}_full\[[^;]*\]\.expect_transaction\((\d+)\)", load))) == sizes, ring
    cleaned = [int(tiles) for tiles in re.findall(r"qla_zero_rows\(tiles\w*, (\d), rows,", load)]
    assert sorted(cleaned) == sorted(table[name] // stages.get(name, 1) // 8192 for name in ("q", "k", "vd", "dw", "do"))
    stored = [int(tiles) for tiles in re.findall(r"qla_store_rows\(.*?qla_tile\(.*?, 0\), (\d), ", load)]
    assert stored == [cfg.k_halves, cfg.k_halves]


def test_values_are_as_wide_as_v(kernel):
    cfg, _, code = kernel
    values = by_role(code, Role)[Role.VALUES]
    half = str(cfg.is_half).lower()
    assert values.count(f"load_values<{cfg.head_v}>(") == values.count(f"finish_values<{cfg.head_v}, {half}>(") == 1
    assert values.count(f"dot_states<{cfg.head_k * cfg.head_v}, {half}>(") == 1
