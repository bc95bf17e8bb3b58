"""Measurements that the baseline holds and the session did not take."""

from __future__ import annotations

import os
from collections.abc import Generator, Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from pytest_gpumem.plugin.reported import FAILED, PASSED
from pytest_gpumem.records.row import ALLOWED, LOST, NOT_RUN, Missing, Status, selects

if TYPE_CHECKING:
    from pytest_gpumem.plugin.session import GpuSession

DESELECTED = "gpumem_deselected"
"""Key of xdist's `workeroutput`: the deselected tests that the baseline holds."""

_COMPLETE = (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED, pytest.ExitCode.NO_TESTS_COLLECTED)
"""How a session ends that collected all it was asked for."""


class LostHooks:
    """Finds what is missing at the end of the session. A lost measurement fails a strict session."""

    def __init__(self, session: GpuSession) -> None:
        self._session = session
        self._collected: set[str] = set()
        self._deselected: set[str] = set()

    def pytest_deselected(self, items: Iterable[pytest.Item]) -> None:
        self._deselected.update(item.nodeid for item in items)

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        self._collected.update(item.nodeid for item in session.items)

    @pytest.hookimpl(optionalhook=True)
    def pytest_xdist_node_collection_finished(self, node: Any, ids: Iterable[str]) -> None:
        self._collected.update(ids)

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node: Any) -> None:
        self._deselected.update(getattr(node, "workeroutput", {}).get(DESELECTED, ()))

    @pytest.hookimpl(wrapper=True, tryfirst=True)  # before results are written
    def pytest_sessionfinish(self, session: pytest.Session, exitstatus: int) -> Generator[None, object, object]:
        self._find(session, exitstatus)
        return (yield)

    def _find(self, session: pytest.Session, exitstatus: int) -> None:
        gpu = self._session
        known = gpu.baseline.expected(gpu.settings.mode)
        if gpu.is_worker:
            held = {row.nodeid for row in known.values()}
            gpu.config.workeroutput[DESELECTED] = sorted(self._deselected & held)  # type: ignore[attr-defined]
            return
        # A session under a profiler judges nothing.
        if session.config.option.collectonly or gpu.ranges.tool_attached():
            return
        taken = {row.key for row in gpu.rows if row.measurement is not None and gpu.rows.end(row.nodeid) in (PASSED, FAILED)}
        for key, row in known.items():
            if key in taken or (why := self._why(row.nodeid, complete=exitstatus in _COMPLETE)) is None:
                continue
            status, reason = why
            one = Missing(row.nodeid, row.label, status, reason)
            if status == LOST and any(one.named(name) for name in gpu.settings.allow_lost):
                one = Missing(row.nodeid, row.label, ALLOWED, reason)
            gpu.missing.append(one)
        gpu.remarks += self._useless(taken)
        lost = any(one.status == LOST for one in gpu.missing)
        if lost and gpu.settings.strict and session.exitstatus in (pytest.ExitCode.OK, pytest.ExitCode.NO_TESTS_COLLECTED):
            session.exitstatus = pytest.ExitCode.TESTS_FAILED

    def _why(self, nodeid: str, *, complete: bool) -> tuple[Status, str] | None:
        """Status and reason of a measurement that is missing; None if nobody asked for its test."""
        end = self._session.rows.end(nodeid)
        if end is not None:
            return LOST, "its test passed without it" if end == PASSED else f"its test {self._session.rows.explain(nodeid)}"
        if nodeid in self._deselected:
            return NOT_RUN, "deselected"
        if nodeid in self._collected:
            return NOT_RUN, "the session ended before it"
        if not complete or not self._asked_for(nodeid):
            return None
        if self._ignored(nodeid):
            return NOT_RUN, "its file is ignored"
        return LOST, "its test is no longer collected"

    def _asked_for(self, nodeid: str) -> bool:
        """True if the command line selects a test that is not there. What -k or -m would do with it is not known."""
        config = self._session.config
        option = config.option
        if option.keyword or option.markexpr or getattr(option, "lf", False):
            return False
        if any(nodeid.startswith(prefix) for prefix in option.deselect or ()):
            return False
        return any(name == "." or selects(name, nodeid) for name in map(self._nodeid, config.args))

    def _nodeid(self, argument: str) -> str:
        """An argument of the command line as a node id, which begins at the root folder."""
        config = self._session.config
        path, *names = argument.split("::")
        file = os.path.relpath(config.invocation_params.dir / path, config.rootpath)
        return "::".join((Path(file).as_posix(), *names))

    def _ignored(self, nodeid: str) -> bool:
        config = self._session.config
        file = config.rootpath / nodeid.partition("::")[0]
        within = [file, *(folder for folder in file.parents if config.rootpath in folder.parents)]
        return any(config.hook.pytest_ignore_collect(collection_path=path, config=config) for path in within)

    def _useless(self, taken: set[str]) -> Iterator[str]:
        """Remarks about names in `allow_lost` that allow nothing."""
        gpu = self._session
        origin = gpu.settings.origins.get("allow_lost")
        for name in gpu.settings.allow_lost if gpu.baseline.rows else ():
            named = [key for key, rows in gpu.baseline.rows.items() if name == key or selects(name, rows[-1].nodeid)]
            if not named:
                yield f"{origin}: the baseline holds no measurement {name!r}"
            elif taken.issuperset(named):
                yield f"{origin}: {name!r} is measured; the name is no longer needed"
