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


def test_barriers(kernel):
    _, _, code = kernel
    both, warp = 256, 32
    named = {
        name: int(count) for name, count in re.findall(r"(keys_\w+|states_\w+|tiles_\w+|sums_\w+|out_\w+|tail)\[\d\]\.init\((\d+)\)", code)
    }
    assert named == {
        "keys_full": warp, "keys_empty": both, "states_full": warp, "states_empty": both, "tiles_full": 2 * warp,
        "tiles_empty": both + 2 * warp, "sums_full": both, "sums_empty": warp, "out_full": both, "out_empty": warp, "tail": warp,
    }  # fmt: skip
    assert len(re.findall(r"\.init\(256\)", code)) == 6, "four of rings and the two of dv_ready"
    assert code.count("__syncthreads()") == 1, "only after barrier initialisation: between roles it would deadlock"


def test_the_two_warpgroups_meet_as_often(kernel):
    cfg, _, code = kernel
    part = by_role(code, Role)
    for role, own, columns in ((Role.LEFT, 2, True), (Role.RIGHT, 3, cfg.head_v == 128)):
        assert part[role].count("__sync_thread_partial(1, 256)") == 5, "four times a head, once a unit"
        assert part[role].count(f"__sync_thread_partial({own}, 128)") == 2 * columns
    assert "__sync_thread_partial" not in part[Role.IO]


def test_the_two_warpgroups_signal_the_same(kernel):
    """Whether RIGHT has columns of V and K or not: else a count of 256 would never be reached, or a phase passed over."""
    _, _, code = kernel
    left, right = (re.findall(r"(\w+)\[[^;\[]*\]\.arrive\(\)", by_role(code, Role)[role]) for role in (Role.LEFT, Role.RIGHT))
    (p_ready,) = set(left) - set(right)
    assert [name for name in left if name != p_ready] == right
    dv_ready = right[0]
    assert right == [dv_ready, "states_empty", "sums_full", "tiles_empty", "keys_empty", "out_full"]
    assert re.findall(rf"({p_ready}|{dv_ready})\[(\d)\]\.init\((\d+)\)", code) == [
        (p_ready, "0", "128"), (dv_ready, "0", "256"), (dv_ready, "1", "256"),
    ]  # fmt: skip
    for role in (Role.LEFT, Role.RIGHT):
        waits = re.findall(r"(\w+)\[[^;\[]*\]\.wait\(", by_role(code, Role)[role])
        assert {"keys_full", "states_full", "tiles_full", "sums_empty", "out_empty"} <= set(waits), (
            "before it reads or writes what they guard"
        )


def test_products_of_a_head(kernel):
    """64x64x16 products by role; more of them is time that no schedule gives back."""
    cfg, _, code = kernel
    part = by_role(code, Role)
    loops = {role: len(re.findall(r"wgmma_(?:ss|rs)<", part[role])) for role in Role}
    # by the columns of V, by those of K, the pairs' two; LEFT makes a unit's first P
    assert loops == {Role.LEFT: 5 + 7 + 2 + 1, Role.RIGHT: 5 * (cfg.head_v == 128) + 7 * (cfg.head_k == 128) + 2, Role.IO: 0}


def test_results_are_waited_for(kernel):
    _, _, code = kernel
    for role in (Role.LEFT, Role.RIGHT):
        text = by_role(code, Role)[role]
        loop = re.search(r"^( *)for \(int (\w+) = 0; \2 < ratio; \+\+\2\) \{\n(.*?)^\1\}$", text, re.M | re.S)
        assert_products_are_waited_for(text[: loop.start()], loop[3], loop[3], text[loop.end() :])


def test_accumulator_fence_covers_what_a_thread_owns(kernel):
    _, _, code = kernel
    sizes = set(re.findall(r"warpgroup_fence_operand\(reinterpret_cast<float\*>\(\w+ \+ 0\), (\d+)\)", code))
    assert sizes == {"32"}, "a wider fence names registers that do not exist"


def test_table_in_docstring():
    rows = re.findall(r"^    (\w+) +\[([\dVK, ]+)\] +(\d+)(?: |$)", bwd.__doc__, re.M)
    assert {name: int(size) for name, _, size in rows} == bwd.BwdConfig().smem_table()
    for cfg in bwd.CONFIGS:
        extents = {"V": cfg.head_v, "K": cfg.head_k}
        shapes = {name: [extents.get(n) or int(n) for n in shape.split(", ")] for name, shape, _ in rows}
        assert {name: 2 * prod(shape) for name, shape in shapes.items()} == cfg.smem_table()
    roles_documented = re.findall(r"^    (LEFT|RIGHT|IO) +[\d-]+ +(\d+) ", bwd.__doc__, re.M)
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
    stages = {"v": 2, "do": 2, "a": 2}
    for names, barrier in ((("v", "do", "a"), "tiles_full"), (("q", "k"), "keys_full"), (("s", "ds"), "states_full")):
        sizes = sorted(table[name] // stages.get(name, 1) for name in names)
        assert sorted(map(int, re.findall(rf"{barrier}\[[^;]*\]\.expect_transaction\((\d+)\)", load))) == sizes
    cleaned = [int(tiles) for tiles in re.findall(r"qla_zero_rows\(qla_tile\([^;]*?\]\)\), 0\), (\d), rows,", load)]
    assert sorted(cleaned) == sorted(table[name] // stages.get(name, 1) // 8192 for name in ("v", "do", "a", "q", "k"))
    stored = [int(tiles) for tiles in re.findall(r"qla_store_rows\(.*?qla_tile\(.*?, 0\), (\d), ", load)]
    assert sorted(stored) == sorted([cfg.head_v // 64, cfg.head_k // 64, cfg.head_k // 64])
