"""Persisting streams where an MPS server fixes the set-aside."""

from __future__ import annotations

import pytest
from cases import naming
from counted_device import CountedDevice

from pytest_gpumem.devices.protocol import Unsupported
from pytest_gpumem.devices.simulated.datasheets import DATASHEETS, Datasheet
from pytest_gpumem.memory.buffers import Arena
from pytest_gpumem.memory.l2 import persisting
from pytest_gpumem.units import MiB


class UnderMps(Datasheet):
    mps = True


@pytest.fixture
def under_mps() -> CountedDevice:
    """A device on which nobody can change the 9.375 MiB that are set aside."""
    device = CountedDevice(UnderMps(**vars(DATASHEETS["h100"])))
    device.before("l2.request_set_aside", lambda _: pytest.fail("the set-aside is the server's"))
    return device


def test_a_fitted_window_takes_the_servers_set_aside(under_mps: CountedDevice) -> None:
    for mib, ratio in [(8, 1.0), (18.75, 0.5)]:
        arena = Arena(under_mps, seed=0)
        with persisting(under_mps, arena.buffer(int(mib * MiB))) as stream:
            assert (stream.set_aside, stream.hit_ratio) == (9.375 * MiB, ratio), mib
            assert under_mps.l2.window(stream.stream) is not None, mib
        assert under_mps.l2.window(stream.stream) is None, mib


def test_another_set_aside_is_refused(under_mps: CountedDevice) -> None:
    for set_aside in ["off", "max", "4 MiB"]:
        with naming(set_aside):
            arena = Arena(under_mps, seed=0)
            one = persisting(under_mps, arena.buffer(8 * MiB), set_aside=set_aside)
            with (
                pytest.raises(
                    Unsupported, match=r"^under MPS .*: 9\.375 MiB, which no process changes"
                ),
                one,
            ):
                pytest.fail("it is not")
