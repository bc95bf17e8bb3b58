"""The context of an open device. Whoever uses or frees a handle of ours asks here, once a phase.

Streams, events, graphs, modules, pools and buffers live in the GPU's primary context, and may
outlive it. A handle of a context that is gone is a segmentation fault in the driver, so no object
frees its own handle when Python deletes it: it hands the handle over with `frees`, and `collect`
frees it while the context lives.

Sources: CUDA Driver API, Primary Context Management; cuCtxGetId; CUDA Runtime API, cudaDeviceReset.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from cuda.bindings import driver as D  # noqa: N812

from pytest_gpumem.devices.cuda.errors import check
from pytest_gpumem.devices.protocol import OWN_CONTEXT

RESET = "the device was reset (cudaDeviceReset)"
DESTROYED = "the GPU's primary context was destroyed"


def context_number(index: int) -> int | None:
    """Return the number of a GPU's primary context; None while there is none, and makes none. A new
    context may have the handle of an old one, but never its number."""
    error, device = D.cuDeviceGet(index)
    if int(error) != 0:  # as before cuInit
        return None
    error, _, active = D.cuDevicePrimaryCtxGetState(device)
    if int(error) != 0 or not active:
        return None
    error, context = D.cuDevicePrimaryCtxRetain(device)
    if int(error) != 0:
        return None
    error, number = D.cuCtxGetId(context)
    D.cuDevicePrimaryCtxRelease(device)
    return int(number) if int(error) == 0 else None


class Context:
    """The primary context of a GPU."""

    def __init__(self, index: int) -> None:
        doing = f"opening device {index}"
        self.index = index
        self._device = check(D.cuDeviceGet(index), doing)
        self._handle = check(D.cuDevicePrimaryCtxRetain(self._device), doing)
        self._number = int(check(D.cuCtxGetId(self._handle), doing))
        self._unused: list[tuple[Callable[..., object], tuple[Any, ...]]] = []
        error, current = D.cuCtxGetCurrent()
        if int(error) == 0 and not int(current):
            check(D.cuCtxSetCurrent(self._handle), doing)

    def gone(self) -> str | None:
        """Why no handle of this context may be used or freed any more; None while it lives. A
        context that a kernel's error has taken is gone too: the driver says so at each call, by
        `errors.ContextLost`."""
        number = context_number(self.index)
        if number is None:
            return DESTROYED
        return None if number == self._number else RESET

    @contextmanager
    def current(self) -> Iterator[None]:
        """Make it the current context of this thread inside the block, and what was current before
        it afterwards."""
        check(D.cuCtxPushCurrent(self._handle), f"making GPU {self.index} current")
        try:
            yield
        finally:
            D.cuCtxPopCurrent()  # the block may have reset the device

    def elsewhere(self) -> str | None:
        """What is current in its place: "GPU 1", or `OWN_CONTEXT`, which somebody has made with
        cuCtxCreate; None if nothing is."""
        error, current = D.cuCtxGetCurrent()
        if int(error) != 0 or int(current) in (0, int(self._handle)):
            return None
        error, device = D.cuCtxGetDevice()
        if int(error) != 0 or int(device) == self.index:
            return OWN_CONTEXT
        return f"GPU {int(device)}"

    def frees(self, owner: object, free: Callable[..., object], *arguments: Any) -> None:
        """Have `free(*arguments)` called by the next `collect` after `owner` is deleted; never at
        Python's end."""
        weakref.finalize(owner, self._unused.append, (free, arguments)).atexit = False

    def collect(self) -> None:
        """Free the handles whose owners are deleted. If the context is gone, they went with it."""
        if not self._unused:
            return
        unused, self._unused[:] = list(self._unused), []
        if self.gone() is not None:
            _KEPT.append(unused)  # such as pools of a library, whose destructors would free
            return
        for free, arguments in unused:
            free(*arguments)

    def close(self) -> None:
        """Free what nobody uses any more, and let the context go."""
        self.collect()
        if self.gone() is None:
            D.cuDevicePrimaryCtxRelease(self._device)


_KEPT: list[object] = []


@contextmanager
def made_meanwhile(index: int) -> Iterator[None]:
    """Make the primary context of a GPU beside the block, in a third of a second without the
    interpreter. The block opens the device: it meets an error of the driver again, and reports
    it."""
    made: list[Any] = []
    thread = threading.Thread(target=_make, args=(index, made), name="gpumem-context", daemon=True)
    thread.start()
    try:
        yield
    finally:
        thread.join()
        for device in made:
            D.cuDevicePrimaryCtxRelease(device)


def _make(index: int, made: list[Any]) -> None:
    (error,) = D.cuInit(0)
    if int(error) != 0:
        return
    error, device = D.cuDeviceGet(index)
    if int(error) != 0:
        return
    error, _ = D.cuDevicePrimaryCtxRetain(device)
    if int(error) == 0:
        made.append(device)
