"""A simulated device that tests can look into and make fail."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np

from pytest_gpumem.devices.memory_kinds import MemoryKind
from pytest_gpumem.devices.protocol import Allocation, DeviceError, Launch
from pytest_gpumem.devices.simulated.datasheets import DATASHEETS, Datasheet
from pytest_gpumem.devices.simulated.device import SimulatedDevice


class CountedDevice(SimulatedDevice):
    """An H100 that knows what is allocated on it and what was launched.

    Args:
        sheet: another datasheet.
        changes: fields of the datasheet that are to differ.
    """

    def __init__(self, sheet: Datasheet = DATASHEETS["h100"], **changes: Any) -> None:
        super().__init__(replace(sheet, **changes))
        self.live: list[Allocation] = []
        """Allocations that nobody has freed, oldest first."""
        self.launched: list[Launch] = []
        """Kernels, in the order of their launch; inside a capture once."""

        allocate, adopt, free = self.memory.allocate, self.memory.adopt, self.memory.free

        def allocated(nbytes: int, kind: MemoryKind, **flags: bool) -> Allocation:
            self.live.append(allocate(nbytes, kind, **flags))
            return self.live[-1]

        def adopted(array: Any, *, register: bool) -> Allocation:
            self.live.append(adopt(array, register=register))
            return self.live[-1]

        def freed(allocation: Allocation) -> None:
            free(allocation)
            self.live = [a for a in self.live if a is not allocation]

        replaced(self.memory, allocate=allocated, adopt=adopted, free=freed)
        self.before("kernels.launch", lambda launch, *_, **__: self.launched.append(launch))

    def before(self, verb: str, note: Callable[..., object]) -> None:
        """From now on `note` gets the arguments of a verb, such as "kernels.launch", before it is done; what `note` raises, it raises."""
        facet, _, name = verb.rpartition(".")
        owner = getattr(self, facet) if facet else self
        verb_itself = getattr(owner, name)

        def noted(*arguments: Any, **options: Any) -> Any:
            note(*arguments, **options)
            return verb_itself(*arguments, **options)

        replaced(owner, **{name: noted})

    def bytes_of(self, allocation: Allocation) -> bytes:
        """The bytes that are backed."""
        return np.asarray(self.content.to_host(allocation, "u1", allocation.nbytes)).tobytes()


def replaced(facet: object, **methods: Callable[..., Any]) -> None:
    """Put methods in the place of a facet's own."""
    for name, method in methods.items():
        setattr(facet, name, method)  # by itself the simulated device never fails


def failing(
    after: int = 0, error: type[BaseException] = DeviceError, *, once: bool = False
) -> Callable[..., Any]:
    """A method that raises once it was called `after` times, then or from then on; it does nothing else."""
    calls = 0

    def method(*_: object, **__: object) -> None:
        nonlocal calls
        calls += 1
        if calls == after + 1 or (calls > after and not once):
            raise error("made to fail")

    return method
