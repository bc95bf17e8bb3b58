"""The watching pass of a measurement: untimed, of one launch, told as kernels, copies and kinds of memory."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from bench import QUICK, Bench
from counted_device import CountedDevice, replaced

from pytest_gpumem.devices.protocol import NotCounted
from pytest_gpumem.measuring.conductor import Passes
from pytest_gpumem.measuring.sampling import Plan
from pytest_gpumem.records.measurement import Measurement
from pytest_gpumem.records.uses import Activity
from pytest_gpumem.units import MiB

N = 16 * MiB
PLAN = Plan(**QUICK)  # type: ignore[arg-type]


def measured(bench: Bench, kernel: Any, *arguments: Any, watch: bool = True) -> Measurement:
    target = bench.target(kernel, *arguments)
    return bench.conductor.measure(target, PLAN, arena=bench.arena, label="", name="test_it", passes=Passes(activity=watch))


def test_a_kernel_is_told_with_its_shape() -> None:
    bench = Bench()
    found = measured(bench, bench.kernels.triad.with_grid(32), *(bench.memory.device(N, "f4") for _ in range(3)), 3.0).activity
    assert found is not None
    (kernel,) = found.kernels
    assert (kernel.name, kernel.grid, kernel.launches) == ("triad", (32, 1, 1), 1)
    assert kernel.nanoseconds > 1000
    assert (found.copies, found.memsets, found.arguments, found.source) == ((), (), (), "the model")


@pytest.mark.parametrize("kind", ["pinned", "pageable"])
def test_a_copy_is_told_with_its_kinds_of_memory(kind: str) -> None:
    bench = Bench()
    source = getattr(bench.memory, kind)(N)
    found = measured(bench, bench.kernels.memcpy, bench.memory.device(N), source).activity
    assert found is not None
    (copy,) = found.copies
    assert (copy.kind, copy.source, copy.destination, copy.count, copy.nbytes) == ("H2D", kind, "device", 1, N)
    assert found.kernels == ()
    assert found.arguments == (("source", kind),)


def test_nobody_watches_unasked_and_nothing_is_timed_meanwhile() -> None:
    watching = list[str]()

    class Watched(CountedDevice):
        def __init__(self) -> None:
            super().__init__()
            activity, record = self.counters.activity, self.streams.record

            def watched(work: Callable[[], None]) -> Activity:
                watching.append("on")
                try:
                    return activity(work)
                finally:
                    watching.append("off")

            def recorded(*args: Any) -> None:
                assert watching[-1:] != ["on"]
                record(*args)

            replaced(self.counters, activity=watched)
            replaced(self.streams, record=recorded)

    bench = Bench(Watched())
    arguments = [bench.memory.device(N, "f4") for _ in range(2)]
    assert measured(bench, bench.kernels.copy, *arguments, watch=False).activity is None
    assert watching == []
    measured(bench, bench.kernels.copy, *arguments)
    assert watching == ["on", "off"]


def test_what_keeps_us_from_watching_stands_in_the_result() -> None:
    def refuse(work: Callable[[], None]) -> Activity:
        raise NotCounted("another tool holds CUPTI")

    bench = Bench()
    replaced(bench.device.counters, activity=refuse)
    found = measured(bench, bench.kernels.memcpy, bench.memory.device(N), bench.memory.pinned(N)).activity
    assert found is not None
    assert found.not_counted == "another tool holds CUPTI"
    assert found.arguments == (("source", "pinned"),)
