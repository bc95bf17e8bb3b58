"""Whose ini file a session uses."""

from __future__ import annotations

from pathlib import Path

import pytest

from pytest_gpumem.plugin.session import astray


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """A project with settings, and beside it a folder that is there."""
    (tmp_path / "project" / "tests").mkdir(parents=True)
    (tmp_path / "shared").mkdir()
    (tmp_path / "project" / "pyproject.toml").write_text(
        '[project]\nname = "x"\n[tool.pytest.ini_options]\n'
    )
    return tmp_path / "project"


@pytest.mark.parametrize("tests", [[], ["tests"], ["tests::test_it"]])
def test_the_value_of_an_option_hides_the_settings(project: Path, tests: list[str]) -> None:
    away = astray(tests, ["--gpumem", "--gpumem-baseline", "../shared", *tests], project, None)
    assert away is not None
    assert f"settings in {project / 'pyproject.toml'} are lost, none is used" in away
    assert "takes ../shared for tests" in away


def test_another_ini_file_is_used_instead(project: Path) -> None:
    other = project.parent / "pytest.ini"
    other.write_text("")
    away = astray([], ["--gpumem-report", "../shared"], project, other)
    assert away is not None
    assert f"are lost, {other} is used" in away


@pytest.mark.parametrize(
    ("arguments", "used"),
    [
        (["--gpumem-baseline=../shared"], None),  # such as with an ini file that pytest refuses
        (["--gpumem-baseline", "../nowhere"], None),
        (["--gpumem-baseline", "../shared"], "pyproject.toml"),
        (["tests"], None),
    ],
)
def test_nothing_led_astray(project: Path, arguments: list[str], used: str | None) -> None:
    tests = [one for one in arguments if one == "tests"]
    assert astray(tests, arguments, project, project / used if used is not None else None) is None


@pytest.mark.parametrize(
    ("name", "text"),
    [("setup.cfg", "[metadata]\n"), ("pyproject.toml", "[tool.pytest_other]\n"), ("tox.ini", "")],
)
def test_a_file_without_pytests_section_is_no_ini_file(
    tmp_path: Path, name: str, text: str
) -> None:
    (tmp_path / "project").mkdir()
    (tmp_path / "shared").mkdir()
    (tmp_path / "project" / name).write_text(text)
    assert astray([], ["--gpumem-baseline", "../shared"], tmp_path / "project", None) is None
