"""The errors of devices, each a line for the user."""

from __future__ import annotations

from pytest_gpumem.units import ShownError


class DeviceError(ShownError):
    """The device refused or failed."""


class NoDevice(DeviceError):
    """The device or card cannot be used: one line with the reason and the remedy."""


class ContextLost(DeviceError):
    """A kernel's error took the context with it: later calls of this process fail."""


class CannotCapture(DeviceError):
    """The work cannot be captured: it synchronises, allocates, or uses another stream."""

    @classmethod
    def by(cls, error: Exception) -> CannotCapture:
        """What a captured function raised, in a line; of a `DeviceError` without the class."""
        name = type(error).__name__
        text = (str(error) or name).splitlines()[0]
        return cls(text if isinstance(error, DeviceError) else f"{name}: {text}")


class Unsupported(DeviceError):
    """This device cannot do it. A test that needs it skips with this reason."""


class OutOfMemory(DeviceError):
    """The device has not enough free memory. Nothing was allocated."""


class NotCounted(DeviceError):
    """Something cannot be counted. The message is the reason, which reports print."""


class Undelivered(NotCounted):
    """CUPTI did not deliver the counts. Another attempt may succeed."""


class HoldExpired(DeviceError):
    """The hold of a stream timed out."""

    def __init__(self) -> None:
        super().__init__("the host waited for the device while the stream was held")
