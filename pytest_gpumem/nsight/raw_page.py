"""The raw page of Nsight Compute as CSV (`ncu --csv --page raw`): a line for each kernel, below the units of its columns."""

from __future__ import annotations

import csv
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from pytest_gpumem.ranges import DOMAIN

_RANGE = re.compile(rf"(?<![\w.:>-]){re.escape(DOMAIN)}:([A-Za-z0-9_.-]+)(?=:|\"|\s|$)")
_STACK = "thread Domain:Push/Pop_Range"

_PREFIXES = {"": 1.0, "n": 1e-9, "u": 1e-6, "m": 1e-3, "k": 1e3, "g": 1e9, "t": 1e12}
_COUNTS = ("block", "cluster", "grid", "inst", "pass", "register", "request", "sector", "sm", "thread", "warp")
"""Units that count things: one of each is 1, and what is told for each of them is told in the unit before the "/"."""
_BASES = {"byte": 1.0, "second": 1.0, "s": 1.0, "hz": 1.0, "%": 0.01, **dict.fromkeys(_COUNTS, 1.0)}


class BadOutput(ValueError):
    """What ncu wrote cannot be read: one line that names the place."""


@dataclass(frozen=True)
class Line:
    """One kernel."""

    cells: Mapping[str, str]
    """By the headings of their columns."""
    units: Mapping[str, str]
    """The same."""

    @property
    def ranges(self) -> tuple[str, ...]:
        """Ranges of our domain that were open on the kernel's thread, outermost first."""
        return tuple(_RANGE.findall(" ".join(cell for heading, cell in self.cells.items() if heading.startswith(_STACK))))

    def figure(self, metric: str) -> float | None:
        """A metric in bytes, sectors, seconds, hertz or as a share; None for "n/a", or where there is no such column.

        Raises:
            BadOutput: it is no number, or of an unknown unit.
        """
        written = self.cells.get(metric, "")
        # Beside the figure itself a cell may hold its parts, "4.0 (1; 2; 3)".
        plain = written.partition("(")[0].strip()
        if plain.lower() in ("", "n/a", "nan"):
            return None
        one = unit(self.units[metric], metric)
        try:
            return float(plain.replace(",", "")) * one
        except ValueError:
            raise BadOutput(f"ncu gives {metric} as {written!r}, which is no number") from None


def lines_of(text: str, needed: Iterable[str], *, ranges: bool = False) -> list[Line] | None:
    """The kernels in what ncu printed or logged, in the order of their launches; None where there is no such page in it.

    Args:
        text: the page, with whatever else ncu and its child said.
        needed: headings that must be there.
        ranges: the column of NVTX ranges must be there too.

    Raises:
        BadOutput: a column is missing, or a line is of another length than the headings.
    """
    lines = [line for line in text.splitlines() if not line.startswith("==")]
    begin = next((i for i, line in enumerate(lines) if line.startswith('"ID"')), None)
    if begin is None:
        return None
    heading, *rows = list(csv.reader(line + "\n" for line in lines[begin:]))
    missing = [name for name in needed if name not in heading]
    if ranges and not any(name.startswith(_STACK) for name in heading):
        missing.append("the column of NVTX push/pop ranges")
    if missing:
        raise BadOutput(f"ncu's CSV has no {', '.join(missing)}; its columns are {', '.join(heading)}")
    units = dict.fromkeys(heading, "")
    found = []
    for row in rows:
        if not row:
            continue
        if len(row) != len(heading):
            raise BadOutput(f"ncu's CSV has a line of {len(row)} columns below {len(heading)} headings: {','.join(row)[:120]}")
        cells = dict(zip(heading, row, strict=True))
        if cells["ID"].strip():
            found.append(Line(cells, units))
        else:
            units = cells
    return found


def unit(written: str, metric: str) -> float:
    """What one of a unit is in bytes, seconds, hertz, as a share or a count: 0.01 for "%", 1e-9 for "ns" or "nsecond", 1e9 for "Ghz",
    1 for "block" and "sector/request".

    Raises:
        BadOutput: the unit is not known.
    """
    plain = written.strip().lower()
    if not plain:
        return 1.0
    # A clock is written as cycles by time too.
    if plain.startswith("cycle/"):
        return 1.0 / unit(plain.removeprefix("cycle/"), metric)
    told, _, each = plain.partition("/")
    if each in _COUNTS:
        return unit(told, metric)
    if plain in _BASES:
        return _BASES[plain]
    # m is a thousandth of a second, and a million of anything else.
    prefix, base = plain[0], plain[1:]
    if base in _BASES and base != "%":
        if prefix == "m" and base not in ("second", "s"):
            return 1e6 * _BASES[base]
        if prefix in _PREFIXES:
            return _PREFIXES[prefix] * _BASES[base]
    raise BadOutput(f"ncu gives {metric} in {written!r}, which is no unit that is known")
