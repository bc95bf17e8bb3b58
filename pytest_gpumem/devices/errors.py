"""The errors of a device; each message is one line for the user."""


class DeviceError(Exception):
    """The device refused or failed."""


class ContextLost(DeviceError):
    """A kernel's error took the context with it: later calls of this process fail."""


class CannotCapture(DeviceError):
    """The work cannot be captured: it synchronises, allocates, or uses another stream."""


class Unsupported(DeviceError):
    """This device cannot do it. A test that needs it skips with this reason."""


class OutOfMemory(DeviceError):
    """The device has not enough free memory. Nothing was allocated."""


class NotCounted(DeviceError):
    """Something cannot be counted here. The message is the reason, which reports print."""


class Undelivered(NotCounted):
    """CUPTI did not deliver the counts. Another attempt may succeed."""


class HoldExpired(DeviceError):
    """The hold of a stream timed out: the host waited for work that was queued behind it."""
