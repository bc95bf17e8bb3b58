"""The smallest slow-down that a baseline catches, as a session's header shows it."""

from __future__ import annotations

from dataclasses import replace
from datetime import datetime, timedelta, timezone

import pytest
from known_devices import H100
from msgspec import structs
from stored_rows import every, row, run

from pytest_gpumem.baselines.history import Baseline, SavedProcess, SavedRow, assemble
from pytest_gpumem.judging.screen import compared
from pytest_gpumem.judging.spread import difference
from pytest_gpumem.plugin.terminal import catches
from pytest_gpumem.records.measurement import Repeat


def _baseline() -> Baseline:
    rows = []
    for day in range(3):
        stored = row(latency=(200 + day / 100) * 1e-6)
        assert stored.measurement is not None
        process = SavedProcess(
            f"p{day}", datetime(2026, 11, 1, tzinfo=timezone.utc) + timedelta(days=day), None, H100
        )
        repeat = Repeat(stored.measurement.medians, stored.measurement.overhead)
        rows.append(
            SavedRow(stored.nodeid, structs.replace(stored.measurement, further=(repeat,)), process)
        )
    return assemble([run(one) for one in rows])


@pytest.mark.parametrize(("limit", "share"), [(None, 0.0), ("5%", 0.05), ("10 us", 0.05)])
def test_the_header_shows_what_a_run_like_the_newest_one_catches(
    limit: str | None, share: float
) -> None:
    baseline = _baseline()
    measurements = baseline.history(row().key, every).measurements
    of_a_row = compared(
        difference(structs.replace(measurements[-1], further=()), measurements), share
    ).catches
    assert catches(baseline, limit, 1) == pytest.approx(of_a_row, rel=1e-3)
    assert of_a_row > share
    of_two_processes = catches(baseline, limit, 2)
    assert of_two_processes is not None
    assert of_two_processes < of_a_row
    assert catches(Baseline(), limit, 1) is None


def test_measurements_by_another_sampler_do_not_count() -> None:
    """A run is not compared with them."""
    (rows,) = _baseline().rows.values()
    newest = rows[-1]
    others = tuple(
        replace(one, measurement=structs.replace(one.measurement, sampler="host"))
        for one in rows[:-1]
    )
    alone = catches(Baseline({newest.key: (newest,)}), "5%", 1)
    assert alone is not None
    assert catches(Baseline({newest.key: (*others, newest)}), "5%", 1) == alone
