"""CPU-only: every variant of the scans in cp_prep lowers for sm_90a and agrees with the tables at the head of its file."""

import re
from math import prod

import pytest

pytest.importorskip("tilelang")
from qla.kernels import cp_prep as scan  # noqa: E402
from qla.kernels.launch import choose_block_v, num_slots  # noqa: E402
from qla.kernels.ws import (  # noqa: E402
    ENDS,
    FROM_SEGMENT,
    FROM_STATE,
    IDENTITY,
    PLACE_FIELDS,
    PREP_STATE,
    SKIP,
    SMEM_LIMIT_SM90,
    SOURCE,
)
from tests.lowered import (  # noqa: E402
    assert_lanes_hold_pairs_of_gates,
    assert_products_are_waited_for,
    by_role,
    generated,
    place_of,
    static,
)

Role = scan.Role
BARRIERS = ("tiles_full", "tiles_empty", "p_ring_full", "p_ring_empty", "state_ring_full", "state_ring_empty", "values_ready", "tail")
TILES = ("q", "k", "x", "a")  # what TMA loads


@pytest.fixture(scope="module", params=scan.CONFIGS, ids=lambda cfg: cfg.name)
def kernel(request):
    return request.param, *generated(scan, request.param)


def order(cfg):
    """Roles as the code has them: the last branch is the one that the forward scan lacks."""
    return [Role.STATE, Role.IO, Role.SCORE] if cfg.reverse else [Role.STATE, Role.IO]


def roles(cfg, code):
    """Generated code of each role, and of each warp of IO: every branch of a role starts by setting its registers."""
    found = by_role(code, [role.name for role in order(cfg)])
    _, *warps = re.split(r"if \(\(\(int\)threadIdx\.x\) < \d+\) \{", found["IO"])
    assert len(warps) == 3
    return found | {f"IO {i}": warp for i, warp in enumerate(warps)}


def arrives(part):
    return re.findall(r"(\w+)\[[^;{}]*\]\.arrive\(\)", part)


def waits(part):
    return re.findall(r"(\w+)\[[^;{}]*\]\.wait\(", part)


def state_loop(cfg, code):
    """What the state role does before, in and after its loop over chunks."""
    loop = r"^( *)for \(int \w+ = 0; \w+ < num_chunks; \+\+\w+\) \{\n(.*?)^\1\}$"
    before, _, body, after = re.split(loop, roles(cfg, code)["STATE"], maxsplit=1, flags=re.M | re.S)
    return before, body, after


def test_threads_registers_and_shared_memory(kernel):
    cfg, smem, code = kernel
    assert smem == cfg.smem_bytes
    assert code.startswith(f"__launch_bounds__({cfg.threads}, 1)")
    set_by_roles = re.findall(r"warpgroup_reg_(\w+)<(\d+)>", code)
    assert set_by_roles == [("alloc" if role == Role.STATE else "dealloc", str(cfg.regs[role])) for role in order(cfg)]
    last = cfg.threads - scan.WARPGROUP
    branches = [f"(((int)threadIdx.x) < {cfg.state_threads}) {{", *[f"< {last + n * scan.WARP}) {{" for n in (1, 2, 3)]]
    assert [code.count(branch) for branch in branches] == [1] * len(branches)


def test_barriers(kernel):
    cfg, _, code = kernel
    state, score, warp = cfg.state_threads, 128 if cfg.reverse else 0, 32
    counts = {
        "tiles_full": {2 * warp}, "tiles_empty": {state + score + warp}, "state_ring_full": {state}, "state_ring_empty": {warp},
        "values_ready": {state}, "tail": {warp},
    }  # fmt: skip
    if cfg.reverse:
        counts |= {"p_ring_full": {score}, "p_ring_empty": {state}}
    found: dict[str, set[int]] = {}
    inits = re.findall(r"(\w+)\[\d\]\.init\((\d+)\)", code)
    for name, count in inits:
        found.setdefault(name, set()).add(int(count))
    assert found == counts
    assert len(inits) == sum(cfg.stages if name.startswith(("tiles", "values")) else 1 for name in counts), "every slot"
    assert code.count("__syncthreads()") == 2, "after barrier initialisation and after the place: between roles it would deadlock"
    before, after = code[: code.index("warpgroup_reg_")], code[code.index("warpgroup_reg_") :]
    assert "__syncthreads()" not in after
    assert before.rindex(".init(") < before.index("__syncthreads()") < before.index("qla_locate(") < before.rindex("__syncthreads()")


def test_roles_signal_what_the_table_says(kernel):
    cfg, _, code = kernel
    part = roles(cfg, code)
    assert arrives(part["STATE"]) == ["state_ring_full", *(["p_ring_empty"] if cfg.reverse else []), "values_ready", "tiles_empty"]
    assert arrives(part["IO"]) == ["tail", "tiles_full", "tiles_full", "state_ring_empty", "tiles_empty"]
    if cfg.reverse:
        assert arrives(part["SCORE"]) == ["p_ring_full", "tiles_empty"]


def test_tiles_are_announced_and_cleaned(kernel):
    cfg, _, code = kernel
    load = roles(cfg, code)["IO 0"]
    table = {name: size for name, size in cfg.smem_table().items() if name in TILES}
    for barrier in ("tiles_full", "tail"):
        announced = re.findall(rf"{barrier}\[[^;]*\]\.expect_transaction\((\d+)\)", load)
        assert sorted(map(int, announced)) == sorted(size // cfg.stages for size in table.values())
    cleaned = [int(tiles) for tiles in re.findall(r"qla_zero_rows\([^;]*?\]\)\), (\d),", load)]
    assert sorted(cleaned) == sorted(size // cfg.stages // 8192 for size in table.values())
    assert load.index("tail[0].wait(0)") < load.index("qla_zero_rows")
    handed = load[load.rindex("qla_zero_rows") :]
    assert handed.index("fence_proxy_async") < handed.index("tiles_full[")


def test_stores_are_fenced_by_the_warp_that_hands_them_to_tma(kernel):
    cfg, _, code = kernel
    part = roles(cfg, code)
    before, loop, after = state_loop(cfg, code)
    assert before.count("fence_proxy_async") <= 1, "TileLang's own, for the place: once a block"
    assert "fence_proxy_async" not in loop + after
    of_state, of_values = re.split(r"(?=values_ready\[)", part["IO 2"][part["IO 2"].index("state_ring_full[0].wait") :])
    for store, count, release in ((of_state, cfg.halves, "state_ring_empty[0].arrive()"), (of_values, 1, "tiles_empty[")):
        assert store.count("tl::tma_store(") == count
        assert store.index("fence_proxy_async") < store.index("tl::tma_store(")
        assert store.rindex("tl::tma_store(") < store.index("tl::tma_store_wait<0") < store.index(release)
    if cfg.reverse:
        score = part["SCORE"]
        assert score.index("fence_proxy_async") < score.index("p_ring_full[0].arrive()")


def test_accumulator_fence_covers_what_a_thread_owns(kernel):
    _, _, code = kernel
    sizes = set(re.findall(r"warpgroup_fence_operand\(reinterpret_cast<float\*>\(\w+ \+ 0\), (\d+)\)", code))
    assert sizes == {"32"}, "a wider fence names registers that do not exist"


def test_products_of_a_chunk(kernel):
    """64x64x64 products of a warpgroup of the state role; more of them is time that no schedule gives back."""
    cfg, _, code = kernel
    found = [len(re.findall(r"wgmma_(?:ss|rs)<", text)) for text in state_loop(cfg, code)]
    by_halves = [(0, 0), (3, 2), (1, 0)] if cfg.reverse else [(0, 0), (2, 1), (0, 0)]  # for each half of K, and those without K
    expected = [cfg.halves * n + others for n, others in by_halves]
    assert found == expected, "behind the reverse loop: what rounding took from the first chunk's dO"


def test_results_are_waited_for(kernel):
    cfg, _, code = kernel
    before, loop, after = state_loop(cfg, code)
    assert_products_are_waited_for(before, loop, loop, after)


def test_states_are_handed_on_from_chunk_skip(kernel):
    cfg, _, code = kernel
    place = place_of(code)
    before, loop, _ = state_loop(cfg, code)
    assert f"int skip = qla_uniform({place}[{SKIP}]);" in before
    guarded, values = re.findall(r"^( *)if \(skip <= \w+\) \{\n(.*?)^\1\}$", loop, re.M | re.S)
    assert re.search(r"state_ring_empty\[0\]\.wait\(\(\(\(\w+ \+ 1\) - skip\) & 1\)\);", guarded[1]), "counted from there too"
    assert arrives(guarded[1]) == ["state_ring_full"]
    assert guarded[1].count("qla_store_plain(") == loop.count("qla_store_plain(") == cfg.halves
    assert arrives(values[1]) == ["values_ready"] and values[1].count("qla_store_transposed_rounded<") == 1
    store = roles(cfg, code)["IO 2"]
    (stored,) = re.findall(r"^( *)if \(skip\w* <= \w+\) \{\n(.*?)^\1\}$", store, re.M | re.S)
    assert waits(stored[1]) == ["state_ring_full", "values_ready"] and arrives(stored[1]) == ["state_ring_empty"], (
        "as many as are handed on"
    )
    assert waits(store[: store.index(stored[1])]) == ["tiles_full"] and arrives(store) == ["state_ring_empty", "tiles_empty"]


def test_state_begins_and_ends_as_the_place_says(kernel):
    cfg, _, code = kernel
    place = place_of(code)
    before, _, after = state_loop(cfg, code)
    begins = re.findall(rf"if \({place}\[{SOURCE}\] == (\d)\) \{{\s+(\w+)<{cfg.head_k}>\(", before)
    assert begins == [(str(FROM_STATE), "qla_load_state"), (str(FROM_SEGMENT), "qla_load_segment"), (str(IDENTITY), "qla_identity")]
    assert re.findall(rf"(qla_store_\w+)<{cfg.head_k}>\(", after) == ["qla_store_state", "qla_store_segment", "qla_store_split"]
    ends = after.index(f"if ({place}[{ENDS}] != 0) {{")
    assert ends < after.index(f"if (use_items < {PREP_STATE}) {{") < after.index("qla_store_state<")
    if not cfg.reverse:
        values = rf"if \(\({place}\[{SOURCE}\] == {IDENTITY}\)\) \{{\s+(condval\w*) = 0x0p\+0f.*\s+\}} else \{{\s+\1 = 0x1p\+0f"
        assert re.search(values, roles(cfg, code)["IO 1"]), "no values enter a transition"


def test_lanes_hold_the_gates_that_device_code_gives_them(kernel):
    cfg, _, code = kernel
    assert_lanes_hold_pairs_of_gates(cfg, code, roles(cfg, code)["IO 1"], static(code, "float").count(cfg.stages * 64))


# The tables at the head of the file


def section(title, end):
    """Lines of the docstring between two titles."""
    text = scan.__doc__
    start = text.index(f"\n{title}") + 1
    return text[start : text.index(f"\n{end}", start)]


def column(text, block_v):
    """The value for a width from "wide | narrow", or from one value that is both's."""
    return text.split(" | ")[-1 if block_v == 64 else 0].strip()


def size_of(text, cfg):
    """Bytes, from a number or a multiple of K."""
    value = column(text, cfg.block_v)
    return int(value.removesuffix(" K")) * (cfg.head_k if "K" in value else 1)


def test_roles_in_docstring(kernel):
    cfg, *_ = kernel
    rows = re.findall(r"^    (\w+) +(.+?)  +(\d+ \| \d+) +(\S.*)$", section("Roles", "Shared memory"), re.M)
    assert [name for name, *_ in rows] == [role.name for role in Role]
    first = 0
    for (name, threads, registers, work), role in zip(rows, Role, strict=True):
        assert ("in reverse only" in work) == (role == Role.SCORE)
        if role not in cfg.regs:
            continue
        last = first + cfg.role_threads(role) - 1
        assert column(threads, cfg.block_v) in (f"{first}-{last}", f"next {last - first + 1}", f"last {last - first + 1}"), name
        forward = re.search(r"; forward (\d+ \| \d+)", work)
        documented = forward[1] if forward and not cfg.reverse else registers
        assert int(column(documented, cfg.block_v)) == cfg.regs[role], name
        first = last + 1
    assert first == cfg.threads


def test_shared_memory_in_docstring(kernel):
    cfg, _, _ = kernel
    rows = re.findall(r"^    (\w+) +\[(.+?)\] +(\d+(?: K| \| \d+)?)(.*)$", section("Shared memory", "Barriers"), re.M)
    absent = ["static", *([] if cfg.reverse else ["in reverse only"]), *([] if cfg.head_k == 128 else ["with K = 128"])]
    rows = [row for row in rows if not any(words in row[3] for words in absent)]
    assert {name: size_of(size, cfg) for name, _, size, _ in rows} == cfg.smem_table()
    for name, shape, size, _ in rows:
        extents = [int(n) for n in shape.replace("block_v", str(cfg.block_v)).replace("K", str(cfg.head_k)).split(", ")]
        assert 2 * prod(extents) == size_of(size, cfg), name


def test_static_shared_memory_in_docstring(kernel):
    cfg, _, code = kernel
    text = section("Shared memory", "Barriers")
    gates = static(code, "float")
    gates.remove(cfg.stages)  # decay
    assert set(gates) == {cfg.stages * 64} and static(code, "int") == [PLACE_FIELDS]
    reverse = re.search(r"^    gates +(\d+) x \[3, 64\] fp32 +(\d+) +\(static", text, re.M)
    forward = re.search(r"^    gates .*; forward (\d+) x, (\d+)\)$", text, re.M)
    assert reverse and forward, "a row '    gates  5 x [3, 64] fp32  3840  (static, ..; forward 3 x, 2304)'"
    assert [int(n) for n in (reverse if cfg.reverse else forward).groups()] == [len(gates), 4 * sum(gates)]
    assert re.search(r"^    decay +\[3\] fp32 +16 ", text, re.M), "12 bytes, aligned to 16"
    assert re.search(rf"^    place +\[{PLACE_FIELDS}\] int32 +{4 * PLACE_FIELDS} ", text, re.M)


def test_barriers_in_docstring(kernel):
    cfg, _, code = kernel
    counts = dict(re.findall(r"(\w+)\[0\]\.init\((\d+)\)", code))
    part = roles(cfg, code)
    agents = [name for name in ("STATE", "SCORE", "IO 0", "IO 1", "IO 2") if name in part]
    rows = re.findall(
        r"^    (\S+) +((?:STATE|SCORE|IO|all but).*?)  +((?:STATE|SCORE|IO).*?)  +(\S.*)$", section("Barriers", "Schedule"), re.M
    )
    assert [row[0].replace(".", "_") for row in rows] == list(BARRIERS)
    for name, signalled, waited, count in rows:
        barrier = name.replace(".", "_")
        if barrier not in counts:
            assert not cfg.reverse and name.startswith("p_ring")
            continue
        signalled = signalled.replace("all but IO 0,1", "STATE, SCORE, IO 2")
        for text, calls in ((signalled, arrives), (waited, waits)):
            assert {a for a in text.split(", ") if a in agents} == {a for a in agents if barrier in calls(part[a])}, name
        number = cfg.state_threads if count.startswith("STATE threads") else int(re.match(r"\d+", count)[0])
        number += 32 if count.startswith("STATE threads + 32") else 0
        if cfg.reverse and "in reverse + 128" in count:
            number += 128
        assert number == int(counts[barrier]), name


# Host side


def test_config_rejects_what_it_cannot_do(monkeypatch):
    with pytest.raises(ValueError, match=r"block_v must be one of \(128, 64\), got 32"):
        scan.ScanConfig(block_v=32)
    with pytest.raises(ValueError, match="shared memory 270336 B > 232448 B"):
        scan.ScanConfig(reverse=True, stages=4)
    assert scan.ScanConfig(reverse=False, stages=4).smem_bytes <= SMEM_LIMIT_SM90
    # one step of 8 more for STATE is more than the block is launched with
    monkeypatch.setitem(scan.REGS, 128, scan.REGS[128] | {Role.STATE: scan.REGS[128][Role.STATE] + 8})
    with pytest.raises(ValueError, match="registers 67584 > 65536"):
        scan.ScanConfig(reverse=True)


def test_variants_are_distinct():
    assert len({cfg.name for cfg in scan.CONFIGS}) == len(set(scan.CONFIGS)) == len(scan.CONFIGS) == 16


@pytest.mark.parametrize(("items", "block_v"), [(1, 64), (66, 64), (67, 128), (132, 128), (133, 64), (198, 64), (199, 128), (264, 128)])
def test_block_width_fills_the_device(items, block_v):
    assert choose_block_v(items, num_sms=132) == block_v


@pytest.mark.parametrize(
    ("tokens", "num_seqs", "seq_len", "slots"),
    [
        (64, 1, 64, 1),
        (65, 1, 65, 2),
        (130, 2, 65, 4),
        # packed: lengths are not known to the host
        (64, 1, 0, 3),
        (0, 3, 0, 4),
        (200, 3, 0, 7),
    ],
)
def test_number_of_slots(tokens, num_seqs, seq_len, slots):
    assert num_slots(tokens, num_seqs, seq_len) == slots


@pytest.mark.parametrize("lengths", [[0], [1], [64], [65, 0, 0, 63], [0, 0, 0], [200, 1, 128], [63] * 9])
@pytest.mark.parametrize("padding", [0, 1, 64])
def test_chunks_of_packed_sequences_have_slots_of_their_own(lengths, padding):
    used, begin = [], 0
    for n, length in enumerate(lengths):
        used += [begin // 64 + n + i for i in range(-(-length // 64))]
        begin += length
    assert len(set(used)) == len(used)
    assert all(0 <= slot < num_slots(begin + padding, len(lengths), 0) for slot in used)
