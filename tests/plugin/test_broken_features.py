"""A feature that raises by mistake changes no test: it is named once, and there is no verdict."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from sessions import SIMULATED

from pytest_gpumem.outcomes import Exit

BREAKS = """
    from contextlib import contextmanager
    from pytest_gpumem.devices.errors import Unsupported
    from pytest_gpumem.plugin import {module}

    def enters(self, *arguments):
        raise ZeroDivisionError("of nothing")

    def skips(self, *arguments):  # as only a test may
        raise Unsupported("of nothing")

    @contextmanager
    def leaves(self, *arguments):
        yield
        raise ZeroDivisionError("of nothing")

    {module}.{feature}.{method} = {when}
"""
TESTS = """
    import pytest

    @pytest.fixture
    def resource():
        yield
        open("torn down", "a").write("x")

    def test_passes(resource, gpu_benchmark, gpu_kernels, device_buffer):
        gpu_benchmark(gpu_kernels.copy, device_buffer(4096), device_buffer(4096))

    def test_other(resource): pass
"""
FAILS = """
    def test_fails(resource): assert 1 == 2

    def test_skips(resource): pytest.skip("no time")
"""
BROKEN = [
    ("footprints", "FootprintFeature", "setup", "enters"),
    ("footprints", "FootprintFeature", "teardown", "leaves"),
    ("footprints", "WaitFeature", "call", "enters"),
    ("footprints", "WaitFeature", "call", "skips"),
    ("isolation", "LeftoverFeature", "setup", "leaves"),
    ("isolation", "LeftoverFeature", "teardown", "enters"),
    ("isolation", "ExclusiveFeature", "test", "leaves"),
    ("outputs", "OutputFeature", "setup", "enters"),
    ("verdicts", "VerdictFeature", "judge", "enters"),
    ("verdicts", "VerdictFeature", "test", "enters"),
]


@pytest.mark.parametrize(("module", "feature", "method", "when"), BROKEN)
def test_no_outcome_changes_and_the_feature_is_named_once(
    pytester: pytest.Pytester, module: str, feature: str, method: str, when: str
) -> None:
    pytester.makeconftest(BREAKS.format(module=module, feature=feature, method=method, when=when))
    pytester.makepyfile(test_a=TESTS + FAILS, test_b=TESTS)
    result = pytester.runpytest_subprocess(*SIMULATED)
    result.assert_outcomes(passed=4, failed=1, skipped=1)
    assert len(Path("torn down").read_text()) == 6
    text = result.stdout.str()
    assert text.count("raised by mistake, and what it was to judge is UNDECIDED") == 1
    error = "Unsupported" if when == "skips" else "ZeroDivisionError"
    assert f"{method}: {error}: of nothing" in text


@pytest.mark.parametrize(("module", "feature", "method", "when"), BROKEN[1:4])
def test_a_strict_session_has_no_verdict(
    pytester: pytest.Pytester, module: str, feature: str, method: str, when: str
) -> None:
    pytester.makeconftest(BREAKS.format(module=module, feature=feature, method=method, when=when))
    pytester.makepyfile(TESTS)
    strict = pytester.runpytest_subprocess(*SIMULATED, "--gpumem-strict")
    strict.assert_outcomes(passed=2)
    assert strict.ret == Exit.NO_VERDICT
    assert not [line for line in strict.outlines if line.startswith("red")]


def test_a_row_that_fails_at_the_end_of_a_strict_session_is_red(
    pytester: pytest.Pytester,
) -> None:
    pytester.makepyfile(
        TESTS.replace("device_buffer(4096))", "device_buffer(4096), max_regression='1%')")
    )
    pytester.runpytest_subprocess(*SIMULATED, "--gpumem-save")  # a single process passes nothing
    module, feature, method, when = BROKEN[2]
    pytester.makeconftest(BREAKS.format(module=module, feature=feature, method=method, when=when))
    strict = pytester.runpytest_subprocess(*SIMULATED, "--gpumem-strict")
    strict.assert_outcomes(passed=2)
    assert "1 row undecided: this fails" in strict.stdout.str()
    assert strict.ret == Exit.FAILED


@pytest.mark.parametrize("workers", [(), ("-n1",)], ids=["alone", "worker"])
@pytest.mark.parametrize("broken", [BROKEN[0], BROKEN[1]], ids=["setup", "teardown"])
def test_its_limits_are_undecided(
    pytester: pytest.Pytester, broken: tuple[str, str, str, str], workers: tuple[str, ...]
) -> None:
    module, feature, method, when = broken
    pytester.makeconftest(BREAKS.format(module=module, feature=feature, method=method, when=when))
    pytester.makepyfile(
        """
        import pytest

        @pytest.mark.gpumem(max_kept="1 KiB")
        def test_a(device_buffer): device_buffer(4096)
        """
    )
    result = pytester.runpytest_subprocess(*SIMULATED, *workers, "--benchmark-json=results.json")
    result.assert_outcomes(passed=1)
    result.stdout.fnmatch_lines(["*test_a*max_kept*UNDECIDED: footprint raised by mistake*"])
    (missing,) = json.loads(Path("results.json").read_text())["gpumem"]["missing"]
    assert missing["status"] == "undecided"
