"""Control readings around a session: stored with what is saved, and a device that changes meanwhile is said."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from ci_project import make_three
from sessions import Run, row_in, rows_in, stored_in

from pytest_gpumem.devices.simulated.roofline import Roofline
from pytest_gpumem.plugin import state as session_module
from pytest_gpumem.records.measurement import Controls

COPY = """
def test_copy(gpu_benchmark, device_buffer, gpu_kernels):
    gpu_benchmark(gpu_kernels.copy, device_buffer(64 << 20), device_buffer(64 << 20), max_regression="2%")
"""


def taken(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = row_in(folder)["measurement"]["taken"]
    return found


def verdict(folder: Path) -> tuple[str, str]:
    found = row_in(folder)["verdict"]
    return found["outcome"], found["code"]


def test_controls_are_read_where_something_is_compared_or_stored(
    pytester: pytest.Pytester, gpumem: Run
) -> None:
    pytester.makepyfile(COPY)
    gpumem("--benchmark-json=out.json").assert_outcomes(passed=1)
    assert taken(pytester.path)["controls"] is None
    assert taken(pytester.path)["utc"].startswith("20")
    gpumem("--benchmark-json=out.json", "--gpumem-save").assert_outcomes(passed=1)
    saved = taken(pytester.path)["controls"]
    assert min(saved["dram"], saved["l2"], saved["launch"]) > 0
    (stored,) = stored_in(pytester.path)
    (row,) = json.loads(stored.read_text())["content"]["rows"]
    assert row["measurement"]["taken"]["controls"] == saved
    # Compared with now.
    gpumem("--benchmark-json=out.json").assert_outcomes(passed=1)
    assert taken(pytester.path)["controls"]["source"] == saved["source"]


class Drifting:
    """Control readings of a device that is slower each time."""

    def __init__(self, *factors: float) -> None:
        self._factors = list(factors)

    def __call__(self, device: object, **_: object) -> Controls:
        factor = self._factors.pop(0)
        return Controls(dram=60e-6 * factor, l2=20e-6, launch=3e-6, source="1")


def test_a_device_that_changes_meanwhile_is_said_and_nothing_stored(
    pytester: pytest.Pytester, gpumem: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytester.makepyfile(COPY)
    monkeypatch.setattr(session_module, "read_controls", Drifting(1.0, 1.05))
    result = gpumem("--gpumem-save")
    result.assert_outcomes(passed=1)
    assert result.ret == pytest.ExitCode.OK
    result.stdout.fnmatch_lines(
        [
            "UNDECIDED: the device changed while it was measured: a read of DRAM that runs no code of the project takes 5.00 % longer*",
            "--gpumem-save: the device changed while it was measured, nothing is stored",
        ]
    )
    assert not stored_in(pytester.path)


def test_strict_fails_a_session_whose_device_changed(
    pytester: pytest.Pytester, gpumem: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytester.makepyfile(COPY.replace(', max_regression="2%"', ""))
    monkeypatch.setattr(session_module, "read_controls", Drifting(1.0, 1.0, 1.0, 0.95))
    assert gpumem("--gpumem-save", "--gpumem-strict").ret == pytest.ExitCode.OK
    result = gpumem("--gpumem-strict")
    result.assert_outcomes(passed=1)
    assert result.ret == pytest.ExitCode.TESTS_FAILED


def test_a_device_that_is_not_that_of_the_baseline_is_undecided(
    pytester: pytest.Pytester, gpumem: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The rows themselves are as they were: of code that got faster by just as much, or of a control that is wrong."""
    pytester.makepyfile(COPY)
    monkeypatch.setattr(session_module, "read_controls", Drifting(1.0, 1.0, 1.05, 1.05))
    gpumem("--gpumem-save").assert_outcomes(passed=1)
    gpumem("--benchmark-json=out.json").assert_outcomes(passed=1)
    assert verdict(pytester.path) == ("UNDECIDED", "conditions")


def test_controls_that_cannot_be_read_are_left_out(
    pytester: pytest.Pytester, gpumem: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    from pytest_gpumem.devices.protocol import OutOfMemory

    def full(device: object, **_: object) -> Controls:
        raise OutOfMemory("full")

    pytester.makepyfile(COPY)
    monkeypatch.setattr(session_module, "read_controls", full)
    gpumem("--gpumem-save", "--benchmark-json=out.json").assert_outcomes(passed=1)
    assert taken(pytester.path)["controls"] is None


def test_a_worker_tells_the_controller(
    pytester: pytest.Pytester, gpumem: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In processes of their own, whose readings differ from the third on."""
    # The controller, which is this process, reads the conftest too: what that replaces is put back with the patch.
    monkeypatch.setattr(session_module, "read_controls", session_module.read_controls)
    pytester.makeconftest(
        """
        import pytest_gpumem.plugin.state as session
        from pytest_gpumem.records.measurement import Controls

        readings = iter([1.0, 1.05])
        session.read_controls = lambda device, **_: Controls(dram=60e-6 * next(readings), source="1")
        """
    )
    pytester.makepyfile(COPY)
    result = gpumem("--gpumem-save", "-n", "1")
    result.assert_outcomes(passed=1)
    result.stdout.fnmatch_lines(
        ["UNDECIDED: the device changed while it was measured: *", "*nothing is stored"]
    )


class DriftingL2(Drifting):
    def __call__(self, device: object, **_: object) -> Controls:
        return Controls(dram=60e-6, l2=20e-6 * self._factors.pop(0), launch=3e-6, source="1")


HOT = """
def test_hot(gpu_benchmark, device_buffer, gpu_kernels):
    gpu_benchmark(gpu_kernels.copy, device_buffer(8 << 20), device_buffer(8 << 20), mode="hot")
"""


@pytest.mark.parametrize(("tests", "stored"), [(COPY, 1), (COPY + HOT, 1), (HOT, 0)])
def test_a_change_of_l2_concerns_the_rows_that_l2_serves(
    pytester: pytest.Pytester, gpumem: Run, monkeypatch: pytest.MonkeyPatch, tests: str, stored: int
) -> None:
    pytester.makepyfile(tests)
    monkeypatch.setattr(session_module, "read_controls", DriftingL2(1.0, 1.05))
    said = gpumem("--gpumem-save").stdout.str()
    assert ("a read of L2 that runs no code of the project takes" in said) == ("hot" in tests)
    files = stored_in(pytester.path)
    assert sum(len(json.loads(path.read_text())["content"]["rows"]) for path in files) == stored


def test_a_card_of_another_variant_can_join_a_baseline(
    pytester: pytest.Pytester, gpumem: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the verdict advises: until then it is compared with nothing."""
    pytester.makepyfile(COPY)

    def measured(latency: float, *options: str) -> dict[str, Any]:
        controls = Controls(dram=60e-6, l2=20e-6, launch=3e-6, latency=latency, source="1")
        monkeypatch.setattr(session_module, "read_controls", lambda device, **_: controls)
        gpumem("--benchmark-json=out.json", *options).assert_outcomes(passed=1)
        found: dict[str, Any] = row_in(pytester.path)["verdict"]
        return found

    measured(340e-9, "--gpumem-save")
    first = measured(353e-9, "--gpumem-save")
    assert (first["outcome"], first["code"], first["comparison"]) == (
        "UNDECIDED",
        "other card variant",
        None,
    )
    for latency in (353e-9, 340e-9):
        assert measured(latency)["comparison"]["processes"] == 1


HALF_WAY = """
import os
import pytest

@pytest.mark.parametrize("slower", ["1", os.environ.get("HALF_WAY", "1")], ids=["before", "after"])
def test_copy(gpu_benchmark, device_buffer, gpu_kernels, slower):
    os.environ["SLOWER"] = slower
    gpu_benchmark(gpu_kernels.copy, device_buffer(64 << 20), device_buffer(64 << 20), max_regression="2%")
"""


@pytest.fixture
def half_way(
    pytester: pytest.Pytester, gpumem: Run, monkeypatch: pytest.MonkeyPatch
) -> Callable[..., list[str]]:
    """A baseline, and a run with another device, or other code alone, from its second test on. Gives the outcomes."""
    reading = False
    kernel, read_controls = Roofline.kernel, session_module.read_controls

    def slower(self: Roofline, *given: Any) -> float:
        own = os.environ.get("OF") == "code" and reading
        return kernel(self, *given) * (1.0 if own else float(os.environ["SLOWER"]))

    def read(*arguments: Any, **options: Any) -> Controls:
        nonlocal reading
        reading = True
        try:
            return read_controls(*arguments, **options)
        finally:
            reading = False

    monkeypatch.setattr(Roofline, "kernel", slower)
    monkeypatch.setattr(session_module, "read_controls", read)
    monkeypatch.setenv("SLOWER", "1")
    pytester.makepyfile(HALF_WAY)
    gpumem("--gpumem-save").assert_outcomes(passed=2)
    make_three(stored_in(pytester.path)[0])

    def run(factor: float, of: str, *options: str) -> list[str]:
        monkeypatch.setenv("SLOWER", "1")
        monkeypatch.setenv("HALF_WAY", str(factor))
        monkeypatch.setenv("OF", of)
        result = gpumem("--benchmark-json=out.json", *options)
        rows = rows_in(pytester.path)
        found = [(row["verdict"]["outcome"], row["verdict"]["code"]) for row in rows]
        return [*(" ".join(filter(None, one)) for one in found), pytest.ExitCode(result.ret).name]

    return run


def test_a_device_that_slows_down_half_way_fails_no_row(half_way: Callable[..., list[str]]) -> None:
    assert half_way(1.3, "device") == ["PASS", "UNDECIDED conditions", "OK"]
    assert half_way(1.3, "device", "--gpumem-strict") == [
        "PASS",
        "UNDECIDED conditions",
        "TESTS_FAILED",
    ]


def test_code_that_gets_slower_fails_on_a_device_that_does_not(
    half_way: Callable[..., list[str]],
) -> None:
    assert half_way(1.3, "code") == ["PASS", "FAIL slower", "TESTS_FAILED"]


def test_a_device_that_gets_faster_explains_no_slow_down(
    half_way: Callable[..., list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    controls = iter([1.0, 0.9, 0.9])
    monkeypatch.setattr(
        session_module,
        "read_controls",
        lambda device, **_: Controls(dram=60e-6 * next(controls), source="1"),
    )
    assert half_way(1.3, "code") == ["PASS", "FAIL slower", "TESTS_FAILED"]
