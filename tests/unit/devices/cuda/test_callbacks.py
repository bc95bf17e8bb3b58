"""One subscriber of CUPTI's callbacks for several receivers, on a CUPTI that is made up."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from enum import IntEnum
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from pytest_gpumem.devices.cuda.cupti import Callbacks
from pytest_gpumem.devices.cuda.lending import Lending
from pytest_gpumem.devices.protocol import NotCounted


class Domain(IntEnum):
    DRIVER_API = 1
    RUNTIME_API = 2
    RESOURCE = 3


class Driver(IntEnum):
    cuMemAlloc_v2 = 243  # noqa: N815 - the name in cupti-python
    cuMemAllocAsync = 600  # noqa: N815


class Resource(IntEnum):
    MODULE_LOADED = 8


class CuptiError(Exception):
    pass


class Cupti:
    """Calls back what is enabled, and takes one subscriber."""

    CallbackDomain, driver_api_trace_cbid, CallbackIdResource, cuptiError = Domain, Driver, Resource, CuptiError  # noqa: N815

    def __init__(self) -> None:
        self.callback: Any = None
        self.enabled: set[tuple[int, int]] = set()

    def subscribe(self, callback: Any, data: Any) -> int:
        if self.callback is not None:
            raise CuptiError("CUPTI_ERROR_MULTIPLE_SUBSCRIBERS_NOT_SUPPORTED")
        self.callback = callback
        return 7

    def unsubscribe(self, subscriber: int) -> None:
        assert subscriber == 7
        self.callback = None
        self.enabled.clear()

    def enable_callback(self, enable: int, subscriber: int, domain: int, cbid: int) -> None:
        (self.enabled.add if enable else self.enabled.discard)((domain, cbid))

    def call(self, domain: Domain, cbid: int) -> None:
        if (domain, cbid) in self.enabled:
            self.callback(None, domain, cbid, "data")


@pytest.fixture
def cupti(monkeypatch: pytest.MonkeyPatch) -> Cupti:
    # Callbacks that another test never ended would wrap the profiler first.
    monkeypatch.setattr(sys, "meta_path", [one for one in sys.meta_path if not isinstance(one, Lending)])
    made = Cupti()
    monkeypatch.setitem(sys.modules, "cupti", SimpleNamespace(cupti=made))
    return made


def test_receivers_share_one_subscriber_until_the_last_has_ended(cupti: Cupti) -> None:
    callbacks, seen = Callbacks(), list[Any]()
    end_one = callbacks.add("DRIVER_API", ["cuMemAlloc_v2", "cuOfTheFuture"], lambda cbid, data: seen.append(("one", cbid, data)))
    end_two = callbacks.add("DRIVER_API", ["cuMemAlloc_v2"], lambda cbid, data: seen.append(("two", cbid, data)))
    end_three = callbacks.add("RESOURCE", ["MODULE_LOADED"], lambda cbid, data: seen.append(("three", cbid, data)))
    cupti.call(Domain.DRIVER_API, 243)
    cupti.call(Domain.RESOURCE, 8)
    cupti.call(Domain.DRIVER_API, 600)
    assert seen == [("one", 243, "data"), ("two", 243, "data"), ("three", 8, "data")]
    end_one()
    cupti.call(Domain.DRIVER_API, 243)
    assert seen[3:] == [("two", 243, "data")]
    end_two()
    assert cupti.enabled == {(3, 8)}
    end_three()
    assert cupti.callback is None


def test_an_error_of_a_receiver_reaches_neither_cupti_nor_others(cupti: Cupti) -> None:
    callbacks, seen = Callbacks(), list[int]()

    def broken(cbid: int, data: Any) -> None:
        raise ValueError("broken")

    callbacks.add("DRIVER_API", ["cuMemAlloc_v2"], broken)
    callbacks.add("DRIVER_API", ["cuMemAlloc_v2"], lambda cbid, data: seen.append(cbid))
    cupti.call(Domain.DRIVER_API, 243)
    assert seen == [243]


def test_another_tool_holds_cupti(cupti: Cupti) -> None:
    cupti.callback = print
    with pytest.raises(NotCounted, match="MULTIPLE_SUBSCRIBERS"):
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
    end = callbacks.add("DRIVER_API", ["cuMemAlloc_v2"], lambda cbid, data: seen.append(cbid), missed.append)
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


def test_a_profiler_that_keeps_cupti_leaves_everything_uncounted(cupti: Cupti, torch: Path) -> None:
    callbacks = Callbacks()
    callbacks.add("DRIVER_API", ["cuMemAlloc_v2"], lambda cbid, data: None)
    profiler: Any = importlib.import_module("torch.profiler.profiler")
    profile = profiler._KinetoProfile()
    profile.start()
    cupti.callback = print
    profile.stop_trace()
    assert cupti.callback is print
    with pytest.raises(NotCounted, match="MULTIPLE_SUBSCRIBERS"):
        callbacks.add("RESOURCE", ["MODULE_LOADED"], lambda cbid, data: None)
    callbacks.close()
