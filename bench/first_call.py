"""One fresh process from its start to its first results, as a line of JSON; ``bench/startup.py`` starts it, and the tests.

    python bench/first_call.py [--warmup] [--threads 8] [--devices 0,1] [--backward]

Threads make their first call at the same time, in turn on the devices named. Seconds are given for each step ("context" makes the
inputs, too; "import_tilelang" is a step where the package carries no kernels that can be used here), and besides: ``first_result``, all
steps up to the first call; ``ours``, these without PyTorch's import and the context; ``compiled``, the kernels that TileLang compiled;
``loaded``, those that came from its cache or with the package; ``error``, the largest relative error of o against float64; ``same``,
whether all threads on a device got the bits of a later call there.
"""

from __future__ import annotations

import time

BEGIN = time.perf_counter()  # before the imports that are measured

import argparse  # noqa: E402
import contextlib  # noqa: E402
import importlib.abc  # noqa: E402
import importlib.machinery  # noqa: E402
import json  # noqa: E402
import sys  # noqa: E402
import threading  # noqa: E402
from collections.abc import Iterator, Sequence  # noqa: E402
from pathlib import Path  # noqa: E402
from typing import Any  # noqa: E402

if not __package__:  # run as a file: this folder's modules are nobody's business, and a qla on PYTHONPATH comes before the repository's
    here = Path(__file__).resolve().parent
    sys.path = [*(path for path in sys.path if path != str(here)), str(here.parent)]


TILELANG = "tilelang.jit.kernel"  # the module of TileLang's kernels


@contextlib.contextmanager
def counted() -> Iterator[dict[str, int]]:
    """Context in which it is counted how many kernels TileLang compiles, and how many come from its cache on disk or with the package.

    TileLang is not imported for that.
    """
    from qla.kernels import carried

    counts = {"compiled": 0, "loaded": 0}
    originals: list[tuple[Any, str, Any]] = []

    def count(owner: Any, name: str, key: str) -> None:
        original = getattr(owner, name)

        def counting(*args: Any, **kwargs: Any) -> Any:
            counts[key] += 1
            return original(*args, **kwargs)

        originals.append((owner, name, original))
        setattr(owner, name, counting)

    def count_tilelang(module: Any) -> None:
        # Every way of TileLang's to a kernel goes through one of these two methods of tilelang 0.1.15.
        count(module.JITKernel, "_compile_and_create_adapter", "compiled")
        count(module.JITKernel, "_create_adapter_from_database", "loaded")

    class WhenImported(importlib.abc.MetaPathFinder):
        """Has ``count_tilelang`` called as soon as the module is there."""

        def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
            spec = importlib.machinery.PathFinder.find_spec(name, path) if name == TILELANG else None
            if spec is not None and spec.loader is not None:
                execute = spec.loader.exec_module
                spec.loader.exec_module = lambda module: (execute(module), count_tilelang(module))  # type: ignore[method-assign,assignment]
            return spec

    finder = WhenImported()
    if TILELANG in sys.modules:
        count_tilelang(sys.modules[TILELANG])
    else:
        sys.meta_path.insert(0, finder)
    count(carried, "load", "loaded")
    try:
        yield counts
    finally:
        if finder in sys.meta_path:
            sys.meta_path.remove(finder)
        for owner, name, original in reversed(originals):
            setattr(owner, name, original)


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
    from qla.kernels import carried

    if not carried.usable():
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
    of_first = list(steps)[: list(steps).index("first_call") + 1]
    steps["first_result"] = round(sum(steps[name] for name in of_first), 4)
    steps["ours"] = round(sum(steps[name] for name in of_first if name not in ("import_torch", "context")), 4)
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
