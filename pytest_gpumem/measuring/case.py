"""What a test measures, brought into a `Target`: a kernel, work, a call of a function, a `Case`.

A call moves the buffers among its arguments, and a `Case` is built anew at each placement.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from pytest_gpumem.devices.memory_kinds import PLENTY
from pytest_gpumem.devices.protocol import Foreign, OutOfMemory, Stream
from pytest_gpumem.measuring.bound import BadCall, BoundKernel, check_stream
from pytest_gpumem.measuring.target import KernelTarget, Target, WrongResult, out_of_memory, padding
from pytest_gpumem.measuring.works import Work
from pytest_gpumem.memory.buffers import Arena, Buffer
from pytest_gpumem.memory.l2 import PersistingStream, persisting
from pytest_gpumem.memory.spaces import Memory
from pytest_gpumem.records.measurement import MovedBytes
from pytest_gpumem.units import QuantityError, parse_bytes

NO_ARGUMENTS = "is a function without arguments"


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
    """Arrays or buffers that a launch writes, whole; buffers are poisoned before a check, unless
    they are also read."""
    window: Any = None
    """Buffer, or array of one, that is made persisting in L2."""
    moved: int | str | None = None
    """Compulsory bytes of a launch, in bytes or as "64 MiB", where `reads` and `writes` do not
    give them."""
    reference: Callable[[], object] | None = None
    """Does on the host what `launch` does on a GPU, through the buffers' `view()`; the simulated
    device runs it."""


def target_of(
    function: BoundKernel | Work | Callable[..., object],
    arguments: tuple[Any, ...],
    keywords: dict[str, Any],
    *,
    arena: Arena,
    stream: PersistingStream | None = None,
    on_simulated: bool = False,
    **declared: Any,
) -> Target:
    """Return the target of a kernel of the catalogue, work or any callable, with its arguments.

    `declared`: fields of a `Case` that the user gave for a callable.
    Raises `BadCall`: `function`, its arguments or what is declared do not fit.
    """
    if isinstance(function, Work):
        if arguments or keywords or declared or stream is not None:
            names = "=, ".join(declared or ("stream",))
            raise BadCall(
                f"gpu_benchmark({function.name}): work of gpu_work takes no arguments and no "
                f"{names}=: it has its own"
            )
        return function
    if isinstance(function, BoundKernel) and stream is None:
        stream = function.persisting
    if stream is not None:
        check_stream("stream=", stream)
    with arena.device.current():
        if isinstance(function, BoundKernel):
            for field, value in declared.items():
                known = "check" if field in ("check", "reference") else "traffic"
                raise BadCall(
                    f"{field}={value!r}: the {known} of {function.name} is known from the kernel"
                )
            return KernelTarget(function, arguments, keywords, arena, stream)
        if callable(function):
            arena.device.memory.make_room(unless_free=PLENTY)
            return CallTarget(function, arguments, keywords, declared, arena, stream, on_simulated)
    raise BadCall(
        "gpu_benchmark() takes a kernel of gpu_kernels, uncalled, work of gpu_work, or a callable, "
        f"not an object of type {type(function).__name__}"
    )


class _CodeTarget(Target):
    """Code of the user, described by a `Case`."""

    foreign = True
    _on_simulated = False  # the simulated device runs functions that have no reference

    def _take(self, case: Case, arena: Arena, named: str) -> None:
        """Take a case on the buffers of an arena, or raise `BadCall`: a field is wrong.

        `named`: how the user wrote a field.
        """
        for field in ("restore", "check", "reference"):
            function = getattr(case, field)
            if function is not None:
                _check_call(f"{named.format(field)} {NO_ARGUMENTS}", function)
        moved = _declared_bytes(named.format("moved"), case.moved)
        self._reads = _arrays(named.format("reads"), case.reads, arena)
        self._writes = _arrays(named.format("writes"), case.writes, arena)
        self._case, self._buffers = case, arena
        distinct = {id(array): int(array.nbytes) for array in (*self._reads, *self._writes)}
        self.footprint = sum(distinct.values()) or moved
        self.moved_bytes = None
        if moved is not None:
            self.moved_bytes = MovedBytes(0, 0, declared=moved)
        elif distinct:
            reads = sum(int(array.nbytes) for array in self._reads)
            writes = sum(int(array.nbytes) for array in self._writes)
            self.moved_bytes = MovedBytes(reads, writes)

    def _bind(self) -> None:
        """Make launch and restore for where the buffers now are."""
        case, call = self._case, self.device.kernels.call
        self._queues = [partial(call, self._foreign(case.launch, case.reference))]
        self.restores = case.restore is not None
        if case.restore is not None:
            reference = None if self._on_simulated else case.restore
            self.prepare = partial(call, self._foreign(case.restore, reference))
        self.capture()

    def _describe(self, *notes: str) -> None:
        """Fill in the fields for the case and its buffers as they are now."""
        self.poison, self.verify = self._poison, None
        if self._case.check is not None:
            self.verify = self._verify
        self.describe(self._buffers.managed, *notes)
        # It may touch any managed buffer, through closures or other libraries.
        self.managed = tuple(buffer for buffer in self._buffers.managed if buffer.goes_home)

    def _foreign(
        self, function: Callable[[], object], reference: Callable[[], object] | None
    ) -> Foreign:
        """Return a function with the buffers that it touches, where they are now."""
        touched, elsewhere = [], 0
        if self.moved_bytes is not None:
            elsewhere = self.moved_bytes.total
        for array in (*self._reads, *self._writes):
            if isinstance(array, Buffer):
                touched.append((array.allocation, array.nbytes))
                elsewhere -= array.nbytes
        return Foreign(function, reference, touched, max(0, elsewhere), self._on_simulated)

    def _poison(self, stream: Stream) -> None:
        inputs = [id(array) for array in self._reads]
        for array in self._writes:
            if isinstance(array, Buffer) and id(array) not in inputs:
                self.device.content.poison(array.allocation, stream)

    def _verify(self) -> None:
        """Call the user's check. Raises `WrongResult`; `BadCall` if it gives no truth value."""
        assert self._case.check is not None
        try:
            result = self._case.check()
        except AssertionError as error:
            why = str(error) or "its check failed"
            raise WrongResult(f"{self.name}: the result of a launch is wrong: {why}") from error
        try:
            # Libraries have a False of theirs: numpy.bool, or an array of an element.
            right = result is None or bool(result)
        except (ValueError, RuntimeError) as error:  # NumPy's and CuPy's, PyTorch's
            raise BadCall(
                f"check= returned a value of type {type(result).__name__} that is neither true nor "
                f"false ({error}); return one truth value, such as (y == wanted).all()"
            ) from error
        if not right:
            raise WrongResult(f"{self.name}: its check returned {result} after one launch")


def _check_call(text: str, function: Callable[..., object], *arguments: object) -> None:
    """Raise `BadCall` with a text if a function does not take the arguments."""
    if not callable(function):
        raise BadCall(f"{text}, not an object of type {type(function).__name__}")
    try:
        signature = inspect.signature(function, follow_wrapped=False)
    except (TypeError, ValueError, NameError):  # it has none that can be read
        return
    try:
        signature.bind(*arguments)
    except TypeError as error:
        raise BadCall(f"{text}: {error}") from None


def _arrays(name: str, given: object, arena: Arena) -> list[Any]:
    """Return the arrays of a field; for those that lie in a buffer, the buffer."""
    if not isinstance(given, (list, tuple)):
        raise BadCall(f"{name} is a list of arrays or buffers, not {type(given).__name__}")
    arrays = []
    for array in given:
        buffer = arena.find(array)  # not every library's array knows its bytes
        arrays.append(array if buffer is None else buffer)
        if not hasattr(arrays[-1], "nbytes"):
            raise BadCall(f"{name} takes arrays or buffers; {array!r} has no nbytes")
    return arrays


def _declared_bytes(name: str, moved: Any) -> int | None:
    if moved is None:
        return None
    nbytes = 0
    with suppress(QuantityError, TypeError):  # TypeError: of an array of several numbers
        nbytes = parse_bytes(moved)
    if nbytes == 0:
        raise BadCall(
            f"{name} is the compulsory bytes of a launch, a positive integer or a size such as "
            f'"64 MiB", not {moved!r}'
        )
    return nbytes


class CallTarget(_CodeTarget):
    """A call of a function, which launches work on the current stream."""

    def __init__(
        self,
        function: Callable[..., object],
        arguments: tuple[Any, ...],
        keywords: Mapping[str, Any],
        declared: Mapping[str, Any],
        arena: Arena,
        window: PersistingStream | None,
        on_simulated: bool,
    ) -> None:
        name = getattr(function, "__name__", type(function).__name__)
        super().__init__(name, arena, window)
        self._on_simulated = on_simulated
        if window is not None and window.where == "launch":
            raise BadCall(
                f'where="launch" is for kernels of gpu_kernels: {name} makes its launches itself; '
                '"stream" and "graph" reach them'
            )
        movable: list[Buffer] = []
        for value in (*arguments, *keywords.values()):
            if isinstance(value, Buffer) and value not in movable and arena.can_move(value):
                movable.append(value)
        self._movable, self.moves = movable, bool(movable)
        self._take(Case(partial(function, *arguments, **keywords), **declared), arena, "{}=")
        self._bind()
        stays = "one placement: the callable's arrays are its own; a Case is built anew for each"
        self._describe(*(() if self.moves else (stays,)))


class CaseTarget(_CodeTarget):
    """What `build` makes at each placement. Raises `BadCall` if that is no `Case`."""

    moves = True

    def __init__(self, build: Callable[[Memory], Case], arena: Arena) -> None:
        _check_call(
            "gpu_benchmark.case() takes a function of a Memory that returns a Case", build, None
        )
        super().__init__(getattr(build, "__name__", "case"), arena)
        self._build = build
        self._windows = ExitStack()  # closes the window that is open
        with self.device.current():
            self.device.memory.make_room(unless_free=PLENTY)
            self._make()
            try:
                self._open()
            except BaseException:
                self.close()
                raise

    def _make(self) -> None:
        """Build the case, once more with more free memory if it runs out."""
        try:
            self._make_once()
            return
        except Exception as error:
            if not out_of_memory(error):
                raise
        self.device.memory.make_room()
        self.arena.close_kept()  # of earlier cases of the test
        self._make_once()

    def _make_once(self) -> None:
        # The same seed for every placement: the same content at other addresses.
        arena = Arena(self.device, self.arena.seed, oversubscribes=self.arena.oversubscribes)
        try:
            case = self._build(Memory(arena, self.arena.stream))
            if not isinstance(case, Case):
                raise BadCall(
                    f"the function given to gpu_benchmark.case() returned {case!r}, not a Case"
                )
            _check_call(f"Case.launch {NO_ARGUMENTS}", case.launch)
            self._take(case, arena, "Case.{}")
        except BaseException:
            arena.close()
            raise

    def _open(self) -> None:
        """Open the window of what was built, and describe it."""
        case, self.window = self._case, None
        if case.window is not None:
            buffer = self._buffers.find(case.window)
            if buffer is None:
                raise BadCall("Case.window is a buffer or array of the function's `memory`")
            self.window = self._windows.enter_context(persisting(self.device, buffer))
            self.stream = self.window.stream
        self._bind()
        notes = []
        if not all(isinstance(array, Buffer) for array in (*self._reads, *self._writes)):
            notes.append(
                "its own arrays may lie at the same place in several placements: the interval may "
                "be too narrow; arrays of the function's `memory` move"
            )
        self._describe(*notes)

    def move(self, wanted: int, most: int, random: np.random.Generator) -> None:
        self.arena.pad(padding(random))
        # Both placements live for a moment, so that the new gets no old address.
        old = self._buffers
        try:
            self._make()
        except Exception as error:
            if not out_of_memory(error):
                raise
            sentence = str(error).partition(".")[0]
            raise OutOfMemory(f"a second placement of the case does not fit: {sentence}") from error
        try:
            self._windows.close()
        finally:
            old.close()
        # After the old window is closed: two would share the device's set-aside.
        self._open()

    def close(self) -> None:
        # The test may look at the arrays of the last placement until it ends.
        self.arena.keep(self._buffers)
        self._windows.close()
