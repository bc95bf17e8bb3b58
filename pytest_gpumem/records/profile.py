"""A profiler's view of one measurement: kernels, copies, memsets, pages of managed memory, clocks.

Figures are sums over all measured launches of the measurement unless a field says otherwise. The rest of the test (preparation, warm-up,
checks, flushes) is in `TestProfile.rest`. None is "not known": nsys counts no DRAM bytes, ncu counts no copies.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from msgspec import field

from pytest_gpumem.records.measurement import Window
from pytest_gpumem.records.migrations import PageCounts
from pytest_gpumem.records.record import Launches, Record
from pytest_gpumem.records.row import key_of
from pytest_gpumem.records.uses import CopyUse, KernelUse


class Besides(Record, frozen=True):
    """Activity in a test's range outside of its measured launches."""

    kernels: tuple[KernelUse, ...] = ()
    copies: tuple[CopyUse, ...] = ()
    memsets: tuple[CopyUse, ...] = ()
    migrations: PageCounts | None = None
    """None where nothing was recorded of managed memory."""


class TestProfile(Record, frozen=True):
    """One measurement of a test as one tool recorded it in one process."""

    __test__ = False  # pytest collects classes called Test...

    name: str
    """Name of the test's NVTX range, `Row.range_name`."""
    nodeid: str | None
    """pytest's id of the test; None where the tool did not record it."""
    label: str
    """Label of the measurement as it stands in the name of its range (`ranges.labelled`); empty for an unlabelled one."""
    launches: Launches | None
    """Measured launches; None where the tool does not tell them from the kernels that they consist of."""
    kernels: tuple[KernelUse, ...]
    """Kernels of the measured launches, the longest first."""
    copies: tuple[CopyUse, ...] = ()
    """Copies of the measured launches, the longest first."""
    memsets: tuple[CopyUse, ...] = ()
    """Memsets of the measured launches, the longest first."""
    migrations: PageCounts | None = None
    """Page faults and migrations of managed memory during all measured launches; None where they were not recorded."""
    rest: Besides = field(default_factory=Besides)
    """Activity of the test outside of its measured launches."""
    sm_clock_hz: float | None = None
    """SM clock in hertz, the mean over the kernels weighted by their time."""
    memory_clock_hz: float | None = None
    """Memory clock in hertz, the mean over the kernels weighted by their time."""
    set_aside: int | None = None
    """Bytes of L2 set aside for persisting accesses, where the tool gives them."""
    window: Window | None = None
    """Access-policy window, where it is known."""
    process: int | None = None
    """Process id; None where the tool does not give it."""
    tool: str = ""
    """Tool that recorded it: "nsys" or "ncu"."""
    tool_version: str = ""
    """Version of the tool."""

    @property
    def key(self) -> str:
        """`Row.key` where the node id is known and the label stands in its range unchanged; the range's names otherwise."""
        return key_of(self.nodeid or self.name, self.label)

    @property
    def nanoseconds(self) -> int:
        """Running time of all kernels of the measured launches in nanoseconds; those that overlap count each."""
        return sum(kernel.nanoseconds for kernel in self.kernels)

    @property
    def kernel_launches(self) -> int:
        """Launches of kernels within the measured launches."""
        return sum(kernel.launches for kernel in self.kernels)

    @property
    def dram_read(self) -> int | None:
        """Bytes read from DRAM by all kernels; None unless it is known of each."""
        return _sum(kernel.dram_read for kernel in self.kernels)

    @property
    def dram_written(self) -> int | None:
        """Bytes written to DRAM by all kernels; None unless it is known of each."""
        return _sum(kernel.dram_written for kernel in self.kernels)

    @property
    def l2_read(self) -> int | None:
        """Bytes that the SMs read from L2; None unless it is known of each kernel."""
        return _sum(kernel.l2_read for kernel in self.kernels)

    @property
    def l2_written(self) -> int | None:
        """Bytes that the SMs wrote to L2; None unless it is known of each kernel."""
        return _sum(kernel.l2_written for kernel in self.kernels)

    @property
    def l2_hit_rate(self) -> float | None:
        """L2 hit rate over all kernels, weighted by the bytes that the SMs read and write, else by time."""
        return self._mean(lambda kernel: kernel.l2_hit_rate, lambda kernel: _sum((kernel.l2_read, kernel.l2_written)))

    @property
    def l2_read_hit_rate(self) -> float | None:
        """L2 hit rate of reads of the SMs over all kernels, weighted by these bytes, else by time."""
        return self._mean(lambda kernel: kernel.l2_read_hit_rate, lambda kernel: kernel.l2_read)

    @property
    def sectors_per_request(self) -> float | None:
        """Sectors of one load, over all kernels, weighted by the bytes that the SMs read from L2, else by time."""
        return self._mean(lambda kernel: kernel.sectors_per_request, lambda kernel: kernel.l2_read)

    @property
    def sectors_per_store(self) -> float | None:
        """Sectors of one store, over all kernels, weighted by the bytes that the SMs wrote to L2, else by time."""
        return self._mean(lambda kernel: kernel.sectors_per_store, lambda kernel: kernel.l2_written)

    @property
    def occupancy(self) -> float | None:
        """Achieved occupancy over all kernels, weighted by their time."""
        return self._mean(lambda kernel: kernel.occupancy, lambda kernel: kernel.nanoseconds)

    def _mean(self, figure: Callable[[KernelUse], float | None], weight: Callable[[KernelUse], int | None]) -> float | None:
        """The mean over the kernels with a known figure. The weights are all bytes or all times, never a mixture."""
        known = [(value, kernel) for kernel in self.kernels if (value := figure(kernel)) is not None]
        weights = [weight(kernel) for _, kernel in known]
        if any(one is None for one in weights) or not sum(one or 0 for one in weights):
            weights = [kernel.nanoseconds for _, kernel in known]
        total = sum(one or 0 for one in weights)
        return sum(value * (one or 0) for (value, _), one in zip(known, weights, strict=True)) / total if total else None


def _sum(figures: Iterable[int | None]) -> int | None:
    known = list(figures)
    return None if not known or any(one is None for one in known) else sum(one or 0 for one in known)
