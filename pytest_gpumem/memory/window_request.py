"""The arguments of a persisting stream: checked, and fitted to the device."""

from __future__ import annotations

from collections.abc import Mapping
from numbers import Real
from reprlib import repr as shortened
from typing import Any, Literal

from pytest_gpumem.devices.protocol import AccessProperty, Device
from pytest_gpumem.memory.buffers import Buffer
from pytest_gpumem.records.device import DeviceFacts
from pytest_gpumem.units import QuantityError, ShownError, format_bytes, parse_bytes, parse_share

Where = Literal["stream", "graph", "launch"]
"""The carrier of the window: the stream, the kernels of a captured graph, or each launch."""
SetAside = Literal["fit", "max", "off"] | int

_WHERE = ("stream", "graph", "launch")
_MISS = ("fit", "streaming", "normal")
_HIT = ("persisting", "streaming", "normal")
_WORDS: Mapping[str, SetAside] = {"fit": "fit", "max": "max", "off": "off"}
_SET_ASIDE = '"fit", "max", "off", a size such as "8 MiB" and a share of L2 such as "25%"'
FREE_STEPS = 3  # steps of L2/16 that a saturated kernel beside the window hardly misses


class BadWindow(ShownError, ValueError):
    """An access-policy window or a set-aside that cannot be."""


def window_request(
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
) -> dict[str, Any]:
    """Return the checked arguments of `l2.persisting` as fields of a `PersistingStream`."""
    facts = device.facts
    if not isinstance(buffer, Buffer) or not buffer.kind.on_device:
        given = repr(buffer) if isinstance(buffer, Buffer) else _in_one_line(buffer)
        raise BadWindow(f"a persisting window needs a buffer of device memory, not {given}")
    if buffer.device is not device:
        raise BadWindow(
            f"{buffer!r} is memory of another device than {facts.name}, on which the stream is"
        )
    fitted = isinstance(hit_ratio, str) and hit_ratio == "fit"  # an array compares its elements
    is_number = isinstance(hit_ratio, Real) and not isinstance(hit_ratio, bool)
    if not fitted and not (is_number and 0.0 <= float(hit_ratio) <= 1.0):
        raise BadWindow(f'hit_ratio={hit_ratio!r}; accepted are "fit" and a number from 0 to 1')
    for name, value, words in (("hit", hit, _HIT), ("miss", miss, _MISS), ("where", where, _WHERE)):
        if not isinstance(value, str) or value not in words:
            accepted = '"{}", "{}" and "{}"'.format(*words)
            raise BadWindow(f"{name}={value!r}; accepted are {accepted}")
    if not isinstance(allow_thrash, bool):
        raise BadWindow(f"allow_thrash={allow_thrash!r}; accepted are True and False")
    start = _bytes("offset", offset, "accepted are bytes and")
    if start >= buffer.nbytes:
        raise BadWindow(f"offset={format_bytes(start)} is not inside {buffer!r}")
    nbytes = _window_bytes(facts, buffer, window, start)
    size = _set_aside(facts, set_aside)
    all_fitted = fitted and size == "fit" and hit == "persisting"
    return {
        "nbytes": nbytes,
        "offset": start,
        "fixed_ratio": None if fitted else float(hit_ratio),
        "wanted": size,
        "hit": AccessProperty(hit),
        "miss": None if miss == "fit" else AccessProperty(miss),
        "where": where,
        "allow_thrash": allow_thrash,
        "clamped": isinstance(window, str) and window == "clamp" and nbytes < buffer.nbytes - start,
        # A fitted window of more than L2/2 can be slower than none, so none is set.
        "too_large": all_fitted and nbytes > facts.l2_bytes // 2,
    }


def _in_one_line(value: Any) -> str:
    """The text of a value without line breaks, which arrays have."""
    return " ".join(shortened(value).split())


def _bytes(name: str, value: Any, accepted: str) -> int:
    """Raises `BadWindow`, which names what is `accepted` beside a size."""
    try:
        return parse_bytes(value)
    except (QuantityError, TypeError):  # TypeError: of an array of several numbers
        text = f'{name}={_in_one_line(value)}; {accepted} a size such as "8 MiB"'
        raise BadWindow(text) from None


def _window_bytes(facts: DeviceFacts, buffer: Buffer, window: Any, offset: int) -> int:
    largest, rest = facts.access_policy_max_window_bytes, buffer.nbytes - offset
    of_device = f"the largest window of {facts.name}, {format_bytes(largest)}"
    if isinstance(window, str) and window in ("error", "clamp"):
        if rest > largest and window == "error":
            raise BadWindow(
                f"{buffer!r} is larger than {of_device}; "
                'persisting_stream(..., window="clamp") lays the window over its first bytes'
            )
        return min(rest, largest)
    size = _bytes("window", window, 'accepted are "error", "clamp", bytes and')
    if not size:
        raise BadWindow('window=0 bytes; set_aside="off" measures without a window')
    if size > largest:
        raise BadWindow(f"window={format_bytes(size)} is above {of_device}")
    if size > rest:
        text = f"window={format_bytes(size)}"
        if offset:
            text += f" at offset {format_bytes(offset)}"
        raise BadWindow(f"{text} goes beyond the end of {buffer!r}")
    return size


def _set_aside(facts: DeviceFacts, given: Any) -> SetAside:
    if isinstance(given, str) and given in _WORDS:
        return _WORDS[given]
    try:
        if isinstance(given, str) and given.rstrip().endswith("%"):
            size = round(parse_share(given) * facts.l2_bytes)
            text = f"{given.strip()} of L2, {format_bytes(size)},"
        else:
            size = parse_bytes(given)
            text = format_bytes(size)
    except (QuantityError, TypeError):
        raise BadWindow(f"set_aside={given!r}; accepted are {_SET_ASIDE}") from None
    largest = facts.persisting_l2_max_bytes
    if size > largest:
        maximum = f"the maximum of {facts.name}, {format_bytes(largest)}"
        raise BadWindow(f"set_aside={text} is above {maximum}")
    return size or "off"


def fit_set_aside(facts: DeviceFacts, nbytes: int) -> int:
    """Return the set-aside for a window of `nbytes`, in steps of L2/16.

    It is the fewest steps that hold the window, with which a launch takes longer at some
    placements. One more costs nothing as the second or third step. As the fourth it pays if less
    than half of the third is free. Later it costs time
    (`ci/records/nvidia-h200/l2_placements.json`). Never above L2/2 or the device's maximum.
    """
    step = facts.l2_step_bytes
    steps = -(-nbytes // step)
    if steps + 1 <= FREE_STEPS or (steps == FREE_STEPS and 2 * (steps * step - nbytes) < step):
        steps += 1
    return min(steps, min(facts.l2_bytes // 2, facts.persisting_l2_max_bytes) // step) * step


def fit_hit_ratio(set_aside: int, nbytes: int) -> float:
    """Return the largest hit ratio that does not thrash (Best Practices Guide, 9.2.2.2)."""
    return min(1.0, set_aside / nbytes)
