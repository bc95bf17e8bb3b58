"""The tables of the docs, from the code: options and marker, kernels, fixtures, commands and exit codes, API, records, rules, constants.

Pure functions that give Markdown; `ci/renew_tables.py` writes each between its markers.
"""

from __future__ import annotations

import ast
import inspect
import itertools
import json
import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from docs_api import api

if TYPE_CHECKING:
    from pytest_gpumem.kernels.kernel import Kernel
    from pytest_gpumem.options import Option


def _cell(text: str) -> str:
    """Text that stays inside one cell of a table."""
    return " ".join(text.split()).replace("|", r"\|").replace("<", "&lt;")


def options() -> str:
    """Every option of the command line; its environment variable and ini key follow from it."""
    from pytest_gpumem.options import OPTIONS

    lines = []
    for option in OPTIONS:
        if option.ini_only:
            continue
        flag = option.flag if option.is_flag else f"{option.flag}={option.metavar}"
        lines.append(f"- `{flag}`{_keyword(option)}: {_text(option.help)}")
    return "\n".join(lines)


def ini_keys() -> str:
    """Every option that is an ini key alone."""
    from pytest_gpumem.options import OPTIONS

    lines = []
    for option in OPTIONS:
        if option.ini_only:
            key = f"{option.key} = {option.metavar or 'BOOL'}"
            lines.append(f"- `{key}`{_keyword(option)}: {_text(option.help)}")
    return "\n".join(lines)


def _keyword(option: Option) -> str:
    return f", `{option.name}=`" if option.on_marker else ""


def _text(text: str) -> str:
    """The help of an option without a default that says nothing."""
    return " ".join(text.split()).replace("<", "&lt;").removesuffix(" Default: none.")


def marker() -> str:
    """The keywords of the marker that are no options."""
    from pytest_gpumem.options import MARKER_KEYWORDS, OPTIONS

    names = {option.name for option in OPTIONS}
    return "\n".join(f"- `{name}`" for name in MARKER_KEYWORDS if name not in names)


SENTENCES = {
    "copy": "Copies an array.",
    "mul": "Writes an array times a number into another.",
    "stream_add": "Adds two arrays into a third.",
    "triad": "Adds an array and a number times another into a third.",
    "write": "Fills an array with a number.",
    "read": "Sums an array, a partial sum for each block.",
    "dot": "Multiplies two arrays element by element and sums the products, a partial sum for each block.",
    "reset_data": "Fills a long array with a short table, over and over: the table can persist in L2.",
    "reset_data_shared": "Does the same with the table in shared memory.",
    "sliding_window": "Updates every element of a long array, and elements of a short region that can persist in L2.",
    "l2_read": "Reads an array several times in one launch: L2 serves what fits.",
    "add": "Adds one array to another in place.",
    "init": "Fills an array, each thread one element after another with a stride of the grid.",
    "init_warp_per_page": "Fills an array, each warp one page of it.",
    "offset_copy": "Copies an array from an offset on: requests lie across sectors.",
    "stride_copy": "Copies every element at a stride: requests touch more sectors than they use.",
    "permuted_copy": "Copies an array with the threads of a warp in another order within their segment.",
    "transpose": "Transposes a matrix with strided writes.",
    "transpose_tiled": "Transposes a matrix through tiles in shared memory, with bank conflicts.",
    "transpose_padded": "Transposes a matrix through padded tiles in shared memory, without bank conflicts.",
    "chase": "Follows a random cycle of nodes, each access after the one before.",
    "chase_l1": "Follows the cycle with loads through L1.",
    "chase_onward": "Follows the cycle from where the launch before ended.",
    "memcpy": "Copies by the copy engine, without a kernel.",
    "elementwise": "Updates every element in place, with arithmetic for some rounds.",
    "reread": "Reads an array several times at a stride, and writes it.",
}
"""A sentence for each kernel."""


def kernels() -> str:
    """The catalogue: each kernel with its parameters, what it does, its traffic and types."""
    from pytest_gpumem.kernels.catalogue import CATALOGUE

    lines = []
    for kernel in CATALOGUE.values():
        parameters = []
        for parameter in kernel.parameters:
            default = "" if parameter.default is None else f"={parameter.default}"
            parameters.append(parameter.name + default)
        call = f"{kernel.name}({', '.join(parameters)})"
        types = ", ".join(kernel.dtypes) if kernel.source else "any types"
        lines.append(f"- `{call}`: {SENTENCES[kernel.name]} {traffic(kernel)} ({types}).")
    return "\n".join(lines)


_SCALARS = {"width": 512, "height": 512, "steps": 1000, "repeats": 2, "times": 2, "rounds": 1}
"""Of a call whose traffic is shown."""
_SHORT = ("lut_persistent", "data_persistent", "sums", "out")
_ELEMENTS = 512 * 512


def traffic(kernel: Kernel) -> str:
    """Which arrays a launch reads and writes, such as "reads b, c; writes a": each distinct byte counts once."""
    from pytest_gpumem.kernels.kernel import ArrayFacts, Call, Role

    arrays = [
        parameter.name for parameter in kernel.parameters if parameter.role is not Role.SCALAR
    ]
    dtype = kernel.dtypes[0]
    itemsize = int(dtype[1:])
    sizes = {
        name: ArrayFacts(1024 if name in _SHORT else _ELEMENTS, dtype, itemsize) for name in arrays
    }
    scalars = {
        parameter.name: parameter.default
        if parameter.default is not None
        else _SCALARS[parameter.name]
        for parameter in kernel.parameters
        if parameter.role is Role.SCALAR
    }
    accesses = kernel.accesses(Call(sizes, scalars))
    parts = []
    for way in ("read", "write"):
        names = []
        for access in accesses:
            if access.direction == way and f"`{access.argument}`" not in names:
                names.append(f"`{access.argument}`")
        if names:
            parts.append(f"{way}s {', '.join(names)}")
    text = "; ".join(parts)
    return text[0].upper() + text[1:]


def fixtures() -> str:
    """The fixtures with their docstrings."""
    from pytest_gpumem.plugin import hooks as module

    names = re.findall(
        r"^@pytest\.fixture[^\n]*\ndef ([a-z]\w*)\(", inspect.getsource(module), re.MULTILINE
    )
    lines = []
    for name in names:
        fixture = getattr(module, name)
        text = inspect.getdoc(getattr(fixture, "__wrapped__", fixture)) or ""
        lines.append(f"- `{name}`: {_text(text)}")
    return "\n".join(lines)


def commands() -> str:
    """The help of every command."""
    from pytest_gpumem.cli import main

    parts = []
    for path, command in _walk(main, "gpumem"):
        if command is main:
            continue  # its list of commands stands in the README
        # click keeps it, with the names of the context that first needed it
        command._help_option = None
        with click.Context(
            command,
            info_name=path,
            terminal_width=100,
            max_content_width=100,
            **main.context_settings,
        ) as context:
            parts.append(f"## `{path}`\n\n```text\n{_help(command, context)}\n```")
    return "\n\n".join(parts)


def _help(command: click.Command, context: click.Context) -> str:
    """The help of a command; examples and exit codes stand on other pages."""
    text = command.get_help(context).partition("\n  Examples:\n")[0]
    lines = [line for line in text.splitlines() if not line.lstrip().startswith("-h, --help")]
    return "\n".join(lines).rstrip().removesuffix("\nOptions:").rstrip()


def _walk(command: click.Command, path: str) -> Iterator[tuple[str, click.Command]]:
    """A command and all below it, by name."""
    yield path, command
    if isinstance(command, click.Group):
        for name in sorted(command.commands):
            yield from _walk(command.commands[name], f"{path} {name}")


ROOT = Path(__file__).resolve().parents[1]
SCHEMA = ROOT / "docs" / "reference" / "results.schema.json"


READ_BY_USERS = (
    *("Row", "Verdict", "Comparison", "PairedChange", "Omission", "Difference"),
    *("Measurement", "MovedBytes", "Window", "Footprint", "MemoryUse"),
)
"""Records whose fields have a phrase each, the widest first."""
NAMES_ALONE = ("Code", "DeviceFacts", "Limits", "Outcome")
"""Records with the names of their fields alone; the JSON Schema has these, and all others."""


def schema() -> str:
    """Every record of the results with its fields, from their JSON Schema (`ci/results_schema.py`)."""
    whole = json.loads(SCHEMA.read_text(encoding="utf-8"))
    parts = [_record("The value of `gpumem`", whole)]
    for name in READ_BY_USERS:
        parts.append(_record(name, whole["$defs"][name]))
    for name in NAMES_ALONE:
        parts.append(_short_record(name, whole["$defs"][name]))
    return "\n\n".join(parts)


def _record(name: str, record: Mapping[str, Any]) -> str:
    """One record: what it is, and its fields with type and phrase."""
    lines = []
    for field, described in record["properties"].items():
        entry = f"- `{field}`: {_type(described)}"
        if not _says_itself(described, field):
            entry += f". {_phrase(described)}"
        lines.append(entry)
    return f"## {name}\n\n{_phrase(record)}\n\n" + "\n".join(lines)


def _short_record(name: str, record: Mapping[str, Any]) -> str:
    """One record: what it is, and the names of its fields; of an enumeration its values."""
    if "enum" in record:
        names = [f"`{value}`" for value in record["enum"]]
    else:
        names = []
        for field, described in record["properties"].items():
            kind = _type(described)
            names.append(f"`{field}`: {kind}" if "](#" in kind else f"`{field}`")
    return f"## {name}\n\n{_phrase(record)}: {', '.join(names)}."


def _phrase(described: Mapping[str, Any]) -> str:
    """The first sentence of a description, or a clause; the JSON Schema has all of it."""
    text = _text(described.get("description", ""))
    text = re.sub(r"\bNone\b", "null", text)  # of Python's fields, as JSON has them
    phrase = re.split(r"(?<=[a-z)`])[.;:] ", text)[0]
    if len(phrase.split()) > 9:
        phrase = re.split(r", | \(", phrase)[0]
    return phrase.rstrip(".;:,")


def _says_itself(described: Mapping[str, Any], field: str) -> bool:
    """True for a field whose phrase repeats its name, or that is a record of that name."""
    words = {word.lower().strip(",.`") for word in _phrase(described).split()}
    return words <= {*field.split("_"), "the", "a", "an", "of", "its", "in", "by", "and", ""}


def _type(described: Mapping[str, Any]) -> str:
    """A JSON type in words, with links to other records."""
    if "$ref" in described:
        name = str(described["$ref"]).rpartition("/")[2]
        if name not in READ_BY_USERS and name not in NAMES_ALONE:
            return name
        return f"[{name}](#{name.lower()})"
    if "anyOf" in described:
        return " or ".join(_type(choice) for choice in described["anyOf"])
    if "const" in described:
        return f"`{described['const']}`"
    if "enum" in described:
        return " or ".join(f"`{value}`" for value in described["enum"])
    if described.get("type") == "array" and "prefixItems" not in described:
        items = described.get("items")
        return f"array of {_type(items)}" if isinstance(items, dict) and items else "array"
    return str(described.get("type", "any"))


def exit_codes() -> str:
    """The exit codes that mean something particular in a session or a command."""
    from pytest_gpumem.outcomes import EXIT_CODES

    lines = ["| command | code | meaning |", "|---|---|---|"]
    for command, codes in EXIT_CODES.items():
        name = command if command.startswith("pytest") else f"gpumem {command}"
        lines += [
            f"| `{name}` | {code.value} | {_cell(meaning)} |" for code, meaning in codes.items()
        ]
    return "\n".join(lines)


def rooms() -> str:
    """The rooms of the package, floor by floor from the highest, as the law of imports orders them."""
    pyproject = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    layers = re.search(r"^layers = \[\n(.*?)^\]", pyproject, re.DOTALL | re.MULTILINE)
    assert layers is not None
    lines = []
    floors = re.findall(r'"(.+)"', layers[1])
    for number, names in enumerate(floors, 1):
        for name in names.split(" | "):
            path = ROOT / "pytest_gpumem" / name
            file = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
            text = ast.get_docstring(ast.parse(file.read_text(encoding="utf-8"))) or ""
            sentence = re.split(r"(?<=[.:]) ", _text(text))[0].rstrip(":.")
            lines.append(f"- {len(floors) - number} `{name}`: {sentence}.")
    return "\n".join(lines)


def features() -> str:
    """What a session does around a test beside running it: the classes that inherit from `Feature`."""
    lines = []
    for path in sorted((ROOT / "pytest_gpumem" / "plugin").glob("*.py")):
        for node in ast.parse(path.read_text(encoding="utf-8")).body:
            if not isinstance(node, ast.ClassDef):
                continue
            bases = [base.id for base in node.bases if isinstance(base, ast.Name)]
            if "Feature" in bases:
                text = _text(ast.get_docstring(node) or "")
                sentence = re.split(r"(?<=[.]) ", text)[0]
                lines.append(f"- `{node.name}` (`plugin.{path.stem}`): {sentence}")
    return "\n".join(lines)


MODULES_OF_CONSTANTS = ("judging/slowdown.py", "judging/duet.py")
"""Modules of the package with the constants of a comparison."""


def judging_constants() -> Iterator[tuple[str, str, str]]:
    """The constants of a comparison: name, value and comment, as the code has them."""
    for path in MODULES_OF_CONSTANTS:
        text = (ROOT / "pytest_gpumem" / path).read_text(encoding="utf-8")
        for name, value, comment in _constants_of(text):
            yield f"{Path(path).stem}.{name}", value, comment


def _constants_of(text: str) -> Iterator[tuple[str, str, str]]:
    """The constants of a module, each with the docstring below it; empty without one."""
    body = ast.parse(text).body
    for statement, after in itertools.zip_longest(body, body[1:]):
        if not isinstance(statement, ast.Assign) or not isinstance(statement.targets[0], ast.Name):
            continue
        name = statement.targets[0].id
        if not name.isupper():
            continue
        comment = ""
        if isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant):
            comment = " ".join(str(after.value.value).split())
        yield name, ast.get_source_segment(text, statement.value) or "", comment


def constants() -> str:
    """The constants of a comparison, from the code and the docstrings below them."""
    lines = ["| constant | value | what it is |", "|---|---|---|"]
    for name, value, comment in judging_constants():
        if not comment:
            raise ValueError(f"{name}: no docstring says what it is")
        lines.append(f"| `{name}` | `{value}` | {_cell(comment)} |")
    return "\n".join(lines)


TABLES: dict[str, Callable[[], str]] = {
    "options": options,
    "ini-keys": ini_keys,
    "marker": marker,
    "kernels": kernels,
    "fixtures": fixtures,
    "commands": commands,
    "api": api,
    "schema": schema,
    "exit-codes": exit_codes,
    "features": features,
    "rooms": rooms,
    "constants": constants,
}
"""The tables by the NAME of their marker."""
