"""The base of every peer's worker: one device, the triad's three arrays, and its kernel as this project compiles it."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from msgspec import structs

from pytest_gpumem.devices.opening import DeviceChoice
from pytest_gpumem.kernels.kernel import COMPILE_OPTIONS, read_source
from pytest_gpumem.measuring.bound import Kernels
from pytest_gpumem.measuring.case import target_of
from pytest_gpumem.measuring.harness import Harness
from pytest_gpumem.measuring.measure import Plan, measure
from pytest_gpumem.memory.buffers import Arena, Buffer
from pytest_gpumem.ranges import Ranges
from pytest_gpumem.records.measurement import Measurement

SCALAR = 3.0
"""a = b + 3 c."""


class TriadBench:
    """An open device with nothing on it.

    Args:
        chosen: its context is created here.
    """

    def __init__(self, chosen: DeviceChoice) -> None:
        self.index = chosen.index or 0  # which other libraries want to be told
        self.device = chosen.open()
        self.arena = Arena(self.device, seed=0)
        self.triad = Kernels(self.device).triad
        self._harness = Harness(self.device, Ranges(), profiled=False)

    @contextmanager
    def arrays(self, nbytes: int) -> Iterator[tuple[Buffer, Buffer, Buffer]]:
        """a, b and c, allocated in this order with `cudaMalloc` and freed at the end, for every peer alike."""
        made = tuple(self.arena.buffer(nbytes, "f4") for _ in range(3))
        try:
            yield made[0], made[1], made[2]
        finally:
            for buffer in made:
                self.arena.release(buffer.allocation)

    def measure(self, arguments: tuple[Any, ...], plan: Plan) -> tuple[Measurement, float]:
        """Measure the triad by this project, as a test does; and the seconds of wall time that it took."""
        begun = time.perf_counter()
        target = target_of(self.triad, arguments, {}, arena=self.arena)
        measurement = measure(self._harness, target, plan, "triad")
        return measurement, time.perf_counter() - begun

    def launcher(self, arrays: tuple[Buffer, Buffer, Buffer]) -> Callable[[int], None]:
        """A function that launches the triad once on a `cudaStream_t`, given as an integer: what the other peers time.

        The same source, options and launch shape as this project's own launches, so that CuPy finds the same binary.
        """
        import cupy
        import numpy as np

        kernel = self.triad.kernel
        buffers, values = self.triad.arguments((*arrays, SCALAR), {})
        call = self.triad.launch(buffers, values).call
        shape = kernel.shape(self.device.facts, call)
        assert kernel.source is not None
        packed: list[Any] = []
        for item in kernel.arguments_of(call):
            if isinstance(item, int):
                packed.append(np.int64(item))
            elif item in buffers:
                packed.append(np.uint64(buffers[item].address))
            else:
                packed.append(np.float32(values[item]))
        entry = kernel.expression("f4", shape)
        module = cupy.RawModule(
            code=read_source(kernel.source),
            options=tuple(COMPILE_OPTIONS),
            name_expressions=[entry],
        )
        function = module.get_function(entry).kernel
        grid, block, arguments = (shape.blocks,), (shape.threads,), tuple(packed)
        streams: dict[int, Any] = {}

        def launch(handle: int) -> None:
            stream = streams.get(handle)
            if stream is None:
                stream = streams[handle] = cupy.cuda.Stream.from_external(_Handle(handle))
            function(grid, block, arguments, shared_mem=shape.shared_bytes, stream=stream)

        return launch

    def conditions(self) -> dict[str, Any]:
        """Clocks, throttle reasons, temperature and power now."""
        return structs.asdict(self.device.conditions())

    def close(self) -> None:
        """Free everything."""
        self._harness.close()
        self.arena.close()
        self.device.close()


class _Handle:
    """A stream of another library, as the CUDA stream protocol wants it."""

    def __init__(self, handle: int) -> None:
        self._handle = handle

    def __cuda_stream__(self) -> tuple[int, int]:
        return (0, self._handle)
