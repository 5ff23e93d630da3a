"""Whether the GPU tests of a commit are green: figures of a commit whose tests are red, or were not run, are not published.

tests/record_gpu.py leaves a line for each run of the GPU tests. A commit is green when no test failed since its last run in which
one did, and the finished runs since then passed together nearly as many tests as any run before: some files alone say little, and a
run that was cut short says nothing. What was tested need not be the very commit: only files under qla/ run on the
GPU, so another commit stands for it where git says that they do not differ. Without git, the commits must be equal.
"""

from __future__ import annotations

import functools
import subprocess
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.facts import ROOT, read_lines

TESTS = ROOT / "bench" / "results" / "gpu_tests.jsonl"
ENOUGH = 0.9  # of the tests that the largest run until then passed: tests come and go between commits
SHORTEST = 7  # characters with which git abbreviates a commit


@dataclass(frozen=True)
class Verdict:
    """Whether figures may be published, why, and the tested commit that stands for the measured one (None where there is none)."""

    green: bool
    reason: str
    tested: str | None = None


def is_a_version(commit: str | None) -> bool:
    """Whether the name says what the code was: not that of changed files, nor of files from nowhere."""
    return bool(commit) and commit != "unknown" and not str(commit).endswith("-dirty")


def same_name(one: str, other: str) -> bool:
    """Whether these name one commit; either may be abbreviated."""
    short, long = sorted((one, other), key=len)
    return short == long or (len(short) >= SHORTEST and long.startswith(short))


@functools.cache
def same_code(tested: str, measured: str) -> bool:
    """Whether both are the same commit, or git knows both and no file under qla/ differs."""
    if same_name(tested, measured):
        return True
    git = ["git", "-C", str(ROOT), "diff", "--quiet", tested, measured, "--", "qla"]
    try:
        return subprocess.run(git, capture_output=True).returncode == 0  # 1: they differ, 128: not known here
    except OSError:
        return False


def verdict_on(commit: str | None, lines: Iterable[Mapping[str, Any]], same: Callable[[str, str], bool] = same_code) -> Verdict:
    """The verdict from the lines of test runs, of any commits. `same`: whether a tested commit (first) stands for the measured one."""
    if commit is None or not is_a_version(commit):
        return Verdict(False, f"files differ from any commit ({commit}): nothing says what was tested")
    lines = list(lines)
    runs = [line for line in lines if is_a_version(line.get("commit")) and same(line["commit"], commit)]
    if not runs:
        return Verdict(False, f"no GPU tests of commit {commit} are recorded")
    runs.sort(key=lambda line: line.get("date") or "")  # stable: lines without a date stay in their order
    failures = [i for i, line in enumerate(runs) if line["failed"] > 0]
    after = failures[-1] + 1 if failures else 0
    passed = [line for line in runs[after:] if line["passed"] > 0 and not line.get("unfinished")]
    number = sum(line["passed"] for line in passed)
    until = runs[-1].get("date") or ""
    most = max(line["passed"] for line in lines if (line.get("date") or "") <= until)
    if passed and number >= ENOUGH * most:
        last = passed[-1]
        return Verdict(True, f"GPU tests of commit {last['commit']} passed on {last.get('date')}", last["commit"])
    if failures:
        last = runs[failures[-1]]
        return Verdict(False, f"{last['failed']} GPU tests of commit {last['commit']} failed on {last.get('date')}, and none passed later")
    return Verdict(False, f"{number} GPU tests of commit {commit} passed in runs that were finished, of {most} that a run has passed")


def verdict(commit: str | None, path: Path = TESTS) -> Verdict:
    """The verdict from a file of test runs, which may not exist."""
    return verdict_on(commit, read_lines([path]) if path.exists() else [])
