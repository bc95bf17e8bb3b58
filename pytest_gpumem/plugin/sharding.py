"""`--gpumem-shard`: this session runs a part of the tests, and its results say which."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Mapping
from typing import Any

import msgspec
import pytest

from pytest_gpumem.measuring.budget import need
from pytest_gpumem.plugin.marks import BENCHMARK_FIXTURE, uses
from pytest_gpumem.plugin.state import GpuSession
from pytest_gpumem.records.row import Verdict
from pytest_gpumem.records.schema import from_plain, to_plain
from pytest_gpumem.reporting.concerns import Place
from pytest_gpumem.reporting.exports import properties
from pytest_gpumem.runs.shards import ERROR, FAILED, KEY, SKIPPED, Ended, Shard, digest, divided
from pytest_gpumem.settings import DEFAULT_BUDGET

DIVISION = "gpumem_division"  # key of xdist's `workeroutput`: how a worker divided the tests


class ShardHooks:
    """Leaves the tests of other shards out, and adds to the results what a merge needs."""

    def __init__(self, session: GpuSession, shard: tuple[int, int], places: Callable[[], Mapping[str, Place]]) -> None:
        """`shard`: its number, from 1 on, and how many there are. `places`: gives where the reported tests are defined."""
        self._session = session
        self._index, self._count = shard
        self._places = places
        self._pytest: pytest.Session | None = None
        self._own: list[str] = []
        self._division: dict[str, Any] = {"collected": digest(()), "total": 0, "known": 0}
        self._ends: dict[str, Ended] = {}

    def pytest_sessionstart(self, session: pytest.Session) -> None:
        self._pytest = session

    @pytest.hookimpl(trylast=True)  # once all that others leave out is gone
    def pytest_collection_modifyitems(self, config: pytest.Config, items: list[pytest.Item]) -> None:
        costs = self._costs(items)
        shards = divided(costs, self._count)
        others = [item for item in items if shards[item.nodeid] != self._index]
        self._division = {
            "collected": digest(costs),
            "total": len(costs),
            "known": sum(cost is not None for cost in costs.values()),
            "family": self._session.compared(costs),
            "elsewhere": sorted({item.nodeid for item in others}),
        }
        self._session.elsewhere = frozenset(self._division["elsewhere"])
        self._session.whole_suite = self._division["family"]
        config.hook.pytest_deselected(items=others)
        items[:] = [item for item in items if shards[item.nodeid] == self._index]
        self._own = [item.nodeid for item in items]

    def _costs(self, items: Iterable[pytest.Item]) -> dict[str, float | None]:
        """By test, the seconds that it is expected to measure, by the first run of each of its rows: later ones change nothing."""
        gpu, known = self._session, dict[str, float]()
        for rows in gpu.baseline.rows.values():
            if rows:
                cost = need(rows[0].measurement, gpu.facts, gpu.settings.budget or DEFAULT_BUDGET)
                known[rows[0].nodeid] = known.get(rows[0].nodeid, 0.0) + cost
        return {item.nodeid: known.get(item.nodeid) if uses(item, BENCHMARK_FIXTURE) else None for item in items}

    def pytest_report_collectionfinish(self) -> list[str]:
        total, known = self._division["total"], self._division["known"]
        of = f"{len(self._own)} of {total} tests; the baseline has the cost of {known} of the {total}"
        return [f"gpumem: shard {self._index} of {self._count}: {of}"] if total else []

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        before = self._ends.get(report.nodeid) if report.when != "setup" else None
        outcome, text = before.outcome if before is not None else None, before.text if before is not None else ""
        if report.failed:
            outcome = FAILED if report.when == "call" else ERROR
            text = f"{text}\n\n{report.longreprtext}".strip()
        elif report.skipped:
            outcome = "xfailed" if hasattr(report, "wasxfail") else SKIPPED
            text = report.longrepr[2] if isinstance(report.longrepr, tuple) else report.longreprtext
        elif report.when == "call" and outcome not in (FAILED, ERROR):
            outcome, text = "passed", ""  # whatever its subtests skipped
        seconds = (before.seconds if before is not None else 0.0) + report.duration
        given = [(str(name), str(value)) for name, value in report.user_properties]
        self._ends[report.nodeid] = Ended(report.nodeid, outcome, seconds, text, properties=given)

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_sessionfinish(self, session: pytest.Session) -> Generator[None, object, object]:
        if self._session.is_worker:
            self._session.config.workeroutput[DIVISION] = {**self._division, "withheld": self._withheld()}  # type: ignore[attr-defined]
        elif session.exitstatus == pytest.ExitCode.NO_TESTS_COLLECTED and self._division["total"]:
            session.exitstatus = pytest.ExitCode.OK  # others have all the tests
        return (yield)

    # xdist

    @pytest.hookimpl(optionalhook=True)
    def pytest_xdist_node_collection_finished(self, ids: list[str]) -> None:
        self._own = list(ids)

    @pytest.hookimpl(optionalhook=True, tryfirst=True)
    def pytest_testnodedown(self, node: Any) -> None:
        if (division := getattr(node, "workeroutput", {}).get(DIVISION)) is not None:
            self._division = division
            self._session.elsewhere = frozenset(division["elsewhere"])
            self._session.whole_suite = division["family"]
            self._session.open_family(())
            self._session.withheld |= {key: from_plain(verdict, Verdict) for key, verdict in division["withheld"].items()}

    def _withheld(self) -> dict[str, Any]:
        return {key: to_plain(verdict) for key, verdict in self._session.withheld.items()}

    # pytest-benchmark

    @pytest.hookimpl(optionalhook=True)
    def pytest_benchmark_update_json(self, output_json: dict[str, Any]) -> None:
        gpu, places = self._session, self._places()
        fresh: dict[str, list[tuple[str, str]]] = {}
        for row in gpu.rows:
            fresh.setdefault(row.nodeid, []).extend((name, str(value)) for name, value in properties(row, gpu.facts))
        tests = []
        for nodeid in self._own:
            end, place = self._ends.get(nodeid, Ended(nodeid)), places.get(nodeid)
            named = {**dict(end.properties), **dict(fresh.get(nodeid, ()))}  # a row may have been judged again
            at = {} if place is None else {"file": place.file, "line": place.line}
            tests.append(msgspec.structs.replace(end, properties=list(named.items()), **at))
        code = 0 if self._pytest is None else int(self._pytest.exitstatus)
        shard = Shard(self._index, self._count, self._division["collected"], code, tests, self._division.get("family", 1), self._withheld())
        output_json[KEY] = msgspec.to_builtins(shard)
