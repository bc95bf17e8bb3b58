"""A lack of device memory: recognise it in an exception of any library, and read how much was asked for."""

from __future__ import annotations

import re

from pytest_gpumem.devices.protocol import OutOfMemory
from pytest_gpumem.units import GiB, KiB, MiB, TiB

_WORDS = (
    "out of memory",
    "out_of_memory",
    "cudaErrorMemoryAllocation",
    "RESOURCE_EXHAUSTED",
    "_ALLOC_FAILED",
    "_ALLOCATION_FAILED",
)
"""What messages of a library contain that ran out of memory: PyTorch's and CUDA's text, the driver's name of it and RMM's text, the
runtime's name, XLA's status, the status of cuBLAS, cuFFT, cuDNN, cuSOLVER and cuSPARSE, and that of cuRAND."""

_UNITS = {"bytes": 1, "b": 1, "kib": KiB, "mib": MiB, "gib": GiB, "tib": TiB}
_ASKED = re.compile(
    r"\ballocat(?:e|ing)\s+([0-9][0-9,]*(?:\.[0-9]+)?)\s?(bytes|[KMGT]iB|B)\b", re.IGNORECASE
)
"""PyTorch: "Tried to allocate 2.00 GiB"; CuPy: "allocating 2,147,483,648 bytes"; RMM: "failed to allocate 1048576 bytes"; XLA: "trying to
allocate 2147483648 bytes"."""


def out_of_memory(error: BaseException) -> bool:
    """True for a lack of memory, whichever library raised it; none is imported for a look at its classes. CuPy and PyTorch raise an
    `OutOfMemoryError`, RMM and NumPy a `MemoryError`, Numba its `CudaAPIError`, JAX a runtime error."""
    if isinstance(error, (MemoryError, OutOfMemory)) or type(error).__name__ == "OutOfMemoryError":
        return True
    text = str(error).lower()
    return not isinstance(error, AssertionError) and any(words.lower() in text for words in _WORDS)


def shortage(error: BaseException | None) -> BaseException | None:
    """The lack of device memory that an exception is, or that led to it; None if there was none. NumPy's is one of the host's."""
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        if out_of_memory(error) and not type(error).__module__.startswith("numpy"):
            return error
        seen.add(id(error))
        error = error.__cause__ or error.__context__
    return None


def asked_for(error: BaseException) -> int | None:
    """Bytes of the allocation that failed, as exactly as the message has them; None if it does not say."""
    if isinstance(error, OutOfMemory):
        return error.asked
    found = _ASKED.search(str(error))
    return (
        None
        if found is None
        else round(float(found[1].replace(",", "")) * _UNITS[found[2].lower()])
    )
