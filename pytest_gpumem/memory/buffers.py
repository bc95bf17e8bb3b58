"""Buffers: handles to memory that the harness may move, and the arena that frees them all."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import ExitStack, nullcontext
from functools import partial, wraps
from typing import Any, Concatenate, Literal, ParamSpec, Protocol, TypeVar

import numpy as np

from pytest_gpumem.devices.kinds import MemoryKind
from pytest_gpumem.devices.protocol import Allocation, Device, OutOfMemory, Stream
from pytest_gpumem.kernels.kernel import ArrayFacts
from pytest_gpumem.memory.pinned import check_cap, touch
from pytest_gpumem.units import QuantityError, format_bytes, parse_bytes

Home = Literal["host", "device", "prefetched", "as left"]
"""Where the pages of managed memory are put back to before every sample. "prefetched" is from the host to the device, each time: pages
that a kernel faulted in would otherwise stay, and a prefetch that does nothing would not show."""

ALIGNMENT = 256  # bytes; cudaMalloc guarantees it (CUDA C++ Best Practices Guide, 9.2.1.2), and vectorised kernels rely on it


class BadBuffer(ValueError):
    """A buffer was asked for that cannot be: wrong size, type or kind."""


class _OnDevice(Protocol):
    """Something that belongs to a device."""

    @property
    def device(self) -> Device: ...


Args = ParamSpec("Args")
Made = TypeVar("Made")
Owner = TypeVar("Owner", bound=_OnDevice)


def on_its_device(
    method: Callable[Concatenate[Owner, Args], Made],
) -> Callable[Concatenate[Owner, Args], Made]:
    """Runs a method with its object's device as the current one: the test may have chosen another, whose memory, streams and limits CUDA
    would use."""

    @wraps(method)
    def wrapped(owner: Owner, /, *arguments: Args.args, **keywords: Args.kwargs) -> Made:
        with owner.device.current():
            return method(owner, *arguments, **keywords)

    return wrapped


class Buffer:
    """A piece of memory with a shape and a type, as the buffer fixtures return it.

    It is a handle: the harness may move it to another address with the same kind and content. It offers
    `__cuda_array_interface__`, `__array_interface__` and DLPack where its memory allows them; an array made from it is valid until
    the next measurement that it is an argument of. `read()` and `write()` are always valid.
    """

    def __init__(
        self,
        arena: Arena,
        allocation: Allocation,
        shape: tuple[int, ...],
        dtype: np.dtype[Any],
        home: Home,
    ) -> None:
        self._arena = arena
        self.allocation = allocation  # the memory now behind the handle; another one after a move
        self.home: Home = home  # where its pages are before every sample, for managed memory
        self._followers: list[Callable[[], None]] = []
        self.shape = shape
        self.dtype = dtype
        self.written = False  # the user replaced the seeded content, or got an array that can

    @property
    def kind(self) -> MemoryKind:
        """The kind of memory."""
        return self.allocation.kind

    @property
    def device(self) -> Device:
        """The device that it was allocated on."""
        return self._arena.device

    @property
    def address(self) -> int:
        """Address as the device sees it, now; 0 for pageable memory."""
        return self.allocation.address

    @property
    def host_address(self) -> int:
        """Address as the host sees it, now; 0 for device memory."""
        return self.allocation.host_address

    @property
    def size(self) -> int:
        """Elements."""
        return math.prod(self.shape)

    @property
    def itemsize(self) -> int:
        """Bytes of one element."""
        return self.dtype.itemsize

    @property
    def nbytes(self) -> int:
        """Bytes."""
        return self.size * self.itemsize

    @property
    def dtype_name(self) -> str:
        """NumPy type string without byte order, such as "f4"."""
        return self.dtype.str[1:]

    @property
    def facts(self) -> ArrayFacts:
        """Size, type and place, for a kernel's formulas."""
        return ArrayFacts(self.size, self.dtype_name, self.itemsize, self.kind.beyond_link)

    @property
    def goes_home(self) -> bool:
        """True if its pages are put back before every sample."""
        return self.kind.managed and self.home != "as left"

    def __repr__(self) -> str:
        return f"<{self.kind.value} buffer, {format_bytes(self.nbytes)} of {self.dtype_name} at {self.address or self.host_address:#x}>"

    def __len__(self) -> int:
        return self.shape[0]

    # Access for people and libraries

    @on_its_device
    def read(self) -> np.ndarray[Any, Any]:
        """A NumPy copy of the content, after all queued work. On the simulated device: of the part that is backed."""
        flat: np.ndarray[Any, Any] = self._arena.device.content.to_host(
            self.allocation, self.dtype_name, self.size
        )
        return flat.reshape(self.shape) if flat.size == self.size else flat

    @on_its_device
    def write(self, content: Any) -> None:
        """Replace the content.

        Args:
            content: array-like of this buffer's size; cast to its type.

        Raises:
            BadBuffer: `content` has another number of elements.
        """
        array = np.ascontiguousarray(content, dtype=self.dtype).reshape(-1)
        if array.size != self.size:
            raise BadBuffer(
                f"write() got {array.size} elements for {self!r}, which holds {self.size}"
            )
        self._arena.device.content.from_host(self.allocation, array)
        self.written = True

    @on_its_device
    def view(self) -> Any:
        """An array over the memory: CuPy where the device sees it, else NumPy; the backed part on the simulated device."""
        self.written = True
        flat = self._arena.device.memory.view(self.allocation, self.dtype_name, self.size)
        return flat.reshape(self.shape) if flat.size == self.size else flat

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray[Any, Any]:
        if copy is False:
            raise ValueError("a buffer's content cannot be seen as a NumPy array without a copy")
        return self.read() if dtype is None else self.read().astype(dtype)

    @property
    def __cuda_array_interface__(self) -> Any:
        return self.view().__cuda_array_interface__

    @on_its_device
    def __dlpack__(self, /, **options: Any) -> Any:
        return self.view().__dlpack__(**options)

    def __dlpack_device__(self) -> Any:
        return self.view().__dlpack_device__()

    # For the harness

    def follow(self, follower: Callable[[], None]) -> Callable[[], None]:
        """Call `follower` after every move; gives back what ends that."""
        self._followers.append(follower)
        return lambda: self._followers.remove(follower) if follower in self._followers else None

    def move(self) -> None:
        """Put the same content at a fresh address. Raises `OutOfMemory` and stays where it is if both do not fit at once."""
        device = self._arena.device
        old = self.allocation
        new = self._arena.with_room(partial(device.memory.allocate, self.nbytes, self.kind))
        try:
            stream = self._arena.stream
            device.content.copy(new, old, self.nbytes, stream)
            device.streams.synchronize(stream)
        except BaseException:
            device.memory.free(new)
            raise
        self.allocation = new
        self._arena.replaced(old, new)
        device.memory.free(old)
        self.put_home(self._arena.stream)
        for follower in list(self._followers):
            follower()

    def put_home(self, stream: Stream) -> None:
        """Put managed pages back to where they are before every sample; queued on `stream`."""
        if not self.kind.managed:
            return
        if self.home in ("host", "prefetched"):
            self._arena.device.managed.prefetch(self.allocation, True, stream)
        if self.home in ("device", "prefetched"):
            self._arena.device.managed.prefetch(self.allocation, False, stream)


def _ours(
    method: Callable[Concatenate[Arena, Args], Made],
) -> Callable[Concatenate[Arena, Args], Made]:
    """As `on_its_device`, and what is allocated counts in no footprint by itself."""

    @on_its_device
    @wraps(method)
    def wrapped(arena: Arena, /, *arguments: Args.args, **keywords: Args.kwargs) -> Made:
        with arena.device.footprints.ours():
            return method(arena, *arguments, **keywords)

    return wrapped


class Arena:
    """Everything that one test allocates; `close` frees it, whatever happened.
    `oversubscribes`: managed memory may be more than the device has free.
    """

    def __init__(self, device: Device, seed: int, *, oversubscribes: bool = False) -> None:
        self.device = device
        self.oversubscribes = oversubscribes
        self.stream = device.streams.create()
        self.seed = seed
        self._allocations: dict[int, Allocation] = {}
        self._given: dict[int, int] = {}
        """Numbers of the buffers in the test's footprint, by the `id` of the allocation that they now have."""
        self._guests: dict[int, tuple[Any, Buffer]] = {}
        self._managed: list[Buffer] = []
        self._made = 0
        self._padding: list[Allocation] = []
        self._offered: list[Allocation] = []
        self._kept: list[Arena] = []
        """Of cases that were measured: they live until the test ends, or until their memory is needed."""

    @_ours
    def buffer(
        self,
        shape: int | str | Sequence[int],
        dtype: Any = "f4",
        kind: MemoryKind = MemoryKind.DEVICE,
        *,
        home: Home = "device",
        populate: bool = True,
        write_combined: bool = False,
        mapped: bool = True,
        portable: bool = True,
        numa: int | None = None,
        handle: type[Buffer] = Buffer,
        make: Callable[[int], Allocation] | None = None,
    ) -> Buffer:
        """A new buffer with seeded random content.
        `shape`: bytes as one integer or as "64 MiB", or a shape as a tuple of elements.
        `dtype`: element type, as NumPy takes it.
        `home`: where managed pages are before every sample; "host" means that the host touches them first, "prefetched" that they are
        prefetched from there.
        `populate`: leave the pages of managed memory untouched if False.
        `write_combined`, `mapped`, `portable`: flags of `cudaHostAlloc`.
        `numa`: NUMA node of the host on which host memory is to lie; None: the one that the device is attached to, where it is known.
        `make`: allocates so many bytes for it, in place of the device's `allocate`.
        Raises `BadBuffer`: the size is not positive or does not hold whole elements, or the type is not a plain one.
        Raises `OutOfMemory`: less is free; nothing was allocated.
        Raises `TooMuchPinned`: it would pass the cap on page-locked memory; nothing was allocated.
        Raises `Unsupported`: the host has no such NUMA node.
        """
        elements, element = parse_shape(shape, dtype)
        nbytes = math.prod(elements) * element.itemsize
        if kind.locked:
            check_cap(self.device, nbytes)
        flags = {"mapped": mapped, "write_combined": write_combined, "portable": portable}
        if make is None:
            make = self._offer(nbytes, kind)
        allocate = (
            partial(self.device.memory.allocate, nbytes, kind, **flags)
            if make is None
            else partial(make, nbytes)
        )
        # The driver takes the pages of page-locked memory, and so decides where they lie, while it allocates.
        with self.device.memory.near_host(numa) if kind.on_host else nullcontext():
            allocation = self.with_room(allocate)
        self._allocations[id(allocation)] = allocation
        self._given[id(allocation)] = self.device.footprints.took(kind, nbytes)
        address = allocation.address or allocation.host_address
        if address % ALIGNMENT:
            raise BadBuffer(
                f"the device gave {address:#x} for {format_bytes(nbytes)}, which is not aligned to {ALIGNMENT} bytes"
            )
        buffer = handle(self, allocation, elements, element, home)
        if kind.managed:
            self._managed.append(buffer)
        self._made += 1
        if populate:
            self.populate(buffer)
        return buffer

    def _offer(self, nbytes: int, kind: MemoryKind) -> Callable[[int], Allocation] | None:
        """What gives memory that was offered, where there is some of this size."""
        offered = next(
            (one for one in self._offered if (one.nbytes, one.kind) == (nbytes, kind)), None
        )
        if offered is None:
            return None
        self._offered.remove(offered)
        return lambda _: offered

    def offer(self, allocations: Sequence[Allocation], owner: Arena) -> None:
        """Take allocations over from another arena, for the next buffers of their sizes."""
        for allocation in allocations:
            owner._allocations.pop(id(allocation))
            self._allocations[id(allocation)] = allocation
        self._offered += allocations

    @property
    def scattered_sizes(self) -> list[int]:
        """Bytes of each buffer that `scatter` can replace, in the order in which they were made."""
        return [one.nbytes for one in self._allocations.values() if one.kind.traits.scattered]

    @_ours
    def populate(self, buffer: Buffer, *, content: bool = True) -> None:
        """Give the buffer that was made last its seeded content, unless `content` is False, and put its pages home."""
        if content:
            seed = self.seed * 1_000_003 + self._made
            self.device.content.fill_random(buffer.allocation, buffer.dtype_name, seed, self.stream)
        buffer.put_home(self.stream)
        self.device.streams.synchronize(self.stream)

    @_ours
    def adopt(self, array: np.ndarray[Any, Any], *, register: bool) -> Buffer:
        """A buffer over a NumPy array's own memory: page-locked (`register`) or left pageable. It cannot be moved.

        Pages that nobody has touched yet come to lie on the NUMA node that the device is attached to.
        Raises `BadBuffer`: the array is not C-contiguous, is empty, its type is not a plain one, or its memory is another buffer's.
        Raises `TooMuchPinned`: registering it would pass the cap on page-locked memory.
        """
        _check_plain(array.dtype)
        if not array.flags.c_contiguous or array.size == 0:
            raise BadBuffer(
                f"a host array must be C-contiguous and not empty; this one has shape {array.shape}, strides {array.strides}"
            )
        if register:
            check_cap(self.device, array.nbytes)
        else:
            first = int(array.__array_interface__["data"][0])
            end = first + array.nbytes
            for held in self._allocations.values():
                if (
                    held.kind.locked
                    and held.kind.traits.adopted
                    and held.host_address < end
                    and first < held.host_address + held.nbytes
                ):
                    raise BadBuffer(
                        "this array's memory is page-locked by registered_buffer until the test ends: it is not pageable now"
                    )
            for whole, buffer in self._guests.values():
                if isinstance(whole, np.ndarray) and np.may_share_memory(whole, array):
                    raise BadBuffer(
                        f"this array is a part or another view of {buffer.kind.value} memory, not pageable memory of its own: "
                        "pass the array that the fixture gave"
                    )
        with self.device.memory.near_host(None):
            if array.flags.writeable:
                touch(array)
            allocation = self.device.memory.adopt(array, register=register)
        self._allocations[id(allocation)] = allocation
        self._given[id(allocation)] = self.device.footprints.took(allocation.kind, array.nbytes)
        return Buffer(self, allocation, array.shape, array.dtype, "as left")

    @_ours
    def guest(self, buffer: Buffer, like: Any) -> Any:
        """An array of the library `like` over a buffer; the buffer then stays where it is, because the array holds its address."""
        array = self.device.memory.guest(buffer.allocation, buffer.dtype_name, buffer.shape, like)
        self._guests[id(array)] = (array, buffer)
        buffer.written = True
        return array

    @property
    def managed(self) -> tuple[Buffer, ...]:
        """All managed buffers."""
        return tuple(self._managed)

    @property
    def homes(self) -> tuple[Buffer, ...]:
        """Managed buffers whose pages are put back before every sample."""
        return tuple(buffer for buffer in self._managed if buffer.goes_home)

    def find(self, argument: Any) -> Buffer | None:
        """The buffer that an argument is, or that an array made by `guest` lies in."""
        if isinstance(argument, Buffer):
            return argument
        entry = self._guests.get(id(argument))
        return entry[1] if entry is not None and entry[0] is argument else None

    def taken(self, argument: Any) -> Any:
        """The buffer that an argument of a kernel or a copy stands for: itself, the one that it lies in by `guest`, or, for a NumPy array
        of the user's own, pageable host memory, which is what a copy over the link is compared with. Anything else stays as it is.
        Raises `BadBuffer`: as `adopt`.
        """
        found = self.find(argument)
        if found is None and isinstance(argument, np.ndarray):
            return self.adopt(argument, register=False)
        return argument if found is None else found

    def can_move(self, buffer: Buffer) -> bool:
        """True if the harness may move the buffer to a new address."""
        return buffer.kind.movable and all(held is not buffer for _, held in self._guests.values())

    def pad(self, nbytes: int) -> None:
        """Hold some device memory that nobody uses, so that what is allocated next lies elsewhere; ends the padding before."""
        for allocation in self._padding:
            self.release(allocation)
        self._padding = []
        if nbytes:
            self._padding = [self.allocate(nbytes, MemoryKind.DEVICE)]

    def keep(self, other: Arena) -> None:
        """Close another arena with this one, or as soon as its memory is needed."""
        if all(kept is not other for kept in self._kept):
            self._kept.append(other)

    def with_room(self, allocate: Callable[[], Made]) -> Made:
        """What `allocate` gives; where less memory is free, without what was kept."""
        try:
            return allocate()
        except OutOfMemory:
            if not self._kept:
                raise
        self.close_kept()
        return allocate()

    @property
    def keeps(self) -> bool:
        """True if there are other arenas that close with this one."""
        return bool(self._kept)

    def close_kept(self) -> None:
        """Close the arenas that `keep` was given, so that their memory is free. All are closed, even if one raises."""
        with ExitStack() as stack:
            while self._kept:
                stack.callback(self._kept.pop(0).close)

    @_ours
    def allocate(self, nbytes: int, kind: MemoryKind) -> Allocation:
        """Memory without a handle that lives until `release` or `close`."""
        allocation = self.with_room(partial(self.device.memory.allocate, nbytes, kind))
        self._allocations[id(allocation)] = allocation
        return allocation

    @_ours
    def scatter(self, sizes: Sequence[int], seed: int) -> list[Allocation]:
        """Device memory at random places, without content, freed with the arena or by `release`. Raises as the device's `scatter`."""
        made = self.with_room(partial(self.device.memory.scatter, sizes, seed))
        self._allocations.update((id(a), a) for a in made)
        return made

    @_ours
    def release(self, allocation: Allocation) -> None:
        """Free one allocation early."""
        self._allocations.pop(id(allocation), None)
        self.device.footprints.gave_back(self._given.pop(id(allocation), 0))
        self.device.memory.free(allocation)

    def replaced(self, old: Allocation, new: Allocation) -> None:
        """Book a move: `new` is ours now, `old` no longer."""
        self._allocations.pop(id(old), None)
        self._allocations[id(new)] = new
        if (number := self._given.pop(id(old), None)) is not None:
            self._given[id(new)] = number

    @_ours
    def close(self) -> None:
        """Free and unregister everything. Every allocation is tried; the first error is raised at the end."""
        self._guests.clear()
        first: Exception | None = None
        try:
            self.close_kept()
        except Exception as error:
            first = error
        for allocation in reversed(list(self._allocations.values())):
            try:
                self.device.memory.free(allocation)
            except Exception as error:
                first = first or error
        self._allocations.clear()
        for number in self._given.values():
            self.device.footprints.gave_back(number)
        self._given.clear()
        self._padding = []
        if first is not None:
            raise first


def parse_shape(
    shape: int | str | Sequence[int], dtype: Any
) -> tuple[tuple[int, ...], np.dtype[Any]]:
    """Elements per axis and element type from what a user wrote. Raises `BadBuffer`: see `Arena.buffer`."""
    try:
        element = np.dtype(dtype)
    except TypeError as error:
        raise BadBuffer(f"dtype {dtype!r} is no element type: {error}") from None
    _check_plain(element)
    if isinstance(shape, str):
        try:
            shape = parse_bytes(shape)
        except QuantityError as error:
            raise BadBuffer(f"size {error}") from None
    if isinstance(shape, bool) or not isinstance(shape, (int, np.integer, tuple, list)):
        raise BadBuffer(
            f'a size is a number of bytes, a text such as "64 MiB", or a tuple of elements, not {shape!r}'
        )
    if isinstance(shape, (int, np.integer)):
        if shape <= 0 or shape % element.itemsize:
            raise BadBuffer(
                f"{shape} bytes do not hold a whole, positive number of {element.itemsize}-byte elements ({element})"
            )
        return (int(shape) // element.itemsize,), element
    if not shape or any(
        isinstance(n, bool) or not isinstance(n, (int, np.integer)) or n <= 0 for n in shape
    ):
        raise BadBuffer(f"a shape is a tuple of positive integers, not {tuple(shape)!r}")
    return tuple(int(n) for n in shape), element


def _check_plain(element: np.dtype[Any]) -> None:
    if element.kind not in "biufc" or not element.isnative:
        raise BadBuffer(
            f"dtype {element} cannot live in a buffer: it takes numbers in the machine's byte order"
        )
