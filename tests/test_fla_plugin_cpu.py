"""qla as a backend of fla: registration, order, what is served and why not, arguments, switches. Stand-ins play fla's registry."""

from __future__ import annotations

import functools
import inspect
import os
import subprocess
import sys
import threading
import types

import pytest
import torch
from inputs import cu_seqlens_of, make_inputs, make_state
from numeric import assert_bitwise_equal

import qla
from qla import api, checks
from qla.device import DeviceSpec
from qla.integrations import fla as plugin

PARAMETERS = {
    "0.6.0": [
        "q", "k", "v", "g", "beta", "scale", "initial_state", "output_final_state", "use_qk_l2norm_in_kernel",
        "use_beta_sigmoid_in_kernel", "allow_neg_eigval", "state_v_first", "cu_seqlens", "cu_seqlens_cpu", "chunk_indices", "cp_context",
    ],
}  # fmt: skip
PARAMETERS["0.5.2"] = [name for name in PARAMETERS["0.6.0"] if name != "chunk_indices"]


class BackendWithObjectSwitch:
    """The base class of backends as in fla 0.6: objects are asked whether they are enabled."""

    backend_type, package_name, env_var, priority = "base", None, None, 5
    verifier = implementation = None

    @classmethod
    def is_available(cls):
        return True

    def is_enabled(self):
        return self.env_var is None or os.environ.get(self.env_var, "1") != "0"

    @classmethod
    def can_use(cls):
        return cls.is_available() and cls().is_enabled()

    def get_implementation(self, name):
        return self.implementation or getattr(self, name, None)

    def verify(self, name, *args, **kwargs):
        verifier = self.verifier or getattr(self, f"{name}_verifier", None)
        return (True, None) if verifier is None else verifier(*args, **kwargs)


class BackendWithClassSwitch:
    """The same as in fla 0.5.2: the class is asked too."""

    backend_type, package_name, env_var, priority = "base", None, None, 5

    @classmethod
    def is_available(cls):
        return True

    @classmethod
    def is_enabled(cls):
        return cls.env_var is None or os.environ.get(cls.env_var, "1") != "0"

    @classmethod
    def can_use(cls):
        return cls.is_available() and cls.is_enabled()

    def verify(self, name, *args, **kwargs):
        return getattr(self, f"{name}_verifier")(*args, **kwargs)


class StandIn:
    """fla of one version, as modules for sys.modules. ``served`` and ``refused`` tell what each call came to."""

    def __init__(self, version: str, interface: str):
        self.backends, self.registrations, self.served, self.refused = {}, 0, [], []
        base = {"0.6.0": BackendWithObjectSwitch, "0.5.2": BackendWithClassSwitch}[interface]

        class FlashQla(base):
            backend_type, env_var, priority = "flash_qla", "FLA_FLASH_QLA", 3

            def chunk_gated_delta_rule_verifier(self, q, *args, **kwargs):
                return getattr(q, "dtype", None) == torch.float16, "this stand-in takes float16"

            def chunk_gated_delta_rule(self, *args, **kwargs):
                return "flash_qla"

        self.register(FlashQla())
        self.entry = self.dispatched(interface)
        names = ("fla", "fla.ops", "fla.ops.gated_delta_rule", "fla.ops.gated_delta_rule.backends", "fla.ops.backends", "fla.backends")
        self.modules = {name: types.ModuleType(name) for name in names}
        self.modules["fla"].__version__ = version
        self.modules["fla.ops.gated_delta_rule"].chunk_gated_delta_rule = self.entry
        if interface == "0.6.0":
            self.modules["fla.backends"].BaseBackend = base
            self.modules["fla.backends"].register = lambda operation: self.register_class
            self.modules["fla.ops.backends"] = None
        else:
            self.modules["fla.ops.backends"].BaseBackend = base
            self.modules["fla.ops.gated_delta_rule.backends"].gdr_registry = self
            self.modules["fla.backends"] = None

    def register_class(self, backend):
        assert isinstance(backend, type)
        self.register(backend())
        return backend

    def register(self, backend):
        self.registrations += 1
        backend.can_use()
        self.backends[backend.backend_type] = backend

    def order(self):
        return sorted(self.backends.values(), key=lambda backend: backend.priority)

    def dispatched(self, interface):
        def chunk_gated_delta_rule(*args, **kwargs):
            return "fla"

        kinds = inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.VAR_KEYWORD
        own = [inspect.Parameter(name, kinds[0]) for name in PARAMETERS[interface]] + [inspect.Parameter("kwargs", kinds[1])]
        chunk_gated_delta_rule.__signature__ = inspect.Signature(own)

        @functools.wraps(chunk_gated_delta_rule)
        def entry(*args, **kwargs):
            for backend in self.order():
                if not (backend.is_available() and backend.is_enabled()):
                    continue
                accepted, reason = backend.verify("chunk_gated_delta_rule", *args, **kwargs)
                if accepted:
                    self.served.append(backend.backend_type)
                    return backend.chunk_gated_delta_rule(*args, **kwargs)
                self.refused.append((backend.backend_type, reason))
            self.served.append("fla")
            return chunk_gated_delta_rule(*args, **kwargs)

        return entry

    def reason(self, *args, **kwargs) -> str:
        """Why qla refuses this call."""
        self.refused.clear()
        assert self.entry(*args, **kwargs) in ("fla", "flash_qla")
        (reason,) = [reason for backend, reason in self.refused if backend == "qla"]
        return reason


@pytest.fixture
def install(monkeypatch):
    """Puts a stand-in in fla's place; qla is disabled at the end."""
    for name in ("FLA_QLA", "FLA_FLASH_QLA", "FLA_DISABLE_BACKEND_DISPATCH"):
        monkeypatch.delenv(name, raising=False)

    def put(version: str, interface: str = "0.6.0") -> StandIn:
        stand_in = StandIn(version, interface)
        for name, module in stand_in.modules.items():
            monkeypatch.setitem(sys.modules, name, module)
        return stand_in

    yield put
    plugin.disable()


@pytest.fixture(params=["0.6.0", "0.5.2"])
def fla(request, install) -> StandIn:
    return install(request.param, request.param)


@pytest.fixture
def spy(monkeypatch):
    """Lets the kernels take every device, and records what qla's function is called with in its place."""
    calls = []
    monkeypatch.setattr(plugin, "unsupported_reason", lambda *tensors: None)
    monkeypatch.setattr(api, "chunk_gated_delta_rule", lambda **arguments: calls.append(arguments) or ("o", "state"))
    return calls


class TestRegistration:
    def test_before_flash_qla(self, fla, spy, rng):
        inputs = make_inputs(rng, 10).to(torch.float16)
        assert fla.entry(*inputs) == "flash_qla"
        assert plugin.enable() is None
        assert [backend.backend_type for backend in fla.order()] == ["qla", "flash_qla"]
        assert fla.entry(*inputs) == ("o", "state")
        assert fla.served == ["flash_qla", "qla"] and len(spy) == 1

    def test_is_a_backend_of_flas_kind(self, fla):
        plugin.enable()
        backend = fla.backends["qla"]
        base = BackendWithObjectSwitch if hasattr(backend, "get_implementation") else BackendWithClassSwitch
        assert isinstance(backend, base) and backend.backend_type == backend.package_name == "qla" and backend.env_var == "FLA_QLA"
        assert backend.can_use() and type(backend).can_use()
        plugin.disable()
        assert not backend.can_use()

    def test_again(self, fla):
        plugin.enable()
        before = dict(fla.backends), fla.registrations
        plugin.enable()
        assert (dict(fla.backends), fla.registrations) == before

    def test_from_many_threads(self, fla):
        together, before = threading.Barrier(8), fla.registrations

        def enable():
            together.wait()
            plugin.enable()

        threads = [threading.Thread(target=enable) for _ in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert fla.registrations == before + 1

    def test_disable_and_enable_again(self, fla, spy, rng):
        inputs = make_inputs(rng, 10)
        for _ in range(2):
            plugin.enable()
            fla.entry(*inputs)
            assert plugin.disable() is None
            fla.entry(*inputs)
        plugin.disable()
        assert fla.served == ["qla", "fla"] * 2 and len(spy) == 2

    @pytest.mark.filterwarnings("ignore:qla runs this call through PyTorch:RuntimeWarning")
    def test_a_call_runs(self, fla, monkeypatch, rng):
        monkeypatch.setattr(plugin, "unsupported_reason", lambda *tensors: None)
        inputs = make_inputs(rng, 70, dtype=torch.bfloat16)
        plugin.enable()
        results = fla.entry(*inputs, output_final_state=True)
        for got, expected in zip(results, qla.chunk_gated_delta_rule(*inputs, output_final_state=True), strict=True):
            assert_bitwise_equal(got, expected)


class TestSwitches:
    def test_environment_at_each_call(self, fla, spy, monkeypatch, rng):
        inputs = make_inputs(rng, 10)
        monkeypatch.setenv("FLA_QLA", "0")
        plugin.enable()
        for value, server in (("0", "fla"), ("1", "qla"), ("0", "fla"), (None, "qla")):
            monkeypatch.delenv("FLA_QLA") if value is None else monkeypatch.setenv("FLA_QLA", value)
            fla.entry(*inputs)
            assert fla.served[-1] == server, f"FLA_QLA={value}"

    def test_environment_alone_enables_nothing(self, fla, spy, monkeypatch, rng):
        monkeypatch.setenv("FLA_QLA", "1")
        plugin.enable()
        plugin.disable()
        assert fla.entry(*make_inputs(rng, 10)) == "fla" and not spy

    def test_fla_that_asks_no_backend(self, fla, monkeypatch):
        monkeypatch.setenv("FLA_DISABLE_BACKEND_DISPATCH", "1")
        with pytest.warns(RuntimeWarning, match="FLA_DISABLE_BACKEND_DISPATCH=1: fla asks no backend") as warned:
            plugin.enable()
        assert warned[0].filename == __file__


class TestVersions:
    @pytest.mark.parametrize("version, interface", [("0.6.0", "0.6.0"), ("0.6", "0.6.0"), ("0.6.3.post1", "0.6.0"), ("0.5.2", "0.5.2")])
    def test_supported(self, install, version, interface):
        fla = install(version, interface)
        plugin.enable()
        assert "qla" in fla.backends

    @pytest.mark.parametrize("version", ["0.5.1", "0.5.0", "0.4.2", "0.7.0", "1.0", "unknown"])
    def test_others(self, install, version, spy, rng):
        fla = install(version)
        with pytest.raises(RuntimeError, match=f"supports fla 0.5.2 and 0.6, got fla {version}$"):
            plugin.enable()
        assert list(fla.backends) == ["flash_qla"] and fla.entry(*make_inputs(rng, 10)) == "fla"
        fla = install("0.6.0")
        plugin.enable()
        assert "qla" in fla.backends

    def test_without_fla(self, install, monkeypatch):
        monkeypatch.setitem(sys.modules, "fla", None)
        with pytest.raises(ImportError, match="fla"):
            plugin.enable()

    def test_import_leaves_fla_alone(self):
        code = (
            "import sys, qla\n"
            "assert not [name for name in sys.modules if name.startswith('qla.integrations')]\n"
            "sys.modules['fla'] = None\n"
            "import qla.integrations.fla\n"
            "qla.integrations.fla.disable()\n"
            "print([name for name in ('fla.ops', 'tilelang') if name in sys.modules])"
        )
        result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300)
        assert (result.stdout.strip(), result.returncode) == ("[]", 0), result.stderr


class TestArguments:
    def test_by_position(self, fla, spy, rng):
        names = PARAMETERS["0.5.2" if fla.modules["fla.backends"] is None else "0.6.0"]
        inputs = make_inputs(rng, 70)
        state, cu, host = make_state(rng, inputs, 2), cu_seqlens_of([30, 40]), cu_seqlens_of([30, 40])
        indices = torch.zeros(3, 2)
        given = dict(zip(PARAMETERS["0.6.0"], [*inputs, 0.3, state, True, True, True, True, False, cu, host, indices, None], strict=True))
        plugin.enable()
        fla.entry(*[given[name] for name in names])
        (got,) = spy
        assert list(got) == names and all(got[name] is given[name] for name in names)

    def test_by_name(self, fla, spy, rng):
        inputs = make_inputs(rng, 70)
        given = inputs._asdict() | {
            "scale": 0.3, "initial_state": make_state(rng, inputs, 2), "output_final_state": True, "use_qk_l2norm_in_kernel": True,
            "use_beta_sigmoid_in_kernel": True, "allow_neg_eigval": True, "cu_seqlens": cu_seqlens_of([30, 40]),
            "cu_seqlens_cpu": cu_seqlens_of([30, 40]), "chunk_indices": torch.zeros(3, 2), "cp_context": None, "use_gate_in_kernel": True,
            "A_log": torch.zeros(4), "dt_bias": torch.zeros(4), "chunk_size": 32, "transpose_state_layout": False, "auto_cp": False,
        }  # fmt: skip
        plugin.enable()
        fla.entry(**given)
        (got,) = spy
        assert got.keys() == given.keys() and all(got[name] is given[name] for name in given)

    def test_nothing_is_added(self, fla, spy, rng):
        inputs = make_inputs(rng, 10)
        plugin.enable()
        fla.entry(*inputs, state_v_first=True)
        assert list(spy[0]) == ["q", "k", "v", "g", "beta", "state_v_first"]

    @pytest.mark.parametrize("name", ["state_v_first", "transpose_state_layout"])
    def test_state_layout(self, fla, spy, rng, name):
        inputs = make_inputs(rng, 10)
        state = make_state(rng, inputs)
        plugin.enable()
        fla.entry(*inputs, initial_state=state.transpose(-1, -2), **{name: True})
        assert len(spy) == 1
        assert "initial_state must have shape [S, HV, V, K]" in fla.reason(*inputs, initial_state=state, **{name: True})


class TestReasons:
    """Every call here reaches fla's own kernels, with this reason."""

    @pytest.fixture(autouse=True)
    def enabled(self, fla):
        plugin.enable()

    def test_not_on_a_gpu(self, fla, rng):
        assert fla.reason(*make_inputs(rng, 10)) == "the kernels need a CUDA device, and q is on cpu"

    def test_of_the_kernels(self, fla, monkeypatch):
        """Not Hopper, dtype, head sizes. Sizes are all that matters: tensors on "meta" stand for some on a GPU."""

        def inputs(dtype=torch.bfloat16, key_dim=128, value_dim=128):
            q, v = (torch.empty(1, 64, 2, size, dtype=dtype, device="meta") for size in (key_dim, value_dim))
            g = torch.empty(1, 64, 2, device="meta")
            return q, q, v, g, g

        def reason_on(capability, *tensors):
            monkeypatch.setattr(checks, "device_spec", lambda device: DeviceSpec(index=0, capability=capability, sm_count=132))
            as_if_cuda = [types.SimpleNamespace(device=torch.device("cuda:0"), dtype=x.dtype, shape=x.shape) for x in tensors]
            monkeypatch.setattr(plugin, "unsupported_reason", lambda *_: checks.unsupported_reason(*as_if_cuda))
            return fla.reason(*tensors)

        assert reason_on((8, 0), *inputs()) == "the kernels need compute capability 9.0 (Hopper), and cuda:0 has 8.0"
        assert reason_on((10, 0), *inputs()) == "the kernels need compute capability 9.0 (Hopper), and cuda:0 has 10.0"
        assert reason_on((9, 0), *inputs(torch.float32)) == "the kernels take bfloat16 and float16, and q is float32"
        assert reason_on((9, 0), *inputs(key_dim=256)) == "the kernels take head sizes up to 128, and K is 256"
        assert reason_on((9, 0), *inputs(value_dim=192)) == "the kernels take head sizes up to 128, and V is 192"

    def test_context_parallelism(self, fla, spy, rng):
        assert fla.reason(*make_inputs(rng, 10), cp_context=object()) == (
            "qla does not support context parallelism over several GPUs (cp_context)"
        )
        assert not spy

    @pytest.mark.parametrize("name", ["head_first", "something_new", "kwargs"])
    def test_unknown_argument(self, fla, spy, rng, name):
        assert fla.reason(*make_inputs(rng, 10), **{name: None}) == f"qla does not know the argument {name}"

    @pytest.mark.parametrize(
        "change, reason",
        [
            (lambda x: {"k": x.k.bfloat16()}, "qla's checks: k must have the dtype of q, float64, got bfloat16"),
            (lambda x: {"beta": x.beta[:, 1:]}, "qla's checks: beta must have shape [B, T, HV] = [1, 10, 4], got [1, 9, 4]"),
            (lambda x: {"q": None}, "qla's checks: q must be a tensor, got NoneType"),
            (lambda x: {"initial_state": x.q}, "qla's checks: initial_state must have shape [S, HV, K, V]"),
            (lambda x: {"cu_seqlens_cpu": cu_seqlens_of([10])}, "qla's checks: cu_seqlens_cpu is a copy of cu_seqlens and needs it"),
            (lambda x: {"cu_seqlens": cu_seqlens_of([20])}, "qla's checks: cu_seqlens must end at or before the number of tokens, 10"),
            (lambda x: {"scale": float("inf")}, "qla's checks: scale must be finite, got inf"),
        ],
    )
    def test_what_qlas_checks_refuse(self, fla, spy, rng, change, reason):
        inputs = make_inputs(rng, 10)
        assert fla.reason(**inputs._asdict() | change(inputs)).startswith(reason)
        assert not spy

    def test_wrong_calls(self, fla, spy, rng):
        inputs = make_inputs(rng, 10)
        assert fla.reason(*inputs[:3]) == "missing arguments: g, beta"
        assert fla.reason(*inputs, beta=inputs.beta, k=inputs.k) == "given by position and by name: k, beta"
        assert "arguments by position, got 18" in fla.reason(*inputs, *[None] * 13)
        assert not spy


class TestRealFla:
    """The same with fla itself, where it is installed. A further backend answers in place of fla's kernels, which need a GPU."""

    @pytest.fixture
    def entry(self, monkeypatch):
        backends = pytest.importorskip("fla.backends", reason="needs fla 0.6", exc_type=ImportError)
        operation = pytest.importorskip("fla.ops.gated_delta_rule", exc_type=ImportError)
        for name in ("FLA_QLA", "FLA_DISABLE_BACKEND_DISPATCH"):
            monkeypatch.delenv(name, raising=False)
        monkeypatch.setenv("FLA_FLASH_QLA", "0")
        registry = backends._operation_registries["gated_delta_rule"]
        monkeypatch.setattr(registry, "_backends", dict(registry._backends))

        @backends.register("gated_delta_rule")
        class Last(backends.BaseBackend):
            backend_type, priority = "last", 9

            def chunk_gated_delta_rule(self, *args, **kwargs):
                return "fla"

        yield operation.chunk_gated_delta_rule
        plugin.disable()

    def test_parameters(self, entry):
        assert list(inspect.signature(entry).parameters) == [*PARAMETERS["0.6.0"], "kwargs"]

    def test_order(self, entry):
        from fla.backends import _operation_registries

        plugin.enable()
        order = [backend.backend_type for backend in _operation_registries["gated_delta_rule"]._get_sorted_backends()]
        assert order.index("qla") < order.index("flash_qla")

    def test_served_refused_disabled(self, entry, spy, monkeypatch, rng):
        inputs = make_inputs(rng, 10)
        assert entry(*inputs) == "fla"
        plugin.enable()
        assert entry(*inputs, output_final_state=True) == ("o", "state")
        assert list(spy[0]) == ["q", "k", "v", "g", "beta", "output_final_state"]
        assert entry(*inputs, cp_context=object()) == "fla"
        monkeypatch.setenv("FLA_QLA", "0")
        assert entry(*inputs) == "fla"
        monkeypatch.delenv("FLA_QLA")
        plugin.disable()
        assert entry(*inputs) == "fla" and len(spy) == 1
