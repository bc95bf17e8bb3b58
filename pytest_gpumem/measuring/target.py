"""The target of a measurement: the same record of a kernel, a callable, a `Case` or work.

What the four differ in is in the fields. `KernelTarget` fills them in for a kernel of the
catalogue, `case` for code of the user, and `works` for copies and what overlaps.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from types import MappingProxyType
from typing import Any

import numpy as np

from pytest_gpumem.devices.kinds import MemoryKind
from pytest_gpumem.devices.protocol import Allocation, Device, Graph, OutOfMemory, Stream
from pytest_gpumem.kernels.calls import requested_bytes, sectors_per_request
from pytest_gpumem.kernels.kernel import Call, Role
from pytest_gpumem.measuring.bound import BadCall, BoundKernel
from pytest_gpumem.memory.buffers import Arena, Buffer
from pytest_gpumem.memory.l2 import PersistingStream, idle_set_aside
from pytest_gpumem.memory.managed import notes as managed_notes
from pytest_gpumem.records.measurement import MovedBytes
from pytest_gpumem.units import GiB, MiB

PADDING_STEP = 2 * MiB  # device memory is mapped in pages of 2 MiB: less padding moves nothing
MOST_PADDING = 64  # steps of padding
SMALL_BYTES = 16 * GiB
"""Memory up to which placements beyond the wanted number are made at once: copying their content
takes milliseconds."""
MEMORY_SHARE = 0.5  # share of the free memory that placements side by side may take
_MEMORY_ERRORS = (
    "out of memory",
    "out_of_memory",
    "cudaerrormemoryallocation",
    "resource_exhausted",
    "_alloc_failed",
    "_allocation_failed",
)
"""What messages contain: of PyTorch, CUDA's driver and runtime, RMM, XLA, cuBLAS, cuFFT, cuDNN,
cuSOLVER, cuSPARSE and cuRAND."""


class WrongResult(AssertionError):
    """The result of a launch is not the reference's; no speed is reported for it."""


class NotChecked(Exception):
    """The result of a launch could not be compared; the message is the reason."""


def nothing(*_: object) -> None:
    """Do nothing: for targets without inputs to restore or memory to free."""


@dataclass(frozen=True)
class Target:
    """What is measured, where it is now."""

    name: str
    device: Device
    stream: Stream  # where it runs
    launch: Callable[[int, Stream], None]  # queues a launch on the buffers of a placement
    foreign: bool = False  # code of the user, which is not captured unasked: it may do anything
    any_stream: bool = False  # launches may go to any stream; else they belong on `stream`
    places: int = 1  # placements of its buffers that live side by side
    moved_bytes: MovedBytes | None = None  # compulsory bytes of a launch, if known
    footprint: int | None = None  # distinct bytes touched by a launch, if known
    accesses_per_launch: int | None = None  # dependent accesses of a launch
    sectors_per_request: float | None = None  # mean sectors of a launch's warp-wide requests
    requested: int | None = None  # bytes that the threads of a launch request, repeats counted
    host_memory: tuple[tuple[str, str], ...] = ()  # name and kind of arguments beyond the device
    managed: tuple[Buffer, ...] = ()  # managed buffers whose pages are put back before every sample
    window: PersistingStream | None = None  # the persisting stream that it runs on, if any
    notes: tuple[str, ...] = ()  # what a reader of the result must know
    waits: bool = False  # the host takes part in every launch, as in a copy of pageable memory
    restores: bool = False  # something comes before every launch, so that no batch is possible
    prepare: Callable[[Stream], None] = nothing  # queues what restores changed inputs, untimed
    poison: Callable[[Stream], None] = (
        nothing  # overwrites outputs, so that a result is of a launch
    )
    verify: Callable[[], None] | None = None  # raises `WrongResult` for the result of a launch
    move: Callable[[int, int, np.random.Generator], Target] | None = None
    """Returns the same thing at fresh addresses; None for what stays where it is.

    Takes the number of placements wanted side by side, and the largest number where they are small.
    Raises `OutOfMemory` and leaves everything usable where not even a single placement fits.
    """
    close: Callable[[], None] = nothing  # frees what the target itself holds

    def put_back(self, stream: Stream) -> None:
        """Restore inputs, then put managed pages back, because restoring touches them."""
        self.prepare(stream)
        for buffer in self.managed:
            buffer.put_home(stream)

    def check(self) -> None:
        """Launch once on poisoned outputs and restored inputs, and verify the result.

        Raises `WrongResult`, or `NotChecked` where memory is short.
        """
        assert self.verify is not None
        self.poison(self.stream)
        # What restores, launches and verifies need not be on any stream of ours.
        self.device.streams.synchronize()
        self.prepare(self.stream)
        self.device.streams.synchronize()
        self.launch(0, self.stream)
        self.device.streams.synchronize()
        self.verify()
        for buffer in self.managed:
            buffer.put_home(self.stream)
        self.device.streams.synchronize(self.stream)


class KernelResult:
    """The result of a kernel on buffers, compared with the reference's.

    `saved`: content that updated arguments start from, where it is not the present content.
    """

    def __init__(
        self,
        bound: BoundKernel,
        buffers: Mapping[str, Buffer],
        values: Mapping[str, int | float],
        saved: Mapping[str, Allocation] = MappingProxyType({}),
    ) -> None:
        self._bound, self._buffers, self._values, self._saved = bound, buffers, values, saved
        self._expected: Mapping[str, Any] = {}

    def poison(self, stream: Stream) -> None:
        """Overwrite the outputs, restore the inputs, and compute the expected result."""
        content = self._bound.device.content
        for parameter in self._bound.kernel.parameters:
            name = parameter.name
            if name in self._saved:
                buffer = self._buffers[name]
                content.copy(buffer.allocation, self._saved[name], buffer.nbytes, stream)
            elif parameter.role is Role.WRITE:
                content.poison(self._buffers[name].allocation, stream)
        self._bound.device.streams.synchronize(stream)
        try:
            self._expected = self._bound.expected(self._arrays(self._buffers), self._values)
        except Exception as error:
            if not out_of_memory(error):
                raise
            self._bound.device.memory.make_room()
            raise NotChecked(
                "the result was not checked: memory is too short for its reference"
            ) from error

    def verify(self) -> None:
        """Compare the outputs with the expected result."""
        kernel, expected, self._expected = self._bound.kernel, self._expected, {}
        outputs = self._arrays(expected)
        for name, content in expected.items():
            # A reference may give fewer elements than the array has room for, such as tile sums.
            output, tolerance = outputs[name][: content.size], kernel.relative_tolerance
            of = f" of {name!r}"
            compare(self._bound.device, kernel.name, output, content, tolerance, of=of)

    def _arrays(self, names: Iterable[str]) -> dict[str, Any]:
        """Return arrays over arguments, or copies."""
        device = self._bound.device
        content: dict[str, tuple[Allocation, str, int]] = {}
        for name in names:
            buffer = self._buffers[name]
            content[name] = buffer.allocation, buffer.dtype_name, buffer.size
            if self._bound.kernel.source is None:
                # A copy is right to the bit, whatever the bits mean: a NaN equals itself.
                content[name] = buffer.allocation, "u1", buffer.nbytes
        beyond_link = any(buffer.kind.beyond_link for buffer in self._buffers.values())
        if beyond_link or device.content.on_host:
            copies = device.content.copies(list(content.values()))
            return dict(zip(content, copies, strict=True))
        arrays = {}
        for name, (allocation, dtype, size) in content.items():
            arrays[name] = device.memory.view(allocation, dtype, size)
        return arrays


class KernelTarget:
    """A kernel of the catalogue on its buffers, wherever these are now; `target` describes it.

    `window`: the persisting stream, if there is one.
    """

    def __init__(
        self,
        bound: BoundKernel,
        arguments: tuple[Any, ...],
        keywords: Mapping[str, Any],
        arena: Arena,
        stream: Stream,
        window: PersistingStream | None = None,
    ) -> None:
        self._bound, self._arena, self._stream, self._window = bound, arena, stream, window
        self._device = device = arena.device
        self._buffers, self._values = bound.arguments(
            tuple(arena.taken(value) for value in arguments),
            {name: arena.taken(value) for name, value in keywords.items()},
        )
        call = bound.call(self._buffers, self._values)
        if window is not None and window.where != "stream" and bound.kernel.source is None:
            raise BadCall(
                f'where="{window.where}": {bound.name} is a copy, which is no kernel that could '
                "carry a window"
            )
        self._places: list[list[Allocation]] = []  # copies of the movable buffers, side by side
        self._graph: Graph | None = None  # the launch, where the window is on a graph's kernels
        self._launches = [bound.launch(self._buffers, self._values)]
        device.kernels.compile(self._launches[0])
        bound.fill(self._buffers, stream)
        self._movable = [b for b in dict.fromkeys(self._buffers.values()) if arena.can_move(b)]
        self._saved: dict[str, Allocation] = {}  # content that updated arguments start from
        for parameter in bound.kernel.parameters:
            if parameter.role is Role.UPDATE:
                self._save(parameter.name)
        self._result = KernelResult(bound, self._buffers, self._values, self._saved)
        if window is not None and window.where == "graph":
            # A kernel is loaded at its first launch, which waits: not within a capture.
            device.kernels.launch(self._launches[0], stream)
            device.streams.synchronize(stream)
            self._bind()
        self.target = self._describe(call)

    def _describe(self, call: Call) -> Target:
        kernel, buffers, window = self._bound.kernel, self._buffers, self._window
        accesses = kernel.accesses(call)
        footprints: dict[str, int] = {}
        for access in accesses:
            largest = max(footprints.get(access.argument, 0), access.footprint)
            footprints[access.argument] = largest
        managed = tuple(buffer for buffer in buffers.values() if buffer.goes_home)
        notes = window_notes(self._device, window)
        notes += managed_notes(self._device.facts, buffers.values())
        if window is not None and window.set_aside and window.buffer not in buffers.values():
            notes.append(
                f"{kernel.name} touches nothing of the buffer under the window: a cost without a "
                "gain"
            )
        target = Target(
            name=kernel.name,
            device=self._device,
            stream=self._stream,
            launch=self.launch,
            any_stream=window is None and not managed,
            moved_bytes=kernel.traffic(call),
            footprint=sum(footprints.values()),
            host_memory=tuple(
                (name, b.kind.value) for name, b in buffers.items() if not b.kind.on_device
            ),
            managed=managed,
            window=window,
            notes=tuple(notes),
            waits=any(buffer.kind.pageable for buffer in buffers.values()),
            poison=self._poison,
            verify=None if kernel.reference is None else self._result.verify,
            move=self._move if self._movable else None,
            close=self.close,
        )
        if kernel.accesses_per_launch is not None:
            target = replace(target, accesses_per_launch=kernel.accesses_per_launch(call))
        if kernel.source is None:
            return target  # a copy engine makes no requests
        if not any(access.dependent for access in accesses):  # a thread that follows a chain
            target = replace(
                target,
                sectors_per_request=sectors_per_request(accesses),
                requested=requested_bytes(accesses),
            )
        return target

    def _save(self, name: str) -> None:
        """Keep the content that an updated argument has now: every check starts from it."""
        buffer, device, stream = self._buffers[name], self._device, self._arena.stream
        saved = self._arena.allocate(buffer.nbytes, MemoryKind.DEVICE)
        device.content.copy(saved, buffer.allocation, buffer.nbytes, stream)
        device.streams.synchronize(stream)
        buffer.put_home(stream)
        self._saved[name] = saved

    def launch(self, place: int, stream: Stream) -> None:
        """Queue a launch on the buffers of a placement."""
        device = self._device
        if self._graph is not None:
            device.graphs.replay(self._graph, stream)
        elif self._window is not None and self._window.where == "launch":
            device.kernels.launch(self._launches[place], stream, window=self._window.spec)
        else:
            device.kernels.launch(self._launches[place], stream)

    def _move(self, wanted: int, most: int, random: np.random.Generator) -> Target:
        self._leave()
        # A window lies on a buffer, and managed pages are put home a buffer at a time.
        if self.target.any_stream and all(b.kind.scattered for b in self._movable):
            nbytes = sum(buffer.nbytes for buffer in self._movable)
            if self._arena.keeps and self._fitting(nbytes, wanted, wanted) < wanted:
                self._arena.close_kept()
            count = self._fitting(nbytes, wanted, most)
            if count:
                self._scatter(count, random)
                return replace(self.target, places=count)
        try:
            move_buffers(self._arena, self._movable, random)
        finally:
            self._bind()
        return self.target

    def _fitting(self, nbytes: int, wanted: int, most: int) -> int:
        return side_by_side(nbytes, wanted, most, self._device.memory.free_bytes(MemoryKind.DEVICE))

    def _bind(self) -> None:
        """Make the launch, and its graph, for where the buffers now are."""
        self._launches = [self._bound.launch(self._buffers, self._values)]
        if self._window is not None and self._window.where == "graph":
            body = partial(self._device.kernels.launch, self._launches[0], self._stream)
            self._graph = captured(self._bound.name, self._device, self._window, body)

    def _scatter(self, count: int, random: np.random.Generator) -> None:
        """Copy the buffers to `count` placements at random addresses."""
        sizes = [buffer.nbytes for buffer in self._movable]
        copies = self._arena.scatter(sizes * count, int(random.integers(2**32)))
        outputs = []
        for parameter in self._bound.kernel.parameters:
            if parameter.role is Role.WRITE:
                outputs.append(self._buffers[parameter.name])
        for first in range(0, len(copies), len(sizes)):
            self._places.append(copies[first : first + len(sizes)])
        self._launches = []
        for place in self._places:
            placed = dict(zip(self._movable, place, strict=True))
            for buffer, copy in placed.items():
                if buffer not in outputs:
                    self._device.content.copy(
                        copy, buffer.allocation, buffer.nbytes, self._arena.stream
                    )
            self._launches.append(self._bound.launch(self._buffers, self._values, placed))

    def _leave(self) -> None:
        """Go back to the buffers themselves."""
        if self._places:
            self._launches = [self._bound.launch(self._buffers, self._values)]
            places, self._places = self._places, []
            for place in places:
                for allocation in place:
                    self._arena.release(allocation)

    def _poison(self, stream: Stream) -> None:
        self._leave()
        self._result.poison(stream)

    def close(self) -> None:
        """Free the placements and the saved inputs; a second call does nothing."""
        try:
            self._leave()
        finally:
            for saved in self._saved.values():
                self._arena.release(saved)
            self._saved.clear()


def compare(
    device: Device,
    name: str,
    actual: Any,
    expected: Any,
    tolerance: float = 0.0,
    *,
    of: str = "",
    noun: str = "element",
) -> None:
    """Raise `WrongResult` where a result differs from what is expected."""
    wrong = device.content.mismatch(actual, expected, tolerance)
    if wrong is not None:
        count, first = wrong
        raise WrongResult(
            f"{name}: {count} of {expected.size} {noun}s{of} are wrong after one launch on "
            f"poisoned outputs; the first is {noun} {first}"
        )


def side_by_side(set_bytes: int, wanted: int, most: int, free: int) -> int:
    """Return the placements to make at once; 0 where not even another fits.

    `set_bytes`: bytes of the buffers of a placement. `free`: bytes of device memory.
    `most`: largest number where they are small.
    """
    count = max(wanted, min(most, SMALL_BYTES // set_bytes))
    return min(count, int(free * MEMORY_SHARE) // set_bytes)


def padding(random: np.random.Generator) -> int:
    """Return bytes to keep allocated, so that the next allocation gets another address."""
    return int(random.integers(1, MOST_PADDING + 1)) * PADDING_STEP


def move_buffers(arena: Arena, buffers: Iterable[Buffer], random: np.random.Generator) -> None:
    """Give each buffer a new address."""
    arena.pad(padding(random))
    for buffer in buffers:
        buffer.move()


def window_notes(device: Device, window: PersistingStream | None) -> list[str]:
    """Return what a reader must know of the window, or of a set-aside without one."""
    if window is not None:
        return list(window.notes)
    idle = idle_set_aside(device)
    return [] if idle is None else [idle]


def captured(
    name: str, device: Device, window: PersistingStream, body: Callable[[], None]
) -> Graph:
    """Return the graph of `body`, with the window on its kernels.

    Raises `BadCall`: it has no kernel that could carry the window. Raises `CannotCapture`.
    """
    graph = device.graphs.capture(window.stream, body, window=window.spec)
    windows = device.graphs.windows(graph)
    if window.spec is not None and not any(windows):
        raise BadCall(f'where="graph": {name} queues no kernel that could carry the window')
    window.read_back(windows)
    return graph


def out_of_memory(error: Exception) -> bool:
    """Return True for a lack of memory, whichever library raised it; none is imported."""
    if isinstance(error, (MemoryError, OutOfMemory)) or type(error).__name__ == "OutOfMemoryError":
        return True
    if isinstance(error, AssertionError):
        return False
    text = str(error).lower()
    return any(words in text for words in _MEMORY_ERRORS)
