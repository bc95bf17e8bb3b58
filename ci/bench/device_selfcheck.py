"""Exercise every verb of the CUDA device on a real GPU: `python ci/bench/device_selfcheck.py [--device N]`.

Prints one line for each check, OK or FAIL with the exception, goes on after a failure and exits 1 if there was one. It takes at most
64 MiB of managed memory and leaves the GPU's settings as it found them.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
from msgspec import structs

from pytest_gpumem.devices import opening
from pytest_gpumem.devices.protocol import (
    Allocation,
    CannotCapture,
    Device,
    DeviceError,
    Foreign,
    HoldExpired,
    Launch,
    MemoryKind,
    OutOfMemory,
    Stream,
    Unsupported,
    WindowSpec,
)
from pytest_gpumem.kernels.catalogue import CATALOGUE
from pytest_gpumem.kernels.kernel import ArrayFacts, Call, Role

MIB = 1 << 20
CHECKS: list[tuple[str, Callable[[Device, Stream], str | None]]] = []


class Skip(Exception):
    """The check needs something that is not installed here."""


def check(function: Callable[[Device, Stream], str | None]) -> Callable[[Device, Stream], str | None]:
    CHECKS.append((function.__name__.replace("_", " "), function))
    return function


@contextlib.contextmanager
def memory(device: Device, *kinds: MemoryKind, nbytes: int = 16 * MIB, **flags: Any) -> Iterator[Any]:
    made: list[Allocation] = []
    try:
        for kind in kinds:
            made.append(device.memory.allocate(nbytes, kind, **flags))
        yield made[0] if len(made) == 1 else made
    finally:
        device.streams.synchronize()
        for allocation in made:
            device.memory.free(allocation)


def expect(condition: bool, what: str) -> None:
    if not condition:
        raise AssertionError(what)


def raises(kind: type[Exception], function: Callable[[], object]) -> str:
    try:
        function()
    except kind as error:
        return str(error)
    raise AssertionError(f"no {kind.__name__}")


def launch_of(device: Device, name: str, arrays: dict[str, Allocation], dtype: str, **scalars: float) -> Launch:
    kernel = CATALOGUE[name]
    item = np.dtype(dtype).itemsize
    sizes = {n: ArrayFacts(a.nbytes // item, dtype, item, a.kind.on_host) for n, a in arrays.items()}
    defaults = {p.name: p.default for p in kernel.parameters if p.role is Role.SCALAR and p.default is not None}
    call = Call(sizes, {**defaults, **scalars})
    problem = kernel.check(call) if kernel.check is not None else None
    expect(problem is None, str(problem))
    return Launch(kernel, call, kernel.shape(device.facts, call), arrays)


def triad(device: Device, made: list[Allocation]) -> tuple[Launch, list[str]]:
    names = [p.name for p in CATALOGUE["triad"].parameters if p.role is not Role.SCALAR]
    scalars = {p.name: 3.0 for p in CATALOGUE["triad"].parameters if p.role is Role.SCALAR}
    return launch_of(device, "triad", dict(zip(names, made, strict=True)), "f4", **scalars), names


def _mistake() -> None:
    raise IndexError("a user's mistake")


DEVICE, MANAGED, PINNED, REGISTERED, PAGEABLE = MemoryKind


@check
def every_kind_is_allocated_aligned_and_freed(device: Device, stream: Stream) -> str:
    for kind in MemoryKind:
        with memory(device, kind) as a:
            expect((a.address or a.host_address) % 256 == 0, f"{kind.value} at {a.address:#x}")
            expect(bool(a.address) != (kind is PAGEABLE), f"{kind.value}: device address {a.address:#x}")
            expect(bool(a.host_address) != (kind is DEVICE), f"{kind.value}: host address {a.host_address:#x}")
        device.memory.free(a)  # a second call does nothing
    return ", ".join(f"{k.value} {device.memory.free_bytes(k) / 2**30:.1f} GiB free" for k in MemoryKind)


@check
def too_much_is_refused_before_the_driver_is_asked(device: Device, stream: Stream) -> str:
    texts = []
    for kind in (DEVICE, MANAGED, PINNED):
        # twice what is free: what is free may grow meanwhile, and nothing of this size may ever be pinned
        texts.append(raises(OutOfMemory, functools.partial(device.memory.allocate, 2 * device.memory.free_bytes(kind), kind)))
    return " | ".join(texts)


@check
def write_combined_and_unmapped_pinned_memory(device: Device, stream: Stream) -> None:
    with memory(device, PINNED, write_combined=True) as a:
        device.content.fill_random(a, "f4", 1, stream)
    with memory(device, PINNED, mapped=False) as a:
        expect(a.address == 0, "an unmapped allocation has a device address")
        device.content.fill_random(a, "f4", 1, stream)
        device.content.poison(a, stream)
        expect((device.content.to_host(a, "u1", 100) == 255).all(), "not poisoned")


@check
def numpy_memory_is_adopted(device: Device, stream: Stream) -> None:
    array = np.arange(1 << 20, dtype="f4")
    for register in (False, True):
        a = device.memory.adopt(array, register=register)
        try:
            expect(np.array_equal(device.content.to_host(a, "f4", array.size), array), f"register={register}: other content")
        finally:
            device.memory.free(a)


@check
def random_content_is_the_same_on_device_and_host(device: Device, stream: Stream) -> str:
    with memory(device, PAGEABLE) as on_host:
        for dtype in ("f2", "f4", "f8", "i4", "i8", "u1", "b1", "c8"):
            size = 16 * MIB // np.dtype(dtype).itemsize
            device.content.fill_random(on_host, dtype, 42, stream)
            expected = device.content.to_host(on_host, dtype, size).tobytes()
            for kind in (DEVICE, MANAGED, PINNED, REGISTERED):
                with memory(device, kind) as a:
                    device.content.fill_random(a, dtype, 42, stream)
                    expect(device.content.to_host(a, dtype, size).tobytes() == expected, f"{dtype} in {kind.value} memory")
                    device.content.fill_random(a, dtype, 43, stream)
                    expect(device.content.to_host(a, dtype, size).tobytes() != expected, f"{dtype}: the seed changes nothing")
    return "f2 f4 f8 i4 i8 u1 b1 c8 in 5 kinds of memory"


@check
def poison_shows(device: Device, stream: Stream) -> None:
    for kind in MemoryKind:
        with memory(device, kind) as a:
            device.content.poison(a, stream)
            expect(np.isnan(device.content.to_host(a, "f4", 1000)).all(), f"{kind.value} memory is not NaN")
            device.streams.synchronize(stream)


@check
def content_goes_there_and_back(device: Device, stream: Stream) -> None:
    content = np.random.default_rng(0).random(16 * MIB // 8)
    for kind in MemoryKind:
        with memory(device, kind) as a:
            device.content.from_host(a, content)
            expect(np.array_equal(device.content.to_host(a, "f8", content.size), content), f"{kind.value} memory")


@check
def copies_between_all_kinds(device: Device, stream: Stream) -> str:
    for source in MemoryKind:
        for target in MemoryKind:
            with memory(device, source, target, nbytes=MIB) as (s, t):
                device.content.fill_random(s, "i4", 9, stream)
                device.content.poison(t, stream)
                device.content.copy(t, s, MIB, stream)
                device.streams.synchronize(stream)
                same = np.array_equal(device.content.to_host(s, "i4", MIB // 4), device.content.to_host(t, "i4", MIB // 4))
                expect(same, f"{source.value} to {target.value}")
    return "25 pairs"


@check
def a_view_is_a_cupy_or_a_numpy_array(device: Device, stream: Stream) -> None:
    import cupy

    for kind in MemoryKind:
        with memory(device, kind) as a:
            view = device.memory.view(a, "f4", 1000)
            expect(isinstance(view, np.ndarray if kind is PAGEABLE else cupy.ndarray), f"{kind.value}: {type(view)}")
            view[:] = 5
            device.streams.synchronize()
            expect((device.content.to_host(a, "f4", 1000) == 5).all(), f"{kind.value}: the view shows other memory")


@check
def a_cycle_visits_every_node(device: Device, stream: Stream) -> None:
    with memory(device, DEVICE, nbytes=MIB) as a:
        device.content.poison(a, stream)
        device.content.fill_cycle(a, 128, 3, stream)
        following = device.content.to_host(a, "i4", MIB // 4).reshape(-1, 32)
    expect((following[:, 1:] == -1).all(), "more than the first 4 bytes of a node were written")
    at, seen = 0, set()
    for _ in range(len(following)):
        seen.add(at)
        at = int(following[at, 0])
    expect(at == 0 and len(seen) == len(following), f"{len(seen)} of {len(following)} nodes")


@check
def triad_gives_the_references_result(device: Device, stream: Stream) -> str:
    for kind in (DEVICE, MANAGED, PINNED):
        with memory(device, kind, kind, kind) as made:
            launch, names = triad(device, made)
            for seed, a in enumerate(made):
                device.content.fill_random(a, "f4", seed, stream)
            device.streams.synchronize(stream)
            size = made[0].nbytes // 4
            arrays = {n: device.memory.view(a, "f4", size) for n, a in zip(names, made, strict=True)}
            expected = launch.kernel.reference(arrays, launch.call.scalars)  # type: ignore[misc]
            written = next(p.name for p in launch.kernel.parameters if p.role is Role.WRITE)
            device.content.poison(launch.arrays[written], stream)
            device.kernels.launch(launch, stream)
            device.streams.synchronize(stream)
            wrong = device.content.mismatch(arrays[written], expected[written], 1e-6)
            expect(wrong is None, f"{kind.value}: {wrong}")
    return f"{size} elements in device, managed and pinned memory"


@check
def launching_is_cheap(device: Device, stream: Stream) -> str:
    with memory(device, DEVICE, DEVICE, DEVICE, nbytes=4096) as made:
        launch, _ = triad(device, made)
        device.kernels.launch(launch, stream)
        device.streams.synchronize(stream)
        began = time.perf_counter()
        for _ in range(500):
            device.kernels.launch(launch, stream)
        each = (time.perf_counter() - began) / 500
        device.streams.synchronize(stream)
    expect(each < 20e-6, f"{each * 1e6:.1f} us a launch")
    return f"{each * 1e6:.1f} us a launch"


@check
def two_events_with_nothing_between(device: Device, stream: Stream) -> str:
    start, end = device.streams.event(), device.streams.event()
    floors = []
    for _ in range(50):
        device.streams.record(start, stream)
        device.streams.record(end, stream)
        device.streams.synchronize(stream)
        floors.append(device.streams.elapsed(start, end))
    floor = sorted(floors)[25]
    expect(0 < floor < 20e-6, f"{floor * 1e6:.2f} us")
    return f"{floor * 1e6:.2f} us"


@check
def an_event_that_was_not_recorded_is_an_error(device: Device, stream: Stream) -> str:
    return raises(DeviceError, lambda: device.streams.elapsed(device.streams.event(), device.streams.event()))


@check
def a_held_stream_waits_and_is_released(device: Device, stream: Stream) -> str:
    start, end = device.streams.event(), device.streams.event()
    for _ in range(100):  # more often than there are flags
        hold = device.streams.hold(stream, 5.0)
        hold.release()
        device.streams.synchronize(stream)
    device.streams.record(start, stream)
    hold = device.streams.hold(stream, 5.0)
    device.streams.record(end, stream)
    began = time.perf_counter()
    while time.perf_counter() - began < 0.02:
        pass
    hold.release()
    device.streams.synchronize(stream)
    held = device.streams.elapsed(start, end)
    expect(0.015 < held < 1.0, f"held for {held:g} s")
    return f"held for {held * 1e3:.2f} ms of 20 ms"


@check
def a_hold_that_is_not_released_expires(device: Device, stream: Stream) -> str:
    start, end = device.streams.event(), device.streams.event()
    device.streams.record(start, stream)
    device.streams.hold(stream, 0.05)
    device.streams.record(end, stream)
    text = raises(HoldExpired, lambda: device.streams.synchronize(stream))
    held = device.streams.elapsed(start, end)
    expect(0.045 < held < 0.2, f"held for {held:g} s")
    device.streams.synchronize(stream)  # said once
    return text


@check
def a_captured_graph_replays_with_its_events(device: Device, stream: Stream) -> str:
    with memory(device, DEVICE, DEVICE, DEVICE, nbytes=64 * MIB) as made:
        launch, _ = triad(device, made)
        device.kernels.launch(launch, stream)
        device.streams.synchronize(stream)
        pairs = [(device.streams.event(), device.streams.event()) for _ in range(3)]

        def body() -> None:
            for start, end in pairs:
                device.streams.record(start, stream)
                device.kernels.launch(launch, stream)
                device.streams.record(end, stream)

        graph = device.graphs.capture(stream, body)
        times = []
        for _ in range(3):
            device.graphs.replay(graph, stream)
            device.streams.synchronize(stream)
            times.append([device.streams.elapsed(s, e) for s, e in pairs])
        start, end = pairs[0]
        device.streams.record(start, stream)
        device.kernels.launch(launch, stream)
        device.streams.record(end, stream)
        device.streams.synchronize(stream)
        plain = device.streams.elapsed(start, end)
        del graph
    flat = [t for row in times for t in row]
    expect(all(0.3 * plain < t < 3 * plain for t in flat), f"{flat} against {plain}")
    expect(times[0] != times[1] or times[1] != times[2], "the same times after every replay: events are not recorded anew")
    return f"{min(flat) * 1e6:.1f} to {max(flat) * 1e6:.1f} us, plain {plain * 1e6:.1f} us"


@check
def memory_allocated_in_a_capture_lives_with_the_graph(device: Device, stream: Stream) -> str:
    import cupy

    x = cupy.arange(1 << 20, dtype="f4")
    out = cupy.zeros(1 << 20, dtype="f4")

    def compute() -> None:
        cupy.copyto(out, (x * 2 + 1) * 3)

    foreign = Foreign(compute)
    device.kernels.call(foreign, stream)
    device.streams.synchronize()
    pool_before = cupy.get_default_memory_pool().total_bytes()
    graph = device.graphs.capture(stream, lambda: device.kernels.call(foreign, stream))
    expect(cupy.get_default_memory_pool().total_bytes() == pool_before, "the capture allocated from the default pool")
    out.fill(0)
    noise = [cupy.full(1 << 20, 7, dtype="f4") for _ in range(8)]
    device.streams.synchronize()
    device.graphs.replay(graph, stream)
    device.streams.synchronize(stream)
    expect(bool((out == (x * 2 + 1) * 3).all()), "the replay computed something else")
    expect(all(bool((n == 7).all()) for n in noise), "the replay wrote to memory of others")
    del graph
    return "a CuPy expression with two temporaries"


@check
def what_synchronises_cannot_be_captured(device: Device, stream: Stream) -> str:
    def body() -> None:
        device.streams.synchronize(stream)

    text = raises(CannotCapture, lambda: device.graphs.capture(stream, body))
    texts = {
        text,
        raises(CannotCapture, lambda: device.graphs.capture(stream, device.streams.synchronize)),
        raises(CannotCapture, lambda: device.graphs.capture(stream, lambda: None)),
        raises(CannotCapture, lambda: device.graphs.capture(stream, _mistake)),
    }
    with memory(device, DEVICE, nbytes=MIB) as a:
        other = device.streams.create()
        texts.add(raises(CannotCapture, lambda: device.graphs.capture(stream, lambda: device.content.poison(a, other))))
        # the stream works, and the next capture too
        device.content.fill_random(a, "u4", 1, stream)
        before = device.content.to_host(a, "u4", 100)
        graph = device.graphs.capture(stream, lambda: device.content.poison(a, stream))
        expect(np.array_equal(device.content.to_host(a, "u4", 100), before), "a capture ran its work")
        device.graphs.replay(graph, stream)
        device.streams.synchronize(stream)
        expect((device.content.to_host(a, "u1", 100) == 255).all(), "the graph did not run")
    return " | ".join(sorted(texts))


@check
def a_foreign_function_runs_on_our_stream(device: Device, stream: Stream) -> str:
    import cupy

    seen = []
    device.kernels.call(Foreign(lambda: seen.append(cupy.cuda.get_current_stream().ptr)), stream)
    expect(seen == [stream.handle], f"CuPy's stream was {seen}, ours is {stream.handle}")
    expect(cupy.cuda.get_current_stream().ptr != stream.handle, "our stream stayed current")
    try:
        import torch
    except ImportError:
        return "CuPy (no torch here)"
    device.kernels.call(Foreign(lambda: seen.append(torch.cuda.current_stream().cuda_stream)), stream)
    expect(seen[1] == stream.handle, f"torch's stream was {seen[1]}")
    return "CuPy and torch"


@check
def a_window_is_set_read_back_and_turned_off(device: Device, stream: Stream) -> str:
    if not device.facts.persisting_l2_max_bytes:
        raise Skip("no persisting L2")
    with memory(device, DEVICE, nbytes=24 * MIB) as a:
        wanted = WindowSpec(a.address, 24 * MIB, 0.6)
        expect(device.l2.window(stream) is None, f"a new stream has {device.l2.window(stream)}")
        device.l2.set_window(stream, wanted)
        got = device.l2.window(stream)
        device.l2.set_window(stream, None)
        off = device.l2.window(stream)
    expect(got == wanted, f"{got} in place of {wanted}")
    expect(off is None, f"still {off}")
    device.l2.reset_persisting()
    return repr(got)


@check
def the_set_aside_is_granted_and_restored(device: Device, stream: Stream) -> str:
    if not device.facts.persisting_l2_max_bytes:
        raise Skip("no persisting L2")
    found = device.l2.set_aside()
    said = []
    try:
        for wanted in (0, 2 * MIB, 8 * MIB, 24 * MIB, device.facts.persisting_l2_max_bytes, 1 << 40):
            granted = device.l2.request_set_aside(wanted)
            said.append(f"{wanted / MIB:.4g} -> {granted / MIB:.4g}")
            expect(min(wanted, device.facts.persisting_l2_max_bytes) <= granted <= device.facts.persisting_l2_max_bytes, said[-1])
    finally:
        restored = device.l2.request_set_aside(found)
    expect(restored == found, f"found {found}, restored {restored}")
    return f"MiB: {', '.join(said)}; found and restored {found / MIB:.4g}"


@check
def prefetching_moves_pages_both_ways(device: Device, stream: Stream) -> str:
    if not device.facts.concurrent_managed_access:
        raise Skip("no concurrentManagedAccess")
    with memory(device, MANAGED, MANAGED, MANAGED, nbytes=16 * MIB) as made:
        launch, _ = triad(device, made)
        start, end = device.streams.event(), device.streams.event()
        took = {}
        for a in made:
            device.content.fill_random(a, "f4", 1, stream)
        device.kernels.launch(launch, stream)
        for to_host in (True, False):
            times = []
            for _ in range(3):
                for a in made:
                    device.managed.prefetch(a, to_host, stream)
                device.streams.synchronize(stream)
                device.streams.record(start, stream)
                device.kernels.launch(launch, stream)
                device.streams.record(end, stream)
                device.streams.synchronize(stream)
                times.append(device.streams.elapsed(start, end))
            took[to_host] = min(times)
    expect(took[True] > 5 * took[False], f"{took}")
    return f"from the host {took[True] * 1e3:.2f} ms, on the device {took[False] * 1e3:.3f} ms"


@check
def only_managed_memory_is_prefetched(device: Device, stream: Stream) -> str:
    with memory(device, DEVICE) as a:
        return raises(DeviceError, lambda: device.managed.prefetch(a, False, stream))


@check
def a_mismatch_is_counted_and_located(device: Device, stream: Stream) -> None:
    import cupy

    for library in (np, cupy):
        for dtype in ("f2", "f4", "f8", "i4", "i8", "u1", "?", "c8"):
            expected = library.ones(1_000_003, dtype=dtype)
            actual = expected.copy()
            expect(device.content.mismatch(actual, expected, 1e-3) is None, f"{library.__name__} {dtype}: equal arrays differ")
            actual[[777_777, 999_999]] = 0
            found = device.content.mismatch(actual, expected, 1e-3)
            expect(found == (2, 777_777), f"{library.__name__} {dtype}: {found}")
    nan = cupy.full(10, cupy.nan, dtype="f4")
    expect(device.content.mismatch(nan, nan, 1.0) == (10, 0), "NaN equals NaN")
    expect(device.content.mismatch(cupy.ones(10, "f4"), np.ones(10, "f8"), 0.0) is None, "CuPy against NumPy")


def _guest(device: Device, like: Any, kinds: tuple[MemoryKind, ...], to_numpy: Callable[[Any], Any], stream: Stream) -> str:
    for kind in kinds:
        with memory(device, kind) as a:
            device.content.fill_random(a, "f4", 5, stream)
            device.streams.synchronize(stream)
            array = device.memory.guest(a, "f4", (1000, 10), like)
            expect(tuple(array.shape) == (1000, 10), f"shape {array.shape}")
            same = np.array_equal(np.asarray(to_numpy(array)).reshape(-1), device.content.to_host(a, "f4", 10_000))
            expect(same, f"{kind.value}: other content")
            del array
    return ", ".join(k.value for k in kinds)


@check
def cupy_is_a_guest(device: Device, stream: Stream) -> str:
    import cupy

    with memory(device, PAGEABLE) as a:
        raises(Unsupported, lambda: device.memory.guest(a, "f4", (10,), cupy))
    return _guest(device, cupy, (DEVICE, MANAGED, PINNED, REGISTERED), cupy.asnumpy, stream)


@check
def numpy_is_a_guest(device: Device, stream: Stream) -> str:
    with memory(device, DEVICE) as a:
        raises(Unsupported, lambda: device.memory.guest(a, "f4", (10,), np))
    return _guest(device, np, (MANAGED, PINNED, REGISTERED, PAGEABLE), lambda array: array, stream)


@check
def torch_is_a_guest(device: Device, stream: Stream) -> str:
    try:
        import torch
    except ImportError:
        raise Skip("torch is not installed") from None
    return _guest(device, torch, tuple(MemoryKind), lambda array: array.cpu().numpy(), stream)


@check
def numba_is_a_guest(device: Device, stream: Stream) -> str:
    try:
        import numba.cuda
    except ImportError:
        raise Skip("numba is not installed") from None
    return _guest(device, numba.cuda, (DEVICE, MANAGED, PINNED), lambda array: array.copy_to_host(), stream)


@check
def a_stranger_is_no_guest(device: Device, stream: Stream) -> str:
    with memory(device, DEVICE) as a:
        return raises(Unsupported, lambda: device.memory.guest(a, "f4", (10,), sys))


@check
def conditions_are_read(device: Device, stream: Stream) -> str:
    now = device.conditions()
    expect(now.sm_clock_hz is not None and now.sm_clock_hz > 1e8, f"{now}")
    expect(now.temperature_c is not None and 0 < now.temperature_c < 120, f"{now}")
    return repr(now)


@check
def the_clock_goes_on(device: Device, stream: Stream) -> None:
    expect(device.now() < device.now(), "time stands still")


@check
def no_memory_was_lost(device: Device, stream: Stream) -> str:
    import gc

    import cupy

    gc.collect()
    cupy.get_default_memory_pool().free_all_blocks()
    before = device.memory.free_bytes(DEVICE)
    for _ in range(20):
        with memory(device, DEVICE, MANAGED, PINNED, nbytes=32 * MIB):
            pass
    lost = before - device.memory.free_bytes(DEVICE)
    expect(lost <= 8 * MIB, f"{lost} bytes are gone")
    return f"{lost} bytes"


def main() -> int:
    arguments = argparse.ArgumentParser(description=__doc__)
    arguments.add_argument("--device", type=int, default=0, help="CUDA device number (default: 0)")
    arguments.add_argument("--traceback", action="store_true", help="print the traceback of every failure")
    chosen = arguments.parse_args()
    try:
        found = opening.choose(f"cuda:{chosen.device}")
    except opening.NoDevice as reason:
        print(f"FAIL  {reason}")
        return 1
    for field in structs.fields(found.facts):
        print(f"      {field.name} = {getattr(found.facts, field.name)!r}")
    print(f"      key = {found.facts.key}")
    device = found.open()
    stream = device.streams.create()
    failed = 0
    for name, function in CHECKS:
        try:
            said = function(device, stream)
            print(f"OK    {name}" + (f": {said}" if said else ""), flush=True)
        except Skip as reason:
            print(f"SKIP  {name}: {reason}", flush=True)
        except Exception as error:
            failed += 1
            print(f"FAIL  {name}: {type(error).__name__}: {error}", flush=True)
            if chosen.traceback:
                traceback.print_exc()
    try:
        device.close()
        print("OK    the device is closed")
    except Exception as error:
        failed += 1
        print(f"FAIL  closing the device: {type(error).__name__}: {error}")
    print(f"{failed} of {len(CHECKS) + 1} checks failed" if failed else f"all {len(CHECKS) + 1} checks passed")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
