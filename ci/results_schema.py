"""Write docs/reference/results.schema.json: the JSON Schema of results, from the records and their comments.

python ci/results_schema.py
"""

from __future__ import annotations

import ast
import inspect
import json
import textwrap
from itertools import zip_longest
from pathlib import Path
from typing import Any, get_type_hints

import msgspec

from pytest_gpumem.limits import LIMITS
from pytest_gpumem.records import Record, schema
from pytest_gpumem.records.limits import Limits

FILE = Path(__file__).resolve().parents[1] / "docs" / "reference" / "results.schema.json"


def json_schema() -> dict[str, Any]:
    """The JSON Schema of a run, the value of the key `gpumem` of a `--benchmark-json` file (draft 2020-12)."""
    _, definitions = msgspec.json.schema_components(
        (schema.Document,), ref_template="#/$defs/{name}"
    )
    known: list[type[msgspec.Struct]] = [schema.Document, *Record.__subclasses__()]
    kinds = {kind.__name__: kind for kind in known}
    for name, definition in definitions.items():
        definition["description"] = _one_line(definition.get("description", ""))
        if name in kinds:
            _describe(definition, kinds[name])
    run = definitions.pop("Document")
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        **run,
        "title": "pytest-gpumem results",
        "properties": {
            "schema": {"const": schema.SCHEMA, "description": "Version of this layout."},
            "simulated": {
                "type": "boolean",
                "description": "True if the device is simulated: all times are computed.",
            },
            **run["properties"],
        },
        "required": ["schema", "simulated", *run["required"]],
        "$defs": dict(sorted(definitions.items())),
    }


def _describe(definition: dict[str, Any], kind: type[msgspec.Struct]) -> None:
    """Add the descriptions of fields, and the derived figures, which are written always."""
    texts = _texts(kind)
    if kind is Limits:
        texts |= {name: limit.help for name, limit in LIMITS.items()}
    for name, written in zip(kind.__struct_fields__, kind.__struct_encode_fields__, strict=True):
        if name in texts:
            definition["properties"][written]["description"] = texts[name]
    for name in schema.DERIVED.get(kind, ()):
        getter = getattr(kind, name).fget
        described = {"description": _one_line(inspect.getdoc(getter) or "")}
        definition["properties"][name] = (
            msgspec.json.schema(get_type_hints(getter)["return"]) | described
        )
        definition["required"].append(name)


def _texts(kind: type) -> dict[str, str]:
    """The text behind each field, or below it. Python keeps none for fields, so they are read from the source."""
    source = textwrap.dedent(inspect.getsource(kind))
    (body,) = ast.parse(source).body
    assert isinstance(body, ast.ClassDef)
    lines, found = source.splitlines(), {}
    for one, below in zip_longest(body.body, body.body[1:]):
        if isinstance(one, ast.AnnAssign) and isinstance(one.target, ast.Name):
            assert one.end_lineno is not None
            behind = (
                lines[one.end_lineno - 1].encode()[one.end_col_offset :].decode().partition("#")[2]
            )
            text = ast.literal_eval(below.value) if isinstance(below, ast.Expr) else behind
            if text.strip():
                found[one.target.id] = _one_line(text).rstrip(".") + "."
    return found


def _one_line(text: str) -> str:
    return " ".join(text.split())


def text() -> str:
    """The text of the file."""
    return json.dumps(json_schema(), indent=1) + "\n"


if __name__ == "__main__":
    FILE.write_text(text())
