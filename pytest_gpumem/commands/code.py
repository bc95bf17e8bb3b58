"""The command `gpumem code`."""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import click
import msgspec
from rich.text import Text

from pytest_gpumem.commands import examples, json_option, terminal, write_json
from pytest_gpumem.outcomes import Exit, NoAnswer, UserError
from pytest_gpumem.printable import printable
from pytest_gpumem.records.what_ran import CompiledKernel, CompiledKernels
from pytest_gpumem.reporting.columns import Columns, Line
from pytest_gpumem.units import short_bytes

if TYPE_CHECKING:
    from pytest_gpumem.kernels.declared import DeclaredSource, Project

_HEADINGS = ("arch", "registers", "spill", "shared", "code")
_CHILD = "import sys; sys.path[:] = [one for one in sys.path if one]; from pytest_gpumem.cli import main; main()"


@click.command(
    short_help="Compile the project's kernels without a GPU.",
    epilog=examples(
        "gpumem code                             # the kernels that pyproject.toml declares",
        "gpumem code --base origin/main          # beside another revision",
        "gpumem code --catalogue --arch sm_90    # the kernels of this package",
    ),
)
@click.option(
    "--arch",
    "architectures",
    multiple=True,
    metavar="ARCH",
    help="Such as sm_90; may be repeated. Default: of pyproject.toml.",
)
@click.option(
    "--base",
    metavar="BASE",
    help="Compare with a git revision, or with the project in another folder.",
)
@click.option("--catalogue", is_flag=True, help="Compile the kernels of this package.")
@json_option("Write the figures of all kernels as JSON.")
def code(
    architectures: tuple[str, ...], base: str | None, catalogue: bool, file: Path | None
) -> int:
    """Compile kernels for GPUs that are not here, and print what each needs.

    [[tool.gpumem.code.kernels]] in pyproject.toml declares CUDA sources and kernels of Triton. The figures: registers of a thread; local
    memory of a thread (spilled registers and stack); shared memory of a block; and machine code. max_registers, max_spill, max_shared and
    max_code in pyproject.toml limit them.
    """
    from pytest_gpumem.kernels.declared import TABLE, check_architecture, project

    for one in architectures:
        check_architecture(one, "--arch")
    declared = project(Path.cwd())
    if not declared.sources and not catalogue:
        raise click.UsageError(
            f"no [[{TABLE}.kernels]] in {declared.folder / 'pyproject.toml'}; --catalogue compiles those of this package."
        )
    chosen = architectures or declared.architectures
    if catalogue or any(one.source is not None for one in declared.sources):
        _refuse_unknown(
            chosen,
            "--arch"
            if architectures
            else f"{declared.folder / 'pyproject.toml'}: {TABLE}.architectures",
        )
    found, broken = list[CompiledKernel](), list[str]()
    for limits, kernel in _catalogue(chosen) if catalogue else _compiled(declared, chosen):
        if isinstance(kernel, str):
            broken.append(kernel)
        else:
            found.append(kernel)
            broken += _exceeded(kernel, limits)
    write_json(file, msgspec.to_builtins(CompiledKernels(tuple(found))))
    other = None if base is None else _other(base, chosen, catalogue)
    width, colour = terminal()
    if shown := text(found, other, width=width, colour=colour):
        click.echo(shown)
    for line in broken:
        click.echo(printable(f"FAIL {line}"))
    return Exit.FAILED if broken else Exit.FINE


def _refuse_unknown(architectures: Sequence[str], where: str) -> None:
    """Raises `UserError`: NVRTC does not compile for one of them."""
    from pytest_gpumem.devices.cuda.nvrtc import supported

    known = supported()
    for one in architectures:
        if int("".join(filter(str.isdigit, one))) not in known:
            accepted = ", ".join(f"sm_{number}" for number in known)
            raise UserError(
                f"{where}: the installed NVRTC does not compile for {one!r}; accepted are {accepted}"
            )


Limits = Mapping[str, float]


def _compiled(
    declared: Project, architectures: Sequence[str]
) -> Iterator[tuple[Limits, CompiledKernel | str]]:
    """Each kernel for each architecture with its limits, or why a source does not compile."""
    from pytest_gpumem.devices.cuda.nvrtc import DoesNotCompile

    for one in declared.sources:
        for architecture in architectures:
            try:
                for kernel in _of_source(one, declared.folder, architecture):
                    yield one.limits, kernel
            except DoesNotCompile as error:
                yield {}, str(error)


def _of_source(one: DeclaredSource, folder: Path, architecture: str) -> Sequence[CompiledKernel]:
    from pytest_gpumem.devices.cuda import ahead_of_time
    from pytest_gpumem.devices.cuda.nvrtc import DoesNotCompile

    if one.triton is not None:
        return [
            ahead_of_time.from_triton(
                one.triton, one.signature, architecture, one.triton_options, folder
            )
        ]
    assert one.source is not None
    file = folder / one.source
    try:
        source = file.read_text(encoding="utf-8")
    except (OSError, UnicodeError) as error:
        raise DoesNotCompile(f"{one.source}: {getattr(error, 'strerror', None) or error}") from None
    return ahead_of_time.from_source(
        source,
        one.source,
        architecture,
        entries=one.entries,
        options=one.options,
        folder=file.parent.absolute(),
    )


def _catalogue(architectures: Sequence[str]) -> Iterator[tuple[Limits, CompiledKernel | str]]:
    from pytest_gpumem.devices.cuda.ahead_of_time import from_source
    from pytest_gpumem.kernels import sources
    from pytest_gpumem.kernels.catalogue import CATALOGUE
    from pytest_gpumem.kernels.kernel import LaunchShape

    entries: dict[str, dict[str, None]] = {}
    for kernel in CATALOGUE.values():
        if kernel.source is not None:
            one = kernel.expression(sources.CPP_TYPES[kernel.dtypes[0]], LaunchShape(1, 1))
            entries.setdefault(kernel.source, {})[one] = None
    for architecture in architectures:
        for source, names in entries.items():
            options = sources.COMPILE_OPTIONS
            for one_kernel in from_source(
                sources.read(source), source, architecture, entries=tuple(names), options=options
            ):
                yield {}, one_kernel


def _exceeded(kernel: CompiledKernel, limits: Limits) -> Iterator[str]:
    for name, limit in limits.items():
        figure = getattr(kernel, name)
        if figure is not None and figure > limit:
            which = f"{kernel.source}: {kernel.name} for {kernel.architecture}"
            yield f"{which}: {name} {_figure(name, figure)}, max_{name} {_figure(name, limit)}"


def _other(base: str, architectures: Sequence[str], catalogue: bool) -> tuple[CompiledKernel, ...]:
    """The kernels of another state of the project, compiled by a process of its own, which imports its modules.
    Raises `NoAnswer`: there is no such state, or it declares nothing that compiles.
    """
    from pytest_gpumem.runs.child import run
    from pytest_gpumem.runs.worktree import checked_out

    try:
        with checked_out(base, Path.cwd()) as folder, tempfile.TemporaryDirectory() as results:
            file = Path(results, "code.json")
            options = [part for one in architectures for part in ("--arch", one)] + (
                ["--catalogue"] if catalogue else []
            )
            done = run(
                [sys.executable, "-c", _CHILD, "code", *options, f"--json={file}"],
                os.environ,
                lambda line: None,
                folder=folder,
            )
            if not file.exists():
                raise NoAnswer(f"{base}: {(done.output.strip().splitlines() or [done.how])[-1]}")
            return msgspec.json.decode(file.read_bytes(), type=CompiledKernels).kernels
    except OSError as error:
        raise NoAnswer(str(error)) from None


def text(
    kernels: Sequence[CompiledKernel],
    base: Sequence[CompiledKernel] | None,
    *,
    width: int,
    colour: bool,
) -> str:
    """A table with a line for each kernel and architecture; with a base also what changed, and what is gone.
    `base`: of the other one; None: there is no other.
    """
    kernels, base = printable((tuple(kernels), None if base is None else tuple(base)))
    before = {_key(one): one for one in base or ()}
    lines: list[Line | Text] = []
    order = {
        key: index
        for index, key in enumerate(dict.fromkeys((one.source, one.name) for one in kernels))
    }
    source = None
    for one in sorted(kernels, key=lambda one: order[one.source, one.name]):
        if one.source != source:
            source = one.source
            lines.append(Text(one.source, style="bold"))
        lines.append(_line(one, before.get(_key(one)), base is not None))
    drawn = (
        [
            Columns("kernel", _HEADINGS, "" if base is None else "against base", lines).drawn(
                width, colour
            )
        ]
        if lines
        else []
    )
    gone = [
        f"gone: {one.source}: {one.name} for {one.architecture}"
        for key, one in before.items()
        if key not in set(map(_key, kernels))
    ]
    return "\n".join([*drawn, *gone])


def _key(one: CompiledKernel) -> tuple[str, str, str]:
    return one.source, one.name, one.architecture


def _line(one: CompiledKernel, before: CompiledKernel | None, compared: bool) -> Line:
    figures = [one.architecture]
    for name in _HEADINGS[1:]:
        now, was = _shown(name, one), None if before is None else _shown(name, before)
        figures.append(now if was in (None, now) else f"{was} -> {now}")
    last: str | Text = ""
    if compared:
        last = (
            "new"
            if before is None
            else "same code"
            if before.digest == one.digest
            else Text("other code", style="yellow")
        )
    return Line(f"  {one.name}", figures, last)


def _shown(name: str, one: CompiledKernel) -> str:
    figure = getattr(one, name)
    return "" if figure is None else _figure(name, figure)


def _figure(name: str, figure: float) -> str:
    from pytest_gpumem.kernels.declared import IN_BYTES

    return short_bytes(int(figure)) if name in IN_BYTES else f"{figure:.3g}"
