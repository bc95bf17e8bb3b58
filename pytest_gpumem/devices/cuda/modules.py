"""The machine code and the arguments of the kernels that this process launches, from CUPTI's callbacks, through `cupti-python` (the extra
`cupti13`).

CUPTI hands out the cubin of each module when it is loaded. A kernel's name alone does not tell its module: two modules may hold the same
name. So the calls that load modules and look kernels up are followed too, and launches while `launches` collects them. Such calls are rare,
and launches outside of `launches` have no callback.

Following does not call cuInit, and takes some 14 ms on an H100 beside the import of CUPTI.
Sources: CUPTI, Callback API, CUpti_CallbackData and CUpti_ModuleResourceData; CUDA Driver API, Module and Library Management, for the order
of the parameters, which CUPTI hands out as a struct.
"""

from __future__ import annotations

import atexit
import ctypes
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any, NamedTuple

from pytest_gpumem.devices.cuda import graph_nodes
from pytest_gpumem.devices.cuda.arguments import block_of, live_memory
from pytest_gpumem.devices.cuda.cupti import CALLBACKS, ApiCall, imported, words
from pytest_gpumem.devices.cuda.graph_nodes import GraphNodes, NodeKernel
from pytest_gpumem.devices.protocol import NotCounted
from pytest_gpumem.kernels.cubin import Cubin, MachineCode, NotACubin, NotInCubin
from pytest_gpumem.records.arguments import Addresses, texts

_LOADS = (
    *("cuModuleLoad", "cuModuleLoadData", "cuModuleLoadDataEx", "cuModuleLoadFatBinary"),
    *("cuLibraryLoadData", "cuLibraryLoadFromFile"),
)
"""Calls whose first parameter is the address of the new handle of a module or library."""
_LOOKS_UP = (
    "cuModuleGetFunction",
    "cuLibraryGetKernel",
    "cuKernelGetFunction",
    "cuLibraryGetModule",
)
"""Calls whose first parameter is the address of a handle, and whose second the handle of what holds it."""
_BY_NAME = (
    "cuModuleGetFunction",
    "cuLibraryGetKernel",
)  # those whose third parameter is the name of a kernel
_LAUNCHES = {
    f"{name}{suffix}": places
    for name, places in {
        "cuLaunchKernel": (0, 6, 7),
        "cuLaunchKernelEx": (1, 2, 3),
        "cuLaunchCooperativeKernel": (0, 6, None),
    }.items()
    for suffix in ("", "_ptsz")
}
"""Calls that launch a kernel, with the words of their parameters that hold the function, `kernelParams` and `extra`."""


_GRAPH_LAUNCHES = (
    "cuGraphLaunch",
    "cuGraphLaunch_ptsz",
)  # calls whose first parameter is an executable graph


class _ModuleData(ctypes.Structure):
    """A CUpti_ModuleResourceData."""

    _fields_ = (
        ("number", ctypes.c_uint32),
        ("nbytes", ctypes.c_size_t),
        ("cubin", ctypes.c_size_t),
    )


_DESCRIPTOR = 2  # word of a CUpti_ResourceData with the address of what it describes


class LaunchFunction(NamedTuple):
    """One call that launches a kernel."""

    correlation: int  # CUPTI's number of the call
    name: str  # mangled name of the kernel
    function: int  # CUfunction or CUkernel
    arguments: tuple[str, ...] | None = None  # As `Step.arguments`; None where they are not known


class UnknownCode(Exception):
    """The machine code of a kernel is not known; one line with the reason."""


class Launches:
    """Calls that launch, in their order."""

    def __init__(self) -> None:
        self.kernels: list[LaunchFunction] = []
        self.graphs: list[
            Sequence[NodeKernel] | None
        ] = []  # the kernels of each graph; None where they are not known
        self.addresses = Addresses(live_memory)


class Modules:
    """The modules that were loaded since it was made, and the handles through which their kernels are launched. A handle that the driver
    uses again belongs to what it was given to last."""

    def __init__(self) -> None:
        """Raises `NotCounted` as `Callbacks.add`."""
        self._cubins: dict[int, Cubin | bytes] = {}
        """By CUPTI's number of the module; parsed when it is first asked for."""
        self._known: dict[
            int, dict[str, MachineCode | None]
        ] = {}  # by number of the module and name: the answers, which take time
        self._holder: dict[int, int] = {}
        """By the handle of a function, kernel or library's module: the handle that it was looked up in."""
        self._loaded: dict[int, list[int]] = {}  # modules by the handle of a CUmodule or CUlibrary
        self._unplaced: list[int] = []  # modules whose handle is unknown
        self._names: dict[
            int, set[str]
        ] = {}  # names of the kernels that were looked up in each module or library
        self._local = threading.local()
        self._collecting: Launches | None = None
        # what went wrong in a callback: from then on no code is known
        self.failed: Exception | None = None
        self._ends = [
            CALLBACKS.add(
                "RESOURCE",
                ("MODULE_LOADED", "MODULE_UNLOAD_STARTING"),
                partial(self._receive, self._module),
            )
        ]
        self._ends.append(
            CALLBACKS.add("DRIVER_API", (*_LOADS, *_LOOKS_UP), partial(self._receive, self._call))
        )
        self._graphs = GraphNodes(self.parameters)
        self._ends.append(
            CALLBACKS.add(
                "DRIVER_API",
                graph_nodes.CALLS,
                partial(self._receive, self._graph),
                self._graphs.forget,
            )
        )
        self._cupti: Any = imported()

    @contextmanager
    def launches(self) -> Iterator[Launches]:
        """Collect the launches of all threads inside the block."""
        found = self._collecting = Launches()
        end = CALLBACKS.add(
            "DRIVER_API", (*_LAUNCHES, *_GRAPH_LAUNCHES), partial(self._receive, self._call)
        )
        try:
            yield found
        finally:
            end()
            self._collecting = None

    def code(self, name: str, function: int | None) -> str:
        """The digest of a kernel's machine code.
        `name`: mangled name of the kernel.
        `function`: CUfunction or CUkernel of the launch; None for a kernel of a graph, which is found by its name.
        Raises `UnknownCode`: its module was loaded earlier than it was followed, or several modules may be meant whose code differs.
        """
        if self.failed is not None:
            raise UnknownCode(f"a callback of CUPTI failed: {self.failed}")
        digests = {code.digest for code in self._codes(name, function)}
        if not digests:
            raise UnknownCode(
                f"the machine code of {name} is not known: its module was loaded before the session watched"
            )
        if len(digests) > 1:
            raise UnknownCode(
                f"the machine code of {name} is ambiguous: {len(digests)} modules hold different kernels of that name"
            )
        return digests.pop()

    def parameters(self, name: str, function: int | None) -> tuple[tuple[int, int], ...] | None:
        """As `MachineCode.parameters`, of a kernel as for `code`; None also where several modules may be meant whose parameters differ."""
        found = {code.parameters for code in self._codes(name, function)}
        return found.pop() if len(found) == 1 else None

    def _codes(self, name: str, function: int | None) -> list[MachineCode]:
        modules = list(self._cubins) if function is None else self._modules_of(function)
        return [code for module in modules if (code := self._code(module, name)) is not None]

    def close(self) -> None:
        """Follow no longer."""
        for end in self._ends:
            end()

    def _modules_of(self, function: int) -> list[int]:
        holder = function
        while holder not in self._loaded and holder in self._holder:
            holder = self._holder[holder]
        if holder in self._loaded:
            return self._loaded[holder]
        return [one for one in self._unplaced if holder in self._names and self._fits(one, holder)]

    def _fits(self, module: int, handle: int) -> bool:
        """True if a module holds all kernels that were looked up by a handle."""
        return all(self._code(module, name) is not None for name in self._names[handle])

    def _code(self, module: int, name: str) -> MachineCode | None:
        known = self._known.setdefault(module, {})
        if name not in known:
            known[name] = self._read(module, name)
        return known[name]

    def _read(self, module: int, name: str) -> MachineCode | None:
        found = self._cubins.get(module)
        if found is None:
            return None
        try:
            if isinstance(found, bytes):
                found = self._cubins[module] = Cubin(found)
            return found.kernel(name)
        except (NotACubin, NotInCubin):
            return None

    # Callbacks, in the thread of the call

    def _receive(self, receive: Callable[[int, int], None], number: int, address: int) -> None:
        try:
            receive(number, address)
        except Exception as error:  # which would be lost
            self.failed = error

    def _module(self, number: int, address: int) -> None:
        found = _ModuleData.from_address(words(address, _DESCRIPTOR + 1)[_DESCRIPTOR])
        module = found.number
        if number != int(self._cupti.CallbackIdResource.MODULE_LOADED):
            self._cubins.pop(module, None)
            self._known.pop(module, None)
            return
        # CUPTI does not say how long the memory stays valid.
        self._cubins[module] = ctypes.string_at(found.cubin, found.nbytes) if found.cubin else b""
        if self._calls:
            self._calls[-1].append(module)
            return
        # A library is loaded at the first launch of one of its kernels, and launches are not followed now.
        fitting = [
            handle
            for handle in self._names
            if handle not in self._loaded and self._fits(module, handle)
        ]
        if len(fitting) == 1:
            self._loaded[fitting[0]] = [module]
        else:
            self._unplaced.append(module)

    @property
    def _calls(self) -> list[list[int]]:
        """For each followed call that this thread is in, the modules that it loaded."""
        if not hasattr(self._local, "calls"):
            self._local.calls = []
        return self._local.calls  # type: ignore[no-any-return]

    def _call(self, number: int, data: int) -> None:
        name, call = self._cupti.driver_api_trace_cbid(number).name, ApiCall.from_address(data)
        if not call.site:
            self._calls.append([])
            return
        loaded = self._calls.pop() if self._calls else []
        address, failed = call.parameters, call.failed
        if (places := _LAUNCHES.get(name)) is not None:
            # At the end of the call: the module that it loaded tells how the arguments lie, and they still lie there.
            self._launched(
                places,
                address,
                call.correlation,
                (call.symbol or b"").decode(errors="replace"),
                loaded,
                failed=failed,
            )
            return
        first, second, *others = words(address, 3 if name in _BY_NAME else 2)
        if name in _GRAPH_LAUNCHES:
            if self._collecting is not None and not failed:
                self._collecting.graphs.append(self._graphs.kernels(first))
            return
        if not first or failed:
            return  # it gave no handle
        (handle,) = words(first, 1)
        # What had this handle before is gone.
        self._holder.pop(handle, None)
        self._loaded.pop(handle, None)
        if name in _LOADS:
            self._names.pop(handle, None)
            self._place(handle, loaded)
            return
        self._holder[handle] = second
        if name in _BY_NAME:
            self._names.setdefault(second, set()).add(
                ctypes.string_at(others[0]).decode(errors="replace")
            )
        self._place(second, loaded)

    def _graph(self, number: int, data: int) -> None:
        name, call = self._cupti.driver_api_trace_cbid(number).name, ApiCall.from_address(data)
        if not call.site:
            self._graphs.begins(name, call.parameters)
        elif not call.failed:
            self._graphs.ended(name, call.parameters)

    def _launched(
        self,
        places: tuple[int, int, int | None],
        address: int,
        number: int,
        name: str,
        loaded: list[int],
        *,
        failed: bool,
    ) -> None:
        """A call has launched a kernel. `places`: as in `_LAUNCHES`; `address`: of the call's parameters."""
        given = words(address, max(place for place in places if place is not None) + 1)
        function, parameters, extra = (0 if place is None else given[place] for place in places)
        self._place(function, loaded)
        if self._collecting is None or failed:
            return
        layout = self.parameters(name, function)
        block = None if layout is None else block_of(layout, parameters, extra)
        found = (
            None
            if block is None or layout is None
            else texts(block, layout, self._collecting.addresses.token)
        )
        self._collecting.kernels.append(LaunchFunction(number, name, function, found))

    def _place(self, handle: int, loaded: list[int]) -> None:
        """Note modules that a call loaded, by the module or library of the handle that the call was about."""
        while handle in self._holder:
            handle = self._holder[handle]
        if loaded:
            self._loaded.setdefault(handle, []).extend(loaded)


_followed: Modules | NotCounted | None = None


def loading() -> AbstractContextManager[object]:
    """Follow launches inside the block too, if modules are followed: a library is loaded by the first launch of one of its kernels."""
    return _followed.launches() if isinstance(_followed, Modules) else nullcontext()


def follow() -> Modules:
    """Follow the modules of this process from now on; a second call gives what the first one gave.
    Raises `NotCounted`: cupti-python is missing, or another tool is subscribed.
    """
    global _followed
    if _followed is None:
        try:
            _followed = Modules()
            atexit.register(_followed.close)  # a callback after Python's end would crash
        except NotCounted as reason:
            _followed = reason
    if isinstance(_followed, NotCounted):
        raise _followed
    return _followed
