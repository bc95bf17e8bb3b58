"""A gate expects what its base selects on this machine, and holds each test to the stricter limits of base and the change."""

from __future__ import annotations

import html
import json
import shlex
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from ci_project import IN_ONE_PROCESS, SIMULATED, Project, saved_project
from click.testing import CliRunner
from sessions import gate_result, slower

from pytest_gpumem.cli import main

MEASURE = "gpu_benchmark(gpu_kernels.copy, device_buffer({0}), device_buffer({0}){1})"
COPY = MEASURE.format("NBYTES", "")
TESTS = f"""
import pytest
from kern import NBYTES

@pytest.mark.gpu
@pytest.mark.gpumem(max_regression="5%")
def test_copy(gpu_benchmark, device_buffer, gpu_kernels):
    {COPY}

@pytest.mark.gpu
@pytest.mark.parametrize("mib", [16, 32])
@pytest.mark.gpumem(max_latency="1 s")
def test_sizes(gpu_benchmark, device_buffer, gpu_kernels, mib):
    {MEASURE.format("mib << 20", "")}

@pytest.mark.gpu
@pytest.mark.gpumem(max_peak="256 MiB")
def test_memory(device_buffer):
    device_buffer(NBYTES)

@pytest.mark.gpu
@pytest.mark.skip(reason="in base too")
@pytest.mark.gpumem(max_latency="1 s")
def test_skipped(gpu_benchmark):
    pass

@pytest.mark.gpu
def test_cpu():
    pass

def test_skips():
    pytest.skip("in base too")

@pytest.mark.gpumem(max_latency="1 s")
def test_skips_with_a_limit(gpu_benchmark):
    pytest.skip("in base too")
"""
EXACT = f"""
import pytest
from kern import NBYTES

@pytest.mark.gpumem(max_peak_regression="0 B")
def test_peak(device_buffer):
    device_buffer(NBYTES)

@pytest.mark.gpumem(max_copied_bytes="base")
def test_copied(gpu_benchmark, device_buffer, gpu_kernels):
    {COPY.replace("gpu_kernels.copy", "gpu_kernels.memcpy")}

@pytest.mark.gpumem(max_copied_bytes="base", max_kernels="base")
def test_counts(gpu_benchmark, device_buffer, gpu_kernels):
    {COPY}
"""
INI = f"{IN_ONE_PROCESS}markers = gpu\n"
GPU = "--screen-only origin/main -- -m gpu"

Change = dict[str, str]
Gate = Callable[..., tuple[int, str]]


def publish(project: Project, branch: str, *new: str) -> None:
    """Commit what changed, and new files, as a branch of origin."""
    project.git("add", "--update")
    for name in new:
        project.git("add", name)
    project.git("commit", "-qm", branch)
    project.git("update-ref", f"refs/remotes/origin/{branch}", "HEAD")


def publish_unsaved(project: Project, branch: str, tests: str) -> None:
    """Publish tests as a branch of origin, of which no run is saved."""
    project.write("test_it.py", tests)
    publish(project, branch)
    shutil.rmtree(project.folder / ".gpumem-baseline")


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory, programs: Path) -> Project:
    return saved_project(
        tmp_path_factory.mktemp("saved"), programs, {"test_it.py": TESTS, "pytest.ini": INI}
    )


@pytest.fixture
def project(saved: Project, tmp_path: Path) -> Project:
    return saved.copied(tmp_path)


@pytest.fixture
def gate(project: Project, monkeypatch: pytest.MonkeyPatch) -> Gate:
    """Runs a gate of a change, with files by name; gives its exit code and its output."""

    def run(
        change: Change, words: str = GPU, command: str = "gate", folder: str = "."
    ) -> tuple[int, str]:
        for name, text in change.items():
            project.write(name, text)
        for name, value in {"GPUMEM_BASELINE": ".gpumem-baseline", **SIMULATED}.items():
            monkeypatch.setenv(name, value)
        monkeypatch.chdir(project.folder / folder)
        done = CliRunner().invoke(
            main, [*command.split(), *shlex.split(words.replace("{folder}", str(project.folder)))]
        )
        return done.exit_code, done.output

    return run


def replaced(old: str, new: str) -> Change:
    assert old in TESTS
    return {"test_it.py": TESTS.replace(old, new, 1)}


def test_nothing_changed_is_green_and_nothing_is_saved(
    gate: Gate, project: Project, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GPUMEM_SAVE", "1")
    saved = set(project.folder.rglob(".gpumem-baseline/**/*.json"))
    code, text = gate({})
    assert set(project.folder.rglob(".gpumem-baseline/**/*.json")) == saved != set()
    assert code == 0, text
    assert "lost" not in text


DESELECTED = INI.replace("addopts =", "addopts = --deselect test_it.py::test_memory")
UNMARKED = replaced("@pytest.mark.gpu\n", "")["test_it.py"]
SKIPPED = UNMARKED.replace(
    "def test_memory", '@pytest.mark.skip(reason="not today")\ndef test_memory'
)
LIBRARY = 'import pytest\npytest.importorskip("no_such_library")'


@pytest.mark.parametrize(
    ("change", "lines"),
    [
        (
            replaced("def test_copy", "def test_renamed") | {"pytest.ini": DESELECTED},
            ["copy: its test is no longer collected", "memory: deselected by --deselect of"],
        ),
        (
            {"test_it.py": SKIPPED},
            ["copy: deselected by -m", "memory: its test skipped (not today)"],
        ),
        (
            {"pytest.ini": INI + "testpaths = other\n", "other/test_b.py": ""},
            ["copy: outside of testpaths"],
        ),
        ({"conftest.py": 'collect_ignore = ["test_it.py"]\n'}, ["copy: ignored"]),
        (replaced("import pytest", LIBRARY), ["copy: test_it.py skipped"]),
    ],
    ids=["renamed, addopts", "marked otherwise, skipped", "testpaths", "collect_ignore", "import"],
)
def test_what_base_selects_and_the_change_does_not_run_is_lost(
    gate: Gate, change: Change, lines: list[str]
) -> None:
    code, text = gate(change)
    assert code == 1, text
    for line in lines:
        assert f"gpumem gate: lost: test_it.py::test_{line}" in text
    assert "gpumem gate: red (simulated): " in gate_result(text)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (replaced("@pytest.mark.gpu\ndef test_cpu():\n    pass\n", ""), GPU),
        (replaced("def test_copy", "def test_renamed"), "--screen-only origin/main -- -k memory"),
        ({}, f"{GPU} --splits 2 --group 1"),
        ({}, "--screen-only origin/main -- {folder}/test_it.py --rootdir={folder}"),
    ],
    ids=["nobody relies on it", "left out by the words", "of another runner", "whole paths"],
)
def test_what_the_words_leave_out_or_allow_is_not_lost(
    gate: Gate, change: Change, words: str
) -> None:
    code, text = gate(change, words)
    assert " lost: " not in text, text
    assert "gate: red" not in text
    assert code in (0, 6)  # a test that was renamed is new
    if not change:
        assert code == 0, text


def test_a_change_to_a_test_that_base_leaves_out_by_its_own_files_is_no_loss(
    gate: Gate, project: Project
) -> None:
    """The baseline may hold measurements of a nightly run."""
    project.write("pytest.ini", INI.replace("addopts =", 'addopts = -k "not sizes"'))
    publish(project, "quick")
    code, text = gate({}, "--screen-only origin/quick -- -m gpu")
    assert code == 0, text
    assert ": left out of origin/quick too" in text


def test_a_skip_in_the_body_is_a_loss_unless_base_skips_too(gate: Gate) -> None:
    words = "--screen-only origin/main -- -k skips_with_a_limit"
    code, text = gate(
        {}, words.replace("-k skips_with_a_limit", '-k "skips_with_a_limit or memory"')
    )
    assert code == 0, text
    assert "one pair of processes, for the skips of BASE" in text
    assert "not run: test_it.py::test_skips_with_a_limit: skipped in origin/main too" in text
    assert "lost: " not in text
    assert "nothing was measured" not in text
    skips = replaced(
        "def test_memory(device_buffer):",
        'def test_memory(device_buffer):\n    pytest.skip("not today")',
    )
    code, text = gate(skips, "--screen-only origin/main -- -k memory")
    assert code == 1, text
    assert "lost: test_it.py::test_memory: its test skipped (not today)" in text


# The exact figures of base


@pytest.fixture
def exact(project: Project) -> Project:
    """The project with limits on exact figures, and without a baseline."""
    publish_unsaved(project, "exact", EXACT)
    return project


GROWN = {"kern.py": "NBYTES = 80 << 20\n"}


@pytest.mark.usefixtures("exact")
def test_exact_figures_that_grow_are_red_without_a_baseline(gate: Gate) -> None:
    code, text = gate({}, "origin/exact")
    assert code == 0, text
    assert gate_result(text) == "gpumem gate: green (simulated): 3 rows"
    code, text = gate(GROWN, "origin/exact")
    assert code == 1, text
    assert gate_result(text) == "gpumem gate: red (simulated): 2 of 3 rows fail"
    summary = Path("gpumem-results", "results.json").read_text()
    peak = "a peak of 80 MiB against 64 MiB of base (+25.0 %), above max_peak_regression 0 B"
    assert peak in summary
    copied = (
        "80 MiB copied in a launch, 64 MiB copied in a launch in base, above max_copied_bytes base"
    )
    assert copied in summary
    shown = " ".join(text[text.index("gpumem gate: red") :].split())
    assert copied in shown
    repeat = "duet origin/exact --test test_it.py::test_peak --test test_it.py::test_copied"
    repeat += " -- --gpumem-footprint=on"  # also where base has no such limit
    assert f"to repeat: gpumem {repeat} to accept" in shown
    repeated = CliRunner().invoke(main, repeat.split())
    assert repeated.exit_code == 1, repeated.output
    assert peak in " ".join(repeated.output.split())
    assert copied in Path("gpumem-results", "summary.md").read_text()


def test_a_count_that_base_has_lowered_is_held_to_base(gate: Gate, project: Project) -> None:
    """The reference has both counts."""
    test = """
import pytest

@pytest.mark.gpumem(max_gpu_page_faults="base")
def test_faults(gpu_benchmark, managed_buffer, prefetched_buffer, gpu_kernels):
    gpu_benchmark(gpu_kernels.write, managed_buffer(1 << 20))
"""
    shutil.rmtree(project.folder / ".gpumem-baseline")
    for name, buffer in (("faults", "managed"), ("lowered", "prefetched")):
        project.write("test_it.py", test.replace("managed_buffer(", f"{buffer}_buffer("))
        publish(project, name)
        save = ". .venv/bin/activate; python -m pytest --gpumem --gpumem-save"
        done = project.run(save, {"GPUMEM_BASELINE": ".gpumem-baseline", **SIMULATED})
        assert done.returncode == 0, done.stdout + done.stderr
    code, text = gate({"README.md": "words\n"}, "origin/lowered")
    assert code == 0, text
    code, text = gate({"test_it.py": test}, "origin/lowered")
    assert code == 1, text
    assert "0 GPU page faults in a launch in base, above max_gpu_page_faults base" in text


def test_what_to_do_about_many_tests_names_five_and_says_that_there_are_more(
    gate: Gate, exact: Project
) -> None:
    each = '@pytest.mark.parametrize("n", range(8))\ndef test_copied(n, '
    exact.write("test_it.py", EXACT.replace("def test_copied(", each))
    publish(exact, "many", "test_it.py")
    code, text = gate(GROWN, "origin/many -- -k copied")
    assert code == 1, text
    steps = [line for line in text.splitlines() if line.startswith("to ")]
    assert len(steps) == 2
    for step in steps:
        assert step.count("test_it.py::") == 5
        assert step.endswith("  # and 3 further")


@pytest.mark.usefixtures("exact")
def test_a_new_label_in_place_of_one_of_base_is_not_green_without_a_baseline(gate: Gate) -> None:
    call = "gpu_kernels.memcpy, device_buffer(NBYTES), device_buffer(NBYTES)"
    assert call in EXACT
    change = {**GROWN, "test_it.py": EXACT.replace(call, f'{call}, label="new"')}
    code, text = gate(change, "origin/exact -- -k copied")
    assert code == 6, text
    why = "only origin/exact measures it"
    assert f"not judged: test_it.py::test_copied: {why}" in text
    assert gate_result(text).endswith(": 1 not judged"), text


LABELS = f"""
from kern import NBYTES

TIMES, PARTS = ["one", "two"], ["load", "step"]

def test_labels(gpu_benchmark, device_buffer, gpu_kernels, gpu_memory):
    for name in TIMES:
        {MEASURE.format("NBYTES", ", label=name")}
    for name in PARTS:
        with gpu_memory.watch(name, max_peak="1 GiB"):
            device_buffer(NBYTES)
"""


def test_what_a_change_measures_no_more_is_not_green_without_a_baseline(
    gate: Gate, project: Project
) -> None:
    publish_unsaved(project, "labels", LABELS)
    words = "--accept-from-change origin/labels --max-regression 5%"
    code, text = gate({}, words)
    assert (code, "lost" in text) == (0, False), text
    change = {"test_it.py": LABELS.replace(', "two"', "").replace(', "step"', "")}
    code, text = gate(change, words)
    assert code == 6, text
    assert gate_result(text).endswith(": 2 not judged"), text
    for label in ("two", "step"):
        key = f"test_it.py::test_labels[{label}]"
        assert f"not judged: {key}: only origin/labels measures it" in text
        accept = ["accept", key, "--change", "removed", "--reason", "meant"]
        accepted = CliRunner().invoke(main, accept)
        assert accepted.exit_code == 0, accepted.output
    code, text = gate({}, words)
    assert code == 0, text
    assert gate_result(text).endswith(": 3 rows, 1 of them measured; 2 lost rows accepted"), text


ONCE = f"""
import pytest
from kern import NBYTES

loaded = []

def load(gpu_memory, device_buffer):
    if not loaded:
        with gpu_memory.watch("load"):
            loaded.append(device_buffer(NBYTES).nbytes)

def test_first(gpu_memory, device_buffer):
    load(gpu_memory, device_buffer)

@pytest.mark.gpumem(max_regression="5%")
def test_second(gpu_memory, gpu_benchmark, device_buffer, gpu_kernels):
    load(gpu_memory, device_buffer)
    {COPY}
"""


def test_what_the_first_test_of_a_process_measures_is_not_missing(
    gate: Gate, project: Project
) -> None:
    """The duet runs `test_second` alone, which loads there, on both sides."""
    publish_unsaved(project, "once", ONCE)
    code, text = gate({}, "origin/once")
    assert code == 0, text
    assert gate_result(text).endswith(": 3 rows, 2 of them measured"), text


def test_what_base_has_grown_by_is_held_against_the_oldest_revision(
    gate: Gate, exact: Project
) -> None:
    """Nobody accepted it: steps that each pass against BASE add up. Each oldest revision has a file."""
    save = ". .venv/bin/activate; python -m pytest --gpumem --gpumem-save --gpumem-processes 1"
    later = EXACT[: EXACT.index("@pytest.mark.gpumem(max_copied")].replace(
        "test_peak", "test_later"
    )
    for names in ([], ["test_later.py"]):
        for name in names:
            exact.write(name, later)
            publish(exact, "later", name)
        done = exact.run(save, {"GPUMEM_BASELINE": ".gpumem-baseline", **SIMULATED})
        assert done.returncode == 0, done.stdout + done.stderr
    exact.write("kern.py", GROWN["kern.py"])
    publish(exact, "grown")
    code, text = gate({"README.md": "words\n"}, "origin/grown -- -k 'peak or later'")
    assert code == 1, text
    words = "1 row beyond the limit over the reference: a duet with its oldest revision "
    assert text.count(words) == 2
    assert "against the oldest revision of the reference: a peak of 80 MiB against 64 MiB" in text
    repeats = [line for line in text.splitlines() if line.startswith("to repeat: gpumem duet ")]
    for line in repeats:
        assert CliRunner().invoke(main, shlex.split(line)[3:]).exit_code == 1
    assert len(repeats) == 2
    files = sorted(exact.folder.glob("gpumem-results/creep-*.json"))
    compared = [json.loads(file.read_text())["verdicts"] for file in files]
    tests = {verdict["key"] for verdicts in compared for verdict in verdicts}
    assert (len(files), tests) == (2, {"test_it.py::test_peak", "test_later.py::test_later"})
    assert all(file.name in text for file in files)
    assert gate({}, "--screen-only origin/grown -- -k nothing")[0] == 6
    assert not any(file.exists() for file in files)


@pytest.mark.usefixtures("exact")
def test_exact_figures_that_base_does_not_have_are_new(gate: Gate) -> None:
    limit = "@pytest.mark.gpumem(max_peak_regression='0 B')"
    new = f"{EXACT}\n{limit}\ndef test_new(device_buffer):\n    device_buffer(1 << 20)\n"
    code, text = gate({"test_it.py": new}, "--screen-only origin/exact -- -k new")
    assert code == 0, text
    assert "gpumem gate: NEW test_it.py::test_new: base does not have it" in text


def test_a_test_that_base_does_not_measure_is_new_after_one_pair(
    gate: Gate, project: Project
) -> None:
    test = '@pytest.mark.gpumem(max_peak="1 GiB")\ndef test_a(device_buffer'
    base = f"import pytest\n\n{test}):\n    device_buffer(1 << 20)\n"
    project.write("test_a.py", base)
    publish(project, "memory", "test_a.py")
    measures = f"{test}, gpu_benchmark, gpu_kernels):\n    {COPY.replace('NBYTES', '1 << 20')}\n"
    change = {"test_a.py": f"import pytest\n\n{measures}"}
    code, text = gate(change, "origin/memory --max-regression 5% -- test_a.py")
    assert code == 0, text
    assert "NEW test_a.py::test_a: base does not have it" in text
    duet = json.loads(Path("gpumem-results", "duet.json").read_text())
    assert len(duet["processes"]) == 2


def test_a_test_that_fails_once_in_the_first_pair_is_measured_again(
    gate: Gate, project: Project
) -> None:
    runs = project.folder.parent / "runs"
    fails = f"with open({str(runs)!r}, 'a+') as file:\n        print(file=file)\n"
    fails += f"    assert open({str(runs)!r}).read().count('\\n') != 2"
    shutil.rmtree(project.folder / ".gpumem-baseline")
    change = replaced(COPY, f"{fails}\n    {COPY}")
    code, text = gate(change, "origin/main -- -k test_copy")
    assert code == 0, text
    assert "pair 1 is taken again: test_it.py::test_copy: head: failed, AssertionError" in text


def test_a_base_that_crashes_is_no_verdict(gate: Gate, exact: Project) -> None:
    exact.write("conftest.py", "import os\n\ndef pytest_runtest_setup():\n    os._exit(7)\n")
    publish(exact, "crash", "conftest.py")
    code, text = gate({"conftest.py": ""}, "origin/crash -- -k peak")
    assert code == 6, text
    assert "UNDECIDED test_it.py::test_peak: base: crashed: ended with exit code 7" in text
    assert gate_result(text) == "gpumem gate: no verdict (simulated): 1 of 1 row open"


def test_a_base_whose_tests_cannot_be_collected_is_no_verdict(gate: Gate, project: Project) -> None:
    project.write("conftest.py", "syntax error\n")
    publish(project, "broken", "conftest.py")
    code, text = gate({"conftest.py": ""}, "--screen-only origin/broken")
    assert code == 6, text
    assert text.splitlines()[-1].startswith(
        "gpumem: BASE: its tests cannot be collected: base (merge base "
    )


TOLD = """
import os, time
FOLDER = {!r}

def pytest_collection_finish(session):
    until = time.monotonic() + 60
    while {!r} and not os.path.exists(os.path.join(FOLDER, "change")) and time.monotonic() < until:
        pass
    open(os.path.join(FOLDER, {!r}), "w").close()
"""


def test_the_tests_of_base_and_change_are_collected_at_once_and_no_test_runs_before(
    gate: Gate, project: Project
) -> None:
    folder = str(project.folder.parent)
    project.write("conftest.py", TOLD.format(folder, True, "base"))
    publish(project, "late", "conftest.py")
    test = f"import os\n\ndef test_it():\n    assert os.path.exists({folder + '/base'!r})\n"
    change = {"conftest.py": TOLD.format(folder, False, "change"), "test_late.py": test}
    code, text = gate(change, "--screen-only origin/late -- -k 'test_late or test_copy' -n1")
    assert code == 0, text


@pytest.mark.parametrize(
    ("words", "named"),
    [
        ("--no-such-option", "unrecognized arguments: --no-such-option"),
        ("--gpumem-mode hott", "--gpumem-mode: 'hott' is not one of"),
        ("no_such_file.py", "file or directory not found: no_such_file.py"),
    ],
)
def test_a_wrong_argument_of_pytest_is_a_mistake_of_the_user(
    gate: Gate, project: Project, words: str, named: str
) -> None:
    code, text = gate({}, f"{GPU} {words}")
    assert code == 4, text
    summary = project.folder / "gpumem-results" / "summary.md"
    for shown in (text.partition("gpumem gate: could not start: ")[2], summary.read_text()):
        assert named in " ".join(shown.split())


def test_a_file_that_cannot_be_imported_is_named_and_nobody_accepts_its_tests(
    gate: Gate, project: Project
) -> None:
    code, text = gate({"test_it.py": f"import no_such_library\n{TESTS}"})
    assert code == 1, text
    error = "FAIL test_it.py: ModuleNotFoundError: No module named 'no_such_library'"
    assert error in text
    assert error in html.unescape((project.folder / "gpumem-results" / "summary.md").read_text())
    assert "to accept" not in text
    assert "bring the test back" not in text


def test_an_option_of_the_change_that_base_lacks_is_no_mistake_of_the_user(gate: Gate) -> None:
    code, text = gate(
        {"conftest.py": "def pytest_addoption(parser):\n    parser.addoption('--added')\n"},
        f"{GPU} --added=1",
    )
    assert code == 6, text
    assert "BASE: its tests cannot be collected: base (merge base " in text
    assert "unrecognized arguments: --added=1" in text


def test_tests_that_base_cannot_import_are_not_new(gate: Gate, project: Project) -> None:
    """Nobody knows how they performed: a library, or a submodule of git, may be missing in its worktree."""
    publish_unsaved(project, "broken", "import no_such_library\n" + TESTS)
    code, text = gate({"test_it.py": TESTS}, "origin/broken -- -k test_copy")
    assert code == 6, text
    assert "UNDECIDED test_it.py::test_copy: " in text


CALLS = f"""
from kern import NBYTES

LONGEST = "60 us"

def test_time(gpu_benchmark, device_buffer, gpu_kernels):
    {MEASURE.format("NBYTES", ", max_regression='5%'")}

def test_latency(gpu_benchmark, device_buffer, gpu_kernels):
    {MEASURE.format("NBYTES", ", max_latency=LONGEST, label='x'")}

def test_part(gpu_memory, device_buffer):
    with gpu_memory.watch("decode", max_peak="70 MiB"):
        device_buffer(NBYTES)
"""


def test_a_looser_limit_of_a_call_is_red(gate: Gate, project: Project) -> None:
    """The limits of BASE's calls are those of its saved rows."""
    publish_unsaved(project, "calls", CALLS)
    save = ". .venv/bin/activate; python -m pytest --gpumem --gpumem-save"
    done = project.run(save, {"GPUMEM_BASELINE": ".gpumem-baseline", **SIMULATED})
    assert done.returncode == 0, done.stdout + done.stderr
    lines = []
    looser = f"# words\n{CALLS}"
    for old, new, line in (
        (
            "max_regression='5%'",
            "max_regression='900%'",
            "test_time: max_regression 5% → 900% in this change (5% holds)",
        ),
        (
            "max_latency=LONGEST, ",
            "",
            "test_latency[x]: max_latency 60 us → none in this change (60 us holds)",
        ),
        (
            '"70 MiB"',
            '"1 GiB"',
            "test_part[decode]: max_peak 70 MiB → 1 GiB in this change (70 MiB holds)",
        ),
    ):
        looser = looser.replace(old, new)
        lines.append(f"gpumem gate: limit of test_it.py::{line}")
    words = "--screen-only origin/calls"
    ended, text = gate({"test_it.py": looser}, words)
    assert ended == 1, text
    assert [line for line in lines if line not in text] == []
    assert "looser limits of 3 tests" in gate_result(text)
    ended, text = gate({"test_it.py": f"# words\n{CALLS}"}, f"{words} -- -k test_latency")
    assert (ended, "in this change" in text) == (0, False), text


def test_a_looser_limit_of_a_call_is_red_in_any_folder(
    gate: Gate, project: Project, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The ini file says where the baseline is, relative to itself."""
    test = CALLS[: CALLS.index("def test_latency")].replace("from kern", "from gpu.kern")
    project.write("pytest.ini", f"{INI}gpumem_baseline = .gpumem-baseline\npythonpath = .\n")
    project.write("gpu/kern.py", "NBYTES = 1 << 20\n")
    project.write("gpu/test_time.py", test)
    publish(project, "below", "gpu")
    save = ". .venv/bin/activate; python -m pytest gpu --gpumem --gpumem-save"
    done = project.run(save, SIMULATED)
    assert done.returncode == 0, done.stdout + done.stderr
    project.write("gpu/test_time.py", test.replace("5%", "900%"))
    monkeypatch.setenv("GPUMEM_DEVICE", "sim")
    monkeypatch.chdir(project.folder / "gpu")
    result = CliRunner().invoke(main, ["gate", "--screen-only", "origin/below", "--", "."])
    assert result.exit_code == 1, result.output
    assert "limit of gpu/test_time.py::test_time: max_regression 5% → 900%" in result.output


SLOW = {"conftest.py": slower("1.5")}


@pytest.mark.parametrize(
    ("call", "now", "line"),
    [
        (COPY, "max_regression='90%'", "test_copy: max_regression 5% → 90%"),
        (COPY, "max_regression=None", "test_copy: max_regression 5% → none"),
        (
            MEASURE.format("mib << 20", ""),
            "max_latency=None",
            "test_sizes[16]: max_latency 1 s → none",
        ),
    ],
)
def test_a_call_of_the_change_that_loosens_a_limit_of_the_test_is_red(
    gate: Gate, call: str, now: str, line: str
) -> None:
    code, text = gate(SLOW | replaced(call, f"{call[:-1]}, {now})"))
    assert code == 1, text
    assert f"test_it.py::{line} in this change (" in text


# The simulated device


def test_a_simulated_device_takes_the_place_of_a_gpu_by_the_words_alone(
    gate: Gate, project: Project
) -> None:
    (simulated,) = (project.folder / ".gpumem-baseline").iterdir()
    shutil.copytree(simulated, simulated.with_name("NVIDIA-H100"))
    code, text = gate({})
    assert code == 6, text
    assert (
        "no verdict (simulated): the device is simulated, and the baseline is of NVIDIA-H100; "
        in gate_result(text)
    )
    code, text = gate({}, f"{GPU} --gpumem-device sim")
    assert (code, gate_result(text)) == (0, "gpumem gate: green (simulated): 4 rows")


WITHOUT_LIMITS = replaced('@pytest.mark.gpumem(max_regression="5%")\n', "")["test_it.py"].replace(
    '@pytest.mark.gpumem(max_peak="256 MiB")\n', ""
)


@pytest.mark.parametrize(
    ("change", "lines"),
    [
        (
            SLOW | replaced('"5%"', '"900%"'),
            ["test_copy: max_regression 5% → 900% in this change (5% holds)"],
        ),
        (
            {"kern.py": "NBYTES = 257 << 20\n", "test_it.py": WITHOUT_LIMITS},
            [
                "test_copy: max_regression 5% → none in this change (5% holds)",
                "test_memory: max_peak 256 MiB → none in this change (256 MiB holds)",
            ],
        ),
    ],
    ids=["looser", "removed"],
)
def test_a_change_is_held_to_the_limits_of_base(
    gate: Gate, change: Change, lines: list[str]
) -> None:
    code, text = gate(change)
    assert code == 1, text
    for line in lines:
        assert f"gpumem gate: limit of test_it.py::{line}" in text


def test_the_origin_of_a_limit_of_base_is_said(
    gate: Gate, capfd: pytest.CaptureFixture[str]
) -> None:
    change = SLOW | replaced('@pytest.mark.gpumem(max_regression="5%")\n', "")
    gate(change, "--screen-only origin/main -- -k test_copy")
    assert "more than max_regression 5% (marker of origin/main) + 10 %" in capfd.readouterr().out


def test_a_stricter_limit_of_the_change_holds(gate: Gate) -> None:
    code, text = gate(SLOW | replaced('max_latency="1 s"', 'max_latency="1 ns"'))
    assert code == 1, text
    assert "in this change" not in text


def test_what_repeats_has_the_arguments_of_the_gate(gate: Gate) -> None:
    """A duet repeats what is slower than base, and a session all else."""
    both = "-c pytest.ini -k 'copy or 32'"
    alone = "-n 0 --gpumem-baseline=.gpumem-baseline"  # a duet refuses them
    change = SLOW | replaced('max_latency="1 s"', 'max_latency="1 ns"')
    words = f"--screen-only origin/main -- {alone} {both} test_it.py"
    _, text = gate(change, words)
    duet, session = (line for line in text.splitlines() if line.startswith("to repeat: "))
    tests = "--test test_it.py::test_copy"
    assert duet == f"to repeat: gpumem duet origin/main {tests} -- {both} test_it.py"
    assert session == f"to repeat: pytest --gpumem {alone} {both} 'test_it.py::test_sizes[32]'"


@pytest.mark.parametrize(
    ("factor", "option", "code"),
    [("1.5", "900%", 1), ("1.015", "0.1%", 0)],
    ids=["looser", "stricter"],
)
def test_the_limit_of_a_test_wins_over_an_option(
    gate: Gate, factor: str, option: str, code: int
) -> None:
    """The test allows 5 %; the change takes 1.5 % longer, or half as long again."""
    change = {"conftest.py": slower(factor)}
    words = f"--screen-only origin/main --max-regression {option} -- -k test_copy"
    ended, text = gate(change, words)
    assert ended == code, text


def test_a_change_of_the_limit_of_the_session_is_said_once(gate: Gate, project: Project) -> None:
    project.write("pytest.ini", INI + "gpumem_max_regression = 5%\n")
    publish(project, "limited")
    code, text = gate(
        {"pytest.ini": INI + "gpumem_max_regression = 50%\n"},
        "--screen-only origin/limited -- -m gpu",
    )
    assert code == 1, text
    assert " ".join(text.split()).count(": max_regression 5% → 50% in this change (5% holds)") == 1
    rows = json.loads((project.folder / "gpumem-results" / "results.json").read_text())["gpumem"][
        "rows"
    ]
    assert {row["limits"]["max_regression"] for row in rows if row["measurement"]} == {"5%"}


def test_what_repeats_works_in_the_folder_of_the_gate(gate: Gate) -> None:
    new = """
import pytest

@pytest.mark.gpumem(max_latency="1 ns")
def test_new(gpu_benchmark, device_buffer, gpu_kernels):
    gpu_benchmark(gpu_kernels.write, device_buffer(1 << 20))
"""
    words = "--screen-only origin/main -- test_new.py"
    code, text = gate({"gpu/test_new.py": new}, words, folder="gpu")
    assert code == 1, text
    assert "\nto repeat: pytest --gpumem test_new.py::test_new\n" in text


def test_a_new_folder_of_tests_is_new(gate: Gate) -> None:
    """A team's first pull request."""
    new = f"from kern import NBYTES\n\ndef test_new(gpu_benchmark, device_buffer, gpu_kernels):\n    {COPY}\n"
    code, text = gate({"gpu/test_new.py": new}, "origin/main --max-regression 5% -- gpu -n 2")
    assert code == 0, text
    assert "NEW gpu/test_new.py::test_new: base does not have it" in text


BROKEN = """
from pytest_gpumem.plugin.verdicts import VerdictFeature

def raises(self, *arguments):
    raise ZeroDivisionError("of nothing")

VerdictFeature.judge = raises
"""


def test_a_part_of_the_plugin_that_breaks_leaves_no_verdict(
    gate: Gate,
) -> None:
    change = {"conftest.py": BROKEN}
    code, text = gate(change)
    assert code == 6, text
    assert "raised by mistake" in gate_result(text)
