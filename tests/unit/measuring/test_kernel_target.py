"""A kernel's result is checked after exactly one launch, on poisoned outputs."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import numpy as np
import pytest
from bench import Bench, moved
from counted_device import CountedDevice, failing, replaced
from kernel_calls import SCALARS, arguments_of, fitting

from pytest_gpumem.devices.protocol import Launch, Stream
from pytest_gpumem.devices.simulated import memory
from pytest_gpumem.devices.simulated.datasheets import DATASHEETS
from pytest_gpumem.kernels.catalogue import CATALOGUE
from pytest_gpumem.kernels.stream import tile_bytes
from pytest_gpumem.measuring.bound import BadCall, BoundKernel
from pytest_gpumem.measuring.case import target_of
from pytest_gpumem.measuring.target import Target, WrongResult
from pytest_gpumem.measuring.works import Works
from pytest_gpumem.units import GiB, KiB, MiB

ELEMENTS = 1024

Doing = Callable[[CountedDevice, Launch, Stream, Callable[[Launch, Stream], None]], None]


def skip(
    device: CountedDevice, launch: Launch, stream: Stream, once: Callable[[Launch, Stream], None]
) -> None:
    """The kernel is not launched."""


def twice(
    device: CountedDevice, launch: Launch, stream: Stream, once: Callable[[Launch, Stream], None]
) -> None:
    once(launch, stream)
    once(launch, stream)


def changing(parameter: str, element: int, change: Callable[[Any], Any]) -> Doing:
    """One element of the result is another one."""

    def doing(
        device: CountedDevice,
        launch: Launch,
        stream: Stream,
        once: Callable[[Launch, Stream], None],
    ) -> None:
        before = device.content.to_host(launch.arrays[parameter], "f4", ELEMENTS)
        once(launch, stream)
        result = device.memory.view(launch.arrays[parameter], "f4", ELEMENTS)
        result[element] = change((before[element], result[element]))

    return doing


def stale(values: tuple[Any, Any]) -> Any:
    """What was there before the launch: the kernel did not write it."""
    return values[0]


def does(bench: Bench, doing: Doing) -> None:
    """From now on each launch of a kernel does `doing`."""
    once = bench.device.kernels.launch
    replaced(
        bench.device.kernels,
        launch=lambda launch, stream: doing(bench.device, launch, stream, once),
    )


@pytest.mark.parametrize(
    ("kernel", "doing", "message"),
    [
        (
            "copy",
            skip,
            "copy: 1024 of 1024 elements of 'c' are wrong after one launch; the first is element 0",
        ),
        ("add", twice, "add: 1024 of 1024 elements of 'y' are wrong"),
        (
            "copy",
            changing("c", 77, stale),
            "copy: 1 of 1024 elements of 'c' are wrong after one launch; the first is element 77",
        ),
        (
            "copy",
            changing("c", 3, lambda v: np.nextafter(v[1], np.float32(2))),
            "copy: 1 of 1024 elements of 'c'",
        ),
        ("memcpy", skip, "memcpy: .* of 4096 elements of 'destination' are wrong"),
    ],
)
def test_a_wrong_result_names_array_count_and_first_element(
    bench: Bench, kernel: str, doing: Doing, message: str
) -> None:
    target = bench.kernel_target(kernel, *bench.buffers(2, 4 * ELEMENTS))
    target.check()
    does(bench, doing)
    with pytest.raises(WrongResult, match=message) as caught:
        target.check()
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(("factor", "right"), [(1 + 5e-6, True), (1 + 5e-5, False)])
def test_within_the_tolerance_is_right(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, factor: float, right: bool
) -> None:
    monkeypatch.setattr(memory, "BACKED_BYTES", 256 * KiB)  # as ever: its tiles are real
    target = bench.kernel_target(
        "read", bench.memory.device(4 * tile_bytes("read")), bench.memory.device((ELEMENTS,), "f4")
    )
    does(bench, changing("sums", 2, lambda v: v[1] * np.float32(factor)))
    with nullcontext() if right else pytest.raises(WrongResult, match="'sums' are wrong"):
        target.check()


def test_outputs_are_poisoned_and_inputs_are_not(bench: Bench) -> None:
    out, source = bench.buffers(2, 4 * ELEMENTS)
    content = source.read()
    seen: list[Any] = []

    def look(
        device: CountedDevice,
        launch: Launch,
        stream: Stream,
        once: Callable[[Launch, Stream], None],
    ) -> None:
        seen.append((device.bytes_of(launch.arrays["c"]), device.bytes_of(launch.arrays["a"])))
        once(launch, stream)

    target = bench.kernel_target("copy", out, source)
    does(bench, look)
    target.check()
    assert seen == [(b"\xff" * 4 * ELEMENTS, content.tobytes())]


def test_updated_arguments_are_checked_from_what_they_hold(bench: Bench) -> None:
    x, y = bench.buffers(2, 4 * ELEMENTS)
    target = bench.kernel_target("add", x, y)
    for _ in range(3):
        target.launch(0, bench.arena.stream)
        before = y.read()
        target.check()
        np.testing.assert_array_equal(y.read(), before + x.read())


@pytest.mark.parametrize("of_works", [False, True])
@pytest.mark.parametrize("name", CATALOGUE)
def test_no_check_passes_without_a_launch(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, name: str, of_works: bool
) -> None:
    monkeypatch.setattr(memory, "BACKED_BYTES", 256 * KiB)
    arrays = arguments_of(name, 2000, CATALOGUE[name].dtypes[0], np.random.default_rng(1))
    arguments: dict[str, Any] = {**SCALARS.get(name, {}), **fitting(name, arrays)}
    for parameter, array in arrays.items():
        arguments[parameter] = bench.memory.device(array.shape, array.dtype)
    kernel = getattr(bench.kernels, name)
    kernel(**arguments)  # the outputs hold the result before
    target: Target = Works(bench.memory).kernel(kernel, **arguments)
    if not of_works:
        target = target_of(kernel, (), arguments, arena=bench.arena)
    target.check()
    does(bench, skip)
    with pytest.raises(WrongResult, match="after one launch"):
        target.check()


def test_a_result_that_looks_like_poison_is_seen(bench: Bench) -> None:
    (a,) = bench.buffers(1, 4 * ELEMENTS, "i4")
    target = bench.kernel_target("write", a, -1)
    target.check()
    does(bench, skip)
    with pytest.raises(WrongResult, match="'a' are wrong"):
        target.check()


@pytest.mark.parametrize("kind", ["pinned", "pageable"])
def test_a_copy_over_the_link_is_checked(bench: Bench, kind: str) -> None:
    def host() -> Any:
        return getattr(bench.memory, kind)((ELEMENTS,), "f4")

    there = bench.kernel_target("memcpy", bench.memory.device((ELEMENTS,), "f4"), host())
    back = bench.kernel_target("memcpy", host(), bench.memory.device((ELEMENTS,), "f4"))
    there.check()
    back.check()
    does(bench, skip)
    for target in (there, back):
        with pytest.raises(WrongResult, match="'destination' are wrong"):
            target.check()


def test_a_numpy_array_is_pageable_memory(bench: Bench) -> None:
    array = np.arange(ELEMENTS, dtype="f4")
    target = bench.kernel_target("memcpy", bench.memory.device((ELEMENTS,)), array)
    target.check()
    assert target.waits
    assert target.moved_bytes is not None
    assert (target.moved_bytes.link, target.moved_bytes.total) == (True, 4 * ELEMENTS)


def random(seed: int = 1) -> np.random.Generator:
    return np.random.default_rng(seed)


def addresses(launch: Launch) -> dict[str, int]:
    return {name: allocation.address for name, allocation in launch.arrays.items()}


def launched(bench: Bench, target: Target, places: int) -> list[Launch]:
    """One launch of each placement."""
    for place in range(places):
        target.launch(place, bench.arena.stream)
    bench.device.streams.synchronize()
    return bench.device.launched[-places:]


def test_placements_side_by_side_hold_the_inputs_content_and_nobodys_outputs(bench: Bench) -> None:
    out, x = bench.buffers(2, 4 * ELEMENTS)
    target = bench.kernel_target("copy", out, x)
    target.check()
    copied = list[int]()
    bench.device.before(
        "content.copy", lambda destination, source, *_: copied.append(source.address)
    )
    assert moved(target, 3, 5, random()) == 5  # so small that all are made at once
    assert copied == [x.address] * 5
    places = launched(bench, target, 5)
    everywhere = [address for place in places for address in addresses(place).values()] + [
        out.address,
        x.address,
    ]
    assert len(set(everywhere)) == 12
    assert {bench.device.bytes_of(place.arrays["a"]) for place in places} == {
        bench.device.bytes_of(x.allocation)
    }
    assert {bench.device.bytes_of(place.arrays["c"]) for place in places} == {
        bench.device.bytes_of(x.allocation)
    }


def test_a_check_goes_back_to_the_buffers_and_frees_the_placements(bench: Bench) -> None:
    x, y = bench.buffers(2, 4 * ELEMENTS)
    start = y.read()
    target = bench.kernel_target("add", x, y)
    before = list(bench.device.live)
    count = moved(target, 4, 4, random())
    assert len(bench.device.live) == len(before) + 2 * count
    for _ in range(3):
        launched(bench, target, count)
    np.testing.assert_array_equal(y.read(), start)  # nobody touched the user's own
    target.check()
    assert bench.device.live == before
    assert addresses(bench.device.launched[-1]) == {"x": x.address, "y": y.address}
    np.testing.assert_array_equal(y.read(), start + x.read())


def short_of(free: int) -> Bench:
    """A bench whose device holds 3 x 64 MiB and `free` bytes."""
    return Bench(CountedDevice(memory_bytes=192 * MiB + free + DATASHEETS["h100"].context_bytes))


def test_short_memory_holds_fewer_placements_side_by_side() -> None:
    for free, count in [(4 * GiB, 8), (2 * GiB, 5), (768 * MiB, 2), (384 * MiB, 1)]:
        bench = short_of(free)
        target = bench.kernel_target("triad", *bench.buffers(3, 64 * MiB))
        assert moved(target, 8, 8, random()) == count, free
        assert len(bench.device.live) == 3 + 3 * count, free
        launched(bench, target, count)
        target.check()
        assert bench.leftovers() == 0, free


class Least:
    """A generator whose every draw is the least."""

    def integers(self, low: int, _high: int | None = None) -> int:
        return low


def test_with_no_room_side_by_side_the_buffers_themselves_move() -> None:
    bench = short_of(128 * MiB)
    a, b, c = bench.buffers(3, 64 * MiB)
    target = bench.kernel_target("triad", a, b, c)
    before = {"a": a.address, "b": b.address, "c": c.address}
    content = b.read()
    draw: Any = Least()
    assert moved(target, 8, 8, draw) == 1
    (launch,) = launched(bench, target, 1)
    after = addresses(launch)
    assert after == {"a": a.address, "b": b.address, "c": c.address}
    assert all(after[name] != before[name] for name in before)
    np.testing.assert_array_equal(b.read(), content)
    target.check()
    bench.arena.pad(0)
    assert bench.leftovers() == 0


def test_traffic_is_the_kernels_own(bench: Bench) -> None:
    target = bench.kernel_target("triad", *bench.buffers(3))
    assert target.moved_bytes is not None
    assert (target.moved_bytes.reads, target.moved_bytes.writes, target.footprint) == (
        2 * MiB,
        1 * MiB,
        3 * MiB,
    )
    with pytest.raises(BadCall, match="moved=4096: the traffic of triad is known from the kernel"):
        bench.target(bench.kernels.triad, *bench.buffers(3), moved=4096)


def test_where_the_reference_does_not_fit_the_row_says_that_it_was_not_checked(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = bench.kernel_target("copy", *bench.buffers(2, 4 * ELEMENTS))
    # The simulated kernel computes by the reference too, which may not fail.
    monkeypatch.setattr(BoundKernel, "expected", failing(error=MemoryError))
    taken = bench.take(target)
    assert not taken.checked
    assert len([note for note in taken.notes if "the result was not checked" in note]) == 1
    assert bench.leftovers() == 0
