"""`gpumem duet` and `gpumem gate` from outside: real processes of pytest on the simulated device."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from sessions import PROCESSES, Repository, gate_result

TESTS = """
from kern import NBYTES

def measure(gpu_benchmark, device_buffer, gpu_kernels, nbytes):
    gpu_benchmark(gpu_kernels.copy, device_buffer(nbytes), device_buffer(nbytes))

def test_mine(gpu_benchmark, device_buffer, gpu_kernels):
    measure(gpu_benchmark, device_buffer, gpu_kernels, NBYTES)

def test_same(gpu_benchmark, device_buffer, gpu_kernels):
    measure(gpu_benchmark, device_buffer, gpu_kernels, 64 << 20)
"""
NEW = """
def test_new(gpu_benchmark, device_buffer, gpu_kernels):
    measure(gpu_benchmark, device_buffer, gpu_kernels, 1 << 20)
"""

Done = subprocess.CompletedProcess


class Project(Repository):
    """A repository whose base is committed."""

    def __init__(self, tmp_path: Path) -> None:
        super().__init__(tmp_path)
        self.write("kern.py", "NBYTES = 64 << 20\n")
        self.write("test_it.py", TESTS)
        self.commit()

    def duet(self, *arguments: str) -> Done[str]:
        return self.run("duet", *arguments, *(() if "--" in arguments else ("--", *PROCESSES)))

    def gate(self, *arguments: str) -> Done[str]:
        return self.run(
            "gate", "main", *arguments, "--max-regression", "5%", "--", "-q", "-n0", *PROCESSES
        )

    def start_duet(self, *arguments: str) -> subprocess.Popen[str]:
        return self.start("duet", *arguments, "--", *PROCESSES)

    def left(self) -> list[str]:
        return sorted(path.name for path in self.temporary.iterdir())


@pytest.fixture
def project(tmp_path: Path) -> Project:
    return Project(tmp_path)


def until(happened: Callable[[], bool], process: subprocess.Popen[str]) -> None:
    """Wait for something that the process does; give up with it."""
    while not happened():
        if process.poll() is not None:
            raise AssertionError(f"ended with {process.returncode}: {process.communicate()}")
        time.sleep(0.01)


def verdicts(path: Path) -> dict[str, Any]:
    return {
        verdict["key"]: verdict["outcome"] for verdict in json.loads(path.read_text())["verdicts"]
    }


def complaint(done: Done[str]) -> str:
    """The one line of a usage error."""
    assert done.returncode == 4, (done.stdout, done.stderr)
    assert done.stdout == ""
    assert "Traceback" not in done.stderr
    return done.stderr.splitlines()[-1]


def test_it_finds_the_planted_slow_down_of_chosen_tests(project: Project) -> None:
    """Half as many bytes more, not committed. Limits that every row breaks and a strict ini do not
    interfere."""
    project.write("pytest.ini", "[pytest]\ngpumem_max_latency = 1 ns\ngpumem_strict = true\n")
    project.write("kern.py", "NBYTES = 80 << 20\n")
    project.write(".gitignore", "out.json\n.benchmarks\n__pycache__\n")
    project.commit()
    project.write("kern.py", "NBYTES = 120 << 20\n")
    project.write("test_it.py", TESTS + NEW)
    chosen = ("--test", "test_it.py::test_mine", "--test", "test_it.py::test_same")
    done = project.duet("main", *chosen, "--json", "out.json")
    assert done.returncode == 1, done.stderr
    assert "after 1 pair: 2 rows undecided, at most" in done.stderr
    assert done.stderr.count("base: revision main (") == 1
    assert "with uncommitted changes" in done.stderr
    text = done.stdout.replace("\n  ", " ")
    assert "FAIL (simulated) test_it.py::test_mine: +" in text
    assert "PASS (simulated) test_it.py::test_same: " in text
    assert "why: declared bytes 160 MiB → 240 MiB" in text
    document = json.loads((project.folder / "out.json").read_text())
    assert document["simulated"] is True
    assert verdicts(project.folder / "out.json") == {
        "test_it.py::test_mine": "FAIL",
        "test_it.py::test_same": "PASS",
    }
    processes = document["processes"]
    assert len({process["pid"] for process in processes}) == len(processes) == 10
    starts = [process["utc"] for process in processes]
    assert starts == sorted(starts)
    assert (project.worktrees, project.left()) == (1, [])
    assert project.git("status", "--short").split() == ["M", "kern.py", "M", "test_it.py"]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_interrupted_it_prints_what_is_decided_and_removes_everything(
    project: Project, number: signal.Signals
) -> None:
    folder = project.folder.parent
    measured = TESTS.replace(
        "def measure(", f"PIDS = {str(folder / 'pids')!r}\n\ndef measure("
    ).replace(
        "    gpu_benchmark(", "    print(os.getpid(), file=open(PIDS, 'a'))\n    gpu_benchmark("
    )
    project.write("test_it.py", f"import os\n{measured}")
    project.commit()
    pids = folder / "pids"
    process = project.start_duet("main")
    until(lambda: pids.exists() and len(pids.read_text().split()) >= 5, process)
    assert project.worktrees == 2
    process.send_signal(number)
    out, said = process.communicate()
    assert process.returncode == 130, said
    assert "Traceback" not in said
    assert "UNDECIDED (simulated) test_it.py::test_mine: " in out
    stopped = "stopped; 0 of 2 rows decided"
    assert said.splitlines().count(stopped) == 1
    assert (project.worktrees, project.left()) == (1, [])
    # No process is left that measures on.
    for pid in set(pids.read_text().split()):
        with suppress(FileNotFoundError):  # else its parent, which is gone too, did not wait for it
            assert ") Z " in Path(f"/proc/{pid}/stat").read_text()


def test_a_gate_that_is_stopped_in_its_session_says_so_and_leaves_nothing(project: Project) -> None:
    begun = project.folder.parent / "begun"
    waits = f"    open({str(begun)!r}, 'w').close()\n    threading.Event().wait()\n"
    project.write("test_it.py", f"import threading\n{TESTS}\ndef test_x():\n{waits}")
    project.commit()
    process = project.start("gate", "main", "--", "-s", stderr=subprocess.STDOUT)
    until(begun.exists, process)
    process.send_signal(signal.SIGINT)
    said, _ = process.communicate()
    assert process.returncode == 130, said
    assert "gpumem gate: stopped, no verdict" in said.splitlines(), said
    assert not list(project.temporary.glob("gpumem-*"))


def test_a_gate_that_is_stopped_in_its_duet_leaves_no_results_to_accept_from(
    project: Project,
) -> None:
    process = project.start("gate", "main", "--max-regression", "5%", "--", "-n0", *PROCESSES)
    assert process.stderr is not None
    while "a duet decides" not in process.stderr.readline():
        assert process.poll() is None
    process.send_signal(signal.SIGINT)
    _, said = process.communicate()
    assert process.returncode == 130, said
    assert "gpumem gate: stopped, no verdict" in said.splitlines()
    assert "gpumem duet" not in said
    done = project.run("accept", "test_it.py::test_same", "--reason", "it is so")
    assert done.returncode == 4
    assert "there is no gpumem-results/results.json" in done.stderr


def test_a_crash_loses_one_process_of_a_side_that_collects_once(project: Project) -> None:
    folder = project.folder.parent
    crash = f"    with open({str(folder / 'measured')!r}, 'a') as file:\n        file.write('.')\n"
    crash += "        if file.tell() in (2, 6):\n            os.kill(os.getpid(), 9)\n"
    collected = f"import os\nprint(os.getpid(), file=open({str(folder / 'collected')!r}, 'a'))\n"
    call = "    measure(gpu_benchmark, device_buffer, gpu_kernels, NBYTES)"
    project.write("test_it.py", collected + TESTS.replace(call, crash + call))
    project.commit()
    done = project.duet("main", "--json", "out.json", "--strict")
    assert done.returncode == 6, done.stderr  # the device is simulated
    assert set(verdicts(project.folder / "out.json").values()) == {"PASS"}
    assert done.stderr.count("pair 1 is taken again: ended by SIGKILL") == 1
    assert done.stderr.count("pair 2 is taken again: test_it.py::test_mine: ") == 1
    assert "crashed: ended by SIGKILL" in done.stderr
    assert len((folder / "collected").read_text().split()) == 2


def test_what_cannot_be_played_is_one_line(project: Project) -> None:
    refused = project.duet
    assert "BASE no-such is no revision" in complaint(refused("no-such"))
    assert "--base-python none: No such file" in complaint(refused("main", "--base-python", "none"))
    assert "--max-regression: '1' is not understood" in complaint(
        refused("main", "--max-regression", "1")
    )
    assert "-n4 among pytest's arguments: a duet measures one process at a time" in complaint(
        refused("main", "--", "-n4")
    )
    assert "--benchmark-json=x among" in complaint(refused("main", "--", "--benchmark-json=x"))
    assert "--json: none/x: there is no folder" in complaint(refused("main", "--json", "none/x"))
    assert "pytest ended with 4: " in complaint(project.duet("main", "--", "--no-such-option"))
    assert (project.worktrees, project.left()) == (1, [])


def test_a_relative_path_of_base_python_is_of_the_folder_of_the_command(project: Project) -> None:
    """Base runs in another folder. The path stays a link: of a venv, its target has no pytest."""
    (project.folder / "base-venv").symlink_to(sys.prefix)
    python = ("--base-python", "base-venv/bin/python")
    done = project.duet("main", "--test", "test_it.py::test_same", *python)
    assert done.returncode == 0, (done.stdout, done.stderr)
    done = project.gate(*python)
    assert "a duet decides 2 rows" in done.stderr
    assert done.returncode == 0, (done.stdout, done.stderr)


def test_base_and_head_with_other_measuring_settings_are_refused(project: Project) -> None:
    project.write("pytest.ini", "[pytest]\ngpumem_precision = 5%\n")
    said = complaint(project.duet("main"))
    assert "precision is 0.001 in base and 0.05 in head; give -o gpumem_precision" in said
    assert project.worktrees == 1


def test_a_base_whose_plugin_writes_other_results_is_one_line(project: Project) -> None:
    hook = (
        "def pytest_benchmark_update_json(output_json):\n    output_json['gpumem']['schema'] = 1\n"
    )
    project.write("conftest.py", f"import pytest\n\n@pytest.hookimpl(trylast=True)\n{hook}")
    project.commit()
    project.write("conftest.py", "")
    said = complaint(project.duet("main"))
    assert "base (revision main (" in said
    assert ") wrote results of another version of this plugin: " in said


def test_a_base_that_imports_heads_code_is_found_out(project: Project) -> None:
    source = project.folder / "src"
    source.mkdir()
    (source / "mine.py").write_text("")
    project.write("conftest.py", f"import sys\nsys.path.insert(0, {str(source)!r})\nimport mine\n")
    project.commit()
    said = complaint(project.duet("main"))
    assert "base (revision main (" in said
    assert f"ran code of the other side: mine from {source / 'mine.py'}" in said


def test_a_test_without_its_parameters_is_all_of_them(project: Project) -> None:
    sized = TESTS.replace(
        "def test_mine(",
        "import pytest\n\n@pytest.mark.parametrize('mib', [1, 2])\ndef test_sized(mib, ",
    )
    project.write("test_it.py", sized.replace("NBYTES)", "mib << 20)"))
    # Each process would write these.
    own = "--gpumem-save --gpumem-report=r.html --junitxml=mine.xml --benchmark-autosave"
    # And it measures alone, whatever the project's other sessions do.
    project.write("pytest.ini", f"[pytest]\naddopts = {own} -n 2\n")
    project.commit()
    done = project.duet("main", "--json", "out.json", "--test", "test_it.py::test_sized")
    assert done.returncode == 0, done.stderr
    assert verdicts(project.folder / "out.json") == {
        "test_it.py::test_sized[1]": "PASS",
        "test_it.py::test_sized[2]": "PASS",
    }
    assert not {"mine.xml", "r.html", ".pytest_cache"} & {
        path.name for path in project.folder.iterdir()
    }
    assert not list((project.folder / ".benchmarks").rglob("*.json"))
    done = project.duet("main", "--test", "test_it.py::test_size")
    assert "no such test on either side" in done.stdout
    project.write("test_cpu.py", "def test_cpu():\n    pass\n")
    for test in ("test_cpu.py::test_cpu", "test_cpu.py"):
        done = project.duet("HEAD", "--test", test)
        assert f"NO VERDICT {test}: nothing was measured" in done.stdout


SIDES = """
import os
import pytest
from kern import HEAD

def copy(gpu_benchmark, device_buffer, gpu_kernels, mib=64, **keywords):
    gpu_benchmark(gpu_kernels.copy, device_buffer(mib << 20), device_buffer(mib << 20), **keywords)

def test_breaks(gpu_benchmark, device_buffer, gpu_kernels):
    copy(gpu_benchmark, device_buffer, gpu_kernels)
    assert not HEAD

def test_broken(gpu_benchmark, device_buffer, gpu_kernels):
    copy(gpu_benchmark, device_buffer, gpu_kernels)
    assert HEAD

@pytest.mark.gpumem(max_peak="1 GiB")
def test_memory_alone_is_not_compared(device_buffer):
    device_buffer(1 << 20)

def test_always_broken(gpu_benchmark):
    assert False

def test_skips(gpu_benchmark, device_buffer, gpu_kernels):
    if not HEAD:
        pytest.skip("no torch")
    copy(gpu_benchmark, device_buffer, gpu_kernels)

@pytest.mark.parametrize("limit", ["900%", None])
def test_slower(gpu_benchmark, device_buffer, gpu_kernels, limit):
    size = 128 if HEAD else 64
    copy(gpu_benchmark, device_buffer, gpu_kernels, size, label="slow", max_regression=limit)
    copy(gpu_benchmark, device_buffer, gpu_kernels, label="new" if HEAD else "old")
"""


def test_what_differs_between_the_sides(project: Project) -> None:
    project.write("kern.py", "HEAD = False\n")
    project.write("test_it.py", SIDES)
    project.write("test_imports.py", f"{SIDES.partition('def test_')[0]}\ntest_import = copy\n")
    project.commit()
    project.write("kern.py", "HEAD = True\n")
    project.write("test_imports.py", "import no_such_library\n")
    project.write("test_new.py", TESTS.replace("from kern import NBYTES", "NBYTES = 1 << 20"))
    project.write("test_import.py", "import no_such_library\n")
    # The limit of a test is its own, whatever the option says.
    done = project.duet("main", "--json", "out.json", "--max-regression", "5%")
    assert done.returncode == 1, done.stderr
    document = json.loads((project.folder / "out.json").read_text())
    found = {one["key"].partition("::")[2]: one for one in document["verdicts"]}
    assert len(found) == len(document["verdicts"])
    assert {name: one["outcome"] for name, one in found.items()} == {
        "test_breaks": "FAIL",
        "test_import": "FAIL",
        "": "FAIL",  # test_import.py
        "test_broken": None,
        "test_always_broken": None,
        "test_skips": None,
        r"test_slower[900%][slow]": "PASS",
        r"test_slower[None][slow]": "FAIL",
        r"test_slower[900%][old]": None,
        r"test_slower[None][old]": None,
        r"test_slower[900%][new]": "NEW",
        r"test_slower[None][new]": "NEW",
        "test_mine": "NEW",
        "test_same": "NEW",
    }
    sentences = {name: one["sentence"] for name, one in found.items()}
    assert sentences["test_breaks"] == "head: failed, assert not True"
    assert "No module named 'no_such_library'" in sentences[""]
    assert sentences["test_skips"] == "base: skipped, Skipped: no torch"
    assert sentences["test_broken"] == "base: failed, assert False"
    assert sentences[r"test_slower[900%][new]"] == "base: no such measurement"
    assert sentences[r"test_slower[900%][old]"] == "head: no such measurement"
    assert found[r"test_slower[None][slow]"]["paired"]["change"] > 0.9
    limits = [found[rf"test_slower[{of}][slow]"]["paired"]["limit"] for of in ("900%", None)]
    assert limits == [pytest.approx(9.0), 0.01]


COUNTED = """
from kern import HEAD

def number(name):
    with open(f"{FOLDER}/{name}", "a") as file:
        file.write(".")
        return file.tell()

def copy(gpu_benchmark, device_buffer, gpu_kernels, kib=65536):
    gpu_benchmark(gpu_kernels.copy, device_buffer(kib << 10), device_buffer(kib << 10))

def test_noisy(gpu_benchmark, device_buffer, gpu_kernels):
    slow = HEAD and number("noisy") == 1
    copy(gpu_benchmark, device_buffer, gpu_kernels, 65536 + 5300 * slow)

def test_once(gpu_benchmark, device_buffer, gpu_kernels):
    copy(gpu_benchmark, device_buffer, gpu_kernels)

def test_always(gpu_benchmark, device_buffer, gpu_kernels):
    copy(gpu_benchmark, device_buffer, gpu_kernels)

def test_fails_at_last(gpu_benchmark, device_buffer, gpu_kernels):
    copy(gpu_benchmark, device_buffer, gpu_kernels)
    assert not HEAD or number("fails") < 4
"""
THROTTLED = """
import pytest
from kern import HEAD
from test_it import number

@pytest.hookimpl(trylast=True)
def pytest_benchmark_update_json(output_json):
    for row in output_json["gpumem"]["rows"]:
        name = row["nodeid"].partition("::")[2]
        if HEAD and (name == "test_always" or (name == "test_once" and number(name) == 3)):
            row["verdict"] |= {"outcome": "UNDECIDED", "code": "conditions", "reason": "throttled"}
"""


def test_what_is_open_is_measured_on_and_a_disturbed_pair_again(project: Project) -> None:
    project.write("kern.py", "HEAD = False\n")
    project.write("test_it.py", f"FOLDER = {str(project.folder.parent)!r}\n{COUNTED}")
    project.write("conftest.py", THROTTLED)
    project.commit()
    project.write("kern.py", "HEAD = True\n")
    done = project.duet("main", "--json", "out.json", "--max-regression", "10%")
    assert done.returncode == 1, done.stderr
    document = json.loads((project.folder / "out.json").read_text())
    found = {one["key"].partition("::")[2]: one for one in document["verdicts"]}
    assert {
        name: (one["outcome"], one["paired"] and one["paired"]["pairs"])
        for name, one in found.items()
    } == {
        "test_noisy": ("PASS", 8),
        "test_once": ("PASS", 5),
        "test_always": ("UNDECIDED", None),
        "test_fails_at_last": ("FAIL", 3),
    }
    sentence = "head, also when it was taken again: throttled"
    assert found["test_always"]["sentence"] == sentence
    assert found["test_fails_at_last"]["sentence"].startswith("head: failed, AssertionError: ")
    processes = document["processes"]
    again = [(one["pair"], one["attempt"], *one["rows"]) for one in processes if one["attempt"] > 1]
    # Each by a process of each side, of what is to be measured again alone.
    assert again == [
        again_of
        for pair, attempt, name in [
            (1, 2, "test_always"),
            (1, 3, "test_always"),
            (3, 2, "test_once"),
            (4, 2, "test_fails_at_last"),
            (4, 3, "test_fails_at_last"),
        ]
        for again_of in [(pair, attempt, f"test_it.py::{name}")] * 2
    ]
    assert [one["side"] for one in processes[2:4]] == [one["side"] for one in processes[:2]]
    last = [list(one["rows"]) for one in processes if one["pair"] > 5]
    assert last == [["test_it.py::test_noisy"]] * 6


def test_sides_on_two_devices_and_a_head_that_changes_are_refused(project: Project) -> None:
    project.write("pytest.ini", "[pytest]\ngpumem_device = sim:h200\n")
    project.commit()
    project.write("pytest.ini", "[pytest]\ngpumem_device = sim\n")
    said = complaint(project.run("duet", "main", "--", *PROCESSES[2:]))
    assert "the processes ran on different devices: " in said
    project.write("test_it.py", TESTS + "    open('made.py', 'w').close()\n")
    assert "was changed while it was measured; begin anew" in complaint(project.duet("main"))
    assert project.worktrees == 1


def test_a_gate_compares_what_has_no_baseline_and_what_changed_its_sampler(
    project: Project,
) -> None:
    """One test has no baseline, the other has one and now asks for a sampler that hides how long it takes."""
    options = "-m pytest --gpumem --gpumem-save --gpumem-processes=1 -k test_same"
    save = [sys.executable, *options.split(), *PROCESSES]
    subprocess.run(
        save, cwd=project.folder, env=project.environment, check=True, capture_output=True
    )
    project.write("kern.py", "NBYTES = 128 << 20\n")
    hidden = TESTS.replace(
        "def test_same", "@pytest.mark.gpumem(sampler='host')\ndef test_same"
    ).replace("64 <<", "128 <<")
    project.write("test_it.py", "import pytest\n" + hidden + NEW)
    project.environment["GITHUB_ACTIONS"] = "true"
    done = project.gate()
    assert done.returncode == 1, done.stdout + done.stderr
    assert "a duet decides 2 rows" in done.stderr
    assert verdicts(project.folder / "gpumem-results" / "duet.json") == {
        "test_it.py::test_mine": "FAIL",
        "test_it.py::test_same": "FAIL",
    }
    found = json.loads((project.folder / "gpumem-results" / "duet.json").read_text())["verdicts"]
    (same,) = (one["sentence"] for one in found if one["key"] == "test_it.py::test_same")
    assert same.startswith("measured in another way, which may hide a slow-down: sampler was ")
    assert gate_result(done.stdout) == "gpumem gate: red (simulated): 2 of 3 rows fail"
    source = (project.folder / "test_it.py").read_text().splitlines()
    lines_of = {
        line.partition("(")[0].removeprefix("def "): number for number, line in enumerate(source, 1)
    }
    errors = {
        line.partition(",title")[0]
        for line in done.stdout.splitlines()
        if line.startswith("::error ")
    }
    decorated = lines_of["test_same"] - 1
    assert errors == {
        f"::error file=test_it.py,line={line}" for line in (lines_of["test_mine"], decorated)
    }
    assert "--gpumem-save" not in done.stdout  # it would store what the duet has yet to judge
    whys = [
        line
        for line in (project.folder / "gpumem-results" / "summary.md").read_text().splitlines()
        if line.strip().startswith("why: ")
    ]
    assert sum("declared bytes 128 MiB → 256 MiB" in line for line in whys) == 2
