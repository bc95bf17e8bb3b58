"""Every kind of memory is measured at two or more addresses, or says why not."""

from __future__ import annotations

import pytest
from bench import Bench

from pytest_gpumem.devices.memory_kinds import MemoryKind
from pytest_gpumem.devices.protocol import Unsupported
from pytest_gpumem.units import MiB


@pytest.mark.parametrize("kind", MemoryKind)
def test_every_kind_is_measured_on_several_placements_or_says_why_not(kind: MemoryKind) -> None:
    bench = Bench()
    give = getattr(bench.memory, kind.value)
    try:
        buffers = [give(1 * MiB) for _ in range(2)]
    except Unsupported:
        assert kind.on_peer, "the simulated device has every kind but memory of another GPU"
        return
    found = bench.measure("memcpy", *buffers, placements=3)
    addresses = {
        one.arrays["source"].address or one.arrays["source"].host_address
        for one in bench.device.launched
        if "source" in one.arrays
    }
    if kind.movable:
        assert len(found.placements) >= 3
        assert len(addresses) >= 3
    else:
        assert (len(found.placements), len(addresses)) == (1, 1)


def test_a_kind_lies_in_one_place() -> None:
    for kind in MemoryKind:
        assert [kind.on_device, kind.managed, kind.on_host, kind.on_peer].count(True) == 1
