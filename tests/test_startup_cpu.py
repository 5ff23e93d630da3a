"""Start-up: what is in the cache is loaded, the rest compiled in other processes; nothing is compiled twice, by any thread or process."""

from __future__ import annotations

import contextlib
import importlib
import itertools
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
from qla.kernels import carried, launch

ROOT = Path(__file__).resolve().parents[1]
CHEAP = "cp_plan"  # the variant that compiles fastest, in a second or two
LOAD = f"import qla\nqla.warmup({CHEAP!r}, verbose=False)"


@pytest.fixture
def cache(monkeypatch):
    """Stand-ins for ten variants, package and TileLang's cache: names of what is on disk and carried; (name, was it there) of builds."""
    state = SimpleNamespace(disk=set(), carried=set(), builds=[], shares=[], broken=set())
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
    monkeypatch.setattr(launch, "names", lambda only="": (cfg.name for cfg in configs if only in cfg.name))
    monkeypatch.setattr(carried, "function", lambda name: print if name in state.carried else None)
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


def test_what_is_carried_is_not_built(cache):
    cache.carried.update(f"variant {i}" for i in range(10))
    assert qla.warmup(verbose=False) == 10 and cache.builds == cache.shares == []
    cache.carried.remove("variant 4")
    assert qla.warmup(verbose=False) == 10 and cache.builds == [("variant 4", False)] and cache.shares == []
    assert qla.warmup("variant 3", verbose=False) == 1 and len(cache.builds) == 1
    assert len(startup.build_all("variant 3", verbose=False)) == 1, "a cache that is filled for others gets all"


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


@pytest.fixture
def carrying(filled, tmp_path) -> Path:
    """A folder with the package and the cheap variant, as a wheel installs them."""
    package = tmp_path / "site"
    shutil.copytree(ROOT / "qla", package / "qla", ignore=shutil.ignore_patterns("__pycache__"))
    (library,) = filled.rglob("executable.so")
    assert carried.pack({CHEAP: library}, package / "qla" / "kernels" / carried.FOLDER.name, "1.0") == 1
    return package


LAUNCH = f"""\
from qla.kernels import launch
function = launch.launcher({CHEAP!r})
try:
    function(1)
except Exception as error:
    assert "num_args should be 16" in str(error), error
else:
    raise AssertionError("a call with one argument")"""
NO_TILELANG = "import sys\nassert 'tilelang' not in sys.modules and 'tvm' not in sys.modules"


def test_carried_kernels_need_neither_compiler_nor_tilelang(carrying, tmp_path):
    """From a package whose folder cannot be written, and nothing is written elsewhere. The function is there, and checks its arguments."""
    folders = (carrying / "qla" / "kernels", carrying / "qla", carrying)
    for folder in folders:
        folder.chmod(0o555)
    try:
        for code in (LOAD, LAUNCH, f"{LOAD}\n{LAUNCH}"):
            code = f"{code}\nimport qla\nassert qla.__file__.startswith({str(carrying)!r})\n{NO_TILELANG}"
            assert build_counting(code, fresh(tmp_path / "cache", carrying, nvcc=False)) == {"compiled": 0, "loaded": 1}
        assert not (tmp_path / "cache").exists()
    finally:
        for folder in folders:
            folder.chmod(0o755)


def test_tilelang_may_be_imported_before_and_after(carrying, tmp_path):
    """Its libraries are the same: what another kernel needs compiles beside those that are carried."""
    for code in (f"import tilelang\n{LAUNCH}", f"{LAUNCH}\nimport tilelang\n{LAUNCH}"):
        assert build_counting(code, fresh(tmp_path / "cache", carrying, nvcc=False)) == {"compiled": 0, "loaded": 1}
    code = f"{LAUNCH}\nfrom qla.kernels import cp_plan\ncp_plan.build(cp_plan.CONFIGS[0])"
    assert build_counting(code, fresh(tmp_path / "cache", carrying)) == {"compiled": 1, "loaded": 1}


def test_carried_kernels_of_other_sources_are_not_used(carrying, filled, tmp_path):
    changed = carrying / "qla" / "kernels" / "cp_plan.cuh"
    changed.write_text(changed.read_text() + "\n// changed\n")
    assert build_counting(LOAD, fresh(tmp_path / "cache", carrying)) == {"compiled": 1, "loaded": 0}


def test_a_damaged_library_is_compiled_again(carrying, filled, tmp_path):
    """With a warning; what TileLang's cache holds is loaded from there."""
    library = carrying / "qla" / "kernels" / carried.FOLDER.name / f"{CHEAP}.so"
    library.write_bytes(library.read_bytes()[:-1])
    code = f"""\
import warnings
import qla
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    qla.warmup({CHEAP!r}, verbose=False)
assert "does without kernels that it carries" in str(caught[0].message) and len(caught) == 1"""
    assert build_counting(code, fresh(filled, carrying, nvcc=False)) == {"compiled": 0, "loaded": 1}
    assert build_counting(code, fresh(tmp_path / "cache", carrying)) == {"compiled": 1, "loaded": 0}


CARRIED_THREADS = f"""\
import threading
from qla.kernels import launch
together, functions = threading.Barrier(8), []
def first():
    together.wait()
    functions.append(launch.launcher({CHEAP!r}))
threads = [threading.Thread(target=first) for _ in range(8)]
for thread in threads: thread.start()
for thread in threads: thread.join()
assert len(functions) == 8 and len(set(map(id, functions))) == 1"""


def test_eight_threads_load_what_is_carried_once(carrying, tmp_path):
    code = f"{CARRIED_THREADS}\n{NO_TILELANG}"
    assert build_counting(code, fresh(tmp_path / "cache", carrying, nvcc=False)) == {"compiled": 0, "loaded": 1}


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


@pytest.fixture
def empty_launcher():
    launch.launcher.cache_clear()
    yield
    launch.launcher.cache_clear()


def test_launcher_is_the_compiled_function(monkeypatch, empty_launcher):
    """Found once for each form: what is carried, else what TileLang compiled, without its own loop over the arguments."""
    asked = []

    def build(cfg):
        asked.append(cfg)
        executable = {"main": lambda *arguments: (cfg, arguments)}
        return SimpleNamespace(adapter=SimpleNamespace(get_exportable_executable=lambda: executable))

    module = SimpleNamespace(build=build, config_for=lambda reverse, head_k: f"config {reverse} {head_k}")
    monkeypatch.setitem(sys.modules, "qla.kernels.cp_merge", module)
    monkeypatch.setattr(
        launch.carried, "function", lambda name: asked.append(name) or ((lambda *_: "carried") if "forward" in name else None)
    )
    for _ in range(2):
        assert launch.launcher("cp_merge", True, 64)(1, 2) == ("config True 64", (1, 2))
        assert launch.launcher("cp_merge", False, 128)(1, 2) == "carried"
    assert asked == ["merge_reverse_k64", "config True 64", "merge_forward_k128"]
    assert launch.launcher.cache_info().maxsize is not None


def test_forms_are_those_of_the_listed_variants():
    """What is launched by its name alone is what is built for the form; every listed variant has one."""
    pytest.importorskip("tilelang")
    assert list(launch.FORMS) == list(launch.NAMES) == list(startup.KERNELS)
    for kernel, forms in launch.FORMS.items():
        module = importlib.import_module(f"qla.kernels.{kernel}")
        assert [module.config_for(*form) for form in forms] == list(module.CONFIGS)
        assert [launch.NAMES[kernel](*form) for form in forms] == [cfg.name for cfg in module.CONFIGS]
    assert list(launch.names()) == [cfg.name for _, cfg in startup.variants()]
    assert list(launch.names("float16")) == [cfg.name for _, cfg in startup.variants("float16")]
    kkt = importlib.import_module("qla.kernels.kkt_solve")
    for form in itertools.product(launch.HALVES, range(1, 20), launch.HEAD_DIMS):
        assert launch.NAMES["kkt_solve"](*form) == kkt.config_for(*form).name
    recurrent = importlib.import_module("qla.kernels.recurrent")
    assert launch.NAMES["recurrent"](torch.float32, True, 4) == recurrent.config_for(torch.float32, True, 4).name
    assert recurrent.config_for(torch.float32, True, 4).columns == 4 * launch.COLUMNS


def test_tensors_that_nobody_reads_take_no_memory():
    for dtype in (torch.int32, torch.float32, torch.bfloat16):
        x = launch.unread(torch.device("cpu"), dtype)
        assert x is launch.unread(torch.device("cpu"), dtype)
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
    monkeypatch.setattr(launch, "launcher", lambda kernel, *form: asked.add(launch.NAMES[kernel](*form)) or (lambda *_: None))
    monkeypatch.setattr(autograd, "device_spec", lambda _: DeviceSpec(index=0, capability=(9, 0), sm_count=132))
    monkeypatch.setattr(torch.cuda, "device", lambda _: contextlib.nullcontext())
    monkeypatch.setattr(autograd, "_Beside", lambda _: Beside())
    for dtype, key_dim, value_dim in itertools.product((torch.bfloat16, torch.float16), (64, 128), (64, 128)):
        for (h, hv), num_seqs, seq_len, scale, plan in CALLS:
            tokens = num_seqs * (seq_len or 90)
            q, k, do = (torch.zeros(tokens, *shape, dtype=dtype) for shape in ((h, key_dim), (h, key_dim), (hv, value_dim)))
            v, g, beta = torch.zeros_like(do), torch.zeros(tokens, hv), torch.zeros(tokens, hv)
            cu = None if seq_len else torch.arange(num_seqs + 1, dtype=torch.int32) * 90
            call = autograd.Call(num_seqs, seq_len, scale, False, True, plan)
            done = autograd.launch_forward(q, k, v, g, beta, None, cu, call)
            autograd.launch_backward(q, k, v, done.g_cum, beta, done.A, None, do, None, cu, call, True, done.cut)
    listed = {cfg.name for module, cfg in startup.variants() if module.__name__.rpartition(".")[2] in CHUNKED}
    assert asked <= listed
    assert {name for name in listed if name.startswith("bwd") or "_v128_" not in name} <= asked


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
