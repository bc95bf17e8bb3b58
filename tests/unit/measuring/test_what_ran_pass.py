"""What one launch ran on the simulated device: equal for equal work, another digest for each change."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from bench import QUICK, Bench
from counted_device import replaced

from pytest_gpumem.devices.protocol import NotCounted, Undelivered
from pytest_gpumem.measuring import untimed
from pytest_gpumem.measuring.conductor import Passes
from pytest_gpumem.measuring.sampling import Plan
from pytest_gpumem.measuring.target_case import Case
from pytest_gpumem.memory.l2 import persisting
from pytest_gpumem.records.measurement import Measurement
from pytest_gpumem.records.what_ran import Step, StepKind, WhatRan, what_ran
from pytest_gpumem.units import MiB

N = 16 * MiB
WAITS = False
PLAN = Plan(**QUICK)  # type: ignore[arg-type]


def measured(bench: Bench, kernel: Any, *arguments: Any, passes: Passes = Passes(ran=True)) -> Measurement:  # noqa: B008
    target = bench.target(kernel, *arguments)
    return bench.conductor.measure(target, PLAN, arena=bench.arena, label="", name="test_it", passes=passes)


def ran(bench: Bench, kernel: Any, *arguments: Any) -> WhatRan:
    found = measured(bench, kernel, *arguments).what_ran
    assert found is not None
    return found


def triad(bench: Bench, grid: int = 32, nbytes: int = N) -> WhatRan:
    return ran(bench, bench.kernels.triad.with_grid(grid), *(bench.memory.device(nbytes, "f4") for _ in range(3)), 3.0)


def test_a_kernel_has_its_shape_and_a_digest_of_its_source() -> None:
    (step,) = triad(Bench()).launch
    assert (step.kind, step.name, step.grid, step.stream) == (StepKind.KERNEL, "triad", (32, 1, 1), 0)
    assert step.code is not None


def test_two_processes_agree_and_each_change_shows() -> None:
    digests = [triad(Bench()).digest, triad(Bench(), grid=64).digest, ran_copy("pinned").digest, ran_copy("pageable").digest]
    assert None not in digests
    assert len(set(digests)) == 4
    assert triad(Bench()).digest == digests[0]


def ran_copy(kind: str, nbytes: int = N) -> WhatRan:
    bench = Bench()
    return ran(bench, bench.kernels.memcpy, bench.memory.device(nbytes), getattr(bench.memory, kind)(nbytes))


@pytest.mark.parametrize("where", ["module", "function"])
def test_a_value_that_a_case_finds_outside_is_part_of_it(where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Such as whether its launch waits for the device, which the simulated device does not run."""

    def digest(waits: bool) -> str | None:
        monkeypatch.setitem(globals(), "WAITS", waits if where == "module" else False)
        bench = Bench()

        def case(memory: Any) -> Case:
            x, y = memory.device(N, "f4"), memory.device(N, "f4")

            def copy() -> None:
                y.view()[:] = x.view()
                assert not (waits if where == "function" else WAITS) or N

            return Case(copy, reference=copy, reads=[x], writes=[y])

        target = bench.conductor.case(case, arena=bench.arena)
        found = bench.conductor.measure(target, PLAN, arena=bench.arena, label="", name="test_it", passes=Passes(ran=True)).what_ran
        assert found is not None
        return found.digest

    assert digest(False) == digest(False) != digest(True)


@pytest.mark.parametrize("kind", ["pinned", "pageable"])
def test_a_copy_has_its_kinds_of_memory_and_bytes(kind: str) -> None:
    (step,) = ran_copy(kind).launch
    assert (step.kind, step.name, step.source, step.memory, step.nbytes) == (StepKind.COPY, "H2D", kind, "device", N)


def test_the_window_and_the_set_aside_are_part_of_it() -> None:
    bench = Bench()
    arguments = [bench.memory.device(4 * MiB, "f4") for _ in range(2)]
    without = ran(bench, bench.kernels.copy, *arguments)
    with persisting(bench.device, arguments[0]) as stream:
        target = bench.conductor.target(bench.kernels.copy, tuple(arguments), {}, arena=bench.arena, stream=stream)
        found = bench.conductor.measure(target, PLAN, arena=bench.arena, label="", name="test_it", passes=Passes(ran=True)).what_ran
    assert found is not None
    assert without.launch[0].window is None
    assert found.launch[0].window == "4 MiB at hit ratio 1, persisting, else streaming"
    assert found.digest != without.digest


def test_advice_is_part_of_it() -> None:
    digests = set()
    for advice in ({}, {"read_mostly": True}, {"preferred_location": "host"}, {"accessed_by": "device"}):
        bench = Bench()
        x, y = bench.memory.managed(N), bench.memory.managed(N)
        if advice:
            x.advise(**advice)  # type: ignore[attr-defined]
        digests.add(ran(bench, bench.kernels.add, x, y).digest)
    assert len(digests) == 4


def test_work_takes_no_virtual_time_and_changes_nothing_that_is_measured() -> None:
    def values(passes: Passes) -> Any:
        bench = Bench()
        for _ in range(2):
            found = measured(bench, bench.kernels.copy, *(bench.memory.device(N, "f4") for _ in range(2)), passes=passes)
        return pytest.approx(found.samples)

    assert values(Passes()).expected == values(Passes(ran=True))


def answers(*digests: str | None) -> Callable[..., WhatRan]:
    left = list(digests)

    def answer(work: Callable[[], None], wait: Callable[[], None]) -> WhatRan:
        if left[0] == "lost":
            raise Undelivered(f"CUPTI {left.pop(0)} kernels")
        return what_ran([Step(StepKind.KERNEL, "k", code=left[0])], {}, not_watched=None if left.pop(0) else "unknown code")

    return answer


def case(bench: Bench) -> WhatRan:
    def build(memory: Any) -> Case:
        x = memory.device(N, "f4")
        return Case(lambda: None, reference=lambda: None, reads=[x])

    target = bench.conductor.case(build, arena=bench.arena)
    found = bench.conductor.measure(target, PLAN, arena=bench.arena, label="", name="test_it", passes=Passes(ran=True)).what_ran
    assert found is not None
    return found


@pytest.mark.parametrize(
    ("codes", "known"),
    [
        (("a", "a"), True),
        (("a", "b", "b"), True),
        (("a", "b", "c"), False),
        ((None,), False),
        (("a", None), False),
        (("lost", "a", "a"), True),
        (("lost", "a", "b"), False),
        (("lost", "lost", "lost"), False),
    ],
)
def test_two_launches_of_foreign_code_have_to_agree(codes: tuple[str | None, ...], known: bool) -> None:
    bench = Bench()
    replaced(bench.device.counters, what_ran=answers(*codes))
    found = case(bench)
    assert (found.digest is not None, found.not_watched is None) == (known, known)


def test_our_own_kernels_and_long_launches_are_watched_once(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = Bench()
    replaced(bench.device.counters, what_ran=answers("a", "lost", "b", "c"))
    assert [triad(bench).launch[0].code, triad(bench).launch[0].code] == ["a", "b"]
    monkeypatch.setattr(untimed, "LONG", 0.0)
    assert case(bench).launch[0].code == "c"


def test_what_keeps_us_from_watching_stands_in_the_result() -> None:
    def refuse(work: Callable[[], None], wait: Callable[[], None]) -> WhatRan:
        raise NotCounted("another tool holds CUPTI")

    bench = Bench()
    replaced(bench.device.counters, what_ran=refuse)
    assert triad(bench) == WhatRan(not_watched="another tool holds CUPTI")
    bench = Bench()
    assert measured(bench, bench.kernels.copy, *(bench.memory.device(N, "f4") for _ in range(2)), passes=Passes()).what_ran is None
