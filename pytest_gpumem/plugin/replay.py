"""Hand device-timed durations to pytest-benchmark, so that its storage, JSON, histogram and compare work on them unchanged.

The documented way in is the marker's `timer=` with `benchmark.pedantic`: pedantic never calibrates and reads the timer exactly twice a
round, so a timer that yields 0.0, d0, 0.0, d1, ... stores the exact durations. Seen to hold for pytest-benchmark 4.0.0 to 5.3.1.
"""

from __future__ import annotations

import copy
import json
import os
import shlex
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeGuard

import pytest
from pytest_benchmark.fixture import BenchmarkFixture

from pytest_gpumem.files import write_whole
from pytest_gpumem.result_files import revision_of

DEFAULT_STORAGE = "file://./.benchmarks"  # pytest-benchmark's own default of `--benchmark-storage`


TIMER_NAME = "gpumem_device_time"  # of our clock; pytest-benchmark writes it into "options"


class NotOurTimer(RuntimeError):
    """The test uses pytest-benchmark's `benchmark` in a way that would store a wrong time."""


class ReplayTimer:
    """A clock that reads out durations which were measured before, in seconds."""

    __name__ = TIMER_NAME

    def __init__(self) -> None:
        self._ticks: deque[float] = deque()

    def load(self, durations: Sequence[float]) -> None:
        """Have the next reads give each duration as the difference of two."""
        self._ticks = deque(tick for duration in durations for tick in (0.0, duration))

    def __call__(self) -> float:
        if not self._ticks:
            raise NotOurTimer(
                "this test uses gpu_benchmark, whose device times go through pytest-benchmark's `benchmark`; "
                "calling `benchmark` besides would have no clock: move that call to a test of its own"
            )
        return self._ticks.popleft()


_TIMER = pytest.StashKey[ReplayTimer]()


def attach_timer(item: pytest.Item) -> None:
    """Merge our timer into the closest `benchmark` marker, before pytest-benchmark's fixture reads it. A second call does nothing. Under
    CodSpeed the fixture is another one, which refuses `timer`: nothing is done."""
    if (
        _TIMER in item.stash
        or item.config.getoption("codspeed", False)
        or "CODSPEED_ENV" in os.environ
    ):
        return
    timer = item.stash[_TIMER] = ReplayTimer()
    closest = item.get_closest_marker("benchmark")
    kwargs = dict(closest.kwargs) if closest else {}
    item.add_marker(pytest.mark.benchmark(**{**kwargs, "timer": timer}), append=False)


def check_timer(item: pytest.Item, benchmark: object) -> None:
    """See that `benchmark` reads our timer.
    Raises `NotOurTimer`: it was set up before the test asked for `gpu_benchmark`, so that it would store host time.
    """
    if is_pytest_benchmarks(benchmark) and benchmark._timer is not item.stash.get(_TIMER, None):
        raise NotOurTimer(
            "gpu_benchmark was asked for by getfixturevalue after `benchmark` was set up with the host's clock; "
            "ask for gpu_benchmark first, or name it in the test's signature"
        )


def is_pytest_benchmarks(benchmark: object) -> TypeGuard[BenchmarkFixture]:
    """True for pytest-benchmark's own fixture. CodSpeed's claims its class, so `isinstance` takes one for the other."""
    return issubclass(type(benchmark), BenchmarkFixture)


class Replay:
    """One test's way into pytest-benchmark: each measurement gets a fixture of its own."""

    def __init__(self, item: pytest.Item, benchmark: object) -> None:
        self._timer = item.stash.get(_TIMER, None)
        # Another plugin's fixture of that name (CodSpeed's) is left alone: it would time an empty function.
        self._fixture = benchmark if is_pytest_benchmarks(benchmark) else None
        self._unused: BenchmarkFixture | None = None
        self._fed: list[BenchmarkFixture] = []
        self.called = False
        """The test has called `gpu_benchmark`."""

    def feed(
        self, label: str, durations: Sequence[float], summary: Mapping[str, Any], *, failed: bool
    ) -> None:
        """Store one measurement.
        `label`: tells it apart inside its test; empty for the only one.
        `durations`: seconds of each sample.
        `summary`: JSON-able figures for `extra_info`.
        `failed`: neither save nor compare may take it.
        """
        if self._fixture is None or self._timer is None or not durations:
            return
        if self._unused is None:
            self._unused = copy.copy(self._fixture)
            # The test may have called `benchmark` itself, or a failed subtest have excused it.
            self._unused._mode, self._unused.stats = None, None
        # pytest-benchmark's fixture takes one measurement. A copy of the unused one takes another; its `add_stats` is the session's.
        fixture = self._fixture if self._fixture._mode is None else copy.copy(self._unused)
        fixture.extra_info = {**fixture.extra_info, "gpumem": dict(summary)}
        if label:
            fixture.name, fixture.fullname = (
                f"{fixture.name}[{label}]",
                f"{fixture.fullname}[{label}]",
            )
        if summary.get("simulated"):
            mark_simulated(fixture)
        fixture.has_error = failed
        self._fed.append(fixture)
        self._timer.load(durations)
        fixture.pedantic(_nothing, rounds=len(durations), iterations=1)

    def excuse(self) -> None:
        """For a test that did not pass, or whose every call raised: pytest-benchmark stores nothing of it, and does not warn that its
        fixture was not used."""
        for fixture in self._fed:
            fixture.has_error = True
        if self._fixture is not None and self._fixture._mode is None:
            self._fixture._mode = "gpu_benchmark(...)"


def mark_simulated(fixture: BenchmarkFixture) -> None:
    """Say in the group, which pytest-benchmark shows above its table, that these are no times of a GPU."""
    fixture.group = f"{fixture.group}, simulated" if fixture.group else "simulated"


def _nothing() -> None:
    """The function of replayed rounds."""


def storage_folder(config: pytest.Config) -> Path:
    """The folder of pytest-benchmark's storage; its default where the storage is not a folder."""
    uri = str(config.option.benchmark_storage)
    if "://" in uri and not uri.startswith("file://"):
        uri = DEFAULT_STORAGE
    return Path(os.path.expanduser(uri.removeprefix("file://")))


def leave_out(compared: dict[str, Any], key: str) -> str | None:
    """Take the rows of another GPU out of a saved run that pytest-benchmark compares with. Benchmarks of the host stay.
    `compared`: the saved run. Its GPU is taken out too, so that pytest-benchmark compares the hosts alone.
    `key`: of this session's device.
    Returns the key of the other GPU; None if nothing was left out.
    """
    gpu = compared.setdefault("machine_info", {}).pop("gpu", None)
    if gpu is None or gpu.get("key") == key:
        return None
    of_the_host = [
        one for one in compared["benchmarks"] if "gpumem" not in one.get("extra_info", {})
    ]
    if len(of_the_host) == len(compared["benchmarks"]):
        return None
    compared["benchmarks"] = of_the_host
    return str(gpu.get("key", "an unnamed GPU"))


TABLE_OPTIONS = tuple(
    f"--benchmark-{name}"
    for name in (
        *("columns", "sort", "group-by", "name", "time-unit", "verbose", "histogram"),
        *("compare", "compare-fail", "cprofile"),
    )
)
"""Options of pytest-benchmark that ask for its table."""


@contextmanager
def without_table(config: pytest.Config, *, always: bool) -> Iterator[None]:
    """Leave the measurements of this plugin out of pytest-benchmark's table, unless one of its options asks for the table.
    `always`: leave them out even so.
    """
    session: Any = getattr(config, "_benchmarksession", None)
    groups = getattr(session, "groups", None)
    words = [
        *config.getini("addopts"),
        *shlex.split(os.environ.get("PYTEST_ADDOPTS", "")),
        *map(str, config.invocation_params.args),
    ]
    asked = any(word.partition("=")[0] in TABLE_OPTIONS for word in words)
    if not groups or (asked and not always):
        yield
        return
    others = [
        (name, [one for one in of if "gpumem" not in one.get("extra_info", {})])
        for name, of in groups
    ]
    session.groups = [(name, of) for name, of in others if of]
    try:
        yield
    finally:
        session.groups = groups


def write_json(config: pytest.Config) -> Path | None:
    """Write the `--benchmark-json` file where pytest-benchmark does not: with workers, or if no measurement passed. Goes through the same
    hooks, with an empty list of benchmarks. Gives the path, or None if there was nothing to do."""
    session: Any = getattr(config, "_benchmarksession", None)
    if session is None or not session.json or session.benchmarks:
        return None
    machine_info = session.get_machine_info()
    output: dict[str, Any] = config.hook.pytest_benchmark_generate_json(
        config=config,
        benchmarks=[],
        include_data=True,
        machine_info=machine_info,
        commit_info=commit_info(config),
    )
    config.hook.pytest_benchmark_update_json(config=config, benchmarks=[], output_json=output)
    target = session.json
    if not isinstance(target, (str, os.PathLike)):
        target.close()  # before pytest-benchmark 5.3 an open, still empty file
        target = target.name
    path = Path(target)
    write_whole(path, json.dumps(output, indent=4, allow_nan=False, default=str))
    return path


def commit_info(config: pytest.Config) -> dict[str, Any]:
    """The commit as pytest-benchmark finds it, the project's own hooks included."""
    info: dict[str, Any] = config.hook.pytest_benchmark_generate_commit_info(config=config)
    config.hook.pytest_benchmark_update_commit_info(config=config, commit_info=info)
    return info


def revision(config: pytest.Config) -> str | None:
    """Commit id, with "-dirty" for uncommitted changes; None outside a repository."""
    return revision_of(commit_info(config))
