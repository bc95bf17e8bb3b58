"""One process of an experiment, run as a script: pytest collects its tests, imports their libraries, and waits until it may use the GPU.

It imports nothing of this package, so that the tree under test brings its own. Two inherited pipes carry lines of JSON: it reports that it
is ready, receives the tests to run, reports the end of each test, and reports how the session ended. It ends when the other end is closed.
PYTEST_DONT_REWRITE
"""

from __future__ import annotations

import importlib
import json
import os
import sys
import threading
from collections.abc import Callable, Generator
from pathlib import Path
from typing import Any

import pytest

NAME = "gpumem-experiment"  # as `settings.EXPERIMENT`
REASON = 500  # characters of a failure's reason that are kept
OVERRIDDEN: dict[str, Any] = {
    # It writes no file of the user's, and compares with none.
    **dict.fromkeys(("xmlpath", "benchmark_save", "benchmark_compare")),
    "benchmark_autosave": False,
    "store_durations": False,
    "benchmark_compare_fail": [],
    # It runs what it is told, whatever failed in earlier sessions.
    **dict.fromkeys(
        ("lf", "failedfirst", "newfirst", "cacheclear", "stepwise", "stepwise_skip"), False
    ),
    # It measures alone, and goes on after a failure, which is that of one test.
    "dist": "no",
    "numprocesses": None,
    "tx": [],
    "maxfail": 0,
    "continue_on_collection_errors": True,
    # Each process runs the same tests in the same order.
    "randomly_reorganize": False,
    "randomly_reset_seed": False,
}
"""Values of pytest's options, whatever the arguments and the ini file say; by their names in `config.option`."""
WITHOUT = (
    "lfplugin",
    "nfplugin",
)  # plugins of pytest that write into its cache what failed, and what ran
DECIDED = (
    0,
    1,
    5,
)  # pytest's exit codes of a session that ran: all passed, some failed, nothing to run


class Gate:
    """A pytest plugin that waits before the first test, and reports the outcome of each. pytest registers it before those of others,
    and calls it after them where no order is given."""

    def __init__(self, job: dict[str, Any]) -> None:
        self.__name__ = NAME  # pytest registers a plugin under this name
        self._commands = os.fdopen(job["reads"], "r", encoding="utf-8")
        self._answers = os.fdopen(job["writes"], "w", encoding="utf-8")
        self._job = job
        self._tests: list[str] | None = None
        self._collected: list[pytest.Item] = []  # before others deselect some
        self._named: list[
            str
        ] = []  # node ids of tests that the arguments name, where some of them may be missing
        self._unneeded: Callable[[Path], bool] = lambda path: False
        self._failed = False  # a test or a file failed

    def say(self, **words: Any) -> None:
        """One line to the coordinator."""
        self._answers.write(json.dumps(words) + "\n")
        self._answers.flush()

    def leave(self, code: int) -> None:
        """Report how the session ended, and end the process. The libraries' own clean-up is skipped: it costs GPU time and may crash, and
        the driver frees the process's memory."""
        job = self._job
        self.say(exit=code, strays=strays(job["roots"] + job["spared"], job["foreign"]))
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(0)

    def leave_early(self, code: int) -> None:
        """End the process once the results are written, unless its summary alone says why the session failed. No one reads the summary,
        and the next process waits for this one: Hypothesis alone imports itself for the summary, which takes a second if Python may not
        write its bytecode."""
        if code in DECIDED and (code != 1 or self._failed):
            self.leave(code)

    def _wait(self, config: pytest.Config) -> None:
        _import_libraries(config)
        self.say(ready=True, strict=_ini(config, "gpumem_strict"))
        line = self._commands.readline()
        if not line:
            os._exit(1)
        asked = json.loads(line)
        self._tests = asked["tests"]
        threading.Thread(target=self._end_with_the_coordinator, daemon=True).start()

    def _end_with_the_coordinator(self) -> None:
        # Blocks until the coordinator closes the pipe, and with it the need for an answer.
        self._commands.read()
        os._exit(1)

    @pytest.hookimpl(tryfirst=True)  # before the plugins read them
    def pytest_configure(self, config: pytest.Config) -> None:
        for name, value in OVERRIDDEN.items():
            if hasattr(config.option, name):
                setattr(config.option, name, value)
        if self._job["lenient"] and not config.option.pyargs:
            self._leave_out_missing(config)

    def _leave_out_missing(self, config: pytest.Config) -> None:
        """Leave out what the arguments name and this tree lacks: base has not the tests that a change adds."""
        here = [
            name
            for name in map(str, config.args)
            if os.path.exists(config.invocation_params.dir / name.partition("::")[0])
        ]
        paths = {name for name in here if "::" not in name}
        self._named = [
            name for name in here if "::" in name and name.partition("::")[0] not in paths
        ]
        config.args[:] = dict.fromkeys(name.partition("::")[0] for name in here)

    def pytest_collection(self, session: pytest.Session) -> None:
        plugins = session.config.pluginmanager
        for name in filter(plugins.has_plugin, WITHOUT):
            plugins.unregister(name=name)
        plugins.register(
            _BeforeSummary(self, session)
        )  # as late as can be: its hook is to be the first
        if self._job["early"]:
            self._wait(session.config)
        # The tests of a process that starts later are fewer.
        of_tests = {
            session.config.rootpath / nodeid.partition("::")[0]
            for nodeid in self._job["tests"] or ()
        }
        if of_tests and all(file.is_file() for file in of_tests):
            needed = {file.resolve() for file in of_tests}
            # A file that the command line names must be found.
            self._unneeded = lambda path: (
                path.is_file() and path.resolve() not in needed and not session.isinitpath(path)
            )

    def pytest_ignore_collect(self, collection_path: Path) -> bool | None:
        """Leave out files without a test that may run: to import them takes time."""
        return self._unneeded(collection_path) or None

    @pytest.hookimpl(tryfirst=True)
    def pytest_collection_modifyitems(
        self, config: pytest.Config, items: list[pytest.Item]
    ) -> None:
        if self._named:
            folder = config.invocation_params.dir
            of_names = {os.path.realpath(folder / name.partition("::")[0]) for name in self._named}
            named = selected(items, self._named, folder)
            items[:] = [
                item
                for item in items
                if os.path.realpath(item.path) not in of_names or item in named
            ]
        self._collected = list(items)

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtestloop(self, session: pytest.Session) -> None:
        if not self._job["early"]:
            self._wait(session.config)
        if self._tests is not None:
            items = selected(session.items, self._tests, session.config.invocation_params.dir)
            # pytest-split divides the tests of fewer files in another way: what it deselects here may be a test that is to run.
            chosen = set(self._tests)
            session.items[:] = dict.fromkeys(
                (*items, *(item for item in self._collected if item.nodeid in chosen))
            )

    @pytest.hookimpl(tryfirst=True, optionalhook=True)
    def pytest_benchmark_generate_machine_info(self) -> dict[str, Any]:
        return {}  # unused, and py-cpuinfo starts a process for it, which takes a second

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed:
            self._report(
                report.nodeid,
                "failed",
                f"its collection failed: {_last_line(report.longreprtext)}",
                report.longreprtext,
            )

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            self._report(
                report.nodeid, "failed", _last_line(report.longreprtext), report.longreprtext
            )
        elif report.skipped:
            reason = (
                report.longrepr[2]
                if isinstance(report.longrepr, tuple)
                else getattr(report, "wasxfail", "")
            )
            self._report(report.nodeid, "skipped", str(reason)[:REASON])
        if report.when == "teardown":
            self.say(finished=report.nodeid)

    def _report(self, nodeid: str, outcome: str, why: str, text: str = "") -> None:
        """At once, so that a crash loses no report."""
        self._failed = self._failed or outcome == "failed"
        self.say(nodeid=nodeid, outcome=outcome, why=why, text=text)


class _BeforeSummary:
    """The first of the hooks that print the summary, once every file is written: it does not return."""

    def __init__(self, gate: Gate, session: pytest.Session) -> None:
        self._gate = gate
        self._session = session

    @pytest.hookimpl(wrapper=True)
    def pytest_terminal_summary(self) -> Generator[None, object, object]:
        self._gate.leave_early(int(self._session.exitstatus))
        return (yield)


def selected(items: list[pytest.Item], tests: list[str], folder: Path) -> list[pytest.Item]:
    """The items that node ids select as on pytest's command line. Their files are relative to pytest's root folder, or to `folder`."""
    chosen, within = (
        set(tests),
        tuple(f"{name.rstrip('/')}{end}" for name in tests for end in ("[", "::", "/")),
    )
    places = [
        (os.path.realpath(folder / file), inside)
        for file, _, inside in (name.partition("::") for name in tests)
    ]

    def named(item: pytest.Item) -> bool:
        if item.nodeid in chosen or item.nodeid.startswith(within):
            return True
        path, own = os.path.realpath(item.path), item.nodeid.partition("::")[2]
        return any(
            path == file and (own == inside or own.startswith((f"{inside}[", f"{inside}::")))
            for file, inside in places
            if inside
        )

    return [item for item in items if named(item)]


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
    except (
        ImportError,
        KeyError,
        AttributeError,
    ):  # a tree whose plugin is older, or is switched off
        return
    prepare()


def strays(roots: list[str], foreign: list[str]) -> list[str]:
    """Modules that come from the other side, as sentences.

    `foreign`: folders of which nothing may be imported, but from below `roots`.
    """
    strays = []
    within = [os.path.realpath(folder) + os.sep for folder in roots]
    outside = [os.path.realpath(folder) + os.sep for folder in foreign]
    real: dict[str, str] = {}  # hundreds of modules lie in some folders
    for name, module in sorted(sys.modules.items() if foreign else ()):
        file = getattr(module, "__file__", None)
        if not isinstance(file, str) or file == __file__:
            continue
        folder, base = os.path.split(file)
        if folder not in real:
            real[folder] = os.path.realpath(folder)
        path = os.path.join(real[folder], base)
        if os.path.islink(path):
            path = os.path.realpath(path)
        if path.startswith(tuple(outside)) and not path.startswith(tuple(within)):
            strays.append(f"{name} from {path}")
    return strays


def main() -> None:
    """`experiment_process.py JSON`: reads, writes (descriptors), early, tests, lenient, cwd, roots, foreign, spared, arguments."""
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
