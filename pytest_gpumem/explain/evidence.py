"""The evidence of one side: measurements of its processes, profiles, and the file of both.

The file has the layout of `--benchmark-json` and the further key `profiles`. So `gpumem compare` reads it too, and any file of results is
evidence without counters.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from msgspec.structs import replace

from pytest_gpumem.baselines.result_sets import SideError, merged, side
from pytest_gpumem.explain.figures import Evidence
from pytest_gpumem.outcomes import Outcome
from pytest_gpumem.records.device import DeviceFacts
from pytest_gpumem.records.footprint import Footprint
from pytest_gpumem.records.measurement import Limits, Measurement
from pytest_gpumem.records.profile import TestProfile
from pytest_gpumem.records.row import Row, Verdict
from pytest_gpumem.records.schema import SchemaError, document, document_from_json, profiles_from_json, profiles_to_json


class ExplainError(Exception):
    """A call that cannot be carried out: one line with the value and what is accepted."""


class NothingMeasured(Exception):
    """A side measured nothing, so there is nothing to explain: one line with the cause."""


@dataclass(frozen=True)
class SideEvidence:
    """All evidence of one side."""

    name: str
    """For people."""
    facts: DeviceFacts
    """The device."""
    measured: Mapping[str, Measurement]
    """By row key; earlier processes are `further` of the newest."""
    tests: Mapping[str, tuple[str, str]]
    """By row key: pytest's id of the test, and the label."""
    profiles: Mapping[str, TestProfile] = field(default_factory=dict)
    """By row key, from Nsight Compute."""
    traces: Mapping[str, TestProfile] = field(default_factory=dict)
    """By row key, from Nsight Systems."""
    notes: tuple[str, ...] = ()
    """Sentences for a reader, such as why nothing was counted."""
    footprints: Mapping[str, Footprint] = field(default_factory=dict)
    """By row key: the memory of the newest process; none where results of several files are taken together."""

    def evidence(self, key: str) -> Evidence:
        """Of one measurement."""
        return Evidence(self.measured[key], self.facts, self.profiles.get(key), self.traces.get(key))


def together(rows: Sequence[Row]) -> Measurement:
    """The processes of one row as one measurement: the newest, with the medians of the others as its `further`.

    If the newest did not record what the launch ran, its activity or its pages, those of an earlier process stay.
    """
    found = [row.measurement for row in rows if row.measurement is not None]
    newest, others = found[-1], found[:-1]
    alike = [one for one in others if (one.mode, one.sampler, one.target) == (newest.mode, newest.sampler, newest.target)]
    further = tuple(repeat for one in alike for repeat in (one.repeat, *one.further))
    seen = [one.activity for one in reversed(found) if one.activity is not None and one.activity.not_counted is None]
    known = [one.what_ran for one in reversed(found) if one.what_ran is not None and one.what_ran.order]
    counts = [one.migrations for one in reversed(found) if one.migrations is not None and one.migrations.launch is not None]
    return replace(
        newest,
        further=(*newest.further, *further),
        activity=seen[0] if seen else newest.activity,
        migrations=counts[0] if counts else newest.migrations,
        what_ran=known[0] if known else newest.what_ran,
    )


def load(given: str) -> SideEvidence:
    """The evidence in a file, a folder of files or a quoted pattern, as for `gpumem compare`.

    Of a single file all rows count, also throttled ones and those of failed tests: their fault may be the cause.
    Raises `ExplainError`: there is no file, or one that cannot be used.
    """
    try:
        found = side(given)
    except SideError as error:
        raise ExplainError(str(error)) from None
    profiles = [one for file in found.files for one in _profiles(file.path)]
    counted, traced = ({one.key: one for one in profiles if (one.tool == "nsys") is traced} for traced in (False, True))
    if len(found.files) == 1 and "gpumem" in (plain := json.loads(found.files[0].path.read_bytes())):
        results = document_from_json(plain["gpumem"])
        rows = {row.key: row for row in results.rows if row.measurement is not None and not row.measurement.profiled}
        measured = {key: row.measurement for key, row in rows.items() if row.measurement is not None}
        tests = {row.key: (row.nodeid, row.label) for row in results.rows}
        return SideEvidence(given, results.device, measured, tests, counted, traced, footprints=footprints_of(results.rows))
    if len(found.devices) != 1:
        raise ExplainError(f"{given}: holds results of {len(found.devices)} devices; accepted are those of one")
    (facts,) = found.devices.values()
    measured = {key: merged(rows) for key, rows in found.rows.items()}
    tests = {key: (rows[-1].nodeid, rows[-1].label) for key, rows in found.rows.items()}
    return SideEvidence(given, facts, measured, tests, counted, traced)


def footprints_of(rows: Iterable[Row]) -> dict[str, Footprint]:
    """The footprints of some rows by key, of the last where there are several."""
    return {row.key: row.footprint for row in rows if row.footprint is not None}


def _profiles(path: Path) -> tuple[TestProfile, ...]:
    plain = json.loads(path.read_bytes())  # `side` has checked that it is JSON of a sensible size
    if not isinstance(plain, dict) or "profiles" not in plain:
        return ()
    try:
        return profiles_from_json(plain["profiles"])
    except SchemaError as error:
        raise ExplainError(f"{path}: $.profiles{str(error).removeprefix('$')}") from None


def to_json(one: SideEvidence, keys: Sequence[str], *, utc: str) -> dict[str, Any]:
    """The file of some measurements of a side. `keys`: of the measurements."""
    verdict = Verdict(Outcome.PASS, "evidence for an explanation: no limit was judged", simulated=one.facts.simulated)
    rows = []
    for key in keys:
        nodeid, label = one.tests[key]
        rows.append(Row(nodeid, Limits(), verdict, one.measured.get(key), label, footprint=one.footprints.get(key)))
    profiles = [profiles[key] for profiles in (one.profiles, one.traces) for key in keys if key in profiles]
    return {
        "datetime": utc,
        "version": "gpumem explain",
        "gpumem": document(one.facts, rows, {"explain": True}),
        "profiles": profiles_to_json(profiles),
    }
