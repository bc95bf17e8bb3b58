"""The judge: one measurement, its limits and its baseline give one verdict."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence

from pytest_gpumem.records.device import DeviceFacts
from pytest_gpumem.records.measurement import NO_WORK, NOTHING_RAN, Limits, Measurement, Window
from pytest_gpumem.records.row import Row
from pytest_gpumem.records.verdict import Comparison, Outcome, Verdict
from pytest_gpumem.units import format_bytes, format_share, format_time
from pytest_gpumem.verdicts.claims import Claim, beats
from pytest_gpumem.verdicts.drift import KINDS, LIMIT, Drift, drift_of
from pytest_gpumem.verdicts.finding import Finding, change, counted
from pytest_gpumem.verdicts.limits import absolute, physical
from pytest_gpumem.verdicts.paging import paging
from pytest_gpumem.verdicts.screen import allowed, compared, difference, judge_change, judge_gain, limit_name
from pytest_gpumem.verdicts.sorts import another_sort, of_this_sort
from pytest_gpumem.verdicts.suite import ALONE, Family

_WORST_FIRST = (Outcome.FAIL, Outcome.UNRELIABLE, Outcome.SUSPECT, Outcome.INCONCLUSIVE, Outcome.NO_BASELINE, Outcome.PASS)


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
) -> Verdict:
    """Judge one measurement.

    Args:
        measurement: what was measured.
        limits: what it is held to.
        facts: the device that it was measured on.
        history: accepted rows of the same test and label, one for each process. Those of another mode are left out; if what is left
            was measured in another way, that is a SUSPECT.
        strict: only tells the reason's reader that an outcome other than PASS fails; the outcome does not depend on it.
        no_history: why there is no history, for NO BASELINE.
        siblings: the other measurements of its test by label, for `faster_than`.
        family: the rows of the suite that are compared with a baseline.

    Raises:
        QuantityError: a limit that cannot be read.
    """
    if doubts := list(unreliable(measurement)):
        return _verdict(Outcome.UNRELIABLE, f"{', '.join(doubts)}: no limit was judged", None, facts, strict)
    past = [m for item in history if (m := item.measurement if isinstance(item, Row) else item) is not None]
    past = [m for m in past if m.mode == measurement.mode and not m.profiled]
    of_any_sort = [m for m in past if how(m) == how(measurement)]
    alike = of_this_sort(measurement, of_any_sort)
    findings = [*physical(measurement, facts), *absolute(measurement, limits, facts), *paging(measurement, limits)]
    claim, apart = None, False
    if limits.faster_than is not None:
        claim = beats(measurement, Claim.parse(limits.faster_than), limits.origin.get("faster_than", "limit"), siblings or {})
        findings += [claim] if claim is not None else []
    comparison = None
    if alike:
        drift = drift_of(measurement, alike, facts)
        if drift is not None and drift.too_large:
            return _verdict(Outcome.UNRELIABLE, f"{_drifted(drift)}: no limit was judged", None, facts, strict)
        delta = allowed(limits.max_regression, alike)
        found = difference(measurement, alike, drift)
        comparison = compared(found, delta)
        if limits.max_regression is not None:
            name = limit_name(limits.max_regression, limits.origin.get("max_regression", "limit"), delta)
            findings.append(_same_work(measurement, alike[-1], judge_change(measurement, comparison, delta, name, family)))
        if limits.fail_if_faster is not None:
            gain = judge_gain(found, limits.fail_if_faster, limits.origin.get("fail_if_faster", "limit"), family)
            findings += [_same_work(measurement, alike[-1], gain)] if gain is not None else []
    elif limits.max_regression is not None:
        name = f"max_regression {limits.max_regression} ({limits.origin.get('max_regression', 'limit')})"
        if of_any_sort:
            apart = True
            findings.append(Finding(Outcome.INCONCLUSIVE, f"{name} cannot be decided: {another_sort(measurement, of_any_sort)}"))
        elif past:
            # What changed how a test is measured may have made it slower too, such as a new synchronisation.
            changed = f"its rows are {', '.join(how(past[-1]))}; this one is {', '.join(how(measurement))}"
            findings.append(Finding(Outcome.SUSPECT, f"{name} cannot be judged, the measurement itself has changed: {changed}"))
        else:
            findings.append(
                Finding(Outcome.NO_BASELINE, f"{name} has nothing to compare with: {no_history or 'the baseline holds no such row'}")
            )
    if not findings:
        shown = f", {change(comparison.delta)} against {counted(comparison.processes, 'process')}" if comparison else ""
        shown += f", resolves {format_share(comparison.resolvable)}" if comparison else ""
        return _verdict(Outcome.PASS, f"no limit set{shown}", comparison, facts, strict)
    outcome = min((f.outcome for f in findings), key=_WORST_FIRST.index)
    told = [f for f in findings if f.outcome is not Outcome.PASS] or findings
    told.sort(key=lambda f: _WORST_FIRST.index(f.outcome))
    fails = claim is not None and claim.outcome is not Outcome.PASS
    return _verdict(outcome, "; ".join(f.sentence for f in told), comparison, facts, strict, fails=fails, another_sort=apart)


def _drifted(drift: Drift) -> str:
    return (
        f"the device is not as it was for the baseline: {KINDS[drift.kind]} that runs no code of the project changed by "
        f"{change(math.expm1(drift.log))}, more than the {format_share(LIMIT)} that can be taken out"
    )


def _same_work(measurement: Measurement, past: Measurement, found: Finding) -> Finding:
    """Say where a launch now moves another number of bytes or has another window; doubt what is no FAIL then: fewer bytes can hide a
    slow-down."""
    changed = []
    then, now = (None if m.traffic is None else m.traffic.total for m in (past, measurement))
    if then != now:
        changed.append("its traffic from " + " to ".join("unknown" if total is None else format_bytes(total) for total in (then, now)))
    if past.window != measurement.window:
        changed.append("its window from " + " to ".join(_window(m.window) for m in (past, measurement)))
    if not changed:
        return found
    said = f"the measurement itself has changed, {' and '.join(changed)}: {found.sentence}"
    return Finding(found.outcome if found.outcome is Outcome.FAIL else Outcome.SUSPECT, said)


def _window(window: Window | None) -> str:
    if window is None:
        return "none"
    return f"{format_bytes(window.nbytes)} at hit ratio {window.hit_ratio:.3g} and a set-aside of {format_bytes(window.set_aside)}"


def how(measurement: Measurement) -> tuple[str, str]:
    """What was measured and in which way, beside the mode, which somebody chose: only rows that agree in it are compared."""
    return measurement.target, measurement.sampler


def comparable(measurement: Measurement, history: Iterable[Measurement]) -> list[Measurement]:
    """Those of a history that a measurement is compared with: in its mode, of its target and sampler, on cards of its sort."""
    way = measurement.mode, *how(measurement)
    return of_this_sort(measurement, [past for past in history if (past.mode, *how(past)) == way])


def is_failure(verdict: Verdict, strict: bool) -> bool:
    """Whether a test with this verdict fails: FAIL and a claim that does not hold always, under `strict` everything but PASS."""
    return verdict.outcome is Outcome.FAIL or verdict.fails or (strict and verdict.outcome is not Outcome.PASS)


def _verdict(
    outcome: Outcome,
    reason: str,
    comparison: Comparison | None,
    facts: DeviceFacts,
    strict: bool,
    *,
    fails: bool = False,
    another_sort: bool = False,
) -> Verdict:
    if strict and outcome not in (Outcome.PASS, Outcome.FAIL):
        reason += " (strict: this fails)"
    return Verdict(outcome, reason, comparison, fails=fails, simulated=facts.simulated, another_sort=another_sort)


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
        yield f"{counted(others, 'process')} of others on the device"
    if NO_WORK in measurement.sampler_reason:
        yield f"{NO_WORK}: the time may be the host's alone"
    if measurement.latency <= NOTHING_RAN * measurement.floor:
        yield (
            f"{format_time(measurement.latency)} is hardly longer than two events with nothing between "
            f"({format_time(measurement.floor)}), as if nothing was launched on the timed stream"
        )
