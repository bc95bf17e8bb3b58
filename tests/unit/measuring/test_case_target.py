"""A case is built anew for each placement, restored before every launch, and checked before and after timing."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from itertools import groupby, pairwise, product
from typing import Any

import numpy as np
import pytest
from bench import Bench
from cases import naming
from counted_device import CountedDevice, failing

from pytest_gpumem.devices.memory_kinds import MemoryKind
from pytest_gpumem.devices.protocol import DeviceError, WindowSpec
from pytest_gpumem.measuring.bound import BadCall
from pytest_gpumem.measuring.case import Case
from pytest_gpumem.measuring.target import WrongResult
from pytest_gpumem.memory.buffers import Buffer
from pytest_gpumem.memory.spaces import Memory
from pytest_gpumem.units import MiB


def scaling(memory: Memory, **fields: Any) -> Case:
    """y = 2 x."""
    x, y = memory.device(1 * MiB), memory.device(1 * MiB)

    def compute() -> None:
        y.view()[:] = 2 * x.view()

    def check() -> None:
        np.testing.assert_array_equal(y.read(), 2 * x.read())

    return Case(
        **{
            "launch": compute,
            "reference": compute,
            "check": check,
            "reads": [x],
            "writes": [y],
            **fields,
        }
    )


def with_(**fields: Any) -> Callable[[Memory], Case]:
    def build(memory: Memory) -> Case:
        return scaling(memory, **fields)

    return build


def windows(bench: Bench) -> list[WindowSpec]:
    """The windows that are set on streams."""
    device = bench.device
    return [
        window
        for stream in device.streams.visible()
        if (window := device.l2.window(stream)) is not None
    ]


def test_built_once_for_each_placement_at_fresh_addresses(bench: Bench) -> None:
    addresses: list[int] = []
    contents: list[bytes] = []

    def build(memory: Memory) -> Case:
        case = scaling(memory)
        addresses.extend(b.address for b in (*case.reads, *case.writes))
        contents.append(case.reads[0].read().tobytes())
        return case

    taken = bench.case(build, placements=4)
    assert len(taken.placements) == 4
    assert len(addresses) == 8
    pairs = [set(addresses[i : i + 2]) for i in range(0, 8, 2)]
    assert all(one.isdisjoint(following) for one, following in pairwise(pairs))
    assert len(set(contents)) == 1  # the same content at every placement
    assert taken.checked
    assert bench.leftovers() == 0


@pytest.mark.parametrize(
    ("profiled", "plan"), [(False, {}), (False, {"mode": "hot"}), (True, {"sampler": "host"})]
)
def test_restored_before_every_launch(profiled: bool, plan: dict[str, Any]) -> None:
    bench, log = Bench(profiled=profiled), list[str]()

    def build(memory: Memory) -> Case:
        y = memory.device((1024,), "i4")

        def restore() -> None:
            log.append("restore")
            y.view()[:] = 1

        def accumulate() -> None:
            log.append("launch")
            y.view()[:] += 1

        def check() -> bool:
            log.append("check")
            return bool((y.read() == 2).all())

        return Case(
            launch=accumulate,
            reference=accumulate,
            restore=restore,
            check=check,
            reads=[y],
            writes=[y],
        )

    taken = bench.case(build, pages=True, ran=True, **plan)
    launches = [i for i, what in enumerate(log) if what == "launch"]
    assert len(launches) >= len(taken.samples)
    assert all(log[i - 1] == "restore" for i in launches)
    assert log.count("check") == 2
    assert log[:3] == log[-3:] == ["restore", "launch", "check"]


def test_declared_bytes_take_time_on_the_simulated_device(bench: Bench) -> None:
    table = np.zeros(4 * MiB, "u1")
    declared: list[dict[str, Any]] = [
        {"moved": 512 * MiB, "reads": (), "writes": ()},
        {"moved": 512 * MiB},  # of which 2 MiB lie in buffers
        {"reads": [table] * 128, "writes": ()},  # no buffers
    ]
    for fields in declared:
        with naming(list(fields)):
            taken = bench.case(with_(**fields))
            assert taken.bandwidth is not None
            peak = bench.device.facts.dram_peak
            assert 0.85 * peak < taken.bandwidth < 0.95 * peak


def test_other_sizes_are_no_other_code(bench: Bench) -> None:
    def build(memory: Memory, nbytes: int) -> Case:
        return scaling(memory, reads=[memory.device(nbytes)])

    small, large = (bench.case(partial(build, nbytes=n), ran=True).what_ran for n in (MiB, 2 * MiB))
    assert small is not None
    assert small == large


def no() -> None:
    raise AssertionError("the sums differ")


def bare() -> None:
    raise AssertionError


def test_a_check_that_fails() -> None:
    for check, message in [
        (lambda: False, "build: its check returned False after one launch"),
        (lambda: np.array([1, 2]).sum() == 4, "build: its check returned False"),
        (lambda: np.zeros((1,)), r"build: its check returned \[0.\]"),
        (no, "build: the result of a launch is wrong: the sums differ"),
        (bare, "build: the result of a launch is wrong: its check failed"),
    ]:
        bench = Bench()
        with naming(check):
            with pytest.raises(WrongResult, match=message):
                bench.case(with_(check=check))
            assert bench.leftovers() == 0


def test_a_result_that_goes_wrong_during_timing_is_wrong(bench: Bench) -> None:
    answers = iter([True, False])
    with pytest.raises(WrongResult, match="its check returned False"):
        bench.case(with_(check=lambda: next(answers)))


def test_the_window_follows_the_case(bench: Bench) -> None:
    found = bench.device.l2.set_aside()
    addresses: list[int] = []
    seen: list[tuple[int, int]] = []

    def build(memory: Memory) -> Case:
        table, out = memory.device(8 * MiB), memory.device(8 * MiB)
        addresses.append(table.address)

        def look() -> None:
            (window,) = windows(bench)
            seen.append((window.address, bench.device.l2.set_aside()))

        return Case(launch=look, reference=look, reads=[table], writes=[out], window=table)

    taken = bench.case(build, placements=3)
    assert [address for address, _ in groupby(address for address, _ in seen)] == addresses
    assert all(one != following for one, following in pairwise(addresses))
    assert {granted for _, granted in seen} == {int(12.5 * MiB)}
    assert taken.window is not None
    assert (taken.window.nbytes, taken.window.set_aside) == (8 * MiB, int(12.5 * MiB))
    assert bench.device.l2.set_aside() == found
    assert windows(bench) == []
    assert bench.leftovers() == 0


def test_what_is_no_case() -> None:
    cases: list[tuple[Any, str]] = [
        (
            lambda memory: None,
            r"the function given to gpu_benchmark\.case\(\) returned None, not a Case",
        ),
        (lambda memory: memory.device(64), "returned <device buffer.*, not a Case"),
        (
            with_(moved=0),
            r"Case\.moved is the compulsory bytes of a launch, a positive integer .* not 0$",
        ),
        (
            lambda: Case(print),
            r"gpu_benchmark\.case\(\) takes a function .*: too many positional arguments",
        ),
        (
            with_(launch=abs),
            r"Case\.launch is a function without arguments: missing a required argument",
        ),
        (
            Case(lambda: None),
            r"gpu_benchmark\.case\(\) takes a function .*, not an object of type Case",
        ),
    ]
    for build, message in cases:
        bench = Bench()
        with naming(build), pytest.raises(BadCall, match=message):
            bench.case(build)


def test_an_error_at_any_stage_leaves_nothing() -> None:
    errors = (DeviceError, KeyboardInterrupt, ValueError)
    for role, after, error in product(("reference", "restore"), (0, 2, 60), errors):
        bench = Bench()
        found = bench.device.l2.set_aside()
        fields = {role: failing(after, error)}

        def build(memory: Memory, fields: dict[str, Any] = fields) -> Case:
            case = scaling(memory, check=None)
            return scaling(memory, check=None, window=case.reads[0], **fields)

        with naming(role, after, error):
            with pytest.raises(error):
                bench.case(build, placements=8)
            assert bench.device.l2.set_aside() == found
            assert windows(bench) == []
            assert bench.leftovers() == 0


def test_traffic_is_declared_or_the_sum_of_reads_and_writes() -> None:
    cases: list[tuple[dict[str, Any], int | None, int | None]] = [
        ({}, 2 * MiB, 2 * MiB),
        ({"moved": 3 * MiB}, 3 * MiB, 2 * MiB),
        ({"moved": np.int64(3 * MiB), "reads": [], "writes": []}, 3 * MiB, 3 * MiB),
        ({"reads": [], "writes": []}, None, None),
    ]
    for fields, total, footprint in cases:
        bench = Bench()
        taken = bench.case(with_(**fields))
        assert (None if taken.moved_bytes is None else taken.moved_bytes.total) == total, fields
        assert taken.footprint == footprint, fields
        assert (taken.bandwidth is None) == (total is None), fields


@pytest.mark.parametrize("touch", ["host", "device", "none"])
def test_managed_pages_are_home_before_every_launch(touch: Any) -> None:
    bench = Bench(CountedDevice())
    places: list[str | None] = []

    def build(memory: Memory) -> Case:
        y = memory.managed(4 * MiB, first_touch=touch)
        pages = bench.device.roofline.pages[id(y.allocation)]

        def look() -> None:
            places.append(pages.place)

        assert y.kind is MemoryKind.MANAGED
        return Case(launch=look, reference=look, reads=[y], writes=[y])

    taken = bench.case(build, placements=1)
    if (
        touch == "none"
    ):  # as the launch before left them, and nowhere before the first of a placement
        assert places.count(None) == len(taken.placements)
        assert set(places) == {None, "device"}
    else:
        assert set(places) == {touch}


@pytest.mark.parametrize(
    "error",
    [
        type("OutOfMemoryError", (RuntimeError,), {})(
            "CUDA: 60 GiB. Tried to allocate"
        ),  # CuPy's and PyTorch's name
        MemoryError("std::bad_alloc: out_of_memory: CUDA error at: allocator.hpp"),  # RMM
        RuntimeError("RESOURCE_EXHAUSTED: Out of memory while trying to allocate"),  # JAX
    ],
    ids=lambda error: type(error).__name__,
)
def test_a_librarys_lack_of_memory_ends_placements_with_a_note(
    bench: Bench, error: Exception
) -> None:
    """A workspace that fits once; the classes are not known here."""
    built = []

    def build(memory: Memory) -> Case:
        built.append(memory)
        if len(built) > 1:
            raise error
        x = memory.device(1 * MiB)
        return Case(lambda: None, reference=lambda: None, reads=[x])

    taken = bench.case(build, placements=4)
    assert len(taken.placements) == 1
    said = str(error).partition(".")[0]
    assert (
        f"no further placement: a second placement of the case does not fit: {said}" in taken.notes
    )
    assert bench.leftovers() == 0


@pytest.mark.parametrize(
    "error", [RuntimeError("shapes differ"), AssertionError("the model says: out of memory")]
)
def test_another_error_of_a_second_placement_is_the_tests(bench: Bench, error: Exception) -> None:
    built = []

    def build(memory: Memory) -> Case:
        built.append(memory)
        if len(built) == 2:
            raise error
        return Case(lambda: None, reference=lambda: None, reads=[memory.device(1 * MiB)])

    with pytest.raises(type(error), match=str(error)):
        bench.case(build, placements=4)
    assert bench.leftovers() == 0


# What lives until the test ends


@pytest.mark.parametrize("fails", [False, True])
def test_arrays_of_the_last_placement_live_until_the_test_ends(bench: Bench, fails: bool) -> None:
    last: list[Buffer] = []

    def build(memory: Memory) -> Case:
        x = memory.device(1 * MiB)
        last[:] = [x]

        def check() -> bool:
            return not fails

        return Case(lambda: None, reference=lambda: None, reads=[x], check=check)

    if fails:
        with pytest.raises(WrongResult):
            bench.case(build, placements=4)
    else:
        bench.case(build, placements=4)
    assert last[0].read().size
    bench.case(
        build if not fails else lambda memory: Case(lambda: None, reference=lambda: None),
        placements=4,
    )
    assert last[0].read().size
    assert [a.nbytes for a in bench.device.live].count(1 * MiB) == (
        1 if fails else 2
    )  # no placement but the last of each
    assert bench.leftovers() == 0
