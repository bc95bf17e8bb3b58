"""Machine code on disk: compiled once, and again where anything differs or is damaged."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from pytest_gpumem.devices.cuda import code_cache, nvrtc
from pytest_gpumem.devices.cuda.code_cache import CachedCode, CodeCache, Library, loaded_nvrtc
from pytest_gpumem.devices.cuda.nvrtc import Compilation

CODE = CachedCode(b"\x7fELF", "_Z5triad")


@pytest.fixture
def compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The file of the compiler that is loaded."""
    file = tmp_path / "libnvrtc.so.13"
    file.write_text("a compiler")
    monkeypatch.setattr(code_cache, "loaded_nvrtc", lambda: Library.of(str(file)))
    return file


class Counted:
    """Gets kernels from the cache in a folder, and counts how many were compiled."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.folder = folder
        self.compiled = 0
        monkeypatch.setattr(code_cache, "compiled", self._compile)
        monkeypatch.setattr(code_cache, "architecture_of", lambda capability: "sm_90")

    def __call__(
        self,
        source: str = "s",
        entry: str = "e",
        capability: tuple[int, int] = (9, 0),
        *,
        fresh: bool = False,
    ) -> int:
        """The number that this one call compiled. Each is by a cache of its own, as in another process."""
        before, cache = self.compiled, CodeCache(capability, self.folder)
        assert cache.get(source, entry, fresh=fresh) == CODE
        compiled = self.compiled - before
        assert cache.get(source, entry) == CODE
        assert self.compiled - before == compiled  # this process has it now
        return compiled

    def _compile(
        self, source: str, name: str, architecture: str, *, entries: tuple[str, ...], options: Any
    ) -> Compilation:
        self.compiled += 1
        return Compilation(CODE.code, "", dict.fromkeys(entries, CODE.symbol))


@pytest.fixture
def counted(tmp_path: Path, compiler: Path, monkeypatch: pytest.MonkeyPatch) -> Counted:
    return Counted(tmp_path / "kept" / "kernels", monkeypatch)


def test_a_kernel_is_compiled_once(counted: Counted) -> None:
    assert [counted() for _ in range(3)] == [1, 0, 0]
    assert [counted("other"), counted("s", "other"), counted("s", "e", (10, 0))] == [1, 1, 1]
    assert counted() == 0


def test_code_that_cannot_be_loaded_is_compiled_again(counted: Counted) -> None:
    assert [counted(), counted(fresh=True), counted()] == [1, 1, 0]


@pytest.mark.parametrize(
    "damage",
    [
        lambda data: b"",
        lambda data: data[:-9],
        lambda data: data.replace(b"ELF", b"ELE"),
        lambda data: b"\xc1" + data,
    ],
)
def test_a_damaged_file_is_compiled_again(
    counted: Counted, damage: Callable[[bytes], bytes]
) -> None:
    counted()
    (file,) = counted.folder.iterdir()
    file.write_bytes(damage(file.read_bytes()))
    assert [counted(), counted()] == [1, 0]


def test_another_compiler_compiles_again(counted: Counted, compiler: Path) -> None:
    counted()
    compiler.write_text("a newer compiler")
    assert [counted(), counted()] == [1, 0]
    compiler.unlink()
    with pytest.raises(FileNotFoundError):  # the stand-in for the loaded library has no file
        counted()


def test_another_environment_has_entries_of_its_own(
    counted: Counted, monkeypatch: pytest.MonkeyPatch
) -> None:
    counted()
    monkeypatch.setenv("CUDA_PATH", "/elsewhere")
    assert counted() == 1


def test_without_a_folder_it_is_compiled_each_time(
    tmp_path: Path, compiler: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("no folder")
    assert [Counted(tmp_path / "file", monkeypatch)() for _ in range(2)] == [1, 1]
    monkeypatch.chdir(tmp_path)
    assert [Counted(Path("~"), monkeypatch)() for _ in range(2)] == [1, 1]
    assert not (tmp_path / "~").exists()


def test_the_loaded_compiler_is_found_by_its_file(tmp_path: Path) -> None:
    library, builtins, maps = (
        tmp_path / "libnvrtc.so.13",
        tmp_path / "libnvrtc-builtins.so.13.0",
        tmp_path / "maps",
    )
    library.write_text("a compiler")
    line = "7f00-7f01 r-xp 00000000 00:2a 12 "
    maps.write_text(
        f"{line}{library}\n{line}{library}\n{line}{builtins}\n7f02-7f03 rw-p 0 00:00 0\n"
    )
    found = loaded_nvrtc(maps)
    assert found == Library.of(str(library))
    maps.write_text(f"{line}{library}\n{line}/elsewhere/libnvrtc.so.12\n")
    assert loaded_nvrtc(maps) is None
    assert loaded_nvrtc(tmp_path / "missing") is None


@pytest.mark.parametrize(
    ("capability", "architecture"), [((9, 0), "sm_90"), ((10, 3), "compute_90"), ((7, 0), None)]
)
def test_what_is_compiled_for_a_gpu(
    monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int], architecture: str | None
) -> None:
    """One that is newer than the compiler gets code that the driver translates; one that is too old is refused with the remedy."""
    monkeypatch.setattr(
        nvrtc, "_loaded", lambda: SimpleNamespace(nvrtcGetSupportedArchs=lambda: (0, [75, 80, 90]))
    )
    if architecture is not None:
        assert nvrtc.architecture_of(capability) == architecture
        return
    with pytest.raises(
        nvrtc.CompilerMissing,
        match=r"for compute capability 7\.5 and newer, this GPU has 7\.0: .*cuda12",
    ):
        nvrtc.architecture_of(capability)
