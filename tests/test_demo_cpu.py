"""The demo and the example of the README run where there is no GPU."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from qla import demo

README = Path(__file__).resolve().parents[1] / "README.md"


@pytest.fixture
def without_gpu(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)


def test_demo(without_gpu, capsys):
    assert demo.main() == 0
    out = capsys.readouterr().out
    assert "PyTorch (the kernels need a CUDA device, and q is on cpu)" in out
    assert "[1, 1024, 2, 128]" in out and "[1, 1024, 4, 128]" in out and "[1, 4, 128, 128]" in out
    assert re.search(r"error +o \d\.\d+e-0\d, final state \d\.\d+e-\d+", out) and re.search(r"time +[\d.]+ ms a call", out)


def test_demo_fails_on_a_wrong_result(without_gpu, monkeypatch, capsys):
    right = demo.run

    def wrong(inputs):
        o, state = right(inputs)
        return o * 1.1, state

    monkeypatch.setattr(demo, "run", wrong)
    assert demo.main() == 1
    assert "WRONG" in capsys.readouterr().out


def test_checked_heads_belong_together():
    assert demo.first_and_last_group(16, 64) == ([0, 15], [0, 1, 2, 3, 60, 61, 62, 63])
    assert demo.first_and_last_group(1, 3) == ([0], [0, 1, 2])


def test_examples_of_the_readme():
    """One after the other: the second goes on from the first one's state."""
    examples = re.findall(r"```python\n(.*?)```", README.read_text(), re.DOTALL)
    shown = "print(list(o.shape), list(state.shape))\n"
    code = "import torch\ntorch.cuda.is_available = lambda: False\n" + "".join(x.replace("4096", "64") + shown for x in examples)
    result = subprocess.run([sys.executable, "-W", "ignore", "-c", code], capture_output=True, text=True, timeout=120)
    assert result.returncode == 0, result.stderr
    assert result.stdout.splitlines() == ["[1, 64, 64, 128] [1, 64, 128, 128]", "[1, 1, 64, 128] [1, 64, 128, 128]"]
