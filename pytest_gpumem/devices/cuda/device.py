"""A CUDA device: its facets, and the context that they share."""

from __future__ import annotations

import os
import secrets
import time
from contextlib import AbstractContextManager

from cuda.bindings import runtime as R  # noqa: N812

from pytest_gpumem.devices.cuda.allocations import CudaMemory
from pytest_gpumem.devices.cuda.compiler import Compiler
from pytest_gpumem.devices.cuda.content import CudaContent
from pytest_gpumem.devices.cuda.context import Context
from pytest_gpumem.devices.cuda.counters import Beacon, CudaCounters
from pytest_gpumem.devices.cuda.errors import check
from pytest_gpumem.devices.cuda.facts import CudaUnavailable, uuid_of
from pytest_gpumem.devices.cuda.footprints import footprints, forget
from pytest_gpumem.devices.cuda.hints import CudaL2, CudaManaged
from pytest_gpumem.devices.cuda.launches import CudaKernels
from pytest_gpumem.devices.cuda.nvml import ConditionReader
from pytest_gpumem.devices.cuda.places import peer_access
from pytest_gpumem.devices.cuda.streams import CudaGraphs, CudaStreams
from pytest_gpumem.devices.protocol import Device, DeviceError
from pytest_gpumem.records.device import DeviceFacts
from pytest_gpumem.records.measurement import Conditions


class CudaDevice(Device):
    """One GPU through cuda-bindings. Opening it creates (or joins) the primary context."""

    def __init__(self, index: int, facts: DeviceFacts) -> None:
        self._index, self._facts = index, facts
        _check_same(index, facts)
        self._context = context = Context(index)
        with context.current():
            compiler = Compiler(facts.compute_capability)
            self.memory = self._memory = CudaMemory(context, facts)
            self.content = CudaContent(compiler, facts, self._memory)
            self.graphs = graphs = CudaGraphs(context, facts)
            self.streams = self._streams = CudaStreams(context, compiler, self._memory, graphs)
            self.kernels = CudaKernels(index, facts, compiler)
            self.l2 = CudaL2(facts)
            self.managed = CudaManaged(index, facts)
            self._beacon = Beacon(index)
            self.counters = CudaCounters(index, self._beacon)
            self.footprints = self._footprints = footprints(index)
            self._footprints.free_bytes = self._memory.free_without_ours
            self._conditions = ConditionReader(facts)

    @property
    def facts(self) -> DeviceFacts:
        return self._facts

    def now(self) -> float:
        return time.perf_counter()

    def pause(self, seconds: float) -> None:
        time.sleep(seconds)

    def entropy(self, seed: int) -> int:
        return secrets.randbits(64)

    def conditions(self) -> Conditions:
        return self._conditions.read()

    def current(self) -> AbstractContextManager[None]:
        return self._context.current()

    def elsewhere(self) -> str | None:
        return self._context.elsewhere()

    def launches_wait(self) -> bool:
        return os.environ.get("CUDA_LAUNCH_BLOCKING", "0") not in ("", "0")

    def gone(self) -> str | None:
        return self._context.gone()

    def peer_access(self, allowed: bool) -> AbstractContextManager[None]:
        return peer_access(self._index, allowed)

    def close(self) -> None:
        forget(self._index)
        self.footprints.stop()
        if self.gone() is None:
            with self.current():
                self._streams.close()
                check(R.cudaDeviceSynchronize(), "waiting for the device")
                self._beacon.close()
                self.memory.make_room()
        self._context.close()


def _check_same(index: int, facts: DeviceFacts) -> None:
    """Check that this process numbers the GPUs as the one that read the facts did."""
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
