"""Kernels that ask for shared memory, and untimed calls on a persisting stream."""

from __future__ import annotations

import numpy as np
import pytest
from bench import Bench
from counted_device import CountedDevice

from pytest_gpumem.devices.protocol import Unsupported
from pytest_gpumem.devices.simulated.datasheets import DATASHEETS

KiB, MiB = 1024, 1024 * 1024


@pytest.mark.parametrize(("name", "most"), [("h200", 227 * KiB)])
def test_a_block_has_no_more_shared_memory_than_the_device_gives(name: str, most: int) -> None:
    bench = Bench(CountedDevice(**vars(DATASHEETS[name])))
    out, fits, too_large = (bench.memory.device(nbytes, "i4") for nbytes in (MiB, most, most + KiB))
    bench.kernels.reset_data_shared(out, fits)
    np.testing.assert_array_equal(out.view(), np.resize(fits.view(), out.view().size))
    said = f"reset_data_shared needs {most // KiB + 1} KiB of shared memory for each block; {bench.device.facts.name} has at most "
    for refused in (
        bench.kernels.reset_data_shared,
        lambda *a: bench.target(bench.kernels.reset_data_shared, *a),
    ):
        with pytest.raises(Unsupported) as caught:
            refused(out, too_large)
        assert str(caught.value) == f"{said}{most // KiB} KiB"
