"""The judge: what follows from one measurement, its limits and its baseline."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from msgspec import UNSET
from msgspec.structs import replace

from pytest_gpumem.judging import screen, spread
from pytest_gpumem.judging.change import Evidence, decide_change
from pytest_gpumem.judging.finding import (
    Finding,
    Judgement,
    against,
    basis,
    counted,
    find,
    of_limit,
    window_text,
)
from pytest_gpumem.judging.limits import STEPS, absolute, physical
from pytest_gpumem.judging.screen import ALONE, Family, allowed, compared, judge_change
from pytest_gpumem.judging.spread import Difference, difference
from pytest_gpumem.limits import OF_MEASUREMENT
from pytest_gpumem.outcomes import Code, Outcome
from pytest_gpumem.records import what_ran
from pytest_gpumem.records.device import DeviceFacts
from pytest_gpumem.records.measurement import NOTHING_RAN, Limits, Measurement, Repeat
from pytest_gpumem.records.row import ENOUGH, Comparison, LimitResult, Row, Verdict
from pytest_gpumem.units import format_share, format_time, short_bytes


def judge(
    measurement: Measurement,
    limits: Limits,
    facts: DeviceFacts,
    history: Sequence[Measurement],
    *,
    no_history: str | None = None,
    siblings: Mapping[str, Measurement] | None = None,
    family: Family = ALONE,
    first: Sequence[Measurement] = (),
    evidence: bool = True,
) -> Judgement:
    """Judge one measurement.
    `history`: of the same test and label, one a run. Measurements of another mode are left out; if the others were taken differently, the
    finding is UNDECIDED.
    `no_history`: why there is no history, for NEW.
    `siblings`: the other measurements of its test by label, for `faster_than`.
    `family`: the rows of the suite that are compared with a baseline.
    `first`: the first saved runs, if the history has moved on from them.
    `evidence`: let the same machine code settle a doubt that noise alone leaves (`same_code`).
    Raises `QuantityError`: a limit that cannot be read.
    """
    if doubts := list(unreliable(measurement)):
        doubt = find(Outcome.UNDECIDED, "unreliable", Code.CONDITIONS, doubts=", ".join(doubts))
        return Judgement(_without_times(doubt, measurement, limits, facts, history))
    findings = [
        *physical(measurement, facts),
        *absolute(measurement, limits, facts, siblings, history),
    ]
    if (noise := measurement.noise) is not None and noise > spread.WIDEST and _judges_time(limits):
        findings.insert(
            0,
            find(
                Outcome.UNDECIDED,
                "too wide",
                Code.NOISY,
                noise=format_share(noise),
                basis=basis(measurement),
            ),
        )
    alike = [past for past in history if comparable(measurement, past)]
    if not alike:
        if limits.max_regression is not None:
            written = f"max_regression {limits.max_regression} ({limits.origin.get('max_regression', 'limit')})"
            findings.append(
                of_limit("max_regression", _not_compared(measurement, history, written, no_history))
            )
        return Judgement(findings)
    found, delta = difference(measurement, alike), allowed(limits.max_regression, alike)
    since = [past for past in first if comparable(measurement, past)]
    same = (
        evidence
        and not changed_work(alike[-1], measurement)
        and same_code(measurement, [*alike, *since])
    )
    comparison = replace(compared(found, delta), same_code=same)
    against_runs = _Against(measurement, alike, limits, family, found)
    if limits.max_regression is not None:
        finding, comparison = against_runs.regression(comparison, delta, since)
        findings.append(finding)
    return Judgement(findings, comparison)


@dataclass(frozen=True)
class _Against:
    """A measurement against the saved runs that it is compared with; arguments of `judge`, and what follows from them."""

    measurement: Measurement
    alike: Sequence[Measurement]
    limits: Limits
    family: Family
    found: Difference

    def regression(
        self, comparison: Comparison, delta: float, first: Sequence[Measurement]
    ) -> tuple[Finding, Comparison]:
        """The finding about `max_regression`, and the comparison with the p-value that it rests on.
        `delta`: allowed slow-down, as a share.
        `first`: the first saved runs, if there are others.
        """
        written = self.limits.max_regression or ""
        name = screen.limit_name(written, self.limits.origin.get("max_regression", "limit"), delta)
        finding = judge_change(self.measurement, self.found, comparison, delta, name, self.family)
        in_doubt = finding.code in SETTLED
        if (
            finding.outcome is not Outcome.FAIL
            and first
            and (crept := self._crept(first, delta)) is not None
        ):
            since_first = compared(crept, delta)
            creep = screen.judge_creep(
                self.measurement, crept, since_first, delta, name, self.family
            )
            in_doubt = creep.code is Code.NOISY
            if creep.outcome.rank <= finding.outcome.rank:
                finding = creep
            comparison = replace(
                comparison,
                p_value=since_first.p_value,
                since_first=since_first.delta,
                since_first_low=since_first.low,
            )
        if in_doubt and self._only_noise(comparison, delta):
            words = {"limit": name, "seen": against(comparison), "but": _left_out(self.alike)}
            finding = find(
                Outcome.PASS,
                "same code",
                Code.SAME_CODE,
                **words,
                catches=format_share(comparison.catches),
            )
        return of_limit(
            "max_regression", _same_work(self.measurement, self.alike[-1], finding)
        ), comparison

    def _crept(self, first: Sequence[Measurement], delta: float) -> Difference | None:
        """This run and the two before it less the first ones; None unless both it and their mean are above the limit."""
        newest = [
            self.measurement,
            *(past for past in self.alike[1 - ENOUGH :] if past not in first),
        ]
        crept, limit = spread.since(self.found, newest, first), math.log1p(delta)
        return (
            crept
            if min(crept.log, spread.since(self.found, newest[:1], first).log) > limit
            else None
        )

    def _only_noise(self, comparison: Comparison, delta: float) -> bool:
        """True if the same machine code ran, and the row is nearly within its limit and does not look slower."""
        low = self.found.log - self.found.variance(seen=True).reach(screen.LOWER)
        nearly = low <= 0 and screen.below(self.found, delta)
        return (
            decide_change(
                Evidence(slower=False, within=False, same_code=comparison.same_code and nearly)
            )
            is Outcome.PASS
        )


BUSY = 0.25  # share of the looks at which other work may keep the device busy; choice: medians of samples do not notice as much
CLOCKS_APART = 0.01  # least difference, as a share, of clocks that do not agree; choice: one step of 15 MHz is less
SETTLED = (Code.NOISY, Code.TOO_FEW_RUNS)  # codes of a doubt that the same machine code settles


def ran_the_same(one: Measurement, *past: Measurement) -> bool:
    """True if a measurement ran the same machine code in the same way as each past one (`what_ran.ran_the_same`). Never for rows by the
    host's clock: what the host does between its calls was not watched.
    """
    ran, ran_then = one.what_ran, [other.what_ran for other in past if other.what_ran is not None]
    watched = all(each.sampler not in ("host", "plain") for each in (one, *past))
    return (
        watched
        and ran is not None
        and len(ran_then) == len(past)
        and what_ran.ran_the_same(ran, ran_then)
    )


def same_code(measurement: Measurement, alike: Sequence[Measurement]) -> bool:
    """True if a row and every saved run that it is compared with ran the same machine code in the same way, at the same clocks."""
    return all(_same_clocks(measurement, past) for past in alike) and ran_the_same(
        measurement, *alike
    )


def same_code_in_pairs(base: Sequence[Measurement], head: Sequence[Measurement]) -> bool:
    """True if all processes of head ran the same as all of base, at the same clocks. Bytes of arguments that differ between processes of
    base are not compared."""
    ran = (
        _ran_in_all(base)
        if all(one.what_ran is not None and one.what_ran.digest is not None for one in base)
        else None
    )
    if ran is None or not head:
        return False
    known = replace(base[0], what_ran=ran)
    return all(_same_clocks(one, known) for one in base) and all(
        same_code(one, [known]) for one in head
    )


def _left_out(alike: Sequence[Measurement]) -> str:
    """The bytes of arguments that were not compared, as the end of a sentence; empty if there are none."""
    count = max((one.what_ran.left_out for one in alike if one.what_ran is not None), default=0)
    return (
        f", but for {counted(count, 'byte')} of arguments that vary between unchanged launches"
        if count
        else ""
    )


def _same_clocks(measurement: Measurement, past: Measurement) -> bool:
    """True if the lowest clocks of both are known and agree."""
    for name in ("sm_clock_hz", "memory_clock_hz"):
        seen = (
            (one.during,) if one.during is not None else one.conditions
            for one in (measurement, past)
        )
        own, then = (
            min(
                (clock for conditions in each if (clock := getattr(conditions, name))), default=None
            )
            for each in seen
        )
        if own is None or then is None or not clocks_agree(own, then):
            return False
    return True


def clocks_agree(one: float, other: float) -> bool:
    """True if two clocks, in hertz, differ by no more than a step."""
    return abs(one - other) < CLOCKS_APART * max(one, other)


def how(measurement: Measurement) -> tuple[str, str]:
    """The target and the sampler: only rows that agree in both are compared."""
    return measurement.target, measurement.sampler


def comparable(measurement: Measurement, past: Measurement) -> bool:
    """True if a measurement is compared with a past one: same mode, target and sampler, no profiler."""
    return past.mode == measurement.mode and how(past) == how(measurement) and not past.profiled


def is_failure(judged: Verdict | Finding | LimitResult, strict: bool) -> bool:
    """True if a test with this verdict fails: on FAIL, and under `strict` on every doubt."""
    return judged.outcome is Outcome.FAIL or (
        strict and not judged.outcome.quiet and judged.outcome is not Outcome.ACCEPTED
    )


def failing_in_themselves(rows: Sequence[Row], strict: bool) -> set[str]:
    """Node ids of tests that fail by an assertion or an error: it is recorded, or no verdict explains the failure."""
    by_verdict = {row.nodeid for row in rows if is_failure(row.verdict, strict)}
    return {
        row.nodeid
        for row in rows
        if row.test_error is True or (row.failed and row.nodeid not in by_verdict)
    }


def unreliable(measurement: Measurement) -> Iterator[str]:
    """Why the conditions forbid a judgement."""
    if measurement.profiled:
        yield "a profiler was attached"
    for when, conditions in zip(("before", "after"), measurement.conditions, strict=True):
        if conditions.throttle_reasons:
            clock = (
                f" at {conditions.sm_clock_hz / 1e6:.0f} MHz"
                if conditions.sm_clock_hz is not None
                else ""
            )
            yield f"throttled {when} the samples ({', '.join(conditions.throttle_reasons)}{clock})"
    if measurement.discarded >= len(measurement.samples):
        reasons = (
            f" ({', '.join(measurement.during.throttle_reasons or ())})"
            if measurement.during
            else ""
        )
        yield f"{counted(measurement.discarded, 'sample')} taken under throttling{reasons}, {len(measurement.samples)} left"
    seen = (*measurement.conditions, *((measurement.during,) if measurement.during else ()))
    if others := max((c.other_processes or 0 for c in seen), default=0):
        yield f"{counted(others, 'other process')} on the device"
    if measurement.launches_wait is True:
        yield "CUDA_LAUNCH_BLOCKING is set, so that every launch waits for the device"
    if measurement.busy is not UNSET and measurement.busy > BUSY:
        yield f"other work kept the device busy at {format_share(measurement.busy)} of the looks between the samples"
    if measurement.outside is not UNSET:
        yield f"{format_time(measurement.outside)} of its work run on a stream that the timed one does not wait for"
    if measurement.work_seen is False:
        yield "no work was seen on the timed stream, on a default one or on the device: the time may be the host's alone"
    if measurement.latency <= NOTHING_RAN * measurement.floor:
        yield (
            f"{format_time(measurement.latency)} is hardly longer than two events with nothing between "
            f"({format_time(measurement.floor)}), as if nothing was launched on the timed stream"
        )


def _without_times(
    doubt: Finding,
    measurement: Measurement,
    limits: Limits,
    facts: DeviceFacts,
    history: Sequence[Measurement],
) -> list[Finding]:
    """The findings about a measurement whose times are in doubt. What runs does not depend on the conditions."""
    exact = list(absolute(measurement, limits, facts, past=history, names=STEPS))
    return [doubt, *exact] if _judges_time(limits) else exact


def _judges_time(limits: Limits) -> bool:
    """True unless all limits are on exact counts of a launch; with no limit the time is what the verdict is about."""
    given = [name for name in OF_MEASUREMENT if getattr(limits, name) is not None]
    return not given or any(name not in STEPS for name in given)


def _not_compared(
    measurement: Measurement, past: Sequence[Measurement], limit: str, no_history: str | None
) -> Finding:
    """The finding about a limit if no past measurement is comparable."""
    same = [m for m in past if m.mode == measurement.mode and not m.profiled]
    if same:
        # The change of how a test is measured may have made it slower too, such as a new synchronisation.
        changed = (
            f"its rows are {', '.join(how(same[-1]))}; this one is {', '.join(how(measurement))}"
        )
        return find(
            Outcome.UNDECIDED,
            "measured differently",
            Code.MEASURED_DIFFERENTLY,
            limit=limit,
            changed=changed,
        )
    modes = " and ".join(sorted({m.mode for m in past}))
    why = (
        f"its rows are {modes}; this one is {measurement.mode}"
        if past
        else no_history or "the baseline holds no such row"
    )
    return find(Outcome.NEW, "no history", Code.NO_BASELINE, limit=limit, why=why)


def changed_work(past: Measurement, measurement: Measurement) -> list[tuple[str, str, str]]:
    """The parts of a launch's work that changed: bytes and window, each with its old and new value in words."""
    changed = []
    then, now = (
        None if m.moved_bytes is None else m.moved_bytes.total for m in (past, measurement)
    )
    if then != now:
        was, value = ("unknown" if total is None else short_bytes(total) for total in (then, now))
        changed.append(("traffic", was, value))
    if past.window != measurement.window:
        then_window, now_window = (
            "none" if m.window is None else window_text(m.window) for m in (past, measurement)
        )
        changed.append(("window", then_window, now_window))
    return changed


def _more_bytes(past: Measurement, measurement: Measurement) -> bool:
    """True if all that changed is that a launch moves more bytes. It then does more work, and its time says by how much."""
    then, now = past.moved_bytes, measurement.moved_bytes
    return (
        then is not None
        and now is not None
        and past.window == measurement.window
        and then.total < now.total
    )


def _same_work(measurement: Measurement, past: Measurement, found: Finding) -> Finding:
    """The finding, if a launch does the same work as before, or moves more bytes. Else only a FAIL stands: fewer bytes, or another window,
    can hide a slow-down."""
    if not (changed := changed_work(past, measurement)):
        return found
    words = " and ".join(f"its {name} from {then} to {now}" for name, then, now in changed)
    if found.outcome is Outcome.FAIL or _more_bytes(past, measurement):
        return find(found.outcome, "other work", found.code, changed=words, finding=found.sentence)
    return find(
        Outcome.UNDECIDED,
        "not the same work",
        Code.MEASURED_DIFFERENTLY,
        changed=words,
        seen=found.figures.get("seen", ""),
    )


def merged(measurement: Measurement, key: str, further: Sequence[Mapping[str, Row]]) -> Measurement:
    """A measurement with those of the same row in further processes; a note lists the processes that do not count, with the reason.

    If conditions spoilt this process, or most others measured in another way, the first of them takes its place.
    `measurement`: this process's.
    `further`: rows of each further process by their key.
    """
    every = [measurement, *(rows[key].measurement if key in rows else None for rows in further)]
    fit = {
        index: (*how(one), one.mode)
        for index, one in enumerate(every)
        if one is not None and not any(unreliable(one))
    }
    ways = Counter(fit.values())
    first = next((index for index, way in fit.items() if ways[way] == max(ways.values())), 0)
    own = every[first] or measurement
    own = replace(
        own,
        what_ran=_ran_in_all(
            [one for index, one in enumerate(every) if one is not None and index in fit]
        )
        or measurement.what_ran,
    )
    counted, left_out = list[Repeat](), list[str]()
    for index, other in enumerate(every):
        if index == first:
            continue
        if (why := _unlike(own, other)) is not None:
            left_out.append(f"process {index + 1} of {len(every)} is left out: {why}")
        elif other is not None:
            counted.append(other.repeat)
    return replace(own, further=tuple(counted), notes=(*own.notes, *left_out))


def _ran_in_all(processes: Sequence[Measurement]) -> what_ran.WhatRan | None:
    """What the processes of a run ran, without the bytes of arguments that differ between them; None if no process recorded it."""
    found = [
        one.what_ran
        for one in processes
        if one.what_ran is not None and one.what_ran.digest is not None
    ]
    if not found:
        return None
    together = what_ran.together(found)
    return together or replace(
        found[0], digest=None, not_watched="processes of the same run did not run the same"
    )


def _unlike(measurement: Measurement, other: Measurement | None) -> str | None:
    """Why another process's measurement cannot be averaged with this one's; None if it can."""
    if other is None:
        return "it has no such row"
    if (*how(other), other.mode) != (*how(measurement), measurement.mode):
        return f"it measured {', '.join((*how(other), other.mode))}"
    return ", ".join(unreliable(other)) or None
