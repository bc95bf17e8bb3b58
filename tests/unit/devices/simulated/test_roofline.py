"""The roofline: bytes and sectors over a bandwidth, hot and cold, latencies, and the spread of its noise."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from workbench import SCAN, WALK, Workbench, scale, touch

import pytest_gpumem.devices.simulated
from pytest_gpumem.devices.memory_kinds import MemoryKind
from pytest_gpumem.devices.simulated.datasheets import DATASHEETS
from pytest_gpumem.kernels.catalogue import CATALOGUE
from pytest_gpumem.units import MiB

N = 512 * MiB
SHEET = DATASHEETS["h100"]
DRAM = SHEET.dram_peak * SHEET.dram_share


def seconds(bench: Workbench, kernel: Any = SCAN, **kinds: MemoryKind) -> float:
    """Of a kernel on arrays of `N` bytes in device memory, or as said."""
    arrays: Any = {
        parameter.name: bench.memory(N, kinds.get(parameter.name, MemoryKind.DEVICE))
        for parameter in kernel.parameters
    }
    return bench.time(bench.bind(kernel, **arrays))


def test_bytes_over_the_bandwidth_of_dram() -> None:
    for name in DATASHEETS:
        sheet = DATASHEETS[name]
        took = seconds(Workbench(name), scale())
        assert 2 * N / took == pytest.approx(sheet.dram_peak * sheet.dram_share, rel=0.03), name


@pytest.mark.parametrize(("sectors", "times"), [(4.0, 1.0), (32.0, 8.0)])
def test_bytes_are_taken_times_the_sectors_of_a_request(
    bench: Workbench, sectors: float, times: float
) -> None:
    """Of every eighth word: the sectors of an array are no more than the array."""

    def accesses(call: Any) -> Any:
        return tuple(
            replace(
                touch(call, *access, sectors_per_request=sectors),
                footprint=N // 8,
                requested=N // 8,
            )
            for access in roles
        )

    roles = (("x", "read"), ("y", "write"))
    took = seconds(bench, replace(scale(), accesses=accesses))
    assert took == pytest.approx(times * 2 * (N // 8) / DRAM, rel=0.06)


def test_the_link_serves_host_memory(bench: Workbench) -> None:
    took = seconds(bench, x=MemoryKind.PINNED)
    assert N / took == pytest.approx(SHEET.link_bandwidth * SHEET.link_share, rel=0.01)


def test_l2_serves_arrays_that_fit_once_they_are_hot(bench: Workbench) -> None:
    launch = bench.bind(SCAN, x=bench.memory(32 * MiB))
    cold, hot = bench.cold(launch), bench.hot(launch)
    assert cold - hot == pytest.approx(32 * MiB / DRAM - 32 * MiB / SHEET.l2_bandwidth, rel=0.1)
    beyond = bench.bind(SCAN, x=bench.memory(64 * MiB))
    assert bench.hot(beyond) == pytest.approx(bench.cold(beyond), rel=0.05)


def test_dependent_accesses_take_a_latency_each() -> None:
    for kind, hot, latency in [
        (MemoryKind.DEVICE, False, SHEET.dram_latency),
        (MemoryKind.DEVICE, True, SHEET.l2_latency),
        (MemoryKind.PINNED, False, SHEET.link_latency),
    ]:
        bench = Workbench()
        launch = bench.bind(WALK, nodes=bench.memory(8 * MiB, kind))
        took = bench.hot(launch) if hot else bench.cold(launch)
        assert took / (8 * MiB // 64) == pytest.approx(latency, rel=0.05), (kind, hot, latency)


def test_cycles_of_the_sms_are_a_roof_too(bench: Workbench) -> None:
    busy = replace(SCAN, on_chip_cycles=lambda call: 1e9)
    assert seconds(bench, busy) == pytest.approx(1e9 / (SHEET.sm_count * SHEET.sm_clock), rel=0.03)
    launch = bench.bind(busy, blocks=1, x=bench.memory(N))
    assert bench.time(launch) == pytest.approx(1e9 / SHEET.sm_clock, rel=0.03)


def samples(seed: int) -> list[float]:
    bench = Workbench(seed=seed)
    launch = bench.bind(scale(), x=bench.memory(8 * MiB), y=bench.memory(8 * MiB))
    return [bench.time(launch) for _ in range(30)]


def test_the_same_seed_gives_the_same_samples() -> None:
    assert samples(7) == samples(7)
    assert samples(7) != samples(8)


def test_the_model_knows_no_kernel_by_name() -> None:
    folder = Path(pytest_gpumem.devices.simulated.__file__).parent
    # Names that are also words of the trade (read, write, copy, add) cannot tell anything.
    names = {
        n for n in CATALOGUE if n not in ("read", "write", "copy", "mul", "add", "init", "dot")
    }
    assert len(names) >= 10
    naming = re.compile(rf"\b({'|'.join(sorted(names))})\b")
    for file in folder.rglob("*.py"):
        named = naming.search(file.read_text())
        assert named is None, f"{file} names {named}"
