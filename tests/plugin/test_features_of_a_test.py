"""The features of a session around a test: what they raise for the user fails it, and the others still leave."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import product
from pathlib import Path

import pytest
from cases import naming

from pytest_gpumem.devices.protocol import DeviceError
from pytest_gpumem.plugin.running import Feature, RunningHooks

AROUND = ("setup", "fixture", "call", "teardown")
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
    """Notes which phases it enters and leaves. It takes part in all."""

    def __init__(self) -> None:
        self.entered: list[str] = []
        self.left: list[str] = []

    @contextmanager
    def _phase(self, name: str) -> Iterator[None]:
        self.entered.append(name)
        try:
            yield
        finally:
            self.left.append(name)


for phase in AROUND:
    setattr(Recorder, phase, lambda self, *_, phase=phase: self._phase(phase))


def planted(method: str, when: str, error: BaseException) -> Feature:
    """A feature that raises in one of its methods, when it enters or when it leaves a phase."""

    @contextmanager
    def around(*_: object) -> Iterator[None]:
        if when == "entering":
            raise error
        yield
        raise error

    def fails(*_: object) -> None:
        raise error

    members = {method: around if method in AROUND else fails, "name": "planted"}
    feature: Feature = type("Planted", (Feature,), members)()
    return feature


def run(
    pytester: pytest.Pytester, feature: Feature, body: str = "assert True"
) -> tuple[pytest.RunResult, Recorder, dict[str, str]]:
    """One test with a feature, and another one around it or inside of it."""
    recorder, broken = Recorder(), dict[str, str]()
    pytester.makepyfile(TEST.format(body=body))
    hooks = RunningHooks([feature, recorder], broken)
    return pytester.runpytest_inprocess("-rA", plugins=[hooks]), recorder, broken


def test_an_error_for_the_user_in_a_phase_fails_the_test(pytester: pytest.Pytester) -> None:
    for phase, when in product(AROUND, ("entering", "leaving")):
        Path("torn down").unlink(missing_ok=True)
        result, recorder, broken = run(pytester, planted(phase, when, DeviceError("no counters")))
        with naming(phase, when):
            assert sorted(recorder.entered) == sorted(recorder.left)
            assert result.ret != 0
            assert "no counters" in result.stdout.str() + result.stderr.str()
            assert broken == {}
            was_set_up = when == "leaving" or phase in ("call", "teardown")
            assert Path("torn down").exists() == was_set_up


def test_a_failure_takes_the_place_of_a_skip_and_stands_beside_another_failure(
    pytester: pytest.Pytester,
) -> None:
    feature = planted("judge", "", pytest.fail.Exception("too slow", pytrace=False))
    run(pytester, feature, "pytest.skip('no time')")[0].assert_outcomes(failed=1)
    result = run(pytester, feature, "assert 1 == 2")[0]
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(["*assert 1 == 2*", "*Captured gpumem call*", "too slow"])
