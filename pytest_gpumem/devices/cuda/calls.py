"""The calls of this process, from CUPTI's callbacks at their ends: kernels, copies, memsets, and the lines that wait.

Records of activity would tell more, and cost 40 us each. Callbacks of the driver come also for calls of the runtime, which calls it; where
one does not, the callback of the runtime counts. What a call means, `devices.waits` says.

Sources: CUPTI, Callback API, CUpti_CallbackData and generated_cuda_meta.h for the order of the parameters; CUDA Driver API, CUDA_MEMCPY2D,
CUDA_MEMCPY3D, CUlaunchConfig, Graph Management.
"""

from __future__ import annotations

import ctypes
import re
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import cache, lru_cache, partial
from math import prod
from types import CodeType, FrameType
from typing import Any, NamedTuple, cast

from cuda.bindings import driver as D  # noqa: N812
from msgspec.structs import replace

from pytest_gpumem.devices.calls import CallLog
from pytest_gpumem.devices.cuda.cupti import CALLBACKS, ApiCall, imported, words
from pytest_gpumem.devices.cuda.graph_nodes import is_captured, known, nodes
from pytest_gpumem.devices.protocol import NotCounted
from pytest_gpumem.devices.waits import CALLS as WAITS
from pytest_gpumem.devices.waits import Waits, base_name, copy_waits, memset_waits
from pytest_gpumem.records.what_ran import Step, StepKind

_KERNELS = {"cuLaunchKernel": 5, "cuLaunchCooperativeKernel": 5, "cuLaunchKernelEx": None}
"""Calls that launch a kernel: which parameter, of eight bytes each, holds the stream; None: it is in the structure of the first one."""
_STREAM_OF_CONFIG = 4  # word of a CUlaunchConfig
_Words = ctypes.c_uint64 * 6  # the words up to a stream
_COPY = re.compile(r"cuMemcpy(?:(HtoD|DtoH|DtoD|DtoA|AtoD|HtoA|AtoH|AtoA|2D|2DUnaligned|3D|Peer|3DPeer|Batch)?)(Async)?$")
_SIDES = {"D": "device", "A": "array"}  # memory by its letter in the kind of a copy
_Box = tuple[int, int, int, tuple[int, ...]]
_BOX: dict[str, _Box] = {"2D": (16, 2, 9, (14, 15)), "3D": (25, 4, 15, (22, 23, 24))}
"""By the begin of a copy's kind, of its structure: words, those of the memory read and written, those whose product is its bytes."""
_MEMSET = re.compile(r"cuMemsetD(2D)?(8|16|32)(Async)?$")
_FIRST = re.compile(r"cu(Module|Library)(Load|GetFunction)\w*|cuLibraryGet(Kernel|Module)|cuKernelGetFunction")
"""Calls that load a module, or a part of it."""
_STATE = re.compile(
    r"cuStream(Begin|End)Capture\w*|cuGraph(Instantiate\w*|NodeSetEnabled|Exec(Update|Destroy|(Memcpy|ChildGraph)?NodeSetParams))"
)
"""Calls that begin and end captures; and those that make executable graphs, change what they do, and destroy them."""
_UNREAD = re.compile(r"cuMemcpy(?!HostTo)\w+|cuLaunch(Grid(Async)?|CooperativeKernelMultiDevice)?")
"""Calls that do work whose parameters are not read: after one of them the counts are not known."""
_NO_WORK = re.compile(r"EMPTY|HOST|WAIT_EVENT|EVENT_RECORD|EXT_SEMAS_\w+|MEM_(ALLOC|FREE)|BATCH_MEM_OP")  # nodes that count nothing
_OF_RUNTIME = {
    "cudaDeviceSynchronize": "cuCtxSynchronize",
    "cudaStreamSynchronize": "cuStreamSynchronize",
    "cudaEventSynchronize": "cuEventSynchronize",
    "cudaFree": "cuMemFree",
    "cudaMemcpy": "cuMemcpy",
    "cudaMemcpyAsync": "cuMemcpyAsync",
}
"""By calls of the runtime that are followed too, those of the driver that have their meaning and their first parameters."""
_READ = re.compile("|".join([*(one.pattern for one in (_COPY, _MEMSET, _FIRST, _STATE, _UNREAD)), "cuGraphLaunch"]))
_TYPES = {1: "pinned", 2: "device", 3: "array", 4: "managed"}  # CUmemorytype
_CREATES = re.compile(
    rb"(cublas|cudnn|cusolver|cusparse|curand|cufft|nccl|cutensor|nvjpeg|cublasLt)\w*(Create|Init|MakePlan|Plan\dd|PlanMany)"
)
_POOLS = (b"/cupy/cuda/memory", b"libc10_cuda", b"librmm", b"/rmm/")
"""Parts of the names of files whose code asks the driver for memory of a pool."""
_DEEPEST = 40  # native frames that are looked at, for each takes a microsecond


class _Call(NamedTuple):
    """A call of the driver that is followed."""

    name: str  # without its version
    version: str
    first: bool  # it loads a module, or a part of it
    asks: bool  # it does, or it asks for memory
    state: bool  # it counts also while nobody counts: what is captured, and the nodes of graphs
    waits: tuple[Waits, str] | None  # its row in `devices.waits`
    copy: re.Match[str] | None
    memset: re.Match[str] | None

    @property
    def ordered(self) -> bool:
        """True if its work takes its turn on a stream."""
        return self.name.endswith("Async")

    @property
    def of_runtime(self) -> bool:
        """True if the runtime is called in its place."""
        return self.version.startswith("cuda")


_OpenCall = tuple[_Call, float, int]
"""A call that has begun, the seconds of the clock, and `_Thread.seen` then."""
_Place = tuple[int, int]
"""Of the innermost Python frame of a call, which may be none: its `id`, and the instruction."""


class _Thread(threading.local):
    """What a thread is doing."""

    def __init__(self) -> None:
        self.open: list[_OpenCall] = []
        self.seen = 0  # copies and waits of the driver so far
        self.asked: _Place | None = None
        """Where a module was loaded or memory was asked for last, as every handle and plan does before it waits. None once a wait there was
        found to be of none."""

    @property
    def loading(self) -> bool:
        """True inside a call of `_FIRST`."""
        return bool(self.open) and any(known.first for known, _, _ in self.open)


class CudaCalls:
    """Reports the calls of the process into its log."""

    def __init__(self) -> None:
        self.log = CallLog()
        self._thread = _Thread()
        self._launches: dict[int, tuple[int | None, bool]] = {}
        """By CUPTI's number of a call that launches a kernel: as in `_KERNELS`, and whether its stream 0 is the legacy default stream."""
        self._calls: dict[int, _Call] = {}  # by CUPTI's number, the other calls of the driver
        self._of_runtime: dict[int, _Call] = {}  # by CUPTI's number of a call of the runtime, the call of the driver that it stands for
        self._plain: dict[_WaitSite, CodeType | None] = {}
        """Waits that belong to no first use, with their code, so that its `id` stays its own; None for those that did once."""
        self._captures: dict[int, int] = {}  # by stream that is captured, the thread that began it
        self._graphs: dict[int, Counter[Step]] = {}  # by executable graph, its nodes
        self._launch_names: tuple[str, ...] = ()
        self._ends: list[Callable[[], None]] = []

    @property
    def running(self) -> bool:
        """True while calls are reported."""
        return bool(self._ends)

    def start(self) -> str | None:
        if self._ends and CALLBACKS.serves:
            return None
        self.stop()
        self._forget()
        try:
            if not self._calls:
                self._number(imported())
            self._ends.append(CALLBACKS.add("DRIVER_API", self._launch_names, self._launched, self._missed, begins=False))
            for domain, calls in (("DRIVER_API", self._calls), ("RUNTIME_API", self._of_runtime)):
                names = [known.version for known in calls.values()]
                self._ends.append(CALLBACKS.add(domain, names, partial(self._followed, calls), self._missed))
        except NotCounted as why:
            self.stop()
            self.log.missed(str(why))
            return str(why)
        return None

    def _forget(self) -> None:
        """Calls were missed, which may have ended what was open, and changed graphs."""
        self._thread, self._captures, self._graphs = _Thread(), {}, {}

    def _missed(self, why: str) -> None:
        self._forget()
        self.log.missed(why)

    def stop(self) -> None:
        ends, self._ends = self._ends, []
        for end in ends:
            end()

    def _number(self, cupti: Any) -> None:
        """Find the calls in the installed version. Old versions of a call, and those that run in a green context, are left out with it."""
        members = {name: int(number) for name, number in cupti.driver_api_trace_cbid.__members__.items()}
        for name, number in members.items():
            base = base_name(name)
            if base in _KERNELS:
                self._launches[number] = _KERNELS[base], _on_legacy(0, name)
                self._launch_names += (name,)
            elif base in WAITS or _READ.fullmatch(base):
                self._calls[number] = _call(base, name)
        for name, number in cupti.runtime_api_trace_cbid.__members__.items():
            if base := _OF_RUNTIME.get(name.partition("_")[0], ""):
                self._of_runtime[int(number)] = _call(base, name)

    # Callbacks, in the thread of the call

    def _launched(self, number: int, address: int) -> None:
        """Count a kernel. Most calls are these: they are looked at no longer than needed."""
        call = ApiCall.from_address(address)
        result = call.result  # as `failed`
        if not self.log.windows or (result and ctypes.c_int.from_address(result).value):
            return
        at, legacy = self._launches[number]
        block = _Words.from_address(call.parameters)
        stream = block[at] if at is not None else _Words.from_address(block[0])[_STREAM_OF_CONFIG]
        if self._captures and self._captured(stream):
            return
        if self._thread.loading:
            self.log.ran(Step(StepKind.KERNEL), first=True)
        else:
            self.log.launched(on_default=stream == 1 or (stream == 0 and legacy))

    def _followed(self, calls: Mapping[int, _Call], number: int, address: int) -> None:
        """Count a call at its end: one of the runtime only where the driver had no callback."""
        known = calls[number]
        if not (self.log.windows or known.state):
            return
        call, thread = ApiCall.from_address(address), self._thread
        if not call.site:
            thread.open.append((known, time.perf_counter(), thread.seen))
            if known.asks:
                thread.asked = _place(_caller())
            return
        begun, seen = self._leave(known)
        if known.name.startswith("cuStreamEndCapture"):  # also where it fails
            self._captures.pop(words(call.parameters, 1)[0], None)
        elif not call.failed and (seen == thread.seen or not known.of_runtime):
            self._ended(known, call.parameters, begun)

    def _leave(self, known: _Call) -> tuple[float, int]:
        """The clock and `_Thread.seen` at the begin of the call that ends; now and -1 if it began before it was followed."""
        opened = self._thread.open
        while opened:
            found, begun, seen = opened.pop()
            if found is known:
                return begun, seen
        return time.perf_counter(), -1

    def _ended(self, known: _Call, parameters: int, begun: float) -> None:
        thread, name = self._thread, known.name
        if known.waits is not None:  # first, for most calls are these
            thread.seen += 1
            waits, of = known.waits
            if name != "cuMemFree" or words(parameters, 1)[0]:  # to free nothing does nothing
                self._waited(name, of, waits, begun, parameters)
        elif name.startswith("cuStreamBeginCapture"):
            self._captures[words(parameters, 1)[0]] = threading.get_ident()
        elif name == "cuGraphLaunch":
            executable, stream = words(parameters, 2)
            if not self._captured(stream):
                if executable not in self._graphs:
                    self.log.missed("a graph was launched whose nodes are not known")
                for step, count in self._graphs.get(executable, {}).items():
                    self.log.ran(step, count=count, on_default=_on_legacy(stream, known.version))
        elif known.first:
            if "Load" in name:
                self.log.used_first("modules")
        elif known.state:
            self._graph_changed(name, parameters)
        elif known.copy is not None:
            thread.seen += 1
            for step, on in _copies(known, known.copy[1], parameters, self._memory):
                waits = copy_waits(step.source or "unknown", step.memory or "unknown", ordered=known.ordered)
                self._worked(known, step, on, waits, begun, parameters)
        elif known.memset is not None:
            at = 5 if known.memset[1] else 3
            values = words(parameters, at + known.ordered)
            waits = memset_waits("unknown" if known.ordered else self._memory(values[0]), ordered=known.ordered)
            self._worked(known, Step(StepKind.MEMSET), values[at] if known.ordered else 0, waits, begun, parameters)
        elif not self._captured(None):
            self.log.missed(f"{name} is not read")

    def _graph_changed(self, name: str, parameters: int) -> None:
        """Read the nodes of an executable graph, or forget them."""
        (executable,) = words(parameters, 1)
        makes = name.startswith("cuGraphInstantiate")
        if makes:
            (executable,) = words(executable, 1)
        self._graphs.pop(executable, None)
        if (makes or name == "cuGraphExecUpdate") and not self._captures:  # else the driver is not asked
            with suppress(RuntimeError):  # they stay unknown
                self._graphs[executable] = Counter(_nodes(words(parameters, 2)[1]))

    def _captured(self, stream: int | None) -> bool:
        """True if work on this stream becomes a node of a graph; where the driver does not tell, if this thread captures."""
        captures = self._captures
        if captures and stream is not None and stream not in captures and (told := is_captured(stream)) is not None:
            return told
        return stream in captures or threading.get_ident() in captures.values()

    def _memory(self, address: int) -> str:
        """The kind of memory at an address. While a stream is captured, the driver is not asked."""
        return "unknown" if self._captures else _memory(address)

    def _worked(self, known: _Call, step: Step, stream: int | None, waits: Waits, begun: float, parameters: int) -> None:
        """Count a copy or a memset, and its wait."""
        if not self._captured(stream):
            self.log.ran(step, first=self._thread.loading, on_default=_on_legacy(stream, known.version))
            self._waited(known.name, step.kind.value, waits, begun, parameters)

    def _waited(self, name: str, of: str, waits: Waits, begun: float, parameters: int) -> None:
        if waits == "does not":
            return
        seconds = time.perf_counter() - begun
        frame = _caller()
        first = self._thread.loading or self._first_use(frame, name, parameters, allocates=of == "allocation")
        self.log.waited(name, of, seconds, sure=waits == "waits", first=first, frame=frame)

    def _first_use(self, frame: FrameType | None, name: str, parameters: int, *, allocates: bool) -> bool:
        """As the function of this name, which may take longer than the call: it is asked once for each place in the code and depth of the
        native stack, where the parameters lie, and again only after `_Thread.asked`."""
        if allocates or frame is None:
            return _first_use(allocates=allocates)
        site: _WaitSite = id(frame.f_code), frame.f_lasti, name, parameters
        asked = self._thread.asked == _place(frame)
        if self._plain.get(site) is not None and not asked:
            return False
        if len(self._plain) >= _MOST_SITES:
            self._plain.clear()
        if _first_use(allocates=False):
            self._plain[site] = None
            return True
        if asked:
            self._thread.asked = None
        self._plain.setdefault(site, frame.f_code)
        return False


_WaitSite = tuple[int, int, str, int]
"""Of a wait: the `id` of the innermost Python code and its instruction, the call, and the address of its parameters."""
_MOST_SITES = 2**14  # that are kept
_CALLBACKS = (CudaCalls._followed.__code__.co_filename, type(CALLBACKS)._called.__code__.co_filename)
"""The files of the frames of a callback."""


def _caller() -> FrameType | None:
    """The innermost Python frame that has led to a callback."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code.co_filename in _CALLBACKS:
        frame = frame.f_back
    return frame


def _place(frame: FrameType | None) -> _Place:
    return (0, 0) if frame is None else (id(frame), frame.f_lasti)


def _call(base: str, version: str) -> _Call:
    first = _FIRST.fullmatch(base) is not None
    state = first or _STATE.fullmatch(base) is not None
    waits = WAITS.get(base)
    asks = first or (waits is not None and waits[1] == "allocation")
    return _Call(base, version, first, asks, state, waits, _COPY.match(base), _MEMSET.match(base))


def _on_legacy(stream: int | None, version: str) -> bool:
    """True for the legacy default stream, whose handle is 0 in calls that are not of the per-thread kind."""
    return stream == 1 or (stream == 0 and "_pt" not in version)


def _copies(of: _Call, kind: str | None, parameters: int, memory: Callable[[int], str]) -> Iterator[tuple[Step, int | None]]:
    """Each copy of a call, with its stream where the call names one."""
    if kind == "Batch":
        *lists, count = words(parameters, 4)
        for to, source, nbytes in zip(*(words(at, count) for at in lists), strict=True):
            yield _copy(memory(source), memory(to), nbytes), None
        return
    if (box := _BOX.get((kind or "")[:2])) is not None:
        yield _box_copy(box, words(parameters, 1)[0], memory), words(parameters, 2)[1] if of.ordered else 0
        return
    at = 4 if kind == "Peer" else 2 + (kind or "").count("A")  # its bytes: an array has an offset behind it
    stream = at + 1 + of.of_runtime  # a copy of the runtime has its direction between
    values = words(parameters, stream + 1 if of.ordered else at + 1)
    if kind == "Peer":
        yield replace(_copy("device", "device", values[at]), name="P2P"), None
        return
    read, write = (kind[0], kind[3]) if kind else "HH"
    source = _SIDES.get(read) or memory(values[at - 1])
    yield _copy(source, _SIDES.get(write) or memory(values[0]), values[at]), values[stream] if of.ordered else 0


def _box_copy(box: _Box, address: int, memory: Callable[[int], str]) -> Step:
    length, *ends, sides = box
    values = words(address, length)

    def at_end(kind: int, on_host: int, on_device: int) -> str:
        known = _TYPES.get(kind & 0xFFFFFFFF, "unknown")
        return memory(on_host) if known == "pinned" else memory(on_device) if known == "managed" else known

    source, destination = (at_end(*values[at : at + 3]) for at in ends)
    return _copy(source, destination, prod(values[side] for side in sides))


@lru_cache(4096)
def _copy(source: str, destination: str, nbytes: int) -> Step:
    way = "2".join({"pageable": "H", "pinned": "H", "array": "A"}.get(kind, "D") for kind in (source, destination))
    return Step(StepKind.COPY, way, source=source, memory=destination, nbytes=nbytes)


_TYPE = D.CUpointer_attribute.CU_POINTER_ATTRIBUTE_MEMORY_TYPE
_MANAGED = D.CUpointer_attribute.CU_POINTER_ATTRIBUTE_IS_MANAGED


def _memory(address: int) -> str:
    """The kind of memory at an address, one of `uses.MEMORY_KINDS`."""
    error, kind = D.cuPointerGetAttribute(_TYPE, address)
    if int(error):
        return "pageable"  # the driver knows nothing of it
    error, managed = D.cuPointerGetAttribute(_MANAGED, address)
    if not int(error) and int(managed):
        return "managed"
    return _TYPES.get(int(kind), "unknown")


def _nodes(graph: int) -> Iterator[Step]:
    """The work of a graph, node by node. Raises `RuntimeError`: it is not known."""
    for node, kind in nodes(graph):
        what = kind.name.removeprefix("CU_GRAPH_NODE_TYPE_")
        if what in ("KERNEL", "MEMSET"):
            yield Step(StepKind[what])
        elif what == "MEMCPY":
            copied = known(D.cuGraphMemcpyNodeGetParams(node))
            yield _box_copy(_BOX["3D"], copied.getPtr(), _memory)
        elif not _NO_WORK.fullmatch(what):  # CONDITIONAL: the device decides how often its graphs run
            raise RuntimeError(f"{what} is not read")


class _DynamicSymbol(ctypes.Structure):
    """Dl_info of dladdr(3)."""

    _fields_ = (("file", ctypes.c_char_p), ("base", ctypes.c_void_p), ("name", ctypes.c_char_p), ("address", ctypes.c_void_p))


_CREATING, _POOL = 1, 2  # what `meaning` tells of a native frame


def _first_use(*, allocates: bool) -> bool:
    """True in a call that a library makes to create a handle or a plan, or, if it `allocates`, to let its pool grow. The native frames of
    this thread tell, by the names of their files and of the functions that these export."""
    wanted = _CREATING | _POOL if allocates else _CREATING
    return any(_of_address(address) & wanted for address in native_frames())


def native_frames() -> Sequence[int]:
    """The address of each native frame of this thread, the innermost first."""
    frames = (ctypes.c_void_p * _DEEPEST)()
    try:
        count = ctypes.pythonapi.backtrace(frames, _DEEPEST)
    except AttributeError:  # not glibc
        return ()
    return cast("Sequence[int]", frames[:count])


@cache
def _of_address(address: int) -> int:
    found = _DynamicSymbol()
    ctypes.pythonapi.dladdr(ctypes.c_void_p(address), ctypes.byref(found))
    return meaning(found.file or b"", found.name or b"")


def meaning(file: bytes, name: bytes) -> int:
    """What a native frame does, by its file and the exported function that it is in."""
    return (_CREATING if _CREATES.match(name) else 0) | (_POOL if any(part in file for part in _POOLS) else 0)


CALLS = CudaCalls()  # the calls of this process
