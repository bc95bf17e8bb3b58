"""The JSON Schema of results: it is one, it describes every field, and it takes what is written and nothing else."""

from __future__ import annotations

import copy
import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from cases import naming

from pytest_gpumem.outcomes import FileError
from pytest_gpumem.records.schema import document, document_from_json

ROOT = Path(__file__).parents[3]
RECORD = ROOT / "ci" / "records" / "nvidia-h200" / "suite.json"
Break = Callable[[dict[str, Any]], object]


@pytest.fixture(scope="module")
def schema() -> dict[str, Any]:
    found: dict[str, Any] = json.loads(
        (ROOT / "docs" / "reference" / "results.schema.json").read_text()
    )
    return found


@pytest.fixture(scope="module")
def recorded() -> Any:
    """Two rows of a run on a GPU, read and written again."""
    sys.path.append(str(ROOT / "ci"))
    from renew_tables import of_today  # a script: ci is no package

    found = of_today(json.loads(RECORD.read_text())["gpumem"])
    read = document_from_json({**found, "rows": found["rows"][:2]})
    return json.loads(json.dumps(document(read.device, read.rows, read.settings)))


def test_it_is_a_schema(schema: dict[str, Any]) -> None:
    jsonschema.Draft202012Validator.check_schema(schema)


def test_a_recorded_run_is_of_it(schema: dict[str, Any], recorded: Any) -> None:
    jsonschema.Draft202012Validator(schema).validate(recorded)


def test_what_is_not_of_it_is_refused(schema: dict[str, Any], recorded: Any) -> None:
    cases: list[Break] = [
        lambda d: d.update(schema=1),
        lambda d: d.pop("device"),
        lambda d: d["rows"][0].update(extra=1),
        lambda d: d["rows"][0]["verdict"].update(outcome="MAYBE"),
        lambda d: d["rows"][0]["measurement"].pop("latency"),
    ]
    for change in cases:
        broken = copy.deepcopy(recorded)
        change(broken)
        assert not jsonschema.Draft202012Validator(schema).is_valid(broken), change


def properties(schema: object, path: str = "") -> Iterator[tuple[str, dict[str, Any]]]:
    if isinstance(schema, dict):
        for name, one in schema.get("properties", {}).items():
            yield f"{path}.{name}", one
        for name, one in schema.get("$defs", {}).items():
            yield from properties(one, name)


def test_every_field_is_described(schema: dict[str, Any]) -> None:
    bare = {path for path, one in properties(schema) if not one.get("description")}
    assert bare == set()


def test_the_schema_refuses_the_values_that_the_commands_refuse(
    schema: dict[str, Any], recorded: Any
) -> None:
    cases: list[Break] = [
        lambda m: m.update(placements=[[-1e-6]]),
        lambda m: m.update(placements=[]),
        lambda m: m.update(half_width=-1e-9),
        lambda m: m["conditions"][0].update(other_processes=-1),
        lambda m: m.update(window={"nbytes": 1, "hit_ratio": 1.5, "set_aside": 1}),
    ]
    for change in cases:
        with naming(change):
            broken = copy.deepcopy(recorded)
            change(broken["rows"][0]["measurement"])
            assert not jsonschema.Draft202012Validator(schema).is_valid(broken)
            with pytest.raises(FileError):
                document_from_json(broken)
