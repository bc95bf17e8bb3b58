"""One result file as it is shown: the run, when it was taken, of which revision, and its sweeps."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from pytest_gpumem.records.l2_sweep import Sweep
from pytest_gpumem.records.result_file import FileError, content, document_in, parsed, revision_of, time_of
from pytest_gpumem.records.schema import Document, SchemaError
from pytest_gpumem.records.sweep_schema import KEY, sweeps_from_json


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
    try:
        value = parsed(content(path))
        document = document_in(value)
        sweeps = sweeps_from_json(value.get(KEY, []))
    except (FileError, SchemaError, RecursionError) as error:
        raise ResultsError(f"{path}: {' '.join(str(error).split())}") from None
    utc = time_of(value.get("datetime"), path).isoformat(timespec="seconds")
    return Results(document, utc, revision_of(value.get("commit_info")), sweeps)
