"""CUPTI through `cupti-python` (the extra `cupti13`): who has it, and callbacks.

CUPTI serves a single subscriber, so all callbacks of the process come through this module. Those
of cupti-python 13.0 would take 5 us each, and those of 13.4 differ.
Sources: CUPTI, Callback API; Python, C API, PyThreadState_SetAsyncExc.
"""

from __future__ import annotations

import atexit
import ctypes
import itertools
import os
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import cache
from typing import Any, NamedTuple

from pytest_gpumem.devices.protocol import NotCounted

USE_KINDS = ("CONCURRENT_KERNEL", "MEMCPY", "MEMCPY2", "MEMSET")
"""CUpti_ActivityKind. KERNEL would run kernels one after another."""


class ApiCall(ctypes.Structure):
    """A CUpti_CallbackData."""

    site: int  # 0 at the begin of the call, 1 at its end
    parameters: int  # address of them
    result: int  # address of it
    symbol: bytes | None  # mangled name of the kernel, in a launch
    correlation: int
    _fields_ = (
        ("site", ctypes.c_int),
        ("function", ctypes.c_void_p),
        ("parameters", ctypes.c_uint64),
        ("result", ctypes.c_uint64),
        ("symbol", ctypes.c_char_p),
        ("context", ctypes.c_void_p),
        ("context_uid", ctypes.c_uint32),
        ("correlation_data", ctypes.c_void_p),
        ("correlation", ctypes.c_uint32),
    )

    @property
    def failed(self) -> bool:
        result = self.result
        return result != 0 and ctypes.c_int.from_address(result).value != 0


Receive = Callable[[str, ApiCall], None]
"""Called with the name of a call and its data, in the calling thread, before the call returns."""


class _Receiver(NamedTuple):
    receive: Receive
    name: str
    begins: bool  # also at the begin of the call, and of calls that fail
    lost: Callable[[str], None]


# CUpti_CallbackFunc
_CALLED = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_int, ctypes.c_uint32, ctypes.c_size_t)
_PARAMETERS: dict[str, tuple[type[Any], ...]] = {
    "cuptiSubscribe": (ctypes.c_void_p, _CALLED, ctypes.c_void_p),
    "cuptiUnsubscribe": (ctypes.c_void_p,),
    "cuptiEnableCallback": (ctypes.c_uint32, ctypes.c_void_p, ctypes.c_int, ctypes.c_uint32),
    "cuptiFinalize": (),
}
_SUFFIXES = ("", "_ptds", "_ptsz")  # of calls on the per-thread default stream
_IDS = {"DRIVER_API": "driver_api_trace_cbid", "RESOURCE": "CallbackIdResource"}
"""By the name of a `CUpti_CallbackDomain`, the enumeration of its ids in cupti-python."""


def imported() -> Any:
    """Import CUPTI's module, which few sessions need. Raises `NotCounted`."""
    try:
        from cupti import cupti
    except ImportError as error:
        raise NotCounted(
            f"cupti-python cannot be imported ({error}): `gpumem doctor` names the extra to install"
        ) from error
    return cupti


def why_refused(error: Exception) -> str:
    if "MULTIPLE_SUBSCRIBERS" not in str(error):
        return f"CUPTI refuses callbacks: {str(error).partition(chr(10))[0]}"
    whose = "PyTorch's" if _torch_profiles() else "another"
    return f"not read: {whose} profiler has CUPTI"


def _torch_profiles() -> bool:
    torch = sys.modules.get("torch")
    enabled = getattr(getattr(torch, "autograd", None), "_profiler_enabled", None)
    return enabled is not None and bool(enabled())


@cache
def _ids(domain: str, names: tuple[str, ...]) -> dict[tuple[int, int], str]:
    """Those of these names that CUPTI knows, by domain and number."""
    cupti = imported()
    domain_number = int(getattr(cupti.CallbackDomain, domain))
    numbers = getattr(cupti, _IDS[domain]).__members__
    ids = {}
    for name, suffix in itertools.product(names, _SUFFIXES):
        if name + suffix in numbers:
            ids[domain_number, int(numbers[name + suffix])] = name
    return ids


@cache
def _function(name: str) -> Callable[..., int]:
    try:
        from cupti._internal import cupti as loaded

        address = loaded._inspect_function_pointers()[f"__{name}"]
    except (ImportError, RuntimeError) as error:  # there is no libcupti
        raise NotCounted(why_refused(error)) from error
    return ctypes.CFUNCTYPE(ctypes.c_int, *_PARAMETERS[name])(address)


def _call(name: str, *arguments: Any) -> None:
    """Call a function of the library. Raises `NotCounted`."""
    result = _function(name)(*arguments)
    if result:
        raise NotCounted(why_refused(imported().cuptiError(result)))


class Callbacks:
    def __init__(self) -> None:
        self._handle: ctypes.c_void_p | None = None  # while it is subscribed
        self._users: set[object] = set()  # receivers, and passes that hold CUPTI
        self._function = _CALLED(self._called)  # as C sees it; threads may call it at any time
        self._receivers: dict[tuple[int, int], tuple[_Receiver, ...]] = {}  # by domain and number
        self._recorded = False  # activity, since `detach`
        atexit.register(self._let_go)  # a callback after Python's end would crash
        os.register_at_fork(before=self._let_go)

    def add(
        self,
        domain: str,
        names: Sequence[str],
        receive: Receive,
        lost: Callable[[str], None],
        *,
        begins: bool = True,
    ) -> Callable[[], None]:
        """Have `receive` called for these callbacks; return the function that ends it.
        `names`: without the suffixes of the per-thread default stream. Unknown ones are left out.
        `receive`: must be quick, and may ask the driver for attributes, but call nothing else.
        `lost`: called with the reason once a call was missed, or `receive` has failed.
        `begins`: False where only the ends of calls matter that do not fail.
        Raises `NotCounted`: cupti-python or CUPTI is missing, or another tool has CUPTI.
        """
        ids = _ids(domain, tuple(names))

        def end() -> None:
            self._close(end)
            for key in ids:
                before = self._receivers.pop(key, ())
                left = tuple(other for other in before if other.receive != receive)
                if left:
                    self._receivers[key] = left
                elif before and self._handle is not None:
                    with suppress(NotCounted):  # after a lost context
                        _call("cuptiEnableCallback", False, self._handle, *key)

        self._open(end)
        try:
            for key, name in ids.items():
                others = self._receivers.get(key, ())
                self._receivers[key] = (*others, _Receiver(receive, name, begins, lost))
                if not others:  # the first receiver enables it
                    _call("cuptiEnableCallback", True, self._handle, *key)
        except NotCounted:
            end()
            raise
        return end

    @contextmanager
    def subscribed(self) -> Iterator[Any]:
        """Hold CUPTI inside the block, and yield its module. Raises `NotCounted`."""
        user = object()
        cupti = self._open(user)
        self._recorded = True
        try:
            yield cupti
        finally:
            self._close(user)

    def detach(self) -> bool:
        """Take CUPTI out of the process, if activity was recorded: that makes each later launch
        slower. Return False where it is in use, or another thread may call the driver."""
        if not self._recorded or self._users or threading.active_count() > 1 or _torch_profiles():
            return False
        with suppress(NotCounted):
            with self.subscribed():  # refused where another tool has CUPTI
                pass
            _call("cuptiFinalize")
            self._recorded = False
        return not self._recorded

    def _open(self, user: object) -> Any:
        cupti = imported()
        if self._handle is None:
            handle = ctypes.c_void_p()
            # cupti-python 13.4.0 has `subscribe_v2`, which allows no other subscriber.
            _call("cuptiSubscribe", ctypes.addressof(handle), self._function, None)
            self._handle = handle
            _RaisedAgain.install()
        self._users.add(user)
        return cupti

    def _close(self, user: object) -> None:
        self._users.discard(user)
        if self._handle is None or self._users:
            return
        handle, self._handle = self._handle, None
        with suppress(NotCounted):
            _call("cuptiUnsubscribe", handle)  # ends all callbacks
        _RaisedAgain.remove()

    def _let_go(self) -> None:
        """End all: a child that starts CUDA under the parent's subscription crashes."""
        if self._handle is not None:
            self._miss("the test forked")
            self._receivers.clear()
            self._users.clear()
            self._close(self)

    def _miss(self, why: str) -> None:
        receivers = set[_Receiver]().union(*self._receivers.values())
        for lost in {receiver.lost for receiver in receivers}:
            lost(why)

    def _called(self, _data: Any, domain: int, number: int, address: int) -> None:
        if type(sys.unraisablehook) is not _RaisedAgain:
            _RaisedAgain.install()  # pytest before 8.4 replaces the hook in each test
        call = ApiCall.from_address(address)  # of a resource: its receivers read it by the address
        for receive, name, begins, lost in self._receivers.get((domain, number), ()):
            if not begins and (not call.site or call.failed):
                continue
            try:
                receive(name, call)
            except Exception as error:  # it would end in CUPTI's code
                lost(f"a call could not be read: {error}")


CALLBACKS = Callbacks()

_raise_later = ctypes.pythonapi.PyThreadState_SetAsyncExc
_raise_later.argtypes = (ctypes.c_ulong, ctypes.py_object)


class _RaisedAgain:
    """A `sys.unraisablehook`. Python runs a signal's handler where `_called` begins, before
    its `try`. What it raises cannot pass through CUPTI: Python gives it to this hook, which notes
    that a call was missed, and has the line that made the call raise it."""

    def __init__(self, previous: Callable[[Any], object]) -> None:
        self.previous = previous

    @classmethod
    def install(cls) -> None:
        if type(sys.unraisablehook) is not cls:
            sys.unraisablehook = cls(sys.unraisablehook)

    @classmethod
    def remove(cls) -> None:
        hook = sys.unraisablehook
        if type(hook) is cls:
            sys.unraisablehook = hook.previous

    def __call__(self, unraisable: Any) -> None:
        trace = unraisable.exc_traceback  # not `object`, which is None from Python 3.13 on
        if trace is None or trace.tb_frame.f_code is not Callbacks._called.__code__:
            self.previous(unraisable)
            return
        error, kind = unraisable.exc_value.with_traceback(trace.tb_next), unraisable.exc_type
        trace.tb_frame.f_locals["self"]._miss(f"{kind.__name__} came while a call was reported")
        # Python makes the exception of a class: this one gives `error`. The next call or jump of
        # Python code raises it, which in this hook would lose it: `map` makes the call, and
        # the unpacking, which is neither, stays last.
        again = type(kind.__name__, (kind,), {"__new__": lambda *_: error})
        (_,) = map(_raise_later, (threading.get_ident(),), (again,))


def words(address: int, count: int) -> tuple[int, ...]:
    """Eight-byte words at an address: the first parameters of a call."""
    return tuple(_words(count).from_address(address))


@cache
def _words(count: int) -> type[ctypes.Array[ctypes.c_uint64]]:
    return ctypes.c_uint64 * count
