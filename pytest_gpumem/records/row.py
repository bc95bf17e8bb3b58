"""A row of results: a measurement with its limits, its verdict and what differs."""

from __future__ import annotations

from datetime import datetime
from typing import Final, Literal

from msgspec import field

from pytest_gpumem.outcomes import Code, Outcome
from pytest_gpumem.records import Count, LaunchTime, NotNegative, Record, key_of
from pytest_gpumem.records.footprint import Footprint
from pytest_gpumem.records.limits import Limits
from pytest_gpumem.records.measurement import Measurement

Value = int | float | str | tuple[int, ...] | None
"""Bytes, a count, the blocks or threads in x, y and z, or words."""

DECLARED = "declared bytes"
SECTORS = "sectors per request"
WINDOW = "access-policy window"
GPU_FAULTS, CPU_FAULTS = "GPU page faults", "CPU page faults"
MIGRATED = "migrated bytes"
ORDER = "order"  # the same steps in another order
FURTHER = "further differences"  # their number is in `now`
HOST = "host s"  # `Row.extra` of an adopted benchmark: seconds of a call by the host's clock


class Difference(Record, frozen=True, omit_defaults=True):
    """A difference of a row from what it is compared with."""

    kind: str
    """What differs: "declared bytes", "sectors per request", "access-policy window", "GPU page
    faults", "CPU page faults", "migrated bytes"; a kind of step such as "kernel"; "state", "order",
    or "further differences", whose number is `now`."""
    was: Value = None  # Value on the first side; None for what was added, and where it is unknown
    now: Value = None
    """Value on the second side; None for what was removed, and where it is unknown."""
    name: str = ""  # Of the step, or of a part of the state
    field: str = ""  # Of a step: what changed, such as "grid" or "argument 3"
    times: Count = 1  # Steps of the launch that differ so


class Comparison(Record, frozen=True):
    """A row against its reference, as shares of the reference's latency: +0.01 is 1 % slower."""

    change: float  # Measured change
    reach: float | None = None
    """Half of the change's interval, what noise may hide; None for one process."""
    days: int = 1  # Dates of the reference
    processes: int = 1  # Processes of the reference
    same_code: bool = False  # Every process of the reference ran the same machine code
    base: NotNegative | None = None  # Seconds of the reference, with the row's overhead


class PairedChange(Record, frozen=True):
    """What a duet measured: head over base less 1. +0.01 is 1 % slower."""

    change: float  # Mean of the pairs
    low: float  # Lower bound, one-sided at 99.9 %: what FAIL rests on
    high: float  # Upper bound, one-sided: what PASS rests on
    pairs: int  # Pairs of processes
    base: LaunchTime | None = None  # Seconds of base: median of its processes
    head: LaunchTime | None = None  # Likewise, of head


class LimitResult(Record, frozen=True):
    """The result of a limit. A verdict keeps FAIL, UNDECIDED and NEW."""

    limit: str
    """Name of the limit; empty for a doubt about the whole measurement, and for a declaration that
    cannot be true."""
    outcome: Outcome  # The result
    code: Code | None = None  # As `Verdict.code`
    reason: str = ""  # The sentence of `Verdict.reason` about it


class Verdict(Record, frozen=True):
    """The outcome of a row, with its reason."""

    outcome: Outcome  # The result
    reason: str  # One sentence with the figure, the limit and the margin
    comparison: Comparison | None = None  # Change against the reference, where there is a reference
    simulated: bool = False  # Every verdict about a simulated device says so
    code: Code | None = None
    """Why; None for a PASS by the figures, and for a FAIL by an absolute limit."""
    limits: tuple[LimitResult, ...] = ()  # Results that are not PASS, the worst first
    accepted: tuple[str, ...] = ()
    """Names of limits that do not hold, by a change that somebody accepted."""
    paired: PairedChange | None = None  # What a duet measured; None without a duet

    @property
    def change(self) -> float | None:
        """Change of the latency as a share: of a duet, else against the reference."""
        compared = self.paired or self.comparison
        return None if compared is None else compared.change

    @property
    def base(self) -> float | None:
        """Seconds that `change` is relative to."""
        compared = self.paired or self.comparison
        return None if compared is None else compared.base


class Row(Record, frozen=True):
    """One row of the table and of the JSON."""

    nodeid: str  # pytest's id of the test
    limits: Limits  # Its limits
    verdict: Verdict  # Its verdict
    measurement: Measurement | None = None
    """None if the test failed before anything was measured, and in a row of its footprint alone."""
    label: str = ""  # Label of the measurement inside its test
    failed: bool = False  # The test failed, for any reason: such a row never enters a baseline
    range_name: str = ""  # Name of the test's NVTX range in the domain `gpumem`
    test_error: bool = False  # The test failed by an assertion or an error, whatever its verdicts
    extra: dict[str, float] = field(default_factory=dict)
    """Further figures of the test for this measurement, by name and unit, such as "elements/s"."""
    footprint: Footprint | None = None
    """Memory that the test took; of a labelled row, memory that the part with this label took.
    None where it was not watched."""

    differences: tuple[Difference, ...] = ()
    """Of a row that fails: what differs from what it is compared with, the first to read first."""

    @property
    def measured_something(self) -> bool:
        """False if the test failed before."""
        return self.measurement is not None or self.footprint is not None

    @property
    def key(self) -> str:
        """`nodeid[label]`, or the node id alone without a label; `key_of` escapes brackets."""
        return key_of(self.nodeid, self.label)


class Past(Record, frozen=True):
    """A row in an earlier run."""

    utc: datetime  # When it was saved
    latency: float  # Seconds of a launch
    half_width: float | None = None  # Half of its 95 % interval, in seconds
    revision: str | None = None  # Revision of the measured code


ROW: Final = "row"  # `Omission.what` of a measurement of the baseline
TEST: Final = "test"  # `Omission.what` of a test that BASE runs
Status = Literal["lost", "accepted", "not run", "undecided"]
LOST: Final = "lost"
ACCEPTED: Final = "accepted"
NOT_RUN: Final = "not run"
UNDECIDED: Final = "undecided"
How = Literal[
    "passed",
    "failed",
    "skipped",
    "xfailed",
    "xpassed",
    "did not run",
    "left out",
    "not collected",
    "not reached",
    "gone",
    "not asked for",
]
"""How a test ended. "did not run": an earlier test kept it from running. "left out": by an option,
an ini file, a conftest or a module that skips. "not collected": the collection of its file failed.
"not reached": the session ended first. "gone": no file has it. "not asked for": the arguments or
`testpaths` do not name it."""


class Omission(Record, frozen=True):
    """A measurement of the baseline, a limit, or a test of BASE that this run did not judge."""

    nodeid: str  # pytest's id of the test
    label: str  # Label of the measurement inside its test
    status: Status
    """`lost`; `accepted`, if somebody accepted its removal; `not run`, if its test was left out or
    the session ended first; or `undecided`, if its test ran and nothing that the limit is about was
    measured."""
    reason: str  # Why it was not judged; of a test that did not run, what kept it
    what: str = ROW
    """Kind of expectation or name of a limit: "row" is a measurement of the baseline, "test" a test
    that BASE runs in a gate."""
    by_words: bool = False  # Words of the command line left its test out: somebody meant it
    base_too: bool = False  # BASE does not run the test of this gate either
    how: How = "gone"  # How its test ended

    @property
    def key(self) -> str:
        """As `Row.key`."""
        return key_of(self.nodeid, self.label)
