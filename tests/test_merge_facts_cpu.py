"""CPU-only: every variant of cp_merge lowers for sm_90a and agrees with the tables at the head of its file."""

import re
from math import prod
from pathlib import Path

import pytest

pytest.importorskip("tilelang")
from qla.kernels import cp_merge as merge  # noqa: E402
from qla.kernels.ws import launch_registers  # noqa: E402
from tests.lowered import assert_products_are_waited_for, by_role, generated  # noqa: E402

Role = merge.Role
PRODUCT = r"wgmma_rs<.*?>\(reinterpret_cast<const uint32_t\*>\((\w+) \+ .*?reinterpret_cast<uint32_t\*>\((\w+) \+ 0\), (.*)\);"


@pytest.fixture(scope="module", params=merge.CONFIGS, ids=lambda cfg: cfg.name)
def kernel(request):
    return request.param, *generated(merge, request.param)


def parts(code):
    return {role.name: text for role, text in by_role(code, Role).items()}


def test_threads_registers_and_shared_memory(kernel):
    cfg, smem, code = kernel
    assert smem == cfg.smem_bytes
    assert code.startswith(f"__launch_bounds__({cfg.threads}, 1)")
    set_by_roles = re.findall(r"warpgroup_reg_(\w+)<(\d+)>", code)
    assert set_by_roles == [("alloc", str(merge.REGS[Role.STATE])), ("dealloc", str(merge.REGS[Role.IO]))]
    assert sum(merge.REGS.values()) * 128 <= launch_registers(cfg.threads)


def test_barriers(kernel):
    cfg, _, code = kernel
    inits = re.findall(r"(\w+)\[(\d)\]\.init\((\d+)\)", code)
    assert inits == [(name, str(i), count) for name, count in (("m_ring_full", "32"), ("m_ring_empty", "128")) for i in range(cfg.stages)]
    assert code.count("__syncthreads()") == 2, "after barrier initialisation and after the place: between roles it would deadlock"
    before = code[: code.index("warpgroup_reg_")]
    assert before.rindex(".init(") < before.index("__syncthreads()") < before.index("qla_locate_chain(") < before.rindex("__syncthreads()")


def test_roles_signal_what_the_table_says(kernel):
    _, _, code = kernel
    signals = {role: re.findall(r"(\w+)\[[^;\[]*\]\.(wait|arrive)\(", text) for role, text in parts(code).items()}
    assert signals == {
        "STATE": [("m_ring_full", "wait"), ("m_ring_empty", "arrive")],
        "IO": [("m_ring_empty", "wait"), ("m_ring_full", "arrive")],
    }


def test_transitions_are_announced(kernel):
    cfg, _, code = kernel
    load = parts(code)["IO"]
    announced = [int(size) for size in re.findall(r"m_ring_full\[[^;]*\]\.expect_transaction\((\d+)\)", load)]
    assert "for (int part = 0; part < 2; ++part)" in load and load.count("tl::tma_load(") == len(announced) == cfg.halves
    assert 2 * sum(announced) == sum(cfg.smem_table().values()) // cfg.stages


def test_loop_holds_no_fence(kernel):
    _, _, code = kernel
    assert all("fence_proxy_async" not in text for text in parts(code).values()), "only TMA writes what products read"


def test_products_of_a_step(kernel):
    """Small terms first, each half of the result begun by a product that overwrites it; twelve of 64x64x64 a step, with K = 64 three."""
    cfg, _, code = kernel
    state, n = parts(code)["STATE"], cfg.halves
    found = re.findall(PRODUCT, state)
    assert len(found) == len(re.findall(r"wgmma_(?:ss|rs)<", state)) == 3 * n * n
    halves = [found[i : i + 3 * n] for i in range(0, 3 * n * n, 3 * n)]
    for products in halves:
        assert len({out for _, out, _ in products}) == 1
        assert "?" in products[0][2] and all(clear == "1" for *_, clear in products[1:])
        low, high = [a for a, *_ in products[:n]], [a for a, *_ in products[n : 2 * n]]
        assert [a for a, *_ in products] == [*low, *high, *high] and len({*low, *high}) == 2 * n
    assert all([a for a, *_ in products] == [a for a, *_ in halves[0]] for products in halves)
    assert_products_are_waited_for(state)
    # S is split before the first product overwrites it, and both results are there before the buffers are given back
    assert state.index("wait_wgmma<0>") > state.rindex("wgmma_rs<") and state.index("wait_wgmma<0>") < state.index("m_ring_empty[")


def test_parts_of_a_product(kernel):
    """Which tile of M each product reads: high parts, then low ones, then high ones; forward rows are `in`, in reverse `out`."""
    cfg, _, code = kernel
    code = re.sub(r"\(&\((\w+)\[", r"(&(((bfloat16_t*)\1)[", code)  # the only buffer of all needs no cast
    state = parts(code)["STATE"]
    blocks = re.findall(r"initialize_wgmma_descriptor<1, (\d), 64>\(\w+, \(&\(\(\(bfloat16_t\*\)(\w+)\)\[0\]\)\)\);\s+"
                        r"tl::increase_descriptor_offset<int>\(\w+, (.*)\);", state)  # fmt: skip
    n = cfg.halves
    assert len(blocks) == 3 * n * n
    part, half = n * 8192, 8192  # bytes: of the other part, of the other 64 rows
    stage = 2 * part
    places = []
    for major, buffer, offset in blocks:
        assert major == ("1" if cfg.reverse else "0")
        assert eval(offset.replace("(i & 1)", "1")) - eval(offset.replace("(i & 1)", "0")) == stage
        places.append((buffer, eval(offset.replace("(i & 1)", "0"))))
    of_part = rf"\(bfloat16_t\*\)(\w+)\)\[\(\(\(\w+ & 1\) \* {stage // 2}\) \+ \(part \* {part // 2}\)\)\]\)\), (\d+), 0, part,"
    loads = re.findall(rf"tl::tma_load\(.*{of_part}", code)
    assert [column for _, column in loads] == ["0", "64"][:n], "columns of M^T"
    for out in range(n):
        expected = []
        for of_part in (0, part, 0):
            expected += [(loads[k if cfg.reverse else out][0], of_part + half * (out if cfg.reverse else k)) for k in range(n)]
        assert places[3 * n * out : 3 * n * (out + 1)] == expected


def test_reverse_walks_the_same_transitions_the_other_way(kernel):
    cfg, _, code = kernel
    segment = r"\(\(\w+\[0\] \+ 1\) - (i_\d+)\)" if cfg.reverse else r"\(\(\w+\[0\] \+ (i_\d+)\) \+ 1\)"
    loads = re.findall(rf"tl::tma_load\(Transitions_desc, .*, part, .*, {segment}\);", parts(code)["IO"])
    assert len(loads) == cfg.halves and f"for (int {loads[0]} = 0; " in parts(code)["IO"]
    assert f"(bool){int(cfg.reverse)}" in code[: code.index("warpgroup_reg_")]
    first, loaded, stored = re.findall(rf"qla_(?:load|store)_segment<{cfg.head_k}>\(\(&\(Segments\[(.*)\]\)\), ", parts(code)["STATE"])
    assert first.lstrip("(").startswith("int64_t)first) * ((int64_t)heads)")
    assert loaded == stored, "in place"
    step = "int64_t)first) - ((int64_t)i)) - (int64_t)1) *" if cfg.reverse else "int64_t)first) + ((int64_t)i)) + (int64_t)1) *"
    assert loaded.lstrip("(").startswith(step)


def test_accumulator_fence_covers_what_a_thread_owns(kernel):
    _, _, code = kernel
    sizes = set(re.findall(r"warpgroup_fence_operand\(reinterpret_cast<float\*>\(\w+ \+ 0\), (\d+)\)", code))
    assert sizes == {"32"}, "a wider fence names registers that do not exist"


def test_place_agrees_with_device_code():
    source = Path(merge.__file__).with_suffix(".cuh").read_text()
    written = re.findall(r"place\[(\d)\] = (.*);", source)
    assert [int(at) for at, _ in written] == [merge.FIRST, merge.STEPS]
    assert "base + 1" in written[merge.FIRST][1] and "count - 2" in written[merge.STEPS][1]


# The tables at the head of the file


def section(title, end):
    text = merge.__doc__
    start = text.index(f"\n{title}") + 1
    return text[start : text.index(f"\n{end}", start)]


def test_roles_in_docstring():
    rows = re.findall(r"^    (\w+) +(\d+)-(\d+) +(\d+) +\w", section("Roles", "Shared memory"), re.M)
    assert [(name, int(regs)) for name, *_, regs in rows] == [(role.name, merge.REGS[role]) for role in Role]
    assert [(int(first), int(last)) for _, first, last, _ in rows] == [(0, 127), (128, 255)]


def test_shared_memory_in_docstring(kernel):
    cfg, _, code = kernel
    rows = re.findall(r"^    (\w+) +\[(.+?)\](?: int32)? +(\d+)( K)? (.*)$", section("Shared memory", "Barriers"), re.M)
    absent = ("static", *([] if cfg.head_k == 128 else ["with K = 128"]))
    tiles = [row for row in rows if not any(words in row[4] for words in absent)]
    assert {name: int(size) * (cfg.head_k if of_k else 1) for name, _, size, of_k, _ in tiles} == cfg.smem_table()
    for name, shape, *_ in tiles:
        assert 2 * prod(int(n) for n in shape.replace("K", str(cfg.head_k)).split(", ")) == cfg.smem_table()[name], name
    (place,) = [row for row in rows if "static" in row[4]]
    assert re.findall(r"__shared__ __align__\(16\) (?:int|float) \w+\[(\d+)\]", code) == [place[1]]
    assert int(place[2]) == 16, "8 bytes, aligned to 16"


def test_barriers_in_docstring(kernel):
    _, _, code = kernel
    counts = dict(re.findall(r"(\w+)\[0\]\.init\((\d+)\)", code))
    rows = re.findall(r"^    (m_ring\.\w+) +(STATE|IO 0) +(STATE|IO 0) +(\d+)", section("Barriers", "Schedule"), re.M)
    assert {name.replace(".", "_"): count for name, *_, count in rows} == counts
    assert {(name, signalled, waited) for name, signalled, waited, _ in rows} == {
        ("m_ring.full", "IO 0", "STATE"), ("m_ring.empty", "STATE", "IO 0"),
    }  # fmt: skip


def test_config_rejects_what_it_cannot_do(monkeypatch):
    with pytest.raises(ValueError, match="stages must be at least 1, got 0"):
        merge.MergeConfig(stages=0)
    with pytest.raises(ValueError, match=r"head_k must be one of \(64, 128\), got 256"):
        merge.MergeConfig(head_k=256)
    with pytest.raises(ValueError, match="shared memory 262144 B > 232448 B"):
        merge.MergeConfig(stages=4)
    monkeypatch.setitem(merge.REGS, Role.IO, 272)
    with pytest.raises(ValueError, match="registers 64512 > 63488"):
        merge.MergeConfig()


def test_variants_are_distinct():
    names = ["merge_forward_k64", "merge_reverse_k64", "merge_forward_k128", "merge_reverse_k128"]
    assert [cfg.name for cfg in merge.CONFIGS] == names
