"""The judge: what follows from a measurement, its limits and its reference. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from msgspec import UNSET
from msgspec.structs import replace

from pytest_gpumem.judging import regression
from pytest_gpumem.judging.finding import basis, check_of, counted
from pytest_gpumem.judging.latencies import WIDEST
from pytest_gpumem.judging.limits import STEPS, absolute, physical
from pytest_gpumem.judging.regression import NAME, Runs
from pytest_gpumem.limits import OF_MEASUREMENT
from pytest_gpumem.outcomes import Code, Outcome
from pytest_gpumem.records import what_ran
from pytest_gpumem.records.device import DeviceFacts
from pytest_gpumem.records.measurement import NOTHING_RAN, Limits, Measurement
from pytest_gpumem.records.row import Comparison, LimitResult, Row, Verdict
from pytest_gpumem.units import format_share, format_time


class Judgement(NamedTuple):
    """The findings about a measurement."""

    findings: list[LimitResult]
    """One for each limit, and for each doubt about the whole measurement."""
    comparison: Comparison | None = None  # the change against the reference, if there is any


def judge(
    measurement: Measurement,
    limits: Limits,
    facts: DeviceFacts,
    runs: Runs = (),
    *,
    why_new: str | None = None,
    measured_differently: bool = False,
    siblings: Mapping[str, Measurement] | None = None,
) -> Judgement:
    """Judge a measurement at its test's end.

    A row without a finding about `max_regression` waits: the screen judges it at the session's
    end. At the test's end it fails grossly, or has nothing to compare with.
    `runs`: the reference of its row, oldest first.
    `why_new`: why there is none.
    `measured_differently`: there is none because its runs were measured in another way.
    `siblings`: the other measurements of its test by label, for `faster_than`.
    Raises `QuantityError`: a limit that cannot be read.
    """
    past = [run for _, run in runs]
    machine, timing = ", ".join(conditions(measurement)), ", ".join(doubts(measurement))
    if machine or timing:
        # What runs does not depend on the conditions.
        exact = list(absolute(measurement, limits, facts, past=past, names=STEPS))
        if not _judges_time(limits):
            return Judgement(exact)
        reason = f"{timing}: no limit was judged"
        if machine:
            reason = f"mend the machine: {machine}; no limit was judged"
        return Judgement([LimitResult("", Outcome.UNDECIDED, Code.CONDITIONS, reason), *exact])
    findings = []
    noise = measurement.noise
    if noise is not None and noise > WIDEST and _judges_time(limits):
        reason = (
            f"the 95 % interval is ± {format_share(noise)} of the latency, {basis(measurement)}: "
            "too wide to pass; measure more placements"
        )
        findings.append(LimitResult("", Outcome.UNDECIDED, Code.NOISY, reason))
    findings += physical(measurement, facts)
    findings += absolute(measurement, limits, facts, siblings, past)
    check = check_of(limits, NAME)
    if not runs:
        why = why_new or "the baseline holds no such row"
        if check is not None:
            new = check.measured_differently(why) if measured_differently else check.new(why)
            findings.append(new)
        return Judgement(findings)
    run = regression.against_reference(measurement, runs)
    if check is not None:
        slower = regression.at_the_tests_end(run, check)
        if slower is not None:
            findings.append(slower)
    return Judgement(findings, run.comparison)


def _judges_time(limits: Limits) -> bool:
    """True unless all limits are on exact counts of a launch; without a limit the time counts."""
    given = [name for name in OF_MEASUREMENT if getattr(limits, name) is not None]
    return not given or any(name not in STEPS for name in given)


# Whether a measurement can be judged

BUSY = 0.25  # share of the looks at which other work may keep the device busy; choice


def unreliable(measurement: Measurement) -> Iterator[str]:
    """Yield why a measurement cannot be judged."""
    yield from conditions(measurement)
    yield from doubts(measurement)


def conditions(measurement: Measurement) -> Iterator[str]:
    """Yield the conditions of the machine that forbid a judgement."""
    if measurement.profiled:
        yield "a profiler was attached"
    for when, seen in zip(("before", "after"), measurement.conditions, strict=True):
        if seen.throttle_reasons:
            clock = ""
            if seen.sm_clock_hz is not None:
                clock = f" at {seen.sm_clock_hz / 1e6:.0f} MHz"
            yield f"throttled {when} the samples ({', '.join(seen.throttle_reasons)}{clock})"
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
    if measurement.launches_wait is True:
        yield "CUDA_LAUNCH_BLOCKING is set, so that every launch waits for the device"
    if measurement.busy is not UNSET and measurement.busy > BUSY:
        busy = format_share(measurement.busy)
        yield f"other work kept the device busy at {busy} of the looks between the samples"


def doubts(measurement: Measurement) -> Iterator[str]:
    """Yield why a measured time may not be that of the work."""
    if measurement.outside is not UNSET:
        outside = format_time(measurement.outside)
        yield f"{outside} of its work run on a stream that the timed stream does not wait for"
    if measurement.work_seen is False:
        yield (
            "no work was seen on the timed stream, a default stream or the device: "
            "the time may be the host's alone"
        )
    if measurement.latency <= NOTHING_RAN * measurement.floor:
        yield (
            f"{format_time(measurement.latency)} is hardly longer than two events with nothing "
            f"between ({format_time(measurement.floor)}), as if nothing was launched on the timed "
            "stream"
        )


def comparable(measurement: Measurement, past: Measurement) -> bool:
    """True if both were measured in the same way, and the past measurement without a profiler."""
    return _way(past) == _way(measurement) and not past.profiled


# Whether a test fails


def is_failure(judged: Verdict | LimitResult, strict: bool) -> bool:
    """True if a test with this verdict fails: on FAIL, and under `strict` on every doubt."""
    if judged.outcome is Outcome.FAIL:
        return True
    return strict and not judged.outcome.quiet and judged.outcome is not Outcome.ACCEPTED


def failing_in_themselves(rows: Sequence[Row], strict: bool) -> set[str]:
    """Return the node ids of tests that fail by an assertion or an error.

    It is recorded, or no verdict explains the failure.
    """
    by_verdict = {row.nodeid for row in rows if is_failure(row.verdict, strict)}
    failing = set()
    for row in rows:
        if row.test_error is True or (row.failed and row.nodeid not in by_verdict):
            failing.add(row.nodeid)
    return failing


# Several processes of a run


def merged(measurement: Measurement, key: str, further: Sequence[Mapping[str, Row]]) -> Measurement:
    """Return a measurement with those of the same row in further processes of the run.

    A note lists the processes that do not count, with the reason.
    `further`: rows of each further process by their key.
    """
    alike, left_out = [measurement], list[str]()
    for number, rows in enumerate(further, 2):
        process = rows[key].measurement if key in rows else None
        why = _unlike(measurement, process)
        if why is not None:
            left_out.append(f"process {number} of {len(further) + 1} is left out: {why}")
        elif process is not None:
            alike.append(process)
    return replace(
        measurement,
        what_ran=ran_in_all(alike) or measurement.what_ran,
        further=tuple(process.repeat for process in alike[1:]),
        notes=(*measurement.notes, *left_out),
    )


def ran_in_all(processes: Sequence[Measurement]) -> what_ran.WhatRan | None:
    """Return what all processes of a run ran, without bytes of arguments that differ between them.

    None if no process recorded it.
    """
    records = []
    for process in processes:
        if process.what_ran is not None and process.what_ran.digest is not None:
            records.append(process.what_ran)
    if not records:
        return None
    together = what_ran.together(records)
    if together is not None:
        return together
    why = "processes of the same run did not run the same"
    return replace(records[0], digest=None, not_watched=why)


def _way(measurement: Measurement) -> tuple[str, ...]:
    return measurement.target, measurement.sampler, measurement.mode


def _unlike(measurement: Measurement, other: Measurement | None) -> str | None:
    """Return why another process's measurement cannot be averaged with this; None if it can."""
    if other is None:
        return "it has no such row"
    if _way(other) != _way(measurement):
        return f"it measured {', '.join(_way(other))}"
    return ", ".join(unreliable(other)) or None
