"""The JSON of a baseline file.

    {"schema": 2, "sha256": "...", "content": {
        "id", "utc", "sequence", "revision", "key", "written_by", "device", "settings", "rows", "epochs", "rejected", "footprints"}}

A file belongs to one run. Its resets ("epochs") are gains, and accepted changes with the digests of their files (`accepted`). `rejected`
holds the keys of rows that the file's revision makes slower. `footprints` holds the memory of tests; it is missing where none was watched.
A row keeps the median of each placement, not its samples.

The digest covers the content as JSON with sorted keys. It survives a formatter, shows an edit, and does not protect against fraud. The
sequence number is one more than the highest number that the writer had read. It orders files where a clock is wrong, and files of several
machines (Lamport 1978, "Time, clocks, and the ordering of events in a distributed system"). A field with a default may be missing, so
that later versions can add fields.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from contextlib import suppress
from datetime import datetime
from enum import Enum
from functools import cache
from importlib.metadata import version
from typing import Annotated, Any, Literal

import msgspec
from msgspec import structs
from msgspec.structs import replace

from pytest_gpumem.baselines.acceptance import unfit
from pytest_gpumem.baselines.history import Reset, RunFile, SavedFootprint, SavedProcess, SavedRow
from pytest_gpumem.records.footprint import Footprint
from pytest_gpumem.records.measurement import Measurement, Provenance
from pytest_gpumem.records.schema import (
    SchemaError,
    device_from_json,
    device_to_json,
    from_plain,
    other_schema,
)
from pytest_gpumem.result_files import FileError, parsed

LAYOUT = 2  # version of the layout
LARGEST = 64 * 2**20
"""Bytes of the largest file that is read; a file of 300 rows has a third of a megabyte."""
_REMEDY = "restore the file from a copy, or delete it"
_LFS = b"version https://git-lfs"


class _Plain(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    pass


class _Row(_Plain, frozen=True):
    nodeid: str
    measurement: Measurement
    epoch: str | None = None
    test_source: str | None = None


class _Footprint(_Plain, frozen=True):
    nodeid: str
    footprint: Footprint
    label: str = ""
    epoch: str | None = None


class _Reset(_Plain, frozen=True, omit_defaults=True):
    id: str
    key: str
    reason: str
    who: str
    accepted: tuple[str, ...] = ()


class _Content(_Plain, frozen=True):
    id: str
    utc: str
    sequence: Annotated[int, msgspec.Meta(ge=1)]
    key: str
    written_by: str
    device: dict[str, Any]
    revision: str | None = None
    settings: dict[str, Any] = {}
    rows: list[_Row] = []
    epochs: list[_Reset] = []
    rejected: list[str] = []
    footprints: list[_Footprint] = []


class _File(msgspec.Struct, frozen=True):
    schema: Literal[2]
    content: _Content


def reduced_footprint(footprint: Footprint) -> Footprint:
    """The part of a footprint that a comparison needs: without its course over time."""
    return replace(footprint, timeline=(), phases=(), notes=())


def reduced(measurement: Measurement, process: SavedProcess) -> Measurement:
    """The part of a measurement that a comparison needs: the median of each placement instead of its samples, no notes, no counts. Where it
    lacks its time and card, it gets those of its process."""
    provenance = measurement.provenance or Provenance(
        process.utc.isoformat(timespec="seconds"), process.device.uuid
    )
    placements = tuple((median,) for median in measurement.medians)
    return replace(
        measurement, placements=placements, sampler_reason="", notes=(), provenance=provenance
    )


def written(content: RunFile, settings: Mapping[str, object] | None = None) -> str:
    """The text of a file, with one row a line for diffs. `settings`: of the run."""
    plain = _Content(
        id=content.id,
        utc=content.utc.isoformat(),
        sequence=content.sequence,
        revision=content.revision,
        key=content.key,
        written_by=f"pytest-gpumem {version('pytest-gpumem')}",
        device=device_to_json(content.process.device),
        settings=dict(settings or {}),
        rows=[
            _Row(row.nodeid, row.measurement, row.reset, row.test_source) for row in content.rows
        ],
        epochs=[
            _Reset(one.id, one.key, one.reason, one.who, one.accepted) for one in content.resets
        ],
        rejected=list(content.rejected),
        footprints=[
            _Footprint(one.nodeid, one.footprint, one.label, one.reset)
            for one in content.footprints
        ],
    )
    values = {
        name: _value(value)
        for name, value in structs.asdict(plain).items()
        if value or name not in ("rejected", "footprints")
    }
    parts = (f"{json.dumps(name)}: {_lines(value)}" for name, value in values.items())
    head = f'"schema": {LAYOUT},\n"sha256": "{digest(values)}"'
    return f"{{\n{head},\n" + '"content": {\n' + ",\n".join(parts) + "\n}\n}\n"


def digest(content: object) -> str:
    """SHA-256 of JSON values; white space and the order of keys do not change it."""
    return hashlib.sha256(
        json.dumps(content, sort_keys=True, separators=(",", ":"), allow_nan=False).encode()
    ).hexdigest()


def read(text: bytes) -> RunFile:
    """Read what `written` wrote.
    Raises `FileError`: not JSON, another version, a wrong digest, impossible values, or a row that may not be in a baseline.
    """
    if text.startswith(_LFS):
        raise FileError("a pointer of Git LFS instead of the file; `git lfs pull` fetches it")
    try:
        value = parsed(text)
    except FileError as error:
        raise FileError(f"this baseline file is corrupt: {error}; {_REMEDY}") from None
    if not isinstance(value, dict):
        raise FileError("$: not a JSON object")
    if (schema := value.get("schema")) != LAYOUT:
        raise FileError(other_schema(schema, LAYOUT))
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
            f"its content does not fit its sha256: it was edited by hand, or is damaged; {_REMEDY}"
        )
    # The text is as it was written: what does not fit now comes from another version.
    try:
        found = _content(from_plain(content, _Content, "$.content"))
    except (FileError, SchemaError, RecursionError) as error:
        by = content.get("written_by")
        raise FileError(
            f"{error} (written by {by if isinstance(by, str) else 'unknown'})"
        ) from None
    return _checked(found)


def read_checked(text: bytes) -> RunFile:
    """Read what `written` wrote and nobody changed since, as the digest in a file's name shows: in a thirtieth of the time of `read`.
    Raises `FileError`: values that another version wrote, or a row that may not be in a baseline.
    """
    try:
        found = _content(msgspec.json.decode(text, type=_File).content)
    except (SchemaError, msgspec.MsgspecError, RecursionError):
        return read(text)  # its message names the place
    return _checked(found)


def _checked(found: RunFile) -> RunFile:
    for index, row in enumerate(found.rows):
        if (why := unfit(row.measurement)) is not None:
            raise FileError(f"row {index}, {row.key}, may not be in a baseline: {why}")
    refuse_twice(found.rows)
    return found


def _content(read: _Content) -> RunFile:
    utc, mode, device = (
        _time(read.utc, "$.content.utc"),
        read.settings.get("mode"),
        device_from_json(read.device),
    )
    process = SavedProcess(
        read.id, utc, read.revision, device, read.sequence, mode if isinstance(mode, str) else None
    )
    rows = [
        SavedRow(row.nodeid, row.measurement, process, row.epoch, row.test_source)
        for row in read.rows
    ]
    footprints = [
        SavedFootprint(one.nodeid, one.label, one.footprint, process, one.epoch)
        for one in read.footprints
    ]
    resets = tuple(
        Reset(one.id, one.key, one.reason, one.who, utc, read.revision, read.sequence, one.accepted)
        for one in read.epochs
    )
    return RunFile(read.key, process, tuple(rows), tuple(footprints), resets, tuple(read.rejected))


def refuse_twice(rows: Iterable[SavedRow]) -> None:
    """Raises `FileError`: two of the rows have one key."""
    seen: set[str] = set()
    for row in rows:
        if row.key in seen:
            raise FileError(f"holds {row.key} twice")
        seen.add(row.key)


def _time(written: str, path: str) -> datetime:
    with suppress(ValueError):
        if (utc := datetime.fromisoformat(written)).tzinfo is not None:
            return utc
    raise FileError(f"{path}: {written!r} is not a time with a zone")


def _value(value: Any) -> Any:
    """A record as JSON values, without the fields that have their default."""
    if isinstance(value, msgspec.Struct):
        names = zip(
            value.__struct_fields__,
            value.__struct_encode_fields__,
            _defaults(type(value)),
            strict=True,
        )
        return {
            written: _value(own)
            for name, written, default in names
            if (own := getattr(value, name)) != default
        }
    if isinstance(value, Enum):
        return value.value
    if isinstance(value, (tuple, list)):
        return [_value(item) for item in value]
    if isinstance(value, dict):
        return {key: _value(item) for key, item in value.items()}
    return value


@cache
def _defaults(kind: type[msgspec.Struct]) -> list[Any]:
    """The default of each field; `NODEFAULT` of a field that has none."""
    fields = structs.fields(kind)
    return [
        one.default if one.default_factory is msgspec.NODEFAULT else one.default_factory()
        for one in fields
    ]


def _lines(value: Any) -> str:
    if isinstance(value, list) and value:
        return "[\n" + ",\n".join(json.dumps(item, allow_nan=False) for item in value) + "\n]"
    return json.dumps(value, allow_nan=False)
