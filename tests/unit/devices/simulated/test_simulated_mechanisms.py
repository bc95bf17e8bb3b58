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
    assert bench.cold(bench.bind(scale(), x=again[0], y=again[1]), 31) == pytest.approx(first, abs=2 * DATASHEETS["h100"].tick)


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


def persisting(bench: Workbench, table_mib: int, blocks: int, set_aside: float, hit_ratio: float | None) -> float:
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


def test_the_largest_set_aside_slows_a_saturated_write_stream_on_hopper_alone(bench: Workbench) -> None:
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


def test_what_is_set_aside_and_not_used_serves_everyone(bench: Workbench) -> None:
    table = bench.memory(24 * MiB)
    again = bench.bind(SCAN, x=bench.memory(24 * MiB))
    bench.device.l2.request_set_aside(0)
    whole = bench.hot(again)
    bench.device.l2.request_set_aside(bench.device.facts.persisting_l2_max_bytes)
    assert bench.hot(again) == pytest.approx(whole, rel=0.02)
    bench.device.l2.set_window(bench.stream, WindowSpec(table.address, table.nbytes, 1.0))
    bench.run(bench.bind(SCAN, x=table))
    bench.device.l2.set_window(bench.stream, None)
    assert bench.hot(again) > 1.2 * whole
    bench.device.l2.reset_persisting()
    assert bench.hot(again) == pytest.approx(whole, rel=0.02)


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
            read, write = Access("x", "read", nbytes, 32 * nbytes, wrapping=True), Access("x", "write", nbytes, nbytes)
            return (read, write) if written else (read,)

        return bench.cold(bench.bind(replace(kernel, accesses=accesses), x=x))

    assert (seconds(written=True) < 0.9 * seconds(written=False)) == faster


def test_changing_the_limit_drops_persisting_lines(bench: Workbench) -> None:
    memory = bench.memory(8 * MiB)
    launch = bench.bind(SCAN, x=memory)
    bench.device.l2.request_set_aside(10 * MiB)
    bench.device.l2.set_window(bench.stream, WindowSpec(memory.address, memory.nbytes, 1.0))
    bench.run(launch)
    bench.device.l2.set_window(bench.stream, None)
    kept = bench.cold(launch)
    bench.device.l2.request_set_aside(0)
    assert bench.cold(launch) > 1.2 * kept


def test_sectors_that_neighbours_complete_cost_l2_not_dram(bench: Workbench) -> None:
    # Of the memory written, an eighth is touched: nothing but `nearby` says that the rest of it stays where it is.
    x, y = bench.memory(512 * MiB), bench.memory(4096 * MiB)

    def scattered(nearby: bool, sectors: float = 32.0) -> Kernel:
        kernel = scale()
        write: dict[str, Any] = {"footprint": x.nbytes, "requested": x.nbytes, "sectors_per_request": sectors, "nearby": nearby}
        return replace(
            kernel,
            accesses=lambda call: tuple(replace(a, **write) if a.direction == "write" else a for a in kernel.accesses(call)),
        )

    straight, near, far = (bench.cold(bench.bind(k, x=x, y=y)) for k in (scattered(True, 4.0), scattered(True), scattered(False)))
    # Eight times the words between the SMs and L2, of which seven eighths hit; or the same out of DRAM.
    sheet = DATASHEETS["h100"]
    least = 7 * 512 * MiB * sheet.fit.merging / sheet.l2_bandwidth
    assert straight < least < near < 1.3 * least
    assert far > 8 * straight


def test_work_on_chip_bounds_a_kernel(bench: Workbench) -> None:
    sheet, x = DATASHEETS["h100"], bench.memory(64 * MiB)
    busy = replace(SCAN, on_chip_cycles=lambda call: 1e-3 * sheet.sm_count * sheet.sm_clock)
    assert bench.cold(bench.bind(busy, x=x)) == pytest.approx(1e-3, rel=0.02)
    idle = replace(SCAN, on_chip_cycles=lambda call: 1.0)
    assert bench.cold(bench.bind(idle, x=x)) == pytest.approx(bench.cold(bench.bind(SCAN, x=x)), rel=0.01)


def test_a_small_grid_has_few_sms_on_chip(bench: Workbench) -> None:
    sheet, x = DATASHEETS["h100"], bench.memory(MiB)
    busy = replace(SCAN, on_chip_cycles=lambda call: 1e-3 * sheet.sm_clock)
    one, two, all_sms = (bench.cold(bench.bind(busy, blocks=b, x=x)) for b in (1, 2, sheet.sm_count))
    assert one == pytest.approx(1e-3, rel=0.05)
    assert two == pytest.approx(0.5e-3, rel=0.1)
    assert all_sms < 0.05e-3


def test_a_table_whose_part_a_block_comes_back_to_is_read_from_l1(bench: Workbench) -> None:
    """32 blocks of 1024 threads: 2^18 elements are eight rounds of the grid, so that a block reads an eighth of 1024 x 8; one element less
    brings it to all of them."""
    out = bench.memory(GiB)
    own, all_of_it = (
        bench.cold(bench.bind(LOOKUP, blocks=32, table=bench.memory(nbytes), out=out, dtype="i4")) for nbytes in (MiB, MiB - 4)
    )
    assert own < 0.9 * all_of_it


def test_blocks_that_wait_for_a_place_cost_time(bench: Workbench) -> None:
    x = bench.memory(64 * MiB)
    at_once, in_turn = (bench.cold(bench.bind(SCAN, blocks=blocks, x=x)) for blocks in (132 * 8, 132 * 8 * 40))
    turnover = 39 * 256**0.5 * DATASHEETS["h100"].fit.turnover
    assert at_once + 0.2 * turnover < in_turn < at_once + 1.1 * turnover


def test_sectors_far_apart_cost_more_than_their_bytes(bench: Workbench) -> None:
    x, y, kernel = bench.memory(512 * MiB), bench.memory(512 * MiB), scale(sectors=32.0)

    def sparse(share: int) -> float:
        accesses = lambda call: tuple(  # noqa: E731
            replace(a, footprint=a.footprint // share, requested=a.requested // share) for a in kernel.accesses(call)
        )
        return bench.cold(bench.bind(replace(kernel, accesses=accesses), x=x, y=y))

    assert 0.6 < sparse(16) / sparse(8) < 0.8
    assert 0.6 < sparse(32) / sparse(16) < 0.8


def test_a_small_grid_is_bound_by_latency(bench: Workbench) -> None:
    x = bench.memory(256 * MiB)
    assert bench.cold(bench.bind(SCAN, blocks=8, x=x)) > 5 * bench.cold(bench.bind(SCAN, x=x))


def test_ten_percent_more_bytes_take_ten_percent_longer(bench: Workbench) -> None:
    kernel = SCAN
    more = replace(
        kernel,
        accesses=lambda call: tuple(
            replace(a, footprint=a.footprint * 11 // 10, requested=a.requested * 11 // 10) for a in kernel.accesses(call)
        ),
    )
    x = bench.memory(GiB)
    assert bench.cold(bench.bind(more, x=x)) / bench.cold(bench.bind(kernel, x=x)) == pytest.approx(1.1, rel=0.01)


def test_the_model_knows_no_kernel_by_name() -> None:
    folder = Path(pytest_gpumem.devices.simulated.__file__).parent
    # Names that are also words of the trade (read, write, copy, add) cannot tell anything.
    names = {n for n in CATALOGUE if n not in ("read", "write", "copy", "mul", "add", "init", "dot")}
    assert len(names) >= 10
    naming = re.compile(rf"\b({'|'.join(sorted(names))})\b")
    for file in folder.rglob("*.py"):
        found = naming.search(file.read_text())
        assert found is None, f"{file} names {found}"
