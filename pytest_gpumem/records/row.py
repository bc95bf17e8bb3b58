"""A row of results: a measurement with its limits, its verdict and its key."""

from __future__ import annotations

import re
from typing import Final, Literal

from msgspec import UNSET, UnsetType, field

from pytest_gpumem.outcomes import Code, Outcome
from pytest_gpumem.records.device import DeviceFacts
from pytest_gpumem.records.footprint import Footprint
from pytest_gpumem.records.measurement import Limits, Measurement
from pytest_gpumem.records.record import Record

ENOUGH = 3  # Number of runs, or of processes, whose own spread counts
GROSS = 0.1
"""Share beyond the limit that fewer processes can prove. On H200 cards 5 of 2475 single measurements of unchanged code were 2 to 3 % slow
at all placements, for no visible reason (ci/records/nvidia-h200/gate_validation_short.json)."""


class Comparison(Record, frozen=True):
    """A row against its baseline, as shares of the baseline's latency: +0.01 is 1 % slower."""

    delta: float  # Measured change
    low: float  # Lower bound of the change, one-sided at 99.9 %: what FAIL rests on
    high: float  # Upper bound of the change, one-sided at 99.5 %: what PASS rests on
    catches: float  # Smallest slow-down that this comparison fails in 99 % of runs
    processes: int  # Accepted processes of the baseline
    runs: int = 1  # Accepted runs that those processes are of
    measured: int = 1  # Processes of this run behind the change
    p_value: float | None = None
    """Probability that a change of no more than the limit shows such a slow-down or a larger one. Of a row that crept, the change since the
    first run."""
    same_code: bool = False  # Each run that it is compared with ran the same machine code in the same way


class Verdict(Record, frozen=True):
    """The outcome of one row, with its reason."""

    outcome: Outcome  # The result
    reason: str  # One sentence with the figure, the limit and the margin
    comparison: Comparison | None = None  # Change against the baseline, where there is one
    simulated: bool = False  # Every verdict about a simulated device says so
    code: Code | None = None  # Why; None for a PASS by the figures, and for a FAIL by an absolute limit


class Row(Record, frozen=True):
    """One row of the table and of the JSON."""

    nodeid: str  # pytest's id of the test
    limits: Limits  # Its limits
    verdict: Verdict  # Its verdict
    measurement: Measurement | None = None
    """None if the test failed before anything was measured, and in a row that is of its footprint alone."""
    label: str = ""  # Label of the measurement inside its test
    failed: bool = False  # The test failed, for any reason: such a row never enters a baseline
    range_name: str = ""  # Name of the test's NVTX range in the domain `gpumem`
    test_source: str | None = None
    """SHA-256 of the text of the test's function, without functions that it calls and fixtures; None where it has no text."""
    test_error: bool | UnsetType = UNSET
    """True if the test failed by an assertion or an error of its own, whatever its verdicts. Written only then."""
    changed: tuple[str, ...] = ()  # Differences from the processes of the baseline, such as "driver 580.95.05 -> 590.10"
    extra: dict[str, float] = field(default_factory=dict)
    """Further figures that the test gave for this measurement, by name and unit, such as "elements/s"."""
    footprint: Footprint | None = None
    """Memory that the test took; of a labelled row, memory that the part with this label took. None where it was not watched."""

    why: tuple[str, ...] = ()
    """Of a row that fails: what ran differently than in the baseline, and the causes that `--gpumem-explain` finds, a line each."""

    device: DeviceFacts | UnsetType = UNSET
    """The GPU that measured it, where that is of another model than the run's, in a worker of xdist. Written only then."""

    def measured_on(self, device: DeviceFacts) -> DeviceFacts:
        """The GPU that measured it, in a run on `device`."""
        return device if self.device is UNSET else self.device

    @property
    def measured_something(self) -> bool:
        """False if the test failed before."""
        return self.measurement is not None or self.footprint is not None

    @property
    def key(self) -> str:
        """`nodeid[label]`, or the node id alone for an unlabelled measurement; `key_of` escapes brackets in either."""
        return key_of(self.nodeid, self.label)

    @property
    def unique_key(self) -> str:
        """The key; with the GPU where that is of another model than the run's, whose rows may have the same keys."""
        return self.key if self.device is UNSET else f"{self.key} on {self.device.key}"


Status = Literal["lost", "allowed", "not run"]
LOST: Final = "lost"
ALLOWED: Final = "allowed"
NOT_RUN: Final = "not run"


class Missing(Record, frozen=True):
    """A measurement of the baseline that this run did not take."""

    nodeid: str  # pytest's id of the test
    label: str  # Label of the measurement inside its test
    status: Status
    """`lost`; `allowed`, if --gpumem-allow-lost names it; or `not run`, if its test was deselected or the session ended first."""
    reason: str  # Why it was not taken

    @property
    def key(self) -> str:
        """As `Row.key`."""
        return key_of(self.nodeid, self.label)

    def named(self, name: str) -> bool:
        """True if a name is this measurement's key, or a node id that selects its test."""
        return name == self.key or selects(name, self.nodeid)


def selects(name: str, nodeid: str) -> bool:
    """True if a node id selects a test as on pytest's command line: its own id, or that of a file, a class or a test with parameters."""
    # `test[a]` is one set of parameters: `test[a][b]` is another, whose id is "a][b".
    return nodeid == name or (not name.endswith("]") and nodeid.startswith((f"{name}[", f"{name}::", f"{name.rstrip('/')}/")))


def covers(name: str, key: str) -> bool:
    """True if a name is a row's key, or a node id that selects the row's test."""
    own = key_of(name, "")
    return key in (name, own) or key.startswith(f"{own}[") or selects(name, key)


def key_of(nodeid: str, label: str) -> str:
    r"""The key of a measurement: `nodeid[label]`, or the node id alone without a label.

    Brackets inside the parameters and the label get a backslash, so that the parameter `a` with the label `b` is `test[a][b]` and the
    parameter `a][b` is `test[a\]\[b]`. The one key that two measurements can share is that of a test `test` with the label `a` and of a
    test `test[a]` without: pytest makes only one of them, and where both are collected the label is refused.
    """
    start = nodeid.find("[", nodeid.find("::") + 1)
    if start >= 0 and nodeid.endswith("]"):
        nodeid = f"{nodeid[:start]}[{_escaped(nodeid[start + 1 : -1])}]"
    return f"{nodeid}[{_escaped(label)}]" if label else nodeid


def _escaped(text: str) -> str:
    # A backslash is doubled only before a bracket or the end: pytest writes many into its ids, such as "\xe4".
    return re.sub(r"(\\*)([\[\]]|\Z)", lambda found: found[1] * 2 + (f"\\{found[2]}" if found[2] else ""), text)
