"""The fixture `l2_sweep`, `--gpumem-l2-sweep`, and the command that hands on to it."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
from forked import COMMAND
from sessions import SIMULATED, Run

FIXTURE = """
import pytest
from pytest_gpumem import MiB

def test_table(l2_sweep, device_buffer, gpu_kernels, gpu_device):
    found_limit = gpu_device.l2.set_aside()
    out, table = device_buffer(64 * MiB, "i4"), device_buffer(SIZE * MiB, "i4")
    found = l2_sweep(gpu_kernels.reset_data, out, table, window=table)
    assert gpu_device.l2.set_aside() == found_limit
    assert found.simulated and found.target == "reset_data" and found.window_bytes == SIZE * MiB
    assert 3 <= len(found.points) <= found.grid / 4
    assert sum(not point.setting.set_aside for point in found.points) == 1
    told = found.recommend()
    print("told", told, found.pays)
"""
STREAMS = """
from pytest_gpumem import MiB

def test_table(gpu_benchmark, persisting_stream, device_buffer, gpu_kernels):
    out, table = device_buffer(64 * MiB, "i4"), device_buffer(8 * MiB, "i4")
    with persisting_stream(table, set_aside="off") as stream:
        off = gpu_benchmark(gpu_kernels.reset_data, out, table, stream=stream, label="off")
    with persisting_stream(table) as stream:
        on = gpu_benchmark(gpu_kernels.reset_data, out, table, stream=stream, label="on")
    assert on.latency < off.latency

def test_plain(gpu_benchmark, device_buffer, gpu_kernels):
    a, b = (device_buffer(1 * MiB, "f4") for _ in range(2))
    gpu_benchmark(gpu_kernels.copy, a, b)
"""


def said(result: pytest.RunResult) -> str:
    """What the session printed, in one line."""
    return " ".join(result.stdout.str().split())


def sections(result: pytest.RunResult) -> int:
    """Maps that the session showed."""
    return sum(line.startswith("recommended: persisting_stream(") for line in result.stdout.lines)


@pytest.mark.parametrize(("device", "size"), [("rtx3090", 2), ("h200", 9)])
def test_the_fixture_finds_a_setting_that_pays(pytester: pytest.Pytester, gpumem: Run, device: str, size: int) -> None:
    pytester.makepyfile(FIXTURE.replace("SIZE", str(size)))
    result = gpumem("-s", "--gpumem-device", f"sim:{device}")
    result.assert_outcomes(passed=1)
    result.stdout.fnmatch_lines(["*told {'set_aside': *, 'hit_ratio': *} True*", "*gpumem: persisting L2*"])
    assert f"(simulated), window {size} MiB; gain in % against off" in said(result)
    assert sections(result) == 1


def test_a_mistake_is_one_line(pytester: pytest.Pytester, gpumem: Run) -> None:
    pytester.makepyfile(
        """
        import numpy
        from pytest_gpumem import MiB

        def test_not_a_buffer(l2_sweep, gpu_kernels):
            l2_sweep(gpu_kernels.copy, 1, 2, window=[1, 2])

        def test_a_mode(l2_sweep, gpu_kernels, device_buffer):
            a, b = (device_buffer(1 * MiB, "f4") for _ in range(2))
            l2_sweep(gpu_kernels.copy, a, b, window=a, mode="warm")

        def test_an_open_stream(l2_sweep, gpu_kernels, device_buffer, persisting_stream):
            a, b = (device_buffer(1 * MiB, "f4") for _ in range(2))
            with persisting_stream(a):
                l2_sweep(gpu_kernels.copy, a, b, window=a)

        def test_an_array(l2_sweep, gpu_kernels):
            l2_sweep(gpu_kernels.copy, 1, 2, window=numpy.ones((1000, 4)))

        def test_pinned(l2_sweep, gpu_kernels, device_buffer, pinned_buffer):
            a, b = device_buffer(1 * MiB, "f4"), pinned_buffer(1 * MiB, "f4")
            l2_sweep(gpu_kernels.copy, a, b, window=b)

        def test_no_function(l2_sweep, device_buffer):
            l2_sweep(None, window=device_buffer(1 * MiB, "f4"))

        def test_no_build(l2_sweep):
            l2_sweep.case(None)
        """
    )
    result = gpumem()
    result.assert_outcomes(failed=7)
    result.stdout.fnmatch_lines(
        [
            "*BadCall: window=?1, 2?; it is a buffer that device_buffer made",
            "*BadCall: mode='warm'; accepted are clean-cold, dirty-cold, hot",
            "*BadWindow: a persisting stream on <device buffer, * is still open, and a device has one set-aside: sweep after its block",
            "*BadCall: window=array(??1., 1...ape=(1000, 4)); it is a buffer that device_buffer made",
            "*BadWindow: *device memory*",
            "*BadCall: l2_sweep() takes a kernel of gpu_kernels or a callable, not None",
            "*BadCall: l2_sweep.case() takes a function that is given a memory and returns a Case, not None",
        ]
    )
    assert "persisting L2 ===" not in result.stdout.str()


def test_a_wrong_result_is_not_swept(pytester: pytest.Pytester, gpumem: Run) -> None:
    pytester.makeconftest(
        """
        import pytest
        from pytest_gpumem.measuring.target import WrongResult
        from pytest_gpumem.measuring.target_kernel import KernelLaunches

        @pytest.fixture(autouse=True)
        def wrong(monkeypatch):
            def check(self):
                raise WrongResult("made to be wrong")
            monkeypatch.setattr(KernelLaunches, "check", check)
        """
    )
    pytester.makepyfile(FIXTURE.replace("SIZE", "8"))
    result = gpumem()
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(["*WrongResult: made to be wrong"])


def test_the_option_sweeps_what_runs_on_a_persisting_stream_once(pytester: pytest.Pytester, gpumem: Run) -> None:
    pytester.makepyfile(STREAMS)
    result = gpumem("--gpumem-l2-sweep")
    result.assert_outcomes(passed=2)
    assert "test_table: reset_data on" in said(result)
    result.stdout.fnmatch_lines(["hit ratio *", "persistence pays: *", "*: 3 PASS*"])
    assert sections(result) == 1
    assert sections(gpumem()) == 0


def test_also_of_a_test_whose_assertion_fails_on_the_stream(pytester: pytest.Pytester, gpumem: Run) -> None:
    # On the first stream: nothing of this test has been swept before.
    pytester.makepyfile(STREAMS.replace('label="off")', 'label="off")\n        assert False, "too slow"'))
    result = gpumem("--gpumem-l2-sweep", "-k", "table")
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(["*too slow*"])
    assert sections(result) == 1


def test_a_sweep_that_cannot_be_done_does_not_hide_the_failure(pytester: pytest.Pytester, gpumem: Run) -> None:
    # What a sweep raises would make a skip of a failed test.
    pytester.makepyfile(
        """
        from pytest_gpumem import MiB
        from pytest_gpumem.devices.protocol import Unsupported

        def test_table(gpu_benchmark, persisting_stream, device_buffer, gpu_kernels, gpu_device, monkeypatch):
            out, table = device_buffer(64 * MiB, "i4"), device_buffer(8 * MiB, "i4")
            with persisting_stream(table) as stream:
                gpu_benchmark(gpu_kernels.reset_data, out, table, stream=stream)
                request = gpu_device.l2.request_set_aside

                def refuse(nbytes):
                    if nbytes == gpu_device.facts.persisting_l2_max_bytes:
                        raise Unsupported("not that much")
                    return request(nbytes)

                monkeypatch.setattr(gpu_device.l2, "request_set_aside", refuse)
                assert False, "too slow"
        """
    )
    result = gpumem("--gpumem-l2-sweep")
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(["E *too slow*", "not swept: not that much"])
    assert sections(result) == 0


def test_a_driver_that_sets_aside_something_else_is_noted(pytester: pytest.Pytester, gpumem: Run) -> None:
    pytester.makepyfile(
        """
        from pytest_gpumem import MiB

        def test_table(l2_sweep, device_buffer, gpu_kernels, gpu_device, monkeypatch):
            out, table = device_buffer(64 * MiB, "i4"), device_buffer(9 * MiB, "i4")
            largest = gpu_device.facts.persisting_l2_max_bytes
            request = gpu_device.l2.request_set_aside
            monkeypatch.setattr(gpu_device.l2, "request_set_aside", lambda nbytes: request(largest if nbytes else 0))
            found = l2_sweep(gpu_kernels.reset_data, out, table, window=table)
            monkeypatch.undo()
            again = l2_sweep(gpu_kernels.reset_data, out, table, window=table)
            assert found.notes and not again.notes
        """
    )
    result = gpumem("--gpumem-device", "sim:h200")
    assert re.search(r"the driver set aside 37\.5 MiB for a request of (3\.75|7\.5|11\.25) MiB", said(result))
    assert said(result).count("the map shows the requested sizes") == 1
    assert "1 passed" in said(result)


def test_conditions_that_forbid_a_judgement_are_noted(pytester: pytest.Pytester, gpumem: Run) -> None:
    pytester.makepyfile(
        """
        from msgspec.structs import replace
        from pytest_gpumem import MiB

        def test_table(l2_sweep, device_buffer, gpu_kernels, gpu_device, monkeypatch):
            out, table = device_buffer(64 * MiB, "i4"), device_buffer(9 * MiB, "i4")
            conditions = gpu_device.conditions
            monkeypatch.setattr(gpu_device, "conditions", lambda: replace(conditions(), other_processes=2))
            (note,) = l2_sweep(gpu_kernels.reset_data, out, table, window=table).notes
            assert note.endswith(" measurements of the sweep are unreliable: 2 other processes on the device"), note
        """
    )
    gpumem().assert_outcomes(passed=1)


def test_streams_that_are_open_together_are_swept_after_the_last(pytester: pytest.Pytester, gpumem: Run) -> None:
    pytester.makepyfile(
        """
        from pytest_gpumem import MiB

        def test_two(gpu_benchmark, persisting_stream, device_buffer, gpu_kernels, gpu_device, request):
            out, one, other = (device_buffer(size * MiB, "i4") for size in (32, 4, 8))
            from pytest_gpumem.plugin.state import SESSION
            sweeps = request.config.stash[SESSION].sweeps
            with persisting_stream(one, miss="normal") as first:
                with persisting_stream(other, where="launch") as second:
                    gpu_benchmark(gpu_kernels.reset_data, out, other, stream=second, label="other")
                assert not sweeps
                gpu_benchmark(gpu_kernels.reset_data, out, one, stream=first, label="one")
            assert [found.window_bytes for _, found in sweeps] == [8 * MiB, 4 * MiB]
        """
    )
    result = gpumem("--gpumem-l2-sweep")
    result.assert_outcomes(passed=1)
    assert sections(result) == 2


def test_a_sweep_keeps_the_streams_other_arguments(pytester: pytest.Pytester, gpumem: Run) -> None:
    pytester.makeconftest(
        """
        import pytest
        from pytest_gpumem.plugin import l2_sweeping

        @pytest.fixture
        def opened(monkeypatch):
            opened, persisting = [], l2_sweeping.persisting
            monkeypatch.setattr(l2_sweeping, "persisting", lambda *a, **k: opened.append(k) or persisting(*a, **k))
            return opened
        """
    )
    pytester.makepyfile(
        """
        from pytest_gpumem import MiB

        def test_it(gpu_benchmark, persisting_stream, device_buffer, gpu_kernels, opened):
            out, table = (device_buffer(size * MiB, "i4") for size in (32, 8))
            with persisting_stream(table, miss="normal", where="launch", window="6 MiB", offset="1 MiB") as stream:
                gpu_benchmark(gpu_kernels.reset_data, out, table, stream=stream)
            swept = {(k["miss"], k["where"], k["window"], k["offset"]) for k in opened[1:]}  # after the test's own
            assert swept == {("normal", "launch", 6 * MiB, MiB)}
        """
    )
    gpumem("--gpumem-l2-sweep").assert_outcomes(passed=1)


def test_a_device_without_persisting_l2_skips(pytester: pytest.Pytester, gpumem: Run) -> None:
    pytester.makeconftest(
        """
        import pytest

        @pytest.fixture(autouse=True)
        def without(monkeypatch):
            monkeypatch.setattr("pytest_gpumem.memory.l2.unsupported", lambda *_: "no persisting L2 here")
        """
    )
    pytester.makepyfile(FIXTURE.replace("SIZE", "8"))
    result = gpumem("-rs")
    result.assert_outcomes(skipped=1)
    result.stdout.fnmatch_lines(["SKIPPED*no persisting L2 here"])


def test_nothing_swept_is_no_success(pytester: pytest.Pytester, gpumem: Run) -> None:
    pytester.makepyfile(STREAMS)
    result = gpumem("--gpumem-l2-sweep", "-k", "plain")
    result.assert_outcomes(passed=1, deselected=1)
    assert result.ret == 6
    result.stdout.fnmatch_lines(["*nothing was swept*"])


def test_not_under_xdist(pytester: pytest.Pytester, gpumem: Run) -> None:
    pytester.makepyfile(STREAMS)
    result = gpumem("--gpumem-l2-sweep", "-n", "2")
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    assert "leave out -n" in result.stderr.str()


def test_the_picture(pytester: pytest.Pytester, gpumem: Run) -> None:
    pytester.makepyfile(STREAMS)
    result = gpumem("--gpumem-l2-sweep", "--gpumem-l2-sweep-map", "map.svg", "-k", "table")
    assert result.ret == 0
    assert Path(pytester.path, "map.svg").exists()
    assert "--gpumem-l2-sweep-map: wrote" in said(result)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--gpumem-l2-sweep", "map.pdf"), "--gpumem-l2-sweep-map: 'map.pdf' is no SVG file; accepted is a path that ends in .svg"),
        (("--gpumem-l2-sweep", "nowhere/map.svg"), "there is no folder "),
        (("--gpumem-l2-sweep", "folder.svg"), "it is a folder"),
        (("map.svg",), "--gpumem-l2-sweep-map map.svg: nothing would be swept"),
    ],
)
def test_a_picture_that_cannot_be_is_refused_before_anything_is_measured(
    pytester: pytest.Pytester, gpumem: Run, arguments: tuple[str, ...], words: str
) -> None:
    pytester.makepyfile(STREAMS)
    pytester.mkdir("folder.svg")
    *others, name = arguments
    result = gpumem(*others, "--gpumem-l2-sweep-map", name)
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    assert words in result.stderr.str()
    assert "passed" not in result.stdout.str()


def test_a_picture_that_the_environment_asks_for_needs_no_sweep(
    pytester: pytest.Pytester, gpumem: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytester.makepyfile(STREAMS)
    monkeypatch.setenv("GPUMEM_L2_SWEEP_MAP", "map.svg")
    assert gpumem().ret == 0


def test_a_picture_of_what_the_fixture_sweeps(pytester: pytest.Pytester, gpumem: Run) -> None:
    pytester.makepyfile(FIXTURE.replace("SIZE", "8"))
    assert gpumem("--gpumem-l2-sweep-map", "map.svg").ret == 0
    assert Path(pytester.path, "map.svg").exists()


CASE = """
import numpy as np
import pytest
from pytest_gpumem import Case, MiB

placements = []

def lookup(memory):
    placements.append(memory)
    out, table = memory.device(64 * MiB, "i4"), memory.device(8 * MiB, "i4")
    return Case(lambda: None, reads=[table], writes=[out], window=WINDOW, reference=lambda: None, name="lookup")
"""


def test_a_case_with_a_window_is_swept(pytester: pytest.Pytester, gpumem: Run) -> None:
    pytester.makepyfile(
        CASE.replace("WINDOW", "table")
        + """
def test_case(l2_sweep, gpu_device):
    limit = gpu_device.l2.set_aside()
    asked, request = [], gpu_device.l2.request_set_aside
    gpu_device.l2.request_set_aside = lambda nbytes: asked.append(nbytes) or request(nbytes)
    try:
        found = l2_sweep.case(lookup)
    finally:
        del gpu_device.l2.request_set_aside
    assert found.target == "lookup" and found.window_bytes == 8 * MiB
    assert {point.setting.set_aside for point in found.points} <= set(asked)
    assert len(placements) > len(found.points)
    assert gpu_device.l2.set_aside() == limit
"""
    )
    result = gpumem()
    result.assert_outcomes(passed=1)
    assert sections(result) == 1


def test_the_option_sweeps_a_case_with_a_window_once(pytester: pytest.Pytester, gpumem: Run) -> None:
    pytester.makepyfile(
        CASE.replace("WINDOW", "table")
        + """
def test_case(gpu_benchmark):
    gpu_benchmark.case(lookup, label="one")
    gpu_benchmark.case(lookup, label="other")

def test_within_a_stream(gpu_benchmark, gpu_kernels, device_buffer, persisting_stream):
    out, table = (device_buffer(size * MiB, "i4") for size in (32, 4))
    with persisting_stream(table) as stream:
        gpu_benchmark.case(lookup, label="case")
        gpu_benchmark(gpu_kernels.reset_data, out, table, stream=stream, label="call")
"""
    )
    result = gpumem("--gpumem-l2-sweep")
    result.assert_outcomes(passed=2)
    assert sections(result) == 3


def test_a_case_without_a_window_cannot_be_swept(pytester: pytest.Pytester, gpumem: Run) -> None:
    pytester.makepyfile(
        CASE.replace("WINDOW", "None")
        + """
def test_fixture(l2_sweep):
    l2_sweep.case(lookup)

def test_mode(l2_sweep):
    l2_sweep.case(lookup, mode="warm")

def test_measured(gpu_benchmark):
    gpu_benchmark.case(lookup)
"""
    )
    result = gpumem("--gpumem-l2-sweep")
    result.assert_outcomes(failed=2, passed=1)
    result.stdout.fnmatch_lines(["*BadCall: lookup: Case.window is None*", "*BadCall: mode='warm'*"])
    assert sections(result) == 0


def command(pytester: pytest.Pytester, *arguments: str) -> subprocess.CompletedProcess[str]:
    program = [sys.executable, "-c", COMMAND, "l2-sweep", *arguments]
    return subprocess.run(program, cwd=pytester.path, capture_output=True, text=True)


def test_the_command(pytester: pytest.Pytester) -> None:
    pytester.makepyfile(test_suite=STREAMS)
    pytester.makeini("[pytest]\naddopts = --gpumem-save\n")
    quick = ("--", *SIMULATED[1:])
    done = command(pytester, "test_suite.py::test_table", *quick)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "recommended: persisting_stream(" in done.stdout
    assert not list(pytester.path.rglob("gpumem/*.json"))
    assert command(pytester, "test_suite.py::test_plain", *quick).returncode == 6
    mistaken = command(pytester, "--", "--gpumem-device", "sim")
    assert mistaken.returncode == 4
    assert "TEST is a pytest node id" in mistaken.stderr
