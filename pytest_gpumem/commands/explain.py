"""The command `gpumem explain`."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from datetime import datetime, timezone
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import click

from pytest_gpumem.commands import examples, json_option, log, terminal, write, write_json
from pytest_gpumem.files import unwritable
from pytest_gpumem.outcomes import UserError
from pytest_gpumem.printable import printable
from pytest_gpumem.reporting.footprints import growth_lines

if TYPE_CHECKING:
    from pytest_gpumem.explain.causes import Explanation, SlowDown
    from pytest_gpumem.explain.evidence import SideEvidence


PAIRS = 3


@click.command(
    short_help="List why tests got slower.",
    epilog=examples(
        "gpumem explain --base main tests/test_a.py::test_triad",
        "gpumem explain base.json head.json            # without a GPU",
    ),
)
@click.option(
    "--base",
    metavar="BASE",
    help="Revision, folder or wheel to compare with, or a file of results that base wrote.",
)
@click.option(
    "--pairs",
    type=click.IntRange(1, 100),
    metavar="N",
    help=f"Processes of each side. Default: {PAIRS}.",
)
@click.option(
    "--ncu/--no-ncu",
    "counters",
    default=None,
    help="Count under Nsight Compute too. Default: if it is installed.",
)
@click.option(
    "--nsys/--no-nsys",
    "traces",
    default=None,
    help="Trace under Nsight Systems too. Default: if CUPTI could not watch.",
)
@json_option("Write the explanations as JSON.")
@click.option(
    "--keep",
    type=click.Path(file_okay=False, path_type=Path),
    help="Write the evidence, base.json and head.json, here.",
)
@click.argument(
    "arguments",
    nargs=-1,
    type=click.UNPROCESSED,
    metavar="(TEST... | BASE.json HEAD.json) [-- PYTEST_ARGUMENTS]",
)
def explain(
    base: str | None,
    pairs: int | None,
    counters: bool | None,
    traces: bool | None,
    file: Path | None,
    keep: Path | None,
    arguments: tuple[str, ...],
) -> None:
    """List why tests got slower since BASE, and the share of the slow-down that each cause accounts for.

    With --base, both sides are measured in alternating fresh processes, CUPTI watches one launch of each measurement, and Nsight Compute
    counts. With two files of results or evidence neither a GPU nor the code is needed.

    TEST is a node id, with "::" in it; everything else goes to pytest.
    """
    from pytest_gpumem.explain.text import text
    from pytest_gpumem.explain.text import to_json as explanation_to_json

    if keep is not None:
        _check_folder(keep)
    if base is None:
        if not (pairs is None and counters is None and traces is None):
            raise UserError("--pairs, --ncu and --nsys need --base; without it nothing is measured")
        sides = _of_files(arguments)
    else:
        tests = tuple(one for one in arguments if "::" in one and not one.startswith("-"))
        rest = tuple(one for one in arguments if one not in tests)
        _check_tools(counters, traces)
        sides = _measured(base, tests, rest, pairs or PAIRS, counters is not False, traces)
    found = explanations(*sides)
    width, _ = terminal()
    simulated = " (simulated)" if sides[1].facts.simulated else ""
    click.echo(
        printable(f"base: {sides[0].name}; head: {sides[1].name}; {sides[1].facts.name}{simulated}")
    )
    for key, one in found.items():
        click.echo("\n" + text(key, one, width=width))
    memory = grown(*sides)
    for key, lines in memory.items():
        click.echo("\n" + "\n  ".join(printable([key, *lines])))
    notes = list(_notes(*sides))
    for note in notes:
        click.echo("\n" + printable(f"note: {note}"))
    utc = datetime.now(timezone.utc).isoformat(timespec="seconds")
    if keep is not None:
        _keep(keep, sides, found, utc)
    plain: dict[str, Any] = {
        "kind": "gpumem explanation",
        "schema": 1,
        "datetime": utc,
        "base": sides[0].name,
        "head": sides[1].name,
        "device": sides[1].facts.key,
        "simulated": sides[1].facts.simulated,
        "notes": notes,
        "explanations": [explanation_to_json(key, one) for key, one in found.items()],
        "memory": [{"key": key, "changes": lines} for key, lines in memory.items()],
    }
    write_json(file, plain)


def _of_files(arguments: Sequence[str]) -> tuple[SideEvidence, SideEvidence]:
    """The evidence in two files, of base and of head. Raises `UserError`: the arguments are no such files."""
    from pytest_gpumem.explain.evidence import load

    if len(arguments) != 2 or not all(
        one.endswith(".json") or Path(one).is_dir() for one in arguments
    ):
        raise UserError(
            "without --base two files are expected, BASE.json HEAD.json; with it, tests and pytest's arguments"
        )
    return load(arguments[0]), load(arguments[1])


def _check_folder(keep: Path) -> None:
    """Refuse a folder that cannot be made or written, before anything is measured. Raises `click.UsageError`."""
    deepest = next(part for part in (keep.absolute(), *keep.absolute().parents) if part.exists())
    if (why := unwritable(deepest / "base.json")) is not None:
        raise click.UsageError(f"--keep: {keep}: {why}.")


def _keep(
    keep: Path, sides: tuple[SideEvidence, SideEvidence], found: Iterable[str], utc: str
) -> None:
    """Write the evidence of both sides into a folder. `found`: row keys of what was explained. Raises `UserError`: it cannot be made."""
    from pytest_gpumem.explain.evidence import to_json

    try:
        keep.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"--keep: cannot make {keep}: {error.strerror or error}") from None
    for name, side in zip(("base", "head"), sides, strict=True):
        kept = list(dict.fromkeys((*found, *side.footprints)))
        write(
            "--keep",
            keep / f"{name}.json",
            json.dumps(to_json(side, kept, utc=utc), indent=1) + "\n",
        )


def explanations(
    base: SideEvidence, head: SideEvidence, *, known: Mapping[str, SlowDown] = MappingProxyType({})
) -> dict[str, Explanation]:
    """The explanation of each measurement that both sides have, by row key.
    `known`: slow-downs, by row key, that were measured better than by these sides.
    Raises `UserError`: the sides are of different devices, or have nothing in common.
    """
    from pytest_gpumem.explain.causes import explain as why
    from pytest_gpumem.explain.causes import slow_down

    if base.facts.key != head.facts.key:
        raise UserError(
            f"base is of {base.facts.key}, head of {head.facts.key}: results of different devices explain nothing"
        )
    common = [key for key in head.measured if key in base.measured]
    if not common and not head.footprints.keys() & base.footprints.keys():
        had, has = (", ".join(side.measured) or "nothing" for side in (base, head))
        raise UserError(f"base measured {had}, head {has}: no measurement in common")
    slower = {
        key: known.get(key) or slow_down([base.measured[key]], head.measured[key]) for key in common
    }
    return {key: why(base.evidence(key), head.evidence(key), slower[key]) for key in common}


def grown(base: SideEvidence, head: SideEvidence) -> dict[str, list[str]]:
    """The changes in the memory of tests that both sides have, by row key, with the lines that they come from."""
    common = [key for key in head.footprints if key in base.footprints]
    return {
        key: lines
        for key in common
        if (lines := growth_lines(base.footprints[key], head.footprints[key]))
    }


def _notes(base: SideEvidence, head: SideEvidence) -> Iterator[str]:
    """The notes of each side, once if both have the same; and the measurements that only one side has."""
    yield from (f"base and head: {note}" for note in base.notes if note in head.notes)
    sides = (("base", base, head), ("head", head, base))
    for name, one, other in sides:
        yield from (f"{name}: {note}" for note in one.notes if note not in other.notes)
    for name, one, other in sides:
        if missing := [key for key in one.measured if key not in other.measured]:
            yield f"only {name} measured {', '.join(missing)}"


def _check_tools(counters: bool | None, traces: bool | None) -> None:
    """Refuse a requested tool that is missing, before anything is measured. Raises `UserError`: the tool, and the remedy."""
    from pytest_gpumem.nsight.tools import NCU, NSYS, ToolMissing, find

    for requested, tool in ((counters, NCU), (traces, NSYS)):
        if requested:
            try:
                find(tool, os.environ)
            except ToolMissing as error:
                raise UserError(f"--{tool.program}: {error}") from None


def _measured(
    base: str,
    tests: tuple[str, ...],
    arguments: tuple[str, ...],
    pairs: int,
    counters: bool,
    traces: bool | None,
) -> tuple[SideEvidence, SideEvidence]:
    from pytest_gpumem.explain.evidence import load
    from pytest_gpumem.explain.processes import ExplainRequest, measure_sides
    from pytest_gpumem.runs.processes import BASE, HEAD, check_arguments
    from pytest_gpumem.runs.worktree import in_this_environment, two_sides

    request = ExplainRequest(tests, arguments, pairs, counters, traces)

    check_arguments(arguments)  # before a side is prepared, which may install a project
    if base.endswith(".json"):
        return load(base), measure_sides(
            {HEAD: in_this_environment(Path.cwd())}, request, os.environ, log
        )[HEAD]
    with two_sides(base, None, Path.cwd()) as (base_tree, head_tree):
        measured = measure_sides({BASE: base_tree, HEAD: head_tree}, request, os.environ, log)
        return measured[BASE], measured[HEAD]
