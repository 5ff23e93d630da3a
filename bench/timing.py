"""Times of GPU functions: CUDA-graph replays, the L2 cache flushed before each one, providers interleaved.

One round flushes L2 and replays each provider once, so that clocks and temperature drift over all of them alike. The
events stand after the flush and after the replay on one stream: the flush is not in the time. The host runs ahead of
the GPU, so launching costs nothing either, except for a provider that waits for the GPU on the host: such a one cannot
be captured, is called directly ("eager") and pays for its waiting, as its users do.

What is timed is given as a function that first does what must come before and returns the timed part (`Start`). For a
backward pass that is its forward pass: autograd runs a backward operation on the stream of its forward operation, so
`start` is called on the stream that captures, before the capture, or on the stream of the events where there is none.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch

Start = Callable[[], Callable[[], object]]

FLUSH_BYTES = 256 << 20  # several times the 60 MB of L2, and long enough (60 us) for the host to queue the next launches


@dataclass(frozen=True)
class Timing:
    """Milliseconds of one provider: median, extremes, and how it was run ("graph" or "eager")."""

    ms: float
    ms_min: float
    ms_max: float
    mode: str
    sm_mhz: int | None = None


def summarise(samples: list[float], mode: str, sm_mhz: int | None = None) -> Timing:
    return Timing(statistics.median(samples), min(samples), max(samples), mode, sm_mhz)


@dataclass(frozen=True)
class Runnable:
    """A function made ready for timing: `run` enqueues it once; `keep` holds what a graph reads and writes."""

    run: Callable[[], object]
    mode: str
    keep: object = None


def at_once(function: Callable[[], object]) -> Start:
    """The start of a function that needs nothing before it."""
    return lambda: function


def waits_on_host(function: Callable[[], object]) -> bool:
    """Whether PyTorch sees the function wait for the GPU (a copy to the host, .item()): capture would fail."""
    previous = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("error")
    try:
        function()
    except RuntimeError as error:
        if "synchroniz" not in str(error):
            raise
        return True
    finally:
        torch.cuda.set_sync_debug_mode(previous)
    return False


def make_runnable(start: Start, warmups: int = 2) -> Runnable:
    """Warms the timed part up and captures it in a CUDA graph; where that cannot be done, the timed part itself."""
    return capture(start, warmups) or run_directly(start)


def capture(start: Start, warmups: int) -> Runnable | None:
    """The timed part as a CUDA graph; None where it waits on the host or cannot be captured."""
    stream, outside = torch.cuda.Stream(), torch.cuda.current_stream()
    stream.wait_stream(outside)
    with torch.cuda.stream(stream):
        function = start()
        for _ in range(warmups):
            function()
        torch.cuda.synchronize()
        waits = waits_on_host(function)
    torch.cuda.synchronize()
    if waits:
        return None
    graph = torch.cuda.CUDAGraph()
    try:
        with torch.cuda.graph(graph, stream=stream):
            outputs = function()
    except Exception:  # whatever a library raises when a launch is not allowed in a capture
        torch.cuda.set_stream(outside)  # a capture that cannot even be ended leaves its own stream current
        torch.cuda.synchronize()
        return None
    graph.replay()
    torch.cuda.synchronize()
    # The function is kept, too: it holds what the forward pass saved, which the graph reads.
    return Runnable(graph.replay, "graph", (graph, outputs, function))


def run_directly(start: Start) -> Runnable:
    """The timed part as it is, on the current stream; called once, so that a fault of its own comes up here."""
    function = start()
    function()
    torch.cuda.synchronize()
    return Runnable(function, "eager")


def time_interleaved(runnables: Mapping[str, Runnable], reps: int = 30, warmups: int = 3) -> dict[str, Timing]:
    """Medians and extremes over `reps` rounds, each of which runs every runnable once after a flush of L2."""
    if not runnables:
        return {}
    flush = torch.empty(FLUSH_BYTES // 4, dtype=torch.float32, device="cuda")
    events: dict[str, list[tuple[torch.cuda.Event, torch.cuda.Event]]] = {name: [] for name in runnables}
    for round_number in range(warmups + reps):
        for name, runnable in runnables.items():
            start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            flush.zero_()
            start.record()
            runnable.run()
            end.record()
            if round_number >= warmups:
                events[name].append((start, end))
    clock = sm_clock()  # read while the GPU still works through the queue
    torch.cuda.synchronize()
    return {
        name: summarise([start.elapsed_time(end) for start, end in pairs], runnables[name].mode, clock) for name, pairs in events.items()
    }


def sm_clock() -> int | None:
    """The SM clock in MHz, or None where it cannot be read."""
    try:
        return int(torch.cuda.clock_rate())
    except Exception:  # no management library, or a machine that hides it: the time stands without the clock
        return None
