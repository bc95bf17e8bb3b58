"""A CUDA device: its facets, and the context that they share."""

from __future__ import annotations

import os
import secrets
import time
from contextlib import AbstractContextManager

from cuda.bindings import runtime as R  # noqa: N812

from pytest_gpumem.devices.cuda import links
from pytest_gpumem.devices.cuda.allocations import CudaMemory
from pytest_gpumem.devices.cuda.compiler import Compiler
from pytest_gpumem.devices.cuda.content import CudaContent
from pytest_gpumem.devices.cuda.context import Context
from pytest_gpumem.devices.cuda.counters import CudaCounters
from pytest_gpumem.devices.cuda.errors import check
from pytest_gpumem.devices.cuda.facts import CudaUnavailable, uuid_of
from pytest_gpumem.devices.cuda.footprints import footprints, forget
from pytest_gpumem.devices.cuda.graphs import CudaGraphs
from pytest_gpumem.devices.cuda.l2 import CudaL2
from pytest_gpumem.devices.cuda.launches import CudaKernels
from pytest_gpumem.devices.cuda.managed import Beacon, CudaManaged
from pytest_gpumem.devices.cuda.nvml import ConditionReader
from pytest_gpumem.devices.cuda.nvrtc import KernelCompiler
from pytest_gpumem.devices.cuda.streams import CudaStreams
from pytest_gpumem.devices.protocol import DeviceError
from pytest_gpumem.records.device import DeviceFacts


class CudaDevice:
    """One GPU through cuda-bindings. Opening it creates (or joins) the primary context."""

    def __init__(self, index: int, facts: DeviceFacts, nvrtc: KernelCompiler) -> None:
        self.facts = facts
        self._index = index
        _check_same(index, facts)
        self._context = context = Context(index)
        self.current, self.elsewhere, self.gone = context.current, context.elsewhere, context.gone
        with self.current():
            compiler = Compiler(nvrtc)
            self.memory = CudaMemory(context, facts)
            self.content = CudaContent(compiler, facts, self.memory)
            self.graphs = CudaGraphs(context, facts)
            self.streams = CudaStreams(context, compiler, self.memory, self.graphs)
            self.kernels = CudaKernels(index, facts, compiler)
            self.l2 = CudaL2(facts)
            self.managed = CudaManaged(index, facts)
            self._beacon = Beacon(index)
            self.counters = CudaCounters(index, self._beacon)
            self.footprints = footprints(index)
            self.footprints.free_bytes = self.memory.free_without_ours
            self.conditions = ConditionReader(facts).read

    def now(self) -> float:
        return time.perf_counter()

    def pause(self, seconds: float) -> None:
        time.sleep(seconds)

    def entropy(self, seed: int) -> int:
        return secrets.randbits(64)

    def launches_wait(self) -> bool:
        return os.environ.get("CUDA_LAUNCH_BLOCKING", "0") not in ("", "0")

    def peer_access(self, allowed: bool) -> AbstractContextManager[None]:
        return links.peer_access(self._index, allowed)

    def close(self) -> None:
        forget(self._index)
        self.footprints.stop()
        if self.gone() is None:
            with self.current():
                self.streams.close()
                check(R.cudaDeviceSynchronize(), "waiting for the device")
                self._beacon.close()
                self.memory.make_room()
        self._context.close()


def _check_same(index: int, facts: DeviceFacts) -> None:
    """Another process read the facts, and another may hold the lock of that GPU.
    Raises `DeviceError`: this process numbers the GPUs otherwise.
    """
    try:
        now = uuid_of(index)
    except CudaUnavailable as reason:
        raise DeviceError(f"opening device {index}: {reason}") from None
    if facts.uuid is not None and now != facts.uuid:
        raise DeviceError(
            f"device {index} is {now}, and was {facts.uuid} at the session's start: "
            "CUDA_VISIBLE_DEVICES has changed, or CUDA was "
            "initialised before it was set"
        )
