"""The folder of compiled kernels that a wheel carries: what gets in, what is used, and what is left alone.

That libraries load and their functions are there is shown in test_startup_cpu.py, with a library that TileLang built.
"""

from __future__ import annotations

import importlib.metadata
import json
import platform
import sys
import threading
import time
import warnings
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from qla.kernels import carried

NAMES = ("a", "b", "c")


@pytest.fixture
def built(tmp_path) -> dict[str, Path]:
    """Libraries by name."""
    paths = {name: tmp_path / f"built {name}" for name in NAMES}
    for name, path in paths.items():
        path.write_bytes(name.encode() * 1000)
    return paths


@pytest.fixture
def folder(built, tmp_path, monkeypatch) -> Path:
    monkeypatch.setattr(carried, "driver_version", lambda: 13020)
    assert carried.pack(built, tmp_path / "some" / "where", "13.0") == 3
    return tmp_path / "some" / "where"


@pytest.fixture
def loads(monkeypatch) -> list[str]:
    """Names of the libraries that were loaded, by a stand-in that gives the path."""
    loaded = []

    def load(path):
        loaded.append(path.stem)
        time.sleep(0.02)
        return path

    monkeypatch.setattr(carried, "load", load)
    return loaded


def change(folder: Path, **facts: object) -> None:
    path = folder / carried.FACTS
    path.write_text(json.dumps(json.loads(path.read_text()) | facts))


def test_what_is_packed_is_used(built, folder, loads):
    assert sorted(path.name for path in folder.iterdir()) == ["a.so", "b.so", "c.so", "facts.json"]
    assert set(carried.usable(folder)) == set(NAMES)
    assert [carried.function(name, folder) for name in NAMES] == [folder / f"{name}.so" for name in NAMES]
    assert all((folder / f"{name}.so").read_bytes() == built[name].read_bytes() for name in NAMES)
    assert carried.function("d", folder) is None


def test_packing_again_leaves_nothing_behind(built, folder):
    (folder / "old.so").touch()
    del built["b"]
    assert carried.pack(built, folder, "13.0") == 2
    assert sorted(path.name for path in folder.iterdir()) == ["a.so", "c.so", "facts.json"]


def test_the_same_kernels_make_the_same_folder(built, folder, tmp_path):
    carried.pack(dict(reversed(built.items())), tmp_path / "again", "13.0")
    for path in folder.iterdir():
        assert path.read_bytes() == (tmp_path / "again" / path.name).read_bytes()


def test_nothing_to_pack(tmp_path):
    with pytest.raises(ValueError, match="no kernels to carry"):
        carried.pack({}, tmp_path / "out", "13.0")
    assert not (tmp_path / "out").exists()


def test_a_library_is_loaded_once(folder, loads):
    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(lambda i: carried.function("ab"[i % 2], folder), range(40)))
    assert set(found) == {folder / "a.so", folder / "b.so"} and sorted(loads) == ["a", "b"]


@pytest.mark.parametrize("fact", ["tilelang", "tvm_ffi", "machine", "sources"])
def test_what_was_built_otherwise_is_left_alone(folder, fact):
    change(folder, **{fact: "other"})
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert carried.usable(folder) == {} and carried.function("a", folder) is None


@pytest.mark.parametrize(("driver", "used"), [(13000, True), (14010, True), (None, True), (12090, False)])
def test_driver_must_have_the_compilers_major_version(folder, monkeypatch, driver, used):
    monkeypatch.setattr(carried, "driver_version", lambda: driver)
    assert bool(carried.usable(folder)) == used


def test_facts_are_those_of_the_installation(folder):
    facts = json.loads((folder / carried.FACTS).read_text())
    assert facts["machine"] == platform.machine() and facts["cuda"] == "13.0"
    assert (facts["tilelang"], facts["tvm_ffi"]) == tuple(importlib.metadata.version(name) for name in ("tilelang", "apache-tvm-ffi"))


def test_without_tilelang_nothing_is_used(folder, monkeypatch):
    def version(name):
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "version", version)
    assert carried.usable(folder) == {}


def test_every_source_counts(monkeypatch, tmp_path):
    """A kernel's file, its CUDA C++, what they share; nothing else in the folder."""
    for name, content in (("a.py", "1"), ("a.cuh", "2"), ("ws.py", "3"), ("facts.json", "4")):
        (tmp_path / name).write_text(content)
    monkeypatch.setattr(carried, "__file__", str(tmp_path / "carried.py"))
    before = carried.sources()
    (tmp_path / "facts.json").write_text("5")
    assert carried.sources() == before
    for name in ("a.py", "a.cuh", "ws.py"):
        content = (tmp_path / name).read_text()
        (tmp_path / name).write_text("5")
        assert carried.sources() != before
        (tmp_path / name).write_text(content)
    (tmp_path / "b.py").touch()
    assert carried.sources() != before


@pytest.mark.parametrize("damage", ["no facts", "cut", "no libraries", "other kind", "no version"])
def test_a_damaged_folder_is_a_warning(folder, damage):
    facts = folder / carried.FACTS
    if damage == "no facts":
        facts.unlink()
    elif damage == "cut":
        facts.write_text(facts.read_text()[:-20])
    elif damage == "other kind":
        facts.write_text("[1]")
    else:
        change(folder, **{"no libraries": {"libraries": 3}, "no version": {"cuda": "new"}}[damage])
    with pytest.warns(RuntimeWarning, match="does without kernels that it carries"):
        assert carried.usable(folder) == {}


@pytest.mark.parametrize("damage", ["cut", "empty", "changed", "gone"])
def test_a_damaged_library_is_a_warning(folder, loads, damage):
    path = folder / "b.so"
    content = path.read_bytes()
    if damage == "gone":
        path.unlink()
    else:
        path.write_bytes({"cut": content[:-1], "empty": b"", "changed": content[:-1] + b"x"}[damage])
    with pytest.warns(RuntimeWarning, match=r"does without kernels that it carries: .*b\.so cannot be used") as caught:
        assert carried.function("b", folder) is None
        assert carried.function("b", folder) is None
    assert len(caught) == 1 and loads == []
    assert carried.function("a", folder) == folder / "a.so", "the others are used"


def test_a_library_that_does_not_load_is_a_warning(folder):
    """Not a stand-in: what was packed are no libraries."""
    pytest.importorskip("tilelang")
    with pytest.warns(RuntimeWarning, match=r"a\.so cannot be used"):
        assert carried.function("a", folder) is None


def test_libraries_that_are_not_found_are_tilelangs_to_find(monkeypatch, tmp_path):
    """With an installation that has them elsewhere."""
    pytest.importorskip("tvm_ffi")
    (tmp_path / "tilelang").mkdir()
    (tmp_path / "tilelang" / "__init__.py").touch()
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setitem(sys.modules, "tilelang", None)  # so that what was there comes back
    del sys.modules["tilelang"]
    carried._load_runtime.cache_clear()
    carried._load_runtime()
    carried._load_runtime.cache_clear()
    assert sys.modules["tilelang"].__file__ == str(tmp_path / "tilelang" / "__init__.py")


def test_driver_version():
    version = carried.driver_version()
    assert version is None or 11000 <= version < 100000


def test_a_checkout_carries_none():
    assert not carried.FOLDER.exists() and carried.usable() == {} and carried.function("cp_plan") is None


def test_lock_is_not_in_the_way_of_what_loads_meanwhile(folder, monkeypatch):
    """A thread that loads one library may ask for another: a kernel's first call inside another's."""
    monkeypatch.setattr(carried, "load", lambda path: carried.function("b", folder) if path.stem == "a" else path)
    found = []
    thread = threading.Thread(target=lambda: found.append(carried.function("a", folder)), daemon=True)
    thread.start()
    thread.join(10)
    assert found == [folder / "b.so"]
