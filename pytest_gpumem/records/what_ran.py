"""What a launch, which is a run of the target, ran: exact, without times, so that unchanged code
gives equal records."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Annotated, Literal

from msgspec import Meta, field
from msgspec.structs import replace

from pytest_gpumem.records import Bytes, Count, Record

WORD = 4
POINTER = 8
LEAST_ADDRESS = 2**32
"""With unified virtual addressing a 64-bit process has no memory of CUDA below."""

StepKind = Literal["kernel", "copy", "memset", "synchronisation"]
"""What a step of a launch does; at a synchronisation the host waits for the device, a stream or an
event."""
PATTERN = r"^[0-9a-z?-]{1,9}( [0-9a-z?-]{1,9})*$"
Argument = Annotated[str, Meta(pattern=PATTERN, max_length=2**17)]
"""An argument of a kernel by words of four bytes, the lowest first: hexadecimal numbers, `?` for a
word that differs between unchanged launches, and for a pointer its kind of memory and `-`."""


class Step(Record, frozen=True, omit_defaults=True):
    """One step of a launch. A figure that its kind does not have, or that is unknown, is None."""

    kind: StepKind  # What it does
    name: str = ""
    """A kernel's name as CUDA reports it; a copy's direction, such as "H2D"; what a
    synchronisation waits for: "device", "stream" or "event"."""
    code: str | None = None
    """SHA-256 of the image of a kernel's module, or on the simulated device of source and model."""
    grid: tuple[int, int, int] | None = None  # Blocks in x, y and z
    block: tuple[int, int, int] | None = None  # Threads of a block in x, y and z
    shared: Bytes | None = None  # Static shared memory of a block
    dynamic_shared: Bytes | None = None  # Dynamic shared memory of a block
    arguments: tuple[Argument, ...] | None = None
    """Arguments of a kernel, in order; None where the device does not tell them."""
    registers: Count | None = None  # Registers of a thread
    local: Bytes | None = None  # Local memory of a thread: spilled registers and stack
    source: str | None = None  # Memory that a copy reads, such as "pinned"
    memory: str | None = None
    """Memory that a copy or memset writes: "pageable", "pinned", "device", "array", "managed" or
    "unknown"."""
    nbytes: Bytes | None = None  # Bytes that are copied or set
    window: str | None = None  # Access-policy window of the launch, without its address
    stream: Count | None = None
    """Stream, numbered by first use in the launch; None for what is in no stream."""


class WhatRan(Record, frozen=True):
    """A record of what a launch ran, from an untimed pass."""

    steps: tuple[Step, ...] = ()  # The distinct steps, in the order of their first use
    order: tuple[Count, ...] = ()  # The launch: indices into `steps`
    state: dict[str, str] = field(default_factory=dict)
    """State of memory around the launch: the set-aside, and home and advice of managed buffers."""
    not_watched: str | None = None  # Why something was not watched

    def __post_init__(self) -> None:
        """Raises `ValueError`: a step of the launch is not among `steps`, as in an edited file."""
        if max(self.order, default=-1) >= len(self.steps):
            raise ValueError(f"`order` names step {max(self.order)} of {len(self.steps)}")

    @property
    def launch(self) -> tuple[Step, ...]:
        """All steps in order."""
        return tuple(self.steps[index] for index in self.order)

    def of(self, kind: StepKind) -> list[Step]:
        """The steps of a kind, in order."""
        return [step for step in self.launch if step.kind == kind]

    # Exact figures of the launch, for limits and comparisons; of no meaning if `order` is empty.

    @property
    def kernels(self) -> int:
        return len(self.of("kernel"))

    @property
    def copies(self) -> int:
        return len(self.of("copy"))

    @property
    def copied_bytes(self) -> int:
        """Bytes that copies move."""
        return sum(step.nbytes or 0 for step in self.of("copy"))

    @property
    def waits(self) -> int:
        """Times that the host waits."""
        return len(self.of("synchronisation"))

    @property
    def registers(self) -> int:
        """Most registers of a thread of any kernel."""
        return max((step.registers or 0 for step in self.of("kernel")), default=0)

    @property
    def spill(self) -> int:
        """Most bytes of local memory of a thread of any kernel."""
        return max((step.local or 0 for step in self.of("kernel")), default=0)


def what_ran(
    launch: Iterable[Step],
    state: Mapping[str, str] | None = None,
    *,
    not_watched: str | None = None,
) -> WhatRan:
    """Return the record of a launch; the streams of its steps have any numbers."""
    numbers: dict[int, int] = {}
    distinct: dict[Step, int] = {}
    order = []
    for given in launch:
        step = given
        if given.stream is not None:
            step = replace(given, stream=numbers.setdefault(given.stream, len(numbers)))
        order.append(distinct.setdefault(step, len(distinct)))
    return WhatRan(tuple(distinct), tuple(order), dict(sorted((state or {}).items())), not_watched)


def argument_text(value: bytes, offset: int, memory: Callable[[int], str | None]) -> str:
    """Return the text of an argument with the bytes `value`, as `Argument` says, so that unchanged
    code gives equal text.

    `offset`: of its first byte in the kernel's parameters; pointers are aligned there.
    `memory`: the kind of memory at an address; None where there is none of CUDA.
    """
    words = []
    at = 0
    while at < len(value):
        if (offset + at) % POINTER == 0 and at + POINTER <= len(value):
            address = int.from_bytes(value[at : at + POINTER], "little")
            kind = memory(address) if address >= LEAST_ADDRESS else None
            if kind is not None:
                words += [kind, "-"]
                at += POINTER
                continue
        words.append(f"{int.from_bytes(value[at : at + WORD], 'little'):x}")
        at += WORD
    return " ".join(words)
