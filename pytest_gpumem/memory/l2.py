"""Persisting L2: streams with a window, which share the device's set-aside.

Source: CUDA C++ Programming Guide, Device Memory L2 Access Management; CUDA C++ Best Practices
Guide, 9.2.2.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal
from weakref import WeakKeyDictionary

from pytest_gpumem.devices.protocol import AccessProperty, Device, Stream, Unsupported, WindowSpec
from pytest_gpumem.memory.buffers import Buffer, on_its_device
from pytest_gpumem.memory.window_request import (
    BadWindow,
    SetAside,
    Where,
    fit_hit_ratio,
    fit_set_aside,
    window_request,
)
from pytest_gpumem.records.measurement import Window
from pytest_gpumem.units import ShownError, format_bytes, short_bytes, sizes


class Thrashing(UserWarning):
    """Windows ask for more than is set aside, so that their lines evict each other."""


class LeftoverWarning(ShownError, UserWarning):
    """A test left the set-aside or the windows of streams changed; they were put back."""


@dataclass(eq=False)
class PersistingStream:
    """A stream with an access-policy window: its accesses to one buffer persist in L2."""

    stream: Stream
    device: Device
    buffer: Buffer
    nbytes: int
    """Bytes under the window."""
    where: Where
    """The carrier of the window."""
    offset: int  # bytes of the buffer before the window
    fixed_ratio: float | None  # the hit ratio that is requested; None: fitted to the set-aside
    wanted: SetAside  # the set-aside that is requested
    hit: AccessProperty
    miss: AccessProperty | None  # None: normal under a fitted hit ratio below 1, else streaming
    allow_thrash: bool
    clamped: bool  # the buffer is larger than the largest window
    too_large: bool
    """All is fitted, and the window is larger than half of L2: there a fitted window is slower than
    none (`ci/records/nvidia-h200/suite.json`). It is measured without a window."""
    hit_ratio: float = 0.0  # fitted anew when a stream opens or closes
    set_aside: int = 0  # granted to all open streams of the device together
    before: int = 0  # set aside before the first of them
    closed: bool = False  # the `with` block has ended, and the window with it
    used: bool = False  # a measurement used it, or its handle was read
    _reset: Literal["window", "context"] | None = None  # how it was reset, until `renew`
    _graph_window: WindowSpec | None = None

    @property
    def handle(self) -> int:
        """The `cudaStream_t` as an integer.

        Raises:
            BadWindow: each launch carries the window: what is launched by hand would have none.
        """
        if self.where == "launch":
            raise BadWindow(
                'with where="launch" the stream itself has no window: pass stream= to '
                "gpu_benchmark, with a kernel of gpu_kernels"
            )
        self.used = True
        return self.stream.handle

    def __cuda_stream__(self) -> tuple[int, int]:
        """The protocol by which cuda.core and CuPy take another library's stream: version and
        handle."""
        return 0, self.handle

    @property
    def persists(self) -> bool:
        """Whether lines under the window persist: it needs a set-aside."""
        return self.hit is AccessProperty.PERSISTING and not self.too_large

    @property
    def off(self) -> bool:
        """Whether there is to be no window."""
        return self.wanted == "off" or self.too_large

    @property
    def demand(self) -> float:
        """Bytes that persist if all of them are touched: hit ratio x bytes."""
        return self.hit_ratio * self.nbytes if self.persists else 0.0

    @property
    def spec(self) -> WindowSpec | None:
        """The window as it is to be now, over where the buffer is; None if there is to be none."""
        if self.off or self.closed or self._reset == "context":
            return None
        ratio, hit = self.hit_ratio, self.hit
        if self._reset == "window":
            ratio, hit = 1.0, AccessProperty.NORMAL
        start = self.buffer.address + self.offset
        return WindowSpec(start, self.nbytes, ratio, hit, self._miss)

    @property
    def _miss(self) -> AccessProperty:
        """The property of the window's other accesses. Streaming lines are evicted first: a table
        that the set-aside holds in part needs normal lines."""
        in_part = self.fixed_ratio is None and self.hit_ratio < 1
        fitted = AccessProperty.NORMAL if in_part else AccessProperty.STREAMING
        return self.miss or fitted

    @property
    @on_its_device
    def window(self) -> Window | None:
        """The window that is active, or None if it is off.

        On a stream, and on the kernels of a graph once a graph was measured, it is what the driver
        gives back; of a single launch it is what every launch gets.
        """
        spec = self.spec
        if self.where == "stream":
            spec = self.device.l2.window(self.stream)
        elif self.where == "graph" and not self.closed:
            spec = self._graph_window
        if spec is None:
            return None
        return Window(
            nbytes=spec.nbytes,
            hit_ratio=spec.hit_ratio,
            set_aside=self.device.l2.set_aside(),
            where=self.where,
            hit=spec.hit.value,
            miss=spec.miss.value,
            offset=self.offset,
        )

    @property
    def thrashing(self) -> str | None:
        """How the open windows need more than is set aside; None if they do not, or may."""
        streams, granted = open_streams(self.device), self.set_aside
        demand = sum(stream.demand for stream in streams)
        # Fitted ratios are rounded.
        if self.allow_thrash or not granted or demand <= granted * (1 + 1e-9):
            return None
        terms = []
        for stream in streams:
            if stream.persists:
                terms.append(f"{stream.hit_ratio:.3g} x {short_bytes(stream.nbytes)}")
        which = "its lines" if len(streams) == 1 else f"the lines of {len(streams)} streams"
        return (
            f"thrashing: hit ratio x bytes is {' + '.join(terms)} = {short_bytes(round(demand))}, "
            f"{short_bytes(granted)} of L2 are set aside: {which} evict each other"
        )

    @property
    def notes(self) -> tuple[str, ...]:
        notes = []
        if self.clamped and not self.too_large:
            part, whole = sizes(self.nbytes, self.buffer.nbytes)
            notes.append(
                f"the window covers the first {part} of {whole}: no larger one is possible"
            )
        if self.thrashing is not None:
            notes.append(self.thrashing)
        if self.too_large:
            window, half = sizes(self.nbytes, self.device.facts.l2_bytes // 2)
            notes.append(
                f"measured without a window: {window} are more than half of L2, {half}, where a "
                'fitted window can be slower than none; set_aside="max" sets one'
            )
            return tuple(notes)
        spec = self.spec
        persists = spec is not None and spec.hit is AccessProperty.PERSISTING and spec.hit_ratio > 0
        if self.set_aside and not persists:
            cost = f"{short_bytes(self.set_aside)} of L2 are set aside"
            notes.append(f"{cost}, and nothing persists in them: a cost without a gain")
        return tuple(notes)

    def apply(self) -> None:
        """Put the window over where the buffer now is; lines of where it was no longer persist."""
        if not self.off:
            self.device.l2.reset_persisting()
            self.put()

    def put(self) -> None:
        if self.where == "stream" and not self.off:
            self.device.l2.set_window(self.stream, self.spec)

    def read_back(self, windows: tuple[WindowSpec | None, ...]) -> None:
        """Note the windows of a graph's kernels, as the driver has them."""
        self._graph_window = windows[0] if windows else None

    @on_its_device
    def reset(self, how: Literal["window", "context"] = "context") -> None:
        """Release persisting lines, until `renew` (CUDA C++ Programming Guide, Reset L2 Access to
        Normal).

        Args:
            how: "context" turns the window off, and makes all persisting lines of the device normal
                at once (`cudaCtxResetPersistingL2Cache`), those of other streams too, whose next
                accesses restore them. "window" gives the window the hit property normal: lines
                become normal as work under the window touches them; others stay persisting.

        Raises:
            BadWindow: `how` is neither.
        """
        if how not in ("window", "context"):
            raise BadWindow(f'reset({how!r}); accepted are "window" and "context"')
        self._reset = how
        self.put()
        if how == "context":
            self.device.l2.reset_persisting()

    @on_its_device
    def renew(self) -> None:
        """Give the window its hit property again after a `reset`."""
        self._reset = None
        self.put()

    @on_its_device
    def close(self) -> None:
        """Turn the window off; the other streams share out anew. The last stream puts the set-aside
        back to what it was before the first. A second call does nothing."""
        self.closed = True
        streams, l2 = _OPEN[self.device], self.device.l2
        if self not in streams:
            return
        streams.remove(self)
        try:
            if self.where == "stream":
                l2.set_window(self.stream, None)
            if not streams:
                l2.reset_persisting()
        finally:
            if streams:
                _share(self.device)
            elif not self.device.facts.mps:
                l2.request_set_aside(self.before)


_OPEN: WeakKeyDictionary[Device, list[PersistingStream]] = WeakKeyDictionary()
"""The open persisting streams of each device, which has one set-aside for all of them."""


def open_streams(device: Device) -> Sequence[PersistingStream]:
    return _OPEN.get(device, ())


def idle_set_aside(device: Device) -> tuple[str, ...]:
    """Say that L2 is set aside, for a measurement without a window; empty if nothing is."""
    for stream in open_streams(device):
        if stream.set_aside:
            return (
                f"{short_bytes(stream.set_aside)} of L2 are set aside for a persisting stream that "
                "is open, and this measurement has no window in them: a cost without a gain",
            )
    return ()


def _share(device: Device) -> None:
    """Request what the open streams need, fit the ratios to what was granted, put the windows."""
    streams, wanted, l2 = _OPEN[device], _wanted(device), device.l2
    granted = l2.set_aside() if device.facts.mps else l2.request_set_aside(wanted)
    if wanted and not granted:
        size = format_bytes(wanted)
        raise Unsupported(f"{device.facts.name} granted no set-aside where {size} were asked for")
    left, fitted = float(granted), list[PersistingStream]()
    for stream in streams:
        stream.set_aside = granted
        stream.hit_ratio = 1.0
        if stream.fixed_ratio is not None:
            stream.hit_ratio = stream.fixed_ratio
            left -= stream.demand
        elif stream.persists:
            fitted.append(stream)
    nbytes = sum(stream.nbytes for stream in fitted)
    for stream in fitted:
        stream.hit_ratio = fit_hit_ratio(max(0, int(left)), nbytes)
    # Lines of a window that has ended, or of a ratio that no longer holds, take the others' room.
    l2.reset_persisting()
    for stream in streams:
        stream.put()


def _wanted(device: Device) -> int:
    largest = device.facts.persisting_l2_max_bytes
    total, fitted = 0, 0
    for stream in open_streams(device):
        size = stream.wanted
        if size == "max":
            return largest
        if isinstance(size, int):
            total += size
        elif size == "fit" and stream.persists:
            fitted += stream.nbytes
    if fitted:
        total += fit_set_aside(device.facts, fitted)
    return min(total, largest)


_MPS_LIMIT = "CUDA_DEVICE_DEFAULT_PERSISTING_L2_CACHE_PERCENTAGE_LIMIT"
"""By which an MPS server fixes the set-aside (CUDA C++ Programming Guide, L2 set-aside)."""


def why_no_persisting_l2(device: Device) -> str | None:
    """Why the set-aside of a device cannot be changed."""
    facts, which, why = device.facts, "", ""
    if facts.mig_profile is not None:
        which, why = f" (MIG profile {facts.mig_profile})", "the set-aside is disabled in MIG mode"
    elif facts.compute_capability < (8, 0):
        major, minor = facts.compute_capability
        which, why = f" (compute capability {major}.{minor})", "it came with compute capability 8.0"
    elif not facts.persisting_l2_max_bytes:
        why = "persistingL2CacheMaxSize is 0"
    elif facts.mps and not device.l2.set_aside():
        return _fixed_by_mps("nothing is set aside")
    return f"{facts.name}{which} has no persisting L2: {why}" if why else None


def _fixed_by_mps(amount: str) -> str:
    """Explain the set-aside under MPS, whose amount is given in words."""
    value = os.environ.get(_MPS_LIMIT, "not set")
    return (
        f"under MPS the L2 set-aside is fixed when the server starts, by {_MPS_LIMIT} in its "
        f"environment: {amount} (in this process it is {value})"
    )


@contextmanager
def persisting(device: Device, buffer: Buffer, **options: Any) -> Iterator[PersistingStream]:
    """A stream whose access-policy window lies on `buffer` and follows it when it moves.

    Streams that are open at a time share the device's set-aside: the sum of what each requests.
    Fitted hit ratios are made from what the others leave, anew whenever a stream opens or closes.
    `options`: the keywords of `window_request`, by the table of docs/persisting-l2.md.
    Raises `BadWindow`: an argument that is not accepted, or set_aside="off" beside another stream.
    Raises `Unsupported`: the device has no persisting L2, or another set-aside under MPS.
    """
    with device.current():
        reason = why_no_persisting_l2(device)
        if reason is not None:
            raise Unsupported(reason)
        request = window_request(device, buffer, **options)
        if device.facts.mps and request["wanted"] != "fit":
            size = format_bytes(device.l2.set_aside())
            raise Unsupported(_fixed_by_mps(f"{size}, which no process changes"))
        stream = PersistingStream(device.streams.create(), device, buffer, **request)
        streams = _OPEN.setdefault(device, [])
        stream.before = streams[0].before if streams else device.l2.set_aside()
    try:
        for other in streams:
            if "off" in (stream.wanted, other.wanted):
                raise BadWindow(
                    f"a persisting stream on {other.buffer!r} is still open, and the device has "
                    'one set-aside: set_aside="off" cannot be beside another stream'
                )
        with device.current():
            streams.append(stream)
            _share(device)
        buffer.followers.append(stream.apply)
        yield stream
    finally:
        if stream.apply in buffer.followers:
            buffer.followers.remove(stream.apply)
        stream.close()
