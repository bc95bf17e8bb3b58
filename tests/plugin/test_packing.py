"""Tests packed by their memory into real workers of pytest-xdist, on the simulated device."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from sessions import Run

from pytest_gpumem.devices.opening import choose

pytest.importorskip("xdist")

PACK = (
    "--gpumem",
    "--gpumem-device",
    "sim",
    "--gpumem-budget",
    "5 ms",
    "--gpumem-pack",
    "-p",
    "cacheprovider",
)
LOG = """
import os, time, pytest
from pathlib import Path

@pytest.fixture
def log(request):
    "Notes when a test begins and ends."
    def write(word):
        with open(Path(request.config.rootpath, "log"), "a") as file:
            file.write(f"{word} {request.node.name}\\n")
    write("begin")
    yield write
    write("end")
"""


def known(folder: Path, **tests: dict[str, Any]) -> None:
    """Have an earlier session have learnt tests: `grown` in GiB."""
    file = folder / f".pytest_cache/d/gpumem/{choose('sim').facts.key}.json"
    file.parent.mkdir(parents=True, exist_ok=True)
    whole: dict[str, Any] = (
        json.loads(file.read_text()) if file.exists() else {"schema": 1, "idle": 0, "tests": {}}
    )
    for name, one in tests.items():
        grown = [int(gib * 2**30) for gib in one.pop("grown", ())]
        whole["tests"][f"test_it.py::{name}"] = {"seconds": 1.0, "grown": grown, **one}
    file.write_text(json.dumps(whole))


def learnt(folder: Path) -> dict[str, Any]:
    (file,) = folder.glob(".pytest_cache/d/gpumem/*.json")
    found: dict[str, Any] = json.loads(file.read_text())["tests"]
    return found


def most_at_once(folder: Path) -> int:
    """Tests that ran at once at most."""
    count = most = 0
    for line in (folder / "log").read_text().splitlines():
        count += 1 if line.startswith("begin") else -1
        most = max(most, count)
    return most


def said(result: pytest.RunResult) -> list[str]:
    """The lines about packing."""
    return [
        line
        for line in result.outlines
        if line.startswith("gpumem: ") and "simulated" not in line.lower()
    ]


def test_the_first_session_learns_alone_and_the_second_packs(
    pytester: pytest.Pytester, session: Run
) -> None:
    pytester.makeconftest(LOG)
    pytester.makepyfile(
        test_it="""
        import time, pytest

        @pytest.fixture(scope="module")
        def of_module():
            yield

        @pytest.mark.parametrize("gib", [20, 25, 30])
        def test_buffer(device_buffer, gib, log, of_module):
            device_buffer(gib << 30, "u1")
            time.sleep(0.6)

        def test_host(log):
            time.sleep(0.6)
        """
    )
    first = session(*PACK, "-n", "3")
    first.assert_outcomes(passed=4)
    assert most_at_once(pytester.path) == 1
    assert (
        said(first)[-2]
        == "gpumem: alone on the GPU: 4 never measured; the next session packs what was never measured"
    )
    assert re.fullmatch(
        r"gpumem: packing gained nothing: .* \(4 tests, up to 1 at once\)", said(first)[-1]
    )
    shares = learnt(pytester.path)
    assert shares["test_it.py::test_buffer[30]"]["grown"] == [30 << 30]
    assert shares["test_it.py::test_host"]["grown"] == [0]

    (pytester.path / "log").unlink()
    second = session(*PACK, "-n", "3")
    second.assert_outcomes(passed=4)
    assert most_at_once(pytester.path) == 3  # 20 + 25 + 30 GiB fit, and there are three workers
    assert said(second)[-1].endswith("(4 tests, up to 3 at once)")


def test_what_other_tests_leave_free_is_no_measure_of_a_test(
    pytester: pytest.Pytester, session: Run
) -> None:
    pytester.makeconftest(
        """
        from pytest_gpumem.plugin.packed import PackedFeature

        read = PackedFeature._read

        def beside_a_large_test(self):
            read(self)
            self._free = (self._held or 0) + (25 << 30)

        PackedFeature._read = beside_a_large_test
        """
    )
    pytester.makepyfile(
        test_it="def test_buffer(device_buffer): device_buffer(20 << 30, 'u1')\ndef test_new(device_buffer): device_buffer(20 << 30, 'u1')"
    )
    known(pytester.path, test_buffer={"grown": [20]})
    session(*PACK, "-n", "2").assert_outcomes(passed=2)
    shares = learnt(pytester.path)
    assert (
        shares["test_it.py::test_new"]["alone"] == "took most of the free memory"
    )  # it was alone on the GPU
    assert not shares["test_it.py::test_buffer"].get("alone")


def test_what_does_not_fit_waits(pytester: pytest.Pytester, session: Run) -> None:
    pytester.makeconftest(LOG)
    pytester.makepyfile(
        test_it="""
        import time, pytest

        @pytest.mark.parametrize("number", range(3))
        def test_large(device_buffer, number, log):
            device_buffer(40 << 30, "u1")
            time.sleep(0.2)
        """
    )
    session(*PACK, "-n", "2")
    (pytester.path / "log").unlink()
    session(*PACK, "-n", "2").assert_outcomes(passed=3)
    assert most_at_once(pytester.path) == 1


def test_a_test_that_runs_out_of_memory_beside_others_runs_again_alone(
    pytester: pytest.Pytester, session: Run
) -> None:
    pytester.makeconftest(LOG)
    pytester.makepyfile(
        test_it="""
        import time, pytest
        from pathlib import Path

        class OutOfMemoryError(RuntimeError):
            "As that of a library."

        def test_more(device_buffer, log):  # its share says 1 GiB
            device_buffer(50 << 30, "u1")
            time.sleep(0.8)

        def test_innocent(device_buffer, request, log):
            device_buffer(1 << 30, "u1")
            first = Path(request.config.rootpath, "first")
            request.node.user_properties.append(("seen", first.exists()))
            if not first.exists():
                first.touch()
                raise OutOfMemoryError("CUDA out of memory")

        def test_never(device_buffer, log):
            raise OutOfMemoryError("CUDA out of memory")
        """
    )
    known(
        pytester.path,
        test_more={"grown": [1]},
        test_innocent={"grown": [1]},
        test_never={"grown": [1]},
    )
    result = session(*PACK, "-n", "3", "--junitxml", "junit.xml")
    result.assert_outcomes(passed=2, failed=1)
    lines = said(result)
    assert any(
        "test_it.py::test_more took more than its share: 50.5 GiB instead of 1" in line
        for line in lines
    )
    assert not any("test_innocent took" in line for line in lines)
    (twice,) = (line for line in lines if "twice" in line)
    assert twice.startswith(
        "gpumem: 2 tests ran twice (memory), the second time alone on the GPU: "
    )
    log = (pytester.path / "log").read_text().splitlines()
    again = len(log) - 1 - log[::-1].index("begin test_innocent")
    assert log.count("begin test_innocent") == 2
    running = [line for line in log[:again] if line.startswith("begin")]
    assert len(running) == len([line for line in log[:again] if line.startswith("end")]), (
        "another test ran beside it"
    )
    assert (pytester.path / "junit.xml").read_text().count('name="seen"') == 1
    assert learnt(pytester.path)["test_it.py::test_more"]["grown"] == [1 << 30, 50 << 30]


def test_groups_stay_together_and_a_crash_costs_one_test(
    pytester: pytest.Pytester, session: Run
) -> None:
    pytester.makepyfile(
        test_it="""
        import os, pytest

        @pytest.mark.parametrize("number", range(3))
        @pytest.mark.xdist_group("together")
        def test_group(number, worker_id, request):
            with open(request.config.rootpath / "group", "a") as file:
                file.write(worker_id + "\\n")

        def test_crash():
            os._exit(3)

        def test_after(device_buffer):
            device_buffer(1 << 30, "u1")
        """
    )
    result = session(*PACK, "-n", "2", "--dist", "loadgroup")
    result.assert_outcomes(passed=4, failed=1)
    assert len({*(pytester.path / "group").read_text().split()}) == 1
    result.stdout.fnmatch_lines(["*the process ended in this test, by os._exit(3)*"])
    assert "test_it.py::test_group[0]" in learnt(pytester.path)


def test_the_first_failure_ends_a_session_and_fixtures_are_torn_down(
    pytester: pytest.Pytester, session: Run
) -> None:
    pytester.makepyfile(
        test_it="""
        import pytest

        @pytest.fixture(scope="module")
        def broken():
            yield
            raise RuntimeError("torn down")

        def test_first(broken):
            pass

        def test_second():
            assert False

        @pytest.mark.parametrize("number", range(20))
        def test_third(number):
            pass
        """
    )
    result = session(*PACK, "-n", "1")
    result.assert_outcomes(passed=21, failed=1, errors=1)
    result.stdout.fnmatch_lines(["*RuntimeError: torn down*"])
    stopped = session(*PACK, "-n", "1", "-x")
    assert stopped.ret == pytest.ExitCode.INTERRUPTED
    assert stopped.parseoutcomes()["failed"] == 1
    assert stopped.parseoutcomes().get("passed", 0) < 21


def test_reruns_have_their_own_count(pytester: pytest.Pytester, session: Run) -> None:
    pytester.makepyfile(
        test_it="""
        from pathlib import Path

        def test_flaky(request):
            mark = Path(request.config.rootpath, "mark")
            if not mark.exists():
                mark.touch()
                raise MemoryError("CUDA out of memory")
        """
    )
    result = session(*PACK, "-n", "2", "--reruns", "1", "-p", "no:randomly")
    assert {**result.parseoutcomes(), "warnings": 0} == {"passed": 1, "rerun": 1, "warnings": 0}


def test_the_plan_is_printed_without_a_test(pytester: pytest.Pytester, session: Run) -> None:
    pytester.makepyfile(
        test_it="def test_a(): pass\ndef test_b(): pass\ndef test_c(gpu_benchmark): pass\ndef test_d(): pass\n"
    )
    known(
        pytester.path,
        test_a={"grown": [60], "seconds": 90.0},
        test_b={"grown": [10], "seconds": 30.0},
        test_c={"grown": [1]},
    )
    result = session(*PACK, "-n", "2", "--collect-only", "-v")
    assert said(result) == [
        "gpumem: plan: 4 tests on 1 GPU with 2 workers: 2 min 1 s -> 1 min 31 s expected, without 1 never measured",
        "gpumem: alone on the GPU: 1 measures, 1 never measured",
        "gpumem: test_it.py::test_a: 60 GiB, 1 min 30 s",
        "gpumem: test_it.py::test_b: 10 GiB, 30 s",
        "gpumem: test_it.py::test_c: 1 GiB, 1 s, alone: measures",
        "gpumem: test_it.py::test_d, alone: never measured",
    ]


def test_as_many_workers_as_the_memory_and_the_plan_can_use(
    pytester: pytest.Pytester, session: Run
) -> None:
    pytester.makepyfile(test_it="def test_a(): pass\n")
    session(*PACK, "-n", "auto").stdout.fnmatch_lines(["*1 worker *1 item*"])
    known(pytester.path, **{f"test_{name}": {"grown": [20]} for name in "bcdefg"})
    session(*PACK, "-n", "auto").stdout.fnmatch_lines(["*3 workers *"])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            (),
            "gpumem: --gpumem-pack packs tests into workers: add -n auto, or a number such as -n 8",
        ),
        (
            ("-n", "2", "-p", "no:cacheprovider"),
            "gpumem: --gpumem-pack keeps what tests take in pytest's cache*leave out -p no:cacheprovider",
        ),
        (
            ("-n", "2", "--dist", "each"),
            "gpumem: --gpumem-pack: --dist each runs all tests in each worker; accepted are load, *",
        ),
        (
            ("-d", "--tx", "ssh=there"),
            "gpumem: --gpumem-pack: workers on other machines have other GPUs; accepted are workers here*",
        ),
        (
            ("-n", "2", "--gpumem-footprint=off"),
            "gpumem: --gpumem-pack needs the memory of every test: --gpumem-footprint off *",
        ),
        (
            ("-n", "2", "--gpumem-memory-limit=1 GiB"),
            "gpumem: --gpumem-pack contradicts --gpumem-memory-limit: *",
        ),
    ],
)
def test_a_session_that_cannot_pack_says_why(
    pytester: pytest.Pytester, session: Run, arguments: tuple[str, ...], message: str
) -> None:
    pytester.makepyfile(test_it="def test_a(): pass\n")
    result = session(*PACK, *arguments)
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    result.stderr.fnmatch_lines([f"*{message}"])


def test_fixtures_of_modules_are_charged_to_the_tests_that_use_them(
    pytester: pytest.Pytester, session: Run
) -> None:
    module = """
        import pytest
        from pytest_gpumem.devices.protocol import MemoryKind
        from pytest_gpumem.plugin.state import SESSION

        def held(request, gib):
            memory = request.config.stash[SESSION].device.memory
            buffer = memory.allocate(gib << 30, MemoryKind.DEVICE)
            yield
            memory.free(buffer)

        @pytest.fixture(scope="module")
        def inner(request):
            yield from held(request, {gib})

        @pytest.fixture(scope="module")
        def outer(request):
            request.getfixturevalue("inner")
            yield from held(request, 2)

        @pytest.fixture(scope="module", params=[3, 4])
        def model(request):
            yield from held(request, request.param)

        def test_outer(outer): pass
        def test_inner(inner, device_buffer): device_buffer(1 << 30, "u1")
        def test_model(model): pass
        def test_none(device_buffer): device_buffer(1 << 30, "u1")
        """
    pytester.makepyfile(test_it=module.format(gib=10), test_other=module.format(gib=20))
    session(*PACK, "-n", "1").assert_outcomes(passed=10)
    shares = {
        name: (
            one["grown"][0] >> 30,
            *(f"{fixture} {nbytes >> 30}" for fixture, nbytes in one.get("fixtures", {}).items()),
        )
        for name, one in learnt(pytester.path).items()
    }
    assert shares == {
        f"{file}::{name}": (charged, *(f"{file}::{fixture}" for fixture in fixtures))
        for file, gib in (("test_it.py", 10), ("test_other.py", 20))
        for name, charged, *fixtures in (
            ("test_outer", gib + 2, f"outer {gib + 2}"),  # it sets up the other one
            ("test_inner", gib + 1, f"inner {gib}"),
            ("test_model[3]", 3, "model 3"),
            ("test_model[4]", 4, "model 4"),
            ("test_none", 1),
        )
    }
