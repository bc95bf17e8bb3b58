"""The rules of a baseline: the rows and runs that enter it, the gains that reset it, and the rows that take a revision out of it."""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Mapping, Sequence
from datetime import date, datetime
from pathlib import Path

from pytest_gpumem.judging.judge import comparable
from pytest_gpumem.judging.latencies import base_latency, corrected_logs, readings
from pytest_gpumem.judging.reference import PLAIN, Reference, gains_restart
from pytest_gpumem.outcomes import Code, Outcome
from pytest_gpumem.records.measurement import Measurement
from pytest_gpumem.records.row import ENOUGH, Row
from pytest_gpumem.units import format_share, parse_margin

USUAL_LIMIT = 0.01  # allowed slow-down of a row without max_regression, as a share


def refusal(row: Row, simulated: bool, *, again: bool = False, slower: float = 0.0) -> str | None:
    """Why a row may not enter a baseline; None if it may.

    Every run of a passing test enters: without its slow runs, a baseline takes an unchanged test's slow mode for a regression. A row stays
    out if it fails, if it would fail a limit of `USUAL_LIMIT` where it has none, or if it cannot be compared.
    `again`: it may be measured in another way than its baseline.
    `slower`: slow-down that somebody accepted, as a share.
    """
    measurement, verdict = row.measurement, row.verdict
    if measurement is None and row.footprint is None:
        return "nothing was measured"
    if measurement is None and row.footprint is not None and not row.footprint.watched:
        return verdict.reason
    if row.failed:
        return "its test failed"
    if verdict.simulated != simulated:
        return "it is simulated" if verdict.simulated else "it is not simulated"
    if measurement is not None and (why := unfit(measurement)) is not None:
        return why
    if verdict.code is Code.CONDITIONS:
        return verdict.reason
    if verdict.code is Code.MEASURED_DIFFERENTLY and not again:
        return f"it is measured in another way than its baseline: {verdict.reason}"
    comparison = verdict.comparison
    if comparison is not None and slower_without_limit(row) and comparison.delta > slower:
        return f"it is slower than the baseline by {format_share(comparison.delta)}"
    return f"{verdict.outcome.value}: {verdict.reason}" if verdict.outcome is Outcome.FAIL else None


def slower_without_limit(row: Row) -> bool:
    """True if a row without `max_regression` would fail a limit of `USUAL_LIMIT`."""
    comparison = row.verdict.comparison
    if comparison is None or row.limits.max_regression is not None:
        return False
    return comparison.delta > (1 + USUAL_LIMIT) * (1 + PLAIN) - 1


def unfit(measurement: Measurement) -> str | None:
    """Why nothing can be compared with a measurement; None if something can."""
    if measurement.profiled:
        return "it was measured under a profiler"
    if throttled := sorted(
        {reason for c in measurement.conditions for reason in c.throttle_reasons or ()}
    ):
        return f"it was measured under throttling ({', '.join(throttled)})"
    return None


def improvement(row: Row, past: Sequence[Measurement]) -> str | None:
    """The gain that resets the baseline of a saved row; None where the row joins the baseline.

    A gain resets if it lasts: this run and the two before it, of three days, are each faster than
    those before them by more than the limit.
    `past`: the runs of its baseline, oldest first.
    """
    comparison, now = row.verdict.comparison, row.measurement
    if comparison is None or now is None or not row.verdict.outcome.quiet:
        return None
    runs = [*(run for run in past if comparable(now, run)), now]
    days = [_date(run) for run in runs]
    newest = set(days[-ENOUGH:])
    if len(runs) <= ENOUGH or None in days or len(newest) < ENOUGH:
        return None
    logs = corrected_logs([readings(run) for run in runs])
    before = []
    for day, of_run in zip(days[:-ENOUGH], logs[:-ENOUGH], strict=True):
        assert day is not None
        before.append((day, [math.exp(log) for log in of_run]))
    allowed = USUAL_LIMIT
    if row.limits.max_regression is not None:
        allowed = parse_margin(row.limits.max_regression).over(base_latency(now, comparison))
    reference = Reference(before)
    means = [statistics.fmean(of_run) for of_run in logs[-ENOUGH:]]
    if not gains_restart(reference, means, math.log1p(allowed)):
        return None
    gain = format_share(-math.expm1(means[-1] - reference.mean))
    return f"faster by {gain}, as the two runs before it"


def _date(measurement: Measurement) -> date | None:
    if measurement.provenance is None:
        return None
    try:
        return datetime.fromisoformat(measurement.provenance.utc.replace("Z", "+00:00")).date()
    except ValueError:
        return None


def rejects(row: Row) -> bool:
    """True if a row shows its revision to be slower than the baseline; earlier runs of that revision then leave the baseline."""
    return row.verdict.outcome is Outcome.FAIL and row.verdict.code in (Code.SLOWER, Code.CREPT)


# Runs of a fork's code. Such code may report any time, and must not decide the limits of later changes.

_OURS = (
    "push",
    "schedule",
    "workflow_dispatch",
    "repository_dispatch",
    "merge_group",
    "release",
    "create",
)
"""Events of GitHub that only somebody with write access can cause."""
_PULL_REQUESTS = (
    "pull_request",
    "pull_request_target",
    "pull_request_review",
    "pull_request_review_comment",
)
"""Events whose payload names the repositories of both sides."""


def untrusted(environment: Mapping[str, str]) -> str | None:
    """Why the results of this run may not be stored: it runs code of a fork, or may; None if it does not.

    GitHub Actions gives the event and its payload, GitLab the projects of both sides ("Predefined CI/CD variables reference"). A pipeline
    in a fork's own project is not detected; it has no access to this project's storage.
    """
    ours, theirs = (
        environment.get(f"CI_MERGE_REQUEST_{side}PROJECT_ID", "") for side in ("", "SOURCE_")
    )
    if ours != theirs:
        return f"a merge request from the fork {environment.get('CI_MERGE_REQUEST_SOURCE_PROJECT_PATH') or theirs or 'that is not named'}"
    return _github(environment)


def _github(environment: Mapping[str, str]) -> str | None:
    event = environment.get("GITHUB_EVENT_NAME", "")
    if event in ("", *_OURS):
        return None
    if event not in (*_PULL_REQUESTS, "workflow_run"):
        return f"the event {event}, whose payload does not say whose code is checked out"
    path = environment.get("GITHUB_EVENT_PATH", "")
    try:
        payload = json.loads(Path(path).read_bytes())
        if event == "workflow_run":
            run = payload["workflow_run"]
            if (first := run["event"]) not in (*_OURS, *_PULL_REQUESTS):
                return f"the event workflow_run after {first}, whose payload does not say whose code is checked out"
            base, head = payload["repository"], run["head_repository"]
        else:
            base, head = (
                payload["pull_request"]["base"]["repo"],
                payload["pull_request"]["head"]["repo"],
            )
        # A deleted fork is null.
        ours, theirs = base["full_name"], "that is gone" if head is None else str(head["full_name"])
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return f"a {event} event whose payload (GITHUB_EVENT_PATH {path or 'unset'}) does not say whether it is of a fork"
    return None if ours == theirs else f"a {event} event from the fork {theirs}"
