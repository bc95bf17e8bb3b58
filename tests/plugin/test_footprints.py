"""The memory of tests on the simulated device: rows, limits, baselines, parts, and wrong input."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from sessions import Run, rows_in, stored_in

MIB = 2**20

BUFFERS = """
import pytest

def test_two(device_buffer, pinned_buffer):
    device_buffer("4 MiB")
    pinned_buffer("1 MiB")

def test_measured(gpu_benchmark, gpu_kernels, device_buffer):
    a, b, c = (device_buffer(1 << 20, "f4") for _ in range(3))
    gpu_benchmark(gpu_kernels.triad, a, b, c, 3.0)

def test_of_the_host():
    pass
"""


def rows(path: Path) -> dict[str, Any]:
    return {row["key"]: row for row in rows_in(path)}


def results(
    pytester: pytest.Pytester, gpumem: Run, test: str, *arguments: str
) -> tuple[pytest.RunResult, dict[str, Any]]:
    pytester.makepyfile(test_it=test)
    result = gpumem("--benchmark-json=out.json", *arguments)
    return result, rows(pytester.path)


def test_every_test_that_takes_memory_has_a_row(pytester: pytest.Pytester, gpumem: Run) -> None:
    result, found = results(pytester, gpumem, BUFFERS, "--gpumem-footprint=on")
    assert result.ret == 0
    assert set(found) == {"test_it.py::test_two", "test_it.py::test_measured"}
    of_two, of_measured = (
        found["test_it.py::test_two"]["footprint"],
        found["test_it.py::test_measured"]["footprint"],
    )
    assert (of_two["peak"], of_two["pinned_peak"], of_two["kept"], of_two["allocations"]) == (
        4 * MIB,
        MIB,
        0,
        2,
    )
    # Neither placements nor the flush nor references are the test's.
    assert (of_measured["peak"], of_measured["allocations"], of_measured["kept"]) == (3 * MIB, 3, 0)


def test_measured_rows_have_it_without_the_option_and_others_no_row(
    pytester: pytest.Pytester, gpumem: Run
) -> None:
    _, found = results(pytester, gpumem, BUFFERS)
    assert set(found) == {"test_it.py::test_measured"}
    assert found["test_it.py::test_measured"]["footprint"]["peak"] == 3 * MIB
    _, found = results(pytester, gpumem, BUFFERS, "--gpumem-footprint=off")
    assert found["test_it.py::test_measured"]["footprint"] is None


def test_a_limit_that_is_broken_fails_its_test(pytester: pytest.Pytester, gpumem: Run) -> None:
    result, found = results(
        pytester,
        gpumem,
        """
        import pytest

        @pytest.mark.gpumem(max_peak="4 MiB")
        def test_within(device_buffer):
            device_buffer("1 MiB"), device_buffer("3 MiB")

        @pytest.mark.gpumem(max_peak="4 MiB")
        def test_above(device_buffer):
            device_buffer("4 MiB"), device_buffer(4096)
        """,
    )
    result.assert_outcomes(passed=1, failed=1)
    verdicts = {key.partition("::")[2]: row["verdict"] for key, row in found.items()}
    assert {name: (one["outcome"], one["code"]) for name, one in verdicts.items()} == {
        "test_within": ("PASS", None),
        "test_above": ("FAIL", "too much memory"),
    }
    assert "4.004 MiB, above max_peak 4 MiB (marker)" in verdicts["test_above"]["reason"]


def test_limits_of_options_and_of_the_ini_file_hold_for_all_that_take_memory(
    pytester: pytest.Pytester, gpumem: Run
) -> None:
    pytester.makeini("[pytest]\ngpumem_max_peak = 2 MiB\n")
    result, found = results(pytester, gpumem, BUFFERS)
    result.assert_outcomes(passed=1, failed=2)  # that of the host takes none
    assert {row["limits"]["origin"]["max_peak"] for row in found.values()} == {
        "gpumem_max_peak in tox.ini"
    }
    result, _ = results(pytester, gpumem, BUFFERS, "--gpumem-max-peak", "1 GiB")
    result.assert_outcomes(passed=3)


KEEPS = """
import pytest

LEFT = []

@pytest.fixture
def leaking(gpu_device):
    # As a library would report it that nobody frees.
    from pytest_gpumem.devices.memory_kinds import MemoryKind
    return lambda nbytes: LEFT.append(gpu_device.footprints.took(MemoryKind.DEVICE, nbytes))

@pytest.mark.gpumem(max_kept="0 B")
def test_keeps(leaking):
    leaking(4096)

@pytest.mark.gpumem(max_kept="4 KiB")
def test_may_keep(leaking):
    leaking(4096)

@pytest.mark.gpumem(max_kept="0 B")
@pytest.mark.parametrize("number", range(20))
def test_clean(device_buffer, number):
    device_buffer("1 MiB")
"""


def test_what_is_kept_is_judged_after_the_teardown(pytester: pytest.Pytester, gpumem: Run) -> None:
    result, found = results(pytester, gpumem, KEEPS)
    result.assert_outcomes(passed=22, errors=1)
    verdict = found["test_it.py::test_keeps"]["verdict"]
    assert (verdict["outcome"], found["test_it.py::test_keeps"]["failed"]) == ("FAIL", True)
    assert "4 KiB kept, above max_kept 0 B (marker)" in verdict["reason"]
    assert [row["footprint"]["kept"] for row in found.values()] == [4096, 4096, *[0] * 20]
    assert result.ret == 1


def test_workers_of_xdist_report_what_was_kept(pytester: pytest.Pytester, gpumem: Run) -> None:
    pytester.makepyfile(test_it=KEEPS)
    result = gpumem("-n", "1", "-p", "xdist", "-k", "keep", "--benchmark-json=out.json")
    result.assert_outcomes(passed=2, errors=1)
    assert rows(pytester.path)["test_it.py::test_keeps"]["verdict"]["outcome"] == "FAIL"


def test_a_part_is_watched_by_its_label(pytester: pytest.Pytester, gpumem: Run) -> None:
    result, found = results(
        pytester,
        gpumem,
        """
        def test_parts(gpu_memory, device_buffer, managed_buffer):
            device_buffer("2 MiB")
            with gpu_memory.watch("decode", max_kept="8 MiB") as used:
                device_buffer("4 MiB")
                assert used.peak == 4 << 20
                managed_buffer("1 MiB")
            seen = used.footprint
            assert (used.peak, used.kept, seen.managed_peak, seen.allocations, seen.largest) == (4 << 20, 5 << 20, 1 << 20, 2, 4 << 20)
            with gpu_memory.watch("nothing", max_peak="1 B") as nothing:
                pass
            assert nothing.peak == nothing.kept == 0
            with gpu_memory.watch("above", max_kept="0 B"):
                device_buffer("1 MiB")
        """,
    )
    result.assert_outcomes(failed=1)
    assert {
        key.removeprefix("test_it.py::"): row["verdict"]["outcome"] for key, row in found.items()
    } == {
        "test_parts": "MEASURED",
        "test_parts[decode]": "PASS",
        "test_parts[nothing]": "PASS",
        "test_parts[above]": "FAIL",
    }
    assert found["test_it.py::test_parts"]["footprint"]["peak"] == 7 * MIB


GROWS = """
import pytest
from pathlib import Path

@pytest.mark.gpumem(max_peak_regression="{allowed}")
def test_it(device_buffer):
    for _ in range(int(Path(__file__).with_name("blocks").read_text())):
        device_buffer("1 MiB")
"""


@pytest.fixture
def blocks(pytester: pytest.Pytester, gpumem: Run) -> Callable[..., tuple[str, str]]:
    """Runs with a number of blocks of 1 MiB: outcome and reason."""

    def run(count: int, allowed: str = "0 B", *arguments: str) -> tuple[str, str]:
        (pytester.path / "blocks").write_text(str(count))
        _, found = results(pytester, gpumem, GROWS.format(allowed=allowed), *arguments)
        verdict = found["test_it.py::test_it"]["verdict"]
        return verdict["outcome"], verdict["reason"]

    return run


def test_a_growth_against_the_baseline_fails_and_nothing_else_does(
    blocks: Callable[..., tuple[str, str]],
) -> None:
    assert blocks(20)[0] == "NEW"
    assert blocks(20, "0 B", "--gpumem-save")[0] == "NEW"
    assert blocks(20)[0] == "PASS"
    assert blocks(19)[0] == "PASS"
    outcome, reason = blocks(21)
    assert outcome == "FAIL"
    assert (
        "a peak of 21 MiB against 20 MiB of 1 saved run (+1 MiB, +5.00 %), above max_peak_regression 0 B (marker)"
        in reason
    )
    assert blocks(21, "5%")[0] == "PASS"
    assert blocks(22, "5%")[0] == "FAIL"
    assert blocks(22, "5% + 1 MiB")[0] == "PASS"


def test_a_growth_in_several_processes_is_judged_by_the_middle_process(
    pytester: pytest.Pytester, gpumem: Run
) -> None:
    """As with caches and autotuning, which a process has and another has not."""
    source = """
        import pytest
        from pathlib import Path

        left = Path(__file__).with_name("peaks")

        @pytest.mark.gpumem(max_peak_regression="0 B")
        def test_it(device_buffer):
            now, *later = left.read_text().split()
            left.write_text(" ".join(later))
            device_buffer(f"{now} MiB")
    """

    def verdict(peaks: str, *arguments: str) -> tuple[int, str, list[int]]:
        (pytester.path / "peaks").write_text(peaks)
        result, found = results(
            pytester, gpumem, source, f"--gpumem-processes={len(peaks.split())}", *arguments
        )
        row = found["test_it.py::test_it"]
        peaks_of = [row["footprint"]["peak"], *row["footprint"]["further_peaks"]]
        return int(result.ret), row["verdict"]["outcome"], [peak // MIB for peak in peaks_of]

    assert verdict("20", "--gpumem-save") == (0, "NEW", [20])
    assert verdict("21 " * 3) == (1, "FAIL", [21] * 3)
    assert verdict("20 20 21", "--gpumem-save") == (0, "PASS", [21, 20, 20])
    assert verdict("21 " * 3) == (0, "PASS", [21] * 3)
    assert verdict("22 " * 3) == (0, "UNDECIDED", [22] * 3)


def test_a_growth_is_over_the_greatest_peak_of_the_reference(
    blocks: Callable[..., tuple[str, str]],
) -> None:
    assert blocks(20, "5%", "--gpumem-save")[0] == "NEW"
    assert blocks(22, "5%")[0] == "FAIL"
    assert blocks(21, "5%", "--gpumem-save")[0] == "PASS"
    assert blocks(22, "5%")[0] == "PASS"
    outcome, reason = blocks(23, "5%")
    assert outcome == "UNDECIDED"
    assert "needs a duet" in reason
    assert "unchanged code varies between 20 MiB and 21 MiB" in reason


def test_an_accepted_peak_starts_the_row_anew(blocks: Callable[..., tuple[str, str]]) -> None:
    from click.testing import CliRunner

    from pytest_gpumem.cli import main

    assert blocks(1, "0 B", "--gpumem-save")[0] == "NEW"
    assert blocks(2)[0] == "FAIL"
    change = ["--change", "memory=2 MiB", "--reason", "larger batch"]
    done = CliRunner().invoke(main, ["accept", *change, "test_it.py::test_it"])
    assert done.exit_code == 0, done.output
    outcome, reason = blocks(2, "0 B", "--gpumem-save")
    assert outcome == "NEW"
    assert "larger batch), so a new reference begins" in reason
    assert blocks(2)[0] == "PASS"
    assert blocks(3)[0] == "FAIL"


def test_a_test_without_our_fixtures_is_not_passed_on_a_simulated_device(
    pytester: pytest.Pytester, gpumem: Run
) -> None:
    test = """
        import pytest

        @pytest.mark.gpumem(max_peak="1 GiB")
        def test_of_a_library():
            pass
    """
    _, found = results(pytester, gpumem, test)
    verdict = found["test_it.py::test_of_a_library"]["verdict"]
    assert (verdict["outcome"], verdict["code"]) == ("UNDECIDED", "not read")
    assert "a simulated device counts only the buffers of fixtures" in verdict["reason"]
    assert results(pytester, gpumem, test, "--gpumem-strict")[0].ret == 1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ("--gpumem-max-peak", "2 GHz"),
            r"--gpumem-max-peak: '2 GHz' is not understood; accepted is a size",
        ),
        (("--gpumem-max-peak", "0 B"), r"--gpumem-max-peak: '0 B' cannot be met"),
        (
            ("--gpumem-max-kept", "0"),
            r"--gpumem-max-kept: '0' is not understood; accepted is a size .*\), or \"0 B\"$",
        ),
        (
            ("--gpumem-max-peak", "1 MiB", "--gpumem-footprint=off"),
            r"--gpumem-max-peak: max_peak 1 MiB limits what --gpumem-footprint off",
        ),
    ],
)
def test_a_wrong_limit_is_one_line(
    pytester: pytest.Pytester, gpumem: Run, arguments: tuple[str, ...], message: str
) -> None:
    pytester.makepyfile(test_it=BUFFERS)
    result = gpumem(*arguments)
    assert result.ret == 4
    result.stderr.re_match_lines([f"ERROR: gpumem: {message}"])


def test_a_wrong_marker_is_one_line(pytester: pytest.Pytester, gpumem: Run) -> None:
    line = '@pytest.mark.gpumem(max_peek="1 MiB")'
    pytester.makepyfile(test_it=f"import pytest\n{line}\ndef test_it(device_buffer): pass\n")
    result = gpumem()
    assert result.ret == 4
    result.stderr.fnmatch_lines(["*there is no keyword max_peek (did you mean max_peak?)*"])


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (
            "with gpu_memory.watch('a'): pass\n    with gpu_memory.watch('a'): pass",
            "*watch('a'): the label is used already*",
        ),
        (
            "with gpu_memory.watch('a'), gpu_memory.watch('a', max_peak='1 B'): pass",
            "*watch('a'): the label is used already*",
        ),
        (
            "with gpu_memory.watch('a', max_latency='1 us'): pass",
            "*has no keyword 'max_latency'; accepted are max_peak,*",
        ),
        (
            "gpu_benchmark(len, [], max_peak='1 MiB')",
            "*max_peak limits the memory of a test, not a measurement*",
        ),
    ],
)
def test_a_wrong_call_is_one_line(
    pytester: pytest.Pytester, gpumem: Run, body: str, message: str
) -> None:
    pytester.makepyfile(test_it=f"def test_it(gpu_memory, gpu_benchmark):\n    {body}\n")
    result = gpumem()
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines([message])
    result.stdout.no_fnmatch_line("*Traceback*")


def test_a_part_that_outlives_the_body_is_an_error_as_nothing_judges_it(
    pytester: pytest.Pytester, gpumem: Run
) -> None:
    pytester.makepyfile(
        test_it="""
        import pytest

        @pytest.fixture
        def part(gpu_memory):
            with gpu_memory.watch("part", max_peak="1 MiB"):
                yield

        def test_it(part, device_buffer):
            device_buffer("2 MiB")
        """
    )
    result = gpumem()
    result.assert_outcomes(passed=1, errors=1)
    result.stdout.fnmatch_lines(["*this test was judged already: measure in its body*"])


COLLECTIONS = """
import gc, json
from pathlib import Path

collect, asked, running = gc.collect, {}, [""]

def recorded(generation=2):
    asked.setdefault(running[-1], []).append(generation)
    return collect(generation)

def pytest_runtest_logstart(nodeid):
    running.append(nodeid.partition("::test_")[2])

def pytest_runtestloop():
    gc.collect = recorded
    gc.disable()  # a collection of its own would make the objects of a test old

def pytest_unconfigure():
    gc.collect = collect
    gc.enable()
    Path("collections.json").write_text(json.dumps(asked))
"""


def test_what_only_pytest_refers_to_is_not_kept(pytester: pytest.Pytester, gpumem: Run) -> None:
    """Nor are all objects of the process looked at where a test keeps nothing: that would take tens of milliseconds a test."""
    pytester.makeconftest(COLLECTIONS)
    _, found = results(
        pytester,
        gpumem,
        """
        import gc
        import pytest
        from pytest_gpumem.devices.memory_kinds import MemoryKind

        KEPT = []

        class Array:
            '''Memory that lives as long as this object.'''

            def __init__(self, device):
                self.footprints = device.footprints
                self.number = self.footprints.took(MemoryKind.DEVICE, 4096)

            def __del__(self):
                self.footprints.gave_back(self.number)

        @pytest.fixture
        def array(gpu_device):
            return Array(gpu_device)

        def test_nothing(gpu_memory, gpu_device):
            Array(gpu_device)

        def test_fixture(gpu_memory, array):
            assert array

        def test_fails(gpu_memory, gpu_device):
            held = Array(gpu_device)
            def inner(also):
                raise ValueError  # pytester's record of hooks would keep both sides of an assertion
            inner(held)

        def test_cycle(gpu_memory, gpu_device):
            ring = [Array(gpu_device)]
            ring.append(ring)

        def test_old(gpu_memory, gpu_device):
            ring = [Array(gpu_device)]
            ring.append(ring)
            gc.collect()

        def test_traceback(gpu_memory, gpu_device):
            def failing():
                held = Array(gpu_device)
                raise ValueError
            try:
                failing()
            except ValueError as error:
                KEPT.append(error)

        def test_list(gpu_memory, gpu_device):
            KEPT.append(Array(gpu_device))
        """,
    )
    kept = {key.partition("::test_")[2]: row["footprint"]["kept"] for key, row in found.items()}
    # The variables of a failure are there for a debugger, as pytest leaves them.
    assert kept == {
        "nothing": 0,
        "fixture": 0,
        "fails": 4096,
        "cycle": 0,
        "old": 0,
        "traceback": 4096,
        "list": 4096,
    }
    looked = json.loads((pytester.path / "collections.json").read_text())
    assert looked == {"fails": [1], "cycle": [1], "traceback": [1], "list": [1], "old": [2, 1, 2]}


def test_memory_of_wider_fixtures_belongs_to_no_test(
    pytester: pytest.Pytester, gpumem: Run
) -> None:
    _, found = results(
        pytester,
        gpumem,
        """
        import time

        import pytest
        from pytest_gpumem.devices.memory_events import AllocationEvent

        def library_takes(request, address, nbytes):
            log = request.config.pluginmanager.getplugin("gpumem-session").device.footprints.log
            log.emit(AllocationEvent(time.perf_counter(), ("CuPy", "device"), "use", address, nbytes))

        @pytest.fixture(scope="module")
        def wide(request):
            library_takes(request, 1, 1 << 20)
            yield
            library_takes(request, 1, 0)

        def test_first(gpu_memory, wide): pass
        def test_last(gpu_memory, wide, request): library_takes(request, 2, 1 << 10)
        """,
    )
    assert [(row["footprint"]["peak"], row["footprint"]["kept"]) for row in found.values()] == [
        (0, 0),
        (1024, 1024),
    ]


def test_a_limit_of_a_session_without_a_gpu_says_what_it_holds(
    pytester: pytest.Pytester, gpumem: Run
) -> None:
    pytester.makepyfile(test_it="def test_of_a_library(): pass")
    result = gpumem("--gpumem-max-kept", "0 B")
    assert result.ret == 0
    why = "a simulated device counts only the buffers of fixtures, and judges only tests with them"
    limit = f"--gpumem-max-kept: max_kept 0 B: {why}"
    assert limit in " ".join(result.stdout.str().split())
    result = gpumem("--gpumem-max-kept", "0 B", "--gpumem-max-peak", "1 MiB")
    both = f"--gpumem-max-peak: max_peak 1 MiB, --gpumem-max-kept: max_kept 0 B: {why}"
    assert both in " ".join(result.stdout.str().split())


def test_what_a_simulated_device_cannot_show_is_no_pass(
    pytester: pytest.Pytester, gpumem: Run
) -> None:
    """Buffers of fixtures end with them: the whole test keeps and reserves nothing, whatever it does. A part may keep something."""
    test = """
        import pytest

        @pytest.mark.gpumem(max_kept="0 B", max_peak="1 GiB")
        def test_it(device_buffer, pooled_buffer, gpu_memory):
            device_buffer("1 MiB"), pooled_buffer("1 MiB")
            with gpu_memory.watch("part", max_kept="0 B"):
                pass
    """
    result, found = results(pytester, gpumem, test)
    result.assert_outcomes(passed=1)
    whole, part = (found[f"test_it.py::test_it{label}"]["verdict"] for label in ("", "[part]"))
    assert (whole["outcome"], whole["code"], part["outcome"]) == ("UNDECIDED", "not read", "PASS")
    assert {one["limit"] for one in whole["limits"]} == {"max_kept"}
    assert "a simulated device has only the buffers of fixtures" in whole["reason"]


NOT_READ = """
import pytest

@pytest.fixture(autouse=True, scope="session")
def _unreadable(request):
    footprints = request.config.pluginmanager.getplugin("gpumem-session").device.footprints

    def fail(*_, **__):
        raise RuntimeError("the allocator has no snapshot")

    if {at_once}:
        footprints.start = footprints.watch = fail
        return
    begin = footprints.watch
    def watch():
        begun = begin()
        begun.read = fail
        return begun
    footprints.watch = watch
"""


@pytest.mark.parametrize("at_once", [True, False], ids=["from the start", "when it is read"])
def test_memory_that_cannot_be_read_passes_no_limit_and_disturbs_no_test(
    pytester: pytest.Pytester, gpumem: Run, at_once: bool
) -> None:
    pytester.makeconftest(NOT_READ.format(at_once=at_once))
    test = """
        import pytest

        def test_first(device_buffer):
            device_buffer("1 MiB")

        @pytest.mark.gpumem(max_kept="0 B")
        def test_of_a_library():
            pass

        @pytest.mark.gpumem(max_peak="1 GiB")
        def test_measures(gpu_benchmark, gpu_kernels, device_buffer):
            gpu_benchmark(gpu_kernels.copy, device_buffer("1 MiB"), device_buffer("1 MiB"))

        def test_part(gpu_memory):
            with gpu_memory.watch("limited", max_kept="0 B") as used:
                pass
            with gpu_memory.watch("free"):
                pass
            with pytest.raises(Exception, match="the allocator has no snapshot"):
                used.peak

        def test_free(gpu_benchmark, gpu_kernels, device_buffer):
            gpu_benchmark(gpu_kernels.copy, device_buffer("1 MiB"), device_buffer("1 MiB"))
    """
    result, found = results(pytester, gpumem, test, "--gpumem-save")
    result.assert_outcomes(passed=5)
    said = {
        key.removeprefix("test_it.py::"): (row["verdict"]["outcome"], row["verdict"]["code"])
        for key, row in found.items()
    }
    unread = ("UNDECIDED", "not read")
    assert said == {
        "test_of_a_library": unread,
        "test_measures": unread,
        "test_part[limited]": unread,
        "test_free": ("MEASURED", None),
    }
    assert all(
        "the allocator has no snapshot" in row["verdict"]["reason"]
        for key, row in found.items()
        if "free" not in key
    )
    (stored,) = stored_in(pytester.path)
    content = json.loads(stored.read_text())["content"]
    assert {row["nodeid"].partition("::")[2] for row in content["rows"]} == {
        "test_measures",
        "test_free",
    }
    assert not any("footprint" in row for row in content["rows"])
    result, _ = results(pytester, gpumem, test, "--gpumem-strict")
    assert result.ret == 1


PLANS = """
import pytest
from plans import plan

@pytest.mark.gpumem(allow_kept="plans.py:*")
def test_plans(gpu_memory, device_buffer):
    with gpu_memory.watch("plan", max_kept="0 B"):
        plan(device_buffer)

@pytest.mark.gpumem(allow_kept="plans.py:*")
def test_leaks_besides(gpu_memory, device_buffer):
    with gpu_memory.watch("plan", max_kept="0 B"):
        plan(device_buffer)
        device_buffer("1 MiB")

def test_without(gpu_memory, device_buffer):
    with gpu_memory.watch("plan", max_kept="0 B"):
        plan(device_buffer)
"""


def test_what_lines_keep_on_purpose_is_left_out(pytester: pytest.Pytester, gpumem: Run) -> None:
    pytester.makepyfile(plans="def plan(device_buffer):\n    return device_buffer('4 MiB')\n")
    result, found = results(pytester, gpumem, PLANS)
    result.assert_outcomes(passed=1, failed=2)
    outcomes = {
        key.partition("::test_")[2]: (row["verdict"]["outcome"], row["footprint"]["kept"])
        for key, row in found.items()
        if row["label"]
    }
    assert outcomes == {
        "plans[plan]": ("PASS", 0),
        "leaks_besides[plan]": ("FAIL", MIB),
        "without[plan]": ("FAIL", 4 * MIB),
    }
    (use,) = found["test_it.py::test_plans[plan]"]["footprint"]["uses"]
    assert (use["kept"], use["allowed"]) == (0, 4 * MIB)


WARMS_UP = """
import pytest

CALLS = []

@pytest.fixture
def buffer(device_buffer):
    return device_buffer("1 MiB")

@pytest.mark.gpumem(warmups=2, max_peak="2 MiB")
def test_function(buffer, device_buffer, gpu_memory):
    CALLS.append("function")
    with gpu_memory.watch("part") as used:
        device_buffer("1 MiB")
    assert used.peak == 2**20

class TestMethod:
    @pytest.mark.gpumem(warmups=1, max_peak="1 MiB")
    @pytest.mark.parametrize("number", [7])
    def test_method(self, buffer, number):
        CALLS.append(number)

@pytest.mark.gpumem(warmups=3, max_peak="1 MiB")
def test_fails(buffer):
    CALLS.append("fails")
    assert CALLS.count("fails") < 2

def test_calls():
    assert CALLS == 3 * ["function"] + 2 * [7] + 2 * ["fails"]
"""


def test_a_function_is_called_before_its_memory_counts(
    pytester: pytest.Pytester, gpumem: Run
) -> None:
    result, found = results(pytester, gpumem, WARMS_UP)
    result.assert_outcomes(passed=3, failed=1)
    result.stdout.fnmatch_lines(["E *assert 2 < 2"])
    assert "warmed_up" not in result.stdout.str()
    assert {key.partition("::")[2] for key in found} >= {
        "test_function",
        "test_function[part]",
        "TestMethod::test_method[7]",
    }
    assert found["test_it.py::test_function"]["verdict"]["outcome"] == "PASS"


def test_buffers_of_several_threads_count(pytester: pytest.Pytester, gpumem: Run) -> None:
    _, found = results(
        pytester,
        gpumem,
        """
        from concurrent.futures import ThreadPoolExecutor

        def test_it(device_buffer, gpu_memory):
            with ThreadPoolExecutor(8) as threads:
                list(threads.map(device_buffer, 64 * ["1 MiB"]))
        """,
    )
    assert found["test_it.py::test_it"]["footprint"]["peak"] == 64 * MIB


@pytest.mark.parametrize(
    ("code", "why"),
    [
        ("def test_it(gpu_benchmark): ...", "marker: warmups 2: a benchmark warms up by itself"),
        (
            "async def test_it(gpu_memory): ...",
            "marker: warmups 2: only a plain function or method can be called again",
        ),
    ],
)
def test_what_cannot_be_called_again_is_refused(
    pytester: pytest.Pytester, gpumem: Run, code: str, why: str
) -> None:
    pytester.makepyfile(test_it=f"import pytest\n@pytest.mark.gpumem(warmups=2)\n{code}\n")
    result = gpumem()
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines([f"*{why}*"])
