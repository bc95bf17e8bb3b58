"""A saved run: the records of a file, and its JSON.

    {"schema": 4, "sha256": "...", "content": {
        "id", "utc", "device", "revision", "mode", "written_by", "rows"}}

The sha256 covers the content as JSON with sorted keys: a formatter does not change it, an edit
does. A field with its default is left out.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from datetime import date, datetime, timezone
from functools import cache
from importlib.metadata import version
from typing import Annotated, Any

import msgspec
from msgspec import Meta
from msgspec.structs import fields, replace

from pytest_gpumem.baselines.acceptances import Figure
from pytest_gpumem.limits import LIMITS
from pytest_gpumem.records import Record
from pytest_gpumem.records.device import DeviceFacts
from pytest_gpumem.records.footprint import Footprint
from pytest_gpumem.records.limits import Limits
from pytest_gpumem.records.measurement import Measurement
from pytest_gpumem.records.row import key_of
from pytest_gpumem.records.schema import FileError, check_schema, converted
from pytest_gpumem.result_files import parsed
from pytest_gpumem.units import QuantityError

LAYOUT = 4  # version of the layout
_REMEDY = "restore the file from a copy, or delete it"
_fields = cache(fields)


class SavedRow(Record, frozen=True):
    """A row of a run: its times, its memory, or both."""

    nodeid: str  # pytest's id of the test
    label: str = ""  # As `Row.label`
    measurement: Measurement | None = None  # Reduced: each placement has its median only
    footprint: Footprint | None = None  # As `Row.footprint`
    limits: Limits = Limits()  # Those of the row in this run
    accepted_time: str = ""  # `Acceptances.digest` of the accepted time; empty for nothing
    accepted_memory: str = ""  # The same of the accepted memory

    @property
    def key(self) -> str:
        """As `Row.key`."""
        return key_of(self.nodeid, self.label)

    def accepted(self, figure: Figure) -> str:
        return self.accepted_time if figure == "time" else self.accepted_memory

    def has(self, figure: Figure) -> bool:
        saved = self.measurement if figure == "time" else self.footprint
        return saved is not None


class SavedRun(Record, frozen=True, kw_only=True):
    """One file: a run."""

    id: str  # Unique: a copy of its file is not a second run
    utc: Annotated[datetime, Meta(tz=True)]  # When it was saved, in UTC
    device: DeviceFacts  # The device at that time, with its driver and CUDA versions
    revision: str | None = None
    """Revision of the measured code, with "-dirty" for uncommitted changes; None if unknown."""
    mode: str | None = None  # The session's mode, which a test may override; None if unknown
    written_by: str = ""  # The version of the plugin
    rows: tuple[SavedRow, ...] = ()

    @property
    def processes(self) -> int:
        numbers = [1]
        for row in self.rows:
            if row.measurement is not None:
                numbers.append(1 + len(row.measurement.further))
        return max(numbers)


class PastRow(SavedRow, frozen=True, kw_only=True):
    """A run of a row, with the file that holds it."""

    file: SavedRun


def times_of(runs: Iterable[PastRow]) -> list[tuple[date, Measurement]]:
    times = []
    for run in runs:
        if run.measurement is not None:
            times.append((run.file.utc.date(), run.measurement))
    return times


def memory_of(runs: Iterable[SavedRow]) -> list[Footprint]:
    return [run.footprint for run in runs if run.footprint is not None]


def reduced(measurement: Measurement) -> Measurement:
    """Return what a comparison needs: the median of each placement, and no notes."""
    placements = tuple((median,) for median in measurement.medians)
    return replace(measurement, placements=placements, sampler_reason="", notes=())


def file_text(run: SavedRun) -> str:
    """Return the text of a file, with a row a line for diffs."""
    run = replace(run, written_by=f"pytest-gpumem {version('pytest-gpumem')}")
    content = _plain(run)
    lines = []
    for name, value in content.items():
        text = json.dumps(value, allow_nan=False)
        if name == "rows":
            rows = [json.dumps(row, allow_nan=False) for row in value]
            text = "[\n" + ",\n".join(rows) + "\n]"
        lines.append(f'"{name}": {text}')
    head = f'"schema": {LAYOUT},\n"sha256": "{digest(content)}",\n"content"'
    return f"{{\n{head}: {{\n" + ",\n".join(lines) + "\n}\n}\n"


def digest(content: object) -> str:
    """Return the SHA-256 of JSON values; white space and the order of keys do not change it."""
    text = json.dumps(content, sort_keys=True, separators=(",", ":"), allow_nan=False)
    return hashlib.sha256(text.encode()).hexdigest()


def read(text: bytes) -> SavedRun:
    """Return the run of a `file_text`. Raises `FileError`: of another text, or a changed one."""
    try:
        file = parsed(text)
    except FileError as error:
        raise FileError(f"this baseline file is corrupt: {error}; {_REMEDY}") from None
    if isinstance(file, dict) and "schema" not in file:
        raise FileError("this is no baseline file of this plugin; remove it")
    check_schema(file, LAYOUT)
    content = file.get("content")
    if file.keys() != {"schema", "sha256", "content"} or not isinstance(content, dict):
        raise FileError("$: not the keys schema, sha256 and content")
    try:
        sha256 = digest(content)
    except (ValueError, RecursionError) as error:  # such as infinity
        raise FileError(f"$.content: {error}") from None
    if sha256 != file["sha256"]:
        why = "its content does not fit its sha256: it was edited by hand, or is damaged"
        raise FileError(f"{why}; {_REMEDY}")
    # The sha256 fits, so nobody edited the file. What cannot be read, another version wrote.
    try:
        return _checked(converted(content, SavedRun, "$.content"))
    except (FileError, RecursionError) as error:
        raise FileError(f"{error} (written by {content.get('written_by', 'unknown')})") from None


def _checked(run: SavedRun) -> SavedRun:
    """Check keys and limits, and return the run in UTC. Raises `FileError`."""
    try:
        run = replace(run, utc=run.utc.astimezone(timezone.utc))
    except OverflowError:
        raise FileError(f"$.content.utc: {run.utc} is too far from now") from None
    keys = set[str]()
    for index, row in enumerate(run.rows):
        path = f"$.content.rows[{index}]"
        if row.key in keys:
            raise FileError(f"holds {row.key} twice")
        keys.add(row.key)
        if row.measurement is not None and row.measurement.label != row.label:
            raise FileError(f"{path}.measurement.label: not that of the row, {row.label!r}")
        for name, limit in LIMITS.items():
            value = getattr(row.limits, name)
            try:
                if value is not None:
                    limit.parse(value)
            except QuantityError as error:
                raise FileError(f"{path}.limits.{name}: {error}") from None
    return run


def _plain(value: Any) -> Any:
    """Return JSON values, without the fields that have their default."""
    if isinstance(value, msgspec.Struct):
        plain = {}
        for field in _fields(type(value)):
            default = field.default
            if field.default_factory is not msgspec.NODEFAULT:
                default = field.default_factory()
            item = getattr(value, field.name)
            if item != default:
                plain[field.encode_name] = _plain(item)
        return plain
    if isinstance(value, (tuple, list)):
        return [_plain(item) for item in value]
    return msgspec.to_builtins(value)
