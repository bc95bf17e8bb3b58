"""Other libraries: arrays of theirs over our memory, and our stream as their current stream. Each
but CuPy, which an open device has imported, is imported only in its factory."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from cuda.bindings import runtime as R

from pytest_gpumem.devices.cuda import places
from pytest_gpumem.devices.cuda.context import PER_THREAD_DEFAULT, CudaStream, check
from pytest_gpumem.devices.protocol import Allocation, DeviceError, Unsupported

_LIBRARIES = {
    "cupy": "CuPy",
    "torch": "",
    "numba.cuda": "Numba's CUDA target",
    "numba": "Numba's CUDA target",
    "numba_cuda.numba.cuda": "Numba's CUDA target",  # of the package numba-cuda
    "jax": "JAX",
    "jax.numpy": "JAX",
    "warp": "Warp",
    "cudf": "cuDF",
    "numpy": "",
}
"""By module: the library's name; empty if it also takes memory that the device cannot address."""
_NAMES = ("cupy", "torch", "numba.cuda", "jax", "warp", "cudf")
_RELAXED = R.cudaStreamCaptureMode.cudaStreamCaptureModeRelaxed


def guest(
    view: Callable[[Allocation, str, int], Any],
    allocation: Allocation,
    dtype: str,
    shape: tuple[int, ...],
    like: Any,
) -> Any:
    """An array of the library `like` over an allocation. Raises `Unsupported`."""
    name = getattr(like, "__name__", repr(like))
    if name not in _LIBRARIES:
        raise Unsupported(
            f"no bridge to {name}: like= takes the module {', '.join(_NAMES)} or numpy"
        )
    size = math.prod(shape)
    seen = view(allocation, dtype, size).reshape(shape)
    library = _LIBRARIES[name]
    if library and not allocation.address:
        raise Unsupported(f"{library} cannot see {allocation.kind.value} memory")
    try:
        array = _array(library or name, seen, allocation, dtype, size)
        # JAX arrays are immutable: `reshape` would copy.
        return array if tuple(array.shape) == shape else array.reshape(shape)
    except DeviceError:
        raise
    except (ImportError, TypeError, ValueError, RuntimeError) as error:
        raise Unsupported(
            f"{name} cannot take {allocation.kind.value} memory of {dtype}: {error}"
        ) from error


def _array(library: str, view: Any, allocation: Allocation, dtype: str, size: int) -> Any:
    """Make an array of a library of CuPy's `view`."""
    if library == "numpy":
        return places.array(allocation, dtype, size)
    if library == "torch":
        import torch

        if allocation.kind.on_host:  # a CPU tensor; torch finds out by itself that it is pinned
            return torch.from_numpy(places.array(allocation, dtype, size))
        return torch.as_tensor(view, device=f"cuda:{view.device.id}")
    if library == "JAX":
        import jax

        array = jax.dlpack.from_dlpack(view)
        # JAX copies what it cannot alias, and turns 8-byte types into 4-byte ones unless
        # jax_enable_x64 is set: the copy would be measured in place of our buffer.
        if array.unsafe_buffer_pointer() != allocation.address or array.dtype != view.dtype:
            raise Unsupported(
                f"JAX made a copy of {allocation.kind.value} memory of {dtype} in place of an "
                "array over it"
            )
        return array
    if library == "Warp":
        import warp

        return warp.from_dlpack(view)
    if library == "cuDF":
        import cudf

        if view.ndim != 1:
            raise Unsupported(f"a cuDF series has one dimension; {view.ndim} were asked for")
        return cudf.Series(view)
    if library == "CuPy":
        return view
    from numba import cuda

    return cuda.as_cuda_array(view, sync=False)


@contextmanager
def current(index: int, stream: CudaStream) -> Iterator[None]:
    """Make `stream` the current stream of CuPy, and of PyTorch (and so Triton) and Warp where they
    are imported. Other libraries have none to set."""
    import cupy

    with ExitStack() as stack:
        torch, warp = usable_torch(), sys.modules.get("warp")
        stack.enter_context(cupy.cuda.Device(index))
        if stream.is_legacy_default:
            stack.enter_context(cupy.cuda.Stream.null)
        elif stream.handle == PER_THREAD_DEFAULT:
            stack.enter_context(cupy.cuda.Stream.ptds)
        else:
            stack.enter_context(cupy.cuda.Stream.from_external(stream))
        if torch is not None and stream.is_legacy_default:
            stack.enter_context(torch.cuda.stream(torch.cuda.default_stream(index)))
        elif torch is not None:
            external = torch.cuda.ExternalStream(stream.handle, device=f"cuda:{index}")
            stack.enter_context(torch.cuda.stream(external))
        if warp is not None and hasattr(warp, "ScopedStream") and warp.is_cuda_available():
            of_warp = warp.Stream(f"cuda:{index}", cuda_stream=stream.handle)
            stack.enter_context(warp.ScopedStream(of_warp, sync_enter=False))
        yield


@contextmanager
def private_pools() -> Iterator[tuple[Any, ...]]:
    """Have CuPy, and PyTorch where it is in use, allocate from new pools, and yield these: they
    must live as long as what is captured."""
    import cupy

    def allocate(nbytes: int) -> Any:
        # so that a capture may call cudaMalloc
        before = check(R.cudaThreadExchangeStreamCaptureMode(_RELAXED), "relaxing the capture mode")
        try:
            return cupy.cuda.MemoryPointer(cupy.cuda.Memory(nbytes), 0)
        finally:
            check(R.cudaThreadExchangeStreamCaptureMode(before), "restoring the capture mode")

    pools: list[Any] = [cupy.cuda.MemoryPool(allocate)]
    torch = usable_torch()
    with ExitStack() as stack:
        stack.enter_context(cupy.cuda.using_allocator(pools[0].malloc))
        if torch is not None and torch.cuda.is_initialized():
            if not hasattr(torch.cuda, "use_mem_pool"):
                raise Unsupported(
                    f"PyTorch {torch.__version__} has no torch.cuda.use_mem_pool: its memory "
                    "cannot be kept for a graph"
                )
            pools.append(torch.cuda.MemPool())
            stack.enter_context(torch.cuda.use_mem_pool(pools[-1]))
        yield tuple(pools)


def usable_torch() -> Any:
    """PyTorch, if it is imported and can use a GPU; else None."""
    torch = sys.modules.get("torch")
    if torch is not None and hasattr(torch, "cuda") and torch.cuda.is_available():
        return torch
    return None
