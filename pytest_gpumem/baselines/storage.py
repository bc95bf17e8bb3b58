"""The place of saved runs: a folder, or a store behind an fsspec URL with a copy on this machine.

A store of runs is immutable files, `<folder or URL>/<GPU>/gpumem/<name>.json`. Nobody changes one, and its name is never used again, so
writers need no lock, and a copy needs only the files that it lacks. Readers always read a folder: of a URL, the copy.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import select
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from platformdirs import user_cache_path

from pytest_gpumem.files import write_whole
from pytest_gpumem.options import masked, place
from pytest_gpumem.outcomes import UserError

SUBFOLDER = "gpumem"
"""Folder of the runs below the device's key, beside the files of pytest-benchmark."""
PATIENCE = 60.0  # seconds without any answer after which a store is given up
UNSENT = "unsent"  # folder beside the copies: runs that the store did not take
_URL = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*://")
_ROOT = Path(__file__).resolve().parents[2]
_PROGRAM = "import json, sys; sys.path[:] = json.loads(sys.argv[1]); from pytest_gpumem.baselines.transfer import main; main()"


class BaselineError(UserError):
    """A baseline that cannot be used; the message is one line with the file's name."""


class Storage:
    """Runs in a folder, which need not exist."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder  # holds a folder for each kind of device

    def __str__(self) -> str:
        """For messages: without credentials."""
        return str(self.folder)

    @property
    def location(self) -> str:
        """The place as `storage` takes it, with its credentials."""
        return str(self.folder)

    def at(self, key: str) -> Path:
        """Folder of the files of one kind of device."""
        return self.folder / key / SUBFOLDER

    def devices(self) -> list[str]:
        """Keys of the devices that have runs here. Raises `BaselineError`: the store cannot be reached."""
        try:
            return sorted(
                path.parent.name
                for path in self.folder.glob(f"*/{SUBFOLDER}")
                if any(path.glob("*.json"))
            )
        except OSError:
            return []

    def update(self, key: str) -> None:
        """Make `at(key)` hold all files of one kind of device.
        Raises `BaselineError`: the store cannot be reached; or the folder is a file.
        """
        if os.path.lexists(self.folder) and not self.folder.is_dir():
            raise BaselineError(
                f"{self.folder} is not a folder; a baseline is a folder with a folder for each GPU"
            )

    def shown(self, path: Path) -> str:
        """The name of a file of `at` for messages."""
        return str(path)

    def fetch_again(self, path: Path) -> bool:
        """Replace a file of `at` by the store's; False where the file itself is the store's.
        Raises `BaselineError`: the store cannot be reached, or lacks it.
        """
        return False

    def unwritable(self, key: str) -> str | None:
        """Why nothing can be stored here, to be checked before long work; None if something can."""
        folder = self.at(key)
        try:
            there = next(one for one in (folder, *folder.absolute().parents) if one.exists())
            # A trial: permissions do not hold for root, nor on every file system.
            with tempfile.TemporaryFile(dir=there):
                return None
        except OSError as error:
            return f"nothing can be stored in {folder}: {error.strerror or error}"

    def write(self, key: str, files: Mapping[str, str | bytes]) -> None:
        """Write files, by name. Raises `BaselineError`: not all of them could be written."""
        _written(self.at(key), files)


class RemoteStorage(Storage):
    """Runs behind a URL. `folder` is the copy, in the user's cache folder."""

    def __init__(self, url: str, *, offline: bool = False) -> None:
        """`url`: as fsspec reads it. `offline`: read the copy as it is: another process has brought it up to date."""
        self.url = url.rstrip("/")
        self.offline = offline
        # Without credentials: a gate knows the store by its results, which have none.
        self._own = (
            user_cache_path("pytest-gpumem")
            / "baselines"
            / hashlib.sha256(str(self).encode()).hexdigest()[:16]
        )
        self._devices: list[str] | None = None
        super().__init__(self._own / "copy")

    def __str__(self) -> str:
        return masked(self.url)

    @property
    def location(self) -> str:
        return self.url

    def devices(self) -> list[str]:
        if self.offline:
            return super().devices()
        if self._devices is None:
            self._devices = self._ask("devices", "*")
        return self._devices

    def update(self, key: str) -> None:
        if not self.offline:
            self._devices = self._ask("fetch", key, folder=str(self.at(key)))

    def shown(self, path: Path) -> str:
        return f"{self}/{path.relative_to(self.folder).as_posix()}"

    def fetch_again(self, path: Path) -> bool:
        if self.offline:
            raise BaselineError(
                f"{self.shown(path)}: this machine's copy does not fit the digest in its name: it was edited, or is damaged; a run that "
                "reaches the store replaces it"
            )
        path.unlink(missing_ok=True)
        self.update(path.parent.parent.name)
        return True

    def write(self, key: str, files: Mapping[str, str | bytes]) -> None:
        unsent = Storage(self._own / UNSENT)
        kept = _written(unsent.at(key), files)
        try:
            self._ask("send", key, files=[str(path) for path in kept])
        except BaselineError as error:
            raise BaselineError(
                f"{error}; it is kept on this machine: copy {unsent} into the store"
            ) from None
        with suppress(OSError):  # the store has them
            for path in kept:
                self.at(key).mkdir(parents=True, exist_ok=True)
                path.replace(self.at(key) / path.name)

    def _ask(self, do: str, key: str, **more: object) -> list[str]:
        """Have a process do one request of `transfer`.
        Raises `BaselineError`: it failed, or nothing was answered for `PATIENCE` seconds.
        """
        request = {"do": do, "url": self.url, "under": f"{key}/{SUBFOLDER}", **more}
        for line in _lines(request, str(self)):
            if "error" in line:
                raise BaselineError(f"{self}: {line['error'].replace(self.url, str(self))}")
            if "devices" in line:
                devices: list[str] = line["devices"]
                return devices
        raise AssertionError("the last line has devices or an error")


def storage(written: str, base: Path | None = None, *, offline: bool = False) -> Storage:
    """The place that an option names.
    `written`: a folder, which may begin with "~", or a URL.
    `base`: a relative folder is below it; None: the working directory.
    `offline`: as of `RemoteStorage`; a folder is always there.
    Raises `QuantityError`: it is no place.
    """
    text = place(written)
    if _URL.match(text) and not text.startswith("file://"):
        return RemoteStorage(text, offline=offline)
    return Storage((base or Path()) / Path(text.removeprefix("file://")).expanduser())


def _written(folder: Path, files: Mapping[str, str | bytes]) -> list[Path]:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for name, content in files.items():
            write_whole(folder / name, content)
    except OSError as error:
        raise BaselineError(f"{folder}: cannot write the run: {error.strerror or error}") from None
    return [folder / name for name in files]


def _lines(request: Mapping[str, object], url: str) -> Iterator[dict[str, Any]]:
    """The lines that a process of `transfer` answers, the last of which has the store's devices, or an error."""
    command = [sys.executable, "-c", _PROGRAM, json.dumps([str(_ROOT), *filter(None, sys.path)])]
    with tempfile.TemporaryFile() as errors:
        try:
            process = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors
            )
        except OSError as error:
            raise BaselineError(
                f"{url}: {sys.executable!r} cannot be started to reach it: {error.strerror}"
            ) from None
        try:
            assert process.stdin is not None
            assert process.stdout is not None
            with suppress(BrokenPipeError):
                process.stdin.write(json.dumps(request).encode())
                process.stdin.close()
            pending, until = b"", time.monotonic() + PATIENCE
            while True:
                if not select.select([process.stdout], [], [], max(0.0, until - time.monotonic()))[
                    0
                ]:
                    raise BaselineError(f"{url}: no answer for {PATIENCE:.0f} s")
                part = os.read(process.stdout.fileno(), 1 << 16)
                if not part:
                    break
                *lines, pending = (pending + part).split(b"\n")
                until = time.monotonic() + PATIENCE
                yield from map(json.loads, lines)
            process.wait()
            errors.seek(0)
            last = errors.read().decode(errors="replace").strip().splitlines() or ["no message"]
            yield {
                "error": f"the process that reaches it ended with {process.returncode}: {last[-1]}"
            }
        finally:
            process.kill()
            for pipe in (process.stdin, process.stdout):
                if pipe is not None:
                    with suppress(OSError):
                        pipe.close()
            process.wait()
