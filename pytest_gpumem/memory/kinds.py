"""What kind of memory a pointer belongs to (CUDA C++ Best Practices Guide, 9.1.4 Unified Virtual Addressing)."""

from __future__ import annotations

from numbers import Integral
from typing import Any

from pytest_gpumem.devices.protocol import Device, MemoryKind
from pytest_gpumem.memory.buffers import BadBuffer, Buffer


def memory_kind(device: Device, pointer: Any) -> MemoryKind | None:
    """What kind of memory a pointer belongs to, as the driver and the operating system say; a slice is of its array's kind.

    Args:
        device: whose memory is "device"; another GPU's is "peer".
        pointer: an address as an integer, a buffer, or an array of any library (by `__cuda_array_interface__`, `data_ptr()` or
            `__array_interface__`), of which its first element counts.

    Gives None for an address in no memory of this process, such as the first byte past the end of an allocation that nothing lies behind.

    Raises:
        BadBuffer: it is none of these, or a negative address.
    """
    address = address_of(pointer)
    if address < 0:
        raise BadBuffer(f"{address} is no address")
    return device.memory.kind_at(address)


def address_of(pointer: Any) -> int:
    """The address of an integer, a buffer or an array's first element. Raises `BadBuffer` for anything else."""
    if isinstance(pointer, Integral) and not isinstance(pointer, bool):
        return int(pointer)
    if isinstance(pointer, Buffer):
        return pointer.host_address or pointer.address
    if callable(data_ptr := getattr(pointer, "data_ptr", None)):  # PyTorch: a tensor of the CPU has no other interface to ask for
        return int(data_ptr())
    for name in ("__cuda_array_interface__", "__array_interface__"):
        interface = getattr(pointer, name, None)
        if isinstance(interface, dict) and isinstance(interface.get("data"), tuple):
            return int(interface["data"][0])
    raise BadBuffer(f"memory_kind() takes an address, a buffer or an array, not {type(pointer).__name__}")
