"""Undo changes to persisting L2 that a test leaves behind, which slow what the next test measures:
a set-aside, windows on streams and persisting lines."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from contextlib import suppress

from pytest_gpumem.devices.protocol import Device, DeviceError, Stream, WindowSpec
from pytest_gpumem.memory.l2 import PersistingStream, open_streams, why_no_persisting_l2
from pytest_gpumem.units import format_bytes

State = dict[str, int | WindowSpec | None]
"""The set-aside in bytes, and by name the window of each visible stream; None: no window."""
_LIMIT = "the set-aside"
_DEFAULT_STREAMS = ("the legacy default stream", "the per-thread default stream")


class L2Watch:
    """The set-aside and the windows of a device, beside what persisting streams of tests change.

    Nothing is watched where the set-aside cannot be changed (compute capability below 8.0, MIG,
    MPS).
    """

    def __init__(self, device: Device) -> None:
        self._device = device
        self._works = why_no_persisting_l2(device) is None
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
        return self._works and self._device.gone() is None

    def begin(self) -> None:
        self._expected = self.look() or self._expected

    def fresh(self) -> None:
        """Reset persisting lines, unless a live owner keeps a window."""
        if self._usable() and not any(self._kept.values()) and not open_streams(self._device):
            self._device.l2.reset_persisting()

    def keep(self, owner: Hashable, before: State) -> None:
        """Assign the changes since `before` to `owner`, which outlives this test."""
        now = self.look()
        kept = self._kept[owner] = {}
        for key in _changed(before, now):
            kept[key], self._expected[key] = before.get(key), now[key]

    def ended(self, owner: Hashable) -> None:
        """Expect the state before the changes of `owner` again."""
        self._expected.update(self._kept.pop(owner, {}))

    def forgotten(self, stream: PersistingStream) -> None:
        self._forgotten.append(f"an open persisting_stream on {stream.buffer!r}, which was closed")

    def settle(self) -> tuple[str, bool] | None:
        """End a test: restore the state from before it. Return what it left, without a subject, and
        whether all was put back; None for nothing."""
        changes, self._forgotten = self._forgotten, []
        if not self._usable():
            return None
        try:
            with self._device.current():  # a test may have left another
                now = self._read()
                left = _changed(self._expected, now)
                if not left and not changes:
                    return None
                self._put_back(left)
                self._device.l2.reset_persisting()
                remaining = _changed(self._expected, self._read())
        except DeviceError as error:
            self._works = False
            lost = "a device on which the L2 set-aside can be neither read nor put back"
            return "; ".join([*changes, f"{lost}: {error}"]), False
        for key in left:
            what = f"an L2 set-aside of {_text(now[key])}"
            if key != _LIMIT:
                what = f"{key}: {_text(now[key])}"
            changes.append(f"{what} (found: {_text(self._expected.get(key))})")
        text = "; ".join(changes) + "; put back as found, and persisting lines reset"
        if remaining:
            text += f"; except {', '.join(remaining)}"
        return text, not remaining

    def _streams(self) -> dict[str, Stream]:
        streams = self._device.streams
        ours = {stream.stream.handle for stream in open_streams(self._device)}
        defaults = [stream.handle for stream in streams.defaults()]
        visible = {}
        for stream in streams.visible():
            name = f"stream 0x{stream.handle:x}"
            if stream.handle in defaults:
                name = _DEFAULT_STREAMS[defaults.index(stream.handle)]
            if stream.handle not in ours:
                visible[f"the window on {name}"] = stream
        return visible

    def _read(self) -> State:
        state: State = {}
        if not open_streams(self._device):
            state[_LIMIT] = self._device.l2.set_aside()
        for name, stream in self._streams().items():
            with suppress(DeviceError):  # a stream that is gone, or one that takes no window
                state[name] = self._device.l2.window(stream)
        return state

    def _put_back(self, keys: Sequence[str]) -> None:
        streams = self._streams()
        for key in keys:
            before = self._expected.get(key)
            if isinstance(before, int):
                self._device.l2.request_set_aside(before)
            elif key in streams:
                self._device.l2.set_window(streams[key], before)


def _changed(before: State, now: State) -> list[str]:
    """Return the keys whose value has changed. A new stream had no window."""
    keys = []
    for key, value in now.items():
        if value != before.get(key) and (key != _LIMIT or key in before):
            keys.append(key)
    return keys


def _text(value: int | WindowSpec | None) -> str:
    if value is None:
        return "none"
    if isinstance(value, int):
        return format_bytes(value)
    return f"{format_bytes(value.nbytes)} at hit ratio {value.hit_ratio:.3g}"
