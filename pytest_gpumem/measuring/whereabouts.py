"""On which stream a foreign callable works: asked of the device, because a library need not follow anybody's current stream.

Numba has no current stream, an extension may launch on the default one, a framework may keep streams of its own. Timing the wrong
stream gives a wrong number without any error.
"""

from __future__ import annotations

from collections.abc import Callable

from pytest_gpumem.devices.protocol import Device, Stream
from pytest_gpumem.measuring.samplers.blocked import HOLD_TIMEOUT

NOTHING = 1.5
"""Times the empty interval up to which nothing can have run in it: an empty kernel takes more than twice as long."""
LOOKS = 2
"""Looks at every stream; what a stream seems to do only once was somebody else's."""
BESIDE = 20e-6
"""Seconds that the device may go on after the timed stream is done, beyond what asking costs, before something runs beside it."""

_DEFAULTS = ("the legacy default stream", "this thread's default stream")


class Elsewhere(Exception):
    """The work cannot be timed on one stream; a phrase that says why."""


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
        Elsewhere: it runs on streams of its own, or nowhere.
    """
    defaults = device.default_streams()
    names = dict(zip(map(id, defaults), _DEFAULTS, strict=False))
    candidates = (own, *defaults)
    busy = _busy(device, prepare, launch, own, candidates, floor)
    if defaults and own in busy and len(busy) > 1:
        # Some of it follows the current stream and some does not: make the default stream the current one, so that all meet there.
        own = defaults[0]
        busy = _busy(device, prepare, launch, own, candidates, floor)
    if not busy:
        raise Elsewhere("no work was seen on the timed stream or on a default one")
    if len(busy) > 1:
        raise Elsewhere("its work is spread over several streams")
    found = busy[0]
    if _goes_on(device, prepare, launch, found):
        raise Elsewhere("some of its work goes on beside the timed stream")
    return found, names.get(id(found))


def _busy(device: Device, prepare: Queues, launch: Queues, current: Stream, streams: tuple[Stream, ...], floor: float) -> list[Stream]:
    """Those of `streams` that did something, in every look."""
    shortest = [float("inf")] * len(streams)
    for _ in range(LOOKS):
        prepare(current)
        device.synchronize()
        pairs = [(device.event(), device.event()) for _ in streams]
        holds = []
        try:
            for stream, (start, _end) in zip(streams, pairs, strict=True):
                holds.append(device.hold(stream, HOLD_TIMEOUT))
                device.record(start, stream)
            launch(current)
            for stream, (_start, end) in zip(streams, pairs, strict=True):
                device.record(end, stream)
        finally:
            for hold in holds:
                hold.release()
        device.synchronize()
        shortest = [min(least, device.elapsed(*pair)) for least, pair in zip(shortest, pairs, strict=True)]
    return [stream for stream, seconds in zip(streams, shortest, strict=True) if seconds > NOTHING * floor]


def _goes_on(device: Device, prepare: Queues, launch: Queues, stream: Stream) -> bool:
    """Whether the device is busy for longer than `stream`. Work beside it that ends sooner costs nothing and stays unseen."""

    def rest(work: bool) -> float:
        prepare(stream)
        device.synchronize()
        if work:
            launch(stream)
        device.synchronize(stream)
        begun = device.now()
        device.synchronize()
        return device.now() - begun

    return min(rest(True) for _ in range(LOOKS + 1)) > min(rest(False) for _ in range(LOOKS + 1)) + BESIDE
