"""Methods of objects that belong to a device: they run with it as the current device."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Concatenate, ParamSpec, Protocol, TypeVar

from pytest_gpumem.devices.protocol import Device


class _OnDevice(Protocol):
    @property
    def device(self) -> Device: ...


Args = ParamSpec("Args")
Result = TypeVar("Result")
Owner = TypeVar("Owner", bound=_OnDevice)


def on_its_device(
    method: Callable[Concatenate[Owner, Args], Result],
) -> Callable[Concatenate[Owner, Args], Result]:
    """Run a method with its object's device as the current device: the test may have chosen
    another."""

    @wraps(method)
    def wrapped(owner: Owner, /, *arguments: Args.args, **keywords: Args.kwargs) -> Result:
        with owner.device.current():
            return method(owner, *arguments, **keywords)

    return wrapped


def uncounted(
    method: Callable[Concatenate[Owner, Args], Result],
) -> Callable[Concatenate[Owner, Args], Result]:
    """As `on_its_device`, and what is allocated counts in no footprint by itself."""

    @wraps(method)
    def wrapped(owner: Owner, /, *arguments: Args.args, **keywords: Args.kwargs) -> Result:
        with owner.device.current(), owner.device.footprints.ours():
            return method(owner, *arguments, **keywords)

    return wrapped
