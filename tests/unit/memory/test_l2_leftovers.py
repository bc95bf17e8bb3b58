"""What somebody else leaves of persisting L2 is found, put back and said."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from counted_device import CountedDevice, failing
from msgspec import structs

from pytest_gpumem.devices.protocol import Stream, WindowSpec
from pytest_gpumem.memory.buffers import Arena
from pytest_gpumem.memory.l2 import persisting
from pytest_gpumem.memory.l2_leftovers import L2Watch
from pytest_gpumem.units import MiB

STEP = int(3.125 * MiB)
FOUND = 2 * STEP
pytestmark = pytest.mark.usefixtures("found")
MOST = 10 * STEP
WINDOW = WindowSpec(4096, 8 * MiB, 0.75)


@pytest.fixture
def watch(device: CountedDevice, found: int) -> L2Watch:
    return L2Watch(device)


@pytest.fixture
def resets(device: CountedDevice, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Grows with every reset of persisting lines."""
    calls: list[str] = []
    monkeypatch.setattr(device.l2, "reset_persisting", lambda: calls.append("reset"))
    return calls


def text(watch: L2Watch) -> str:
    left = watch.settle()
    assert left is not None
    assert left.repaired
    return left.text


def test_nothing_left_is_nothing_said_and_nothing_done(
    device: CountedDevice, watch: L2Watch, resets: list[str], arena: Arena
) -> None:
    with persisting(device, arena.buffer(8 * MiB)):
        pass
    del resets[:]
    assert watch.settle() is None
    assert resets == []


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
    assert f"a window of 8 MiB at hit ratio 0.75 on {names[new]} (found: none)" in said
    assert (
        f"a window of 4 MiB at hit ratio 0.75 on {names[changed]} (found: one of 8 MiB at hit ratio 0.75)"
        in said
    )
    assert f"no window on {names[dropped]} (found: one of 8 MiB at hit ratio 0.75)" in said
    assert [device.l2.window(stream) for stream in (new, changed, dropped)] == [
        None,
        WINDOW,
        WINDOW,
    ]
    assert resets == ["reset"]


def test_default_streams_have_names(device: CountedDevice, monkeypatch: pytest.MonkeyPatch) -> None:
    streams = (device.streams.create(), device.streams.create())
    monkeypatch.setattr(device.streams, "defaults", lambda: streams)
    monkeypatch.setattr(device.streams, "visible", lambda: streams)
    watch = L2Watch(device)
    for stream in streams:
        device.l2.set_window(stream, WINDOW)
    said = text(watch)
    assert "on the legacy default stream (found: none); a window of" in said
    assert "on the per-thread default stream (found: none); put back" in said


def test_what_changed_between_two_tests_is_not_the_second_ones(
    device: CountedDevice, watch: L2Watch
) -> None:
    device.l2.request_set_aside(MOST)
    watch.begin()
    assert watch.settle() is None
    assert device.l2.set_aside() == MOST


def test_an_open_stream_of_ours_accounts_for_what_it_changed(
    device: CountedDevice, watch: L2Watch, resets: list[str], arena: Arena
) -> None:
    with persisting(device, arena.buffer(8 * MiB)) as stream:
        del resets[:]
        assert watch.settle() is None
        watch.fresh()
        assert (device.l2.set_aside(), resets) == (4 * STEP, [])
        assert device.l2.window(stream.stream) is not None
        watch.begin()
    assert watch.settle() is None
    assert device.l2.set_aside() == FOUND


def owner(
    device: CountedDevice, watch: L2Watch, nbytes: int, stream: Stream | None = None
) -> object:
    """Somebody who sets something up and lives on."""
    living, before = object(), watch.look()
    device.l2.request_set_aside(nbytes)
    if stream is not None:
        device.l2.set_window(stream, WINDOW)
    watch.keep(living, before)
    return living


def end(
    device: CountedDevice, watch: L2Watch, living: object, restore: Callable[[], object]
) -> None:
    watch.ending(living)
    restore()
    watch.ended(living)


def test_what_lives_on_keeps_what_it_changed(
    device: CountedDevice, watch: L2Watch, resets: list[str]
) -> None:
    stream = device.streams.create()
    living = owner(device, watch, MOST, stream)
    assert watch.settle() is None
    watch.begin()
    watch.fresh()
    assert (device.l2.set_aside(), device.l2.window(stream), resets) == (MOST, WINDOW, [])
    device.l2.request_set_aside(4 * STEP)
    device.l2.set_window(stream, None)
    said = text(watch)
    assert "12.5 MiB (found: 31.25 MiB)" in said
    assert "no window on" in said
    assert (device.l2.set_aside(), device.l2.window(stream)) == (MOST, WINDOW)
    watch.ending(living)
    device.l2.request_set_aside(FOUND)
    device.l2.set_window(stream, None)
    watch.ended(living)
    assert watch.settle() is None
    watch.fresh()
    assert resets[-1:] == ["reset"]


def test_what_changed_nothing_when_it_began_cannot_change_what_is_found(
    device: CountedDevice, watch: L2Watch
) -> None:
    living = owner(device, watch, FOUND)
    end(device, watch, living, lambda: device.l2.request_set_aside(0))
    assert "an L2 set-aside of 0 B (found: 6.25 MiB)" in text(watch)


def test_of_two_that_live_on_the_outer_ones_change_remains(
    device: CountedDevice, watch: L2Watch
) -> None:
    outer, inner = owner(device, watch, MOST), owner(device, watch, 4 * STEP)
    end(device, watch, inner, lambda: device.l2.request_set_aside(MOST))
    assert watch.settle() is None
    end(device, watch, outer, lambda: device.l2.request_set_aside(FOUND))
    assert watch.settle() is None


def test_what_began_before_the_device_was_opened_puts_back_what_it_had_changed(
    device: CountedDevice,
) -> None:
    device.l2.request_set_aside(MOST)
    watch = L2Watch(device)
    end(device, watch, object(), lambda: device.l2.request_set_aside(FOUND))
    assert watch.settle() is None
    assert device.l2.set_aside() == FOUND


def test_what_a_test_left_is_not_taken_for_what_an_ending_one_put_back(
    device: CountedDevice, watch: L2Watch
) -> None:
    device.l2.request_set_aside(MOST)
    end(device, watch, object(), lambda: None)
    assert "31.25 MiB (found: 6.25 MiB)" in text(watch)


def test_a_lost_device_is_said_once(
    device: CountedDevice, watch: L2Watch, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(device.l2, "set_aside", failing())
    watch.begin()
    left = watch.settle()
    assert left is not None
    assert not left.repaired
    assert (
        left.text
        == "a device on which the L2 set-aside can be neither read nor put back: made to fail"
    )
    watch.begin()
    watch.fresh()
    assert watch.settle() is None


def test_a_stream_that_cannot_be_asked_is_left_out(
    device: CountedDevice, watch: L2Watch, monkeypatch: pytest.MonkeyPatch
) -> None:
    device.l2.set_window(device.streams.create(), WINDOW)
    monkeypatch.setattr(device.l2, "window", failing())
    assert watch.settle() is None
    device.l2.request_set_aside(MOST)
    assert "31.25 MiB" in text(watch)


@pytest.mark.parametrize(
    "changes", [{"mig_profile": "1g.10gb"}, {"compute_capability": (7, 5)}], ids=str
)
def test_where_nothing_can_be_set_aside_nothing_is_watched(
    device: CountedDevice,
    monkeypatch: pytest.MonkeyPatch,
    resets: list[str],
    changes: dict[str, Any],
) -> None:
    monkeypatch.setattr(device.roofline, "facts", structs.replace(device.facts, **changes))
    watch = L2Watch(device)
    device.l2.set_window(device.streams.create(), WINDOW)
    watch.fresh()
    assert watch.look() == {}
    assert watch.settle() is None
    assert resets == []
