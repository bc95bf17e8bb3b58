"""What differs between two revisions of a test: counters of Nsight Compute, and what it ran."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path

from pytest_gpumem.devices.errors import NoDevice
from pytest_gpumem.devices.opening import choose
from pytest_gpumem.judging.differences import differences
from pytest_gpumem.nsight import ncu, tools
from pytest_gpumem.nsight.ncu import Counter, CountersForbidden, ProfiledKernel
from pytest_gpumem.outcomes import NoAnswer, UserError
from pytest_gpumem.reporting.row import describe
from pytest_gpumem.runs.processes import BASE, HEAD, Processes, for_a_part, pytest_command
from pytest_gpumem.runs.worktree import Side, environment_of, moved_word, two_sides

MARGIN = 0.05  # counters that differ by less are no difference


@dataclass
class Explanation:
    """What differs between base and head, in lines by measurement."""

    tool: str = tools.NCU.title
    counters: dict[str, list[str]] = field(default_factory=dict)  # by range of the measurement
    ran: dict[str, list[str]] = field(default_factory=dict)  # by key of the row
    notes: list[str] = field(default_factory=list)
    failed: bool = False  # pytest ended with another code than 0 on a side


def explain(
    base: str,
    test: str,
    arguments: Sequence[str],
    environment: Mapping[str, str],
    echo: Callable[[str], object],
) -> Explanation:
    """Run each side of a test under Nsight Compute, or under Nsight Systems where counters may not
    be read, and once more for what it ran. `base` is a git revision, head the working tree. Raises
    `UserError`; `NoAnswer`: nothing could be counted."""
    device = tools.check(arguments, environment)
    tools.find(tools.NCU, environment)
    try:
        choose(device)
    except NoDevice as error:
        raise NoAnswer(f"counters are of a GPU: {error}") from None
    arguments = ["--gpumem-device", device, *arguments]
    explanation = Explanation()
    with two_sides(base, Path.cwd()) as (base_side, head_side):
        sides = {BASE: base_side, HEAD: head_side}
        counters: Sequence[Counter] = ncu.COUNTERS
        try:
            counts = _count(sides, test, arguments, environment, echo, ncu.count_launches)
        except CountersForbidden as error:
            explanation.notes.append(f"{error}. Nsight Systems timed the kernels instead.")
            explanation.tool = tools.NSYS.title
            counters = (ncu.TIME,)
            counts = _count(sides, test, arguments, environment, echo, ncu.time_launches)
        try:
            explanation.ran = ran_differently(sides, test, arguments, environment)
        except UserError as error:
            explanation.notes.append(f"what ran is not known: {error}")
    kernels = []
    for name, (launches, code) in zip(sides, counts, strict=True):
        kernels.append(ncu.kernels_of(launches))
        if code:
            explanation.failed = True
            explanation.notes.append(f"{name}: pytest ended with exit code {code}")
    explanation.counters = compare(kernels[0], kernels[1], counters)
    return explanation


def _count(
    sides: Mapping[str, Side],
    test: str,
    arguments: Sequence[str],
    environment: Mapping[str, str],
    echo: Callable[[str], object],
    under_tool: Callable[..., tuple[list[ProfiledKernel], int]],
) -> list[tuple[list[ProfiledKernel], int]]:
    """The launches and the exit code of each side."""
    counts = []
    head = sides[HEAD]
    for name, side in sides.items():
        # A side has its own paths, and imports nothing of the other.
        side_arguments = [moved_word(word, side, head) for word in arguments]
        tests = [moved_word(test, side, head)]
        command = pytest_command(side_arguments, tests=tests, python=side.python)
        others = [other for other in sides.values() if other is not side]
        variables = environment_of(side, others, for_a_part(environment))
        echo(f"gpumem: {name} ({side.title})")
        try:
            counts.append(under_tool(command, variables, echo, folder=side.folder))
        except CountersForbidden:
            raise
        except NoAnswer as error:
            raise NoAnswer(f"{name}: {error}") from None
    return counts


def compare(
    base: Sequence[ProfiledKernel], head: Sequence[ProfiledKernel], counters: Sequence[Counter]
) -> dict[str, list[str]]:
    """The counters that differ by more than 5 %, with both values, by measurement."""
    before = {(kernel.place, kernel.name): kernel for kernel in base}
    after = {(kernel.place, kernel.name): kernel for kernel in head}
    lines: dict[str, list[str]] = {}
    for key in dict.fromkeys([*before, *after]):
        place, name = key
        was, now = before.get(key), after.get(key)
        if was is None:
            texts = ["only in head"]
        elif now is None:
            texts = ["only in base"]
        else:
            texts = _differences(was, now, counters)
        for text in texts:
            lines.setdefault(place, []).append(f"{name}: {text}")
    return lines


def _differences(
    base: ProfiledKernel, head: ProfiledKernel, counters: Sequence[Counter]
) -> list[str]:
    texts = []
    if base.launches != head.launches:
        texts.append(f"launches {base.launches} → {head.launches}")
    for counter in counters:
        was, now = base.figure(counter), head.figure(counter)
        if was is None or now is None or abs(now - was) <= MARGIN * abs(was):
            continue
        before, after = counter.text(was), counter.text(now)
        # Near zero, a change by a large share may not show.
        if before != after:
            texts.append(f"{counter.title} {before} → {after}")
    return texts


def ran_differently(
    sides: Mapping[str, Side], test: str, arguments: Sequence[str], environment: Mapping[str, str]
) -> dict[str, list[str]]:
    """What differs in a plain run of each side, by row. Raises `UserError`: a process broke off."""
    processes = Processes(sides, [*arguments, test], environment, evidence=True)
    records = []
    with closing(processes):
        for name in sides:
            process = processes.run(name)
            if process.error is not None:
                raise UserError(f"{process.name} {process.error}")
            records.append(process)
    base, head = records
    lines: dict[str, list[str]] = {}
    for key, row in head.rows.items():
        was = base.rows.get(key)
        if was is None or was.measurement is None or row.measurement is None:
            continue
        for difference in differences(was.measurement, row.measurement):
            lines.setdefault(key, []).append(describe(difference))
    return lines
