"""The primary context of a GPU, made by a thread while modules are imported: the driver takes a third of a second, and no interpreter."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

from cuda.bindings import driver as D  # noqa: N812


@contextmanager
def made_meanwhile(index: int) -> Iterator[None]:
    """Make the primary context of a device beside the block, which has to make it current. What the driver refuses is refused again, and
    reported, when the context is made current."""
    thread = threading.Thread(target=_make, args=(index, made := list[D.CUdevice]()), name="gpumem-context", daemon=True)
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
