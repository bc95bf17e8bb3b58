"""A persisting stream: what is granted, where the window lies, and that all is put back."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from cases import naming
from counted_device import CountedDevice, failing

from pytest_gpumem.devices.opening import choose
from pytest_gpumem.devices.protocol import AccessProperty, DeviceError, WindowSpec
from pytest_gpumem.memory.buffers import Arena
from pytest_gpumem.memory.l2 import persisting
from pytest_gpumem.memory.window_request import BadWindow, fit_set_aside
from pytest_gpumem.units import MiB

STEP = 3.125 * MiB
FOUND = int(2 * STEP)
pytestmark = pytest.mark.usefixtures("found")


@pytest.fixture
def calls(device: CountedDevice, found: int) -> list[Any]:
    """What happens to the persisting cache of the device from now on."""
    made: list[Any] = []
    device.before("l2.request_set_aside", lambda nbytes: made.append(("request_set_aside", nbytes)))
    device.before("l2.set_window", lambda stream, window: made.append(("set_window", window)))
    device.before("l2.reset_persisting", lambda: made.append(("reset_persisting", "reset")))
    return made


def test_the_window_lies_over_the_buffer_and_follows_it(
    device: CountedDevice, arena: Arena
) -> None:
    buffer = arena.buffer(8 * MiB)
    with persisting(device, buffer) as stream:
        assert stream.set_aside == device.l2.set_aside() == 4 * STEP
        assert device.l2.window(stream.stream) == WindowSpec(buffer.address, 8 * MiB, 1.0)
        before = buffer.address
        buffer.move()
        assert buffer.address != before
        assert device.l2.window(stream.stream) == WindowSpec(buffer.address, 8 * MiB, 1.0)
        assert stream.window is not None
        assert (stream.window.nbytes, stream.window.hit_ratio, stream.window.set_aside) == (
            8 * MiB,
            1.0,
            4 * STEP,
        )
    assert device.l2.set_aside() == FOUND
    assert device.l2.window(stream.stream) is None
    buffer.move()
    assert device.l2.window(stream.stream) is None


def test_a_window_over_a_part_of_the_buffer_is_fitted_to_that_part_and_follows_it(
    device: CountedDevice, arena: Arena
) -> None:
    buffer = arena.buffer(64 * MiB)
    with persisting(
        device, buffer, window="20 MiB", offset="4 MiB", hit_ratio=20 / 64, miss="normal"
    ) as stream:
        assert stream.set_aside == 7 * STEP  # what holds 20 MiB
        buffer.move()
        part = WindowSpec(buffer.address + 4 * MiB, 20 * MiB, 20 / 64, miss=AccessProperty.NORMAL)
        assert device.l2.window(stream.stream) == part
        assert stream.window is not None
        assert (stream.window.offset, stream.window.nbytes, stream.window.miss) == (
            4 * MiB,
            20 * MiB,
            "normal",
        )
        assert stream.notes == ()


def test_what_was_granted_is_read_back() -> None:
    """Lines beyond the ratio stream, unless it was fitted to what is set aside."""
    for set_aside, hit_ratio, granted, ratio in [
        ("50%", "fit", 8 * STEP, 25 / 40),
        ("max", "fit", 10 * STEP, 31.25 / 40),
        ("max", 0.5, 10 * STEP, 0.5),
        # rounded up, and the ratio is made from what was granted
        ("4 MiB", "fit", 2 * STEP, 6.25 / 40),
        ("25%", "fit", 4 * STEP, 12.5 / 40),  # of L2
    ]:
        device = CountedDevice()
        assert device.l2.request_set_aside(FOUND) == FOUND
        buffer = Arena(device, seed=7).buffer(40 * MiB)
        with (
            naming(set_aside, hit_ratio),
            persisting(device, buffer, set_aside=set_aside, hit_ratio=hit_ratio) as stream,
        ):
            assert stream.set_aside == device.l2.set_aside() == granted
            spec = device.l2.window(stream.stream)
            assert spec is not None
            assert spec.hit_ratio == stream.hit_ratio == pytest.approx(ratio)
            assert (spec.miss is AccessProperty.STREAMING) == (hit_ratio != "fit")


def test_off_means_no_set_aside_no_window_and_no_lines_that_somebody_left(
    device: CountedDevice, arena: Arena, calls: list[Any]
) -> None:
    buffer = arena.buffer(8 * MiB)
    with persisting(device, buffer, set_aside="off") as stream:
        assert ("reset_persisting", "reset") in calls
        assert (device.l2.set_aside(), stream.set_aside, stream.window) == (0, 0, None)
        buffer.move()
        assert stream.window is None
    assert device.l2.set_aside() == FOUND


ABOVE_HALF = (
    "measured without a window: 26218496 B are more than half of L2, 25 MiB, where a fitted window can be slower than none; "
    'set_aside="max" sets one'
)


def test_a_fitted_window_above_half_of_l2_is_none_and_says_so() -> None:
    for nbytes, set_aside, notes in [(25 * MiB, 25 * MiB, ()), (25 * MiB + 4096, 0, (ABOVE_HALF,))]:
        device = CountedDevice()
        assert device.l2.request_set_aside(FOUND) == FOUND
        arena = Arena(device, seed=7)
        with persisting(device, arena.buffer(nbytes)) as stream:
            stream.buffer.move()
            assert (device.l2.set_aside(), stream.notes) == (set_aside, notes), nbytes
            assert (stream.window is None) is (set_aside == 0), nbytes


def test_all_is_restored_where_setting_up_fails(device: CountedDevice, arena: Arena) -> None:
    buffer = arena.buffer(8 * MiB)
    calls: list[Any] = []
    device.before("l2.set_window", failing(once=True))
    device.before("l2.set_window", lambda *arguments: calls.append(arguments))
    with pytest.raises(DeviceError, match="made to fail"), persisting(device, buffer):
        raise AssertionError("the body ran")
    assert device.l2.set_aside() == FOUND
    assert len(calls) == 2
    buffer.move()  # nobody follows


def test_what_cannot_be_is_refused_before_anything_changes(
    device: CountedDevice, arena: Arena, calls: list[Any]
) -> None:
    cases: list[tuple[dict[str, Any], str]] = [
        ({"hit_ratio": 1.1}, 'hit_ratio=1.1; accepted are "fit" and a number from 0 to 1'),
        (
            {"set_aside": "64 MiB"},
            "set_aside=64 MiB is above the maximum of NVIDIA H100 80GB HBM3, 31.25 MiB",
        ),
        (
            {"set_aside": "all"},
            'set_aside=\'all\'; accepted are "fit", "max", "off", a size such as "8 MiB" and a share of L2 such as "25%"',
        ),
        (
            {"set_aside": "75%"},
            "set_aside=75% of L2, 37.5 MiB, is above the maximum of NVIDIA H100 80GB HBM3, 31.25 MiB",
        ),
        (
            {"window": "6 MiB", "offset": "3 MiB"},
            "window=6 MiB at offset 3 MiB goes beyond the end of <device buffer, 8 MiB",
        ),
        ({"where": "kernel"}, 'where=\'kernel\'; accepted are "stream", "graph" and "launch"'),
        ({"where": np.array([1, 2])}, "where=array([1, 2]); accepted are"),
        ({"allow_thrash": "yes"}, "allow_thrash='yes'; accepted are True and False"),
        ({"set_aside": np.array([1, 2])}, "set_aside=array([1, 2]); accepted are"),
    ]
    for options, message in cases:
        with naming(options):
            buffer = arena.buffer(8 * MiB)
            with pytest.raises(BadWindow) as caught, persisting(device, buffer, **options):
                raise AssertionError("the body ran")
            assert message in str(caught.value)
            assert "\n" not in str(caught.value)
            assert calls == []


def test_elsewhere_the_stream_itself_has_no_window() -> None:
    for where in ["graph", "launch"]:
        device = CountedDevice()
        assert device.l2.request_set_aside(FOUND) == FOUND
        arena = Arena(device, seed=7)
        with naming(where):
            buffer = arena.buffer(8 * MiB)
            with persisting(device, buffer, where=where) as stream:
                assert device.l2.set_aside() == 4 * STEP
                assert stream.spec == WindowSpec(buffer.address, 8 * MiB, 1.0)
                buffer.move()
                assert stream.spec == WindowSpec(buffer.address, 8 * MiB, 1.0)
                assert device.l2.window(stream.stream) is None
                if where == "launch":
                    with pytest.raises(BadWindow, match="the stream itself has no window"):
                        _ = stream.handle
                    assert stream.window is not None
                else:
                    assert stream.handle
                    assert stream.window is None  # nothing was captured yet
                    stream.read_back((stream.spec,))
                    assert stream.window is not None
            assert [stream.spec, stream.window] == [None, None]
            assert device.l2.set_aside() == FOUND


# The set-aside and hit ratio that fit a window

H100 = choose("sim:h100").facts


def test_what_holds_the_window_and_a_step_more_where_that_pays() -> None:
    for window, set_aside in [
        (1 * MiB, 6.25 * MiB),  # one step of L2/16 holds it, and one more
        (7.5 * MiB, 9.375 * MiB),  # three steps, with half of one free
        (24 * MiB, 25 * MiB),
        (40 * MiB, 25 * MiB),  # never above L2/2, although the device would grant 31.25 MiB
    ]:
        assert H100.l2_bytes == 50 * MiB, window
        assert fit_set_aside(H100, int(window)) == int(set_aside), window


def test_a_reset_is_by_the_window_or_by_the_context(
    device: CountedDevice, arena: Arena, calls: list[Any]
) -> None:
    with persisting(device, arena.buffer(8 * MiB)) as stream:
        given = device.l2.window(stream.stream)
        ways: list[tuple[Any, int]] = [("window", 0), ("context", 1)]
        for how, resets in ways:
            calls.clear()
            stream.reset(how)
            assert device.l2.window(stream.stream) != given, how
            assert calls.count(("reset_persisting", "reset")) == resets, how
            stream.renew()
            assert device.l2.window(stream.stream) == given, how
        with pytest.raises(BadWindow, match="reset\\('all'\\); accepted are"):
            stream.reset("all")  # type: ignore[arg-type]
