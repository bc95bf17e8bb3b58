"""Measurements under windows that a graph's kernels or each launch carry, and what notes say of set-asides."""

from __future__ import annotations

from typing import get_args

import pytest
from bench import Bench
from cases import naming

from pytest_gpumem.devices.protocol import Launch
from pytest_gpumem.measuring.bound import BadCall
from pytest_gpumem.measuring.case import Case
from pytest_gpumem.memory.buffers import Buffer
from pytest_gpumem.memory.l2 import persisting
from pytest_gpumem.memory.window_request import Where
from pytest_gpumem.records.measurement import Window
from pytest_gpumem.units import GiB, MiB

TABLE = 24 * MiB


def table_of(bench: Bench) -> tuple[Buffer, Buffer]:
    out, table = bench.memory.device(GiB, "i4"), bench.memory.device(TABLE, "i4")
    return out, table


def test_a_measurement_records_its_window_wherever_it_is(bench: Bench) -> None:
    out, table = table_of(bench)
    kernel = bench.kernels.reset_data.with_grid(32)
    with persisting(bench.device, table, set_aside="off") as off:
        without = bench.take(bench.target(kernel, out, table, stream=off))
    assert without.window is None
    for where in get_args(Where):
        with persisting(bench.device, table, where=where) as stream:
            measured = bench.take(bench.target(kernel, out, table, stream=stream), budget=0.2)
            assert (bench.device.l2.window(stream.stream) is not None) is (where == "stream")
        assert measured.window == Window(TABLE, 1.0, 25 * MiB, where=where)
        assert measured.checked
        assert len(measured.placements) == 2


def test_a_window_follows_its_buffer_to_every_placement_and_back(bench: Bench) -> None:
    out, table = table_of(bench)
    own, placed = table.address, set[int]()
    with persisting(bench.device, table) as stream:

        def note(launch: Launch, *_: object, **__: object) -> None:
            if "lut_persistent" in launch.arrays:
                window = bench.device.l2.window(stream.stream)
                assert window is not None
                assert window.address == launch.arrays["lut_persistent"].address
                placed.add(window.address)

        bench.device.before("kernels.launch", note)
        measured = bench.take(
            bench.target(bench.kernels.reset_data, out, table, stream=stream), placements=6
        )
        spec = bench.device.l2.window(stream.stream)
    assert len(measured.placements) == len(placed) == 6
    assert spec is not None
    assert table.address == spec.address == own


@pytest.mark.parametrize("where", get_args(Where))
def test_a_hot_kernel_keeps_its_window(bench: Bench, where: Where) -> None:
    """A graph replays what has its window in a graph already: no other graph can capture it."""
    out, table = table_of(bench)
    kernel = bench.kernels.reset_data.with_grid(32)
    with persisting(bench.device, table, where=where) as stream:
        measured = bench.take(bench.target(kernel, out, table, stream=stream), mode="hot")
    assert measured.sampler == ("batched" if where == "graph" else "graph")
    assert measured.window == Window(TABLE, 1.0, 25 * MiB, where=where)


def test_a_kernel_with_a_persisting_stream_is_measured_on_it(bench: Bench) -> None:
    out, table = table_of(bench)
    with persisting(bench.device, table) as stream:
        kernel = bench.kernels.reset_data.with_grid(32).with_stream(stream)
        measured = bench.take(bench.target(kernel, out, table))
    assert measured.window == Window(TABLE, 1.0, 25 * MiB)


def test_a_copy_carries_no_window() -> None:
    for where in ["graph", "launch"]:
        bench = Bench()
        with naming(where):
            destination, source = bench.buffers(2)
            with (
                persisting(bench.device, source, where=where) as stream,
                pytest.raises(BadCall, match=f'where="{where}": memcpy is a copy'),
            ):
                bench.target(bench.kernels.memcpy, destination, source, stream=stream)


def test_a_window_on_a_buffer_that_the_kernel_does_not_touch_is_noted() -> None:
    said = "reset_data touches nothing of the buffer under the window: a cost without a gain"
    for where in get_args(Where):
        bench = Bench()
        out, table, other = bench.buffers(3)
        kernel = bench.kernels.reset_data
        with naming(where):
            with persisting(bench.device, other, where=where) as stream:
                assert said in bench.target(kernel, out, table, stream=stream).notes
            with persisting(bench.device, table, where=where) as stream:
                assert bench.target(kernel, out, table, stream=stream).notes == ()
            with persisting(bench.device, other, set_aside="off") as stream:
                assert bench.target(kernel, out, table, stream=stream).notes == ()


def test_a_measurement_beside_an_open_stream_pays_for_its_set_aside(bench: Bench) -> None:
    out, table = bench.buffers(2)
    plain = bench.measure("copy", out, table).notes
    assert not any("set aside" in note for note in plain)
    with persisting(bench.device, table):
        kernel = bench.measure("copy", out, table).notes
        case = bench.case(
            lambda memory: Case(lambda: None, reference=lambda: None, reads=[memory.device(MiB)])
        ).notes
        foreign = bench.target(lambda: None).notes
    for notes in (kernel, case, foreign):
        assert (
            sum(
                "this measurement has no window in them: a cost without a gain" in note
                for note in notes
            )
            == 1
        )
