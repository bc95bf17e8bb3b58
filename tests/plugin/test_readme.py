"""The examples of the README: those of the catalogue run on the simulated device, the others can be collected."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest
from readme_examples import README, examples

TESTS = [example for example in examples() if example.module is None]
MODULES = [example for example in examples() if example.module is not None]


def test_there_are_some() -> None:
    assert len(TESTS) >= 4
    assert [example.module for example in MODULES] == ["triton_kernels.py"]


def test_catalogue_examples_run_on_the_simulated_device(pytester: pytest.Pytester, session: Callable[..., pytest.RunResult]) -> None:
    pytester.makepyfile(TESTS[0].code)
    result = session("--gpumem", "--gpumem-device", "sim")
    result.assert_outcomes(passed=3)


def test_every_example_can_be_collected(pytester: pytest.Pytester) -> None:
    """Here, or where its libraries are: else it skips."""
    pytester.makepyfile(**{module.module.removesuffix(".py"): module.code for module in MODULES if module.module})
    pytester.makepyfile(**{f"test_of_line_{example.line}": example.code for example in TESTS})
    result = pytester.runpytest_subprocess("--collect-only", "-q", "-p", "no:cacheprovider")
    assert result.ret == pytest.ExitCode.OK, result.stdout.str()


def test_the_kernels_shown_are_those_that_run_on_a_gpu() -> None:
    """`tests/cuda` imports its own copy of the module that the README shows."""
    (shown,) = MODULES
    there = (README.parent / "tests" / "cuda" / str(shown.module)).read_text(encoding="utf-8")
    bare = there.partition('"""\n\n')[2].replace("  # noqa: N803", "")
    assert shown.code.partition("\n")[2] == bare


def prose() -> str:
    """The README without its code."""
    return re.sub(r"^```.*?^```$|`[^`\n]*`", "", README.read_text(encoding="utf-8"), flags=re.DOTALL | re.MULTILINE)


@pytest.mark.parametrize("target", re.findall(r"\]\(([^)#:]+)\)", prose()))
def test_links_lead_somewhere(target: str) -> None:
    assert (README.parent / Path(target)).exists()
