"""The simulated device's kernels: references that compute the results, and the work that the model takes the time of."""

from __future__ import annotations

import hashlib
import inspect
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import lru_cache, partial
from types import CodeType
from typing import NamedTuple

import numpy as np
from msgspec.structs import replace

from pytest_gpumem.devices.checks import check_live, check_window, copied_by
from pytest_gpumem.devices.kinds import MemoryKind
from pytest_gpumem.devices.protocol import (
    Allocation,
    DeviceError,
    Foreign,
    Launch,
    Stream,
    Unsupported,
    WindowSpec,
)
from pytest_gpumem.devices.simulated import timing
from pytest_gpumem.devices.simulated.content import computation
from pytest_gpumem.devices.simulated.engine import COMPUTE, SimulatedStream, WorkItem
from pytest_gpumem.devices.simulated.machine import SimulatedMachine
from pytest_gpumem.devices.simulated.streams import LAUNCH, Facet, QueueStep, Timeline, own_stream
from pytest_gpumem.kernels.kernel import Access, LaunchShape
from pytest_gpumem.kernels.sources import SourceMissing, fingerprint
from pytest_gpumem.records import what_ran
from pytest_gpumem.records.arguments import WORD, Addresses, Interval, texts
from pytest_gpumem.records.what_ran import StepKind


class _ReadyLaunch(NamedTuple):
    """A launch made ready: its result and its work."""

    computation: Callable[[], None]
    work: timing.LaunchWork
    ran: what_ran.Step  # its entry in records of what ran


class SimulatedKernels(Facet):
    """Queues launches. Each is prepared once.
    `copy`: the facet `content`'s.
    """

    def __init__(
        self,
        timeline: Timeline,
        machine: SimulatedMachine,
        copy: Callable[[Allocation, Allocation, int, Stream], None],
    ) -> None:
        super().__init__(timeline, machine)
        self._copy = copy

    def compile(self, launch: Launch) -> None:
        """Nothing: references need no compiler."""

    def launch(self, launch: Launch, stream: Stream, *, window: WindowSpec | None = None) -> None:
        own = own_stream(stream)
        if window is not None:
            check_window(window, self._machine.facts)
        if launch.kernel.source is None:
            self._copy(*copied_by(launch), stream)
            return
        check_live(launch)
        if launch.backing is None:
            launch.backing = self._prepare(launch)
        prepared: _ReadyLaunch = launch.backing
        window = self._timeline.window_of_kernel(own, window)
        self._queue(own, prepared.work, window, prepared.computation, prepared.ran, LAUNCH)

    def _queue(
        self,
        stream: SimulatedStream,
        work: timing.LaunchWork,
        window: WindowSpec | None,
        effect: Callable[[], object],
        ran: what_ran.Step,
        cost: float,
    ) -> None:
        duration = partial(
            self._machine.watched, ran, partial(self._machine.run_kernel, work, window)
        )
        if window is not None and self._timeline.recording:
            ran = replace(ran, window=window.words)
        self._timeline.queue(
            stream,
            QueueStep(WorkItem(COMPUTE, duration, self._machine.share_of(work)), effect, ran),
            cost,
        )

    def _prepare(self, launch: Launch) -> _ReadyLaunch:
        kernel, call = launch.kernel, launch.call
        for name, allocation in launch.arrays.items():
            if not allocation.address:
                raise DeviceError(
                    f"{kernel.name}: {name} is {allocation.kind.value} memory, which kernels cannot see"
                )
        work = timing.work_of(
            self._machine.sheet,
            self._machine.pages,
            [
                (a, launch.arrays[a.argument], call.arrays[a.argument].itemsize)
                for a in kernel.accesses(call)
            ],
            launch.shape,
            kernel.loads_in_flight * launch.shape.vectors * _elements_of_a_load(launch),
            kernel.accesses_per_launch(call) if kernel.accesses_per_launch is not None else None,
            kernel.on_chip_cycles(call) if kernel.on_chip_cycles is not None else 0.0,
            kernel.on_chip_loads(call) if kernel.on_chip_loads is not None else 0.0,
        )
        code = f"{_source(kernel.source or '')} {kernel.entry} {_element(launch)} {launch.shape.vectors}"
        return _ReadyLaunch(
            computation(launch),
            work,
            replace(_kernel_step(kernel.name, launch.shape, code), arguments=_arguments(launch)),
        )

    def current_stream(self, stream: Stream) -> AbstractContextManager[None]:
        return nullcontext()

    def call(self, foreign: Foreign, stream: Stream) -> None:
        if foreign.reference is None and foreign.on_simulated:
            foreign.function()
            return
        if foreign.reference is None:
            raise Unsupported("a function without reference= does not run on the simulated device")
        own = own_stream(stream)
        # Memory without an access is known to be touched, not how: once, to be read. An access without memory is to memory of its size.
        known = foreign.allocations[: len(foreign.accesses)]
        accesses = [
            *foreign.accesses,
            *(
                Access("memory", "read", m.nbytes, m.nbytes)
                for m in foreign.allocations[len(known) :]
            ),
        ]
        unknown = [
            Allocation(MemoryKind.DEVICE, access.footprint, 0, 0)
            for access in foreign.accesses[len(known) :]
        ]
        touched = zip(accesses, [*foreign.allocations, *unknown], strict=True)
        full = self._machine.full_grid
        work = timing.work_of(
            self._machine.sheet,
            self._machine.pages,
            [(access, m, 4) for access, m in touched],
            full,
            4,
            None,
        )
        window = self._timeline.window_of_kernel(own)
        code = ""
        if self._timeline.watching is not None:
            code = f"{_code_of(foreign.function)} {_code_of(foreign.reference)} {foreign.accesses}"
        self._queue(
            own, work, window, foreign.reference, _kernel_step("reference", full, code), 2 * LAUNCH
        )


def _kernel_step(name: str, shape: LaunchShape, code: str) -> what_ran.Step:
    """A launch as a step. `code` is the source and the model, which stand for machine code."""
    digest = hashlib.sha256(code.encode()).hexdigest()
    grid, block = (shape.blocks, 1, 1), (shape.threads, 1, 1)
    return what_ran.Step(
        StepKind.KERNEL,
        name,
        code=digest,
        grid=grid,
        block=block,
        dynamic_shared=shape.shared_bytes,
    )


def _arguments(launch: Launch) -> tuple[str, ...]:
    """The arguments that a GPU would get: addresses, 64-bit integers, and scalars in the element type of the first array."""
    call, element = launch.call, np.dtype(_element(launch)).type
    defaults = {parameter.name: parameter.default for parameter in launch.kernel.parameters}
    memory = [Interval(one.address, one.address + one.nbytes) for one in launch.arrays.values()]
    packed = [
        np.int64(item)
        if not isinstance(item, str)
        else np.uint64(launch.arrays[item].address)
        if item in launch.arrays
        else element(call.scalars.get(item, defaults[item]))
        for item in launch.kernel.arguments_of(call)
    ]
    block = b"".join(value.tobytes().ljust(WORD, b"\0") for value in packed)
    places = [(WORD * index, value.nbytes) for index, value in enumerate(packed)]
    return texts(
        block,
        places,
        Addresses(
            lambda at: next((one for one in memory if one.begin <= at < one.end), None)
        ).token,
    )


@lru_cache
def _source(name: str) -> str:
    """Digest of a source's text; the name of one that is not the catalogue's, which nobody compiles here."""
    try:
        return fingerprint(name)
    except SourceMissing:
        return name


_PLAIN = (bool, int, float, str, bytes, type(None))


def _code_of(function: Callable[[], object]) -> str:
    """Instructions, names and constants of a Python function, and the plain values that it finds outside, such as whether it waits for
    the device; not its file, lines and comments."""
    code = getattr(getattr(function, "__func__", function), "__code__", None)
    if not isinstance(code, CodeType):
        return type(function).__name__
    try:
        outside = inspect.getclosurevars(function)
    except ValueError:  # a variable that the function finds outside has no value yet
        return repr(_instructions(code))
    values = {
        name: value
        for name, value in {**outside.globals, **outside.nonlocals}.items()
        if isinstance(value, _PLAIN)
    }
    return repr((_instructions(code), sorted(values.items())))


def _instructions(code: CodeType) -> tuple[object, ...]:
    constants = [
        _instructions(one) if isinstance(one, CodeType) else repr(one) for one in code.co_consts
    ]
    return code.co_code, code.co_names, constants


def _element(launch: Launch) -> str:
    return next(iter(launch.call.arrays.values())).dtype


def _elements_of_a_load(launch: Launch) -> int:
    itemsize = next(iter(launch.call.arrays.values())).itemsize
    return max(1, (launch.kernel.load_bytes or itemsize) // itemsize)
