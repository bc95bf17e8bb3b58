"""The simulated device's managed memory: prefetches, advice, discards."""

from __future__ import annotations

from functools import partial

from pytest_gpumem.devices.protocol import Advice, Allocation, DeviceError, Managed, Stream
from pytest_gpumem.devices.simulated.allocations import SimulatedMemory
from pytest_gpumem.devices.simulated.engine import COMPUTE, DEVICE_TO_HOST, HOST_TO_DEVICE, Work
from pytest_gpumem.devices.simulated.machine import Machine
from pytest_gpumem.devices.simulated.pages import Pages
from pytest_gpumem.devices.simulated.streams import CALL, LAUNCH, Step, Timeline, own_stream


class SimulatedManaged:
    """Moves pages and takes advice."""

    def __init__(self, timeline: Timeline, machine: Machine, memory: SimulatedMemory) -> None:
        self._timeline = timeline
        self._machine = machine
        self._memory = memory

    def prefetch(self, allocation: Allocation, to_host: bool, stream: Stream) -> None:
        pages = self._pages_of(allocation, "prefetched")
        self._timeline.forbid_capture("a prefetch cannot be captured")
        self._timeline.called("cudaMemPrefetchAsync")
        duration = partial(self._run_prefetch, allocation, pages, to_host)
        engine = DEVICE_TO_HOST if to_host else HOST_TO_DEVICE
        self._timeline.queue(own_stream(stream), Step(Work(engine, duration)), LAUNCH)

    def _run_prefetch(self, allocation: Allocation, pages: Pages, to_host: bool, start: float) -> float:
        if to_host:
            moved = pages.to_host()
            seconds = self._machine.timing.pages.prefetched_to_host(moved)
        else:
            touched = pages.to_device()
            moved = touched.moved
            seconds = self._machine.timing.pages.prefetched(touched)
        if moved:
            self._machine.l2.forget(allocation)
        seconds += self._machine.sheet.launch
        return seconds * self._machine.noise.sample(seconds)

    def advise(self, allocation: Allocation, advice: Advice, to_host: bool, *, on: bool) -> None:
        pages = self._pages_of(allocation, "advised about")
        self._timeline.called("cudaMemAdvise")
        self._timeline.run()  # at once on the host's clock, but not before what was queued
        self._timeline.host += CALL
        pages.advise(advice, to_host, on=on)

    def discard(self, allocation: Allocation, stream: Stream) -> None:
        pages = self._pages_of(allocation, "discarded")
        self._timeline.forbid_capture("a discard cannot be captured")
        self._timeline.called("cudaMemDiscardBatchAsync")
        self._timeline.queue(own_stream(stream), Step(Work(COMPUTE, partial(self._run_discard, pages))), LAUNCH)

    def _run_discard(self, pages: Pages, start: float) -> float:
        pages.discard()
        return self._machine.sheet.launch

    def _pages_of(self, allocation: Allocation, done: str) -> Pages:
        if not allocation.kind.managed:
            raise DeviceError(f"only managed memory can be {done}, not {allocation.kind.value} memory")
        return self._machine.pages[id(allocation)]

    def oversubscribe(self, nbytes: int) -> Allocation:
        return self._memory.oversubscribe(nbytes)


_: type[Managed] = SimulatedManaged
