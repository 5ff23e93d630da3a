"""One fresh process from its start to its first results, as a line of JSON; ``bench/startup.py`` starts it, and the tests.

    python bench/first_call.py [--warmup] [--threads 8] [--devices 0,1] [--backward]

Threads make their first call at the same time, in turn on the devices named. Seconds are given for each step ("context" makes the
inputs, too), and besides: ``compiled``, the kernels that TileLang compiled; ``loaded``, those it found in its cache; ``error``, the
largest relative error of o against float64; ``same``, whether all threads on a device got the bits of a later call there.
"""

from __future__ import annotations

import time

BEGIN = time.perf_counter()  # before the imports that are measured

import argparse  # noqa: E402
import contextlib  # noqa: E402
import json  # noqa: E402
import sys  # noqa: E402
import threading  # noqa: E402
from collections.abc import Iterator, Sequence  # noqa: E402
from pathlib import Path  # noqa: E402
from typing import Any  # noqa: E402

if not __package__:  # run as a file: this folder's modules are nobody's business, and a qla on PYTHONPATH comes before the repository's
    here = Path(__file__).resolve().parent
    sys.path = [*(path for path in sys.path if path != str(here)), str(here.parent)]


@contextlib.contextmanager
def counted() -> Iterator[dict[str, int]]:
    """Context in which it is counted how many kernels TileLang compiles and how many it finds in its cache on disk."""
    from tilelang.jit.kernel import JITKernel

    counts = {"compiled": 0, "loaded": 0}
    # Every way to a kernel goes through one of these two methods of tilelang 0.1.15.
    names = {"compiled": "_compile_and_create_adapter", "loaded": "_create_adapter_from_database"}
    originals = {key: getattr(JITKernel, name) for key, name in names.items()}

    def counting(key: str) -> Any:
        def method(*args: Any, **kwargs: Any) -> Any:
            counts[key] += 1
            return originals[key](*args, **kwargs)

        return method

    for key, name in names.items():
        setattr(JITKernel, name, counting(key))
    try:
        yield counts
    finally:
        for key, name in names.items():
            setattr(JITKernel, name, originals[key])


def measure(devices: Sequence[str], threads: int, warmup: bool, backward: bool) -> dict[str, Any]:
    steps: dict[str, Any] = {}
    last = BEGIN

    def step(name: str) -> None:
        nonlocal last
        now = time.perf_counter()
        steps[name], last = round(now - last, 4), now

    import torch

    step("import_torch")
    import qla

    step("import_qla")
    from qla.reference import chunked_gated_delta_rule

    def synchronise() -> None:
        for device in devices:
            if device != "cpu":
                torch.cuda.synchronize(device)

    generator = torch.Generator().manual_seed(0)
    heads, value_heads, tokens, dim = 2, 4, 500, 128
    q, k = (torch.nn.functional.normalize(torch.randn(1, tokens, heads, dim, generator=generator), dim=-1).bfloat16() for _ in range(2))
    v = torch.randn(1, tokens, value_heads, dim, generator=generator).bfloat16()
    g = torch.nn.functional.logsigmoid(torch.randn(1, tokens, value_heads, generator=generator))
    beta = torch.rand(1, tokens, value_heads, generator=generator)
    inputs = {device: [x.to(device) for x in (q, k, v, g, beta)] for device in devices}
    synchronise()
    step("context")
    import tilelang  # noqa: F401

    step("import_tilelang")
    with counted() as counts:
        if warmup:
            qla.warmup()
        step("warmup")
        places = [devices[i % len(devices)] for i in range(threads)]
        results: list[Any] = [None] * threads
        together = threading.Barrier(threads)

        def call(i: int) -> None:
            together.wait()
            results[i] = qla.chunk_gated_delta_rule(*inputs[places[i]])[0]

        workers = [threading.Thread(target=call, args=(i,)) for i in range(threads)]
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join()
        synchronise()
        step("first_call")
        again = {device: qla.chunk_gated_delta_rule(*inputs[device])[0] for device in devices}
        synchronise()
        step("second_call")
        if backward:
            leaves = [x.clone().requires_grad_() for x in inputs[devices[0]]]
            qla.chunk_gated_delta_rule(*leaves)[0].float().sum().backward()
            synchronise()
            step("first_backward")
    steps["first_result"] = round(sum(steps[name] for name in list(steps)[: list(steps).index("first_call") + 1]), 4)
    if any(o is None for o in results):
        raise RuntimeError("a thread's call failed")
    exact, _ = chunked_gated_delta_rule(*(x.double() for x in (q, k, v, g, beta)))
    errors = [float((o.double().cpu() - exact).norm() / exact.norm()) for o in results]
    same = all(torch.equal(o, again[place]) for o, place in zip(results, places, strict=True))
    return steps | counts | {"error": max(errors), "same": same, "threads": threads, "devices": len(devices), "qla": qla.__file__}


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--warmup", action="store_true", help="qla.warmup() before the first call")
    parser.add_argument("--threads", type=int, default=1, metavar="N")
    parser.add_argument("--devices", default="0", metavar="LIST", help="CUDA devices, such as 0,1; cpu runs through PyTorch")
    parser.add_argument("--backward", action="store_true", help="a backward pass at the end, too")
    args = parser.parse_args(argv)
    devices = [name if name == "cpu" else f"cuda:{name}" for name in args.devices.split(",")]
    print(json.dumps(measure(devices, args.threads, args.warmup, args.backward)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
