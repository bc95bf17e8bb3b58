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
from pytest_gpumem.kernels.sources import fingerprint
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
"""Bytes of each array that are compared at once where memory is too short for the reference of
the whole."""


class KernelLaunches:
    """The launches of a kernel on its buffers, wherever these are now, compiled and with its content filled in; `target` describes them.
    `arguments`, `keywords`: of the call; buffers, arrays over them, NumPy arrays and numbers.
    `window`: the persisting stream, if `stream` is one.
    Raises `BadCall`: the arguments do not fit, or the window is to lie on a copy.
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
                f'where="{window.where}": {bound.name} is a copy, which is no kernel that could carry a window'
            )
        self._places: list[list[Allocation]] = []
        """Copies of the movable buffers, for each of several placements side by side."""
        self._graph: Graph | None = None
        """The launch, where the window is on a graph's kernels; such buffers move one placement at a time."""
        self._launches = [bound.launch(self._buffers, self._values)]
        device.kernels.compile(self._launches[0])
        bound.fill(self._buffers, stream)
        self._movable = tuple(b for b in dict.fromkeys(self._buffers.values()) if arena.can_move(b))
        self._saved: dict[str, Allocation] = {}
        for parameter in bound.kernel.parameters:
            if parameter.role is Role.UPDATE:
                self._save(parameter.name)
        if window is not None and window.where == "graph":
            # A kernel is loaded at its first launch, which waits for the device: not within a capture.
            device.kernels.launch(self._launches[0], stream)
            device.streams.synchronize(stream)
            self._bind()
        self.target = self._describe(call)

    def _describe(self, call: Call) -> Target:
        kernel, buffers = self._bound.kernel, self._buffers
        accesses = kernel.accesses(call)
        footprints: dict[str, int] = {}
        for access in accesses:
            footprints[access.argument] = max(footprints.get(access.argument, 0), access.footprint)
        # A copy engine makes no warp-wide requests, nor does one thread that follows a chain.
        requests = kernel.source is not None and not any(access.dependent for access in accesses)
        return Target(
            name=self._bound.name,
            kind="kernel",
            stream=self._stream,
            launch=self.launch,
            moved_bytes=kernel.traffic(call),
            footprint=sum(footprints.values()),
            accesses_per_launch=None
            if kernel.accesses_per_launch is None
            else kernel.accesses_per_launch(call),
            sectors_per_request=sectors_per_request(accesses) if requests else None,
            requested=requested_bytes(accesses) if requests else None,
            kernel_source=None if kernel.source is None else fingerprint(kernel.source),
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

    def _notes(self) -> tuple[str, ...]:
        window, device = self._window, self._device
        notes = (
            *window_notes(device, window),
            *managed_notes(device.facts, self._buffers.values()),
        )
        if (
            window is not None
            and window.set_aside
            and not any(b is window.buffer for b in self._buffers.values())
        ):
            notes += (
                f"{self._bound.name} touches nothing of the buffer under the window: a cost without a gain",
            )
        return notes

    def _save(self, name: str) -> None:
        """Keep the content that an updated argument has now: every check starts from it."""
        buffer, device, stream = self._buffers[name], self._device, self._arena.stream
        saved = self._arena.allocate(buffer.nbytes, MemoryKind.DEVICE)
        device.content.copy(saved, buffer.allocation, buffer.nbytes, stream)
        device.streams.synchronize(stream)
        buffer.put_home(stream)
        self._saved[name] = saved

    def launch(self, place: int, stream: Stream) -> None:
        """Queue one launch on the buffers of one placement."""
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
            nbytes = sum(b.nbytes for b in self._movable)
            if (
                self._arena.keeps
                and side_by_side(
                    nbytes, wanted, wanted, self._device.memory.free_bytes(MemoryKind.DEVICE)
                )
                < wanted
            ):
                self._arena.close_kept()
            count = side_by_side(
                nbytes, wanted, most, self._device.memory.free_bytes(MemoryKind.DEVICE)
            )
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

    def _bind(self) -> None:
        """Make the launch, and its graph, for where the buffers now are."""
        self._launches = [self._bound.launch(self._buffers, self._values)]
        if self._window is not None and self._window.where == "graph":
            body = partial(self._device.kernels.launch, self._launches[0], self._stream)
            self._graph = captured(self._bound.name, self._device, self._window, body)

    def _scatter(self, count: int, random: np.random.Generator) -> None:
        """Copy the buffers to `count` placements at random addresses."""
        each = len(self._movable)
        copies = self._arena.scatter(
            [b.nbytes for b in self._movable] * count, int(random.integers(2**32))
        )
        self._places = [copies[first : first + each] for first in range(0, len(copies), each)]
        outputs = {
            self._buffers[p.name] for p in self._bound.kernel.parameters if p.role is Role.WRITE
        }
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
            for allocation in (a for place in places for a in place):
                self._arena.release(allocation)

    # Checking

    def check(self) -> None:
        """Launch once on poisoned outputs and restored inputs and compare with the reference. Raises `WrongResult` or `NotChecked`."""
        kernel, device, stream = self._bound.kernel, self._device, self._stream
        self._leave()
        for parameter in kernel.parameters:
            if parameter.role is Role.UPDATE:
                buffer = self._buffers[parameter.name]
                device.content.copy(
                    buffer.allocation, self._saved[parameter.name], buffer.nbytes, stream
                )
            elif parameter.role is Role.WRITE:
                device.content.poison(self._buffers[parameter.name].allocation, stream)
        device.streams.synchronize(stream)
        expected = self._whole_reference()
        self.launch(0, stream)
        device.streams.synchronize(stream)
        if expected is None:
            self._compare_pieces()
        else:
            outputs = self._arrays({name: self._buffers[name].allocation for name in expected})
            self._refuse(
                self._wrong(outputs, expected),
                {name: content.size for name, content in expected.items()},
            )
        for buffer in self.target.managed:
            buffer.put_home(stream)
        device.streams.synchronize(stream)

    def _inputs(self) -> dict[str, Any]:
        """What a launch starts from: updated arguments have their saved content."""
        return self._arrays(
            {
                name: self._saved.get(name, buffer.allocation)
                for name, buffer in self._buffers.items()
            }
        )

    def _whole_reference(self) -> Mapping[str, Any] | None:
        """The reference's result; None where memory is too short for it."""
        try:
            return self._bound.expected(self._inputs(), self._values)
        except Exception as error:
            if not out_of_memory(error):
                raise
        self._device.memory.make_room()  # for the pieces
        return None

    def _compare_pieces(self) -> None:
        """Compare after a launch, a piece at a time. Its inputs are what they were, so far as the kernel wrote its outputs alone."""
        kernel = self._bound.kernel
        if not kernel.elementwise:
            raise NotChecked("the result was not checked: memory is too short for its reference")
        try:
            inputs = self._inputs()
            written = [p.name for p in kernel.parameters if p.role in (Role.WRITE, Role.UPDATE)]
            outputs = self._arrays({name: self._buffers[name].allocation for name in written})
            size = min(array.size for array in inputs.values())
            step = max(1, PIECE_BYTES // max(array.itemsize for array in inputs.values()))
            wrong: dict[str, tuple[int, int]] = {}
            for start in range(0, size, step):
                piece = slice(start, start + step)
                expected = self._bound.expected(
                    {name: array[piece] for name, array in inputs.items()}, self._values
                )
                for name, (count, first) in self._wrong(
                    {name: outputs[name][piece] for name in expected}, expected
                ).items():
                    before, at = wrong.get(name, (0, start + first))
                    wrong[name] = before + count, at
        except Exception as error:
            if not out_of_memory(error):
                raise
            raise NotChecked(
                "the result was not checked: memory is too short for a piece of its reference"
            ) from error
        self._refuse(wrong, dict.fromkeys(written, size))

    def _wrong(
        self, outputs: Mapping[str, Any], expected: Mapping[str, Any]
    ) -> dict[str, tuple[int, int]]:
        """Number of wrong elements and the first of them, of each output that has some."""
        # A reference may give fewer elements than the array has room for, such as one sum for each tile.
        found = {
            name: self._device.content.mismatch(
                outputs[name][: content.size], content, self._bound.kernel.relative_tolerance
            )
            for name, content in expected.items()
        }
        return {name: wrong for name, wrong in found.items() if wrong is not None}

    def _refuse(self, wrong: Mapping[str, tuple[int, int]], sizes: Mapping[str, int]) -> None:
        for name, (count, first) in wrong.items():
            raise WrongResult(
                f"{self._bound.name}: {count} of {sizes[name]} elements of {name!r} are wrong after one launch on poisoned outputs; "
                f"the first is element {first}"
            )

    def _arrays(self, allocations: Mapping[str, Allocation]) -> dict[str, Any]:
        """Arrays of one library over arguments, or over copies of them as soon as one argument lies beyond the link."""
        # a copy is right to the bit, whatever the bits mean: a NaN equals itself
        copied = self._bound.kernel.source is None
        content = {
            name: (allocation, "u1", buffer.nbytes)
            if copied
            else (allocation, buffer.dtype_name, buffer.size)
            for name, allocation in allocations.items()
            for buffer in (self._buffers[name],)
        }
        if any(b.kind.beyond_link for b in self._buffers.values()):
            return dict(
                zip(content, self._device.content.copies(list(content.values())), strict=True)
            )
        return {name: self._device.memory.view(*one) for name, one in content.items()}

    def close(self) -> None:
        """Free the placements and the saved inputs; a second call does nothing."""
        try:
            self._leave()
        finally:
            for saved in self._saved.values():
                self._arena.release(saved)
            self._saved.clear()
