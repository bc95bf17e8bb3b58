"""The judge: one measurement, its limits and its baseline give one verdict."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence

from msgspec.structs import replace

from pytest_gpumem.judging.claims import Claim, beats
from pytest_gpumem.judging.drift import Drift, drift_of, kind_of, other_variant, same_variant, since_start
from pytest_gpumem.judging.finding import Finding, counted
from pytest_gpumem.judging.limits import absolute, paging, physical
from pytest_gpumem.judging.screen import (
    LOOKS,
    against,
    allowed,
    compared,
    decidable,
    judge_change,
    judge_creep,
    judge_gain,
    limit_name,
    since,
)
from pytest_gpumem.judging.spread import difference
from pytest_gpumem.judging.suite import ALONE, Family
from pytest_gpumem.outcomes import Code, Outcome
from pytest_gpumem.records.device import DeviceFacts
from pytest_gpumem.records.measurement import NOTHING_RAN, Limits, Measurement, Repeat, Window
from pytest_gpumem.records.row import Row
from pytest_gpumem.records.verdict import Comparison, Verdict
from pytest_gpumem.units import format_bytes, format_share, format_time, parse_share


def judge(
    measurement: Measurement,
    limits: Limits,
    facts: DeviceFacts,
    history: Sequence[Row | Measurement],
    *,
    strict: bool,
    no_history: str | None = None,
    siblings: Mapping[str, Measurement] | None = None,
    family: Family = ALONE,
    first: Measurement | None = None,
    changes: Callable[[], Mapping[str, float]] = dict,
) -> Verdict:
    """Judge one measurement.

    Args:
        measurement: what was measured.
        limits: its limits.
        facts: the device that it was measured on.
        history: accepted rows of the same test and label, one for each run. Rows of another mode are left out; if the others were
            measured differently, the verdict is UNDECIDED.
        strict: adds to the reason that an outcome other than PASS fails; the outcome does not depend on it.
        no_history: why there is no history, for NEW.
        siblings: the other measurements of its test by label, for `faster_than`.
        family: the rows of the suite that are compared with a baseline.
        first: the first accepted run, where the history has moved on from it.
        changes: reads the controls again, by kind the log-ratio to the session's start. Called only before a row fails against its
            baseline: such a row is UNDECIDED if the device may have changed as much.

    Raises:
        QuantityError: a limit that cannot be read.
    """
    if doubts := list(unreliable(measurement)):
        finding = Finding(Outcome.UNDECIDED, f"{', '.join(doubts)}: no limit was judged", Code.CONDITIONS)
        return _verdict([finding], None, facts, strict)
    past = [m for item in history if (m := item.measurement if isinstance(item, Row) else item) is not None]
    findings = [*physical(measurement, facts), *absolute(measurement, limits, facts), *paging(measurement, limits)]
    if limits.faster_than is not None:
        claim = beats(measurement, Claim.parse(limits.faster_than), limits.origin.get("faster_than", "limit"), siblings or {})
        findings += [claim] if claim is not None else []
    alike = [m for m in past if comparable(measurement, m)]
    if not alike:
        if limits.max_regression is not None:
            name = f"max_regression {limits.max_regression} ({limits.origin.get('max_regression', 'limit')})"
            findings.append(_not_compared(measurement, past, name, no_history))
        return _verdict(findings, None, facts, strict)
    drift = drift_of(measurement, alike, facts)
    if drift is not None and drift.too_large:
        finding = Finding(Outcome.UNDECIDED, f"{drift.sentence}: no limit was judged", Code.CONDITIONS)
        return _verdict([finding], None, facts, strict)
    found, delta = difference(measurement, alike), allowed(limits.max_regression, alike)
    comparison = compared(found, delta)
    if limits.max_regression is not None:
        name = limit_name(limits.max_regression, limits.origin.get("max_regression", "limit"), delta)
        finding = _whatever_followed(drift, judge_change(measurement, found, delta, name, family), comparison, delta)
        if finding.outcome is not Outcome.FAIL and first is not None and comparable(measurement, first):
            crept = since(measurement, first, alike)
            if (creep := judge_creep(measurement, crept, delta, name, family)) is not None:
                finding = _whatever_followed(drift_of(measurement, [first], facts), creep, compared(crept, delta), delta)
        finding = _of_this_device(finding, measurement, facts, changes, comparison.low - delta, 1)
        findings.append(_same_work(measurement, alike[-1], finding))
    if limits.fail_if_faster is not None:
        gain = judge_gain(found, limits.fail_if_faster, limits.origin.get("fail_if_faster", "limit"), family)
        if gain is not None:
            beyond = -parse_share(limits.fail_if_faster) - comparison.high
            if drift is not None and -drift.share >= beyond:
                gain = Finding(Outcome.UNDECIDED, f"{drift.sentence}: {gain.sentence}", Code.CONDITIONS)
            gain = _of_this_device(gain, measurement, facts, changes, beyond, -1)
            findings.append(_same_work(measurement, alike[-1], gain))
    return _verdict(findings, comparison, facts, strict)


def repeatable(
    measurement: Measurement, limits: Limits, verdict: Verdict, history: Sequence[Measurement], first: Measurement | None = None
) -> bool:
    """True if further processes of this run may decide an undecided row.

    Args:
        measurement: what was measured.
        limits: its limits.
        verdict: its verdict so far.
        history: as `judge` got it.
        first: as `judge` got it.
    """
    if verdict.outcome is not Outcome.UNDECIDED or limits.max_regression is None:
        return False
    if verdict.code is Code.CONDITIONS:
        # A passing disturbance is over by then; a changed device stays as it is.
        passing = not measurement.profiled and 1 + len(measurement.further) < LOOKS[1]
        return passing and all(one.outcome is not Outcome.UNDECIDED for one in paging(measurement, limits))
    alike = [past for past in history if comparable(measurement, past)]
    if not alike or verdict.code is Code.MEASURED_DIFFERENTLY:
        return False
    found, delta = difference(measurement, alike), allowed(limits.max_regression, alike)
    if verdict.code is Code.NOISY and judge_change(measurement, found, delta, limits.max_regression).outcome is Outcome.PASS:
        return False  # it is another limit that is too close to call, by this process's own figures
    if decidable(found, delta):
        return True
    if first is None or not comparable(measurement, first):
        return False
    # A window that moves along with a creep spreads so far that it decides nothing; the first run still can.
    crept = since(measurement, first, alike)
    return crept.log > math.log1p(delta) and decidable(crept, delta)


def how(measurement: Measurement) -> tuple[str, str]:
    """What was measured and by which sampler: only rows that agree in it are compared."""
    return measurement.target, measurement.sampler


def comparable(measurement: Measurement, past: Measurement) -> bool:
    """True if a measurement is compared with a past one: same mode, target and sampler, same variant of the card, no profiler."""
    alike = past.mode == measurement.mode and how(past) == how(measurement) and not past.profiled
    return alike and same_variant(measurement, past)


def is_failure(verdict: Verdict, strict: bool) -> bool:
    """Whether a test with this verdict fails: FAIL always, under `strict` everything but PASS."""
    return verdict.outcome is Outcome.FAIL or (strict and verdict.outcome is not Outcome.PASS)


def unreliable(measurement: Measurement) -> Iterator[str]:
    """Why the conditions forbid a judgement."""
    if measurement.profiled:
        yield "a profiler was attached"
    for when, conditions in zip(("before", "after"), measurement.conditions, strict=True):
        if conditions.throttle_reasons:
            clock = f" at {conditions.sm_clock_hz / 1e6:.0f} MHz" if conditions.sm_clock_hz is not None else ""
            yield f"throttled {when} the samples ({', '.join(conditions.throttle_reasons)}{clock})"
    if measurement.discarded >= len(measurement.samples):
        reasons = f" ({', '.join(measurement.during.throttle_reasons)})" if measurement.during else ""
        yield f"{measurement.discarded} samples were taken under throttling{reasons}, {len(measurement.samples)} are left"
    seen = (*measurement.conditions, *((measurement.during,) if measurement.during else ()))
    if others := max((c.other_processes or 0 for c in seen), default=0):
        yield f"{counted(others, 'other process')} on the device"
    if measurement.work_seen is False:
        yield "no work was seen on the timed stream, on a default one or on the device: the time may be the host's alone"
    if measurement.latency <= NOTHING_RAN * measurement.floor:
        yield (
            f"{format_time(measurement.latency)} is hardly longer than two events with nothing between "
            f"({format_time(measurement.floor)}), as if nothing was launched on the timed stream"
        )


def _not_compared(measurement: Measurement, past: Sequence[Measurement], limit: str, no_history: str | None) -> Finding:
    """The finding about a limit where no past measurement is comparable."""
    same = [m for m in past if m.mode == measurement.mode and not m.profiled]
    if of_other_variants := [m for m in same if how(m) == how(measurement)]:
        text = f"{limit} cannot be judged: {other_variant(measurement, of_other_variants)}"
        return Finding(Outcome.UNDECIDED, text, Code.OTHER_CARD_VARIANT)
    if same:
        # What changed how a test is measured may have made it slower too, such as a new synchronisation.
        changed = f"its rows are {', '.join(how(same[-1]))}; this one is {', '.join(how(measurement))}"
        text = f"{limit} cannot be judged, the measurement itself has changed: {changed}; gpumem duet compares them"
        return Finding(Outcome.UNDECIDED, text, Code.MEASURED_DIFFERENTLY)
    modes = " and ".join(sorted({m.mode for m in past}))
    why = f"its rows are {modes}; this one is {measurement.mode}" if past else no_history or "the baseline holds no such row"
    text = f"{limit} has nothing to compare with: {why}"
    return Finding(Outcome.NEW, text, Code.NO_BASELINE)


def _whatever_followed(drift: Drift | None, found: Finding, comparison: Comparison, delta: float) -> Finding:
    """The finding, or UNDECIDED in place of a PASS or FAIL that depends on how far the row follows the device's drift."""
    if drift is None:
        return found
    passes = found.outcome is Outcome.PASS and comparison.high - min(drift.share, 0.0) >= delta
    fails = found.outcome is Outcome.FAIL and comparison.low - max(drift.share, 0.0) <= delta
    return Finding(Outcome.UNDECIDED, f"{drift.sentence}: {found.sentence}", Code.CONDITIONS) if passes or fails else found


def _of_this_device(
    found: Finding, measurement: Measurement, facts: DeviceFacts, changes: Callable[[], Mapping[str, float]], beyond: float, sign: int
) -> Finding:
    """The finding, or UNDECIDED in place of a FAIL that the device's own change since the session's start can explain.

    Args:
        found: about a change against the baseline.
        measurement: this run's.
        facts: its device.
        changes: as for `judge`.
        beyond: share by which the bound of the row's change lies beyond its limit.
        sign: 1 for a slow-down, -1 for a gain.
    """
    if found.outcome is not Outcome.FAIL:
        return found
    # A row that follows no control may follow anything of the device, which its reads of DRAM speak for.
    kind = kind_of(measurement, facts) or "dram"
    log = changes().get(kind, 0.0)
    sentence = since_start(kind, log) if sign * math.expm1(log) >= beyond else None
    return found if sentence is None else Finding(Outcome.UNDECIDED, f"{sentence}: {found.sentence}", Code.CONDITIONS)


def _same_work(measurement: Measurement, past: Measurement, found: Finding) -> Finding:
    """The finding where a launch moves as many bytes in the same window as before. Else only a FAIL stands: fewer bytes can hide a
    slow-down."""
    changed = []
    then, now = (None if m.traffic is None else m.traffic.total for m in (past, measurement))
    if then != now:
        changed.append("its traffic from " + " to ".join("unknown" if total is None else format_bytes(total) for total in (then, now)))
    if past.window != measurement.window:
        changed.append("its window from " + " to ".join(_window(m.window) for m in (past, measurement)))
    if not changed:
        return found
    text = f"the measurement itself has changed, {' and '.join(changed)}: {found.sentence}"
    if found.outcome is Outcome.FAIL:
        return Finding(Outcome.FAIL, text, found.code)
    return Finding(Outcome.UNDECIDED, text, Code.MEASURED_DIFFERENTLY)


def _window(window: Window | None) -> str:
    if window is None:
        return "none"
    return f"{format_bytes(window.nbytes)} at hit ratio {window.hit_ratio:.3g} and a set-aside of {format_bytes(window.set_aside)}"


def _verdict(findings: Sequence[Finding], comparison: Comparison | None, facts: DeviceFacts, strict: bool) -> Verdict:
    """The worst finding's outcome and code, with the sentences of all that are no PASS."""
    if not findings:
        shown = f", {against(comparison)}, catches {format_share(comparison.catches)}" if comparison else ""
        return Verdict(Outcome.PASS, f"no limit set{shown}", comparison, simulated=facts.simulated)
    ordered = sorted(findings, key=lambda f: f.outcome.rank)
    worst = ordered[0]
    reason = "; ".join(f.sentence for f in ordered if f.outcome is not Outcome.PASS or worst.outcome is Outcome.PASS)
    if strict and worst.outcome not in (Outcome.PASS, Outcome.FAIL):
        reason += " (strict: this fails)"
    return Verdict(worst.outcome, reason, comparison, simulated=facts.simulated, code=worst.code)


def merged(measurement: Measurement, key: str, further: Sequence[Mapping[str, Row]]) -> Measurement:
    """A measurement with those of the same row in further processes; a note says which processes do not count, and why.

    Where conditions spoilt this process's, that of the first process that they did not spoil takes its place.

    Args:
        measurement: this process's.
        key: `Row.key`.
        further: rows of each further process by their key.
    """
    every = [measurement, *(rows[key].measurement if key in rows else None for rows in further)]
    first = next((index for index, one in enumerate(every) if one is not None and not any(unreliable(one))), 0)
    own = every[first] or measurement
    counted, left_out = list[Repeat](), list[str]()
    for index, other in enumerate(every):
        if index == first:
            continue
        if (why := _unlike(own, other)) is not None:
            left_out.append(f"process {index + 1} of {len(every)} is left out: {why}")
        elif other is not None:
            counted.append(other.repeat)
    return replace(own, further=tuple(counted), notes=(*own.notes, *left_out))


def _unlike(measurement: Measurement, other: Measurement | None) -> str | None:
    """Why another process's measurement cannot be averaged with this one's; None if it can."""
    if other is None:
        return "it has no such row"
    if (*how(other), other.mode) != (*how(measurement), measurement.mode):
        return f"it measured {', '.join((*how(other), other.mode))}"
    return ", ".join(unreliable(other)) or None
