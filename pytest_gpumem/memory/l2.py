"""Persisting L2: how much to set aside, how streams share it, and putting back what was found.

Source: CUDA C++ Programming Guide, Device Memory L2 Access Management; CUDA C++ Best Practices Guide, 9.2.2.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from numbers import Real
from reprlib import repr as shortened
from typing import Any, Literal
from weakref import WeakKeyDictionary

from pytest_gpumem.devices.checks import fixed_by_mps, unsupported
from pytest_gpumem.devices.protocol import AccessProperty, Device, Stream, Unsupported, WindowSpec
from pytest_gpumem.memory.buffers import Buffer, on_its_device
from pytest_gpumem.records.device import DeviceFacts
from pytest_gpumem.records.measurement import Window
from pytest_gpumem.units import (
    QuantityError,
    format_bytes,
    parse_bytes,
    parse_share,
    short_bytes,
    sizes,
)

Where = Literal[
    "stream", "graph", "launch"
]  # the carrier of the window: the stream, the kernels of a captured graph, or each launch

_WHERE = ("stream", "graph", "launch")
_MISS = (AccessProperty.STREAMING.value, AccessProperty.NORMAL.value)
_HIT = (AccessProperty.PERSISTING.value, *_MISS)
FREE_STEPS = 3  # steps of L2/16 that a saturated kernel beside the window hardly misses
_SET_ASIDE = '"fit", "max", "off", a size such as "8 MiB" and a share of L2 such as "25%"'


class BadWindow(ValueError):
    """An access-policy window or a set-aside that cannot be."""


@dataclass(frozen=True)
class WindowRequest:
    """A window with its set-aside, as asked for."""

    nbytes: int  # bytes under the window
    offset: int  # bytes of the buffer before the window
    hit_ratio: (
        float | None
    )  # None: as much as the set-aside holds; all of it where the hit property is not persisting
    set_aside: Literal["fit", "max", "off"] | int
    hit: AccessProperty
    miss: AccessProperty | None  # None: normal under a fitted hit ratio below 1, else streaming
    where: Where
    allow_thrash: bool
    clamped_from: int | None  # bytes of the buffer, where `window="clamp"` made the window shorter
    too_large: bool
    """All is fitted, and the window is larger than half of L2: there a fitted window is slower than none, by 1 to 6 % for `sliding_window`
    of 40 to 60 MiB on an H200 (`ci/records/nvidia-h200/suite.json`). It is measured without one."""

    @property
    def persists(self) -> bool:
        """Whether lines under the window persist, so that it needs a set-aside."""
        return self.hit is AccessProperty.PERSISTING and not self.too_large

    @property
    def off(self) -> bool:
        """Whether there is to be no window."""
        return self.set_aside == "off" or self.too_large


def asked(
    device: Device,
    buffer: Any,
    *,
    hit_ratio: Any = "fit",
    set_aside: Any = "fit",
    hit: Any = "persisting",
    miss: Any = "fit",
    window: Any = "error",
    offset: Any = 0,
    where: Any = "stream",
    allow_thrash: Any = False,
) -> WindowRequest:
    """Check the arguments of `persisting`, which describes them. Raises `BadWindow` as documented there."""
    facts = device.facts
    if not isinstance(buffer, Buffer) or not buffer.kind.on_device:
        given = repr(buffer) if isinstance(buffer, Buffer) else in_one_line(buffer)
        raise BadWindow(f"a persisting window needs a buffer of device memory, not {given}")
    if buffer.device is not device:
        raise BadWindow(
            f"{buffer!r} is memory of another device than {facts.name}, on which the stream is"
        )
    fitted = isinstance(hit_ratio, str) and hit_ratio == "fit"  # an array compares its elements
    if not fitted and not _is_ratio(hit_ratio):
        raise BadWindow(f'hit_ratio={hit_ratio!r}; accepted are "fit" and a number from 0 to 1')
    if hit not in _HIT:
        raise BadWindow(f'hit={hit!r}; accepted are "persisting", "streaming" and "normal"')
    if miss not in ("fit", *_MISS):
        raise BadWindow(f'miss={miss!r}; accepted are "fit", "streaming" and "normal"')
    if where not in _WHERE:
        raise BadWindow(f'where={where!r}; accepted are "stream", "graph" and "launch"')
    if not isinstance(allow_thrash, bool):
        raise BadWindow(f"allow_thrash={allow_thrash!r}; accepted are True and False")
    start = _offset(buffer, offset)
    nbytes, kept = _window_bytes(facts, buffer, window, start), _set_aside(facts, set_aside)
    all_fitted = fitted and kept == "fit" and hit == AccessProperty.PERSISTING.value
    return WindowRequest(
        nbytes=nbytes,
        offset=start,
        hit_ratio=None if fitted else float(hit_ratio),
        set_aside=kept,
        hit=AccessProperty(hit),
        miss=None if miss == "fit" else AccessProperty(miss),
        where=where,
        allow_thrash=allow_thrash,
        clamped_from=buffer.nbytes
        if window == "clamp" and nbytes < buffer.nbytes - start
        else None,
        too_large=all_fitted and nbytes > facts.l2_bytes // 2,
    )


def in_one_line(value: Any) -> str:
    """A value for a message, shortened: arrays print their content over many lines."""
    return " ".join(shortened(value).split())


def _is_ratio(value: Any) -> bool:
    return isinstance(value, Real) and not isinstance(value, bool) and 0.0 <= float(value) <= 1.0


def _offset(buffer: Buffer, offset: Any) -> int:
    try:
        start = parse_bytes(offset)
    except (QuantityError, TypeError):
        raise BadWindow(
            f'offset={in_one_line(offset)}; accepted are bytes and a size such as "8 MiB"'
        ) from None
    if start >= buffer.nbytes:
        raise BadWindow(f"offset={format_bytes(start)} is not inside {buffer!r}")
    return start


def _window_bytes(facts: DeviceFacts, buffer: Buffer, window: Any, offset: int) -> int:
    largest, rest = facts.access_policy_max_window_bytes, buffer.nbytes - offset
    if isinstance(window, str) and window in ("error", "clamp"):
        if rest > largest and window == "error":
            raise BadWindow(
                f"{buffer!r} is larger than the largest window of {facts.name}, {format_bytes(largest)}; "
                'persisting_stream(..., window="clamp") lays the window over its first bytes'
            )
        return min(rest, largest)
    try:
        size = parse_bytes(window)
    except (QuantityError, TypeError):
        raise BadWindow(
            f'window={in_one_line(window)}; accepted are "error", "clamp", bytes and a size such as "8 MiB"'
        ) from None
    if not size:
        raise BadWindow('window=0 bytes; set_aside="off" measures without a window')
    if size > largest:
        raise BadWindow(
            f"window={format_bytes(size)} is above the largest window of {facts.name}, {format_bytes(largest)}"
        )
    if size > rest:
        beyond = f" at offset {format_bytes(offset)}" if offset else ""
        raise BadWindow(f"window={format_bytes(size)}{beyond} goes beyond the end of {buffer!r}")
    return size


def _set_aside(facts: DeviceFacts, given: Any) -> Literal["fit", "max", "off"] | int:
    if isinstance(given, str) and given in ("fit", "max", "off"):
        named: Literal["fit", "max", "off"] = given  # type: ignore[assignment]
        return named
    largest = facts.persisting_l2_max_bytes
    try:
        if isinstance(given, str) and given.rstrip().endswith("%"):
            size = round(parse_share(given) * facts.l2_bytes)
            words = f"{given.strip()} of L2, {format_bytes(size)},"
        else:
            size = parse_bytes(given)
            words = format_bytes(size)
    except (QuantityError, TypeError):  # an array of several numbers is no index
        raise BadWindow(f"set_aside={given!r}; accepted are {_SET_ASIDE}") from None
    if size > largest:
        raise BadWindow(
            f"set_aside={words} is above the maximum of {facts.name}, {format_bytes(largest)}"
        )
    return size or "off"


def fit_set_aside(facts: DeviceFacts, nbytes: int) -> int:
    """The set-aside for a window of `nbytes`: the least number of steps of L2/16 that holds it, and one more where that pays.

    With the least, the window's lines overflow some sets at some placements, and a launch takes 5 to 25 % longer there; with one more at
    none. Up to three steps together the additional one costs nothing. A fourth costs up to 8 %: it pays where the window leaves less than
    half a step free. Above, one more costs up to 54 %, because what is set aside is missing for everything else; the maximum, which guides
    recommend, makes a saturated kernel up to 2.2 times slower. Never above L2/2 or the device's maximum.

    Measured: `ci/records/nvidia-h100/l2_placements.json` and `ci/records/nvidia-h200/l2_placements.json`.
    """
    step = facts.l2_step_bytes
    steps = -(-nbytes // step)
    if steps + 1 <= FREE_STEPS or (steps == FREE_STEPS and 2 * (steps * step - nbytes) < step):
        steps += 1
    return min(steps, min(facts.l2_bytes // 2, facts.persisting_l2_max_bytes) // step) * step


def fit_hit_ratio(set_aside: int, nbytes: int) -> float:
    """The largest hit ratio that does not thrash: what is set aside over the window, at most 1 (Best Practices Guide, 9.2.2.2)."""
    return min(1.0, set_aside / nbytes)


class Thrashing(UserWarning):
    """Windows ask for more than is set aside, so that their lines evict each other."""


class LeftoverWarning(UserWarning):
    """A test did not leave the set-aside and the windows of streams as it found them; they were put back."""


@dataclass(eq=False)
class PersistingStream:
    """A stream with an access-policy window: its accesses to one buffer persist in L2."""

    stream: Stream
    device: Device
    buffer: Buffer
    asked: WindowRequest
    """The arguments that it was opened with."""
    hit_ratio: float = 0.0
    """Share of the window's accesses that persist. A fitted one changes when another stream opens or closes."""
    set_aside: int = 0
    """Bytes that the driver granted to all streams that are open on the device together; 0 with set_aside="off"."""
    closed: bool = False
    """The `with` block has ended, and the window with it."""
    used: bool = False
    """A measurement used it, or its handle was read."""
    _reset: Literal["window", "context"] | None = None
    """How it was reset, until `renew`."""
    _graph_window: WindowSpec | None = None

    @property
    def handle(self) -> int:
        """The `cudaStream_t` as an integer.

        Raises:
            BadWindow: each launch carries the window, not the stream: what is launched by hand would have none.
        """
        if self.where == "launch":
            raise BadWindow(
                'with where="launch" the stream itself has no window: pass stream= to gpu_benchmark, with a kernel of gpu_kernels'
            )
        self.used = True
        return self.stream.handle

    def __cuda_stream__(self) -> tuple[int, int]:
        """The protocol by which cuda.core and CuPy take another library's stream: version and handle."""
        return 0, self.handle

    @property
    def where(self) -> Where:
        """The carrier of the window."""
        return self.asked.where

    @property
    def nbytes(self) -> int:
        """Bytes under the window."""
        return self.asked.nbytes

    @property
    def demand(self) -> float:
        """Bytes that persist if all of them are touched: hit ratio x bytes; 0 where the hit property is not persisting."""
        return self.hit_ratio * self.nbytes if self.asked.persists else 0.0

    @property
    def spec(self) -> WindowSpec | None:
        """The window as it is to be now, over where the buffer is; None if there is to be none."""
        if self.asked.off or self.closed or self._reset == "context":
            return None
        ratio, hit = (
            (1.0, AccessProperty.NORMAL)
            if self._reset == "window"
            else (self.hit_ratio, self.asked.hit)
        )
        return WindowSpec(
            self.buffer.address + self.asked.offset, self.nbytes, ratio, hit, self._miss
        )

    @property
    def _miss(self) -> AccessProperty:
        """The property of the window's other accesses.

        Streaming lines go first, also those that would stay in L2 without a window: on an H200 a table of 6 MiB of which the set-aside
        holds 3.75 MiB takes 33 % longer than without a window, and as long with normal ones. A table that L2 does not hold takes as long
        with either.
        """
        if self.asked.miss is not None:
            return self.asked.miss
        return (
            AccessProperty.NORMAL
            if self.asked.hit_ratio is None and self.hit_ratio < 1
            else AccessProperty.STREAMING
        )

    @property
    @on_its_device
    def window(self) -> Window | None:
        """The window that is active, or None if it is off.

        On a stream, and on the kernels of a graph once one was measured, it is what the driver gives back; of a single launch it is
        what every launch is handed, because the driver cannot be asked afterwards.
        """
        spec = self._graph_window if self.where == "graph" and not self.closed else self.spec
        if self.where == "stream":
            spec = self.device.l2.window(self.stream)
        if spec is None:
            return None
        return Window(
            nbytes=spec.nbytes,
            hit_ratio=spec.hit_ratio,
            set_aside=self.device.l2.set_aside(),
            where=self.where,
            hit=spec.hit.value,
            miss=spec.miss.value,
            offset=self.asked.offset,
        )

    @property
    def thrashing(self) -> str | None:
        """How the windows that are open ask for more than is set aside, in one line; None if they do not, or that is wanted."""
        ledger = _LEDGERS.get(self.device)
        return None if ledger is None or self.asked.allow_thrash else ledger.thrashing()

    @property
    def notes(self) -> tuple[str, ...]:
        """Notes for the result of a measurement on this stream."""
        notes = []
        if self.asked.clamped_from is not None and not self.asked.too_large:
            part, whole = sizes(self.nbytes, self.asked.clamped_from)
            notes.append(
                f"the window covers the first {part} of {whole}: no larger one is possible"
            )
        if (thrashing := self.thrashing) is not None:
            notes.append(thrashing)
        if self.asked.too_large:
            window, half = sizes(self.nbytes, self.device.facts.l2_bytes // 2)
            notes.append(
                f"measured without a window: {window} are more than half of L2, {half}, where a fitted window can be "
                'slower than none; set_aside="max" sets one'
            )
        elif self.set_aside and self.spec is None:
            notes.append(
                f"{short_bytes(self.set_aside)} of L2 are set aside with no window in them: a cost without a gain"
            )
        elif self.set_aside and (self._reset == "window" or not self.asked.persists):
            which = (
                "that was reset" if self._reset else f"with the hit property {self.asked.hit.value}"
            )
            notes.append(
                f"{short_bytes(self.set_aside)} of L2 are set aside, but under a window {which} nothing persists: a cost without a gain"
            )
        elif self.set_aside and self.hit_ratio == 0.0:
            notes.append(
                f"{short_bytes(self.set_aside)} of L2 are set aside, but at hit ratio 0 nothing persists: a cost without a gain"
            )
        return tuple(notes)

    def apply(self) -> None:
        """Put the window over where the buffer now is; lines of where it was no longer persist."""
        if not self.asked.off:
            self.device.l2.reset_persisting()
            self.put()

    def put(self) -> None:
        """Give the stream its window, where it is the stream that carries it."""
        if self.where == "stream" and not self.asked.off:
            self.device.l2.set_window(self.stream, self.spec)

    def read_back(self, windows: tuple[WindowSpec | None, ...]) -> None:
        """Take note of the windows that a graph's kernels have, as the driver holds them."""
        self._graph_window = windows[0] if windows else None

    @on_its_device
    def reset(self, how: Literal["window", "context"] = "context") -> None:
        """Release persisting lines, until `renew` (CUDA C++ Programming Guide, Reset L2 Access to Normal).

        Args:
            how: "context" turns the window off, and makes all persisting lines of the device normal at once
                (`cudaCtxResetPersistingL2Cache`), those of other streams too, whose next accesses restore them. "window" gives the
                window the hit property normal: lines become normal as work under the window touches them; the others stay persisting.

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
        """Turn the window off; others share out anew, or what was found is put back after the last. A second call does nothing."""
        self.closed = True
        ledger = _LEDGERS.get(self.device)
        if ledger is None or self not in ledger.live:
            return
        try:
            ledger.close(self)
        finally:
            if not ledger.live:
                del _LEDGERS[self.device]


@dataclass(eq=False)
class _Ledger:
    """The persisting streams that are open on one device, which has one set-aside for all of them."""

    device: Device
    found: int  # bytes that were set aside before the first of them
    live: list[PersistingStream] = field(default_factory=list)
    granted: int = 0

    def open(self, stream: PersistingStream) -> None:
        """Take a stream in, and share out anew. Raises `BadWindow` where one asks for no set-aside at all beside another."""
        for one, other in ((stream, o) for o in self.live):
            if "off" in (one.asked.set_aside, other.asked.set_aside):
                raise BadWindow(
                    f"a persisting stream on {other.buffer!r} is still open, and the device has one set-aside: "
                    'set_aside="off" cannot be beside another stream'
                )
        self.live.append(stream)
        self._share()

    def close(self, stream: PersistingStream) -> None:
        """Turn the window off of a stream that is among them; the others share out anew, or what was found is put back after the last."""
        self.live.remove(stream)
        try:
            if stream.where == "stream":
                self.device.l2.set_window(stream.stream, None)
            if not self.live:
                self.device.l2.reset_persisting()
        finally:
            if self.live:
                self._share()
            elif not self.device.facts.mps:
                self.device.l2.request_set_aside(self.found)

    def _share(self) -> None:
        """Ask for what all need together, fit the ratios to what was granted, and put the windows."""
        wanted, l2 = self._wanted(), self.device.l2
        self.granted = l2.set_aside() if self.device.facts.mps else l2.request_set_aside(wanted)
        if wanted and not self.granted:
            raise Unsupported(
                f"{self.device.facts.name} granted no set-aside where {format_bytes(wanted)} were asked for"
            )
        persist = [s for s in self.live if s.asked.persists]
        fixed = sum(s.asked.hit_ratio * s.nbytes for s in persist if s.asked.hit_ratio is not None)
        fitted = sum(s.nbytes for s in persist if s.asked.hit_ratio is None)
        left = max(0, int(self.granted - fixed))
        for stream in self.live:
            share = fit_hit_ratio(left, fitted) if stream.asked.persists and fitted else 1.0
            stream.hit_ratio = share if stream.asked.hit_ratio is None else stream.asked.hit_ratio
            stream.set_aside = self.granted
        # Lines of a window that has ended, or persist at a ratio that no longer holds, would take the others' room. Without a set-aside,
        # lines that somebody left persisting would change the time that a gain is measured against.
        self.device.l2.reset_persisting()
        for stream in self.live:
            stream.put()

    def _wanted(self) -> int:
        facts, each = self.device.facts, [s.asked.set_aside for s in self.live]
        if "max" in each:
            return facts.persisting_l2_max_bytes
        fitted = sum(s.nbytes for s in self.live if s.asked.set_aside == "fit" and s.asked.persists)
        sizes = sum(size for size in each if isinstance(size, int))
        return min(
            sizes + (fit_set_aside(facts, fitted) if fitted else 0), facts.persisting_l2_max_bytes
        )

    def thrashing(self) -> str | None:
        """That the windows ask for more than is set aside, with the numbers; None if they do not."""
        demand = sum(s.demand for s in self.live)
        # A fitted ratio went through a division.
        if not self.granted or demand <= self.granted * (1 + 1e-9):
            return None
        terms = " + ".join(
            f"{s.hit_ratio:.3g} x {short_bytes(s.nbytes)}" for s in self.live if s.asked.persists
        )
        evict = (
            "its lines evict each other"
            if len(self.live) == 1
            else f"the lines of {len(self.live)} streams evict each other"
        )
        room = f"{short_bytes(self.granted)} of L2 are set aside"
        return f"thrashing: hit ratio x bytes is {terms} = {short_bytes(round(demand))}, {room}: {evict}"


_LEDGERS: WeakKeyDictionary[Device, _Ledger] = WeakKeyDictionary()
"""Of each device on which a persisting stream is open."""


def open_streams(device: Device) -> tuple[PersistingStream, ...]:
    """The persisting streams that are open on a device, which account for its set-aside and for their windows."""
    ledger = _LEDGERS.get(device)
    return () if ledger is None else tuple(ledger.live)


def idle_set_aside(device: Device) -> str | None:
    """That L2 is set aside for streams that are open, in one line for a measurement that has no window; None if nothing is."""
    ledger = _LEDGERS.get(device)
    if ledger is None or not ledger.granted:
        return None
    return (
        f"{short_bytes(ledger.granted)} of L2 are set aside for a persisting stream that is open, and this measurement has no window "
        "in them: a cost without a gain"
    )


@contextmanager
def persisting(device: Device, buffer: Buffer, **options: Any) -> Iterator[PersistingStream]:
    """A stream whose access-policy window lies on `buffer` and follows it when it moves.

    Several can be open at a time on one device. They share its set-aside: what is asked for is the sum of what each asks for, and
    fitted hit ratios are made from what the others leave, anew whenever a stream opens or closes. Options, with defaults as in `asked`:
    `hit_ratio`: share of the window's accesses that have the property `hit`, in [0, 1]; "fit": as many as the set-aside holds, and all of
    them where `hit` is not "persisting".
    `set_aside`: bytes, a share of L2 such as "25%", or "fit" (what holds the window, see `fit_set_aside`; with a fitted hit ratio, above
    half of L2, as "off" with a note), "max", or "off" (limit 0 and no window; a gain is measured against it). The driver rounds up to
    steps of L2/16; the result has the bytes that it granted.
    `hit`: access property of that share. With "streaming" and "normal" nothing persists, and "fit" sets nothing aside.
    `miss`: access property of the window's other accesses; "fit": normal under a fitted hit ratio below 1, else streaming.
    `window`: bytes under the window, from `offset` on; or the whole buffer, where one beyond `accessPolicyMaxWindowSize` is refused
    ("error") or covered from `offset` on as far as possible ("clamp").
    `offset`: bytes of the buffer before the window.
    `where`: the carrier of the window: "stream" every kernel on the stream, "graph" the kernels of a graph that the measured launch is
    captured into, "launch" each launch of a kernel of the catalogue.
    `allow_thrash`: hit ratios x bytes beyond the set-aside are wanted; else `PersistingStream.thrashing` says so.
    On exit, also after an error, the window is turned off and persisting lines are reset; after the last stream of a device the limit
    that was found is restored.
    Raises `BadWindow`: a hit ratio outside [0, 1], a set-aside beyond the maximum, a buffer of another kind or device, a window of no
    bytes, beyond the buffer or the largest window; set_aside="off" beside another stream; an argument that is none of the accepted words.
    Under MPS the set-aside is the server's, and `set_aside="fit"` takes it as it is.
    Raises `Unsupported`: the device has no persisting L2 (compute capability below 8.0, MIG), or under MPS another set-aside is asked for.
    """
    with device.current():
        reason = unsupported(device.facts, device.l2.set_aside)
        if reason is not None:
            raise Unsupported(reason)
        wanted = asked(device, buffer, **options)
        if device.facts.mps and wanted.set_aside != "fit":
            raise Unsupported(
                fixed_by_mps(f"{format_bytes(device.l2.set_aside())}, which no process changes")
            )
        stream = PersistingStream(device.streams.create(), device, buffer, wanted)
        ledger = _LEDGERS.get(device)
        if (
            ledger is None or not ledger.live
        ):  # one without streams was interrupted before its first
            ledger = _LEDGERS[device] = _Ledger(device, device.l2.set_aside())
    unfollow: Callable[[], None] | None = None
    try:
        with device.current():
            ledger.open(stream)
        unfollow = buffer.follow(stream.apply)
        yield stream
    finally:
        if unfollow is not None:
            unfollow()
        stream.close()
