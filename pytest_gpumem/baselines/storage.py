"""The place of saved runs: a folder, or a URL of fsspec with a copy of its files on this machine.

A run is one immutable file, `<folder or URL>/<GPU>/gpumem/<name>.json`. Nobody changes a file, and
its name is never used again, so writers need no lock, and a copy needs only the files that it
lacks. Readers always read a folder: of a URL, the copy. Credentials, endpoints, retries and
timeouts are those of fsspec's packages.
"""

from __future__ import annotations

import hashlib
import re
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from platformdirs import user_cache_path

from pytest_gpumem.baselines import saved
from pytest_gpumem.files import write_whole
from pytest_gpumem.options import masked, place
from pytest_gpumem.outcomes import UserError
from pytest_gpumem.result_files import FileError

SUBFOLDER = "gpumem"
"""Folder of the runs below the device's key, beside the files of pytest-benchmark."""
_URL = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*://")


class BaselineError(UserError):
    """A baseline that cannot be used; the message is a line with the file's name."""


class Storage:
    """Runs in a folder, which need not exist."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder  # has a folder for each kind of device

    def __str__(self) -> str:
        """For messages: without credentials."""
        return str(self.folder)

    def at(self, key: str) -> Path:
        """Return the folder of the files of a kind of device."""
        return self.folder / key / SUBFOLDER

    def shown(self, path: Path) -> str:
        """Return the name of a file of `at` for messages."""
        return f"{self}/{path.relative_to(self.folder).as_posix()}"

    def devices(self) -> list[str]:
        """Return the keys of the devices that have runs here.

        Raises `BaselineError`: the URL cannot be reached.
        """
        keys = set[str]()
        with suppress(OSError):
            for path in self.folder.glob(f"*/{SUBFOLDER}/*.json"):
                keys.add(path.parent.parent.name)
        return sorted(keys)

    def update(self, key: str) -> None:
        """Make `at(key)` hold all files of a kind of device.

        Raises `BaselineError`: the URL cannot be reached.
        """

    def unwritable(self, key: str) -> str | None:
        """Return why nothing can be stored here, to be checked before long work, or None."""
        folder = self.at(key)
        try:
            parent = folder.absolute()
            while not parent.exists():
                parent = parent.parent
            # A trial: permissions do not hold for root, nor on every file system.
            with tempfile.TemporaryFile(dir=parent):
                return None
        except OSError as error:
            return f"nothing can be stored in {folder}: {error.strerror or error}"

    def write(self, key: str, name: str, text: str) -> None:
        """Write a new file. Raises `BaselineError`: it could not be written."""
        folder = self.at(key)
        try:
            folder.mkdir(parents=True, exist_ok=True)
            write_whole(folder / name, text)
        except OSError as error:
            raise BaselineError(
                f"{folder}: cannot write the run: {error.strerror or error}"
            ) from None


class RemoteStorage(Storage):
    """Runs behind a URL. `folder` is the copy, in the user's cache folder."""

    def __init__(self, url: str) -> None:
        """`url`: as fsspec reads it; it may have credentials."""
        self.url = url.rstrip("/")
        # Without credentials: a gate knows the place by its results, which have none.
        name = hashlib.sha256(str(self).encode()).hexdigest()[:16]
        cache = user_cache_path("pytest-gpumem") / "baselines" / name
        self._unsent = Storage(cache / "unsent")  # runs that the URL did not take
        super().__init__(cache / "copy")

    def __str__(self) -> str:
        return masked(self.url)

    def devices(self) -> list[str]:
        with self._opened() as (files, root):
            paths = files.glob(f"{root}/*/{SUBFOLDER}")
            return sorted({path.split("/")[-2] for path in paths})

    def update(self, key: str) -> None:
        folder = self.at(key)
        with self._opened() as (files, root):
            names = _names(files, f"{root}/{key}/{SUBFOLDER}")
            folder.mkdir(parents=True, exist_ok=True)
            copied = {path.name for path in folder.glob("*.json")}
            for name in sorted(names - copied):
                text = files.cat_file(f"{root}/{key}/{SUBFOLDER}/{name}")
                try:
                    saved.read(text)
                except FileError as error:
                    raise OSError(f"{name}: {error}") from None
                write_whole(folder / name, text)
            for name in copied - names:
                (folder / name).unlink(missing_ok=True)

    def write(self, key: str, name: str, text: str) -> None:
        self._unsent.write(key, name, text)
        try:
            with self._opened() as (files, root):
                files.makedirs(f"{root}/{key}/{SUBFOLDER}", exist_ok=True)
                files.pipe_file(f"{root}/{key}/{SUBFOLDER}/{name}", text.encode())
        except BaselineError as error:
            raise BaselineError(
                f"{error}; it is kept on this machine: copy {self._unsent} into the store"
            ) from None
        with suppress(OSError):
            self.at(key).mkdir(parents=True, exist_ok=True)
            (self._unsent.at(key) / name).replace(self.at(key) / name)

    @contextmanager
    def _opened(self) -> Iterator[tuple[Any, str]]:
        """Yield the file system of fsspec and the root in it.

        Raises `BaselineError` for whatever a package behind fsspec raises inside.
        """
        try:
            import fsspec

            files, root = fsspec.core.url_to_fs(self.url)
            files.invalidate_cache()
            yield files, root.rstrip("/")
        except Exception as error:
            text = " ".join(str(error).split()).replace(self.url, str(self))
            if isinstance(error, ImportError):
                text += "; pip install 'pytest-gpumem[remote]' brings fsspec and s3fs"
            elif isinstance(error, PermissionError):
                text = f"permission denied ({text})"
            elif not text or not isinstance(error, (OSError, ValueError)):
                text = f"{type(error).__name__}: {text}"
            raise BaselineError(f"{self}: {text}") from None


def _names(files: Any, folder: str) -> set[str]:
    """Return the names of the runs in a folder of a file system of fsspec."""
    try:
        listed = files.ls(folder, detail=False)
    except FileNotFoundError as error:
        if error.__cause__ is not None:  # the answer of a store, such as a missing bucket
            raise
        return set()  # nothing was written yet
    names = {path.rstrip("/").rpartition("/")[2] for path in listed}
    return {name for name in names if name.endswith(".json")}


def storage(written: str, base: Path | None = None) -> Storage:
    """Return the place that an option names.

    `written`: a folder, which may begin with "~", or a URL.
    `base`: a relative folder is below it; None: the working directory.
    Raises `QuantityError`: it is no place.
    """
    text = place(written)
    if _URL.match(text) and not text.startswith("file://"):
        return RemoteStorage(text)
    return Storage((base or Path()) / Path(text.removeprefix("file://")).expanduser())
