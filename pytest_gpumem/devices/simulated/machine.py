"""The simulated device's model of the time, with seeded noise."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Sequence
from functools import partial
from statistics import NormalDist

import numpy as np

from pytest_gpumem.devices.protocol import Allocation, WindowSpec
from pytest_gpumem.devices.simulated.datasheets import Datasheet
from pytest_gpumem.devices.simulated.engine import COMPUTE, DEVICE_TO_HOST, HOST_TO_DEVICE
from pytest_gpumem.devices.simulated.l2 import L2Lines
from pytest_gpumem.devices.simulated.pages import Pages
from pytest_gpumem.devices.simulated.timing import LaunchWork, Timing, work_of
from pytest_gpumem.kernels.kernel import Access, LaunchShape
from pytest_gpumem.records.what_ran import Step
from pytest_gpumem.units import MiB

_NORMAL = NormalDist()
_BLOCK = 4096


class Noise:
    """The disturbances of one device. The same seed and the same calls give the same numbers."""

    def __init__(self, seed: int) -> None:
        self._seed = seed
        self._generator = np.random.default_rng(seed)
        self._drawn: list[float] = []
        self._placements: dict[tuple[tuple[int, ...], float], float] = {}
        self._launches = 0

    def sample(self, seconds: float) -> float:
        """Factor of one launch: lognormal, 0.3 % for a launch of a microsecond down to 0.05 % for a long one."""
        if not self._drawn:
            self._drawn = self._generator.standard_normal(_BLOCK).tolist()
        sigma = 0.0005 + 0.0025 / (1.0 + seconds / 10e-6)
        return math.exp(sigma * self._drawn.pop())

    def placement(self, addresses: tuple[int, ...], footprint: float) -> float:
        """Factor of where the buffers lie: the same for the same addresses. Standard deviation 2.1 % for three arrays of 2 MiB, 0.37 % for
        three of 32 MiB, then falling faster than the footprint grows."""
        factor = self._placements.get((addresses, footprint))
        if factor is None:
            digest = hashlib.blake2b(repr((self._seed, addresses)).encode(), digest_size=8).digest()
            z = min(
                3.0, max(-3.0, _NORMAL.inv_cdf((int.from_bytes(digest, "little") + 0.5) / 2**64))
            )
            small, large = 6 * MiB, 96 * MiB
            spread = (
                0.021
                * min(1.0, (small / max(1.0, min(footprint, large))) ** 0.626)
                * min(1.0, large / max(1.0, footprint)) ** 1.2
            )
            self._placements[addresses, footprint] = factor = math.exp(spread * z)
        return factor

    def warm_up(self) -> float:
        """Factor of the first launches after the device was made or stood idle: clocks rise, tables are filled."""
        self._launches += 1
        return 1.0 + 0.4 * math.exp(-self._launches / 2) if self._launches < 40 else 1.0

    def rest(self) -> None:
        """The device stood idle."""
        self._launches = 0


_IDLE = 0.1  # seconds without work after which a device has to warm up again


class SimulatedMachine:
    """State that the facets share besides the timeline: L2, pages of managed memory, the model of the time, noise."""

    def __init__(self, sheet: Datasheet, seed: int) -> None:
        self.sheet = sheet
        self.facts = sheet.facts()
        self.l2 = L2Lines(sheet)
        self.timing = Timing(sheet, self.l2)
        self.noise = Noise(seed)
        self.pages: dict[int, Pages] = {}  # of managed allocations, by their identity
        self.write_combined: set[int] = set()  # identities of write-combined allocations
        self.watching: list[tuple[Step, float, float]] | None = None
        """Kernels and copies so far, each with its start and its seconds, while activity is recorded."""
        self._busy_until = 0.0
        self._running: list[tuple[float, float]] = []
        """End of each kernel under a window, and the bytes that are to persist for it."""
        self._link_until = {
            True: 0.0,
            False: 0.0,
        }  # when the last copy to the host, and the last one from it, ends

    @property
    def full_grid(self) -> LaunchShape:
        """A launch that fills the device."""
        return LaunchShape(self.facts.sm_count * (self.facts.max_threads_per_sm // 256), 256)

    def run_kernel(self, work: LaunchWork, window: WindowSpec | None, start: float) -> float:
        if start - self._busy_until > _IDLE:
            self.noise.rest()
        self._running = [one for one in self._running if one[0] > start]
        seconds = self.timing.kernel(
            work, window, sum(persisting for _, persisting in self._running)
        )
        seconds *= (
            self.noise.placement(work.addresses, work.reach)
            * self.noise.sample(seconds)
            * self.noise.warm_up()
        )
        self._busy_until = start + seconds
        if window is not None and (persisting := self.timing.persisting(work, window)):
            self._running.append((start + seconds, persisting))
        return seconds

    def share_of(self, work: LaunchWork) -> float:
        """Share of the threads that fit the device which a launch takes."""
        return min(1.0, work.threads / (self.facts.sm_count * self.facts.max_threads_per_sm))

    def run_copy(
        self, destination: Allocation, source: Allocation, nbytes: int, start: float
    ) -> float:
        for memory in (destination, source):
            pages = self.pages.get(id(memory))
            if pages is not None:
                pages.to_device()
        self.l2.forget(destination)
        seconds = (
            self.sheet.launch
            + self.sheet.copy_start
            + self.timing.copy(destination, source, nbytes)
        )
        seconds *= self.noise.sample(seconds)
        there = destination.kind.on_host
        seconds += self.sheet.duplex_loss * max(
            0.0, min(seconds, self._link_until[not there] - start)
        )
        self._link_until[there] = start + seconds
        self._busy_until = start + seconds
        return seconds

    def copying(
        self, destination: Allocation, source: Allocation, nbytes: int
    ) -> tuple[Callable[[float], float], str, bool]:
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
        inside = self.touching([(read, source), (write, destination)])
        return lambda start: self.sheet.copy_start + inside(start), COMPUTE, False

    def touching(self, accesses: Sequence[tuple[Access, Allocation]]) -> Callable[[float], float]:
        """Duration of a driver's own kernel, such as a fill."""
        work = work_of(
            self.sheet, self.pages, [(a, m, 4) for a, m in accesses], self.full_grid, 4, None
        )
        return partial(self.run_kernel, work, None)

    def host_access(self, allocation: Allocation, *, writes: bool) -> float:
        """The host touches memory: managed pages come to it. Seconds that this takes."""
        pages = self.pages.get(id(allocation))
        self.l2.forget(allocation)
        return (
            0.0 if pages is None else self.timing.pages.host_touched(pages.to_host(writes=writes))
        )

    def watched(self, ran: Step, duration: Callable[[float], float], start: float) -> float:
        """The time of a kernel or a copy, which is recorded if activity is."""
        seconds = duration(start)
        if self.watching is not None:
            self.watching.append((ran, start, seconds))
        return seconds
