"""CUPTI through `cupti-python` (the extra `cupti13`): who has it, and callbacks.

CUPTI serves a single subscriber, so all callbacks of the process come through this module. They
come from CUPTI itself: those of cupti-python 13.0 take 5 us each, and those of 13.4 differ.
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
    lost: Callable[[str], None] | None


# CUpti_CallbackFunc
_CALLED = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_int, ctypes.c_uint32, ctypes.c_size_t)
_PARAMETERS: dict[str, tuple[type[Any], ...]] = {
    "cuptiSubscribe": (ctypes.c_void_p, _CALLED, ctypes.c_void_p),
    "cuptiUnsubscribe": (ctypes.c_void_p,),
    "cuptiEnableCallback": (ctypes.c_uint32, ctypes.c_void_p, ctypes.c_int, ctypes.c_uint32),
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
    torch = sys.modules.get("torch")
    enabled = getattr(getattr(torch, "autograd", None), "_profiler_enabled", None)
    whose = "PyTorch's" if enabled is not None and enabled() else "another"
    return f"not read: {whose} profiler has CUPTI"


class Callbacks:
    def __init__(self) -> None:
        self._cupti: Any = None
        self._pointers: dict[str, int] = {}  # to the functions of the library
        self._handle: ctypes.c_void_p | None = None  # while it is subscribed
        self._users = 0  # receivers that were added, and passes that hold CUPTI
        self._function = _CALLED(self._called)  # as C sees it; threads may call it at any time
        self._receivers: dict[tuple[int, int], tuple[_Receiver, ...]] = {}  # by domain and number
        atexit.register(self._forget)  # a callback after Python's end would crash
        os.register_at_fork(before=self._before_fork, after_in_child=self._receivers.clear)

    def add(
        self,
        domain: str,
        names: Sequence[str],
        receive: Receive,
        lost: Callable[[str], None] | None = None,
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
        cupti = self._open()
        numbers = getattr(cupti, _IDS[domain])
        domain_number = int(getattr(cupti.CallbackDomain, domain))
        keys: list[tuple[int, int]] = []  # filled below; an error leaves a part to `end`

        def end() -> None:
            for key in keys:
                before = self._receivers.pop(key, ())
                left = tuple(other for other in before if other.receive != receive)
                if left:
                    self._receivers[key] = left
                elif self._handle is not None:
                    with suppress(cupti.cuptiError):  # after a lost context
                        self._call("cuptiEnableCallback", False, self._handle, *key)
            self._close()

        try:
            for name, suffix in itertools.product(names, _SUFFIXES):
                if not hasattr(numbers, name + suffix):
                    continue
                key = domain_number, int(getattr(numbers, name + suffix))
                keys.append(key)
                others = self._receivers.get(key, ())
                self._receivers[key] = (*others, _Receiver(receive, name, begins, lost))
                if not others and self._handle is not None:  # the first receiver enables it
                    self._call("cuptiEnableCallback", True, self._handle, *key)
        except cupti.cuptiError as error:
            end()
            raise NotCounted(why_refused(error)) from error
        return end

    @contextmanager
    def subscribed(self) -> Iterator[Any]:
        """Hold CUPTI inside the block, and yield its module. Raises `NotCounted`."""
        cupti = self._open()
        try:
            yield cupti
        finally:
            self._close()

    def _open(self) -> Any:
        cupti = imported()
        if self._handle is None:
            handle = ctypes.c_void_p()
            try:
                from cupti._internal import cupti as loaded

                self._cupti, self._pointers = cupti, loaded._inspect_function_pointers()
                # cupti-python 13.4.0 has `subscribe_v2`, which allows no other subscriber.
                address = ctypes.addressof(handle)
                self._call("cuptiSubscribe", address, self._function, None)
            # RuntimeError: there is no libcupti
            except (cupti.cuptiError, ImportError, RuntimeError) as error:
                raise NotCounted(why_refused(error)) from error
            self._handle = handle
            _RaisedAgain.install()
        self._users += 1
        return cupti

    def _call(self, name: str, *arguments: Any) -> None:
        prototype = ctypes.CFUNCTYPE(ctypes.c_int, *_PARAMETERS[name])
        result = prototype(self._pointers[f"__{name}"])(*arguments)
        if result:
            raise self._cupti.cuptiError(result)

    def _close(self) -> None:
        self._users -= 1
        if self._users == 0:
            self._unsubscribe()

    def _unsubscribe(self) -> None:
        handle, self._handle = self._handle, None
        if handle is not None:
            with suppress(self._cupti.cuptiError):
                self._call("cuptiUnsubscribe", handle)
            _RaisedAgain.remove()

    def _before_fork(self) -> None:
        """Let CUPTI go: a child that starts CUDA under the parent's subscription crashes.
        Receivers stay until their `end`, but are called no more."""
        if self._handle is not None:
            self._unsubscribe()
            self._miss("the process forked")

    def _forget(self) -> None:
        self._receivers.clear()
        self._unsubscribe()

    def _miss(self, why: str) -> None:
        receivers = set[_Receiver]().union(*self._receivers.values())
        for lost in {receiver.lost for receiver in receivers}:
            if lost is not None:
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
                if lost is not None:
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
