"""What a baseline file holds, as JSON: version 2, and version 1 as it is still read.

    {"schema": 2, "sha256": "...", "content": {
        "id", "utc", "sequence", "revision", "key", "written_by", "device", "settings", "rows", "epochs", "rejected"}}

A file is of one run, or of one `gpumem accept`, which has epochs and no rows. `rejected` holds keys of rows that the file's revision
makes slower. A row has a placement's median where version 1 had its samples. The digest is over the content as JSON with sorted keys:
it survives a formatter and no edit, and is no protection against somebody who means to deceive. The sequence number is one more than
the highest that the writer had seen: it orders files where a clock is wrong, also those of several machines (Lamport 1978, "Time,
clocks, and the ordering of events in a distributed system"). A field that has a default may be missing, so that fields can be added.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime
from enum import Enum
from typing import Annotated, Any, NoReturn, TypeVar

import msgspec

from pytest_gpumem.baselines.history import Accepted, Epoch, Process, Rejection
from pytest_gpumem.records.device import DeviceFacts
from pytest_gpumem.records.measurement import Measurement, Taken
from pytest_gpumem.records.row import Row
from pytest_gpumem.records.schema import SchemaError, device_from_json, device_to_json, document_from_json, refuse_impossible

LAYOUT = 2
"""Version that is written."""
FIRST = 1
"""The version before it, a document as results hold it."""
LARGEST = 64 * 2**20
"""Bytes of a file from which on it is not read: one of 300 rows takes a third of a megabyte."""
_LFS = b"version https://git-lfs"

_T = TypeVar("_T")


class LayoutError(ValueError):
    """A file's content that cannot be used; names the path of the value where one is wrong."""


@dataclass(frozen=True)
class Content:
    """One file, read."""

    key: str
    """`DeviceFacts.key` of the device, whose folder the file belongs into."""
    process: Process | None
    """None in a file of `gpumem accept`, which measured nothing."""
    id: str
    """Unique to the file."""
    utc: datetime
    """When it was written, by the clock of the machine that wrote it."""
    revision: str | None
    """As `Process.revision`; of the code that was accepted where nothing was measured."""
    sequence: int = 0
    """One more than the highest that the writer had seen; 0 in files of before there was one."""
    rows: tuple[Accepted, ...] = ()
    epochs: tuple[Epoch, ...] = ()
    rejections: tuple[Rejection, ...] = ()
    judged: tuple[Row, ...] = field(default=(), compare=False)
    """The rows as version 1 stored them, with their verdicts."""


class _Row(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    nodeid: str
    measurement: dict[str, Any]
    epoch: str | None = None
    test_source: str | None = None


class _Epoch(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    id: str
    key: str
    reason: str
    who: str


class _Content(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    id: str
    utc: str
    key: str
    written_by: str
    sequence: Annotated[int, msgspec.Meta(ge=0)] = 0
    revision: str | None = None
    device: dict[str, Any] | None = None
    settings: dict[str, Any] = {}
    rows: list[_Row] = []
    epochs: list[_Epoch] = []
    rejected: list[str] = []


def reduced(measurement: Measurement, process: Process) -> Measurement:
    """What a comparison needs of an accepted measurement: each placement's median in place of its samples, no notes, no counts.

    Where it does not know when and on which card it was taken, its process does.
    """
    taken = measurement.taken or Taken(process.utc.isoformat(timespec="seconds"), process.device.uuid)
    placements = tuple((median,) for median in measurement.medians)
    return replace(measurement, placements=placements, sampler_reason="", notes=(), counted=None, taken=taken)


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
    epochs: Sequence[Epoch] = (),
    rejected: Sequence[str] = (),
) -> str:
    """A file's text, a row on each line, so that it can be read and compared line by line."""
    content: dict[str, Any] = {"id": id, "utc": utc.isoformat(), "sequence": sequence, "revision": revision}
    content |= {"key": key, "written_by": written_by}
    content["device"] = None if device is None else device_to_json(device)
    content["settings"] = dict(settings or {})
    content["rows"] = [_row(row) for row in rows]
    content["epochs"] = [{name: getattr(epoch, name) for name in _Epoch.__struct_fields__} for epoch in epochs]
    if rejected:
        content["rejected"] = list(rejected)
    parts = (f"{json.dumps(name)}: {_lines(value)}" for name, value in content.items())
    head = f'"schema": {LAYOUT},\n"sha256": "{digest(content)}"'
    return f"{{\n{head},\n" + '"content": {\n' + ",\n".join(parts) + "\n}\n}\n"


def _row(row: Accepted) -> dict[str, Any]:
    plain: dict[str, Any] = {"nodeid": row.nodeid, "epoch": row.epoch, "test_source": row.test_source}
    return {name: value for name, value in plain.items() if value is not None} | {"measurement": _plain(row.measurement)}


def digest(content: object) -> str:
    """SHA-256 of JSON values, whatever white space and order of keys they were read with."""
    return hashlib.sha256(json.dumps(content, sort_keys=True, separators=(",", ":"), allow_nan=False).encode()).hexdigest()


def read(text: bytes) -> Content:
    """What `written` wrote, or an earlier version of it.

    Raises:
        LayoutError: not JSON, another version, a content that its digest does not fit, or values that cannot be.
    """
    if text.startswith(_LFS):
        raise LayoutError("a pointer of Git LFS in place of the file; `git lfs pull` fetches it")
    try:
        value = json.loads(text, parse_constant=_no_number)
    # ValueError: not JSON, not UTF-8, or a number of too many digits.
    except (ValueError, RecursionError) as error:
        raise LayoutError(f"not JSON: {' '.join(str(error).split()) or type(error).__name__}") from None
    if not isinstance(value, dict):
        raise LayoutError("$: not a JSON object")
    schema = value.get("schema")
    try:
        if schema == LAYOUT and not isinstance(schema, bool):
            return _second(value)
        if schema == FIRST and not isinstance(schema, bool):
            return _first(value)
    except (SchemaError, msgspec.ValidationError, RecursionError) as error:
        raise LayoutError(" ".join(str(error).split())) from None
    raise LayoutError(f"$.schema: {schema!r}; this version reads {FIRST} and {LAYOUT}")


def _no_number(name: str) -> NoReturn:
    raise ValueError(f"{name} is not a finite number")


def _second(value: dict[str, Any]) -> Content:
    content = value.get("content")
    if value.keys() != {"schema", "sha256", "content"} or not isinstance(content, dict):
        raise LayoutError("$: not the keys schema, sha256 and content")
    try:
        fits = digest(content) == value["sha256"]
    except ValueError:  # a number too large for a float
        raise LayoutError("$.content: a number in it is not finite") from None
    if not fits:
        raise LayoutError("its content does not fit its sha256: it was edited by hand, or is damaged")
    # From here on the text is what was written: what does not fit was written by another version.
    try:
        return _content(_converted(content, _Content, "$.content"))
    except (LayoutError, SchemaError) as error:
        by = content.get("written_by")
        raise LayoutError(f"{error} (written by {by if isinstance(by, str) else 'unknown'})") from None


def _content(read: _Content) -> Content:
    utc = _time(read.utc, "$.content.utc")
    if read.device is None:
        if read.rows:
            raise LayoutError("$.content.device: null, but there are rows")
        process = None
    else:
        process = Process(read.id, utc, read.revision, device_from_json(read.device), read.sequence, _mode(read.settings))
    rows = []
    for index, row in enumerate(read.rows):
        place = f"$.content.rows[{index}].measurement"
        if unknown := sorted(row.measurement.keys() - _MEASURED):
            raise LayoutError(f"{place}.{unknown[0]}: unknown")
        measurement = _converted(row.measurement, Measurement, place)
        refuse_impossible(measurement, place)
        assert process is not None
        rows.append(Accepted(row.nodeid, measurement, process, row.epoch, row.test_source))
    epochs = tuple(Epoch(e.id, e.key, e.reason, e.who, utc, read.revision, read.sequence) for e in read.epochs)
    rejections = tuple(Rejection(key, read.revision, read.sequence) for key in read.rejected if read.revision is not None)
    return Content(read.key, process, read.id, utc, read.revision, read.sequence, tuple(rows), epochs, rejections)


def _first(value: dict[str, Any]) -> Content:
    """A document as it stands under pytest-benchmark's key `gpumem`, with its samples, the revision and the time."""
    document = document_from_json(value)
    revision = value.get("revision")
    if not (revision is None or isinstance(revision, str)):
        raise LayoutError(f"$.revision: {revision!r} is no text")
    # It has no identity of its own: two of the same content are copies of one.
    try:
        own = digest(value)
    except ValueError:
        raise LayoutError("$: a number in it is not finite") from None
    process = Process(f"version 1, {own}", _time(value.get("utc"), "$.utc"), revision, document.device, mode=_mode(document.settings))
    rows = tuple(Accepted(r.nodeid, reduced(r.measurement, process), process) for r in document.rows if r.measurement is not None)
    return Content(document.device.key, process, process.id, process.utc, revision, rows=rows, judged=document.rows)


def _mode(settings: Mapping[str, Any]) -> str | None:
    return mode if isinstance(mode := settings.get("mode"), str) else None


def _time(value: object, path: str) -> datetime:
    try:
        utc = datetime.fromisoformat(value) if isinstance(value, str) else None
    except ValueError:
        utc = None
    if utc is None or utc.tzinfo is None:
        raise LayoutError(f"{path}: {value!r} is no time with its zone")
    return utc


def _converted(value: object, kind: type[_T], path: str) -> _T:
    try:
        return msgspec.convert(value, kind)
    except (msgspec.ValidationError, OverflowError, UnicodeEncodeError) as error:
        what, _, where = str(error).partition(" - at `$")
        raise LayoutError(f"{path}{where.rstrip('`')}: {what}") from None


def _plain(record: Any) -> dict[str, Any]:
    """A record's fields as JSON values, without those that have their default: most of a measurement's do."""
    plain: dict[str, Any] = {}
    for one in dataclasses.fields(record):
        value = getattr(record, one.name)
        default = one.default_factory() if one.default_factory is not dataclasses.MISSING else one.default
        if value != default:
            plain[one.name] = _value(value)
    return plain


def _value(value: Any) -> Any:
    if dataclasses.is_dataclass(value):
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


_MEASURED = frozenset(one.name for one in dataclasses.fields(Measurement))
