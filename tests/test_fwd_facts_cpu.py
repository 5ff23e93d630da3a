"""CPU-only: every variant of fwd_fused lowers for sm_90a and agrees with the tables at the head of its file."""

import re
from math import prod

import pytest

pytest.importorskip("tilelang")
from qla.kernels import fwd_fused as fwd  # noqa: E402
from qla.kernels.launch import choose_block_v  # noqa: E402
from qla.kernels.ws import CHUNKS, HEAD_DIMS, PART_OF_V, PLACE_FIELDS, SKIP  # noqa: E402
from tests.lowered import (  # noqa: E402
    assert_lanes_hold_pairs_of_gates,
    assert_products_are_waited_for,
    by_role,
    generated,
    place_of,
    static,
)

Role = fwd.Role
PRODUCTS = r"wgmma_(?:ss|rs)<"


@pytest.fixture(scope="module", params=fwd.CONFIGS, ids=lambda cfg: cfg.name)
def kernel(request):
    return request.param, *generated(fwd, request.param)


def arrives(part):
    """Barriers that are arrived at, in the text's order, by a thread for itself or for others too."""
    return [own or counted for own, counted in re.findall(r"(\w+)\[[^;]*\]\.arrive\(\)|qla_arrive\((\w+)\[", part)]


def waits(part):
    return re.findall(r"(\w+)\[[^;\[]*\]\.wait\(", part) + re.findall(r"(\w+)\[", " ".join(re.findall(r"qla_wait_all\((.*)\);", part)))


def agents(code):
    """Text of each role, and of each warp of IO."""
    part = {role.name: text for role, text in by_role(code, Role).items()}
    _, *warps = re.split(r"if \(\(\(int\)threadIdx\.x\) < \d+\) \{", part["IO"])
    assert len(warps) == 3
    return {name: part[name] for name in ("STATE", "SCORE")} | {f"IO {i}": warp for i, warp in enumerate(warps)}


def state_loop(code):
    """What the state role does before, in and after its loop over chunks."""
    loop = r"^( *)for \(int \w+ = 0; \w+ < \(num_chunks - 1\); \+\+\w+\) \{\n(.*?)^\1\}$"
    before, _, body, after = re.split(loop, by_role(code, Role)[Role.STATE], maxsplit=1, flags=re.M | re.S)
    return before, body, after


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
    assert code.count("__syncthreads()") == 2, "after barrier initialisation and after the place: between roles it would deadlock"
    before, roles = code[: code.index("warpgroup_reg_")], code[code.index("warpgroup_reg_") :]
    assert "__syncthreads()" not in roles
    assert before.rindex(".init(") < before.index("__syncthreads()") < before.index("qla_locate(") < before.rindex("__syncthreads()")


def test_roles_signal_what_the_table_says(kernel):
    cfg, _, code = kernel
    part = by_role(code, Role)
    last_chunk = ["p_ring_empty", "o_ring_full"]
    assert arrives(part[Role.STATE]) == ["tiles_empty", "p_ring_empty", "o_ring_full", *last_chunk]
    assert arrives(part[Role.SCORE]) == ["p_ring_full", "tiles_empty"]
    assert arrives(part[Role.IO]) == ["tail", "tiles_full", "tiles_full", "o_ring_empty"]
    assert all("qla_arrive" not in part[role] for role in (Role.SCORE, Role.IO))


def test_one_warpgroup_of_a_split_item_arrives_for_both(kernel):
    cfg, _, code = kernel
    state = by_role(code, Role)[Role.STATE]
    if cfg.block_v == 64:
        assert "qla_arrive" not in state and "condval" not in state
        return
    assert ".arrive()" not in state, "each arrival counts for the warpgroup that may have left"
    counts = re.findall(
        r"if \(\(half < 0\)\) \{\s+(condval\w*) = (\d);\s+\} else \{\s+\1 = (\d);\s+\}\s+qla_arrive\(\w+\[[^;]*\], \1\);", state
    )
    assert [(whole, split) for _, whole, split in counts] == [("1", "2")] * 5
    assert cfg.state_threads == 2 * fwd.WARPGROUP, "so that twice one warpgroup is what the barriers count"
    # the other warpgroup leaves before it loads, waits or arrives
    place = place_of(code)
    assert f"int half = qla_uniform({place}[{PART_OF_V}]);" in state
    (condition,) = re.findall(r"bool (\w+) = \(\(half < 0\) \|\| \(half == qla_uniform\(\(\(\(int\)threadIdx\.x\) >> 7\)\)\)\);", state)
    start = state.index(f"if ({condition}) {{")
    assert not re.search(r"\.wait\(|qla_wait|qla_arrive|qla_load|qla_store", state[:start])
    indent = state[state.rindex("\n", 0, start) + 1 : start]
    (after,) = re.findall(rf"^{indent}\}}\n(.*)", state[start:], re.M | re.S)
    assert not re.search(r"\.wait\(|qla_|wgmma", after)


def test_tiles_are_announced_and_cleaned(kernel):
    cfg, _, code = kernel
    load = agents(code)["IO 0"]
    table = {name: cfg.smem_table()[name] // cfg.stages for name in ("q", "k", "v", "a")}
    halves = cfg.block_v // 64
    for barrier in ("tiles_full", "tail"):
        announced = re.findall(rf"{barrier}\[[^;]*\]\.expect_transaction\((\d+)\)", load)
        assert sorted(map(int, announced)) == sorted([table["q"], table["k"], table["a"], table["v"] // halves])
        assert len(re.findall(rf"tma_load\(V_desc, {barrier}\[", load)) == 1
    # with 128 columns each half of V announces itself: a split item's block loads one
    guarded = r"if \(\((half\w*) < 0\) \|\| \(\1 == (n\w*)\)\) \{\s+\w+\[.*\]\.expect_transaction\(8192\);\s+tl::tma_load\(V_desc"
    loops = [f"for (int {n} = 0; {n} < 2; ++{n}) {{" in load for _, n in re.findall(guarded, load)]
    assert loops == ([True, True] if halves == 2 else [])
    cleaned = [int(tiles) for tiles in re.findall(r"qla_zero_rows\([^;]*?\]\)\), (\d),", load)]
    assert sorted(cleaned) == sorted(table[name] // 8192 for name in ("k", "v", "a"))
    assert load.index("tail[0].wait(0)") < load.index("qla_zero_rows")
    handed = load[load.rindex("qla_zero_rows") :]
    assert handed.index("fence_proxy_async") < handed.index("tiles_full[")


def test_loop_of_the_state_role_holds_no_fence(kernel):
    _, _, code = kernel
    before, loop, after = state_loop(code)
    assert before.count("fence_proxy_async") <= 1, "TileLang's own, for the place: once a block"
    assert "fence_proxy_async" not in loop + after, "what the role stores is fenced by the warp that hands it to TMA"
    score = by_role(code, Role)[Role.SCORE]
    assert score.rindex("fence_proxy_async") < score.index("p_ring_full[0].arrive()")


def test_output_is_fenced_and_only_of_chunks_that_the_item_owns(kernel):
    cfg, _, code = kernel
    store, place = agents(code)["IO 2"], place_of(code)
    loop = store[store.index("o_ring_full[0].wait") :]
    assert loop.index("fence_proxy_async") < loop.index("tl::tma_store(") < loop.index("tl::tma_store_wait<0")
    chunk = re.search(rf"for \(int (\w+) = 0; \1 < {place}\[{CHUNKS}\]", store)[1]
    # TileLang splits the condition; what lies outside of it hands the buffer back
    owned = rf"^( *)if \({place}\[{SKIP}\] <= {chunk}\) \{{\n(.*?)^\1\}}$"
    inside = "".join(body for _, body in re.findall(owned, loop, re.M | re.S))
    outside = re.sub(owned, "", loop, flags=re.M | re.S)
    assert inside.count("tl::tma_store(") == inside.count("qla_store_rows(") == 1
    assert not re.search(r"tma_store|qla_store", outside) and arrives(outside) == ["o_ring_empty"] and arrives(inside) == []
    half = rf"if \(\({place}\[{PART_OF_V}\] < 0\) \|\| \({place}\[{PART_OF_V}\] == n_\d+\)\) \{{\s+(tl::tma_store|qla_store_rows)"
    assert re.findall(half, inside) == (["tl::tma_store", "qla_store_rows"] if cfg.block_v == 128 else [])


def test_products_of_a_chunk(kernel):
    """64x64x64 products of a warpgroup of the state role before, in and after its loop; more of them cost time."""
    cfg, _, code = kernel
    by_halves = [(2, 1), (3, 2), (1, 1)]  # for each half of K, and those without K
    assert [len(re.findall(PRODUCTS, text)) for text in state_loop(code)] == [cfg.halves * n + others for n, others in by_halves]
    assert len(re.findall(PRODUCTS, by_role(code, Role)[Role.SCORE])) == 1


def test_results_are_waited_for(kernel):
    _, _, code = kernel
    before, loop, after = state_loop(code)
    assert_products_are_waited_for(before, loop, loop, after)
    assert_products_are_waited_for(by_role(code, Role)[Role.SCORE])


def test_lanes_hold_the_gates_that_device_code_gives_them(kernel):
    cfg, _, code = kernel
    assert_lanes_hold_pairs_of_gates(cfg, code, agents(code)["IO 1"], static(code, "float").count(cfg.stages * 64))


def test_accumulator_fence_covers_what_a_thread_owns(kernel):
    _, _, code = kernel
    sizes = set(re.findall(r"warpgroup_fence_operand\(reinterpret_cast<float\*>\(\w+ \+ 0\), (\d+)\)", code))
    assert sizes == {"32"}, "a wider fence names registers that do not exist"


def test_table_in_docstring():
    rows = re.findall(r"^    (q|k|v|a|p|o) +\[(.*?)\] +(\d+(?: K| \| \d+)?)", fwd.__doc__, re.M)
    for column, block_v in enumerate((128, 64)):
        for head_k in HEAD_DIMS:
            table = fwd.FwdConfig(block_v, head_k=head_k).smem_table()
            sizes = [(name, text.split(" | ")[min(column, text.count("|"))]) for name, _, text in rows]
            assert {name: int(text.removesuffix(" K")) * (head_k if "K" in text else 1) for name, text in sizes} == table
            for name, shape, _ in rows:
                extents = [int(n) for n in shape.replace("block_v/64", str(block_v // 64)).replace("K", str(head_k)).split(", ")]
                assert 2 * prod(extents) == table[name], name
    roles_documented = re.findall(r"^    (STATE|SCORE|IO) .*?  +(\d+) \| (\d+) +\w", fwd.__doc__, re.M)
    assert {(name, int(wide), int(narrow)) for name, wide, narrow in roles_documented} == {
        (role.name, fwd.REGS[128][role], fwd.REGS[64][role]) for role in Role
    }


def test_static_shared_memory_in_docstring(kernel):
    cfg, _, code = kernel
    floats = static(code, "float")
    floats.remove(cfg.stages)  # decay
    assert set(floats) == {cfg.stages * 64} and static(code, "int") == [PLACE_FIELDS]
    (number, size), (decay,), (fields, place) = (
        re.search(rf"^    {row} +\(static", fwd.__doc__, re.M).groups()
        for row in (r"gates +(\d+) x \[3, 64\] fp32 +(\d+)", r"decay +\[3\] fp32 +(\d+)", r"place +\[(\d+)\] int32 +(\d+)")
    )
    assert (int(number), int(size)) == (len(floats), 4 * sum(floats))
    assert int(decay) == 16, "12 bytes, aligned to 16"
    assert (int(fields), int(place)) == (PLACE_FIELDS, 4 * PLACE_FIELDS)


def test_barriers_in_docstring(kernel):
    cfg, _, code = kernel
    counts = dict(re.findall(r"(\w+)\[0\]\.init\((\d+)\)", code))
    part = agents(code)
    table = fwd.__doc__[fwd.__doc__.index("\nBarriers") : fwd.__doc__.index("\nSchedule")]
    rows = re.findall(r"^    (\S+) +((?:STATE|SCORE|IO).*?)  +((?:STATE|SCORE|IO).*?)  +(\S.*)$", table, re.M)
    assert {row[0].replace(".", "_") for row in rows} == set(counts)
    for name, signalled, waited, count in rows:
        barrier = name.replace(".", "_")
        for text, calls in ((signalled, arrives), (waited, waits)):
            assert set(text.split(", ")) == {agent for agent in part if barrier in calls(part[agent])}, name
        number = cfg.state_threads if count.startswith("STATE threads") else int(re.match(r"\d+", count)[0])
        assert number + (128 if count.endswith("+ 128") else 0) == int(counts[barrier]), name


def test_config_rejects_what_it_cannot_do():
    with pytest.raises(ValueError, match="block_v"):
        fwd.FwdConfig(block_v=32)
    with pytest.raises(ValueError, match=r"head_k must be one of \(64, 128\), got 96"):
        fwd.FwdConfig(head_k=96)
    with pytest.raises(ValueError, match="shared memory"):
        fwd.FwdConfig(stages=4)


@pytest.mark.parametrize(("items", "block_v"), [(8, 64), (64, 64), (66, 64), (67, 128), (128, 128), (132, 128), (192, 64), (256, 128)])
def test_block_width_fills_the_device(items, block_v):
    assert choose_block_v(items, num_sms=132) == block_v
