"""Records as JSON, which is read back to an equal record. Derived figures such as a latency are
written for readers of the file, and ignored when it is read."""

from __future__ import annotations

import math
import re
import reprlib
from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

import msgspec

from pytest_gpumem.outcomes import FileError
from pytest_gpumem.records import Record
from pytest_gpumem.records.device import DeviceFacts
from pytest_gpumem.records.footprint import Footprint
from pytest_gpumem.records.measurement import Measurement
from pytest_gpumem.records.row import Omission, Row

SCHEMA = 2  # Version of the layout

DERIVED: dict[type[msgspec.Struct], tuple[str, ...]] = {
    Row: ("key",),
    Omission: ("key",),
    Measurement: ("latency", "latency_per_access", "bandwidth", "noise", "placement_spread"),
    DeviceFacts: ("key",),
    Footprint: ("kept", "reserved", "allocations", "largest", "pinned_peak", "managed_peak"),
}
"""Properties that are written after the fields of a record."""
_T = TypeVar("_T")


class Document(msgspec.Struct, frozen=True):
    """The value of the key `gpumem` in a file that pytest --gpumem --benchmark-json=FILE wrote. SI
    units."""

    device: DeviceFacts  # The measured device
    settings: dict[str, Any]  # Settings of the run by the names of the options, as plain values
    rows: tuple[Row, ...]  # A row for each measurement
    missing: tuple[Omission, ...] = ()  # Measurements of the baseline that the run did not take


def to_plain(record: object, path: str = "$") -> Any:
    """Return a record as plain values, without derived figures."""
    plain = msgspec.to_builtins(record)
    from_plain(plain, type(record), path)  # refuses what could not be read back
    return plain


def from_plain(value: object, kind: type[_T], path: str = "$") -> _T:
    """Return the record that `to_plain` wrote."""
    try:
        _refuse_unplain(value, path)
        return converted(value, kind, path)
    except RecursionError:
        raise FileError(f"{path}: nested too deeply") from None


def converted(value: object, kind: type[_T], path: str = "$") -> _T:
    """Return the record of JSON values whose numbers are finite."""
    try:
        return msgspec.convert(value, kind)
    except msgspec.ValidationError as error:
        raise FileError(_located(str(error), value, path)) from None
    except (OverflowError, UnicodeEncodeError) as error:
        raise FileError(f"{path}: {error}") from None


def row_to_json(row: Row) -> dict[str, Any]:
    plain = _with_derived(row, "$")
    for name in ("measurement", "footprint"):
        record = getattr(row, name)
        if record is not None:
            plain[name] |= _derived(record, f"$.{name}")
    return plain


def device_to_json(facts: DeviceFacts) -> dict[str, Any]:
    return _with_derived(facts, "$")


def document(
    facts: DeviceFacts,
    rows: Sequence[Row],
    settings: Mapping[str, object],
    missing: Sequence[Omission] = (),
) -> dict[str, Any]:
    """Return a run as plain values: the value of the key `gpumem` of pytest-benchmark's JSON."""
    _refuse_unplain(dict(settings), "$.settings")
    return {
        "schema": SCHEMA,
        "device": device_to_json(facts),
        "simulated": facts.simulated,
        "settings": dict(settings),
        "rows": [row_to_json(row) for row in rows],
        "missing": [_with_derived(omission, "$.missing") for omission in missing],
    }


def document_from_json(value: Any, path: str = "$") -> Document:
    """Return the run that `document` wrote."""
    _check_schema(value, path)
    run = from_plain(value, Document, path)
    claims = {"simulated": value.get("simulated")}
    for index, row in enumerate(run.rows):
        claims[f"rows[{index}].verdict.simulated"] = row.verdict.simulated
    for name, simulated in claims.items():
        if simulated is not run.device.simulated:
            raise FileError(f"{path}.{name}: contradicts {path}.device.simulated")
    return run


def _check_schema(value: Any, path: str) -> None:
    """Refuse a file with another version of its layout, or with none."""
    if not isinstance(value, dict):
        raise FileError(f"{path}: not a JSON object")
    version = value.get("schema")
    if version != SCHEMA:
        written = "missing" if version is None else repr(version)
        raise FileError(f"{path}.schema: {written}; this version reads {SCHEMA}")


def _with_derived(record: Record, path: str) -> dict[str, Any]:
    plain: dict[str, Any] = to_plain(record, path)
    return plain | _derived(record, path)


def _derived(record: Record, path: str) -> dict[str, Any]:
    figures = {name: getattr(record, name) for name in DERIVED[type(record)]}
    _refuse_unplain(figures, path)
    return figures


def _refuse_unplain(value: object, path: str) -> None:
    """Refuse what JSON cannot hold, above all NaN and infinity, which `json.dumps` writes."""
    if value is None or isinstance(value, (str, int)):
        return
    if isinstance(value, float):
        if not math.isfinite(value):
            raise FileError(f"{path}: {value!r} is not a finite number")
    elif isinstance(value, dict):
        for key, inner in value.items():
            if not isinstance(key, str):
                raise FileError(f"{path}: key {key!r} is not a text")
            _refuse_unplain(inner, f"{path}.{key}")
    elif isinstance(value, (list, tuple)):
        for index, inner in enumerate(value):
            _refuse_unplain(inner, f"{path}[{index}]")
    else:
        raise FileError(f"{path}: {type(value).__name__} is not a JSON value")


def _located(message: str, value: Any, path: str) -> str:
    """Return msgspec's "Expected `int`, got `str` - at `$.a[0]`" with the value and its path."""
    problem, _, place = message.partition(" - at `$")
    place = place.rstrip("`")
    unknown = re.fullmatch("Object contains unknown field `(.*)`", problem, re.DOTALL)
    if unknown is not None:
        return f"{path}{place}.{unknown[1]}: unknown"
    if problem.startswith("Object missing"):
        return f"{path}{place}: {problem}"
    # "[...]" stands for any key: the mapping is shown.
    for name, index in re.findall(r"\.(\w+)|\[(\d+)\]", place):
        value = value[name or int(index)]
    return f"{path}{place}: {reprlib.repr(value)}; {problem[0].lower()}{problem[1:]}"
