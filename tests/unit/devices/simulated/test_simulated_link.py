"""The simulated host link: two copy engines, streams that wait for each other, what lies where, allocators."""

from __future__ import annotations

import numpy as np
import pytest
from workbench import Workbench

from pytest_gpumem.devices.memory_kinds import MemoryKind
from pytest_gpumem.devices.protocol import (
    HoldExpired,
)


def test_a_hold_that_another_stream_waits_for_runs_out(bench: Workbench) -> None:
    device, other = bench.device, bench.device.streams.create()
    device.streams.hold(bench.stream, 0.01)
    device.streams.join(other, bench.stream)
    began = device.now()
    device.streams.synchronize(other)
    assert device.now() - began >= 0.01
    with pytest.raises(HoldExpired):
        device.streams.synchronize(bench.stream)


def test_parts_share_the_content_of_the_whole(bench: Workbench) -> None:
    device = bench.device
    whole = bench.memory(4096, MemoryKind.PINNED)
    device.content.from_host(whole, np.arange(1024, dtype="i4"))
    part = whole.part(1024, 2048)
    assert device.content.to_host(part, "i4", 512)[0] == 256
    device.content.from_host(part, np.full(512, -1, dtype="i4"))
    seen = device.content.to_host(whole, "i4", 1024)
    assert [seen[255], seen[256], seen[767], seen[768]] == [255, -1, -1, 768]
    assert (part.address, part.host_address) == (whole.address + 1024, whole.host_address + 1024)
