"""On which stream a foreign callable works: asked of the device, because a library need not follow anybody's current stream.

Numba has no current stream, an extension may launch on the default one, a framework may keep streams of its own. Timing the wrong
stream gives a wrong number without any error.
"""

from __future__ import annotations

from collections.abc import Callable

from pytest_gpumem.devices.protocol import Device, Stream
from pytest_gpumem.measuring.samplers import held
from pytest_gpumem.records.measurement import NOTHING_RAN

LOOKS = 2
"""Looks at every stream; what a stream seems to do only once was somebody else's. Long work is looked at once: each look runs it."""
LONG = 0.025
"""Seconds of work from which on nobody waits for other streams to end, because delays of microseconds no longer matter."""
LONG_SHARE = 0.1
"""Share of the whole time that a stream must be busy for, where the work is long."""
BESIDE = 20e-6
"""Seconds that the device may go on after the timed stream is done, beyond what asking costs, before something runs beside it."""

_DEFAULTS = ("the legacy default stream", "this thread's default stream")


class Elsewhere(Exception):
    """The work cannot be timed on one stream; a phrase that says why."""


class NoWork(Elsewhere):
    """The device did nothing: the host's clock may show the host's time alone."""


Queues = Callable[[Stream], object]
"""Something that queues work with the given stream as the current one of every library."""


def find(device: Device, prepare: Queues, launch: Queues, own: Stream, floor: float) -> tuple[Stream, str | None]:
    """The stream that shows the work's time, and its name if that is not `own`.

    Launches the work some ten times, with every stream that it may go to held and timed.

    Args:
        device: where it runs.
        prepare: puts the work's inputs back.
        launch: queues the work once; it ran before, so that nothing is compiled now.
        own: the stream that the harness meant.
        floor: seconds of an empty interval.

    Raises:
        HoldExpired: the work waits for the device.
        Elsewhere: it runs on streams of its own; `NoWork` if it runs nowhere.
    """
    defaults = device.streams.defaults()
    look = _Look(device, prepare, launch, floor)
    busy = [s for s in (own, *defaults) if look.busy(own, s)]
    if defaults and own in busy and defaults[0] in busy:
        # Some of it follows the current stream and some does not: make the default stream the current one, so that all meet there.
        look.first_on(defaults[0])
        busy = [s for s in (defaults[0], own) if look.busy(defaults[0], s)]
    elif defaults and defaults[0] in busy:
        busy = [defaults[0]]  # the two default streams wait for each other
    if not busy:
        if look.goes_on(own):
            raise Elsewhere("its work runs on streams of its own")
        raise NoWork("no work was seen on the timed stream, on a default one or on the device")
    if len(busy) > 1:
        raise Elsewhere("its work is spread over several streams")
    found = busy[0]
    if look.goes_on(found):
        raise Elsewhere("some of its work goes on beside the timed stream")
    names = dict(zip(map(id, defaults), _DEFAULTS, strict=False))
    return found, names.get(id(found))


class _Look:
    """Launches the work under observation."""

    def __init__(self, device: Device, prepare: Queues, launch: Queues, floor: float) -> None:
        self._device = device
        self._prepare = prepare
        self._launch = launch
        self._floor = floor
        self._whole: float | None = None

    def busy(self, current: Stream, watched: Stream) -> bool:
        """Whether `watched` does something, in every look, with `current` as the current stream."""
        whole = self._whole_time(current)
        least = max(NOTHING_RAN * self._floor, LONG_SHARE * whole if whole > LONG else 0.0)
        looks = 1 if whole > LONG else LOOKS
        return min(self._interval(current, watched, whole) for _ in range(looks)) > least

    def first_on(self, current: Stream) -> None:
        """Launch once with nothing held: a library sets up its state for a stream, such as a workspace, at its first work there."""
        self._idle_after(current, True)

    def _whole_time(self, current: Stream) -> float:
        """Seconds until the device is idle after one launch."""
        if self._whole is None:
            self._whole = min(self._idle_after(current, True) for _ in range(LOOKS))
        return self._whole

    def _idle_after(self, current: Stream, work: bool, first: Stream | None = None) -> float:
        """Seconds from a launch, or from when the stream `first` is done after it, until the device is idle."""
        device = self._device
        self._prepare(current)
        device.streams.synchronize()
        begun = device.now()
        if work:
            self._launch(current)
        if first is not None:
            device.streams.synchronize(first)
            begun = device.now()
        device.streams.synchronize()
        return device.now() - begun

    def _interval(self, current: Stream, watched: Stream, whole: float) -> float:
        """Seconds that `watched`, held while the work is queued, was busy afterwards.

        It is released when work on other streams has ended: a kernel that ends between two events on an idle stream delays the second
        by some microseconds.
        """
        device = self._device
        start, end = device.streams.event(), device.streams.event()
        self._prepare(current)
        device.streams.synchronize()
        with held(device, watched):
            device.streams.record(start, watched)
            self._launch(current)
            device.streams.record(end, watched)
            over = device.now() + (2 * whole if whole <= LONG else 0.0)
            while device.now() < over:
                pass
        device.streams.synchronize()
        return device.streams.elapsed(start, end)

    def goes_on(self, stream: Stream) -> bool:
        """Whether the device is busy for longer than `stream`. Work beside it that ends sooner costs nothing and stays unseen."""
        after, idle = (min(self._idle_after(stream, work, stream) for _ in range(LOOKS + 1)) for work in (True, False))
        return after > idle + BESIDE
