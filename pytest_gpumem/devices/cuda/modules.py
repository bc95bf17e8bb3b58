"""The modules and the arguments of the kernels that this process launches, from CUPTI's callbacks,
through `cupti-python` (the extra `cupti13`).

CUPTI hands out the image of each module when it is loaded, but not its handle. A kernel's name
alone does not tell its module: two modules may hold the same name. So the calls that load modules
and look kernels up are followed too, and launches while `launches` collects them. Modules are
followed in tests with fixtures of the plugin and in its passes; what was loaded elsewhere is not
known. Following does not call cuInit.
Sources: CUPTI, Callback API, CUpti_CallbackData and CUpti_ModuleResourceData; CUDA Driver API,
Module and Library Management, for the order of the parameters, which CUPTI hands out as a struct.
"""

from __future__ import annotations

import ctypes
import hashlib
import re
import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import NamedTuple

from pytest_gpumem.devices.cuda.cupti import CALLBACKS, ApiCall, words
from pytest_gpumem.devices.cuda.graph_nodes import CALLS as GRAPH_CALLS
from pytest_gpumem.devices.cuda.graph_nodes import GraphNodes, Kernel, read_kernel

_LOADS = (
    "cuModuleLoad",
    "cuModuleLoadData",
    "cuModuleLoadDataEx",
    "cuModuleLoadFatBinary",
    "cuLibraryLoadData",
    "cuLibraryLoadFromFile",
)
"""Calls whose first parameter is the address of the new handle of a module or library."""
_BY_NAME = ("cuModuleGetFunction", "cuLibraryGetKernel")
_LOOKS_UP = (*_BY_NAME, "cuKernelGetFunction", "cuLibraryGetModule")
"""Calls whose first parameter is the address of a handle, and whose second the handle of what holds
it. The third parameter of those in `_BY_NAME` is the name of a kernel."""
_GRAPH_LAUNCHES = ("cuGraphLaunch", "cuGraphLaunch_ptsz")
"""Calls whose first parameter is an executable graph."""
_LAUNCHES = {
    "cuLaunchKernel": (0, 6),
    "cuLaunchKernel_ptsz": (0, 6),
    "cuLaunchKernelEx": (1, 2),
    "cuLaunchKernelEx_ptsz": (1, 2),
    "cuLaunchCooperativeKernel": (0, 6),
    "cuLaunchCooperativeKernel_ptsz": (0, 6),
}
"""Calls that launch a kernel, with the words of their parameters that hold the function and
`kernelParams`."""
_DEEPEST = 3  # a function of a kernel of a library, or of a module of a library
_DESCRIPTOR = 2  # word of a CUpti_ResourceData with the address of what it describes
_KERNEL_NAMES = re.compile(rb"\.text\.([^\0]+)\0")  # in an image: each kernel has a section


class _ModuleData(ctypes.Structure):
    """A CUpti_ModuleResourceData."""

    _fields_ = (
        ("number", ctypes.c_uint32),
        ("nbytes", ctypes.c_size_t),
        ("image", ctypes.c_size_t),
    )


class Image(NamedTuple):
    """What is kept of a module."""

    digest: str  # SHA-256 of the whole image
    names: frozenset[bytes]  # of its functions


class Launch(NamedTuple):
    """A call that launches."""

    correlation: int  # CUPTI's number of the call
    kernels: list[Kernel] | None  # None for a graph whose nodes are not known
    graph: bool = False


class UnknownModule(Exception):
    """The module of a kernel is not known; one line with the reason."""


class Modules:
    """The modules that were loaded while they were followed, and the handles of their kernels.
    A handle that the driver uses again belongs to what it was given to last."""

    def __init__(self) -> None:
        self._forget()
        self._followed = False
        self._launches: list[Launch] | None = None  # while they are collected
        self._local = threading.local()

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
        self._graphs = GraphNodes()

    @contextmanager
    def following(self) -> Iterator[None]:
        """Follow what is loaded inside the block. Raises `NotCounted`: as `Callbacks.add`."""
        if self._followed:
            yield
            return
        self._local = threading.local()
        with ExitStack() as ends:
            for domain, names, receive in (
                ("RESOURCE", ("MODULE_LOADED",), self._module_loaded),
                ("DRIVER_API", (*_LOADS, *_LOOKS_UP), self._called),
                ("DRIVER_API", GRAPH_CALLS, self._graph_changed),
            ):
                ends.callback(CALLBACKS.add(domain, names, receive, self._forget))
            self._followed = True
            try:
                yield
            finally:
                self._followed = False

    @contextmanager
    def launches(self) -> Iterator[list[Launch]]:
        """Collect the launches of all threads inside the block. Raises `NotCounted`."""
        if self._launches is not None:
            yield self._launches
            return
        with self.following(), ExitStack() as ends:
            calls = (*_LAUNCHES, *_GRAPH_LAUNCHES)
            ends.callback(CALLBACKS.add("DRIVER_API", calls, self._called, self._forget))
            self._launches = []
            try:
                yield self._launches
            finally:
                self._launches = None

    def loading(self) -> AbstractContextManager[object]:
        """Follow launches too inside the block, where modules are followed: a library's module is
        loaded by the first launch of one of its kernels."""
        return self.launches() if self._followed else nullcontext()

    def digest(self, kernel: Kernel, *, in_graph: bool) -> str:
        """Return the SHA-256 of the image of a kernel's module. A kernel of a graph, whose handle
        may be the driver's, may be found by its name.
        Raises `UnknownModule`: it was loaded where nobody followed, or several may be meant.
        """
        holder = self._holder(kernel.function)
        images = self._loaded.get(holder)
        if images is None:
            images = [image for image in self._unplaced if self._fits(image, holder)]
        if not images and in_graph:
            images = self._images
        name = kernel.name.encode()
        digests = {image.digest for image in images if name in image.names}
        if len(digests) == 1:
            return digests.pop()
        if digests:
            raise UnknownModule(f"{len(digests)} modules hold a kernel {kernel.name}")
        why = self._missed or "its module was loaded before the test"
        raise UnknownModule(f"the code of {kernel.name} is not read: {why}")

    def _holder(self, handle: int) -> int:
        """The module or library of a handle, as far as it is known."""
        for _ in range(_DEEPEST):
            handle = self._holders.get(handle, handle)
        return handle

    def _fits(self, image: Image, holder: int) -> bool:
        """True if an image holds all kernels that were looked up in a module or library."""
        return holder in self._names and self._names[holder] <= image.names

    # Callbacks, in the thread of the call

    @property
    def _calls(self) -> list[list[Image]]:
        """For each followed call that this thread is in, the images that it loaded."""
        if not hasattr(self._local, "calls"):
            self._local.calls = []
        return self._local.calls  # type: ignore[no-any-return]

    def _module_loaded(self, _name: str, address: int) -> None:
        data = _ModuleData.from_address(words(address, _DESCRIPTOR + 1)[_DESCRIPTOR])
        content = ctypes.string_at(data.image, data.nbytes) if data.image else b""
        digest = hashlib.sha256(content).hexdigest()
        image = Image(digest, frozenset(_KERNEL_NAMES.findall(content)))
        self._images.append(image)
        if self._calls:
            self._calls[-1].append(image)
            return
        # Mostly by the first launch of a kernel, and launches are not followed now.
        waiting = [holder for holder in self._names if holder not in self._loaded]
        fitting = [holder for holder in waiting if self._fits(image, holder)]
        if len(fitting) == 1:
            self._loaded[fitting[0]] = [image]
        else:
            self._unplaced.append(image)

    def _called(self, name: str, address: int) -> None:
        call = ApiCall.from_address(address)
        if not call.site:
            self._calls.append([])
            return
        loaded = self._calls.pop() if self._calls else []
        if name in _LAUNCHES:
            # At its end: what it loaded is known, and the arguments still lie there.
            self._launched(name, call, loaded)
        elif name in _GRAPH_LAUNCHES:
            self._graph_launched(call)
        elif not call.failed:
            self._handle_given(name, call.parameters, loaded)

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
        """Note the images that a call loaded by the module or library that it was about."""
        if loaded:
            self._loaded.setdefault(self._holder(handle), []).extend(loaded)

    def _launched(self, name: str, call: ApiCall, loaded: list[Image]) -> None:
        at_function, at_pointers = _LAUNCHES[name]
        given = words(call.parameters, at_pointers + 1)
        function, pointers = given[at_function], given[at_pointers]
        self._loaded_by(function, loaded)
        if self._launches is None or call.failed:
            return
        symbol = (call.symbol or b"").decode(errors="replace")
        kernel = Kernel(symbol, function, None)
        if function in self._holders:  # else nobody knows what kind of handle it is
            kernel = read_kernel(symbol, function, pointers, is_kernel=function in self._kernels)
        self._launches.append(Launch(call.correlation, [kernel]))

    def _graph_launched(self, call: ApiCall) -> None:
        if self._launches is not None and not call.failed:
            (executable,) = words(call.parameters, 1)
            kernels = self._graphs.kernels(executable)
            self._launches.append(Launch(call.correlation, kernels, graph=True))

    def _graph_changed(self, name: str, address: int) -> None:
        call = ApiCall.from_address(address)
        if call.site and not call.failed:
            self._graphs.changed(name, call.parameters)


MODULES = Modules()  # the modules of this process
