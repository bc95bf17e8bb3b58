"""Which module a launched kernel is of, from a replay of CUPTI's callbacks: two modules may hold kernels of one name."""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from enum import IntEnum
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from pytest_gpumem.devices.cuda import modules
from pytest_gpumem.devices.cuda.modules import Modules, UnknownCode
from pytest_gpumem.kernels.cubin import NotInCubin

NAMES = (*modules._LOADS, *modules._LOOKS_UP, *modules._LAUNCHES)
Cbid = IntEnum("Cbid", NAMES)  # type: ignore[misc]
Resource = IntEnum("Resource", ["MODULE_LOADED", "MODULE_UNLOAD_STARTING"])
Site = IntEnum("Site", ["API_ENTER", "API_EXIT"], start=0)


class FakeCubin:
    """Text such as "scale=a triad=b" instead of a cubin: kernels with their digests."""

    def __init__(self, content: bytes) -> None:
        self._digests = dict(one.split("=") for one in content.decode().split())

    def kernel(self, name: str) -> Any:
        if name not in self._digests:
            raise NotInCubin(name)
        return SimpleNamespace(digest=self._digests[name])


class Process:
    """Plays the calls of a process. Handles are any numbers; pointers point to real memory."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._receivers: dict[str, Callable[[int, Any], None]] = {}
        self._kept: list[Any] = []
        self._modules = 0
        self._correlation = 0
        resource = SimpleNamespace(from_ptr=lambda address, readonly: SimpleNamespace(_data=self._described[address]))
        self._described: dict[int, dict[str, Any]] = {}
        fake = SimpleNamespace(driver_api_trace_cbid=Cbid, CallbackIdResource=Resource, ApiCallbackSite=Site, ModuleResourceData=resource)
        monkeypatch.setitem(sys.modules, "cupti", SimpleNamespace(cupti=fake))
        monkeypatch.setattr(modules, "CALLBACKS", self)
        monkeypatch.setattr(modules, "Cubin", FakeCubin)
        self.modules = Modules()

    def add(self, domain: str, names: tuple[str, ...], receive: Callable[[int, Any], None]) -> Callable[[], None]:
        """The interface of `Callbacks`."""
        keys = [f"{domain} {name}" for name in names]
        self._receivers |= dict.fromkeys(keys, receive)

        def remove() -> None:
            for key in keys:
                del self._receivers[key]

        return remove

    def loaded(self, content: str) -> int:
        """A module is loaded, inside or outside of a call."""
        self._modules += 1
        text = ctypes.create_string_buffer(content.encode())
        self._kept.append(text)
        described = {"module_id": self._modules, "cubin_size": len(content), "p_cubin": ctypes.addressof(text)}
        self._described[self._modules] = {name: np.array(value) for name, value in described.items()}
        self._receivers["RESOURCE MODULE_LOADED"](Resource.MODULE_LOADED, SimpleNamespace(resource_descriptor=self._modules))
        return self._modules

    def unloaded(self, module: int) -> None:
        self._receivers["RESOURCE MODULE_UNLOAD_STARTING"](Resource.MODULE_UNLOAD_STARTING, SimpleNamespace(resource_descriptor=module))

    @contextmanager
    def call(self, name: str, *parameters: int, out: int | None = None, text: str = "", result: int = 0) -> Iterator[None]:
        """A call of the driver; modules that it loads are loaded inside the block. `out` is what its first parameter points to."""
        receive = self._receivers.get(f"DRIVER_API {name}")
        pointer, code = ctypes.c_uint64(0), ctypes.c_int(result)
        named = ctypes.create_string_buffer(text.encode())
        given = [ctypes.addressof(pointer)] if out is not None else []
        words = (ctypes.c_uint64 * 4)(*(*given, *parameters, *([ctypes.addressof(named)] if text else [])))
        self._kept += [pointer, code, named, words]
        self._correlation += 1
        plain = {
            "function_params": ctypes.addressof(words),
            "function_return_value": ctypes.addressof(code),
            "correlation_id": self._correlation,
        }

        def told(site: Site) -> None:
            data = {key: np.array(value) for key, value in {**plain, "callback_site": int(site)}.items()}
            if receive is not None:
                receive(Cbid[name], SimpleNamespace(_data=data, symbol_name=text))

        told(Site.API_ENTER)
        yield
        pointer.value = out or 0
        told(Site.API_EXIT)

    def module(self, handle: int, content: str) -> int:
        with self.call("cuModuleLoadData", 99, out=handle):
            return self.loaded(content)

    def function(self, handle: int, module: int, name: str) -> None:
        with self.call("cuModuleGetFunction", module, out=handle, text=name):
            pass

    def library(self, handle: int) -> None:
        with self.call("cuLibraryLoadData", 99, out=handle):
            pass

    def kernel(self, handle: int, library: int, name: str) -> None:
        with self.call("cuLibraryGetKernel", library, out=handle, text=name):
            pass

    def code(self, name: str, function: int | None) -> str:
        assert self.modules.failed is None, repr(self.modules.failed)
        return self.modules.code(name, function)


@pytest.fixture
def process(monkeypatch: pytest.MonkeyPatch) -> Process:
    return Process(monkeypatch)


def test_two_modules_with_a_kernel_of_one_name(process: Process) -> None:
    for module, function, content in ((10, 11, "scale=a"), (20, 21, "scale=b")):
        process.module(module, content)
        process.function(function, module, "scale")
    assert (process.code("scale", 11), process.code("scale", 21)) == ("a", "b")


def test_libraries_that_are_loaded_by_a_launch_one_after_the_other(process: Process) -> None:
    for library, kernel, content in ((10, 11, "scale=a"), (20, 21, "scale=b other=c")):
        process.library(library)
        process.kernel(kernel, library, "scale")
        process.loaded(content)
    assert (process.code("scale", 11), process.code("scale", 21)) == ("a", "b")


def test_libraries_that_cannot_be_told_apart_are_ambiguous(process: Process) -> None:
    for library, kernel in ((10, 11), (20, 21)):
        process.library(library)
        process.kernel(kernel, library, "scale")
    process.loaded("scale=a")
    process.loaded("scale=b")
    for kernel in (11, 21):
        with pytest.raises(UnknownCode, match="ambiguous: 2 modules"):
            process.code("scale", kernel)


def test_launches_that_are_followed_place_the_library_that_they_load(process: Process) -> None:
    for library, kernel in ((10, 11), (20, 21)):
        process.library(library)
        process.kernel(kernel, library, "scale")
    with process.modules.launches() as launches:
        with process.call("cuLaunchKernel", 11, text="scale"):
            process.loaded("scale=a")
        with process.call("cuLaunchKernelEx", 5, 21, text="scale"):
            process.loaded("scale=b")
    assert [(one.name, one.function) for one in launches] == [("scale", 11), ("scale", 21)]
    assert (process.code("scale", 11), process.code("scale", 21)) == ("a", "b")
    with process.call("cuLaunchKernel", 11, text="scale"):
        pass  # followed no longer
    assert len(launches) == 2


def test_functions_of_a_librarys_kernel_and_module(process: Process) -> None:
    process.library(10)
    process.kernel(11, 10, "scale")
    with process.call("cuKernelGetFunction", 11, out=12):
        process.loaded("scale=a")
    with process.call("cuLibraryGetModule", 10, out=13):
        pass
    process.function(14, 13, "scale")
    assert {process.code("scale", handle) for handle in (11, 12, 14)} == {"a"}


def test_a_handle_that_is_used_again_belongs_to_the_new_module(process: Process) -> None:
    first = process.module(10, "scale=a")
    process.function(11, 10, "scale")
    process.unloaded(first)
    process.module(10, "scale=b")
    process.function(11, 10, "scale")
    assert process.code("scale", 11) == "b"
    assert process.code("scale", None) == "b"


def test_what_was_loaded_before_is_unknown(process: Process) -> None:
    process.module(10, "scale=a")
    with pytest.raises(UnknownCode, match="its module was loaded before the session watched"):
        process.code("scale", 77)
    with pytest.raises(UnknownCode, match="loaded before"):
        process.code("triad", None)


def test_a_kernel_of_a_graph_is_found_by_its_name(process: Process) -> None:
    process.module(10, "scale=a")
    process.module(20, "scale=a triad=t")
    assert (process.code("scale", None), process.code("triad", None)) == ("a", "t")
    process.module(30, "scale=b")
    with pytest.raises(UnknownCode, match="ambiguous"):
        process.code("scale", None)


def test_a_call_that_fails_gives_no_handle(process: Process) -> None:
    process.module(10, "scale=a")
    process.function(11, 10, "scale")
    with process.call("cuModuleGetFunction", 10, out=11, text="missing", result=500):
        pass
    assert process.code("scale", 11) == "a"


def test_a_callback_that_fails_leaves_no_code_known(process: Process) -> None:
    process.module(10, "scale=a")
    process.modules._receive(process.modules._call, 10_000, SimpleNamespace())
    with pytest.raises(UnknownCode, match="a callback of CUPTI failed"):
        process.modules.code("scale", None)


def test_a_first_launch_is_followed_only_where_modules_are(process: Process, monkeypatch: pytest.MonkeyPatch) -> None:
    with modules.loading():
        pass
    monkeypatch.setattr(modules, "_followed", process.modules)
    for library, kernel in ((10, 11), (20, 21)):
        process.library(library)
        process.kernel(kernel, library, "scale")
    with modules.loading(), process.call("cuLaunchKernelEx", 5, 11, text="scale"):
        process.loaded("scale=a")
    assert process.code("scale", 11) == "a"
    with pytest.raises(UnknownCode):
        process.code("scale", 21)
