"""Help, completion and errors of the command line."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import click
import pytest
from click.testing import CliRunner

from pytest_gpumem.cli import main
from pytest_gpumem.outcomes import NoAnswer, UserError


def commands(group: click.Group, path: str = "") -> Iterator[tuple[str, click.Command]]:
    for name, command in group.commands.items():
        yield f"{path}{name}", command
        if isinstance(command, click.Group):
            yield from commands(command, f"{path}{name} ")


EVERY = dict(commands(main))
EXAMPLES = {
    path: [line.strip() for line in (command.epilog or "").split("\n\n")[0].splitlines()[2:]]
    for path, command in EVERY.items()
    if not isinstance(command, click.Group)
}


def test_every_command_has_its_line_and_examples() -> None:
    assert not [name for name, command in main.commands.items() if not command.short_help]
    assert not [path for path, examples in EXAMPLES.items() if not examples]


def test_help_shows_the_examples_as_they_are() -> None:
    for path in EXAMPLES:
        output = CliRunner().invoke(main, [*path.split(), "--help"]).output
        for example in EXAMPLES[path]:
            assert f"\n    {example}\n" in output, path


def test_an_example_is_a_call_that_the_command_takes() -> None:
    for example in [example for examples in EXAMPLES.values() for example in examples]:
        words = shlex.split(example, comments=True)
        words = words[: next((i for i, word in enumerate(words) if word.startswith(">")), None)]
        assert words.pop(0) == "gpumem", example
        context: click.Context | None = None
        command: click.Command = main
        while isinstance(command, click.Group):
            name = words.pop(0)
            command = command.commands[name]
        context = command.make_context(
            name, list(words)
        )  # raises where an option or an argument does not fit
        assert context.params or not command.params, example


def test_an_error_is_one_line_and_a_crash_of_ours_never_ends_with_the_code_of_a_regression(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for error, code, words in [
        (UserError, 4, ""),
        (NoAnswer, 6, ""),
        (ValueError, 3, "internal error, no verdict: ValueError: "),
    ]:

        def fail(error: type[Exception] = error, **_: object) -> None:
            raise error("first\nsecond\x07")

        commands = type(main)(commands={"doctor": click.Command("doctor", callback=fail)})
        result = CliRunner().invoke(commands, ["doctor"])
        assert result.exit_code == code
        assert result.stderr.splitlines()[-1] == f"gpumem: {words}first second\\x07"


def test_a_dash_puts_one_file_on_standard_output_in_place_of_the_text(tmp_path: Path) -> None:
    text = CliRunner().invoke(main, ["doctor", "--json", str(tmp_path / "machine.json")])
    assert text.stdout.splitlines()[-1] == f"wrote {tmp_path / 'machine.json'}"
    alone = CliRunner().invoke(main, ["doctor", "--json", "-"])
    assert (
        json.loads(alone.stdout).keys()
        == json.loads((tmp_path / "machine.json").read_text()).keys()
    )
    both = CliRunner().invoke(main, ["report", "a.json", "--json", "-", "--csv=-"])
    assert (both.exit_code, both.stdout) == (4, "")
    assert "another file goes to standard output already" in both.stderr


def test_an_empty_argument_is_no_folder() -> None:
    """As a path it would be the working directory, which a duet would compare with itself."""
    for arguments, words in [
        (["duet", ""], "an argument of 'duet ' is empty"),
        (["duet", "--", ""], "BASE is empty"),
        (["report", "results.json", "--csv", ""], "an argument of 'report results.json --csv '"),
    ]:
        result = CliRunner().invoke(main, arguments)
        assert (result.exit_code, result.stdout) == (4, ""), arguments
        assert words in result.stderr, arguments


def test_a_reader_that_has_enough_is_no_error() -> None:
    reader, writer = os.pipe()
    os.close(reader)
    program = "from pytest_gpumem.cli import main; main()"
    done = subprocess.run(
        [sys.executable, "-c", program, "--help"], stdout=writer, stderr=subprocess.PIPE, text=True
    )
    os.close(writer)
    assert (done.returncode, done.stderr) == (141, "")


def test_an_option_of_pytest_before_the_dashes_is_told_its_place() -> None:
    for command in ["profile nsys", "gate", "duet"]:
        done = CliRunner().invoke(main, [*command.split(), "-k", "x"], prog_name="gpumem")
        assert done.exit_code == 4, command
        assert "options of pytest come last, after --: ... -- -k. " in done.output, command
    done = CliRunner().invoke(main, ["gate", "--max-regresion", "1%"], prog_name="gpumem")
    assert "Did you mean '--max-regression'? Try" in done.output
