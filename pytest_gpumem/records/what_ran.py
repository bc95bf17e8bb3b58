"""What one launch of a measurement ran: exact, without times, so that unchanged code gives equal records."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from enum import Enum
from typing import Annotated

import msgspec
from msgspec import Meta, field
from msgspec.structs import replace

from pytest_gpumem.records import arguments as texts
from pytest_gpumem.records.record import Bytes, Count, Record

_DIGEST_BYTES = 8


class StepKind(str, Enum):
    """The kind of a step of a launch."""

    KERNEL = "kernel"
    COPY = "copy"
    MEMSET = "memset"
    ALLOCATION = "allocation"
    FREE = "free"
    SYNCHRONISATION = "synchronisation"  # The host waits: for the device, a stream or an event
    JOIN = "join"  # A stream waits for an event; the host does not


Argument = Annotated[str, Meta(pattern=texts.PATTERN, max_length=2**17)]
"""An argument of a kernel by aligned words of eight bytes: hexadecimal, `??` for a byte that varies between unchanged launches, `p256` for
an address and its alignment, `h` for one of plain host memory. `varies` if the test says that it does."""


class Step(Record, frozen=True, omit_defaults=True):
    """One step of a launch. A figure that its kind does not have, or that is unknown, is None."""

    kind: StepKind  # What it does
    name: str = ""
    """A kernel's name as CUDA reports it; a copy's direction, one of `uses.COPY_KINDS`; what a synchronisation waits for: "device",
    "stream" or "event"."""
    code: str | None = None
    """Digest of a kernel's machine code (`kernels.cubin`), or of its source and model on the
    simulated device."""
    grid: tuple[int, int, int] | None = None  # Blocks in x, y and z
    block: tuple[int, int, int] | None = None  # Threads of a block in x, y and z
    cluster: tuple[int, int, int] | None = None
    """Blocks of a cluster in x, y and z; None for a kernel without clusters."""
    shared: Bytes | None = None  # Static shared memory of a block
    dynamic_shared: Bytes | None = None  # Dynamic shared memory of a block
    arguments: tuple[Argument, ...] | None = None
    """Arguments of a kernel, in order; None where the device does not tell them."""
    registers: Count | None = None  # Registers of a thread
    local: Bytes | None = None  # Local memory of a thread: spilled registers and stack
    source: str | None = None  # Memory that a copy reads, one of `uses.MEMORY_KINDS`
    memory: str | None = None
    """Memory that a copy or memset writes, or that is allocated or freed, one of
    `uses.MEMORY_KINDS`."""
    nbytes: Bytes | None = None  # Bytes that are copied, set, allocated or freed
    window: str | None = None  # Access-policy window that the launch carried, without its address
    stream: Count | None = None
    """Stream, numbered by first use in the launch; None for what is in no stream."""
    priority: int | None = None  # Priority of the stream, where it is not 0


class WhatRan(Record, frozen=True):
    """A record of what one launch ran, from an untimed pass."""

    digest: str | None = None
    """Digest of everything below; equal digests mean that the same ran. None if something was
    not watched."""
    steps: tuple[Step, ...] = ()  # The distinct steps, in the order of their first use
    order: tuple[Count, ...] = ()  # The launch: indices into `steps`
    calls: dict[str, Count] = field(default_factory=dict)
    """Calls of the CUDA runtime and driver by name, without queries: launches, copies, advice, prefetches."""
    state: dict[str, str] = field(default_factory=dict)
    """State of memory around the launch: the window of the stream, the set-aside, and kind and advice of each argument that is not plain
    device memory."""
    not_watched: str | None = None  # Why something was not watched

    def __post_init__(self) -> None:
        """Raises `ValueError`: a step of the launch is not among `steps`, as in a file that was edited."""
        if max(self.order, default=-1) >= len(self.steps):
            raise ValueError(f"`order` names step {max(self.order)} of {len(self.steps)}")

    @property
    def launch(self) -> tuple[Step, ...]:
        """All steps in order."""
        return tuple(self.steps[index] for index in self.order)

    def of(self, *kinds: StepKind) -> Iterator[Step]:
        """The steps of some kinds, in order."""
        return (step for step in self.launch if step.kind in kinds)

    @property
    def left_out(self) -> int:
        """Bytes of arguments that vary between unchanged launches, which `digest` leaves out."""
        return sum(
            texts.unknown_bytes(text) for step in self.steps for text in step.arguments or ()
        )

    # Exact figures of the launch, for limits and comparisons; of no meaning if `order` is empty.

    @property
    def kernels(self) -> int:
        """Launched kernels."""
        return sum(1 for _ in self.of(StepKind.KERNEL))

    @property
    def copies(self) -> int:
        """Copies."""
        return sum(1 for _ in self.of(StepKind.COPY))

    @property
    def copied_bytes(self) -> int:
        """Bytes that copies move."""
        return sum(step.nbytes or 0 for step in self.of(StepKind.COPY))

    @property
    def waits(self) -> int:
        """Times that the host waits."""
        return sum(1 for _ in self.of(StepKind.SYNCHRONISATION))

    @property
    def registers(self) -> int:
        """Most registers of a thread of any kernel."""
        return max((step.registers or 0 for step in self.of(StepKind.KERNEL)), default=0)

    @property
    def spill(self) -> int:
        """Most bytes of local memory of a thread of any kernel."""
        return max((step.local or 0 for step in self.of(StepKind.KERNEL)), default=0)


def what_ran(
    launch: Iterable[Step],
    calls: Mapping[str, int],
    state: Mapping[str, str] | None = None,
    *,
    not_watched: str | None = None,
) -> WhatRan:
    """The record of one launch.
    `launch`: its steps in order; streams have any numbers that tell them apart.
    `calls`: as `WhatRan.calls`.
    `state`: as `WhatRan.state`.
    `not_watched`: as `WhatRan.not_watched`.
    """
    numbers: dict[int, int] = {}
    distinct: dict[Step, int] = {}
    order = []
    for step in launch:
        own = (
            step
            if step.stream is None
            else replace(step, stream=numbers.setdefault(step.stream, len(numbers)))
        )
        order.append(distinct.setdefault(own, len(distinct)))
    steps, state = tuple(distinct), dict(sorted((state or {}).items()))
    calls = dict(sorted(calls.items()))
    if not_watched is not None:
        return WhatRan(None, steps, tuple(order), calls, state, not_watched)
    unnamed = _unnamed(steps)
    content = msgspec.json.encode(([unnamed[index] for index in order], calls, state))
    return WhatRan(
        hashlib.blake2b(content, digest_size=_DIGEST_BYTES).hexdigest(),
        steps,
        tuple(order),
        calls,
        state,
    )


def together(records: Sequence[WhatRan]) -> WhatRan | None:
    """One record of launches that should run the same: bytes of arguments in which they differ are left out. None if they differ otherwise,
    or if one has no digest."""
    first, digests = records[0], {one.digest for one in records}
    if None not in digests and len(digests) == 1:
        return first
    if None in digests or any(
        _without_arguments(one) != _without_arguments(first) for one in records
    ):
        return None
    launch = list(first.launch)
    for other in records[1:]:
        launch = [
            _with(mine, theirs, texts.masked)
            for mine, theirs in zip(launch, other.launch, strict=True)
        ]
    return what_ran(launch, first.calls, first.state)


def ran_the_same(one: WhatRan, past: Sequence[WhatRan]) -> bool:
    """True if a launch ran the same as all past ones. Bytes of arguments that a past record leaves out, or that have other values in most
    of them, are not compared: those of unchanged code vary. Bytes that only `one` leaves out count as a change."""
    if one.digest is None or any(other.digest is None for other in past):
        return False
    if all(other.digest == one.digest for other in past):
        return True
    # Without the steps of a launch, only its digest tells what ran.
    if not list(one.launch) or any(
        _without_arguments(other) != _without_arguments(one) for other in past
    ):
        return False
    launches = [list(each.launch) for each in (one, *past)]
    for hidden in (*launches[1:], _varying(launches[1:])):
        launches = [
            [_with(step, mask, texts.under) for step, mask in zip(launch, hidden, strict=True)]
            for launch in launches
        ]
    return all(
        [step.arguments for step in launch] == [step.arguments for step in launches[0]]
        for launch in launches
    )


def _varying(launches: Sequence[Sequence[Step]]) -> list[Step]:
    """The first launch, without bytes of arguments that have other values in most of them."""
    found = []
    for steps in zip(*launches, strict=True):
        given = [step.arguments for step in steps if step.arguments is not None]
        if len(given) == len(steps) and len(set(given)) >= texts.LEAST_VALUES:
            found.append(
                replace(
                    steps[0],
                    arguments=tuple(texts.varying(each) for each in zip(*given, strict=True)),
                )
            )
        else:
            found.append(steps[0])
    return found


def declared(found: WhatRan, varying: Iterable[int]) -> WhatRan:
    """The record without arguments that vary on purpose.
    `varying`: their numbers, from 1 on; those of all kernels.
    """
    numbers = set(varying)
    if not numbers or found.digest is None:
        return found

    def of(step: Step) -> Step:
        if step.arguments is None:
            return step
        return replace(
            step,
            arguments=tuple(
                texts.VARIES if at in numbers else text for at, text in enumerate(step.arguments, 1)
            ),
        )

    return what_ran([of(step) for step in found.launch], found.calls, found.state)


def _with(step: Step, other: Step, change: Callable[[str, str], str]) -> Step:
    """A step with its arguments changed by those of another."""
    if step.arguments == other.arguments or step.arguments is None or other.arguments is None:
        return step
    return replace(step, arguments=tuple(map(change, step.arguments, other.arguments)))


def _unnamed(steps: Iterable[Step]) -> list[Step]:
    """Steps without the names of kernels, which change nothing that the device does."""
    return [replace(step, name="") if step.code is not None else step for step in steps]


def _without_arguments(found: WhatRan) -> object:
    """What a record has beside the content of arguments: their number and sizes count."""
    sizes = [
        None if step.arguments is None else [len(texts.tokens(text)) for text in step.arguments]
        for step in found.steps
    ]
    steps = list(
        zip((replace(step, arguments=None) for step in _unnamed(found.steps)), sizes, strict=True)
    )
    return [steps[index] for index in found.order], found.calls, found.state
