"""The Python API as Markdown, from the source of the public classes: signatures, fields and docstrings.

It reads the text of the source, so every version of Python gives the same pages.
"""

from __future__ import annotations

import ast
import inspect
import re
import textwrap
from collections.abc import Iterator
from importlib import import_module

SECTIONS = {
    "Measuring": {
        "plugin.gpu_benchmark.GpuBenchmark": "__call__ case stream",
        "measuring.case.Case": "",
        "plugin.result.Result": "",
    },
    "Buffers and memory": {
        "memory.spaces.Memory": "",
        "memory.buffers.Buffer": "kind address host_address size itemsize nbytes read write view",
        "memory.managed.ManagedBuffer": "advice advise prefetch discard",
        "plugin.gpu_memory.GpuMemory": "watch",
        "plugin.gpu_memory.BlockMemory": "footprint peak kept",
    },
    "Persisting L2": {"memory.l2.PersistingStream": "handle where nbytes window reset renew"},
    "Work that overlaps": {
        "measuring.works.Works": "copy kernel host allocating in_turn after together staged enqueue",
        "records.measurement.Overlap": "",
    },
}
"""The classes by heading, each with its public members; all of them where none is named."""
LEFT_OUT = {"Memory": ("arena",)}
CALLED = {"__call__": "gpu_benchmark"}
WIDTH = 100
Function = ast.FunctionDef | ast.AsyncFunctionDef


def api() -> str:
    """Every class with its members."""
    parts = []
    for heading, classes in SECTIONS.items():
        parts.append(f"## {heading}")
        for path, members in classes.items():
            module, _, name = path.rpartition(".")
            parts += described(
                getattr(import_module(f"pytest_gpumem.{module}"), name), members.split()
            )
    return "\n\n".join(part for part in parts if part)


def described(kind: type, members: list[str]) -> Iterator[str]:
    """One class: its docstring, a table of its attributes, and its methods.

    Raises:
        LookupError: it has no such member.
    """
    (body,) = ast.parse(textwrap.dedent(inspect.getsource(kind))).body
    assert isinstance(body, ast.ClassDef)
    attributes, methods = dict[str, str](), dict[str, Function]()
    for one, below in zip(body.body, [*body.body[1:], ast.Pass()], strict=True):
        if isinstance(one, ast.AnnAssign) and isinstance(one.target, ast.Name):
            text = (
                below.value.value
                if isinstance(below, ast.Expr) and isinstance(below.value, ast.Constant)
                else ""
            )
            attributes[one.target.id] = str(text)
        elif isinstance(one, Function):
            if any(
                isinstance(by, ast.Name) and by.id.endswith("property") for by in one.decorator_list
            ):
                attributes[one.name] = ast.get_docstring(one) or ""
            else:
                methods[one.name] = one
    left_out = LEFT_OUT.get(kind.__name__, ())
    shown = members or [
        name
        for name in (*attributes, *methods)
        if not name.startswith("_") and name not in left_out
    ]
    if unknown := [name for name in shown if name not in attributes and name not in methods]:
        raise LookupError(f"{kind.__name__} has no {', '.join(unknown)}")
    yield f"### {kind.__name__}"
    yield prose(inspect.getdoc(kind) or "")
    rows = [f"- `{name}`: {phrase(attributes[name])}" for name in shown if name in attributes]
    yield "\n".join(rows)
    for name in shown:
        if name in methods:
            method = methods[name]
            method.name = CALLED.get(name, name)
            yield f"#### {kind.__name__}.{name}" if method.name == name else f"#### {method.name}()"
            yield f"```py\n{signature(method)}\n```"
            yield prose(ast.get_docstring(method) or "")


def signature(function: Function) -> str:
    """The name with the parameters and their defaults; their text says what they take."""
    arguments = ast.parse(f"def f({ast.unparse(function.args)}): ...").body[0]
    assert isinstance(arguments, ast.FunctionDef)
    for parameter in ast.walk(arguments.args):
        if isinstance(parameter, ast.arg):
            parameter.annotation = None
    text = re.sub(r"^self(, /)?(, )?", "", ast.unparse(arguments.args)).replace("'", '"')
    return textwrap.fill(f"{function.name}({text})", WIDTH, subsequent_indent="    ")


def prose(docstring: str) -> str:
    """A docstring of Google's style as Markdown: its lists have a phrase for each entry.

    Errors are left out: each names the value and what is accepted.
    """
    paragraphs = []
    for part in re.split(r"\n\s*\n", inspect.cleandoc(docstring)):
        head, _, rest = part.partition("\n")
        if head == "Raises:" or head.startswith("Source: "):
            continue
        if head in ("Args:", "Returns:", "Yields:"):
            text = textwrap.indent(textwrap.dedent(rest), "    ")
            items = []
            for entry in re.sub(r"\n\s{5,}", " ", text).splitlines():
                if ": as for " not in entry:
                    items.append("- " + re.sub(r"^([\w*]+(?:, [\w*]+)*): ", named, first(entry)))
            if not items:
                continue
            title = {"Args:": "Parameters"}.get(head, head.rstrip(":"))
            paragraphs.append(f"{title}:\n\n" + "\n".join(items))
        else:
            paragraphs.append(" ".join(part.split()))
    return "\n\n".join(paragraphs).replace("<", "&lt;")


def first(text: str) -> str:
    """The first sentence, or what stands before its semicolon."""
    return re.split(r"(?<=[.]) (?=[A-Z])|; ", " ".join(text.split()))[0].rstrip(".")


def named(names: re.Match[str]) -> str:
    """The names at the beginning of an entry as code."""
    return ", ".join(f"`{name}`" for name in names[1].split(", ")) + ": "


def phrase(docstring: str) -> str:
    """The first sentence of a docstring."""
    return first(inspect.cleandoc(docstring).partition("\n\n")[0]).replace("<", "&lt;")
