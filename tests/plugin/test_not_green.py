"""What cannot turn a pipeline green (docs/ci.md): each case against the same saved baseline. The screen alone decides."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from textwrap import dedent

import pytest
from ci_project import INI, SIMULATED, TESTS, Project, saved_project
from click.testing import CliRunner
from test_lost_contexts import LOSING

from pytest_gpumem.baselines.store import digest
from pytest_gpumem.cli import main

Gate = Callable[..., tuple[int, str]]

SECOND = "\ndef test_first():\n    assert False\n"
SKIP = "    pytest.skip('not today')\n"
CRASH = """
import pytest_gpumem.baselines.verdicts

def crash(*arguments, **keywords):
    raise RuntimeError("no verdict")

pytest_gpumem.baselines.verdicts.judged = crash
"""


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory, programs: Path) -> Project:
    return saved_project(tmp_path_factory.mktemp("saved"), programs, {"pytest.ini": f"{INI}\n"})


@pytest.fixture
def project(saved: Project, tmp_path: Path) -> Project:
    return saved.copied(tmp_path)


@pytest.fixture
def gate(project: Project, monkeypatch: pytest.MonkeyPatch) -> Gate:
    """Runs a gate in a CI that has no GPU; gives its exit code and its output. `isolated`: as by default, in a worker."""

    def run(
        options: str = "", arguments: str = "", isolated: bool = False, **variables: str
    ) -> tuple[int, str]:
        own = {
            "CI": "true",
            "CUDA_VISIBLE_DEVICES": "",
            "GPUMEM_BASELINE": ".gpumem-baseline",
            **SIMULATED,
            **variables,
        }
        for name, value in own.items():
            monkeypatch.setenv(name, value)
        monkeypatch.chdir(project.folder)
        words = [*([] if isolated else ["-n0"]), *arguments.split()]
        done = CliRunner().invoke(
            main, ["gate", "--screen-only", *options.split(), "origin/main", "--", *words]
        )
        return done.exit_code, done.output

    return run


def no_baseline(project: Project) -> None:
    shutil.rmtree(project.folder / ".gpumem-baseline")


def holding(text: str, name: str = "test_it.py") -> Callable[[Project], None]:
    return lambda project: project.write(name, text)


def after_files(text: str) -> str:
    """What a gate prints below the list of its files."""
    return re.split(r"gpumem gate: \d files", text)[1]


def unchanged(project: Project) -> None:
    pass


CASES = {
    "nothing changed: green, else the others would show nothing": (unchanged, "", "", 0),
    "no baseline, or an evicted cache": (no_baseline, "", "", 6),
    "skipped after it was measured": (holding(TESTS + SKIP), "", "", 1),
    "all tests skipped": (holding(TESTS.replace("    gpu_b", f"{SKIP}    gpu_b")), "", "", 1),
    "all tests deselected": (unchanged, "", "-k nothing", 6),
    "all tests gone": (holding(""), "", "", 1),
    "-x after one": (holding(SECOND + TESTS), "", "-x", 1),
    "a crash while judging": (holding(CRASH, "conftest.py"), "", "", 6),
    "results of the simulated device, strictly": (unchanged, "--strict", "", 6),
}


@pytest.mark.parametrize("case", CASES)
def test_what_is_not_judged_is_not_green(project: Project, gate: Gate, case: str) -> None:
    change, options, arguments, code = CASES[case]
    change(project)
    ended, text = gate(options, arguments)
    assert ended == code, text


@pytest.mark.parametrize(
    ("leaves", "isolated", "code"),
    [("os._exit(0)", True, 1), ("os.kill(os.getpid(), 9)", True, 1), ("os._exit(0)", False, 6)],
)
def test_a_process_that_ends_by_itself_is_not_green(
    project: Project, gate: Gate, leaves: str, isolated: bool, code: int
) -> None:
    """A worker's test is red; without workers there is no verdict."""
    project.write("test_it.py", f"{TESTS}\ndef test_leaves():\n    import os\n    {leaves}\n")
    ended, text = gate(isolated=isolated)
    assert ended == code, text
    assert ("no verdict: nothing was measured" in text) == (code == 6)


LOST = """from conftest import lose

def test_culprit(gpu_device):
    lose(gpu_device)
"""


@pytest.mark.parametrize(
    ("crash", "said"),
    [
        (LOST, "ContextLost: at the test's end: "),
        (
            "def test_culprit():\n    import os\n    os.abort()\n",
            "worker 'gw0' crashed while running 'test_a.py::test_culprit'",
        ),
    ],
    ids=["lost context", "abort"],
)
def test_a_crash_costs_one_test_and_is_named_once(
    project: Project, gate: Gate, crash: str, said: str
) -> None:
    """A gate isolates without being asked. Nobody means a crash, so nothing accepts it."""
    project.write("conftest.py", dedent(LOSING))
    project.write("test_a.py", crash)
    ended, text = gate(isolated=True)
    assert ended == 1, text
    _, _, end = text.partition("gpumem gate: red (simulated): ")
    assert end.startswith(
        f"1 test failed without a measurement\nFAIL test_a.py::test_culprit: {said}"
    ), text
    assert "lost" not in after_files(text).replace("lost.", "")
    assert "accept" not in end
    assert (
        "1 row (simulated): 1 PASS"
        in (project.folder / "gpumem-results" / "summary.md").read_text()
    )


def test_what_a_crash_keeps_from_running_is_told_once(project: Project, gate: Gate) -> None:
    project.write("conftest.py", dedent(LOSING))
    project.write("test_a.py", LOST)
    ended, text = gate()
    assert ended == 1, text
    end = " ".join(after_files(text).split())
    assert (
        "lost: 1 test did not run because test_a.py::test_culprit lost the context (cudaErrorIllegalAddress, test_a.py:3)"
        in end
    )
    assert "1 test failed without a measurement; 1 test did not run" in end
    assert "accept" not in end
    assert "test_it.py" not in end


def test_no_gpu_is_not_green(gate: Gate) -> None:
    ended, text = gate(GPUMEM_DEVICE="")
    assert ended == 4, text


def test_a_changed_driver_hides_no_slow_down(project: Project, gate: Gate) -> None:
    """Its row has no reference: without a duet there is no verdict."""
    for path in (project.folder / ".gpumem-baseline").rglob("*.json"):
        stored = json.loads(path.read_text())
        stored["content"]["device"]["driver"] = "550.1"
        path.write_text(json.dumps({**stored, "sha256": digest(stored["content"])}))
    project.change("96 << 20")
    ended, text = gate()
    assert ended == 6, text
    assert "driver 550.1 → unknown, so a new reference begins" in text


def test_a_baseline_of_a_gpu_is_not_replaced_by_a_simulated_run(
    project: Project, gate: Gate
) -> None:
    """Where the device is left to the machine, as in the templates."""
    folder = project.folder / ".gpumem-baseline"
    (of_the_simulated,) = folder.iterdir()
    of_the_simulated.rename(folder / of_the_simulated.name.removeprefix("simulated-"))
    ended, text = gate(GPUMEM_DEVICE="auto")
    assert ended == 4, text
