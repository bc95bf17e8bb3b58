"""The verdict on one measurement, as a session of one row gives it."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import date, timedelta
from typing import Any

from pytest_gpumem.baselines.verdicts import waits
from pytest_gpumem.judging import judge as judging
from pytest_gpumem.judging.finding import check_of
from pytest_gpumem.judging.regression import (
    NAME,
    Runs,
    against_reference,
    at_the_sessions_end,
)
from pytest_gpumem.judging.verdict import OPEN, known, with_verdict
from pytest_gpumem.records.device import DeviceFacts
from pytest_gpumem.records.measurement import Limits, Measurement
from pytest_gpumem.records.row import Row, Verdict


def on_days(runs: Sequence[Measurement], *, days: int | None = None) -> Runs:
    """Saved runs of successive days, or of the first `days` of them."""
    first = date(2026, 11, 1)
    dated = []
    for index, run in enumerate(runs):
        dated.append((first + timedelta(days=index % (days or len(runs))), run))
    return dated


def judge(
    measurement: Measurement,
    limits: Limits,
    facts: DeviceFacts,
    history: Sequence[Measurement],
    *,
    strict: bool = False,
    days: int | None = None,
    others: Sequence[float] = (),
    **how: Any,
) -> Verdict:
    """The verdict at the session's end. Arguments as of `judging.judge.judge`.

    `history`: saved runs, of as many `days`.
    `others`: changes of other rows, as log-ratios.
    """
    runs = on_days(history, days=days)
    judgement = judging.judge(measurement, limits, facts, runs, **how)
    row = with_verdict(
        Row("test_a", limits, OPEN, measurement),
        judgement.findings,
        comparison=judgement.comparison,
        simulated=facts.simulated,
        strict=strict,
    )
    if waits(row):
        check = check_of(limits, NAME)
        assert check is not None
        run = against_reference(measurement, runs)
        finding = at_the_sessions_end(run, check, others, row.nodeid)
        row = with_verdict(row, [*known(row), finding], strict=strict)
    return row.verdict
