"""What code that is not ours leaves of persisting L2: a set-aside, windows on streams, lines. Found and put back.

A set-aside or a window that outlives a test slows what the next test measures: on H100 the largest set-aside, with no window at all,
makes a saturated kernel 2.2 times slower.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass

from pytest_gpumem.devices.checks import unsupported
from pytest_gpumem.devices.protocol import Device, DeviceError, Stream, WindowSpec
from pytest_gpumem.memory.l2 import PersistingStream, open_streams
from pytest_gpumem.units import format_bytes

_LIMIT = "set-aside"

_Value = int | WindowSpec | None
State = dict[int | str, _Value]
"""The set-aside in bytes, and the window of each stream that can be seen, by its handle; None: it has none."""

_DEFAULT_STREAMS = ("the legacy default stream", "the per-thread default stream")


@dataclass(frozen=True)
class Leftover:
    """What was left, and whether it is gone."""

    text: str
    """What was left, what had been found, and what was done; without its subject, which is the test."""
    repaired: bool


class Watch:
    """Knows what is to be set aside and under windows on one device, beside what our own persisting streams change.

    What it finds when it is made is where the process started, whoever set it. Each look costs one call for the limit and one for each
    stream that can be seen: the two default streams, the current one, and a handful of the device's own. Nothing is watched where the
    set-aside cannot be changed (compute capability below 8.0, MIG, MPS).

    Args:
        device: the open device.
    """

    def __init__(self, device: Device) -> None:
        self._device = device
        self._works = unsupported(device.facts, device.l2.set_aside) is None
        self._found: State = {}
        self._kept: dict[Hashable, State] = {}
        """What those that live longer than a test have changed: what was there before."""
        self._ending: dict[Hashable, State] = {}
        self._forgotten: list[str] = []
        self.begin()

    def look(self) -> State:
        """What there is now; nothing where it cannot be read. What our own open streams account for is left out."""
        if not self._works:
            return {}
        try:
            return self._read()
        except DeviceError:  # of a lost context, which `settle` tells
            return {}

    def begin(self) -> None:
        """A test begins: what there is now is what it finds."""
        if found := self.look():
            self._found = found

    def fresh(self) -> None:
        """Turn the lines to normal that somebody left persisting, which nobody can ask for; not while others keep a window.

        Raises:
            DeviceError: the device is lost.
        """
        if self._works and not any(self._kept.values()) and not open_streams(self._device):
            self._device.l2.reset_persisting()

    def keep(self, owner: Hashable, before: State) -> None:
        """What changed since `before` belongs to `owner`, which lives on: it is no leftover of this test."""
        now = self.look()
        changed = {key for key in now if now[key] != before.get(key)}
        self._kept[owner] = {key: before.get(key) for key in changed if key != _LIMIT or key in before}
        self._found.update({key: now[key] for key in changed})

    def ending(self, owner: Hashable) -> None:
        """`owner` is about to put back what it changed."""
        self._ending[owner] = self.look()

    def ended(self, owner: Hashable) -> None:
        """`owner` is gone, and what it had changed is to be as before it.

        Of an owner that changed things before the device was opened, that is what it has put back.
        """
        before, kept = self._ending.pop(owner, {}), self._kept.pop(owner, None)
        if kept is None:
            now = self.look()
            kept = {key: now[key] for key in now if key in before and now[key] != before[key]}
        self._found.update(kept)

    def forgotten(self, stream: PersistingStream) -> None:
        """A persisting stream was closed whose block had not ended."""
        self._forgotten.append(f"an open persisting_stream on {stream.buffer!r}, which was closed")

    def settle(self) -> Leftover | None:
        """A test has ended: put back what it left, and turn persisting lines to normal; None if all is as found."""
        said, self._forgotten = self._forgotten, []
        if not self._works:
            return None
        try:
            now = self._read()
            left = self._differences(now)
            if not left and not said:
                return None
            for key in left:
                self._put_back(key)
            self._device.l2.reset_persisting()
            stubborn = self._differences(self._read())
        except DeviceError as error:
            self._works = False
            what = "".join(f"{one}; " for one in said)
            return Leftover(f"{what}a device on which the L2 set-aside can be neither read nor put back: {error}", repaired=False)
        said += [self._described(key, now[key]) for key in left]
        text = "; ".join(said) + "; put back as found, and persisting lines reset"
        if stubborn:
            text += f"; except {', '.join('the set-aside' if k == _LIMIT else f'the window on {self._name(k)}' for k in stubborn)}"
        return Leftover(text, repaired=not stubborn)

    def _read(self) -> State:
        device, ours = self._device, open_streams(self._device)
        state: State = {} if ours else {_LIMIT: device.l2.set_aside()}
        handles = {stream.stream.handle for stream in ours}
        for stream in device.streams.visible():
            if stream.handle not in handles:
                try:
                    state[stream.handle] = device.l2.window(stream)
                except DeviceError:  # a stream that is gone, or one that takes no window
                    continue
        return state

    def _differences(self, now: State) -> list[int | str]:
        """What is not as found. A stream that is new had no window; a set-aside that an open stream held back was not found."""
        return [key for key in now if now[key] != self._found.get(key) and (key != _LIMIT or key in self._found)]

    def _put_back(self, key: int | str) -> None:
        found = self._found.get(key)
        if isinstance(found, int):
            self._device.l2.request_set_aside(found)
            return
        stream = self._stream(key)
        if stream is not None:
            self._device.l2.set_window(stream, found)

    def _stream(self, key: int | str) -> Stream | None:
        return next((stream for stream in self._device.streams.visible() if stream.handle == key), None)

    def _described(self, key: int | str, value: _Value) -> str:
        found = self._found.get(key)
        if isinstance(value, int) and isinstance(found, int):
            return f"an L2 set-aside of {format_bytes(value)} (found: {format_bytes(found)})"
        left = f"a window of {_size(value)}" if value is not None else "no window"
        return f"{left} on {self._name(key)} (found: {'none' if found is None else f'one of {_size(found)}'})"

    def _name(self, key: int | str) -> str:
        for stream, name in zip(self._device.streams.defaults(), _DEFAULT_STREAMS, strict=False):
            if stream.handle == key:
                return name
        return f"stream 0x{key:x}"


def _size(window: _Value) -> str:
    assert isinstance(window, WindowSpec)
    return f"{format_bytes(window.nbytes)} at hit ratio {window.hit_ratio:.3g}"
