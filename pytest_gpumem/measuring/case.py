"""A `Case`, the user's own code with its checks, and what is read from its fields.

A call of a function with `moved=`, `reads=`, `writes=`, `check=` or `reference=` has these fields
too.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from pytest_gpumem.devices.protocol import Device, Foreign
from pytest_gpumem.judging.traffic import two_declarations
from pytest_gpumem.kernels.kernel import Access
from pytest_gpumem.measuring.bound import BadCall
from pytest_gpumem.measuring.target import Target, WrongResult, declared_bytes
from pytest_gpumem.memory.buffers import Arena, Buffer
from pytest_gpumem.records.measurement import MovedBytes
from pytest_gpumem.units import did_you_mean


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
    """Raises, or returns something false, if the result of one launch on poisoned, restored data is
    wrong; called before and after timing."""
    reads: Sequence[Any] = ()
    """Arrays or buffers that a launch reads, whole."""
    writes: Sequence[Any] = ()
    """Arrays or buffers that a launch writes, whole; poisoned before a check, unless they are also
    read."""
    window: Any = None
    """Buffer, or array of one, that is made persisting in L2."""
    moved: int | str | None = None
    """Compulsory bytes of one launch, in bytes or as "64 MiB", where `reads` and `writes` do not
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


def by_buffers(case: Case, arena: Arena, named: str) -> Case:
    """Return the case with the buffers that its arrays lie in, and with its declared bytes.

    Not every library's array knows its bytes.
    `named`: how the user wrote a field, such as "Case.{}".
    Raises `BadCall`: a field is wrong.
    """
    moved = declared_bytes(named.format("moved").rstrip("="), case.moved)
    reads, writes = _buffers_of(case.reads, arena), _buffers_of(case.writes, arena)
    case = replace(case, reads=reads, writes=writes, moved=moved)
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


def _buffers_of(arrays: Sequence[Any], arena: Arena) -> Sequence[Any]:
    if not isinstance(arrays, (list, tuple)):
        return arrays
    buffers = []
    for array in arrays:
        buffer = arena.find(array)
        buffers.append(array if buffer is None else buffer)
    return buffers


def known_buffers(arrays: Sequence[Any], arena: Arena) -> list[Buffer]:
    """Return the buffers of the fixtures that arrays lie in."""
    buffers = []
    for array in arrays:
        buffer = arena.find(array)
        if buffer is not None:
            buffers.append(buffer)
    return buffers


def traffic_of(case: Case) -> MovedBytes | None:
    """Return the compulsory bytes of a launch, if they are declared."""
    if case.moved is not None:
        return MovedBytes(0, 0, declared=int(case.moved))
    if not case.reads and not case.writes:
        return None
    return MovedBytes(reads=_nbytes(case.reads), writes=_nbytes(case.writes))


def _nbytes(arrays: Sequence[Any]) -> int:
    return sum(int(array.nbytes) for array in arrays)


def footprint_of(case: Case) -> int | None:
    """Return the bytes of the distinct arrays, else the declared bytes."""
    arrays = {id(array): array for array in (*case.reads, *case.writes)}
    nbytes = _nbytes(list(arrays.values()))
    if nbytes == 0 and case.moved is not None:
        return int(case.moved)
    return nbytes or None


def notes_of(case: Case, arena: Arena) -> list[str]:
    """Return what a reader of the result must know."""
    notes = []
    if case.check is not None and len(known_buffers(case.writes, arena)) < len(case.writes):
        notes.append(
            "outputs that are no buffers of a fixture or of `memory` are not poisoned before a "
            "check"
        )
    if case.moved is not None:
        note = two_declarations(int(case.moved), _nbytes(case.reads), _nbytes(case.writes))
        if note:
            notes.append(note)
    return notes


def foreign_of(
    function: Callable[[], object],
    reference: Callable[[], object] | None,
    reads: Sequence[Buffer],
    writes: Sequence[Buffer],
    *,
    on_simulated: bool = False,
) -> Foreign:
    """Return a function of the user with the buffers that it touches, where they are now."""
    accesses, allocations = [], []
    for index, buffer in enumerate(reads):
        accesses.append(Access(f"read {index}", "read", buffer.nbytes, buffer.nbytes))
        allocations.append(buffer.allocation)
    for index, buffer in enumerate(writes):
        accesses.append(Access(f"write {index}", "write", buffer.nbytes, buffer.nbytes))
        allocations.append(buffer.allocation)
    return Foreign(function, reference, tuple(accesses), tuple(allocations), on_simulated)


def check_launch(
    device: Device,
    target: Target,
    case: Case,
    reads: Sequence[Buffer],
    writes: Sequence[Buffer],
    named: str,
) -> None:
    """Check the result of a launch on poisoned outputs and restored inputs.

    `reads`, `writes`: the known buffers among the arrays of `case`.
    Raises `WrongResult`; `BadCall` if the check gives no truth value.
    """
    assert case.check is not None
    for buffer in writes:
        if buffer not in reads:
            device.content.poison(buffer.allocation, target.stream)
    # The poison is on our stream. What restores, launches and checks need not be on any of ours,
    # and no stream of ours waits for another.
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
        # Libraries answer with their own False: numpy.bool, or an array of one element.
        right = result is None or bool(result)
    except (ValueError, RuntimeError) as error:  # NumPy's and CuPy's, PyTorch's
        raise BadCall(
            f"{named.format('check')} returned a value of type {type(result).__name__} that is "
            f"neither true nor false ({error}); return one truth value, such as that of "
            "(y == wanted).all(), or raise an AssertionError"
        ) from error
    if not right:
        raise WrongResult(f"{target.name}: its check returned {result} after one launch")
    for buffer in target.managed:
        buffer.put_home(target.stream)
    device.streams.synchronize(target.stream)
