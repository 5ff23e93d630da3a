"""Compiles every variant ahead of time, on a machine that needs no GPU, and reports what the compiler made of it.

    python -m qla.aot --out DIR
    python -m qla.aot --pack DIR

DIR then holds TileLang's cache: with TILELANG_CACHE_DIR=DIR a machine with a GPU starts without compiling. Printed for each
variant: registers, spilled bytes, shared memory, compile time, and for warp-specialised kernels the same by role where
nvdisasm is found (CUDA's, or the one of the package nvidia-cuda-nvdisasm). The exit status is 1 if a role that computes
spills more than its config explains, or if something spills and nobody knows where; a producer that spills costs little.

With --pack, DIR is the folder of all variants that a wheel carries (``make wheel``; qla/kernels/carried.py), built anew and without
reports, or taken from a cache that is named (--cache).
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from qla.startup import Progress, build_all, cpus, variants

ARCH = ("-gencode=arch=compute_90a,code=sm_90a",)


@dataclass(frozen=True)
class Resources:
    """What ptxas says about a kernel: registers a thread, bytes of stack, spills and static shared memory, and its warnings."""

    registers: int
    stack: int
    spill_stores: int
    spill_loads: int
    static_smem: int
    warnings: tuple[str, ...] = ()

    @property
    def spills(self) -> int:
        return self.spill_stores + self.spill_loads


@dataclass(frozen=True)
class RoleCode:
    """One role's machine code: its register budget, instructions, highest register, loads and stores of local memory."""

    name: str
    budget: int | None
    instructions: int
    highest_register: int
    local_loads: int
    local_stores: int
    computes: bool

    @property
    def local(self) -> int:
        return self.local_loads + self.local_stores


@dataclass(frozen=True)
class Report:
    """One compiled variant."""

    name: str
    threads: int
    smem: int
    seconds: float
    resources: Resources
    roles: tuple[RoleCode, ...] = field(default=())
    explained: int = 0  # loads and stores of local memory that a computing role may have; the config says why

    @property
    def problem(self) -> str | None:
        """Why the variant is not acceptable, or None."""
        if self.resources.spills == 0:
            return None
        if not self.roles:
            return f"{self.resources.spills} bytes of spills (by which role is not known: the kernel has none, or nvdisasm is missing)"
        spilling = [role.name for role in self.roles if role.computes and role.local > self.explained]
        return f"spills in {', '.join(spilling)}" if spilling else None


def parse_ptxas(text: str) -> Resources:
    """Reads the output of ``nvcc -Xptxas -v``. Spills and stacks of functions that were not inlined are added up."""
    registers = [int(x) for x in re.findall(r"Used (\d+) registers", text)]
    if not registers:
        raise ValueError(f"no 'Used N registers' in the compiler's output: {text[-500:]!r}")
    frames = re.findall(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads", text)
    stack, stores, loads = (sum(int(frame[i]) for frame in frames) for i in range(3))
    smem = max((int(x) for x in re.findall(r"(\d+) bytes smem", text)), default=0)
    found = re.findall(r"^ptxas.*(?:warning|\(C\d{4}\)).*$", text, re.MULTILINE)
    return Resources(max(registers), stack, stores, loads, smem, tuple(dict.fromkeys(line.strip() for line in found)))


def split_roles(sass: str, budgets: Mapping[str, int]) -> tuple[RoleCode, ...]:
    """Cuts machine code into roles: each begins by setting its register budget (USETMAXREG).

    budgets: role -> registers. What stands before the first role is named "entry". The role with the smallest budget is
    the producer: it does not compute. Blocks that the compiler moved to the end count for the role that stands last.
    """
    sections: list[tuple[int | None, list[str]]] = [(None, [])]
    for instruction in re.findall(r"/\*[0-9a-f]{4,6}\*/\s+(.*?);", sass):
        if "USETMAXREG" in instruction:
            value = int(re.findall(r"0x[0-9a-f]+|\b\d+\b", instruction)[-1], 0)
            # an allocation may be tried again in a loop: still the same role
            if sections[-1][0] != value:
                sections.append((value, []))
        sections[-1][1].append(instruction)
    if len(sections) == 1:
        return ()
    smallest = min(budgets.values(), default=0)

    def role(budget: int | None, code: list[str]) -> RoleCode:
        named = [name for name, registers in budgets.items() if registers == budget]
        name = "entry" if budget is None else "/".join(named) or f"{budget} registers"
        highest = max((int(r) for line in code for r in re.findall(r"\bR(\d+)\b", line)), default=-1)
        loads, stores = (sum(op in line for line in code) for op in ("LDL", "STL"))
        return RoleCode(name, budget, len(code), highest, loads, stores, budget is None or budget > smallest)

    return tuple(role(budget, code) for budget, code in sections)


def format_report(reports: Iterable[Report]) -> str:
    """A table with one line a variant, below each the lines of its roles and the compiler's warnings."""
    lines = [f"{'variant':34} {'threads':>7} {'regs':>5} {'spill B':>8} {'stack B':>8} {'smem B':>8} {'seconds':>8}"]
    for report in reports:
        r = report.resources
        smem = report.smem + r.static_smem
        lines.append(f"{report.name:34} {report.threads:7} {r.registers:5} {r.spills:8} {r.stack:8} {smem:8} {report.seconds:8.1f}")
        for role in report.roles:
            budget = "-" if role.budget is None else str(role.budget)
            lines.append(
                f"    {role.name:30} budget {budget:>4}, highest register {role.highest_register:3}, {role.instructions:5} instructions, "
                f"local loads {role.local_loads}, stores {role.local_stores}"
            )
        lines += [f"    {warning}" for warning in r.warnings]
        if report.problem:
            lines.append(f"    NOT ACCEPTABLE: {report.problem}")
    return "\n".join(lines)


def find_tool(name: str) -> str | None:
    """A CUDA tool on PATH, in CUDA_HOME, or in a Python package that carries it."""
    found = shutil.which(name)
    if found:
        return found
    home = os.environ.get("CUDA_HOME") or os.environ.get("CUDA_PATH")
    candidates = [Path(home) / "bin"] if home else []
    for entry in map(Path, sys.path):
        candidates += [entry / "nvidia" / "cu13" / "bin", entry / "triton" / "backends" / "nvidia" / "bin"]
    return next((str(place / name) for place in candidates if (place / name).is_file()), None)


def compile_command(nvcc: str, pass_configs: Mapping[Any, Any], source: Path, cubin: Path) -> list[str]:
    """nvcc as TileLang calls it (tilelang 0.1.15), with ptxas told to report."""
    spec = importlib.util.find_spec("tilelang")
    if spec is None or spec.origin is None:
        raise RuntimeError("tilelang is not installed")
    root = Path(spec.origin).parent
    configs = {str(getattr(key, "value", key)): value for key, value in pass_configs.items()}
    flags = ["-std=c++20", f"-I{root / 'src'}", f"-I{root / '3rdparty' / 'cutlass' / 'include'}"]
    extra = configs.get("tl.device_compile_flags") or []
    flags += extra.split() if isinstance(extra, str) else [token for flag in extra for token in str(flag).split()]
    if configs.get("tl.enable_fast_math"):
        flags.append("--use_fast_math")
    if configs.get("tl.ptxas_register_usage_level") is not None:
        flags.append(f"--ptxas-options=--register-usage-level={configs['tl.ptxas_register_usage_level']}")
    return [nvcc, "--cubin", "-O3", "-lineinfo", *ARCH, *flags, "-Xptxas", "-v", "-o", str(cubin), str(source)]


def inspect_source(
    source: str, pass_configs: Mapping[Any, Any], budgets: Mapping[str, int], keep: Path | None, name: str
) -> tuple[Resources, tuple[RoleCode, ...]]:
    """Compiles generated CUDA once more, for the compiler's report and the machine code. Raises RuntimeError where nvcc fails."""
    nvcc = find_tool("nvcc")
    if nvcc is None:
        raise RuntimeError("nvcc is not on PATH and not in CUDA_HOME")
    with tempfile.TemporaryDirectory() as scratch:
        folder = keep or Path(scratch)
        folder.mkdir(parents=True, exist_ok=True)
        code, cubin = folder / f"{name}.cu", folder / f"{name}.cubin"
        code.write_text(source, encoding="utf-8")
        done = subprocess.run(compile_command(nvcc, pass_configs, code, cubin), capture_output=True, text=True, check=False)
        output = done.stdout + done.stderr
        if done.returncode:
            raise RuntimeError(f"nvcc failed on {name}: {output[-3000:]}")
        resources = parse_ptxas(output)
        sass = disassemble(cubin)
        if keep and sass:
            (folder / f"{name}.sass").write_text(sass, encoding="utf-8")
        return resources, split_roles(sass, budgets) if budgets else ()


def disassemble(cubin: Path) -> str:
    """Machine code of a cubin as text; empty where nvdisasm is missing or fails."""
    nvdisasm = find_tool("nvdisasm")
    if nvdisasm is None:
        return ""
    return subprocess.run([nvdisasm, "-c", str(cubin)], capture_output=True, text=True, check=False).stdout


def role_budgets(cfg: Any) -> dict[str, int]:
    """Registers by role of a warp-specialised config; empty for a kernel without roles."""
    return {getattr(role, "name", str(role)): int(registers) for role, registers in getattr(cfg, "regs", {}).items()}


def compile_all(only: str, jobs: int, keep: Path | None) -> Iterator[Report]:
    """Builds the variants, then makes their reports, ``jobs`` at a time either way."""
    seconds = build_all(only, jobs)
    pending: list[tuple[Any, Future[tuple[Resources, tuple[RoleCode, ...]]]]] = []
    with ThreadPoolExecutor(max_workers=jobs) as pool, Progress("reports", len(seconds), True) as progress:
        for module, cfg in variants(only):
            kernel = module.build(cfg)
            future = pool.submit(inspect_source, kernel.get_kernel_source(), kernel.pass_configs or {}, role_budgets(cfg), keep, cfg.name)
            future.add_done_callback(lambda _: progress.step())
            pending.append((cfg, future))
        found = [future.result() for _, future in pending]
    for (cfg, _), (resources, roles) in zip(pending, found, strict=True):
        explained = int(getattr(cfg, "explained_spills", 0))
        yield Report(cfg.name, int(cfg.threads), int(cfg.smem_bytes), seconds[cfg.name], resources, roles, explained)


def pack_all(only: str, jobs: int, out: Path, cache: Path | None) -> int:
    """Builds the variants in a folder of their own, or in this cache, and packs them. Returns their number."""
    with tempfile.TemporaryDirectory() as scratch:
        folder = cache or Path(scratch)
        # Read by TileLang whenever it looks for a kernel.
        os.environ["TILELANG_CACHE_DIR"] = str(folder.resolve())
        if not build_all(only, jobs):
            return 0
        from qla.kernels import carried

        return int(carried.pack(libraries(folder, only), out, nvcc_version()))


def libraries(cache: Path, only: str = "") -> dict[str, Path]:
    """The libraries of the variants, which are built, in a cache of TileLang's. Raises RuntimeError if one is not there.

    A kernel that TileLang has loaded knows its library. One that it has compiled in this process does not: it lies beside the CUDA C++
    that was generated for it.
    """
    sources = {(path.parent / "device_kernel.cu").read_text(): path.parent for path in cache.rglob("manifest.json")}
    found: dict[str, Path] = {}
    for module, cfg in variants(only):
        kernel = module.build(cfg)
        path = Path(getattr(kernel.adapter, "libpath", None) or sources.get(kernel.get_kernel_source(), cache) / "executable.so")
        if not path.is_file() or cache.resolve() not in path.resolve().parents:
            raise RuntimeError(f"{cfg.name} is not in {cache}")
        found[cfg.name] = path
    return found


def nvcc_version() -> str:
    """Version of CUDA's compiler, such as "13.0". Raises RuntimeError where it does not say."""
    nvcc = find_tool("nvcc")
    text = subprocess.run([nvcc, "--version"], capture_output=True, text=True, check=False).stdout if nvcc else ""
    found = re.search(r"release (\d+\.\d+)", text)
    if found is None:
        raise RuntimeError(f"{nvcc or 'nvcc'} does not give its version: {text!r}")
    return found[1]


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m qla.aot", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    target = parser.add_mutually_exclusive_group(required=True)
    target.add_argument("--out", type=Path, metavar="DIR", help="where the compiled kernels go (a TILELANG_CACHE_DIR)")
    target.add_argument("--pack", type=Path, metavar="DIR", help="write the folder that a wheel carries instead")
    parser.add_argument("--cache", type=Path, metavar="DIR", help="with --pack: a TILELANG_CACHE_DIR to take kernels from")
    parser.add_argument("--only", default="", metavar="TEXT", help="only the variants whose name holds TEXT")
    parser.add_argument("--jobs", type=int, default=cpus(), metavar="N", help="processes at a time (default: one for each CPU)")
    parser.add_argument("--keep", type=Path, default=None, metavar="DIR", help="keep generated source, cubin and machine code there")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    args = make_parser().parse_args(argv)
    started = time.monotonic()
    if args.pack is not None:
        count = pack_all(args.only, args.jobs, args.pack, args.cache)
        size = sum(path.stat().st_size for path in args.pack.iterdir()) if count else 0
        print(f"{count} variants in {time.monotonic() - started:.0f} s: {args.pack}, {size / 1e6:.1f} MB")
        return 0 if count else 1
    os.environ["TILELANG_CACHE_DIR"] = str(args.out.resolve())
    reports = list(compile_all(args.only, args.jobs, args.keep))
    print(format_report(reports))
    print(f"{len(reports)} variants in {time.monotonic() - started:.0f} s, in {args.out}")
    return 1 if not reports or any(report.problem for report in reports) else 0


if __name__ == "__main__":
    sys.exit(main())
