"""The kernels of a project that are compiled without a GPU, as its `pyproject.toml` declares them."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pytest_gpumem import units
from pytest_gpumem.outcomes import UserError

TABLE = "tool.gpumem.code"
ARCHITECTURES = (
    "sm_80",
    "sm_90",
    "sm_100",
)  # compiled for by default: of A100, H100 and H200, and B200
FIGURES = ("registers", "spill", "shared", "code")
"""Figures of `records.what_ran.CompiledKernel` that may be limited, as `max_registers` and so on."""
IN_BYTES = ("spill", "shared", "code")  # those in bytes


class BadDeclaration(UserError):
    """The declaration cannot be used. The message is one line with the place, the value and what is accepted."""


@dataclass(frozen=True)
class DeclaredSource:
    """One source, with the kernels in it that are compiled."""

    source: str | None  # a CUDA file, relative to the folder of `pyproject.toml`
    triton: str | None  # a kernel of Triton: "module:function"
    entries: tuple[
        str, ...
    ] = ()  # C++ name expressions such as "scale<float>"; empty: all kernels of the file that are no templates
    options: tuple[str, ...] = ()  # options of NVRTC; of a Triton kernel none
    signature: str = ""
    """Types and constants of a Triton kernel's parameters in order, as its ahead-of-time compiler takes them: "*fp32:16, i32, 1024"."""
    triton_options: Mapping[str, int] = field(
        default_factory=dict
    )  # `num_warps` and `num_stages`, where they are given
    limits: Mapping[str, float] = field(
        default_factory=dict
    )  # the most of each figure of `FIGURES`


@dataclass(frozen=True)
class Project:
    """All declarations of a project."""

    folder: Path
    sources: tuple[DeclaredSource, ...]
    architectures: tuple[str, ...] = ARCHITECTURES


_LIMITS = tuple(f"max_{name}" for name in FIGURES)
_CUDA, _TRITON = (
    ("source", "entries", "options"),
    ("triton", "signature", "num_warps", "num_stages"),
)


def project(folder: Path) -> Project:
    """The declarations in `pyproject.toml`; none where there is no such file or table.
    Raises `BadDeclaration`: the file cannot be read, or something in its table cannot be used.
    """
    file = folder / "pyproject.toml"
    try:
        content = _toml(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return Project(folder, ())
    except (OSError, ValueError) as error:
        raise BadDeclaration(f"{file}: {getattr(error, 'strerror', None) or error}") from None
    tool = content.get("tool", {})
    gpumem = tool.get("gpumem", {}) if isinstance(tool, dict) else {}
    for name in gpumem if isinstance(gpumem, dict) else ():
        if name != "code":
            remedy = f"options stand in [tool.pytest.ini_options], as gpumem_{name}"
            raise BadDeclaration(f"{file}: tool.gpumem: there is no key {name!r}; {remedy}")
    where = f"{file}: {TABLE}"
    table = gpumem.get("code", {}) if isinstance(gpumem, dict) else None
    if not isinstance(table, dict):
        raise BadDeclaration(f"{where} is no table")
    _known(table, ("architectures", "kernels", *_LIMITS), where)
    general = _limits(table, where)
    kernels = table.get("kernels", [])
    if not isinstance(kernels, list) or not all(isinstance(one, dict) for one in kernels):
        raise BadDeclaration(f"{where}.kernels is no array of tables; write [[{TABLE}.kernels]]")
    architectures = _texts(table, "architectures", where) or ARCHITECTURES
    for one in architectures:
        check_architecture(one, f"{where}.architectures")
    found = tuple(
        _declared(one, general, f"{where}.kernels[{index}]") for index, one in enumerate(kernels)
    )
    return Project(folder, found, architectures)


def check_architecture(text: str, where: str) -> None:
    """That a text is an architecture of machine code. Raises `BadDeclaration`: it is not."""
    if not re.fullmatch(r"sm_[0-9]{2,3}[af]?", text):
        raise BadDeclaration(f'{where}: {text!r} is no architecture; accepted is such as "sm_90"')


def _declared(table: dict[str, Any], general: Mapping[str, float], where: str) -> DeclaredSource:
    if ("source" in table) == ("triton" in table):
        raise BadDeclaration(f'{where} needs source = "FILE.cu" or triton = "MODULE:FUNCTION"')
    limits = {**general, **_limits(table, where)}
    if "source" in table:
        _known(table, (*_CUDA, *_LIMITS), where)
        source = _text(table, "source", where)
        return DeclaredSource(
            source,
            None,
            _texts(table, "entries", where),
            _texts(table, "options", where),
            limits=limits,
        )
    _known(table, (*_TRITON, *_LIMITS), where)
    triton, signature = _text(table, "triton", where), _text(table, "signature", where)
    if not re.fullmatch(r"[\w.]+:\w+", triton):
        raise BadDeclaration(f'{where}.triton: {triton!r}; accepted is "MODULE:FUNCTION"')
    numbers: dict[str, int] = {}
    for name in ("num_warps", "num_stages"):
        if name in table:
            if type(table[name]) is not int or table[name] < 1:
                raise BadDeclaration(
                    f"{where}.{name}: {table[name]!r}; accepted is a whole number from 1 on"
                )
            numbers[name] = table[name]
    return DeclaredSource(None, triton, signature=signature, triton_options=numbers, limits=limits)


def _limits(table: Mapping[str, Any], where: str) -> dict[str, float]:
    found = {}
    for name in FIGURES:
        value = table.get(f"max_{name}")
        if value is None:
            continue
        if isinstance(value, str) and name in IN_BYTES:
            try:
                value = units.parse_bytes(value)
            except units.QuantityError as error:
                raise BadDeclaration(f"{where}.max_{name}: {error}") from None
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not value >= 0:
            accepted = 'bytes such as 0 or "4 KiB"' if name in IN_BYTES else "a number from 0 on"
            raise BadDeclaration(f"{where}.max_{name}: {value!r}; accepted is {accepted}")
        found[name] = value
    return found


def _known(table: Mapping[str, Any], accepted: tuple[str, ...], where: str) -> None:
    for name in table:
        if name not in accepted:
            raise BadDeclaration(
                f"{where}: there is no key {name!r}; accepted are {', '.join(accepted)}"
            )


def _text(table: Mapping[str, Any], name: str, where: str) -> str:
    value = table.get(name)
    if not isinstance(value, str) or not value.strip() or "\0" in value:
        raise BadDeclaration(f"{where}.{name}: {value!r}; a text is needed")
    return value.strip()


def _texts(table: Mapping[str, Any], name: str, where: str) -> tuple[str, ...]:
    value = table.get(name, [])
    if not isinstance(value, list) or not all(
        isinstance(one, str) and one.strip() for one in value
    ):
        raise BadDeclaration(f"{where}.{name}: {value!r}; a list of texts is needed")
    return tuple(one.strip() for one in value)


def _toml(text: str) -> dict[str, Any]:
    try:
        import tomllib
    except ModuleNotFoundError:  # before Python 3.11, where pytest brings tomli
        import tomli as tomllib  # type: ignore[import-not-found,no-redef,unused-ignore]
    found: dict[str, Any] = tomllib.loads(text)
    return found
