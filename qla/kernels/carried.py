"""Compiled kernels that a wheel carries: a folder beside this file with a library for each variant, called without TileLang's compiler.

A library is what TileLang's cache on disk holds of a kernel: machine code, and the host code that checks the arguments and launches it.
TVM FFI loads it; what it calls stands in two libraries of the TileLang installation, which are loaded without importing TileLang: its
import takes longer than everything else here together, and tracing a kernel, to know its place in TileLang's cache, as well.

Libraries are used by the versions of TileLang and TVM FFI that built them, with the same sources in this folder, on the same kind of CPU,
with a driver of at least the major version of CUDA's compiler. Whatever else is found is left alone, and kernels are compiled by TileLang
or come from its cache, as if nothing were carried. Python's and PyTorch's versions do not matter.
"""

import contextlib
import ctypes
import functools
import hashlib
import importlib.metadata
import importlib.util
import json
import platform
import sys
import threading
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).with_name("compiled")
FACTS = "facts.json"
VERSIONS = {"tilelang": "tilelang", "tvm_ffi": "apache-tvm-ffi"}  # facts, and the installed packages they are of
# What a library calls, in the order in which importing TileLang loads it; the first is seen by all that is loaded later.
RUNTIME = (("libtvm_runtime.so", ctypes.RTLD_GLOBAL), ("libtilelang.so", ctypes.RTLD_LOCAL))
_LOADING = threading.RLock()
_functions: dict[Path, Callable[..., None] | None] = {}


def pack(libraries: Mapping[str, Path], folder: Path, cuda: str) -> int:
    """Writes a folder that carries these libraries, by the names of their variants, and returns their number.

    cuda: version of CUDA's compiler that built them, such as "13.0". Raises ValueError if there are none.
    """
    if not libraries:
        raise ValueError("there are no kernels to carry")
    folder.mkdir(parents=True, exist_ok=True)
    for path in (*folder.glob("*.so"), folder / FACTS):
        path.unlink(missing_ok=True)
    contents = {name: libraries[name].read_bytes() for name in sorted(libraries)}
    for name, content in contents.items():
        (folder / f"{name}.so").write_bytes(content)
    hashes = {name: _hash(content) for name, content in contents.items()}
    (folder / FACTS).write_text(json.dumps({**_installed(), "cuda": cuda, "libraries": hashes}, indent=1))
    return len(libraries)


def _hash(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def _installed() -> dict[str, str]:
    """What a library must have been built with to be used here. Raises PackageNotFoundError without TileLang."""
    return {
        **{fact: importlib.metadata.version(package) for fact, package in VERSIONS.items()},
        "machine": platform.machine(),
        "sources": sources(),
    }


def sources() -> str:
    """Hash of all source files in this folder."""
    files = sorted(path for path in Path(__file__).parent.iterdir() if path.suffix in (".py", ".cuh"))
    return _hash(b"\0".join(part for path in files for part in (path.name.encode(), path.read_bytes())))


@functools.cache
def usable(folder: Path = FOLDER) -> Mapping[str, str]:
    """Hashes of the libraries that can be used here, by variant; none where none are carried or their facts do not fit.

    Read once a process. A folder that cannot be read is a RuntimeWarning.
    """
    if not folder.is_dir():
        return {}
    try:
        facts = json.loads((folder / FACTS).read_text())
        libraries, cuda = {str(name): str(digest) for name, digest in facts["libraries"].items()}, int(facts["cuda"].split(".")[0])
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        _warn(folder / FACTS, error)
        return {}
    try:
        fits = {name: facts.get(name) for name in _installed()} == _installed()
    except importlib.metadata.PackageNotFoundError:
        return {}
    driver = driver_version()
    return libraries if fits and (driver is None or cuda <= driver // 1000) else {}


def function(name: str, folder: Path = FOLDER) -> Callable[..., None] | None:
    """The compiled function of a variant, loaded once a process, by one thread; None if it is not carried for this installation.

    A library that is damaged, or cannot be loaded, is a RuntimeWarning.
    """
    digest = usable(folder).get(name)
    if digest is None:
        return None
    path = folder / f"{name}.so"
    with _LOADING:
        if path not in _functions:
            _functions[path] = _checked_and_loaded(path, digest)
        return _functions[path]


def _checked_and_loaded(path: Path, digest: str) -> Callable[..., None] | None:
    try:
        if _hash(path.read_bytes()) != digest:
            raise ValueError("it is not the library that was packed")
        return load(path)
    except Exception as error:  # of TVM FFI's any kind may come
        _warn(path, error)
        return None


def load(path: Path) -> Callable[..., None]:
    """The function in a kernel's library. Raises what TVM FFI and the loader of libraries raise."""
    _load_runtime()
    import tvm_ffi

    found: Callable[..., None] = tvm_ffi.load_module(path)["main"]
    return found


@functools.cache
def _load_runtime() -> None:
    """What libraries of kernels call: the two libraries of TileLang's installation, or, if they cannot be loaded alone, TileLang."""
    import tvm_ffi  # noqa: F401  # its own library comes first

    if "tilelang" in sys.modules:
        return
    spec = importlib.util.find_spec("tilelang")
    if spec is None or spec.origin is None:
        raise RuntimeError("tilelang is not installed")
    try:
        for name, mode in RUNTIME:
            ctypes.CDLL(str(Path(spec.origin).parent / "lib" / name), mode)
    except OSError:
        import tilelang  # noqa: F401


def _warn(path: Path, error: Any) -> None:
    warnings.warn(f"qla does without kernels that it carries: {path} cannot be used: {error!r}", RuntimeWarning, stacklevel=3)


def driver_version() -> int | None:
    """CUDA version that the GPU's driver supports, 13020 for 13.2; None without a driver. Makes no context."""
    with contextlib.suppress(OSError, AttributeError):
        version = ctypes.c_int()
        if ctypes.CDLL("libcuda.so.1").cuDriverGetVersion(ctypes.byref(version)) == 0:
            return version.value
    return None
