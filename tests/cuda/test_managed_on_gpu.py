"""Managed memory on a real driver: what CUPTI counts, what the driver takes, and two GPUs."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from pytest_gpumem import Case, GpuBenchmark, MiB
from pytest_gpumem.devices.protocol import Device
from pytest_gpumem.measuring.bound import Kernels
from pytest_gpumem.memory.spaces import Memory

SIZE = 32 * MiB


@pytest.fixture
def counted(gpu_device: Device) -> Any:
    """Counts pages while something runs; skips where they cannot be counted."""
    from pytest_gpumem.devices.protocol import NotCounted

    def count(work: Any) -> Any:
        def waiting() -> None:
            work()
            gpu_device.streams.synchronize()

        try:
            return gpu_device.counters.pages(waiting)
        except NotCounted as why:
            pytest.skip(f"not counted: {why}")

    return count


def test_faults_of_the_gpu_and_of_the_host_are_told_apart(
    counted: Any, gpu_kernels: Kernels, managed_buffer: Any
) -> None:
    buffer = managed_buffer(SIZE, "f4")
    faulting = counted(lambda: gpu_kernels.init(buffer))
    assert faulting.gpu_faults >= faulting.gpu_groups > 0
    assert faulting.to_device >= SIZE
    view = buffer._arena.guest(buffer, np)
    read = counted(lambda: float(view.sum()))
    assert read.cpu_faults > 0
    assert read.to_host >= SIZE
    assert read.gpu_faults == 0


def test_a_host_that_reads_in_place_after_a_measurement_faults(
    counted: Any, gpu_benchmark: GpuBenchmark, gpu_kernels: Kernels, managed_buffer: Any
) -> None:
    """As in tests/memory/test_managed.py, whose test only a profiler can see fault. A copy by the driver is no fault of the host."""
    array = managed_buffer(SIZE, "f4", first_touch="none", like=np)
    gpu_benchmark(gpu_kernels.init, array, 2.0)
    read = counted(lambda: float(array.sum()))
    assert read.cpu_faults > 0
    assert read.to_host >= SIZE
    buffer = managed_buffer(SIZE, "f4", first_touch="none")
    gpu_benchmark(gpu_kernels.init, buffer, 2.0, label="buffer")
    assert counted(lambda: np.asarray(buffer)).cpu_faults == 0


def test_a_second_launch_and_a_prefetched_one_fault_no_more(
    counted: Any, gpu_kernels: Kernels, managed_buffer: Any
) -> None:
    buffer = managed_buffer(SIZE, "f4")
    counted(lambda: gpu_kernels.init(buffer))
    assert counted(lambda: gpu_kernels.init(buffer)).gpu_faults == 0
    buffer.prefetch("host")
    ahead = counted(lambda: buffer.prefetch("device"))
    assert ahead.to_device == SIZE == ahead.causes["prefetch"]
    assert counted(lambda: gpu_kernels.init(buffer)).gpu_faults == 0


def test_pages_that_prefer_the_host_are_mapped_once(
    counted: Any, gpu_kernels: Kernels, managed_buffer: Any
) -> None:
    """The mapping stays when they are prefetched to where they are."""
    buffer = managed_buffer(SIZE, "f4", preferred_location="host")
    first = counted(lambda: gpu_kernels.init(buffer))
    assert first.gpu_faults > 0
    assert first.migrated == 0
    buffer.prefetch("host")
    assert counted(lambda: gpu_kernels.init(buffer)).gpu_faults == 0


def test_the_driver_takes_every_advice_and_its_opposite(managed_buffer: Any) -> None:
    buffer = managed_buffer(
        SIZE, "f4", read_mostly=True, preferred_location="device", accessed_by=("device", "host")
    )
    for advice in (
        {"preferred_location": "host"},
        {"accessed_by": None},
        {"read_mostly": False, "preferred_location": None},
    ):
        buffer.advise(**advice)
    assert np.isfinite(buffer.read()).all()


def test_two_gpus_share_managed_memory(gpu_benchmark: GpuBenchmark) -> None:
    """Before every launch the other GPU writes what this one then reads: the pages come over from there."""
    cupy = pytest.importorskip("cupy")
    gpus = cupy.cuda.runtime.getDeviceCount()
    if gpus < 2:
        pytest.skip("needs two GPUs; CUDA sees one")
    here = cupy.cuda.Device().id
    other = (here + 1) % gpus
    if not cupy.cuda.Device(other).attributes["ConcurrentManagedAccess"]:
        pytest.skip("the other GPU has no concurrentManagedAccess")

    def writing_on(gpu: int) -> Any:
        def case(memory: Memory) -> Case:
            x, y = (memory.managed(SIZE, "f4", first_touch="none", like=cupy) for _ in range(2))
            x.fill(1)
            theirs = cupy.ndarray(
                y.shape,
                y.dtype,
                cupy.cuda.MemoryPointer(cupy.cuda.UnownedMemory(y.data.ptr, y.nbytes, y, gpu), 0),
            )

            def write() -> None:
                with cupy.cuda.Device(gpu):
                    theirs.fill(2)
                    cupy.cuda.get_current_stream().synchronize()

            return Case(
                lambda: cupy.add(x, y, out=y),
                restore=write,
                check=lambda: bool((y == 3).all()),
                reads=[x, y],
                writes=[y],
            )

        return case

    alone = gpu_benchmark.case(writing_on(here), label="written here", count_pages=True)
    shared = gpu_benchmark.case(
        writing_on(other), label="written on the other GPU", count_pages=True
    )
    assert shared.latency > 2 * alone.latency
    if shared.counts and (counts := shared.counts.launch):
        assert counts.gpu_faults > 0
        assert counts.between_devices + counts.to_device >= SIZE
