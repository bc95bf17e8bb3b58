"""A stream that is held while work is queued on it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress

from pytest_gpumem.devices.protocol import Device, DeviceError, Stream

HOLD_TIMEOUT = 0.5
"""Seconds after which the holding kernel gives up: work that waits for the device would otherwise never return."""


@contextmanager
def held(device: Device, stream: Stream) -> Iterator[None]:
    """Hold `stream` while the block queues work on it; then let it go on.

    A hold that expired meanwhile is reported by the next `synchronize`, except where the block raises: then its own error counts, and
    nobody who uses the stream after it is told of the hold.
    """
    hold = device.hold(stream, HOLD_TIMEOUT)
    try:
        yield
    except BaseException:
        hold.release()
        with suppress(DeviceError):
            device.synchronize(stream)
        raise
    hold.release()
