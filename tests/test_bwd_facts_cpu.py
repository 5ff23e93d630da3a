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
    _, _, code = kernel
    part = by_role(code, Role)
    for role, own in ((Role.LEFT, 2), (Role.RIGHT, 3)):
        assert part[role].count("__sync_thread_partial(1, 256)") == 5, "four times a head, once a unit"
        assert part[role].count(f"__sync_thread_partial({own}, 128)") == 2
    assert "__sync_thread_partial" not in part[Role.IO]


def test_products_of_a_head(kernel):
    """64x64x16 products by role; more of them is time that no schedule gives back."""
    _, _, code = kernel
    part = by_role(code, Role)
    loops = {role: len(re.findall(r"wgmma_(?:ss|rs)<", part[role])) for role in Role}
    assert loops == {Role.LEFT: 15, Role.RIGHT: 14, Role.IO: 0}


def test_accumulator_fence_covers_what_a_thread_owns(kernel):
    _, _, code = kernel
    sizes = set(re.findall(r"warpgroup_fence_operand\(reinterpret_cast<float\*>\(\w+ \+ 0\), (\d+)\)", code))
    assert sizes == {"32"}, "a wider fence names registers that do not exist"


def test_table_in_docstring():
    cfg = bwd.CONFIGS[0]
    documented = {name: int(size) for name, size in re.findall(r"^    (\w+) +\[[\d, ]+\] +(\d+)(?: |$)", bwd.__doc__, re.M)}
    assert documented == cfg.smem_table()
    roles_documented = re.findall(r"^    (LEFT|RIGHT|IO) +[\d-]+ +(\d+) ", bwd.__doc__, re.M)
    assert {(name, int(registers)) for name, registers in roles_documented} == {(role.name, bwd.REGS[role]) for role in Role}


def test_config_rejects_what_it_cannot_do():
    with pytest.raises(ValueError, match="dtype must be bfloat16 or float16, got float32"):
        bwd.BwdConfig("float32")
