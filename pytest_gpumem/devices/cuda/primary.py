"""The primary context of a GPU: made by a thread while modules are imported, for it takes a third of a second without the interpreter; and
its identity, which a reset changes."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

from cuda.bindings import driver as D  # noqa: N812


@contextmanager
def made_meanwhile(index: int) -> Iterator[None]:
    """Make the primary context of a device beside the block, which has to make it current. There an error of the driver occurs again, and
    is reported."""
    thread = threading.Thread(
        target=_make, args=(index, made := list[D.CUdevice]()), name="gpumem-context", daemon=True
    )
    thread.start()
    try:
        yield
    finally:
        thread.join()
        for device in made:  # whoever made it current keeps it
            D.cuDevicePrimaryCtxRelease(device)


def _make(index: int, made: list[D.CUdevice]) -> None:
    (error,) = D.cuInit(0)
    if int(error):
        return
    error, device = D.cuDeviceGet(index)
    if int(error):
        return
    error, _ = D.cuDevicePrimaryCtxRetain(device)
    if not int(error):
        made.append(device)


def identity(index: int) -> int | None:
    """The number of the primary context, which is unique in the process: another one after `cudaDeviceReset` (CUDA Driver API, cuCtxGetId).
    None if the driver does not tell."""
    error, device = D.cuDeviceGet(index)
    if int(error):
        return None
    error, context = D.cuDevicePrimaryCtxRetain(device)
    if int(error):
        return None
    try:
        error, number = D.cuCtxGetId(context)
        return None if int(error) else int(number)
    finally:
        D.cuDevicePrimaryCtxRelease(device)
