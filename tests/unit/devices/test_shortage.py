"""A lack of device memory in the words of each library."""

from __future__ import annotations

import pytest

from pytest_gpumem import GiB, MiB
from pytest_gpumem.devices.protocol import OutOfMemory
from pytest_gpumem.devices.shortage import asked_for, shortage

TORCH = (
    "CUDA out of memory. Tried to allocate {}. GPU 0 has a total capacity of 79.19 GiB of which 11.06 MiB is free. "
    "Of the allocated memory 9.25 GiB is allocated by PyTorch, and 10.14 MiB is reserved by PyTorch but unallocated."
)


def of_library(
    message: str, name: str = "OutOfMemoryError", base: type[Exception] = RuntimeError
) -> Exception:
    """An error whose class nobody here imports."""
    made: Exception = type(name, (base,), {})(message)
    return made


@pytest.mark.parametrize(
    ("error", "asked"),
    [
        (of_library(TORCH.format("2.50 GiB")), 5 * GiB // 2),
        (of_library(TORCH.format("20.00 MiB")), 20 * MiB),
        (
            of_library(
                "Out of memory allocating 2,147,483,648 bytes (allocated so far: 9,663,676,416 bytes).",
                base=MemoryError,
            ),
            2 * GiB,
        ),
        (
            MemoryError(
                "std::bad_alloc: out_of_memory: CUDA error (failed to allocate 1073741824 bytes) at: a.hpp"
            ),
            GiB,
        ),
        (
            RuntimeError(
                "RESOURCE_EXHAUSTED: Out of memory while trying to allocate 1073741824 bytes."
            ),
            GiB,
        ),
        (
            of_library(
                "[2] Call to cuMemAlloc results in CUDA_ERROR_OUT_OF_MEMORY", "CudaAPIError"
            ),
            None,
        ),
        (of_library("cudaErrorMemoryAllocation: out of memory", "CUDARuntimeError"), None),
        (
            RuntimeError(
                "CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"
            ),
            None,
        ),
        (of_library("CUBLAS_STATUS_ALLOC_FAILED", "CUBLASError"), None),
        (of_library("CUFFT_ALLOC_FAILED", "CuFFTError"), None),
        (RuntimeError("cuDNN error: CUDNN_STATUS_ALLOC_FAILED"), None),
        (of_library("CUSOLVER_STATUS_ALLOC_FAILED", "CUSOLVERError"), None),
        (of_library("CURAND_STATUS_ALLOCATION_FAILED", "CURANDError"), None),
        (of_library("RESOURCE_EXHAUSTED: failed to capture the graph", "XlaRuntimeError"), None),
        (OutOfMemory("3 GiB of device memory asked for, 2 GiB are free", 3 * GiB), 3 * GiB),
        (OutOfMemory("70 GiB of pinned memory asked for, 2 GiB are free"), None),
    ],
)
def test_each_library_is_recognised_with_what_it_asked_for(
    error: Exception, asked: int | None
) -> None:
    assert shortage(error) is error
    assert asked_for(error) == asked


def test_an_error_that_a_shortage_led_to() -> None:
    later = KeyError("batch")
    later.__context__ = of_library(TORCH.format("2.00 GiB"))
    later.__suppress_context__ = True
    found = shortage(later)
    assert found is not None
    assert asked_for(found) == 2 * GiB


def test_no_shortage_of_the_device() -> None:
    host = type("_ArrayMemoryError", (MemoryError,), {"__module__": "numpy._core._exceptions"})
    for error in (
        None,
        ValueError("17 of 20"),
        RuntimeError("CUBLAS_STATUS_NOT_INITIALIZED"),
        AssertionError("out of memory was expected"),
        host("Unable to allocate 7.28 TiB"),
    ):
        assert shortage(error) is None
