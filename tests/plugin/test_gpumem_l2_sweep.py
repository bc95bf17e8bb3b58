"""`gpumem l2-sweep` on tests that measure under an access-policy window."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner, Result
from sessions import SIMULATED

from pytest_gpumem.cli import main
from pytest_gpumem.measuring import l2_sweep

TESTS = """
from pytest_gpumem import Case, MiB

def lookup(memory):
    out, table = memory.device(64 * MiB, "i4"), memory.device(8 * MiB, "i4")
    return Case(lambda: None, reads=[table], writes=[out], window=table, reference=lambda: None, name="lookup")

def test_table(gpu_benchmark, persisting_stream, device_buffer, gpu_kernels):
    out, table = device_buffer(64 * MiB, "i4"), device_buffer(8 * MiB, "i4")
    with persisting_stream(table, set_aside="off") as stream:
        off = gpu_benchmark(gpu_kernels.reset_data, out, table, stream=stream, label="off")
    with persisting_stream(table, hit_ratio=0.5) as stream:
        on = gpu_benchmark(gpu_kernels.reset_data, out, table, stream=stream, label="on")
    gpu_benchmark.case(lookup, label="case")
    assert on.latency < off.latency

def test_plain(gpu_benchmark, device_buffer, gpu_kernels):
    a, b = (device_buffer(1 * MiB, "f4") for _ in range(2))
    gpu_benchmark(gpu_kernels.copy, a, b)
"""


@pytest.fixture(autouse=True)
def few_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    """The search measures off, the fitted setting and the maximum, and confirms them twice."""
    monkeypatch.setattr(l2_sweep, "GRID_SHARE", 0.0)
    monkeypatch.setattr(l2_sweep, "ROUNDS", 2)


def swept(pytester: pytest.Pytester, *arguments: str) -> Result:
    pytester.makepyfile(test_suite=TESTS)
    return CliRunner().invoke(
        main, ["l2-sweep", *arguments, *(() if "--" in arguments else ("--",)), *SIMULATED[1:]]
    )


def test_each_measurement_under_a_window_gets_its_map_and_nothing_is_saved(
    pytester: pytest.Pytester,
) -> None:
    pytester.makeini(
        "[pytest]\naddopts = --gpumem-save --benchmark-save=here\ngpumem_report = page.html\n"
    )
    done = swept(pytester, "test_suite.py::test_table", "--json", "l2.json")
    assert done.exit_code == 0, done.stdout + done.stderr
    assert done.stdout.count("recommended: persisting_stream(") == 2
    assert "test_suite.py::test_table[on]: reset_data on " in done.stdout
    assert "(simulated), window 8 MiB" in done.stdout
    on, case = json.loads(Path(pytester.path, "l2.json").read_text())
    assert (on["row"], case["row"]) == (
        "test_suite.py::test_table[on]",
        "test_suite.py::test_table[case]",
    )
    for one in (on, case):
        assert one["simulated"]
        assert one["window_bytes"] == 8 << 20
        assert [point["setting"] == [0, 0.0] for point in one["points"]] == [True, False, False]
    # The test fails without persistence, and is swept.
    assert on["recommend"]["set_aside"] > 0
    assert on["gain"]["low"] > 0
    assert not list(pytester.path.rglob("gpumem/*.json"))
    assert not Path(pytester.path, "page.html").exists()


def test_nothing_to_sweep_is_no_answer(pytester: pytest.Pytester) -> None:
    done = swept(pytester, "test_suite.py::test_plain")
    assert (done.exit_code, done.stdout) == (6, "")
    assert "gpumem: nothing was swept" in done.stderr


def test_a_mistake_is_named_with_what_pytest_says(pytester: pytest.Pytester) -> None:
    done = swept(pytester, "test_suite.py::test_no_such")
    assert done.exit_code == 4
    assert done.stderr.splitlines() == ["gpumem: there is no test test_suite.py::test_no_such"]
    done = swept(pytester, "test_suite.py::test_table", "--", "--no-such-option")
    assert (done.exit_code, len(done.stderr.splitlines())) == (4, 1)
    assert "pytest ended with 4: " in done.stderr
    assert "unrecognized arguments: --no-such-option" in done.stderr
    done = swept(pytester, "--")
    assert done.exit_code == 4
    assert "TEST is a pytest node id" in done.stderr
