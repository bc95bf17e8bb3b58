"""One launch with nothing timed, from where a sample would begin: what counting and watching look at."""

from __future__ import annotations

from pytest_gpumem.devices.protocol import Device
from pytest_gpumem.measuring.target import Target


def put_back(device: Device, target: Target) -> None:
    """Put inputs and pages back exactly as before a sample, and wait."""
    target.prepare(target.stream)
    device.synchronize()
    for buffer in target.homes:
        buffer.put_home(target.stream)
    device.synchronize()


def launch(device: Device, target: Target) -> None:
    """Launch once on the first placement, and wait."""
    target.launch(0, target.stream)
    device.synchronize()
