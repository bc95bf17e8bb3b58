"""Every command line in the README and the documentation is one that the programs take."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from pathlib import Path

import click
import pytest
from cases import naming
from document_blocks import PAGES, ROOT, blocks, command_lines

from pytest_gpumem import cli, options

LINES = list(command_lines())
TAKEN_AS_READ = "cd cp sed echo head grep git export case mkdir ncu nsys . mkdocs otava aws"
"""Programs of others, whose lines are not looked at."""


def words(line: str) -> list[str]:
    return shlex.split(line, comments=True)


def parse_gpumem(arguments: list[str]) -> None:
    """As `gpumem` would, without doing anything.

    Raises:
        click.UsageError: there is no such command or option, or an argument is missing.
    """
    with cli.main.make_context("gpumem", arguments) as context:
        _, command, rest = cli.main.resolve_command(
            context, [*context._protected_args, *context.args]
        )
        assert command is not None
        inner = command.make_context("gpumem", rest, parent=context)
        if isinstance(command, click.Group):
            _, command, rest = command.resolve_command(inner, [*inner._protected_args, *inner.args])
            assert command is not None
            command.make_context("gpumem", rest, parent=inner)


@pytest.fixture(autouse=True)
def _files_need_not_be_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        click.Path, "convert", lambda _self, value, _parameter, _context: Path(value)
    )


def gpumem_options(arguments: list[str]) -> Iterator[tuple[options.Option, str | None]]:
    """Options of the plugin among pytest's arguments, each with its value."""
    known = {option.flag: option for option in options.OPTIONS}
    for at, argument in enumerate(arguments):
        name, _, value = argument.partition("=")
        if name.startswith("--gpumem"):
            option = known[name]
            following = arguments[at + 1 : at + 2]
            if (
                not value
                and option.bare is not None
                and (not following or following[0].startswith("-"))
            ):
                value = option.bare
            yield option, None if option.is_flag else value or arguments[at + 1]


def check_pytest(arguments: list[str], config: pytest.Config) -> None:
    """pytest, this plugin and pytest-benchmark know the options, and the plugin can read the values."""
    config._parser.parse(arguments)  # ends with a UsageError at an unknown option
    for option, value in gpumem_options(arguments):
        if value is not None:
            option.parse(value)


def check_script(arguments: list[str]) -> None:
    """The script exists and reads the options."""
    script = ROOT / arguments[0]
    assert script.exists(), script
    own = arguments[1 : arguments.index("--") if "--" in arguments else None]
    sources = "".join(
        path.read_text(encoding="utf-8") for path in (script, *script.parent.glob("*.py"))
    )
    for name in (one for one in own if one.startswith("--")):
        assert f'"{name}"' in sources, f"no script has an option {name}"


def test_every_line_is_taken(pytestconfig: pytest.Config) -> None:
    refused = []
    for where, line in LINES:
        try:
            take(line, pytestconfig)
        except (Exception, SystemExit) as error:
            refused.append(f"{where}: {line}: {type(error).__name__}: {error}")
    assert refused == []


def take(line: str, pytestconfig: pytest.Config) -> None:
    """Raise an error if its program does not take a line."""
    program, *arguments = (
        word for word in words(line) if not re.match(r"[A-Z_]+=", word)
    )  # no variables
    if program == "gpumem":
        parse_gpumem(arguments)
        if "--" in arguments:
            check_pytest(arguments[arguments.index("--") + 1 :], pytestconfig)
    elif program == "pytest":
        check_pytest(arguments, pytestconfig)
    elif program == "pip":
        extras = set(re.findall(r"\[([\w,]+)\]", line))
        text = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
        assert all(
            re.search(rf"^{extra} = \[", text, re.MULTILINE)
            for one in extras
            for extra in one.split(",")
        )
    elif program in ("python", "python3"):
        if arguments[:2] != ["-m", "venv"]:
            check_script(arguments)
    else:
        assert program in TAKEN_AS_READ.split(), "the program is not known here"


def test_a_wrong_line_is_seen() -> None:
    for arguments in [
        ["no-such-command"],
        ["doctor", "--no-such-option"],
        ["gate"],
        ["profile", "gdb"],
    ]:
        with naming(arguments), pytest.raises(click.UsageError):
            parse_gpumem(arguments)


def test_a_wrong_option_of_pytest_is_seen(pytestconfig: pytest.Config) -> None:
    with pytest.raises((pytest.UsageError, SystemExit)):
        check_pytest(["--gpumem-no-such-option"], pytestconfig)


def test_the_readme_names_every_command() -> None:
    for command in sorted(cli.main.commands):
        assert f"gpumem {command}" in (ROOT / "README.md").read_text(encoding="utf-8"), command


def test_outputs_names_the_commands_that_write_json() -> None:
    sentence = next(
        line
        for line in (ROOT / "docs" / "outputs.md").read_text(encoding="utf-8").splitlines()
        if "take `--json FILE`" in line
    )
    named = re.findall(r"`([a-z0-9-]+)`", sentence.partition(" take ")[0])
    inner = {
        name: getattr(command, "commands", {"": command}).values()
        for name, command in cli.main.commands.items()
    }
    assert named == sorted(
        name
        for name, found in inner.items()
        if any("--json" in one.opts for each in found for one in each.params)
    )


def test_toml_blocks_hold_known_keys() -> None:
    known = {option.key for option in options.OPTIONS}
    keys = [
        key
        for block in blocks("toml")
        for key in re.findall(r"^(gpumem\w*) =", block.code, re.MULTILINE)
    ]
    assert keys
    assert {*keys} <= known


def test_pages_are_found() -> None:
    assert {Path(where.partition(":")[0]).name for where, _ in LINES} >= {
        "README.md",
        "tutorial.md",
        "baselines.md",
        "nsight.md",
    }


def test_options_and_variables_in_the_text_exist() -> None:
    """Also those that no command line shows."""
    spelt = [option for option in options.OPTIONS if not option.ini_only]
    flags = {option.flag for option in spelt}
    variables = {option.variable for option in spelt} | {
        "GPUMEM_NSYS",
        "GPUMEM_NCU",
        "GPUMEM_CARDS",
    }  # tools; a template's
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        assert {*re.findall(r"--gpumem(?:-[a-z0-9]+)*(?![\w*-])", text)} <= flags, page.name
        assert {*re.findall(r"(?<!_)\bGPUMEM(?:_[A-Z0-9]+)*(?![\w*])", text)} <= variables, (
            page.name
        )


def test_modules_that_the_architecture_names_exist() -> None:
    package = ROOT / "pytest_gpumem"
    rooms = "|".join(
        path.name for path in package.iterdir() if path.is_dir() and path.name.isidentifier()
    )
    text = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    named = {tuple(one.split(".")) for one in re.findall(rf"`((?:{rooms})\.\w+)", text)}
    assert len(named) > 20
    assert [
        one
        for one in sorted(named)
        if not any(package.joinpath(*one).with_suffix(end).exists() for end in ("", ".py"))
    ] == []


def test_every_feature_of_a_test_is_in_the_architecture() -> None:
    sources = "".join(
        path.read_text(encoding="utf-8")
        for path in (ROOT / "pytest_gpumem" / "plugin").glob("*.py")
    )
    features = {*re.findall(r"^class (\w+)\(Feature\)", sources, re.MULTILINE)}
    text = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    assert len(features) >= 9
    assert features <= {*re.findall(r"`(\w+)`", text)}
