"""Machine code of kernels, on disk too: each is compiled once, and later processes need no compiler.

CuPy keeps machine code as well, but asks the compiler for its version first: to load NVRTC and to compile an empty program takes longer
than everything else that this package does before a first launch.
"""

from __future__ import annotations

import hashlib
import os
import re
import sys
from contextlib import suppress
from pathlib import Path

import msgspec
from platformdirs import user_cache_path

from pytest_gpumem.devices.cuda.nvrtc import architecture_of, compiled
from pytest_gpumem.files import write_whole
from pytest_gpumem.kernels.sources import COMPILE_OPTIONS

OPTIONS = (
    *COMPILE_OPTIONS,
    "-ftz=true",
)  # as CuPy compiles a user's kernels: denormal numbers are flushed to zero

_FORMAT = 2
_WHERE = ("CUDA_PATH", "CUDA_HOME", "CONDA_PREFIX", "LD_LIBRARY_PATH")
"""Variables that decide, beside the Python environment, which NVRTC is found."""
_NVRTC = re.compile(r"/.*/libnvrtc\.so[.0-9]*$", re.MULTILINE)


class Library(msgspec.Struct, frozen=True, array_like=True):
    """A library's file, as it was when it compiled."""

    path: str
    nbytes: int
    modified: int  # nanoseconds

    @classmethod
    def of(cls, path: str) -> Library:
        """Raises `OSError` if there is none."""
        found = os.stat(path)
        return cls(path, found.st_size, found.st_mtime_ns)


class CachedCode(msgspec.Struct, frozen=True, array_like=True):
    """A kernel's machine code."""

    code: bytes
    symbol: str  # name of the kernel in `code`


class _CacheFile(msgspec.Struct, frozen=True, array_like=True):
    """A file of the cache."""

    code: CachedCode
    compiler: Library
    digest: bytes  # of both: a damaged file is compiled again


class CodeCache:
    """The machine code of one user's kernels for one kind of GPU.
    `capability`: compute capability of the GPU.
    `folder`: default: the user's cache folder for this package.
    """

    def __init__(self, capability: tuple[int, int], folder: Path | None = None) -> None:
        self._capability = capability
        self._folder = folder or user_cache_path("pytest-gpumem") / "kernels"
        self._got: dict[tuple[str, str], CachedCode] = {}

    def get(self, source: str, entry: str, *, fresh: bool = False) -> CachedCode:
        """The machine code of a kernel: from this process, else from the folder, else compiled and kept in both.

        Where the folder cannot be read or written, or the compiler's file is unknown, each process compiles it.
        `source`, `entry`: what is compiled.
        `fresh`: compile it again, because the cached code cannot be loaded.
        Raises `CompilerMissing` or `DoesNotCompile`, with the compiler's first error.
        """
        found = None if fresh else self._got.get((source, entry))
        if found is None:
            found = self._got[source, entry] = self._read_or_compiled(source, entry, fresh=fresh)
        return found

    def _read_or_compiled(self, source: str, entry: str, *, fresh: bool) -> CachedCode:
        where = [os.environ.get(name, "") for name in _WHERE]
        parts = [str(_FORMAT), str(self._capability), sys.prefix, *where, *OPTIONS, entry, source]
        path = self._folder / f"{hashlib.sha256(chr(0).join(parts).encode()).hexdigest()}.cubin"
        if not fresh and (kept := _read(path)) is not None:
            return kept
        made = compiled(
            source, entry, architecture_of(self._capability), entries=(entry,), options=OPTIONS
        )
        code = CachedCode(made.cubin or made.ptx.encode(), made.symbols[entry])
        # Without a home folder its path is relative: nothing is written into the working directory.
        if path.is_absolute() and (compiler := loaded_nvrtc()) is not None:
            with suppress(OSError):
                path.parent.mkdir(parents=True, exist_ok=True)
                write_whole(
                    path,
                    msgspec.msgpack.encode(_CacheFile(code, compiler, _digest(code, compiler))),
                )
        return code


def _read(path: Path) -> CachedCode | None:
    """The entry of a file, if it is whole and its compiler is still the same."""
    try:
        entry = msgspec.msgpack.decode(path.read_bytes(), type=_CacheFile)
        valid = (
            entry.digest == _digest(entry.code, entry.compiler)
            and Library.of(entry.compiler.path) == entry.compiler
        )
    except (OSError, ValueError):  # of msgspec's errors too
        return None
    return entry.code if valid else None


def _digest(code: CachedCode, compiler: Library) -> bytes:
    return hashlib.sha256(msgspec.msgpack.encode((code, compiler))).digest()


def loaded_nvrtc(maps: Path = Path("/proc/self/maps")) -> Library | None:
    """The file of the NVRTC that this process has loaded; None if there are several, or if the system does not list them."""
    try:
        paths = set(_NVRTC.findall(maps.read_text(errors="replace")))
        return Library.of(paths.pop()) if len(paths) == 1 else None
    except OSError:
        return None
