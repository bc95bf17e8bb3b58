"""Bring the L2 cache into the state of a mode before every sample."""

from __future__ import annotations

from pytest_gpumem.devices.kinds import MemoryKind
from pytest_gpumem.devices.protocol import Device, Launch, Stream
from pytest_gpumem.kernels.catalogue import CATALOGUE
from pytest_gpumem.kernels.stream import tile_bytes
from pytest_gpumem.measuring.bound import BoundKernel
from pytest_gpumem.memory.buffers import Arena

FLUSH_FACTOR = 2
"""Size over L2: nothing of the sample before survives least-recently-used eviction, an eighth survives random eviction."""


class Flush:
    """Fills L2 with lines of a buffer of its own.

    clean-cold reads: its lines are evicted for free. dirty-cold writes: the kernel pays for their write-back, which made a 32 MiB triad on
    an H100 26 % slower. hot does nothing.
    """

    def __init__(self, device: Device, mode: str) -> None:
        self._device = device
        self._launch: Launch | None = None
        self._arena = Arena(device, seed=0)
        if mode == "hot":
            return
        try:
            self._launch = self._made(mode)
        except BaseException:
            self._arena.close()
            raise

    def _made(self, mode: str) -> Launch:
        device = self._device
        swept = self._arena.buffer(FLUSH_FACTOR * device.facts.l2_bytes, "f4", MemoryKind.DEVICE)
        if mode == "clean-cold":
            sums = self._arena.buffer((swept.nbytes // tile_bytes("read"),), "f4", MemoryKind.DEVICE)
            return self._bound("read").launch({"a": swept, "sums": sums}, {})
        return self._bound("write").launch({"a": swept}, {"value": 1.0})

    def _bound(self, name: str) -> BoundKernel:
        return BoundKernel(CATALOGUE[name], self._device, self._arena.stream)

    def __call__(self, stream: Stream) -> None:
        """Queue the flush."""
        if self._launch is not None:
            self._device.kernels.launch(self._launch, stream)

    def close(self) -> None:
        """Free the buffer."""
        self._arena.close()
