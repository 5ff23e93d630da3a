"""Generated CUDA of a kernel for sm_90a, without a GPU and without nvcc."""

import re
from collections.abc import Iterable
from typing import Any

from tilelang import tvm
from tilelang.backend.target import determine_target
from tilelang.engine.lower import lower

from qla.kernels import ws


def generated(kernel_file: Any, cfg: Any, whole: bool = False) -> tuple[int, str]:
    """(bytes of dynamic shared memory, text of the kernel) of one config of a kernel file; whole: with all that stands before it."""
    target = determine_target(ws.TARGET, return_object=True)
    pass_configs = {key.value: value for key, value in kernel_file.PASS_CONFIGS.items()}
    with ws.lowering(), tvm.transform.PassContext(opt_level=3, config=pass_configs), target:
        artifact = lower(kernel_file.prim_func(cfg), target=target, enable_host_codegen=False, enable_device_compile=False)
    (function,) = artifact.device_mod.functions.values()
    source = artifact.kernel_source
    return int(function.attrs.get("dyn_shared_memory_buf", 0)), source if whole else source[source.rindex("__launch_bounds__") :]


def by_role(code: str, roles: Iterable[Any]) -> dict[Any, str]:
    """The kernel's text cut at the roles, named in their order in it: every branch of a role starts by setting its registers."""
    parts = re.split(r"tl::warpgroup_reg_(?:de)?alloc<\d+>\(\);", code)
    return dict(zip(roles, parts[1:], strict=True))


def static(code: str, dtype: str) -> list[int]:
    """Elements of each array of static shared memory of a type, barriers aside."""
    return [int(n) for n in re.findall(rf"__shared__ __align__\(16\) {dtype} \w+\[(\d+)\]", code)]


def place_of(code: str) -> str:
    """Name of the array that holds the block's place."""
    return re.search(rf"__shared__ __align__\(16\) int (\w+)\[{ws.PLACE_FIELDS}\];", code)[1]


def assert_lanes_hold_pairs_of_gates(cfg: Any, code: str, warp: str, arrays: int) -> None:
    """qla_fetch_gates and qla_take_gates rely on lane l having elements 2 l and 2 l + 1 of the 64.

    code, warp: text of the kernel and of its gate warp. arrays: of [stages, 64] floats in shared memory, which the warp fills.
    """
    locals_of_gates = set(re.search(r"qla_take_gates\(\w+, .*, (\w+), (\w+), \w+, \(\(\(int\)threadIdx\.x\) & 31\)\);", warp).groups())
    assert all(f"float {name}[2];" in code for name in locals_of_gates)
    assert {name for name, _ in re.findall(r"\*\(float2\*\)\((\w+) \+ (0)\)", warp)} == locals_of_gates, "whole pairs and nothing else"
    stores = re.findall(r"\*\(float2\*\)\((\w+) \+ (.*threadIdx.*)\) = ", warp)
    assert len({name for name, _ in stores}) == len(stores) == arrays
    first = cfg.threads - 3 * 32  # of the warp
    for _, index in stores:
        stage = re.search(r"(i_\d+) % 3", index)[1]
        for lane in range(32):
            text = index.replace("((int)threadIdx.x)", str(first + lane)).replace(stage, "1")
            assert re.fullmatch(r"[\d ()*+%-]+", text), index
            assert eval(text) == 64 + 2 * lane, index
    assert len(re.findall(r"qla_(?:fetch|take)_gates\(", warp)) == 3, "of the first chunk, of this one, of the next one"


def assert_products_are_waited_for(*texts: str) -> None:
    """Whatever is fenced behind a wait, to be read, belongs to no product that the wait may leave in flight.

    texts: of one warpgroup, in the order in which it comes through them.
    """
    accumulator = r"wgmma_(?:ss|rs)<[^;]*?(?:\(\(uint32_t\*\)\(|reinterpret_cast<uint32_t\*>\()(\w+) \+ 0\)"
    fence = r"\s+tl::warpgroup_fence_operand\(reinterpret_cast<float\*>\((\w+) \+ 0\), 32\);"
    events = rf"{accumulator}|(warpgroup_commit_batch)|wait_wgmma<(\d)>\(\);((?:{fence})*)"
    issued: list[str] = []
    product, checked = "", 0
    for text in texts:
        for name, commit, left, fences, _ in re.findall(events, text):
            if name:
                product = name
            elif commit:
                issued.append(product)
            else:
                issued = issued[len(issued) - int(left) :] if int(left) else []
                for read in re.findall(fence, fences):
                    assert read not in issued, f"{read} is read while its product may run; in flight: {issued}"
                    checked += 1
    assert checked, "no wait found"
