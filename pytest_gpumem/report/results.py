"""One result file as it is shown: the run, when it was taken, of which revision, and its sweeps."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from pytest_gpumem.records.l2_sweep import Sweep
from pytest_gpumem.records.schema import Document, SchemaError, document_from_json
from pytest_gpumem.records.sweep_schema import KEY, sweeps_from_json
from pytest_gpumem.revisions import DIRTY

LARGEST = 1 << 30
"""Bytes of a file from which on it is not read: results hold every sample."""


class ResultsError(Exception):
    """A file that cannot be shown; one line that names it."""


@dataclass(frozen=True)
class Results:
    """What one file holds."""

    document: Document
    utc: str
    """When it was written, ISO 8601."""
    revision: str | None
    """Of the code that was measured; None if unknown."""
    sweeps: tuple[tuple[str, Sweep], ...]


def load(path: Path) -> Results:
    """What `--benchmark-json` wrote in a session with `--gpumem`.

    Raises:
        ResultsError: the file cannot be read, is something else, or holds values that cannot be.
    """
    value = parsed(path, content(path))
    if not isinstance(value, dict) or not isinstance(value.get("gpumem"), dict):
        raise ResultsError(f"{path}: holds no results of this plugin; pytest --gpumem --benchmark-json FILE writes them")
    try:
        document = document_from_json(value["gpumem"])
        sweeps = sweeps_from_json(value.get(KEY, []))
    except (SchemaError, RecursionError) as error:
        raise ResultsError(f"{path}: {' '.join(str(error).split())}") from None
    return Results(document, _when(value, path), revision_of(value.get("commit_info")), sweeps)


def content(path: Path) -> bytes:
    """The bytes of a file.

    Raises:
        ResultsError: it cannot be read, or is too large.
    """
    try:
        with path.open("rb") as file:
            text = file.read(LARGEST + 1)
    except OSError as error:
        raise ResultsError(f"{path}: {error.strerror or error}") from None
    if len(text) > LARGEST:
        raise ResultsError(f"{path}: larger than {LARGEST >> 20} MiB")
    return text


def parsed(path: Path, text: bytes) -> Any:
    """The JSON value of a file. Raises `ResultsError` where it is none."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ResultsError(f"{path}: not JSON: {' '.join(str(error).split()) or type(error).__name__}") from None


def revision_of(info: object) -> str | None:
    """The commit that pytest-benchmark wrote, with "-dirty" for uncommitted changes; None where it knew none."""
    commit = info.get("id") if isinstance(info, Mapping) else None
    if not isinstance(commit, str) or commit in ("unversioned", "unknown", ""):
        return None
    return commit + DIRTY if isinstance(info, Mapping) and info.get("dirty") else commit


def time_of(written: object) -> datetime | None:
    """A time as pytest-benchmark writes it; None where it is none."""
    try:
        utc = datetime.fromisoformat(str(written).replace("Z", "+00:00"))
    except ValueError:
        return None
    return utc if utc.tzinfo is not None else utc.replace(tzinfo=timezone.utc)


def _when(value: Mapping[str, Any], path: Path) -> str:
    utc = time_of(value.get("datetime")) or datetime.fromtimestamp(path.stat().st_mtime, timezone.utc)
    return utc.isoformat(timespec="seconds")
