"""Times of GPU functions: CUDA-graph replays, the L2 cache flushed before each one, providers interleaved.

One round flushes L2 and replays each provider once, so that clocks and temperature drift over all of them alike. The
events stand after the flush and after the replay on one stream: the flush is not in the time. The host runs ahead of
the GPU, so launching costs nothing either, except for a provider that waits for the GPU on the host: such a one cannot
be captured, is called directly ("eager") and pays for its waiting, as its users do.

Rounds come in batches. With `settled` they end before `reps` as soon as the middle half of every provider's times lies
within that fraction of its median: the median of ten such times is as good as that of thirty, since versions that do not
differ are 3 % apart from one run to the next anyway.

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

BATCH = 10  # rounds after which the spread is looked at
FLUSH_BYTES = 256 << 20  # several times the 60 MB of L2, and long enough (60 us) for the host to queue the next launches


@dataclass(frozen=True)
class Timing:
    """Milliseconds of one provider: median, extremes, how it was run ("graph" or "eager"), the clock, and of how many rounds."""

    ms: float
    ms_min: float
    ms_max: float
    mode: str
    sm_mhz: int | None = None
    reps: int | None = None


def summarise(samples: list[float], mode: str, sm_mhz: int | None = None) -> Timing:
    return Timing(statistics.median(samples), min(samples), max(samples), mode, sm_mhz, len(samples))


def relative_spread(samples: list[float]) -> float:
    """Width of the middle half of the samples, over their median; infinite for fewer than two."""
    if len(samples) < 2:
        return float("inf")
    lower, median, upper = statistics.quantiles(samples, n=4, method="inclusive")
    return (upper - lower) / median


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


def time_interleaved(runnables: Mapping[str, Runnable], reps: int = 30, warmups: int = 3, settled: float = 0.0) -> dict[str, Timing]:
    """Medians and extremes over at most `reps` rounds, each of which runs every runnable once after a flush of L2.

    settled: relative spread (see `relative_spread`) of every runnable at which fewer rounds are enough; 0: never.
    """
    if not runnables:
        return {}
    flush = torch.empty(FLUSH_BYTES // 4, dtype=torch.float32, device="cuda")
    samples: dict[str, list[float]] = {name: [] for name in runnables}
    rounds, clock = 0, None
    while rounds < reps:
        batch = min(BATCH, reps - rounds) if settled else reps
        events = _run_rounds(runnables, flush, (0 if rounds else warmups) + batch)
        clock = sm_clock()  # read while the GPU still works through the queue
        torch.cuda.synchronize()
        for name, pairs in events.items():
            samples[name] += [start.elapsed_time(end) for start, end in pairs[-batch:]]
        rounds += batch
        if all(relative_spread(times) <= settled for times in samples.values()):
            break
    return {name: summarise(times, runnables[name].mode, clock) for name, times in samples.items()}


def _run_rounds(
    runnables: Mapping[str, Runnable], flush: torch.Tensor, rounds: int
) -> dict[str, list[tuple[torch.cuda.Event, torch.cuda.Event]]]:
    """Enqueues this many rounds; by runnable, the events before and after it in each of them."""
    events: dict[str, list[tuple[torch.cuda.Event, torch.cuda.Event]]] = {name: [] for name in runnables}
    for _ in range(rounds):
        for name, runnable in runnables.items():
            start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            flush.zero_()
            start.record()
            runnable.run()
            end.record()
            events[name].append((start, end))
    return events


def sm_clock() -> int | None:
    """The SM clock in MHz, or None where it cannot be read."""
    try:
        return int(torch.cuda.clock_rate())
    except Exception:  # no management library, or a machine that hides it: the time stands without the clock
        return None
