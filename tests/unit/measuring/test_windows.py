"""Measurements under windows that a graph's kernels or each launch carry, and what notes say of set-asides."""

from __future__ import annotations

from typing import Any, get_args

import numpy as np
import pytest
from bench import Bench, check, moved
from cases import naming

from pytest_gpumem.devices.protocol import CannotCapture, WindowSpec
from pytest_gpumem.measuring.bound import BadCall
from pytest_gpumem.measuring.case import Case
from pytest_gpumem.memory.buffers import Buffer
from pytest_gpumem.memory.l2 import persisting
from pytest_gpumem.memory.spaces import Memory
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


@pytest.mark.parametrize("where", ["graph", "launch"])
def test_the_window_is_over_where_the_buffer_now_is(
    bench: Bench, where: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    out, table = bench.buffers(2)
    given: list[WindowSpec | None] = []
    launch, capture = bench.device.kernels.launch, bench.device.graphs.capture
    monkeypatch.setattr(
        bench.device.kernels,
        "launch",
        lambda one, stream, window=None: given.append(window) or launch(one, stream, window=window),
    )
    monkeypatch.setattr(
        bench.device.graphs,
        "capture",
        lambda stream, body, window=None: (
            given.append(window) or capture(stream, body, window=window)
        ),
    )
    with persisting(bench.device, table, where=where) as stream:
        target = bench.target(bench.kernels.copy, out, table, stream=stream)
        assert not target.any_stream
        before = table.address
        assert moved(target, 8, 8, np.random.default_rng(3)) == 1
        target.launch(0, stream.stream)
        assert table.address != before
        placed = [window for window in given if window is not None]
        assert placed[-1] == WindowSpec(table.address, table.nbytes, 1.0)
        check(target)


def test_updated_inputs_are_restored_before_the_check_although_a_kernel_ran_to_be_loaded(
    bench: Bench,
) -> None:
    region, streaming = (bench.memory.device(MiB, "i4") for _ in range(2))
    with persisting(bench.device, region, where="graph") as stream:
        target = bench.target(bench.kernels.sliding_window, region, streaming, stream=stream)
        assert len(bench.device.launched) == 2  # once for real, once captured
        check(target)


def test_hot_batches_carry_the_window_too() -> None:
    for where, sampler in [("graph", "batched"), ("launch", "graph")]:  # no graph takes a graph
        bench = Bench()
        out, table = table_of(bench)
        kernel = bench.kernels.reset_data.with_grid(32)
        with naming(where):
            with persisting(bench.device, table, where=where) as stream:
                target = bench.target(kernel, out, table, stream=stream)
                measured = bench.take(target, mode="hot")
                assert bench.device.roofline.l2.persisting
            assert measured.sampler == sampler


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


def test_a_callable_makes_its_launches_itself(bench: Bench) -> None:
    (table,) = bench.buffers(1)
    with (
        persisting(bench.device, table, where="launch") as stream,
        pytest.raises(BadCall, match='where="launch" is for kernels'),
    ):
        bench.target(lambda x: None, table, stream=stream)


class Calls:
    """A device whose foreign calls launch a kernel, as a library would."""

    def __init__(self, bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
        self.made = 0
        self.bench = bench
        monkeypatch.setattr(bench.device.kernels, "call", self.call)

    def call(self, foreign: Any, stream: Any) -> None:
        self.made += 1
        foreign.function()

    def copying(self, out: Buffer, table: Buffer, stream: Any) -> None:
        kernel = self.bench.kernels.copy
        self.bench.device.kernels.launch(kernel.launch({"c": out, "a": table}, {}), stream)


def test_a_callable_is_captured_once_for_each_placement(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    out, table = bench.buffers(2)
    calls = Calls(bench, monkeypatch)
    with persisting(bench.device, table, where="graph") as stream:
        target = bench.target(
            lambda c, a: calls.copying(c, a, stream.stream), out, table, stream=stream
        )
        assert calls.made == 2  # once for real, once captured
        for _ in range(5):
            target.launch(0, stream.stream)
        assert calls.made == 2
        assert stream.window == Window(
            table.nbytes, 1.0, bench.device.l2.set_aside(), where="graph"
        )
        moved(target, 8, 8, np.random.default_rng(3))
        assert calls.made == 3
        spec = stream.spec
        assert spec is not None
        assert spec.address == table.address


def test_a_callable_that_cannot_be_captured_says_why(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    (table,) = bench.buffers(1)
    Calls(bench, monkeypatch)
    with (
        persisting(bench.device, table, where="graph") as stream,
        pytest.raises(CannotCapture, match="it synchronises"),
    ):
        bench.target(lambda x: bench.device.streams.synchronize(), table, stream=stream)


def test_a_graph_without_a_kernel_carries_no_window(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    out, table = bench.buffers(2)
    Calls(bench, monkeypatch)

    def copying(c: Buffer, a: Buffer) -> None:
        bench.device.content.copy(c.allocation, a.allocation, a.nbytes, stream.stream)

    with persisting(bench.device, table, where="graph") as stream, pytest.raises(BadCall) as caught:
        bench.target(copying, out, table, stream=stream)
    assert (
        str(caught.value) == 'where="graph": copying queues no kernel that could carry the window'
    )
    with persisting(bench.device, table, where="graph", set_aside="off") as stream:
        bench.target(copying, out, table, stream=stream)


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


def test_thrashing_is_noted_unless_it_is_wanted(bench: Bench) -> None:
    out, table = bench.memory.device(64 * MiB, "i4"), bench.memory.device(40 * MiB, "i4")
    notes = {}
    for wanted in (False, True):
        with persisting(
            bench.device, table, set_aside="max", hit_ratio=1.0, allow_thrash=wanted
        ) as stream:
            notes[wanted] = bench.take(
                bench.target(bench.kernels.reset_data, out, table, stream=stream)
            ).notes
    assert any(
        note.startswith("thrashing: hit ratio x bytes is 1 x 40 MiB = 40 MiB, 31.25 MiB")
        for note in notes[False]
    )
    assert not any("thrash" in note for note in notes[True])


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


def test_a_case_shares_the_set_aside_with_an_open_stream(bench: Bench) -> None:
    def build(memory: Memory) -> Case:
        x = memory.device(8 * MiB)
        return Case(lambda: None, reference=lambda: None, reads=[x], window=x)

    (table,) = bench.buffers(1, 8 * MiB)
    with persisting(bench.device, table) as stream:
        alone = stream.set_aside
        measured = bench.case(build)
        assert measured.window is not None
        assert 2 * measured.window.set_aside == 3 * alone  # each alone has a step to spare
        assert bench.device.l2.set_aside() == stream.set_aside == alone
