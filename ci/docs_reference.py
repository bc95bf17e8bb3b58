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
    """Every option of the command line with its environment variable and ini key, which all derive from one table."""
    from pytest_gpumem.options import OPTIONS

    lines = ["| option | environment, ini | marker | |", "|---|---|---|---|"]
    for option in (one for one in OPTIONS if not one.ini_only):
        flag = option.flag if option.is_flag else f"{option.flag} {option.metavar}"
        lines.append(
            f"| `{flag}` | `{option.variable}`, `{option.key}` | {_keyword(option)} | {_cell(option.help)} |"
        )
    return "\n".join(lines)


def ini_keys() -> str:
    """Every option that is an ini key alone."""
    from pytest_gpumem.options import OPTIONS

    rare = [one for one in OPTIONS if one.ini_only]
    rows = [
        f"| `{one.key} = {one.metavar or 'BOOL'}` | {_keyword(one)} | {_cell(one.help)} |"
        for one in rare
    ]
    return "\n".join(["| ini | marker | |", "|---|---|---|", *rows])


def _keyword(option: Option) -> str:
    return f"`{option.name}=`" if option.on_marker else ""


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
    """The catalogue: each kernel with what it does, its parameters, traffic, element types and where it comes from."""
    from pytest_gpumem.kernels.catalogue import CATALOGUE

    lines = [
        "| kernel | what it does | parameters | traffic | types | source |",
        "|---|---|---|---|---|---|",
    ]
    for kernel in CATALOGUE.values():
        parameters = ", ".join(
            parameter.name if parameter.default is None else f"{parameter.name}={parameter.default}"
            for parameter in kernel.parameters
        )
        cells = [
            SENTENCES[kernel.name],
            f"`{parameters}`",
            traffic(kernel),
            ", ".join(kernel.dtypes),
            _cell(kernel.section),
        ]
        lines.append(f"| `{kernel.name}` | {' | '.join(cells)} |")
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
    found = {
        way: list(dict.fromkeys(one.argument for one in accesses if one.direction == way))
        for way in ("read", "write")
    }
    return "; ".join(
        f"{way}s {', '.join(f'`{name}`' for name in names)}"
        for way, names in found.items()
        if names
    )


def fixtures() -> str:
    """The fixtures with their docstrings."""
    from pytest_gpumem.plugin import fixtures as module

    names = re.findall(
        r"^@pytest\.fixture[^\n]*\ndef ([a-z]\w*)\(", inspect.getsource(module), re.MULTILINE
    )
    lines = ["| fixture | |", "|---|---|"]
    for name in names:
        fixture = getattr(module, name)
        lines.append(
            f"| `{name}` | {_cell(inspect.getdoc(getattr(fixture, '__wrapped__', fixture)) or '')} |"
        )
    return "\n".join(lines)


def commands() -> str:
    """The help of every command."""
    from pytest_gpumem.cli import main

    parts = []
    for path, command in _walk(main, "gpumem"):
        # click keeps it, with the names of the context that first needed it
        command._help_option = None
        with click.Context(
            command,
            info_name=path,
            terminal_width=100,
            max_content_width=100,
            **main.context_settings,
        ) as context:
            parts.append(f"## `{path}`\n\n```text\n{command.get_help(context)}\n```")
    return "\n\n".join(parts)


def _walk(command: click.Command, path: str) -> Iterator[tuple[str, click.Command]]:
    """A command and all below it, by name."""
    yield path, command
    if isinstance(command, click.Group):
        for name in sorted(command.commands):
            yield from _walk(command.commands[name], f"{path} {name}")


ROOT = Path(__file__).resolve().parents[1]
SCHEMA = ROOT / "docs" / "reference" / "results.schema.json"


def schema() -> str:
    """Every record of the results with its fields, from their JSON Schema (`ci/results_schema.py`)."""
    whole = json.loads(SCHEMA.read_text(encoding="utf-8"))
    parts = [_record("The value of `gpumem`", whole)]
    # In the order in which a reader meets them: the widest first.
    order = (
        "Row",
        "Verdict",
        "Comparison",
        "Measurement",
        "MovedBytes",
        "Window",
        "Conditions",
        "DeviceFacts",
        "Limits",
    )
    names = [*order, *sorted(whole["$defs"].keys() - {*order})]
    return "\n\n".join([*parts, *(_record(name, whole["$defs"][name]) for name in names)])


def _record(name: str, record: Mapping[str, Any]) -> str:
    """One record: what it is, and a table of its fields; of an enumeration its values."""
    head = f"## {name}\n\n{_cell(record.get('description', ''))}"
    if "enum" in record:
        return f"{head}\n\nOne of {', '.join(f'`{value}`' for value in record['enum'])}."
    lines = ["| field | type | |", "|---|---|---|"]
    for field, described in record["properties"].items():
        text = re.sub(
            r"\bNone\b", "null", _cell(described.get("description", ""))
        )  # of Python's fields, as JSON has them
        lines.append(f"| `{field}` | {_type(described)} | {text} |")
    return f"{head}\n\n" + "\n".join(lines)


def _type(described: Mapping[str, Any]) -> str:
    """A JSON type in words, with links to other records."""
    if "$ref" in described:
        name = described["$ref"].rpartition("/")[2]
        return f"[{name}](#{name.lower()})"
    if "anyOf" in described:
        return " or ".join(_type(one) for one in described["anyOf"])
    if "const" in described:
        return f"`{described['const']}`"
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
    """The rooms of the package from the highest floor to the lowest, as the law of imports orders them."""
    layers = re.search(
        r"^layers = \[\n(.*?)^\]",
        (ROOT / "pyproject.toml").read_text(encoding="utf-8"),
        re.DOTALL | re.MULTILINE,
    )
    assert layers is not None
    lines = ["| floor | room | |", "|---|---|---|"]
    floors = re.findall(r'"(.+)"', layers[1])
    for floor, names in zip(range(len(floors) - 1, -1, -1), floors, strict=True):
        for name in names.split(" | "):
            path = ROOT / "pytest_gpumem" / name
            file = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
            text = ast.get_docstring(ast.parse(file.read_text(encoding="utf-8"))) or ""
            lines.append(
                f"| {floor} | `{name}` | {_cell(re.split(r'(?<=[.]) ', ' '.join(text.split()))[0])} |"
            )
    return "\n".join(lines)


def features() -> str:
    """What a session does around a test beside running it: the classes that inherit from `Feature`."""
    lines = ["| feature | in | |", "|---|---|---|"]
    for path in sorted((ROOT / "pytest_gpumem" / "plugin").glob("*.py")):
        for one in ast.parse(path.read_text(encoding="utf-8")).body:
            if isinstance(one, ast.ClassDef) and any(
                isinstance(base, ast.Name) and base.id == "Feature" for base in one.bases
            ):
                lines.append(
                    f"| `{one.name}` | `plugin.{path.stem}` | {_cell(ast.get_docstring(one) or '')} |"
                )
    return "\n".join(lines)


MODULES_OF_CONSTANTS = ("judging/reference.py", "judging/duet.py")
"""Modules of the package with the constants of a comparison."""


def judging_constants() -> list[tuple[str, str, str]]:
    """The constants of a comparison: name, value and comment, as the code has them."""
    constants = []
    for path in MODULES_OF_CONSTANTS:
        text = (ROOT / "pytest_gpumem" / path).read_text(encoding="utf-8")
        for name, value, comment in _constants_of(text):
            constants.append((f"{Path(path).stem}.{name}", value, comment))
    return constants


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
