"""Which module a launched kernel is of, from a replay of CUPTI's callbacks: two modules may hold kernels of one name."""

from __future__ import annotations

import ctypes
import struct
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from enum import IntEnum
from types import SimpleNamespace
from typing import Any

import pytest

driver = pytest.importorskip(
    "cuda.bindings.driver", reason="cuda-bindings has no wheel for this machine"
)

from pytest_gpumem.devices.cuda import graph_nodes, modules  # noqa: E402
from pytest_gpumem.devices.cuda.cupti import ApiCall, Receive  # noqa: E402
from pytest_gpumem.devices.cuda.modules import Modules, UnknownCode  # noqa: E402
from pytest_gpumem.kernels.cubin import NotInCubin  # noqa: E402
from pytest_gpumem.records.arguments import Interval  # noqa: E402

NAMES = (
    *modules._LOADS,
    *modules._LOOKS_UP,
    *modules._LAUNCHES,
    *modules._GRAPH_LAUNCHES,
    *graph_nodes.CALLS,
)
Cbid = IntEnum("Cbid", NAMES)  # type: ignore[misc]
Resource = IntEnum("Resource", ["MODULE_LOADED", "MODULE_UNLOAD_STARTING"])


PARAMETERS = (
    (0, 8),
    (8, 4),
    (16, 16),
)  # of every kernel: an address, an int, and a struct of an address and an int
LIVE = Interval(0x7F00_0000_0000, 0x7F00_0001_0000)


class FakeCubin:
    """Text such as "scale=a triad=b" instead of a cubin: kernels with their digests."""

    def __init__(self, content: bytes) -> None:
        self._digests = dict(one.split("=") for one in content.decode().split())

    def kernel(self, name: str) -> Any:
        if name not in self._digests:
            raise NotInCubin(name)
        return SimpleNamespace(digest=self._digests[name], parameters=PARAMETERS)


class Process:
    """Plays the calls of a process. Handles are any numbers; pointers point to real memory."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._receivers: dict[str, Receive] = {}
        self._kept: list[Any] = []
        self._modules = 0
        self.lost: Callable[[str], None] | None = None
        self._correlation = 0
        fake = SimpleNamespace(driver_api_trace_cbid=Cbid, CallbackIdResource=Resource)
        monkeypatch.setitem(sys.modules, "cupti", SimpleNamespace(cupti=fake))
        monkeypatch.setattr(modules, "CALLBACKS", self)
        monkeypatch.setattr(modules, "Cubin", FakeCubin)
        for one in (modules, graph_nodes):
            monkeypatch.setattr(
                one,
                "live_memory",
                lambda address: LIVE if LIVE.begin <= address < LIVE.end else None,
            )
        self.modules = Modules()

    def add(
        self,
        domain: str,
        names: tuple[str, ...],
        receive: Receive,
        lost: Callable[[str], None] | None = None,
    ) -> Callable[[], None]:
        """The interface of `Callbacks`."""
        self.lost = lost or self.lost
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
        self._resource("MODULE_LOADED", self._modules, len(content), ctypes.addressof(text))
        return self._modules

    def unloaded(self, module: int) -> None:
        self._resource("MODULE_UNLOAD_STARTING", module, 0, 0)

    def _resource(self, name: str, *described: int) -> None:
        """A callback with a CUpti_ResourceData, whose descriptor is a CUpti_ModuleResourceData."""
        descriptor = ctypes.create_string_buffer(struct.pack("<I4xQQ", *described))
        data = ctypes.create_string_buffer(struct.pack("<QQQ", 1, 2, ctypes.addressof(descriptor)))
        self._receivers[f"RESOURCE {name}"](Resource[name], ctypes.addressof(data))

    @contextmanager
    def call(
        self, name: str, *parameters: int, out: int | None = None, text: str = "", result: int = 0
    ) -> Iterator[None]:
        """A call of the driver; modules that it loads are loaded inside the block. `out` is what its first parameter points to."""
        receive = self._receivers.get(f"DRIVER_API {name}")
        pointer, code = ctypes.c_uint64(0), ctypes.c_int(result)
        named = ctypes.create_string_buffer(text.encode())
        given = [ctypes.addressof(pointer)] if out is not None else []
        words = (ctypes.c_uint64 * 8)(
            *(
                *given,
                *parameters,
                *([ctypes.addressof(named)] if text and "Launch" not in name else []),
            )
        )
        self._kept += [pointer, code, named, words]
        self._correlation += 1
        given_back = ctypes.addressof(code)
        data = ApiCall(
            0,
            None,
            ctypes.addressof(words),
            given_back,
            text.encode(),
            correlation=self._correlation,
        )
        if receive is not None:
            receive(Cbid[name], ctypes.addressof(data))
        yield
        pointer.value, data.site = out or 0, 1
        if receive is not None:
            receive(Cbid[name], ctypes.addressof(data))

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

    def given(self, *values: int) -> int:
        """The address of `kernelParams`: addresses of the arguments of `PARAMETERS`."""
        memory = [
            ctypes.create_string_buffer(struct.pack(layout, *values[at:end]))
            for layout, at, end in (("<Q", 0, 1), ("<i", 1, 2))
        ]
        memory.append(ctypes.create_string_buffer(struct.pack("<Qi", *values[2:]) + b"\0" * 4))
        pointers = (ctypes.c_uint64 * 3)(*map(ctypes.addressof, memory))
        self._kept += [*memory, pointers]
        return ctypes.addressof(pointers)

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
    assert [(one.name, one.function) for one in launches.kernels] == [("scale", 11), ("scale", 21)]
    assert (process.code("scale", 11), process.code("scale", 21)) == ("a", "b")
    with process.call("cuLaunchKernel", 11, text="scale"):
        pass  # followed no longer
    assert len(launches.kernels) == 2


@pytest.mark.parametrize(
    ("call", "before"),
    [
        ("cuLaunchKernel", (11, *[0] * 5)),
        ("cuLaunchKernelEx_ptsz", (5, 11)),
        ("cuLaunchCooperativeKernel", (11, *[0] * 5)),
    ],
)
def test_arguments_are_read_once_the_call_has_loaded_the_module(
    process: Process, call: str, before: tuple[int, ...]
) -> None:
    process.library(10)
    process.kernel(11, 10, "scale")
    with process.modules.launches() as launches:
        with process.call(
            call, *before, process.given(LIVE.begin + 256, -1, LIVE.begin + 4, 3), text="scale"
        ):
            process.loaded("scale=a")
        with process.call(call, *before, 0, text="scale"):
            pass
        with process.call(call, *before, process.given(1, 2, 3, 4), text="scale", result=1):
            pass
    assert process.modules.failed is None
    assert [one.arguments for one in launches.kernels] == [("p256", "ffffffff", "p4 3"), None]


def test_arguments_in_one_buffer(process: Process) -> None:
    process.module(10, "scale=a")
    process.function(11, 10, "scale")
    block = struct.pack("<Qi4sQi4x", LIVE.begin, 7, b"junk", 2**40, 9)
    buffer, size = ctypes.create_string_buffer(block, len(block)), ctypes.c_uint64(len(block))
    extra = (ctypes.c_uint64 * 5)(1, ctypes.addressof(buffer), 2, ctypes.addressof(size), 0)
    with (
        process.modules.launches() as launches,
        process.call("cuLaunchKernel", 11, *[0] * 6, ctypes.addressof(extra), text="scale"),
    ):
        pass
    with process.modules.launches() as short:
        size.value = 16
        with process.call("cuLaunchKernel", 11, *[0] * 6, ctypes.addressof(extra), text="scale"):
            pass
    assert [one.arguments for one in (*launches.kernels, *short.kernels)] == [
        ("p256", "7", f"{2**40:x} 9"),
        None,
    ]


class Graph:
    """The driver's answers about one graph of kernels named "scale"; `arguments` are those of its nodes."""

    CUgraphNodeType = driver.CUgraphNodeType

    def __init__(self, process: Process, handle: int, *arguments: int) -> None:
        self.process, self.handle, self.alive = process, handle, True
        self.arguments = dict(enumerate(arguments, 100))

    def cuGraphGetNodes(self, graph: int, count: int = 0) -> Any:  # noqa: N802
        assert (graph, self.alive) == (self.handle, True)
        return 0, list(self.arguments)[:count], len(self.arguments)

    def cuGraphNodeGetType(self, node: int) -> Any:  # noqa: N802
        return 0, driver.CUgraphNodeType.CU_GRAPH_NODE_TYPE_KERNEL

    def cuGraphKernelNodeGetParams(self, node: int) -> Any:  # noqa: N802
        given = self.process.given(LIVE.begin, self.arguments[node], 0, 0)
        return 0, SimpleNamespace(func=11, kern=0, kernelParams=given, extra=0)

    def cuFuncGetName(self, function: int) -> Any:  # noqa: N802
        return 0, b"scale"


def launched(process: Process, executable: int) -> Any:
    with process.modules.launches() as launches, process.call("cuGraphLaunch", executable, 0):
        pass
    assert process.modules.failed is None
    (found,) = launches.graphs
    return None if found is None else [(kernel.arguments or ("",))[-2] for kernel in found]


def test_the_nodes_of_a_graph_as_it_was_made_executable(
    process: Process, monkeypatch: pytest.MonkeyPatch
) -> None:
    process.module(10, "scale=a")
    process.function(11, 10, "scale")
    graph = Graph(process, 70, 5, 6)
    monkeypatch.setattr(graph_nodes, "D", graph)
    with process.call("cuGraphInstantiateWithFlags", 70, 0, out=80):
        pass
    assert launched(process, 80) == ["5", "6"]
    with process.call("cuGraphInstantiate_v2", 70, 0, 0, 0, out=81):
        pass
    with process.call("cuGraphKernelNodeSetParams_v2", 100, 0):
        graph.arguments[100] = 9  # of the template alone
    assert launched(process, 81) == ["5", "6"]
    words = (ctypes.c_uint64 * 8)(11, 0, 0, 0, 0, process.given(LIVE.begin, 17, 0, 0), 0, 0)
    with process.call("cuGraphExecKernelNodeSetParams_v2", 81, 101, ctypes.addressof(words)):
        pass
    assert (launched(process, 81), launched(process, 80)) == (["5", "11"], ["5", "6"])
    with process.call("cuGraphExecUpdate_v2", 81, 70, 0):
        pass
    with process.call("cuGraphDestroy", 70):
        pass
    graph.alive = False
    assert launched(process, 81) == ["9", "6"]
    assert process.lost is not None
    process.lost("a profiler has CUPTI")
    assert launched(process, 80) is None
    with process.call("cuGraphExecDestroy", 81):
        pass
    assert launched(process, 81) is None


def test_a_driver_that_does_not_tell_the_nodes(
    process: Process, monkeypatch: pytest.MonkeyPatch
) -> None:
    graph = Graph(process, 70, 5)
    monkeypatch.setattr(
        graph_nodes, "known", lambda answer: (_ for _ in ()).throw(RuntimeError("too old"))
    )
    monkeypatch.setattr(graph_nodes, "D", graph)
    with process.call("cuGraphInstantiateWithFlags", 70, 0, out=80):
        pass
    assert launched(process, 80) is None


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
    process.modules._receive(process.modules._call, 10_000, 0)
    with pytest.raises(UnknownCode, match="a callback of CUPTI failed"):
        process.modules.code("scale", None)


def test_a_first_launch_is_followed_only_where_modules_are(
    process: Process, monkeypatch: pytest.MonkeyPatch
) -> None:
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
