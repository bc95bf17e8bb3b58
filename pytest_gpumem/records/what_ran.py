"""What untimed passes record of a launch: its steps, and page faults and migrations.

A launch is a run of the target. Steps have no times: unchanged code gives equal records.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Annotated, Literal, NamedTuple

from msgspec import Meta, field
from msgspec.structs import replace

from pytest_gpumem.records import Bytes, Count, Record, Seconds

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


# Page faults and migrations

_MOVES = ("to_device", "to_host", "between_devices")


class PageCounts(Record, frozen=True):
    """Counts between two moments."""

    gpu_faults: Count = 0  # Page faults of the GPU, duplicates included
    gpu_groups: Count = 0  # Groups in which the driver handled them
    gpu_pages: Count = 0  # Distinct pages that faulted on the GPU; the other faults are duplicates
    cpu_faults: Count = 0  # Page faults of the host
    to_device: Bytes = 0  # Bytes that moved from the host to the device
    to_host: Bytes = 0  # Bytes that moved from the device to the host
    between_devices: Bytes = 0  # Bytes that moved between devices
    mapped: Bytes | None = None
    """Bytes that the device mapped in place, without moving them; None where mappings are not
    counted."""
    causes: dict[str, Bytes] = field(default_factory=dict)
    """Bytes that moved, by cause: "prefetch", "fault", "speculation", "eviction", "access
    counters", "unknown"."""
    to_device_seconds: Seconds = 0.0
    """Seconds in which at least one copy to the device was in progress."""
    to_host_seconds: Seconds = 0.0  # Seconds in which at least one copy to the host was in progress

    @property
    def migrated(self) -> int:
        """Bytes that moved, in all directions."""
        return self.to_device + self.to_host + self.between_devices

    @property
    def to_device_bandwidth(self) -> float | None:
        """Bytes per second while pages moved to the device, the link's rate, or None."""
        return _rate(self.to_device, self.to_device_seconds)

    @property
    def to_host_bandwidth(self) -> float | None:
        """The same to the host."""
        return _rate(self.to_host, self.to_host_seconds)


def _rate(nbytes: int, seconds: float) -> float | None:
    return nbytes / seconds if nbytes and seconds else None


class Migrations(Record, frozen=True):
    """An untimed pass that counts: pages are put back, then a launch runs."""

    before: PageCounts | None = None
    """Counts while inputs and pages are put back, which is not timed."""
    launch: PageCounts | None = None  # Counts during the launch
    source: str = ""  # Source of the counts, such as "CUPTI"
    not_counted: str | None = None  # Why nothing was counted; `before` and `launch` are None then


class PageEvent(NamedTuple):
    """One event of CUPTI."""

    kind: str  # field of `PageCounts`, such as "to_device"
    value: int  # bytes, or faults on one page that the driver handled together
    start: int  # nanoseconds
    end: int  # nanoseconds
    address: int  # first page
    why: str  # cause of a migration, or access that faulted


def page_counts(events: Sequence[PageEvent], *, maps: bool) -> PageCounts:
    """Add events up. `maps`: True if mappings are recorded too."""
    totals, last_end = Counter[str](), Counter[str]()
    seconds = dict.fromkeys(_MOVES, 0.0)
    causes: dict[str, int] = {}
    pages = []  # of each group of GPU faults
    if maps:
        totals["mapped"] = 0
    for event in sorted(events, key=lambda event: event.start):
        # A record of the CPU: one fault.
        totals[event.kind] += 1 if event.kind == "cpu_faults" else event.value
        if event.kind == "gpu_faults":
            pages.append(event.address)
        if event.kind in _MOVES:
            causes[event.why] = causes.get(event.why, 0) + event.value
            begin = max(event.start, last_end[event.kind])  # copies that overlap count once
            seconds[event.kind] += max(0, event.end - begin) / 1e9
            last_end[event.kind] = max(last_end[event.kind], event.end)
    return PageCounts(
        **totals,
        gpu_groups=len(pages),
        gpu_pages=len(set(pages)),
        causes=causes,
        to_device_seconds=seconds["to_device"],
        to_host_seconds=seconds["to_host"],
    )
