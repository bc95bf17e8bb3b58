"""The context of an open device, its handles, and CUDA's errors, which may have taken the context.

Streams, events, graphs, modules, pools and buffers live in the GPU's primary context, and may
outlive it. To free a handle of a context that is gone is a segmentation fault in the driver. So no
object frees its handle when Python deletes it: `free_later` notes the handle, and `free_unused`
frees it while the context lives.

Source: CUDA Driver API, Primary Context Management.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

from cuda.bindings import driver as D
from cuda.bindings import runtime as R

from pytest_gpumem.devices.protocol import ContextLost, DeviceError, NotCounted, OutOfMemory

LEGACY_DEFAULT, PER_THREAD_DEFAULT = 1, 2
"""Handles of the default streams: `cudaStreamLegacy`, `cudaStreamPerThread`."""
_NEVER_FREED: list[object] = []  # handles of contexts that are gone
# CUDA Runtime API, cudaError_t: "any further CUDA work will return the same error." Driver and
# runtime number these alike.
_STICKY_NAMES = (
    "cudaErrorECCUncorrectable",
    "cudaErrorNvlinkUncorrectable",
    "cudaErrorContained",
    "cudaErrorIllegalAddress",
    "cudaErrorLaunchTimeout",
    "cudaErrorContextIsDestroyed",
    "cudaErrorAssert",
    "cudaErrorHardwareStackError",
    "cudaErrorIllegalInstruction",
    "cudaErrorMisalignedAddress",
    "cudaErrorInvalidAddressSpace",
    "cudaErrorInvalidPc",
    "cudaErrorLaunchFailure",
    "cudaErrorTensorMemoryLeak",
    "cudaErrorMpsClientTerminated",
    "cudaErrorExternalDevice",
)
_STICKY = {int(error) for error in R.cudaError_t if error.name in _STICKY_NAMES}


def check(result: Any, doing: str) -> Any:
    """Give the values of a call of cuda-bindings, which returns (error, value, ...), or raise a
    `DeviceError`, with the runtime's last error cleared."""
    error, *values = result
    if int(error) != 0:
        R.cudaGetLastError()
        name, text = R.cudaGetErrorName, R.cudaGetErrorString
        if isinstance(error, D.CUresult):
            name, text = D.cuGetErrorName, D.cuGetErrorString
        problem = f"{doing}: {name(error)[1].decode()}: {text(error)[1].decode()}."
        if int(error) in _STICKY:
            lost = "The CUDA context is lost: every later CUDA call of this process fails."
            raise ContextLost(f"{problem} {lost}")
        if int(error) == int(R.cudaError_t.cudaErrorMemoryAllocation):
            raise OutOfMemory(problem)
        raise DeviceError(problem)
    if not values:
        return None
    return values[0] if len(values) == 1 else tuple(values)


def answer(result: Any) -> Any:
    """As `check`, but leaves the user's last error. Raises `NotCounted`."""
    error, *values = result
    if int(error) != 0:
        raise NotCounted(f"the driver does not answer: {error.name}")
    return values[0] if len(values) == 1 else values


def context_number(index: int) -> int | None:
    """The number of a GPU's primary context, or None. Unlike a handle, it is never used again."""
    with suppress(NotCounted):  # as before cuInit
        device = answer(D.cuDeviceGet(index))
        _, active = answer(D.cuDevicePrimaryCtxGetState(device))
        if active:
            context = answer(D.cuDevicePrimaryCtxRetain(device))
            try:
                return int(answer(D.cuCtxGetId(context)))
            finally:
                D.cuDevicePrimaryCtxRelease(device)
    return None


class Context:
    """The primary context of a GPU."""

    destroyed = False  # True once any context was, and with it the modules that CuPy had loaded

    def __init__(self, index: int) -> None:
        doing = f"opening device {index}"
        self.index = index
        self._device = check(D.cuDeviceGet(index), doing)
        self._handle = check(D.cuDevicePrimaryCtxRetain(self._device), doing)
        self._number = int(check(D.cuCtxGetId(self._handle), doing))
        self._unused: list[tuple[Callable[..., object], tuple[Any, ...]]] = []
        if not has_context():
            check(D.cuCtxSetCurrent(self._handle), doing)

    def gone(self) -> str | None:
        number = context_number(self.index)
        if number is None:
            return "the GPU's primary context was destroyed"
        return None if number == self._number else "the device was reset (cudaDeviceReset)"

    @contextmanager
    def current(self) -> Iterator[None]:
        """Make it the current context of this thread inside the block."""
        check(D.cuCtxPushCurrent(self._handle), f"making GPU {self.index} current")
        try:
            yield
        finally:
            D.cuCtxPopCurrent()  # the block may have reset the device

    def in_own_context(self) -> bool:
        """As `Device.in_own_context`."""
        error, current = D.cuCtxGetCurrent()
        if int(error) != 0 or int(current) in (0, int(self._handle)):
            return False
        error, device = D.cuCtxGetDevice()
        return int(error) != 0 or int(device) == self.index

    def free_later(self, owner: object, free: Callable[..., object], *arguments: Any) -> None:
        """Have the next `free_unused` after `owner` is deleted call `free(*arguments)`."""
        weakref.finalize(owner, self._unused.append, (free, arguments)).atexit = False

    def free_unused(self) -> None:
        """Free the handles whose owners are deleted."""
        if not self._unused:
            return
        unused = list(self._unused)
        del self._unused[: len(unused)]
        if self.gone() is not None:
            _NEVER_FREED.append(unused)  # as destructors of a library's pools would free memory
            return
        for free, arguments in unused:
            free(*arguments)

    def close(self) -> None:
        self.free_unused()
        if self.gone() is None:
            D.cuDevicePrimaryCtxRelease(self._device)
        else:
            Context.destroyed = True


@dataclass(eq=False)
class CudaStream:
    """A stream by its handle: ours, or of somebody else who frees it."""

    handle: int

    def __cuda_stream__(self) -> tuple[int, int]:
        """The protocol by which libraries take a stream: version and handle."""
        return 0, self.handle

    @property
    def is_legacy_default(self) -> bool:
        return self.handle in (0, LEGACY_DEFAULT)


def is_captured(stream: int) -> bool | None:
    """True if work on a stream becomes a node of a graph; None if the driver does not tell."""
    status, captured = D.cuStreamIsCapturing(stream)
    return None if int(status) else int(captured) != 0  # CU_STREAM_CAPTURE_STATUS_NONE


def has_context() -> bool:
    error, context = D.cuCtxGetCurrent()
    return int(error) == 0 and int(context) != 0
