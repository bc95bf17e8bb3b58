"""One self-contained HTML page of a history: what changed lately, and a line for every figure of every test.

The values of all lines are one text in the page. Its script unpacks the values of a line when it draws it, so that a page of ten million
values opens promptly.
"""

from __future__ import annotations

import base64
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

import msgspec
import numpy as np
from markupsafe import Markup
from numpy.typing import NDArray

from pytest_gpumem.history.data import Change, History, Run, Series
from pytest_gpumem.judging.finding import counted
from pytest_gpumem.printable import printable
from pytest_gpumem.reporting.web_page import anchor, rendered
from pytest_gpumem.units import format_rate, format_share, format_time, short_bytes

MOST_CHANGES = 2000
"""Lines of a table of changes; the sections of the tests have all."""


@dataclass(frozen=True)
class _Line:
    """A change as a line of a table, and in the section of its test."""

    test: str
    target: str
    metric: str
    card: str
    size: str  # such as "+3.2 %"
    levels: str  # before and after it
    commits: str
    date: str
    judged: str  # "not accepted", or who accepted it and why
    worse: bool
    accepted: bool
    lately: bool
    rank: float  # larger ones come first


def page(history: History, since: datetime) -> str:
    """The page; what changed since a time comes first."""
    cards = _cards(history.runs)
    lines = [_line(history, change, cards, since) for change in history.changes]
    recent = sorted((one for one in lines if one.lately), key=lambda one: (one.accepted, -one.rank))
    tables = (
        ("slower", "Slower or larger", [one for one in recent if one.worse]),
        ("gains", "Faster or smaller", [one for one in recent if not one.worse]),
    )
    facts, values = _facts(history, cards, lines)
    simulated = sorted({cards[one.card] for one in history.runs if one.simulated})
    return rendered(
        "history.html",
        styles=["report.css", "history.css"],
        scripts=["history.js"],
        title=_title(history.runs, cards),
        simulated=f"No GPU was measured in the runs of {', '.join(simulated)}. These times come from a model." if simulated else "",
        counts=", ".join(
            [
                counted(len({one.test for one in history.series}), "test"),
                counted(len(history.series), "line"),
                counted(len(history.runs), "run"),
                counted(len(history.changes), "change"),
            ]
        ),
        period=_period(history.runs),
        since=f"{since:%Y-%m-%d}",
        tables=[(name, heading, found[:MOST_CHANGES], len(found)) for name, heading, found in tables],
        metrics=list(dict.fromkeys(printable(one.metric) for one in history.series)),
        cards=list(dict.fromkeys(_card(one, cards) for one in history.series)),
        # In JSON, a character that could end or begin an element is an escape.
        facts=Markup(msgspec.json.encode(facts, enc_hook=np.generic.item).decode().replace("<", "\\u003c")),
        values=Markup(values),
    )


def _title(runs: Sequence[Run], cards: dict[str, str]) -> str:
    names = list(dict.fromkeys(cards.values()))
    return "history" if not names else f"history of {names[0] if len(names) == 1 else counted(len(names), 'card model')}"


def _period(runs: Sequence[Run]) -> str:
    if not runs:
        return ""
    first, last = f"{runs[0].when:%Y-%m-%d}", f"{runs[-1].when:%Y-%m-%d}"
    return first if first == last else f"{first} to {last}"


def _cards(runs: Sequence[Run]) -> dict[str, str]:
    """By key, how the page names a card: its device, or the key where cards of one name have several."""
    devices = {one.card: f"{one.device} (simulated)" if one.simulated else one.device for one in runs}
    names = list(devices.values())
    return {card: printable(device if names.count(device) == 1 else card) for card, device in devices.items()}


def _card(series: Series, cards: dict[str, str]) -> str:
    return cards[series.card] if series.variant is None else f"{cards[series.card]}, {printable(series.variant)}"


def _line(history: History, change: Change, cards: dict[str, str], since: datetime) -> _Line:
    series = history.series[change.series]
    runs = [history.runs[index] for index in series.runs[[max(change.earliest - 1, 0), change.latest, change.at]]]
    finite = np.isfinite(change.relative)
    return _Line(
        test=printable(series.test),
        target=anchor(series.test),
        metric=printable(series.metric),
        card=_card(series, cards),
        size=format_share(change.relative, sign=True) if finite else "from 0",
        levels=f"{_figure(change.before, series.unit)} → {_figure(change.after, series.unit)}",
        commits=_commits(runs[0] if change.earliest else None, runs[1]),
        date=f"{runs[2].when:%Y-%m-%d}",
        judged=_judged(change),
        worse=(change.after > change.before) == series.larger_is_worse,
        accepted=change.accepted,
        lately=runs[1].when >= since,
        rank=abs(change.relative) if finite else np.inf,
    )


def _judged(change: Change) -> str:
    if not change.accepted:
        return "not accepted"
    who = f"accepted by {change.who}" if change.who else "accepted"
    return printable(f"{who}: {change.why}" if change.why else who)


def _commits(before: Run | None, last: Run) -> str:
    """The commits that may have made a change, as git takes them: behind the first one, up to the second one."""
    after = _revision(last)
    if before is None or not after or not (base := _revision(before)):
        return f"up to {after}" if after else "unknown commit"
    return f"{base}..{after}" if base != after else f"none: {after} before and after"


def _revision(run: Run) -> str:
    commit, dash, dirty = run.revision.partition("-")
    return printable(f"{commit[:9]}{dash}{dirty}")


_FORMATS: dict[str, Callable[[float], str]] = {"s": format_time, "B/s": format_rate, "B": lambda value: short_bytes(round(value))}


def _figure(value: float, unit: str) -> str:
    return _FORMATS[unit](value) if unit in _FORMATS else f"{value:.10g}{unit and ' '}{printable(unit)}"


def _facts(history: History, cards: dict[str, str], lines: Sequence[_Line]) -> tuple[dict[str, Any], str]:
    """All that the script draws: what JSON has, and the packed values in Base64."""
    names = list(cards)
    tests = {name: index for index, name in enumerate(dict.fromkeys(one.test for one in history.series))}
    metrics = {(one.metric, one.unit): one.larger_is_worse for one in history.series}
    metric_of = {metric: index for index, metric in enumerate(metrics)}
    sets = _RunSets(len(history.runs))
    columns: dict[str, list[Any]] = {name: [] for name in ("test", "metric", "card", "variant", "runs", "packing", "scale")}
    parts = bytearray()
    for one in history.series:
        packing, scale, packed = _packed(one.values)
        row = (
            tests[one.test],
            metric_of[one.metric, one.unit],
            names.index(one.card),
            printable(one.variant),
            sets.of(one.runs),
            packing,
            scale,
        )
        for column, value in zip(columns.values(), row, strict=True):
            column.append(value)
        parts += packed
        parts += bytes(-len(packed) % 3)  # so that the Base64 of each line begins with a character of its own
    facts = {
        "runs": {
            "when": [round(one.when.timestamp()) for one in history.runs],
            "revision": [_revision(one) for one in history.runs],
            "accepted": [int(one.accepted) for one in history.runs],
        },
        "cards": list(cards.values()),
        "tests": [[printable(name), anchor(name)] for name in tests],
        "metrics": [[printable(name), printable(unit), worse] for (name, unit), worse in metrics.items()],
        "series": columns,
        "sets": sets.packed,
        "changes": list(_marks(history, lines)),
    }
    return facts, base64.b64encode(parts).decode()


def _marks(history: History, lines: Sequence[_Line]) -> Iterator[dict[str, Any]]:
    for change, line in zip(history.changes, lines, strict=True):
        places = {name: getattr(change, name) for name in ("series", "at", "earliest", "latest", "before", "after")}
        texts = {name: getattr(line, name) for name in ("size", "levels", "commits", "date", "judged", "worse", "accepted", "lately")}
        yield {**places, **texts, "rank": min(line.rank, 1e9)}


class _RunSets:
    """The sets of runs that series have, each once, as a bit for each run of the history."""

    def __init__(self, runs: int) -> None:
        self.packed: list[str] = []
        self._runs = runs
        self._known: dict[bytes, int] = {}

    def of(self, runs: NDArray[np.int32]) -> int:
        """Index into `packed`."""
        key = runs.tobytes()
        if key not in self._known:
            bits = np.zeros(self._runs, dtype=bool)
            bits[runs] = True
            self._known[key] = len(self.packed)
            self.packed.append(base64.b64encode(np.packbits(bits).tobytes()).decode())
        return self._known[key]


_PALETTE, _LOGARITHMIC, _PLAIN = range(3)


def _packed(values: NDArray[np.float64]) -> tuple[int, list[float], bytes]:
    """How the values of a line are packed, its figures, and the bytes.

    At most 256 different values are exact: a byte each, and the values themselves. Other positive values are 16 bits each on a logarithmic
    scale from the least to the largest of them: one that is ten times all others costs the rest no more than 0.002 %. The remaining ones
    are 32-bit floats.
    """
    if not len(values):
        return _PALETTE, [], b""
    least, largest = float(values.min()), float(values.max())
    if least == largest:
        return _PALETTE, [least], b""
    if np.isfinite(least) and np.isfinite(largest):
        if len(values) <= 16 or not (values[:16] % 1).any():  # times have as many different values as runs
            palette, indexes = np.unique(values, return_inverse=True)
            if len(palette) <= 256:
                return _PALETTE, palette.tolist(), indexes.astype(np.uint8).tobytes()
        if least > 0:
            low, high = math.log(least), math.log(largest)
            step = (high - low) / 65535
            return _LOGARITHMIC, [low, step], np.rint((np.log(values) - low) / step).astype("<u2").tobytes()
    return _PLAIN, [], values.astype("<f4").tobytes()
