"""Find and undo changes to persisting L2 that a test leaves behind: a set-aside, windows on streams, persisting lines.

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
State = dict[
    int | str, _Value
]  # the set-aside in bytes, and the window of each stream that can be seen, by its handle; None: it has none

_DEFAULT_STREAMS = ("the legacy default stream", "the per-thread default stream")


@dataclass(frozen=True)
class Leftover:
    """A change that a test left, and whether it was undone."""

    text: str  # the change, the state before, and the repair. The sentence's subject, the test, is missing.
    repaired: bool


class L2Watch:
    """Knows what is to be set aside and under windows on one device, beside what our own persisting streams change.

    What it finds when it is made is where the process started, whoever set it. Each look costs one call for the limit and one for each
    stream that can be seen: the two default streams, the current one, and a handful of the device's own. Nothing is watched where the
    set-aside cannot be changed (compute capability below 8.0, MIG, MPS).
    """

    def __init__(self, device: Device) -> None:
        self._device = device
        self._works = unsupported(device.facts, device.l2.set_aside) is None
        self._found: State = {}
        self._kept: dict[
            Hashable, State
        ] = {}  # the state before the changes of owners that outlive a test
        self._ending: dict[Hashable, State] = {}
        self._forgotten: list[str] = []
        self.begin()

    def look(self) -> State:
        """The state now, without the changes of open persisting streams; empty if it cannot be read."""
        if not self._works:
            return {}
        try:
            with self._device.current():
                return self._read()
        except DeviceError:  # a lost context; `settle` reports it
            return {}

    def begin(self) -> None:
        """Start a test: remember the state that it finds."""
        if found := self.look():
            self._found = found

    def fresh(self) -> None:
        """Reset persisting lines, which no call can list, unless a live owner keeps a window. Raises `DeviceError`: the device is lost."""
        if self._works and not any(self._kept.values()) and not open_streams(self._device):
            self._device.l2.reset_persisting()

    def keep(self, owner: Hashable, before: State) -> None:
        """Assign the changes since `before` to `owner`, which outlives this test: they are no leftovers."""
        now = self.look()
        changed = {key for key in now if now[key] != before.get(key)}
        self._kept[owner] = {
            key: before.get(key) for key in changed if key != _LIMIT or key in before
        }
        self._found.update({key: now[key] for key in changed})

    def ending(self, owner: Hashable) -> None:
        """Note that `owner` is about to undo its changes."""
        self._ending[owner] = self.look()

    def ended(self, owner: Hashable) -> None:
        """Note that `owner` has ended: the state before its changes is expected again. For an owner that made changes before the device was
        opened, that is the state which it restored."""
        before, kept = self._ending.pop(owner, {}), self._kept.pop(owner, None)
        if kept is None:
            now = self.look()
            kept = {key: now[key] for key in now if key in before and now[key] != before[key]}
        self._found.update(kept)

    def forgotten(self, stream: PersistingStream) -> None:
        """Note that a persisting stream was closed before its block ended."""
        self._forgotten.append(f"an open persisting_stream on {stream.buffer!r}, which was closed")

    def settle(self) -> Leftover | None:
        """End a test: restore the state that it found and reset persisting lines. Returns None if nothing changed."""
        found, self._forgotten = self._forgotten, []
        if not self._works:
            return None
        try:
            with self._device.current():  # a test may have left another
                now = self._read()
                left = self._differences(now)
                if not left and not found:
                    return None
                for key in left:
                    self._put_back(key)
                self._device.l2.reset_persisting()
                remaining = self._differences(self._read())
        except DeviceError as error:
            self._works = False
            before = "".join(f"{one}; " for one in found)
            return Leftover(
                f"{before}a device on which the L2 set-aside can be neither read nor put back: {error}",
                repaired=False,
            )
        found += [self._described(key, now[key]) for key in left]
        text = "; ".join(found) + "; put back as found, and persisting lines reset"
        if remaining:
            text += f"; except {', '.join('the set-aside' if k == _LIMIT else f'the window on {self._name(k)}' for k in remaining)}"
        return Leftover(text, repaired=not remaining)

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
        """Keys whose value has changed. A new stream had no window; the set-aside counts only if it was read at the start."""
        return [
            key
            for key in now
            if now[key] != self._found.get(key) and (key != _LIMIT or key in self._found)
        ]

    def _put_back(self, key: int | str) -> None:
        found = self._found.get(key)
        if isinstance(found, int):
            self._device.l2.request_set_aside(found)
            return
        stream = self._stream(key)
        if stream is not None:
            self._device.l2.set_window(stream, found)

    def _stream(self, key: int | str) -> Stream | None:
        return next(
            (stream for stream in self._device.streams.visible() if stream.handle == key), None
        )

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
