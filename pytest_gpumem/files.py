"""Atomic writes and bounded reads of files, and the file that pytest-benchmark writes of a run."""

from __future__ import annotations

import json
import os
import secrets
import stat
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pytest_gpumem.outcomes import FileError, UserError
from pytest_gpumem.revisions import DIRTY

if TYPE_CHECKING:
    from pytest_gpumem.records.schema import Document

LARGEST = 1 << 30  # bytes of the largest file that is read: results hold every sample


def write_whole(path: Path, text: str) -> None:
    """Write `text` to a temporary file beside `path`, then rename it: no reader sees half a file.

    The target of a link is replaced, a pipe or a device is written to.
    """
    if _is_special(path):
        path.write_bytes(text.encode())
        return
    path = path.resolve()
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(6)}.tmp")
    try:
        # Created with the permissions of the umask, as other files of a project are.
        with open(temporary, "xb") as file:
            file.write(text.encode())
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def append_whole(path: Path, text: str) -> None:
    """Append `text` in a single write, so that no other process writes into it."""
    with open(path, "ab", buffering=0) as file:
        file.write(text.encode())


def unwritable(path: Path) -> str | None:
    """Return why a file cannot be written, to check before long work, or None."""
    if _is_special(path):
        return None if os.access(path, os.W_OK) else "no permission to write to it"
    folder = path.resolve().parent
    if not folder.is_dir():
        return f"there is no folder {folder}"
    if path.is_dir():
        return "it is a folder"
    # A new file replaces the old file, so the permission of the folder decides.
    if os.access(folder, os.W_OK):
        return None
    return f"no permission to write in {folder}"


def _is_special(path: Path) -> bool:
    """True for a device or a pipe, which a rename would destroy."""
    return path.exists() and not path.is_file() and not path.is_dir()


def content(path: Path) -> bytes:
    """Return the bytes of a file. Raises `FileError`: it cannot be read, or is too large."""
    try:
        mode = path.stat().st_mode
        if stat.S_ISBLK(mode) or (stat.S_ISCHR(mode) and not path.samefile("/dev/stdin")):
            raise FileError("a device; accepted is a file")
        with path.open("rb") as file:
            text = file.read(LARGEST + 1)
    except OSError as error:
        raise FileError(error.strerror or str(error)) from None
    if len(text) > LARGEST:
        raise FileError(f"larger than {LARGEST >> 20} MiB")
    return text


def parsed(text: bytes) -> Any:
    """The JSON value of a file. Raises `FileError`: it is not JSON."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise FileError(f"not JSON: {str(error) or type(error).__name__}") from None


# The file of `--benchmark-json`


@dataclass(frozen=True)
class ResultFile:
    path: Path
    value: dict[str, Any]  # the JSON
    document: Document
    utc: str  # time of writing, ISO 8601
    revision: str | None  # revision of the measured code; None if unknown


def load_results(path: Path) -> ResultFile:
    """Return what a session wrote to the file of `--benchmark-json`. Raises `UserError`."""
    from pytest_gpumem.records.schema import document_from_json  # most sessions read no file

    try:
        value = parsed(content(path))
        if not isinstance(value, dict) or "gpumem" not in value:
            writes = "pytest --gpumem --benchmark-json=FILE writes them"
            raise FileError(f"holds no results of this plugin; {writes}")
        document = document_from_json(value["gpumem"], "$.gpumem")
    except FileError as error:
        raise UserError(f"{path}: {error}") from None
    utc = time_of(value.get("datetime"), path).isoformat(timespec="seconds")
    return ResultFile(path, value, document, utc, revision_of(value.get("commit_info")))


def revision_of(info: object) -> str | None:
    """Return the commit in pytest-benchmark's `commit_info`, or None if it is unknown."""
    if not isinstance(info, Mapping):
        return None
    commit = info.get("id")
    if not isinstance(commit, str) or commit in ("unversioned", "unknown", ""):
        return None
    return commit + DIRTY if info.get("dirty") else commit


def time_of(written: object, path: Path) -> datetime:
    """Return pytest-benchmark's `datetime`, or the time of the file's last change."""
    try:
        utc = datetime.fromisoformat(str(written).replace("Z", "+00:00"))
    except ValueError:
        return datetime.fromtimestamp(path.stat().st_mtime, timezone.utc)
    if utc.tzinfo is None:
        return utc.replace(tzinfo=timezone.utc)
    return utc
