"""Kernels that ask for shared memory, and untimed calls on a persisting stream."""

from __future__ import annotations

from typing import Any, get_args

import numpy as np
import pytest
from bench import Bench
from cases import naming
from counted_device import CountedDevice

from pytest_gpumem.devices.protocol import Unsupported
from pytest_gpumem.devices.simulated.datasheets import DATASHEETS
from pytest_gpumem.measuring.bound import BadCall
from pytest_gpumem.memory.l2 import persisting
from pytest_gpumem.memory.window_request import BadWindow, Where

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


def test_an_untimed_call_on_a_persisting_stream_leaves_lines_that_persist(bench: Bench) -> None:
    out, table = bench.memory.device(64 * MiB, "i4"), bench.memory.device(8 * MiB, "i4")
    l2: Any = bench.device.roofline.l2
    with persisting(bench.device, table) as stream:
        bench.kernels.reset_data(out, table)
        assert not l2.persisting
        bench.kernels.reset_data.with_grid(32).with_stream(stream)(out, table)
        assert l2.persisting
        assert stream.used


def test_a_stream_without_the_window_is_refused_for_untimed_calls() -> None:
    for where in [w for w in get_args(Where) if w != "stream"]:
        bench = Bench()
        with naming(where):
            with (
                persisting(bench.device, bench.memory.device(MiB), where=where) as stream,
                pytest.raises(BadWindow) as caught,
            ):
                bench.kernels.reset_data.with_stream(stream)
            assert (
                str(caught.value)
                == f'where="{where}": the stream itself has no window, which an untimed call could run under'
            )


def test_a_stream_that_is_closed_is_refused_for_untimed_calls(bench: Bench) -> None:
    with persisting(bench.device, bench.memory.device(MiB)) as stream:
        pass
    with pytest.raises(
        BadWindow, match="a persisting stream whose `with` block has ended has no window"
    ):
        bench.kernels.reset_data.with_stream(stream)


def test_a_kernel_bound_for_untimed_calls_is_not_measured_without_its_window(bench: Bench) -> None:
    out, table = bench.memory.device(64 * MiB, "i4"), bench.memory.device(8 * MiB, "i4")
    with persisting(bench.device, table) as stream:
        bound = bench.kernels.reset_data.with_stream(stream)
        with pytest.raises(
            BadCall, match=r"with_stream\(\) is for untimed calls; measure with stream=stream"
        ):
            bench.target(bound, out, table)
        bench.target(bound, out, table, stream=stream).close()
