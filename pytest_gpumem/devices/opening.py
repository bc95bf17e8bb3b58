"""The only way to a device: a choice such as "auto", "cuda:1" or "sim:h100" becomes a device that
can be opened."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack, nullcontext, suppress
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Optional

from pytest_gpumem.collector import uncollected
from pytest_gpumem.devices.protocol import Device, DeviceError, Footprints, NotCounted, WaitCounter
from pytest_gpumem.records.device import Card, DeviceFacts
from pytest_gpumem.records.measurement import Conditions

if TYPE_CHECKING:
    from pytest_gpumem.devices.cuda import facts

DriverAnswer = Optional["facts.FactsProcess"]
"""The process that asks the driver, where there is one."""

DEFAULT_DATASHEET = "h100"


def _nothing() -> None:
    """The answer of a device that has nothing of the kind."""


class NoDevice(DeviceError):
    """The chosen device is missing. The message is one line with the reason and the remedy."""


@dataclass(frozen=True)
class DeviceChoice:
    """A device that was found but not opened: no context was created on it."""

    facts: DeviceFacts
    open: Callable[[], Device]  # create the context (or the model) and give the device
    fallback_reason: str | None = None  # why `auto` chose the simulated device
    conditions: Callable[[], Conditions] = Conditions
    """Reads clocks and throttle reasons without a context; by default all are unknown."""
    prepare: Callable[[], object] = _nothing
    """Imports the modules that `open` needs, without a context: a process that waits for its turn
    does so beforehand."""
    gpus: tuple[str, ...] = ()
    """UUIDs of the GPUs that CUDA sees, beginning with this one and its peer."""
    alike: tuple[str, ...] = ()
    """Those of them that have the same key: their rows belong to one baseline."""
    follow: Callable[[], AbstractContextManager[object]] = nullcontext
    """Follows the modules that this process loads inside the block, for `Counters.what_ran`;
    without a context."""
    unfinished: Callable[[], bool | None] = _nothing
    """True if work waits on the default streams or the current stream of a library; None if this
    process has no context. Waits for nothing."""
    footprints: Callable[[], Footprints | None] = _nothing
    """Gives the memory of this process on the device, without a context; None where the open device
    has it."""
    waits: Callable[[], WaitCounter | None] = _nothing
    """Gives what counts the waits of a test; None on the simulated device."""


def asked(choice: str) -> AbstractContextManager[DriverAnswer]:
    """Have another process ask the driver about a device, for `choose`. The block imports
    meanwhile."""
    kind, _, which = choice.partition(":")
    if kind == "sim":
        return nullcontext()
    from pytest_gpumem.devices.cuda.facts import asking

    return asking(int(which or 0))


def choose(choice: str, *, seed: int = 0, asked: DriverAnswer = None) -> DeviceChoice:
    """Find a device without creating a context.
    `choice`: `auto` (a GPU, else the simulated device), `cuda`, `cuda:N`, `sim`, `sim:NAME`.
    `seed`: seeds the simulated device's noise.
    `asked`: what `asked` gave for this choice.
    Raises `NoDevice`: no GPU for `cuda`, or no datasheet of that name for `sim:NAME`.
    """
    kind, _, which = choice.partition(":")
    if kind == "sim":
        return _simulated(which or DEFAULT_DATASHEET, seed, None)
    try:
        return _cuda(int(which or 0), asked)
    except NoDevice as missing:
        if kind == "auto":
            return _simulated(DEFAULT_DATASHEET, seed, str(missing))
        raise


def look(pci_bus_id: str | None) -> Card:
    """The state of the card at a PCI bus id, or of the first one, from the driver; without a
    context, and without CuPy.
    Raises `NoDevice`: there is no driver or no such card, or nvidia-ml-py is not installed.
    """
    try:
        from pytest_gpumem.devices.cuda.nvml import NvmlUnavailable, read_card
    except ImportError:
        raise NoDevice("nvidia-ml-py is not installed") from None
    try:
        return read_card(pci_bus_id)
    except NvmlUnavailable as reason:
        raise NoDevice(str(reason)) from None


def _cuda(index: int, asked: DriverAnswer) -> DeviceChoice:
    from pytest_gpumem.devices.cuda.facts import CudaUnavailable, read_facts

    try:
        found = read_facts(index, asked)
    except CudaUnavailable as reason:
        raise NoDevice(f"no CUDA device {index}: {reason}") from None
    facts = found.facts
    return DeviceChoice(
        facts,
        partial(_open_cuda, index, facts),
        conditions=partial(_cuda_conditions, facts),
        prepare=_import_cuda,
        gpus=found.gpus,
        alike=found.alike,
        follow=_follow_modules,
        unfinished=_cuda_unfinished,
        footprints=partial(_cuda_footprints, index),
        waits=_cuda_waits,
    )


def _cuda_conditions(facts: DeviceFacts) -> Conditions:
    from pytest_gpumem.devices.cuda.nvml import ConditionReader

    return ConditionReader(facts).read()


def _import_cuda() -> None:
    import pytest_gpumem.devices.cuda.device  # noqa: F401


def _follow_modules() -> AbstractContextManager[object]:
    from pytest_gpumem.devices.cuda.modules import MODULES

    ends = ExitStack()
    with suppress(NotCounted), uncollected():  # each row says why
        ends.enter_context(MODULES.following())
    return ends


def _cuda_unfinished() -> bool | None:
    from pytest_gpumem.devices.cuda.context import unfinished

    return unfinished()


def _cuda_footprints(index: int) -> Footprints:
    from pytest_gpumem.devices.cuda.footprints import footprints

    return footprints(index)


def _cuda_waits() -> WaitCounter:
    from pytest_gpumem.devices.cuda.waits import WAITS

    return WAITS


def _open_cuda(index: int, facts: DeviceFacts) -> Device:
    from pytest_gpumem.devices.cuda.context import made_meanwhile
    from pytest_gpumem.devices.cuda.own_kernels import compiled_meanwhile

    with uncollected(), made_meanwhile(index), compiled_meanwhile(facts) as nvrtc:
        # imports CuPy, which need not be installed to find no GPU
        from pytest_gpumem.devices.cuda.device import (
            CudaDevice,
        )

        return CudaDevice(index, facts, nvrtc)


def _simulated(name: str, seed: int, fallback_reason: str | None) -> DeviceChoice:
    from pytest_gpumem.devices.simulated.datasheets import DATASHEETS
    from pytest_gpumem.devices.simulated.device import SimulatedDevice

    if name not in DATASHEETS:
        raise NoDevice(f"no simulated device {name!r}; there are {', '.join(sorted(DATASHEETS))}")
    datasheet = DATASHEETS[name]
    opened: list[SimulatedDevice] = []

    def open_() -> Device:
        opened[:] = [SimulatedDevice(datasheet, seed=seed)]
        return opened[0]

    def unfinished() -> bool:
        return any(device.timeline.unfinished() for device in opened)

    return DeviceChoice(
        datasheet.facts(),
        open_,
        fallback_reason,
        unfinished=unfinished,
    )
