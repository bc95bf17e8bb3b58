"""Prefetches, advice and discards in the words of CUDA 12 and of CUDA 13."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
from cases import naming
from msgspec.structs import replace

pytest.importorskip("cupy")
pytest.importorskip("cuda.bindings.runtime")

from cuda.bindings import runtime as R  # noqa: N812

from pytest_gpumem.devices.cuda import managed
from pytest_gpumem.devices.kinds import MemoryKind
from pytest_gpumem.devices.protocol import Advice, Allocation, DeviceError, Unsupported
from pytest_gpumem.records.device import DeviceFacts

MEMORY = Allocation(MemoryKind.MANAGED, 4096, 0x10000, 0x10000)
STREAM: Any = SimpleNamespace(handle=1)


def test_a_place_is_a_number_or_a_location() -> None:
    for to_host in [False, True]:
        number, kinds = -1 if to_host else 3, R.cudaMemLocationType
        assert managed.place(None, 12, 3, to_host=to_host) == (number,), to_host
        assert managed.location(None, 12, 3, to_host=to_host) == number, to_host
        location, flags = managed.place(R, 13, 3, to_host=to_host)
        kind = kinds.cudaMemLocationTypeHost if to_host else kinds.cudaMemLocationTypeDevice
        assert (location.type, location.id, flags) == (kind, 0 if to_host else 3, 0), to_host


def test_each_advice_is_set_and_unset_by_its_own_number() -> None:
    for advice in Advice:
        numbers = {
            on: managed.advice_number(advice, on=on).name.lower().replace("_", "")
            for on in (True, False)
        }
        assert numbers == {
            True: f"cudamemadviseset{advice.value.replace('_', '')}",
            False: f"cudamemadviseunset{advice.value.replace('_', '')}",
        }, advice


def test_the_installed_bindings_take_the_arguments_chosen_for_them() -> None:
    """Without a driver the calls give error codes; a wrong signature raises TypeError."""
    where = managed.location(R, managed.BINDINGS_MAJOR, 0, to_host=False)
    (error,) = R.cudaMemAdvise(0, 0, managed.advice_number(Advice.READ_MOSTLY, on=True), where)
    assert isinstance(error, R.cudaError_t)
    (error,) = R.cudaMemPrefetchAsync(
        0, 0, *managed.place(R, managed.BINDINGS_MAJOR, 0, to_host=False), 0
    )
    assert isinstance(error, R.cudaError_t)
    if hasattr(R, "cudaMemDiscardBatchAsync"):
        (error,) = R.cudaMemDiscardBatchAsync([0x10000], [4096], 1, 0, 1)
        assert isinstance(error, R.cudaError_t)


def test_the_driver_knows_the_attribute_that_tells_ats_from_hmm() -> None:
    driver = pytest.importorskip("cuda.bindings.driver")
    assert hasattr(
        driver.CUdevice_attribute,
        "CU_DEVICE_ATTRIBUTE_PAGEABLE_MEMORY_ACCESS_USES_HOST_PAGE_TABLES",
    )


def test_what_cannot_be_is_refused(h100: DeviceFacts) -> None:
    cases: list[Callable[[managed.CudaManaged, Allocation], None]] = [
        lambda facet, memory: facet.prefetch(memory, False, STREAM),
        lambda facet, memory: facet.advise(memory, Advice.READ_MOSTLY, False, on=True),
        lambda facet, memory: facet.discard(memory, STREAM),
    ]
    for verb in cases:
        with naming(verb):
            with pytest.raises(DeviceError, match="not pinned memory"):
                verb(managed.CudaManaged(0, h100), Allocation(MemoryKind.PINNED, 64, 256, 256))
            with pytest.raises(Unsupported, match="concurrentManagedAccess"):
                verb(managed.CudaManaged(0, replace(h100, concurrent_managed_access=False)), MEMORY)
