"""The content of memory, and the device's fills, copies, reads and comparisons, with their times.

An allocation has a backed prefix, and a token that names its content. Tokens spare work: a launch whose inputs hold what they held at its
last run, and whose outputs hold what that run wrote, would write the same bytes again. A token is only trusted while nobody outside this
module can reach the bytes: a view that is still alive makes its content unknown.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from itertools import count
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pytest_gpumem.devices import protocol
from pytest_gpumem.devices.checks import nodes_of
from pytest_gpumem.devices.protocol import Allocation, DeviceError, Launch, Stream, Unsupported
from pytest_gpumem.devices.simulated.counters import copied, copy_step, memory_name
from pytest_gpumem.devices.simulated.engine import COMPUTE, Work
from pytest_gpumem.devices.simulated.machine import Machine
from pytest_gpumem.devices.simulated.streams import LAUNCH, Step, Timeline, own_stream
from pytest_gpumem.kernels.kernel import Access, Role
from pytest_gpumem.kernels.latency import random_cycle
from pytest_gpumem.records import what_ran
from pytest_gpumem.records.what_ran import StepKind

BACKED_BYTES = 256 * 2**10  # most bytes of one allocation that real memory stands behind

Token = object

_serial = count()


def _fresh() -> Token:
    return next(_serial)


def _owned_references(array: NDArray[np.uint8]) -> int:
    return sys.getrefcount(array)


class Content:
    """The first bytes of one allocation.
    `nbytes`: size of the allocation.
    `over`: a user's array to lie over, whose bytes anybody may change at any time.
    """

    def __init__(self, nbytes: int, over: NDArray[Any] | None = None) -> None:
        self.backed = min(nbytes, BACKED_BYTES)
        self._foreign = over is not None
        self._bytes: NDArray[np.uint8]
        if over is None:
            self._bytes = np.zeros(self.backed, dtype=np.uint8)
        else:
            self._bytes = over.reshape(-1).view(np.uint8)[: self.backed]
        self._token: Token = _fresh()
        self._handed_out = False
        self._parts: weakref.WeakSet[Part] = weakref.WeakSet()
        # References without any view: this object's attribute and the call's own argument.
        self._references = _owned_references(self._bytes)

    def token(self) -> Token:
        """Names the content; a new name whenever it may have changed."""
        if self._foreign:
            return _fresh()
        if self._handed_out:
            self._token = _fresh()
            # NumPy's views keep the array that owns the memory alive: no other reference, no view left.
            # Each part holds one view; its writes are known.
            self._handed_out = _owned_references(self._bytes) > self._references + len(self._parts)
        return self._token

    def changed(self, token: Token | None = None) -> None:
        """Say that the bytes were written; `token` names well-known content."""
        self._token = _fresh() if token is None else token
        for part in self._parts:
            part.outdated()

    def view(self, dtype: str, size: int) -> NDArray[Any]:
        """A writable array over the first `size` elements, or over those that are backed."""
        self._handed_out = True
        return self.peek(dtype, size)

    def peek(self, dtype: str, size: int) -> NDArray[Any]:
        """As `view`, for use inside this package only: it must not outlive the call."""
        kind = np.dtype(dtype)
        elements = min(size, self.backed // kind.itemsize)
        return self._bytes[: elements * kind.itemsize].view(kind)

    def fill_random(self, dtype: str, seed: int) -> None:
        """Floats uniform in [0, 1), integers over their full range."""
        kind = np.dtype(dtype)
        token = ("random", kind.str, seed, self.backed)
        if self.token() == token:
            return
        generator = np.random.default_rng(seed)
        target = self.peek(dtype, self.backed)
        if kind.kind == "f":
            target[:] = generator.random(len(target), dtype=np.float64 if kind.itemsize > 4 else np.float32)
        else:
            target.view(np.uint8)[:] = np.frombuffer(generator.bytes(target.nbytes), dtype=np.uint8)
        self.changed(token)

    def fill_cycle(self, node_bytes: int, seed: int, length: int | None = None) -> None:
        """One random cycle over the backed nodes; the first 4 bytes of each hold the index of the next."""
        token = ("cycle", node_bytes, seed, length, self.backed)
        if self.token() == token:
            return
        nodes = self.backed // node_bytes
        following = random_cycle(nodes, seed, length)
        self._bytes[: nodes * node_bytes].reshape(nodes, node_bytes)[:, :4] = following.view(np.uint8).reshape(nodes, 4)
        self.changed(token)

    def poison(self) -> None:
        """Every byte 0xFF."""
        if self.token() != "poison":
            self._bytes[:] = 0xFF
            self.changed("poison")

    def copy_from(self, source: Content, nbytes: int) -> None:
        """The first `nbytes` of another content, as far as both are backed."""
        whole = nbytes >= self.backed and self.backed <= source.backed
        token = source.token()
        if whole and self.backed == source.backed and self.token() == token:
            return
        n = min(nbytes, self.backed, source.backed)
        self._bytes[:n] = source._bytes[:n]
        self.changed(token if whole and self.backed == source.backed else None)

    def part(self, offset: int, nbytes: int) -> Part:
        """The content of a part of the memory, as far as it is backed: both see what either writes."""
        made = Part(self, offset, nbytes)
        self._parts.add(made)
        return made

    def read(self, dtype: str, size: int) -> NDArray[Any]:
        """A copy of the first `size` elements, or of those that are backed."""
        return self.peek(dtype, size).copy()

    def write(self, array: NDArray[Any]) -> None:
        """Put the first bytes of an array in; what lies beyond the backed prefix has no place here."""
        flat = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
        n = min(flat.nbytes, self.backed)
        self._bytes[:n] = flat[:n]
        self.changed()


class Part(Content):
    """The content of a part of an allocation: a view of the whole's bytes with a name of its own.
    `whole`: content of the allocation.
    `offset`: first byte.
    """

    def __init__(self, whole: Content, offset: int, nbytes: int) -> None:
        super().__init__(nbytes, over=whole._bytes[offset : offset + nbytes])
        self.backed = max(0, min(nbytes, whole.backed - offset))
        self._whole = whole
        self._range = range(offset, offset + nbytes)

    def token(self) -> Token:
        if not self.backed:
            return "nothing is backed"
        if self._whole._foreign or self._whole._handed_out or self._handed_out:
            return _fresh()
        return self._token

    def changed(self, token: Token | None = None) -> None:
        self._token = _fresh() if token is None else token
        self._whole._token = _fresh()
        for other in self._whole._parts:
            if other is not self and other._range.start < self._range.stop and self._range.start < other._range.stop:
                other.outdated()

    def outdated(self) -> None:
        """Somebody else wrote the bytes."""
        self._token = _fresh()


def content(allocation: Allocation) -> Content:
    """The content of an allocation that this device made."""
    backing = allocation.backing
    if not isinstance(backing, Content):
        raise TypeError("the allocation belongs to another device")
    return backing


def live(allocation: Allocation) -> Content:
    """The content of an allocation that is not freed."""
    if allocation.freed:
        raise DeviceError("the memory was freed")
    return content(allocation)


@dataclass(frozen=True)
class _Argument:
    name: str
    content: Content
    dtype: str
    size: int
    whole: bool


class Computation:
    """The result side of one launch: runs the kernel's reference on prefixes that belong together. Raises `Unsupported` without a
    reference.

    If one array of a call is backed in part, every array is cut to as many elements as the shortest of those has: a table that is smaller
    stays whole, a stream becomes its first elements.
    """

    def __init__(self, launch: Launch) -> None:
        kernel = launch.kernel
        if kernel.reference is None:
            raise Unsupported(f"{kernel.name} has no reference to run on the simulated device")
        self._reference = kernel.reference
        self._scalars: Mapping[str, int | float] = launch.call.scalars
        arguments = []
        for name, facts in launch.call.arrays.items():
            memory = content(launch.arrays[name])
            backed = memory.backed // facts.itemsize
            arguments.append(_Argument(name, memory, facts.dtype, min(facts.size, backed), backed >= facts.size))
        cut = min((a.size for a in arguments if not a.whole), default=None)
        self._arguments = [a if cut is None else _Argument(a.name, a.content, a.dtype, min(a.size, cut), a.whole) for a in arguments]
        roles = {p.name: p.role for p in kernel.parameters}
        self._written = [a for a in self._arguments if roles.get(a.name) in (Role.WRITE, Role.UPDATE)]
        written = {id(a.content) for a in self._written}
        read = [a for a in self._arguments if roles.get(a.name) is not Role.WRITE]
        self._repeatable = not any(id(a.content) in written for a in read)
        self._settled: tuple[Token, ...] | None = None
        self._known: tuple[tuple[Token, ...], dict[str, NDArray[Any]], dict[str, Token]] | None = None
        """Of the last run: the tokens of its arguments before it, its results, and their tokens."""

    def run(self) -> None:
        """Compute and write the result, unless it is already there."""
        before = self._tokens()
        if self._settled is not None and before == self._settled:
            return
        arrays = {a.name: a.content.peek(a.dtype, a.size) for a in self._arguments}
        if self._known is not None and self._known[0] == before:
            for a in self._written:
                if a.name in self._known[1]:
                    arrays[a.name][:] = self._known[1][a.name]
                    a.content.changed(self._known[2][a.name])
            return
        results = self._reference(arrays, self._scalars)
        settled = self._repeatable
        for a in self._written:
            if a.name not in results:
                continue
            target = arrays[a.name]
            result = np.asarray(results[a.name]).reshape(-1).astype(target.dtype, copy=False)
            n = min(len(target), len(result))
            if not self._repeatable and target[:n].tobytes() == result[:n].tobytes():
                continue
            target[:n] = result[:n]
            a.content.changed()
        after = self._tokens()
        written = [a.name for a in self._written if a.name in results]
        named = dict(zip((a.name for a in self._arguments), after, strict=True))
        self._known = None if self._repeatable else (before, {n: arrays[n].copy() for n in written}, {n: named[n] for n in written})
        # The same bytes in, the same bytes out: a launch that reads nothing it writes, or that found its result in place.
        self._settled = after if settled or after == before else None

    def _tokens(self) -> tuple[Token, ...]:
        return tuple(a.content.token() for a in self._arguments)


_WRITE_COMBINED_READ = 0.02  # speed of host reads of write-combined memory over cached memory: each one bypasses the caches


class SimulatedContent:
    """Fills, copies, reads and compares."""

    def __init__(self, timeline: Timeline, machine: Machine) -> None:
        self._timeline = timeline
        self._machine = machine

    def fill_random(self, allocation: Allocation, dtype: str, seed: int, stream: Stream) -> None:
        self._fill(allocation, partial(live(allocation).fill_random, dtype, seed), stream)

    def fill_cycle(self, allocation: Allocation, node_bytes: int, seed: int, stream: Stream, *, length: int | None = None) -> None:
        nodes_of(allocation, node_bytes)
        self._fill(allocation, partial(live(allocation).fill_cycle, node_bytes, seed, length), stream)

    def poison(self, allocation: Allocation, stream: Stream) -> None:
        self._fill(allocation, live(allocation).poison, stream)

    def _fill(self, allocation: Allocation, effect: Callable[[], None], stream: Stream) -> None:
        own = own_stream(stream)
        if not allocation.address:
            self._timeline.forbid_capture("it writes memory on the host")
            self._timeline.wait([own])
            self._timeline.host += allocation.nbytes / self._machine.sheet.host_bandwidth
            effect()
            return
        write = Access("memory", "write", allocation.nbytes, allocation.nbytes)
        ran = what_ran.Step(StepKind.MEMSET, memory=memory_name(allocation), nbytes=allocation.nbytes)
        self._timeline.queue(own, Step(Work(COMPUTE, self._machine.touching([(write, allocation)])), effect, ran), LAUNCH)

    def copy(self, destination: Allocation, source: Allocation, nbytes: int, stream: Stream) -> None:
        own = own_stream(stream)
        if not 0 < nbytes <= min(destination.nbytes, source.nbytes):
            raise DeviceError(f"a copy of {nbytes} bytes from {source.nbytes} to {destination.nbytes} bytes of memory")
        target, origin = live(destination), live(source)
        duration, engine, waits = self._machine.copying(destination, source, nbytes)
        if waits:
            self._timeline.forbid_capture("a copy with pageable memory makes the host wait")
        use = copied(destination, source, nbytes)
        duration = partial(self._machine.watched, use, duration)
        self._timeline.queue(own, Step(Work(engine, duration), partial(target.copy_from, origin, nbytes), copy_step(use)), LAUNCH)
        if waits:
            self._timeline.wait([own])

    def to_host(self, allocation: Allocation, dtype: str, size: int) -> Any:
        self._timeline.forbid_capture("it reads memory on the host")
        memory = live(allocation)
        self._timeline.wait(self._timeline.streams)
        nbytes = size * np.dtype(dtype).itemsize
        self._timeline.host += self._machine.host_access(allocation, writes=False) + nbytes / self._host_speed(
            allocation, self._machine.sheet.pageable_to_host, read=True
        )
        return memory.read(dtype, size)

    def from_host(self, allocation: Allocation, content: Any) -> None:
        self._timeline.forbid_capture("it writes memory from the host")
        memory = live(allocation)
        self._timeline.wait(self._timeline.streams)
        array = np.asarray(content)
        self._timeline.host += self._machine.host_access(allocation, writes=True)
        self._timeline.host += array.nbytes / self._host_speed(allocation, self._machine.sheet.pageable_to_device, read=False)
        memory.write(array)

    def _host_speed(self, allocation: Allocation, device: float, *, read: bool) -> float:
        if allocation.kind.on_device:
            return device
        slow = read and id(allocation) in self._machine.write_combined
        return self._machine.sheet.host_bandwidth * (_WRITE_COMBINED_READ if slow else 1.0)

    def mismatch(self, actual: Any, expected: Any, relative_tolerance: float) -> tuple[int, int] | None:
        left, right = np.asarray(actual).reshape(-1), np.asarray(expected).reshape(-1)
        n = min(left.size, right.size)
        left, right = left[:n], right[:n]
        differs = left != right
        if differs.any() and right.dtype.kind == "f":
            wide, reference = left.astype(np.float64), right.astype(np.float64)
            with np.errstate(invalid="ignore"):
                near = np.abs(wide - reference) <= relative_tolerance * np.maximum(np.abs(reference), 1e-30)
            differs &= ~near
        wrong = np.flatnonzero(differs)
        return (int(wrong.size), int(wrong[0])) if wrong.size else None


_: type[protocol.Content] = SimulatedContent
