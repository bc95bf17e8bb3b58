"""Rows as CSV, and as github-action-benchmark reads them."""

from __future__ import annotations

import csv
import json
from collections.abc import Callable
from datetime import datetime
from typing import Any

import jsonschema
import pytest
from msgspec.structs import replace

from pytest_gpumem.records.device import DeviceFacts
from pytest_gpumem.records.footprint import Footprint, MemoryUse
from pytest_gpumem.records.row import Comparison, Row
from pytest_gpumem.records.what_ran import Step, what_ran
from pytest_gpumem.reporting.conclusion import Run
from pytest_gpumem.reporting.output_formats import as_csv, as_json

MakeRow = Callable[..., Row]

NAME = {"type": "string", "minLength": 1}
ENTRIES: dict[str, Any] = {
    "type": "array",
    "items": {
        "type": "object",
        "properties": {
            "name": NAME,
            "unit": NAME,
            "value": {"type": "number"},
            "range": NAME,
            "extra": NAME,
        },
        "required": ["name", "unit", "value"],
        "additionalProperties": False,
    },
}
"""`BenchmarkResult` of github-action-benchmark 1.22, from which it makes a chart for each name."""

FOOTPRINT = Footprint(
    3 << 20,
    uses=(MemoryUse("CuPy", "device", peak=3 << 20, kept=4096, reserved=1 << 20, allocations=7),),
    watched=("CuPy",),
)
RAN = what_ran(
    [
        Step("kernel", "triad", code="1", registers=24, local=16),
        Step("copy", "HtoD", nbytes=512),
        Step("synchronisation", "stream"),
    ],
    {},
)
FIGURES = {
    "peak_bytes": 3 << 20,
    "kept_bytes": 4096,
    "reserved_bytes": 1 << 20,
    "allocations": 7,
    "kernels": 1,
    "copies": 1,
    "copied_bytes": 512,
    "waits": 1,
    "registers": 24,
    "spill_bytes": 16,
    "moved_bytes": 768 << 20,
}
"""Of a triad over 768 MiB with `FOOTPRINT` and `RAN`."""


@pytest.fixture
def run(make_row: MakeRow, facts: DeviceFacts) -> Run:
    """A row of everything, one of memory alone, one of a test that failed by itself, and one under a profiler."""
    comparison = Comparison(0.02, 0.01, processes=3)
    whole = replace(
        make_row(what_ran=RAN, label="warm", comparison=comparison),
        footprint=FOOTPRINT,
        extra={"elements/s": 7.5},
    )
    memory = replace(make_row("t.py::test_memory", measured=False), footprint=FOOTPRINT)
    broken = replace(make_row("t.py::test_broken"), failed=True, test_error=True)
    return Run(
        [whole, memory, broken, make_row("t.py::test_profiled", profiled=True)],
        facts,
        {},
        "2026-11-20T18:00:00+00:00",
        "0c0de00",
    )


def lines(run: Run) -> list[dict[str, str]]:
    return list(csv.DictReader(as_csv(run).splitlines()))


def test_csv_has_a_line_for_each_row_in_si_units(run: Run) -> None:
    whole, memory, broken, _ = found = lines(run)
    assert [one["key"] for one in found] == [row.key for row in run.rows]
    assert {name: int(whole[name]) for name in FIGURES} == FIGURES
    assert float(whole["latency_s"]) == pytest.approx(268.3e-6, rel=1e-3)
    assert float(whole["bandwidth_bytes_per_s"]) == pytest.approx((768 << 20) / 268.3e-6, rel=1e-3)
    shares = [float(whole[name]) for name in ("change", "reach", "elements/s")]
    assert shares == [0.02, 0.01, 7.5]
    assert (memory["latency_s"], memory["kept_bytes"], memory["elements/s"]) == ("", "4096", "")
    assert (broken["failed"], broken["verdict"]) == ("True", "PASS")
    # Lines of many runs make one table: each says of which run it is.
    assert datetime.fromisoformat(memory["utc"]) == datetime.fromisoformat(run.utc)
    assert {(one["revision"], one["gpu"], one["simulated"]) for one in found} == {
        ("0c0de00", run.facts.key, "False")
    }


def test_github_action_benchmark_gets_the_figures_of_which_less_is_better(run: Run) -> None:
    found = json.loads(as_json(run))
    jsonschema.Draft202012Validator(ENTRIES).validate(found)
    values = {one["name"]: one["value"] for one in found}
    assert len(values) == len(found)
    assert {(one["unit"], one["name"].split()[-3]) for one in found if one["unit"] != "bytes"} == {
        ("us", "latency"),
        *(("count", name) for name in ("allocations", "kernels", "copies", "waits", "registers")),
    }
    whole, memory = (row.key for row in run.rows[:2])
    for name, value in FIGURES.items():
        assert values[f"{whole} {name} @ {run.facts.key}"] == value
    assert values[f"{whole} latency @ {run.facts.key}"] == pytest.approx(268.3, rel=1e-3)
    assert values[f"{memory} kept_bytes @ {run.facts.key}"] == 4096
    assert not [
        name
        for name in values
        if "bandwidth" in name or "elements" in name or "broken" in name or "profiled" in name
    ]
