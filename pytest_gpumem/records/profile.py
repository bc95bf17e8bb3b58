"""What a profiler saw of one measurement: kernels, copies, memsets, pages of managed memory, clocks.

Figures are sums over all measured launches of the measurement unless a field says otherwise. What the test did besides them
(preparation, warm-up, checks, flushes) stands apart in `TestProfile.rest`. None is "not known": nsys counts no DRAM bytes, ncu counts no
copies.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from msgspec import field

from pytest_gpumem.records.measurement import Window
from pytest_gpumem.records.migrations import PageCounts
from pytest_gpumem.records.record import Record
from pytest_gpumem.records.row import key_of
from pytest_gpumem.records.schema import SchemaError, from_plain, to_plain
from pytest_gpumem.records.uses import COPY_KINDS as COPY_KINDS
from pytest_gpumem.records.uses import MEMORY_KINDS as MEMORY_KINDS
from pytest_gpumem.records.uses import CopyUse as CopyUse
from pytest_gpumem.records.uses import KernelUse as KernelUse

SCHEMA = 1
"""Version of the layout in JSON. A reader refuses any other."""


class Besides(Record, frozen=True):
    """What happened in a test's range outside of its measured launches."""

    kernels: tuple[KernelUse, ...] = ()
    copies: tuple[CopyUse, ...] = ()
    memsets: tuple[CopyUse, ...] = ()
    migrations: PageCounts | None = None
    """None where nothing was recorded of managed memory."""


class TestProfile(Record, frozen=True):
    """One measurement of a test as one tool saw it in one process."""

    __test__ = False  # pytest collects what is called Test...

    name: str
    """Name of the test's NVTX range, `Row.range_name`."""
    nodeid: str | None
    """pytest's id of the test; None where the tool did not record it."""
    label: str
    """Label of the measurement as it stands in the name of its range (`ranges.labelled`); empty for an unlabelled one."""
    launches: int | None
    """Measured launches; None where the tool does not tell them from the kernels that they consist of."""
    kernels: tuple[KernelUse, ...]
    """Kernels of the measured launches, the longest first."""
    copies: tuple[CopyUse, ...] = ()
    """Copies of the measured launches, the longest first."""
    memsets: tuple[CopyUse, ...] = ()
    """Memsets of the measured launches, the longest first."""
    migrations: PageCounts | None = None
    """What pages of managed memory did during the measured launches, all together; None where that was not recorded."""
    rest: Besides = field(default_factory=Besides)
    """What the test did besides."""
    sm_clock_hz: float | None = None
    """SM clock in hertz, the mean over the kernels weighted by their time."""
    memory_clock_hz: float | None = None
    """Memory clock in hertz, the mean over the kernels weighted by their time."""
    set_aside: int | None = None
    """Bytes of L2 set aside for persisting accesses, where the tool says."""
    window: Window | None = None
    """Access-policy window, where it is known."""
    process: int | None = None
    """Process id; None where the tool does not say."""
    tool: str = ""
    """What recorded it: "nsys" or "ncu"."""
    tool_version: str = ""
    """Its version, as it gives it."""

    @property
    def key(self) -> str:
        """`Row.key` where the node id is known and the label stands in its range unchanged; the range's names else."""
        return key_of(self.nodeid or self.name, self.label)

    @property
    def nanoseconds(self) -> int:
        """Running time of all kernels of the measured launches in nanoseconds; those that overlap count each."""
        return sum(kernel.nanoseconds for kernel in self.kernels)

    @property
    def kernel_launches(self) -> int:
        """Kernels that were launched within the measured launches."""
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
        """Share of what was asked of L2 that it had, over all kernels, weighted by the bytes that the SMs asked, else by time."""
        return self._mean(lambda kernel: kernel.l2_hit_rate, lambda kernel: _sum((kernel.l2_read, kernel.l2_written)))

    @property
    def l2_read_hit_rate(self) -> float | None:
        """Share of what the SMs read that L2 had, over all kernels, weighted by these bytes, else by time."""
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
        """The mean over the kernels that the figure is known of. Weights are bytes or times, never a mixture."""
        known = [(value, kernel) for kernel in self.kernels if (value := figure(kernel)) is not None]
        weights = [weight(kernel) for _, kernel in known]
        if any(one is None for one in weights) or not sum(one or 0 for one in weights):
            weights = [kernel.nanoseconds for _, kernel in known]
        total = sum(one or 0 for one in weights)
        return sum(value * (one or 0) for (value, _), one in zip(known, weights, strict=True)) / total if total else None


def _sum(figures: Iterable[int | None]) -> int | None:
    known = list(figures)
    return None if not known or any(one is None for one in known) else sum(one or 0 for one in known)


def profiles_to_json(profiles: Iterable[TestProfile]) -> dict[str, Any]:
    """Profiles as plain values, with the version of their layout.

    Raises:
        SchemaError: a number that is not finite.
    """
    return {"schema": SCHEMA, "profiles": [to_plain(profile, f"$.profiles[{index}]") for index, profile in enumerate(profiles)]}


def profiles_from_json(value: object) -> tuple[TestProfile, ...]:
    """What `profiles_to_json` wrote. A field that has a default may be missing.

    Raises:
        SchemaError: another version, or the path of the value that does not fit.
    """
    if not isinstance(value, dict) or not isinstance(value.get("profiles"), list):
        raise SchemaError("$.profiles: missing, or not a JSON list; accepted is what `gpumem read --json` writes")
    if (schema := value.get("schema")) != SCHEMA or isinstance(schema, bool):
        raise SchemaError(f"$.schema: {schema!r}; this version reads {SCHEMA}")
    return tuple(_checked(from_plain(one, TestProfile, f"$.profiles[{i}]"), f"$.profiles[{i}]") for i, one in enumerate(value["profiles"]))


def _checked(profile: TestProfile, path: str) -> TestProfile:
    """Refuse figures of the right type that no profile can have."""
    if profile.launches is not None and profile.launches < 1:
        raise SchemaError(f"{path}.launches: {profile.launches!r}; figures of no launch mean nothing")
    for where, kernels in (("kernels", profile.kernels), ("rest.kernels", profile.rest.kernels)):
        for index, kernel in enumerate(kernels):
            if kernel.launches < 1 or kernel.nanoseconds < 0:
                raise SchemaError(f"{path}.{where}[{index}]: {kernel.launches} launches in {kernel.nanoseconds} ns cannot be")
    return profile
