"""The modules and the arguments of the kernels that this process launches, from CUPTI's callbacks.

CUPTI hands out the image of each module when it is loaded, but not its handle, and two modules may
hold kernels of the same name. So the calls that load modules and look kernels up are followed too,
and launches while `launches` collects them. The arguments of a graph's nodes are read when the
graph is made executable: a library may destroy the graph then. Following does not call cuInit.

Sources: CUPTI, Callback API, CUpti_ModuleResourceData; CUDA Driver API, for the order of the
parameters of calls, which CUPTI hands out as a struct.
"""

from __future__ import annotations

import ctypes
import hashlib
import re
import threading
from collections import defaultdict
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from typing import Any, NamedTuple

from cuda.bindings import driver as D

from pytest_gpumem.devices.cuda.context import answer
from pytest_gpumem.devices.cuda.cupti import CALLBACKS, ApiCall, words
from pytest_gpumem.devices.protocol import NotCounted
from pytest_gpumem.records.what_ran import argument_text

_LOADS = (
    "cuModuleLoad",
    "cuModuleLoadData",
    "cuModuleLoadDataEx",
    "cuModuleLoadFatBinary",
    "cuLibraryLoadData",
    "cuLibraryLoadFromFile",
)
"""Their first parameter: address of the new handle of a module or library."""
_BY_NAME = ("cuModuleGetFunction", "cuLibraryGetKernel")
_LOOKS_UP = (*_BY_NAME, "cuKernelGetFunction", "cuLibraryGetModule")
"""Their parameters: address of the handle found, handle looked in; in `_BY_NAME` also the kernel's
name."""
_LAUNCHES = {
    "cuLaunchKernel": (0, 6),
    "cuLaunchKernelEx": (1, 2),
    "cuLaunchCooperativeKernel": (0, 6),
}
"""Words of their parameters, of 8 bytes: the function and `kernelParams`."""
_GRAPH_LAUNCH = "cuGraphLaunch"  # first parameter: executable graph
_GRAPHS_MADE = (
    "cuGraphInstantiate",
    "cuGraphInstantiate_v2",
    "cuGraphInstantiateWithFlags",
    "cuGraphInstantiateWithParams",
)
"""Their parameters: address of the new executable graph, graph."""
_GRAPHS_UPDATED = ("cuGraphExecUpdate", "cuGraphExecUpdate_v2")
"""Their parameters: executable graph, new graph."""
_GRAPHS_LOST = (
    "cuGraphExecDestroy",
    "cuGraphExecChildGraphNodeSetParams",
    "cuGraphExecNodeSetParams",
    "cuGraphExecKernelNodeSetParams",
    "cuGraphExecKernelNodeSetParams_v2",
)
"""After these the nodes of the executable graph are not known."""
_DEEPEST = 3  # a function of a kernel of a library, or of a module of a library
_KERNEL_NAMES = re.compile(rb"\.text\.([^\0]+)\0")  # in an image: each kernel has a section
_ATTRIBUTES = [
    D.CUpointer_attribute.CU_POINTER_ATTRIBUTE_MEMORY_TYPE,
    D.CUpointer_attribute.CU_POINTER_ATTRIBUTE_IS_MANAGED,
]
_MEMORY_TYPES = {1: "pinned", 2: "device", 3: "array", 4: "managed"}  # CUmemorytype


class Image(NamedTuple):
    """Of a module: the SHA-256 of all of it, and the names of its functions."""

    digest: str
    names: frozenset[bytes]


class LaunchedKernel(NamedTuple):
    name: str  # mangled
    function: int  # CUfunction or CUkernel
    arguments: tuple[str, ...] | None  # as `Step.arguments`; None where they are not known
    in_graph: bool = False


Launches = dict[int, list[LaunchedKernel] | None]
"""By CUPTI's number of the call: the kernels; None for a graph whose nodes are not known."""


class Modules:
    """The modules that were loaded while they were followed, and the handles of their kernels."""

    def __init__(self) -> None:
        self._forget()
        self._followed = False
        self._launches: Launches | None = None  # while they are collected
        self._calls: dict[int, list[list[Image]]] = defaultdict(list)
        """By thread, a stack: the images loaded by each followed call that has not returned."""

    def _forget(self, why: str = "") -> None:
        """Calls were missed: handles may stand for something else now."""
        self._missed = why
        self._images: list[Image] = []
        self._loaded: dict[int, list[Image]] = {}  # by the handle of a CUmodule or CUlibrary
        self._unplaced: list[Image] = []  # whose handle is not known
        self._holders: dict[int, int] = {}
        """By the handle of a function, kernel or library's module: what it was looked up in."""
        self._names: dict[int, set[bytes]] = {}  # looked up in each module or library
        self._kernels: set[int] = set()  # the handles that are a CUkernel
        self._graphs: dict[int, list[LaunchedKernel]] = {}  # kernels by executable graph

    @contextmanager
    def following(self) -> Iterator[None]:
        """Follow what is loaded inside the block. Raises `NotCounted`: as `Callbacks.add`."""
        if self._followed:
            yield
            return
        self._calls.clear()
        graph_calls = (*_GRAPHS_MADE, *_GRAPHS_UPDATED, *_GRAPHS_LOST)
        with ExitStack() as ends:
            for domain, names, receive, begins in (
                ("RESOURCE", ("MODULE_LOADED",), self._module_loaded, True),
                ("DRIVER_API", (*_LOADS, *_LOOKS_UP), self._called, True),
                ("DRIVER_API", graph_calls, self._graph_changed, False),
            ):
                end = CALLBACKS.add(domain, names, receive, self._forget, begins=begins)
                ends.callback(end)
            self._followed = True
            try:
                yield
            finally:
                self._followed = False

    @contextmanager
    def launches(self) -> Iterator[Launches]:
        """Collect the launches of all threads inside the block. Raises `NotCounted`."""
        if self._launches is not None:
            yield self._launches
            return
        with self.following(), ExitStack() as ends:
            calls = (*_LAUNCHES, _GRAPH_LAUNCH)
            ends.callback(CALLBACKS.add("DRIVER_API", calls, self._called, self._forget))
            self._launches = {}
            try:
                yield self._launches
            finally:
                self._launches = None

    @contextmanager
    def loading(self) -> Iterator[None]:
        """Follow launches too inside the block, where modules are followed: a library's module is
        loaded by the first launch of one of its kernels."""
        with ExitStack() as ends:
            if self._followed:
                with suppress(NotCounted):  # the pass that needs it says why
                    ends.enter_context(self.launches())
            yield

    def digest(self, kernel: LaunchedKernel) -> tuple[str | None, str]:
        """The SHA-256 of the image of a kernel's module, or None and the reason.

        Images that may hold it: 1. those loaded into its module; 2. else those of unknown handle
        that hold every name looked up there; 3. else, for a graph's kernel, all: its handle may be
        the driver's. Known if exactly one digest remains.
        """
        holder = self._holder(kernel.function)
        images = self._loaded.get(holder)
        if images is None:
            images = [image for image in self._unplaced if self._fits(image, holder)]
        if not images and kernel.in_graph:
            images = self._images
        name = kernel.name.encode()
        digests = {image.digest for image in images if name in image.names}
        if len(digests) == 1:
            return digests.pop(), ""
        if digests:
            return None, f"{len(digests)} modules hold a kernel {kernel.name}"
        why = self._missed or "its module was loaded before the test"
        return None, f"the code of {kernel.name} is not read: {why}"

    def _holder(self, handle: int) -> int:
        for _ in range(_DEEPEST):
            handle = self._holders.get(handle, handle)
        return handle

    def _fits(self, image: Image, holder: int) -> bool:
        """True if an image holds all kernels that were looked up in a module or library."""
        return holder in self._names and self._names[holder] <= image.names

    # Callbacks, in the thread of the call

    def _module_loaded(self, _name: str, resource: ApiCall) -> None:
        # The third word of a CUpti_ResourceData is the address of a CUpti_ModuleResourceData:
        # number, bytes and address of the image.
        _, nbytes, address = words(words(ctypes.addressof(resource), 3)[2], 3)
        content = ctypes.string_at(address, nbytes) if address else b""
        digest = hashlib.sha256(content).hexdigest()
        image = Image(digest, frozenset(_KERNEL_NAMES.findall(content)))
        self._images.append(image)
        calls = self._calls[threading.get_ident()]
        if calls:
            calls[-1].append(image)
            return
        # Mostly a first launch loads it, and launches are not followed now.
        waiting = [holder for holder in self._names if holder not in self._loaded]
        fitting = [holder for holder in waiting if self._fits(image, holder)]
        if len(fitting) == 1:
            self._loaded[fitting[0]] = [image]
        else:
            self._unplaced.append(image)

    def _called(self, name: str, call: ApiCall) -> None:
        calls = self._calls[threading.get_ident()]
        if not call.site:  # the call begins
            calls.append([])
            return
        loaded = calls.pop() if calls else []
        if name in _LAUNCHES:
            # At its end: what it loaded is known, and the arguments still lie there.
            self._launched(name, call, loaded)
        elif call.failed:
            return
        elif name != _GRAPH_LAUNCH:
            self._handle_given(name, call.parameters, loaded)
        elif self._launches is not None:
            (executable,) = words(call.parameters, 1)
            self._launches[call.correlation] = self._graphs.get(executable)

    def _handle_given(self, call: str, parameters: int, loaded: list[Image]) -> None:
        place, holder = words(parameters, 2)
        if not place:
            return
        (handle,) = words(place, 1)
        # What had this handle before is gone.
        self._holders.pop(handle, None)
        self._loaded.pop(handle, None)
        self._kernels.discard(handle)
        if call in _LOADS:
            self._names.pop(handle, None)
            self._loaded_by(handle, loaded)
            return
        self._holders[handle] = holder
        if call == "cuLibraryGetKernel":
            self._kernels.add(handle)
        if call in _BY_NAME:
            name = ctypes.string_at(words(parameters, 3)[2])
            self._names.setdefault(self._holder(holder), set()).add(name)
        self._loaded_by(holder, loaded)

    def _loaded_by(self, handle: int, loaded: list[Image]) -> None:
        if loaded:
            self._loaded.setdefault(self._holder(handle), []).extend(loaded)

    def _launched(self, name: str, call: ApiCall, loaded: list[Image]) -> None:
        at_function, at_pointers = _LAUNCHES[name]
        given = words(call.parameters, at_pointers + 1)
        function, pointers = given[at_function], given[at_pointers]
        self._loaded_by(function, loaded)
        if self._launches is None or call.failed:
            return
        symbol, arguments = (call.symbol or b"").decode(errors="replace"), None
        if function in self._holders:  # else nobody knows what kind of handle it is
            arguments = _arguments(function, pointers, is_kernel=function in self._kernels)
        self._launches[call.correlation] = [LaunchedKernel(symbol, function, arguments)]

    def _graph_changed(self, name: str, call: ApiCall) -> None:
        (executable,) = words(call.parameters, 1)
        if name in _GRAPHS_MADE:
            (executable,) = words(executable, 1)
        self._graphs.pop(executable, None)
        if name not in _GRAPHS_LOST:
            graph = words(call.parameters, 2)[1]
            with suppress(NotCounted, RuntimeError):  # the kernels stay unknown
                self._graphs[executable] = list(_kernels_of(graph))


MODULES = Modules()


def _arguments(function: int, pointers: int, *, is_kernel: bool) -> tuple[str, ...] | None:
    """The arguments of a launch: `pointers` is its `kernelParams`, or 0 where they lie in `extra`,
    which is not read. `is_kernel`: `function` is a CUkernel."""
    layout = _parameters(function, is_kernel=is_kernel)
    if layout is None or (layout and not pointers):
        return None
    addresses = words(pointers, len(layout)) if layout else ()
    arguments = []
    for address, (offset, size) in zip(addresses, layout, strict=True):
        arguments.append(argument_text(ctypes.string_at(address, size), offset, _memory_at))
    return tuple(arguments)


def _parameters(function: int, *, is_kernel: bool) -> list[tuple[int, int]] | None:
    """Offset and bytes of each parameter of a kernel; None if the driver does not tell them."""
    if is_kernel:
        ask, handle = D.cuKernelGetParamInfo, D.CUkernel(function)
    else:
        ask, handle = D.cuFuncGetParamInfo, D.CUfunction(function)
    parameters: list[tuple[int, int]] = []
    while True:
        try:
            status, offset, size = ask(handle, len(parameters))
        except RuntimeError:  # a driver before CUDA 12.4 lacks the function
            return None
        if status == D.CUresult.CUDA_ERROR_INVALID_VALUE:  # there are no more
            return parameters
        if status != D.CUresult.CUDA_SUCCESS:
            return None
        parameters.append((int(offset), int(size)))


def _memory_at(address: int) -> str | None:
    """The kind of CUDA's memory at an address or before it, as an end; None for no memory."""
    for place in (address, address - 1):
        status, values = D.cuPointerGetAttributes(len(_ATTRIBUTES), _ATTRIBUTES, place)
        if status == D.CUresult.CUDA_SUCCESS and int(values[0]):
            return "managed" if values[1] else _MEMORY_TYPES.get(int(values[0]), "unknown")
    return None


def _kernels_of(graph: Any) -> Iterator[LaunchedKernel]:
    """The kernels of a graph and of its child graphs. Raises `NotCounted`, or `RuntimeError` where
    the driver lacks a function."""
    _, count = answer(D.cuGraphGetNodes(graph))
    nodes, _ = answer(D.cuGraphGetNodes(graph, count))
    for node in (nodes or ())[:count]:
        kind = answer(D.cuGraphNodeGetType(node))
        if kind == D.CUgraphNodeType.CU_GRAPH_NODE_TYPE_GRAPH:
            yield from _kernels_of(answer(D.cuGraphChildGraphNodeGetGraph(node)))
        elif kind == D.CUgraphNodeType.CU_GRAPH_NODE_TYPE_KERNEL:
            given = answer(D.cuGraphKernelNodeGetParams(node))
            kernel, function = int(given.kern), int(given.func)
            name = answer(D.cuKernelGetName(given.kern) if kernel else D.cuFuncGetName(given.func))
            handle = kernel or function
            arguments = _arguments(handle, int(given.kernelParams), is_kernel=kernel != 0)
            yield LaunchedKernel(name.decode(), handle, arguments, in_graph=True)
