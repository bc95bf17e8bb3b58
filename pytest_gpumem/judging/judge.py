"""The judge: what follows from a measurement, its limits and its reference. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence

from msgspec import UNSET
from msgspec.structs import replace

from pytest_gpumem.judging import regression
from pytest_gpumem.judging.finding import Finding, Judgement, basis, counted, find, of_limit
from pytest_gpumem.judging.latencies import WIDEST
from pytest_gpumem.judging.limits import STEPS, absolute, physical
from pytest_gpumem.judging.regression import NAME, Runs
from pytest_gpumem.limits import OF_MEASUREMENT
from pytest_gpumem.outcomes import Code, Outcome
from pytest_gpumem.records import what_ran
from pytest_gpumem.records.device import DeviceFacts
from pytest_gpumem.records.measurement import NOTHING_RAN, Limits, Measurement, Repeat
from pytest_gpumem.records.row import LimitResult, Row, Verdict
from pytest_gpumem.units import format_share, format_time


def judge(
    measurement: Measurement,
    limits: Limits,
    facts: DeviceFacts,
    runs: Runs = (),
    *,
    why_new: str | None = None,
    measured_differently: bool = False,
    siblings: Mapping[str, Measurement] | None = None,
    evidence: bool = True,
) -> Judgement:
    """Judge one measurement at its test's end.

    `max_regression` has a finding only if it fails grossly, or has nothing to compare with. Else
    the row waits: the screen judges it at the session's end.
    `runs`: the reference of its row, oldest first.
    `why_new`: why there is none.
    `measured_differently`: there is none because its runs were measured in another way.
    `siblings`: the other measurements of its test by label, for `faster_than`.
    `evidence`: let the same machine code narrow what noise may hide.
    Raises `QuantityError`: a limit that cannot be read.
    """
    past = [run for _, run in runs]
    machine, timing = ", ".join(conditions(measurement)), ", ".join(doubts(measurement))
    if machine or timing:
        if machine:
            doubt = find(Outcome.UNDECIDED, "conditions", Code.CONDITIONS, doubts=machine)
        else:
            doubt = find(Outcome.UNDECIDED, "unreliable", Code.CONDITIONS, doubts=timing)
        # What runs does not depend on the conditions.
        exact = list(absolute(measurement, limits, facts, past=past, names=STEPS))
        return Judgement([doubt, *exact] if _judges_time(limits) else exact)
    findings = [
        *physical(measurement, facts),
        *absolute(measurement, limits, facts, siblings, past),
    ]
    noise = measurement.noise
    if noise is not None and noise > WIDEST and _judges_time(limits):
        words = {"noise": format_share(noise), "basis": basis(measurement)}
        findings.insert(0, find(Outcome.UNDECIDED, "too wide", Code.NOISY, **words))
    run = None
    if runs:
        run = regression.against_reference(measurement, runs, evidence=evidence)
    if limits.max_regression is not None:
        finding = _regression(run, limits, why_new, measured_differently)
        if finding is not None:
            findings.append(of_limit(NAME, finding))
    return Judgement(findings, None if run is None else run.comparison)


def _regression(
    run: regression.ComparedRun | None, limits: Limits, why_new: str | None, differently: bool
) -> Finding | None:
    """Return the finding about `max_regression` at the test's end; None if the row waits."""
    if run is not None:
        return regression.at_the_tests_end(run, limits)
    limit = f"{NAME} {limits.max_regression} ({limits.origin.get(NAME, 'limit')})"
    why = why_new or "the baseline holds no such row"
    if differently:
        # The change of how a test is measured may have made it slower too.
        code = Code.MEASURED_DIFFERENTLY
        return find(Outcome.UNDECIDED, "measured differently", code, limit=limit, changed=why)
    return find(Outcome.NEW, "no history", Code.NO_BASELINE, limit=limit, why=why)


def _judges_time(limits: Limits) -> bool:
    """True unless all limits are on exact counts of a launch; without a limit the time counts."""
    given = [name for name in OF_MEASUREMENT if getattr(limits, name) is not None]
    return not given or any(name not in STEPS for name in given)


# Whether a measurement can be judged

BUSY = 0.25  # share of the looks at which other work may keep the device busy; choice
CLOCKS_APART = 0.01  # least difference, as a share, of clocks that differ; choice


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
        yield f"{outside} of its work run on a stream that the timed one does not wait for"
    if measurement.work_seen is False:
        yield (
            "no work was seen on the timed stream, on a default one or on the device: "
            "the time may be the host's alone"
        )
    if measurement.latency <= NOTHING_RAN * measurement.floor:
        yield (
            f"{format_time(measurement.latency)} is hardly longer than two events with nothing "
            f"between ({format_time(measurement.floor)}), as if nothing was launched on the timed "
            "stream"
        )


def how(measurement: Measurement) -> tuple[str, str]:
    """Return the target and the sampler: only rows that agree in both are compared."""
    return measurement.target, measurement.sampler


def comparable(measurement: Measurement, past: Measurement) -> bool:
    """True if both have the same mode, target and sampler, and the past one no profiler."""
    return past.mode == measurement.mode and how(past) == how(measurement) and not past.profiled


def clocks_agree(clock: float, other: float) -> bool:
    """True if two clocks, in hertz, differ by no more than a step."""
    return abs(clock - other) < CLOCKS_APART * max(clock, other)


# Whether a test fails


def is_failure(judged: Verdict | Finding | LimitResult, strict: bool) -> bool:
    """True if a test with this verdict fails: on FAIL, and under `strict` on every doubt."""
    if judged.outcome is Outcome.FAIL:
        return True
    return strict and not judged.outcome.quiet and judged.outcome is not Outcome.ACCEPTED


def failing_in_themselves(rows: Sequence[Row], strict: bool) -> set[str]:
    """Return the node ids of tests that fail by an assertion or an error of their own.

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

    A note lists the processes that do not count, with the reason. If conditions spoilt this
    process, or most others measured in another way, the first of them takes its place.
    `further`: rows of each further process by their key.
    """
    processes: list[Measurement | None] = [measurement]
    for rows in further:
        processes.append(rows[key].measurement if key in rows else None)
    fit = {}
    for index, process in enumerate(processes):
        if process is not None and not any(unreliable(process)):
            fit[index] = _way(process)
    ways = Counter(fit.values())
    usual = [index for index, way in fit.items() if ways[way] == max(ways.values())]
    first = usual[0] if usual else 0
    chosen = processes[first] or measurement
    ran = ran_in_all([processes[index] or measurement for index in fit])
    chosen = replace(chosen, what_ran=ran or measurement.what_ran)
    repeats, left_out = list[Repeat](), list[str]()
    for index, process in enumerate(processes):
        if index == first:
            continue
        why = _unlike(chosen, process)
        if why is not None:
            left_out.append(f"process {index + 1} of {len(processes)} is left out: {why}")
        elif process is not None:
            repeats.append(process.repeat)
    return replace(chosen, further=tuple(repeats), notes=(*chosen.notes, *left_out))


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
    return (*how(measurement), measurement.mode)


def _unlike(measurement: Measurement, other: Measurement | None) -> str | None:
    """Return why another process's measurement cannot be averaged with this; None if it can."""
    if other is None:
        return "it has no such row"
    if _way(other) != _way(measurement):
        return f"it measured {', '.join(_way(other))}"
    return ", ".join(unreliable(other)) or None
