"""Methods of objects that belong to a device: they run with it as the current device."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any, ParamSpec, TypeVar

Args = ParamSpec("Args")
Result = TypeVar("Result")


def on_its_device(method: Callable[Args, Result]) -> Callable[Args, Result]:
    """Run a method with its object's device as the current one, whatever the test has chosen."""

    @wraps(method)
    def wrapped(*arguments: Args.args, **keywords: Args.kwargs) -> Result:
        owner: Any = arguments[0]
        with owner.device.current():
            return method(*arguments, **keywords)

    return wrapped


def uncounted(method: Callable[Args, Result]) -> Callable[Args, Result]:
    """As `on_its_device`, and what is allocated counts in no footprint by itself."""

    @wraps(method)
    def wrapped(*arguments: Args.args, **keywords: Args.kwargs) -> Result:
        owner: Any = arguments[0]
        with owner.device.current(), owner.device.footprints.ours():
            return method(*arguments, **keywords)

    return wrapped
