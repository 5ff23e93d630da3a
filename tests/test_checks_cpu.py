"""Wrong input is refused before anything runs, with the argument, the rule and the value in the message."""

from __future__ import annotations

import contextlib
import dataclasses
import weakref
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest
import torch
from inputs import cu_seqlens_of, make_inputs, make_state

import qla
from qla import checks, device
from qla.device import DeviceSpec, device_spec

CPU_REASON = "the kernels need a CUDA device, and q is on cpu"


def call(rng, **changes):
    """A right call on 1 x 40 tokens with single arguments replaced; a callable replacement gets the right value."""
    inputs = make_inputs(rng, 40, dtype=torch.float32)
    arguments = dict(inputs._asdict(), initial_state=make_state(rng, inputs), output_final_state=True)
    for name, change in changes.items():
        arguments[name] = change(arguments[name]) if callable(change) else change
    return qla.chunk_gated_delta_rule(**arguments)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_the_right_call_passes(rng):
    o, state = call(rng)
    assert o.shape == (1, 40, 4, 24) and state.shape == (1, 4, 16, 24)


SHAPES = {
    "q rank": ({"q": lambda q: q[0]}, r"q must have shape \[B, T, H, K\], got \[40, 2, 16\]"),
    "v rank": ({"v": lambda v: v[0]}, r"v must have shape \[B, T, HV, V\], got \[40, 4, 24\]"),
    "k tokens": ({"k": lambda k: k[:, 1:]}, r"k must have shape \[B, T, H, K\] = \[1, 40, 2, 16\], got \[1, 39, 2, 16\]"),
    "k heads": ({"k": lambda k: k[:, :, :1]}, r"k must have shape .* = \[1, 40, 2, 16\], got \[1, 40, 1, 16\]"),
    "k dim": ({"k": lambda k: k[..., 1:]}, r"k must have shape .* got \[1, 40, 2, 15\]"),
    "v tokens": ({"v": lambda v: v[:, 1:]}, r"v must have shape .* = \[1, 40, 4, 24\], got \[1, 39, 4, 24\]"),
    "v batch": ({"v": lambda v: v.expand(2, -1, -1, -1)}, r"v must have shape .* got \[2, 40, 4, 24\]"),
    "g heads": ({"g": lambda g: g[..., :2]}, r"g must have shape \[B, T, HV\] = \[1, 40, 4\], got \[1, 40, 2\]"),
    "g rank": ({"g": lambda g: g[..., None]}, r"g must have shape .* got \[1, 40, 4, 1\]"),
    "beta tokens": ({"beta": lambda b: b[:, :3]}, r"beta must have shape .* got \[1, 3, 4\]"),
    "head ratio": (
        {"v": lambda v: v[:, :, :3], "g": lambda g: g[..., :3], "beta": lambda b: b[..., :3]},
        r"v must have a number of heads HV that is a multiple of q's H = 2, got HV = 3",
    ),
    "fewer value heads": (
        {"v": lambda v: v[:, :, :1], "g": lambda g: g[..., :1], "beta": lambda b: b[..., :1]},
        r"multiple of q's H = 2, got HV = 1",
    ),
    "no heads": ({"q": lambda q: q[:, :, :0], "k": lambda k: k[:, :, :0]}, r"q must have H >= 1, got H = 0"),
    "no key dim": ({"q": lambda q: q[..., :0], "k": lambda k: k[..., :0]}, r"q must have K >= 1, got K = 0"),
    "no value dim": ({"v": lambda v: v[..., :0]}, r"v must have V >= 1, got V = 0"),
    "state layout": (
        {"initial_state": lambda s: s.transpose(2, 3)},
        r"initial_state must have shape \[S, HV, K, V\] = \[1, 4, 16, 24\], got \[1, 4, 24, 16\]",
    ),
    "state v first": ({"state_v_first": True}, r"initial_state must have shape \[S, HV, V, K\] = \[1, 4, 24, 16\], got \[1, 4, 16, 24\]"),
    "state count": ({"initial_state": lambda s: s.expand(2, -1, -1, -1)}, r"initial_state must have shape .* got \[2, 4, 16, 24\]"),
    "states of packed": ({"cu_seqlens": cu_seqlens_of([20, 20])}, r"initial_state must have shape .* = \[2, 4, 16, 24\], got \[1, 4"),
}


@pytest.mark.parametrize(("changes", "message"), SHAPES.values(), ids=SHAPES)
def test_wrong_shapes(rng, changes, message):
    with pytest.raises(ValueError, match=message):
        call(rng, **changes)


TYPES = {
    "q list": ({"q": [1.0]}, r"q must be a tensor, got list"),
    "g none": ({"g": None}, r"g must be a tensor, got NoneType"),
    "beta none": ({"beta": None}, r"beta must be a tensor, got NoneType"),
    "q int": ({"q": lambda q: q.int()}, r"q must be bfloat16, float16, float32 or float64, got int32"),
    "g int": ({"g": lambda g: g.int()}, r"g must be bfloat16, .* got int32"),
    "k dtype": ({"k": lambda k: k.half()}, r"k must have the dtype of q, float32, got float16"),
    "v dtype": ({"v": lambda v: v.double()}, r"v must have the dtype of q, float32, got float64"),
    "state int": ({"initial_state": lambda s: s.long()}, r"initial_state must be bfloat16, .* got int64"),
    "state none type": ({"initial_state": 0.0}, r"initial_state must be a tensor, got float"),
    "cu list": ({"cu_seqlens": [0, 40]}, r"cu_seqlens must be a tensor, got list"),
    "cu float": ({"cu_seqlens": torch.tensor([0.0, 40.0])}, r"cu_seqlens must be int32 or int64, got float32"),
    "cu short": ({"cu_seqlens": torch.tensor([0, 40], dtype=torch.int16)}, r"cu_seqlens must be int32 or int64, got int16"),
    "scale str": ({"scale": "1"}, r"scale must be a number or None, got str"),
    "scale tensor": ({"scale": torch.tensor(1.0)}, r"scale must be a number or None, got Tensor"),
}


@pytest.mark.parametrize(("changes", "message"), TYPES.values(), ids=TYPES)
def test_wrong_types(rng, changes, message):
    with pytest.raises(TypeError, match=message):
        call(rng, **changes)


@pytest.mark.parametrize("scale", [float("nan"), float("inf"), -float("inf")])
def test_scale_must_be_finite(rng, scale):
    with pytest.raises(ValueError, match="scale must be finite, got"):
        call(rng, scale=scale)


@pytest.mark.parametrize("name", ["k", "v", "g", "beta", "initial_state"])
def test_other_device(rng, name):
    with pytest.raises(ValueError, match=f"{name} must be on the device of q, cpu, got meta"):
        call(rng, **{name: lambda x: x.to("meta")})


CU_SEQLENS = {
    "start": ([3, 40], "must start with 0, got 3"),
    "negative": ([-1, 40], "must start with 0, got -1"),
    "falls": ([0, 30, 20, 40], "must not decrease, got 30 and then 20 at index 2"),
    "too long": ([0, 20, 41], "must end at or before the number of tokens, 40, got 41"),
}


@pytest.mark.parametrize(("values", "message"), CU_SEQLENS.values(), ids=CU_SEQLENS)
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_wrong_values_in_cu_seqlens(rng, values, message, dtype):
    cu = torch.tensor(values, dtype=dtype)
    with pytest.raises(ValueError, match=f"cu_seqlens {message}"):
        call(rng, cu_seqlens=cu, initial_state=None)
    with pytest.raises(ValueError, match=f"cu_seqlens_cpu {message}"):
        call(rng, cu_seqlens=cu_seqlens_of([40] + [0] * (len(values) - 2)), cu_seqlens_cpu=cu, initial_state=None)


def test_wrong_shape_of_cu_seqlens(rng):
    with pytest.raises(ValueError, match=r"cu_seqlens must have shape \[S \+ 1\], got \[0\]"):
        call(rng, cu_seqlens=torch.zeros(0, dtype=torch.int32))
    with pytest.raises(ValueError, match=r"cu_seqlens must have shape \[S \+ 1\], got \[1, 2\]"):
        call(rng, cu_seqlens=torch.tensor([[0, 40]]))


def test_cu_seqlens_needs_one_batch_row(rng):
    inputs = make_inputs(rng, 40, batch=2)
    with pytest.raises(ValueError, match=r"q must have B = 1 when cu_seqlens is given .* got B = 2"):
        qla.chunk_gated_delta_rule(*inputs, cu_seqlens=cu_seqlens_of([40]))


def test_the_copy_of_cu_seqlens_belongs_to_it(rng):
    with pytest.raises(ValueError, match="cu_seqlens_cpu is a copy of cu_seqlens and needs it, got cu_seqlens=None"):
        call(rng, cu_seqlens_cpu=cu_seqlens_of([40]))
    with pytest.raises(ValueError, match=r"cu_seqlens_cpu must have shape cu_seqlens's = \[2\], got \[3\]"):
        call(rng, cu_seqlens=cu_seqlens_of([40]), cu_seqlens_cpu=cu_seqlens_of([20, 20]))
    with pytest.raises(ValueError, match=r"cu_seqlens_cpu must equal cu_seqlens, \[0, 40\], got \[0, 39\]"):
        call(rng, cu_seqlens=cu_seqlens_of([40]), cu_seqlens_cpu=cu_seqlens_of([39]))


def test_too_many_tokens_for_32_bit_rows():
    q = torch.empty(1, 2**31, 1, 1, device="meta", dtype=torch.bfloat16)
    gate = torch.empty(1, 2**31, 1, device="meta")
    with pytest.raises(ValueError, match=r"q must have B \* T <= 2147483647, got 2147483648"):
        checks.check_inputs(q, q, q, gate, gate, None, False, None, None)


def test_the_low_level_entry_checks_too(rng):
    inputs = make_inputs(rng, 40)
    with pytest.raises(ValueError, match="v must have shape"):
        qla.chunk_gated_delta_rule_fwd(inputs.q, inputs.k, inputs.v[:, 1:], inputs.g, inputs.beta)
    with pytest.raises(ValueError, match="scale must be finite"):
        qla.chunk_gated_delta_rule_fwd(*inputs, scale=float("nan"))


def test_problem_describes_the_call(rng):
    inputs = make_inputs(rng, 40, batch=3, dtype=torch.bfloat16)
    problem = checks.check_inputs(*inputs, None, False, None, None)
    assert problem == checks.Problem(torch.bfloat16, 3, 40, 2, 4, 16, 24, 3, False)
    assert problem.seq_len == 40
    assert problem.state_shape(False) == (3, 4, 16, 24) and problem.state_shape(True) == (3, 4, 24, 16)
    packed = checks.check_inputs(*(x[:1] for x in inputs), None, False, cu_seqlens_of([10, 0, 30]), None)
    assert packed.num_seqs == 3 and packed.varlen and packed.seq_len == 0
    with pytest.raises(dataclasses.FrozenInstanceError):
        problem.batch = 1


class TestUnsupportedReason:
    """The reasons, on stand-ins for CUDA tensors."""

    @staticmethod
    def tensor(dtype=torch.bfloat16, dim=128):
        return SimpleNamespace(device=torch.device("cuda", 0), dtype=dtype, shape=(1, 64, 2, dim))

    @pytest.fixture(autouse=True)
    def hopper(self, monkeypatch):
        self.spec = DeviceSpec(0, (9, 0), 132)
        monkeypatch.setattr(checks, "device_spec", lambda device: self.spec)

    def test_none_when_the_kernels_take_it(self):
        for dtype in (torch.bfloat16, torch.float16):
            for dim in (1, 64, 100, 128):
                x = self.tensor(dtype, dim)
                assert qla.unsupported_reason(x, x, x) is None

    def test_cpu(self, rng):
        inputs = make_inputs(rng, 8)
        assert qla.unsupported_reason(*inputs) == CPU_REASON
        assert qla.unsupported_reason(**inputs._asdict(), scale=1.0, output_final_state=True) == CPU_REASON

    def test_other_gpu(self):
        self.spec = DeviceSpec(0, (8, 0), 108)
        x = self.tensor()
        assert qla.unsupported_reason(x, x, x) == "the kernels need compute capability 9.0 (Hopper), and cuda:0 has 8.0"

    def test_dtype(self):
        x = self.tensor(torch.float32)
        assert qla.unsupported_reason(x, x, x) == "the kernels take bfloat16 and float16, and q is float32"

    def test_head_size(self):
        x, wide = self.tensor(), self.tensor(dim=256)
        assert qla.unsupported_reason(wide, wide, x) == "the kernels take head sizes up to 128, and K is 256"
        assert qla.unsupported_reason(x, x, wide) == "the kernels take head sizes up to 128, and V is 256"


@pytest.fixture
def empty_spec_cache():
    device._spec_of_index.cache_clear()
    yield
    device._spec_of_index.cache_clear()


def test_device_spec(monkeypatch, empty_spec_cache):
    reads = []

    def properties(index):
        reads.append(index)
        return SimpleNamespace(major=9, minor=0, multi_processor_count=132)

    monkeypatch.setattr(torch.cuda, "get_device_properties", properties)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 6)
    expected = DeviceSpec(index=7, capability=(9, 0), sm_count=132)
    assert device_spec("cuda:7") == device_spec(torch.device("cuda", 7)) == device_spec(7) == expected
    assert reads == [7], "read once per device"
    assert device_spec("cuda").index == 6
    with pytest.raises(ValueError, match="device must be a CUDA device, got cpu"):
        device_spec("cpu")


def test_warn_once():
    with pytest.warns(RuntimeWarning, match="a reason of this test") as caught:
        checks.warn_once("a reason of this test")
        checks.warn_once("a reason of this test")
    assert len(caught) == 1


class TestWhatPassedOnce:
    """A call like one that passed is not checked again; what the checks depend on is all that makes calls alike."""

    @pytest.fixture
    def checked(self, monkeypatch):
        """The q of each call that was checked in full."""
        calls = []
        check_heads = checks._check_heads
        monkeypatch.setattr(checks, "_check_heads", lambda q, k, v: calls.append(q) or check_heads(q, k, v))
        checks._passed.cache_clear()
        yield calls
        checks._passed.cache_clear()

    @staticmethod
    def check(inputs, state=None, v_first=False, cu=None, cu_cpu=None):
        return checks.check_inputs(*inputs, state, v_first, cu, cu_cpu)

    def test_other_values_and_strides_are_alike(self, rng, checked):
        inputs = make_inputs(rng, 40, batch=2, dtype=torch.bfloat16)
        first = self.check(inputs)
        assert self.check(make_inputs(rng, 40, batch=2, dtype=torch.bfloat16)) is first
        assert self.check([torch.stack([x, x], -1)[..., 1] for x in inputs]) is first
        assert len(checked) == 1

    def test_sizes_dtypes_and_optional_tensors_are_not(self, rng, checked):
        packed = cu_seqlens_of([15, 25])
        inputs = make_inputs(rng, 40, dtype=torch.bfloat16)
        two = make_state(rng, inputs, 2)
        calls = [
            (inputs,),
            (inputs._replace(g=inputs.g.float()),),
            (make_inputs(rng, 40, dtype=torch.float16),),
            (make_inputs(rng, 41, dtype=torch.bfloat16),),
            ([x.to("meta") for x in inputs],),
            (inputs, make_state(rng, inputs)),
            (inputs, make_state(rng, inputs).double()),
            (inputs, make_state(rng, inputs).transpose(2, 3), True),
            (inputs, None, False, packed),
            (inputs, None, False, packed.long() if packed.dtype == torch.int32 else packed.int()),
            (inputs, None, False, cu_seqlens_of([15, 5, 20])),
            (inputs, None, False, packed, packed),
            (inputs, two, False, packed),
        ]
        problems = [self.check(*arguments) for arguments in calls]
        assert len(checked) == len(calls)
        assert [self.check(*arguments) for arguments in calls] == problems and len(checked) == len(calls)
        assert [(problem.dtype, problem.tokens, problem.num_seqs) for problem in problems[2:4]] == [
            (torch.float16, 40, 1),
            (torch.bfloat16, 41, 1),
        ]
        assert [problem.num_seqs for problem in problems[8:]] == [2, 2, 3, 2, 2]

    @pytest.mark.parametrize(("changes", "message"), [*SHAPES.values(), *TYPES.values()], ids=[*SHAPES, *TYPES])
    @pytest.mark.filterwarnings("ignore::RuntimeWarning")
    def test_what_is_wrong_stays_so(self, rng, checked, changes, message):
        """After a right call, and the second time as well."""
        call(rng)
        for _ in range(2):
            with pytest.raises((TypeError, ValueError), match=message):
                call(rng, **changes)

    @pytest.mark.filterwarnings("ignore::RuntimeWarning")
    def test_layout_of_a_state_whose_shape_fits_both(self, rng, checked):
        inputs = make_inputs(rng, 40, key_dim=16, value_dim=16, dtype=torch.bfloat16)
        state = make_state(rng, inputs)
        assert self.check(inputs, state, False) == self.check(inputs, state, True)

    def test_values_of_cu_seqlens_are_looked_at_each_time(self, rng, checked, monkeypatch):
        inputs = make_inputs(rng, 40, dtype=torch.bfloat16)
        right, other, wrong = (torch.tensor([0, end, 40]) for end in (15, 20, 50))
        self.check(inputs, None, False, right, right)
        assert self.check(inputs, None, False, other, other).num_seqs == 2 and len(checked) == 1
        with pytest.raises(ValueError, match="cu_seqlens_cpu must not decrease, got 50 and then 40 at index 2"):
            self.check(inputs, None, False, right, wrong)
        with pytest.raises(ValueError, match=r"cu_seqlens_cpu must equal cu_seqlens, \[0, 15, 40\], got \[0, 20, 40\]"):
            self.check(inputs, None, False, right, other)
        self.check(inputs, None, False, right)
        with pytest.raises(ValueError, match="cu_seqlens must not decrease, got 50 and then 40 at index 2"):
            self.check(inputs, None, False, wrong)

    def test_no_tensor_is_kept(self, rng, checked):
        inputs = make_inputs(rng, 40, dtype=torch.bfloat16)
        cu = cu_seqlens_of([15, 25])
        arguments = [*inputs, make_state(rng, inputs, 2), False, cu, cu.clone()]
        checks.check_inputs(*arguments)
        alive = [weakref.ref(x) for x in arguments if isinstance(x, torch.Tensor)]
        checked.clear()
        del inputs, arguments, cu
        assert len(alive) == 8 and not any(ref() is not None for ref in alive)

    def test_others_than_plain_tensors_are_checked_each_time(self, rng, checked):
        inputs = make_inputs(rng, 40, dtype=torch.bfloat16)
        for _ in range(2):
            self.check(inputs, torch.nn.Parameter(make_state(rng, inputs)))
        assert len(checked) == 2

    def test_it_is_bounded(self, checked):
        assert checks._passed.cache_info().maxsize == 1024

    def test_threads_at_once(self, rng, checked):
        """Forms come and go in eight threads: each gets its own problem."""
        forms = [make_inputs(rng, tokens, dtype=torch.bfloat16) for tokens in range(1, 20)]
        with ThreadPoolExecutor(8) as pool:
            problems = list(pool.map(self.check, forms * 20))
        assert [problem.tokens for problem in problems] == list(range(1, 20)) * 20


def test_on_device(monkeypatch):
    """Nothing is switched where the device is current, and a CPU's tensors have none."""
    switched = []
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    monkeypatch.setattr(torch.cuda, "device", lambda device: contextlib.nullcontext(switched.append(device)))
    for name in ("cpu", "cuda", "cuda:1", "cuda:0"):
        with device.on_device(torch.device(name)):
            pass
    assert switched == [torch.device("cuda:0")]
