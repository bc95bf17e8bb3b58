"""A simulated device. Kernels give the results of their references, and take the time of the
roofline."""

from __future__ import annotations

import hashlib
import inspect
from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import lru_cache, partial
from typing import Any

import numpy as np
from msgspec.structs import replace

from pytest_gpumem.devices import protocol
from pytest_gpumem.devices.footprints import Footprints
from pytest_gpumem.devices.protocol import Foreign, Launch, Span, Stream, Unsupported, WindowSpec
from pytest_gpumem.devices.simulated import streams
from pytest_gpumem.devices.simulated.datasheets import Datasheet
from pytest_gpumem.devices.simulated.memory import (
    NO_PEER,
    SimulatedContent,
    SimulatedMemory,
    memory_name,
    prefix,
)
from pytest_gpumem.devices.simulated.roofline import Roofline, Traffic
from pytest_gpumem.devices.simulated.streams import LAUNCH, Facet, Operation, Timeline
from pytest_gpumem.kernels.kernel import Access, LaunchShape, Role, fingerprint
from pytest_gpumem.records.device import Conditions
from pytest_gpumem.records.what_ran import PageCounts, Step, WhatRan, argument_text, what_ran

_Ready = tuple[Callable[[], object], Traffic, Step]  # effect, traffic and record of a kernel


class SimulatedKernels(Facet, protocol.DeviceKernels):
    def __init__(self, timeline: Timeline, content: SimulatedContent) -> None:
        super().__init__(timeline)
        self._content = content

    def launch(self, launch: Launch, stream: Stream, *, window: WindowSpec | None = None) -> None:
        if launch.kernel.source is None:
            self._content.copy(*launch.copied(), stream)
            return
        launch.check_live()
        if launch.backing is None:
            launch.backing = self._ready(launch)
        self._queue(launch.backing, stream, window, LAUNCH)

    def _queue(self, ready: _Ready, stream: Stream, window: WindowSpec | None, cost: float) -> None:
        compute, traffic, ran = ready
        window = window or self._timeline.windows.get(stream)
        graph = self._timeline.capturing
        if graph is not None:
            window = graph.window or window
            graph.windows.append(window)
        if window is not None:
            ran = replace(ran, window=window.words)
        seconds = partial(self._roofline.kernel, traffic, window)
        self._timeline.queue(stream, Operation(streams.COMPUTE, seconds, compute, ran), cost)

    def _ready(self, launch: Launch) -> _Ready:
        kernel, call, shape = launch.kernel, launch.call, launch.shape
        arguments = []
        for item, packed in zip(kernel.arguments_of(call), launch.packed_arguments(), strict=True):
            if item in launch.arrays:
                arguments.append(f"{memory_name(launch.arrays[str(item)])} -")
            else:
                arguments.append(argument_text(packed.tobytes(), 0, lambda _: None))
        touched = [(access, launch.arrays[access.argument]) for access in kernel.accesses(call)]
        chain = cycles = 0.0
        if kernel.accesses_per_launch is not None:
            chain = kernel.accesses_per_launch(call)
        if kernel.on_chip_cycles is not None:
            busy = min(shape.blocks, self._roofline.facts.sm_count)
            cycles = kernel.on_chip_cycles(call) / busy
        traffic = self._roofline.traffic(touched, chain, cycles)
        source, element = _source(kernel.source or ""), launch.element_type
        code = f"{source} {kernel.entry} {element} {shape.vectors}"
        step = replace(_kernel_step(kernel.name, shape, code), arguments=tuple(arguments))
        return _computation(launch), traffic, step

    def call(self, foreign: Foreign, stream: Stream) -> None:
        reference = foreign.reference
        if reference is None:
            if foreign.on_simulated:
                foreign.function()
                return
            raise Unsupported("a function without reference= does not run on the simulated device")
        code = ""
        if self._timeline.steps is not None:
            code = f"{_code_of(foreign.function)} {_code_of(reference)}"
        shape = LaunchShape(8 * self._roofline.facts.sm_count, 256)
        accesses = []
        for memory, nbytes in foreign.touched:  # direction does not matter
            accesses.append((Access("", "read", nbytes, nbytes), memory))
        traffic = self._roofline.traffic(accesses, elsewhere=foreign.elsewhere)
        step = _kernel_step("reference", shape, code)
        self._queue((reference, traffic, step), stream, None, 2 * LAUNCH)


def _computation(launch: Launch) -> Callable[[], None]:
    """What writes the part of a kernel's results that is backed, by its reference."""
    kernel = launch.kernel
    reference = kernel.reference
    if reference is None:
        raise Unsupported(f"{kernel.name} has no reference to run on the simulated device")
    arrays, partial_sizes = {}, []
    for name, facts in launch.call.arrays.items():
        array = arrays[name] = prefix(launch.arrays[name], facts.dtype, facts.size)
        if array.size < facts.size:
            partial_sizes.append(array.size)
    shortest = min(partial_sizes, default=None)
    read, written = [], {}
    for parameter in kernel.parameters:
        if parameter.name not in arrays:
            continue
        array = arrays[parameter.name] = arrays[parameter.name][:shortest]
        if parameter.role is not Role.WRITE:
            read.append(array)
        if parameter.role is not Role.READ:
            written[parameter.name] = array
    last_inputs: list[bytes] | None = None
    results: dict[str, Any] = {}

    def run() -> None:
        nonlocal last_inputs
        if not any(array.size for array in written.values()):
            return  # such as a chunk behind the real bytes
        inputs = [array.tobytes() for array in read]
        if inputs != last_inputs:
            last_inputs = inputs
            for name, result in reference(dict(arrays), launch.call.scalars).items():
                results[name] = np.array(result).reshape(-1)
        for name, result in results.items():
            size = min(result.size, written[name].size)
            written[name][:size] = result[:size]

    return run


def _kernel_step(name: str, shape: LaunchShape, code: str) -> Step:
    """A launch as a step. `code` stands for machine code."""
    return Step(
        "kernel",
        name,
        code=hashlib.sha256(code.encode()).hexdigest(),
        grid=(shape.blocks, 1, 1),
        block=(shape.threads, 1, 1),
        dynamic_shared=shape.shared_bytes,
    )


@lru_cache
def _source(name: str) -> str:
    """The digest of a source's text, or the name of what is not the catalogue's."""
    try:
        return fingerprint(name)
    except FileNotFoundError:
        return name


def _code_of(function: Callable[[], object]) -> str:
    try:
        return inspect.getsource(function)
    except (OSError, TypeError):
        return type(function).__name__


class SimulatedL2(Facet, protocol.L2):
    def set_aside(self) -> int:
        return self._roofline.set_aside

    def request_set_aside(self, nbytes: int) -> int:
        """Round up to steps of L2/16, up to the maximum. A change ends what persists."""
        self._timeline.call(streams.ALLOCATE, "it changes the set-aside")
        roofline, facts = self._roofline, self._roofline.facts
        step = facts.l2_step_bytes
        granted = min(-(-nbytes // step) * step, facts.persisting_l2_max_bytes)
        roofline.persisting = roofline.persisting and granted == roofline.set_aside
        roofline.set_aside = granted
        return granted

    def set_window(self, stream: Any, window: WindowSpec | None) -> None:
        self._timeline.call()
        self._timeline.windows[stream] = window

    def window(self, stream: Any) -> WindowSpec | None:
        self._timeline.call()
        return self._timeline.windows.get(stream)

    def reset_persisting(self) -> None:
        self._timeline.call(streams.CALL, "it resets persisting lines")
        self._roofline.persisting = False


class SimulatedCounters(Facet, protocol.Counters):
    def pages(self, work: Callable[[], None]) -> PageCounts:
        self._roofline.take_page_counts()
        work()
        return self._roofline.take_page_counts()

    def spans(self, work: Callable[[], None]) -> list[Span]:
        spans = self._timeline.spans = []
        try:
            work()
        finally:
            self._timeline.spans = None
        return spans

    def what_ran(self, work: Callable[[], None], wait: Callable[[], None]) -> WhatRan:
        timeline, host = self._timeline, self._timeline.host
        steps = timeline.steps = []
        try:
            work()
        finally:
            timeline.steps, timeline.host = None, host
        return what_ran(steps)


class SimulatedDevice(protocol.Device):
    """A device with a datasheet's figures. The same seed and calls give the same times."""

    def __init__(self, datasheet: Datasheet, *, seed: int = 0) -> None:
        self.roofline = Roofline(datasheet, seed)
        self.facts = self.roofline.facts
        timeline = self.timeline = Timeline(self.roofline)
        self.streams = streams.SimulatedStreams(timeline)
        self.memory = SimulatedMemory(timeline)
        self.content = SimulatedContent(timeline)
        self.kernels = SimulatedKernels(timeline, self.content)
        self.l2 = SimulatedL2(timeline)
        self.counters = SimulatedCounters(timeline)
        self.footprints = Footprints(None, ())

    def now(self) -> float:
        self.timeline.call()
        return self.timeline.host

    def pause(self, seconds: float) -> None:
        self.timeline.host += seconds

    def conditions(self) -> Conditions:
        sheet = self.roofline.sheet
        clocks = {"sm_clock_hz": sheet.sm_clock, "memory_clock_hz": sheet.memory_clock}
        return Conditions(**clocks, throttle_reasons=(), other_processes=0)

    def peer_access(self, allowed: bool) -> AbstractContextManager[None]:
        raise Unsupported(NO_PEER)

    def close(self) -> None:
        self.timeline.windows.clear()
