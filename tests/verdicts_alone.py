"""The verdict on one measurement, as a session of one row gives it."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from datetime import date, datetime, timedelta, timezone

from pytest_gpumem.baselines.acceptances import Acceptances
from pytest_gpumem.baselines.references import SavedRow, SavedRun, assemble
from pytest_gpumem.baselines.verdicts import judged, screened
from pytest_gpumem.judging.finding import unjudged
from pytest_gpumem.judging.slowdown import Runs
from pytest_gpumem.outcomes import Outcome
from pytest_gpumem.records.device import DeviceFacts
from pytest_gpumem.records.limits import Limits
from pytest_gpumem.records.measurement import Measurement
from pytest_gpumem.records.row import Comparison, Row, Verdict

FIRST = datetime(2026, 11, 1, tzinfo=timezone.utc)


def day_of(index: int, runs: int, days: int | None) -> datetime:
    return FIRST + timedelta(days=index % (days or runs), seconds=index)


def on_days(runs: Sequence[Measurement], *, days: int | None = None) -> Runs:
    """Saved runs of successive days, or of the first `days` of them."""
    dated = list[tuple[date, Measurement]]()
    for index, run in enumerate(runs):
        dated.append((day_of(index, len(runs), days).date(), run))
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
    siblings: Mapping[str, Measurement] | None = None,
) -> Verdict:
    """The verdict at the session's end.

    `history`: saved runs, of as many `days`.
    `others`: changes of other rows, as log-ratios.
    `siblings`: as of `judged`.
    """
    runs = []
    for index, run in enumerate(history):
        saved = SavedRow("test_a", measurement.label, run)
        utc = day_of(index, len(history), days)
        runs.append(SavedRun(id=str(index), utc=utc, device=facts, rows=(saved,)))
    baseline = assemble(runs, facts, Acceptances())
    row = Row("test_a", limits, unjudged(simulated=facts.simulated), measurement, measurement.label)
    rows = [judged(row, baseline, facts, siblings=siblings or {}, strict=strict)]
    for other in others:
        verdict = Verdict(Outcome.UNDECIDED, "", Comparison(math.expm1(other)))
        rows.append(Row(f"test_{len(rows)}", Limits(), verdict))
    return screened(rows, baseline, strict=strict)[0].verdict
