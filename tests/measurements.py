"""Measurements that no device took."""

from __future__ import annotations

from typing import Any

from pytest_gpumem.records.device import Conditions
from pytest_gpumem.records.measurement import Measurement, MovedBytes
from pytest_gpumem.units import MiB

TRIAD: dict[str, Any] = {
    "target": "triad",
    "moved_bytes": MovedBytes(512 * MiB, 256 * MiB),
    "footprint": 768 * MiB,
}
"""Changes of `measurement`: the work is a triad over 768 MiB."""


def measurement(**changes: Any) -> Measurement:
    """One placement of 1 ms, of work whose traffic is unknown, under conditions of which nothing is known."""
    given: dict[str, Any] = {
        "label": "",
        "target": "copy",
        "mode": "clean-cold",
        "sampler": "blocked",
        "sampler_reason": "",
        "placements": ((1e-3,),),
        "half_width": None,
        "moved_bytes": None,
        "footprint": None,
        "floor": 1e-6,
        "conditions": (Conditions(), Conditions()),
        "checked": True,
    }
    return Measurement(**given | changes)
