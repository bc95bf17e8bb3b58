"""Makes and judges the rows of tests, and raises the failures of their limits."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

import pytest
from msgspec.structs import replace

from pytest_gpumem.baselines import verdicts
from pytest_gpumem.baselines.acceptances import with_accepted_counts
from pytest_gpumem.baselines.references import times_of
from pytest_gpumem.judging.differences import merged_record, row_differences
from pytest_gpumem.judging.finding import (
    failed_before,
    in_doubt,
    is_failure,
    unjudged,
    with_verdict,
)
from pytest_gpumem.judging.limits import unreliable
from pytest_gpumem.limits import AT_THE_END, LIMITS
from pytest_gpumem.outcomes import Code, Outcome
from pytest_gpumem.plugin.footprints import WatchedTest, limited
from pytest_gpumem.plugin.running import fail
from pytest_gpumem.plugin.session import BY_LIMITS_ATTRIBUTE, GpuSession, state_of
from pytest_gpumem.printable import printable
from pytest_gpumem.records.device import DeviceFacts
from pytest_gpumem.records.footprint import Footprint, Waits
from pytest_gpumem.records.limits import Limits
from pytest_gpumem.records.measurement import Measurement, Repeat
from pytest_gpumem.records.row import HOST, LimitResult, Row
from pytest_gpumem.records.what_ran import WhatRan
from pytest_gpumem.reporting.details import failure_text
from pytest_gpumem.reporting.row import properties
from pytest_gpumem.settings import both_limits
from pytest_gpumem.units import counted

if TYPE_CHECKING:
    from pytest_gpumem.plugin.gpu_benchmark import GpuTest


def judge_body(item: pytest.Item, error: BaseException | None, session: GpuSession) -> None:
    """Judge a test whose body has ended, early by `error`. Raises its failure by its rows."""
    state = state_of(item)
    test: GpuTest | None = state.test
    skip = error if isinstance(error, pytest.skip.Exception) else None
    caught = None
    if test is not None:
        test.judged = True
        if test.wrong is not None and not test.subtest_failed and (error is None or skip):
            from pytest_gpumem.measuring.target import WrongResult

            caught = error = WrongResult(f"{test.wrong} (the test caught this error)")
            skip = None
    rows = _rows(item, test, session, skip)
    strict = session.settings.strict
    failed = (error is not None and skip is None) or (test is not None and test.subtest_failed)
    failed = failed or any(is_failure(row.verdict, strict) for row in rows)
    rows = [replace(row, failed=failed) for row in rows]
    if failed and test is not None and test.entries is not None and not test.measurements:
        rows = [unmeasured(item, session, error)]
    state.rows = rows
    if caught is not None:
        raise caught
    failing = [row for row in rows if is_failure(row.verdict, strict)]
    if failing and error is None:
        _fail(item, failing, session)


def judge_the_end(item: pytest.Item, watched: WatchedTest) -> None:
    """Judge a test again with its whole footprint. Raises its failure, if none is reported yet."""
    session = watched.session
    state = state_of(item)
    rows = state.rows
    judged, failing = [], []
    for row in rows:
        whole = _whole(row, watched)
        if whole is not row and not row.failed:  # what a failed test keeps is no finding
            whole = _judged(whole, session, rows)
            if is_failure(whole.verdict, session.settings.strict):
                whole = replace(whole, failed=True)
                failing.append(whole)
        judged.append(whole)
    state.rows = judged
    if failing:
        _fail(item, failing, session)


def _whole(row: Row, watched: WatchedTest) -> Row:
    """A row with the whole footprint of its test; the same row if it is of a part."""
    footprint = watched.whole
    if footprint is None or row.footprint is None or row.label:
        return row
    if watched.trouble is None:
        peaks, kept = row.footprint.further_peaks, row.footprint.further_kept
        return replace(row, footprint=replace(footprint, further_peaks=peaks, further_kept=kept))
    if not limited(row.limits, AT_THE_END):
        return row
    unread = footprint.not_watched  # what was read before stays
    whole = replace(row.footprint, watched=(), not_watched=unread, ended=True)
    return replace(row, footprint=whole)


def _rows(
    item: pytest.Item, test: GpuTest | None, session: GpuSession, skip: BaseException | None
) -> list[Row]:
    """The rows of a test at its body's end with their verdicts."""
    rows = []
    if test is not None:
        further = [process.rows for process in session.further]
        for label, (measured, limits, extra) in test.measurements.items():
            row = new_row(session, item.nodeid, limits, label)
            measurement = merged(measured, row.key, further) if further else measured
            rows.append(replace(row, measurement=measurement, extra=dict(extra)))
    if skip is not None:
        why = f"the test skipped after this measurement: {skip}"
        return [in_doubt(row, why) for row in rows]
    watched: WatchedTest | None = state_of(item).watched
    if watched is not None and session.lost_in is None:
        rows = attached(rows, watched.footprint(ended=False), watched)
    return [_judged(row, session, rows) for row in rows]


def attached(rows: Sequence[Row], footprint: Footprint, watched: WatchedTest) -> list[Row]:
    """The rows of a test with its footprint and those of its parts."""
    session = watched.session
    by_label = {row.label: row for row in rows}
    if any(row.measurement is not None for row in rows):  # a limit on waits is on one launch then
        watched.waits = None
        footprint = replace(footprint, waits=None)
    footprints = watched.parts
    waits = footprint.waits or Waits()
    not_read = waits.not_read is not None and watched.limits.max_waits is not None
    unknown = watched.trouble is not None and limited(watched.limits)  # whether it uses the GPU
    has_row = footprint.uses or watched.limited or unknown or waits.lines or not_read
    if "" in by_label or (has_row and (watched.shown or watched.reads_waits)):
        footprints = {"": (footprint, watched.limits), **footprints}
    further = [process.rows for process in session.further]
    for label, (seen, limits) in footprints.items():
        if watched.trouble is not None and not seen.watched and not limited(limits):
            continue  # nothing was read, and nothing is judged by it
        row = by_label.get(label) or new_row(session, watched.item.nodeid, limits, label)
        all_seen = with_further(seen, row.key, further)
        by_label[label] = replace(row, limits=both_limits(row.limits, limits), footprint=all_seen)
    return list(by_label.values())


def new_row(session: GpuSession, nodeid: str, limits: Limits, label: str = "") -> Row:
    verdict = unjudged(simulated=session.facts.simulated)
    return Row(nodeid, limits, verdict, label=label, range_name=session.names.unique(nodeid))


def unmeasured(item: pytest.Item, session: GpuSession, error: BaseException | None) -> Row:
    """The row of a test that failed before anything was measured, by `error` or by a subtest."""
    cause = "a subtest failed"
    if error is not None:
        # A failure that pytest raised has a message of its own.
        parts = [] if isinstance(error, pytest.fail.Exception) else [type(error).__name__]
        parts += [line.strip() for line in str(error).strip().splitlines()[:1]]
        cause = ": ".join(parts) or "no message"
    reason = f"failed before anything was measured: {cause}"
    code = Code.DID_NOT_RUN if item.nodeid in session.unrun else None
    row = replace(new_row(session, item.nodeid, Limits()), failed=True)
    return with_verdict(row, [LimitResult("", Outcome.FAIL, code, reason)])


def _judged(row: Row, session: GpuSession, rows: Sequence[Row]) -> Row:
    if session.baseline.merged.files:
        row = with_accepted_counts(row, session.baseline.merged)
    siblings = {other.label: other.measurement for other in rows if other.measurement is not None}
    strict = session.settings.strict
    return verdicts.judged(row, session.baseline, session.facts, siblings=siblings, strict=strict)


def judge_waiting(gpu: GpuSession) -> bool:
    """Judge the rows that wait for the session's end; return whether the session fails."""
    strict = gpu.settings.strict
    failed = False
    if gpu.further:
        from pytest_gpumem.plugin.repeating import failures_elsewhere

        failed = failures_elsewhere(gpu)
    rows = list(gpu.rows)
    waiting = {row.key for row in rows if verdicts.waits(row)}
    gpu.rows.replace(verdicts.screened(rows, gpu.baseline, strict=strict, in_gate=gpu.in_gate))
    judged = [row.verdict.outcome for row in gpu.rows if row.key in waiting]
    undecided = judged.count(Outcome.UNDECIDED)
    if undecided and strict and gpu.announces:
        gpu.remark(f"--gpumem-strict: {counted(undecided, 'row')} undecided: this fails")
        return True
    return failed


def rows_of_table(session: GpuSession) -> list[Row]:
    """The rows of this plugin's table: adopted ones if they have a limit or a reference."""
    rows = []
    for row in session.rows:
        adopted = HOST in row.extra
        if not adopted or limited(row.limits, LIMITS) or session.baseline.past(row):
            rows.append(row)
    return rows


def add_properties(report: pytest.TestReport, rows: Iterable[Row], facts: DeviceFacts) -> None:
    """Give a report the properties of JUnit's file, which takes those of the last report."""
    of_rows: dict[str, object] = {}
    for row in rows:
        of_rows.update(properties(row, facts))
    others = [entry for entry in report.user_properties if entry[0] not in of_rows]
    report.user_properties = [*others, *of_rows.items()]


# The failure of a test


def _fail(item: pytest.Item, failing: Sequence[Row], session: GpuSession) -> None:
    """Raise the failure of a test by its rows."""
    if session.is_further:  # the main process judges its rows
        return
    explained = {row.key: row for row in failing}
    for row in failing:
        if row.measurement is not None:
            runs = times_of(session.baseline.reference_runs(row))
            if runs:
                differences = row_differences(row, runs[-1][1])
                explained[row.key] = replace(row, differences=differences)
    state = state_of(item)
    state.rows = [explained.get(row.key, row) for row in state.rows]
    text = failure_text(explained.values(), session.facts, whole=session.announces)
    failure = pytest.fail.Exception(text, pytrace=False)
    setattr(failure, BY_LIMITS_ATTRIBUTE, printable(failing[0].verdict.reason))
    raise failure


def fail_by_others(item: pytest.Item, report: pytest.TestReport, session: GpuSession) -> None:
    """Fail a test by a further process, or by the verdict of an earlier attempt."""
    for process in session.further:
        why = process.failure_of(item.nodeid)
        if why is not None and not report.failed:
            fail(report, why)
    state = state_of(item)
    failing = failed_before(state.rows, state.attempts)
    if not failing:
        return
    rows = {**{row.key: row for row in state.rows}, **failing}
    state.rows = [replace(row, failed=True) for row in rows.values()]
    if not report.failed:
        fail(report, failure_text(failing.values(), session.facts, whole=session.announces))
        setattr(report, BY_LIMITS_ATTRIBUTE, True)


# Several processes of a run


def merged(measurement: Measurement, key: str, further: Sequence[Mapping[str, Row]]) -> Measurement:
    """Return a measurement with those of further processes, each with its rows by key. Notes name
    the processes that do not count."""
    alike, left_out = [measurement], list[str]()
    for number, rows in enumerate(further, 2):
        process = rows[key].measurement if key in rows else None
        if process is None:
            why = "it has no such row"
        elif _method(process) != _method(measurement):
            why = f"it measured {', '.join(_method(process))}"
        else:
            why = ", ".join(unreliable(process))
        if process is not None and not why:
            alike.append(process)
        else:
            left_out.append(f"process {number} of {len(further) + 1} is left out: {why}")
    repeats = [Repeat(process.medians, process.overhead) for process in alike[1:]]
    return replace(
        measurement,
        what_ran=_ran_in_all(alike) or measurement.what_ran,
        further=tuple(repeats),
        notes=(*measurement.notes, *left_out),
    )


def _method(measurement: Measurement) -> tuple[str, ...]:
    return measurement.target, measurement.sampler, measurement.mode


def _ran_in_all(processes: Sequence[Measurement]) -> WhatRan | None:
    """Return what all processes ran; None if none recorded it."""
    records = []
    for process in processes:
        if process.what_ran is not None and process.what_ran.not_watched is None:
            records.append(process.what_ran)
    if not records:
        return None
    merged = merged_record(records)
    if merged is not None:
        return merged
    return replace(records[0], not_watched="processes of the same run did not run the same")


def with_further(footprint: Footprint, key: str, further: Iterable[Mapping[str, Row]]) -> Footprint:
    """Return a footprint with those of further processes, as `merged` does."""
    peaks, kept = list(footprint.further_peaks), list(footprint.further_kept)
    for rows in further:
        row = rows.get(key)
        if row is not None and row.footprint is not None and row.footprint.watched:
            peaks.append(row.footprint.peak)
            kept.append(row.footprint.kept)
    return replace(footprint, further_peaks=tuple(peaks), further_kept=tuple(kept))
