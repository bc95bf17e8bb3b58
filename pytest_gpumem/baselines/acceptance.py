"""The rules of a baseline: the rows and runs that enter it, the gains that reset it, and the rows that take a revision out of it."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

from pytest_gpumem.judging.judge import comparable
from pytest_gpumem.judging.screen import base_latency, compared
from pytest_gpumem.judging.spread import days, difference, readings
from pytest_gpumem.outcomes import Code, Outcome
from pytest_gpumem.records.measurement import Measurement
from pytest_gpumem.records.row import ENOUGH, GROSS, Row
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
    if comparison is not None and slower_without_limit(row) and comparison.low > slower:
        return (
            f"it is slower than the baseline by {format_share(comparison.low)} or more with 99.9 %"
        )
    return f"{verdict.outcome.value}: {verdict.reason}" if verdict.outcome is Outcome.FAIL else None


def slower_without_limit(row: Row) -> bool:
    """True if a row without `max_regression` would fail a limit of `USUAL_LIMIT`."""
    comparison = row.verdict.comparison
    if comparison is None or row.limits.max_regression is not None:
        return False
    return comparison.low > (USUAL_LIMIT if comparison.measured >= ENOUGH else USUAL_LIMIT + GROSS)


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

    A gain resets if it lasts: this run and the two before it, of `ENOUGH` days, each exceed the allowed slow-down (99.5 %) against the runs
    before them. Older runs would hide its later loss. Only runs of one card count: another one may be faster by itself.
    `past`: the runs of its baseline, oldest first.
    """
    comparison, now = row.verdict.comparison, row.measurement
    if comparison is None or now is None or not row.verdict.outcome.quiet:
        return None
    alike = [one for one in past if comparable(now, one) and _card(one) == _card(now)]
    older, newest = alike[: 1 - ENOUGH], [*alike[1 - ENOUGH :], now]
    if not older or len(set(days([readings(one)[0] for one in newest])) - {None}) < ENOUGH:
        return None
    written = row.limits.max_regression
    allowed = (
        USUAL_LIMIT
        if written is None
        else parse_margin(written).over(base_latency(now, comparison))
    )
    gains = [compared(difference(one, older), 0.0) for one in newest]
    if max(gain.high for gain in gains) >= -allowed:
        return None
    return f"faster by {format_share(-gains[-1].delta)}, by {format_share(-gains[-1].high)} or more with 99.5 %, as the two runs before it"


def _card(measurement: Measurement) -> str | None:
    return measurement.provenance.card if measurement.provenance is not None else None


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
