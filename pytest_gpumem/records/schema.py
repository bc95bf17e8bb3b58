"""Rows and devices as JSON, schema 2: strict in both directions. Results of schema 1, with other verdicts, are still read.

What is written can be read back to an equal record. Reading refuses what it does not know: a wrong type, an unknown key,
a number that is not finite or cannot be a time. A field that has a default may be missing, so that fields can be added.
Derived figures (latency, bandwidth) are written for readers of the file, and ignored on reading.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, TypeVar

import msgspec
from msgspec import structs

from pytest_gpumem.outcomes import Code, Outcome
from pytest_gpumem.records.device import DeviceFacts
from pytest_gpumem.records.measurement import Measurement
from pytest_gpumem.records.migrations import PageCounts
from pytest_gpumem.records.record import Record
from pytest_gpumem.records.row import Missing, Row

SCHEMA = 2
"""Version of the layout that is written."""
_FIRST = 1
_OUTCOMES_OF_FIRST = {
    "SUSPECT": (Outcome.UNDECIDED, Code.LOOKS_SLOWER),
    "INCONCLUSIVE": (Outcome.UNDECIDED, Code.NOISY),
    "UNRELIABLE": (Outcome.UNDECIDED, Code.CONDITIONS),
    "NO BASELINE": (Outcome.NEW, Code.NO_BASELINE),
}
"""Outcomes of schema 1, each with what it is called now."""

LEAST_TIME, LONGEST_TIME = 1e-12, 1e9
"""Seconds of a launch: no clock resolves less, and nobody waits longer."""

DERIVED_ROW = ("key",)
DERIVED_MISSING = ("key",)
DERIVED_MEASUREMENT = ("latency", "latency_per_access", "latency_per_access_interval", "bandwidth", "noise", "placement_spread")
DERIVED_DEVICE = ("key",)
_PAGES = tuple(field.name for field in structs.fields(PageCounts) if field.type in (int, float, int | None))
"""Counts of pages that are plain numbers."""

_T = TypeVar("_T")


class SchemaError(ValueError):
    """JSON that is not of this schema, or a record that cannot be written; names the path of the value."""


class Document(Record, frozen=True):
    """What one run wrote."""

    device: DeviceFacts
    """The device that it ran on."""
    settings: dict[str, Any]
    """Its settings, as plain values."""
    rows: tuple[Row, ...]
    """Its rows."""
    missing: tuple[Missing, ...] = ()
    """Measurements that the baseline holds and the run did not take."""


def row_to_json(row: Row) -> dict[str, Any]:
    """A row as plain values, with its derived figures.

    Raises:
        SchemaError: a number that is not finite, a measurement without samples or with a time that cannot be.
    """
    _refuse_impossible(row, "$")
    plain: dict[str, Any] = msgspec.to_builtins(row)
    plain["key"] = row.key
    if row.measurement is not None:
        for name in DERIVED_MEASUREMENT:
            plain["measurement"][name] = getattr(row.measurement, name)
    _refuse_unplain(plain, "$")
    return plain


def row_from_json(value: object) -> Row:
    """The row that `row_to_json` wrote.

    Raises:
        SchemaError: with the path of the value that does not fit.
    """
    return _row(value, "$")


def device_to_json(facts: DeviceFacts) -> dict[str, Any]:
    """A device as plain values, with its baseline key.

    Raises:
        SchemaError: a number that is not finite.
    """
    plain: dict[str, Any] = msgspec.to_builtins(facts)
    plain["key"] = facts.key
    _refuse_unplain(plain, "$")
    return plain


def device_from_json(value: object) -> DeviceFacts:
    """The device that `device_to_json` wrote.

    Raises:
        SchemaError: with the path of the value that does not fit.
    """
    return _device(value, "$")


def document(facts: DeviceFacts, rows: Sequence[Row], settings: Mapping[str, object], missing: Sequence[Missing] = ()) -> dict[str, Any]:
    """A run as plain values: what stands under the key `gpumem` of pytest-benchmark's JSON, and in a baseline.

    Raises:
        SchemaError: a number that is not finite, or a setting that is no plain value.
    """
    plain = {
        "schema": SCHEMA,
        "device": device_to_json(facts),
        "simulated": facts.simulated,
        "settings": dict(settings),
        "rows": [row_to_json(row) for row in rows],
        "missing": [{**to_plain(one, "$.missing"), "key": one.key} for one in missing],
    }
    _refuse_unplain(plain["settings"], "$.settings")
    return plain


def document_from_json(value: object) -> Document:
    """The run that `document` wrote; further keys at the top level are the caller's.

    Raises:
        SchemaError: another schema, a key that is missing, simulated and real mixed, or the path of a value that does not fit.
    """
    if not isinstance(value, dict):
        raise SchemaError("$: not a JSON object")
    if (schema := value.get("schema")) not in (_FIRST, SCHEMA) or isinstance(schema, bool):
        raise SchemaError(f"$.schema: {schema!r}; this version reads {_FIRST} and {SCHEMA}")
    for key, kind in (("device", dict), ("simulated", bool), ("settings", dict), ("rows", list)):
        if not isinstance(value.get(key), kind):
            raise SchemaError(f"$.{key}: missing, or not a JSON {kind.__name__}")
    device = _device(value["device"], "$.device")
    if value["simulated"] is not device.simulated:
        raise SchemaError("$.simulated: contradicts $.device.simulated")
    given = [_upgraded(row) for row in value["rows"]] if schema == _FIRST else value["rows"]
    rows = tuple(_row(row, f"$.rows[{index}]") for index, row in enumerate(given))
    for index, row in enumerate(rows):
        if row.verdict.simulated is not device.simulated:
            raise SchemaError(f"$.rows[{index}].verdict.simulated: contradicts $.device.simulated")
    missing = value.get("missing", [])
    if not isinstance(missing, list):
        raise SchemaError("$.missing: not a JSON list")
    found = (from_plain(_without(one, DERIVED_MISSING), Missing, f"$.missing[{index}]") for index, one in enumerate(missing))
    return Document(device, value["settings"], rows, tuple(found))


def _upgraded(row: object) -> object:
    """Give a row of schema 1 the verdict of schema 2. A malformed row comes back as it is: the reader refuses it."""
    if not isinstance(row, dict) or not isinstance(verdict := row.get("verdict"), dict):
        return row
    fails, other_variant = (verdict.get(name) is True for name in ("fails", "another_sort"))
    verdict = _without(verdict, ("fails", "another_sort"))
    assert isinstance(verdict, dict)
    if fails:  # a claim of the test that did not hold
        verdict["outcome"] = Outcome.FAIL.value
    elif (known := _OUTCOMES_OF_FIRST.get(str(verdict.get("outcome")))) is not None:
        verdict["outcome"] = known[0].value
        verdict["code"] = (Code.OTHER_CARD_VARIANT if other_variant else known[1]).value
    if isinstance(comparison := verdict.get("comparison"), dict):
        kept = _without(comparison, ("resolvable", "sessions", "errors", "drift", "without_slowest"))
        assert isinstance(kept, dict)
        verdict["comparison"] = kept | {"catches": comparison.get("resolvable"), "runs": comparison.get("sessions", 1)}
    return {**row, "verdict": verdict}


def to_plain(record: object, path: str) -> Any:
    """A frozen record as plain values.

    Args:
        record: an instance of a `Record`.
        path: where it stands in the document, for errors.

    Raises:
        SchemaError: a number that is not finite.
    """
    plain = msgspec.to_builtins(record)
    _refuse_unplain(plain, path)
    return plain


def from_plain(value: object, kind: type[_T], path: str) -> _T:
    """The record of `kind` that `to_plain` wrote; a field that has a default may be missing.

    Raises:
        SchemaError: with the path of the value that does not fit.
    """
    return _converted(value, kind, path)


def _row(value: object, path: str) -> Row:
    value = _without(value, DERIVED_ROW)
    if isinstance(value, dict) and "measurement" in value:
        value["measurement"] = _without(value["measurement"], DERIVED_MEASUREMENT)
    row = _converted(value, Row, path)
    _refuse_impossible(row, path)
    return row


def _device(value: object, path: str) -> DeviceFacts:
    return _converted(_without(value, DERIVED_DEVICE), DeviceFacts, path)


def _without(value: object, keys: tuple[str, ...]) -> object:
    return {k: v for k, v in value.items() if k not in keys} if isinstance(value, dict) else value


def _converted(value: object, kind: type[_T], path: str) -> _T:
    _refuse_unplain(value, path)
    try:
        return msgspec.convert(value, kind)
    except (msgspec.ValidationError, OverflowError, UnicodeEncodeError) as error:
        raise SchemaError(_located(str(error), path)) from None


def _located(message: str, path: str) -> str:
    """msgspec's "Expected `int`, got `str` - at `$.a.b`" with the path in front."""
    what, _, where = message.partition(" - at `$")
    path += where.rstrip("`")
    if (unknown := re.fullmatch("Object contains unknown field `(.*)`", what, re.DOTALL)) is not None:
        return f"{path}.{unknown[1]}: unknown"
    return f"{path}: {what}"


def _refuse_unplain(value: object, path: str) -> None:
    """Refuse what JSON cannot hold, above all NaN and infinity, which `json.dumps` writes without a word."""
    if isinstance(value, float):
        if not math.isfinite(value):
            raise SchemaError(f"{path}: {value!r} is not a finite number")
    elif isinstance(value, dict):
        for key, inner in value.items():
            if not isinstance(key, str):
                raise SchemaError(f"{path}: key {key!r} is not a text")
            _refuse_unplain(inner, f"{path}.{key}")
    elif isinstance(value, (list, tuple)):
        for index, inner in enumerate(value):
            _refuse_unplain(inner, f"{path}[{index}]")
    elif value is not None and not isinstance(value, (str, int, bool)):
        raise SchemaError(f"{path}: {type(value).__name__} is not a JSON value")


def _refuse_impossible(row: Row, path: str) -> None:
    if row.measurement is None:
        return
    if row.label != row.measurement.label:
        raise SchemaError(f"{path}.measurement.label: {row.measurement.label!r} in a row labelled {row.label!r}")
    refuse_impossible(row.measurement, f"{path}.measurement")


def is_time(seconds: float) -> bool:
    """Whether a launch can take so long. Beyond these bounds ratios and squares of times overflow, or vanish."""
    return LEAST_TIME <= seconds <= LONGEST_TIME


def refuse_impossible(measurement: Measurement, path: str) -> None:
    """Refuse figures of the right type that no measurement can have.

    Raises:
        SchemaError: with `path` and what is below it.
    """
    if not measurement.placements:
        raise SchemaError(f"{path}.placements: empty")
    for index, placement in enumerate(measurement.placements):
        if not placement:
            raise SchemaError(f"{path}.placements[{index}]: empty")
        for sample in placement:
            # A median of 0 s would have no logarithm and no bandwidth.
            if not is_time(sample):
                raise SchemaError(f"{path}.placements[{index}]: {sample!r} s is no time of a launch")
    for index, repeat in enumerate(measurement.further):
        if not repeat.medians:
            raise SchemaError(f"{path}.further[{index}].medians: empty")
        for median in repeat.medians:
            if not is_time(median):
                raise SchemaError(f"{path}.further[{index}].medians: {median!r} s is no time of a launch")
    every = [("taken", measurement.controls), *((f"further[{index}]", one.controls) for index, one in enumerate(measurement.further))]
    for place, controls in every:
        for name in ("dram", "l2", "launch", "latency"):
            reading = getattr(controls, name, None)
            if reading is not None and not is_time(reading):
                raise SchemaError(f"{path}.{place}.controls.{name}: {reading!r} s is no time of a launch")
    if measurement.half_width is not None and measurement.half_width < 0:
        raise SchemaError(f"{path}.half_width: {measurement.half_width!r} is negative")
    for name, count in _counts(measurement):
        if count is not None and count < 0:
            raise SchemaError(f"{path}.{name}: {count!r} is negative")
    if measurement.counted is not None and measurement.counted.launches < 1:
        raise SchemaError(f"{path}.counted.launches: {measurement.counted.launches!r}; figures of no launch mean nothing")


def _counts(measurement: Measurement) -> Iterator[tuple[str, float | None]]:
    yield "floor", measurement.floor
    yield "overhead", measurement.overhead
    yield "footprint", measurement.footprint
    yield "discarded", measurement.discarded
    yield "accesses_per_launch", measurement.accesses_per_launch
    yield "sectors_per_request", measurement.sectors_per_request
    yield "requested", measurement.requested
    for index, repeat in enumerate(measurement.further):
        yield f"further[{index}].overhead", repeat.overhead
    if measurement.traffic is not None:
        yield "traffic.reads", measurement.traffic.reads
        yield "traffic.writes", measurement.traffic.writes
    if measurement.counted is not None:
        for name in ("reads", "writes", "l2_reads", "l2_writes"):
            yield f"counted.{name}", getattr(measurement.counted, name)
    if measurement.migrations is not None:
        for part in ("before", "launch"):
            if (pages := getattr(measurement.migrations, part)) is not None:
                for name in _PAGES:
                    yield f"migrations.{part}.{name}", getattr(pages, name)
                yield from ((f"migrations.{part}.causes.{cause}", nbytes) for cause, nbytes in pages.causes.items())
