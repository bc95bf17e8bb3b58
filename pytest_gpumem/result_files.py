"""Read the file that pytest-benchmark writes of a run with this plugin. All commands refuse a bad file in the same words."""

from __future__ import annotations

import json
import stat
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from pytest_gpumem.outcomes import UserError
from pytest_gpumem.records.schema import Document, SchemaError, document_from_json
from pytest_gpumem.revisions import DIRTY

LARGEST = 1 << 30  # bytes of the largest file that is read: results hold every sample


class FileError(ValueError):
    """A file that cannot be read, or holds no results: one line, without the file's name."""


@dataclass(frozen=True)
class Results:
    """The content of one file."""

    path: Path
    document: Document
    utc: str  # time of writing, ISO 8601
    revision: str | None  # revision of the measured code; None if unknown


def content(path: Path, most: int = LARGEST) -> bytes:
    """The bytes of a file, `most` of them. Raises `FileError`: it cannot be read, or is too large."""
    try:
        mode = path.stat().st_mode
        if stat.S_ISBLK(mode) or (stat.S_ISCHR(mode) and not path.samefile("/dev/stdin")):
            raise FileError("a device; accepted is a file")
        with path.open("rb") as file:
            text = file.read(most + 1)
    except OSError as error:
        raise FileError(error.strerror or str(error)) from None
    if len(text) > most:
        raise FileError(f"larger than {most >> 20} MiB")
    return text


def parsed(text: bytes) -> Any:
    """The JSON value of a file. Raises `FileError`: it is not JSON."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise FileError(
            f"not JSON: {' '.join(str(error).split()) or type(error).__name__}"
        ) from None


def document_in(value: object) -> Document:
    """The run in the value of a file. Raises `FileError`: it holds none, or impossible values."""
    if not isinstance(value, Mapping) or "gpumem" not in value:
        raise FileError(
            "holds no results of this plugin; pytest --gpumem --benchmark-json=FILE writes them"
        )
    try:
        return document_from_json(value["gpumem"])
    except SchemaError as error:
        raise FileError(f"$.gpumem{' '.join(str(error).split()).removeprefix('$')}") from None
    except RecursionError:
        raise FileError("$.gpumem: nested too deeply") from None


def load(path: Path) -> Document | None:
    """The run in a file; None where the file is empty, as pytest-benchmark leaves it where nothing was measured.
    Raises `FileError`: the file cannot be read, or holds no run.
    """
    text = content(path)
    return document_in(parsed(text)) if text.strip() else None


def load_results(path: Path) -> Results:
    """Everything that a session with `--gpumem` wrote to the file of `--benchmark-json`.
    Raises `UserError`: the file cannot be read, is something else, or holds impossible values.
    """
    try:
        value = parsed(content(path))
        document = document_in(value)
    except FileError as error:
        raise UserError(f"{path}: {' '.join(str(error).split())}") from None
    utc = time_of(value.get("datetime"), path).isoformat(timespec="seconds")
    return Results(path, document, utc, revision_of(value.get("commit_info")))


def revision_of(info: object) -> str | None:
    """The commit in pytest-benchmark's `commit_info`, with "-dirty" for uncommitted changes; None if unknown."""
    commit = info.get("id") if isinstance(info, Mapping) else None
    if not isinstance(commit, str) or commit in ("unversioned", "unknown", ""):
        return None
    return commit + DIRTY if isinstance(info, Mapping) and info.get("dirty") else commit


def time_of(written: object, path: Path) -> datetime:
    """Time of writing: pytest-benchmark's `datetime`, or the file's last change where that is no time."""
    try:
        utc = datetime.fromisoformat(str(written).replace("Z", "+00:00"))
    except ValueError:
        return datetime.fromtimestamp(path.stat().st_mtime, timezone.utc)
    return utc if utc.tzinfo is not None else utc.replace(tzinfo=timezone.utc)
