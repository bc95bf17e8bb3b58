"""Nsight Compute's view of one measurement: kernels and clocks.

Figures are sums over all measured launches of the measurement unless a field says otherwise. Preparation, warm-up, checks and flushes are
not among them. None is "not known".
"""

from __future__ import annotations

from pytest_gpumem.records.measurement import Window
from pytest_gpumem.records.record import Launches, Record
from pytest_gpumem.records.row import key_of
from pytest_gpumem.records.uses import KernelUse


class TestProfile(Record, frozen=True):
    """One measurement of a test as one tool recorded it in one process."""

    __test__ = False  # pytest collects classes called Test...

    name: str  # Name of the test's NVTX range, `Row.range_name`
    nodeid: str | None  # pytest's id of the test; None where the tool did not record it
    label: str  # Label of the measurement as it stands in the name of its range (`ranges.labelled`); empty for an unlabelled one
    launches: (
        Launches | None
    )  # Measured launches; None where the tool does not tell them from the kernels that they consist of
    kernels: tuple[KernelUse, ...]  # Kernels of the measured launches, the longest first
    sm_clock_hz: float | None = None
    """SM clock in hertz, the mean over the kernels weighted by their time."""
    memory_clock_hz: float | None = None
    """Memory clock in hertz, the mean over the kernels weighted by their time."""
    set_aside: int | None = None
    """Bytes of L2 set aside for persisting accesses, where the tool gives them."""
    window: Window | None = None  # Access-policy window, where it is known
    process: int | None = None  # Process id; None where the tool does not give it
    tool: str = ""  # Tool that recorded it: "ncu"
    tool_version: str = ""  # Version of the tool

    @property
    def key(self) -> str:
        """`Row.key` where the node id is known and the label stands in its range unchanged; the range's names otherwise."""
        return key_of(self.nodeid or self.name, self.label)
