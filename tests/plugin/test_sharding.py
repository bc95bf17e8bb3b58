"""`--gpumem-shard` and `gpumem merge`: the tests of a suite over several sessions, and one verdict for all of them."""

from __future__ import annotations

import functools
import json
import re
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
import yaml
from ci_project import BRANCH, SIMULATED, Done, Project, make_three
from click.testing import CliRunner, Result
from msgspec.structs import replace
from sessions import Run, slower, stored_in

from pytest_gpumem.cli import main
from pytest_gpumem.outcomes import Outcome
from pytest_gpumem.plugin import repeating
from pytest_gpumem.records.row import Row, Verdict
from pytest_gpumem.runs.shards import KEY

PLANTED = slower('float(os.environ.get("FACTOR", 1)) if request.node.name == "test_slower[8388608]" else 1.0')
COUNT = 4
SUITE = """
    import os
    import pytest

    SIZES = [number << 22 for number in range(1, 7)]

    @pytest.mark.parametrize("size", SIZES)
    def test_copy(gpu_benchmark, device_buffer, gpu_kernels, size):
        gpu_benchmark(gpu_kernels.copy, device_buffer(size), device_buffer(size))

    @pytest.mark.gpumem(max_regression="5%")
    @pytest.mark.parametrize("size", SIZES)
    def test_slower(gpu_benchmark, device_buffer, gpu_kernels, size):
        gpu_benchmark(gpu_kernels.copy, device_buffer(size), device_buffer(size))

    @pytest.mark.parametrize("number", range(6))
    def test_plain(number):
        assert number != int(os.environ.get("FAILS", "-1"))

    def test_skipped():
        pytest.skip("not here")
"""


@pytest.fixture
def suite(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(pytester.path)
    pytester.makepyfile(SUITE)
    pytester.makeconftest(PLANTED)
    return pytester.path


def sharded(gpumem: Run, *arguments: str, count: int = COUNT) -> list[str]:
    """Run every shard; the names of their results."""
    names = [f"shard-{index}.json" for index in range(1, count + 1)]
    for index, name in enumerate(names, 1):
        gpumem(f"--gpumem-shard={index}/{count}", f"--benchmark-json={name}", *arguments)
    return names


def merge(*names: str) -> Result:
    return CliRunner().invoke(main, ["merge", *names])


def rows(path: Path) -> dict[str, tuple[str, bool]]:
    return {row["nodeid"]: (row["verdict"]["outcome"], row["failed"]) for row in json.loads(path.read_text())["gpumem"]["rows"]}


def cases(path: Path) -> dict[tuple[str, str], str]:
    found = {}
    for case in ElementTree.parse(path).getroot().iter("testcase"):
        kinds = [child.tag for child in case if child.tag in ("failure", "error", "skipped")]
        found[case.get("classname", ""), case.get("name", "")] = kinds[0] if kinds else "passed"
    return found


def test_four_shards_merged_equal_one_run(suite: Path, gpumem: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    gpumem("--gpumem-save").assert_outcomes(passed=18, skipped=1)
    make_three(stored_in(suite)[0])
    monkeypatch.setenv("FACTOR", "2")
    monkeypatch.setenv("FAILS", "3")
    one = gpumem("--benchmark-json=one.json", "--junitxml=one.xml")
    one.assert_outcomes(passed=16, failed=2, skipped=1)
    names = sharded(gpumem)
    result = merge(*names)
    assert result.exit_code == one.ret == 1
    whole, together = json.loads((suite / "one.json").read_text()), json.loads((suite / "gpumem-results" / "results.json").read_text())
    assert rows(suite / "gpumem-results" / "results.json") == rows(suite / "one.json")
    assert cases(suite / "gpumem-results" / "junit.xml") == cases(suite / "one.xml")
    assert together["gpumem"]["missing"] == whole["gpumem"]["missing"]
    assert {one["fullname"] for one in together["benchmarks"]} == {one["fullname"] for one in whole["benchmarks"]}
    assert KEY not in together
    shards = [json.loads((suite / name).read_text())[KEY] for name in names]
    assert sum(len(shard["tests"]) for shard in shards) == 19
    # By cost: no shard has all the tests that measure.
    measured = [sum("test_plain" not in test["nodeid"] for test in shard["tests"]) for shard in shards]
    assert max(measured) <= 6
    assert {shard["family"] for shard in shards} == {12}
    for name in ("report.html", "summary.md", "code-quality.json"):
        assert (suite / "gpumem-results" / name).exists()
    assert json.loads((suite / "gpumem-results" / "code-quality.json").read_text())[0]["location"]["lines"]["begin"] > 1


def test_what_is_no_run(suite: Path, gpumem: Run) -> None:
    names = sharded(gpumem, "-k", "plain", count=3)

    def refused(*given: str) -> str:
        result = merge(*given)
        assert result.exit_code == 4
        assert not (suite / "gpumem-results").exists()
        (line,) = result.stderr.splitlines()
        return line

    assert "shard 2 of 3 is missing" in refused(names[0], names[2])
    (suite / "copy.json").write_text((suite / names[0]).read_text())
    assert "copy.json: shard 1" in refused(*names, "copy.json")
    gpumem("-k", "plain", "--benchmark-json=one.json", "--gpumem-shard=1/2")
    assert "shards 3" in refused("one.json", *names[1:])
    gpumem("-k", "plain and not 3", "--benchmark-json=other.json", "--gpumem-shard=1/3")
    assert "do not make up one suite" in refused("other.json", *names[1:])
    gpumem("-k", "plain", "--benchmark-json=hot.json", "--gpumem-shard=1/3", "--gpumem-mode=hot")
    assert "--gpumem-mode" in refused("hot.json", *names[1:])
    gpumem("-k", "copy", "--benchmark-json=whole.json")
    assert "of no shard" in refused("whole.json", *names[1:])
    assert "no such file" in refused("nothing-*.json")
    assert merge("shard-*.json").exit_code == 0


def test_more_shards_than_tests(suite: Path, gpumem: Run) -> None:
    ends = [
        gpumem("--gpumem-shard", f"{index}/3", "-k", "plain and 1", "--gpumem-save", f"--benchmark-json=shard-{index}.json")
        for index in (1, 2, 3)
    ]
    assert [end.ret for end in ends] == [0, 0, 0]
    for end in ends:
        end.stdout.fnmatch_lines(["--gpumem-save: nothing was measured, nothing is stored"])
    assert sorted(end.parseoutcomes().get("passed", 0) for end in ends) == [0, 0, 1]
    result = merge("shard-*.json")
    assert result.exit_code == 0
    assert "1 test: 1 passed" in result.output


def test_a_shard_that_broke_is_no_green_run(suite: Path, gpumem: Run) -> None:
    names = sharded(gpumem, "-k", "plain", count=2)
    value: dict[str, Any] = json.loads((suite / names[0]).read_text())
    value[KEY]["exit"] = 2
    value[KEY]["tests"][0]["outcome"] = None
    (suite / names[0]).write_text(json.dumps(value))
    result = merge(*names)
    assert result.exit_code == 1
    assert "shard 1 of 2 ended with 2 before its tests did" in result.output
    assert "shard 1 of 2 did not run 1 test" in result.output


def test_in_workers(suite: Path, gpumem: Run) -> None:
    pytest.importorskip("xdist")
    gpumem("--gpumem-save", "-k", "copy").assert_outcomes(passed=6)
    names = sharded(gpumem, "-n2", "-k", "copy", count=2)
    assert merge(*names).exit_code == 0
    assert len(rows(suite / "gpumem-results" / "results.json")) == 6
    assert json.loads((suite / "gpumem-results" / "results.json").read_text())["gpumem"]["missing"] == []


def test_further_processes_measure_the_same_shard(suite: Path, session: Run) -> None:
    arguments = (
        "--gpumem",
        "--gpumem-device=sim",
        "--gpumem-budget=5ms",
        "-k",
        "copy",
        "--gpumem-processes=2",
        "--benchmark-json=out.json",
    )
    result = session(*arguments, "--gpumem-shard=1/2")
    assert result.ret == 0
    found = json.loads((suite / "out.json").read_text())
    assert 0 < len(found["gpumem"]["rows"]) < 6
    assert all(len(row["measurement"]["further"]) == 1 for row in found["gpumem"]["rows"])


GITHUB, GITLAB = (
    yaml.safe_load((Path(__file__).parents[2] / "ci" / kind / "gpumem-shards.yml").read_text()) for kind in ("github", "gitlab")
)


def of_github(job: str, project: Project, **matrix: str) -> Done[str]:
    """The steps of a job after its installation; expressions stand for what GitHub puts there."""
    given = {"github.base_ref": BRANCH, **{f"matrix.{name}": value for name, value in matrix.items()}}
    (step,) = [step for step in GITHUB["jobs"][job]["steps"] if step.get("name") in ("Measure", "Gate")]
    own = {name: re.sub(r"\$\{\{ (.*?) \}\}", lambda found: given[found[1]], text) for name, text in step["env"].items()}
    variables = {name: str(value) for name, value in GITHUB["env"].items()} | own
    variables["GATE_OPTIONS"] = "--screen-only"
    return project.run(step["run"], variables, **SIMULATED, **shared(project, SHARDS="2", RUNNER_TEMP=str(project.folder.parent)))


def of_gitlab(job: str, project: Project, *, shard: int = 1) -> Done[str]:
    script = "\n".join([". .venv/bin/activate", *GITLAB[job]["script"]])
    project.git("update-ref", "refs/remotes/origin/gpumem-base", f"origin/{BRANCH}")
    given = {"TESTS": "", "GATE_OPTIONS": "--screen-only", "CI_NODE_INDEX": str(shard), "CI_NODE_TOTAL": "2"}
    return project.run(script, given, **SIMULATED, **shared(project))


def shared(project: Project, **variables: str) -> dict[str, str]:
    return {"GPUMEM_BASELINE": str(project.folder.parent / "store"), **variables}


@pytest.fixture
def project(tmp_path: Path, programs: Path) -> Project:
    """A project with a baseline of three runs of its base, and a change on top."""
    made = Project(tmp_path, programs)
    saved = made.run(". .venv/bin/activate; python -m pytest -q --gpumem --gpumem-save", SIMULATED, **shared(made))
    assert saved.returncode == 0, saved.stdout
    (stored,) = (tmp_path / "store").rglob("*.json")
    make_three(stored)
    made.write("test_more.py", "def test_plain():\n    pass\n")
    made.git("add", ".")
    made.git("commit", "-qm", "more")
    return made


@pytest.mark.parametrize("kind", ["github", "gitlab"])
def test_the_templates(project: Project, tmp_path: Path, kind: str) -> None:
    """Two runners and a gate; then with a shard that is missing."""
    if kind == "github":
        screens = [of_github("screen", project, shard=str(shard), card="gpu") for shard in (1, 2)]
        folder, gate = tmp_path / "shards", functools.partial(of_github, "gate", project, card="gpu")
        (tmp_path / "shard").rename(folder)  # as the artifacts go
    else:
        screens = [of_gitlab("gpumem:screen", project, shard=shard) for shard in (1, 2)]
        folder, gate = project.folder, functools.partial(of_gitlab, "gpumem:gate", project)
    assert [done.returncode for done in screens] == [0, 0]
    done = gate()
    assert done.returncode == 0, done.stdout + done.stderr
    assert "green: 1 row" in done.stdout
    assert (project.folder / "gpumem-results" / "junit.xml").read_text().count("<testcase") == 2
    (folder / "shard-2.json").unlink()
    missing = gate()
    assert missing.returncode == 4
    assert "shard 2 of 2 is missing" in missing.stderr


def test_a_gate_refuses_shards_of_another_comparison(project: Project, gpumem: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(project.folder)
    for name, value in {**SIMULATED, **shared(project)}.items():
        monkeypatch.setenv(name, value)

    def gate(*more: str) -> Result:
        return CliRunner().invoke(main, ["gate", "--screen-only", "--shards", "../one.json", *more, "--", "origin/main"])

    for more, to_gate, words in (
        ("", "", "compared with all runs"),
        ("--gpumem-baseline-of=HEAD", "", "compared with the history of HEAD"),
        ("--gpumem-baseline-of=origin/main", "--max-regression=1%", "give --gpumem-max-regression to each of them"),
    ):
        assert gpumem("--gpumem-shard=1/1", "--benchmark-json=../one.json", *more.split()).ret == 0
        done = gate(*to_gate.split())
        assert done.exit_code == 4
        assert words in done.stderr
    project.git("commit", "-qm", "empty", "--allow-empty")
    done = gate()
    assert done.exit_code == 4
    assert "is checked out" in done.stderr


@pytest.mark.parametrize("written", ["0/2", "3/2", "2", "a/b", "1/0", ""])
def test_no_shard(suite: Path, gpumem: Run, written: str) -> None:
    result = gpumem(f"--gpumem-shard={written}")
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    result.stderr.fnmatch_lines([f"ERROR: gpumem: --gpumem-shard: {written!r} is no shard; accepted is I/N*"])


def test_the_header_says_which(suite: Path, gpumem: Run) -> None:
    gpumem("--gpumem-save", "-k", "copy").assert_outcomes(passed=6)
    result = gpumem("--gpumem-shard=2/4")
    (line,) = [line for line in result.outlines if line.startswith("gpumem: shard")]
    assert re.fullmatch(r"gpumem: shard 2 of 4: \d+ of 19 tests; the baseline has the cost of 6 of the 19", line)


def test_the_merged_junit_says_of_a_test_what_pytests_says(pytester: pytest.Pytester, gpumem: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(pytester.path)
    pytester.makepyfile(
        """
        import pytest

        def test_skips_a_part(subtests):
            with subtests.test("part"):
                pytest.skip("not here")

        def test_fails():
            three = 3
            assert three == 4, "counted wrong"
        """
    )
    (name,) = sharded(gpumem, count=1)
    assert merge(name).exit_code == 1
    passed, failed = ElementTree.parse("gpumem-results/junit.xml").getroot().iter("testcase")
    assert passed.find("skipped") is None
    failure = failed.find("failure")
    assert failure is not None
    assert failure.get("message") == "AssertionError: counted wrong"


def test_rows_that_are_judged_again_are_counted_as_in_one_process(suite: Path, session: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """The controller of xdist, which collects nothing, judges them among as many."""
    pytest.importorskip("xdist")
    arguments = ("--gpumem", "--gpumem-device=sim", "--gpumem-budget=5ms", "-k", "slower")
    sizes = list[int]()

    def judged(row: Row, siblings: object, gpu: Any) -> Row:
        sizes.append(gpu.family.size)
        return replace(row, verdict=Verdict(Outcome.PASS, "enough"))

    monkeypatch.setattr(repeating, "judged", judged)
    monkeypatch.setattr(repeating, "LOOKS", (1, 2))
    assert session(*arguments, "--gpumem-save", "--gpumem-processes=1").ret == 0
    make_three(stored_in(suite)[0])
    monkeypatch.setenv("FACTOR", "1.2")
    for more in ((), ("-n1",), ("-n1", "--gpumem-shard=1/1")):
        session(*arguments, *more)
    assert sizes == [6, 6, 6]
