"""The evidence of one side: measurements of its processes and profiles, as figures of a single launch, and the file of both.

The file has the layout of `--benchmark-json` and the further key `profiles`. So `gpumem compare` reads it too, and any file of results is
evidence without counters.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from msgspec.structs import replace

from pytest_gpumem.baselines.result_sets import merged, side
from pytest_gpumem.explain.pairing import KernelGroup
from pytest_gpumem.judging.verdict import OPEN, with_verdict
from pytest_gpumem.outcomes import Outcome, UserError
from pytest_gpumem.records.device import DeviceFacts
from pytest_gpumem.records.footprint import Footprint
from pytest_gpumem.records.measurement import Conditions, Limits, Measurement, Window
from pytest_gpumem.records.migrations import PageCounts
from pytest_gpumem.records.profile import TestProfile
from pytest_gpumem.records.row import LimitResult, Row
from pytest_gpumem.records.schema import (
    SchemaError,
    document,
    document_from_json,
    profiles_from_json,
    profiles_to_json,
)
from pytest_gpumem.records.uses import Activity, CopyUse, KernelUse


@dataclass(frozen=True)
class SideFigures:
    """One measurement of one side, with the profiles of the same test, and their figures of one launch."""

    measurement: Measurement
    facts: DeviceFacts
    profile: TestProfile | None = None  # counters of a run under Nsight Compute
    trace: TestProfile | None = None  # kernels and copies of a run under Nsight Systems

    @property
    def latency(self) -> float:
        """Seconds of one launch."""
        return self.measurement.latency

    @property
    def window(self) -> Window | None:
        """The access-policy window."""
        return self.measurement.window

    @property
    def set_aside(self) -> int | None:
        """Bytes of L2 set aside, with or without a window; None if unknown."""
        if self.window is not None:
            return self.window.set_aside
        return (
            self.measurement.activity.set_aside if self.measurement.activity is not None else None
        )

    @property
    def _watched(self) -> Activity | None:
        """The launch that CUPTI watched."""
        activity = self.measurement.activity
        return activity if activity is not None and activity.not_counted is None else None

    @cached_property
    def kernels(self) -> KernelGroup:
        """The kernels of a launch in their order, as far as known; with counters if a profiler counted."""
        if self.profile is not None and self.profile.kernels:
            return _recorded(self.profile.kernels, self.profile.launches or 1)
        if self._watched is not None:
            return _recorded(self._watched.kernels, 1)
        return (
            _recorded(self.trace.kernels, self.trace.launches)
            if self.trace is not None and self.trace.launches
            else KernelGroup()
        )

    @property
    def knows_kernels(self) -> bool:
        """True if `kernels` was recorded at all."""
        return (
            self._watched is not None
            or self.trace is not None
            or bool(self.profile is not None and self.profile.kernels)
        )

    @property
    def at_once(self) -> float | None:
        """Seconds of the launch in which two kernels or more ran; None if it was not watched."""
        return None if self._watched is None else self._watched.at_once / 1e9

    @property
    def counted(self) -> bool:
        """True if a profiler counted DRAM bytes of every kernel."""
        return self.kernels.dram is not None

    @cached_property
    def copies(self) -> tuple[CopyUse, ...] | None:
        """Copies and memsets of one launch; None if they were not recorded."""
        if self._watched is not None:
            return (*self._watched.copies, *self._watched.memsets)
        trace = self.trace
        if trace is None or not trace.launches:
            return None
        return tuple(
            _copy_of_launch(copy, trace.launches) for copy in (*trace.copies, *trace.memsets)
        )

    @cached_property
    def pages(self) -> PageCounts | None:
        """Faults and migrations of managed memory during one launch; None if they were not counted."""
        return (
            self.measurement.migrations.launch if self.measurement.migrations is not None else None
        )

    @property
    def prefetched(self) -> int:
        """Bytes that moved to the device before a launch, while pages were put back."""
        migrations = self.measurement.migrations
        return (
            migrations.before.to_device
            if migrations is not None and migrations.before is not None
            else 0
        )

    @property
    def host_memory(self) -> dict[str, str]:
        """Kind of memory by name, of arguments that are not plain device memory."""
        activity = self.measurement.activity
        return dict(activity.arguments) if activity is not None else {}

    def clock(self, of: Callable[[Conditions], float | None]) -> float | None:
        """A clock in hertz while sampling: the lowest between samples, else the higher one of before and after."""
        if (
            self.measurement.during is not None
            and (seen := of(self.measurement.during)) is not None
        ):
            return seen
        known = [
            clock
            for conditions in self.measurement.conditions
            if (clock := of(conditions)) is not None
        ]
        return max(known, default=None)

    @property
    def compulsory(self) -> int | None:
        """Declared bytes of one launch to and from DRAM; None if unknown, or if they cross a link."""
        traffic = self.measurement.moved_bytes
        return None if traffic is None or traffic.link else traffic.total


def _recorded(uses: Sequence[KernelUse], launches: int) -> KernelGroup:
    return KernelGroup(tuple((use, launches) for use in uses))


def _copy_of_launch(copy: CopyUse, launches: int) -> CopyUse:
    count, nbytes, nanoseconds = (
        round(one / launches) for one in (copy.count, copy.nbytes, copy.nanoseconds)
    )
    return CopyUse(copy.kind, copy.source, copy.destination, count, nbytes, nanoseconds)


@dataclass(frozen=True)
class SideEvidence:
    """All evidence of one side."""

    name: str  # for people
    facts: DeviceFacts  # the device
    measured: Mapping[str, Measurement]  # by row key; earlier processes are `further` of the newest
    tests: Mapping[str, tuple[str, str]]  # by row key: pytest's id of the test, and the label
    profiles: Mapping[str, TestProfile] = field(
        default_factory=dict
    )  # by row key, from Nsight Compute
    traces: Mapping[str, TestProfile] = field(
        default_factory=dict
    )  # by row key, from Nsight Systems
    notes: tuple[str, ...] = ()  # sentences for a reader, such as why nothing was counted
    footprints: Mapping[str, Footprint] = field(default_factory=dict)
    """By row key: the memory of the newest process; none where results of several files are taken together."""

    def evidence(self, key: str) -> SideFigures:
        """The evidence of one measurement."""
        return SideFigures(
            self.measured[key], self.facts, self.profiles.get(key), self.traces.get(key)
        )


def together(rows: Sequence[Row]) -> Measurement:
    """The processes of one row as one measurement: the newest, with the medians of the others as its `further`. If the newest did not
    record what the launch ran, its activity or its pages, those of an earlier process stay."""
    found = [row.measurement for row in rows if row.measurement is not None]
    newest, others = found[-1], found[:-1]
    alike = [
        one
        for one in others
        if (one.mode, one.sampler, one.target) == (newest.mode, newest.sampler, newest.target)
    ]
    further = tuple(repeat for one in alike for repeat in (one.repeat, *one.further))
    seen = [
        one.activity
        for one in reversed(found)
        if one.activity is not None and one.activity.not_counted is None
    ]
    known = [
        one.what_ran for one in reversed(found) if one.what_ran is not None and one.what_ran.order
    ]
    counts = [
        one.migrations
        for one in reversed(found)
        if one.migrations is not None and one.migrations.launch is not None
    ]
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
    Raises `UserError`: there is no file, or one that cannot be used.
    """
    found = side(given)
    profiles = [one for file in found.files for one in _profiles(file.path)]
    counted, traced = (
        {one.key: one for one in profiles if (one.tool == "nsys") is traced}
        for traced in (False, True)
    )
    if len(found.files) == 1 and "gpumem" in (
        plain := json.loads(found.files[0].path.read_bytes())
    ):
        results = document_from_json(plain["gpumem"])
        rows = {
            row.key: row
            for row in results.rows
            if row.measurement is not None and not row.measurement.profiled
        }
        measured = {
            key: row.measurement for key, row in rows.items() if row.measurement is not None
        }
        tests = {row.key: (row.nodeid, row.label) for row in results.rows}
        return SideEvidence(
            given,
            results.device,
            measured,
            tests,
            counted,
            traced,
            footprints=footprints_of(results.rows),
        )
    if len(found.devices) != 1:
        raise UserError(
            f"{given}: holds results of {len(found.devices)} devices; accepted are those of one"
        )
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
        raise UserError(f"{path}: $.profiles{str(error).removeprefix('$')}") from None


def to_json(one: SideEvidence, keys: Sequence[str], *, utc: str) -> dict[str, Any]:
    """The file of some measurements of a side. `keys`: of the measurements."""
    unjudged = LimitResult(
        "", Outcome.MEASURED, None, "evidence for an explanation: no limit was judged"
    )
    rows = []
    for key in keys:
        nodeid, label = one.tests[key]
        row = Row(
            nodeid, Limits(), OPEN, one.measured.get(key), label, footprint=one.footprints.get(key)
        )
        rows.append(with_verdict(row, [unjudged], simulated=one.facts.simulated))
    profiles = [
        profiles[key] for profiles in (one.profiles, one.traces) for key in keys if key in profiles
    ]
    return {
        "datetime": utc,
        "version": "gpumem explain",
        "gpumem": document(one.facts, rows, {}),
        "profiles": profiles_to_json(profiles),
    }
