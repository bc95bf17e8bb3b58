"""The only way to a device: a choice such as "auto", "cuda:1" or "sim:h100" becomes a device that
can be opened."""

from __future__ import annotations

from contextlib import AbstractContextManager, ExitStack, suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING

from pytest_gpumem.collector import uncollected
from pytest_gpumem.devices.errors import NoDevice, NotCounted
from pytest_gpumem.records.device import Card, DeviceFacts

if TYPE_CHECKING:
    from pytest_gpumem.devices.cuda.waits import CudaWaits
    from pytest_gpumem.devices.protocol import Device, Footprints

DEFAULT_DATASHEET = "h100"


@dataclass(frozen=True)
class DeviceChoice:
    """A device that can be opened. Only `open` creates a context."""

    facts: DeviceFacts
    fallback_reason: str | None = None  # why `auto` chose the simulated device
    gpus: tuple[str, ...] = ()
    """UUIDs of the GPUs that CUDA sees: this one, its peer, and the others."""
    alike: tuple[str, ...] = ()
    """Those of them with the same key: their rows belong to one baseline."""
    index: int | None = None  # of a GPU; None is the simulated device
    sheet: str = DEFAULT_DATASHEET  # of the simulated device

    def open(self) -> Device:
        if self.index is None:
            from pytest_gpumem.devices.simulated.datasheets import DATASHEETS
            from pytest_gpumem.devices.simulated.device import SimulatedDevice

            return SimulatedDevice(DATASHEETS[self.sheet])
        with uncollected():
            # imports CuPy, which need not be installed to find no GPU
            from pytest_gpumem.devices.cuda.device import CudaDevice

            return CudaDevice(self.index, self.facts)

    def prepare(self) -> None:
        """Import what `open` needs on a GPU, before a fork."""
        if self.index is not None:
            import pytest_gpumem.devices.cuda.device  # noqa: F401

    def has_context(self) -> bool:
        if self.index is None:
            return False
        from pytest_gpumem.devices.cuda.context import has_context

        return has_context()

    def follow(self) -> AbstractContextManager[object]:
        """Follow the modules that are loaded until the block's end, for `Counters.what_ran`."""
        ends = ExitStack()  # empty where they cannot be followed
        if self.index is not None:
            from pytest_gpumem.devices.cuda.modules import MODULES

            with suppress(NotCounted), uncollected():  # each row says why
                ends.enter_context(MODULES.following())
        return ends

    def footprints(self) -> Footprints | None:
        """The memory of this process on the device; None where the open device has it."""
        if self.index is None:
            return None
        from pytest_gpumem.devices.cuda.footprints import footprints

        return footprints(self.index)

    def waits(self) -> CudaWaits | None:
        if self.index is None:
            return None
        from pytest_gpumem.devices.cuda.waits import WAITS

        return WAITS


def choose(choice: str) -> DeviceChoice:
    """Find a device without creating a context: `auto` (a GPU, else the simulated device), `cuda`,
    `cuda:N`, `sim`, `sim:NAME`. Raises `NoDevice`."""
    kind, _, which = choice.partition(":")
    if kind == "sim":
        return _simulated(which or DEFAULT_DATASHEET)
    try:
        return _cuda(int(which or 0))
    except NoDevice as missing:
        if kind == "auto":
            return _simulated(DEFAULT_DATASHEET, str(missing))
        raise


def _cuda(index: int) -> DeviceChoice:
    from pytest_gpumem.devices.cuda.facts import read_facts

    try:
        every = read_facts(index)
    except NoDevice as reason:
        raise NoDevice(f"no CUDA device {index}: {reason}") from None
    facts = every[0]
    gpus = tuple(each.uuid for each in every if each.uuid)
    alike = tuple(each.uuid for each in every if each.uuid and each.key == facts.key)
    return DeviceChoice(facts, None, gpus, alike, index)


def _simulated(name: str, fallback_reason: str | None = None) -> DeviceChoice:
    from pytest_gpumem.devices.simulated.datasheets import DATASHEETS

    if name not in DATASHEETS:
        raise NoDevice(f"no simulated device {name!r}; there are {', '.join(sorted(DATASHEETS))}")
    return DeviceChoice(DATASHEETS[name].facts(), fallback_reason, sheet=name)


def look(pci_bus_id: str | None) -> Card:
    """The state of the card at a PCI bus id, or of the first, without a context and without CuPy.
    Raises `NoDevice`."""
    try:
        from pytest_gpumem.devices.cuda.nvml import read_card
    except ImportError:
        raise NoDevice("nvidia-ml-py is not installed") from None
    return read_card(pci_bus_id)
