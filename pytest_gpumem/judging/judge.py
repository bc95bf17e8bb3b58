"""Whether a measurement can be judged, whether a test fails, and the processes of a run. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from msgspec.structs import replace

from pytest_gpumem.judging.finding import known, with_verdict
from pytest_gpumem.judging.what_ran import merged_record
from pytest_gpumem.outcomes import Outcome
from pytest_gpumem.records.measurement import Measurement, Repeat
from pytest_gpumem.records.row import LimitResult, Row, Verdict
from pytest_gpumem.records.what_ran import WhatRan
from pytest_gpumem.units import counted, format_share, format_time

NOTHING_RAN = 1.5
"""Latency over `floor` up to which nothing ran between two events; recorded: an empty kernel takes
2.6 times the floor on an H100."""
BUSY = 0.25  # share of the looks at which other work may keep the device busy; choice


def unreliable(measurement: Measurement) -> Iterator[str]:
    """Yield why a measurement cannot be judged."""
    yield from conditions(measurement)
    yield from doubts(measurement)


def conditions(measurement: Measurement) -> Iterator[str]:
    """Yield the conditions of the machine that forbid a judgement."""
    if measurement.profiled:
        yield "a profiler was attached"
    last = measurement.conditions[1]  # those before it are of samples that were discarded
    if last.throttle_reasons:
        clock = ""
        if last.sm_clock_hz is not None:
            clock = f" at {last.sm_clock_hz / 1e6:.0f} MHz"
        yield f"throttled at the last samples ({', '.join(last.throttle_reasons)}{clock})"
    during = measurement.during
    if measurement.discarded >= len(measurement.samples):
        reasons = "" if during is None else f" ({', '.join(during.throttle_reasons or ())})"
        taken = counted(measurement.discarded, "sample")
        yield f"{taken} taken under throttling{reasons}, {len(measurement.samples)} left"
    others = [seen.other_processes or 0 for seen in measurement.conditions]
    if during is not None:
        others.append(during.other_processes or 0)
    if max(others):
        yield f"{counted(max(others), 'other process')} on the device"
    if measurement.launches_wait:
        yield "CUDA_LAUNCH_BLOCKING is set, so that every launch waits for the device"
    if measurement.busy > BUSY:
        busy = format_share(measurement.busy)
        yield f"other work kept the device busy at {busy} of the looks between the samples"


def doubts(measurement: Measurement) -> Iterator[str]:
    """Yield why a measured time may not be that of the work."""
    if not measurement.work_seen:
        yield "no work was seen on the timed stream: the time may be the host's alone"
    if measurement.latency <= NOTHING_RAN * measurement.floor:
        yield (
            f"{format_time(measurement.latency)} is hardly longer than two events with nothing "
            f"between ({format_time(measurement.floor)}), as if nothing was launched on the timed "
            "stream"
        )


# Whether a test fails


def is_failure(judged: Verdict | LimitResult, strict: bool) -> bool:
    """True if a test with this verdict fails: on FAIL, and under `strict` on every doubt."""
    if judged.outcome is Outcome.FAIL:
        return True
    return strict and not judged.outcome.quiet and judged.outcome is not Outcome.ACCEPTED


def failing_in_themselves(rows: Sequence[Row]) -> set[str]:
    """Return the node ids of tests that fail by an assertion or an error, and not by a verdict."""
    # A strict session fails doubts too.
    by_verdict = {row.nodeid for row in rows if is_failure(row.verdict, strict=True)}
    failing = set()
    for row in rows:
        if row.test_error or (row.failed and row.nodeid not in by_verdict):
            failing.add(row.nodeid)
    return failing


def failed_before(rows: Sequence[Row], attempts: Sequence[Sequence[Row]]) -> dict[str, Row]:
    """Return by key the rows whose FAIL of an earlier attempt is kept: a rerun clears none."""
    now, kept = {row.key: row for row in rows}, dict[str, Row]()
    for number, attempt in enumerate(attempts):
        for before in attempt:
            row = kept.get(before.key) or now.get(before.key)
            failed = before.verdict.outcome is Outcome.FAIL and before.measured_something
            if failed and (row is None or row.verdict.outcome is not Outcome.FAIL):
                first, *findings = known(before)
                first = replace(first, reason=f"FAIL in attempt {number}: {first.reason}")
                verdict = with_verdict(before, [first, *findings]).verdict
                differences = before.differences
                kept[before.key] = replace(row or before, verdict=verdict, differences=differences)
    return kept


# Several processes of a run


def merged(measurement: Measurement, key: str, further: Sequence[Mapping[str, Row]]) -> Measurement:
    """Return a measurement with those of further processes, each with its rows by key.

    A note names each process that does not count, with the reason.
    """
    alike, left_out = [measurement], list[str]()
    for number, rows in enumerate(further, 2):
        process = rows[key].measurement if key in rows else None
        if process is None:
            why = "it has no such row"
        elif _way(process) != _way(measurement):
            why = f"it measured {', '.join(_way(process))}"
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


def _way(measurement: Measurement) -> tuple[str, ...]:
    return measurement.target, measurement.sampler, measurement.mode


def _ran_in_all(processes: Sequence[Measurement]) -> WhatRan | None:
    """Return what all processes ran; None if no process recorded it."""
    records = []
    for process in processes:
        if process.what_ran is not None and process.what_ran.not_watched is None:
            records.append(process.what_ran)
    if not records:
        return None
    merged = merged_record(records)
    if merged is not None:
        return merged
    why = "processes of the same run did not run the same"
    return replace(records[0], not_watched=why)
