"""The protocol that the CUDA and the simulated device implement, and what both do alike.

Addresses are integers, sizes bytes, times seconds. A method with a body is what a device without
the feature does.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

import numpy as np

from pytest_gpumem.devices.errors import (
    CannotCapture,
    ContextLost,
    DeviceError,
    HoldExpired,
    NotCounted,
    OutOfMemory,
    Undelivered,
    Unsupported,
)
from pytest_gpumem.devices.footprints import Footprints
from pytest_gpumem.devices.memory_kinds import (
    ALLOCATORS,
    AccessProperty,
    Advice,
    Allocation,
    MemoryKind,
    WindowSpec,
)
from pytest_gpumem.kernels.kernel import Call, Kernel, LaunchShape, Role
from pytest_gpumem.records.device import Conditions, DeviceFacts
from pytest_gpumem.records.what_ran import PageCounts, WhatRan
from pytest_gpumem.units import short_bytes

__all__ = [
    "ALLOCATORS",
    "AccessProperty",
    "Advice",
    "Allocation",
    "CannotCapture",
    "ContextLost",
    "DeviceError",
    "Footprints",
    "HoldExpired",
    "NotCounted",
    "OutOfMemory",
    "Undelivered",
    "Unsupported",
    "WindowSpec",
]

OWN_CONTEXT = "a context of the test's own"  # made with cuCtxCreate


@dataclass(eq=False)
class Launch:
    """A kernel with its arguments. It is rebuilt when a buffer moves."""

    kernel: Kernel
    call: Call
    shape: LaunchShape
    arrays: Mapping[str, Allocation]  # array arguments by parameter name
    backing: Any = field(default=None, init=False, repr=False)
    """What the device makes of it at the first launch."""

    @property
    def element_type(self) -> str:
        """The element type of the first array parameter, which instantiates the template."""
        first = next(p for p in self.kernel.parameters if p.role is not Role.SCALAR)
        return self.call.arrays[first.name].dtype

    def check_live(self) -> None:
        for name, allocation in self.arrays.items():
            if allocation.freed:
                raise DeviceError(f"{self.kernel.name}: the memory of {name} was freed")

    def copied(self) -> tuple[Allocation, Allocation, int]:
        """Where a copy of the catalogue writes and reads, and its bytes."""
        by_role = {p.role: p.name for p in self.kernel.parameters}
        destination, source = by_role[Role.WRITE], by_role[Role.READ]
        nbytes = min(self.call.arrays[destination].nbytes, self.call.arrays[source].nbytes)
        return self.arrays[destination], self.arrays[source], nbytes

    def packed_arguments(self) -> tuple[Any, ...]:
        """The C arguments in order: addresses as uint64, sizes as int64, scalars in the element
        type, as NumPy scalars of their size and bits."""
        kernel, call = self.kernel, self.call
        element = np.dtype(self.element_type).type
        scalars = {p.name: p.default for p in kernel.parameters if p.role is Role.SCALAR}
        scalars.update(call.scalars)
        packed: list[Any] = []
        for item in kernel.arguments_of(call):
            if isinstance(item, (int, np.integer)):
                packed.append(np.int64(item))
            elif item in self.arrays:
                allocation = self.arrays[item]
                if not allocation.address:
                    kind = allocation.kind.value
                    raise DeviceError(
                        f"{kernel.name}: {item} is {kind} memory, which kernels cannot see"
                    )
                packed.append(np.uint64(allocation.address))
            elif scalars.get(item) is not None:
                packed.append(element(scalars[item]))
            else:
                raise DeviceError(f"kernel {kernel.name!r}: no value for {item!r}")
        return tuple(packed)


@dataclass(frozen=True)
class Foreign:
    """A function of the user."""

    function: Callable[[], object]  # launches on the current stream
    reference: Callable[[], object] | None = None
    """Does its work on host views of the buffers, for the simulated device."""
    touched: Sequence[tuple[Allocation, int]] = ()
    """Memory that a run touches, and bytes of it, for simulated times."""
    elsewhere: int = 0  # bytes that a run moves besides
    on_simulated: bool = False  # it calls only methods of `Device`


class Stream(Protocol):
    @property
    def handle(self) -> int:
        """The `cudaStream_t`; a serial number on the simulated device."""


Event = Any  # a point in a stream that can be timed
Graph = Any  # captured work; it owns the memory that was allocated during its capture
Hold = Any
"""Makes a stream wait while work is queued behind it: the work then has no launch gaps."""

AllocFree = Callable[[int, Stream], None]
"""Allocates a number of bytes and frees them, on the stream if it can."""


class Streams(Protocol):
    def create(self) -> Stream:
        """A new non-blocking stream, as long as it is referenced."""

    def defaults(self) -> tuple[Stream, ...]:
        """The legacy and the per-thread default stream, if there are any."""
        return ()

    def visible(self) -> tuple[Stream, ...]:
        """The defaults, those made by `create`, and CuPy's current stream."""

    def event(self) -> Event: ...

    def record(self, event: Event, stream: Stream) -> None:
        """Record an event; inside a capture, at every replay."""

    def elapsed(self, start: Event, end: Event) -> float:
        """Seconds between two recorded and completed events."""

    def synchronize(self, stream: Stream | None = None) -> None:
        """Wait for a stream, or for the whole device. Raises `HoldExpired`: a hold timed out."""

    def end_captures(self) -> int:
        """End captures that this thread has left open, also of libraries; return their number."""
        return 0

    def join(self, stream: Stream, other: Stream) -> None:
        """Make `stream` wait for all that is queued on `other` now; the host does not wait."""

    def hold(self, stream: Stream, timeout: float) -> Hold:
        """Make `stream` wait until `release`, or for `timeout` seconds."""

    def release(self, hold: Hold) -> None: ...

    def clock(self, hold: Hold) -> float | None:
        """Hertz of the SM clock during a hold, once it is synchronized."""

    def capture(
        self, stream: Stream, body: Callable[[], None], *, window: WindowSpec | None = None
    ) -> Graph:
        """Capture what `body` queues on `stream`; nothing of it runs now. `window` overrides
        those of the stream and of launches. Raises `CannotCapture`."""

    def windows(self, graph: Graph) -> tuple[WindowSpec | None, ...]:
        """The window of each kernel, as the driver has it."""

    def replay(self, graph: Graph, stream: Stream) -> None:
        """Queue a captured graph. Raises `CannotCapture` during a capture."""


class DeviceKernels(Protocol):
    def compile(self, launch: Launch) -> None:
        """Raises `DeviceError` with the compiler's message."""
        return

    def launch(self, launch: Launch, stream: Stream, *, window: WindowSpec | None = None) -> None:
        """Queue a kernel, or a copy where the kernel has no source. `window` overrides the
        stream's; a copy takes none."""

    def current_stream(self, stream: Stream) -> AbstractContextManager[None]:
        """Make `stream` the current stream of all imported libraries inside the block."""
        return nullcontext()

    def call(self, foreign: Foreign, stream: Stream) -> None:
        """Run a user's function inside `current_stream`. Raises `Unsupported`: there is no
        reference to simulate it; `DeviceError`: it made another GPU current."""


class DeviceMemory(Protocol):
    def allocate(
        self,
        nbytes: int,
        kind: MemoryKind,
        *,
        mapped: bool = True,
        write_combined: bool = False,
        portable: bool = True,
    ) -> Allocation:
        """Allocate memory aligned to 256 bytes; the keywords are flags of `cudaHostAlloc`. Raises
        `OutOfMemory` before the driver is called, and `Unsupported`: there is no other GPU, or the
        kind is adopted."""

    def oversubscribe(self, nbytes: int) -> Allocation:
        """Managed memory that may exceed the device's, up to half of the host's available memory.
        Raises `OutOfMemory` before the driver is called."""

    def adopt(self, array: Any, *, register: bool) -> Allocation:
        """Use the memory of a NumPy array, page-locked if `register`."""

    def free(self, allocation: Allocation) -> None:
        """A second call does nothing."""

    def free_bytes(self, kind: MemoryKind) -> int: ...

    def scatter(self, sizes: Sequence[int], seed: int) -> list[Allocation]:
        """Device memory for several buffers at places that `seed` decides, each freed alone.
        Those of 1 MiB and more are aligned to 2 MiB, else to 512 bytes. Raises `OutOfMemory`."""

    def make_room(self, *, unless_free: float = 1.0) -> bool:
        """Free memory that is kept for reuse, unless this share of the GPU's is free without it.
        True if something was freed."""
        return False

    def settle(self) -> None:
        """Wait until the driver has scrubbed freed memory, which takes bandwidth."""
        return

    def kind_at(self, address: int) -> MemoryKind | None:
        """The kind of memory at an address, in a pool `DEVICE`; None: not of this process."""

    def host(self) -> tuple[int, int]:
        """Bytes of RAM that this process may use, and those that are page-locked through here."""

    def near_host(self, node: int | None = None) -> AbstractContextManager[int | None]:
        """Run on the CPUs of a NUMA node, or of the device's, so that memory touched first lies
        there. Yields the node, or None if the block runs anywhere."""
        return nullcontext(None if node else 0)  # the only node is 0

    def allocator(self, name: str) -> AbstractContextManager[AllocFree]:
        """A way of allocating, by its name in `ALLOCATORS`. Raises `Unsupported`."""

    def view(self, allocation: Allocation, dtype: str, size: int) -> Any:
        """A one-dimensional array: of CuPy for memory that the device sees, else of NumPy; on the
        simulated device, of the part that is real."""

    def guest(self, allocation: Allocation, dtype: str, shape: tuple[int, ...], like: Any) -> Any:
        """The memory as an array of the library `like`. Raises `Unsupported`."""


class Content(Protocol):
    """The content of memory; and where the pages of managed memory lie, on a device with
    `concurrentManagedAccess`."""

    @property
    def on_host(self) -> bool:
        """True once CuPy cannot compute any more."""
        return False

    def fill_random(self, allocation: Allocation, dtype: str, seed: int, stream: Stream) -> None:
        """Fill as `values.fill`."""

    def fill_cycle(self, allocation: Allocation, stream: Stream) -> None:
        """Fill with a random cycle of `kernels.latency`."""

    def poison(self, allocation: Allocation, stream: Stream) -> None:
        """Fill with bytes 0xFF (NaN, or -1), so that an unwritten output shows."""

    def copy(
        self, destination: Allocation, source: Allocation, nbytes: int, stream: Stream
    ) -> None:
        """Copy between any two kinds of memory, asynchronously where the kinds allow it."""

    def to_host(self, allocation: Allocation, dtype: str, size: int) -> Any:
        """A NumPy copy, after all queued work; simulated, of the part that is real."""

    def copies(self, wanted: Sequence[tuple[Allocation, str, int]]) -> list[Any]:
        """Copies to compute with and to compare: on the device where all fit, else `to_host`."""

    def from_host(self, allocation: Allocation, content: Any) -> None:
        """Copy a NumPy array into the memory, waiting for it."""

    def mismatch(self, actual: Any, expected: Any, tolerance: float) -> tuple[int, int] | None:
        """How many elements differ and the index of the first, or None. Floats differ if
        |actual - expected| > tolerance * max(|expected|, 1e-30), integers if at all. NaN equals
        nothing. Raises `Unsupported` for elements that are no numbers."""

    def prefetch(self, allocation: Allocation, to_host: bool, stream: Stream) -> None: ...

    def advise(self, allocation: Allocation, advice: Advice, to_host: bool, *, on: bool) -> None:
        """Set or unset an advice for the device or the host, in no stream's order."""

    def discard(self, allocation: Allocation, stream: Stream) -> None:
        """Drop the content: pages then move without being copied, and the next access has to write.
        Raises `Unsupported` before CUDA 13."""


class L2(Protocol):
    def set_aside(self) -> int:
        """`cudaLimitPersistingL2CacheSize`."""

    def request_set_aside(self, nbytes: int) -> int:
        """Set it, unless `memory.l2.why_no_persisting_l2` says why not; return what is granted."""

    def set_window(self, stream: Stream, window: WindowSpec | None) -> None:
        """Set a stream's window, or turn it off, which leaves persisting lines."""

    def window(self, stream: Stream) -> WindowSpec | None: ...

    def reset_persisting(self) -> None:
        """Turn all persisting lines to normal, of whatever window."""


class Span(NamedTuple):
    """When a kernel, copy or memset ran: seconds on a clock of the pass."""

    name: str  # a kernel's name as CUDA reports it; empty for a copy or a memset
    grid: int  # blocks; 0 for a copy or a memset
    start: float
    end: float
    stream: int  # equal for work on the same stream


class Counters(Protocol):
    """Counts of this process's work, from CUPTI or the model. `work` waits for what it queues, and
    is slower than uncounted. Each method raises `NotCounted` with the reason."""

    def pages(self, work: Callable[[], None]) -> PageCounts:
        """Count faults and migrations of managed pages."""

    def spans(self, work: Callable[[], None]) -> list[Span]:
        """Record each kernel, copy and memset, in any order."""

    def what_ran(self, work: Callable[[], None], wait: Callable[[], None]) -> WhatRan:
        """Record each step. `wait` waits for what `work` queues; its calls are left out."""

    def loading(self) -> AbstractContextManager[object]:
        """Follow which launch loads which machine code."""
        return nullcontext()

    def detach(self) -> None:
        """End what passes cost each later launch, unless CUPTI is in use."""
        return


class Device(Protocol):
    """A GPU, real or simulated. Not thread-safe; one per process."""

    facts: DeviceFacts
    streams: Streams
    kernels: DeviceKernels
    memory: DeviceMemory
    content: Content
    l2: L2
    counters: Counters
    footprints: Footprints

    def now(self) -> float:
        """Seconds on the host's clock, or on a virtual one."""

    def pause(self, seconds: float) -> None: ...

    def conditions(self) -> Conditions: ...

    def current(self) -> AbstractContextManager[None]:
        """Make this GPU current in this thread."""
        return nullcontext()

    def in_own_context(self) -> bool:
        """True if a context of the test's own is current on this GPU."""
        return False

    def launches_wait(self) -> bool:
        """True if every launch waits (`CUDA_LAUNCH_BLOCKING`): no hold works."""
        return False

    def gone(self) -> str | None:
        """Why the context is gone with all its handles, as by `cudaDeviceReset`; else None."""
        return None

    def peer_access(self, allowed: bool) -> AbstractContextManager[None]:
        """Allow or forbid peer access to the GPU of `PEER` memory; without it, copies go through
        the host. Raises `Unsupported`."""

    def close(self) -> None:
        """Free all but the allocations of callers."""


def check_free(nbytes: int, kind: MemoryKind, free: int) -> None:
    if nbytes > free:
        what = f"{short_bytes(nbytes)} of {kind.value} memory"
        raise OutOfMemory(f"{what} asked for, {short_bytes(free)} are free")


def check_oversubscription(nbytes: int, host_bytes: int) -> None:
    """Check that half of the host's memory can take evicted pages."""
    most = host_bytes // 2
    if not 0 < nbytes <= most:
        raise OutOfMemory(
            f"{short_bytes(nbytes)} of managed memory asked for; the host has {short_bytes(most)} "
            "for evicted pages"
        )


def check_copy(destination: Allocation, source: Allocation, nbytes: int) -> None:
    if destination.freed or source.freed:
        raise DeviceError(f"a copy of {nbytes} bytes: the memory was freed")
    if not 0 < nbytes <= min(destination.nbytes, source.nbytes):
        raise DeviceError(
            f"a copy of {nbytes} bytes from {source.nbytes} to {destination.nbytes} bytes of memory"
        )
