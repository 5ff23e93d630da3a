"""CPU-only: l2norm and gates lower for sm_90a, values go where their names are, and constants mean the same in Python and CUDA."""

import re
from pathlib import Path

import pytest
import torch

pytest.importorskip("tilelang")
from test_kernel_path_cpu import StandIns  # noqa: E402

from qla import activations  # noqa: E402
from qla.kernels import gates, l2norm, launch, recurrent  # noqa: E402
from qla.kernels.ws import HEAD_DIMS  # noqa: E402
from tests.lowered import generated, static  # noqa: E402

SOURCES = {module: Path(module.__file__).with_suffix(".cuh").read_text() for module in (gates, l2norm)}
VARIANTS = [(module, cfg) for module in SOURCES for cfg in module.CONFIGS]


@pytest.fixture(scope="module", params=VARIANTS, ids=lambda variant: variant[1].name)
def variant(request):
    """(module, config, bytes of dynamic shared memory, text) of each kernel."""
    module, cfg = request.param
    return module, cfg, *generated(module, cfg)


def parameters(source, function):
    """Names of a device function's parameters, in their order."""
    text = re.search(rf"__forceinline__ int {function}\((.*?)\) \{{", source, re.S)[1]
    return [re.search(r"(\w+?)_?$", parameter.strip())[1] for parameter in text.split(",")]


def arguments(code):
    """Of each call of a device function."""
    calls = re.findall(r"qla_\w+::\w+(?:<\w+>)?\((.*)\);", code)
    return [
        [re.sub(r"\(&\((\w+)\[0\]\)\)|\(\(int\)(\w+)\.x\)|\(\(int\)blockIdx\.(y)\)", r"\1\2\3", x) for x in call.split(", ")]
        for call in calls
    ]


def test_one_function_and_no_more(variant):
    module, cfg, smem, code = variant
    assert code.startswith(f"__launch_bounds__({module.THREADS}, {getattr(cfg, 'blocks_per_sm', 1)})") and cfg.threads == module.THREADS
    assert smem == cfg.smem_bytes == 0
    assert static(code, "float") == ([2 * gates.THREADS * launch.GATES_QUAD] if cfg == gates.GatesConfig(backward=True) else [])
    function = "differentiate" if cfg.backward else "activate" if module is gates else "normalize"
    assert len(re.findall(rf"::{function}\b", code)) == (1 if module is gates else 2)


def test_values_go_where_their_names_are(variant):
    module, cfg, _, code = variant
    function = "differentiate" if cfg.backward else "activate" if module is gates else "normalize"
    names = parameters(SOURCES[module], function)
    same = {"tokens": "N", "heads": "HV" if module is gates else "H", "block": "blockIdx", "thread": "threadIdx", "group": "y"}
    same |= {"blocks": "num_blocks", "A_log": "ALog", "raw_g": "RawG", "raw_beta": "RawBeta", "dt_bias": "DtBias", "draw_g": "DRawG"}
    same |= {"draw_beta": "DRawBeta", "dim": "D"}
    for number, call in enumerate(arguments(code)):
        tensor = "qk"[number]
        own = {"x": tensor, "y": f"y{tensor}", "r": f"r{tensor}", "dy": f"dy{tensor}", "dx": f"d{tensor}"} if module is l2norm else {}
        own |= {"token_stride": f"{tensor}_token", "head_stride": f"{tensor}_head"} if module is l2norm else {}
        expected = [{**same, **own}.get(name, name).lower() for name in names]
        got = [re.sub(r"[()]", "", text).lower() for text in call]
        got = ["shared" if "shared" in text else text for text in got]
        if "rows" in names:
            assert sorted(got[names.index("rows")].split(" * ")) == ["h", "n"]
            expected[names.index("rows")] = got[names.index("rows")]
        assert got == expected


def test_constants_agree():
    declared = dict(re.findall(r"\b(k\w+) = (\d+)(?=[,;])", SOURCES[gates]))
    own = {"kThreads": gates.THREADS, "kQuad": launch.GATES_QUAD, "kAtOnce": launch.GATES_TOKENS_AT_ONCE}
    options = {
        "kActivateGate": launch.ACTIVATE_GATE,
        "kHasBias": launch.HAS_BIAS,
        "kActivateBeta": launch.ACTIVATE_BETA,
        "kTwice": launch.TWICE,
    }
    types = {"kFloat": torch.float32, "kBfloat16": torch.bfloat16, "kFloat16": torch.float16}
    assert {name: int(value) for name, value in declared.items()} == {
        **own,
        **options,
        **{name: launch.TYPES[x] for name, x in types.items()},
    }
    assert (StandIns.ACTIVATE_BETA, StandIns.TWICE) == (launch.ACTIVATE_BETA, launch.TWICE)
    declared = {name: int(value) for name, value in re.findall(r"\b(k\w+) = (\d+)(?=[,;])", SOURCES[l2norm])}
    assert declared == {"kAtOnce": launch.NORM_ROWS_OF_LANES} and l2norm.THREADS == launch.NORM_THREADS
    lanes = {int(n) for n in re.findall(r"return \w+_rows<HALF, (\d+)>", SOURCES[l2norm])}
    assert lanes == {dim // launch.NORM_VECTOR for dim in HEAD_DIMS}, "eight elements of 16 bits a lane: 16-byte loads"
    assert "if (dim == 64) return" in SOURCES[l2norm]


@pytest.mark.parametrize("most", [None, 1, 2], ids=["forward", "one block", "two blocks"])
@pytest.mark.parametrize("heads", [1, 3, 4, 16, 64, 255, 256, 257, 1000, 1028])
@pytest.mark.parametrize("tokens", [1, 7, 1000])
def test_each_element_has_one_thread(heads, tokens, most):
    """The columns of gates.cuh, in Python: all (token, head) pairs once, for the launcher's number of blocks."""
    blocks, groups = launch._gate_grid(tokens, heads, launch.GATES_TOKENS_AT_ONCE if most is None else 1)
    blocks, seen = min(blocks, most or blocks), []
    of_thread = launch.GATES_QUAD if heads % launch.GATES_QUAD == 0 else 1
    for group in range(groups):
        width = min(gates.THREADS, heads // of_thread - group * gates.THREADS)
        rows = gates.THREADS // width
        for block in range(blocks):
            for thread in range(rows * width):
                first, unit = block * rows + thread // width, group * gates.THREADS + thread % width
                own = range(first, tokens, blocks * rows)
                assert most or len(own) <= launch.GATES_TOKENS_AT_ONCE, "forward has no loop"
                seen += [(token, unit * of_thread + j) for token in own for j in range(of_thread)]
    assert len(seen) == len(set(seen)) == tokens * heads


def test_one_epsilon():
    """Kernels take it as a number, or have their own: the same in both."""
    assert activations.L2NORM_EPS == recurrent.L2NORM_EPS == 1e-6


def test_wrong_dtype():
    with pytest.raises(ValueError, match="dtype must be bfloat16 or float16, got float32"):
        l2norm.L2NormConfig("float32")
