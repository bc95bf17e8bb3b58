from __future__ import annotations

from importlib.metadata import version

import pytest
from click.testing import CliRunner

from pytest_gpumem.cli import main


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ([], "Missing command. Try '"),
        (["profile"], "Missing command. Try '"),
        (["docter"], "docter"),
        (["doctor", "--jsn"], "--json"),
        (["doctor", "extra"], "extra"),
    ],
)
def test_usage_errors_are_one_line_and_exit_with_4(arguments: list[str], named: str) -> None:
    result = CliRunner().invoke(main, arguments)
    assert result.exit_code == 4
    assert result.stdout == ""
    (line,) = result.stderr.splitlines()
    assert line.startswith("gpumem: ")
    assert named in line


def test_version() -> None:
    result = CliRunner().invoke(main, ["--version"])
    assert (result.exit_code, result.output) == (0, f"gpumem {version('pytest-gpumem')}\n")
