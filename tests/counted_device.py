"""A simulated device that tests can look into and make fail."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np

from pytest_gpumem.devices.protocol import Allocation, DeviceError, Launch, MemoryKind, Stream, WindowSpec
from pytest_gpumem.devices.simulated.datasheets import DATASHEETS
from pytest_gpumem.devices.simulated.device import SimulatedDevice


class CountedDevice(SimulatedDevice):
    """An H100 that knows what is allocated on it and what was launched.

    Args:
        changes: fields of the datasheet that are to differ.
    """

    def __init__(self, **changes: Any) -> None:
        super().__init__(replace(DATASHEETS["h100"], **changes))
        self.live: list[Allocation] = []
        """Allocations that nobody has freed, oldest first."""
        self.launched: list[Launch] = []
        """Kernels, in the order of their launch; inside a capture once."""

    def allocate(self, nbytes: int, kind: MemoryKind, **flags: bool) -> Allocation:
        allocation = super().allocate(nbytes, kind, **flags)
        self.live.append(allocation)
        return allocation

    def adopt(self, array: Any, *, register: bool) -> Allocation:
        allocation = super().adopt(array, register=register)
        self.live.append(allocation)
        return allocation

    def free(self, allocation: Allocation) -> None:
        super().free(allocation)
        self.live = [a for a in self.live if a is not allocation]

    def launch(self, launch: Launch, stream: Stream, *, window: WindowSpec | None = None) -> None:
        self.launched.append(launch)
        super().launch(launch, stream, window=window)

    def content(self, allocation: Allocation) -> bytes:
        """The bytes that are backed."""
        return np.asarray(self.to_host(allocation, "u1", allocation.nbytes)).tobytes()


def failing(after: int = 0, error: type[BaseException] = DeviceError) -> Callable[..., Any]:
    """A method that raises once it was called `after` times; before that it does nothing."""
    calls = 0

    def method(*_: object, **__: object) -> None:
        nonlocal calls
        calls += 1
        if calls > after:
            raise error("made to fail")

    return method
