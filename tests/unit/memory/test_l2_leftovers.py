"""What somebody else leaves of persisting L2 is found, put back and said."""

from __future__ import annotations

from dataclasses import replace

import pytest
from counted_device import CountedDevice

from pytest_gpumem.devices.protocol import WindowSpec
from pytest_gpumem.memory.l2_leftovers import L2Watch
from pytest_gpumem.units import MiB

pytestmark = pytest.mark.usefixtures("found")
WINDOW = WindowSpec(4096, 8 * MiB, 0.75)


@pytest.fixture
def watch(device: CountedDevice, found: int) -> L2Watch:
    return L2Watch(device)


@pytest.fixture
def resets(device: CountedDevice) -> list[str]:
    """Grows with every reset of persisting lines."""
    calls: list[str] = []
    device.before("l2.reset_persisting", lambda: calls.append("reset"))
    return calls


def text(watch: L2Watch) -> str:
    left = watch.settle()
    assert left is not None
    said, repaired = left
    assert repaired
    return said


def test_a_window_on_a_stream_is_put_back(
    device: CountedDevice, watch: L2Watch, resets: list[str]
) -> None:
    new, changed, dropped = (
        device.streams.create(),
        device.streams.create(),
        device.streams.create(),
    )
    for stream in (changed, dropped):
        device.l2.set_window(stream, WINDOW)
    watch.begin()
    other = replace(WINDOW, nbytes=4 * MiB)
    device.l2.set_window(new, WINDOW)
    device.l2.set_window(changed, other)
    device.l2.set_window(dropped, None)
    names = {stream: f"stream 0x{stream.handle:x}" for stream in (new, changed, dropped)}
    said = text(watch)
    before = "8 MiB at hit ratio 0.75"
    for stream, left in ((new, f"{before} (found: none)"), (dropped, f"none (found: {before})")):
        assert f"the window on {names[stream]}: {left}" in said
    assert f"{names[changed]}: 4 MiB at hit ratio 0.75 (found: {before})" in said
    assert [device.l2.window(stream) for stream in (new, changed, dropped)] == [
        None,
        WINDOW,
        WINDOW,
    ]
    assert resets == ["reset"]
