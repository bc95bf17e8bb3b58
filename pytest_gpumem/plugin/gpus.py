"""The GPUs of a session: each of them in turn as device 0, and several for a test that asks for them."""

from __future__ import annotations

from collections.abc import Collection, Sequence

import pytest

from pytest_gpumem.devices.opening import DeviceChoice
from pytest_gpumem.devices.protocol import Unsupported
from pytest_gpumem.plugin.marks import PEER_FIXTURE, marks_of, uses
from pytest_gpumem.settings import marker_keywords, of_marker

VISIBLE = "CUDA_VISIBLE_DEVICES"  # the driver reads it once, when a process initialises CUDA
_MIG = "MIG-"


def orders(gpus: Sequence[str], alike: Collection[str], visible: str | None) -> list[str]:
    """The values of `CUDA_VISIBLE_DEVICES` under which each GPU of one model in turn is device 0, and the others follow.

    A process sees one MIG instance at most, the first in the list: of several, each is a GPU of its own.
    `gpus`: UUIDs of the GPUs that this process sees, in its order.
    `alike`: those of the model of the first.
    `visible`: `CUDA_VISIBLE_DEVICES` of this process, with indices, UUIDs or MIG instances; None if it is not set.
    """
    if gpus and gpus[0].startswith(_MIG):
        listed = [name.strip() for name in (visible or "").split(",")]
        return list(dict.fromkeys(name for name in listed if name.startswith(_MIG))) or [gpus[0]]
    return [
        ",".join((first, *(other for other in gpus if other != first)))
        for first in gpus
        if first in alike
    ]


def reserved(item: pytest.Item, chosen: DeviceChoice) -> tuple[str, ...]:
    """UUIDs of the GPUs that a test has for itself: one, two if it uses `peer_buffer`, or as many as its marker says.
    Raises `Unsupported`: the marker asks for more than there are.
    """
    asked = of_marker(marker_keywords(marks_of(item)), "gpus")
    there = max(1, len(chosen.gpus))
    if asked is not None and asked > there:
        raise Unsupported(f"the test needs {asked} GPUs (gpus={asked}); this process sees {there}")
    own = chosen.gpus or ((chosen.facts.uuid,) if chosen.facts.uuid is not None else ())
    return own[: max(asked or 1, 2 if uses(item, PEER_FIXTURE) else 1)]
