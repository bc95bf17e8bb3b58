"""The target of a measurement, the check of its result, and a kernel of the catalogue as a target.

`case` has functions and cases, `works` has copies and what overlaps.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np

from pytest_gpumem.devices.memory_kinds import MemoryKind
from pytest_gpumem.devices.protocol import Allocation, Launch, OutOfMemory, Stream
from pytest_gpumem.kernels.kernel import Role, requested_bytes, sectors_per_request
from pytest_gpumem.measuring.bound import BadCall, BoundKernel, Buffers, Values
from pytest_gpumem.memory.buffers import Arena, Buffer
from pytest_gpumem.memory.l2 import PersistingStream, idle_set_aside
from pytest_gpumem.memory.managed import notes as managed_notes
from pytest_gpumem.records.measurement import MovedBytes
from pytest_gpumem.units import GiB, MiB, ShownError

PADDING_STEP = 2 * MiB  # device memory is mapped in pages of 2 MiB: less padding moves nothing
MOST_PADDING = 64  # steps of padding
SMALL_BYTES = 16 * GiB  # of all placements, if they are more than wanted
MEMORY_SHARE = 0.5  # share of the free memory that placements side by side may take
_NO_MEMORY = "out.of.memory|cudaErrorMemoryAllocation|RESOURCE_EXHAUSTED|_ALLOC(ATION)?_FAILED"
"""In messages of PyTorch, CUDA's driver, runtime and libraries, RMM and XLA."""
_SEED = -1  # of content that no buffer begins with

Queue = Callable[[Stream], None]


class WrongResult(ShownError, AssertionError):
    """The result of a launch is not the reference's; no speed is reported for it."""


def nothing(stream: Stream) -> None:
    """Queue nothing."""


class NotChecked(Exception):
    """The result of a launch could not be compared; the message is the reason."""


class Target:
    """What is measured, as the steps of a measurement know it."""

    foreign = False  # code of the user, which is not captured unasked: it may do anything
    any_stream = False  # launches may go to any stream; else they belong on `stream`
    restores = False  # something comes before every launch, so that no batch is possible
    waits = False  # the host takes part in every launch, as in a copy of pageable memory
    moves = False  # `move` gives it fresh addresses
    places = 1  # placements of its buffers that live side by side
    moved_bytes: MovedBytes | None = None  # compulsory bytes of a launch, if known
    footprint: int | None = None  # distinct bytes touched by a launch, if known
    accesses_per_launch: int | None = None  # dependent accesses of a launch
    sectors_per_request: float | None = None  # mean sectors of a launch's warp-wide requests
    requested: int | None = None  # bytes that the threads of a launch request, repeats counted
    managed: tuple[Buffer, ...] = ()  # managed buffers whose pages are put back before every sample
    notes: tuple[str, ...] = ()  # what a reader of the result must know
    _movable: Sequence[Buffer] = ()  # buffers that get other addresses, one after another

    def __init__(self, name: str, arena: Arena, window: PersistingStream | None = None) -> None:
        """`window`: the persisting stream on which it runs; None: it runs on the arena's."""
        self.name, self.arena, self.device, self.window = name, arena, arena.device, window
        self.stream: Stream = arena.stream if window is None else window.stream
        self._queues: list[Queue] = []  # queues a launch, for each placement
        self.prepare: Queue = nothing  # queues what restores changed inputs, untimed
        self.poison: Queue = nothing  # overwrites outputs, so that a result is of a launch
        self.verify: Callable[[], None] | None = None  # raises `WrongResult`

    def launch(self, place: int, stream: Stream) -> None:
        self._queues[place](stream)

    def move(self, wanted: int, most: int, random: np.random.Generator) -> None:
        """Go to fresh addresses: `wanted` placements side by side, `most` where they are small.

        Raises `OutOfMemory` where not even a single placement fits; all stays usable.
        """
        try:
            self.arena.pad(padding(random))
            for buffer in self._movable:
                buffer.move()
        finally:
            self._bind()

    def _bind(self) -> None:
        """Make `_queues` for where the buffers now are."""

    def close(self) -> None:
        """Free what the target itself holds."""

    def put_back(self, stream: Stream, *, wait: bool = False) -> None:
        """Restore inputs, then put managed pages back, because restoring touches them."""
        self.prepare(stream)
        if wait:
            self.device.streams.synchronize()
        for buffer in self.managed:
            buffer.put_home(stream)
        if wait:
            self.device.streams.synchronize()

    def check(self) -> str | None:
        """Verify a launch on poisoned outputs and restored inputs, or return why memory is too
        short for that. Raises `WrongResult`.
        """
        # A user's code may restore, launch and verify on any stream.
        synchronize = self.device.streams.synchronize
        assert self.verify is not None
        self.arena.checks = True
        try:
            for step in (self.poison, self.prepare, partial(self.launch, 0)):
                step(self.stream)
                synchronize()
            self.verify()
        except NotChecked as reason:
            return str(reason)
        finally:
            self.arena.checks = False
        for buffer in self.managed:
            buffer.put_home(self.stream)
        synchronize(self.stream)
        return None

    def capture(self) -> None:
        """Launch a graph from now on, if the window is to be on a graph's kernels.

        Raises `BadCall`: no kernel could carry the window. Raises `CannotCapture`.
        """
        window, streams = self.window, self.device.streams
        if window is None or window.where != "graph":
            return
        # The first launch may load or set up something, which no capture can.
        self.launch(0, self.stream)
        streams.synchronize()
        body = partial(self.launch, 0, self.stream)
        graph = streams.capture(self.stream, body, window=window.spec)
        windows = streams.windows(graph)
        if window.spec is not None and not any(windows):
            raise BadCall(
                f'where="graph": {self.name} queues no kernel that could carry the window'
            )
        window.read_back(windows)
        self._queues = [partial(streams.replay, graph)]

    def describe(self, buffers: Iterable[Buffer], *notes: str) -> None:
        """Note what a reader must know, also of the set-aside of L2 and of managed buffers."""
        if self.window is not None:
            notes += self.window.notes
        else:
            notes += idle_set_aside(self.device)
        managed = [buffer for buffer in buffers if buffer.kind.managed]
        if managed:
            notes += tuple(managed_notes(self.device.facts, managed))
        self.notes = notes


def checking(
    bound: BoundKernel,
    buffers: Buffers,
    values: Values,
    *,
    results: Buffers | None = None,
    name: str = "",
) -> tuple[Queue, Callable[[], None]]:
    """Return what poisons the outputs of a kernel, and what verifies it.

    `results`: where the outputs are at the end. `name`: of the work; default: the kernel's.
    """
    device, kernel, outputs = bound.device, bound.kernel, results or buffers
    expected: dict[str, Any] = {}

    def arrays(names: Iterable[str], within: Buffers) -> dict[str, Any]:
        content: dict[str, tuple[Allocation, str, int]] = {}
        for name in names:
            buffer = within[name]
            content[name] = buffer.allocation, buffer.dtype_name, buffer.size
            if kernel.source is None:
                # A copy is right to the bit, whatever the bits mean: a NaN equals itself.
                content[name] = buffer.allocation, "u1", buffer.nbytes
        beyond_link = any(buffer.kind.beyond_link for buffer in within.values())
        if beyond_link or device.content.on_host:
            copies = device.content.copies(list(content.values()))
            return dict(zip(content, copies, strict=True))
        return {name: device.memory.view(*content[name]) for name in content}

    def poison(stream: Stream) -> None:
        for parameter in kernel.parameters:
            if parameter.role is Role.WRITE:
                device.content.poison(buffers[parameter.name].allocation, stream)
        device.streams.synchronize(stream)
        expect()
        # A launch that does nothing would pass where an output already holds its result.
        for name in set(expected).difference(differing()):
            buffer = outputs[name]
            device.content.fill_random(buffer.allocation, buffer.dtype_name, _SEED, stream)
            device.streams.synchronize(stream)
            expect()

    def expect() -> None:
        try:
            expected.update(bound.expected(arrays(buffers, buffers), values))
        except Exception as error:
            if not out_of_memory(error):
                raise
            device.memory.make_room()
            why = "the result was not checked: memory is too short for its reference"
            raise NotChecked(why) from error

    def differing() -> dict[str, tuple[int, int]]:
        """Return how many elements of an output are not as expected, and the first."""
        content, wrong = arrays(expected, outputs), {}
        for argument, result in expected.items():
            # A reference may give fewer elements than the array has room for, such as tile sums.
            output = content[argument][: result.size]
            differs = device.content.mismatch(output, result, kernel.relative_tolerance)
            if differs is not None:
                wrong[argument] = differs
        return wrong

    def verify() -> None:
        for argument, (count, first) in differing().items():
            raise WrongResult(
                f"{name or kernel.name}: {count} of {expected[argument].size} elements of "
                f"{argument!r} are wrong after one launch; the first is element {first}"
            )
        expected.clear()

    return poison, verify


class KernelTarget(Target):
    """A kernel of the catalogue on its buffers, wherever these are now."""

    def __init__(
        self,
        bound: BoundKernel,
        arguments: tuple[Any, ...],
        keywords: Mapping[str, Any],
        arena: Arena,
        window: PersistingStream | None = None,
    ) -> None:
        super().__init__(bound.name, arena, window)
        self._bound, kernel, device = bound, bound.kernel, self.device
        buffers, values = bound.arguments(arguments, keywords, arena)
        self._buffers, self._values = buffers, values
        if window is not None and window.where != "stream" and kernel.source is None:
            raise BadCall(
                f'where="{window.where}": {kernel.name} is a copy, which is no kernel that could '
                "carry a window"
            )
        self._copies: list[Allocation] = []  # of the movable buffers, side by side
        self._homes: dict[Buffer, Allocation] = {}  # of buffers at a copy
        launch = bound.launch(buffers, values)
        self._queues, call = [self._queue(launch)], launch.call
        device.kernels.compile(launch)
        bound.fill(buffers, self.stream)
        self._movable = [b for b in dict.fromkeys(buffers.values()) if arena.can_move(b)]
        self.poison, self.verify = checking(bound, buffers, values)
        self.capture()

        self.moves = bool(self._movable)
        self.waits = any(buffer.kind.pageable for buffer in buffers.values())
        self.managed = tuple(buffer for buffer in buffers.values() if buffer.goes_home)
        self.any_stream = window is None and not self.managed
        self.describe(buffers.values())
        if window is not None and window.set_aside and window.buffer not in buffers.values():
            self.notes += (
                f"{kernel.name} touches nothing of the buffer under the window: a cost without a "
                "gain",
            )
        self.moved_bytes = kernel.traffic(call)
        accesses = kernel.accesses(call)
        footprints = dict.fromkeys(buffers, 0)
        for access in accesses:
            footprints[access.argument] = max(footprints[access.argument], access.footprint)
        self.footprint = sum(footprints.values())
        if kernel.accesses_per_launch is not None:
            self.accesses_per_launch = kernel.accesses_per_launch(call)
        # Neither a copy engine nor a thread that follows a chain makes requests of a warp.
        if kernel.source is not None and not any(access.dependent for access in accesses):
            self.sectors_per_request = sectors_per_request(accesses)
            self.requested = requested_bytes(accesses)

    def _queue(self, launch: Launch) -> Queue:
        window, kernels = self.window, self.device.kernels
        if window is not None and window.where == "launch":
            return lambda stream: kernels.launch(launch, stream, window=window.spec)
        return lambda stream: kernels.launch(launch, stream)

    def check(self) -> str | None:
        self.close()
        return super().check()

    def move(self, wanted: int, most: int, random: np.random.Generator) -> None:
        self.close()
        if self.window is not None:
            wanted = most = 1
        sizes, count = [buffer.nbytes for buffer in self._movable], 0
        # Managed pages are put home a buffer at a time.
        if not self.managed and all(b.kind is MemoryKind.DEVICE for b in self._movable):
            free_bytes = partial(self.device.memory.free_bytes, MemoryKind.DEVICE)
            count = side_by_side(sum(sizes), wanted, most, free_bytes())
            if count < wanted:
                self.arena.close_kept()
                count = side_by_side(sum(sizes), wanted, most, free_bytes())
        if not count:
            super().move(wanted, most, random)
            return
        self._copies = self.arena.scatter(sizes * count, int(random.integers(2**32)))
        parameters = self._bound.kernel.parameters
        outputs = [self._buffers[p.name] for p in parameters if p.role is Role.WRITE]
        self._queues, self.places = [], count
        for first in range(0, len(self._copies), len(sizes)):
            placed = dict(zip(self._movable, self._copies[first:], strict=False))
            for buffer, copy in placed.items():
                if buffer not in outputs:
                    self.device.content.copy(copy, buffer.allocation, buffer.nbytes, self.stream)
            launch = self._bound.launch(self._buffers, self._values, placed)
            self._queues.append(self._queue(launch))
        if self.window is not None:  # it follows its buffer
            self._homes = {buffer: buffer.allocation for buffer in placed}
            for buffer, copy in placed.items():
                buffer.go(copy)
            self.capture()

    def _bind(self) -> None:
        self._queues = [self._queue(self._bound.launch(self._buffers, self._values))]
        self.places = 1
        self.capture()

    def close(self) -> None:
        """Go back to the buffers themselves."""
        if self._copies:
            for buffer, home in self._homes.items():
                buffer.go(home)
            self._bind()
        while self._copies:
            self.arena.release(self._copies.pop())


def side_by_side(set_bytes: int, wanted: int, most: int, free: int) -> int:
    """Return how many placements, of `set_bytes` each, to make at once; 0 if no further one fits.

    `most`: largest number where they are small. `free`: bytes of device memory.
    """
    count = max(wanted, min(most, SMALL_BYTES // set_bytes))
    return min(count, int(free * MEMORY_SHARE) // set_bytes)


def padding(random: np.random.Generator) -> int:
    """Return bytes to keep allocated: the next allocation then gets another address."""
    return int(random.integers(1, MOST_PADDING + 1)) * PADDING_STEP


def out_of_memory(error: Exception) -> bool:
    """Return True for a lack of memory, whichever library raised it; none is imported."""
    if isinstance(error, (MemoryError, OutOfMemory)) or type(error).__name__ == "OutOfMemoryError":
        return True
    if isinstance(error, AssertionError):
        return False
    return re.search(_NO_MEMORY, str(error), re.IGNORECASE) is not None
