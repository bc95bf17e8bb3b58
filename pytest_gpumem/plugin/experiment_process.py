"""The pytest of one side of an experiment, a script that collects once and forks to measure.

An inherited socket carries lines of JSON: tests to run come in, records go out. Where a fork could
not use the GPU, this process measures itself and ends. It imports nothing of this package before
pytest does, so that the tree under test brings its own.
PYTEST_DONT_REWRITE
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import importlib
import json
import os
import socket
import sys
import threading
import time
import warnings
from collections.abc import Generator, Iterable
from pathlib import Path
from typing import Any

import pytest

NAME = "gpumem-experiment"  # as `settings.EXPERIMENT`
SESSION = "gpumem-session"  # as `marks.SESSION_PLUGIN`
REASON = 500  # characters of a failure's reason that are kept
OVERRIDDEN: dict[str, Any] = {
    # It writes no file of the user's, and compares with none.
    "xmlpath": None,
    "benchmark_save": None,
    "benchmark_compare": None,
    "benchmark_autosave": False,
    "benchmark_compare_fail": [],
    "store_durations": False,
    # It runs what its controller requests, whatever failed in earlier sessions.
    "lf": False,
    "failedfirst": False,
    "newfirst": False,
    "cacheclear": False,
    "cacheshow": True,  # then pytest writes nothing into its cache
    "stepwise": False,
    "stepwise_skip": False,
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
"""Values of `config.option`, whatever the arguments and the ini file say."""
MEASURING = (
    "numpy.random",
    "pytest_gpumem.memory.l2_leftovers",
    "pytest_gpumem.plugin.gpu_benchmark",
    "pytest_gpumem.plugin.results",
)
"""Modules that a measurement imports: each process would take 0.1 s for it."""


class Experiment:
    """The plugin of this pytest, registered before all others."""

    def __init__(self, job: dict[str, Any]) -> None:
        self.__name__ = NAME  # pytest registers a plugin under this name
        self._job, self._begun = job, time.monotonic()
        self._socket = socket.socket(fileno=job["socket"])
        self._requests = self._socket.makefile("r", encoding="utf-8")
        self._answers = self._socket.makefile("w", encoding="utf-8")
        self._named: list[str] = []  # tests that the arguments name, some of which may be missing
        self._collected: list[pytest.Item] = []  # before others deselect some
        self._reports: list[dict[str, str]] = []  # failures of the collection
        self._measures = False  # this process runs tests
        self._failed = False  # a test or a file failed

    def _say(self, **words: Any) -> None:
        self._answers.write(json.dumps(words) + "\n")
        self._answers.flush()

    def _say_reports(self) -> None:
        while self._reports:
            self._say(**self._reports.pop(0))

    def leave(self, code: int) -> None:
        # The libraries' clean-up costs GPU time and may crash; the driver frees the memory.
        self._say_reports()
        self._say(exit=code, strays=strays(self._job["roots"], self._job["foreign"]))
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(0)

    # Collecting

    @pytest.hookimpl(tryfirst=True)  # before the plugins read them
    def pytest_configure(self, config: pytest.Config) -> None:
        for name, value in OVERRIDDEN.items():
            if hasattr(config.option, name):
                setattr(config.option, name, value)
        if self._job["tests"] is not None:
            # To import other files takes time.
            files = set()
            for test in self._job["tests"]:
                for folder in (config.rootpath, config.invocation_params.dir):
                    files.add(str(folder / _file_of(test)))
            config.args[:] = sorted(file for file in files if os.path.exists(file))
        elif self._job["lenient"] and not config.option.pyargs:
            self._leave_out_missing(config)

    def _leave_out_missing(self, config: pytest.Config) -> None:
        # Base has no test that is new.
        folder = config.invocation_params.dir
        files: dict[str, None] = {}
        for name in config.args:
            file = _file_of(name)
            if os.path.exists(folder / file):
                files[file] = None
                if file not in config.args:
                    self._named.append(name)
        config.args[:] = files

    @pytest.hookimpl(tryfirst=True)
    def pytest_collection_modifyitems(
        self, config: pytest.Config, items: list[pytest.Item]
    ) -> None:
        if self._named:
            folder = config.invocation_params.dir
            files = {os.path.realpath(folder / _file_of(name)) for name in self._named}
            left = set(selected(items, self._named, folder))
            left.update(item for item in items if os.path.realpath(item.path) not in files)
            items[:] = [item for item in items if item in left]
        self._collected = list(items)

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed:
            why = f"its collection failed: {_last_line(report.longreprtext)}"
            self._report(report.nodeid, "failed", why, report.longreprtext)

    # Forking

    @pytest.hookimpl(wrapper=True, tryfirst=True)  # before all that belongs to running tests
    def pytest_runtestloop(self, session: pytest.Session) -> Generator[None, object, object]:
        gpumem = session.config.pluginmanager.get_plugin(SESSION)  # None where it is off
        if gpumem is not None:
            gpumem.chosen.prepare()
            for name in MEASURING:
                with contextlib.suppress(ImportError):  # of another version of the plugin
                    importlib.import_module(name)
        tests = self._next_tests()
        self._measures = True
        self._say(pid=os.getpid())
        self._say_reports()
        threading.Thread(target=self._end_with_the_controller, daemon=True).start()
        if tests is not None:
            items = selected(session.items, tests, session.config.invocation_params.dir)
            # pytest-split divides the tests of fewer files in another way: what it deselects may
            # be a test that is to run.
            items += [item for item in self._collected if item.nodeid in tests]
            session.items[:] = dict.fromkeys(items)
        return (yield)

    def _next_tests(self) -> list[str] | None:
        """Wait for requests. Return the tests of one in the process that runs them."""
        while True:
            line = self._requests.readline()
            if not line:
                os._exit(0)
            tests: list[str] | None = json.loads(line)
            if not self._job["forks"] or uses_cuda():
                self._say(anew=time.monotonic() - self._begun)
                return tests
            sys.stdout.flush()
            sys.stderr.flush()
            with warnings.catch_warnings():
                # Python warns of the idle threads of NumPy and others.
                warnings.simplefilter("ignore")
                pid = os.fork()
            if pid == 0:
                return tests
            _, status = os.waitpid(pid, 0)
            self._answers.write("\n")  # a crash may leave half a line
            self._say(ended=os.waitstatus_to_exitcode(status))

    def _end_with_the_controller(self) -> None:
        # Blocks until the controller closes the socket.
        self._requests.read()
        os._exit(1)

    # Measuring

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        text = report.longreprtext
        if report.failed:
            self._report(report.nodeid, "failed", _last_line(text), text)
        elif report.skipped:
            reason = getattr(report, "wasxfail", "")
            if isinstance(report.longrepr, tuple):
                reason = report.longrepr[2]
            self._report(report.nodeid, "skipped", str(reason)[:REASON])
        if report.when == "teardown":
            self._say(finished=report.nodeid)

    def _report(self, nodeid: str, outcome: str, why: str, text: str = "") -> None:
        self._failed = self._failed or outcome == "failed"
        self._reports.append({"nodeid": nodeid, "outcome": outcome, "why": why, "text": text})
        if self._measures:
            self._say_reports()  # at once, so that a crash loses none

    @pytest.hookimpl(tryfirst=True, optionalhook=True)
    def pytest_benchmark_generate_machine_info(self) -> dict[str, Any]:
        return {}  # unused, and py-cpuinfo starts a process for it, which takes a second

    @pytest.hookimpl(wrapper=True, optionalhook=True)
    def pytest_benchmark_update_json(
        self, output_json: dict[str, Any]
    ) -> Generator[None, object, object]:
        result = yield
        self._say(results=output_json.get("gpumem"))
        return result

    @pytest.hookimpl(wrapper=True)  # registered early: within the wrapper that prints the summary
    def pytest_sessionfinish(self, session: pytest.Session) -> Generator[None, object, object]:
        # Before the summary, unless that alone says why the session failed.
        result = yield
        code = int(session.exitstatus)
        if code in (0, 5) or (code == 1 and self._failed):
            self.leave(code)
        return result


def uses_cuda() -> bool:
    """Return whether this process has initialised CUDA: a fork of it could not use the GPU."""
    try:
        driver = ctypes.CDLL("libcuda.so.1", os.RTLD_NOLOAD | os.RTLD_NOW)
    except OSError:  # nobody has loaded it
        return False
    return int(driver.cuDeviceGetCount(ctypes.byref(ctypes.c_int()))) == 0


def _file_of(name: str) -> str:
    return name.partition("::")[0]


def selected(items: list[pytest.Item], tests: Iterable[str], folder: Path) -> list[pytest.Item]:
    """Return the items that node ids select as on a command line in the root folder or `folder`."""
    places = []
    for name in tests:
        file, _, inside = name.partition("::")
        places.append((name.rstrip("/"), os.path.realpath(folder / file), inside))
    chosen = []
    for item in items:
        path, inside_item = os.path.realpath(item.path), item.nodeid.partition("::")[2]
        for name, file, inside in places:
            same_file = inside and path == file
            if _within(item.nodeid, name) or (same_file and _within(inside_item, inside)):
                chosen.append(item)
                break
    return chosen


def _within(nodeid: str, name: str) -> bool:
    return nodeid == name or nodeid.startswith((f"{name}[", f"{name}::", f"{name}/"))


def _last_line(text: str) -> str:
    """The message of an error, whose lines pytest marks with an E; else the first line."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    marked = [line[1:].strip() for line in lines if line.startswith("E ")]
    return (marked or lines or ["no message"])[0][:REASON]


def strays(roots: list[str], foreign: list[str]) -> list[str]:
    """Return modules that come from `foreign` folders, and not from below `roots`, as sentences."""
    within = tuple(os.path.realpath(folder) + os.sep for folder in roots)
    outside = tuple(os.path.realpath(folder) + os.sep for folder in foreign)
    if not outside:
        return []
    texts = []
    real = functools.cache(os.path.realpath)  # hundreds of modules lie in some folders
    for name, module in sorted(sys.modules.items()):
        file = getattr(module, "__file__", None)
        if not isinstance(file, str) or file == __file__:
            continue
        folder, base = os.path.split(file)
        path = os.path.join(real(folder), base)
        if path.startswith(outside) and not path.startswith(within):
            texts.append(f"{name} from {path}")
    return texts


def main() -> None:
    """Run with the job of `runs.processes.Processes`, as JSON."""
    job = json.loads(sys.argv[1])
    os.set_inheritable(job["socket"], False)
    # Python put this file's folder there, whose names would shadow a project's.
    here = os.path.dirname(os.path.realpath(__file__))
    sys.path[:] = [entry for entry in sys.path if os.path.realpath(entry or ".") != here]
    sys.path.insert(0, job["cwd"])
    sys.argv = ["pytest", *job["arguments"]]
    experiment = Experiment(job)
    experiment.leave(int(pytest.main(job["arguments"], plugins=[experiment])))


if __name__ == "__main__":
    main()
