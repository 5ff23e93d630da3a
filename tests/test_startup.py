"""The first call of a fresh process on the GPU: nothing is compiled that a cache or the package holds, by any thread, process or device.

Times are printed (pytest -s), not judged: bench/startup.py measures them.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from gradients import Losses, gradients_of, make_losses
from problems import DEVICE, gpu_marks, make_inputs

import qla
from bench.first_call import counted
from bench.startup import ROOT, first_call
from qla.autocp import Plan
from qla.kernels import carried

pytestmark = gpu_marks(
    pytest.mark.skipif(DEVICE == "cpu", reason="needs the kernels: test_startup_cpu.py has stand-ins"),
    pytest.mark.xdist_group("start-up"),  # with --dist loadgroup: what they share is made once
    seconds=600,
)

TWO_GPUS = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
LIMIT = 5e-3  # relative error of o in bfloat16, as everywhere


def check(result: dict[str, object], what: str, compiled: int = 0) -> None:
    seconds = [f"{name} {result[name]} s" for name in ("first_result", "ours", "first_call", "second_call")]
    print(f"\n{what}: {', '.join(seconds)}, {result['loaded']} loaded")
    assert result["compiled"] == compiled and result["same"] and float(str(result["error"])) < LIMIT, result


@pytest.fixture(scope="module")
def filled(tmp_path_factory) -> Path:
    """A cache with every variant, from qla.warmup() in a process that began with an empty one."""
    folder = tmp_path_factory.mktemp("filled")
    result = first_call(ROOT, folder, "--warmup")
    print(f"\nqla.warmup() with an empty cache: {result['warmup']} s")
    return folder


@pytest.fixture(scope="module")
def carrying(filled, tmp_path_factory) -> Path:
    """A folder with the package and all its kernels, as a wheel of `make wheel` installs them."""
    folder = tmp_path_factory.mktemp("site")
    shutil.copytree(ROOT / "qla", folder / "qla", ignore=shutil.ignore_patterns("__pycache__"))
    out = folder / "qla" / "kernels" / carried.FOLDER.name
    subprocess.run([sys.executable, "-m", "qla.aot", "--pack", str(out), "--cache", str(filled)], cwd=ROOT, check=True, timeout=300)
    facts = json.loads((out / carried.FACTS).read_text())
    (out / carried.FACTS).write_text(json.dumps({**facts, "cuda": "1.0"}))  # by whatever compiler: it ran on this machine
    return folder


@pytest.fixture(scope="module")
def needed(filled) -> int:
    """Kernels that the program's forward call needs."""
    result = first_call(ROOT, filled, with_nvcc=False)
    check(result, "filled cache")
    return int(result["loaded"])


def test_filled_cache(filled):
    check(first_call(ROOT, filled, "--backward", with_nvcc=False), "filled cache, with a backward pass")


def test_carried_kernels(carrying, tmp_path):
    for what in ("carried kernels, empty cache", "carried kernels, filled cache"):
        result = first_call(carrying, tmp_path, "--backward", with_nvcc=False)
        assert str(result["qla"]).startswith(str(carrying)) and "import_tilelang" not in result
        check(result, what)
    assert not list(tmp_path.iterdir()), "nothing is written"


def test_eight_processes_with_carried_kernels(carrying, tmp_path):
    with ThreadPoolExecutor(8) as pool:
        for result in pool.map(lambda _: first_call(carrying, tmp_path, with_nvcc=False), range(8)):
            check(result, "one of eight processes, carried kernels")


def test_eight_processes_with_one_empty_cache(tmp_path):
    with ThreadPoolExecutor(8) as pool:
        results = list(pool.map(lambda _: first_call(ROOT, tmp_path), range(8)))
    for result in results:
        check(result, "one of eight processes, empty cache", result["compiled"])  # or found what another had compiled
    check(first_call(ROOT, tmp_path, with_nvcc=False), "a ninth, afterwards")


def test_eight_threads_load_once(filled, needed):
    result = first_call(ROOT, filled, "--threads", "8", with_nvcc=False)
    check(result, "eight threads, filled cache")
    assert result["loaded"] == needed


def test_eight_threads_compile_once(needed, tmp_path):
    check(first_call(ROOT, tmp_path, "--threads", "8"), "eight threads, empty cache", compiled=needed)


def test_eight_threads_load_what_is_carried_once(carrying, needed, tmp_path):
    result = first_call(carrying, tmp_path, "--threads", "8", with_nvcc=False)
    check(result, "eight threads, carried kernels")
    assert result["loaded"] == needed


@TWO_GPUS
def test_another_device_than_the_current_one(filled, needed):
    """cuda:0 is current in a fresh process; the call, forward and backward, is on cuda:1."""
    check(first_call(ROOT, filled, "--devices", "1", "--backward", with_nvcc=False), "cuda:1")


@TWO_GPUS
def test_threads_on_two_devices(filled, needed):
    result = first_call(ROOT, filled, "--devices", "0,1", "--threads", "8", with_nvcc=False)
    check(result, "eight threads on two devices")
    assert result["loaded"] == needed


@TWO_GPUS
def test_devices_give_the_same_bits(rng):
    """In one process, cuda:0 current: a device that had no call yet gives what the other gives, gradients too."""
    x = make_inputs(rng, [700, 64, 1], (2, 8))
    losses = make_losses(rng, x)
    results = []
    for device in ("cuda:0", "cuda:1"):
        there = x.with_(**{name: getattr(x, name).to(device) for name in ("q", "k", "v", "g", "beta", "h0", "cu")})
        with torch.cuda.device("cuda:0"):
            results.append([*there.run(), *gradients_of(there, Losses(*(t.to(device) for t in losses))).values()])
            torch.cuda.synchronize(device)
    for a, b in zip(*results, strict=True):
        assert b.device == torch.device("cuda:1") and torch.equal(a.cpu(), b.cpu())


def test_nothing_compiles_again(rng):
    """After a warm-up: head counts, batches, lengths, scales, head sizes, layouts, plans, forward and backward."""
    qla.warmup(verbose=False)
    with counted() as counts:
        for dtype in (torch.bfloat16, torch.float16):
            for heads in ((1, 1), (2, 8), (3, 6), (16, 64)):
                for tokens, batch, options in (
                    (64, 1, {}),
                    (130, 3, {"scale": 0.7}),
                    ([700, 0, 5], 1, {"state_v_first": True, "auto_cp": Plan(4, 1, 1, 2, 4)}),
                    (1500, 1, {"auto_cp": Plan(4, 2, 0, 1, 4)}),
                    ([64] * 9, 1, {"scale": 0.0}),
                    (300, 1, {"use_qk_l2norm_in_kernel": True, "use_beta_sigmoid_in_kernel": True}),
                ):
                    x = make_inputs(rng, tokens, heads, batch=batch, dims=(128, 128) if batch == 1 else (96, 64), dtype=dtype)
                    leaves = [t.clone().requires_grad_() for t in x.tensors]
                    o, state = qla.chunk_gated_delta_rule(*leaves, initial_state=x.h0, output_final_state=True, cu_seqlens=x.cu, **options)
                    (o.float().sum() + state.sum()).backward()
        torch.cuda.synchronize()
    assert counts == {"compiled": 0, "loaded": 0}
