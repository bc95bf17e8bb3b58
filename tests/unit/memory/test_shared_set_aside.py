"""Several persisting streams share a device's set-aside."""

from __future__ import annotations

import pytest
from cases import naming
from counted_device import CountedDevice, failing

from pytest_gpumem.devices.protocol import DeviceError, WindowSpec
from pytest_gpumem.memory.buffers import Arena
from pytest_gpumem.memory.l2 import persisting
from pytest_gpumem.memory.window_request import BadWindow
from pytest_gpumem.units import MiB

STEP = 3.125 * MiB
FOUND = int(2 * STEP)
pytestmark = pytest.mark.usefixtures("found")


def test_what_all_need_together_is_set_aside(device: CountedDevice, arena: Arena) -> None:
    one, other = arena.buffer(8 * MiB), arena.buffer(8 * MiB)
    with persisting(device, one) as outer:
        assert outer.set_aside == device.l2.set_aside() == 4 * STEP
        with persisting(device, other) as inner:
            assert outer.set_aside == inner.set_aside == device.l2.set_aside() == 6 * STEP
            assert (outer.hit_ratio, inner.hit_ratio) == (1.0, 1.0)
            assert device.l2.window(outer.stream) == WindowSpec(one.address, 8 * MiB, 1.0)
            assert device.l2.window(inner.stream) == WindowSpec(other.address, 8 * MiB, 1.0)
            assert inner.thrashing is outer.thrashing is None
        assert (outer.set_aside, device.l2.set_aside()) == (4 * STEP, 4 * STEP)
        assert device.l2.window(outer.stream) == WindowSpec(one.address, 8 * MiB, 1.0)
        assert device.l2.window(inner.stream) is None
        one.move()
        assert device.l2.window(outer.stream) == WindowSpec(one.address, 8 * MiB, 1.0)
    assert device.l2.set_aside() == FOUND


def test_fitted_ratios_share_what_there_is_and_get_it_back(
    device: CountedDevice, arena: Arena
) -> None:
    one, other = arena.buffer(20 * MiB), arena.buffer(25 * MiB)
    with persisting(device, one) as outer:
        assert outer.hit_ratio == 1.0
        with persisting(device, other) as inner:
            assert device.l2.set_aside() == 25 * MiB
            assert outer.hit_ratio == inner.hit_ratio == pytest.approx(25 / 45)
            spec = device.l2.window(outer.stream)
            assert spec is not None
            assert spec.hit_ratio == outer.hit_ratio
            assert inner.thrashing is None
        assert outer.hit_ratio == 1.0
        spec = device.l2.window(outer.stream)
        assert spec is not None
        assert spec.hit_ratio == 1.0


def test_over_commit_is_said_with_the_numbers(device: CountedDevice, arena: Arena) -> None:
    one, other = arena.buffer(25 * MiB), arena.buffer(25 * MiB)
    with persisting(device, one, hit_ratio=1.0, set_aside="25 MiB") as outer:
        assert outer.thrashing is None
        with persisting(device, other, hit_ratio=1.0, set_aside="max") as inner:
            said = (
                "thrashing: hit ratio x bytes is 1 x 25 MiB + 1 x 25 MiB = 50 MiB, 31.25 MiB of L2 are set aside: "
                "the lines of 2 streams evict each other"
            )
            assert [inner.thrashing, outer.thrashing] == [said, said]
            assert inner.notes == (said,)
        assert outer.notes == ()


def test_off_stands_alone(device: CountedDevice, arena: Arena) -> None:
    one, other = arena.buffer(8 * MiB), arena.buffer(8 * MiB)
    for outer, inner in (("off", "fit"), ("fit", "off")):
        with persisting(device, one, set_aside=outer) as stream:
            before = device.l2.set_aside()
            with (
                pytest.raises(
                    BadWindow,
                    match=r'is still open, and the device has one set-aside: set_aside="off" cannot',
                ),
                persisting(device, other, set_aside=inner),
            ):
                pytest.fail("entered")
            assert device.l2.set_aside() == before == stream.set_aside
            other.move()  # nobody follows
        assert device.l2.set_aside() == FOUND


def test_a_second_stream_that_cannot_open_leaves_the_first_as_it_was() -> None:
    for error in [DeviceError, KeyboardInterrupt]:
        device = CountedDevice()
        assert device.l2.request_set_aside(FOUND) == FOUND
        arena = Arena(device, seed=7)
        with naming(error):
            one, other = arena.buffer(8 * MiB), arena.buffer(8 * MiB)
            with persisting(device, one) as outer:
                device.before("l2.request_set_aside", failing(error=error, once=True))
                with pytest.raises(error), persisting(device, other):
                    pytest.fail("entered")
                assert outer.set_aside == device.l2.set_aside() == 4 * STEP
                assert device.l2.window(outer.stream) == WindowSpec(one.address, 8 * MiB, 1.0)
            assert device.l2.set_aside() == FOUND
