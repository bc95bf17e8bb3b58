"""Kernels through NVRTC: source and entry in, a function that can be launched out."""

from __future__ import annotations

from typing import Any

import cupy
from cupy.cuda.compiler import CompileException

from pytest_gpumem.devices.cuda.ahead_of_time import first_error
from pytest_gpumem.devices.cuda.errors import translated
from pytest_gpumem.devices.protocol import DeviceError
from pytest_gpumem.kernels import sources
from pytest_gpumem.kernels.kernel import Kernel, LaunchShape

_DEFAULT_SHARED_BYTES = 48 * 1024  # above it, a kernel must opt in (CUDA Programming Guide, compute capabilities)


class Compiler:
    """Compiled functions of one device, by source and instantiated entry. CuPy keeps the binaries on disk between processes."""

    def __init__(self) -> None:
        self._kernels: dict[tuple[str, str], Any] = {}
        self._largest_shared: dict[tuple[str, str], int] = {}

    def function(self, kernel: Kernel, dtype: str, shape: LaunchShape) -> Any:
        """The kernel for an element type and a launch shape, allowed to use the shape's dynamic shared memory.

        Raises:
            DeviceError: no such element type, or the compiler's first error line.
        """
        assert kernel.source is not None, "a copy has nothing to compile"
        entry = entry_for(kernel, dtype, shape)
        found = self._kernels.get((kernel.source, entry))
        if found is None:
            found = self._kernels[kernel.source, entry] = self._compile(
                sources.read(kernel.source), entry, sources.COMPILE_OPTIONS, f"kernel {kernel.name!r} ({kernel.source})"
            )
        self._allow_shared(found, (kernel.source, entry), shape.shared_bytes)
        return found.kernel

    def private(self, source: str, entry: str) -> Any:
        """A function of the device's own, from a source string."""
        return self._compile(source, entry, sources.COMPILE_OPTIONS, entry).kernel

    def _allow_shared(self, kernel: Any, key: tuple[str, str], nbytes: int) -> None:
        if nbytes > max(_DEFAULT_SHARED_BYTES, self._largest_shared.get(key, 0)):
            with translated(f"asking for {nbytes} bytes of shared memory"):
                kernel.max_dynamic_shared_size_bytes = nbytes
            self._largest_shared[key] = nbytes

    @staticmethod
    def _compile(source: str, entry: str, options: tuple[str, ...], what: str) -> Any:
        try:
            with translated(f"loading {what}"):
                kernel = cupy.RawModule(code=source, options=tuple(options), name_expressions=[entry]).get_function(entry)
                _ = kernel.kernel  # resolved now, so that a launch finds it ready
        except CompileException as error:
            raise DeviceError(f"{what} does not compile: {first_error(str(error))}") from None
        return kernel


def entry_for(kernel: Kernel, dtype: str, shape: LaunchShape) -> str:
    """The C++ name expression for an element type: "add<float>" for "add<{dtype}>" and "f4". Raises `DeviceError` without one."""
    if "{dtype}" in kernel.entry and dtype not in sources.CPP_TYPES:
        raise DeviceError(f"kernel {kernel.name!r}: no C++ type for elements of {dtype!r}; there are {', '.join(sources.CPP_TYPES)}")
    return kernel.expression(sources.CPP_TYPES.get(dtype, ""), shape)
