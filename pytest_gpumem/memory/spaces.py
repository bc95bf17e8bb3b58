"""Buffers of each kind of `devices.memory_kinds`, for buffer fixtures and `Case` functions."""

from __future__ import annotations

from numbers import Integral
from typing import Any, Literal

import numpy as np

from pytest_gpumem.devices.memory_kinds import MemoryKind
from pytest_gpumem.devices.protocol import Allocation, Device, Stream, Unsupported
from pytest_gpumem.memory.buffers import Arena, BadBuffer, Buffer, Home, Shape, parse_shape
from pytest_gpumem.memory.managed import Place, managed


class Memory:
    """Buffers of every kind of memory, one method for each kind.

    Sizes are bytes, as an integer or as "64 MiB", or elements as a tuple. Content is seeded and
    random: floats uniform in [0, 1), integers over their full range. `like` is a module (`cupy`,
    `torch`, `numba.cuda`, `jax`, `warp`, `cudf`, or `numpy` for managed and host memory): then an
    array of that library over the memory itself is given instead of a `Buffer`, and it stays at its
    address.

    All methods raise `BadBuffer` for a size or type that cannot be, `OutOfMemory` if less is free,
    and `Unsupported` (the test skips) where the device has no such memory.
    """

    def __init__(self, arena: Arena, stream: Stream | None = None) -> None:
        self.arena = arena
        self._stream = stream

    @property
    def stream(self) -> Stream:
        """The stream that a case without a window is timed on, for libraries without a current
        stream."""
        return self._stream or self.arena.stream

    def device(self, shape: Shape, dtype: Any = "f4", *, like: Any = None) -> Any:
        """Device memory by `cudaMalloc`."""
        return self._give(self.arena.buffer(shape, dtype, MemoryKind.DEVICE), like)

    def pooled(self, shape: Shape, dtype: Any = "f4", *, like: Any = None) -> Any:
        """Device memory of the driver's stream-ordered pool (`cudaMallocAsync`), which stays at its
        address.

        Source: CUDA C++ Programming Guide, Stream Ordered Memory Allocator.
        """
        return self._give(self.arena.buffer(shape, dtype, MemoryKind.POOLED), like)

    def managed(
        self,
        shape: Shape,
        dtype: Any = "f4",
        *,
        first_touch: Literal["host", "device", "none"] = "host",
        read_mostly: bool = False,
        preferred_location: Place | None = None,
        accessed_by: Any = None,
        discard: bool = False,
        like: Any = None,
    ) -> Any:
        """Managed memory whose pages are put where `first_touch` says before every sample.

        Args:
            shape, dtype, like: as for every kind.
            first_touch: "host" (kernels then fault the pages in), "device", or "none": no page
                exists until somebody touches it, and samples find the pages where the one before
                left them.
            read_mostly, preferred_location, accessed_by: advice that holds from the start;
                `ManagedBuffer.advise` says what each does.
            discard: drop the content before every sample, after the pages were put back: for what a
                launch writes whole (`cudaMemDiscardBatchAsync`, CUDA 13).

        Source: CUDA C++ Programming Guide, Unified Memory Programming.
        """
        homes: dict[str, Home] = {"host": "host", "device": "device", "none": "as left"}
        if not isinstance(first_touch, str) or first_touch not in homes:
            raise BadBuffer(
                f"first_touch={first_touch!r}; accepted are {', '.join(map(repr, homes))}"
            )
        buffer = managed(
            self.arena,
            shape,
            dtype,
            home=homes[first_touch],
            discard=discard,
            read_mostly=read_mostly,
            preferred_location=preferred_location,
            accessed_by=accessed_by,
        )
        return self._give(buffer, like)

    def prefetched(
        self,
        shape: Shape,
        dtype: Any = "f4",
        *,
        read_mostly: bool = False,
        preferred_location: Place | None = None,
        accessed_by: Any = None,
        like: Any = None,
    ) -> Any:
        """Managed memory that is prefetched from the host to the device before every sample.

        Args as for `managed`, without `first_touch` and `discard`.
        """
        buffer = managed(
            self.arena,
            shape,
            dtype,
            home="prefetched",
            read_mostly=read_mostly,
            preferred_location=preferred_location,
            accessed_by=accessed_by,
        )
        return self._give(buffer, like)

    def pinned(
        self,
        shape: Shape,
        dtype: Any = "f4",
        *,
        mapped: bool = True,
        write_combined: bool = False,
        portable: bool = True,
        numa: int | None = None,
        like: Any = None,
    ) -> Any:
        """Page-locked host memory by `cudaHostAlloc` (CUDA C++ Best Practices Guide, 9.1.1).

        Args:
            shape, dtype, like: as for every kind.
            mapped: visible to kernels (zero copy, 9.1.3).
            write_combined: fast for the host to write and for the link, slow for the host to read.
            portable: page-locked for every CUDA context, not for that of this device alone.
            numa: NUMA node of the host; None: that of the device, where the host reports it.

        Raises:
            OutOfMemory: also where it would pass the cap on page-locked memory, half of the host's
                RAM.
            Unsupported: the device cannot map host memory, or this process cannot run on the node;
                the test skips.
        """
        if numa is not None and (isinstance(numa, bool) or not isinstance(numa, Integral)):
            raise BadBuffer(f"numa={numa!r}; it is the number of a NUMA node of the host, or None")
        facts = self.arena.device.facts
        if mapped and not facts.can_map_host:
            raise Unsupported(f"{facts.name} cannot map host memory (canMapHostMemory is 0)")
        memory, kind = self.arena.device.memory, MemoryKind.PINNED
        flags = {"mapped": mapped, "write_combined": write_combined, "portable": portable}

        def allocate(nbytes: int) -> Allocation:
            # The driver decides where page-locked memory lies while it allocates.
            with memory.near_host(numa) as node:
                if numa not in (None, node):
                    raise Unsupported(f"numa={numa}: this process cannot run on such a NUMA node")
                return memory.allocate(nbytes, kind, **flags)

        return self._give(self.arena.buffer(shape, dtype, kind, make=allocate), like)

    def peer(self, shape: Shape, dtype: Any = "f4", *, like: Any = None) -> Any:
        """Device memory of another GPU (CUDA C++ Programming Guide, Peer-to-Peer Memory Access).

        Copies from and to it are direct while `peer_access(True)` of the device holds, else staged
        through the host; kernels of this device see it only then.

        Raises:
            Unsupported: there is one GPU; the test skips.
        """
        return self._give(self.arena.buffer(shape, dtype, MemoryKind.PEER), like)

    def registered(self, array: Any, dtype: Any = "f4", *, like: Any = None) -> Any:
        """Pageable host memory, page-locked afterwards by `cudaHostRegister`.

        Args:
            array: a C-contiguous NumPy array, whose own memory is registered until the test ends;
                or a size, for a new one.
            dtype, like: as for every kind, where `array` is a size.
        """
        return self._give(self._host(array, dtype, register=True), like)

    def pageable(self, array: Any, dtype: Any = "f4", *, like: Any = None) -> Any:
        """Ordinary host memory: that of a NumPy array, or new memory of the given size."""
        return self._give(self._host(array, dtype, register=False), like)

    def _host(self, array: Any, dtype: Any, *, register: bool) -> Any:
        if isinstance(array, np.ndarray):
            return self.arena.adopt(array, register=register)
        shape, element = parse_shape(array, dtype)
        generator = np.random.default_rng(self.arena.seed)
        block: np.ndarray[Any, Any]
        if element.kind in "iu":
            block = generator.integers(0, 2**31 - 1, 4096, dtype=np.int32)
        else:
            block = generator.random(4096)
        # np.resize repeats the block: the pages must exist, their content need not be unique.
        with self.arena.device.memory.near_host():
            array = np.resize(block.astype(element), shape)
        return self.arena.adopt(array, register=register)

    def _give(self, buffer: Any, like: Any) -> Any:
        return buffer if like is None else self.arena.guest(buffer, like)


def memory_kind(device: Device, pointer: Any) -> MemoryKind | None:
    """Return the kind of memory of an address, a buffer or an array; None outside of this process's
    memory."""
    address = address_of(pointer)
    if address < 0:
        raise BadBuffer(f"{address} is no address")
    with device.current():
        return device.memory.kind_at(address)


def address_of(pointer: Any) -> int:
    if isinstance(pointer, Integral) and not isinstance(pointer, bool):
        return int(pointer)
    if isinstance(pointer, Buffer):
        return pointer.host_address or pointer.address
    data_ptr = getattr(pointer, "data_ptr", None)
    if callable(data_ptr):  # PyTorch: a tensor of the CPU has no other interface
        return int(data_ptr())
    for name in ("__cuda_array_interface__", "__array_interface__"):
        interface = getattr(pointer, name, None)
        if isinstance(interface, dict) and isinstance(interface.get("data"), tuple):
            return int(interface["data"][0])
    raise BadBuffer(
        f"memory_kind() takes an address, a buffer or an array, not {type(pointer).__name__}"
    )
