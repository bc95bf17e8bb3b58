"""Histories of one test or more, as a store would give them."""

from __future__ import annotations

from datetime import datetime, timedelta, timezone

import numpy as np
from numpy.typing import ArrayLike

from pytest_gpumem.history.data import Change, History, Run, Series

NEWEST = datetime(2026, 11, 22, 12, 0, tzinfo=timezone.utc)
CARD = "NVIDIA-H100-80GB-HBM3-sm90-80GiB-ecc"
DEVICE = "NVIDIA H100 80GB HBM3"


def runs(count: int, *, card: str = CARD, device: str = DEVICE, simulated: bool = False) -> list[Run]:
    """One a day, the newest at `NEWEST`; every third one is accepted."""
    days = [NEWEST - timedelta(days=count - 1 - index) for index in range(count)]
    return [Run(day, f"{index:04x}{'c0de' * 9}", card, device, index % 3 == 0, simulated) for index, day in enumerate(days)]


def series(
    test: str, values: ArrayLike, *, metric: str = "latency", unit: str = "s", card: str = CARD, variant: str | None = None
) -> Series:
    """A value in each of the first runs."""
    of_runs = np.array(values, float)
    return Series(test, metric, unit, card, variant, np.arange(of_runs.size, dtype=np.int32), of_runs)


def change(series: int, at: int, before: float, after: float, *, who: str = "", why: str = "", width: int = 1) -> Change:
    """A change that begins between `width` runs before `at` and as many behind it."""
    relative = after / before - 1 if before else float("inf")
    return Change(series, at, at - width, at + width, before, after, relative, bool(who), who, why)


def one_slower() -> History:
    """40 runs of a test that takes 2.5 % longer since the 30th run."""
    return History(
        tuple(runs(40)), (series("tests/test_a.py::test_copy", [100e-6] * 30 + [102.5e-6] * 10),), (change(0, 30, 100e-6, 102.5e-6),)
    )
