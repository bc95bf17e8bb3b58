"""Where a prefetch goes, in the words of CUDA 12 and of CUDA 13."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

pytest.importorskip("cupy")
pytest.importorskip("cuda.bindings.runtime")

from cuda.bindings import runtime as R  # noqa: N812

from pytest_gpumem.devices.cuda import managed
from pytest_gpumem.devices.kinds import MemoryKind
from pytest_gpumem.devices.protocol import Allocation, DeviceError, Unsupported
from pytest_gpumem.records.device import DeviceFacts


def test_cuda_12_takes_a_device_number() -> None:
    assert managed.place(None, 12, 3, to_host=False) == (3,)
    assert managed.place(None, 12, 3, to_host=True) == (-1,)


def test_cuda_13_takes_a_location() -> None:
    location, flags = managed.place(R, 13, 3, to_host=False)
    assert (location.type, location.id, flags) == (R.cudaMemLocationType.cudaMemLocationTypeDevice, 3, 0)
    location, flags = managed.place(R, 13, 3, to_host=True)
    assert (location.type, flags) == (R.cudaMemLocationType.cudaMemLocationTypeHost, 0)


def test_the_installed_bindings_take_the_arguments_chosen_for_them() -> None:
    """Without a driver the call gives an error code; a wrong signature raises TypeError."""
    arguments = managed.place(R, managed.BINDINGS_MAJOR, 0, to_host=False)
    (error,) = R.cudaMemPrefetchAsync(0, 0, *arguments, 0)
    assert isinstance(error, R.cudaError_t)


def test_what_cannot_be_prefetched_is_refused(h100: DeviceFacts) -> None:
    with pytest.raises(DeviceError, match="not device"):
        managed.CudaManaged(0, h100).prefetch(Allocation(MemoryKind.DEVICE, 64, 256, 0), False, None)  # type: ignore[arg-type]
    pages = Allocation(MemoryKind.MANAGED, 64, 256, 256)
    with pytest.raises(Unsupported, match="concurrentManagedAccess"):
        managed.CudaManaged(0, replace(h100, concurrent_managed_access=False)).prefetch(pages, False, None)  # type: ignore[arg-type]
