"""How long a fresh process takes to its first result: with an empty cache and qla.warmup(), with a filled cache, with carried kernels.

    python bench/startup.py                        on a Hopper GPU with nvcc; appends to bench/results/startup.jsonl
    python bench/startup.py --wheel dist/qla-*.whl        what `make wheel` made, instead of building the kernels that are carried

Each measurement is a process of its own (bench/first_call.py), without what others have left in caches but the operating system's. A line
holds seconds by step; ``first_result`` is their sum up to the first forward pass, ``ours`` the part of it that is neither PyTorch's
import nor the context on the GPU, and ``process`` what the whole process took.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

if not __package__:  # run as a file: the repository root belongs on the path, this folder does not
    sys.path[0] = str(Path(__file__).resolve().parents[1])

from bench.facts import ROOT, append_line, environment  # noqa: E402

RESULTS = ROOT / "bench" / "results" / "startup.jsonl"
PROGRAM = ROOT / "bench" / "first_call.py"
LIMIT = 600  # seconds


def install(folder: Path, wheel: Path | None = None) -> Path:
    """A folder for PYTHONPATH with the package and the kernels it carries: those of a wheel, or built now. Returns the folder."""
    if wheel is not None:
        with zipfile.ZipFile(wheel) as file:
            file.extractall(folder)
    else:
        shutil.copytree(ROOT / "qla", folder / "qla", ignore=shutil.ignore_patterns("__pycache__"))
        compiled = folder / "qla" / "kernels" / "compiled"
        subprocess.run([sys.executable, "-m", "qla.aot", "--pack", str(compiled)], cwd=ROOT, check=True, timeout=LIMIT)
    return folder


def first_call(package: Path, cache: Path, *options: str, with_nvcc: bool = True) -> dict[str, Any]:
    """What the program says of one fresh process, with the seconds that the process took. Raises RuntimeError if it fails.

    package: folder that holds qla; cache: TILELANG_CACHE_DIR; with_nvcc=False hides CUDA's compiler, to show that nothing needs it.
    """
    paths = os.pathsep.join(filter(None, [str(package), os.environ.get("PYTHONPATH", "")]))
    environment = os.environ | {"PYTHONPATH": paths, "TILELANG_CACHE_DIR": str(cache), "TILELANG_PRINT_ON_COMPILATION": "0"}
    if not with_nvcc:
        folders = [folder for folder in os.environ.get("PATH", "").split(os.pathsep) if not Path(folder, "nvcc").exists()]
        environment |= {"PATH": os.pathsep.join(folders), "CUDA_HOME": "/nonexistent"}
    started = time.perf_counter()
    done = subprocess.run([sys.executable, str(PROGRAM), *options], env=environment, capture_output=True, text=True, timeout=LIMIT)
    seconds = time.perf_counter() - started
    if done.returncode:
        raise RuntimeError(f"{' '.join(options) or 'the first call'}: {done.stdout[-2000:]}{done.stderr[-4000:]}")
    return dict(json.loads(done.stdout.splitlines()[-1])) | {"process": round(seconds, 4)}


def measurements(folder: Path, wheel: Path | None, rounds: int, options: Sequence[str]) -> Iterator[dict[str, Any]]:
    """All measurements, each with the key ``start``, as they are made."""
    carrying = install(folder / "carrying", wheel)
    for number in range(rounds):
        cache = folder / f"cache {number}"
        for start, package, place, more in (
            ("empty cache, warmup", ROOT, cache, ["--warmup"]),
            ("filled cache", ROOT, cache, []),
            ("carried, empty cache", carrying, folder / f"second cache {number}", []),
        ):
            result = first_call(package, place, *options, *more, with_nvcc=start == "empty cache, warmup")
            seconds = f"first result {result['first_result']:6.2f} s, ours {result['ours']:6.2f} s"
            print(f"{start:24} {seconds}, {result['compiled']} compiled", flush=True)
            yield {"start": start, "round": number} | result


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--wheel", type=Path, help="a wheel that carries kernels")
    parser.add_argument("--rounds", type=int, default=2, metavar="N", help="times that everything is measured (default: 2)")
    parser.add_argument("--devices", default="0", help="as of bench/first_call.py")
    parser.add_argument("--results", type=Path, default=RESULTS, metavar="FILE")
    args = parser.parse_args(argv)
    facts = environment() | {"cpus": len(os.sched_getaffinity(0))}
    with tempfile.TemporaryDirectory() as folder:
        for record in measurements(Path(folder), args.wheel, args.rounds, ["--devices", args.devices, "--backward"]):
            append_line(args.results, record | facts)
    return 0


if __name__ == "__main__":
    sys.exit(main())
