"""Code of the user as a target: a `Case`, or a call of a function with the same fields.

A call moves the buffers among its arguments, and a `Case` is built anew at each placement.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from types import MappingProxyType
from typing import Any

import numpy as np

from pytest_gpumem.devices.kinds import MemoryKind
from pytest_gpumem.devices.protocol import Foreign, Graph, OutOfMemory, Stream
from pytest_gpumem.kernels.kernel import Access
from pytest_gpumem.measuring.bound import BadCall
from pytest_gpumem.measuring.target import (
    Target,
    WrongResult,
    captured,
    move_buffers,
    nothing,
    out_of_memory,
    padding,
    window_notes,
)
from pytest_gpumem.memory.buffers import Arena, Buffer
from pytest_gpumem.memory.l2 import PersistingStream, persisting
from pytest_gpumem.memory.managed import notes as managed_notes
from pytest_gpumem.memory.shapes import BadBuffer
from pytest_gpumem.memory.spaces import Memory, address_of
from pytest_gpumem.records.measurement import MovedBytes
from pytest_gpumem.units import did_you_mean, parse_bytes


@dataclass(frozen=True)
class Case:
    """A measurement of your own code: its launch, its check, and the bytes that it moves.

    The function that builds it gets a `Memory` and is called once for each placement, at fresh
    addresses.
    """

    launch: Callable[[], object]
    """Launches the work on the current stream."""
    restore: Callable[[], object] | None = None
    """Restores inputs that `launch` changes; untimed, before every sample, on the same stream."""
    check: Callable[[], object] | None = None
    """Raises, or returns something false, if the result of a launch on poisoned, restored data is
    wrong; called before and after timing."""
    reads: Sequence[Any] = ()
    """Arrays or buffers that a launch reads, whole."""
    writes: Sequence[Any] = ()
    """Arrays or buffers that a launch writes, whole; poisoned before a check, unless they are also
    read."""
    window: Any = None
    """Buffer, or array of one, that is made persisting in L2."""
    moved: int | str | None = None
    """Compulsory bytes of a launch, in bytes or as "64 MiB", where `reads` and `writes` do not
    give them."""
    reference: Callable[[], object] | None = None
    """Does on the host what `launch` does on a GPU, through the buffers' `view()`; the simulated
    device runs it."""
    name: str = ""
    """Shown in the table; default: the name of the function that built the case."""

    def __new__(cls, *_arguments: object, **keywords: object) -> Case:
        """Raises `BadCall`: there is no such field."""
        fields = cls.__dataclass_fields__
        for name in keywords:
            if name not in fields:
                raise BadCall(f"Case() has no field {name!r}{did_you_mean(name, fields)}")
        return super().__new__(cls)


class _Code:
    """A case on the buffers of an arena.

    `named`: how the user wrote a field, such as "Case.{}".
    Raises `BadCall`: a field is wrong.
    """

    def __init__(self, case: Case, arena: Arena, named: str, *, on_simulated: bool = False) -> None:
        self.case, self._arena, self._named = case, arena, named
        self._on_simulated = on_simulated
        for field in ("launch", "restore", "check", "reference"):
            function = getattr(case, field)
            if not callable(function) and (function is not None or field == "launch"):
                raise BadCall(
                    f"{named.format(field)} is a function without arguments, not {function!r}"
                )
        self.moved = _declared_bytes(named.format("moved").rstrip("="), case.moved)
        self.reads = self._arrays("reads")
        self.writes = self._arrays("writes")

    def _arrays(self, field: str) -> list[Any]:
        """Return the arrays of a field; for those that lie in a buffer, the buffer."""
        given, name = getattr(self.case, field), self._named.format(field)
        if not isinstance(given, (list, tuple)):
            raise BadCall(f"{name} is a list of arrays or buffers, not {type(given).__name__}")
        arrays = []
        for array in given:
            buffer = self._arena.find(array)  # not every library's array knows its bytes
            arrays.append(array if buffer is None else buffer)
            if not hasattr(arrays[-1], "nbytes"):
                raise BadCall(f"{name} takes arrays or buffers; {array!r} has no nbytes")
        return arrays

    def target(
        self,
        name: str,
        stream: Stream,
        launch: Callable[[int, Stream], None],
        window: PersistingStream | None,
        notes: list[str],
        **fields: Any,
    ) -> Target:
        """Describe the case; `fields`: further ones of the target."""
        case, device = self.case, self._arena.device
        distinct = {id(array): int(array.nbytes) for array in (*self.reads, *self.writes)}
        moved_bytes: MovedBytes | None = None
        if self.moved is not None:
            moved_bytes = MovedBytes(0, 0, declared=self.moved)
        elif self.reads or self.writes:
            reads = sum(int(array.nbytes) for array in self.reads)
            writes = sum(int(array.nbytes) for array in self.writes)
            moved_bytes = MovedBytes(reads, writes)
        if case.check is not None and not all(isinstance(array, Buffer) for array in self.writes):
            notes.append(
                "outputs that are no buffers of a fixture or of `memory` are not poisoned before a "
                "check"
            )
        notes += window_notes(device, window)
        notes += managed_notes(device.facts, self._arena.managed)
        return Target(
            name=name,
            device=device,
            stream=stream,
            launch=launch,
            foreign=True,
            moved_bytes=moved_bytes,
            footprint=sum(distinct.values()) or self.moved,
            # It may touch any managed buffer, through closures or other libraries.
            managed=self._arena.homes,
            window=window,
            notes=tuple(notes),
            poison=self._poison,
            verify=None if case.check is None else partial(self._verify, name),
            **fields,
        )

    def foreign(
        self, function: Callable[[], object], reference: Callable[[], object] | None
    ) -> Foreign:
        """Return a function with the buffers that it touches, where they are now."""
        accesses, allocations = [], []
        for index, array in enumerate(self.reads):
            if isinstance(array, Buffer):
                accesses.append(Access(f"read {index}", "read", array.nbytes, array.nbytes))
                allocations.append(array.allocation)
        for index, array in enumerate(self.writes):
            if isinstance(array, Buffer):
                accesses.append(Access(f"write {index}", "write", array.nbytes, array.nbytes))
                allocations.append(array.allocation)
        return Foreign(function, reference, tuple(accesses), tuple(allocations), self._on_simulated)

    def _poison(self, stream: Stream) -> None:
        inputs = [id(array) for array in self.reads]
        for array in self.writes:
            if isinstance(array, Buffer) and id(array) not in inputs:
                self._arena.device.content.poison(array.allocation, stream)

    def _verify(self, name: str) -> None:
        """Call the user's check. Raises `WrongResult`; `BadCall` if it gives no truth value."""
        check = self.case.check
        assert check is not None
        try:
            result = check()
        except AssertionError as error:
            why = str(error) or "its check failed"
            raise WrongResult(f"{name}: the result of a launch is wrong: {why}") from error
        try:
            # Libraries have a False of theirs: numpy.bool, or an array of an element.
            right = result is None or bool(result)
        except (ValueError, RuntimeError) as error:  # NumPy's and CuPy's, PyTorch's
            raise BadCall(
                f"{self._named.format('check')} returned a value of type {type(result).__name__} "
                f"that is neither true nor false ({error}); return one truth value, such as that "
                "of (y == wanted).all(), or raise an AssertionError"
            ) from error
        if not right:
            raise WrongResult(f"{name}: its check returned {result} after one launch")


def _declared_bytes(name: str, moved: object) -> int | None:
    """Return the bytes that a user declares as `name`. Raises `BadCall` or `QuantityError`."""
    if moved is None:
        return None
    if isinstance(moved, str):
        moved = parse_bytes(moved)
    if isinstance(moved, bool) or not isinstance(moved, (int, np.integer)) or moved <= 0:
        raise BadCall(
            f"{name}={moved!r}; it is the compulsory bytes of a launch, a positive integer or a "
            'size such as "64 MiB"'
        )
    return int(moved)


class CallTarget:
    """A call of a function, which launches work on the current stream; `target` describes it.

    `window`: the persisting stream, if there is one.
    `declared`: fields of a `Case` that the user gave for the call.
    Raises `BadCall`: a declared field is wrong, or the window reaches no kernel of the function.
    Raises `CannotCapture`: the window is to lie on a graph's kernels.
    """

    def __init__(
        self,
        function: Callable[..., object],
        arguments: tuple[Any, ...],
        keywords: Mapping[str, Any],
        arena: Arena,
        stream: Stream,
        window: PersistingStream | None = None,
        declared: Mapping[str, Any] = MappingProxyType({}),
        *,
        on_simulated: bool = False,
    ) -> None:
        name = getattr(function, "__name__", type(function).__name__)
        if window is not None and window.where == "launch":
            raise BadCall(
                f'where="launch" is for kernels of gpu_kernels: {name} makes its launches itself; '
                '"stream" and "graph" reach them'
            )
        self._movable: list[Buffer] = []
        for value in (*arguments, *keywords.values()):
            if isinstance(value, Buffer) and value not in self._movable and arena.can_move(value):
                self._movable.append(value)
        self._name, self._arena, self._window = name, arena, window
        case = Case(partial(function, *arguments, **keywords), **declared)
        self._code = code = _Code(case, arena, "{}=", on_simulated=on_simulated)
        self._foreign = code.foreign(case.launch, case.reference)
        self._graph: Graph | None = None
        if window is not None and window.where == "graph":
            # What a library sets up at its first call cannot be captured.
            arena.device.kernels.call(self._foreign, stream)
            arena.device.streams.synchronize()
            self._bind()
        notes = []
        if not self._movable:
            notes.append(
                "one placement: the callable's arrays are its own; a Case is built anew for each"
            )
        move = self._move if self._movable else None
        self.target = code.target(name, stream, self._launch, window, notes, move=move)

    def _bind(self) -> None:
        """Describe the call, and capture its graph, for where its buffers now are."""
        case, window = self._code.case, self._window
        self._foreign = self._code.foreign(case.launch, case.reference)
        if window is not None and window.where == "graph":
            body = partial(self._arena.device.kernels.call, self._foreign, window.stream)
            self._graph = captured(self._name, self._arena.device, window, body)

    def _launch(self, place: int, stream: Stream) -> None:
        device = self._arena.device
        if self._graph is not None:
            device.graphs.replay(self._graph, stream)
        else:
            device.kernels.call(self._foreign, stream)

    def _move(self, wanted: int, most: int, random: np.random.Generator) -> Target:
        try:
            move_buffers(self._arena, self._movable, random)
        finally:
            self._bind()
        return self.target


class CaseTarget:
    """A case at its present placement; `target` describes it.

    `arena`: the test's; its seed gives every placement the same content.
    """

    def __init__(self, build: Callable[[Memory], Case], arena: Arena) -> None:
        try:
            inspect.signature(build).bind(None)
        except TypeError as error:
            name = getattr(build, "__name__", "the function")
            raise BadCall(
                f"gpu_benchmark.case() calls {name}(memory), with the memory for its buffers: "
                f"{error}"
            ) from None
        except ValueError:  # a callable without a signature
            pass
        self._build, self._arena, self._device = build, arena, arena.device
        self._window = ExitStack()  # closes the window that is open
        self._addresses: list[list[int]] = []  # of arrays in no buffer, at each placement
        self._notes: list[str] = []
        self._built, self._code = self._make()
        try:
            self.target = self._describe()
        except BaseException:
            self._window.close()
            self._built.close()
            raise

    def _make(self) -> tuple[Arena, _Code]:
        """Build the case, once more with more free memory if it runs out."""
        try:
            return self._make_once()
        except Exception as error:
            if not out_of_memory(error):
                raise
            if not self._device.memory.make_room() and not self._arena.keeps:
                raise
        self._arena.close_kept()  # of earlier cases of the test
        return self._make_once()

    def _make_once(self) -> tuple[Arena, _Code]:
        # The same seed for every placement: the same content at other addresses.
        arena = Arena(self._device, self._arena.seed, oversubscribes=self._arena.oversubscribes)
        try:
            case = self._build(Memory(arena, self._arena.stream))
            if not isinstance(case, Case):
                raise BadCall(
                    f"the function given to gpu_benchmark.case() returned {case!r}, not a Case"
                )
            code = _Code(case, arena, "Case.{}")
            if case.window is not None and arena.find(case.window) is None:
                raise BadCall(
                    "Case.window is a buffer or array made by the `memory` that the function is "
                    "given"
                )
        except BaseException:
            arena.close()
            raise
        return arena, code

    def _describe(self) -> Target:
        """Open the window of what was built, and describe it."""
        code, case = self._code, self._code.case
        window: PersistingStream | None = None
        stream = self._arena.stream
        buffer = None if case.window is None else self._built.find(case.window)
        if buffer is not None:
            window = self._window.enter_context(persisting(self._device, buffer))
            stream = window.stream
        prepare: Callable[[Stream], None] = nothing
        if case.restore is not None:
            prepare = partial(self._device.kernels.call, code.foreign(case.restore, case.restore))
        return code.target(
            case.name or getattr(self._build, "__name__", "case"),
            stream,
            partial(self._call, code.foreign(case.launch, case.reference)),
            window,
            self._same_memory(),
            restores=case.restore is not None,
            prepare=prepare,
            move=self._move,
            close=self._close,
        )

    def _call(self, foreign: Foreign, place: int, stream: Stream) -> None:
        self._device.kernels.call(foreign, stream)

    def _move(self, wanted: int, most: int, random: np.random.Generator) -> Target:
        self._arena.pad(padding(random))
        # Both placements live for a moment, so that the new gets no old address.
        old = self._built
        if not self._fits():
            self._arena.close_kept()
        if not self._fits():
            raise OutOfMemory("two placements of the case do not fit at once")
        try:
            self._built, self._code = self._make()
        except Exception as error:
            if not out_of_memory(error):
                raise
            sentence = str(error).partition(".")[0]
            raise OutOfMemory(f"a second placement of the case does not fit: {sentence}") from error
        try:
            self._window.close()
        finally:
            old.close()
        # After the old window is closed: two would share the device's set-aside.
        self.target = self._describe()
        return self.target

    def _fits(self) -> bool:
        free = self._device.memory.free_bytes(MemoryKind.DEVICE)
        return free >= (self.target.footprint or 0)

    def _same_memory(self) -> list[str]:
        """Note that arrays lie where they lay, because a library's pool gives the memory again."""
        addresses = []
        for array in (*self._code.reads, *self._code.writes):
            if not isinstance(array, Buffer):
                addresses.append(_address(array))
        if any(addresses) and addresses in self._addresses:
            self._notes = [
                "its own arrays lie at the same place in several placements, because a library's "
                "pool gives the same memory again: the interval may be too narrow; arrays of the "
                "function's `memory` move"
            ]
        self._addresses.append(addresses)
        return list(self._notes)

    def _close(self) -> None:
        """Close the window.

        The memory lives until the test ends, which may look at the arrays of the last placement.
        """
        self._arena.keep(self._built)
        self._window.close()


def _address(array: Any) -> int:
    """Return the address of an array of any library; 0 where the array does not give it."""
    try:
        return address_of(array)
    except BadBuffer:
        return 0
