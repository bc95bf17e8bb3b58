"""A CUDA device: its facets, and the context that they share."""

from __future__ import annotations

import gc
import os
import secrets
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager

import cupy
from cuda.bindings import driver as D  # noqa: N812
from cuda.bindings import runtime as R  # noqa: N812
from cupy.cuda import runtime

from pytest_gpumem.devices.cuda import links
from pytest_gpumem.devices.cuda.allocations import CudaMemory
from pytest_gpumem.devices.cuda.compiler import Compiler
from pytest_gpumem.devices.cuda.content import CudaContent
from pytest_gpumem.devices.cuda.counters import CudaCounters
from pytest_gpumem.devices.cuda.errors import CUPY_ERRORS, check, translated
from pytest_gpumem.devices.cuda.facts import CudaUnavailable, uuid_of
from pytest_gpumem.devices.cuda.footprints import footprints, forget
from pytest_gpumem.devices.cuda.graphs import CudaGraph, CudaGraphs
from pytest_gpumem.devices.cuda.handles import CudaStream
from pytest_gpumem.devices.cuda.l2 import CudaL2
from pytest_gpumem.devices.cuda.launches import CudaKernels
from pytest_gpumem.devices.cuda.managed import Beacon, CudaManaged
from pytest_gpumem.devices.cuda.nvml import ConditionReader
from pytest_gpumem.devices.cuda.nvrtc import KernelCompiler
from pytest_gpumem.devices.cuda.primary import identity
from pytest_gpumem.devices.cuda.streams import CudaStreams
from pytest_gpumem.devices.protocol import ContextLost, DeviceError
from pytest_gpumem.records.device import DeviceFacts


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


class CudaDevice:
    """One GPU through CuPy and cuda-bindings. Opening it creates (or joins) the primary context and makes the device current."""

    def __init__(self, index: int, facts: DeviceFacts, nvrtc: KernelCompiler) -> None:
        self._index = index
        self.facts = facts
        _check_same(index, facts)
        current = Current(index)
        self.current, self.elsewhere = current.during, current.elsewhere
        with translated(f"opening device {index}"):
            cupy.cuda.Device(index).use()
            runtime.free(0)  # creates the context now
        # cuda-bindings carries a runtime of its own; both share the primary context.
        check(R.cudaSetDevice(index), f"opening device {index}")
        self._context = identity(index)
        self._dangling: list[object] = []
        compiler = Compiler(nvrtc)
        self.memory = CudaMemory(index, facts)
        self.content = CudaContent(compiler, facts, self.memory)
        self.graphs = CudaGraphs(facts)
        self.streams = CudaStreams(compiler, self.memory, self.graphs)
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

    def was_reset(self) -> bool:
        if not self._dangling and identity(self._index) != self._context:
            # Also those in garbage that is not collected yet: to destroy a handle of the context before is a segmentation fault.
            kinds = (cupy.cuda.Stream, cupy.cuda.Event, CudaStream, CudaGraph)
            self._dangling = [
                self,
                *(one for one in gc.get_objects() if issubclass(type(one), kinds)),
            ]
            _DANGLING.append(self._dangling)
        return bool(self._dangling)

    def peer_access(self, allowed: bool) -> AbstractContextManager[None]:
        return links.peer_access(self._index, allowed)

    def close(self) -> None:
        forget(self._index)
        if self.was_reset():
            self.footprints.stop()
            return  # every handle went with the context that was opened
        try:
            self.footprints.stop()
            self.streams.close()
            runtime.deviceSynchronize()
            self._beacon.close()
            self.memory.make_room()
        except (*CUPY_ERRORS, ContextLost):
            pass  # a lost context: there is nothing left to free


_DANGLING: list[
    list[object]
] = []  # objects that live on because the device was reset under their handles


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
            f"device {index} is {now}, and was {facts.uuid} at the session's start: CUDA_VISIBLE_DEVICES has changed, or CUDA was "
            "initialised before it was set"
        )
