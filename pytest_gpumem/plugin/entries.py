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
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeGuard

import pytest
from pytest_benchmark.fixture import BenchmarkFixture

from pytest_gpumem.files import write_whole
from pytest_gpumem.reporting.row import HOST
from pytest_gpumem.result_files import revision_of

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
        # Another plugin's fixture of that name (CodSpeed's) is left alone.
        self._fixture = benchmark if is_pytest_benchmarks(benchmark) else None
        self._added: list[BenchmarkFixture] = []
        self.further: dict[str, Any] = {}  # further figures for `extra_info`
        self.called = False  # the test has called `gpu_benchmark`

    def add(
        self, label: str, durations: Sequence[float], summary: Mapping[str, Any], *, failed: bool
    ) -> None:
        """Add the entry of a measurement with this label, which no save or compare takes if failed.
        `durations`: seconds of each sample. `summary`: JSON-able figures for `extra_info`.
        """
        fixture = self._fixture
        if fixture is None or not durations:
            return
        beside = fixture.stats is not None  # an entry of the host
        self._use_up()
        if fixture.disabled:
            return
        entry = copy.copy(fixture)
        gpumem = {**self.further, **summary}
        if beside:
            label = label or "gpu"
        if HOST in summary.get("extra", {}):  # the fixture has measured the same call
            entry.group = f"{fixture.group} GPU" if fixture.group else "GPU"
            gpumem["adopted"] = True
        if label:
            entry.name, entry.fullname = f"{entry.name}[{label}]", f"{entry.fullname}[{label}]"
        if summary.get("simulated"):
            # pytest-benchmark shows the group above its table: these are no times of a GPU.
            entry.group = f"{entry.group}, simulated" if entry.group else "simulated"
        entry.extra_info = {**fixture.extra_info, "gpumem": gpumem}
        entry.has_error, entry.cprofile_stats = failed, None
        entry._timer = gpumem_device_time
        stats = entry._make_stats(iterations=1)
        for duration in durations:
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
    """The folder of pytest-benchmark's storage, or where that is its default or no folder
    `.benchmarks` of the rootdir.
    """
    uri = str(config.option.benchmark_storage)
    if uri == DEFAULT_STORAGE or ("://" in uri and not uri.startswith("file://")):
        return config.rootpath / ".benchmarks"
    folder = os.path.expanduser(uri.removeprefix("file://"))
    return Path(config.invocation_params.dir, folder)


def leave_out(compared: dict[str, Any], key: str) -> list[str]:
    """Take the entries of another GPU than that of `key` out of a saved run that pytest-benchmark
    compares with, and return their full names. Its GPU leaves `machine_info`, which is of the host.
    """
    gpu = compared["gpu"] = compared.setdefault("machine_info", {}).pop("gpu", None)
    if gpu is None or gpu.get("key") == key:
        return []
    of_the_host, names = [], []
    for entry in compared["benchmarks"]:
        if "gpumem" in entry.get("extra_info", {}):
            names.append(entry["fullname"])
        else:
            of_the_host.append(entry)
    compared["benchmarks"] = of_the_host
    return names


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


def write_json(config: pytest.Config) -> Path | None:
    """Write the `--benchmark-json` file where pytest-benchmark does not, with workers or if no
    measurement passed: with its hooks, and without benchmarks. Returns the path if it was written.
    """
    session: Any = getattr(config, "_benchmarksession", None)
    if session is None or not session.json or session.benchmarks:
        return None
    output: dict[str, Any] = config.hook.pytest_benchmark_generate_json(
        config=config,
        benchmarks=[],
        include_data=True,
        machine_info=session.get_machine_info(),
        commit_info=_commit_info(config),
    )
    config.hook.pytest_benchmark_update_json(config=config, benchmarks=[], output_json=output)
    target = session.json
    if not isinstance(target, (str, os.PathLike)):
        target.close()  # before pytest-benchmark 5.3 an open, still empty file
        target = target.name
    path = Path(target)
    write_whole(path, json.dumps(output, indent=4, allow_nan=False, default=str))
    return path


def _commit_info(config: pytest.Config) -> dict[str, Any]:
    """The commit as pytest-benchmark finds it, the project's hooks included."""
    info: dict[str, Any] = config.hook.pytest_benchmark_generate_commit_info(config=config)
    config.hook.pytest_benchmark_update_commit_info(config=config, commit_info=info)
    return info


def revision(config: pytest.Config) -> str | None:
    """Commit id, with "-dirty" for uncommitted changes; None outside a repository."""
    return revision_of(_commit_info(config))
