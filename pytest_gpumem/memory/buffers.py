"""Buffers of a test: handles to memory that may move, and the arena that makes and frees them."""

from __future__ import annotations

import math
import mmap
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial, wraps
from typing import Any, Literal, ParamSpec, TypeVar

import numpy as np

from pytest_gpumem.devices.memory_kinds import MemoryKind
from pytest_gpumem.devices.protocol import Allocation, Device, OutOfMemory, Stream
from pytest_gpumem.kernels.kernel import ArrayFacts
from pytest_gpumem.units import QuantityError, ShownError, format_bytes, parse_bytes, short_bytes

LOCKED_SHARE = 0.5
"""Share of the RAM that may be page-locked: a host without free pages stalls (CUDA C++ Best
Practices Guide, 9.1.1)."""
Shape = int | str | Sequence[int]
"""Bytes, as an integer or as "64 MiB"; or elements, as a tuple."""
Home = Literal["host", "device", "prefetched", "as left"]
"""Where the pages of managed memory are put back to before every sample. "prefetched" is from the
host to the device, each time."""

Args = ParamSpec("Args")
Result = TypeVar("Result")


class BadBuffer(ShownError, ValueError):
    """A buffer that cannot be: wrong size, type or kind."""


def on_its_device(method: Callable[Args, Result]) -> Callable[Args, Result]:
    """Run a method with its object's device as the current one, whatever the test has chosen."""

    @wraps(method)
    def wrapped(*arguments: Args.args, **keywords: Args.kwargs) -> Result:
        owner: Any = arguments[0]
        with owner.device.current():
            return method(*arguments, **keywords)

    return wrapped


def uncounted(method: Callable[Args, Result]) -> Callable[Args, Result]:
    """As `on_its_device`; allocations inside count in no footprint, unless noted by `took`."""

    @wraps(method)
    def wrapped(*arguments: Args.args, **keywords: Args.kwargs) -> Result:
        owner: Any = arguments[0]
        with owner.device.current(), owner.device.footprints.ours():
            return method(*arguments, **keywords)

    return wrapped


class Buffer:
    """A piece of memory with a shape and a type, as the buffer fixtures return it.

    It is a handle: the harness may move it to another address with the same kind and content. It
    offers `__cuda_array_interface__`, `__array_interface__` and DLPack where its memory allows
    them; an array made from it is valid until the next measurement that it is an argument of.
    `read()` and `write()` are always valid.
    """

    home: Home = "as left"

    def __init__(
        self, arena: Arena, allocation: Allocation, shape: tuple[int, ...], dtype: np.dtype[Any]
    ) -> None:
        self._arena, self.device = arena, arena.device
        self.allocation = allocation  # the memory now behind the handle; another one after a move
        self.followers: list[Callable[[], None]] = []  # called after every move
        self.shape = shape
        self.dtype = dtype
        self.written = False  # the user replaced the seeded content, or got an array that can

    @property
    def kind(self) -> MemoryKind:
        """Kind of memory."""
        return self.allocation.kind

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
        """Bytes of an element."""
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
        return ArrayFacts(self.size, self.dtype_name, self.itemsize, self.kind.beyond_link)

    @property
    def goes_home(self) -> bool:
        return self.home != "as left"

    def __repr__(self) -> str:
        address = self.address or self.host_address
        size = f"{format_bytes(self.nbytes)} of {self.dtype_name}"
        return f"<{self.kind.value} buffer, {size} at {address:#x}>"

    def __len__(self) -> int:
        return self.shape[0]

    @on_its_device
    def read(self) -> np.ndarray[Any, Any]:
        """Return a NumPy copy of the content (simulated: of the part that is backed)."""
        content = self.device.content
        return self._shaped(content.to_host(self.allocation, self.dtype_name, self.size))

    def _shaped(self, flat: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
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
            count = f"{array.size} elements for {self!r}, which holds {self.size}"
            raise BadBuffer(f"write() got {count}")
        self.device.content.from_host(self.allocation, array)
        self.written = True

    @on_its_device
    def view(self) -> Any:
        """Return an array over the memory (simulated: over the part that is backed): CuPy where
        the device sees it, else NumPy."""
        self.written = True
        return self._shaped(self.device.memory.view(self.allocation, self.dtype_name, self.size))

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

    def move(self) -> None:
        """Put the same content at a fresh address. Raises `OutOfMemory`: both do not fit."""
        device, old = self.device, self.allocation
        new = self._arena.with_room(partial(device.memory.allocate, self.nbytes, self.kind))
        try:
            stream = self._arena.stream
            device.content.copy(new, old, self.nbytes, stream)
            device.streams.synchronize(stream)
        except BaseException:
            device.memory.free(new)
            raise
        self._arena.replaced(old, new)
        device.memory.free(old)
        self.go(new)

    def go(self, allocation: Allocation) -> None:
        """Use an allocation that has the content."""
        self.allocation = allocation
        self.put_home(self._arena.stream)
        for follower in list(self.followers):
            follower()

    def put_home(self, stream: Stream) -> None:
        """Put managed pages where samples find them."""


class Arena:
    """Everything that a test allocates; `close` frees it, whatever happened.
    `oversubscribes`: managed memory may be more than the device has free.
    """

    def __init__(self, device: Device, seed: int, *, oversubscribes: bool = False) -> None:
        self.device = device
        self.oversubscribes = oversubscribes
        with device.current():
            self.stream = device.streams.create()
        self.seed = seed
        self.checks = False  # within a check of a result
        self._allocations: dict[Allocation, int] = {}  # numbers in the test's footprint, or 0
        self._guests: dict[int, tuple[Any, Buffer]] = {}  # by `id` of an array over a buffer
        self.managed: list[Buffer] = []
        self._made = 0  # buffers: each has another seed
        self._padding: list[Allocation] = []
        self.kept: list[Arena] = []
        """Of measured cases: they live until the test ends, or until their memory is needed."""

    @uncounted
    def buffer(
        self,
        shape: Shape,
        dtype: Any = "f4",
        kind: MemoryKind = MemoryKind.DEVICE,
        *,
        handle: Callable[..., Buffer] | None = None,
        make: Callable[[int], Allocation] | None = None,
    ) -> Buffer:
        """Return a new buffer, whose bytes `make` allocates."""
        elements, element = parse_shape(shape, dtype)
        nbytes = math.prod(elements) * element.itemsize
        if kind.locked:
            check_cap(self.device, nbytes)
        allocate = make or partial(self.device.memory.allocate, kind=kind)
        allocation = self.with_room(partial(allocate, nbytes))
        self._allocations[allocation] = self.device.footprints.took(kind, nbytes)
        buffer = (handle or Buffer)(self, allocation, elements, element)
        if kind.managed:
            self.managed.append(buffer)
        self._made += 1
        if buffer.goes_home or not kind.managed:  # else its pages stay untouched
            seed = self.seed * 1_000_003 + self._made
            self.device.content.fill_random(allocation, buffer.dtype_name, seed, self.stream)
        buffer.put_home(self.stream)
        self.device.streams.synchronize(self.stream)
        return buffer

    @uncounted
    def adopt(self, array: np.ndarray[Any, Any], *, register: bool) -> Buffer:
        """Return a buffer over a NumPy array, page-locked (`register`) or pageable. Its untouched
        pages come to the device's NUMA node."""
        check_plain(array.dtype)
        flags = array.flags
        if not flags.c_contiguous or not flags.writeable or array.size == 0:
            layout = f"shape {array.shape}, strides {array.strides}, writeable {flags.writeable}"
            raise BadBuffer(
                f"a host array must be writable, C-contiguous and not empty; this one has {layout}"
            )
        if register:
            check_cap(self.device, array.nbytes)
        else:
            self._refuse_shared(array)
        with self.device.memory.near_host():
            touch(array)
            allocation = self.device.memory.adopt(array, register=register)
        self._allocations[allocation] = self.device.footprints.took(allocation.kind, array.nbytes)
        return Buffer(self, allocation, array.shape, array.dtype)

    def _refuse_shared(self, array: np.ndarray[Any, Any]) -> None:
        """Refuse a pageable array in memory of a buffer."""
        first = int(array.__array_interface__["data"][0])
        end = first + array.nbytes
        for allocation in self._allocations:
            start, locked = allocation.host_address, allocation.kind is MemoryKind.REGISTERED
            if locked and start < end and first < start + allocation.nbytes:
                raise BadBuffer(
                    "this array's memory is page-locked by registered_buffer until the test ends"
                )
        for guest, buffer in self._guests.values():
            if isinstance(guest, np.ndarray) and np.may_share_memory(guest, array):
                raise BadBuffer(
                    f"this array is a part or another view of {buffer.kind.value} memory, not "
                    "pageable memory of its own: pass the array that the fixture gave"
                )

    @uncounted
    def guest(self, buffer: Buffer, like: Any) -> Any:
        """Return an array of the library `like` over a buffer, which then stays where it is."""
        array = self.device.memory.guest(buffer.allocation, buffer.dtype_name, buffer.shape, like)
        self._guests[id(array)] = (array, buffer)
        buffer.written = True
        return array

    def find(self, argument: Any) -> Buffer | None:
        """Return the buffer that an argument is, or that an array made by `guest` lies in."""
        if isinstance(argument, Buffer):
            return argument
        return self._guests.get(id(argument), (None, None))[1]

    def taken(self, argument: Any) -> Any:
        """Return the buffer of an argument, a pageable one of a NumPy array, or the argument."""
        buffer = self.find(argument)
        if buffer is not None:
            return buffer
        if isinstance(argument, np.ndarray):
            return self.adopt(argument, register=False)
        return argument

    def can_move(self, buffer: Buffer) -> bool:
        """True if the harness may move the buffer to a new address."""
        guests = [guest for _, guest in self._guests.values() if guest is buffer]
        return buffer.kind.movable and not guests

    def pad(self, nbytes: int) -> None:
        """Have what is allocated next lie elsewhere."""
        while self._padding:
            self.release(self._padding.pop())
        if nbytes:
            self._padding.append(self.allocate(nbytes))

    def keep(self, other: Arena) -> None:
        """Close another arena with this one, or when memory is short."""
        if other not in self.kept:
            self.kept.append(other)

    def with_room(self, allocate: Callable[[], Result]) -> Result:
        """Return what `allocate` gives; where memory is short, close what was kept first."""
        try:
            return allocate()
        except OutOfMemory:
            if not self.kept:
                raise
        self.close_kept()
        return allocate()

    def close_kept(self) -> None:
        with ExitStack() as stack:
            while self.kept:
                stack.callback(self.kept.pop(0).close)

    @uncounted
    def allocate(self, nbytes: int) -> Allocation:
        allocate = partial(self.device.memory.allocate, nbytes, MemoryKind.DEVICE)
        allocation = self.with_room(allocate)
        self._allocations[allocation] = 0
        return allocation

    @uncounted
    def scatter(self, sizes: Sequence[int], seed: int) -> list[Allocation]:
        allocations = self.with_room(partial(self.device.memory.scatter, sizes, seed))
        self._allocations.update(dict.fromkeys(allocations, 0))
        return allocations

    @uncounted
    def release(self, allocation: Allocation) -> None:
        self.device.footprints.gave_back(self._allocations.pop(allocation, 0))
        self.device.memory.free(allocation)

    def replaced(self, old: Allocation, new: Allocation) -> None:
        self._allocations[new] = self._allocations.pop(old, 0)

    @uncounted
    def close(self) -> None:
        """Free and unregister everything, whatever fails, the last first."""
        allocations, self._allocations, self._padding = self._allocations, {}, []
        self._guests.clear()
        with ExitStack() as stack:
            for allocation, number in allocations.items():
                stack.callback(self.device.footprints.gave_back, number)
                stack.callback(self.device.memory.free, allocation)
            stack.callback(self.close_kept)


def parse_shape(shape: Shape, dtype: Any) -> tuple[tuple[int, ...], np.dtype[Any]]:
    try:
        element = np.dtype(dtype)
    except TypeError:
        raise BadBuffer(f"dtype {dtype!r} is no element type such as 'f4'") from None
    check_plain(element)
    if isinstance(shape, str):
        try:
            shape = parse_bytes(shape)
        except QuantityError as error:
            raise BadBuffer(f"size {error}") from None
    if isinstance(shape, bool) or not isinstance(shape, (int, np.integer, tuple, list)):
        accepted = 'a number of bytes, a text such as "64 MiB", or a tuple of elements'
        raise BadBuffer(f"a size is {accepted}, not {shape!r}")
    if isinstance(shape, (int, np.integer)):
        if shape <= 0:
            raise BadBuffer(f"a buffer needs at least one element; {shape} bytes requested")
        if shape % element.itemsize:
            elements = f"{element.itemsize}-byte elements ({element})"
            raise BadBuffer(f"{shape} bytes do not hold a whole number of {elements}")
        return (int(shape) // element.itemsize,), element
    for count in shape or (0,):
        if isinstance(count, bool) or not isinstance(count, (int, np.integer)) or count <= 0:
            raise BadBuffer(f"a shape is a tuple of positive integers, not {tuple(shape)!r}")
    return tuple(int(count) for count in shape), element


def check_plain(element: np.dtype[Any]) -> None:
    if element.kind not in "biufc" or not element.isnative:
        accepted = "it takes numbers in the machine's byte order"
        raise BadBuffer(f"dtype {element} cannot live in a buffer: {accepted}")


def check_cap(device: Device, nbytes: int) -> None:
    total, locked = device.memory.host()
    cap = int(LOCKED_SHARE * total)
    if locked + nbytes <= cap:
        return
    size = f"{format_bytes(nbytes)} of page-locked memory"
    if locked:
        size += f" beside {format_bytes(locked)} that are locked already"
    raise OutOfMemory(
        f"{size} pass the cap of {short_bytes(cap)}, half of the host's "
        f"{short_bytes(total)}: ask for less"
    )


def touch(array: np.ndarray[Any, Any]) -> None:
    """Write to each page of an array, so that it exists: unwritten pages are all read from a single
    page of zeros, as if the link were faster."""
    flat = array.reshape(-1).view(np.uint8)
    flat[:: mmap.PAGESIZE] = flat[:: mmap.PAGESIZE]
    flat[-1:] = flat[-1:]
