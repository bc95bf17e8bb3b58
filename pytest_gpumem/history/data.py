"""What many runs measured: runs, a series of values for each figure of a test, and the changes of level in them."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True)
class Run:
    """One session of pytest on one card."""

    when: datetime  # when it was written, UTC
    revision: str  # the commit that it measured, with "-dirty" where there were uncommitted changes; empty where it is unknown
    card: str  # `DeviceFacts.key` of the device: the name of its folder in a store
    device: str  # name of the device, for people
    accepted: bool
    """It is of a baseline. The others were recorded (`--gpumem-record`)."""
    simulated: bool  # the device was simulated: its times mean nothing beside those of a GPU


@dataclass(frozen=True)
class Series:
    """One figure of one test, over the runs that measured it. A card of another model, and another variant of a card, is another series."""

    test: str  # `Row.key` of the test
    metric: str
    """The figure: "latency", "peak", "kept", "kernels", "copies" and others of `history.figures`. A larger one is worse."""
    unit: str  # of the values: "s", "B", or "" for a count
    card: str  # `Run.card` of its runs
    variant: str | None  # what tells cards of one model apart; None where they are alike, or it is unknown
    runs: NDArray[np.int32]  # indexes into `History.runs`, ascending
    values: NDArray[np.float64]  # the figure in each of `runs`


@dataclass(frozen=True)
class Change:
    """A lasting change of the level of a series."""

    series: int  # index into `History.series`
    at: int  # index into `Series.runs`: the first run at the new level
    earliest: int
    """As `at`: the first run that the change may begin with. Suspect are the commits after the run before it, up to that of `latest`."""
    latest: int  # as `at`: the last run that the change may begin with
    before: float  # level before it, in the unit of the series
    after: float  # level after it
    relative: float  # `after / before - 1`; infinite where the level before was 0
    accepted: bool  # somebody accepted it (`gpumem accept`), or the baseline did because the test became faster
    who: str  # who accepted it; empty where nobody did
    why: str  # the reason that was given; empty where nobody accepted it

    @property
    def worse(self) -> bool:
        """True if a test became slower or larger."""
        return self.after > self.before


@dataclass(frozen=True)
class History:
    """Everything that a store of runs says about its tests."""

    runs: tuple[Run, ...]  # oldest first
    series: tuple[Series, ...]
    changes: tuple[Change, ...]  # by series, then by run
