"""CPU-only: every variant of fwd_fused lowers for sm_90a and agrees with the tables at the head of its file."""

import re

import pytest

pytest.importorskip("tilelang")
from qla.kernels import fwd_fused as fwd  # noqa: E402
from tests.lowered import by_role, generated  # noqa: E402

Role = fwd.Role


@pytest.fixture(scope="module", params=fwd.CONFIGS, ids=lambda cfg: cfg.name)
def kernel(request):
    return request.param, *generated(fwd, request.param)


def test_threads_registers_and_shared_memory(kernel):
    cfg, smem, code = kernel
    assert smem == cfg.smem_bytes
    assert code.startswith(f"__launch_bounds__({cfg.threads}, 1)")
    assert [int(x) for x in re.findall(r"warpgroup_reg_\w+<(\d+)>", code)] == [cfg.regs[role] for role in Role]


def test_barriers(kernel):
    cfg, _, code = kernel
    state, score, warp = cfg.state_threads, 128, 32
    counts = {name: int(count) for name, count in re.findall(r"(\w+)\[\d\]\.init\((\d+)\)", code)}
    assert counts == {
        "tiles_full": 2 * warp, "tiles_empty": state + score, "p_ring_full": score, "p_ring_empty": state,
        "o_ring_full": state, "o_ring_empty": warp, "tail": warp,
    }  # fmt: skip
    assert code.count("__syncthreads()") == 1, "only after barrier initialisation: between roles it would deadlock"


def test_roles_signal_what_the_table_says(kernel):
    _, _, code = kernel
    part = by_role(code, Role)

    def arrives(role):
        return re.findall(r"(\w+)\[[^;]*\]\.arrive\(\)", part[role])

    last_chunk = ["p_ring_empty", "o_ring_full"]
    assert arrives(Role.STATE) == ["tiles_empty", "p_ring_empty", "o_ring_full", *last_chunk]
    assert arrives(Role.SCORE) == ["p_ring_full", "tiles_empty"]
    assert arrives(Role.IO) == ["tail", "tiles_full", "tiles_full", "o_ring_empty"]


def test_loop_of_the_state_role_holds_no_fence(kernel):
    _, _, code = kernel
    assert "fence_proxy_async" not in by_role(code, Role)[Role.STATE], "what the role stores is fenced by the warp that hands it to TMA"
    assert "fence_proxy_async" in by_role(code, Role)[Role.SCORE]
    assert by_role(code, Role)[Role.IO].count("fence_proxy_async") >= 2


def test_accumulator_fence_covers_what_a_thread_owns(kernel):
    _, _, code = kernel
    sizes = set(re.findall(r"warpgroup_fence_operand\(reinterpret_cast<float\*>\(\w+ \+ 0\), (\d+)\)", code))
    assert sizes == {"32"}, "a wider fence names registers that do not exist"


def test_table_in_docstring():
    rows = dict(re.findall(r"^    (q|k|v|a|p|o) +\[.*?\] +(\d+(?: \| \d+)?)", fwd.__doc__, re.M))
    for column, block_v in enumerate((128, 64)):
        table = fwd.FwdConfig(block_v).smem_table()
        documented = {name: int(text.split(" | ")[min(column, text.count("|"))]) for name, text in rows.items()}
        assert documented == table
    roles_documented = re.findall(r"^    (STATE|SCORE|IO) .*?  +(\d+) \| (\d+) +\w", fwd.__doc__, re.M)
    assert {(name, int(wide), int(narrow)) for name, wide, narrow in roles_documented} == {
        (role.name, fwd.REGS[128][role], fwd.REGS[64][role]) for role in Role
    }


def test_config_rejects_what_it_cannot_do():
    with pytest.raises(ValueError, match="block_v"):
        fwd.FwdConfig(block_v=32)
    with pytest.raises(ValueError, match="shared memory"):
        fwd.FwdConfig(stages=4)


@pytest.mark.parametrize(("items", "block_v"), [(8, 64), (64, 64), (66, 64), (67, 128), (128, 128), (132, 128), (192, 64), (256, 128)])
def test_block_width_fills_the_device(items, block_v):
    assert fwd.choose_block_v(items, num_sms=132) == block_v
