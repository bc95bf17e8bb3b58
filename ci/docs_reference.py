"""The reference pages' tables, from the code: options and marker, kernels of the catalogue, fixtures, commands.

Pure functions that give Markdown; `ci/docs_hooks.py` puts each behind its marker when the site is built.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterator

import click


def _cell(text: str) -> str:
    """Text that stays inside one cell of a table."""
    return " ".join(text.split()).replace("|", r"\|").replace("<", "&lt;")


def options() -> str:
    """Every option with its environment variable and ini key, which all derive from one table."""
    from pytest_gpumem.settings import OPTIONS

    lines = ["| option | environment, ini | marker | |", "|---|---|---|---|"]
    for option in OPTIONS:
        flag = option.flag if option.is_flag else f"{option.flag} {option.metavar}"
        marker = f"`{option.name}=`" if option.on_marker else ""
        lines.append(f"| `{flag}` | `{option.variable}`, `{option.key}` | {marker} | {_cell(option.help)} |")
    return "\n".join(lines)


def marker() -> str:
    """The keywords of the marker that are no options."""
    from pytest_gpumem.settings import MARKER_KEYWORDS, OPTIONS

    names = {option.name for option in OPTIONS}
    return "\n".join(f"- `{name}`" for name in MARKER_KEYWORDS if name not in names)


def kernels() -> str:
    """The catalogue: each kernel with its parameters, element types and where it comes from."""
    from pytest_gpumem.kernels.catalogue import CATALOGUE

    lines = ["| kernel | parameters | types | source |", "|---|---|---|---|"]
    for kernel in CATALOGUE.values():
        parameters = ", ".join(
            parameter.name if parameter.default is None else f"{parameter.name}={parameter.default}" for parameter in kernel.parameters
        )
        lines.append(f"| `{kernel.name}` | `{parameters}` | {', '.join(kernel.dtypes)} | {_cell(kernel.section)} |")
    return "\n".join(lines)


def fixtures() -> str:
    """The fixtures with their docstrings."""
    from pytest_gpumem.plugin import fixtures as module

    names = re.findall(r"^@pytest\.fixture[^\n]*\ndef ([a-z]\w*)\(", inspect.getsource(module), re.MULTILINE)
    lines = ["| fixture | |", "|---|---|"]
    for name in names:
        fixture = getattr(module, name)
        lines.append(f"| `{name}` | {_cell(inspect.getdoc(getattr(fixture, '__wrapped__', fixture)) or '')} |")
    return "\n".join(lines)


def commands() -> str:
    """What every command says to `--help`."""
    from pytest_gpumem.cli import main

    parts = []
    for path, command in _walk(main, "gpumem"):
        with click.Context(command, info_name=path, terminal_width=100, max_content_width=100) as context:
            parts.append(f"## `{path}`\n\n```text\n{command.get_help(context)}\n```")
    return "\n\n".join(parts)


def _walk(command: click.Command, path: str) -> Iterator[tuple[str, click.Command]]:
    """A command and all below it, by name."""
    yield path, command
    if isinstance(command, click.Group):
        for name in sorted(command.commands):
            yield from _walk(command.commands[name], f"{path} {name}")


TABLES: dict[str, Callable[[], str]] = {
    "options": options,
    "marker": marker,
    "kernels": kernels,
    "fixtures": fixtures,
    "commands": commands,
}
"""What `<!-- generated: NAME -->` stands for."""
