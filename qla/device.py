"""Facts about a CUDA device that the kernels' launchers need. Read on first use, never at import."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from functools import cache

import torch


@dataclass(frozen=True)
class DeviceSpec:
    """One CUDA device as the launchers see it.

    index: CUDA device index.
    capability: compute capability, (9, 0) on Hopper.
    sm_count: number of streaming multiprocessors.
    """

    index: int
    capability: tuple[int, int]
    sm_count: int


def device_spec(device: torch.device | int | str) -> DeviceSpec:
    """The facts of one CUDA device, read once per index.

    device: a CUDA device, its index, or a string such as "cuda:1"; "cuda" alone is the current device.
    Raises ValueError for a device that is not CUDA.
    """
    if isinstance(device, int):
        return _spec_of_index(device)
    if isinstance(device, str):
        device = torch.device(device)
    if device.type != "cuda":
        raise ValueError(f"device must be a CUDA device, got {device}")
    return _spec_of_index(torch.cuda.current_device() if device.index is None else device.index)


@cache
def _spec_of_index(index: int) -> DeviceSpec:
    properties = torch.cuda.get_device_properties(index)
    return DeviceSpec(
        index=index,
        capability=(properties.major, properties.minor),
        sm_count=properties.multi_processor_count,
    )


_AS_IT_IS = contextlib.nullcontext()


def on_device(device: torch.device) -> contextlib.AbstractContextManager[object]:
    """Context in which ``device`` is the current CUDA device: where it is so already, one that does nothing, which takes the host less."""
    index = device.index
    return _AS_IT_IS if index is None or index == torch.cuda.current_device() else torch.cuda.device(device)
