"""The side of a remote baseline that talks to it, through fsspec. `storage` runs it in a process of its own.

So a store that never answers can be given up, and the process of the tests has none of the library's threads. Credentials, endpoints and
retries are those of the library: https://filesystem-spec.readthedocs.io/en/latest/api.html#other-known-implementations
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import suppress
from itertools import count
from pathlib import Path
from typing import Any

from pytest_gpumem.files import write_whole

AT_ONCE = 8  # files that are read or written at the same time
TRIES = 3  # how often a file is read whose answer is cut short; the library repeats what fails in other ways
SUFFIX = ".json"
_WHOLE_PUTS = frozenset(
    ("s3", "s3a", "gs", "gcs", "abfs", "abfss", "az", "adl", "oss", "oci", "memory")
)
"""Protocols whose stores show a new file only once it is whole."""


class Remote:
    """The files behind a URL: `<url>/<GPU>/gpumem/<name>.json`."""

    def __init__(self, url: str) -> None:
        """Raises `ImportError`: fsspec, or its package for this protocol, is not installed. Raises `ValueError`: an unknown protocol."""
        import fsspec

        self._fs, root = fsspec.core.url_to_fs(url)
        self._root = root.rstrip("/")
        protocol = self._fs.protocol
        self._whole_puts = not _WHOLE_PUTS.isdisjoint(
            (protocol,) if isinstance(protocol, str) else protocol
        )

    def folders(self, under: str = "") -> list[str]:
        """Names of the folders below a folder."""
        return sorted(_last(one["name"]) for one in self._list(under) if one["type"] == "directory")

    def devices(self, subfolder: str) -> list[str]:
        """Names of the folders that have a subfolder of this name."""
        found = self.folders()
        with ThreadPoolExecutor(AT_ONCE) as pool:
            return [
                name
                for name, below in zip(found, pool.map(self.folders, found), strict=True)
                if subfolder in below
            ]

    def sizes(self, under: str) -> dict[str, int | None]:
        """Bytes of each JSON file of a folder, by name; None where the store does not tell, as a web server."""
        found = {
            _last(one["name"]): one["size"] for one in self._list(under) if one["type"] == "file"
        }
        return {
            name: size
            for name, size in found.items()
            if name.endswith(SUFFIX) and not name.startswith(".")
        }

    def read(self, under: str, name: str, size: int | None) -> bytes:
        """The bytes of a file. Raises `OSError`: it is shorter than `size`, if that is known, each time."""
        for _ in range(TRIES):
            data: bytes = self._fs.cat_file(self._path(under, name))
            if size in (None, len(data)):
                return data
        raise OSError(f"{name}: the answer ends after {len(data)} of {size} bytes")

    def write(self, under: str, name: str, data: bytes) -> None:
        """Write a file, which is visible once it is whole."""
        path = self._path(under, name)
        if self._whole_puts:
            self._fs.pipe_file(path, data)
            return
        temporary = self._path(under, f".{name}.{os.urandom(6).hex()}.tmp")
        self._fs.makedirs(self._path(under), exist_ok=True)
        try:
            self._fs.pipe_file(temporary, data)
            self._fs.mv(temporary, path)
        except BaseException:
            with suppress(OSError):
                self._fs.rm_file(temporary)
            raise

    def _path(self, *parts: str) -> str:
        return "/".join((self._root, *filter(None, parts)))

    def _list(self, under: str) -> list[dict[str, Any]]:
        self._fs.invalidate_cache()
        try:
            found: list[dict[str, Any]] = self._fs.ls(self._path(under), detail=True)
        except FileNotFoundError as error:
            if (
                error.__cause__ is not None
            ):  # the store's own answer, such as that there is no such bucket
                raise
            return []  # nothing was written yet
        return found


def _last(path: str) -> str:
    return path.rstrip("/").rpartition("/")[2]


def fetch(
    url: str, under: str, folder: Path, step: Callable[[], object] = lambda: None
) -> list[str]:
    """Make a local folder hold the same files as a folder of a store. Files never change, so only new ones are read.
    `under`: folder of the store.
    `step`: is called after each file.
    Returns the devices of the store.
    """
    remote = Remote(url)
    devices, sizes = remote.devices(_last(under)), remote.sizes(under)
    step()
    folder.mkdir(parents=True, exist_ok=True)
    here = {path.name for path in folder.iterdir() if path.suffix == SUFFIX}

    def one(name: str) -> None:
        with suppress(FileNotFoundError):  # removed since it was listed
            write_whole(folder / name, remote.read(under, name, sizes[name]))

    _each(one, sorted(sizes.keys() - here), step)
    for name in here - sizes.keys():
        (folder / name).unlink(missing_ok=True)
    return devices


def _each(work: Callable[[str], None], names: Iterable[str], step: Callable[[], object]) -> None:
    with ThreadPoolExecutor(AT_ONCE) as pool:
        for future in as_completed([pool.submit(work, name) for name in names]):
            future.result()
            step()


def explain(error: BaseException) -> str:
    """An error of fsspec as one line."""
    text = " ".join(str(error).split())
    if isinstance(error, ImportError):
        return f"{text or 'a package is missing'}; pip install 'pytest-gpumem[remote]' brings fsspec and s3fs"
    if isinstance(error, PermissionError):
        return f"permission denied ({text})" if text else "permission denied"
    return (
        text
        if isinstance(error, (OSError, ValueError)) and text
        else ": ".join(filter(None, (type(error).__name__, text)))
    )


def answer(request: Mapping[str, Any], tell: Callable[[object], object]) -> None:
    """Do one request of `storage`; tells a number after each step, and at last the result or the error."""
    steps = count(1)
    url, under, do = request["url"], request["under"], request["do"]

    def step() -> None:
        tell({"step": next(steps)})

    devices: list[str] | None = None
    try:
        if do == "fetch":
            devices = fetch(url, under, Path(request["folder"]), step)
        elif do == "send":
            store, files = Remote(url), {Path(file).name: Path(file) for file in request["files"]}
            _each(lambda name: store.write(under, name, files[name].read_bytes()), files, step)
        else:
            devices = Remote(url).devices(_last(under))
    except Exception as error:  # of any library behind fsspec
        tell({"error": explain(error)})
    else:
        tell({"devices": devices})


def main() -> None:
    """Answer the request on the standard input, in lines of JSON."""
    with os.fdopen(os.dup(1), "w", encoding="utf-8") as out:
        os.dup2(2, 1)  # a library may print

        def tell(value: object) -> None:
            out.write(json.dumps(value) + "\n")
            out.flush()

        answer(json.load(sys.stdin), tell)
    os._exit(0)  # threads of the library may wait
