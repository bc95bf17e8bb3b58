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

from pytest_gpumem.records.schema import from_plain
from pytest_gpumem.records.what_ran import WhatRan, declared, ran_the_same, together

ROWS = Path(__file__).resolve().with_name("what_ran_rows.py")
GROUP = 3  # processes of a run
ARGUMENTS = 1000  # more than any kernel has
PADDED = 0.1  # largest share of rows that runs may see with other arguments: padding holds what was on the stack
SAME = ", same"  # end of the label of a row that must run the same as its base
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
        "import os; from pytest_gpumem.devices.opening import choose; choose('cuda').follow(); pid = os.fork();\n"
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


def session(folder: Path, *, alone: bool = True) -> dict[str, Any]:
    """Run the rows in a fresh process: measurements by key.

    Not `alone`: it waits for no other process on the GPU. What runs does not depend on them.
    """
    results = folder / "results.json"
    command = [
        *PYTEST,
        *QUICKLY,
        f"--rootdir={ROWS.parent}",
        f"--benchmark-json={results}",
        str(ROWS),
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


@pytest.fixture(scope="module")
def first(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The rows of one process."""
    return session(tmp_path_factory.mktemp("first"))


def test_each_change_has_another_digest_and_a_rebuild_the_same(first: dict[str, Any]) -> None:
    compared, wrong = 0, []
    for key, row in first.items():
        base = first.get(f"{key[: key.rindex('[')]}[base]") if "[" in key else None
        if base is None or base is row:
            continue
        compared += 1
        same = row["what_ran"]["digest"] == base["what_ran"]["digest"]
        if row["what_ran"]["digest"] is None or same is not row["label"].endswith(SAME):
            wrong.append(key)
    assert compared > 20
    assert wrong == []


def test_two_runs_of_three_processes_agree(
    first: dict[str, Any], tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Single processes differ in padding of arguments, and runs of three in few rows, never in more."""
    folders = [tmp_path_factory.mktemp("other") for _ in range(2 * GROUP - 1)]
    with ThreadPoolExecutor(len(folders)) as pool:  # what runs does not depend on other processes
        others = list(pool.map(lambda folder: session(folder, alone=False), folders))
    padded, in_more = list[str](), list[str]()
    for key, row in first.items():
        if row["what_ran"]["digest"] is None:
            continue
        records = [from_plain(rows[key]["what_ran"], WhatRan) for rows in (first, *others)]
        one, other = together(records[:GROUP]), together(records[GROUP:])
        if one is not None and other is not None and ran_the_same(other, [one]):
            continue
        without_arguments = {declared(record, range(1, ARGUMENTS)).digest for record in records}
        (padded if len(without_arguments) == 1 else in_more).append(key)
    assert in_more == []
    assert len(padded) <= PADDED * len(first), padded
