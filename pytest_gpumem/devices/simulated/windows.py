"""The simulated device's persisting L2: the set-aside and the windows of streams."""

from __future__ import annotations

from pytest_gpumem.devices import protocol
from pytest_gpumem.devices.checks import check_window, unsupported
from pytest_gpumem.devices.protocol import DeviceError, Stream, Unsupported, WindowSpec
from pytest_gpumem.devices.simulated.machine import Machine
from pytest_gpumem.devices.simulated.streams import ALLOCATE, CALL, Timeline, own_stream


class SimulatedL2:
    """The set-aside of the model's L2, and windows."""

    def __init__(self, timeline: Timeline, machine: Machine) -> None:
        self._timeline = timeline
        self._machine = machine

    def set_aside(self) -> int:
        return self._machine.l2.set_aside

    def request_set_aside(self, nbytes: int) -> int:
        reason = unsupported(self._machine.facts, self.set_aside)
        if reason is not None:
            raise Unsupported(reason)
        if nbytes < 0:
            raise DeviceError(f"a set-aside of {nbytes} bytes: at least 0 is needed")
        self._timeline.forbid_capture("it changes the set-aside")
        self._timeline.run()
        self._timeline.host += ALLOCATE
        return self._machine.l2.request_set_aside(nbytes)

    def set_window(self, stream: Stream, window: WindowSpec | None) -> None:
        own = own_stream(stream)
        self._timeline.host += CALL
        if window is not None:
            check_window(window, self._machine.facts)
        self._timeline.windows[own] = window

    def window(self, stream: Stream) -> WindowSpec | None:
        self._timeline.host += CALL
        return self._timeline.windows.get(own_stream(stream))

    def reset_persisting(self) -> None:
        self._timeline.forbid_capture("it resets persisting lines")
        self._timeline.run()
        self._timeline.host += CALL
        self._machine.l2.reset_persisting()


_: type[protocol.L2] = SimulatedL2
