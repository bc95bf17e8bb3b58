"""Kernels through NVRTC: source and entry in, a function that can be launched out."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from cuda.bindings import driver as D  # noqa: N812

from pytest_gpumem.devices.cuda.errors import check
from pytest_gpumem.devices.cuda.handles import CudaStream
from pytest_gpumem.devices.cuda.nvrtc import DoesNotCompile, KernelCompiler
from pytest_gpumem.devices.protocol import DeviceError
from pytest_gpumem.kernels import sources
from pytest_gpumem.kernels.kernel import Kernel, LaunchShape

_DEFAULT_SHARED_BYTES = 48 * 1024
"""Above it, a kernel must opt in (CUDA Programming Guide, compute capabilities)."""


class KernelCall:
    """A kernel with all that a launch needs besides its stream, as the driver takes it: to queue it
    again is one call."""

    __slots__ = ("_address", "_blocks", "_doing", "_function", "_kept", "_shared_bytes", "_threads")

    def __init__(
        self, function: Any, shape: LaunchShape, arguments: Sequence[Any], doing: str
    ) -> None:
        """`function` is a CUfunction, `arguments` are NumPy scalars of the kernel's own types, and
        `doing` is for the text of an error."""
        values = np.zeros((len(arguments), 2), dtype=np.uint64)  # 16 bytes hold any of them
        for value, argument in zip(values, arguments, strict=True):
            value.view(np.uint8)[: argument.nbytes] = np.frombuffer(
                argument.tobytes(), dtype=np.uint8
            )
        # The driver reads each argument through a pointer, and is done with both before a call
        # returns.
        pointers = (values.ctypes.data + 16 * np.arange(len(arguments))).astype(np.uint64)
        self._kept = (values, pointers)
        self._address = int(pointers.ctypes.data)
        self._function = function
        self._blocks, self._threads, self._shared_bytes = (
            shape.blocks,
            shape.threads,
            shape.shared_bytes,
        )
        self._doing = doing

    def queue(self, stream: CudaStream) -> None:
        """Queue it. Raises `DeviceError`: the driver refuses."""
        result = D.cuLaunchKernel(
            self._function,
            self._blocks,
            1,
            1,
            self._threads,
            1,
            1,
            self._shared_bytes,
            stream.handle,
            self._address,
            0,
        )
        check(result, self._doing)

    def queue_with(self, stream: CudaStream, attribute: Any) -> None:
        """Queue it with one attribute of a launch. Raises `DeviceError`: the driver refuses."""
        config = D.CUlaunchConfig()
        config.gridDimX, config.blockDimX = self._blocks, self._threads
        config.gridDimY = config.gridDimZ = config.blockDimY = config.blockDimZ = 1
        config.sharedMemBytes = self._shared_bytes
        config.hStream = D.CUstream(stream.handle)
        config.attrs = [attribute]
        config.numAttrs = 1
        check(
            D.cuLaunchKernelEx(config, self._function, self._address, 0),
            f"{self._doing} with a window",
        )


class Compiler:
    """Compiled functions of one device, by source and instantiated entry."""

    def __init__(self, nvrtc: KernelCompiler) -> None:
        self._nvrtc = nvrtc
        self._functions: dict[tuple[str, str], Any] = {}
        self._largest_shared: dict[tuple[str, str], int] = {}

    def function(self, kernel: Kernel, dtype: str, shape: LaunchShape) -> Any:
        """The kernel for an element type and a launch shape, allowed to use the shape's dynamic
        shared memory.
        Raises `DeviceError`: no such element type, or the compiler's first error line.
        """
        assert kernel.source is not None, "a copy has nothing to compile"
        entry = entry_for(kernel, dtype, shape)
        loaded = self._functions.get((kernel.source, entry))
        if loaded is None:
            what = f"kernel {kernel.name!r} ({kernel.source})"
            loaded = self._functions[kernel.source, entry] = self._load(
                sources.read(kernel.source), entry, what
            )
        self._allow_shared(loaded, (kernel.source, entry), shape.shared_bytes)
        return loaded

    def private(self, source: str, entry: str) -> Any:
        """A function of the device's own, from a source string."""
        return self._load(source, entry, entry)

    def _allow_shared(self, function: Any, key: tuple[str, str], nbytes: int) -> None:
        if nbytes > max(_DEFAULT_SHARED_BYTES, self._largest_shared.get(key, 0)):
            attribute = D.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
            check(
                D.cuFuncSetAttribute(function, attribute, nbytes),
                f"asking for {nbytes} bytes of shared memory",
            )
            self._largest_shared[key] = nbytes

    def _load(self, source: str, entry: str, what: str) -> Any:
        try:
            kernel = self._nvrtc.get(source, entry)
        except DoesNotCompile as error:
            raise DeviceError(f"{what}: {error}") from None
        # The module lives as long as the context: no function outlives it.
        module = check(D.cuModuleLoadData(kernel.code), f"loading {what}")
        return check(D.cuModuleGetFunction(module, kernel.symbol.encode()), f"loading {what}")


def entry_for(kernel: Kernel, dtype: str, shape: LaunchShape) -> str:
    """The C++ name expression for an element type: "add<float>" for "add<{dtype}>" and "f4". Raises
    `DeviceError` without one."""
    if "{dtype}" in kernel.entry and dtype not in sources.CPP_TYPES:
        raise DeviceError(
            f"kernel {kernel.name!r}: no C++ type for elements of {dtype!r}; there are "
            f"{', '.join(sources.CPP_TYPES)}"
        )
    return kernel.expression(sources.CPP_TYPES.get(dtype, ""), shape)
