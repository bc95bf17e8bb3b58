from __future__ import annotations

from importlib.metadata import version

from click.testing import CliRunner

from pytest_gpumem.cli import main


def test_usage_errors_are_one_line_and_exit_with_4() -> None:
    for arguments, named in [
        ([], "Missing command. Try '"),
        (["profile"], "Missing command. Try '"),
        (["docter"], "docter"),
        (["compare"], "No such command 'compare'"),
        (["doctor", "--jsn"], "--json"),
        (["doctor", "extra"], "extra"),
    ]:
        result = CliRunner().invoke(main, arguments)
        assert result.exit_code == 4, arguments
        assert result.stdout == "", arguments
        (line,) = result.stderr.splitlines()
        assert line.startswith("gpumem: "), arguments
        assert named in line, arguments


def test_version() -> None:
    result = CliRunner().invoke(main, ["--version"])
    assert (result.exit_code, result.output) == (0, f"gpumem {version('pytest-gpumem')}\n")
