"""One process of a duet, run as a script: pytest collects its tests, imports their libraries, and waits until it may use the GPU.

It imports nothing of this package, so that the tree under test brings its own. Two inherited pipes carry lines of
JSON: it reports that it is ready, receives the tests to run, and reports how the session ended. It ends when the other end is closed.
PYTEST_DONT_REWRITE
"""

from __future__ import annotations

import importlib
import json
import os
import sys
import threading
from typing import Any

import pytest

REASON = 500  # characters of a failure's reason that are kept
WAYS = "_GPUMEM_WAYS"  # as `settings.WAYS`
UNWRITTEN = ("xmlpath", "benchmark_save", "benchmark_autosave")
"""Options of others, such as an ini file's, by which each process would write a file of the user's."""
DECIDED = (0, 1, 5)  # pytest's exit codes of a session that ran: all passed, some failed, nothing to run


class Gate:
    """A pytest plugin that waits before the first test, and records the outcome of each."""

    def __init__(self, job: dict[str, Any]) -> None:
        self._commands = os.fdopen(job["reads"], "r", encoding="utf-8")
        self._answers = os.fdopen(job["writes"], "w", encoding="utf-8")
        self._job = job
        self._early: bool = job["early"]
        self._tests: list[str] | None = None
        self.outcomes: dict[str, list[str]] = {}
        """By node id of each test that did not pass: "failed" or "skipped", and why."""

    def say(self, **words: Any) -> None:
        """One line to the coordinator."""
        self._answers.write(json.dumps(words) + "\n")
        self._answers.flush()

    def leave(self, code: int) -> None:
        """Report how the session ended, and end the process. The libraries' own clean-up is skipped: it costs GPU time and may crash, and
        the driver frees the process's memory."""
        job = self._job
        self.say(exit=code, outcomes=self.outcomes, strays=strays(job["names"], job["roots"], job["foreign"], job["spared"]))
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(0)

    def _wait(self, config: pytest.Config) -> None:
        _import_libraries(config)
        self.say(ready=True, strict=_ini(config, "gpumem_strict"))
        line = self._commands.readline()
        if not line:
            os._exit(1)
        asked = json.loads(line)
        self._tests = asked["tests"]
        os.environ[WAYS] = json.dumps(asked["ways"])
        threading.Thread(target=self._end_with_the_coordinator, daemon=True).start()

    def _end_with_the_coordinator(self) -> None:
        # Blocks until the coordinator closes the pipe, and with it the need for an answer.
        self._commands.read()
        os._exit(1)

    @pytest.hookimpl(tryfirst=True)  # before the plugins read them
    def pytest_configure(self, config: pytest.Config) -> None:
        for name in UNWRITTEN:
            if hasattr(config.option, name):
                setattr(config.option, name, None)
        if getattr(config.option, "numprocesses", None) or getattr(config.option, "dist", "no") != "no":
            raise pytest.UsageError("gpumem duet measures one process at a time; leave out -n and --dist")

    @pytest.hookimpl(tryfirst=True)
    def pytest_sessionstart(self, session: pytest.Session) -> None:
        session.config.pluginmanager.register(_Leaving(self))  # as late as can be: its hook is to be the last of those that come last

    @pytest.hookimpl(tryfirst=True)
    def pytest_collection(self, session: pytest.Session) -> None:
        if self._early:
            self._wait(session.config)

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtestloop(self, session: pytest.Session) -> None:
        if not self._early:
            self._wait(session.config)
        if self._tests is not None:
            chosen, within = set(self._tests), tuple(f"{name.rstrip('/')}{end}" for name in self._tests for end in ("[", "::", "/"))
            session.items[:] = [item for item in session.items if item.nodeid in chosen or item.nodeid.startswith(within)]

    @pytest.hookimpl(tryfirst=True, optionalhook=True)
    def pytest_benchmark_generate_machine_info(self) -> dict[str, Any]:
        return {}  # unused, and py-cpuinfo starts a process for it, which takes a second

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed:
            self.outcomes[report.nodeid] = ["failed", f"its collection failed: {_last_line(report.longreprtext)}"]

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            self.outcomes[report.nodeid] = ["failed", _last_line(report.longreprtext)]
        elif report.skipped:
            reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else getattr(report, "wasxfail", "")
            self.outcomes[report.nodeid] = ["skipped", str(reason)[:REASON]]


class _Leaving:
    """Ends the process once the results are written. No one reads the summary, and the next process waits for this one: Hypothesis alone
    imports itself for the summary, which takes a second if Python may not write its bytecode."""

    def __init__(self, gate: Gate) -> None:
        self._gate = gate

    @pytest.hookimpl(trylast=True)
    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        if int(session.exitstatus) in DECIDED:
            self._gate.leave(int(session.exitstatus))


def _last_line(text: str) -> str:
    """The message of an assertion or an error, whose lines pytest marks with an E; else the first line."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    marked = [line[1:].strip() for line in lines if line.startswith("E ")]
    return (marked or lines or ["no message"])[0][:REASON]


def _ini(config: pytest.Config, name: str) -> str | None:
    try:
        value: str | None = config.getini(name)
    except (KeyError, ValueError):  # a tree without this option
        return None
    return value


def _import_libraries(config: pytest.Config) -> None:
    """Import the libraries that opening the device needs, if the tree's plugin names them."""
    try:
        session = config.stash[importlib.import_module("pytest_gpumem.plugin.state").SESSION]
        prepare = session.chosen.prepare
    except (ImportError, KeyError, AttributeError):  # a tree whose plugin is older, or is switched off
        return
    prepare()


def strays(names: list[str], roots: list[str], foreign: list[str], spared: list[str]) -> list[str]:
    """Modules that come from the other side, as sentences.
    `names`: top-level modules that this side brings.
    `roots`: where those may come from.
    `foreign`: folders of which nothing may be imported,
    `spared`: but from below these.
    """
    found, real = [], dict[str, str]()
    roots, foreign, spared = ([os.path.realpath(folder) + os.sep for folder in folders] for folders in (roots, foreign, spared))
    for name, module in sorted(sys.modules.items()):
        file = getattr(module, "__file__", None)
        if not isinstance(file, str) or file == __file__:
            continue
        folder, base = os.path.split(file)
        if folder not in real:  # hundreds of modules lie in some folders
            real[folder] = os.path.realpath(folder)
        path = os.path.join(real[folder], base)
        path = os.path.realpath(path) if os.path.islink(path) else path
        own = name.partition(".")[0] in names
        if (own and not _below(path, roots)) or (_below(path, foreign) and not _below(path, roots + spared)):
            found.append(f"{name} from {path}")
    return found


def _below(path: str, folders: list[str]) -> bool:
    return any(path.startswith(folder) for folder in folders)


def main() -> None:
    """`duet_worker.py JSON`: reads, writes (file descriptors), early, cwd, names, roots, foreign, spared, arguments."""
    job = json.loads(sys.argv[1])
    for descriptor in (job["reads"], job["writes"]):
        os.set_inheritable(descriptor, False)
    # Python put this file's folder there; its modules have ordinary names that would shadow a project's own.
    here = os.path.dirname(os.path.realpath(__file__))
    sys.path[:] = [entry for entry in sys.path if os.path.realpath(entry or ".") != here]
    if job["cwd"]:
        sys.path.insert(0, job["cwd"])
    sys.argv = ["pytest", *job["arguments"]]
    gate = Gate(job)
    gate.leave(int(pytest.main(job["arguments"], plugins=[gate])))


if __name__ == "__main__":
    main()
