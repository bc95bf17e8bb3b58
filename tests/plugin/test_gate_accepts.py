"""A gate counts what its change accepts, by files that it adds, and where the workflow says so."""

from __future__ import annotations

import html
import json
import shlex
import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
from ci_project import SIMULATED, Project, saved_project
from click.testing import CliRunner, Result
from committing import commit
from sessions import gate_result, slower

from pytest_gpumem.baselines.acceptances import acceptances
from pytest_gpumem.cli import main
from pytest_gpumem.units import format_time

COPY = """
@pytest.mark.gpumem(max_latency="1 s")
@pytest.mark.gpumem(max_regression="2%")
def test_copy(gpu_benchmark, device_buffer, gpu_kernels):
    gpu_benchmark(gpu_kernels.copy, device_buffer(NBYTES), device_buffer(NBYTES))
"""
TESTS = f"""
import pytest
from kern import COPIED, NBYTES
{COPY}
@pytest.mark.gpumem(max_peak_regression="0 B")
def test_memory(device_buffer):
    device_buffer(NBYTES)

@pytest.mark.gpumem(max_regression="20%", max_copied_bytes="base")
def test_copied(gpu_benchmark, device_buffer, gpu_kernels):
    gpu_benchmark(gpu_kernels.memcpy, device_buffer(COPIED), device_buffer(COPIED))
"""
KERN = "NBYTES = 64 << 20\nCOPIED = 100 << 20\n"
TIME, ALL = "origin/main -- -k test_copy", "origin/main"

Change = dict[str, str]


class Gates:
    """Gates of one project."""

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
        self, words: str = TIME, options: Iterable[str] = ("--accept-from-change",)
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
        commit(self.project.folder, "merged")
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


SLOWER = {"conftest.py": slower("1.25")}


def test_what_the_gate_flags_is_accepted_by_the_change_and_said_so(gates: Gates) -> None:
    """By the command without a size: the last gate has it."""
    gates.change(SLOWER)
    red, _, text = gates.gate()
    assert red == 1, text
    accept = "gpumem accept test_it.py::test_copy --reason '...'"
    assert f"to accept, commit what this writes: {accept}" in text
    duet = json.loads((gates.project.folder / "gpumem-results" / "duet.json").read_text())
    (verdict,) = duet["verdicts"]
    was, now = (format_time(verdict[f"{side}_latency"]) for side in ("base", "head"))
    assert f"latency {now}, was {was}" in text
    accepted = gates.accept("test_it.py::test_copy")
    assert "accepted time up to 2" in accepted.stdout
    code, last, text = gates.gate()
    assert code == 0, text
    assert "a duet decides 1 row" in text
    assert last == "green: 1 row, 1 of them accepted"
    assert "gpumem gate: ACCEPTED test_it.py::test_copy: max_regression accepted (" in text
    summary = (gates.project.folder / "gpumem-results" / "summary.md").read_text()
    assert "ACCEPTED" in summary


def test_the_workflow_says_whether_a_gate_counts_what_is_committed(gates: Gates) -> None:
    gates.change(SLOWER)
    gates.accept("test_it.py::test_copy", "--change", "time=30%")
    commit(gates.project.folder, "accept")
    code, _, text = gates.gate(options=[])
    assert code == 1, text
    (path,) = gates.project.folder.glob(".gpumem/accepted/*.json")
    file = f".gpumem/accepted/{path.name}"
    assert f"gpumem gate: {file} does not count: add --accept-from-change" in text
    assert "gpumem accept" not in text
    path.unlink()
    text = gates.gate(options=["--screen-only"])[2]
    accept = "gpumem accept test_it.py::test_copy --reason '...'"
    words = "to accept, commit what this writes and gate with --accept-from-change"
    assert f"{words}: {accept}" in text
    summary = (gates.project.folder / "gpumem-results" / "summary.md").read_text()
    assert accept in html.unescape(summary)  # to copy: on its line


def test_a_larger_slow_down_than_the_accepted_one_is_red(gates: Gates) -> None:
    gates.change(SLOWER)
    gates.accept("test_it.py::test_copy", "--change", "time=10%")
    code, last, text = gates.gate()
    assert (code, last) == (1, "red: 1 of 1 row fails"), text
    assert "slower than the accepted 10% allows" in text


def test_between_the_merge_and_the_next_saved_run_a_test_is_guarded(gates: Gates) -> None:
    gates.change(SLOWER)
    gates.accept("test_it.py::test_copy", "--change", "time=30%")
    gates.merge()
    gates.change({"conftest.py": slower("1.5")})
    # Nothing is left to compare with: the duet decides.
    assert gates.gate(options=["--screen-only"])[0] == 6
    code, last, text = gates.gate()
    assert (code, last) == (1, "red: 1 of 1 row fails"), text
    gates.change({**SLOWER, "README": "a change of nothing that is measured"})
    code, last, text = gates.gate()
    assert (code, last) == (0, "green: 1 row"), text


def test_copies_are_accepted(gates: Gates) -> None:
    copied = f"{ALL} -- -k test_copied"
    gates.change({"kern.py": KERN.replace("100", "101")})
    assert gates.gate(copied)[0] == 1
    gates.accept("test_it.py::test_copied")
    code, last, text = gates.gate(copied)
    assert (code, last) == (0, "green: 1 row, 1 of them accepted"), text


def test_where_copies_are_accepted_the_limit_on_the_time_stays_in_force(gates: Gates) -> None:
    gates.change({"kern.py": KERN.replace("100", "200")})
    gates.accept("test_it.py::test_copied", "--change", "max_copied_bytes=200 MiB")
    code, last, text = gates.gate(f"{ALL} -- -k test_copied")
    (row,) = gates_rows(gates)
    assert row["verdict"]["accepted"] == ["max_copied_bytes"], text
    assert (code, last) == (1, "red: 1 of 1 row fails"), text


def test_memory_is_accepted_up_to_its_size(gates: Gates) -> None:
    gates.change({"kern.py": KERN.replace("64 <<", "65 <<")})
    gates.accept("test_it.py::test_memory", "--change", "memory=65 MiB")
    code, last, text = gates.gate(f"{ALL} -- -k test_memory")
    assert (code, last) == (0, "green: 1 row, 1 of them accepted"), text
    gates.change({"kern.py": KERN.replace("64 <<", "66 <<")})
    assert gates.gate(f"{ALL} -- -k test_memory")[0] == 1


def gates_rows(gates: Gates) -> list[dict[str, Any]]:
    path = gates.project.folder / "gpumem-results" / "results.json"
    rows: list[dict[str, Any]] = json.loads(path.read_text())["gpumem"]["rows"]
    return rows


def test_a_row_that_is_measured_in_another_way(gates: Gates) -> None:
    limited = '@pytest.mark.gpumem(max_regression="2%"'
    looser = TESTS.replace(limited, '@pytest.mark.gpumem(max_regression="9%", mode="hot"', 1)
    gates.change({"test_it.py": looser})
    text = " ".join(gates.gate()[2].replace("\\\n", " ").split())
    words = "--change max_regression=9% --change measured --reason"
    assert f"gpumem accept test_it.py::test_copy {words}" in text
    gates.change({"test_it.py": TESTS.replace(limited, f'{limited}, mode="hot"', 1)})
    code, last, text = gates.gate()
    assert (code, last) == (1, "red: 1 of 1 row fails"), text
    assert "gpumem gate BASE" not in text  # it is running
    repeat = next(line for line in text.splitlines() if line.startswith("to repeat: gpumem "))
    arguments = shlex.split(repeat)[3:]
    assert CliRunner().invoke(main, arguments).exit_code == 1
    gates.accept("test_it.py::test_copy", "--change", "measured")
    code, last, text = gates.gate()
    assert (code, last) == (0, "green: 1 row, 1 of them accepted"), text
    assert "ACCEPTED (simulated) test_it.py::test_copy: measured in another way" in text
    assert "FAIL" not in text


def test_a_removed_test(gates: Gates) -> None:
    limited = '@pytest.mark.gpumem(max_regression="2%")\ndef test_copy'
    gates.change({"test_it.py": TESTS.replace(limited, "def left_out")})
    words = f"{ALL} -- test_it.py"
    code, _, text = gates.gate(words)
    assert code == 1, text
    assert "lost: test_it.py::test_copy" in text
    assert "to repair: bring the test back, by its name and not skipped\n" in text
    gates.accept("test_it.py::test_copy")
    (made,) = acceptances(gates.project.folder).files.values()
    assert [change.figure for change in made.changes] == ["removed"]
    code, last, text = gates.gate(words)
    assert code == 0, text
    assert last.endswith("; 1 lost row accepted"), text
    assert text.count("accepted: test_it.py::test_copy: removed (") == 1, text
    assert gates.gate(words, [])[0] == 1
    # After the merge nobody misses it.
    gates.merge()
    code, last, text = gates.gate(words)
    assert code == 0, text
    assert "test_copy " not in text


def test_an_accepted_loss_of_one_row_excuses_no_other_loss_of_its_test(gates: Gates) -> None:
    one = COPY.replace("(NBYTES))", "(NBYTES), label='one')")
    body = one[one.index("    gpu_benchmark") :]
    two = one + body.replace("one", "two")
    gates.change({"test_it.py": TESTS.replace(COPY, one)})
    gates.merge()
    shutil.rmtree(gates.project.folder / ".gpumem-baseline")
    save = ". .venv/bin/activate; python -m pytest --gpumem --gpumem-save -k test_copy"
    done = gates.project.run(save, {"GPUMEM_BASELINE": ".gpumem-baseline", **SIMULATED})
    assert done.returncode == 0, done.stdout + done.stderr
    gates.change({"test_it.py": TESTS.replace(COPY, two)})
    gates.merge()
    gates.accept("test_it.py::test_copy[one]", "--change", "removed")
    skips = two.replace(body, "    pytest.skip('not today')\n" + body)
    gates.change({"test_it.py": TESTS.replace(COPY, skips)})
    code, _, text = gates.gate("--screen-only origin/main -- -k test_copy")
    assert code == 1, text
    assert "accepted: test_it.py::test_copy[one]: removed (" in text
    assert "lost: test_it.py::test_copy: its test skipped (not today)" in text


def test_an_edited_acceptance_of_base_is_one_of_the_change(gates: Gates) -> None:
    gates.accept("test_it.py::test_other", "--change", "removed")
    gates.merge()
    (file,) = (gates.project.folder / ".gpumem" / "accepted").iterdir()
    file.write_text(file.read_text().replace("test_other", "test_copy"))
    label = COPY.replace("device_buffer(NBYTES))", 'device_buffer(NBYTES), label="new")')
    gates.change({"test_it.py": TESTS.replace(COPY, label)})
    code, last, text = gates.gate(ALL, [])
    assert (code, last) == (1, "red: 1 measurement lost"), text
    assert f"{file.name} does not count: add --accept-from-change" in text


def test_a_renamed_test_is_accepted_as_the_gate_says(gates: Gates) -> None:
    gates.change({"test_it.py": TESTS.replace("def test_copy", "def test_copy_renamed")})
    code, _, text = gates.gate()
    assert code == 1, text
    assert "test_it.py::test_copy is gone and test_it.py::test_copy_renamed is new" in text
    words = "test_it.py::test_copy_renamed --renamed-from test_it.py::test_copy"
    assert text.count("gpumem accept ") == 1
    assert f"gpumem accept {words} --reason '...'" in text
    gates.accept(*words.split())
    code, last, text = gates.gate()
    assert code == 0, text
    assert last.endswith("; 1 lost row accepted"), text
    assert "a duet decides 1 row" in text
    now = "test_it.py::test_copy: renamed to test_it.py::test_copy_renamed ("
    assert f"accepted: {now}" in text
    gates.accept(*words.split(), "--change", "time=5%")


@pytest.mark.parametrize("how", ["    assert False\n", "    import os; os._exit(1)\n"])
def test_a_test_that_fails_by_itself_is_red_whatever_is_accepted(gates: Gates, how: str) -> None:
    body = "gpu_benchmark(gpu_kernels.copy, device_buffer(NBYTES), device_buffer(NBYTES))\n"
    gates.change({**SLOWER, "test_it.py": TESTS.replace(body, body + how, 1)})
    changes = ("--change", "time=900%", "--change", "memory=1 TiB", "--change", "removed")
    gates.accept("test_it.py::test_copy", *changes)
    code, last, text = gates.gate()
    assert code == 1, text
    assert last.startswith("red: ")


def test_a_loosened_limit(gates: Gates) -> None:
    looser = TESTS.replace('max_regression="2%"', 'max_regression="50%"', 1)
    gates.change({**SLOWER, "test_it.py": looser})
    code, last, text = gates.gate()
    # A duet too holds the row to the limit of base.
    assert (code, last) == (1, "red: 1 of 1 row fails; looser limits of 1 test"), text
    text = " ".join(text.replace("\\\n", " ").split())
    accept = "gpumem accept test_it.py::test_copy --change max_regression=50% --change time=2"
    assert "to repair: restore the limit to accept, commit" in text
    assert accept in text
    assert text.count("gpumem accept ") == 1
    gates.accept("test_it.py::test_copy", "--change", "max_regression=40%")
    assert gates.gate(options=["--accept-from-change", "--screen-only"])[0] == 1
    gates.accept("test_it.py::test_copy", "--change", "max_regression=50%")
    (*_, file) = acceptances(gates.project.folder).files.values()
    code, last, text = gates.gate()
    assert (code, last) == (0, "green: 1 row; 1 looser limit accepted"), text
    line = f"accepted: test_it.py::test_copy: max_regression 2% → 50% ({file.who}: checks bounds)"
    assert f"gpumem gate: {line}\n" in text
    for page in ("summary.md", "report.html"):
        written = (gates.project.folder / "gpumem-results" / page).read_text(encoding="utf-8")
        assert line in html.unescape(" ".join(written.split()))
    gates.merge()
    assert "accepted:" not in gates.gate()[2]


@pytest.mark.parametrize(
    ("limit", "looser", "slowed"),
    [
        ('max_latency="1 s"', "", SLOWER),
        ('max_regression="2%"', 'max_regression="5%"', SLOWER),
        # The test is lost too.
        (COPY, "def test_copy(): pass", {}),
    ],
)
def test_the_line_of_a_looser_limit_accepts_all_that_is_red(
    gates: Gates, limit: str, looser: str, slowed: Change
) -> None:
    text = TESTS.replace(limit, looser, 1)
    gates.change({**slowed, "test_it.py": text})
    words = TIME if slowed else ALL
    code, _, text = gates.gate(words)
    assert code == 1, text
    (line,) = [line for line in text.splitlines() if "gpumem accept " in line]
    gates.accept(*shlex.split(line.partition("gpumem accept ")[2]))
    code, last, text = gates.gate(words)
    assert code == 0, text
    assert "looser limit" in last, text


def test_without_a_baseline_the_figures_of_base_are_accepted(gates: Gates) -> None:
    shutil.rmtree(gates.project.folder / ".gpumem-baseline")
    gates.change({"kern.py": KERN.replace("64 <<", "65 <<")})
    words = f"{ALL} -- -k test_memory"
    assert gates.gate(words)[0] == 1
    assert "memory up to 65 MiB" in gates.accept("test_it.py::test_memory").stdout
    code, last, text = gates.gate(words)
    assert (code, last) == (0, "green: 1 row, 1 of them accepted"), text


def test_a_renamed_test_is_held_against_its_old_name(gates: Gates) -> None:
    renamed = TESTS.replace("def test_copy(", "def test_moved(")
    gates.change({**SLOWER, "test_it.py": renamed})
    gates.accept("test_it.py::test_moved", "--renamed-from", "test_it.py::test_copy")
    code, _, text = gates.gate(ALL)
    assert code == 1, text
    assert "FAIL (simulated) test_it.py::test_moved" in text
    (repeat,) = [line for line in text.splitlines() if line.startswith("to repeat: gpumem ")]
    repeated = CliRunner().invoke(main, shlex.split(repeat.removeprefix("to repeat: gpumem ")))
    assert repeated.exit_code == 1, repeated.output
    wrong = CliRunner().invoke(main, ["duet", "no-such"])
    assert "BASE no-such is no revision" in wrong.output


def test_what_a_renamed_file_has_no_more_is_lost(gates: Gates) -> None:
    gates.change({"test_new.py": TESTS.replace(COPY, "")})
    (gates.project.folder / "test_it.py").unlink()
    assert gates.gate(ALL)[0] == 1
    gates.accept("test_new.py", "--renamed-from", "test_it.py")
    code, last, text = gates.gate(ALL)
    assert (code, last) == (1, "red: 1 measurement lost"), text
    assert "lost: test_it.py::test_copy: its test is no longer collected" in text
    gates.accept("test_it.py::test_copy")
    assert gates.gate(ALL)[0] == 0


def test_a_test_of_a_renamed_file_that_base_skips_too_is_not_lost(gates: Gates) -> None:
    text = f"{TESTS}\ndef test_skips(gpu_benchmark):\n    pytest.skip('one GPU')\n"
    gates.change({"test_it.py": text})
    gates.merge()
    gates.change({"test_new.py": text})
    (gates.project.folder / "test_it.py").unlink()
    gates.accept("test_new.py", "--renamed-from", "test_it.py")
    code, _, text = gates.gate(ALL)
    assert code == 0, text
    assert "not run: test_new.py::test_skips: skipped in origin/main too" in text


def test_a_call_of_a_renamed_test_that_loosens_its_limit_is_red(gates: Gates) -> None:
    call = TESTS.replace(COPY, COPY.replace("(NBYTES))", '(NBYTES), max_latency="2 s")'))
    gates.change({"test_it.py": call})
    gates.merge()
    save = ". .venv/bin/activate; python -m pytest --gpumem --gpumem-save"
    done = gates.project.run(save, {"GPUMEM_BASELINE": ".gpumem-baseline", **SIMULATED})
    assert done.returncode == 0, done.stdout + done.stderr
    gates.change({"test_new.py": call.replace("2 s", "9 s")})
    (gates.project.folder / "test_it.py").unlink()
    gates.gate(ALL)
    gates.accept("test_new.py", "--renamed-from", "test_it.py")
    code, _, text = gates.gate(f"--screen-only {ALL}")
    assert code == 1, text
    assert "limit of test_new.py::test_copy: max_latency 2 s → 9 s in this change" in text


HOSTS = """
@pytest.mark.xfail
@pytest.mark.gpumem(max_latency="1 s")
def test_expected(gpu_benchmark):
    assert False

def test_host(benchmark):
    benchmark(len, "")
"""


def test_a_looser_limit_of_the_project_is_accepted_by_one_command(gates: Gates) -> None:
    """A benchmark of the host has no such limit, and a test that fails in BASE as expected."""
    settings = "[pytest]\ngpumem_max_peak = 1 GiB\ngpumem_min_bandwidth = {}\n"
    gates.change({"pytest.ini": settings.format("2 GB/s"), "test_host.py": f"import pytest{HOSTS}"})
    gates.merge()
    gates.change({"pytest.ini": settings.format("1 GB/s")})
    code, last, text = gates.gate(ALL)
    assert (code, last) == (1, "red: looser limits of 2 tests"), text
    (line,) = [line for line in text.splitlines() if line.startswith("to accept, ")]
    gates.accept(*shlex.split(line.partition(": gpumem accept ")[2].replace("--reason '...'", "")))
    code, last, text = gates.gate(ALL)
    assert (code, last) == (0, "green: 3 rows; 2 looser limits accepted"), text
