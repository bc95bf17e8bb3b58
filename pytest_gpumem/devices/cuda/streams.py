"""Streams, events and graphs of a GPU, holds of a stream, and windows in persisting L2.

`measuring.samplers` takes samples with them. To hold a stream, one thread spins on a flag in mapped
host memory, with a time-out on the device's timer (nvbench's blocking kernel). A graph keeps the
memory that was allocated during its capture. Source of windows: CUDA Best Practices Guide, 9.2.2.
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any
from weakref import WeakSet

import numpy as np
from cuda.bindings import driver as D
from cuda.bindings import runtime as R

from pytest_gpumem.devices.cuda import places
from pytest_gpumem.devices.cuda.allocations import CudaMemory
from pytest_gpumem.devices.cuda.compiler import HOLD, HOLD_SOURCE, Compiler, KernelCall
from pytest_gpumem.devices.cuda.context import (
    LEGACY_DEFAULT,
    PER_THREAD_DEFAULT,
    Context,
    CudaStream,
    check,
)
from pytest_gpumem.devices.cuda.guests import arrays
from pytest_gpumem.devices.memory_kinds import MemoryKind
from pytest_gpumem.devices.protocol import (
    AccessProperty,
    CannotCapture,
    DeviceError,
    Event,
    Graph,
    Hold,
    HoldExpired,
    Stream,
    Unsupported,
    WindowSpec,
)
from pytest_gpumem.kernels.kernel import LaunchShape
from pytest_gpumem.records.device import DeviceFacts

PROPERTIES = (AccessProperty.NORMAL, AccessProperty.STREAMING, AccessProperty.PERSISTING)
"""By the number that the driver and the runtime give them."""
_SET_ASIDE = R.cudaLimit.cudaLimitPersistingL2CacheSize
_WINDOW = R.cudaStreamAttrID.cudaLaunchAttributeAccessPolicyWindow
_NODE_WINDOW = R.cudaKernelNodeAttrID.cudaLaunchAttributeAccessPolicyWindow
_OFF = WindowSpec(0, 0, 0.0, AccessProperty.NORMAL, AccessProperty.NORMAL)  # of no bytes
_THREAD_LOCAL = R.cudaStreamCaptureMode.cudaStreamCaptureModeThreadLocal
_KERNEL = R.cudaGraphNodeType.cudaGraphNodeTypeKernel
_NO_WORK = (
    R.cudaGraphNodeType.cudaGraphNodeTypeEventRecord,
    R.cudaGraphNodeType.cudaGraphNodeTypeEmpty,
)

_SLOT_WORDS = 32  # 128 bytes: no two holds share a cache line
_SLOTS = 64
_EXPIRED = 2  # what the kernel writes of a hold that timed out
_ONE_THREAD = LaunchShape(1, 1)
_CLOCK_SECONDS = 10e-6  # shortest hold that tells the clock: the device's timer ticks every 32 ns


# Graphs


@dataclass(eq=False)
class CudaGraph:
    executable: Any
    template: Any  # the graph that it was made from, whose nodes can be read


def _nodes(graph: Any) -> list[tuple[Any, Any]]:
    doing = "reading a graph"
    _, count = check(R.cudaGraphGetNodes(graph, 0), doing)
    nodes, _ = check(R.cudaGraphGetNodes(graph, count), doing)
    return [(node, check(R.cudaGraphNodeGetType(node), doing)) for node in nodes]


def _kernels(graph: Any) -> list[Any]:
    return [node for node, kind in _nodes(graph) if kind == _KERNEL]


def _destroy(executable: Any, template: Any, pools: object) -> None:
    """Free a graph. Its work allocated from `pools`, which live as long as the arguments."""
    R.cudaGraphExecDestroy(executable)
    R.cudaGraphDestroy(template)


def _end_capture(handle: int) -> None:
    """End a capture that went wrong or was left open."""
    error, graph = R.cudaStreamEndCapture(handle)
    if int(error) == 0 and int(graph):
        R.cudaGraphDestroy(graph)
    R.cudaGetLastError()


# Streams


@dataclass(eq=False)
class CudaEvent:
    handle: Any


@dataclass(eq=False)
class CudaHold:
    words: Any
    """The slot: 4 bytes that the host writes to release, 4 that tell how it ended, and 8 each of
    cycles and nanoseconds that it held."""
    slot: int
    stream: Stream


class CudaStreams:
    def __init__(self, context: Context, compiler: Compiler, memory: CudaMemory) -> None:
        self._context = context
        self._compiler = compiler
        self._memory = memory
        self._capturing: Stream | None = None
        self._streams: WeakSet[CudaStream] = WeakSet()
        self._flags = 0  # the device's address of flags in mapped host memory
        self._words: Any = None  # the same memory, a row for each slot
        self._free_slots = list(range(_SLOTS))
        self._holds: list[CudaHold] = []  # that no `synchronize` has waited for

    def create(self) -> Stream:
        # It and the legacy default stream do not wait for each other.
        handle = check(R.cudaStreamCreateWithFlags(R.cudaStreamNonBlocking), "creating a stream")
        stream = CudaStream(int(handle))
        self._context.free_later(stream, R.cudaStreamDestroy, handle)
        self._streams.add(stream)
        return stream

    def defaults(self) -> tuple[Stream, ...]:
        return CudaStream(LEGACY_DEFAULT), CudaStream(PER_THREAD_DEFAULT)

    def visible(self) -> tuple[Stream, ...]:
        import cupy

        current = CudaStream(int(cupy.cuda.get_current_stream().ptr) or LEGACY_DEFAULT)
        streams: dict[int, Stream] = {}
        for stream in (*self.defaults(), *self._streams, current):
            streams.setdefault(stream.handle, stream)
        return tuple(streams.values())

    def event(self) -> Event:
        return self._event(R.cudaEventDefault)

    def _event(self, flags: int) -> CudaEvent:
        event = CudaEvent(check(R.cudaEventCreateWithFlags(flags), "creating an event"))
        self._context.free_later(event, R.cudaEventDestroy, event.handle)
        return event

    def record(self, event: Event, stream: Stream) -> None:
        if self._capturing is stream:
            # as an external node, whose time can be read after every replay
            external = R.cudaEventRecordExternal
            result = R.cudaEventRecordWithFlags(event.handle, stream.handle, external)
            check(result, "recording an event in a graph")
        else:
            check(R.cudaEventRecord(event.handle, stream.handle), "recording an event")

    def elapsed(self, start: Event, end: Event) -> float:
        result = R.cudaEventElapsedTime(start.handle, end.handle)
        milliseconds = check(result, "reading the time between two events")
        # CUDA gives milliseconds in 32 bits: below a picosecond there is nothing but longer files.
        return round(float(milliseconds) * 1e-3, 12)

    def synchronize(self, stream: Stream | None = None) -> None:
        if stream is None:
            check(R.cudaDeviceSynchronize(), "waiting for the device")
            self._context.free_unused()
        else:
            check(R.cudaStreamSynchronize(stream.handle), "waiting for a stream")
        expired = False
        holds, self._holds = self._holds, []
        for hold in holds:
            if stream is not None and hold.stream is not stream:
                self._holds.append(hold)
                continue
            self._free_slots.append(hold.slot)
            expired = expired or hold.words[1] == _EXPIRED
        if expired:
            raise HoldExpired

    def end_captures(self) -> int:
        handles = {stream.handle for stream in self._streams}
        handles.update(_handles_of_libraries())
        ended = 0
        # To ask for the legacy default stream while others are captured is an error.
        for handle in sorted(handles - {0, LEGACY_DEFAULT, PER_THREAD_DEFAULT}):
            status, captured = R.cudaStreamIsCapturing(handle)
            if int(status) == 0 and int(captured) != 0:  # not cudaStreamCaptureStatusNone
                _end_capture(handle)
                ended += 1
        return ended

    def join(self, stream: Stream, other: Stream) -> None:
        doing = "making a stream wait for another"
        mark = self._event(R.cudaEventDisableTiming)
        check(R.cudaEventRecord(mark.handle, other.handle), doing)
        # The event may go at once (CUDA Runtime API, cudaEventDestroy).
        check(R.cudaStreamWaitEvent(stream.handle, mark.handle, 0), doing)

    def hold(self, stream: Stream, timeout: float) -> Hold:
        kernel = self._compiler.private(HOLD_SOURCE, HOLD)
        if not self._flags:
            memory = self._memory.allocate(_SLOTS * _SLOT_WORDS * 4, MemoryKind.PINNED)
            if not memory.address:
                self._memory.free(memory)
                raise Unsupported("the device cannot map host memory: a stream cannot be held")
            self._words = places.array(memory, "u4", _SLOTS * _SLOT_WORDS).reshape(_SLOTS, -1)
            self._flags = memory.address
        if not self._free_slots:
            raise DeviceError(f"{_SLOTS} holds wait already: synchronize before asking for more")
        slot = self._free_slots[-1]
        words = self._words[slot]
        words[:6] = 0
        flag = np.uint64(self._flags + slot * _SLOT_WORDS * 4)
        arguments = (flag, np.uint64(round(timeout * 1e9)))
        KernelCall(kernel, _ONE_THREAD, arguments, "holding a stream").queue(stream)
        hold = CudaHold(words, self._free_slots.pop(), stream)
        self._holds.append(hold)
        return hold

    def release(self, hold: Hold) -> None:
        hold.words[0] = 1

    def clock(self, hold: Hold) -> float | None:
        cycles, nanoseconds = (int(word) for word in hold.words[2:6].view("u8"))
        if nanoseconds < _CLOCK_SECONDS * 1e9:
            return None
        return cycles / nanoseconds * 1e9

    def replay(self, graph: Graph, stream: Stream) -> None:
        if self._capturing is not None:  # it would have to become a node of the other
            raise CannotCapture("it replays a graph")
        check(R.cudaGraphLaunch(graph.executable, stream.handle), "replaying a graph")

    def windows(self, graph: Graph) -> tuple[WindowSpec | None, ...]:
        windows = []
        for node in _kernels(graph.template):
            result = R.cudaGraphKernelNodeGetAttribute(node, _NODE_WINDOW)
            value = check(result, "reading the access-policy window of a graph's kernel")
            windows.append(unpacked(value))
        return tuple(windows)

    def capture(
        self, stream: Stream, body: Callable[[], None], *, window: WindowSpec | None = None
    ) -> CudaGraph:
        if self._capturing is not None:
            raise CannotCapture("another capture is under way")
        template = executable = None
        try:
            with arrays.private_pools() as pools:
                check(R.cudaStreamBeginCapture(stream.handle, _THREAD_LOCAL), "beginning a capture")
                self._capturing = stream
                body()
                # Before the allocators are restored, whose clean-up must not be captured.
                self._capturing = None
                template = check(R.cudaStreamEndCapture(stream.handle), "ending a capture")
            if all(kind in _NO_WORK for _, kind in _nodes(template)):  # it went to another stream
                raise CannotCapture("it queued nothing on the stream that is captured")
            if window is not None:
                for node in _kernels(template):
                    # An executable graph keeps what its nodes have when it is made.
                    value = packed(window, R.cudaKernelNodeAttrValue)
                    doing = "setting the access-policy window of a graph's kernel"
                    check(R.cudaGraphKernelNodeSetAttribute(node, _NODE_WINDOW, value), doing)
            executable = check(R.cudaGraphInstantiate(template, 0), "making a graph executable")
        except CannotCapture:
            raise
        except Exception as error:
            raise CannotCapture.by(error) from error
        finally:
            if self._capturing is not None:
                self._capturing = None
                _end_capture(stream.handle)
            if executable is None and template is not None:
                R.cudaGraphDestroy(template)
        graph = CudaGraph(executable, template)
        self._context.free_later(graph, _destroy, executable, template, pools)
        return graph

    def close(self) -> None:
        for hold in self._holds:
            self.release(hold)


def _handles_of_libraries() -> Iterator[int]:
    kinds: list[tuple[Any, str]] = []
    for library, name in (("cupy", "ptr"), ("torch", "cuda_stream")):
        kind = getattr(getattr(sys.modules.get(library), "cuda", None), "Stream", None)
        if kind is not None:
            kinds.append((kind, name))
    for candidate in gc.get_objects():
        for kind, name in kinds:
            if issubclass(type(candidate), kind):
                yield int(getattr(candidate, name))


# Persisting L2


class CudaL2:
    def __init__(self, facts: DeviceFacts) -> None:
        self._facts = facts

    def set_aside(self) -> int:
        return int(check(R.cudaDeviceGetLimit(_SET_ASIDE), "reading the L2 set-aside"))

    def request_set_aside(self, nbytes: int) -> int:
        wanted = min(nbytes, self._facts.persisting_l2_max_bytes)
        check(R.cudaDeviceSetLimit(_SET_ASIDE, wanted), f"setting aside {wanted} bytes of L2")
        return self.set_aside()

    def set_window(self, stream: Stream, window: WindowSpec | None) -> None:
        value = packed(window, R.cudaStreamAttrValue)
        result = R.cudaStreamSetAttribute(stream.handle, _WINDOW, value)
        check(result, "setting the access-policy window")

    def window(self, stream: Stream) -> WindowSpec | None:
        result = R.cudaStreamGetAttribute(stream.handle, _WINDOW)
        return unpacked(check(result, "reading the access-policy window"))

    def reset_persisting(self) -> None:
        check(R.cudaCtxResetPersistingL2Cache(), "resetting persisting L2 lines")


def packed(window: WindowSpec | None, kind: Callable[[], Any]) -> Any:
    """The attribute of a window for a stream or for a graph's kernel."""
    value = kind()
    _fill(value.accessPolicyWindow, window or _OFF, R.cudaAccessProperty)
    return value


def launch_attribute(window: WindowSpec) -> Any:
    """The window as the driver's attribute of a launch, for `cuLaunchKernelEx`."""
    attribute = D.CUlaunchAttribute()
    attribute.id = D.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_ACCESS_POLICY_WINDOW
    _fill(attribute.value.accessPolicyWindow, window, D.CUaccessProperty)
    return attribute


def _fill(policy: Any, window: WindowSpec, properties: Callable[[int], Any]) -> None:
    policy.base_ptr = window.address
    policy.num_bytes = window.nbytes
    policy.hitRatio = window.hit_ratio
    policy.hitProp = properties(PROPERTIES.index(window.hit))
    policy.missProp = properties(PROPERTIES.index(window.miss))


def unpacked(value: Any) -> WindowSpec | None:
    policy = value.accessPolicyWindow
    if not int(policy.num_bytes):
        return None
    return WindowSpec(
        address=int(policy.base_ptr),
        nbytes=int(policy.num_bytes),
        hit_ratio=round(float(policy.hitRatio), 7),  # it went through 32 bits
        hit=PROPERTIES[int(policy.hitProp)],
        miss=PROPERTIES[int(policy.missProp)],
    )
