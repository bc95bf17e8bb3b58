"""A simulated device: its facets, on one timeline and one machine."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

from pytest_gpumem.devices.footprints import Footprints
from pytest_gpumem.devices.protocol import Device, Unsupported
from pytest_gpumem.devices.simulated.allocations import SimulatedMemory
from pytest_gpumem.devices.simulated.counters import SimulatedCounters
from pytest_gpumem.devices.simulated.datasheets import Datasheet
from pytest_gpumem.devices.simulated.filling import SimulatedContent
from pytest_gpumem.devices.simulated.kernels import SimulatedKernels
from pytest_gpumem.devices.simulated.machine import Machine
from pytest_gpumem.devices.simulated.managed import SimulatedManaged
from pytest_gpumem.devices.simulated.streams import CALL, SimulatedGraphs, SimulatedStreams, Timeline
from pytest_gpumem.devices.simulated.windows import SimulatedL2
from pytest_gpumem.records.device import DeviceFacts
from pytest_gpumem.records.measurement import Conditions


class SimulatedDevice:
    """A device that models a datasheet.

    Args:
        datasheet: its figures and fitted parameters.
        seed: of its noise. The same seed and the same calls give exactly the same times.
    """

    def __init__(self, datasheet: Datasheet, *, seed: int = 0) -> None:
        self.timeline = Timeline(datasheet)
        self.machine = Machine(datasheet, seed)
        self.streams = SimulatedStreams(self.timeline)
        self.graphs = SimulatedGraphs(self.timeline, self.machine)
        self.kernels = SimulatedKernels(self.timeline, self.machine)
        self.memory = SimulatedMemory(self.timeline, self.machine, self.kernels.forget)
        self.content = SimulatedContent(self.timeline, self.machine)
        self.l2 = SimulatedL2(self.timeline, self.machine)
        self.managed = SimulatedManaged(self.timeline, self.machine, self.memory)
        self.counters = SimulatedCounters(self.timeline, self.machine)
        self.footprints = Footprints(None, (), lambda: None)

    @property
    def facts(self) -> DeviceFacts:
        return self.machine.facts

    def now(self) -> float:
        self.timeline.host += CALL
        return self.timeline.host

    def entropy(self, seed: int) -> int:
        return seed

    def conditions(self) -> Conditions:
        sheet = self.machine.sheet
        return Conditions(sm_clock_hz=sheet.sm_clock, memory_clock_hz=sheet.memory_clock, throttle_reasons=(), other_processes=0)

    def current(self) -> AbstractContextManager[None]:
        return nullcontext()

    def elsewhere(self) -> int | None:
        return None

    def peer_access(self, allowed: bool) -> AbstractContextManager[None]:
        raise Unsupported("one GPU is simulated: there is no peer to copy to")

    def close(self) -> None:
        self.timeline.clear()
        self.kernels.clear()


_: type[Device] = SimulatedDevice
