"""The simulated device's kernels: results by their references, times by the roofline."""

from __future__ import annotations

import hashlib
import inspect
from collections.abc import Callable
from functools import lru_cache, partial
from typing import Any, NamedTuple

import numpy as np
from msgspec.structs import replace

from pytest_gpumem.devices import protocol
from pytest_gpumem.devices.checks import check_live, check_window, copied_by
from pytest_gpumem.devices.protocol import Foreign, Launch, Stream, WindowSpec
from pytest_gpumem.devices.simulated.memory import SimulatedContent, memory_name, prefix
from pytest_gpumem.devices.simulated.roofline import Roofline, Traffic
from pytest_gpumem.devices.simulated.streams import COMPUTE, LAUNCH, Facet, Timeline, Work
from pytest_gpumem.kernels.kernel import LaunchShape, Role
from pytest_gpumem.kernels.sources import SourceMissing, fingerprint
from pytest_gpumem.records.arguments import text
from pytest_gpumem.records.what_ran import Step, StepKind


class _Ready(NamedTuple):
    compute: Callable[[], object]
    traffic: Traffic
    ran: Step


class SimulatedKernels(Facet, protocol.DeviceKernels):
    """Queues launches. Each is made ready once."""

    def __init__(self, timeline: Timeline, roofline: Roofline, content: SimulatedContent) -> None:
        super().__init__(timeline, roofline)
        self._content = content

    def launch(self, launch: Launch, stream: Stream, *, window: WindowSpec | None = None) -> None:
        if window is not None:
            check_window(window, self._roofline.facts)
        if launch.kernel.source is None:
            self._content.copy(*copied_by(launch), stream)
            return
        check_live(launch)
        if launch.backing is None:
            launch.backing = self._ready(launch)
        self._queue(launch.backing, stream, window, LAUNCH)

    def _queue(self, ready: _Ready, stream: Stream, window: WindowSpec | None, cost: float) -> None:
        ran = ready.ran
        window = self._timeline.window_of_kernel(stream, window)
        if window is not None:
            ran = replace(ran, window=window.words)
        seconds = partial(self._roofline.kernel, ready.traffic, window)
        self._timeline.queue(stream, Work(COMPUTE, seconds, ready.compute, ran), cost)

    def _ready(self, launch: Launch) -> _Ready:
        kernel, call, shape = launch.kernel, launch.call, launch.shape
        for name, allocation in launch.arrays.items():
            if not allocation.address:
                problem = f"{name} is {allocation.kind.value} memory, which kernels cannot see"
                raise protocol.DeviceError(f"{kernel.name}: {problem}")
        touched = [(access, launch.arrays[access.argument]) for access in kernel.accesses(call)]
        chain = cycles = 0.0
        if kernel.accesses_per_launch is not None:
            chain = kernel.accesses_per_launch(call)
        if kernel.on_chip_cycles is not None:
            busy = min(shape.blocks, self._roofline.facts.sm_count)
            cycles = kernel.on_chip_cycles(call) / busy
        traffic = self._roofline.traffic(touched, chain, cycles)
        code = f"{_source(kernel.source or '')} {kernel.entry} {_element(launch)} {shape.vectors}"
        step = replace(_kernel_step(kernel.name, shape, code), arguments=_arguments(launch))
        return _Ready(_computation(launch), traffic, step)

    def call(self, foreign: Foreign, stream: Stream) -> None:
        reference = foreign.reference
        if reference is None:
            if foreign.on_simulated:
                foreign.function()
                return
            problem = "a function without reference= does not run on the simulated device"
            raise protocol.Unsupported(problem)
        code = ""
        if self._timeline.steps is not None:
            code = f"{_code_of(foreign.function)} {_code_of(reference)} {foreign.accesses}"
        shape = LaunchShape(8 * self._roofline.facts.sm_count, 256)
        touched = zip(foreign.accesses, foreign.allocations, strict=True)
        ready = _Ready(
            reference, self._roofline.traffic(touched), _kernel_step("reference", shape, code)
        )
        self._queue(ready, stream, None, 2 * LAUNCH)


def _computation(launch: Launch) -> Callable[[], None]:
    """Return what writes a kernel's results, of what is real, by its reference.

    If an array is backed in part, all are cut to the elements of the shortest of those: a smaller
    table stays whole, a stream becomes its first elements. Unchanged inputs are not computed again.
    """
    kernel = launch.kernel
    reference = kernel.reference
    if reference is None:
        problem = f"{kernel.name} has no reference to run on the simulated device"
        raise protocol.Unsupported(problem)
    arrays = {}
    shortest = None
    for name, facts in launch.call.arrays.items():
        array = arrays[name] = prefix(launch.arrays[name], facts.dtype, facts.size)
        if array.size < facts.size and (shortest is None or array.size < shortest):
            shortest = array.size
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
    """Return a launch as a step. `code`: what stands for machine code."""
    return Step(
        StepKind.KERNEL,
        name,
        code=hashlib.sha256(code.encode()).hexdigest(),
        grid=(shape.blocks, 1, 1),
        block=(shape.threads, 1, 1),
        dynamic_shared=shape.shared_bytes,
    )


def _arguments(launch: Launch) -> tuple[str, ...]:
    """Return the arguments that a GPU would get, as in `records.arguments`."""
    call = launch.call
    element = np.dtype(_element(launch)).type
    scalars: dict[str, Any] = {p.name: p.default for p in launch.kernel.parameters}
    scalars.update(call.scalars)
    texts = []
    for item in launch.kernel.arguments_of(call):
        if item in launch.arrays:
            texts.append(f"{memory_name(launch.arrays[str(item)])} -")
            continue
        number: Any = np.int64(item) if not isinstance(item, str) else element(scalars[item])
        texts.append(text(number.tobytes(), 0, lambda _: None))
    return tuple(texts)


@lru_cache
def _source(name: str) -> str:
    """Return the digest of a source's text, or the name of what is not the catalogue's."""
    try:
        return fingerprint(name)
    except SourceMissing:
        return name


def _code_of(function: Callable[[], object]) -> str:
    """Return a Python function's text."""
    try:
        return inspect.getsource(function)
    except (OSError, TypeError):
        return type(function).__name__


def _element(launch: Launch) -> str:
    return next(iter(launch.call.arrays.values())).dtype
