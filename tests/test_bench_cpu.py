"""The benchmark harness without a GPU: shapes, inputs, the check before timing, records, the table, the budget."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import math
import sys
from types import SimpleNamespace

import pytest
import torch

from bench import directions, facts, host, kernels, records, run, timing
from bench.cases import errors, expected_slices, make_case, make_gates
from bench.gradients import NAMES, expected_gradients, gradient_errors
from bench.providers import PROVIDERS, Call, Provider, own_call
from bench.shapes import BACKWARD_SETS, SETS, Shape, parse_lengths, parse_shape
from qla import autocp, costs
from qla.autocp import WHOLE, Plan
from qla.checks import unsupported_reason
from qla.kernels import launch

FACTS = {"gpu": "a GPU", "torch": "2", "tilelang": "0.1.15", "commit": "abc", "date": "2026-01-01T00:00:00Z"}
REQUIRED = ["direction", "hk", "hv", "lengths", "gates", "provider", "ms", "ms_min", "ms_max"]
REQUIRED += ["gpu", "torch", "tilelang", "provider_version", "commit", "date"]
SMALL = Shape(1, 2, "70+64")


# Shapes and inputs


@pytest.mark.parametrize("text, lengths", [("8192", (8192,)), ("24576+8192", (24576, 8192)), ("8192x4", (8192,) * 4), ("5+3x2", (5, 3, 3))])
def test_lengths(text, lengths):
    assert parse_lengths(text) == lengths


@pytest.mark.parametrize("text", ["", "x4", "8x", "8x4x2", "-1", "0", "8++8", "8 x4", "a"])
def test_bad_lengths(text):
    with pytest.raises(ValueError, match="lengths"):
        parse_lengths(text)


def test_shapes():
    shape = parse_shape("16/64:8192x4")
    assert (shape.hk, shape.hv, shape.lengths, shape.tokens, shape.heads) == (16, 64, "8192x4", 32768, "16/64")
    for bad in ("16/64", "16:64", "3/64:8", "0/64:8", "16/64:"):
        with pytest.raises(ValueError):
            parse_shape(bad)


def test_sets():
    assert len(SETS["sweep"]) == 9 * 19 == len(set(SETS["sweep"]))
    assert len(SETS["targets"]) == 28 and set(SETS["targets"]) <= set(SETS["sweep"])
    assert Shape(16, 64, "8192x4") in SETS["quick"] and len(SETS["quick"]) <= 6
    assert len(BACKWARD_SETS["targets"]) == 32 and set(BACKWARD_SETS) == set(SETS)
    assert {shape.tokens for shape in BACKWARD_SETS["targets"]} == {8192, 32768}
    assert {len(shape.sequence_lengths) for shape in BACKWARD_SETS["targets"]} == {1, 2, 4, 8}
    assert SETS["cp"] == BACKWARD_SETS["cp"] and len(set(SETS["cp"])) == 16 and set(SETS["cp"]) <= set(SETS["sweep"])


def test_gates():
    noise = torch.randn(1, 50, 8)
    assert torch.equal(make_gates("fast", noise), torch.nn.functional.logsigmoid(noise))
    slow = make_gates("slow", noise)
    assert slow.max() <= 0 and slow.min() >= -1e-6
    mixed = make_gates("mixed", noise)
    never = (mixed >= -1e-6).all(1)[0]
    assert never.sum() == 2
    with pytest.raises(ValueError, match="gates"):
        make_gates("other", noise)


def test_case_is_as_described():
    case = make_case(SMALL, "fast", "cpu")
    assert case.q.shape == case.k.shape == (1, 134, 1, 128) and case.v.shape == (1, 134, 2, 128)
    assert case.q.dtype == torch.bfloat16 and case.g.dtype == case.beta.dtype == torch.float32
    assert (case.q.float().norm(dim=-1) - 1).abs().max() < 1e-2
    assert case.cu_seqlens.tolist() == [0, 70, 134]
    one = make_case(Shape(1, 1, "9"), "fast", "cpu")
    assert one.cu_seqlens is None and one.packed_cu_seqlens.tolist() == [0, 9]


# The check before timing


def test_check_compares_with_float64():
    import qla

    case = make_case(Shape(2, 6, "70+64"), "mixed", "cpu")
    (expected,) = expected_slices([case])
    assert expected.heads == (0, 5)
    o, state = qla.reference.chunked_gated_delta_rule(
        case.q, case.k, case.v, case.g, case.beta, output_final_state=True, cu_seqlens=case.cu_seqlens
    )
    assert max(errors(expected, o, state)) < 4e-3
    wrong = state.clone()
    wrong[:, 5] *= 1.1
    assert errors(expected, o, wrong)[1] > 0.05, "one head's fault is not lost in a larger one"
    o[0, 3, 2, 1] = math.nan  # also in a head that is not compared
    assert errors(expected, o, state) == (math.inf, math.inf)


# Running with stand-ins for GPU and timer


def fake_provider(name: str, factor: float = 1.0, raises: Exception | None = None) -> Provider:
    """Computes the reference, times ``factor``."""

    def prepare(case):
        from qla.reference import chunked_gated_delta_rule

        def outputs():
            if raises:
                raise raises
            o, state = chunked_gated_delta_rule(
                case.q, case.k, case.v, case.g, case.beta, output_final_state=True, cu_seqlens=case.cu_seqlens
            )
            return factor * o, state

        return Call(timing.at_once(outputs), lambda result: result)

    return Provider(name, ("no-such-distribution",), "qla", prepare)


def fake_backward_provider(name: str, wrong: str = "") -> Provider:
    """The reference called as a package is; the gradient of that name comes out 1.1 times too large."""

    def prepare_backward(case):
        call = PROVIDERS["qla"].prepare_backward(case)
        factors = [1.1 if name == wrong else 1.0 for name in NAMES]
        return Call(call.start, lambda result: tuple(f * x for f, x in zip(factors, call.outputs(result), strict=True)))

    return Provider(name, ("no-such-distribution",), "qla", fake_provider(name).prepare, prepare_backward)


def fake_timer(milliseconds):
    def timer(runnables, reps):
        return {name: timing.summarise([milliseconds[name]] * reps, "graph", 1980) for name in runnables}

    return timer


def make_bench(tmp_path, providers, milliseconds, **options) -> run.Bench:
    options = {"deadline": math.inf, "reps": 3, "device": "cpu", "ready_up": lambda start: timing.Runnable(start(), "graph")} | options
    return run.Bench(providers=providers, path=tmp_path / "r" / "fwd_x.jsonl", facts=FACTS, timer=fake_timer(milliseconds), **options)


def test_a_row_is_recorded_line_by_line(tmp_path, capsys):
    providers = [fake_provider("qla"), fake_provider("fla"), fake_provider("flash_qla", raises=RuntimeError("cannot\nat all"))]
    bench = make_bench(tmp_path, providers, {"qla": 0.5, "fla": 1.0})
    bench.run_shape(SMALL, ["fast"])
    lines = [json.loads(line) for line in bench.path.read_text().splitlines()]
    assert [line["provider"] for line in lines] == ["qla", "fla"]
    for line in lines:
        assert set(REQUIRED) <= set(line)
        assert (line["direction"], line["hk"], line["hv"], line["lengths"], line["gates"]) == ("fwd", 1, 2, "70+64", "fast")
        assert line["err_o"] < 4e-3 and line["mode"] == "graph" and line["commit"] == "abc"
    assert lines[0]["ms"] == lines[0]["ms_min"] == lines[0]["ms_max"] == 0.5
    said = capsys.readouterr().out
    assert "note 1/2 70+64 fast: flash_qla: RuntimeError: cannot" in said and "best peer / qla 2.00" in said
    assert not bench.failed


def test_a_row_that_qla_gets_wrong_is_refused(tmp_path, capsys):
    bench = make_bench(tmp_path, [fake_provider("fla"), fake_provider("qla", factor=1.02)], {"qla": 0.5, "fla": 1.0})
    bench.run_shape(SMALL, ["fast"])
    assert not bench.path.exists() and not bench.rows
    assert bench.failed == ["1/2 70+64 fast"]
    assert "REFUSED" in capsys.readouterr().out


def test_a_peer_that_is_wrong_is_left_out(tmp_path):
    bench = make_bench(tmp_path, [fake_provider("qla"), fake_provider("fla", factor=1.1)], {"qla": 0.5, "fla": 1.0})
    bench.run_shape(SMALL, ["slow"])
    assert bench.rows[0].ms == {"qla": 0.5}
    assert "wrong: error of o" in bench.rows[0].notes[0]


def test_the_budget_ends_the_run_between_measurements(tmp_path, monkeypatch):
    bench = make_bench(tmp_path, [fake_provider("qla")], {"qla": 0.5})
    bench.run_shape(SMALL, ["fast"])
    bench.deadline = -math.inf
    with pytest.raises(run.OutOfBudget):
        bench.run_shape(SMALL, ["slow"])
    assert len(bench.path.read_text().splitlines()) == 1


def test_known_times_fill_in(tmp_path):
    path = tmp_path / "old.jsonl"
    summary = timing.Timing(2.0, 1.9, 2.1, "graph")
    facts.append_line(path, records.make_record(SMALL, "fast", "flashinfer", "1", timing.Timing(9.0, 9.0, 9.0, "graph"), FACTS))
    facts.append_line(path, records.make_record(SMALL, "fast", "flashinfer", "1", summary, FACTS))
    facts.append_line(path, records.make_record(SMALL, "slow", "fla", "1", summary, FACTS))
    bench = make_bench(tmp_path, [fake_provider("qla")], {"qla": 0.5}, known=records.known_times([path]))
    bench.run_shape(SMALL, ["fast"])
    assert bench.rows[0].ms == {"qla": 0.5, "flashinfer": 2.0}
    assert bench.rows[0].ratio == 4.0


def test_table():
    held_back = {"flash_qla_nocp": 0.1, "qla_whole": 0.1, "qla:fwd_fused": 0.3}
    rows = [
        records.Row(Shape(16, 64, "8192x4"), "fast", {"qla": 0.5, "fla": 3.0, "flash_qla": 1.0, **held_back}),
        records.Row(Shape(2, 8, "2048"), "slow", {"qla": 0.5, "fla": 0.25}),
        records.Row(Shape(2, 8, "4096"), "slow", {"qla": 0.5}),
    ]
    assert rows[0].best_peer == ("flash_qla", 1.0), "neither our own kernels nor a package held back is the best peer"
    text = records.format_table(rows, ["qla", "fla", "flash_qla"])
    header, first, second, third, summary = text.splitlines()
    assert header.split() == ["heads", "lengths", "gates", "qla", "fla", "flash_qla", "best", "peer", "ratio"]
    assert first.split() == ["16/64", "8192x4", "fast", "0.5000", "3.0000", "1.0000", "flash_qla", "2.00"]
    assert second.split() == ["2/8", "2048", "slow", "0.5000", "0.2500", "-", "fla", "0.50"]
    assert third.split()[-1] == "-"
    assert len({len(line) for line in (header, first, second, third)}) == 1
    assert summary == "best peer / qla: geometric mean 1.00, worst 0.50, rows 2"
    assert records.format_table([], ["qla"])


def test_arguments():
    args = run.make_parser().parse_args(["--set", "targets", "--providers", "qla,fla", "--gates", "fast,slow", "--heads", "16/64"])
    assert args.providers == ["qla", "fla"] and args.gates == ["fast", "slow"]
    shapes = run.chosen_shapes(args)
    assert len(shapes) == 7 and all(shape.heads == "16/64" for shape in shapes)
    args = run.make_parser().parse_args(["--shape", "2/8:2048", "--shape", "1/1:64"])
    assert run.chosen_shapes(args) == [Shape(2, 8, "2048"), Shape(1, 1, "64")]
    assert run.chosen_shapes(run.make_parser().parse_args([])) == list(SETS["quick"])
    for bad in (["--providers", "nobody"], ["--gates", ""], ["--shape", "8192"], ["--set", "all"], ["--direction", "both"]):
        with pytest.raises(SystemExit):
            run.make_parser().parse_args(bad)


def test_needs_a_gpu(monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert run.main(["--set", "quick"]) == 2
    assert "CUDA" in capsys.readouterr().out


def test_missing_providers_are_noted(monkeypatch, capsys):
    monkeypatch.setitem(PROVIDERS, "fla", dataclasses.replace(PROVIDERS["fla"], module="no_such_module"))
    assert [provider.name for provider in run.usable_providers(["qla", "fla"])] == ["qla"]
    assert "skipped fla: ModuleNotFoundError" in capsys.readouterr().out
    assert PROVIDERS["qla"].version


# How the peers are called: entry points that record their arguments stand in for the packages


def fake_module(monkeypatch, name: str, calls: list, result) -> None:
    def chunk_gated_delta_rule(*args, **kwargs):
        calls.append((args, kwargs))
        return result(args)

    parts = name.split(".")
    for i in range(1, len(parts) + 1):
        monkeypatch.setitem(sys.modules, ".".join(parts[:i]), SimpleNamespace(chunk_gated_delta_rule=chunk_gated_delta_rule))


@pytest.mark.parametrize("provider", ["fla", "flash_qla", "flash_qla_nocp", "flashinfer"])
@pytest.mark.parametrize("lengths", ["70+64", "64"])
def test_calls_of_peers(provider, lengths, monkeypatch):
    case = make_case(Shape(1, 2, lengths), "fast", "cpu")
    state_shape = (len(case.shape.sequence_lengths), 2, 128, 128)
    calls: list = []
    state = torch.randn(state_shape)
    fake_module(monkeypatch, PROVIDERS[provider].module, calls, lambda args: (torch.zeros_like(args[2]), state))
    call = PROVIDERS[provider].prepare(case)
    o, final = call.outputs(call.start()())
    ((args, kwargs),) = calls
    assert o.shape == case.v.shape and final.shape == state_shape
    assert kwargs["output_final_state"] is True and kwargs["scale"] == 128**-0.5
    if provider == "flashinfer":
        assert torch.equal(args[3], case.g[0].exp()), "its gates are factors"
        assert kwargs["cu_seqlens"].tolist() == [0, *torch.tensor(case.shape.sequence_lengths).cumsum(0).tolist()]
        assert torch.equal(final, state.transpose(-1, -2)), "its states are V first"
    else:
        assert args[3] is case.g and kwargs["cu_seqlens"] is case.cu_seqlens
        assert torch.equal(final, state)
    if provider.startswith("flash_qla"):
        assert kwargs["auto_cp"] is (provider == "flash_qla")


@pytest.mark.parametrize("provider", ["qla", "qla_whole"])
@pytest.mark.parametrize("lengths", ["70+64", "64"])
def test_calls_of_ours(provider, lengths, monkeypatch):
    """The planner knows the lengths, and nothing is converted in the timed part."""
    case = make_case(Shape(1, 2, lengths), "fast", "cpu")
    calls: list = []
    fake_module(monkeypatch, "qla", calls, lambda args: (args[2], torch.zeros(1)))
    call = PROVIDERS[provider].prepare(case)
    for _ in range(2):
        call.start()()
    first, second = (kwargs for _, kwargs in calls)
    assert first["auto_cp"] is (provider == "qla")
    if lengths == "64":
        assert first["cu_seqlens"] is first["cu_seqlens_cpu"] is None
    else:
        assert first["cu_seqlens"].dtype == torch.int32 and first["cu_seqlens_cpu"].tolist() == [0, 70, 134]
        assert all(first[name] is second[name] for name in ("cu_seqlens", "cu_seqlens_cpu"))
    cut = Plan(1, 1, 0, 0, 0)
    own_call(case, cut, backward=False).start()()
    assert calls[-1][1]["auto_cp"] is cut
    assert PROVIDERS[provider].prepare_backward is not None


# The backward pass


def test_gradients_are_those_of_float64():
    """Of whole groups of heads; a fault of one head is not lost among the others, nor is anything that is not finite."""
    from qla.reference import recurrent_gated_delta_rule

    case = make_case(Shape(3, 6, "70+64"), "fast", "cpu")
    (expected,) = expected_gradients([case])
    assert expected.key_heads == (0, 2) and expected.value_heads == (0, 1, 4, 5)
    leaves = [x.double().requires_grad_() for x in (case.q, case.k, case.v, case.g, case.beta)]
    o, _ = recurrent_gated_delta_rule(*leaves, scale=case.scale, cu_seqlens=case.cu_seqlens)
    gradients = torch.autograd.grad(o, leaves, case.do.double())
    assert max(gradient_errors(expected, gradients).values()) < 1e-10
    for i, (name, x) in enumerate(zip(NAMES, gradients, strict=True)):
        changed = x.clone()
        changed[:, :, -1] *= 1.1
        found = gradient_errors(expected, [*gradients[:i], changed, *gradients[i + 1 :]])
        assert found[name] == pytest.approx(0.1) and max(error for other, error in found.items() if other != name) < 1e-10
        changed[0, 5, 2] = math.nan
        assert set(gradient_errors(expected, [*gradients[:i], changed, *gradients[i + 1 :]]).values()) == {math.inf}


@pytest.mark.filterwarnings("ignore:qla runs this call through PyTorch")
def test_a_backward_row(tmp_path, capsys):
    providers = [fake_backward_provider("qla"), fake_backward_provider("fla", "dk"), fake_backward_provider("flash_qla")]
    bench = make_bench(tmp_path, providers, {"qla": 0.5, "flash_qla": 1.0}, direction="bwd")
    with torch.no_grad():  # as main runs it
        bench.run_shape(SMALL, ["fast"])
    lines = [json.loads(line) for line in bench.path.read_text().splitlines()]
    assert [(line["direction"], line["provider"]) for line in lines] == [("bwd", "qla"), ("bwd", "flash_qla")]
    for line in lines:
        assert set(REQUIRED) <= set(line) and all(line[f"err_{name}"] < 8e-3 for name in NAMES)
    assert bench.rows[0].ratio == 2.0
    assert "fla: ValueError: wrong: error of dk 1.0" in capsys.readouterr().out


@pytest.mark.filterwarnings("ignore:qla runs this call through PyTorch")
@pytest.mark.parametrize("wrong", NAMES)
def test_a_backward_row_that_qla_gets_wrong_is_refused(wrong, tmp_path):
    bench = make_bench(tmp_path, [fake_backward_provider("qla", wrong)], {"qla": 0.5}, direction="bwd")
    bench.run_shape(SMALL, ["fast"])
    assert bench.failed and not bench.path.exists()


@pytest.mark.parametrize("result, own, limit", [("o", True, 8e-3), ("dq", False, 3e-2), ("dg", True, 2e-2), ("dbeta", False, 5e-2)])
def test_limits(result, own, limit):
    assert directions.limit_of(result, own) == limit


@pytest.mark.parametrize("provider", ["qla", "fla", "flash_qla", "flash_qla_nocp"])
def test_the_backward_pass_is_timed_alone(provider, monkeypatch):
    """The forward pass runs in the start, the timed part may run again, and it gives the gradients of all five inputs."""
    calls: list = []
    fake_module(monkeypatch, PROVIDERS[provider].module, calls, lambda args: ((sum(args[:3]) * sum(args[3:])[..., None]).bfloat16(), None))
    case = make_case(Shape(2, 2, "70+64"), "fast", "cpu")
    call = PROVIDERS[provider].prepare_backward(case)
    assert not calls
    with torch.no_grad():
        timed = call.start()
        ((args, kwargs),) = calls
        assert kwargs["output_final_state"] is False and kwargs["scale"] == case.scale and kwargs["cu_seqlens"].tolist() == [0, 70, 134]
        assert all(x.is_leaf and x.requires_grad for x in args)
    first, second = call.outputs(timed()), call.outputs(timed())
    assert len(calls) == 1
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
    assert [x.shape for x in first] == [x.shape for x in (case.q, case.k, case.v, case.g, case.beta)]
    assert not any(x.requires_grad for x in (case.q, case.k, case.v, case.g, case.beta))
    if provider.startswith("flash_qla"):
        assert kwargs["auto_cp"] is (provider == "flash_qla")
    call.start()
    assert calls[1][0][0] is not args[0], "leaves of its own each time"


class FakeCuda:
    """Stands in for torch.cuda where a function is made ready: notes which stream is current when."""

    def __init__(self, monkeypatch, fails: str = "") -> None:
        self.events: list[str] = []
        self.current, self.capturing, self.fails = "default", False, fails
        monkeypatch.setattr(torch.cuda, "set_stream", lambda stream: None)
        for name in ("Stream", "current_stream"):
            monkeypatch.setattr(torch.cuda, name, lambda: SimpleNamespace(wait_stream=lambda other: None))
        monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
        monkeypatch.setattr(torch.cuda, "stream", lambda stream: self.switch(False))
        monkeypatch.setattr(torch.cuda, "graph", lambda graph, stream: self.switch(True))
        monkeypatch.setattr(torch.cuda, "CUDAGraph", lambda: SimpleNamespace(replay=lambda: self.events.append("replay")))
        monkeypatch.setattr(timing, "waits_on_host", lambda function: function() or fails == "waits")

    @contextlib.contextmanager
    def switch(self, capturing):
        self.current, self.capturing = "side", capturing
        try:
            yield
        finally:
            self.current, self.capturing = "default", False

    def start(self):
        assert not self.capturing
        self.events.append(f"start {self.current}")

        def timed():
            self.events.append(f"{'capture' if self.capturing else 'run'} {self.current}")
            if self.capturing and self.fails == "capture":
                raise RuntimeError("not allowed in a capture")

        return timed


def test_what_comes_before_runs_on_the_stream_that_captures(monkeypatch):
    cuda = FakeCuda(monkeypatch)
    runnable = timing.make_runnable(cuda.start)
    assert runnable.mode == "graph" and cuda.events == ["start side", *["run side"] * 3, "capture side", "replay"]
    assert runnable.keep[2] is not None, "what the forward pass saved must live as long as the graph"


@pytest.mark.parametrize("fails", ["waits", "capture"])
def test_what_cannot_be_captured_starts_again_on_the_stream_of_the_events(fails, monkeypatch):
    cuda = FakeCuda(monkeypatch, fails)
    assert timing.make_runnable(cuda.start).mode == "eager"
    assert cuda.events[-2:] == ["start default", "run default"] and "replay" not in cuda.events


def test_the_gradient_that_starts_it_is_always_the_same():
    case, again = (make_case(SMALL, "fast", "cpu") for _ in range(2))
    assert torch.equal(case.do, again.do) and case.do.shape == case.v.shape and case.do.dtype == torch.bfloat16
    assert not torch.equal(case.do, case.v)


def test_backward_arguments(capsys):
    args = run.parse_arguments(["--direction", "bwd", "--set", "targets", "--heads", "2/4"])
    assert len(run.chosen_shapes(args)) == 8
    assert run.chosen_shapes(run.parse_arguments(["--direction", "bwd"])) == list(BACKWARD_SETS["quick"])
    assert [provider.name for provider in run.usable_providers(["qla", "flashinfer"], "bwd")] == ["qla"]
    assert "skipped flashinfer: has no backward pass" in capsys.readouterr().out


# Kernels, timing, records


def test_serial_chunks():
    assert kernels.serial_chunks([8192] * 4, 64, 132) == 2 * 128  # 256 blocks on 132 SMs
    assert kernels.serial_chunks([32768], 128, 132) == 512
    assert kernels.serial_chunks([65], 1, 132) == 2
    assert kernels.serial_chunks([640, 64, 64], 1, 2) == 10


class FakeKernels:
    """Stands in for the kernel modules: every launcher notes its call and gives what the real one gives."""

    LAUNCHERS = (
        "kkt_solve", "cp_plan", "prepare_states", "prepare_state_gradients", "scan_states", "scan_state_gradients", "cp_merge",
        "fwd_fused", "bwd_fused",
    )  # fmt: skip

    def __init__(self, monkeypatch, plan: Plan) -> None:
        self.launches: list[tuple[str, tuple, dict]] = []
        self.items = tuple(torch.zeros(3, 2, 4) for _ in range(2)), torch.zeros(12)
        for name in self.LAUNCHERS:
            monkeypatch.setattr(launch, name, self.launcher(name))
        monkeypatch.setattr(launch, "choose_block_v", lambda *sizes: 64)
        monkeypatch.setattr(launch, "num_slots", lambda *sizes: 5)
        monkeypatch.setattr("qla.device.device_spec", lambda device: SimpleNamespace(sm_count=132))
        monkeypatch.setattr(autocp, "plan", lambda problem, device: plan)

    def launcher(self, name):
        def note(*args, **kwargs):
            assert all(x.is_contiguous() for x in args if isinstance(x, torch.Tensor))
            self.launches.append((name, args, kwargs))
            if name == "kkt_solve":
                g = args[1]
                return g, torch.zeros(*g.shape, 64), g if kwargs["with_bound"] else g[:1]
            return (*self.items[0], self.items[1]) if name == "cp_plan" else None

        return note

    def of(self, name) -> tuple[tuple, dict]:
        """Arguments of the last launch."""
        return next((args, kwargs) for launched, args, kwargs in reversed(self.launches) if launched == name)


def run_once(start) -> timing.Runnable:
    function = start()
    function()
    return timing.Runnable(function, "graph")


CUTS = {
    "uncut": (WHOLE, [], []),
    "lean": (Plan(1, 1, 1, 1, 0), ["cp_plan"], []),
    "own segments": (Plan(1, 2, 1, 1, 0), [], ["cp_plan"]),
    "prepared": (Plan(1, 1, 0, 1, 0), ["cp_plan", "cp_prep"], ["cp_prep"]),
    "transitions": (
        Plan(1, 2, 1, 1, 2),
        ["cp_plan", "cp_prep", "cp_merge"],
        ["cp_prep", "cp_merge", "cp_prep_gradients", "cp_merge_gradients"],
    ),
}


@pytest.mark.parametrize("lengths", ["70+64", "64"])
@pytest.mark.parametrize("cut", CUTS)
def test_kernels_are_timed_apart(cut, lengths, tmp_path, monkeypatch, capsys):
    plan, between, _ = CUTS[cut]
    fake = FakeKernels(monkeypatch, plan)
    names, packed = ["kkt_solve", *between, "fwd_fused"], lengths != "64"
    assert names == costs.launches(plan, backward=False)
    bench = make_bench(tmp_path, [fake_provider("qla")], {"qla": 0.5, **dict.fromkeys(names, 0.2)}, kernels=True, ready_up=run_once)
    shape = Shape(1, 2, lengths)
    bench.run_shape(shape, ["fast"])
    own, *lines = (json.loads(line) for line in bench.path.read_text().splitlines())
    assert [line["provider"] for line in lines] == [f"qla:{name}" for name in names]
    assert own["provider"] == "qla" and Plan(**own["plan"]) == plan
    predicted = costs.predict(kernels.problem_of(shape), 132, plan).total
    assert own["predicted_us"] == pytest.approx(predicted, abs=0.01)
    said = capsys.readouterr().out
    assert f"predicted {predicted:.1f} us, off by {predicted / 500 - 1:+.1%}" in said

    place = (2, 0) if packed else (1, 64)
    args, kwargs = fake.of("kkt_solve")
    assert args[5:] == (*place, 132) and kwargs == {"with_bound": plan != WHOLE}
    args, kwargs = fake.of("fwd_fused")
    q, k, v, g_cum, beta, A, o, h0, ht, _, cu_seqlens, *rest = args
    assert q.shape == k.shape == (len(v), 1, 128) and A.shape == (len(v), 2, 64) and g_cum.shape == beta.shape == (len(v), 2)
    assert o.shape == v.shape and h0 is None and ht.shape == (place[0], 2, 128, 128) and rest == [*place, False, 132]
    assert (None if cu_seqlens is None else cu_seqlens.dtype) == (torch.int32 if packed else None)
    assert (kwargs["items"] is None) == (kwargs["order"] is None) == (not plan.chunks_per_segment or not plan.needs_tables)
    assert ("bound" in kwargs) == (cut == "own segments")
    assert (kwargs["segment_states"] is None) == (not plan.needs_states)
    assert ("us_per_chunk" in lines[-1]) == ("prototype 1.3" in said) == (plan == WHOLE)
    if plan == WHOLE:
        assert lines[-1]["block_v"] == 64 and lines[-1]["us_per_chunk"] == pytest.approx(200 / (2 if packed else 1))
    if plan.needs_states:
        *_, items, states, transitions = fake.of("prepare_states")[0]
        assert items is kwargs["items"] and states is kwargs["segment_states"] and states.shape == (3, 2, 128, 128)
        assert (transitions is None) == (plan.max_transition_heads == 0)


@pytest.mark.parametrize("stays_whole", [0, 1])
def test_the_launch_without_work_is_timed_apart(stays_whole, tmp_path, monkeypatch):
    """Of a cut that the device may undo there are two launches of the fused kernel; which of them has the work is cp_plan's answer."""
    plan = Plan(1, 1, 1, 1, 0, max_serial_heads=0, whole_split=2)
    fake = FakeKernels(monkeypatch, plan)
    fake.items[1][-1] = stays_whole
    calls = kernels.kernel_calls(make_case(Shape(1, 2, "128"), "fast", "cpu"), plan)
    assert list(calls) == costs.launches(plan, backward=False) == ["kkt_solve", "cp_plan", "fwd_fused", "fwd_spare"]
    for name, whole in (("fwd_fused", stays_whole), ("fwd_spare", not stays_whole)):
        calls[name]()
        _, kwargs = fake.of("fwd_fused")
        assert kwargs.get("items") is (None if whole else fake.items[0][0]) and kwargs["order"] is fake.items[1]
        assert kwargs["block_v"] == (64 if whole else 128)


@pytest.mark.parametrize("lengths", ["70+64", "64"])
@pytest.mark.parametrize("cut", CUTS)
def test_backward_kernels_are_timed_apart(cut, lengths, tmp_path, monkeypatch):
    plan, _, before = CUTS[cut]
    fake = FakeKernels(monkeypatch, plan)
    names = [*before, "scan_states", "scan_state_gradients", "bwd_fused"]
    assert names == costs.launches(plan, backward=True)
    milliseconds = dict.fromkeys(["qla", *names], 0.1)
    bench = make_bench(tmp_path, [fake_provider("qla")], milliseconds, kernels=True, direction="bwd", ready_up=run_once)
    bench.run_kernels(records.Row(Shape(1, 2, lengths), "fast"), make_case(Shape(1, 2, lengths), "fast", "cpu"), plan)
    lines = [json.loads(line) for line in bench.path.read_text().splitlines()]
    assert [(line["provider"], line["direction"]) for line in lines] == [(f"qla:{name}", "bwd") for name in names]
    # Each has run once with what those before it made before it is timed.
    launched = [name for name, _, _ in fake.launches]
    assert launched.index("scan_state_gradients") < launched.index("bwd_fused")
    (forward, reverse), _ = fake.items
    items = [fake.of(name)[1]["items"] for name in ("scan_states", "scan_state_gradients")]
    assert all(a is b for a, b in zip(items, (None, None) if plan == WHOLE else (forward, reverse), strict=True))
    if plan.max_transition_heads:
        *_, of_items, start_grads = fake.of("prepare_state_gradients")[0]
        assert of_items is reverse and fake.of("scan_state_gradients")[1]["segment_states"] is start_grads
        merge = fake.of("cp_merge")
        assert merge[0][0] is start_grads and merge[0][2] is forward and merge[1] == {"reverse": True}


def test_summary():
    summary = timing.summarise([3.0, 1.0, 2.0, 10.0], "eager")
    assert (summary.ms, summary.ms_min, summary.ms_max, summary.mode) == (2.5, 1.0, 10.0, "eager")


def test_facts(monkeypatch, tmp_path):
    monkeypatch.setenv("QLA_COMMIT", "from the environment")
    assert facts.commit() == "from the environment"
    monkeypatch.delenv("QLA_COMMIT")
    monkeypatch.setattr(facts, "ROOT", tmp_path)
    assert facts.commit() == "unknown"
    assert set(facts.environment()) == {"gpu", "torch", "tilelang", "commit", "date"}
    path = tmp_path / "a" / "b.jsonl"
    facts.append_line(path, {"x": 1})
    facts.append_line(path, {"x": 2})
    assert list(facts.read_lines([path])) == [{"x": 1}, {"x": 2}]
    path.write_text("{broken\n")
    with pytest.raises(ValueError, match="b.jsonl:1"):
        list(facts.read_lines([path]))


def test_record_of_a_test_run():
    record_gpu = pytest.importorskip("record_gpu")
    stats = {"passed": [1] * 5, "failed": [1], "error": [1, 1], "skipped": [1] * 3, "warnings": [1]}
    line = record_gpu.make_line(stats, 12.34, FACTS)
    assert line == {
        **{"commit": "abc", "gpu": "a GPU", "torch": "2", "tilelang": "0.1.15"},
        **{"passed": 5, "failed": 3, "skipped": 3, "seconds": 12.3, "date": "2026-01-01T00:00:00Z"},
    }
    assert record_gpu.make_line(stats, 12.34, FACTS, collected=11) == line
    assert record_gpu.make_line(stats, 12.34, FACTS, collected=20) == {**line, "unfinished": 9}


def test_show_prints_what_was_recorded(tmp_path, capsys):
    path = tmp_path / "results.jsonl"
    lines = [("qla", 0.5), ("fla", 1.0), ("qla", 0.25)]  # the later line of a row and provider counts
    for name, ms in lines:
        record = records.make_record(SMALL, "fast", name, "1", timing.Timing(ms, ms, ms, "graph"), FACTS)
        facts.append_line(path, record)
    assert run.main(["--show", str(path)]) == 0
    text = capsys.readouterr().out
    assert "0.2500" in text and "4.00" in text and "0.5000" not in text and "bwd" not in text
    facts.append_line(path, records.make_record(SMALL, "fast", "qla", "1", timing.Timing(9.0, 9.0, 9.0, "graph"), FACTS, "bwd"))
    assert run.main(["--show", str(path)]) == 0
    forward, backward = capsys.readouterr().out.split("bwd, milliseconds")
    assert forward.startswith("fwd, milliseconds") and "0.2500" in forward and "9.0000" not in forward
    assert "9.0000" in backward and "0.2500" not in backward


def test_host_time_without_a_gpu(monkeypatch, capsys, tmp_path):
    """--dry: the whole way of a call but the launches; nothing is recorded, and nothing stays replaced."""
    launcher = launch.launcher
    monkeypatch.setattr(host, "DRY_BATCHES", 1)
    assert host.main(["--dry", "--results", str(tmp_path / "none")]) == 0 and not (tmp_path / "none").exists()
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == list(host.DRY_SHAPES) and all(line.endswith(" us") for line in lines)
    assert launch.launcher is launcher and unsupported_reason(*[make_case(SMALL, "fast", "cpu").q] * 3) is not None
