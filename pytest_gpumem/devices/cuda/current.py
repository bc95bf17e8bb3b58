"""The current device of this thread, which the test's own code may choose too."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from cuda.bindings import driver as D  # noqa: N812
from cuda.bindings import runtime as R  # noqa: N812
from cupy.cuda import runtime

from pytest_gpumem.devices.cuda.errors import check, translated


class Current:
    """Makes one GPU current for the length of a block.

    It is made before the GPU is opened, which makes it current: the first block puts back what was current before that. If the process
    had no context then, there was no choice to put back, and putting one back would create a context on another GPU.
    """

    def __init__(self, index: int) -> None:
        self._index = index
        self._chosen = _chosen()

    @contextmanager
    def during(self) -> Iterator[None]:
        """Make the GPU current inside the block, and what was current before it afterwards, also after an error."""
        with translated("asking for the current device"):
            before = int(runtime.getDevice())
        if self._chosen is not None:
            before, self._chosen = self._chosen, None
        self._use(self._index)
        try:
            yield
        finally:
            self._use(before)

    def elsewhere(self) -> int | None:
        """Number of the GPU that is current instead; None if this one is."""
        now = int(runtime.getDevice())
        return None if now == self._index else now

    def _use(self, index: int) -> None:
        if runtime.getDevice() == index:
            return
        with translated(f"making GPU {index} current"):
            runtime.setDevice(index)
        # cuda-bindings carries a runtime of its own.
        check(R.cudaSetDevice(index), f"making GPU {index} current")


def _chosen() -> int | None:
    """The current device, if the process has a context already."""
    error, context = D.cuCtxGetCurrent()
    if int(error) != 0 or context is None or not int(context):
        return None
    with translated("asking for the current device"):
        return int(runtime.getDevice())
