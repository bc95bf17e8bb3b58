"""The JSON Schema of a run's document, made from the records themselves, with what their docstrings say of each field."""

from __future__ import annotations

import ast
import inspect
import textwrap
from enum import Enum
from typing import Any, get_args, get_origin, get_type_hints

import msgspec

from pytest_gpumem.records.device import DeviceFacts
from pytest_gpumem.records.measurement import Measurement
from pytest_gpumem.records.record import Record
from pytest_gpumem.records.row import Missing, Row
from pytest_gpumem.records.schema import DERIVED_DEVICE, DERIVED_MEASUREMENT, DERIVED_MISSING, DERIVED_ROW, SCHEMA

_DERIVED: dict[type, tuple[str, ...]] = {
    Row: DERIVED_ROW,
    Measurement: DERIVED_MEASUREMENT,
    DeviceFacts: DERIVED_DEVICE,
    Missing: DERIVED_MISSING,
}


def json_schema() -> dict[str, Any]:
    """Of what stands under the key `gpumem` of a `--benchmark-json` file (JSON Schema, draft 2020-12)."""
    document = {
        "schema": {"const": SCHEMA, "description": "Version of this layout."},
        "device": {"$ref": "#/$defs/DeviceFacts", "description": "What was measured on."},
        "simulated": {"type": "boolean", "description": "No GPU took part: every time is a model's."},
        "settings": {"type": "object", "description": "What the run was asked for, by the names of the options."},
        "rows": {"type": "array", "items": {"$ref": "#/$defs/Row"}, "description": "A row for each measurement."},
        "missing": {
            "type": "array",
            "items": {"$ref": "#/$defs/Missing"},
            "description": "Measurements that the baseline holds and the run did not take.",
        },
    }
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "pytest-gpumem results",
        "description": "The value of the key `gpumem` in a file that pytest --gpumem --benchmark-json=FILE wrote. SI units.",
        "type": "object",
        # Further keys are of those who put a document somewhere, such as the maps of sweeps, and a baseline's time and revision.
        "properties": document,
        "required": [name for name in document if name != "missing"],  # older files have none
        "$defs": _definitions(),
    }


def _definitions() -> dict[str, Any]:
    _, components = msgspec.json.schema_components((Row, Missing, DeviceFacts), ref_template="#/$defs/{name}")
    records = {one.__name__: one for one in _records(Row) | _records(Missing) | _records(DeviceFacts)}
    for name, definition in components.items():
        record = records[name]
        definition["description"] = _one_line(inspect.getdoc(record) or "")
        if issubclass(record, Enum):
            continue
        described = _described(record)
        for field, schema in definition["properties"].items():
            if field in described:
                schema["description"] = described[field]
        derived = _DERIVED.get(record, ())
        definition["properties"] |= {field: _of_property(record, field) for field in derived}
        # Written always, also where it has a default; a reader does without.
        definition["required"] = [*definition.get("required", []), *derived]
        definition["additionalProperties"] = False
    return dict(sorted(components.items()))


def _of_property(record: type, name: str) -> dict[str, Any]:
    """A figure that is worked out: written for readers of the file, ignored when it is read."""
    getter = getattr(record, name).fget
    schema: dict[str, Any] = msgspec.json.schema(get_type_hints(getter)["return"])
    return {**schema, "description": _one_line(inspect.getdoc(getter) or "")}


def _records(kind: Any) -> set[type]:
    """The records and enumerations that a type is made of."""
    if get_origin(kind) is not None:
        return set().union(*(_records(part) for part in get_args(kind)))
    if isinstance(kind, type) and issubclass(kind, Enum):
        return {kind}
    if not (isinstance(kind, type) and issubclass(kind, Record)):
        return set()
    return {kind}.union(*(_records(part) for part in get_type_hints(kind).values()))


def _described(record: type) -> dict[str, str]:
    """What the text below each field says of it. Python keeps no docstrings of fields, so they are read from the source."""
    (body,) = ast.parse(textwrap.dedent(inspect.getsource(record))).body
    assert isinstance(body, ast.ClassDef)
    found = {}
    for field, text in zip(body.body, body.body[1:], strict=False):
        if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name) and isinstance(text, ast.Expr):
            found[field.target.id] = _one_line(ast.literal_eval(text.value))
    return found


def _one_line(text: str) -> str:
    return " ".join(text.split())
