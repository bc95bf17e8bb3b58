"""A kernel's result is checked after exactly one launch, on poisoned outputs and restored inputs."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from bench import Bench, check, moved
from counted_device import CountedDevice

from pytest_gpumem.devices.kinds import MemoryKind
from pytest_gpumem.devices.protocol import Launch, OutOfMemory, Stream
from pytest_gpumem.devices.simulated import memory
from pytest_gpumem.devices.simulated.datasheets import DATASHEETS
from pytest_gpumem.kernels.stream import tile_bytes
from pytest_gpumem.measuring.bound import BadCall, BoundKernel
from pytest_gpumem.measuring.target import Target, WrongResult
from pytest_gpumem.memory.l2 import persisting
from pytest_gpumem.memory.shapes import BadBuffer
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


def does(bench: Bench, doing: Doing, monkeypatch: pytest.MonkeyPatch) -> None:
    """From now on each launch of a kernel does `doing`."""
    once = bench.device.kernels.launch
    monkeypatch.setattr(
        bench.device.kernels,
        "launch",
        lambda launch, stream: doing(bench.device, launch, stream, once),
    )


@pytest.mark.parametrize(
    ("kernel", "doing", "message"),
    [
        (
            "copy",
            skip,
            "copy: 1024 of 1024 elements of 'c' are wrong after one launch on poisoned outputs; the first is element 0",
        ),
        ("add", skip, "add: 1024 of 1024 elements of 'y' are wrong"),
        ("add", twice, "add: 1024 of 1024 elements of 'y' are wrong"),
        (
            "copy",
            changing("c", 77, stale),
            "copy: 1 of 1024 elements of 'c' are wrong after one launch on poisoned outputs; the first is element 77",
        ),
        (
            "add",
            changing("y", 1023, stale),
            r"add: 1 of 1024 elements of 'y' are wrong .* the first is element 1023",
        ),
        (
            "copy",
            changing("c", 3, lambda v: np.nextafter(v[1], np.float32(2))),
            "copy: 1 of 1024 elements of 'c'",
        ),
        ("copy", changing("c", 3, lambda v: np.float32("nan")), "copy: 1 of 1024 elements of 'c'"),
        ("memcpy", skip, "memcpy: .* of 4096 elements of 'destination' are wrong"),
    ],
)
def test_a_wrong_result_names_array_count_and_first_element(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, kernel: str, doing: Doing, message: str
) -> None:
    target = bench.kernel_target(kernel, *bench.buffers(2, 4 * ELEMENTS))
    check(target)
    does(bench, doing, monkeypatch)
    with pytest.raises(WrongResult, match=message) as caught:
        check(target)
    assert "\n" not in str(caught.value)


def lacking(monkeypatch: pytest.MonkeyPatch, most: int) -> None:
    """From now on a reference runs out of memory for arrays of more than `most` bytes."""
    expected = BoundKernel.expected

    def short(bound: BoundKernel, arrays: Any, values: Any) -> Any:
        if max(array.nbytes for array in arrays.values()) > most:
            raise MemoryError("made to be full")
        return expected(bound, arrays, values)

    monkeypatch.setattr(BoundKernel, "expected", short)


@pytest.mark.parametrize("kernel", ["copy", "triad", "memcpy", "add", "write"])
def test_a_reference_that_does_not_fit_is_compared_in_pieces(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, kernel: str
) -> None:
    monkeypatch.setattr("pytest_gpumem.measuring.target_kernel.PIECE_BYTES", 1000)
    buffers = bench.buffers({"triad": 3, "write": 1}.get(kernel, 2), 4 * ELEMENTS)
    target = bench.kernel_target(kernel, *buffers)
    lacking(monkeypatch, 1000)
    check(target)
    does(bench, skip, monkeypatch)
    with pytest.raises(WrongResult, match="are wrong after one launch"):
        check(target)


def test_wrong_elements_of_all_pieces_are_counted(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pytest_gpumem.measuring.target_kernel.PIECE_BYTES", 1000)
    target = bench.kernel_target("copy", *bench.buffers(2, 4 * ELEMENTS))
    lacking(monkeypatch, 1000)
    does(
        bench,
        lambda device, launch, stream, once: once_but(device, launch, stream, once, 300, 900),
        monkeypatch,
    )
    with pytest.raises(
        WrongResult, match=r"copy: 2 of 1024 elements of 'c' are wrong .* the first is element 300"
    ):
        check(target)


def once_but(
    device: CountedDevice,
    launch: Launch,
    stream: Stream,
    once: Callable[[Launch, Stream], None],
    *elements: int,
) -> None:
    once(launch, stream)
    for element in elements:
        device.memory.view(launch.arrays["c"], "f4", ELEMENTS)[element] += 1


@pytest.mark.parametrize(("kernel", "most"), [("copy", 0), ("offset_copy", 1000)])
def test_where_not_even_a_piece_fits_the_row_says_that_it_was_not_checked(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, kernel: str, most: int
) -> None:
    target = bench.kernel_target(kernel, *bench.buffers(2, 4 * ELEMENTS))
    lacking(monkeypatch, most)
    taken = bench.take(target)
    assert not taken.checked
    assert len([note for note in taken.notes if "the result was not checked" in note]) == 1
    assert bench.leftovers() == 0


def test_a_kernel_with_another_reference_is_wrong(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The device computes by the catalogue's kernel, the check by another: as a broken kernel looks."""
    bound = bench.kernels.copy
    broken = replace(
        bound.kernel, reference=lambda arrays, scalars: {"c": arrays["a"][::-1].copy()}
    )
    target = bench.target(
        BoundKernel(broken, bench.device, bound.stream), *bench.buffers(2, 4 * ELEMENTS)
    )
    does(
        bench,
        lambda device, launch, stream, once: once(replace(launch, kernel=bound.kernel), stream),
        monkeypatch,
    )
    with pytest.raises(WrongResult, match=r"copy: .* of 1024 elements of 'c' are wrong"):
        check(target)


@pytest.mark.parametrize(("factor", "right"), [(1 + 5e-6, True), (1 + 5e-5, False)])
def test_within_the_tolerance_is_right(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, factor: float, right: bool
) -> None:
    monkeypatch.setattr(memory, "BACKED_BYTES", 256 * KiB)
    target = bench.kernel_target(
        "read", bench.memory.device(4 * tile_bytes("read")), bench.memory.device((ELEMENTS,), "f4")
    )
    does(bench, changing("sums", 2, lambda v: v[1] * np.float32(factor)), monkeypatch)
    with nullcontext() if right else pytest.raises(WrongResult, match="'sums' are wrong"):
        check(target)


def test_outputs_are_poisoned_and_inputs_are_not(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
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
    does(bench, look, monkeypatch)
    check(target)
    assert seen == [(b"\xff" * 4 * ELEMENTS, content.tobytes())]


def test_updated_arguments_are_put_back_before_each_check(bench: Bench) -> None:
    x, y = bench.buffers(2, 4 * ELEMENTS)
    start = y.read()
    target = bench.kernel_target("add", x, y)
    for _ in range(3):
        for _ in range(5):
            target.launch(0, bench.arena.stream)
        check(target)
        np.testing.assert_array_equal(y.read(), start + x.read())


def test_content_given_after_the_buffer_was_made_is_what_a_check_starts_from(bench: Bench) -> None:
    x, y = bench.buffers(2, 4 * ELEMENTS)
    x.write(np.full(ELEMENTS, 2))
    y.write(np.full(ELEMENTS, 40))
    check(bench.kernel_target("add", x, y))
    assert (y.read() == 42).all()


def test_a_copy_of_nans_is_right(bench: Bench) -> None:
    destination, source = bench.buffers(2, 4 * ELEMENTS)
    source.write(np.full(ELEMENTS, np.nan))
    check(bench.kernel_target("memcpy", destination, source))
    assert np.isnan(destination.read()).all()


@pytest.mark.parametrize("kind", ["pinned", "registered", "pageable"])
def test_a_copy_over_the_link_is_checked(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    def host() -> Any:
        return getattr(bench.memory, kind)((ELEMENTS,), "f4")

    there = bench.kernel_target("memcpy", bench.memory.device((ELEMENTS,), "f4"), host())
    back = bench.kernel_target("memcpy", host(), bench.memory.device((ELEMENTS,), "f4"))
    check(there)
    check(back)
    does(bench, skip, monkeypatch)
    for target in (there, back):
        with pytest.raises(WrongResult, match="'destination' are wrong"):
            check(target)


def test_a_numpy_array_is_pageable_memory(bench: Bench) -> None:
    array = np.arange(ELEMENTS, dtype="f4")
    target = bench.kernel_target("memcpy", bench.memory.device((ELEMENTS,)), array)
    check(target)
    assert target.waits
    assert target.moved_bytes is not None
    assert (target.moved_bytes.link, target.moved_bytes.total) == (True, 4 * ELEMENTS)


def test_an_array_over_a_buffer_is_the_buffer_and_a_part_of_it_is_not_called_pageable(
    bench: Bench,
) -> None:
    managed, pinned = (
        bench.memory.managed((ELEMENTS,), "f4", like=np),
        bench.memory.pinned((ELEMENTS,), "f4", like=np),
    )
    target = bench.kernel_target("init", managed, 2.0)
    assert target.host_memory == (("x", "managed"),)
    assert target.move is None  # the array holds the address
    check(target)
    assert (managed == 2.0).all()
    assert bench.kernel_target("memcpy", bench.memory.device((ELEMENTS,)), pinned).host_memory == (
        ("source", "pinned"),
    )
    by_name = bench.conductor.target(
        bench.kernels.init, (), {"x": managed, "value": 3.0}, arena=bench.arena
    )
    assert by_name.host_memory == (("x", "managed"),)
    with pytest.raises(BadBuffer, match="part or another view of pinned memory"):
        bench.kernel_target(
            "memcpy", bench.memory.device((ELEMENTS // 2,)), pinned[: ELEMENTS // 2]
        )


def test_the_chase_walks_a_cycle(bench: Bench) -> None:
    nodes, out = bench.memory.device(1 * MiB, "i4"), bench.memory.device((1,), "i4")
    target = bench.kernel_target("chase", nodes, out, 1000)
    check(target)
    assert target.accesses_per_launch == 1000
    following = nodes.read()[::16]
    node, seen = 0, set()
    for _ in range(len(following)):
        seen.add(node)
        node = int(following[node])
    assert len(seen) == len(following)  # no short cycle


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
    check(target)
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


def test_an_updated_argument_is_an_input_too(bench: Bench) -> None:
    x, y = bench.buffers(2, 4 * ELEMENTS)
    total = x.read() + y.read()
    target = bench.kernel_target("add", x, y)
    moved(target, 2, 2, random())
    for place in launched(bench, target, 2):
        np.testing.assert_array_equal(
            bench.device.memory.view(place.arrays["y"], "f4", ELEMENTS), total
        )


def test_a_buffer_that_is_given_twice_lies_at_one_address_in_each_placement(bench: Bench) -> None:
    out, x = bench.buffers(2, 4 * ELEMENTS)
    target = bench.kernel_target("stream_add", out, x, x)
    count = moved(target, 2, 2, random())
    for place in launched(bench, target, count):
        assert place.arrays["a"] is place.arrays["b"]


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
    check(target)
    assert bench.device.live == before
    assert addresses(bench.device.launched[-1]) == {"x": x.address, "y": y.address}
    np.testing.assert_array_equal(y.read(), start + x.read())


def test_spreading_again_replaces_the_placements(bench: Bench) -> None:
    target = bench.kernel_target("copy", *bench.buffers(2))
    before = len(bench.device.live)
    draw = random()
    moved(target, 2, 2, draw)
    first = [addresses(launch) for launch in launched(bench, target, 2)]
    moved(target, 2, 2, draw)
    assert len(bench.device.live) == before + 4
    assert [addresses(launch) for launch in launched(bench, target, 2)] != first
    target.close()
    assert len(bench.device.live) == before


def test_the_seed_decides_where_placements_lie() -> None:
    def where(seed: int) -> list[dict[str, int]]:
        bench = Bench()
        target = bench.kernel_target("copy", *bench.buffers(2))
        return [
            addresses(launch)
            for launch in launched(bench, target, moved(target, 3, 3, random(seed)))
        ]

    assert where(1) == where(1)
    assert where(1) != where(2)


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
        check(target)
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
    check(target)
    bench.arena.pad(0)
    assert bench.leftovers() == 0


def test_a_place_for_some_buffers_only_leaves_everything_usable() -> None:
    # Room for a second small one and the padding, not for a second large one.
    bench = Bench(CountedDevice(memory_bytes=160 * MiB + DATASHEETS["h100"].context_bytes))
    small, large = bench.memory.device(1 * MiB, "i4"), bench.memory.device(64 * MiB, "i4")
    target = bench.kernel_target("sliding_window", small, large)
    before = {"data_persistent": small.address, "data_streaming": large.address}
    draw: Any = Least()
    with pytest.raises(OutOfMemory):
        moved(target, 4, 4, draw)
    (launch,) = launched(bench, target, 1)
    after = addresses(launch)
    assert after["data_streaming"] == before["data_streaming"]
    assert after["data_persistent"] == small.address != before["data_persistent"]
    check(target)


def test_managed_buffers_move_one_placement_at_a_time(bench: Bench) -> None:
    x, y = bench.memory.managed(1 * MiB), bench.memory.managed(1 * MiB)
    target = bench.kernel_target("add", x, y)
    before = x.address
    assert not target.any_stream
    assert moved(target, 8, 8, random()) == 1
    assert addresses(launched(bench, target, 1)[0]) == {"x": x.address, "y": y.address}
    assert x.address != before


def test_a_windows_buffer_moves_with_its_window(bench: Bench) -> None:
    out, table = bench.buffers(2)
    with persisting(bench.device, table) as stream:
        target = bench.target(bench.kernels.copy, out, table, stream=stream)
        before = table.address
        assert not target.any_stream
        assert moved(target, 8, 8, random()) == 1
        window = bench.device.l2.window(stream.stream)
        assert window is not None
        assert window.address == table.address != before


def test_host_memory_and_guests_stay(bench: Bench) -> None:
    pinned, other = bench.memory.pinned(4096), bench.memory.pinned(4096)
    target = bench.kernel_target("memcpy", pinned, other)
    assert target.move is None
    assert bench.kernel_target("memcpy", *bench.buffers(2, 4096)).move is not None


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
    check(target)
    assert {bench.device.roofline.pages[id(b.allocation)].place for b in (x, y)} == {"host"}
    assert set(target.managed) == {x, y}


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
