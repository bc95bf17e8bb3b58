"""One subscriber of CUPTI's callbacks for several receivers, on a CUPTI that is made up."""

from __future__ import annotations

import _thread
import ctypes
import importlib
import signal
import struct
import sys
from collections.abc import Iterator
from enum import IntEnum
from functools import partial
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from pytest_gpumem.devices.cuda.cupti import CALLBACKS, ApiCall, Callbacks, Receive
from pytest_gpumem.devices.cuda.lending import Lending
from pytest_gpumem.devices.protocol import NotCounted


class Domain(IntEnum):
    DRIVER_API = 1
    RESOURCE = 3


class Driver(IntEnum):
    cuMemAlloc_v2 = 243  # noqa: N815 - the name in cupti-python
    cuMemAllocAsync = 600  # noqa: N815


class Resource(IntEnum):
    MODULE_LOADED = 8


class CuptiError(Exception):
    pass


SUBSCRIBED = 39  # CUPTI_ERROR_MULTIPLE_SUBSCRIBERS_NOT_SUPPORTED
DATA = struct.Struct("<i4xQQQQQIxxxxQI4x")  # CUpti_CallbackData


class Cupti:
    """Calls back what is enabled, and takes one subscriber. Its functions are C functions, as those of the library."""

    CallbackDomain, driver_api_trace_cbid, CallbackIdResource, cuptiError = (
        Domain,
        Driver,
        Resource,
        CuptiError,
    )

    def __init__(self) -> None:
        self.callback: Any = None
        self.enabled: set[tuple[int, int]] = set()
        number, pointer = ctypes.c_uint32, ctypes.c_void_p
        self._kept = {
            "__cuptiSubscribe": ctypes.CFUNCTYPE(ctypes.c_int, pointer, pointer, pointer)(
                self._subscribe
            ),
            "__cuptiUnsubscribe": ctypes.CFUNCTYPE(ctypes.c_int, pointer)(self._unsubscribe),
            "__cuptiEnableCallback": ctypes.CFUNCTYPE(
                ctypes.c_int, number, pointer, ctypes.c_int, number
            )(self._enable),
        }
        self.pointers = {
            name: ctypes.cast(function, pointer).value for name, function in self._kept.items()
        }

    def _subscribe(self, handle: int, callback: int, data: int) -> int:
        if self.callback is not None:
            return SUBSCRIBED
        ctypes.c_uint64.from_address(handle).value = 7
        self.callback = ctypes.CFUNCTYPE(
            None, ctypes.c_void_p, ctypes.c_int, ctypes.c_uint32, ctypes.c_void_p
        )(callback)
        return 0

    def _unsubscribe(self, subscriber: int) -> int:
        assert subscriber == 7
        self.callback = None
        self.enabled.clear()
        return 0

    def _enable(self, enable: int, subscriber: int, domain: int, cbid: int) -> int:
        assert subscriber == 7
        (self.enabled.add if enable else self.enabled.discard)((domain, cbid))
        return 0

    def call(self, domain: Domain, cbid: int) -> None:
        """The begin and the end of a call; a resource has one callback, whose data begin with an address."""
        if (domain, cbid) in self.enabled:
            for site in (0, 1) if domain is not Domain.RESOURCE else (0x7F00,):
                data = ctypes.create_string_buffer(DATA.pack(site, 0, 2, 3, 0, 0, 0, 0, 9))
                self.callback(None, domain, cbid, ctypes.addressof(data))


@pytest.fixture
def cupti(monkeypatch: pytest.MonkeyPatch) -> Cupti:
    # Callbacks that another test never ended would wrap the profiler first, and be the hook.
    monkeypatch.setattr(sys, "unraisablehook", sys.__unraisablehook__)
    monkeypatch.setattr(
        sys, "meta_path", [one for one in sys.meta_path if not isinstance(one, Lending)]
    )
    made = Cupti()
    package, internal = ModuleType("cupti"), ModuleType("cupti._internal")
    package.cupti, package._internal = made, internal  # type: ignore[attr-defined]
    internal.cupti = SimpleNamespace(_inspect_function_pointers=lambda: made.pointers)  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "cupti", package)
    monkeypatch.setitem(sys.modules, "cupti._internal", internal)
    return made


def test_receivers_share_one_subscriber_until_the_last_has_ended(cupti: Cupti) -> None:
    callbacks, seen = Callbacks(), list[Any]()

    def receive(name: str) -> Receive:
        return lambda cbid, address: seen.append((name, cbid, ApiCall.from_address(address).site))

    end_one = callbacks.add("DRIVER_API", ["cuMemAlloc_v2", "cuOfTheFuture"], receive("one"))
    end_two = callbacks.add("DRIVER_API", ["cuMemAlloc_v2"], receive("two"), begins=False)
    end_three = callbacks.add("RESOURCE", ["MODULE_LOADED"], receive("three"))
    cupti.call(Domain.DRIVER_API, 243)
    cupti.call(Domain.RESOURCE, 8)
    cupti.call(Domain.DRIVER_API, 600)
    assert seen == [("one", 243, 0), ("one", 243, 1), ("two", 243, 1), ("three", 8, 0x7F00)]
    end_one()
    cupti.call(Domain.DRIVER_API, 243)
    assert seen[4:] == [("two", 243, 1)]
    end_two()
    assert cupti.enabled == {(3, 8)}
    end_three()
    assert cupti.callback is None


def test_the_begins_of_calls_may_have_a_receiver_of_their_own(cupti: Cupti) -> None:
    callbacks, seen, missed = Callbacks(), list[str](), list[str]()

    def begun(cbid: int, data: Any) -> None:
        seen.append("begun")
        if seen.count("begun") == 2:
            raise ValueError("broken")

    end = callbacks.add(
        "DRIVER_API",
        ["cuMemAlloc_v2"],
        lambda *_: seen.append("ended"),
        missed.append,
        begins=begun,
    )
    other = callbacks.add("DRIVER_API", ["cuMemAlloc_v2"], lambda *_: None)
    for _ in range(2):
        cupti.call(Domain.DRIVER_API, 243)
    assert seen == 2 * ["begun", "ended"]
    assert missed == ["a call could not be read: broken"]
    callbacks._miss("a profiler had CUPTI")
    assert missed[1:] == ["a profiler had CUPTI"]  # once for both
    end()
    cupti.call(Domain.DRIVER_API, 243)
    callbacks._miss("again")
    assert (len(seen), len(missed)) == (4, 2)
    other()
    assert cupti.callback is None


def test_an_error_of_a_receiver_reaches_neither_cupti_nor_others(cupti: Cupti) -> None:
    callbacks, seen, missed = Callbacks(), list[int](), list[str]()

    def broken(cbid: int, data: Any) -> None:
        raise ValueError("broken")

    callbacks.add("DRIVER_API", ["cuMemAlloc_v2"], broken, missed.append, begins=False)
    callbacks.add(
        "DRIVER_API", ["cuMemAlloc_v2"], lambda cbid, data: seen.append(cbid), begins=False
    )
    cupti.call(Domain.DRIVER_API, 243)
    assert (seen, missed) == ([243], ["a call could not be read: broken"])


class Timeout(BaseException):
    """What a plugin's handler of a signal raises: it is no `Exception`, and Python could not make it without arguments."""

    def __init__(self, of: str, seconds: int) -> None:
        super().__init__(of, seconds)


def signalled_call(cupti: Cupti) -> None:
    """A call that a signal comes in, and then its callback: no Python code runs between, which would run the handler."""
    data = ctypes.create_string_buffer(DATA.pack(1, 0, 2, 3, 0, 0, 0, 0, 9))
    back = partial(cupti.callback, None, Domain.DRIVER_API, 243, ctypes.addressof(data))
    list(map(partial.__call__, (partial(_thread.interrupt_main, signal.SIGUSR1), back)))


@pytest.mark.parametrize(
    "error",
    [KeyboardInterrupt(), Timeout("a test", 5), SystemExit(143), TimeoutError("late")],
    ids=repr,
)
@pytest.mark.parametrize("replaced", [False, True], ids=["", "another-hook"])
def test_the_error_of_a_signal_reaches_the_line_and_the_call_is_missed(
    cupti: Cupti, monkeypatch: pytest.MonkeyPatch, error: BaseException, replaced: bool
) -> None:
    """Python runs the handler where the callback begins, and would drop what it raises: Ctrl-C would do nothing, and a limit would hold."""

    def handler(*_: object) -> None:
        raise error

    others, hook = list[Any](), sys.unraisablehook
    callbacks, seen, missed = Callbacks(), list[int](), list[str]()
    end = callbacks.add(
        "DRIVER_API",
        ["cuMemAlloc_v2"],
        lambda cbid, data: seen.append(cbid),
        missed.append,
        begins=False,
    )
    if replaced:  # as pytest before 8.4 does in each test
        monkeypatch.setattr(sys, "unraisablehook", others.append)
        cupti.call(Domain.DRIVER_API, 243)
    before = signal.signal(signal.SIGUSR1, handler)
    try:
        with pytest.raises(type(error)) as raised:
            signalled_call(cupti)
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert raised.value is error
    assert "signalled_call" in {one.name for one in raised.traceback}
    assert missed == [f"{type(error).__name__} came while a call was reported"]
    assert not others
    cupti.call(Domain.DRIVER_API, 243)
    assert seen == [243] * (1 + replaced)
    if replaced:
        sys.unraisablehook(SimpleNamespace(exc_traceback=None))
    assert len(others) == replaced  # errors of others are theirs
    end()
    assert sys.unraisablehook == (others.append if replaced else hook)


def test_the_data_of_a_call_lie_as_in_cuptis_header() -> None:
    result = ctypes.c_int(2)
    name = ctypes.create_string_buffer(b"triad")
    data = ctypes.create_string_buffer(
        DATA.pack(1, 11, 12, ctypes.addressof(result), ctypes.addressof(name), 13, 14, 15, 16)
    )
    call = ApiCall.from_address(ctypes.addressof(data))
    assert (call.site, call.parameters, call.symbol, call.correlation, call.failed) == (
        1,
        12,
        b"triad",
        16,
        True,
    )
    result.value = 0
    assert not call.failed


def test_calls_are_refused_while_a_profiler_has_cupti(cupti: Cupti) -> None:
    """Also in a part of a test that begins then: it would count nothing, and its limits would hold."""
    source = pytest.importorskip(
        "pytest_gpumem.devices.cuda.calls", exc_type=ImportError
    ).CudaCalls()
    CALLBACKS._lend("PyTorch")
    try:
        assert "the profiler of PyTorch" in str(source.start())
    finally:
        CALLBACKS._take_back()
    assert source.start() is None
    window = source.log.open()
    CALLBACKS._lend("PyTorch")
    other, cupti.callback = cupti.callback, print
    CALLBACKS._take_back()
    assert window.read(Path()).not_counted is not None
    assert source.running
    assert str(SUBSCRIBED) in str(source.start())  # the profiler has kept it: nothing reports
    assert not source.running
    cupti.callback = other
    assert source.start() is None
    source.stop()


def test_another_tool_holds_cupti(cupti: Cupti) -> None:
    cupti.callback = print
    with pytest.raises(NotCounted, match=f"{SUBSCRIBED}"):
        Callbacks().add("DRIVER_API", ["cuMemAlloc_v2"], lambda cbid, data: None)


def test_without_cupti(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cupti", None)
    with pytest.raises(NotCounted, match="gpumem doctor"):
        Callbacks().add("DRIVER_API", ["cuMemAlloc_v2"], lambda cbid, data: None)


PROFILER = """
class _KinetoProfile:
    def start(self):
        self.prepare_trace()

    def prepare_trace(self):
        self.holder = holder()

    def stop_trace(self):
        self.holder_at_end = holder()
"""


@pytest.fixture
def torch(tmp_path: Path, cupti: Cupti, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A PyTorch whose profiler notes who has CUPTI."""
    package = tmp_path / "torch" / "profiler"
    package.mkdir(parents=True)
    (package.parent / "__init__.py").touch()
    (package / "__init__.py").touch()
    (package / "profiler.py").write_text(PROFILER)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr("builtins.holder", lambda: cupti.callback, raising=False)
    yield tmp_path
    for name in [one for one in sys.modules if one.partition(".")[0] == "torch"]:
        del sys.modules[name]


@pytest.mark.parametrize("first", ["ours", "profiler"])
def test_a_profiler_has_cupti_while_it_traces(cupti: Cupti, torch: Path, first: str) -> None:
    if first == "profiler":
        importlib.import_module("torch.profiler.profiler")
    callbacks, seen, missed = Callbacks(), list[int](), list[str]()
    end = callbacks.add(
        "DRIVER_API",
        ["cuMemAlloc_v2"],
        lambda cbid, data: seen.append(cbid),
        missed.append,
        begins=False,
    )
    profiler: Any = importlib.import_module("torch.profiler.profiler")
    for times in (1, 2):
        profile, other = profiler._KinetoProfile(), profiler._KinetoProfile()
        profile.start()
        other.start()
        assert (profile.holder, other.holder) == (None, None)
        with pytest.raises(NotCounted, match="the profiler of PyTorch had CUPTI"):
            callbacks.add("RESOURCE", ["MODULE_LOADED"], lambda cbid, data: None)
        profile.stop_trace()
        assert cupti.callback is None
        other.stop_trace()
        other.stop_trace()  # a second time ends nothing
        cupti.call(Domain.DRIVER_API, 243)
        assert seen == [243] * times
        assert (len(missed), callbacks.lent) == (times, times)
    end()
    assert profiler._KinetoProfile.prepare_trace.__name__ == "prepare_trace"
    assert not hasattr(profiler._KinetoProfile.prepare_trace, "__gpumem__")
    assert not any(isinstance(one, Lending) for one in sys.meta_path)


def test_a_test_that_subscribes_has_cupti_until_it_unsubscribes(
    cupti: Cupti, monkeypatch: pytest.MonkeyPatch
) -> None:
    def subscribe(callback: Any, data: Any) -> int:
        if callback is None:
            raise CuptiError(1)
        assert cupti.callback is None
        cupti.callback = callback
        return 7

    module = ModuleType("cupti.cupti")
    module.subscribe, module.unsubscribe = subscribe, cupti._unsubscribe  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "cupti.cupti", module)
    callbacks, seen, missed = Callbacks(), list[int](), list[str]()
    end = callbacks.add(
        "DRIVER_API",
        ["cuMemAlloc_v2"],
        lambda cbid, data: seen.append(cbid),
        missed.append,
        begins=False,
    )
    with pytest.raises(CuptiError):
        module.subscribe(None, None)
    handle = module.subscribe(print, None)
    with pytest.raises(NotCounted, match="the profiler of the test had CUPTI"):
        callbacks.add("RESOURCE", ["MODULE_LOADED"], lambda cbid, data: None)
    module.unsubscribe(handle)
    cupti.call(Domain.DRIVER_API, 243)
    assert (seen, len(missed)) == ([243], 2)
    end()
    assert module.subscribe is subscribe


def test_a_profiler_that_keeps_cupti_leaves_everything_uncounted(cupti: Cupti, torch: Path) -> None:
    callbacks = Callbacks()
    callbacks.add("DRIVER_API", ["cuMemAlloc_v2"], lambda cbid, data: None)
    profiler: Any = importlib.import_module("torch.profiler.profiler")
    profile = profiler._KinetoProfile()
    profile.start()
    cupti.callback = print
    profile.stop_trace()
    assert cupti.callback is print
    with pytest.raises(NotCounted, match=f"{SUBSCRIBED}"):
        callbacks.add("RESOURCE", ["MODULE_LOADED"], lambda cbid, data: None)
    callbacks.close()
