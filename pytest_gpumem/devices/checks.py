"""What both devices share: checks that raise `DeviceError`, and arguments of launches."""

from __future__ import annotations

from typing import Any

import numpy as np

from pytest_gpumem.devices.memory_kinds import MemoryKind
from pytest_gpumem.devices.protocol import Allocation, DeviceError, Launch, OutOfMemory
from pytest_gpumem.kernels.kernel import Role
from pytest_gpumem.units import GiB


def part_of(allocation: Allocation, offset: int, nbytes: int) -> Allocation:
    address, host_address = allocation.address, allocation.host_address
    return Allocation(
        allocation.kind,
        nbytes,
        address and address + offset,
        host_address and host_address + offset,
        backing=allocation,
    )


def check_free(nbytes: int, kind: MemoryKind, free: int) -> None:
    if nbytes > free:
        asked = f"{nbytes / GiB:.3g} GiB of {kind.value} memory asked for"
        raise OutOfMemory(f"{asked}, {free / GiB:.3g} GiB are free")


def check_oversubscription(nbytes: int, host_bytes: int) -> None:
    """Check that half of the host's memory can take evicted pages."""
    most = host_bytes // 2
    if not 0 < nbytes <= most:
        raise OutOfMemory(
            f"{nbytes / GiB:.3g} GiB of managed memory asked for; the host has {most / GiB:.3g} "
            "GiB for evicted pages"
        )


def check_live(launch: Launch) -> None:
    for name, allocation in launch.arrays.items():
        if allocation.freed:
            raise DeviceError(f"{launch.kernel.name}: the memory of {name} was freed")


def check_copy(destination: Allocation, source: Allocation, nbytes: int) -> None:
    if destination.freed or source.freed:
        raise DeviceError(f"a copy of {nbytes} bytes: the memory was freed")
    if not 0 < nbytes <= min(destination.nbytes, source.nbytes):
        raise DeviceError(
            f"a copy of {nbytes} bytes from {source.nbytes} to {destination.nbytes} bytes of memory"
        )


def copied_by(launch: Launch) -> tuple[Allocation, Allocation, int]:
    """Where a catalogue copy (a kernel without a `.cu` file) writes and reads, and its bytes."""
    by_role = {p.role: p.name for p in launch.kernel.parameters}
    destination, source = by_role[Role.WRITE], by_role[Role.READ]
    nbytes = min(launch.call.arrays[destination].nbytes, launch.call.arrays[source].nbytes)
    return launch.arrays[destination], launch.arrays[source], nbytes


def element_type(launch: Launch) -> str:
    """The element type of the first array parameter, which instantiates the template."""
    first = next(p for p in launch.kernel.parameters if p.role is not Role.SCALAR)
    return launch.call.arrays[first.name].dtype


def packed_arguments(launch: Launch) -> tuple[Any, ...]:
    """The C arguments in order: addresses as uint64, sizes as int64, scalars in the element
    type, as NumPy scalars of their size and bits."""
    kernel, call = launch.kernel, launch.call
    element = np.dtype(element_type(launch)).type
    scalars = {p.name: p.default for p in kernel.parameters if p.role is Role.SCALAR}
    scalars.update(call.scalars)
    packed: list[Any] = []
    for item in kernel.arguments_of(call):
        if isinstance(item, (int, np.integer)):
            packed.append(np.int64(item))
        elif item in launch.arrays:
            allocation = launch.arrays[item]
            if not allocation.address:
                kind = allocation.kind.value
                raise DeviceError(
                    f"{kernel.name}: {item} is {kind} memory, which kernels cannot see"
                )
            packed.append(np.uint64(allocation.address))
        elif scalars.get(item) is not None:
            packed.append(element(scalars[item]))
        else:
            raise DeviceError(f"kernel {kernel.name!r}: no value for {item!r}")
    return tuple(packed)


def why_not_captured(error: Exception) -> str:
    """What a captured function raised, in a line; of a `DeviceError` without the class."""
    name = type(error).__name__
    text = (str(error) or name).splitlines()[0]
    return text if isinstance(error, DeviceError) else f"{name}: {text}"
