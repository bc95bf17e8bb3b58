"""The JSON of a saved run.

    {"schema": 4, "sha256": "...", "content": {
        "id", "utc", "device", "revision", "mode", "written_by", "rows"}}

`history.SavedRun` has the fields of the content. A row has its measurement with the median of each
placement instead of its samples, its memory, its limits, and the digests of what was accepted of
it. The sha256 covers the content as JSON with sorted keys: it survives a formatter, shows an edit,
and does not protect against fraud. A field with a default may be missing, so that later versions
can add fields.
"""

from __future__ import annotations

import hashlib
import json
from datetime import datetime, timezone
from enum import Enum
from functools import cache
from importlib.metadata import version
from typing import Any, Literal

import msgspec
from msgspec import structs
from msgspec.structs import replace

from pytest_gpumem.baselines.history import SavedProcess, SavedRow, SavedRun
from pytest_gpumem.limits import LIMITS
from pytest_gpumem.records.footprint import Footprint
from pytest_gpumem.records.measurement import Measurement, Provenance
from pytest_gpumem.records.schema import SchemaError, from_plain, other_schema
from pytest_gpumem.result_files import FileError, parsed
from pytest_gpumem.units import QuantityError

LAYOUT = 4  # version of the layout
LARGEST = 64 * 2**20
"""Bytes of the largest file that is read; a file of 300 rows has a third of a megabyte."""
_REMEDY = "restore the file from a copy, or delete it"
_LFS = b"version https://git-lfs"


class _File(msgspec.Struct, frozen=True):
    schema: Literal[4]
    content: SavedRun


def unfit(measurement: Measurement) -> str | None:
    """Return why nothing can be compared with a measurement; None if something can."""
    if measurement.profiled:
        return "it was measured under a profiler"
    reasons = set[str]()
    for conditions in measurement.conditions:
        reasons.update(conditions.throttle_reasons or ())
    if reasons:
        return f"it was measured under throttling ({', '.join(sorted(reasons))})"
    return None


def reduced_footprint(footprint: Footprint) -> Footprint:
    """Return the part of a footprint that a comparison needs: without remarks."""
    return replace(footprint, notes=())


def reduced(measurement: Measurement, process: SavedProcess) -> Measurement:
    """Return the part of a measurement that a comparison needs.

    It has the median of each placement instead of its samples, and no notes. Where it lacks its
    time and card, it gets those of its process.
    """
    provenance = measurement.provenance or Provenance(
        process.utc.isoformat(timespec="seconds"), process.device.uuid
    )
    placements = tuple((median,) for median in measurement.medians)
    return replace(
        measurement, placements=placements, sampler_reason="", notes=(), provenance=provenance
    )


def written(run: SavedRun) -> str:
    """Return the text of a file, with one row a line for diffs."""
    run = replace(run, written_by=f"pytest-gpumem {version('pytest-gpumem')}")
    values = _value(run)
    lines = []
    for name, value in values.items():
        lines.append(f"{json.dumps(name)}: {_lines(value)}")
    head = f'"schema": {LAYOUT},\n"sha256": "{digest(values)}"'
    return f"{{\n{head},\n" + '"content": {\n' + ",\n".join(lines) + "\n}\n}\n"


def digest(content: object) -> str:
    """Return the SHA-256 of JSON values; white space and the order of keys do not change it."""
    text = json.dumps(content, sort_keys=True, separators=(",", ":"), allow_nan=False)
    return hashlib.sha256(text.encode()).hexdigest()


def read(text: bytes) -> SavedRun:
    """Read what `written` wrote.

    Raises `FileError`: not JSON, another version, a wrong digest, impossible values, or a row that
    may not be in a baseline.
    """
    if text.startswith(_LFS):
        raise FileError("a pointer of Git LFS instead of the file; `git lfs pull` fetches it")
    try:
        value = parsed(text)
    except FileError as error:
        raise FileError(f"this baseline file is corrupt: {error}; {_REMEDY}") from None
    if not isinstance(value, dict):
        raise FileError("$: not a JSON object")
    if value.get("schema") != LAYOUT:
        raise FileError(other_schema(value.get("schema"), LAYOUT))
    content = value.get("content")
    if value.keys() != {"schema", "sha256", "content"} or not isinstance(content, dict):
        raise FileError("$: not the keys schema, sha256 and content")
    try:
        fits = digest(content) == value["sha256"]
    except ValueError:
        raise FileError("$.content: a number in it is not finite") from None
    except RecursionError:
        raise FileError("$.content: nested too deeply") from None
    if not fits:
        raise FileError(
            "its content does not fit its sha256: it was edited by hand, or is damaged; " + _REMEDY
        )
    # The text is as it was written: what does not fit now comes from another version.
    try:
        return checked(from_plain(content, SavedRun, "$.content"))
    except (SchemaError, RecursionError) as error:
        by = content.get("written_by")
        raise FileError(
            f"{error} (written by {by if isinstance(by, str) else 'unknown'})"
        ) from None


def read_unchanged(text: bytes) -> SavedRun:
    """Read what `written` wrote and nobody changed, in a thirtieth of the time of `read`.

    Raises `FileError`: as `read`.
    """
    try:
        return checked(msgspec.json.decode(text, type=_File).content)
    except (SchemaError, msgspec.MsgspecError, RecursionError):
        return read(text)  # its message names the place


def checked(run: SavedRun) -> SavedRun:
    """Return a run. Raises `FileError`: a value is impossible, or a row may not be saved."""
    try:
        run = replace(run, utc=run.utc.astimezone(timezone.utc))
    except OverflowError:
        raise FileError(f"$.content.utc: {run.utc} is too far from now") from None
    keys = set[str]()
    for index, row in enumerate(run.rows):
        _check(row, f"$.content.rows[{index}]")
        if row.key in keys:
            raise FileError(f"holds {row.key} twice")
        keys.add(row.key)
    return run


def _check(row: SavedRow, path: str) -> None:
    if row.measurement is not None:
        if row.measurement.label != row.label:
            raise FileError(f"{path}.measurement.label: not that of the row, {row.label!r}")
        why = unfit(row.measurement)
        if why is not None:
            raise FileError(f"{path}, {row.key}, may not be in a baseline: {why}")
    for name, limit in LIMITS.items():
        value = getattr(row.limits, name)
        try:
            if value is not None:
                limit.parse(value)
        except QuantityError as error:
            raise FileError(f"{path}.limits.{name}: {error}") from None


def _value(value: Any) -> Any:
    """Return a record as JSON values, without the fields that have their default."""
    if isinstance(value, msgspec.Struct):
        plain = {}
        kind = type(value)
        names = zip(kind.__struct_fields__, kind.__struct_encode_fields__, strict=True)
        for (name, encoded), default in zip(names, _defaults(kind), strict=True):
            item = getattr(value, name)
            if item != default:
                plain[encoded] = _value(item)
        return plain
    if isinstance(value, Enum):
        return value.value
    if isinstance(value, datetime):
        return value.isoformat()
    if isinstance(value, (tuple, list)):
        return [_value(item) for item in value]
    if isinstance(value, dict):
        return {key: _value(item) for key, item in value.items()}
    return value


@cache
def _defaults(kind: type[msgspec.Struct]) -> list[Any]:
    """Return the default of each field; `NODEFAULT` of a field that has none."""
    defaults = []
    for item in structs.fields(kind):
        if item.default_factory is msgspec.NODEFAULT:
            defaults.append(item.default)
        else:
            defaults.append(item.default_factory())
    return defaults


def _lines(value: Any) -> str:
    if isinstance(value, list) and value:
        return "[\n" + ",\n".join(json.dumps(item, allow_nan=False) for item in value) + "\n]"
    return json.dumps(value, allow_nan=False)
