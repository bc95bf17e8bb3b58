"""A kernel of the catalogue as a target: its buffers move, side by side where they can."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np

from pytest_gpumem.devices.kinds import MemoryKind
from pytest_gpumem.devices.protocol import Allocation, Graph, Stream
from pytest_gpumem.kernels.calls import requested_bytes, sectors_per_request
from pytest_gpumem.kernels.kernel import Call, Role
from pytest_gpumem.measuring.bound import BadCall, BoundKernel
from pytest_gpumem.measuring.target import (
    NotChecked,
    Target,
    WrongResult,
    captured,
    out_of_memory,
    padding,
    side_by_side,
    window_notes,
)
from pytest_gpumem.memory.buffers import Arena
from pytest_gpumem.memory.l2 import PersistingStream
from pytest_gpumem.memory.managed import notes as managed_notes
from pytest_gpumem.units import MiB

PIECE_BYTES = 256 * MiB
"""Bytes of each array that are compared at once where memory is too short for the whole."""


class KernelLaunches:
    """The launches of a kernel on its buffers, wherever these are now; `target` describes them.

    `window`: the persisting stream, if `stream` is one.
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
        self._written = self._names(Role.WRITE)
        self._places: list[list[Allocation]] = []
        """Copies of the movable buffers, for each of several placements side by side."""
        self._graph: Graph | None = None
        """The launch, where the window is on a graph's kernels."""
        self._launches = [bound.launch(self._buffers, self._values)]
        device.kernels.compile(self._launches[0])
        bound.fill(self._buffers, stream)
        self._movable = []
        for buffer in dict.fromkeys(self._buffers.values()):
            if arena.can_move(buffer):
                self._movable.append(buffer)
        self._saved: dict[str, Allocation] = {}
        for name in self._names(Role.UPDATE):
            self._save(name)
        if window is not None and window.where == "graph":
            # A kernel is loaded at its first launch, which waits: not within a capture.
            device.kernels.launch(self._launches[0], stream)
            device.streams.synchronize(stream)
            self._bind()
        self.target = self._describe(call)

    def _names(self, role: Role) -> list[str]:
        return [p.name for p in self._bound.kernel.parameters if p.role is role]

    def _describe(self, call: Call) -> Target:
        kernel, buffers = self._bound.kernel, self._buffers
        accesses = kernel.accesses(call)
        footprints: dict[str, int] = {}
        for access in accesses:
            largest = max(footprints.get(access.argument, 0), access.footprint)
            footprints[access.argument] = largest
        target = Target(
            name=self._bound.name,
            kind="kernel",
            stream=self._stream,
            launch=self.launch,
            moved_bytes=kernel.traffic(call),
            footprint=sum(footprints.values()),
            host_memory=tuple(
                (name, b.kind.value) for name, b in buffers.items() if not b.kind.on_device
            ),
            managed=tuple(b for b in buffers.values() if b.goes_home),
            window=self._window,
            notes=self._notes(),
            waits=any(b.kind.pageable for b in buffers.values()),
            check=None if kernel.reference is None else self.check,
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

    def _notes(self) -> tuple[str, ...]:
        window, buffers = self._window, self._buffers.values()
        notes = [
            *window_notes(self._device, window),
            *managed_notes(self._device.facts, buffers),
        ]
        if window is not None and window.set_aside and window.buffer not in buffers:
            name = self._bound.name
            notes.append(
                f"{name} touches nothing of the buffer under the window: a cost without a gain"
            )
        return tuple(notes)

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

    # Placements

    def _move(self, wanted: int, most: int, random: np.random.Generator) -> Target:
        self._leave()
        # A window lies on one buffer, and managed pages are put home one buffer at a time.
        if self.target.any_stream and all(b.kind.traits.scattered for b in self._movable):
            nbytes = sum(buffer.nbytes for buffer in self._movable)
            if self._arena.keeps and self._fitting(nbytes, wanted, wanted) < wanted:
                self._arena.close_kept()
            count = self._fitting(nbytes, wanted, most)
            if count:
                self._scatter(count, random)
                return replace(self.target, places=count)
        self._arena.pad(padding(random))
        try:
            for buffer in self._movable:
                buffer.move()
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
        outputs = [self._buffers[name] for name in self._written]
        self._places = []
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

    # Checking

    def check(self) -> None:
        """Launch once on poisoned outputs and restored inputs, and compare with the reference.

        Raises `WrongResult` or `NotChecked`.
        """
        device, stream = self._device, self._stream
        self._leave()
        for parameter in self._bound.kernel.parameters:
            name = parameter.name
            if parameter.role is Role.UPDATE:
                buffer = self._buffers[name]
                device.content.copy(buffer.allocation, self._saved[name], buffer.nbytes, stream)
            elif parameter.role is Role.WRITE:
                device.content.poison(self._buffers[name].allocation, stream)
        device.streams.synchronize(stream)
        expected = self._whole_reference()
        self.launch(0, stream)
        device.streams.synchronize(stream)
        if expected is None:
            self._compare_pieces()
        else:
            outputs = self._outputs(list(expected))
            for name, content in expected.items():
                wrong = self._mismatch(outputs[name], content)
                if wrong is not None:
                    raise self._wrong(name, wrong, content.size)
        for buffer in self.target.managed:
            buffer.put_home(stream)
        device.streams.synchronize(stream)

    def _inputs(self) -> dict[str, Any]:
        """Return what a launch starts from: updated arguments have their saved content."""
        allocations = {}
        for name, buffer in self._buffers.items():
            allocations[name] = self._saved.get(name, buffer.allocation)
        return self._arrays(allocations)

    def _outputs(self, names: list[str]) -> dict[str, Any]:
        return self._arrays({name: self._buffers[name].allocation for name in names})

    def _whole_reference(self) -> Mapping[str, Any] | None:
        """Return the reference's result; None where memory is too short for it."""
        try:
            return self._bound.expected(self._inputs(), self._values)
        except Exception as error:
            if not out_of_memory(error):
                raise
        self._device.memory.make_room()  # for the pieces
        return None

    def _compare_pieces(self) -> None:
        """Compare after a launch, a piece at a time."""
        kernel = self._bound.kernel
        if not kernel.elementwise:
            raise NotChecked("the result was not checked: memory is too short for its reference")
        wrong: dict[str, tuple[int, int]] = {}
        try:
            inputs = self._inputs()
            roles = (Role.WRITE, Role.UPDATE)
            outputs = self._outputs([p.name for p in kernel.parameters if p.role in roles])
            size = min(array.size for array in inputs.values())
            step = max(1, PIECE_BYTES // max(array.itemsize for array in inputs.values()))
            for start in range(0, size, step):
                piece = slice(start, start + step)
                arrays = {name: array[piece] for name, array in inputs.items()}
                for name, content in self._bound.expected(arrays, self._values).items():
                    mismatch = self._mismatch(outputs[name][piece], content)
                    if mismatch is not None:
                        count, first = wrong.get(name, (0, start + mismatch[1]))
                        wrong[name] = count + mismatch[0], first
        except Exception as error:
            if not out_of_memory(error):
                raise
            raise NotChecked(
                "the result was not checked: memory is too short for a piece of its reference"
            ) from error
        for name, mismatch in wrong.items():
            raise self._wrong(name, mismatch, size)

    def _mismatch(self, output: Any, expected: Any) -> tuple[int, int] | None:
        """Return the number of wrong elements and the first of them."""
        # A reference may give fewer elements than the array has room for, such as sums of tiles.
        tolerance = self._bound.kernel.relative_tolerance
        return self._device.content.mismatch(output[: expected.size], expected, tolerance)

    def _wrong(self, name: str, mismatch: tuple[int, int], size: int) -> WrongResult:
        count, first = mismatch
        return WrongResult(
            f"{self._bound.name}: {count} of {size} elements of {name!r} are wrong after one "
            f"launch on poisoned outputs; the first is element {first}"
        )

    def _arrays(self, allocations: Mapping[str, Allocation]) -> dict[str, Any]:
        """Return arrays of one library over arguments.

        They are copies as soon as an argument lies beyond the link.
        """
        content: dict[str, tuple[Allocation, str, int]] = {}
        for name, allocation in allocations.items():
            buffer = self._buffers[name]
            content[name] = allocation, buffer.dtype_name, buffer.size
            if self._bound.kernel.source is None:
                # A copy is right to the bit, whatever the bits mean: a NaN equals itself.
                content[name] = allocation, "u1", buffer.nbytes
        if any(buffer.kind.beyond_link for buffer in self._buffers.values()):
            copies = self._device.content.copies(list(content.values()))
            return dict(zip(content, copies, strict=True))
        arrays = {}
        for name, (allocation, dtype, size) in content.items():
            arrays[name] = self._device.memory.view(allocation, dtype, size)
        return arrays

    def close(self) -> None:
        """Free the placements and the saved inputs; a second call does nothing."""
        try:
            self._leave()
        finally:
            for saved in self._saved.values():
                self._arena.release(saved)
            self._saved.clear()
