"""Start-up: what is in the cache is loaded, the rest compiled in other processes; nothing is compiled twice, by any thread or process."""

from __future__ import annotations

import contextlib
import importlib
import importlib.metadata
import json
import os
import shutil
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from test_kernel_path_cpu import Beside

import qla
from bench.startup import first_call
from qla import autograd, startup
from qla.autocp import WHOLE, Plan
from qla.device import DeviceSpec

ROOT = Path(__file__).resolve().parents[1]
CHEAP = "cp_plan"  # the variant that compiles fastest, in a second or two
LOAD = f"import qla\nqla.warmup({CHEAP!r}, verbose=False)"


@pytest.fixture
def cache(monkeypatch):
    """Stand-ins for ten variants and TileLang's cache: names of what is on disk, and (name, was it there) of each build."""
    state = SimpleNamespace(disk=set(), builds=[], shares=[], broken=set())
    clock = [0.0]

    def build(cfg):
        if cfg.name in state.broken:
            raise OSError("no nvcc")
        state.builds.append((cfg.name, cfg.name in state.disk))
        clock[0] += 0.1 if cfg.name in state.disk else 5.0
        state.disk.add(cfg.name)

    module = SimpleNamespace(build=build)
    configs = [SimpleNamespace(name=f"variant {i}") for i in range(10)]
    monkeypatch.setattr(startup, "variants", lambda only="": [(module, cfg) for cfg in configs if only in cfg.name])
    monkeypatch.setattr(startup.time, "monotonic", lambda: clock[0])

    def elsewhere(names, jobs, step):
        state.shares.append((names, jobs))
        state.disk.update(names)
        for _ in names:
            step()
        return dict.fromkeys(names, 7.0)

    monkeypatch.setattr(startup, "_compile_elsewhere", elsewhere)
    return state


def test_what_is_there_is_loaded(cache):
    cache.disk.update(f"variant {i}" for i in range(10))
    assert qla.warmup(verbose=False) == 10
    assert cache.builds == [(f"variant {i}", True) for i in range(10)] and cache.shares == []


@pytest.mark.parametrize("there", [0, 3])
def test_the_rest_is_compiled_elsewhere(cache, there, capsys):
    cache.disk.update(f"variant {i}" for i in range(there))
    assert qla.warmup(jobs=4) == 10
    assert [name for name, found in cache.builds if not found] == [f"variant {there}"], "one here, to see that the cache lacks it"
    assert cache.shares == [([f"variant {i}" for i in range(there + 1, 10)], 4)]
    assert [name for name, _ in cache.builds] == [f"variant {i}" for i in range(10)]
    assert capsys.readouterr().err.startswith("qla: 10 of 10 kernels in ")


def test_seconds_are_those_of_the_compilation(cache):
    seconds = startup.build_all(verbose=False)
    assert {name: round(value) for name, value in seconds.items()} == {f"variant {i}": 7 if i else 5 for i in range(10)}


def test_as_many_processes_as_cpus(cache, monkeypatch):
    monkeypatch.setattr(startup, "cpus", lambda: 16)
    qla.warmup(verbose=False)
    assert [jobs for _, jobs in cache.shares] == [16]


def test_some_variants(cache):
    assert qla.warmup("variant 7", verbose=False) == 1 and cache.builds == [("variant 7", False)] and cache.shares == []
    assert qla.warmup("nothing of that name") == 0


def test_bad_jobs():
    with pytest.raises(ValueError, match="jobs must be at least 1, got 0"):
        qla.warmup(jobs=0)


def test_a_failure_names_its_variant(cache):
    cache.broken.add("variant 2")
    cache.disk.update(f"variant {i}" for i in range(10))
    with pytest.raises(RuntimeError, match="could not build variant 2:\n.*no nvcc"):
        qla.warmup(verbose=False)


def test_progress_is_one_line(capsys, monkeypatch):
    for terminal in (False, True):
        monkeypatch.setattr(sys.stderr, "isatty", lambda answer=terminal: answer)
        with startup.Progress("kernels", 3, True) as progress:
            for _ in range(3):
                progress.step()
        text = capsys.readouterr().err
        assert text.count("\n") == 1 and text.endswith("qla: 3 of 3 kernels in 0 s\n")
        assert text.count("\r") == (4 if terminal else 0)


# Processes that compile


def fresh(cache_dir: Path, package: Path = ROOT, nvcc: bool = True) -> dict[str, str]:
    """Environment of a fresh process with this cache."""
    environment = os.environ | {"TILELANG_CACHE_DIR": str(cache_dir), "PYTHONPATH": f"{package}:{ROOT}", "OMP_NUM_THREADS": "1"}
    return environment if nvcc else environment | {"PATH": "/nonexistent", "CUDA_HOME": "/nonexistent"}


def build_counting(code: str, environment: dict[str, str]) -> dict[str, int]:
    """Runs code in a fresh process; what TileLang compiled and found there."""
    pytest.importorskip("tilelang")
    lines = ["import json", "from bench.first_call import counted", "with counted() as counts:"]
    lines += [f"    {line}" for line in code.splitlines()] + ["print(json.dumps(counts))"]
    command = [sys.executable, "-c", "\n".join(lines)]
    # Elsewhere than in the repository, whose own package would come first.
    done = subprocess.run(command, env=environment, cwd=os.sep, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def compile_in_processes(count: int, folder: Path) -> None:
    """The cheap variant in as many processes at the same time."""
    pytest.importorskip("tilelang")
    command = [sys.executable, "-c", "from qla.startup import serve; serve()"]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    environment = fresh(folder) | {"TILELANG_PRINT_ON_COMPILATION": "0"}
    processes = [subprocess.Popen(command, env=environment, **pipes) for _ in range(count)]
    for process in processes:
        process.stdin.write(f"{CHEAP}\n")
        process.stdin.close()
    for process in processes:
        text = process.stdout.read()
        assert process.wait(timeout=300) == 0 and text.startswith(startup.BUILT), text


@pytest.fixture(scope="module")
def filled(tmp_path_factory) -> Path:
    """A cache with one variant."""
    folder = tmp_path_factory.mktemp("cache")
    compile_in_processes(1, folder)
    return folder


def test_eight_processes_share_one_empty_cache(tmp_path):
    compile_in_processes(8, tmp_path)
    assert len(list(tmp_path.rglob("manifest.json"))) == 1 and not list(tmp_path.glob("*/*/.staging/*"))
    assert build_counting(LOAD, fresh(tmp_path, nvcc=False)) == {"compiled": 0, "loaded": 1}


def test_a_filled_cache_compiles_nothing_and_needs_no_compiler(filled):
    assert build_counting(LOAD, fresh(filled, nvcc=False)) == {"compiled": 0, "loaded": 1}


def test_carried_kernels_compile_nothing_and_need_no_compiler(filled, tmp_path):
    """From a package whose folder cannot be written; with kernels of other sources, they are not found."""
    from qla.kernels import carried

    package, cache_dir = tmp_path / "site", tmp_path / "cache"
    shutil.copytree(ROOT / "qla", package / "qla", ignore=shutil.ignore_patterns("__pycache__"))
    assert carried.pack(filled, package / "qla" / "kernels" / "compiled.tar.xz", importlib.metadata.version("tilelang"), "13.0") == 1
    for folder in (package / "qla" / "kernels", package / "qla", package):
        folder.chmod(0o555)
    code = f"{LOAD}\nassert qla.__file__.startswith({str(package)!r})"
    try:
        assert build_counting(code, fresh(cache_dir, package, nvcc=False)) == {"compiled": 0, "loaded": 1}
        changed = package / "qla" / "kernels" / "cp_plan.cuh"
        changed.write_text(changed.read_text() + "\n// changed\n")
        assert build_counting(code, fresh(cache_dir, package)) == {"compiled": 1, "loaded": 0}
    finally:
        for folder in (package, package / "qla", package / "qla" / "kernels"):
            folder.chmod(0o755)


THREADS = f"""\
import threading
from qla import startup
together, kernels = threading.Barrier(8), []
def first():
    together.wait()
    for module, cfg in startup.variants({CHEAP!r}):
        kernels.append(module.build(cfg))
threads = [threading.Thread(target=first) for _ in range(8)]
for thread in threads: thread.start()
for thread in threads: thread.join()
assert len(kernels) == 8 and len(set(map(id, kernels))) == 1"""


def test_eight_threads_compile_once(filled, tmp_path):
    """Imports included: nothing of qla's kernels is loaded before the threads start."""
    assert build_counting(THREADS, fresh(tmp_path)) == {"compiled": 1, "loaded": 0}
    assert build_counting(THREADS, fresh(filled, nvcc=False)) == {"compiled": 0, "loaded": 1}


def test_compiling_elsewhere_leaves_results_in_the_cache(tmp_path, monkeypatch):
    pytest.importorskip("tilelang")
    monkeypatch.setenv("TILELANG_CACHE_DIR", str(tmp_path))
    steps = []
    seconds = startup._compile_elsewhere([CHEAP], 3, lambda: steps.append(1))
    assert list(seconds) == [CHEAP] and 0 < seconds[CHEAP] < 300 and len(steps) == 1
    assert len(list(tmp_path.rglob("manifest.json"))) == 1
    with pytest.raises(RuntimeError, match="could not build no such variant:\n(.|\n)*KeyError"):
        startup._compile_elsewhere(["no such variant"], 1, steps.append)


def test_a_process_that_dies_is_named(monkeypatch):
    monkeypatch.setattr(startup.sys, "executable", "false")
    with pytest.raises(RuntimeError, match="could not build b, a:\nexit status 1"):
        startup._compile_elsewhere(["a", "b"], 1, lambda: None)


# One process


def test_once_per_config():
    """Of eight threads that ask at the same time one builds; another config is built for itself, and a failure is tried again."""
    ws = pytest.importorskip("qla.kernels.ws", exc_type=ImportError)
    builds, together, broken = [], threading.Barrier(8), [True]

    @ws.once_per_config
    def build(cfg):
        builds.append(cfg)
        time.sleep(0.05)
        if cfg == "broken" and broken:
            raise OSError("no nvcc")
        return f"kernel {cfg}"

    def first(results):
        together.wait()
        results.append(build("a"))

    results = []
    threads = [threading.Thread(target=first, args=(results,)) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == ["kernel a"] * 8 and builds == ["a"]
    assert build("b") == "kernel b" and build("a") == "kernel a" and builds == ["a", "b"]
    with pytest.raises(OSError, match="no nvcc"):
        build("broken")
    broken.clear()
    assert build("broken") == "kernel broken"


def test_launcher_is_the_compiled_function():
    """Found once for each form, without TileLang's own loop over the arguments; another ``build`` is asked for itself."""
    ws = pytest.importorskip("qla.kernels.ws", exc_type=ImportError)
    asked = []

    def build(cfg):
        asked.append(cfg)
        executable = {"main": lambda *arguments: (cfg, arguments)}
        return SimpleNamespace(adapter=SimpleNamespace(get_exportable_executable=lambda: executable))

    def config_for(dtype, size):
        return f"{dtype} {size}"

    assert [ws.launcher(build, config_for, "half", size)(1, 2) for size in (3, 4, 3)] == [(f"half {n}", (1, 2)) for n in (3, 4, 3)]
    assert asked == ["half 3", "half 4"]
    assert ws.launcher(lambda cfg: cfg.upper, config_for, "half", 3)() == "HALF 3", "what is no kernel of TileLang's is launched itself"
    assert ws.launcher.cache_info().maxsize is not None


def test_tensors_that_nobody_reads_take_no_memory():
    ws = pytest.importorskip("qla.kernels.ws", exc_type=ImportError)
    for dtype in (torch.int32, torch.float32, torch.bfloat16):
        x = ws.unread(torch.device("cpu"), dtype)
        assert x is ws.unread(torch.device("cpu"), dtype)
        assert (x.dtype, x.shape, x.stride(), x.untyped_storage().nbytes()) == (dtype, (0,), (1,), 0)


def test_every_kernel_is_built_once():
    for kernel in startup.KERNELS:
        assert "\n@once_per_config\ndef build(" in (ROOT / "qla" / "kernels" / f"{kernel}.py").read_text(), kernel


def test_lowering_in_two_threads():
    """The patch that kernels are lowered with is there as long as any thread lowers, and gone afterwards."""
    ws = pytest.importorskip("qla.kernels.ws", exc_type=ImportError)
    original = ws.TensorCoreIntrinEmitter.wgmma_accum_regs
    together = threading.Barrier(2)
    patched = []

    def lower(seconds):
        together.wait()
        with ws.lowering():
            time.sleep(seconds)
            patched.append(ws.TensorCoreIntrinEmitter.wgmma_accum_regs is not original)

    threads = [threading.Thread(target=lower, args=(seconds,)) for seconds in (0.02, 0.1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert patched == [True, True] and ws.TensorCoreIntrinEmitter.wgmma_accum_regs is original


CHUNKED = ("kkt_solve", "cp_plan", "cp_prep", "cp_merge", "fwd_fused", "bwd_fused")  # kernels of chunk_gated_delta_rule
CALLS = [  # (H, HV), sequences, tokens of each or 0 when packed, scale, plan
    ((1, 1), 1, 64, 1.0, WHOLE),
    ((2, 8), 3, 100, 0.5, WHOLE),
    ((16, 64), 2, 65, 0.1, WHOLE),
    ((4, 12), 5, 0, 0.0, WHOLE),
    ((3, 3), 1, 700, 2.0, Plan(2, 1, 1, 2, 4)),
    ((2, 4), 4, 0, 0.3, Plan(4, 2, 0, 1, 4)),
]


def test_heads_batches_lengths_and_scales_ask_for_listed_variants(monkeypatch):
    """Real launchers, stand-ins for kernels: what calls of any size ask for is what is built ahead, each of them for some call."""
    pytest.importorskip("tilelang")
    asked = set()
    for kernel in CHUNKED:
        module = importlib.import_module(f"qla.kernels.{kernel}")
        monkeypatch.setattr(module, "build", lambda cfg: asked.add(cfg.name) or (lambda *_: None))
    monkeypatch.setattr(autograd, "device_spec", lambda _: DeviceSpec(index=0, capability=(9, 0), sm_count=132))
    monkeypatch.setattr(torch.cuda, "device", lambda _: contextlib.nullcontext())
    monkeypatch.setattr(autograd, "_Beside", lambda _: Beside())
    for dtype in (torch.bfloat16, torch.float16):
        for (h, hv), num_seqs, seq_len, scale, plan in CALLS:
            tokens = num_seqs * (seq_len or 90)
            q, k, do = (torch.zeros(tokens, heads, 128, dtype=dtype) for heads in (h, h, hv))
            v, g, beta = torch.zeros_like(do), torch.zeros(tokens, hv), torch.zeros(tokens, hv)
            cu = None if seq_len else torch.arange(num_seqs + 1, dtype=torch.int32) * 90
            call = autograd.Call(num_seqs, seq_len, scale, False, True, plan)
            done = autograd.launch_forward(q, k, v, g, beta, None, cu, call)
            autograd.launch_backward(q, k, v, done.g_cum, beta, done.A, None, do, None, cu, call, True, done.cut)
    listed = {cfg.name for module, cfg in startup.variants() if module.__name__.rpartition(".")[2] in CHUNKED}
    assert asked <= listed
    assert {name for name in listed if not name.startswith(("fwd_fused_v128", "scan_forward_v128", "scan_reverse_v128"))} <= asked


# The program that measures


def test_first_call_program(tmp_path):
    """Through PyTorch, without kernels: the program itself."""
    result = first_call(ROOT, tmp_path, "--devices", "cpu", "--threads", "2", "--backward", with_nvcc=False)
    assert (result["compiled"], result["loaded"], result["same"], result["threads"], result["devices"]) == (0, 0, True, 2, 1)
    assert result["error"] < 5e-3 and result["qla"] == str(ROOT / "qla" / "__init__.py")
    steps = ("import_torch", "import_qla", "context", "import_tilelang", "warmup", "first_call")
    assert (
        result["first_result"] == pytest.approx(sum(result[name] for name in steps), abs=1e-3)
        and result["process"] > result["first_result"]
    )
    with pytest.raises(RuntimeError, match="invalid"):
        first_call(ROOT, tmp_path, "--threads", "many")
