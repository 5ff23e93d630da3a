"""CPU-only: every variant of kkt_solve lowers for sm_90a and agrees with the tables at the head of its file."""

import re
from pathlib import Path

import pytest

pytest.importorskip("tilelang")
from qla.kernels import kkt_solve as kkt  # noqa: E402
from qla.kernels import launch  # noqa: E402
from tests.lowered import generated  # noqa: E402

REGISTERS_PER_SM = 65536
STATIC_SMEM = 1024  # the barrier, as ptxas counts it
RESERVED_SMEM = 1024  # what CUDA takes of each block


@pytest.fixture(scope="module", params=kkt.CONFIGS, ids=lambda cfg: cfg.name)
def kernel(request):
    return request.param, *generated(kkt, request.param)


def test_launch_shape_and_shared_memory(kernel):
    cfg, smem, code = kernel
    assert smem == cfg.smem_bytes
    assert code.startswith(f"__launch_bounds__({cfg.threads}, {cfg.blocks_per_sm})")
    assert cfg.blocks_per_sm * (smem + STATIC_SMEM + RESERVED_SMEM) <= kkt.SMEM_LIMIT_SM
    assert cfg.blocks_per_sm * cfg.threads * kkt.REGS[cfg.kk_slots] <= REGISTERS_PER_SM


def test_barriers(kernel):
    cfg, _, code = kernel
    loop = code[code.index("while (1)") :]
    assert loop.count("__syncthreads()") == 2, "kk_free and kk_ready"
    assert code.count("__syncthreads()") == 4, "besides these: barrier init and the first unit record"
    assert re.findall(r"keys_full\[0\]\.init\((\d+)\)", code) == [str(kkt.WARP)]
    assert loop.count(".wait(") == 2, "keys of step 0 and of step 1"
    assert loop.count(".arrive()") == 2, "keys of step 1 and of the next unit"
    assert code.count(".arrive()") == 3, "besides these: keys of the first unit"


def test_asynchronous_copies(kernel):
    cfg, _, code = kernel
    assert code.count("tl::tma_load(") == 3 * cfg.tiles
    assert code.count(f"expect_transaction({64 * cfg.head_k * 2})") == 3 * cfg.tiles, "a tile of 64 keys each"
    assert code.count("tl::tma_store(") == kkt.HEADS
    assert code.count("tl::wgmma_ss<") == cfg.kk_slots
    assert code.count("wait_wgmma<0>") == cfg.kk_slots, "no product in flight past its own wait"
    # a leader is elected within one warp: an election over the whole block never picks a lane of the last warp
    assert set(re.findall(r"tl_shuffle_elect<(\d+)>", code)) == {"0", "32"}


def test_bounds_come_of_what_the_inverse_reads(kernel):
    """From the same slot of K K^T and the same gates, before the inverse, and only if they are wanted."""
    _, _, code = kernel
    bound = re.search(r"if \(with_bound != 0\) \{\s+qla_kkt::store_bound\((.*), \(&\(bound\[0\]\)\), (.*), num_value_heads\);\s+\}", code)
    inverse = re.search(r"qla_kkt::solve_head<(?:true|false)>\((.*)\);", code)
    assert code.count("store_bound") == code.count("solve_head") == 1
    assert bound.end() < inverse.start() and inverse[1].startswith(f"{bound[1]}, ")


def test_record_fields_agree_with_device_code():
    source = Path(kkt.__file__).with_name("kkt_solve.cuh").read_text()
    names = re.search(r"enum Field \{([^}]*)\}", source)[1].replace(" ", "").split(",")
    in_python = [re.sub(r"(?<=[a-z])(?=[A-Z])", "_", name[1:]).upper() for name in names]  # kChunkSlot: CHUNK_SLOT
    assert [getattr(kkt, name) for name in in_python] == list(range(len(names)))
    assert len(names) <= kkt.UNIT_FIELDS and kkt.UNIT_FIELDS % 4 == 0, "records are written 16 bytes at a time"
    assert f"Unit record in shared memory, {kkt.UNIT_FIELDS} integers" in source
    assert f"ring of unit records, {len(names)} fields each" in kkt.__doc__
    assert "kLow + 6 * kBlock" in source
    assert kkt.KK_SLOT_BYTES == 4 * (16 * 16 + 16) * 4 + 2 * 6 * 16 * 16 * 2


def test_table_in_docstring():
    rows = re.findall(r"^    (gates|keys|kk|stage|units|total) .*? (\d+) +(\d+) ", kkt.__doc__, re.M)
    assert [row[0] for row in rows] == [*kkt.CONFIGS[0].smem_table(), "total"]
    assert f"[{kkt.UNITS}, {kkt.UNIT_FIELDS}] int32" in kkt.__doc__
    for name, kk2, kk4 in rows:
        for slots, text in ((2, kk2), (4, kk4)):
            cfg, narrow = (kkt.KktConfig(kk_slots=slots, head_k=head_k) for head_k in (128, 64))
            assert int(text) == (cfg.smem_bytes if name == "total" else cfg.smem_table()[name]), name
            assert narrow.smem_table() == cfg.smem_table() | {"keys": cfg.smem_table()["keys"] // 2}


def test_config_rejects_what_it_cannot_do():
    with pytest.raises(ValueError, match="float32"):
        kkt.KktConfig(dtype="float32")
    with pytest.raises(ValueError, match=r"head_k must be one of \(64, 128\), got 32"):
        kkt.KktConfig(head_k=32)
    with pytest.raises(ValueError, match="kk_slots"):
        kkt.KktConfig(kk_slots=3)


@pytest.mark.parametrize("lengths", [[0], [1], [64], [65, 0, 0, 63], [0, 0, 0], [200, 1, 128]])
@pytest.mark.parametrize("padding", [0, 1, 64, 130])
def test_slots_cover_every_row_once(lengths, padding):
    """The numbering of chunk slots that kkt_solve.cuh inverts: base(n) = cu[n] / 64 + n, S is the rows that no sequence owns."""
    cu = [0]
    for length in lengths:
        cu.append(cu[-1] + length)
    tokens, seqs = cu[-1] + padding, len(lengths)
    owners = [0] * tokens
    for slot in range(launch.num_units(tokens, 4, seqs, 0)):
        seq = max(n for n in range(seqs + 1) if cu[n] // 64 + n <= slot)
        begin, end = cu[seq], cu[seq + 1] if seq < seqs else tokens
        first = begin + (slot - cu[seq] // 64 - seq) * 64
        for row in range(first, min(first + 64, end)):
            owners[row] += 1
    assert owners == [1] * tokens
