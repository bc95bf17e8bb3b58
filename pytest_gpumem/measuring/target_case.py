"""A `Case` as a target: the user's own code with its checks, built anew at each placement."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np

from pytest_gpumem.devices.kinds import MemoryKind
from pytest_gpumem.devices.protocol import Allocation, Device, Foreign, OutOfMemory, Stream
from pytest_gpumem.judging.finding import counted
from pytest_gpumem.judging.traffic import two_declarations
from pytest_gpumem.kernels.kernel import Access
from pytest_gpumem.measuring.bound import BadCall
from pytest_gpumem.measuring.target import (
    SMALL_BYTES,
    Target,
    WrongResult,
    declared_bytes,
    nothing,
    out_of_memory,
    padding,
    refuse_window,
    window_notes,
)
from pytest_gpumem.memory.buffers import Arena, Buffer
from pytest_gpumem.memory.l2 import PersistingStream, persisting
from pytest_gpumem.memory.managed import notes as managed_notes
from pytest_gpumem.memory.shapes import BadBuffer
from pytest_gpumem.memory.spaces import Memory, address_of
from pytest_gpumem.records.measurement import MovedBytes
from pytest_gpumem.units import did_you_mean

SPARE_PARTS = 4  # the free memory over what the placements of a case may take at once: the user's code needs room too


@dataclass(frozen=True)
class Case:
    """A measurement of your own code: the launch, how its result is checked, and the bytes that it moves.

    The function that builds it gets a `Memory` and is called once for each placement, at fresh addresses.
    """

    launch: Callable[[], object]
    """Launches the work on the current stream."""
    restore: Callable[[], object] | None = None
    """Restores inputs that `launch` changes; untimed, before every sample, on the same stream."""
    check: Callable[[], object] | None = None
    """Raises, or returns something false, if the result of one launch on poisoned, restored data is wrong; called before and after
    timing."""
    reads: Sequence[Any] = ()
    """Arrays or buffers that a launch reads, whole."""
    writes: Sequence[Any] = ()
    """Arrays or buffers that a launch writes, whole; poisoned before a check, unless they are also read."""
    window: Any = None
    """Buffer, or array of one, that is made persisting in L2."""
    moved: int | str | None = None
    """Compulsory bytes of one launch, in bytes or as "64 MiB", where `reads` and `writes` do not give them."""
    reference: Callable[[], object] | None = None
    """Does on the host what `launch` does on a GPU, through the buffers' `view()`; the simulated device runs it."""
    name: str = ""
    """Shown in the table; default: the name of the function that built the case."""

    def __new__(cls, *_arguments: object, **keywords: object) -> Case:
        """Raises `BadCall`: there is no such field."""
        for name in keywords:
            if name not in cls.__dataclass_fields__:
                raise BadCall(
                    f"Case() has no field {name!r}{did_you_mean(name, cls.__dataclass_fields__)}"
                )
        return super().__new__(cls)


class CasePlacements:
    """A case at its present placement; `target` describes it.
    `build`: builds the case in a memory of its own.
    `arena`: the test's; its seed gives every placement the same content.
    `stream`: where it runs, unless it has a window.
    Raises `BadCall`: `build` takes no memory or returns no `Case`, or a field of it is wrong.
    """

    def __init__(self, build: Callable[[Memory], Case], arena: Arena, stream: Stream) -> None:
        try:
            inspect.signature(build).bind(None)
        except TypeError as error:
            name = getattr(build, "__name__", "the function")
            raise BadCall(
                f"gpu_benchmark.case() calls {name}(memory), with the memory for its buffers: {error}"
            ) from None
        except ValueError:  # a callable without a signature
            pass
        self._build, self._arena, self._device = build, arena, arena.device
        self._stream = stream
        self._window = ExitStack()  # closes the window that is open
        self._sets: list[list[Allocation]] | None = None
        """Memory of the buffers of the placements to come, at random places of one region; None before the first move."""
        self._addresses: list[
            tuple[int, ...]
        ] = []  # of the arrays that are no buffers of ours, at each placement
        self._built = self._make()
        self._name = self._built.case.name or getattr(build, "__name__", "case")
        try:
            self.target = self._described()
        except BaseException:
            self._window.close()
            self._built.arena.close()
            raise

    def _make(self, places: Sequence[Allocation] = ()) -> _Built:
        try:
            return self._build_once(places)
        except Exception as error:
            if not out_of_memory(error) or not (
                self._release_sets() or self._device.memory.make_room() or self._arena.keeps
            ):
                raise
        self._arena.close_kept()  # of earlier cases of the test
        return self._build_once()

    def _scattered(
        self, wanted: int, most: int, random: np.random.Generator
    ) -> list[list[Allocation]]:
        """Memory for the buffers of all placements that may come; none where they are large. An address that the driver gives is often one
        that it gave before: of 32 placements of three buffers of 2 MiB, 21 were distinct (H100)."""
        sizes = self._built.arena.scattered_sizes
        nbytes = min(SMALL_BYTES, self._device.memory.free_bytes(MemoryKind.DEVICE) // SPARE_PARTS)
        count = min(most, nbytes // sum(sizes)) if sizes else 0
        if count < wanted:
            return []
        try:
            made = self._arena.scatter(sizes * count, int(random.integers(2**32)))
        except OutOfMemory:
            return []
        return [made[first : first + len(sizes)] for first in range(0, len(made), len(sizes))]

    def _release_sets(self) -> bool:
        """Free the memory of placements to come; False if there is none."""
        if self._sets is None:
            return False
        sets, self._sets = self._sets, []
        for allocation in (one for each in sets for one in each):
            self._arena.release(allocation)
        return bool(sets)

    def _build_once(self, places: Sequence[Allocation] = ()) -> _Built:
        # The same seed for every placement: the same content at other addresses.
        arena = Arena(self._device, self._arena.seed, oversubscribes=self._arena.oversubscribes)
        arena.offer(places, self._arena)
        try:
            case = self._build(Memory(arena, self._stream))
            if not isinstance(case, Case):
                raise BadCall(
                    f"the function given to gpu_benchmark.case() returned {case!r}, not a Case"
                )
            case = by_buffers(case, arena, "Case.{}")
            under_window = None if case.window is None else arena.find(case.window)
            if case.window is not None and under_window is None:
                raise BadCall(
                    "Case.window is a buffer or array made by the `memory` that the function is given"
                )
            reads = tuple(b for b in map(arena.find, case.reads) if b is not None)
            writes = tuple(b for b in map(arena.find, case.writes) if b is not None)
            self._addresses.append(
                tuple(_address(a) for a in (*case.reads, *case.writes) if arena.find(a) is None)
            )
        except BaseException:
            arena.close()
            raise
        return _Built(case, arena, reads, writes, under_window)

    def _described(self) -> Target:
        """Open the window of what was built, and describe it."""
        built, case = self._built, self._built.case
        window: PersistingStream | None = None
        if built.under_window is not None:
            window = self._window.enter_context(persisting(self._device, built.under_window))
        return Target(
            name=self._name,
            kind="case",
            stream=self._stream if window is None else window.stream,
            launch=self._launching(case.launch),
            moved_bytes=traffic_of(case),
            footprint=footprint_of(case),
            managed=built.arena.homes,
            window=window,
            notes=(
                *notes_of(case, built.arena),
                *_same_memory(self._addresses),
                *managed_notes(self._device.facts, built.arena.managed),
                *window_notes(self._device, window),
            ),
            restores=case.restore is not None,
            prepare=nothing if case.restore is None else partial(self._launching(case.restore), 0),
            check=None if case.check is None else self.check,
            move=self.move,
            run_on=self.run_on,
            close=self.close,
        )

    def _launching(self, function: Callable[[], object]) -> Callable[[int, Stream], None]:
        """A function of the case as one that queues it on a stream, on its only placement."""
        case, built = self._built.case, self._built
        reference = case.reference if function is case.launch else function
        foreign = foreign_of(function, reference, built.reads, built.writes)
        return lambda _, stream: self._device.kernels.call(foreign, stream)

    def move(self, wanted: int, most: int, random: np.random.Generator) -> Target:
        if self._sets is None:
            self._sets = self._scattered(wanted, most, random)
        places = self._sets.pop() if self._sets else []
        if not places:
            self._arena.pad(padding(random))
        # Both placements live for a moment, so that the new one cannot get the old addresses.
        old = self._built
        if self._device.memory.free_bytes(MemoryKind.DEVICE) < (self.target.footprint or 0):
            self._arena.close_kept()
        if self._device.memory.free_bytes(MemoryKind.DEVICE) < (self.target.footprint or 0):
            raise OutOfMemory("two placements of the case do not fit at once")
        try:
            self._built = self._make(places)
        except OutOfMemory:
            raise
        except Exception as error:
            if not out_of_memory(error):
                raise
            raise OutOfMemory(
                f"a second placement of the case does not fit: {str(error).partition('.')[0]}"
            ) from error
        try:
            self._window.close()
        finally:
            old.arena.close()
        # opens the window after the old one is closed: two would share the device's set-aside
        self.target = self._described()
        return self.target

    def run_on(self, stream: Stream) -> Target:
        refuse_window(self._name, self.target.window)
        self._stream = stream
        self.target = replace(self.target, stream=stream)
        return self.target

    def check(self) -> None:
        built = self._built
        check_launch(self._device, self.target, built.case, built.reads, built.writes, "Case.{}")

    def close(self) -> None:
        """Close the window. The memory lives until the test ends: the test may look at the arrays of the last placement."""
        self._release_sets()
        self._arena.keep(self._built.arena)
        self._window.close()


@dataclass(frozen=True)
class _Built:
    """A case at one placement, with the memory that it was built in."""

    case: Case
    arena: Arena
    reads: tuple[Buffer, ...]
    writes: tuple[Buffer, ...]
    under_window: Buffer | None


# What a case declares, and the keywords of a call that are named as its fields


def by_buffers(case: Case, arena: Arena, named: str) -> Case:
    """The case with the buffers that its arrays lie in, as not every library's array knows its bytes; and with its declared bytes.
    `named`: how the user wrote a field, such as "Case.{}".
    Raises `BadCall`: a field is wrong.
    """

    def known(arrays: Sequence[Any]) -> Sequence[Any]:
        if not isinstance(arrays, (list, tuple)):
            return arrays
        return [array if (buffer := arena.find(array)) is None else buffer for array in arrays]

    moved = declared_bytes(named.format("moved").rstrip("="), case.moved)
    case = replace(case, reads=known(case.reads), writes=known(case.writes), moved=moved)
    for field in ("launch", "restore", "check", "reference"):
        function = getattr(case, field)
        if not callable(function) and (function is not None or field == "launch"):
            raise BadCall(
                f"{named.format(field)} is a function without arguments, not {function!r}"
            )
    for field, arrays in (("reads", case.reads), ("writes", case.writes)):
        if not isinstance(arrays, (list, tuple)):
            raise BadCall(
                f"{named.format(field)} is a list of arrays or buffers, not {type(arrays).__name__}"
            )
        for array in arrays:
            if not hasattr(array, "nbytes"):
                raise BadCall(
                    f"{named.format(field)} takes arrays or buffers; {array!r} has no nbytes"
                )
    return case


def traffic_of(case: Case) -> MovedBytes | None:
    if case.moved is not None:
        return MovedBytes(0, 0, declared=int(case.moved))
    if not case.reads and not case.writes:
        return None
    return MovedBytes(
        reads=sum(int(a.nbytes) for a in case.reads), writes=sum(int(a.nbytes) for a in case.writes)
    )


def footprint_of(case: Case) -> int | None:
    """Bytes of the distinct arrays, else the declared ones."""
    arrays = {id(a): int(a.nbytes) for a in (*case.reads, *case.writes)}
    return sum(arrays.values()) or (None if case.moved is None else int(case.moved))


def notes_of(case: Case, arena: Arena) -> Iterator[str]:
    """What a reader of the result must know."""
    if case.check is not None and any(arena.find(one) is None for one in case.writes):
        yield "outputs that are no buffers of a fixture or of `memory` are not poisoned before a check"
    if case.moved is not None:
        reads, writes = (sum(int(a.nbytes) for a in arrays) for arrays in (case.reads, case.writes))
        if note := two_declarations(int(case.moved), reads, writes):
            yield note


def foreign_of(
    function: Callable[[], object],
    reference: Callable[[], object] | None,
    reads: Sequence[Buffer],
    writes: Sequence[Buffer],
    *,
    on_simulated: bool = False,
) -> Foreign:
    """A function of the user with the buffers that it touches, where they are now."""
    accesses = (
        *(Access(f"read {i}", "read", b.nbytes, b.nbytes) for i, b in enumerate(reads)),
        *(Access(f"write {i}", "write", b.nbytes, b.nbytes) for i, b in enumerate(writes)),
    )
    return Foreign(
        function, reference, accesses, tuple(b.allocation for b in (*reads, *writes)), on_simulated
    )


def check_launch(
    device: Device,
    target: Target,
    case: Case,
    reads: Sequence[Buffer],
    writes: Sequence[Buffer],
    named: str,
) -> None:
    """Check the result of one launch on poisoned outputs and restored inputs.
    `reads`, `writes`: the buffers of ours among the arrays of `case`; `named`: as for `by_buffers`.
    Raises `WrongResult`; `BadCall` if the check gives no truth value.
    """
    assert case.check is not None
    for buffer in writes:
        if buffer not in reads:
            device.content.poison(buffer.allocation, target.stream)
    # The poison is on our stream; what restores, launches and checks need be on none of ours, and no stream of ours waits for another.
    device.streams.synchronize()
    target.prepare(target.stream)
    device.streams.synchronize()
    target.launch(0, target.stream)
    device.streams.synchronize()
    try:
        result = case.check()
    except AssertionError as error:
        raise WrongResult(
            f"{target.name}: the result of one launch is wrong: {str(error) or 'its check failed'}"
        ) from error
    try:
        # Libraries answer with their own kinds of False: numpy.bool, or an array or tensor of one element.
        right = result is None or bool(result)
    except (ValueError, RuntimeError) as error:  # NumPy's and CuPy's, PyTorch's
        raise BadCall(
            f"{named.format('check')} returned a value of type {type(result).__name__} that is neither true nor false ({error}); return "
            "one truth value, such as that of (y == wanted).all(), or raise an AssertionError"
        ) from error
    if not right:
        raise WrongResult(f"{target.name}: its check returned {result} after one launch")
    for buffer in target.managed:
        buffer.put_home(target.stream)
    device.streams.synchronize(target.stream)


def _same_memory(addresses: Sequence[tuple[int, ...]]) -> Iterator[str]:
    """Note that placements do not differ, because a library's pool gives its arrays the memory that they had before."""
    different = len(set(addresses))
    if different < len(addresses) and any(map(any, addresses)):
        yield (
            f"its own arrays lie at {counted(different, 'place')} in {len(addresses)} placements, because a library's pool gives the "
            "same memory again: the interval may be too narrow; arrays of the function's `memory` move"
        )


def _address(array: Any) -> int:
    """Address of an array of any library; 0 where the array does not give it."""
    try:
        return address_of(array)
    except BadBuffer:
        return 0
