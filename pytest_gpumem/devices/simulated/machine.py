"""How long the simulated device works on what it is given: the model of the time with noise, and who watches."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

from msgspec.structs import replace

from pytest_gpumem.devices.protocol import Allocation, WindowSpec
from pytest_gpumem.devices.simulated.datasheets import Datasheet
from pytest_gpumem.devices.simulated.engine import COMPUTE, DEVICE_TO_HOST, HOST_TO_DEVICE
from pytest_gpumem.devices.simulated.l2 import L2
from pytest_gpumem.devices.simulated.noise import Noise
from pytest_gpumem.devices.simulated.pages import Pages
from pytest_gpumem.devices.simulated.timing import Timing, Work, work_of
from pytest_gpumem.kernels.kernel import Access, LaunchShape
from pytest_gpumem.records.uses import CopyUse, KernelUse

_IDLE = 0.1
"""Seconds without work after which a device has to warm up again."""


class Machine:
    """What the facets share besides the timeline: L2, pages of managed memory, the model of the time, noise."""

    def __init__(self, sheet: Datasheet, seed: int) -> None:
        self.sheet = sheet
        self.facts = sheet.facts()
        self.l2 = L2(sheet)
        self.timing = Timing(sheet, self.l2)
        self.noise = Noise(seed)
        self.pages: dict[int, Pages] = {}
        """Of managed allocations, by their identity."""
        self.write_combined: set[int] = set()
        """Identities of write-combined allocations."""
        self.watching: list[KernelUse | CopyUse] | None = None
        """What ran, while somebody counts it."""
        self._busy_until = 0.0

    @property
    def full_grid(self) -> LaunchShape:
        """A launch that fills the device."""
        return LaunchShape(self.facts.sm_count * (self.facts.max_threads_per_sm // 256), 256)

    def run_kernel(self, work: Work, window: WindowSpec | None, start: float) -> float:
        if start - self._busy_until > _IDLE:
            self.noise.rest()
        seconds = self.timing.kernel(work, window)
        seconds *= self.noise.placement(work.addresses, work.reach) * self.noise.sample(seconds) * self.noise.warm_up()
        self._busy_until = start + seconds
        return seconds

    def run_copy(self, destination: Allocation, source: Allocation, nbytes: int, start: float) -> float:
        for memory in (destination, source):
            pages = self.pages.get(id(memory))
            if pages is not None:
                pages.to_device()
        self.l2.forget(destination)
        seconds = self.sheet.launch + self.timing.copy(destination, source, nbytes)
        seconds *= self.noise.sample(seconds)
        self._busy_until = start + seconds
        return seconds

    def copying(self, destination: Allocation, source: Allocation, nbytes: int) -> tuple[Callable[[float], float], str, bool]:
        """Duration, engine, and whether the host waits for a copy."""
        waits = destination.kind.pageable or source.kind.pageable
        if source.kind.on_host:
            return partial(self.run_copy, destination, source, nbytes), HOST_TO_DEVICE, waits
        if destination.kind.on_host:
            # One copy engine serves both directions in turn (asyncEngineCount; Best Practices Guide, 9.1.2).
            engine = DEVICE_TO_HOST if self.sheet.async_engines > 1 else HOST_TO_DEVICE
            return partial(self.run_copy, destination, source, nbytes), engine, waits
        read = Access("source", "read", nbytes, nbytes)
        write = Access("destination", "write", nbytes, nbytes)
        return self.touching([(read, source), (write, destination)]), COMPUTE, False

    def touching(self, accesses: Sequence[tuple[Access, Allocation]]) -> Callable[[float], float]:
        """Duration of a driver's own kernel, such as a fill."""
        work = work_of(self.sheet, [(a, m, 4, self.pages.get(id(m))) for a, m in accesses], self.full_grid, 4, None)
        return partial(self.run_kernel, work, None)

    def host_access(self, allocation: Allocation, *, writes: bool) -> float:
        """The host touches memory: managed pages come to it. Seconds that this takes."""
        pages = self.pages.get(id(allocation))
        self.l2.forget(allocation)
        return 0.0 if pages is None else self.timing.pages.host_touched(pages.touched_by_host(writes=writes))

    def watched(self, use: KernelUse | CopyUse, duration: Callable[[float], float], start: float) -> float:
        """The time of a piece of work, told to whoever watches."""
        seconds = duration(start)
        if self.watching is not None:
            self.watching.append(replace(use, nanoseconds=round(seconds * 1e9)))
        return seconds
