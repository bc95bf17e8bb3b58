"""A gate counts what its change accepts: the files that it adds, up to their sizes, and only where the workflow says so."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
from ci_project import SIMULATED, Project, saved_project
from click.testing import CliRunner, Result
from sessions import gate_result

from pytest_gpumem.baselines.accepted import FOLDER, acceptances
from pytest_gpumem.cli import main

TESTS = """
import pytest
from kern import COPIED, NBYTES

@pytest.mark.gpumem(max_regression="2%")
def test_copy(gpu_benchmark, device_buffer, gpu_kernels):
    gpu_benchmark(gpu_kernels.copy, device_buffer(NBYTES), device_buffer(NBYTES))

@pytest.mark.gpumem(max_peak_regression="0 B")
def test_memory(device_buffer):
    device_buffer(NBYTES)

@pytest.mark.gpumem(max_regression="20%", max_copied_bytes="base")
def test_copied(gpu_benchmark, device_buffer, gpu_kernels):
    gpu_benchmark(gpu_kernels.memcpy, device_buffer(COPIED), device_buffer(COPIED))
"""
KERN = "NBYTES = 64 << 20\nCOPIED = 100 << 20\n"
LIMITED = '@pytest.mark.gpumem(max_regression="2%")\ndef test_copy'
TIME, ALL = "origin/main -- -k test_copy", "origin/main"

Change = dict[str, str]


class Gates:
    """Gates of one project. Those that need no duet are of the screen alone."""

    def __init__(self, project: Project, monkeypatch: pytest.MonkeyPatch) -> None:
        self.project = project
        for name, value in {
            "GPUMEM_BASELINE": ".gpumem-baseline",
            "COLUMNS": "400",
            **SIMULATED,
        }.items():
            monkeypatch.setenv(name, value)
        monkeypatch.chdir(project.folder)

    def change(self, files: Change) -> None:
        for name, text in files.items():
            self.project.write(name, text)

    def gate(
        self, words: str = TIME, options: Iterable[str] = ("--screen-only", "--accept-from-change")
    ) -> tuple[int, str, str]:
        """Exit code, result and all lines."""
        done = CliRunner().invoke(main, ["gate", *options, *words.split()])
        return (
            done.exit_code,
            gate_result(done.stdout).removeprefix("gpumem gate: ").replace(" (simulated)", "", 1),
            done.output,
        )

    def accept(self, *words: str) -> Result:
        done = CliRunner().invoke(main, ["accept", "--reason", "checks bounds", *words])
        assert done.exit_code == 0, done.output
        return done

    def merge(self) -> None:
        """The change becomes main. Nothing is saved."""
        self.project.git("add", ".")
        self.project.git("commit", "-qm", "merged")
        self.project.git("push", "-q", "--force", "origin", "HEAD:main")
        self.project.git("fetch", "-q")


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory, programs: Path) -> Project:
    ignored = ".gpumem-baseline\n__pycache__\n.venv\ngpumem-results\n"
    return saved_project(
        tmp_path_factory.mktemp("saved"),
        programs,
        {"test_it.py": TESTS, "kern.py": KERN, ".gitignore": ignored},
    )


@pytest.fixture
def gates(saved: Project, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Gates:
    return Gates(saved.copied(tmp_path), monkeypatch)


SLOWER = {"kern.py": KERN.replace("64", "80")}


def test_what_the_gate_flags_is_accepted_by_the_change_and_said_so(gates: Gates) -> None:
    """By the command without a size: the last gate has it."""
    gates.change(SLOWER)
    red, _, text = gates.gate()
    assert red == 1, text
    accepted = gates.accept("test_it.py::test_copy")
    assert "accepted time up to 2" in accepted.stdout
    code, last, text = gates.gate()
    assert code == 0, text
    assert last.startswith("green: accepted, 1 test +2")
    assert last.endswith(" % by this change")
    assert "a change of it is accepted: test_it.py::test_copy" in text
    summary = (gates.project.folder / "gpumem-results" / "summary.md").read_text()
    assert "ACCEPTED" in summary
    assert "max_regression accepted" in summary
    # Committed it is the same.
    gates.project.git("add", ".")
    gates.project.git("commit", "-qm", "accept")
    assert gates.gate()[:2] == (0, last)
    # It is the workflow that says so.
    code, last, text = gates.gate(options=["--screen-only"])
    assert code == 1, text
    (path,) = gates.project.folder.glob(".gpumem/accepted/*.json")
    assert (
        f"gpumem gate: {FOLDER / path.name} does not count: the gate has no --accept-from-change"
        in text
    )


def test_a_larger_slow_down_than_the_accepted_one_is_red(gates: Gates) -> None:
    gates.change(SLOWER)
    gates.accept("test_it.py::test_copy", "--scope", "time", "--size", "10%")
    code, last, text = gates.gate()
    assert (code, last) == (1, "red: 1 of 1 row fails"), text


def test_a_duet_decides_how_much_slower_a_change_is(gates: Gates) -> None:
    """Its verdict is about the change alone, whatever the baseline holds."""
    gates.change(SLOWER)
    gates.accept("test_it.py::test_copy", "--scope", "time", "--size", "30%")
    code, last, text = gates.gate(options=["--accept-from-change", "--rounds-max", "11"])
    assert code == 0, text
    assert "the duet decides it" in text
    assert last.startswith("green: accepted, 1 test +2")


def test_between_the_merge_and_the_next_saved_run_a_test_is_guarded(gates: Gates) -> None:
    gates.change(SLOWER)
    gates.accept("test_it.py::test_copy", "--scope", "time", "--size", "30%")
    gates.merge()
    gates.change({"kern.py": KERN.replace("64", "100")})
    # Nothing is left to compare with: the duet decides.
    code, last, text = gates.gate()
    assert code == 6, text
    code, last, text = gates.gate(options=["--accept-from-change", "--rounds-max", "11"])
    assert (code, last) == (1, "red: 1 of 1 row fails"), text
    gates.change({**SLOWER, "README": "a change of nothing that is measured"})
    code, last, text = gates.gate(options=["--accept-from-change", "--rounds-max", "11"])
    assert (code, last) == (0, "green: 1 row"), text


@pytest.mark.parametrize("words", [ALL, f"{ALL} -- -n 2"])
def test_memory_and_copies_are_accepted_and_the_time_is_not(gates: Gates, words: str) -> None:
    """By the file of the copies alone the limit on the time stays in force."""
    copied = f"{ALL} -- -k test_copied"
    gates.change({"kern.py": KERN.replace("100", "101")})
    red, _, text = gates.gate(words)
    assert red == 1, text
    gates.accept("test_it.py::test_copied", "--scope", "kernels")
    code, last, text = gates.gate(words)
    assert (code, last) == (0, "green: accepted, 1 test max_copied_bytes 101 MiB by this change"), (
        text
    )
    gates.change({"kern.py": KERN.replace("100", "200")})
    assert gates.gate(copied)[0] == 1
    gates.accept("test_it.py::test_copied", "--scope", "kernels")
    code, last, text = gates.gate(copied)
    (row,) = gates_rows(gates)
    assert row["verdict"]["accepted"] == ["max_copied_bytes"], text
    assert (code, last) == (1, "red: 1 of 1 row fails"), text
    gates.change({"kern.py": KERN.replace("64 <<", "65 <<")})
    gates.accept("test_it.py::test_memory", "--scope", "memory", "--size", "65 MiB")
    code, last, text = gates.gate(f"{ALL} -- -k test_memory")
    assert (code, last) == (0, "green: accepted, 1 test a peak of 65 MiB by this change"), text
    gates.change({"kern.py": KERN.replace("64 <<", "66 <<")})
    assert gates.gate(f"{ALL} -- -k test_memory")[0] == 1


def gates_rows(gates: Gates) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = json.loads(
        (gates.project.folder / "gpumem-results" / "results.json").read_text()
    )["gpumem"]["rows"]
    return rows


@pytest.mark.parametrize("renamed", [False, True])
def test_a_removed_test(gates: Gates, renamed: bool) -> None:
    without = (
        TESTS.replace("def test_copy", "def test_renamed")
        if renamed
        else TESTS.replace(LIMITED, "def left_out")
    )
    gates.change({"test_it.py": without})
    words = f"{ALL} -- test_it.py"
    code, _, text = gates.gate(words)
    assert code == 1, text
    assert "lost: test_it.py::test_copy" in text
    gates.accept("test_it.py::test_copy")
    (made,) = acceptances(gates.project.folder)
    assert [change.scope.value for change in made.changes] == ["removed"]
    code, last, text = gates.gate(words)
    assert (code, last) == (0, "green: accepted, 1 test removed by this change"), text
    assert ("new, base does not have it: test_it.py::test_renamed" in text) is renamed
    assert "removed: test_it.py::test_copy: its removal was accepted" in text
    assert gates.gate(words, ["--screen-only"])[0] == 1
    # After the merge nobody misses it, and a saved run takes it out of the baseline.
    gates.merge()
    code, last, text = gates.gate(words)
    assert "test_copy" not in text, text
    assert code == (6 if renamed else 0)  # the renamed one has no saved run


@pytest.mark.parametrize(
    "how", ["    assert False\n", "    import os; os._exit(1)\n", "    raise MemoryError\n"]
)
def test_a_test_that_fails_by_itself_is_red_whatever_is_accepted(gates: Gates, how: str) -> None:
    body = "gpu_benchmark(gpu_kernels.copy, device_buffer(NBYTES), device_buffer(NBYTES))\n"
    gates.change({**SLOWER, "test_it.py": TESTS.replace(body, body + how, 1)})
    sizes = (
        "--scope",
        "time",
        "--size",
        "900%",
        "--scope",
        "memory",
        "--size",
        "1 TiB",
        "--scope",
        "removed",
    )
    gates.accept("test_it.py::test_copy", *sizes)
    code, last, text = gates.gate()
    assert code == 1, text
    assert last.startswith("red: ")


def test_a_loosened_limit(gates: Gates) -> None:
    gates.change(
        {**SLOWER, "test_it.py": TESTS.replace('max_regression="2%"', 'max_regression="50%"', 1)}
    )
    code, _, text = gates.gate()
    assert code == 1, text
    gates.accept("test_it.py::test_copy", "--scope", "limit", "--size", "max_regression=40%")
    assert gates.gate()[0] == 1
    accepted = gates.accept(
        "test_it.py::test_copy", "--scope", "limit", "--size", "max_regression=50%"
    )
    assert "  in place of " in accepted.stdout
    code, last, text = gates.gate()
    assert (code, last) == (0, "green: accepted, 1 test max_regression 2% -> 50% by this change"), (
        text
    )
    assert (
        "limit of test_it.py::test_copy: max_regression 2% -> 50% in this change (accepted, "
        in text
    )


def test_a_loosened_limit_of_a_call(gates: Gates) -> None:
    call = "gpu_benchmark(gpu_kernels.copy, device_buffer(NBYTES), device_buffer(NBYTES), max_latency={!r})"
    body = TESTS.replace(
        "gpu_benchmark(gpu_kernels.copy, device_buffer(NBYTES), device_buffer(NBYTES))",
        call.format("45 us"),
    )
    gates.change({"test_it.py": body})
    gates.merge()
    gates.change(
        {
            **SLOWER,
            "test_it.py": body.replace("45 us", "1 ms").replace(
                'max_regression="2%"', 'max_regression="50%"', 1
            ),
        }
    )
    sizes = ("--scope", "time", "--size", "30%", "--scope", "limit", "--size", "max_regression=50%")
    gates.accept("test_it.py::test_copy", *sizes)
    assert gates.gate()[0] == 1
    gates.accept("test_it.py::test_copy", *sizes, "--scope", "limit", "--size", "max_latency=1 ms")
    code, last, text = gates.gate()
    assert (code, last) == (
        0,
        "green: accepted, 1 test max_regression 2% -> 50%, max_latency 45 us -> 1 ms by this change",
    ), text


def test_two_files_of_one_change_do_not_add_up(gates: Gates) -> None:
    gates.change(SLOWER)
    for size in ("15%", "16%"):
        gates.accept("test_it.py::test_copy", "--scope", "time", "--size", size)
        (path,) = gates.project.folder.glob(".gpumem/accepted/*.json")
        path.rename(gates.project.folder / path.name)
    for path in gates.project.folder.glob("*.json"):
        path.rename(gates.project.folder / FOLDER / path.name)
    code, _, text = gates.gate()
    assert code == 4, text
    assert "both accept the time of test_it.py::test_copy; remove one" in text


def test_a_file_that_accepts_nothing_is_named(gates: Gates) -> None:
    """A saved run would begin a new baseline by it."""
    gates.accept("test_it.py::test_copy", "--scope", "time", "--size", "30%")
    code, last, text = gates.gate()
    assert (code, last) == (0, "green: 1 row"), text
    assert (
        "accepts what does not fail here; the next saved run begins a new baseline all the same"
        in text
    )
    gates.change(SLOWER)
    assert "accepts what does not fail" not in gates.gate()[2]


def test_without_a_baseline_the_figures_of_base_are_accepted(gates: Gates) -> None:
    shutil.rmtree(gates.project.folder / ".gpumem-baseline")
    gates.change({"kern.py": KERN.replace("64 <<", "65 <<")})
    words = f"{ALL} -- -k test_memory"
    code, _, text = gates.gate(words)
    assert code == 1, text
    assert "memory up to 65 MiB" in gates.accept("test_it.py::test_memory").stdout
    code, last, text = gates.gate(words)
    assert (code, last) == (0, "green: accepted, 1 test a peak of 65 MiB by this change"), text


def test_strict_takes_what_is_accepted(gates: Gates) -> None:
    gates.change(SLOWER)
    gates.accept("test_it.py::test_copy", "--scope", "time", "--size", "30%")
    code, last, text = gates.gate(options=["--screen-only", "--accept-from-change", "--strict"])
    assert (code, last) == (6, "no verdict: under --strict, the device is simulated"), text
