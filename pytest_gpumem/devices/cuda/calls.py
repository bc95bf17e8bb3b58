"""The calls of this process, from CUPTI's callbacks at their ends: kernels, copies, memsets, and the lines that wait.

Records of activity tell more, and cost 40 us each. The runtime calls the driver, which has a callback for each copy and wait: on an H100,
42,820 of 42,820 in CuPy's tests. What a call means, `devices.waits` says.

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
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from functools import cache, lru_cache
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
_STREAM_OF_CONFIG = 4
_Words = ctypes.c_uint64 * 6  # the words up to a stream: those that a call lacks are not read
_KINDS = {
    "wait": "|".join(WAITS),
    "capture": r"cuStreamBeginCapture\w*",
    "captured": r"cuStreamEndCapture\w*",
    # They make executable graphs, change what these do, and destroy them.
    "graph": r"cuGraph(Instantiate\w*|NodeSetEnabled|Exec(Update|Destroy|(Memcpy|ChildGraph)?NodeSetParams))",
    "launch": "cuGraphLaunch",
    # They load a module, or a part of it.
    "first": r"cu(Module|Library)(Load|GetFunction)\w*|cuLibraryGet(Kernel|Module)|cuKernelGetFunction",
    "copy": r"cuMemcpy(HtoD|DtoH|DtoD|DtoA|AtoD|HtoA|AtoH|AtoA|2D|2DUnaligned|3D|Peer|3DPeer|Batch)?(Async)?",
    "memset": r"cuMemsetD(2D)?(8|16|32)(Async)?",
    # They do work that is not read: afterwards the counts are not known.
    "unread": r"cuMemcpy(?!HostTo)\w+|cuLaunch(Grid(Async)?|CooperativeKernelMultiDevice)?",
}
"""The names of the calls that are followed, by kind: a call has the first that fits."""
_SIDES = {"D": "device", "A": "array"}  # memory by its letter in the kind of a copy
_Box = tuple[int, int, int, tuple[int, ...]]
_BOX: dict[str, _Box] = {"2D": (16, 2, 9, (14, 15)), "3D": (25, 4, 15, (22, 23, 24))}
"""By the begin of a copy's kind, of its structure: words, those of the memory read and written, those whose product is its bytes."""
_NO_WORK = re.compile(
    r"EMPTY|HOST|WAIT_EVENT|EVENT_RECORD|EXT_SEMAS_\w+|MEM_(ALLOC|FREE)|BATCH_MEM_OP"
)  # nodes that count nothing
_TYPES = {1: "pinned", 2: "device", 3: "array", 4: "managed"}  # CUmemorytype
_CREATES = re.compile(
    rb"(cublas|cudnn|cusolver|cusparse|curand|cufft|nccl|cutensor|nvjpeg|cublasLt)\w*(Create|Init|MakePlan|Plan\dd|PlanMany)"
)
_POOLS = (b"/cupy/cuda/memory", b"libc10_cuda", b"librmm", b"/rmm/")
"""Parts of the names of files whose code asks the driver for memory of a pool."""
_DEEPEST = 40  # native frames that are looked at: each takes a microsecond


class _Call(NamedTuple):
    """A call of the driver that is followed, and what its name tells: a test may make thousands."""

    name: str  # without its version
    version: str
    kind: str  # as in `_KINDS`
    asks: bool  # it loads a module, or asks for memory
    state: bool  # it is followed also while nobody counts
    waits: tuple[Waits, str]  # its row in `devices.waits`
    ordered: bool  # its work takes its turn on a stream
    default: tuple[int, ...]  # handles that mean the legacy default stream
    detail: str  # of a copy its kind, of a memset "2D"


class _Thread(threading.local):
    """What a thread is doing."""

    def __init__(self) -> None:
        self.open: list[
            tuple[_Call, float]
        ] = []  # calls that have begun, and the seconds of the clock then
        self.asked: tuple[int, int] | None = None
        """Where a module was loaded or memory was asked for last, as handles and plans do before they wait; None once a wait there was of
        none."""

    @property
    def loading(self) -> bool:
        """True inside a call that loads a module."""
        return bool(self.open) and any(
            known.kind == "first" for known, _ in self.open
        )  # mostly none is open


class CudaCalls:
    """Reports the calls of the process into its log."""

    def __init__(self) -> None:
        self.log = CallLog()
        self._thread = _Thread()
        self._launches: dict[int, tuple[int | None, tuple[int, ...], str]] = {}
        """By CUPTI's number of a call that launches a kernel: as in `_KERNELS`, as `_Call.default`, and its name."""
        self._calls: dict[int, _Call] = {}  # by CUPTI's number, the other calls of the driver
        self._plain: dict[_WaitSite, CodeType | None] = {}
        """Waits of no first use, with their code, so that its `id` stays its own; None for those that were of one."""
        self._captures: dict[int, int] = {}  # by stream that is captured, the thread that began it
        self._graphs: dict[int, Counter[Step]] = {}  # by executable graph, its nodes
        self._ends: list[Callable[[], None]] = []
        self._by_kind: dict[str, Callable[[_Call, int, float], None]] = {
            "wait": self._ended_wait,
            "capture": self._capture_begun,
            "graph": self._graph_changed,
            "launch": self._graph_launched,
            "copy": self._ended_copy,
            "memset": self._ended_memset,
        }
        """What counts a call at its end; for the others, `_other`."""

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
            launches, calls = (
                [name for *_, name in self._launches.values()],
                [known.version for known in self._calls.values()],
            )
            self._ends.append(
                CALLBACKS.add("DRIVER_API", launches, self._launched, self._missed, begins=False)
            )
            self._ends.append(
                CALLBACKS.add("DRIVER_API", calls, self._followed, self._missed, begins=self._begun)
            )
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
        """Find the calls in the installed version of CUPTI."""
        for name, number in cupti.driver_api_trace_cbid.__members__.items():
            base = base_name(name)
            if base in _KERNELS:
                self._launches[int(number)] = _KERNELS[base], _default(name), name
            elif (known := _call(base, name)) is not None:
                self._calls[int(number)] = known

    # Callbacks, in the thread of the call

    def _launched(self, number: int, address: int) -> None:
        """Count a kernel. Most calls are these."""
        call = ApiCall.from_address(address)
        result = call.result  # as `failed`
        if not self.log.windows or (result and ctypes.c_int.from_address(result).value):
            return
        at, default, _ = self._launches[number]
        block = _Words.from_address(call.parameters)
        stream = block[at] if at is not None else _Words.from_address(block[0])[_STREAM_OF_CONFIG]
        if self._captures and self._captured(stream):
            return
        if self._thread.loading:
            self.log.ran(Step(StepKind.KERNEL), first=True)
        else:
            self.log.launched(on_default=stream in default)

    def _begun(self, number: int, _address: int) -> None:
        """Note when a call begins."""
        known = self._calls[number]
        if self.log.windows or known.state:
            thread = self._thread
            thread.open.append((known, time.perf_counter()))
            if known.asks:
                thread.asked = _place(_caller(1))

    def _followed(self, number: int, address: int) -> None:
        """Count a call at its end."""
        known = self._calls[number]
        if not (self.log.windows or known.state):
            return
        now, opened, seconds = time.perf_counter(), self._thread.open, None
        while opened and seconds is None:  # the end of another one was not followed
            found, begun = opened.pop()
            if found is known:
                seconds = now - begun
        call = ApiCall.from_address(address)
        if known.kind == "captured":  # also where it fails
            self._captures.pop(words(call.parameters, 1)[0], None)
        elif not call.failed:
            self._by_kind.get(known.kind, self._other)(known, call.parameters, seconds or 0.0)

    def _ended_wait(self, known: _Call, parameters: int, seconds: float) -> None:
        waits, of = known.waits
        if known.name != "cuMemFree" or words(parameters, 1)[0]:  # to free nothing does nothing
            self._waited(known.name, of, waits, seconds, parameters)

    def _ended_copy(self, known: _Call, parameters: int, seconds: float) -> None:
        for step, stream in _copies(known, parameters, self._memory):
            waits = copy_waits(
                step.source or "unknown", step.memory or "unknown", ordered=known.ordered
            )
            self._worked(known, step, stream, waits, seconds, parameters)

    def _ended_memset(self, known: _Call, parameters: int, seconds: float) -> None:
        at = 5 if known.detail else 3
        values = words(parameters, at + known.ordered)
        waits = memset_waits(
            "unknown" if known.ordered else self._memory(values[0]), ordered=known.ordered
        )
        self._worked(
            known,
            Step(StepKind.MEMSET),
            values[at] if known.ordered else 0,
            waits,
            seconds,
            parameters,
        )

    def _other(self, known: _Call, _parameters: int, _seconds: float) -> None:
        if known.kind == "unread" and not self._captured(None):
            self.log.missed(f"{known.name} is not read")
        elif known.kind == "first" and "Load" in known.name:
            self.log.used_first("modules")

    def _capture_begun(self, _known: _Call, parameters: int, _seconds: float) -> None:
        self._captures[words(parameters, 1)[0]] = threading.get_ident()

    def _graph_launched(self, known: _Call, parameters: int, _seconds: float) -> None:
        executable, stream = words(parameters, 2)
        if not self._captured(stream):
            if executable not in self._graphs:
                self.log.missed("a graph was launched whose nodes are not known")
            for step, count in self._graphs.get(executable, {}).items():
                self.log.ran(step, count=count, on_default=stream in known.default)

    def _graph_changed(self, known: _Call, parameters: int, _seconds: float) -> None:
        """Read the nodes of an executable graph, or forget them."""
        (executable,) = words(parameters, 1)
        makes = known.name.startswith("cuGraphInstantiate")
        if makes:
            (executable,) = words(executable, 1)
        self._graphs.pop(executable, None)
        if (
            makes or known.name == "cuGraphExecUpdate"
        ) and not self._captures:  # else the driver is not asked
            with suppress(RuntimeError):  # they stay unknown
                self._graphs[executable] = Counter(_nodes(words(parameters, 2)[1]))

    def _captured(self, stream: int | None) -> bool:
        """True if work on this stream becomes a node of a graph. Where the driver does not tell: if this thread captures."""
        captures = self._captures
        if (
            captures
            and stream is not None
            and stream not in captures
            and (told := is_captured(stream)) is not None
        ):
            return told
        return stream in captures or threading.get_ident() in captures.values()

    def _memory(self, address: int) -> str:
        """The kind of memory at an address. While a stream is captured, the driver is not asked."""
        return "unknown" if self._captures else _memory(address)

    def _worked(
        self,
        known: _Call,
        step: Step,
        stream: int | None,
        waits: Waits,
        seconds: float,
        parameters: int,
    ) -> None:
        """Count a copy or a memset, and its wait."""
        if not self._captured(stream):
            self.log.ran(step, first=self._thread.loading, on_default=stream in known.default)
            if waits != "does not":
                self._waited(known.name, step.kind.value, waits, seconds, parameters)

    def _waited(self, name: str, of: str, waits: Waits, seconds: float, parameters: int) -> None:
        frame = _caller(3)
        first = self._thread.loading or self._first_use(
            frame, name, parameters, allocates=of == "allocation"
        )
        self.log.waited(name, of, seconds, sure=waits == "waits", first=first, frame=frame)

    def _first_use(
        self, frame: FrameType | None, name: str, parameters: int, *, allocates: bool
    ) -> bool:
        """As the function of this name, which is slow: it is asked once for each place in the code and depth of the native stack, where the
        parameters lie, and again after `_Thread.asked`."""
        if allocates or frame is None:
            return _first_use(allocates=allocates)
        site: _WaitSite = id(frame.f_code), frame.f_lasti, name, parameters
        thread = self._thread
        asked = thread.asked is not None and thread.asked == _place(frame)
        if self._plain.get(site) is not None and not asked:
            return False
        if len(self._plain) >= _MOST_SITES:
            self._plain.clear()
        if _first_use(allocates=False):
            self._plain[site] = None
            return True
        if asked:
            thread.asked = None
        self._plain.setdefault(site, frame.f_code)
        return False


_WaitSite = tuple[int, int, str, int]
"""Of a wait: the `id` of the innermost Python code and its instruction, the call, and the address of its parameters."""
_MOST_SITES = 2**14  # that are kept
_CALLBACKS = (
    CudaCalls._followed.__code__.co_filename,
    type(CALLBACKS)._called.__code__.co_filename,
)
"""The files of the frames of a callback."""


def _caller(depth: int) -> FrameType | None:
    """The innermost Python frame that has led to a callback, which is beyond so many frames."""
    frame: FrameType | None = sys._getframe(depth)
    while frame is not None and frame.f_code.co_filename in _CALLBACKS:
        frame = frame.f_back
    return frame


def _place(frame: FrameType | None) -> tuple[int, int]:
    """Of a call's innermost Python frame."""
    return (0, 0) if frame is None else (id(frame), frame.f_lasti)


def _call(base: str, version: str) -> _Call | None:
    """None for a call that is not followed."""
    for kind, names in _KINDS.items():
        if (match := re.fullmatch(names, base)) is not None:
            waits = WAITS.get(base, ("does not", ""))
            return _Call(
                base,
                version,
                kind,
                asks=kind == "first" or waits[1] == "allocation",
                state=kind in ("first", "capture", "captured", "graph"),
                waits=waits,
                ordered=base.endswith("Async"),
                default=_default(version),
                detail=str(match[1] or "") if kind in ("copy", "memset") else "",
            )
    return None


@cache
def _way(kind: str) -> tuple[str | None, str | None, int] | None:
    """Of a copy without a structure: the kinds of memory that its name tells, of its source and its destination; and the word of its bytes,
    which is behind the source's."""
    if kind in ("Batch", "Peer") or kind[:2] in _BOX:
        return None
    read, write = (kind[0], kind[3]) if kind else "HH"
    return (
        _SIDES.get(read),
        _SIDES.get(write),
        2 + kind.count("A"),
    )  # an array has an offset behind it


def _default(version: str) -> tuple[int, ...]:
    """The handles of the legacy default stream: 0 is one, unless the call is of the per-thread kind."""
    return (1,) if "_pt" in version else (0, 1)


def _copies(
    of: _Call, parameters: int, memory: Callable[[int], str]
) -> Sequence[tuple[Step, int | None]]:
    """Each copy of a call, with its stream where the call names one."""
    if (way := _way(of.detail)) is not None:
        source, to, at = way
        values = _Words.from_address(parameters)
        step = _copy(source or memory(values[at - 1]), to or memory(values[0]), values[at])
        return ((step, values[at + 1] if of.ordered else 0),)
    if (box := _BOX.get(of.detail[:2])) is not None:
        return (
            (
                _box_copy(box, words(parameters, 1)[0], memory),
                words(parameters, 2)[1] if of.ordered else 0,
            ),
        )
    if of.detail == "Peer":
        return ((replace(_copy("device", "device", words(parameters, 5)[4]), name="P2P"), None),)
    *lists, count = words(parameters, 4)
    batch = zip(*(words(at, count) for at in lists), strict=True)
    return [(_copy(memory(source), memory(to), nbytes), None) for to, source, nbytes in batch]


def _box_copy(box: _Box, address: int, memory: Callable[[int], str]) -> Step:
    length, *ends, sides = box
    values = words(address, length)

    def at_end(kind: int, on_host: int, on_device: int) -> str:
        known = _TYPES.get(kind & 0xFFFFFFFF, "unknown")
        return (
            memory(on_host)
            if known == "pinned"
            else memory(on_device)
            if known == "managed"
            else known
        )

    source, destination = (at_end(*values[at : at + 3]) for at in ends)
    return _copy(source, destination, prod(values[side] for side in sides))


@lru_cache(4096)
def _copy(source: str, destination: str, nbytes: int) -> Step:
    way = "2".join(
        {"pageable": "H", "pinned": "H", "array": "A"}.get(kind, "D")
        for kind in (source, destination)
    )
    return Step(StepKind.COPY, way, source=source, memory=destination, nbytes=nbytes)


def _memory(address: int) -> str:
    """The kind of memory at an address, one of `uses.MEMORY_KINDS`."""
    attributes = D.CUpointer_attribute
    error, kind = D.cuPointerGetAttribute(attributes.CU_POINTER_ATTRIBUTE_MEMORY_TYPE, address)
    if int(error):
        return "pageable"  # the driver knows nothing of it
    error, managed = D.cuPointerGetAttribute(attributes.CU_POINTER_ATTRIBUTE_IS_MANAGED, address)
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
        elif not _NO_WORK.fullmatch(
            what
        ):  # CONDITIONAL: the device decides how often its graphs run
            raise RuntimeError(f"{what} is not read")


class _DynamicSymbol(ctypes.Structure):
    """Dl_info of dladdr(3)."""

    _fields_ = (
        ("file", ctypes.c_char_p),
        ("base", ctypes.c_void_p),
        ("name", ctypes.c_char_p),
        ("address", ctypes.c_void_p),
    )


_CREATING, _POOL = 1, 2  # what `meaning` tells of a native frame


def _first_use(*, allocates: bool) -> bool:
    """True in a call that a library makes to create a handle or a plan, or, if it `allocates`, to let its pool grow. Names of native frames
    tell."""
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
    return (_CREATING if _CREATES.match(name) else 0) | (
        _POOL if any(part in file for part in _POOLS) else 0
    )


CALLS = CudaCalls()
