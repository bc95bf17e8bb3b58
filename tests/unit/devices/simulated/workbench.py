"""Kernels of these tests' own, and a simulated device with a stream to launch them on."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from typing import Any

import numpy as np

from pytest_gpumem.devices.memory_kinds import MemoryKind
from pytest_gpumem.devices.protocol import Allocation, Graph, Launch
from pytest_gpumem.devices.simulated.datasheets import DATASHEETS
from pytest_gpumem.devices.simulated.device import SimulatedDevice
from pytest_gpumem.kernels.kernel import (
    Access,
    ArrayFacts,
    Call,
    Kernel,
    LaunchShape,
    Parameter,
    Role,
)


def full_grid(facts: Any, call: Call) -> LaunchShape:
    return LaunchShape(call.blocks or facts.sm_count * 8, 256)


def touch(
    call: Call, name: str, direction: Any, *, requested: int | None = None, **more: Any
) -> Access:
    nbytes = call.arrays[name].nbytes
    return Access(name, direction, nbytes, nbytes if requested is None else requested, **more)


def kernel(
    name: str,
    roles: dict[str, Role],
    accesses: Any,
    reference: Any,
    *,
    shape: Any = full_grid,
    **more: Any,
) -> Kernel:
    parameters = tuple(Parameter(array, role) for array, role in roles.items())
    return Kernel(
        name=name,
        parameters=parameters,
        shape=shape,
        accesses=accesses,
        source="tests.cu",
        reference=reference,
        **more,
    )


def scale(sectors: float = 4.0) -> Kernel:
    """y = 3 x."""
    return kernel(
        "scale",
        {"y": Role.WRITE, "x": Role.READ},
        lambda call: tuple(
            touch(call, *access, sectors_per_request=sectors)
            for access in (("x", "read"), ("y", "write"))
        ),
        lambda arrays, _: {"y": arrays["x"] * arrays["x"].dtype.type(3)},
    )


ACCUMULATE = kernel(
    "accumulate",
    {"x": Role.READ, "y": Role.UPDATE},
    lambda call: (touch(call, "x", "read"), touch(call, "y", "read"), touch(call, "y", "write")),
    lambda arrays, _: {"y": arrays["x"] + arrays["y"]},
)
"""y = x + y."""
LOOKUP = kernel(
    "lookup",
    {"out": Role.WRITE, "table": Role.READ},
    lambda call: (
        touch(call, "table", "read", requested=call.arrays["out"].nbytes),
        touch(call, "out", "write"),
    ),
    lambda arrays, _: {"out": np.resize(arrays["table"], arrays["out"].size)},
    shape=lambda facts, call: LaunchShape(call.blocks or 2 * facts.sm_count, 1024),
)
"""out[i] = table[i % len(table)]."""
SCAN = kernel(
    "scan",
    {"x": Role.READ},
    lambda call: (touch(call, "x", "read"),),
    lambda arrays, _: {},
)
"""Reads all of x."""
OVERWRITE = kernel(
    "overwrite",
    {"x": Role.WRITE},
    lambda call: (touch(call, "x", "write"),),
    lambda arrays, _: {"x": np.ones_like(arrays["x"])},
)
"""Writes all of x."""
WALK = kernel(
    "walk",
    {"nodes": Role.READ},
    lambda call: (
        Access(
            "nodes",
            "read",
            *(call.arrays["nodes"].nbytes // 16,) * 2,
            sectors_per_request=32.0,
            dependent=True,
        ),
    ),
    lambda arrays, _: {},
    shape=lambda facts, call: LaunchShape(1, 1),
    accesses_per_launch=lambda call: call.arrays["nodes"].size // 16,
)
"""One thread follows all nodes of 64 bytes."""


class Workbench:
    """A device, a stream, and what tests repeat."""

    def __init__(self, name: str = "h100", seed: int = 0) -> None:
        self.device = SimulatedDevice(DATASHEETS[name], seed=seed)
        self.stream = self.device.streams.create()

    def memory(self, nbytes: int, kind: MemoryKind = MemoryKind.DEVICE) -> Allocation:
        return self.device.memory.allocate(nbytes, kind)

    def bind(
        self, kernel: Kernel, blocks: int | None = None, dtype: str = "f4", **arrays: Allocation
    ) -> Launch:
        size = np.dtype(dtype).itemsize
        facts = {
            n: ArrayFacts(a.nbytes // size, dtype, size, a.kind.on_host) for n, a in arrays.items()
        }
        call = Call(facts, {}, blocks)
        return Launch(kernel, call, kernel.shape(self.device.facts, call), arrays)

    def run(self, launch: Launch) -> None:
        self.device.kernels.launch(launch, self.stream)
        self.device.streams.synchronize()

    def time(self, launch: Launch) -> float:
        """Seconds of one launch, launch latency hidden."""
        return self.interval(lambda: self.device.kernels.launch(launch, self.stream))

    def interval(self, work: Callable[[], object]) -> float:
        """Seconds between an event before and one after work on the stream, which is held until all of it is queued."""
        streams, start, end = (
            self.device.streams,
            self.device.streams.event(),
            self.device.streams.event(),
        )
        held = streams.hold(self.stream, 10.0)
        streams.record(start, self.stream)
        work()
        streams.record(end, self.stream)
        streams.release(held)
        streams.synchronize()
        return streams.elapsed(start, end)

    def captured(self, launch: Launch) -> tuple[Graph, Callable[[], float]]:
        """A graph of one launch between two events, and what gives the seconds between these after a replay."""
        streams, start, end = (
            self.device.streams,
            self.device.streams.event(),
            self.device.streams.event(),
        )

        def body() -> None:
            streams.record(start, self.stream)
            self.device.kernels.launch(launch, self.stream)
            streams.record(end, self.stream)

        return self.device.streams.capture(self.stream, body), lambda: streams.elapsed(start, end)

    def replay(self, graph: Graph) -> None:
        self.device.streams.replay(graph, self.stream)
        self.device.streams.synchronize()

    def hot(self, launch: Launch, samples: int = 9) -> float:
        """Median seconds of a launch after launches of its own kind."""
        return statistics.median([self.time(launch) for _ in range(samples + 2)][2:])

    def flush(self) -> None:
        """Reads twice the L2."""
        if not hasattr(self, "_flush"):
            self._flush = self.bind(SCAN, x=self.memory(2 * self.device.facts.l2_bytes))
        self.run(self._flush)

    def cold(self, launch: Launch, samples: int = 9) -> float:
        """Median seconds of a launch after a read flush."""
        times = []
        for _ in range(samples):
            self.flush()
            times.append(self.time(launch))
        return statistics.median(times)
