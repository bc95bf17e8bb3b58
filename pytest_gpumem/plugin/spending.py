"""A total budget (`--gpumem-budget="60 s total"`), shared out over the tests that measure."""

from __future__ import annotations

from collections.abc import Iterable

import pytest

from pytest_gpumem.measuring.budget import Ledger, need
from pytest_gpumem.plugin.marks import BENCHMARK_FIXTURE, marks_of, uses
from pytest_gpumem.plugin.session import GpuSession
from pytest_gpumem.records.measurement import Measurement
from pytest_gpumem.settings import DEFAULT_BUDGET, SettingsError, marker_keywords, of_test


def ledger_of(session: GpuSession, items: Iterable[pytest.Item]) -> Ledger:
    """Divide the total budget among the tests, by their cost in the baseline."""
    known: dict[str, dict[str, Measurement]] = {}
    for rows in session.baseline.rows.values():
        for row in rows:
            if row.measurement is not None:
                known.setdefault(row.nodeid, {})[row.label] = row.measurement
    expected = {}
    for item in items:
        if not uses(item, BENCHMARK_FIXTURE):
            continue
        try:
            settings = of_test(session.settings, marker_keywords(marks_of(item)))
        except SettingsError:  # in a worker: the test fails by it, and measures nothing
            continue
        needs = {}
        for label, measurement in known.get(item.nodeid, {}).items():
            needs[label] = need(measurement, session.facts, settings.budget or DEFAULT_BUDGET)
        expected[item.nodeid] = needs
    total = session.settings.total_budget
    assert total is not None
    return Ledger(total / session.settings.processes, expected)  # a part for each process
