"""A stream that waits for the host: one thread spins on a flag in mapped host memory, with a time-out on the device's own timer.

Work queued behind it starts back to back once it is released, so that launch latency is not measured (nvbench's blocking kernel).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from pytest_gpumem.devices.cuda import host
from pytest_gpumem.devices.cuda.allocations import CudaMemory
from pytest_gpumem.devices.cuda.handles import CudaStream
from pytest_gpumem.devices.kinds import MemoryKind
from pytest_gpumem.devices.protocol import DeviceError, HoldExpired, Unsupported

# %globaltimer counts nanoseconds; __nanosleep keeps the one thread from flooding the host link with reads.
SOURCE = r"""
extern "C" __global__ void gpumem_hold(volatile unsigned int* slot, unsigned long long timeout_ns) {
    unsigned long long start, now;
    asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(start));
    unsigned int outcome = 1;
    while (slot[0] == 0) {
        asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now));
        if (now - start > timeout_ns) {
            outcome = 2;
            break;
        }
        __nanosleep(100);
    }
    slot[1] = outcome;
    __threadfence_system();
}
"""

_SLOT_WORDS = 32  # 128 bytes: no two holds share a cache line
_SLOTS = 64
_EXPIRED = 2


@dataclass(eq=False)
class CudaHold:
    """One waiting stream."""

    words: Any
    """The slot's two words: written by the host to release, by the kernel to say how it ended."""
    slot: int
    stream: CudaStream
    timeout: float

    def release(self) -> None:
        """Let the stream go on. If it had timed out before, `synchronize` raises `HoldExpired`."""
        self.words[0] = 1


class Holds:
    """The flags in mapped host memory, and which of them are in use."""

    def __init__(self, function: Any, memory: CudaMemory) -> None:
        self._function = function
        self._memory = memory.allocate(_SLOTS * _SLOT_WORDS * 4, MemoryKind.PINNED)
        if not self._memory.address:
            memory.free(self._memory)
            raise Unsupported("the device cannot map host memory: a stream cannot be held")
        self._words: Any = host.array(self._memory, "u4", _SLOTS * _SLOT_WORDS).reshape(_SLOTS, _SLOT_WORDS)
        self._free = list(range(_SLOTS))
        self._pending: list[CudaHold] = []

    def hold(self, stream: CudaStream, timeout: float) -> CudaHold:
        """Make `stream` wait. Raises `DeviceError` with all flags in use."""
        if not self._free:
            raise DeviceError(f"{_SLOTS} holds wait already: synchronize before asking for more")
        slot = self._free.pop()
        words = self._words[slot]
        words[:2] = 0
        hold = CudaHold(words, slot, stream, timeout)
        try:
            self._function(
                (1,),
                (1,),
                (np.uint64(self._memory.address + slot * _SLOT_WORDS * 4), np.uint64(round(timeout * 1e9))),
                stream=stream.cupy,
            )
        except BaseException:
            self._free.append(slot)
            raise
        self._pending.append(hold)
        return hold

    def settle(self, stream: CudaStream | None) -> None:
        """After `stream` (or, with None, the device) was synchronized: give flags back. Raises `HoldExpired` if one timed out."""
        if not self._pending:
            return
        done = [h for h in self._pending if stream is None or h.stream is stream]
        self._pending = [h for h in self._pending if h not in done]
        self._free.extend(h.slot for h in done)
        expired = [h for h in done if int(h.words[1]) == _EXPIRED]
        if expired:
            raise HoldExpired(
                f"the stream was held for {expired[0].timeout:g} s and not released: what was queued behind it waited for the device"
            )

    def release_all(self) -> None:
        """Let every stream go on."""
        for hold in self._pending:
            hold.release()
