"""The verdict on one measurement, as a session gives it to a row of it alone."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from pytest_gpumem.judging import judge as judging
from pytest_gpumem.judging.verdict import OPEN, with_verdict
from pytest_gpumem.records.device import DeviceFacts
from pytest_gpumem.records.measurement import Limits, Measurement
from pytest_gpumem.records.row import Row, Verdict


def judge(
    measurement: Measurement,
    limits: Limits,
    facts: DeviceFacts,
    history: Sequence[Measurement],
    *,
    strict: bool = False,
    **how: Any,
) -> Verdict:
    """The verdict. Arguments as of `judging.judge.judge` and `with_verdict`."""
    found = judging.judge(measurement, limits, facts, history, **how)
    row = Row("", limits, OPEN, measurement)
    return with_verdict(
        row, found.findings, comparison=found.comparison, simulated=facts.simulated, strict=strict
    ).verdict
