"""Work put together from copies, kernels and the host: what is queued, how long it takes, that wrong results are seen."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
from cases import naming
from counted_device import CountedDevice, replaced
from hypothesis import given
from hypothesis import strategies as st

from pytest_gpumem.devices.protocol import Device, Unsupported
from pytest_gpumem.kernels.catalogue import CATALOGUE
from pytest_gpumem.measuring.bound import BadCall, BoundKernel
from pytest_gpumem.measuring.overlap import bound_of
from pytest_gpumem.measuring.target import NotChecked, WrongResult
from pytest_gpumem.measuring.works import (
    DEVICE_TO_HOST,
    HOST_TO_DEVICE,
    KERNEL,
    Work,
    Works,
    cut,
)
from pytest_gpumem.memory.buffers import Arena, Buffer
from pytest_gpumem.memory.spaces import Memory

MIB = 2**20


def bound(memory: Memory, name: str) -> BoundKernel:
    return BoundKernel(CATALOGUE[name], memory.arena.device, memory.arena.stream)


def launched(memory: Memory, name: str, *arguments: Any, **scalars: Any) -> Work:
    return Works(memory).kernel(bound(memory, name), *arguments, **scalars)


def took(device: Device, work: Work) -> float:
    """Seconds of one run between events, after a first one."""
    stream, start, end = device.streams.create(), device.streams.event(), device.streams.event()
    work.queue(stream)
    device.streams.synchronize()
    hold = device.streams.hold(stream, 10.0)
    device.streams.record(start, stream)
    work.queue(stream)
    device.streams.record(end, stream)
    device.streams.release(hold)
    device.streams.synchronize()
    return device.streams.elapsed(start, end)


def checked(device: Device, work: Work) -> None:
    stream = device.streams.create()
    work.poison(stream)
    work.queue(stream)
    device.streams.synchronize(stream)
    assert work.verify is not None
    work.verify()


def staged(memory: Memory, shape: Any, streams: int) -> Work:
    return Works(memory).staged(streams, shape, rounds=1)


@given(nbytes=st.integers(1, 10**7), pieces=st.integers(1, 200))
def test_pieces_cover_everything_once_at_aligned_offsets(nbytes: int, pieces: int) -> None:
    if pieces > -(-nbytes // 256):
        with pytest.raises(BadCall, match=f"cannot be cut into {pieces} pieces"):
            cut(nbytes, pieces)
        return
    made = cut(nbytes, pieces)
    assert len(made) == pieces
    assert all(offset % 256 == 0 and length > 0 for offset, length in made)
    assert [offset for offset, _ in made] == [0, *np.cumsum([length for _, length in made])[:-1]]
    assert sum(length for _, length in made) == nbytes


N = (33001,)
"""Elements that no number of chunks divides."""


def made_before(*buffers: Buffer) -> Callable[..., Buffer]:
    """Stands for a method that makes buffers: it gives these."""
    left = iter(buffers)
    return lambda *_: next(left)


def test_a_staged_copy_gives_the_sequential_result() -> None:
    streams_cases: list[tuple[int, int | None]] = [(1, None), (3, 7), (16, 5)]
    for back in (True, False):
        for streams, chunks in streams_cases:
            memory = Memory(Arena(CountedDevice(), seed=7))
            source, there, target = memory.pinned(N), memory.device(N), memory.pinned(N)
            replaced(memory, pinned=made_before(source, target), device=made_before(there))
            work = Works(memory).staged(streams, N, chunks=chunks, back=back, rounds=3)
            checked(memory.arena.device, work)
            result = target if back else there
            x = source.read()
            for _ in range(3):
                x = np.float32(3.75) * x * (np.float32(1) - x)
            np.testing.assert_array_equal(result.read(), x)
            assert (work.streams, work.chunks) == (streams, chunks or streams), (
                back,
                streams,
                chunks,
            )


def test_staging_hides_and_more_chunks_hide_more(memory: Memory) -> None:
    device = memory.arena.device
    sequential = took(device, Works(memory).in_turn(*staged(memory, "64 MiB", 1).parts))
    parts = [(work.engines, took(device, work)) for work in staged(memory, "64 MiB", 1).parts]
    bound = bound_of(device, parts)
    times = [took(device, staged(memory, "64 MiB", n)) for n in (1, 2, 4, 16)]
    assert sequential == pytest.approx(sum(seconds for _, seconds in parts), rel=0.02)
    assert times == sorted(times, reverse=True)
    assert times[0] == pytest.approx(sequential, rel=0.02)
    assert bound < times[-1] < 1.15 * bound
    # tT + tE/n, with everything that is not the longest part to be hidden
    for n, seconds in zip((2, 4, 16), times[1:], strict=True):
        estimate = bound + (sequential - bound) / n
        assert 0.95 * estimate < seconds < 1.05 * estimate


def test_one_copy_engine_makes_the_directions_share() -> None:
    two, one = CountedDevice(), CountedDevice(async_engines=1)
    parts = [
        (frozenset([HOST_TO_DEVICE]), 3.0),
        (frozenset([KERNEL]), 4.0),
        (frozenset([DEVICE_TO_HOST]), 2.0),
    ]
    assert bound_of(two, parts) == 4.0
    assert bound_of(one, parts) == 5.0


@pytest.mark.parametrize("engines", [0, 1])
def test_what_cannot_overlap_is_refused(engines: int) -> None:
    device = CountedDevice(async_engines=engines)
    memory = Memory(Arena(device, 1))
    up = Works(memory).copy(memory.device(MIB), memory.pinned(MIB))
    down = Works(memory).copy(memory.pinned(MIB), memory.device(MIB))
    with pytest.raises(Unsupported, match=f"asyncEngineCount is {engines}"):
        Works(memory).together(up, down)
    kernel = launched(memory, "elementwise", memory.device(MIB))
    if engines:
        Works(memory).together(up, kernel)
        staged(memory, MIB, 2)
    else:
        with pytest.raises(Unsupported, match="asyncEngineCount is 0"):
            Works(memory).together(up, kernel)
        with pytest.raises(Unsupported, match="asyncEngineCount is 0"):
            staged(memory, MIB, 2)


def test_host_work_comes_after_all_is_queued(memory: Memory) -> None:
    device = memory.arena.device
    copy = Works(memory).copy(memory.device("64 MiB"), memory.pinned("64 MiB"))
    seen = []

    def busy() -> None:
        began = device.now()
        seen.append(began)
        while device.now() < began + 1e-3:
            pass

    works = Works(memory)
    host = works.host(busy)
    assert works.enqueue(host)[0] == pytest.approx(1e-3, rel=0.05)
    alone = works.enqueue(copy)[1]
    together = works.enqueue(works.together(host, copy))
    in_turn = works.enqueue(works.in_turn(copy, host))
    assert together[1] == pytest.approx(max(alone, 1e-3), rel=0.05)
    assert in_turn[1] == pytest.approx(alone + 1e-3, rel=0.05)
    assert (host.waits, works.together(host, copy).waits, copy.waits) == (
        True,
        True,
        False,
    )


def test_the_call_returns_at_once_for_pinned_memory_and_late_for_pageable(memory: Memory) -> None:
    target, works = memory.device("64 MiB"), Works(memory)
    returned, done = works.enqueue(works.copy(target, memory.pinned("64 MiB")))
    assert returned < 0.05 * done
    pageable = works.copy(target, memory.pageable("64 MiB"))
    returned, done = works.enqueue(pageable)
    assert returned > 0.9 * done
    assert pageable.waits


def test_a_kernel_takes_arrays_of_a_library(memory: Memory) -> None:
    array = memory.managed((256,), "i4", like=np)
    work = launched(memory, "init", array)
    checked(memory.arena.device, work)
    assert work.moved_bytes is not None
    assert work.moved_bytes.writes == array.nbytes


def test_a_refused_call_leaves_the_users_own_arrays(memory: Memory) -> None:
    own = np.ones(1024, "i4")
    with pytest.raises(BadCall, match="out takes one index, it has 2 elements"):
        launched(memory, "chase", own, memory.device((2,), "i4"), 10)
    assert (own == 1).all()


def test_a_wrong_result_is_seen() -> None:
    memory = Memory(Arena(CountedDevice(), seed=7))
    stream, target = memory.arena.device.streams.create(), memory.device((1000,))
    for kind, work in [
        ("copy", Works(memory).copy(target, memory.pinned((1000,)))),
        ("kernel", launched(memory, "reread", target, memory.device((1000,)))),
        ("staged copy", staged(memory, (1000,), 2)),
    ]:
        with naming(kind):
            work.poison(stream)
            assert work.verify is not None
            with pytest.raises(WrongResult, match="the first is"):  # nothing ran
                work.verify()


def test_work_that_cannot_be() -> None:
    cases: list[tuple[Any, str]] = [
        (lambda m: Works(m).copy(m.device(512), m.pinned(1024)), "a copy of 1 KiB to 512 B"),
        (
            lambda m: Works(m).together(Works(m).host(print)),
            "together takes at least two pieces of work, not 1",
        ),
        (lambda m: Works(m).together(*[m.device(512)] * 2), "Buffer is no work of gpu_work"),
        (lambda m: Works(m).in_turn(), "takes pieces of work"),
        (lambda m: Works(m).in_turn(m.device(512)), "Buffer is no work of gpu_work"),
        (lambda m: Works(m).after(Works(m).host(print), m.device(512)), "Buffer is no work"),
        (lambda m: Works(m).kernel(m.device(512)), "is no kernel of gpu_kernels"),
        (
            lambda m: launched(m, "elementwise", m.device(512), np.array(3)),
            r"'rounds' is a number, not array\(3\)",
        ),
        (lambda m: staged(m, 4096, 0), "n_streams=0"),
        (lambda m: Works(m).staged(2, 4096, chunks=0), "chunks=0; accepted is a whole number"),
        (lambda m: Works(m).staged(2, 4096, rounds=0), "elementwise: rounds is 0"),
    ]
    for make, said in cases:
        memory = Memory(Arena(CountedDevice(), seed=7))
        with naming(make), pytest.raises(BadCall, match=said):
            make(memory)


def test_a_copy_is_checked_against_what_it_copied(memory: Memory) -> None:
    """What runs before it may write its source anew each time."""
    works, x, host = Works(memory), memory.device(MIB), memory.pinned(MIB)
    back, kernel = works.copy(host, x), launched(memory, "elementwise", x)
    new = iter(range(100))
    fill = works.host(lambda: host.write(np.full(host.size, next(new))))
    for work in (
        works.in_turn(kernel, back),
        works.after(kernel, back),
        works.in_turn(fill, works.copy(x, host)),
    ):
        with naming(work.name):
            assert work.check() is None


def test_work_is_checked_against_what_runs_before_it(memory: Memory) -> None:
    works, x, y = Works(memory), memory.device(MIB), memory.device(MIB)
    up = works.copy(x, memory.pinned(MIB))
    for work in launched(memory, "elementwise", x), launched(memory, "copy", y, x):
        with naming(work.name):
            assert works.after(up, work).check() is None


def test_work_follows_its_buffers(memory: Memory) -> None:
    """A measurement may move a buffer that work was made of before."""
    device, works = memory.arena.device, Works(memory)
    y, x = memory.device(MIB), memory.device(MIB)
    made = [
        works.copy(y, x),
        works.copy(y, x, pieces=3),
        works.kernel(bound(memory, "copy"), y, x),
    ]
    before = y.address, x.address
    y.move()
    x.move()
    assert before != (y.address, x.address)
    for work in made:
        checked(device, work)


def test_the_same_update_twice_is_checked(memory: Memory) -> None:
    works, x = Works(memory), memory.device(MIB)
    update = launched(memory, "elementwise", x)
    for work in works.in_turn(update, update), works.after(update, update):
        with naming(work.name):
            assert work.check() is None


def test_each_of_works_in_turn_is_checked(memory: Memory) -> None:
    """The launch of the first does nothing the second time: its result lies there from before."""
    works, x, y = Works(memory), memory.device(MIB), memory.device(MIB)
    first, last = works.copy(x, memory.pinned(MIB)), works.copy(y, x)
    for work in works.in_turn(first, last), works.after(first, last):
        with naming(work.name):
            assert work.check() is None
            queue, first.queue = first.queue, lambda _: None
            with pytest.raises(WrongResult, match="pinned to device: "):
                work.check()
            first.queue = queue


def test_work_after_other_work_is_no_part_of_more(memory: Memory) -> None:
    """What is to run before it would be left out, or the order be another."""
    works = Works(memory)
    a, b, c = (works.host(lambda: None, name) for name in "abc")
    prepared = works.after(b, c)
    for combine in works.after, works.in_turn, works.together:
        for pieces in (a, prepared), (prepared, a):
            with pytest.raises(BadCall, match=r"^c is of after\(\), which comes last: "):
                combine(*pieces)


def test_all_that_is_to_run_before_work_runs_in_order(memory: Memory) -> None:
    works, ran = Works(memory), list[str]()
    a, b, c = (works.host(partial(ran.append, name), name) for name in "abc")
    for work in works.after(works.in_turn(a, b), c), works.after(a, works.in_turn(b, c)):
        ran.clear()
        work.put_back(memory.arena.stream)
        work.launch(0, memory.arena.stream)
        assert ran == ["a", "b", "c"]
    ran.clear()
    works.enqueue(works.after(a, b))
    assert ran[-2:] == ["a", "b"]


def test_what_precedes_work_of_the_host_is_checked(memory: Memory) -> None:
    works = Works(memory)
    copy = works.copy(memory.device(MIB), memory.pinned(MIB))
    turn = works.in_turn(copy, works.host(lambda: None))
    assert turn.verify is not None
    assert turn.check() is None
    copy.queue = lambda _: None
    with pytest.raises(WrongResult, match="pinned to device: "):
        turn.check()


def test_a_check_that_ends_early_leaves_later_launches_alone(memory: Memory) -> None:
    device, works, x = memory.arena.device, Works(memory), memory.device(MIB)
    assert isinstance(device, CountedDevice)
    turn = works.in_turn(works.copy(x, memory.pinned(MIB)), works.copy(memory.device(MIB), x))
    other = launched(memory, "elementwise", memory.device(MIB))
    whole = works.together(turn, other)

    def short(_stream: Any) -> None:
        raise NotChecked("memory is too short")

    other.poison = short
    assert whole.check() == "memory is too short"
    poisoned = list[Any]()
    device.before("content.poison", lambda allocation, _: poisoned.append(allocation))
    whole.queue(memory.arena.stream)
    assert not poisoned
