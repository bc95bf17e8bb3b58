"""The live line, with a terminal that keeps what was written."""

from __future__ import annotations

import io
import time
from collections.abc import Generator
from types import SimpleNamespace
from typing import Any

import pytest

from pytest_gpumem.plugin import terminal
from pytest_gpumem.plugin.marks import BENCHMARK_FIXTURE
from pytest_gpumem.plugin.reported import Rows


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def made(file: io.StringIO, **option: object) -> tuple[terminal.ProgressFeature, SimpleNamespace]:
    reporter = SimpleNamespace(
        _tw=SimpleNamespace(_file=file, fullwidth=60), ensure_newline=lambda: None
    )
    reporter.write_line = lambda line: file.write(line + "\n")
    options = {"capture": "fd", "usepdb": False, "log_cli_level": None, **option}
    plugins = SimpleNamespace(hasplugin=lambda name: True)
    config = SimpleNamespace(
        getoption=lambda name, default=None: options[name],
        getini=lambda name: False,
        pluginmanager=plugins,
    )
    session: Any = SimpleNamespace(config=config, rows=Rows())
    hooks = terminal.ProgressFeature(session, reporter)  # type: ignore[arg-type]
    items = [
        SimpleNamespace(nodeid=f"t.py::{name}", fixturenames=[BENCHMARK_FIXTURE]) for name in "ab"
    ]
    items.append(SimpleNamespace(nodeid="t.py::other", fixturenames=[]))
    hooks.selected(SimpleNamespace(items=items))  # type: ignore[arg-type]
    return hooks, session


def run(hook: Generator[None, object, object], file: io.StringIO, text: str) -> None:
    """What pytest does around its own output."""
    next(hook)
    file.write(text)
    with pytest.raises(StopIteration):
        hook.send(None)


@pytest.fixture(autouse=True)
def _a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")


def test_what_pytest_writes_never_meets_the_line() -> None:
    file = Terminal()
    hooks, _ = made(file)
    run(hooks.pytest_runtest_logstart("t.py::a"), file, "<start>")
    report: Any = SimpleNamespace(when="teardown", nodeid="t.py::a")
    with hooks.logged(report):
        file.write("<report>")
    run(hooks.pytest_runtest_logfinish(), file, "<finish>")
    hooks.end()
    file.write("<end>")
    shown = file.getvalue()
    wiped = f"{terminal._SAVE}{terminal._BELOW}{terminal._RESTORE}"
    for said in ("<report>", "<finish>", "<end>"):
        assert shown[: shown.index(said)].endswith(wiped)
    assert "gpumem: 0 of 2 tests, 0 samples: t.py::a" in shown
    assert "gpumem: 1 of 2 tests, 0 samples, about" in shown
    assert shown.count(terminal._ROOM) == 3
    # Nothing is drawn once the session is over.
    run(hooks.pytest_runtest_logfinish(), file, "<late>")
    assert file.getvalue().endswith("<late>")


@pytest.mark.parametrize(
    ("file", "option"),
    [(io.StringIO(), {}), (Terminal(), {"capture": "no"}), (Terminal(), {"usepdb": True})],
)
def test_elsewhere_a_plain_line_now_and_then(
    file: io.StringIO, option: dict[str, object], monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [1000.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    hooks, _ = made(file, **option)
    run(hooks.pytest_runtest_logstart("t.py::a"), file, "")
    assert file.getvalue() == ""
    now[0] += terminal.EVERY
    run(hooks.pytest_runtest_logfinish(), file, "")
    run(hooks.pytest_runtest_logfinish(), file, "")
    assert file.getvalue() == "gpumem: 0 of 2 tests, 0 samples: t.py::a\n"


def test_a_dumb_terminal_gets_plain_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "dumb")
    file = Terminal()
    hooks, _ = made(file)
    run(hooks.pytest_runtest_logstart("t.py::a"), file, "")
    assert file.getvalue() == ""
