"""Result files as tests of commands write them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from known_devices import H100 as KNOWN
from measurements import measurement
from msgspec.structs import replace

from pytest_gpumem.outcomes import Outcome
from pytest_gpumem.records.device import DeviceFacts
from pytest_gpumem.records.limits import Limits
from pytest_gpumem.records.measurement import MovedBytes
from pytest_gpumem.records.row import Omission, Row, Verdict
from pytest_gpumem.records.schema import document

H100 = replace(KNOWN, driver="580.95.05")


class Folder:
    """Writes result files whose latencies differ as processes do."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._rng = np.random.default_rng(11)

    def row(
        self,
        latency: float = 268e-6,
        name: str = "test_triad",
        *,
        spread: float = 1e-4,
        **changes: Any,
    ) -> Row:
        measured = {
            key: changes.pop(key)
            for key in ("mode", "sampler", "conditions", "profiled")
            if key in changes
        }
        medians = latency * np.exp(self._rng.normal(0, spread) + self._rng.normal(0, spread, 8))
        placements = tuple((float(m),) * 3 for m in medians)
        triad = {
            "target": "triad",
            "half_width": 1e-8,
            "moved_bytes": MovedBytes(2 << 28, 1 << 28),
            "footprint": 3 << 28,
            "overhead": 2e-6,
        }
        taken = measurement(
            label=changes.get("label", ""), placements=placements, floor=1.28e-6, **triad | measured
        )
        verdict = Verdict(Outcome.PASS, "no limit set")
        return Row(
            **{
                "nodeid": f"tests/test_a.py::{name}",
                "limits": Limits(),
                "verdict": verdict,
                "measurement": taken,
                **changes,
            }
        )

    def write(
        self,
        name: str,
        rows: Sequence[Row],
        facts: DeviceFacts = H100,
        missing: Sequence[Omission] = (),
        **settings: Any,
    ) -> str:
        """A `--benchmark-json` file."""
        rows = [
            replace(row, verdict=replace(row.verdict, simulated=facts.simulated)) for row in rows
        ]
        value = {
            "datetime": "2026-11-20T18:00:00.123+00:00",
            "commit_info": {"id": "abc", "dirty": False},
            "benchmarks": [],
            "gpumem": document(facts, rows, settings, missing),
        }
        return self.put(name, value)

    def runs(
        self,
        name: str,
        count: int,
        latency: float = 268e-6,
        facts: DeviceFacts = H100,
        strict: bool = False,
        **changes: Any,
    ) -> str:
        """Several processes; gives their pattern."""
        for index in range(count):
            self.write(f"{name}-{index}.json", [self.row(latency, **changes)], facts, strict=strict)
        return f"{name}-*.json"

    def put(self, name: str, value: object) -> str:
        (self.path / name).write_text(value if isinstance(value, str) else json.dumps(value))
        return name
