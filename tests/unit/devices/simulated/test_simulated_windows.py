"""Windows on the simulated device: on a stream, on a graph's kernels, on one launch; both properties."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from workbench import LOOKUP, OVERWRITE, SCAN, Workbench

from pytest_gpumem.devices.protocol import (
    AccessProperty,
    CannotCapture,
    DeviceError,
    Launch,
    WindowSpec,
)
from pytest_gpumem.units import GiB, MiB


class Table:
    """A table of 24 MiB that is looked up beside a stream, with 25 MiB set aside."""

    def __init__(self) -> None:
        self.bench = Workbench()
        self.bench.warm_up()
        device = self.device = self.bench.device
        device.l2.request_set_aside(25 * MiB)
        self.memory = self.bench.memory(24 * MiB)
        self.launch: Launch = self.bench.bind(
            LOOKUP, blocks=32, table=self.memory, out=self.bench.memory(GiB)
        )
        self.window = WindowSpec(self.memory.address, self.memory.nbytes, 1.0)

    def time(self, queue: Any) -> float:
        """Seconds of what `queue` queues, the second time."""
        _, seconds = self.bench.interval(queue), self.bench.interval(queue)
        self.device.l2.reset_persisting()
        return seconds

    def plain(self) -> None:
        self.device.kernels.launch(self.launch, self.bench.stream)


@pytest.fixture
def table() -> Table:
    return Table()


def test_a_graph_gives_the_window_of_each_of_its_kernels(table: Table) -> None:
    device, stream, window = table.device, table.bench.stream, table.window
    own, streams = replace(window, hit_ratio=0.25), replace(window, hit_ratio=0.5)

    def body() -> None:
        device.kernels.launch(table.launch, stream)
        device.kernels.launch(table.launch, stream, window=own)

    assert device.graphs.windows(device.graphs.capture(stream, body)) == (None, own)
    assert device.graphs.windows(device.graphs.capture(stream, body, window=window)) == (
        window,
        window,
    )
    device.l2.set_window(stream, streams)
    assert device.graphs.windows(device.graphs.capture(stream, body)) == (streams, own)


def test_windows_that_cannot_be_are_refused_everywhere(table: Table) -> None:
    device, stream = table.device, table.bench.stream
    wrong = replace(table.window, miss=AccessProperty.PERSISTING)
    queues: tuple[Callable[[], object], ...] = (
        lambda: device.l2.set_window(stream, wrong),
        lambda: device.kernels.launch(table.launch, stream, window=wrong),
        lambda: device.graphs.capture(stream, table.plain, window=wrong),
    )
    for queue in queues:
        with pytest.raises(DeviceError, match="a miss property of"):
            queue()
    graph = device.graphs.capture(stream, table.plain)
    with pytest.raises(CannotCapture, match="replays a graph"):
        device.graphs.capture(stream, lambda: device.graphs.replay(graph, stream))


@pytest.mark.parametrize("hit", [AccessProperty.NORMAL, AccessProperty.STREAMING])
def test_only_the_persisting_property_persists(table: Table, hit: AccessProperty) -> None:
    device, stream = table.device, table.bench.stream
    without = table.time(table.plain)
    other = table.time(
        lambda: device.kernels.launch(table.launch, stream, window=replace(table.window, hit=hit))
    )
    assert other > 0.97 * without


def test_a_window_with_the_normal_property_lets_lines_go_as_they_are_touched(table: Table) -> None:
    bench, device = table.bench, table.device
    reading = bench.bind(SCAN, x=table.memory)
    fresh = bench.cold(reading)
    device.kernels.launch(reading, bench.stream, window=table.window)
    device.streams.synchronize()
    assert bench.cold(reading) < 0.8 * fresh
    normal = replace(table.window, hit=AccessProperty.NORMAL)
    other = bench.bind(OVERWRITE, x=bench.memory(MiB))
    device.kernels.launch(other, bench.stream, window=normal)  # touches nothing of it
    device.streams.synchronize()
    assert bench.cold(reading) < 0.8 * fresh
    device.kernels.launch(reading, bench.stream, window=normal)
    device.streams.synchronize()
    assert bench.cold(reading) == pytest.approx(fresh, rel=0.05)
