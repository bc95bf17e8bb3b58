"""The measurements of this plugin in pytest-benchmark's session: entries, table, JSON, saves.

A measurement becomes an entry with the device's samples, beside whatever `benchmark` measures. So
storage, JSON, histogram and comparison work on it unchanged. Seen with pytest-benchmark 4.0.0 and
5.3.1.
"""

from __future__ import annotations

import copy
import json
import os
import re
import shlex
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeGuard

import pytest
from pytest_benchmark.fixture import BenchmarkFixture

from pytest_gpumem.files import write_whole
from pytest_gpumem.plugin.marks import BENCHMARK_FIXTURE, uses
from pytest_gpumem.plugin.session import GpuSession

if TYPE_CHECKING:
    from pytest_gpumem.records.row import Row

DEFAULT_STORAGE = "file://./.benchmarks"  # pytest-benchmark's default of `--benchmark-storage`


def gpumem_device_time() -> float:
    """Name the clock of the entries in their `options`. Nothing calls it."""
    raise NotImplementedError


def is_pytest_benchmarks(benchmark: object) -> TypeGuard[BenchmarkFixture]:
    """True for pytest-benchmark's fixture. CodSpeed's claims its class, as `isinstance` sees it."""
    return issubclass(type(benchmark), BenchmarkFixture)


class Entries:
    def __init__(self, benchmark: object) -> None:
        """`benchmark`: the test's fixture."""
        self._fixture = benchmark if is_pytest_benchmarks(benchmark) else None
        self._added: list[BenchmarkFixture] = []
        self.further: dict[str, Any] = {}
        """Further figures for `extra_info`; "adopted" if the fixture has measured the same call."""
        self.called = False  # the test has called `gpu_benchmark`

    def add(self, row: Row, figures: Mapping[str, Any]) -> None:
        """Add the entry of a row, which no save or compare takes if its test failed.
        `figures`: for `extra_info`."""
        fixture = self._fixture
        if fixture is None or row.measurement is None:
            return
        beside = fixture.stats is not None  # an entry of the host
        self._use_up()
        if fixture.disabled:
            return
        entry = copy.copy(fixture)
        gpumem, label = {**self.further, **figures}, row.label
        if beside:
            label = label or "gpu"
        if "adopted" in gpumem:
            entry.group = f"{fixture.group} GPU" if fixture.group else "GPU"
        if label:
            entry.name, entry.fullname = f"{entry.name}[{label}]", f"{entry.fullname}[{label}]"
        if figures["simulated"]:
            # pytest-benchmark shows the group above its table: these are no times of a GPU.
            entry.group = f"{entry.group}, simulated" if entry.group else "simulated"
        entry.extra_info = {**fixture.extra_info, "gpumem": gpumem}
        entry.has_error, entry.cprofile_stats = row.failed, None
        entry._timer = gpumem_device_time
        stats = entry._make_stats(iterations=1)
        for duration in row.measurement.samples:
            stats.update(duration)
        self._added.append(entry)

    def excuse(self) -> None:
        """Have pytest-benchmark store nothing of a test that did not pass, or that only raised."""
        for entry in self._added:
            entry.has_error = True
        self._use_up()

    def _use_up(self) -> None:
        """Keep pytest-benchmark from the warning that its fixture was not used."""
        if self._fixture is not None and self._fixture._mode is None:
            self._fixture._mode = "gpu_benchmark(...)"


def words_of(config: pytest.Config) -> list[str]:
    """The words of the command line, with those of PYTEST_ADDOPTS."""
    words = shlex.split(os.environ.get("PYTEST_ADDOPTS", ""))
    return words + [str(word) for word in config.invocation_params.args]


def storage_folder(config: pytest.Config) -> Path:
    """The folder of pytest-benchmark's storage; `.benchmarks` of the rootdir where the storage is
    the default or no folder.
    """
    uri = str(config.option.benchmark_storage)
    if uri == DEFAULT_STORAGE or ("://" in uri and not uri.startswith("file://")):
        return config.rootpath / ".benchmarks"
    folder = os.path.expanduser(uri.removeprefix("file://"))
    return Path(config.invocation_params.dir, folder)


_TABLE_OPTION = re.compile(
    r"--benchmark-(columns|sort|group-by|name|time-unit|verbose|histogram|compare|compare-fail"
    r"|cprofile)(=|$)"
)  # options of pytest-benchmark that ask for its table


@contextmanager
def without_table(config: pytest.Config, *, always: bool) -> Iterator[None]:
    """Leave what `gpu_benchmark` measured out of pytest-benchmark's table, unless one of its
    options asks for the table. `always`: also then.
    """
    session: Any = getattr(config, "_benchmarksession", None)
    groups = getattr(session, "groups", None)
    words = [*config.getini("addopts"), *words_of(config)]
    wanted = any(_TABLE_OPTION.match(word) for word in words)
    if not groups or (wanted and not always):
        yield
        return
    session.groups = []
    for name, entries in groups:
        shown = []
        for entry in entries:
            gpumem = entry.get("extra_info", {}).get("gpumem")
            if gpumem is None or "adopted" in gpumem:
                shown.append(entry)
        if shown:
            session.groups.append((name, shown))
    try:
        yield
    finally:
        session.groups = groups


def write_json(config: pytest.Config) -> None:
    """Write the `--benchmark-json` file where pytest-benchmark does not, with workers or if no
    measurement passed: with its hooks, and without benchmarks.
    """
    session: Any = getattr(config, "_benchmarksession", None)
    if session is None or not session.json or session.benchmarks:
        return
    output: dict[str, Any] = config.hook.pytest_benchmark_generate_json(
        config=config,
        benchmarks=[],
        include_data=True,
        machine_info=session.get_machine_info(),
        commit_info=commit_info(config),
    )
    config.hook.pytest_benchmark_update_json(config=config, benchmarks=[], output_json=output)
    target = session.json
    if not isinstance(target, (str, os.PathLike)):
        target.close()  # before pytest-benchmark 5.3 an open, still empty file
        target = target.name
    write_whole(Path(target), json.dumps(output, indent=4, allow_nan=False, default=str))


def commit_info(config: pytest.Config) -> dict[str, Any]:
    """The commit as pytest-benchmark finds it, the project's hooks included."""
    info: dict[str, Any] = config.hook.pytest_benchmark_generate_commit_info(config=config)
    config.hook.pytest_benchmark_update_commit_info(config=config, commit_info=info)
    return info


class BenchmarkFiles:
    """Hooks of pytest-benchmark: its files get the rows, and it compares entries of one GPU."""

    def __init__(self, session: GpuSession) -> None:
        self._session = session
        self._other_gpu = ""  # of a saved run that pytest-benchmark compares with
        self._left_out: set[str] = set()  # names of its entries

    def pytest_benchmark_compare_machine_info(self, compared_benchmark: dict[str, Any]) -> None:
        """Leave the entries of another GPU out of a saved run."""
        key, comparable = self._session.facts.key, []
        for entry in compared_benchmark["benchmarks"]:
            gpu = entry.get("extra_info", {}).get("gpumem", {}).get("gpu", key)
            if gpu == key:
                comparable.append(entry)
            else:
                self._left_out.add(entry["fullname"])
                self._other_gpu = gpu
        compared_benchmark["benchmarks"] = comparable

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        key = self._session.facts.key
        for item in session.items if self._other_gpu else ():
            if uses(item, BENCHMARK_FIXTURE) or f"{item.nodeid}[gpu]" in self._left_out:
                raise pytest.UsageError(
                    f"--benchmark-compare: the saved run is of {self._other_gpu}, this session's "
                    f"device is {key}; give each GPU a storage of its own, such as "
                    f"--benchmark-storage=file://.benchmarks/{key}"
                )

    def pytest_benchmark_update_json(self, output_json: dict[str, Any]) -> None:
        from pytest_gpumem.records.schema import document
        from pytest_gpumem.reporting.row import figures

        session = self._session
        by_name = {(row.range_name, row.label): row for row in session.rows}
        for entry in output_json.get("benchmarks", ()):  # a project may write its own JSON
            gpumem = entry.get("extra_info", {}).get("gpumem")
            if gpumem is None:
                continue
            # Since then the row may have been judged again.
            row = by_name.get((gpumem["range"], gpumem.get("label", "")))
            if row is not None:
                gpumem.update(figures(row, session.facts))
        output_json["gpumem"] = document(
            session.facts, list(session.rows), session.settings.to_json(), session.missing
        )
