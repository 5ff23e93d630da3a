"""Built kernels that a wheel carries: an archive beside this file, whose entries are copied into TileLang's cache on disk.

An entry is a folder as TileLang's cache holds it, at its path below TILELANG_CACHE_DIR: the library with the machine code, its parameters,
both sources, and sizes and hashes of these, which TileLang checks. TileLang finds it by a hash of the traced kernel, its own version, the
target and the kind of CPU: not of paths, Python, torch, or CUDA's compiler, which a machine that finds the entry need not have. What was
built from other kernel sources is therefore never found, and what is not found is compiled as if nothing were carried.
"""

import contextlib
import ctypes
import functools
import io
import json
import lzma
import os
import platform
import tarfile
import tempfile
import warnings
from collections.abc import Iterable
from pathlib import Path, PurePosixPath

ARCHIVE = Path(__file__).with_name("compiled.tar.xz")
FACTS = "facts.json"
ENTRY_MARK = "manifest.json"  # what TileLang writes into a finished entry


def pack(cache_dir: Path, archive: Path, tilelang: str, cuda: str) -> int:
    """Writes an archive of all entries in a cache of TileLang's, and returns their number. Raises ValueError if there is none.

    tilelang: version that built them; cuda: version of CUDA's compiler, such as "13.0".
    """
    entries = sorted(path.parent.relative_to(cache_dir).as_posix() for path in cache_dir.rglob(ENTRY_MARK))
    if not entries:
        raise ValueError(f"{cache_dir} holds no kernels of TileLang's")
    facts = {"tilelang": tilelang, "machine": platform.machine(), "cuda": cuda, "entries": entries}
    # Variants look alike: compressed as one, they take a fraction of what they would one by one.
    with tarfile.open(archive, "w:xz", preset=9) as tar:
        _add(tar, FACTS, json.dumps(facts).encode())
        for entry in entries:
            for path in sorted((cache_dir / entry).iterdir()):
                _add(tar, f"{entry}/{path.name}", path.read_bytes())
    return len(entries)


def _add(tar: tarfile.TarFile, name: str, content: bytes) -> None:
    member = tarfile.TarInfo(name)
    member.size = len(content)
    tar.addfile(member, io.BytesIO(content))


@functools.cache
def seed(cache_dir: Path, tilelang: str, archive: Path = ARCHIVE) -> int:
    """Copies the archive's entries that the cache lacks into it, once a process, and returns their number; 0 without an archive.

    Entries appear whole, by a rename, so any number of processes may do this at once. What another version of TileLang built, or for
    another kind of CPU, or CUDA's compiler of a later major version than the driver's, is left alone. A cache that cannot be written is a
    RuntimeWarning: then the kernels are compiled.

    cache_dir: TILELANG_CACHE_DIR; tilelang: version that runs.
    """
    if not archive.is_file():
        return 0
    try:
        with tarfile.open(archive, "r:xz") as tar:
            first = tar.next()
            content = None if first is None else tar.extractfile(first)
            facts = json.loads(b"" if content is None else content.read())
            driver = driver_version()
            if (facts["tilelang"], facts["machine"]) != (tilelang, platform.machine()):
                return 0
            if driver is not None and int(facts["cuda"].split(".")[0]) > driver // 1000:
                return 0
            return _copy(tar, {entry for entry in facts["entries"] if not (cache_dir / entry).exists()}, cache_dir)
    except (OSError, EOFError, ValueError, KeyError, tarfile.TarError, lzma.LZMAError) as error:
        warnings.warn(
            f"qla compiles its kernels: those it carries could not be copied to {cache_dir}: {error!r}", RuntimeWarning, stacklevel=2
        )
        return 0


def _copy(tar: tarfile.TarFile, entries: Iterable[str], cache_dir: Path) -> int:
    missing = set(entries)
    if not missing:
        return 0
    # Beside TileLang's own unfinished entries, where it clears what a killed process has left for an hour.
    staging = cache_dir / PurePosixPath(min(missing)).parent.parent / ".staging"
    staging.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="qla_", dir=staging) as scratch:
        for member in tar:
            name = PurePosixPath(member.name)
            content = tar.extractfile(member)
            if str(name.parent) in missing and content is not None:
                path = Path(scratch, name)
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_bytes(content.read())
        for entry in missing:
            (cache_dir / entry).parent.mkdir(parents=True, exist_ok=True)
            try:
                os.rename(Path(scratch, entry), cache_dir / entry)
            except OSError:
                # Another process was first.
                if not (cache_dir / entry).is_dir():
                    raise
    return len(missing)


def driver_version() -> int | None:
    """CUDA version that the GPU's driver supports, 13020 for 13.2; None without a driver. Makes no context."""
    with contextlib.suppress(OSError, AttributeError):
        version = ctypes.c_int()
        if ctypes.CDLL("libcuda.so.1").cuDriverGetVersion(ctypes.byref(version)) == 0:
            return version.value
    return None
