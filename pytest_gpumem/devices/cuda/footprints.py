"""The footprints of each GPU of this process. They make no context, and may be watched before there
is one."""

from __future__ import annotations

from functools import partial

from pytest_gpumem.devices.cuda.context import context_number
from pytest_gpumem.devices.cuda.driver_memory import DriverMemory
from pytest_gpumem.devices.cuda.guests.cupy_memory import CupyMemory
from pytest_gpumem.devices.cuda.guests.others import JaxMemory, NumbaMemory, RmmMemory
from pytest_gpumem.devices.cuda.guests.torch_memory import TorchMemory
from pytest_gpumem.devices.footprints import Footprints

_FOOTPRINTS: dict[int, Footprints] = {}


def footprints(index: int) -> Footprints:
    """Return those of a GPU. The open device has the same."""
    if index not in _FOOTPRINTS:
        libraries = (
            CupyMemory(index),
            TorchMemory(index),
            NumbaMemory(),
            RmmMemory(index),
            JaxMemory(index),
        )
        _FOOTPRINTS[index] = Footprints(
            DriverMemory(index), libraries, partial(context_number, index)
        )
    return _FOOTPRINTS[index]


def forget(index: int) -> None:
    """Begin anew with the next context."""
    _FOOTPRINTS.pop(index, None)
