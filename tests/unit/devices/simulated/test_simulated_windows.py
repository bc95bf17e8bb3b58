"""Windows on the simulated device: on a stream, on a graph's kernels, on one launch; both properties."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
from workbench import LOOKUP, Workbench

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
        device = self.device = self.bench.device
        device.l2.request_set_aside(25 * MiB)
        self.memory = self.bench.memory(24 * MiB)
        self.launch: Launch = self.bench.bind(
            LOOKUP, blocks=32, table=self.memory, out=self.bench.memory(GiB)
        )
        self.window = WindowSpec(self.memory.address, self.memory.nbytes, 1.0)

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


def test_what_persists_is_kept_until_a_reset(table: Table) -> None:
    for hit, persists in [(AccessProperty.PERSISTING, True), (AccessProperty.STREAMING, False)]:
        device, l2 = table.device, table.device.roofline.l2
        device.kernels.launch(
            table.launch, table.bench.stream, window=replace(table.window, hit=hit)
        )
        assert l2.persisting is persists, hit
        device.l2.request_set_aside(device.l2.set_aside())
        assert l2.persisting is persists, hit
        device.l2.reset_persisting()
        assert not l2.persisting, hit


def test_what_persists_ends_without_a_reset_too(table: Table) -> None:
    for ends in ["another set-aside", "a window with the normal property"]:
        device, stream = table.device, table.bench.stream
        device.kernels.launch(table.launch, stream, window=table.window)
        if ends == "another set-aside":
            device.l2.request_set_aside(0)
        else:
            device.kernels.launch(
                table.launch, stream, window=replace(table.window, hit=AccessProperty.NORMAL)
            )
        assert not device.roofline.l2.persisting, ends


def test_no_time_depends_on_a_window(table: Table) -> None:
    device, stream = table.device, table.bench.stream
    without = table.bench.interval(table.plain)
    under = table.bench.interval(
        lambda: device.kernels.launch(table.launch, stream, window=table.window)
    )
    assert under == pytest.approx(without, rel=0.01)
