"""A CUDA device: its parts, and the context that they share."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import cast

from cuda.bindings import runtime as R

from pytest_gpumem.devices.cuda.allocations import CudaMemory
from pytest_gpumem.devices.cuda.compiler import Compiler, KernelCall
from pytest_gpumem.devices.cuda.content import CudaContent, copy
from pytest_gpumem.devices.cuda.context import Context, CudaStream, check
from pytest_gpumem.devices.cuda.counters import CudaCounters
from pytest_gpumem.devices.cuda.facts import uuid_of
from pytest_gpumem.devices.cuda.footprints import footprints
from pytest_gpumem.devices.cuda.guests import arrays
from pytest_gpumem.devices.cuda.nvml import ConditionReader
from pytest_gpumem.devices.cuda.places import current_gpu, peer_access
from pytest_gpumem.devices.cuda.streams import CudaL2, CudaStreams, launch_attribute
from pytest_gpumem.devices.errors import NoDevice
from pytest_gpumem.devices.protocol import Device, DeviceError, Foreign, Launch, Stream, WindowSpec
from pytest_gpumem.records.device import Conditions, DeviceFacts


class CudaKernels:
    def __init__(self, index: int, compiler: Compiler) -> None:
        self._index = index
        self._compiler = compiler
        self._current: Stream | None = None  # of the innermost open `current_stream`

    def compile(self, launch: Launch) -> None:
        if launch.kernel.source is not None:
            self._prepared(launch)

    def launch(self, launch: Launch, stream: Stream, *, window: WindowSpec | None = None) -> None:
        if launch.kernel.source is None:
            copy(*launch.copied(), stream)
            return
        launch.check_live()
        call = self._prepared(launch)
        if window is None:
            call.queue(stream)
        else:
            call.queue_with(stream, launch_attribute(window))

    @contextmanager
    def current_stream(self, stream: Stream) -> Iterator[None]:
        outer, self._current = self._current, stream
        try:
            with arrays.current(self._index, cast(CudaStream, stream)):
                yield
        finally:
            self._current = outer

    def call(self, foreign: Foreign, stream: Stream) -> None:
        if stream is not self._current:
            with self.current_stream(stream):
                self.call(foreign, stream)  # now `stream` is the current one
            return
        foreign.function()
        now = current_gpu()
        if now != self._index:
            raise DeviceError(
                f"the measured function made GPU {now} current, while this session measures GPU "
                f"{self._index}: select it by --gpumem-device cuda:{now}"
            )

    def _prepared(self, launch: Launch) -> KernelCall:
        if launch.backing is None:
            function = self._compiler.function(launch.kernel, launch.element_type, launch.shape)
            doing = f"launching kernel {launch.kernel.name!r}"
            launch.backing = KernelCall(function, launch.shape, launch.packed_arguments(), doing)
        call: KernelCall = launch.backing
        return call


class CudaDevice(Device):
    """One GPU through cuda-bindings. Opening it creates (or joins) the primary context."""

    streams: CudaStreams
    memory: CudaMemory
    counters: CudaCounters

    def __init__(self, index: int, facts: DeviceFacts) -> None:
        self._index, self.facts = index, facts
        _check_same(index, facts)
        self._context = context = Context(index)
        with context.current():
            compiler = Compiler(facts.compute_capability)
            self.memory = CudaMemory(context, facts)
            self.content = CudaContent(index, compiler, facts, self.memory)
            self.streams = CudaStreams(context, compiler, self.memory)
            self.kernels = CudaKernels(index, compiler)
            self.l2 = CudaL2(facts)
            self.counters = CudaCounters(index)
            self.footprints = footprints(index)
            self.footprints.free_bytes = self.memory.free_without_ours  # only a device can tell
            self._conditions = ConditionReader(facts)

    def now(self) -> float:
        return time.perf_counter()

    def pause(self, seconds: float) -> None:
        time.sleep(seconds)

    def conditions(self) -> Conditions:
        return self._conditions.read()

    def current(self) -> AbstractContextManager[None]:
        return self._context.current()

    def in_own_context(self) -> bool:
        return self._context.in_own_context()

    def launches_wait(self) -> bool:
        return os.environ.get("CUDA_LAUNCH_BLOCKING", "0") not in ("", "0")

    def gone(self) -> str | None:
        return self._context.gone()

    def peer_access(self, allowed: bool) -> AbstractContextManager[None]:
        return peer_access(self._index, allowed)

    def close(self) -> None:
        footprints.cache_clear()
        self.footprints.stop()
        if self.gone() is None:
            with self.current():
                self.streams.close()
                check(R.cudaDeviceSynchronize(), "waiting for the device")
                self.counters.close()
                self.memory.make_room()  # frees what is kept for reuse
        self._context.close()


def _check_same(index: int, facts: DeviceFacts) -> None:
    """Check that this process numbers GPUs as the process that read the facts."""
    try:
        now = uuid_of(index)
    except NoDevice as reason:
        raise DeviceError(f"opening device {index}: {reason}") from None
    if facts.uuid is not None and now != facts.uuid:
        raise DeviceError(
            f"device {index} is {now}, and was {facts.uuid} at the session's start: "
            "CUDA_VISIBLE_DEVICES has changed, or CUDA was initialised before it was set"
        )
