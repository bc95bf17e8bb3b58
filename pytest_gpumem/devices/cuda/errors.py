"""CUDA's errors as `DeviceError`: one line with the error's name, and whether the context survives
it."""

from __future__ import annotations

import sys
from typing import Any

from cuda.bindings import driver as D  # noqa: N812
from cuda.bindings import runtime as R  # noqa: N812

from pytest_gpumem.devices.protocol import ContextLost, DeviceError, OutOfMemory

# CUDA Runtime API, cudaError_t: "any further CUDA work will return the same error." Driver and
# runtime number these alike.
_STICKY_NAMES = (
    "cudaErrorECCUncorrectable",
    "cudaErrorNvlinkUncorrectable",
    "cudaErrorContained",
    "cudaErrorIllegalAddress",
    "cudaErrorLaunchTimeout",
    "cudaErrorContextIsDestroyed",
    "cudaErrorAssert",
    "cudaErrorHardwareStackError",
    "cudaErrorIllegalInstruction",
    "cudaErrorMisalignedAddress",
    "cudaErrorInvalidAddressSpace",
    "cudaErrorInvalidPc",
    "cudaErrorLaunchFailure",
    "cudaErrorTensorMemoryLeak",
    "cudaErrorMpsClientTerminated",
    "cudaErrorExternalDevice",
)
_STICKY = {int(error) for error in R.cudaError_t if error.name in _STICKY_NAMES}

_NO_MEMORY = int(R.cudaError_t.cudaErrorMemoryAllocation)


def check(result: Any, doing: str) -> Any:
    """Give the values of a call of cuda-bindings, runtime or driver, which returns (error, value,
    ...) and never raises.
    Raises `DeviceError`: the call failed; the runtime's last error is cleared.
    """
    error, *values = result
    if int(error) != 0:
        R.cudaGetLastError()
        name, text = R.cudaGetErrorName, R.cudaGetErrorString
        if isinstance(error, D.CUresult):
            name, text = D.cuGetErrorName, D.cuGetErrorString
        problem = f"{doing}: {name(error)[1].decode()}: {text(error)[1].decode()}."
        if int(error) in _STICKY:
            lost = "The CUDA context is lost: every later CUDA call of this process fails."
            raise ContextLost(f"{problem} {lost}")
        raise (OutOfMemory if int(error) == _NO_MEMORY else DeviceError)(problem)
    if not values:
        return None
    return values[0] if len(values) == 1 else tuple(values)


def library_errors() -> tuple[type[Exception], ...]:
    """The errors by which CuPy reports those of CUDA, if it is imported."""
    cupy: Any = sys.modules.get("cupy")
    if cupy is None:
        return ()
    return (cupy.cuda.runtime.CUDARuntimeError, cupy.cuda.driver.CUDADriverError)
