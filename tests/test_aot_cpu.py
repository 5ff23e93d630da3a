"""Ahead-of-time builds: reading what the compiler says, and the report. Nothing is compiled here."""

from __future__ import annotations

import dataclasses
import json
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest

from qla import aot, startup
from qla.kernels import carried

PTXAS = """\
kernel.cu(12): warning #177-D: variable "x" was declared but never referenced
ptxas info    : (C7510) Potential Performance Loss: wgmma.mma_async instructions are serialized due to X in function 'k'
ptxas info    : 0 bytes gmem
ptxas info    : Compiling entry function 'fwd_fused_kernel_kernel' for 'sm_90a'
ptxas info    : Function properties for fwd_fused_kernel_kernel
    24 bytes stack frame, 32 bytes spill stores, 40 bytes spill loads
ptxas info    : Used 168 registers, used 2 barriers, 24 bytes cumulative stack size, 112 bytes smem
ptxas info    : Function properties for helper
    0 bytes stack frame, 0 bytes spill stores, 8 bytes spill loads
ptxas info    : Compile time = 900.0 ms
"""

SASS = """\
        /*0000*/                   LDC R1, c[0x0][0x28] ;
        /*0010*/                   S2R R9, SR_TID.X ;
        /*0df0*/                   USETMAXREG.DEALLOC.CTAPOOL 0x28 ;
        /*0e00*/                   LDL.64 R10, [R1+0x8] ;
        /*3b40*/                   USETMAXREG.DEALLOC.CTAPOOL 0x80 ;
        /*3b50*/                   FFMA R100, R2, R3, R4 ;
        /*5060*/                   USETMAXREG.TRY_ALLOC.CTAPOOL UP0, 0xd0 ;
        /*5070*/              @!P0 USETMAXREG.TRY_ALLOC.CTAPOOL UP0, 0xd0 ;
        /*5080*/              @!P1 STL [R1], R205 ;
        /*5090*/                   HGMMA.64x64x16.F32.BF16 R24, gdesc[UR4], R24 ;
"""
BUDGETS = {"STATE": 208, "SCORE": 128, "IO": 40}


def report(resources: aot.Resources, roles: tuple[aot.RoleCode, ...] = ()) -> aot.Report:
    return aot.Report("fwd_fused_v64_bfloat16", 384, 168_000, 12.34, resources, roles)


def test_reads_the_compilers_output():
    resources = aot.parse_ptxas(PTXAS)
    assert (resources.registers, resources.stack, resources.static_smem) == (168, 24, 112)
    assert (resources.spill_stores, resources.spill_loads, resources.spills) == (32, 48, 80)
    assert len(resources.warnings) == 1 and "C7510" in resources.warnings[0]
    with pytest.raises(ValueError, match="Used N registers"):
        aot.parse_ptxas("nvcc fatal: something else")


def test_cuts_machine_code_into_roles():
    entry, io, score, state = aot.split_roles(SASS, BUDGETS)
    assert [role.name for role in (entry, io, score, state)] == ["entry", "IO", "SCORE", "STATE"]
    assert (io.local_loads, io.local_stores, io.computes) == (1, 0, False)
    assert (score.local, score.highest_register, score.computes) == (0, 100, True)
    assert (state.local_stores, state.highest_register, state.instructions) == (1, 205, 4)
    assert aot.split_roles("/*0000*/ EXIT ;", BUDGETS) == ()


def test_spills_of_a_role_that_computes_are_a_problem():
    spilling = aot.parse_ptxas(PTXAS)
    clean = aot.Resources(168, 0, 0, 0, 112)
    entry, io, score, state = aot.split_roles(SASS, BUDGETS)
    assert report(clean, (entry, io, score, state)).problem is None
    assert report(spilling, (entry, io, score)).problem is None
    assert report(spilling, (entry, io, score, state)).problem == "spills in STATE"
    assert "not known" in str(report(spilling).problem)
    assert report(clean).problem is None
    explained = dataclasses.replace(report(spilling, (entry, io, score, state)), explained=state.local)
    assert explained.problem is None
    assert dataclasses.replace(explained, explained=state.local - 1).problem == "spills in STATE"


def test_report_names_everything():
    text = aot.format_report([report(aot.parse_ptxas(PTXAS), aot.split_roles(SASS, BUDGETS))])
    header, line, *rest = text.splitlines()
    assert header.split() == ["variant", "threads", "regs", "spill", "B", "stack", "B", "smem", "B", "seconds"]
    assert line.split() == ["fwd_fused_v64_bfloat16", "384", "168", "80", "24", "168112", "12.3"]
    assert any("STATE" in row and "208" in row for row in rest)
    assert any("C7510" in row for row in rest)
    assert rest[-1].strip() == "NOT ACCEPTABLE: spills in STATE"


def test_arguments(capsys):
    assert aot.make_parser().parse_args(["--pack", "file"]).jobs == startup.cpus() >= 1
    with pytest.raises(SystemExit):
        aot.make_parser().parse_args(["--out", "somewhere", "--pack", "file"])
    args = aot.make_parser().parse_args(["--out", "somewhere", "--only", "kkt", "--jobs", "2"])
    assert (args.out, args.only, args.jobs, args.keep) == (Path("somewhere"), "kkt", 2, None)
    with pytest.raises(SystemExit):
        aot.make_parser().parse_args([])
    assert "--out" in capsys.readouterr().err


def test_exit_status_and_cache_folder(monkeypatch, capsys, tmp_path):
    monkeypatch.setenv("TILELANG_CACHE_DIR", "elsewhere")
    clean, spilling = aot.Resources(168, 0, 0, 0, 112), aot.parse_ptxas(PTXAS)
    for reports, status in (([report(clean)], 0), ([report(clean), report(spilling)], 1), ([], 1)):
        monkeypatch.setattr(aot, "compile_all", lambda *_, found=reports: iter(found))
        assert aot.main(["--out", str(tmp_path / "aot")]) == status
        assert aot.os.environ["TILELANG_CACHE_DIR"] == str((tmp_path / "aot").resolve())
    assert "2 variants" in capsys.readouterr().out


def test_builds_then_reports(monkeypatch, capsys):
    """The reports come in the variants' order, with the seconds of the build."""
    kernel = SimpleNamespace(get_kernel_source=lambda: "source", pass_configs=None)
    configs = [SimpleNamespace(name=name, threads=128, smem_bytes=10) for name in "abc"]
    module = SimpleNamespace(build=lambda cfg: kernel)
    monkeypatch.setattr(aot, "build_all", lambda only, jobs: {"a": 1.0, "b": 2.0, "c": 3.0})
    monkeypatch.setattr(aot, "variants", lambda only: [(module, cfg) for cfg in configs])
    monkeypatch.setattr(aot, "inspect_source", lambda *_: (aot.parse_ptxas(PTXAS), ()))
    assert [(report.name, report.seconds, report.smem) for report in aot.compile_all("", 2, None)] == [
        ("a", 1, 10),
        ("b", 2, 10),
        ("c", 3, 10),
    ]
    assert "qla: 3 of 3 reports" in capsys.readouterr().err


@pytest.fixture
def packing(monkeypatch, tmp_path):
    """Stand-ins for two variants: the first is compiled in this process, the second elsewhere, and TileLang loads it. Where they lie."""
    folders = []
    kernels = {}

    def build_all(only, jobs):
        folders.append(Path(aot.os.environ["TILELANG_CACHE_DIR"]))
        for name in ("a", "b"):
            entry = folders[-1] / "1" / "kernels" / f"entry {name}"
            entry.mkdir(parents=True, exist_ok=True)
            for file, content in (("manifest.json", "{}"), ("device_kernel.cu", f"source {name}"), ("executable.so", f"library {name}")):
                (entry / file).write_text(content)
            adapter = SimpleNamespace(libpath=str(entry / "executable.so")) if name == "b" else SimpleNamespace()
            kernels[name] = SimpleNamespace(adapter=adapter, get_kernel_source=lambda name=name: f"source {name}")
        return {} if only == "nothing" else dict.fromkeys(kernels, 1.0)

    module = SimpleNamespace(build=lambda cfg: kernels[cfg.name])
    monkeypatch.setattr(aot, "build_all", build_all)
    monkeypatch.setattr(aot, "variants", lambda only: [(module, SimpleNamespace(name=name)) for name in ("a", "b")])
    monkeypatch.setattr(aot, "nvcc_version", lambda: "13.0")
    monkeypatch.setattr(carried, "_installed", lambda: {"tilelang": "1"})
    monkeypatch.setenv("TILELANG_CACHE_DIR", str(tmp_path / "other cache"))
    return folders


@pytest.mark.parametrize("cache", [None, "cache"])
def test_packs_what_it_has_built(packing, capsys, tmp_path, cache):
    """In a folder of its own, where another cache's kernels do not get in, or in the cache that is named."""
    out = tmp_path / "some" / "where"
    assert aot.main(["--pack", str(out), *(["--cache", str(tmp_path / cache)] if cache else [])]) == 0
    assert "2 variants" in capsys.readouterr().out
    assert {path.name: path.read_text() for path in out.glob("*.so")} == {"a.so": "library a", "b.so": "library b"}
    facts = json.loads((out / "facts.json").read_text())
    assert (facts["tilelang"], facts["cuda"], sorted(facts["libraries"])) == ("1", "13.0", ["a", "b"])
    assert packing == [tmp_path / cache] if cache else packing[0] not in (tmp_path / "other cache", tmp_path / "cache")


def test_packs_nothing_where_nothing_was_built(packing, tmp_path):
    assert aot.main(["--pack", str(tmp_path / "none"), "--only", "nothing"]) == 1 and not (tmp_path / "none").exists()


def test_a_library_of_another_cache_is_not_packed(packing, tmp_path):
    aot.main(["--pack", str(tmp_path / "out"), "--cache", str(tmp_path / "cache")])
    with pytest.raises(RuntimeError, match="a is not in .*empty"):
        aot.libraries(tmp_path / "empty")
    shutil.copytree(tmp_path / "cache", tmp_path / "copy")
    with pytest.raises(RuntimeError, match="b is not in .*copy"):  # the kernel that is loaded is that of the other cache
        aot.libraries(tmp_path / "copy")


def test_version_of_nvcc(monkeypatch, tmp_path):
    nvcc = tmp_path / "nvcc"
    nvcc.write_text("#!/bin/sh\necho 'Cuda compilation tools, release 13.2, V13.2.1'\n")
    nvcc.chmod(0o755)
    monkeypatch.setattr(aot, "find_tool", lambda _: str(nvcc))
    assert aot.nvcc_version() == "13.2"
    monkeypatch.setattr(aot, "find_tool", lambda _: None)
    with pytest.raises(RuntimeError, match="does not give its version"):
        aot.nvcc_version()


def test_compiles_as_tilelang_does(monkeypatch, tmp_path):
    pytest.importorskip("tilelang")
    configs = {"tl.enable_fast_math": True, "tl.ptxas_register_usage_level": 5, "tl.device_compile_flags": ["-DA=1 -DB"]}
    command = aot.compile_command("nvcc", configs, tmp_path / "a.cu", tmp_path / "a.cubin")
    assert {"--use_fast_math", "--ptxas-options=--register-usage-level=5", "-DA=1", "-DB", "-O3", *aot.ARCH} <= set(command)
    folders = [Path(flag[2:]) for flag in command if flag.startswith("-I")]
    assert len(folders) == 2 and all(folder.is_dir() for folder in folders)
    assert "--use_fast_math" not in aot.compile_command("nvcc", {}, tmp_path / "a.cu", tmp_path / "a.cubin")


def test_every_variant_is_listed_once():
    pytest.importorskip("tilelang")
    names = [cfg.name for _, cfg in startup.variants()]
    assert len(names) == len(set(names)) < 60
    assert len([name for name in names if name.startswith(("kkt", "fwd"))]) < 18
    names_of = {kernel: f"qla.kernels.{kernel}" for kernel in startup.KERNELS}
    found = {kernel: [cfg.name for module, cfg in startup.variants() if module.__name__ == name] for kernel, name in names_of.items()}
    assert {kernel: len(of_file) for kernel, of_file in found.items()} == {
        "l2norm": 4, "gates": 2, "kkt_solve": 8, "cp_plan": 1, "cp_prep": 16, "cp_merge": 4, "fwd_fused": 8, "bwd_fused": 8,
        "recurrent": 6,
    }  # fmt: skip
    assert found["cp_plan"] == ["cp_plan"]
    assert found["cp_merge"] == [f"merge_{direction}_k{head_k}" for head_k in (64, 128) for direction in ("forward", "reverse")]
    assert {name.partition("_v")[0] for name in names if name.startswith("fwd")} == {"fwd_fused_k64", "fwd_fused_k128"}
    assert [cfg.name for _, cfg in startup.variants(names[0])] == [names[0]]
    for _, cfg in startup.variants("fwd_fused"):
        budgets = aot.role_budgets(cfg)
        assert len(budgets) >= 2 and all(registers % 8 == 0 for registers in budgets.values())


def test_every_kernel_file_is_built():
    """A file with variants that is not listed would be compiled at its first call."""
    files = {path.stem for path in (Path(aot.__file__).parent / "kernels").glob("*.py")} - {"__init__", "ws", "launch", "carried"}
    assert files == set(startup.KERNELS)


def test_report_of_what_the_kernels_declare():
    """Threads and shared memory of each variant are numbers, and a kernel without roles has no budgets."""
    pytest.importorskip("tilelang")
    for module, cfg in startup.variants():
        assert int(cfg.threads) % 32 == 0 and int(cfg.smem_bytes) >= 0
        has_roles = module.__name__.rpartition(".")[2] not in ("l2norm", "gates", "kkt_solve", "cp_plan", "recurrent")
        assert bool(aot.role_budgets(cfg)) == has_roles, cfg.name
