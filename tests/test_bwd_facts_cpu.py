"""CPU-only: both variants of bwd_fused lower for sm_90a and agree with the tables at the head of its file."""

import re

import pytest

pytest.importorskip("tilelang")
from qla.kernels import bwd_fused as bwd  # noqa: E402
from qla.kernels.ws import launch_registers  # noqa: E402
from tests.lowered import by_role, generated  # noqa: E402

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
    """Groups of four 64x64x16 products by role; more of them is time that no schedule gives back."""
    _, _, code = kernel
    part = by_role(code, Role)
    text = {role: re.findall(r"for \(int ki\w* = 0; ki\w* < (\d+); \+\+ki\w*\) \{\s*tl::wgmma_(?:ss|rs)<", part[role]) for role in Role}
    assert {role: sum(map(int, steps)) for role, steps in text.items()} == {Role.QUERIES: 56, Role.KEYS: 56, Role.VALUES: 0, Role.IO: 0}


def test_tiles_in_registers_are_released_when_products_have_them(kernel):
    """An arrival does not wait for ldmatrix, and TMA overwrites a tile as soon as all have arrived."""
    _, _, code = kernel
    part = by_role(code, Role)
    for role, rings in ((Role.QUERIES, ("dw", "do")), (Role.KEYS, ("dw", "pairs"))):
        for ring in rings:
            (release,) = [found.start() for found in re.finditer(rf"{ring}_empty\[[^;{{}}]*\]\.arrive\(\)", part[role])]
            loaded = max(part[role].rfind(f"qla_load_{way}(", 0, release) for way in ("plain", "transposed"))
            assert len(re.findall(r"wgmma_rs<", part[role][loaded:release])) == 2, (role, ring)


def test_accumulator_fence_covers_what_a_thread_owns(kernel):
    _, _, code = kernel
    sizes = set(re.findall(r"warpgroup_fence_operand\(reinterpret_cast<float\*>\(\w+ \+ 0\), (\d+)\)", code))
    assert sizes == {"32"}, "a wider fence names registers that do not exist"


def test_table_in_docstring():
    cfg = bwd.CONFIGS[0]
    documented = {name: int(size) for name, size in re.findall(r"^    (\w+) +\[[\d, ]+\] +(\d+)(?: |$)", bwd.__doc__, re.M)}
    assert documented == cfg.smem_table()
    roles_documented = re.findall(r"^    (QUERIES|KEYS|VALUES|IO) +[\d-]+ +(\d+) ", bwd.__doc__, re.M)
    assert {(name, int(registers)) for name, registers in roles_documented} == {(role.name, bwd.REGS[role]) for role in Role}


def test_config_rejects_what_it_cannot_do():
    with pytest.raises(ValueError, match="dtype must be bfloat16 or float16, got float32"):
        bwd.BwdConfig("float32")
