"""The features of a session around a test: what one of them raises is a failure with its name, and the others still leave."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from pytest_gpumem.devices.protocol import Unsupported
from pytest_gpumem.plugin.running import Feature, RunningHooks

PHASES = ("test", "setup", "call", "teardown", "fixture")
TEST = """
import pytest

@pytest.fixture
def resource():
    yield
    open("torn down", "w").close()

def test_it(resource):
    {body}
"""


class Recorder(Feature):
    """Notes which phases it enters and leaves."""

    def __init__(self) -> None:
        self.entered: list[str] = []
        self.left: list[str] = []
        for name in PHASES:
            setattr(self, name, lambda *_, name=name: self._phase(name))

    @contextmanager
    def _phase(self, name: str) -> Iterator[None]:
        self.entered.append(name)
        try:
            yield
        finally:
            self.left.append(name)


class Planted(Feature):
    """Raises in one of its methods, in a phase when it enters or when it leaves it."""

    def __init__(self, method: str, when: str, error: BaseException) -> None:
        @contextmanager
        def phase(*_: object) -> Iterator[None]:
            if when == "entering":
                raise error
            yield
            raise error

        def fails(*_: object) -> None:
            raise error

        setattr(self, method, phase if method in PHASES else fails)


def run(
    pytester: pytest.Pytester, planted: Feature, body: str = "assert True"
) -> tuple[pytest.RunResult, list[Recorder]]:
    """One test with a feature between two others."""
    recorders = [Recorder(), Recorder()]
    pytester.makepyfile(TEST.format(body=body))
    hooks = RunningHooks([recorders[0], planted, recorders[1]])
    return pytester.runpytest_inprocess("-rA", plugins=[hooks]), recorders


@pytest.mark.parametrize("when", ["entering", "leaving"])
@pytest.mark.parametrize("phase", PHASES)
def test_an_error_in_a_phase_fails_the_test_with_the_feature_s_name(
    pytester: pytest.Pytester, phase: str, when: str
) -> None:
    result, recorders = run(pytester, Planted(phase, when, ZeroDivisionError("of nothing")))
    assert result.ret != 0
    assert (
        f"gpumem: Planted.{phase} raised ZeroDivisionError: of nothing"
        in result.stdout.str() + result.stderr.str()
    )
    for one in recorders:
        assert sorted(one.entered) == sorted(one.left)
    was_set_up = when == "leaving" or phase in ("call", "teardown")
    assert Path("torn down").exists() == was_set_up
    assert recorders[0].left[-1] == "test"


@pytest.mark.parametrize(
    "error", [Unsupported("no counters"), pytest.fail.Exception("no counters", pytrace=False)]
)
@pytest.mark.parametrize("method", ["setup", "call", "teardown", "judge", "report"])
def test_what_a_feature_cannot_do_skips_no_test(
    pytester: pytest.Pytester, method: str, error: BaseException
) -> None:
    result, _ = run(pytester, Planted(method, "leaving", error))
    assert result.ret == 1
    assert result.parseoutcomes().keys() & {"failed", "errors", "error"}
    assert "skipped" not in result.parseoutcomes()
    result.stdout.fnmatch_lines(["*no counters*"])


@pytest.mark.parametrize("method", ["judge", "report"])
def test_an_error_about_the_report_fails_the_test_with_the_feature_s_name(
    pytester: pytest.Pytester, method: str
) -> None:
    result, recorders = run(pytester, Planted(method, "", ZeroDivisionError("of nothing")))
    assert result.ret == 1
    result.stdout.fnmatch_lines(
        [f"*gpumem: Planted.{method} raised ZeroDivisionError: of nothing*"]
    )
    for one in recorders:
        assert sorted(one.entered) == sorted(one.left)
        assert {"setup", "teardown", "test"} <= {*one.left}


def test_a_failure_takes_the_place_of_a_skip_and_stands_beside_another_failure(
    pytester: pytest.Pytester,
) -> None:
    planted = Planted("judge", "", pytest.fail.Exception("too slow", pytrace=False))
    run(pytester, planted, "pytest.skip('no time')")[0].assert_outcomes(failed=1)
    result, _ = run(pytester, planted, "assert 1 == 2")
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(["*assert 1 == 2*", "*Captured gpumem call*", "too slow"])


def test_an_expected_failure_may_be_a_feature_s(pytester: pytest.Pytester) -> None:
    pytester.makepyfile("import pytest\n\n@pytest.mark.xfail(strict=True)\ndef test_it(): pass")
    hooks = RunningHooks([Planted("judge", "", pytest.fail.Exception("too slow", pytrace=False))])
    pytester.runpytest_inprocess(plugins=[hooks]).assert_outcomes(xfailed=1)
