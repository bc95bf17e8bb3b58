"""What a launch runs in fresh processes: they agree, each change shows, and nothing calls cuInit early."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from pytest_gpumem.judging.differences import merged_record, ran_the_same
from pytest_gpumem.records.schema import from_plain
from pytest_gpumem.records.what_ran import WhatRan

ROWS = Path(__file__).resolve().with_name("what_ran_rows.py")
GROUP = 3  # processes of a run
LEAST_ALIKE = 65 / 72  # share of rows; padding of arguments holds what was on the stack
SAME = ", same"  # end of the label of a row that must run the same as its base
EITHER = "line information"  # it is a part of the module's image; nobody relies on it
PYTEST = (
    sys.executable,
    "-m",
    "pytest",
    "-q",
    "-p",
    "no:cacheprovider",
    "-p",
    "no:xdist",
    "-W",
    "ignore",
    "-c",
    os.devnull,
)
QUICKLY = (
    "--gpumem",
    "--gpumem-device=cuda",
    "--gpumem-budget=10 ms",
    "-o",
    "gpumem_placements=1",
    "--gpumem-processes=1",
)
pytestmark = [
    pytest.mark.usefixtures("free_gpu"),
    pytest.mark.skipif(find_spec("cupti") is None, reason="needs CUPTI"),
]


def test_following_modules_calls_no_cu_init() -> None:
    """Children by fork of a process that called cuInit cannot use CUDA."""
    program = (
        "import os; from pytest_gpumem.devices.opening import choose\n"
        "following = choose('cuda').follow(); following.__enter__(); pid = os.fork()\n"
        "if not pid:\n"
        "    from cuda.bindings import driver\n"
        "    os._exit(int(driver.cuInit(0)[0]))\n"
        "raise SystemExit(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))"
    )
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", program],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")


def session(folder: Path, *, alone: bool = True, file: Path = ROWS) -> dict[str, Any]:
    """Run the rows of a file in a fresh process: measurements by key.

    Not `alone`: it waits for no other process on the GPU. What runs does not depend on them.
    """
    results = folder / "results.json"
    command = [
        *PYTEST,
        *QUICKLY,
        f"--rootdir={file.parent}",
        f"--benchmark-json={results}",
        str(file),
    ]
    environment = {}
    for name, value in os.environ.items():
        if not name.startswith(("GPUMEM", "PYTEST_")):
            environment[name] = value
    environment["PYTHONPATH"] = os.pathsep.join(
        [str(ROWS.parent), environment.get("PYTHONPATH", "")]
    )
    if not alone:
        environment["XDG_RUNTIME_DIR"] = str(folder)  # has the lock of the GPU
    done = subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    rows = {}
    for row in json.loads(results.read_text())["gpumem"]["rows"]:
        if row["measurement"] is not None:
            rows[row["key"].partition("::")[2]] = row["measurement"]
    return rows


OTHERS = """
import cupy

MODULE = cupy.RawModule(code='extern "C" __global__ void early(float* x) { x[0] = 1; }')
FUNCTIONS = []

def test_loads():
    FUNCTIONS.append(MODULE.get_function("early"))
    FUNCTIONS[0]((1,), (1,), (cupy.zeros(1, "f4"),))

def test_measures(gpu_benchmark):
    x = cupy.zeros(1, "f4")
    gpu_benchmark(lambda: FUNCTIONS[0]((1,), (1,), (x,)))
"""


def test_a_module_that_a_test_without_fixtures_loaded_is_not_read(tmp_path: Path) -> None:
    pytest.importorskip("cupy")
    file = tmp_path / "test_others.py"
    file.write_text(OTHERS)
    (row,) = session(tmp_path, file=file).values()
    assert "its module was loaded before the test" in row["what_ran"]["not_watched"]


@pytest.fixture(scope="module")
def first(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The rows of one process."""
    return session(tmp_path_factory.mktemp("first"))


def test_each_change_ran_differently_and_a_rebuild_the_same(
    first: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    changes, rebuilds, wrong = 0, 0, list[str]()
    for key, row in first.items():
        base = first.get(f"{key[: key.rindex('[')]}[base]") if "[" in key else None
        if base is None or base is row or row["label"] == EITHER:
            continue
        same = row["label"].endswith(SAME)
        changes += not same
        rebuilds += same
        watched = not (row["what_ran"]["not_watched"] or base["what_ran"]["not_watched"])
        if not watched or same is not (row["what_ran"] == base["what_ran"]):
            wrong.append(f"{key}: {row['what_ran']['not_watched'] or 'told wrongly'}")
    with capsys.disabled():
        print(f"\n{changes} changes, {rebuilds} rebuilds; told wrongly: {len(wrong)} {wrong}")
    assert changes >= 17  # without Triton
    assert wrong == []


def test_two_runs_of_three_processes_agree(
    first: dict[str, Any],
    tmp_path_factory: pytest.TempPathFactory,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Single processes differ in padding of arguments, and runs of three in few rows."""
    folders = [tmp_path_factory.mktemp("other") for _ in range(2 * GROUP - 1)]
    with ThreadPoolExecutor(len(folders)) as pool:  # what runs does not depend on other processes
        others = list(pool.map(lambda folder: session(folder, alone=False), folders))
    differing = []
    for key in first:
        records = [from_plain(rows[key]["what_ran"], WhatRan) for rows in (first, *others)]
        base, head = merged_record(records[:GROUP]), merged_record(records[GROUP:])
        if base is None or head is None or not ran_the_same(head, [base]):
            unread = next((record.not_watched for record in records if record.not_watched), None)
            differing.append(f"{key}: {unread or 'other steps'}")
    alike = len(first) - len(differing)
    with capsys.disabled():
        print(f"\n{alike} of {len(first)} rows ran the same in two runs; not: {differing}")
    assert alike >= LEAST_ALIKE * len(first)
