"""The JSON of a baseline file.

    {"schema": 2, "sha256": "...", "content": {
        "id", "utc", "sequence", "revision", "key", "written_by", "device", "settings", "rows", "epochs", "rejected", "footprints"}}

A file belongs to one run, or to one `gpumem accept`, which has resets ("epochs") and no rows. `rejected` holds the keys of rows that the
file's revision makes slower. `footprints` holds the memory of tests; it is missing where none was watched. A row keeps the median of each
placement, not its samples.

The digest covers the content as JSON with sorted keys. It survives a formatter, shows an edit, and does not protect against fraud. The
sequence number is one more than the highest number that the writer had read. It orders files where a clock is wrong, and files of several
machines (Lamport 1978, "Time, clocks, and the ordering of events in a distributed system"). A field with a default may be missing, so
that later versions can add fields.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from enum import Enum
from functools import cache
from typing import Annotated, Any, NoReturn

import msgspec
from msgspec import structs
from msgspec.structs import replace

from pytest_gpumem.baselines.history import Accepted, AcceptedFootprint, Process, Rejection, Reset
from pytest_gpumem.records.device import DeviceFacts
from pytest_gpumem.records.footprint import Footprint
from pytest_gpumem.records.measurement import Measurement, Provenance
from pytest_gpumem.records.record import Record
from pytest_gpumem.records.schema import SchemaError, device_from_json, device_to_json, from_plain

LAYOUT = 2  # version of the layout
LARGEST = 64 * 2**20  # bytes of the largest file that is read; a file of 300 rows has a third of a megabyte
_LFS = b"version https://git-lfs"


class LayoutError(ValueError):
    """Content that cannot be used; the message names the path of the wrong value, where there is one."""


@dataclass(frozen=True)
class Content:
    """One file."""

    key: str  # `DeviceFacts.key` of the device. The file belongs into the folder of that name.
    process: Process | None  # None in a file of `gpumem accept`, which measured nothing
    id: str  # unique to the file
    utc: datetime  # when it was written, by the clock of the machine that wrote it
    revision: str | None  # as `Process.revision`; of the accepted code in a file of `gpumem accept`
    sequence: int  # one more than the highest number that the writer had read
    rows: tuple[Accepted, ...] = ()
    footprints: tuple[AcceptedFootprint, ...] = ()
    resets: tuple[Reset, ...] = ()
    rejections: tuple[Rejection, ...] = ()

    @property
    def nodeids(self) -> dict[str, str]:
        """The node id of each row, by its key: of those with times, then of those with footprints."""
        return {row.key: row.nodeid for row in self.rows} | {one.key: one.nodeid for one in self.footprints}


class _Row(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    nodeid: str
    measurement: dict[str, Any]
    epoch: str | None = None
    test_source: str | None = None


class _Footprint(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    nodeid: str
    footprint: dict[str, Any]
    label: str = ""
    epoch: str | None = None


class _Reset(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    id: str
    key: str
    reason: str
    who: str


class _Content(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    id: str
    utc: str
    key: str
    written_by: str
    sequence: Annotated[int, msgspec.Meta(ge=1)]
    revision: str | None = None
    device: dict[str, Any] | None = None
    settings: dict[str, Any] = {}
    rows: list[_Row] = []
    epochs: list[_Reset] = []
    rejected: list[str] = []
    footprints: list[_Footprint] = []


class _CheckedRow(_Row, frozen=True, forbid_unknown_fields=True):
    measurement: Measurement  # type: ignore[assignment]


class _CheckedFootprint(_Footprint, frozen=True, forbid_unknown_fields=True):
    footprint: Footprint  # type: ignore[assignment]


class _CheckedContent(_Content, frozen=True, forbid_unknown_fields=True):
    rows: list[_CheckedRow] = []  # type: ignore[assignment]
    footprints: list[_CheckedFootprint] = []  # type: ignore[assignment]


class _CheckedFile(msgspec.Struct, frozen=True):
    content: _CheckedContent


def reduced_footprint(footprint: Footprint) -> Footprint:
    """The part of a footprint that a comparison needs: without its course over time."""
    return replace(footprint, timeline=(), phases=(), notes=())


def reduced(measurement: Measurement, process: Process) -> Measurement:
    """The part of a measurement that a comparison needs: the median of each placement instead of its samples, no notes, no counts. Where it
    lacks its time and card, it gets those of its process."""
    provenance = measurement.provenance or Provenance(process.utc.isoformat(timespec="seconds"), process.device.uuid)
    placements = tuple((median,) for median in measurement.medians)
    return replace(measurement, placements=placements, sampler_reason="", notes=(), counted=None, provenance=provenance)


def written(
    *,
    id: str,
    utc: datetime,
    sequence: int,
    revision: str | None,
    key: str,
    written_by: str,
    device: DeviceFacts | None = None,
    settings: Mapping[str, object] | None = None,
    rows: Sequence[Accepted] = (),
    resets: Sequence[Reset] = (),
    rejected: Sequence[str] = (),
    footprints: Sequence[AcceptedFootprint] = (),
) -> str:
    """The text of a file, with one row a line for diffs."""
    content: dict[str, Any] = {"id": id, "utc": utc.isoformat(), "sequence": sequence, "revision": revision}
    content |= {"key": key, "written_by": written_by}
    content["device"] = None if device is None else device_to_json(device)
    content["settings"] = dict(settings or {})
    content["rows"] = [_row(row) for row in rows]
    content["epochs"] = [{name: getattr(reset, name) for name in _Reset.__struct_fields__} for reset in resets]
    if rejected:
        content["rejected"] = list(rejected)
    if footprints:
        content["footprints"] = [_footprint(one) for one in footprints]
    parts = (f"{json.dumps(name)}: {_lines(value)}" for name, value in content.items())
    head = f'"schema": {LAYOUT},\n"sha256": "{digest(content)}"'
    return f"{{\n{head},\n" + '"content": {\n' + ",\n".join(parts) + "\n}\n}\n"


def _row(row: Accepted) -> dict[str, Any]:
    plain: dict[str, Any] = {"nodeid": row.nodeid, "epoch": row.reset, "test_source": row.test_source}
    return {name: value for name, value in plain.items() if value is not None} | {"measurement": _plain(row.measurement)}


def _footprint(one: AcceptedFootprint) -> dict[str, Any]:
    plain: dict[str, Any] = {"nodeid": one.nodeid, "label": one.label or None, "epoch": one.reset}
    return {name: value for name, value in plain.items() if value is not None} | {"footprint": _plain(one.footprint)}


def digest(content: object) -> str:
    """SHA-256 of JSON values; white space and the order of keys do not change it."""
    return hashlib.sha256(json.dumps(content, sort_keys=True, separators=(",", ":"), allow_nan=False).encode()).hexdigest()


def read(text: bytes) -> Content:
    """Read what `written` wrote. Raises `LayoutError`: not JSON, another version, a wrong digest, or impossible values."""
    if text.startswith(_LFS):
        raise LayoutError("a pointer of Git LFS instead of the file; `git lfs pull` fetches it")
    try:
        value = json.loads(text, parse_constant=_no_number)
    # ValueError: not JSON, not UTF-8, or a number of too many digits.
    except (ValueError, RecursionError) as error:
        raise LayoutError(f"not JSON: {' '.join(str(error).split()) or type(error).__name__}") from None
    if not isinstance(value, dict):
        raise LayoutError("$: not a JSON object")
    schema = value.get("schema")
    if schema != LAYOUT or isinstance(schema, bool):
        raise LayoutError(f"$.schema: {schema!r}; this version reads {LAYOUT}")
    try:
        return _verified(value)
    except (SchemaError, msgspec.ValidationError, RecursionError) as error:
        raise LayoutError(" ".join(str(error).split())) from None


def read_checked(text: bytes) -> Content:
    """Read what `written` wrote and nobody changed since, as the digest in a file's name shows: in a thirtieth of the time of `read`.
    Raises `LayoutError`: values that another version wrote.
    """
    try:
        return _content(msgspec.json.decode(text, type=_CheckedFile).content)
    except (SchemaError, msgspec.MsgspecError) as error:
        raise LayoutError(str(error)) from None


def _no_number(name: str) -> NoReturn:
    raise ValueError(f"{name} is not a finite number")


def _verified(value: dict[str, Any]) -> Content:
    content = value.get("content")
    if value.keys() != {"schema", "sha256", "content"} or not isinstance(content, dict):
        raise LayoutError("$: not the keys schema, sha256 and content")
    try:
        fits = digest(content) == value["sha256"]
    except ValueError:  # a number too large for a float
        raise LayoutError("$.content: a number in it is not finite") from None
    if not fits:
        raise LayoutError("its content does not fit its sha256: it was edited by hand, or is damaged")
    # The text is as it was written: what does not fit now comes from another version.
    try:
        return _content(from_plain(content, _Content, "$.content"))
    except (LayoutError, SchemaError) as error:
        by = content.get("written_by")
        raise LayoutError(f"{error} (written by {by if isinstance(by, str) else 'unknown'})") from None


def _content(read: _Content) -> Content:
    utc = _time(read.utc, "$.content.utc")
    if read.device is None:
        if read.rows or read.footprints:
            raise LayoutError("$.content.device: null, but there are rows")
        process = None
    else:
        process = Process(read.id, utc, read.revision, device_from_json(read.device), read.sequence, _mode(read.settings))
    rows = []
    for index, row in enumerate(read.rows):
        place = f"$.content.rows[{index}].measurement"
        measurement = row.measurement if isinstance(row, _CheckedRow) else from_plain(row.measurement, Measurement, place)
        assert process is not None
        rows.append(Accepted(row.nodeid, measurement, process, row.epoch, row.test_source))
    footprints = []
    for index, of in enumerate(read.footprints):
        place = f"$.content.footprints[{index}].footprint"
        footprint = of.footprint if isinstance(of, _CheckedFootprint) else from_plain(of.footprint, Footprint, place)
        assert process is not None
        footprints.append(AcceptedFootprint(of.nodeid, of.label, footprint, process, of.epoch))
    resets = tuple(Reset(one.id, one.key, one.reason, one.who, utc, read.revision, read.sequence) for one in read.epochs)
    rejections = tuple(Rejection(key, read.revision, read.sequence) for key in read.rejected if read.revision is not None)
    return Content(read.key, process, read.id, utc, read.revision, read.sequence, tuple(rows), tuple(footprints), resets, rejections)


def _mode(settings: Mapping[str, Any]) -> str | None:
    return mode if isinstance(mode := settings.get("mode"), str) else None


def _time(value: object, path: str) -> datetime:
    try:
        utc = datetime.fromisoformat(value) if isinstance(value, str) else None
    except ValueError:
        utc = None
    if utc is None or utc.tzinfo is None:
        raise LayoutError(f"{path}: {value!r} is not a time with a zone")
    return utc


def _plain(record: Record) -> dict[str, Any]:
    """The fields of a record as JSON values, without those that have their default."""
    kind = type(record)
    names = zip(kind.__struct_fields__, kind.__struct_encode_fields__, _defaults(kind), strict=True)
    return {written: _value(value) for name, written, default in names if (value := getattr(record, name)) != default}


@cache
def _defaults(kind: type[Record]) -> list[Any]:
    """The default of each field; `NODEFAULT` of a field that has none."""
    fields = structs.fields(kind)
    return [one.default if one.default_factory is msgspec.NODEFAULT else one.default_factory() for one in fields]


def _value(value: Any) -> Any:
    if isinstance(value, Record):
        return _plain(value)
    if isinstance(value, Enum):
        return value.value
    if isinstance(value, (tuple, list)):
        return [_value(item) for item in value]
    if isinstance(value, dict):
        return {key: _value(item) for key, item in value.items()}
    return value


def _lines(value: Any) -> str:
    if isinstance(value, list) and value:
        return "[\n" + ",\n".join(json.dumps(item, allow_nan=False) for item in value) + "\n]"
    return json.dumps(value, allow_nan=False)
