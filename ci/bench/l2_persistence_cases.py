"""The cases of `l2_persistence.py`, as a user's tests: it runs pytest on this file."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any

import numpy as np
import pytest

from pytest_gpumem import MiB
from pytest_gpumem.devices.memory_kinds import MemoryKind
from pytest_gpumem.devices.protocol import Allocation, Device, Stream
from pytest_gpumem.measuring.bound import BoundKernel, Kernels
from pytest_gpumem.measuring.harness import flush_of, holding
from pytest_gpumem.measuring.stopping import half_width
from pytest_gpumem.measuring.target import padding
from pytest_gpumem.memory.buffers import Arena, Buffer
from pytest_gpumem.memory.l2 import persisting
from pytest_gpumem.memory.window_request import fit_hit_ratio

WARM_UP = 2
"""Launches before the first sample: they bring the lines in that persist. The flush before a sample leaves those where they are."""
SECONDS = 0.04
"""Seconds of samples at one setting, on one placement."""
LEAST, MOST = 5, 25
"""Samples at one setting, on one placement."""
GRANULES = (0, 1, 2)
"""Granules of set-aside beyond the smallest number that holds the table."""
Work = Callable[[Stream], None]
"""Queues something on a stream. It ran once before it is held: the first launch of a kernel loads it, which waits for the device."""


class HeldSamples:
    """Takes samples on any stream; the events are made once."""

    def __init__(self, device: Device, most: int = 1) -> None:
        self._device = device
        self._pairs = [(device.streams.event(), device.streams.event()) for _ in range(most)]

    def take(
        self, stream: Stream, before: Work | None, works: Sequence[Work | None]
    ) -> list[float]:
        """Seconds between two events around each of `works`, all queued behind one hold, each with `before` in front of it.

        None is no work: an empty interval, or nothing before it. At most as many works as the constructor was told.

        Raises:
            HoldExpired: something that was queued waited for the device.
        """
        device, pairs = self._device, self._pairs[: len(works)]
        device.streams.synchronize(stream)
        with holding(device, stream):
            for (start, end), work in zip(pairs, works, strict=True):
                if before is not None:
                    before(stream)
                device.streams.record(start, stream)
                if work is not None:
                    work(stream)
                device.streams.record(end, stream)
        device.streams.synchronize(stream)
        return [device.streams.elapsed(*pair) for pair in pairs]


class Experiment:
    """Times launches of one kernel, clean-cold, from behind a held stream.

    Args:
        bind: gives the launch on the buffers where they now are, which takes a stream.
        arguments: its buffers.
        window: the one of them that is under the window.
        seed: of where the placements lie.
        least: samples of one setting on one placement, at least.
    """

    def __init__(
        self,
        device: Device,
        bind: Callable[[], Callable[..., None]],
        arguments: Sequence[Buffer],
        window: Buffer,
        *,
        seed: int,
        least: int,
    ) -> None:
        self._device = device
        self._bind = bind
        self._least = least
        self._arguments = tuple(arguments)
        self._window = window
        self._random = np.random.default_rng(seed)
        self._arena = Arena(device, seed=0)
        flush = flush_of(self._arena, "clean-cold")
        self._flush = partial(device.kernels.launch, flush)
        self._samples = HeldSamples(device, MOST)
        self._padding: Allocation | None = None
        # A kernel is loaded at its first launch, which waits for the device: not held.
        plain = device.streams.create()
        bind()(plain)
        self._flush(plain)
        device.streams.synchronize()

    def seconds(self, options: Mapping[str, Any]) -> list[float]:
        """Samples at one setting, where the buffers now are.

        Args:
            options: arguments of `persisting`.
        """
        launch = self._bind()
        with persisting(self._device, self._window, **options, allow_thrash=True) as stream:
            return self._timed(stream.stream, launch)

    def _timed(self, stream: Stream, work: Callable[[Stream], None]) -> list[float]:
        for _ in range(WARM_UP):
            self._flush(stream)
            work(stream)
        first = self._samples.take(stream, self._flush, [work])
        more = max(self._least, min(MOST, int(SECONDS / first[0])))
        return self._samples.take(stream, self._flush, [work] * more)

    def move(self) -> None:
        """Put all buffers at fresh addresses."""
        self._pad(padding(self._random))
        for buffer in self._arguments:
            buffer.move()
        self._device.memory.settle()

    def rounds(self, settings: Sequence[Mapping[str, Any]], count: int) -> list[list[list[float]]]:
        """Samples of each setting in each of `count` rounds, by setting and round.

        A round is one placement, on which all settings are measured; every second one goes backwards, so that a steady drift of the
        clocks favours nobody.
        """
        taken: list[list[list[float]]] = [[] for _ in settings]
        for number in range(count):
            self.move()
            order = range(len(settings)) if number % 2 == 0 else reversed(range(len(settings)))
            for i in order:
                taken[i].append(self.seconds(settings[i]))
        return taken

    def _pad(self, nbytes: int) -> None:
        if self._padding is not None:
            self._device.memory.free(self._padding)
        self._padding = self._device.memory.allocate(nbytes, MemoryKind.DEVICE) if nbytes else None

    def close(self) -> None:
        """Free what is not the test's."""
        self._pad(0)
        self._arena.close()


def bound(device: Device, kernel: BoundKernel, arguments: tuple[Any, ...]) -> Callable[..., None]:
    """The launch of a kernel of the catalogue on the buffers where they now are."""
    return partial(device.kernels.launch, kernel.launch(*kernel.arguments(arguments, {})))


GATHER = """
extern "C" __global__ void gather(unsigned* out, unsigned const* table, unsigned size, unsigned elements)
{
    for (unsigned i = blockIdx.x * blockDim.x + threadIdx.x; i < size; i += gridDim.x * blockDim.x) {
        out[i] = table[(i / 32 * 2654435761u >> 5) % (elements / 32) * 32 + i % 32];
    }
}
"""
"""Each warp copies a line of the table, chosen by a multiplicative hash."""


def gather(device: Device, out: Buffer, table: Buffer) -> Callable[[], Callable[..., None]]:
    """A function that binds a look-up of random lines of a table, as of an embedding, to the buffers where they are."""
    cupy = pytest.importorskip("cupy", reason="the gather is compiled by CuPy")
    kernel = cupy.RawKernel(GATHER, "gather")

    def bind() -> Callable[..., None]:
        arguments = (
            np.uint64(out.address),
            np.uint64(table.address),
            np.uint32(out.size),
            np.uint32(table.size),
        )

        def launch(stream: Stream) -> None:
            with cupy.cuda.ExternalStream(stream.handle):
                kernel((2 * device.facts.sm_count,), (1024,), arguments)

        return launch

    return bind


@pytest.fixture
def experiment(bench: Any, gpu_device: Device, device_buffer: Any, gpu_kernels: Kernels) -> Any:
    """Makes the experiment of a case, with its kernel and buffers; skips where no time is left."""
    bench.begin(gpu_device)
    made = []

    def make(case: dict[str, Any]) -> tuple[Experiment, Any]:
        stream, window = (
            device_buffer(case["out_mib"] * MiB, "i4"),
            device_buffer(case["mib"] * MiB, "i4"),
        )
        arguments = (window, stream) if case["kernel"] == "sliding_window" else (stream, window)
        if case["kernel"] == "gather":
            bind = gather(gpu_device, stream, window)
        else:
            kernel = getattr(gpu_kernels, case["kernel"])
            kernel = kernel if case["blocks"] is None else kernel.with_grid(case["blocks"])
            bind = partial(bound, gpu_device, kernel, arguments)
        made.append(
            Experiment(
                gpu_device,
                bind,
                arguments,
                window,
                seed=case["mib"],
                least=case.get("samples", LEAST),
            )
        )
        return made[-1], window

    yield make
    for one in made:
        one.close()


def test_placements(
    bench: Any, placements_case: dict[str, Any], experiment: Any, gpu_device: Device
) -> None:
    """Off, the smallest set-aside that holds the table, and one and two granules more, on common placements."""
    facts = gpu_device.facts
    timed, window = experiment(placements_case)
    step = facts.l2_step_bytes
    named: dict[str, dict[str, Any]] = {"off": {"set_aside": "off"}}
    if asked := placements_case.get("set_aside"):
        named["ratio 1"] = {"set_aside": asked, "hit_ratio": 1.0}
        named["fitted"] = {"set_aside": asked, "hit_ratio": fit_hit_ratio(asked, window.nbytes)}
        named["fitted, else normal"] = {**named["fitted"], "miss": "normal"}
    for more in () if asked else GRANULES:
        set_aside = (-(-window.nbytes // step) + more) * step
        if set_aside <= facts.persisting_l2_max_bytes:
            named[f"+{more}"] = {"set_aside": set_aside, "hit_ratio": 1.0}
    rounds = timed.rounds(list(named.values()), placements_case["placements"])
    found = {
        name: {
            "set_aside": one["set_aside"],
            "medians": [round(1e9 * statistics.median(samples)) for samples in own],
        }
        for (name, one), own in zip(named.items(), rounds, strict=True)
    }
    bench.add(
        "placements", placements_case, {"granules": -(-window.nbytes // step), "found": found}
    )


LANES: dict[str, dict[str, Any]] = {
    "off": {"set_aside": "off"},
    "1": {"hit_ratio": 1.0},
    "0.5": {"hit_ratio": 0.5},
    "fit": {},
}
"""Settings of each stream's table."""


def test_streams(
    bench: Any,
    streams_case: dict[str, Any],
    gpu_device: Device,
    device_buffer: Any,
    gpu_kernels: Kernels,
) -> None:
    """Two kernels at once, each on a persisting stream of its own: hit ratio 1 against 0.5, and alone."""
    bench.begin(gpu_device)
    device, case = gpu_device, streams_case
    tables, outs = (
        [device_buffer(case[name] * MiB, "i4") for _ in range(2)] for name in ("mib", "out_mib")
    )
    kernels = [
        bound(device, gpu_kernels.reset_data.with_grid(case["blocks"]), pair)
        for pair in zip(outs, tables, strict=True)
    ]
    samples, main = HeldSamples(device, MOST), device.streams.create()
    for kernel in kernels:
        kernel(main)
    device.streams.synchronize()
    found = {}
    for name, setting in LANES.items():
        # Half of what the two tables need together; the streams' requests are added up.
        each = {"set_aside": case["set_aside"] // 2, "allow_thrash": True, **setting}
        with ExitStack() as stack:
            if name == "off":
                lanes = [
                    stack.enter_context(persisting(device, tables[0], set_aside="off")).stream,
                    device.streams.create(),
                ]
            else:
                lanes = [
                    stack.enter_context(persisting(device, table, **each)).stream
                    for table in tables
                ]

            def both(stream: Stream, lanes: Sequence[Stream] = lanes) -> None:
                for lane, kernel in zip(lanes, kernels, strict=True):
                    device.streams.join(lane, stream)
                    kernel(lane)
                for lane in lanes:
                    device.streams.join(stream, lane)

            def alone(stream: Stream, lanes: Sequence[Stream] = lanes) -> None:
                device.streams.join(lanes[0], stream)
                kernels[0](lanes[0])
                device.streams.join(stream, lanes[0])

            for work, label in ((both, name), (alone, f"{name}, alone")):
                for _ in range(WARM_UP):
                    work(main)
                nanoseconds = [1e9 * seconds for seconds in samples.take(main, None, [work] * 10)]
                found[label] = {
                    "median": statistics.median(nanoseconds),
                    "half_width": half_width(nanoseconds),
                }
    bench.add("streams", case, {"found": found})
