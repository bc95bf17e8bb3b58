"""Undo changes to persisting L2 that a test leaves behind, which slow what the next test measures:
a set-aside, windows on streams and persisting lines."""

from __future__ import annotations

from collections.abc import Hashable

from pytest_gpumem.devices.checks import unsupported
from pytest_gpumem.devices.protocol import Device, DeviceError, WindowSpec
from pytest_gpumem.memory.l2 import PersistingStream, open_streams
from pytest_gpumem.units import format_bytes

_LIMIT = "set-aside"

_Value = int | WindowSpec | None
State = dict[int | str, _Value]
"""The set-aside in bytes, and the window of each visible stream by its handle; None: no window."""

_DEFAULT_STREAMS = ("the legacy default stream", "the per-thread default stream")


class L2Watch:
    """The set-aside and the windows of a device, beside what persisting streams of tests change.

    A look costs a call for the limit and a call for each visible stream. Nothing is watched where
    the set-aside cannot be changed (compute capability below 8.0, MIG, MPS).
    """

    def __init__(self, device: Device) -> None:
        self._device = device
        self._works = unsupported(device.facts, device.l2.set_aside) is None
        self._expected: State = {}
        self._kept: dict[Hashable, State] = {}  # before the changes of owners that outlive a test
        self._forgotten: list[str] = []
        self.begin()

    def look(self) -> State:
        """Return the state without the changes of open persisting streams; empty if unreadable."""
        if not self._usable():
            return {}
        try:
            with self._device.current():
                return self._read()
        except DeviceError:  # a lost context; `settle` reports it
            return {}

    def _usable(self) -> bool:
        """True while streams and limits can be read."""
        return self._works and self._device.gone() is None

    def begin(self) -> None:
        """Start a test: remember the state that it finds."""
        self._expected = self.look() or self._expected

    def fresh(self) -> None:
        """Reset persisting lines, unless a live owner keeps a window."""
        if self._usable() and not any(self._kept.values()) and not open_streams(self._device):
            self._device.l2.reset_persisting()

    def keep(self, owner: Hashable, before: State) -> None:
        """Assign the changes since `before` to `owner`, which outlives this test."""
        kept = self._kept[owner] = {}
        for key, value in self.look().items():
            if value == before.get(key):
                continue
            if key != _LIMIT or key in before:
                kept[key] = before.get(key)
            self._expected[key] = value

    def ended(self, owner: Hashable) -> None:
        """Note that `owner` has ended: the state before its changes is expected again."""
        self._expected.update(self._kept.pop(owner, {}))

    def forgotten(self, stream: PersistingStream) -> None:
        """Note that a persisting stream was closed before its block ended."""
        self._forgotten.append(f"an open persisting_stream on {stream.buffer!r}, which was closed")

    def settle(self) -> tuple[str, bool] | None:
        """End a test: restore the state from before it and reset persisting lines. Returns what it
        left, a sentence without its subject, and whether all was put back; None for nothing."""
        changes, self._forgotten = self._forgotten, []
        if not self._usable():
            return None
        try:
            with self._device.current():  # a test may have left another
                now = self._read()
                left = self._differences(now)
                if not left and not changes:
                    return None
                for key in left:
                    self._put_back(key)
                self._device.l2.reset_persisting()
                remaining = self._differences(self._read())
        except DeviceError as error:
            self._works = False
            lost = "a device on which the L2 set-aside can be neither read nor put back"
            return "; ".join([*changes, f"{lost}: {error}"]), False
        changes += [self._described(key, now[key]) for key in left]
        text = "; ".join(changes) + "; put back as found, and persisting lines reset"
        if remaining:
            text += f"; except {', '.join(self._name(key) for key in remaining)}"
        return text, not remaining

    def _read(self) -> State:
        device, ours = self._device, open_streams(self._device)
        state: State = {}
        if not ours:
            state[_LIMIT] = device.l2.set_aside()
        handles = {stream.stream.handle for stream in ours}
        for stream in device.streams.visible():
            if stream.handle not in handles:
                try:
                    state[stream.handle] = device.l2.window(stream)
                except DeviceError:  # a stream that is gone, or one that takes no window
                    continue
        return state

    def _differences(self, now: State) -> list[int | str]:
        """Return the keys whose value has changed. A new stream had no window."""
        keys = []
        for key, value in now.items():
            if value != self._expected.get(key) and (key != _LIMIT or key in self._expected):
                keys.append(key)
        return keys

    def _put_back(self, key: int | str) -> None:
        before = self._expected.get(key)
        if isinstance(before, int):
            self._device.l2.request_set_aside(before)
            return
        for stream in self._device.streams.visible():
            if stream.handle == key:
                self._device.l2.set_window(stream, before)
                return

    def _described(self, key: int | str, value: _Value) -> str:
        before = self._expected.get(key)
        if isinstance(value, int) and isinstance(before, int):
            return f"an L2 set-aside of {format_bytes(value)} (found: {format_bytes(before)})"
        return f"{self._name(key)}: {_window(value)} (found: {_window(before)})"

    def _name(self, key: int | str) -> str:
        if key == _LIMIT:
            return "the set-aside"
        for stream, name in zip(self._device.streams.defaults(), _DEFAULT_STREAMS, strict=False):
            if stream.handle == key:
                return f"the window on {name}"
        return f"the window on stream 0x{key:x}"


def _window(window: _Value) -> str:
    if not isinstance(window, WindowSpec):
        return "none"
    return f"{format_bytes(window.nbytes)} at hit ratio {window.hit_ratio:.3g}"
