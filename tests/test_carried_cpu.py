"""The archive of built kernels that a wheel carries: what gets in, what is copied where, and what is left alone."""

from __future__ import annotations

import json
import os
import platform
import shutil
import subprocess
import sys
import warnings
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from qla.kernels import carried

KERNELS = f"1.2/linux-{platform.machine()}/kernels"


def files_of(folder: Path) -> dict[str, bytes]:
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.fixture
def built(tmp_path) -> Path:
    """A cache with three entries, and what else a cache holds."""
    cache = tmp_path / "built"
    for entry in ("a", "b", "c"):
        folder = cache / KERNELS / entry
        folder.mkdir(parents=True)
        (folder / "manifest.json").write_text(f'{{"entry": "{entry}"}}')
        (folder / "executable.so").write_bytes(entry.encode() * 1000)
    (cache / KERNELS / "unfinished").mkdir()
    (cache / KERNELS / "unfinished" / "executable.so").write_bytes(b"x")
    (cache / "1.2" / "cuda-binaries" / "d").mkdir(parents=True)
    (cache / "1.2" / "cuda-binaries" / "d" / "kernel.cubin").write_bytes(b"y")
    return cache


@pytest.fixture
def archive(built, tmp_path, monkeypatch) -> Path:
    monkeypatch.setattr(carried, "driver_version", lambda: 13020)
    assert carried.pack(built, tmp_path / "compiled.tar.xz", "1.2", "13.0") == 3
    return tmp_path / "compiled.tar.xz"


def test_finished_entries_come_back_as_they_were(built, archive, tmp_path):
    assert carried.seed(tmp_path / "cache", "1.2", archive) == 3
    expected = {name: content for name, content in files_of(built).items() if name.split("/")[-2] in "abc"}
    assert files_of(tmp_path / "cache") == expected and len(expected) == 6


def test_the_same_kernels_make_the_same_archive(built, archive, tmp_path):
    for path in built.rglob("*"):
        os.utime(path, (1, 1))
    carried.pack(built, tmp_path / "again", "1.2", "13.0")
    assert (tmp_path / "again").read_bytes() == archive.read_bytes()


def test_only_what_is_missing_is_copied(archive, tmp_path):
    own = tmp_path / "cache" / KERNELS / "b"
    own.mkdir(parents=True)
    (own / "executable.so").write_text("the user's own")
    assert carried.seed(tmp_path / "cache", "1.2", archive) == 2
    assert files_of(own) == {"executable.so": b"the user's own"}


def test_once_a_process_and_cache(archive, tmp_path):
    assert [carried.seed(tmp_path / name, "1.2", archive) for name in ("one", "two", "one")] == [3, 3, 3]
    shutil.rmtree(tmp_path / "one")
    carried.seed(tmp_path / "one", "1.2", archive)
    assert not (tmp_path / "one").exists()


@pytest.mark.parametrize(
    "tilelang, machine, driver, copied",
    [("1.2", None, 13000, 3), ("1.2", None, None, 3), ("1.3", None, 13000, 0), ("1.2", "other", 13000, 0), ("1.2", None, 12090, 0)],
    ids=["fits", "no driver", "other TileLang", "other CPU", "older driver"],
)
def test_what_cannot_run_is_left_alone(archive, tmp_path, monkeypatch, tilelang, machine, driver, copied):
    monkeypatch.setattr(carried, "driver_version", lambda: driver)
    if machine:
        monkeypatch.setattr(platform, "machine", lambda: machine)
    assert carried.seed(tmp_path / "cache", tilelang, archive) == copied
    assert len(files_of(tmp_path / "cache")) == 2 * copied


def test_driver_version():
    version = carried.driver_version()
    assert version is None or 11000 <= version < 100000


def test_without_an_archive_nothing_happens(tmp_path):
    assert carried.seed(tmp_path / "cache", "1.2", tmp_path / "none") == 0 and not (tmp_path / "cache").exists()
    assert not carried.ARCHIVE.exists(), "a checkout carries none"


@pytest.mark.parametrize("damage", ["cut", "empty", "other file", "cache is a file"])
def test_what_fails_is_a_warning(archive, tmp_path, damage):
    content = archive.read_bytes()
    if damage == "cache is a file":
        (tmp_path / "cache").write_text("")
    else:
        archive.write_bytes({"cut": content[: len(content) // 2], "empty": b"", "other file": b"something" * 100}[damage])
    with pytest.warns(RuntimeWarning, match="qla compiles its kernels"):
        assert carried.seed(tmp_path / "cache", "1.2", archive) == 0


def test_nothing_to_pack(tmp_path):
    with pytest.raises(ValueError, match="holds no kernels"):
        carried.pack(tmp_path, tmp_path / "compiled.tar.xz", "1.2", "13.0")


def test_threads_at_once(built, archive, tmp_path):
    """Eight copies at the same time: each entry is there, whole, and nothing is left over."""
    unmemoised = carried.seed.__wrapped__
    with warnings.catch_warnings(), ThreadPoolExecutor(8) as pool:
        warnings.simplefilter("error")
        list(pool.map(lambda _: unmemoised(tmp_path / "cache", "1.2", archive), range(8)))
    assert {name for name in files_of(tmp_path / "cache")} == {
        f"{KERNELS}/{e}/{f}" for e in "abc" for f in ("executable.so", "manifest.json")
    }


def test_processes_at_once(built, archive, tmp_path):
    code = (
        "import sys, warnings; warnings.simplefilter('error'); from pathlib import Path; import carried\n"
        "print(carried.seed(Path(sys.argv[1]), '1.2', Path(sys.argv[2])))"
    )
    command = [sys.executable, "-c", code, str(tmp_path / "cache"), str(archive)]
    environment = os.environ | {"PYTHONPATH": str(Path(carried.__file__).parent)}  # alone, as it imports nothing heavy
    options = {"env": environment, "cwd": tmp_path, "stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    processes = [subprocess.Popen(command, **options) for _ in range(8)]
    for process in processes:
        text, _ = process.communicate(timeout=300)
        assert process.returncode == 0, text
    manifests = {e: json.loads((tmp_path / "cache" / KERNELS / e / "manifest.json").read_text())["entry"] for e in "abc"}
    assert manifests == {"a": "a", "b": "b", "c": "c"}
