"""The effects that the suite measures exist in the model, with the sizes that GPUs show."""

from __future__ import annotations

import re
import statistics
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from workbench import LOOKUP, OVERWRITE, SCAN, Workbench, scale

import pytest_gpumem.devices.simulated
from pytest_gpumem.devices.protocol import WindowSpec
from pytest_gpumem.devices.simulated.datasheets import DATASHEETS
from pytest_gpumem.kernels.catalogue import CATALOGUE
from pytest_gpumem.kernels.kernel import Access, Call, Kernel
from pytest_gpumem.units import GiB, MiB


def samples(seed: int) -> list[float]:
    bench = Workbench(seed=seed)
    launch = bench.bind(scale(), x=bench.memory(8 * MiB), y=bench.memory(8 * MiB))
    return [bench.time(launch) for _ in range(30)]


def test_the_same_seed_gives_the_same_samples() -> None:
    assert samples(7) == samples(7)
    assert samples(7) != samples(8)


def test_first_launches_are_slower() -> None:
    bench = Workbench()
    launch = bench.bind(SCAN, x=bench.memory(256 * MiB))
    times = [bench.time(launch) for _ in range(60)]
    assert times[0] > 1.1 * statistics.median(times[-20:])


def test_placement_matters_less_the_larger_the_buffers() -> None:
    def spread(mib: int) -> float:
        bench = Workbench()
        bench.warm_up()
        medians = []
        for _ in range(24):
            x, y = bench.memory(mib * MiB), bench.memory(mib * MiB)
            medians.append(bench.cold(bench.bind(scale(), x=x, y=y), 5))
        return statistics.stdev(medians) / statistics.fmean(medians)

    small, middle, large = spread(3), spread(48), spread(384)
    assert 0.008 < small < 0.03
    assert 0.001 < middle < 0.006
    assert large < 0.001


def test_the_same_addresses_give_the_same_time(bench: Workbench) -> None:
    x, y = bench.memory(2 * MiB), bench.memory(2 * MiB)
    first = bench.cold(bench.bind(scale(), x=x, y=y), 31)
    where = (x.address, y.address)
    bench.device.memory.free(x)
    bench.device.memory.free(y)
    again = [bench.memory(2 * MiB), bench.memory(2 * MiB)]
    assert tuple(a.address for a in again) == where
    assert bench.cold(bench.bind(scale(), x=again[0], y=again[1]), 31) == pytest.approx(
        first, abs=2 * DATASHEETS["h100"].tick
    )


def test_reading_twice_l2_evicts_normal_lines(bench: Workbench) -> None:
    launch = bench.bind(SCAN, x=bench.memory(16 * MiB))
    fresh = Workbench()
    fresh.warm_up()
    first = fresh.time(fresh.bind(SCAN, x=fresh.memory(16 * MiB)))
    assert bench.cold(launch) == pytest.approx(first, rel=0.03)


def test_dirty_lines_are_billed_to_the_next_kernel(bench: Workbench) -> None:
    launch = bench.bind(scale(), x=bench.memory(48 * MiB), y=bench.memory(48 * MiB))
    write = bench.bind(OVERWRITE, x=bench.memory(2 * bench.device.facts.l2_bytes))
    clean = bench.cold(launch)
    dirty = []
    for _ in range(9):
        bench.run(write)
        dirty.append(bench.time(launch))
    # Half of L2, written back at the memory's bandwidth: about 8 us.
    assert 5e-6 < statistics.median(dirty) - clean < 12e-6


def persisting(
    bench: Workbench, table_mib: int, blocks: int, set_aside: float, hit_ratio: float | None
) -> float:
    bench.device.l2.request_set_aside(round(set_aside * MiB))
    table, out = bench.memory(table_mib * MiB), bench.memory(GiB)
    if hit_ratio is not None:
        bench.device.l2.set_window(bench.stream, WindowSpec(table.address, table.nbytes, hit_ratio))
    seconds = bench.hot(bench.bind(LOOKUP, blocks=blocks, table=table, out=out, dtype="i4"), 5)
    bench.device.l2.set_window(bench.stream, None)
    bench.device.l2.reset_persisting()
    bench.device.memory.free(table)
    bench.device.memory.free(out)
    return seconds


def test_the_largest_set_aside_slows_a_saturated_write_stream_on_hopper_alone(
    bench: Workbench,
) -> None:
    assert persisting(bench, 1, 264, 31.25, None) > 1.8 * persisting(bench, 1, 264, 0, None)
    assert persisting(bench, 1, 32, 31.25, None) < 1.08 * persisting(bench, 1, 32, 0, None)
    slowed = {}
    for name in ("h100", "a100"):
        other = Workbench(name)
        other.warm_up()
        stream = other.bind(OVERWRITE, x=other.memory(GiB))
        other.device.l2.request_set_aside(0)
        without = other.hot(stream)
        other.device.l2.request_set_aside(other.device.facts.persisting_l2_max_bytes)
        slowed[name] = other.hot(stream) / without
    assert slowed["h100"] > 1.8
    assert slowed["a100"] == pytest.approx(1.0, abs=0.05)


@pytest.mark.parametrize(("name", "faster"), [("h100", True), ("a100", True), ("rtx3090", False)])
def test_a_line_that_is_written_has_one_home_of_two_partitions(name: str, faster: bool) -> None:
    """Each partition may keep a copy of what is only read: four fifths of L2, gone through again and again, fit once, not twice."""
    bench = Workbench(name)
    bench.warm_up()
    bench.device.l2.request_set_aside(0)
    x, kernel = bench.memory(bench.device.facts.l2_bytes * 4 // 5), SCAN

    def seconds(written: bool) -> float:
        def accesses(call: Call) -> tuple[Access, ...]:
            nbytes = call.arrays["x"].nbytes
            read, write = (
                Access("x", "read", nbytes, 32 * nbytes, wrapping=True),
                Access("x", "write", nbytes, nbytes),
            )
            return (read, write) if written else (read,)

        return bench.cold(bench.bind(replace(kernel, accesses=accesses), x=x))

    assert (seconds(written=True) < 0.9 * seconds(written=False)) == faster


def test_sectors_that_neighbours_complete_cost_l2_not_dram(bench: Workbench) -> None:
    # Of the memory written, an eighth is touched: nothing but `nearby` says that the rest of it stays where it is.
    x, y = bench.memory(512 * MiB), bench.memory(4096 * MiB)

    def scattered(nearby: bool, sectors: float = 32.0) -> Kernel:
        kernel = scale()
        write: dict[str, Any] = {
            "footprint": x.nbytes,
            "requested": x.nbytes,
            "sectors_per_request": sectors,
            "nearby": nearby,
        }
        return replace(
            kernel,
            accesses=lambda call: tuple(
                replace(a, **write) if a.direction == "write" else a for a in kernel.accesses(call)
            ),
        )

    straight, near, far = (
        bench.cold(bench.bind(k, x=x, y=y))
        for k in (scattered(True, 4.0), scattered(True), scattered(False))
    )
    # Eight times the words between the SMs and L2, of which seven eighths hit; or the same out of DRAM.
    sheet = DATASHEETS["h100"]
    least = 7 * 512 * MiB * sheet.fit.merging / sheet.l2_bandwidth
    assert straight < least < near < 1.3 * least
    assert far > 8 * straight


def test_the_model_knows_no_kernel_by_name() -> None:
    folder = Path(pytest_gpumem.devices.simulated.__file__).parent
    # Names that are also words of the trade (read, write, copy, add) cannot tell anything.
    names = {
        n for n in CATALOGUE if n not in ("read", "write", "copy", "mul", "add", "init", "dot")
    }
    assert len(names) >= 10
    naming = re.compile(rf"\b({'|'.join(sorted(names))})\b")
    for file in folder.rglob("*.py"):
        found = naming.search(file.read_text())
        assert found is None, f"{file} names {found}"
