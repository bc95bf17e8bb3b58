"""Persisting L2: how much to set aside, and putting back what was found.

Source: CUDA C++ Programming Guide, Device Memory L2 Access Management; CUDA C++ Best Practices Guide, 9.2.2.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from numbers import Real
from typing import Literal
from weakref import WeakKeyDictionary

from pytest_gpumem.devices.protocol import Device, MemoryKind, Stream, Unsupported, WindowSpec
from pytest_gpumem.memory.buffers import Buffer
from pytest_gpumem.records.device import DeviceFacts
from pytest_gpumem.records.measurement import Window
from pytest_gpumem.units import QuantityError, format_bytes, parse_bytes


class BadWindow(ValueError):
    """An access-policy window or a set-aside that cannot be."""


_OPEN: WeakKeyDictionary[Device, PersistingStream] = WeakKeyDictionary()
"""The persisting stream that is open on each device: a second one would change the set-aside under the first."""


def fit_set_aside(facts: DeviceFacts, nbytes: int) -> int:
    """The set-aside for a window of `nbytes`: the smallest step of L2/16 that holds it, never above L2/2 or the device's maximum.

    More is not better: on H100 the maximum, which guides recommend, makes a saturated kernel up to 2.2 times slower, because what is
    set aside is missing for everything else.
    """
    step = facts.l2_step_bytes
    largest = min(facts.l2_bytes // 2, facts.persisting_l2_max_bytes) // step * step
    return min(-(-nbytes // step) * step, largest)


def fit_hit_ratio(set_aside: int, nbytes: int) -> float:
    """The largest hit ratio that does not thrash: what is set aside over the window, at most 1 (Best Practices Guide, 9.2.2.2)."""
    return min(1.0, set_aside / nbytes)


@dataclass
class PersistingStream:
    """A stream whose accesses to one buffer prefer to stay in L2."""

    stream: Stream
    device: Device
    buffer: Buffer
    hit_ratio: float
    set_aside: int
    """Bytes that the driver granted; 0 with set_aside="off"."""
    closed: bool = False
    """The `with` block has ended, and the window with it."""
    used: bool = False
    """Something was measured on it, or its handle was taken."""

    @property
    def handle(self) -> int:
        """The `cudaStream_t` as an integer."""
        self.used = True
        return self.stream.handle

    def __cuda_stream__(self) -> tuple[int, int]:
        """The protocol by which cuda.core and CuPy take another library's stream: version and handle."""
        return 0, self.handle

    @property
    def window(self) -> Window | None:
        """The window as the driver gives it back, or None if it is off."""
        spec = self.device.window(self.stream)
        return None if spec is None else Window(nbytes=spec.nbytes, hit_ratio=spec.hit_ratio, set_aside=self.device.set_aside())

    def apply(self) -> None:
        """Put the window over where the buffer now is; lines of where it was no longer persist."""
        if self.set_aside:
            self.device.reset_persisting()
            self.device.set_window(self.stream, WindowSpec(self.buffer.address, self.buffer.nbytes, self.hit_ratio))


def _requested(facts: DeviceFacts, nbytes: int, set_aside: Literal["fit", "max", "off"] | int | str) -> int:
    if set_aside == "fit":
        return fit_set_aside(facts, nbytes)
    if set_aside == "max":
        return facts.persisting_l2_max_bytes
    if set_aside == "off":
        return 0
    try:
        size = parse_bytes(set_aside)
    except QuantityError:
        raise BadWindow(f'set_aside={set_aside!r}; accepted are "fit", "max", "off" and a size such as "8 MiB"') from None
    if size > facts.persisting_l2_max_bytes:
        raise BadWindow(
            f"set_aside={format_bytes(size)} is above the maximum of {facts.name}, {format_bytes(facts.persisting_l2_max_bytes)}"
        )
    return size


@contextmanager
def persisting(
    device: Device,
    buffer: Buffer,
    *,
    hit_ratio: Literal["fit"] | float = "fit",
    set_aside: Literal["fit", "max", "off"] | int | str = "fit",
) -> Iterator[PersistingStream]:
    """A stream whose access-policy window lies on `buffer` and follows it when it moves.

    Args:
        device: the device that the buffer is on.
        buffer: device memory, at most `accessPolicyMaxWindowSize`.
        hit_ratio: share of the window's accesses that persist, in [0, 1]; "fit": as many as the set-aside holds.
        set_aside: bytes, or "fit" (smallest step of L2/16 that holds the buffer, not above L2/2), "max", or "off" (limit 0 and no
            window: what a gain is compared with). The driver rounds up to steps of L2/16; what it granted is in the result.

    On exit, also after an error, the window is turned off, persisting lines are reset and the limit that was found is restored.

    Raises:
        BadWindow: a hit ratio outside [0, 1], a set-aside beyond the maximum, a buffer of another kind or beyond the largest window.
        Unsupported: the device has no persisting L2 (compute capability below 8.0, MIG).
    """
    facts = device.facts
    if facts.persisting_l2_max_bytes == 0:
        why = (
            f"MIG profile {facts.mig_profile}"
            if facts.mig_profile
            else f"compute capability {facts.compute_capability[0]}.{facts.compute_capability[1]}"
        )
        raise Unsupported(f"{facts.name} ({why}) has no persisting L2: persistingL2CacheMaxSize is 0")
    if not isinstance(buffer, Buffer) or buffer.kind is not MemoryKind.DEVICE:
        raise BadWindow(f"a persisting window needs a buffer of device memory, not {buffer!r}")
    if buffer.nbytes > facts.access_policy_max_window_bytes:
        raise BadWindow(
            f"{buffer!r} is larger than the largest window of {facts.name}, {format_bytes(facts.access_policy_max_window_bytes)}"
        )
    if hit_ratio != "fit" and (isinstance(hit_ratio, bool) or not isinstance(hit_ratio, Real) or not 0.0 <= hit_ratio <= 1.0):
        raise BadWindow(f'hit_ratio={hit_ratio!r}; accepted are "fit" and a number from 0 to 1')
    wanted = _requested(facts, buffer.nbytes, set_aside)

    if (other := _OPEN.get(device)) is not None:
        raise BadWindow(f"a persisting stream on {other.buffer!r} is still open, and the device has one set-aside, fitted to that")
    stream = device.stream()
    found = device.set_aside()
    unfollow = None
    try:
        granted = device.request_set_aside(wanted)
        if wanted and not granted:
            raise Unsupported(f"{facts.name} granted no set-aside where {format_bytes(wanted)} were asked for")
        ratio = fit_hit_ratio(granted, buffer.nbytes) if hit_ratio == "fit" else float(hit_ratio)
        persisting_stream = PersistingStream(stream, device, buffer, ratio, granted)
        _OPEN[device] = persisting_stream
        persisting_stream.apply()
        unfollow = buffer.follow(persisting_stream.apply)
        yield persisting_stream
    finally:
        opened = _OPEN.pop(device, None)
        if opened is not None:
            opened.closed = True
        if unfollow is not None:
            unfollow()
        try:
            device.set_window(stream, None)
            device.reset_persisting()
        finally:
            device.request_set_aside(found)
