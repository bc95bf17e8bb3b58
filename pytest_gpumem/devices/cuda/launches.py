"""A launch in the form that the driver takes: function, grid, block and packed arguments, prepared
once per `Launch`."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import cast

from pytest_gpumem.devices.checks import (
    check_live,
    check_window,
    copied_by,
    element_type,
    packed_arguments,
)
from pytest_gpumem.devices.cuda.compiler import Compiler, KernelCall
from pytest_gpumem.devices.cuda.content import copy
from pytest_gpumem.devices.cuda.context import CudaStream
from pytest_gpumem.devices.cuda.guests import arrays
from pytest_gpumem.devices.cuda.hints import launch_attribute
from pytest_gpumem.devices.cuda.places import current_gpu
from pytest_gpumem.devices.protocol import DeviceError, Foreign, Launch, Stream, WindowSpec
from pytest_gpumem.records.device import DeviceFacts


class CudaKernels:
    """Launches on one device, each prepared once."""

    def __init__(self, index: int, facts: DeviceFacts, compiler: Compiler) -> None:
        self._index = index
        self._facts = facts
        self._compiler = compiler
        # the current stream of the libraries, inside `current_stream`
        self._entered: Stream | None = None

    def compile(self, launch: Launch) -> None:
        if launch.kernel.source is not None:
            self._prepared(launch)

    def launch(self, launch: Launch, stream: Stream, *, window: WindowSpec | None = None) -> None:
        if window is not None:
            check_window(window, self._facts)
        if launch.kernel.source is None:
            copy(*copied_by(launch), stream)
            return
        check_live(launch)
        call = self._prepared(launch)
        if window is None:
            call.queue(cast(CudaStream, stream))
        else:
            call.queue_with(cast(CudaStream, stream), launch_attribute(window))

    @contextmanager
    def current_stream(self, stream: Stream) -> Iterator[None]:
        outer, self._entered = self._entered, stream
        try:
            with arrays.current(self._index, cast(CudaStream, stream)):
                yield
        finally:
            self._entered = outer

    def call(self, foreign: Foreign, stream: Stream) -> None:
        entered = stream is self._entered
        with nullcontext() if entered else arrays.current(self._index, cast(CudaStream, stream)):
            foreign.function()
            now = current_gpu()
        if now != self._index:
            raise DeviceError(
                f"the measured function made GPU {now} current, while this session measures GPU "
                f"{self._index}: select it by --gpumem-device cuda:{now}"
            )

    def _prepared(self, launch: Launch) -> KernelCall:
        if launch.backing is None:
            function = self._compiler.function(launch.kernel, element_type(launch), launch.shape)
            doing = f"launching kernel {launch.kernel.name!r}"
            launch.backing = KernelCall(function, launch.shape, packed_arguments(launch), doing)
        call: KernelCall = launch.backing
        return call
