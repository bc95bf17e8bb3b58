"""Windows on the simulated device: on a stream, on a graph's kernels, on one launch; both properties."""

from __future__ import annotations

from dataclasses import replace

import pytest
from workbench import LOOKUP, Workbench

from pytest_gpumem.devices.protocol import (
    AccessProperty,
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

    assert device.streams.windows(device.streams.capture(stream, body)) == (None, own)
    assert device.streams.windows(device.streams.capture(stream, body, window=window)) == (
        window,
        window,
    )
    device.l2.set_window(stream, streams)
    assert device.streams.windows(device.streams.capture(stream, body)) == (streams, own)


def test_what_persists_is_kept_until_a_reset(table: Table) -> None:
    for hit, persists in [(AccessProperty.PERSISTING, True), (AccessProperty.STREAMING, False)]:
        device, roofline = table.device, table.device.roofline
        device.kernels.launch(
            table.launch, table.bench.stream, window=replace(table.window, hit=hit)
        )
        assert roofline.persisting is persists, hit
        device.l2.request_set_aside(device.l2.set_aside())
        assert roofline.persisting is persists, hit
        device.l2.reset_persisting()
        assert not roofline.persisting, hit
