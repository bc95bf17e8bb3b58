"""Made-up records of ci/bench/peers.py, for tests of what is computed from them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from peers_summary import summary

CALM: dict[str, Any] = {"sm_clock_hz": 1.98e9, "throttle_reasons": []}


def case(way: str, mib: int, value: float, wall: float = 1.0, **more: Any) -> dict[str, Any]:
    """One case as a worker answers it."""
    return {
        "way": way,
        "mib": mib,
        "value": value,
        "wall": wall,
        "samples": 100,
        "before": CALM,
        "after": CALM,
        **more,
    }


def run(
    cases: Sequence[dict[str, Any]], *, error: str | None = None, number: int = 1
) -> dict[str, Any]:
    """One worker's part of a record."""
    return {
        "round": number,
        "peer": "any",
        "error": error,
        "card": "card A",
        "cases": list(cases),
        "seconds": 1.0,
    }


def record(
    values: Mapping[tuple[str, int], Sequence[float]],
    walls: Mapping[tuple[str, int], float] | None = None,
) -> dict[str, Any]:
    """A record that holds these values by way and MiB, one process each."""
    runs = [
        run(
            [case(way, mib, value, (walls or {}).get((way, mib), 1.0), medians=[value, value])],
            number=i,
        )
        for (way, mib), series in values.items()
        for i, value in enumerate(series, 1)
    ]
    device = {"name": "NVIDIA H200", "simulated": False, "driver": "580.95.05"}
    found = {
        "kind": "peers",
        "device": device,
        "versions": {"cuda-bench": "0.3.0"},
        "ended": "2026-11-21T10:00:00+00:00",
        "runs": runs,
    }
    return {**found, "summary": summary(found)}
