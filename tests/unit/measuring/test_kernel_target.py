"""A kernel's result is checked after exactly one launch, on poisoned outputs and restored inputs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from bench import Bench
from counted_device import CountedDevice

from pytest_gpumem.devices.protocol import Launch, MemoryKind, OutOfMemory, Stream
from pytest_gpumem.devices.simulated.datasheets import DATASHEETS
from pytest_gpumem.measuring.bound import BadCall, BoundKernel
from pytest_gpumem.measuring.target import WrongResult
from pytest_gpumem.memory.buffers import Buffer
from pytest_gpumem.units import MiB

ELEMENTS = 1024

Doing = Callable[[CountedDevice, Launch, Stream, Callable[[Launch, Stream], None]], None]


def skip(device: CountedDevice, launch: Launch, stream: Stream, once: Callable[[Launch, Stream], None]) -> None:
    """The kernel is not launched."""


def twice(device: CountedDevice, launch: Launch, stream: Stream, once: Callable[[Launch, Stream], None]) -> None:
    once(launch, stream)
    once(launch, stream)


def changing(parameter: str, element: int, change: Callable[[Any], Any]) -> Doing:
    """One element of the result is another one."""

    def doing(device: CountedDevice, launch: Launch, stream: Stream, once: Callable[[Launch, Stream], None]) -> None:
        before = device.to_host(launch.arrays[parameter], "f4", ELEMENTS)
        once(launch, stream)
        result = device.view(launch.arrays[parameter], "f4", ELEMENTS)
        result[element] = change((before[element], result[element]))

    return doing


def stale(values: tuple[Any, Any]) -> Any:
    """What was there before the launch: the kernel did not write it."""
    return values[0]


def does(bench: Bench, doing: Doing, monkeypatch: pytest.MonkeyPatch) -> None:
    """From now on each launch of a kernel does `doing`."""
    once = bench.device.launch
    monkeypatch.setattr(bench.device, "launch", lambda launch, stream: doing(bench.device, launch, stream, once))


@pytest.mark.parametrize(
    ("kernel", "doing", "message"),
    [
        ("copy", skip, "copy: 1024 of 1024 elements of 'c' are wrong after one launch on poisoned outputs; the first is element 0"),
        ("add", skip, "add: 1024 of 1024 elements of 'y' are wrong"),
        ("add", twice, "add: 1024 of 1024 elements of 'y' are wrong"),
        (
            "copy",
            changing("c", 77, stale),
            "copy: 1 of 1024 elements of 'c' are wrong after one launch on poisoned outputs; the first is element 77",
        ),
        ("add", changing("y", 1023, stale), r"add: 1 of 1024 elements of 'y' are wrong .* the first is element 1023"),
        ("copy", changing("c", 3, lambda v: np.nextafter(v[1], np.float32(2))), "copy: 1 of 1024 elements of 'c'"),
        ("copy", changing("c", 3, lambda v: np.float32("nan")), "copy: 1 of 1024 elements of 'c'"),
        ("memcpy", skip, "memcpy: .* of 4096 elements of 'destination' are wrong"),
    ],
)
def test_a_wrong_result_names_array_count_and_first_element(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, kernel: str, doing: Doing, message: str
) -> None:
    target = bench.kernel_target(kernel, *bench.buffers(2, 4 * ELEMENTS))
    target.check()
    does(bench, doing, monkeypatch)
    with pytest.raises(WrongResult, match=message) as caught:
        target.check()
    assert "\n" not in str(caught.value)


def test_a_kernel_with_another_reference_is_wrong(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """The device computes by the catalogue's kernel, the check by another: as a broken kernel looks."""
    bound = bench.kernels.copy
    broken = replace(bound.kernel, reference=lambda arrays, scalars: {"c": arrays["a"][::-1].copy()})
    target = bench.target(BoundKernel(broken, bench.device, bound.stream), *bench.buffers(2, 4 * ELEMENTS))
    does(bench, lambda device, launch, stream, once: once(replace(launch, kernel=bound.kernel), stream), monkeypatch)
    with pytest.raises(WrongResult, match=r"copy: .* of 1024 elements of 'c' are wrong"):
        target.check()


def test_within_the_tolerance_is_right(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    a, sums = bench.memory.device(4096 * ELEMENTS), bench.memory.device((ELEMENTS,), "f4")
    target = bench.kernel_target("read", a, sums)
    for factor, right in ((1 + 5e-6, True), (1 + 5e-5, False)):
        with monkeypatch.context() as patch:
            does(bench, changing("sums", 5, lambda v, factor=factor: v[1] * np.float32(factor)), patch)
            if right:
                target.check()
            else:
                with pytest.raises(WrongResult, match="'sums' are wrong"):
                    target.check()


def test_outputs_are_poisoned_and_inputs_are_not(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    out, source = bench.buffers(2, 4 * ELEMENTS)
    content = source.read()
    seen: list[Any] = []

    def look(device: CountedDevice, launch: Launch, stream: Stream, once: Callable[[Launch, Stream], None]) -> None:
        seen.append((device.content(launch.arrays["c"]), device.content(launch.arrays["a"])))
        once(launch, stream)

    target = bench.kernel_target("copy", out, source)
    does(bench, look, monkeypatch)
    target.check()
    assert seen == [(b"\xff" * 4 * ELEMENTS, content.tobytes())]


def test_updated_arguments_are_put_back_before_each_check(bench: Bench) -> None:
    x, y = bench.buffers(2, 4 * ELEMENTS)
    start = y.read()
    target = bench.kernel_target("add", x, y)
    for _ in range(3):
        for _ in range(5):
            target.launch()
        target.check()
        np.testing.assert_array_equal(y.read(), start + x.read())


def test_content_given_after_the_buffer_was_made_is_what_a_check_starts_from(bench: Bench) -> None:
    x, y = bench.buffers(2, 4 * ELEMENTS)
    x.write(np.full(ELEMENTS, 2))
    y.write(np.full(ELEMENTS, 40))
    bench.kernel_target("add", x, y).check()
    assert (y.read() == 42).all()


def test_a_copy_of_nans_is_right(bench: Bench) -> None:
    destination, source = bench.buffers(2, 4 * ELEMENTS)
    source.write(np.full(ELEMENTS, np.nan))
    bench.kernel_target("memcpy", destination, source).check()
    assert np.isnan(destination.read()).all()


@pytest.mark.parametrize("kind", ["pinned", "registered", "pageable"])
def test_a_copy_over_the_link_is_checked(bench: Bench, monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    def host() -> Buffer:
        return getattr(bench.memory, kind)((ELEMENTS,), "f4")

    there = bench.kernel_target("memcpy", bench.memory.device((ELEMENTS,), "f4"), host())
    back = bench.kernel_target("memcpy", host(), bench.memory.device((ELEMENTS,), "f4"))
    there.check()
    back.check()
    does(bench, skip, monkeypatch)
    for target in (there, back):
        with pytest.raises(WrongResult, match="'destination' are wrong"):
            target.check()


def test_a_numpy_array_is_pageable_memory(bench: Bench) -> None:
    array = np.arange(ELEMENTS, dtype="f4")
    target = bench.kernel_target("memcpy", bench.memory.device((ELEMENTS,)), array)
    target.check()
    assert target.waits
    assert target.traffic is not None
    assert (target.traffic.link, target.traffic.total) == (True, 4 * ELEMENTS)


def test_the_chase_walks_a_cycle(bench: Bench) -> None:
    nodes, out = bench.memory.device(1 * MiB, "i4"), bench.memory.device((1,), "i4")
    target = bench.kernel_target("chase", nodes, out, 1000)
    target.check()
    assert target.accesses_per_launch == 1000
    following = nodes.read()[::16]
    node, seen = 0, set()
    for _ in range(len(following)):
        seen.add(node)
        node = int(following[node])
    assert len(seen) == len(following)  # no short cycle


def test_placing_moves_what_is_launched(bench: Bench) -> None:
    a, b = bench.buffers(2)
    target = bench.kernel_target("copy", a, b)
    before = (a.address, b.address)
    target.place()
    target.launch()
    launched = bench.device.launched[-1]
    assert (launched.arrays["c"].address, launched.arrays["a"].address) == (a.address, b.address)
    assert a.address != before[0]
    assert b.address != before[1]
    target.check()


def test_a_place_for_some_buffers_only_leaves_everything_usable() -> None:
    # Room for one more of the three buffers, not for two: the freed one's room is smaller than the largest.
    bench = Bench(CountedDevice(memory_bytes=100 * MiB + DATASHEETS["h100"].context_bytes))
    nodes, sums = bench.memory.device(64 * MiB), bench.memory.device((64 * MiB // 4096,))
    target = bench.kernel_target("read", nodes, sums)
    where = nodes.address
    with pytest.raises(OutOfMemory):
        target.place()
    assert nodes.address == where
    target.launch()
    target.check()


def test_host_memory_and_guests_stay(bench: Bench) -> None:
    pinned, other = bench.memory.pinned(4096), bench.memory.pinned(4096)
    target = bench.kernel_target("memcpy", pinned, other)
    assert target.max_placements == 1
    assert bench.kernel_target("memcpy", *bench.buffers(2, 4096)).max_placements is None


def test_closing_gives_the_saved_inputs_back(bench: Bench) -> None:
    x, y = bench.buffers(2, 4096)
    target = bench.kernel_target("add", x, y)
    assert len(bench.device.live) == 3
    target.close()
    target.close()
    assert bench.device.live == [x.allocation, y.allocation]


def test_managed_pages_are_home_again_after_a_check(bench: Bench) -> None:
    x, y = bench.memory.managed(4 * MiB), bench.memory.managed(4 * MiB)
    assert x.kind is MemoryKind.MANAGED
    target = bench.kernel_target("add", x, y)
    target.check()
    assert {bench.device._pages[id(b.allocation)].on_device for b in (x, y)} == {0}
    assert set(target.homes) == {x, y}


def test_traffic_is_the_kernels_own(bench: Bench) -> None:
    target = bench.kernel_target("triad", *bench.buffers(3))
    assert target.traffic is not None
    assert (target.traffic.reads, target.traffic.writes, target.footprint) == (2 * MiB, 1 * MiB, 3 * MiB)
    with pytest.raises(BadCall, match="moved=4096: the traffic of triad is known from the kernel"):
        bench.target(bench.kernels.triad, *bench.buffers(3), moved=4096)
