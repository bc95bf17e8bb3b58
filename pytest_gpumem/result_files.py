"""Read the file that pytest-benchmark writes of a run with this plugin."""

from __future__ import annotations

import json
import stat
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from pytest_gpumem.outcomes import UserError
from pytest_gpumem.records.schema import Document, FileError, document_from_json
from pytest_gpumem.revisions import DIRTY

LARGEST = 1 << 30  # bytes of the largest file that is read: results hold every sample


@dataclass(frozen=True)
class ResultFile:
    path: Path
    document: Document
    utc: str  # time of writing, ISO 8601
    revision: str | None  # revision of the measured code; None if unknown


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


def load_results(path: Path) -> ResultFile:
    """Return what a session wrote to the file of `--benchmark-json`. Raises `UserError`."""
    try:
        value = parsed(content(path))
        if not isinstance(value, Mapping) or "gpumem" not in value:
            writes = "pytest --gpumem --benchmark-json=FILE writes them"
            raise FileError(f"holds no results of this plugin; {writes}")
        document = document_from_json(value["gpumem"], "$.gpumem")
    except FileError as error:
        raise UserError(f"{path}: {error}") from None
    utc = time_of(value.get("datetime"), path).isoformat(timespec="seconds")
    return ResultFile(path, document, utc, revision_of(value.get("commit_info")))


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
