"""Machine code as compiled, and what one launch of a measurement ran: exact, without times, so that unchanged code gives equal records."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Mapping
from enum import Enum

import msgspec
from msgspec import field
from msgspec.structs import replace

from pytest_gpumem.records.record import Bytes, Count, Record


class CompiledKernel(Record, frozen=True):
    """One kernel, compiled for one architecture."""

    source: str  # Its file, or "module:function" of a Triton kernel
    name: str  # As declared: a C++ name expression, or the signature of a Triton kernel
    architecture: str  # Such as "sm_90"
    digest: str  # Digest of the machine code: equal for equal code (`kernels.cubin`)
    registers: Count | None  # Registers of a thread
    spill: Bytes | None  # Local memory of a thread: spilled registers, and arrays that are indexed at run time
    shared: Bytes  # Shared memory of a block: static, and of a Triton kernel also the dynamic one
    code: Bytes  # Machine code


class CompiledKernels(Record, frozen=True):
    """The kernels of a project."""

    kernels: tuple[CompiledKernel, ...]


_DIGEST_BYTES = 8


class StepKind(str, Enum):
    """What a step of a launch does."""

    KERNEL = "kernel"
    COPY = "copy"
    MEMSET = "memset"
    ALLOCATION = "allocation"
    FREE = "free"
    SYNCHRONISATION = "synchronisation"  # The host waits: for the device, a stream or an event
    JOIN = "join"  # A stream waits for an event; the host does not


class Step(Record, frozen=True, omit_defaults=True):
    """One step of a launch. A figure that its kind does not have, or that is unknown, is None."""

    kind: StepKind  # What it does
    name: str = ""
    """A kernel's name as CUDA reports it; a copy's direction, one of `uses.COPY_KINDS`; what a synchronisation waits for: "device",
    "stream" or "event"."""
    code: str | None = None  # Digest of a kernel's machine code (`kernels.cubin`), or of its source and model on the simulated device
    grid: tuple[int, int, int] | None = None  # Blocks in x, y and z
    block: tuple[int, int, int] | None = None  # Threads of a block in x, y and z
    cluster: tuple[int, int, int] | None = None  # Blocks of a cluster in x, y and z; None for a kernel without clusters
    shared: Bytes | None = None  # Static shared memory of a block
    dynamic_shared: Bytes | None = None  # Dynamic shared memory of a block
    registers: Count | None = None  # Registers of a thread
    local: Bytes | None = None  # Local memory of a thread: spilled registers and stack
    source: str | None = None  # Memory that a copy reads, one of `uses.MEMORY_KINDS`
    memory: str | None = None  # Memory that a copy or memset writes, or that is allocated or freed, one of `uses.MEMORY_KINDS`
    nbytes: Bytes | None = None  # Bytes that are copied, set, allocated or freed
    window: str | None = None  # Access-policy window that the launch carried, without its address
    stream: Count | None = None  # Stream, numbered by first use in the launch; None for what is in no stream
    priority: int | None = None  # Priority of the stream, where it is not 0


class WhatRan(Record, frozen=True):
    """What one launch ran, from an untimed pass."""

    digest: str | None = None  # Of everything below; equal digests mean that the same ran. None if something was not watched.
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
    launch: Iterable[Step], calls: Mapping[str, int], state: Mapping[str, str] | None = None, *, not_watched: str | None = None
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
        own = step if step.stream is None else replace(step, stream=numbers.setdefault(step.stream, len(numbers)))
        order.append(distinct.setdefault(own, len(distinct)))
    steps, state = tuple(distinct), dict(sorted((state or {}).items()))
    calls = dict(sorted(calls.items()))
    if not_watched is not None:
        return WhatRan(None, steps, tuple(order), calls, state, not_watched)
    # The name of a kernel changes nothing that the device does.
    unnamed = [replace(step, name="") if step.code is not None else step for step in steps]
    content = msgspec.json.encode(([unnamed[index] for index in order], calls, state))
    return WhatRan(hashlib.blake2b(content, digest_size=_DIGEST_BYTES).hexdigest(), steps, tuple(order), calls, state)
