"""A row of results: a measurement with its verdict, under the key that finds it again."""

from __future__ import annotations

from dataclasses import dataclass

from pytest_gpumem.records.measurement import Limits, Measurement
from pytest_gpumem.records.verdict import Verdict


@dataclass(frozen=True)
class Row:
    """One line of the table; also what JSON and baselines hold."""

    nodeid: str
    """pytest's id of the test."""
    limits: Limits
    """What it was held to."""
    verdict: Verdict
    """How it was judged."""
    measurement: Measurement | None = None
    """None if the test failed before anything was measured."""
    label: str = ""
    """Label of the measurement inside its test."""
    failed: bool = False
    """The test failed, for whatever reason: such a row never enters a baseline."""
    range_name: str = ""
    """Name of the test's NVTX range in the domain `gpumem`."""
    test_source: str | None = None
    """SHA-256 of the text of the test's function; what the function calls or is given by fixtures is not in it. None where it has none."""
    changed: tuple[str, ...] = ()
    """What is not as it was for the processes of the baseline, such as "driver 580.95.05 -> 590.10"."""

    @property
    def key(self) -> str:
        """`nodeid[label]`, or the node id alone for an unlabelled measurement."""
        return key_of(self.nodeid, self.label)


def selects(name: str, nodeid: str) -> bool:
    """Whether a node id selects a test as on pytest's command line: its own, or that of a file, a class or a test with parameters."""
    return nodeid == name or nodeid.startswith((f"{name}[", f"{name}::", f"{name.rstrip('/')}/"))


def key_of(nodeid: str, label: str) -> str:
    """`Row.key` of a measurement whose row is not made yet."""
    return f"{nodeid}[{label}]" if label else nodeid
