"""What a user asks of a persisting stream, checked against the device before anything changes."""

from __future__ import annotations

from dataclasses import dataclass
from numbers import Real
from reprlib import repr as shortened
from typing import Any, Literal

from pytest_gpumem.devices.protocol import AccessProperty, Device
from pytest_gpumem.memory.buffers import Buffer
from pytest_gpumem.records.device import DeviceFacts
from pytest_gpumem.units import QuantityError, format_bytes, parse_bytes, parse_share

Where = Literal["stream", "graph", "launch"]
"""What carries the window: the stream, the kernels of a captured graph, or each launch."""

_WHERE = ("stream", "graph", "launch")
_MISS = (AccessProperty.STREAMING.value, AccessProperty.NORMAL.value)
_SET_ASIDE = '"fit", "max", "off", a size such as "8 MiB" and a share of L2 such as "25%"'


class BadWindow(ValueError):
    """An access-policy window or a set-aside that cannot be."""


@dataclass(frozen=True)
class Asked:
    """A window with its set-aside, as asked for."""

    nbytes: int
    """Bytes under the window."""
    hit_ratio: float | None
    """None: as much as the set-aside holds."""
    set_aside: Literal["fit", "max", "off"] | int
    miss: AccessProperty
    where: Where
    allow_thrash: bool
    clamped_from: int | None
    """Bytes of the buffer, where the window is shorter."""


def asked(
    device: Device,
    buffer: Any,
    *,
    hit_ratio: Any,
    set_aside: Any,
    miss: Any,
    window: Any,
    where: Any,
    allow_thrash: Any,
) -> Asked:
    """Check what `persisting` was given. Raises `BadWindow` as it says."""
    facts = device.facts
    if not isinstance(buffer, Buffer) or not buffer.kind.on_device:
        given = repr(buffer) if isinstance(buffer, Buffer) else in_one_line(buffer)
        raise BadWindow(f"a persisting window needs a buffer of device memory, not {given}")
    if buffer.device is not device:
        raise BadWindow(f"{buffer!r} is memory of another device than {facts.name}, on which the stream is")
    fitted = isinstance(hit_ratio, str) and hit_ratio == "fit"  # an array compares its elements
    if not fitted and not _is_ratio(hit_ratio):
        raise BadWindow(f'hit_ratio={hit_ratio!r}; accepted are "fit" and a number from 0 to 1')
    if miss not in _MISS:
        raise BadWindow(f'miss={miss!r}; accepted are "streaming" and "normal"')
    if where not in _WHERE:
        raise BadWindow(f'where={where!r}; accepted are "stream", "graph" and "launch"')
    if not isinstance(allow_thrash, bool):
        raise BadWindow(f"allow_thrash={allow_thrash!r}; accepted are True and False")
    nbytes = _window_bytes(facts, buffer, window)
    return Asked(
        nbytes=nbytes,
        hit_ratio=None if fitted else float(hit_ratio),
        set_aside=_set_aside(facts, set_aside),
        miss=AccessProperty(miss),
        where=where,
        allow_thrash=allow_thrash,
        clamped_from=buffer.nbytes if nbytes < buffer.nbytes else None,
    )


def in_one_line(value: Any) -> str:
    """What was given, for a message: shortened, because arrays print their content over many lines."""
    return " ".join(shortened(value).split())


def _is_ratio(value: Any) -> bool:
    return isinstance(value, Real) and not isinstance(value, bool) and 0.0 <= float(value) <= 1.0


def _window_bytes(facts: DeviceFacts, buffer: Buffer, window: Any) -> int:
    if window not in ("error", "clamp"):
        raise BadWindow(f'window={window!r}; accepted are "error" and "clamp"')
    largest = facts.access_policy_max_window_bytes
    if buffer.nbytes > largest and window == "error":
        raise BadWindow(
            f"{buffer!r} is larger than the largest window of {facts.name}, {format_bytes(largest)}; "
            'persisting_stream(..., window="clamp") lays the window over its first bytes'
        )
    return min(buffer.nbytes, largest)


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
        raise BadWindow(f"set_aside={words} is above the maximum of {facts.name}, {format_bytes(largest)}")
    return size or "off"
