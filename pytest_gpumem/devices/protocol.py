"""The verbs of a device: the one surface that the CUDA and the simulated device share.

Everything above this floor is written once against it. Addresses are integers, sizes bytes, times seconds.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from pytest_gpumem.devices.kinds import MemoryKind
from pytest_gpumem.devices.memory_events import Accounts, Growth
from pytest_gpumem.kernels.kernel import Access, Call, Kernel, LaunchShape
from pytest_gpumem.records.device import DeviceFacts
from pytest_gpumem.records.footprint import Footprint
from pytest_gpumem.records.measurement import Conditions
from pytest_gpumem.records.migrations import PageCounts
from pytest_gpumem.records.uses import Activity
from pytest_gpumem.records.waits import Waits
from pytest_gpumem.records.what_ran import WhatRan
from pytest_gpumem.units import format_bytes


class DeviceError(Exception):
    """The device refused or failed; one line for the user."""


class ContextLost(DeviceError):
    """A kernel's error took the context with it: every later call of this process for the device fails."""


class CannotCapture(DeviceError):
    """The work cannot be captured into a graph (it synchronises, allocates, or uses another stream)."""


class Unsupported(DeviceError):
    """This device cannot do it. A test that needs it skips with this reason."""


class OutOfMemory(DeviceError):
    """The device has not enough free memory. Nothing was allocated."""


class NotCounted(DeviceError):
    """Page faults or activity cannot be counted here. The message is the reason; reports print it after "not counted:"."""


class Undelivered(NotCounted):
    """CUPTI did not deliver the counts. Another attempt may succeed."""


class HoldExpired(DeviceError):
    """The hold of a stream timed out: the host waited for work that was queued behind it."""


@dataclass(frozen=True)
class HostMemory:
    """The host's memory, in bytes."""

    total: (
        int  # RAM that this process may use: the machine's, or its control group's if that is less
    )
    available: int  # of it, what new allocations can take without swapping
    locked: int  # bytes that are page-locked through this device now: pinned and registered


class Advice(str, Enum):
    """A hint to the driver on the use of managed memory (`cudaMemAdvise`; CUDA C++ Programming Guide, Data Usage Hints)."""

    READ_MOSTLY = "read_mostly"  # mostly read: each reader gets its own copy, and a write drops the other copies. This advice has no place.
    PREFERRED_LOCATION = "preferred_location"  # pages stay at this place where they can, and are mapped from elsewhere
    ACCESSED_BY = "accessed_by"  # this place has the pages mapped wherever they are, so that its accesses do not fault


@dataclass(eq=False)
class Allocation:
    """A piece of memory. Only the device that made it reads `backing`."""

    kind: MemoryKind
    nbytes: int
    address: int  # address in the device's address space; 0 if the device cannot see it (pageable)
    host_address: (
        int  # address in the host's address space; 0 if the host cannot see it (device memory)
    )
    backing: Any = None
    freed: bool = False


class AccessProperty(str, Enum):
    """How L2 treats the lines of an access (`cudaAccessProperty`; CUDA C++ Programming Guide, L2 Access Properties)."""

    NORMAL = "normal"  # no preference. It also turns a persisting line back to normal.
    STREAMING = "streaming"  # first to be evicted
    PERSISTING = "persisting"  # kept in the set-aside


@dataclass(frozen=True)
class WindowSpec:
    """An access-policy window for a stream, for the kernels of a graph or for one launch."""

    address: int  # first byte, as a device address
    nbytes: int  # length, at most `accessPolicyMaxWindowSize`
    hit_ratio: float  # share of the accesses in the window that get the hit property, in [0, 1]; the others get the miss property
    hit: AccessProperty = AccessProperty.PERSISTING
    miss: AccessProperty = AccessProperty.STREAMING
    """Streaming or normal: CUDA takes no other (CUDA Runtime API, cudaAccessPolicyWindow)."""

    @property
    def words(self) -> str:
        """Everything but the address: "8 MiB at hit ratio 1, persisting, else streaming"."""
        return f"{format_bytes(self.nbytes)} at hit ratio {self.hit_ratio:.3g}, {self.hit.value}, else {self.miss.value}"


@dataclass(eq=False)
class Launch:
    """A kernel bound to its arguments, for `DeviceKernels.launch`. It is rebuilt when a buffer moves. Only the device reads `backing`."""

    kernel: Kernel
    call: Call
    shape: LaunchShape
    arrays: Mapping[str, Allocation]  # array arguments by parameter name
    backing: Any = field(
        default=None, init=False, repr=False
    )  # what the device makes of it at the first launch


@dataclass(frozen=True)
class Foreign:
    """A function of the user, for `DeviceKernels.call`."""

    function: Callable[[], object]  # launches on the current stream
    reference: Callable[[], object] | None = None
    """Does the work of `function` on the host views of the buffers. The simulated device runs this one."""
    accesses: tuple[
        Access, ...
    ] = ()  # accesses of one run, for the simulated device's model of the time. Argument names do not matter.
    allocations: tuple[
        Allocation, ...
    ] = ()  # memory that it touches, one for each access where known
    on_simulated: bool = False  # it uses no other device than this one: the simulated device runs it where there is no reference


class Stream(Protocol):
    """An in-order queue of work."""

    @property
    def handle(self) -> int:
        """The `cudaStream_t` as an integer; a serial number on the simulated device."""


class Event(Protocol):
    """A point in a stream that can be timed."""


class Graph(Protocol):
    """Captured work. It owns memory that was allocated during its capture for as long as it lives."""


class Allocator(Protocol):
    """One way of allocating memory and freeing it, whose time can be measured."""

    def cycle(self, nbytes: int, stream: Stream) -> None:
        """Allocate and free once, in the order of `stream` where the allocator has one. Raises `OutOfMemory` if less is free."""

    def close(self) -> None:
        """Give back what it keeps."""


class Hold(Protocol):
    """A stream that waits while work is queued behind it, so that the work then runs without launch gaps."""

    def release(self) -> None:
        """Let the stream go on. Raises `HoldExpired` later, from `synchronize`, if it had timed out before."""

    def clock(self) -> float | None:
        """Hertz of the SM clock while the stream was held, once it is synchronized; None where the hold was too short to tell."""


ALLOCATORS = (
    "cudaMalloc",
    "cudaMallocAsync",
    "cudaMallocAsync, kept",
    "CuPy pool",
    "cudaHostAlloc",
    "cudaHostRegister",
)
"""Ways of allocating: `cudaMalloc` and `cudaFree`; a stream-ordered pool whose release threshold is 0, so that every synchronisation gives
unused memory back, and one that keeps it; CuPy's pool; page-locking, of new memory and of memory that exists.
Source: CUDA C++ Programming Guide, Stream Ordered Memory Allocator."""


class Streams(Protocol):
    """Streams and events."""

    def create(self) -> Stream:
        """A new non-blocking stream. It lives as long as it is referenced."""

    def defaults(self) -> tuple[Stream, ...]:
        """The legacy default stream and the per-thread default stream, in this order; none on the simulated device.

        Source: CUDA C++ Programming Guide, Default Stream.
        """

    def visible(self) -> tuple[Stream, ...]:
        """Streams whose windows can be read: the default streams, the current stream of CuPy, and live streams of `create`. On the
        simulated device: streams that ever had a window. Streams that another library made are missing."""

    def event(self) -> Event:
        """A new timing event."""

    def record(self, event: Event, stream: Stream) -> None:
        """Record `event` in `stream`; inside a capture it becomes an external record node, readable after every replay."""

    def elapsed(self, start: Event, end: Event) -> float:
        """Seconds between two recorded and completed events."""

    def synchronize(self, stream: Stream | None = None) -> None:
        """Wait for a stream, or for the whole device. Raises `HoldExpired` if a hold timed out, `DeviceError` for a failed kernel."""

    def end_captures(self) -> int:
        """End captures that this thread has left open, of the streams of CuPy and PyTorch too, and drop their graphs; the number of them.
        None on the simulated device, whose captures end with their block."""

    def join(self, stream: Stream, other: Stream) -> None:
        """Make `stream` wait for all that is queued on `other` now (`cudaStreamWaitEvent`); the host does not wait. Inside a capture of
        `stream` or `other` the capture includes it. The simulated device captures one stream only."""

    def hold(self, stream: Stream, timeout: float) -> Hold:
        """Make `stream` wait until released or until `timeout` seconds have passed on the device's own timer."""


class Graphs(Protocol):
    """Work captured once and replayed."""

    def capture(
        self, stream: Stream, body: Callable[[], None], *, window: WindowSpec | None = None
    ) -> Graph:
        """Run `body`, capturing what it queues on `stream`. Raises `CannotCapture(reason)` and leaves the stream usable.
        `stream`: where `body` queues its work.
        `body`: queues the work; nothing of it runs now.
        `window`: access-policy window of every kernel in the graph, whatever window the stream or the launch had.
        """

    def windows(self, graph: Graph) -> tuple[WindowSpec | None, ...]:
        """The access-policy window of each kernel in a graph, as the driver holds it."""

    def replay(self, graph: Graph, stream: Stream) -> None:
        """Queue a captured graph. Raises `CannotCapture` during a capture."""


class DeviceKernels(Protocol):
    """Kernels and functions that are queued on a stream."""

    def compile(self, launch: Launch) -> None:
        """Make a launch ready ahead of its first time. Raises `DeviceError` with the compiler's message."""

    def launch(self, launch: Launch, stream: Stream, *, window: WindowSpec | None = None) -> None:
        """Queue a kernel, or a copy where the kernel has no source.
        `launch`: the kernel with its arguments.
        `stream`: where it is queued.
        `window`: access-policy window of this launch alone (`cuLaunchKernelEx`); it goes before the stream's. A copy takes none.
        Raises `DeviceError`: the launch was refused, or the window cannot be.
        """

    def current_stream(self, stream: Stream) -> AbstractContextManager[None]:
        """Make `stream` the current stream of every library that is already imported, so that each `call` on it inside the block need not.
        The simulated device has no libraries."""

    def call(self, foreign: Foreign, stream: Stream) -> None:
        """Run a foreign function with `stream` as the current stream of every library that is already imported.

        The simulated device runs the reference instead, and raises `Unsupported` where there is none.
        Raises `DeviceError`: the function made another GPU current: its work is not this device's.
        """


PLENTY = 0.75  # share of the device's memory that is free for code of other libraries while memory is kept for the next kernel


class DeviceMemory(Protocol):
    """Memory of every kind: allocated, adopted, freed, and seen as arrays."""

    def allocate(
        self,
        nbytes: int,
        kind: MemoryKind,
        *,
        mapped: bool = True,
        write_combined: bool = False,
        portable: bool = True,
    ) -> Allocation:
        """Allocate memory aligned to 256 bytes.

        Args:
            nbytes: how much.
            kind: where. `PEER` is memory of another GPU: of the first that this one can copy from and to directly, else of the first.
            mapped, write_combined, portable: flags of `cudaHostAlloc`, for pinned memory.

        Raises:
            OutOfMemory: less is free; the driver was not asked.
            Unsupported: `PEER` where there is one GPU.
        """

    def pooled(self, nbytes: int, pool: Callable[[int], Any]) -> Allocation:
        """Memory of a library's pool: `pool(nbytes)` gives an object that owns it, with its address as `ptr`; freeing drops the object.

        Raises:
            DeviceError: the object has no such address.
            Unsupported: the device is simulated.
        """

    def part(self, allocation: Allocation, offset: int, nbytes: int) -> Allocation:
        """A part of an allocation, for copies and launches: it is not freed, and lives no longer than the whole."""

    def adopt(self, array: Any, *, register: bool) -> Allocation:
        """An allocation over a host NumPy array: registered (page-locked) or left pageable. The array stays the owner."""

    def free(self, allocation: Allocation) -> None:
        """Free or unregister; a second call does nothing."""

    def free_bytes(self, kind: MemoryKind) -> int:
        """Bytes that can still be allocated of a kind."""

    def scatter(self, sizes: Sequence[int], seed: int) -> list[Allocation]:
        """Device memory for several buffers, each at a random place of its own; `seed` decides where.

        As aligned as allocations of their own: to 2 MiB from 1 MiB on, else to 512 bytes. Each is freed by itself. Raises `OutOfMemory`
        before asking the driver if less is free.
        """

    def make_room(self, *, unless_free: float = 1.0) -> bool:
        """Free device memory that is kept for reuse, before the user's code allocates; False if there is none, or if it stays.

        Args:
            unless_free: share of the device's memory that, if it is free besides, lets the kept memory stay. Freed memory is scrubbed
                beside the next measurement, which waits for that.
        """

    def settle(self) -> None:
        """Wait until the driver has scrubbed freed memory: scrubbing takes bandwidth from concurrent work."""

    def kind_at(self, address: int) -> MemoryKind | None:
        """The kind of memory at an address (unified virtual addressing, `cudaPointerGetAttributes`); a pool's is `DEVICE`. None: the
        address belongs to no memory of this process, such as the first byte past the end of the last allocation."""

    def host(self) -> HostMemory:
        """The host's memory: total, available and page-locked bytes."""

    def near_host(self, node: int | None) -> AbstractContextManager[int | None]:
        """Run on the CPUs of one NUMA node of the host inside the block, so that memory that is allocated or touched first lies there.

        Args:
            node: its number; None: the node that the device is attached to, if the host reports one.

        Yields the node, or None if the block runs anywhere. The affinity of the thread is restored afterwards.

        Raises:
            Unsupported: the host has no such node, or this process may use none of its CPUs.
        """

    def allocator(self, name: str) -> Allocator:
        """An allocator by its name in `ALLOCATORS`. Raises `Unsupported` if the device does not have it."""

    def view(self, allocation: Allocation, dtype: str, size: int) -> Any:
        """A one-dimensional array over the memory: CuPy for memory that the device sees, NumPy for pageable memory. On the simulated device
        a NumPy array of the backed prefix, which may be shorter than `size`."""

    def guest(self, allocation: Allocation, dtype: str, shape: tuple[int, ...], like: Any) -> Any:
        """An array of another library over the memory: `like` is the module `cupy`, `torch`, `numba.cuda` or `numpy` (host memory).

        Raises `Unsupported` for a module that this device has no bridge to.
        """


class Content(Protocol):
    """The content of memory: filled, copied, read and compared."""

    def fill_random(self, allocation: Allocation, dtype: str, seed: int, stream: Stream) -> None:
        """Seeded content: floats uniform in [0, 1), integers over their full range, booleans 0 or 1, complex numbers two floats each. The
        same seed gives the same content."""

    def fill_cycle(
        self, allocation: Allocation, node_bytes: int, seed: int, stream: Stream
    ) -> None:
        """One random cycle over nodes of `node_bytes` each: the first 4 bytes of a node hold the index of the next node."""

    def poison(self, allocation: Allocation, stream: Stream) -> None:
        """Fill with bytes 0xFF (NaN for floats, -1 for integers), so that an unwritten output shows."""

    def copy(
        self, destination: Allocation, source: Allocation, nbytes: int, stream: Stream
    ) -> None:
        """Copy between any two kinds of memory, asynchronously where the kinds allow it."""

    def to_host(self, allocation: Allocation, dtype: str, size: int) -> Any:
        """A NumPy copy of the content (of the backed prefix on the simulated device), after all queued work."""

    def copies(self, wanted: Sequence[tuple[Allocation, str, int]]) -> list[Any]:
        """Copies of allocations' content as `to_host`, to compute with and to compare: all on the device where they fit in its memory."""

    def from_host(self, allocation: Allocation, content: Any) -> None:
        """Copy a NumPy array into the memory, waiting for it."""

    def mismatch(
        self, actual: Any, expected: Any, relative_tolerance: float
    ) -> tuple[int, int] | None:
        """Compare two arrays that `view` or a reference gave: None, or how many elements differ and the index of the first. NaN equals
        nothing. Floats differ if |actual - expected| > tolerance * max(|expected|, 1e-30), integers if at all. Raises `Unsupported` for
        elements that are no numbers, and `DeviceError` for arrays of different sizes, which on the simulated device are cut."""


class L2(Protocol):
    """Persisting L2: the set-aside, access-policy windows of streams, and persisting lines."""

    def set_aside(self) -> int:
        """`cudaLimitPersistingL2CacheSize`: bytes of L2 set aside now."""

    def request_set_aside(self, nbytes: int) -> int:
        """Set the set-aside; returns the bytes that the driver granted. Raises `Unsupported` with the reason if it cannot work."""

    def set_window(self, stream: Stream, window: WindowSpec | None) -> None:
        """Set the stream's access-policy window, or turn it off. Turning it off leaves the lines that persist where they are. A window with
        the hit property normal turns those under it back to normal, as work on the stream touches them."""

    def window(self, stream: Stream) -> WindowSpec | None:
        """The stream's window as the driver holds it."""

    def reset_persisting(self) -> None:
        """`cudaCtxResetPersistingL2Cache`: turn all persisting lines to normal, those of other windows too.

        This and a window with the hit property normal are the two ways to rely on. The third, to wait until lines that nobody touches
        turn normal by themselves, "is strongly discouraged because of the undetermined length of time required for automatic reset to
        occur" (CUDA C++ Programming Guide, Reset L2 Access to Normal).
        """


class Managed(Protocol):
    """Managed memory: where its pages lie."""

    def prefetch(self, allocation: Allocation, to_host: bool, stream: Stream) -> None:
        """`cudaMemPrefetchAsync` to the device or to the host. Raises `Unsupported` without `concurrentManagedAccess`."""

    def advise(self, allocation: Allocation, advice: Advice, to_host: bool, *, on: bool) -> None:
        """`cudaMemAdvise` for the device or for the host: set (`on`) or unset, at once and in no stream's order.

        Raises `Unsupported` without `concurrentManagedAccess`.
        """

    def discard(self, allocation: Allocation, stream: Stream) -> None:
        """Drop the content (`cudaMemDiscardBatchAsync`): pages then move without being copied. A read before the next write is undefined.
        Raises `Unsupported` if driver or bindings are older than CUDA 13."""

    def oversubscribe(self, nbytes: int) -> Allocation:
        """Managed memory of up to half of the host's available memory. Pages that the device cannot hold are evicted to the host.
        Oversubscription can hang a GPU. Raises `OutOfMemory` before asking the driver."""


class Span(NamedTuple):
    """When a kernel, copy or memset ran: seconds on a clock that all spans of a pass share."""

    name: str  # a kernel's name as CUDA reports it; empty for a copy or a memset
    grid: int  # blocks; 0 for a copy or a memset
    start: float
    end: float


class Counters(Protocol):
    """Counts of page faults, migrations, kernels and copies, from CUPTI or the model."""

    def pages(self, work: Callable[[], None]) -> PageCounts:
        """Count faults and migrations of this process's managed pages while `work` runs. `work` waits for the work that it queues. Counting
        slows `work` down. It is off before and after. Raises `NotCounted` with the reason, before `work` runs or after it."""

    def activity(self, work: Callable[[], None]) -> Activity:
        """Record kernels, copies and memsets of this process while `work` runs. `work` waits for the work that it queues. Recording slows
        `work` down. It is off before and after. Raises `NotCounted` with the reason, before `work` runs or after it."""

    def spans(self, work: Callable[[], None]) -> list[Span]:
        """As `activity`, each kernel, copy and memset by itself, in any order and without holds."""

    def what_ran(self, work: Callable[[], None], wait: Callable[[], None]) -> WhatRan:
        """Record each step of this process's work while `work` runs, with the machine code of its kernels.

        Recording is off before and after.
        `work`: queues what is recorded.
        `wait`: waits for it; its own calls are left out.
        Raises `NotCounted`: with the reason, before `work` runs or after it.
        """

    def loading(self) -> AbstractContextManager[object]:
        """Follow, inside the block, which kernel's launch loads which machine code: the first launches of work belong here."""


class WaitCounter(Protocol):
    """Counts the waits of this process, by the innermost line of the user's code. It needs no context."""

    def start(self) -> None:
        """Count from now on. Raises `NotCounted`: with the reason."""

    def stop(self) -> None:
        """Count no longer; a second call does nothing."""

    def read(self, root: Path, allowed: Sequence[str]) -> Waits:
        """What was counted.
        `root`: files are shown relative to it.
        `allowed`: lines that do not count, such as "conftest.py:*".
        """


class MemoryWatch(Protocol):
    """The memory that is taken from its begin on. Watches may lie inside each other."""

    def read(self) -> Footprint:
        """The footprint so far. Waits for no work. What CuPy's and PyTorch's pools keep for reuse is `reserved`, not `kept`."""

    def settle(self) -> bool:
        """Give back what libraries keep for reuse and cannot be told from what is used, such as page-locked memory; False if there was
        nothing of it, so that a `read` would give what the last one gave."""

    def seconds(self) -> float:
        """Seconds since it began."""

    def accounts(self) -> Accounts:
        """The single allocations behind it, as of the last `read`: those of the peak and those that are kept."""

    def close(self) -> None:
        """End it."""


class Footprints(Protocol):
    """The memory that all libraries of this process take on this device, and the driver."""

    def start(self, *, driver: bool, lines: bool = False) -> None:
        """Have the sources report from now on. A second call changes what is watched.
        `driver`: watch the driver's allocations too, which takes some 3 us each.
        `lines`: keep the line of the user's code behind each allocation.
        """

    def stop(self) -> None:
        """Have the sources report no longer."""

    def look(self) -> None:
        """Watch the libraries that have come into use too; else they are found when a footprint is read."""

    def watch(self) -> MemoryWatch:
        """Begin to watch. Raises `DeviceError` before `start`."""

    def ours(self) -> AbstractContextManager[Growth]:
        """What is allocated inside the block is no test's. Frees count wherever they happen. Yields the bytes by which libraries use more
        after the block; empty until it ends."""

    def paused(self) -> AbstractContextManager[None]:
        """As `ours`, and no source reports inside the block, so that none takes time: for timed samples."""

    def released(self, growth: Growth) -> None:
        """What was no test's, as `ours` gave it, is about to be freed: the watches that are open do not count it as theirs."""

    def resumed(self) -> AbstractContextManager[None]:
        """Inside `paused`, a block that is watched."""

    def took(self, kind: MemoryKind, nbytes: int) -> int:
        """A fixture gave the test memory; a number for `gave_back`, which stays the same if the harness moves the memory."""

    def gave_back(self, number: int) -> None:
        """A fixture's memory is the test's no longer; a second call does nothing."""


class Device(Protocol):
    """One GPU, real or simulated. Not thread-safe; one per process."""

    @property
    def facts(self) -> DeviceFacts: ...
    @property
    def streams(self) -> Streams: ...
    @property
    def graphs(self) -> Graphs: ...
    @property
    def kernels(self) -> DeviceKernels: ...
    @property
    def memory(self) -> DeviceMemory: ...
    @property
    def content(self) -> Content: ...
    @property
    def l2(self) -> L2: ...
    @property
    def managed(self) -> Managed: ...
    @property
    def counters(self) -> Counters: ...
    @property
    def footprints(self) -> Footprints: ...

    def now(self) -> float:
        """Seconds on the host's clock, or on the simulated device's virtual one: for the *host* sampler and for budgets."""

    def pause(self, seconds: float) -> None:
        """Let the host and the device rest."""

    def entropy(self, seed: int) -> int:
        """A seed for placements and other choices that differ from process to process. The simulated device returns `seed`."""

    def conditions(self) -> Conditions:
        """Clocks, throttle reasons, temperature, power, other processes, now."""

    def current(self) -> AbstractContextManager[None]:
        """Make this GPU the current device of the thread inside the block, and what was current before it afterwards."""

    def elsewhere(self) -> int | None:
        """CUDA's number of the GPU that is current instead of this one; None if this one is."""

    def launches_wait(self) -> bool:
        """True if the environment makes every launch wait for the device (`CUDA_LAUNCH_BLOCKING`): nothing can be queued behind a hold."""

    def was_reset(self) -> bool:
        """True if the context that was opened is gone with all its handles: a test reset the device (`cudaDeviceReset`)."""

    def peer_access(self, allowed: bool) -> AbstractContextManager[None]:
        """Allow or forbid peer access between this GPU and the GPU of `PEER` memory inside the block; restore the previous state. Without
        peer access, copies between them are staged through the host. Raises `Unsupported` with the reason if it is impossible."""

    def close(self) -> None:
        """Free the device's own resources. It does not free allocations of callers."""
