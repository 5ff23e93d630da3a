"""Generated CUDA of a kernel for sm_90a, without a GPU and without nvcc."""

import re
from collections.abc import Iterable
from typing import Any

from tilelang import tvm
from tilelang.backend.target import determine_target
from tilelang.engine.lower import lower

from qla.kernels import ws


def generated(kernel_file: Any, cfg: Any) -> tuple[int, str]:
    """(bytes of dynamic shared memory, text of the kernel) of one config of a kernel file."""
    target = determine_target(ws.TARGET, return_object=True)
    pass_configs = {key.value: value for key, value in kernel_file.PASS_CONFIGS.items()}
    with ws.lowering(), tvm.transform.PassContext(opt_level=3, config=pass_configs), target:
        artifact = lower(kernel_file.prim_func(cfg), target=target, enable_host_codegen=False, enable_device_compile=False)
    (function,) = artifact.device_mod.functions.values()
    source = artifact.kernel_source
    return int(function.attrs["dyn_shared_memory_buf"]), source[source.rindex("__launch_bounds__") :]


def by_role(code: str, roles: Iterable[Any]) -> dict[Any, str]:
    """The kernel's text cut at the roles, named in their order in it: every branch of a role starts by setting its registers."""
    parts = re.split(r"tl::warpgroup_reg_(?:de)?alloc<\d+>\(\);", code)
    return dict(zip(roles, parts[1:], strict=True))
