"""One side's evidence: what its processes measured and a profiler counted, and the file that holds both.

The file is that of `--benchmark-json` as far as this plugin writes it, with a further key `profiles`: so `gpumem compare` reads it too,
and any file of results is evidence, with fewer counters.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from msgspec.structs import replace

from pytest_gpumem.baselines.result_sets import SideError, merged, side
from pytest_gpumem.explain.figures import Evidence
from pytest_gpumem.outcomes import Outcome
from pytest_gpumem.records.device import DeviceFacts
from pytest_gpumem.records.measurement import Limits, Measurement
from pytest_gpumem.records.profile import TestProfile, profiles_from_json, profiles_to_json
from pytest_gpumem.records.row import Row
from pytest_gpumem.records.schema import SchemaError, document, document_from_json
from pytest_gpumem.records.verdict import Verdict


class ExplainError(Exception):
    """A call that cannot be carried out as it stands: one line with the value and what is accepted."""


class NothingMeasured(Exception):
    """There is nothing to explain, because a side measured nothing: one line with the cause."""


@dataclass(frozen=True)
class Side:
    """Everything that is known of one side."""

    name: str
    """For people."""
    facts: DeviceFacts
    """The device that it ran on."""
    measured: Mapping[str, Measurement]
    """By row key; the processes beyond the newest are its `further`."""
    nodeids: Mapping[str, str]
    """By row key."""
    profiles: Mapping[str, TestProfile] = field(default_factory=dict)
    """By row key, where Nsight Compute counted."""
    traces: Mapping[str, TestProfile] = field(default_factory=dict)
    """By row key, where Nsight Systems traced."""
    notes: tuple[str, ...] = ()
    """What a reader must know, such as why nothing was counted."""

    def evidence(self, key: str) -> Evidence:
        """Of one measurement."""
        return Evidence(self.measured[key], self.facts, self.profiles.get(key), self.traces.get(key))


def together(rows: Sequence[Row]) -> Measurement:
    """The processes of one row as one measurement: the newest, with the others' medians as its `further`.

    Where one process saw what a launch consists of and the newest did not, that stays.
    """
    found = [row.measurement for row in rows if row.measurement is not None]
    newest, others = found[-1], found[:-1]
    alike = [one for one in others if (one.mode, one.sampler, one.target) == (newest.mode, newest.sampler, newest.target)]
    further = tuple(repeat for one in alike for repeat in (one.repeat, *one.further))
    seen = [one.activity for one in reversed(found) if one.activity is not None and one.activity.not_counted is None]
    counts = [one.migrations for one in reversed(found) if one.migrations is not None and one.migrations.launch is not None]
    return replace(
        newest,
        further=(*newest.further, *further),
        activity=seen[0] if seen else newest.activity,
        migrations=counts[0] if counts else newest.migrations,
    )


def load(given: str) -> Side:
    """The evidence in a file, a folder of files or a quoted pattern, as `gpumem compare` takes them.

    A single file of results is taken as it is, throttled rows and those of failed tests too: what is wrong with them may be the cause.

    Raises:
        ExplainError: nothing there, or a file that cannot be used.
    """
    try:
        found = side(given)
    except SideError as error:
        raise ExplainError(str(error)) from None
    if len(found.files) == 1 and (whole := _results(given, found.files[0].path)) is not None:
        return whole
    if len(found.devices) != 1:
        raise ExplainError(f"{given}: holds results of {len(found.devices)} devices; accepted are those of one")
    (facts,) = found.devices.values()
    seen = [one for file in found.files for one in _profiles(file.path)]
    profiles, traces = ({one.key: one for one in seen if (one.tool == "nsys") is traced} for traced in (False, True))
    measured = {key: merged(rows) for key, rows in found.rows.items()}
    return Side(given, facts, measured, {key: rows[-1].nodeid for key, rows in found.rows.items()}, profiles, traces)


def _results(given: str, path: Path) -> Side | None:
    """All rows of a file of results; None of another file."""
    plain = json.loads(path.read_bytes())
    if "gpumem" not in plain:
        return None
    found = document_from_json(plain["gpumem"])
    rows = {row.key: row for row in found.rows if row.measurement is not None and not row.measurement.profiled}
    measured = {key: row.measurement for key, row in rows.items() if row.measurement is not None}
    seen = _profiles(path)
    profiles, traces = ({one.key: one for one in seen if (one.tool == "nsys") is traced} for traced in (False, True))
    return Side(given, found.device, measured, {key: row.nodeid for key, row in rows.items()}, profiles, traces)


def _profiles(path: Path) -> tuple[TestProfile, ...]:
    plain = json.loads(path.read_bytes())  # a side was made of it, so it is JSON and not too large
    if not isinstance(plain, dict) or "profiles" not in plain:
        return ()
    try:
        return profiles_from_json(plain["profiles"])
    except SchemaError as error:
        raise ExplainError(f"{path}: $.profiles{str(error).removeprefix('$')}") from None


def to_json(one: Side, keys: Sequence[str], *, utc: str) -> dict[str, Any]:
    """The file of some measurements of a side.

    Args:
        one: the side.
        keys: of the measurements.
        utc: when, as ISO 8601.
    """
    verdict = Verdict(Outcome.PASS, "evidence for an explanation: no limit was judged", simulated=one.facts.simulated)
    rows = [Row(one.nodeids[key], Limits(), verdict, one.measured[key], one.measured[key].label) for key in keys]
    profiles = [seen[key] for seen in (one.profiles, one.traces) for key in keys if key in seen]
    return {
        "datetime": utc,
        "version": "gpumem explain",
        "gpumem": document(one.facts, rows, {"explain": True}),
        "profiles": profiles_to_json(profiles),
    }
