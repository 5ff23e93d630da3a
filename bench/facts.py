"""Where and with what a measurement was made: commit, GPU, versions, date. Appends JSON lines."""

from __future__ import annotations

import datetime
import importlib.metadata
import json
import os
import subprocess
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]


def commit() -> str:
    """QLA_COMMIT where it is set (a copy without git); else the checkout's commit, "-dirty" if files differ; else "unknown"."""
    if os.environ.get("QLA_COMMIT"):
        return os.environ["QLA_COMMIT"]
    try:
        git = ["git", "--no-optional-locks", "-C", str(ROOT)]
        head = subprocess.run([*git, "rev-parse", "--short=12", "HEAD"], capture_output=True, text=True, check=True).stdout.strip()
        # Results are appended while runs are being recorded: they do not make the code differ.
        changes = [*git, "status", "--porcelain", "--untracked-files=no", "--", ":!bench/results"]
        return head + ("-dirty" if subprocess.run(changes, capture_output=True, text=True, check=True).stdout.strip() else "")
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


def package_version(*names: str) -> str | None:
    """Version of the first of these distributions that is installed, or None."""
    for name in names:
        try:
            return importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return None


def gpu_name() -> str | None:
    """Name of the current CUDA device, or None."""
    import torch

    return torch.cuda.get_device_name() if torch.cuda.is_available() else None


def environment() -> dict[str, str | None]:
    """The keys that every recorded line carries."""
    import torch

    return {
        "gpu": gpu_name(),
        "torch": torch.__version__,
        "tilelang": package_version("tilelang"),
        "commit": commit(),
        "date": datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ"),
    }


def append_line(path: Path, record: dict[str, Any]) -> None:
    """Appends one JSON line and flushes it, so that a killed run keeps what it measured."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a", encoding="utf-8") as file:
        file.write(json.dumps(record) + "\n")
        file.flush()


def read_lines(paths: Iterable[Path]) -> Iterator[dict[str, Any]]:
    """The records of these files, in order. Raises ValueError with file and line where one is not JSON."""
    for path in paths:
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
            if not line.strip():
                continue
            try:
                yield json.loads(line)
            except json.JSONDecodeError as error:
                raise ValueError(f"{path}:{number} is not a JSON line: {error}") from error
