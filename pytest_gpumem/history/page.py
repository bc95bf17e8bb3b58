"""One self-contained HTML page of a history: what changed lately, and a line for every figure of every test.

The values of all lines are one text in the page. Its script unpacks the values of a line when it draws it, so that a page of ten million
values opens promptly.
"""

from __future__ import annotations

import base64
import math
from collections.abc import Iterable, Iterator, Sequence
from datetime import datetime
from typing import Any, TypeVar

import msgspec
import numpy as np
from markupsafe import Markup
from numpy.typing import NDArray

from pytest_gpumem.collector import uncollected
from pytest_gpumem.history.data import Change, History, Run
from pytest_gpumem.history.lines import ChangeLine, card_names, card_of, change_lines, revision
from pytest_gpumem.history.query import recent
from pytest_gpumem.judging.finding import counted
from pytest_gpumem.printable import printable
from pytest_gpumem.reporting.web_page import anchor, rendered

_Key = TypeVar("_Key")
MOST_CHANGES = 2000  # lines of a table of changes; the sections of the tests have all


@uncollected()
def page(history: History, since: datetime) -> str:
    """The page; what changed since a time comes first."""
    cards = card_names(history.runs)
    lately = recent(history, since)
    tables = (
        ("slower", "Slower or larger", [change for change in lately if change.worse]),
        ("gains", "Faster or smaller", [change for change in lately if not change.worse]),
    )
    facts, values = _facts(history, cards, {id(change) for change in lately})
    names = list(dict.fromkeys(cards.values()))
    simulated = sorted({cards[one.card] for one in history.runs if one.simulated})
    return rendered(
        "history.html",
        styles=["report.css", "history.css"],
        scripts=["history.js"],
        title=f"history of {names[0] if len(names) == 1 else counted(len(names), 'card model')}" if names else "history",
        simulated=f"No GPU was measured in the runs of {', '.join(simulated)}. These times come from a model." if simulated else "",
        counts=", ".join(
            [
                counted(len(facts["tests"]), "test"),
                counted(len(history.series), "line"),
                counted(len(history.runs), "run"),
                counted(len(history.changes), "change"),
            ]
        ),
        period=_period(history.runs),
        since=f"{since:%Y-%m-%d}",
        tables=[(name, heading, list(_rows(history, found[:MOST_CHANGES])), len(found)) for name, heading, found in tables],
        metrics=list(dict.fromkeys(name for name, _ in facts["metrics"])),
        cards=facts["cards"],
        # In JSON, a character that could end or begin an element is an escape.
        facts=Markup(msgspec.json.encode(facts, enc_hook=np.generic.item).decode().replace("<", "\\u003c")),
        values=Markup(values),
    )


def _period(runs: Sequence[Run]) -> str:
    if not runs:
        return ""
    first, last = f"{runs[0].when:%Y-%m-%d}", f"{runs[-1].when:%Y-%m-%d}"
    return first if first == last else f"{first} to {last}"


def _rows(history: History, changes: Sequence[Change]) -> Iterator[tuple[ChangeLine, str, str]]:
    """Lines of a table of changes: the texts, the element of the test, and the class of the change."""
    for change, texts in zip(changes, change_lines(history, changes), strict=True):
        style = "doubt" if change.accepted else "fail" if change.worse else "pass"
        yield texts, anchor(history.series[change.series].test), style


def _facts(history: History, cards: dict[str, str], lately: set[int]) -> tuple[dict[str, Any], str]:
    """All that the script draws: what JSON has, and the packed values in Base64.

    `lately`: identities of the changes that come first.
    """
    tests = _numbered(one.test for one in history.series)
    metrics = _numbered((one.metric, one.unit) for one in history.series)
    shown = _numbered((one.card, one.variant) for one in history.series)
    sets = _RunSets(len(history.runs))
    lines: list[tuple[int, int, int, int, int, list[float]]] = []
    parts = bytearray()
    for one in history.series:
        packing, scale, packed = _packed(one.values)
        metric = metrics[one.metric, one.unit]
        lines.append((tests[one.test], metric, shown[one.card, one.variant], sets.of(one.runs), packing, scale))
        parts += packed
        parts += bytes(-len(packed) % 3)  # so that the Base64 of each line begins with a character of its own
    facts = {
        "runs": {
            "when": [round(one.when.timestamp()) for one in history.runs],
            "revision": [revision(one) for one in history.runs],
            "accepted": [int(one.accepted) for one in history.runs],
        },
        "cards": [card_of(card, variant, cards) for card, variant in shown],
        "tests": [[printable(name), anchor(name)] for name in tests],
        "metrics": printable([list(metric) for metric in metrics]),
        "lines": lines,
        "sets": sets.packed,
        "changes": list(_marks(history, lately)),
    }
    return facts, base64.b64encode(parts).decode()


def _numbered(values: Iterable[_Key]) -> dict[_Key, int]:
    """The different values, each with its number, in the order of their first occurrence."""
    return {value: number for number, value in enumerate(dict.fromkeys(values))}


def _marks(history: History, lately: set[int]) -> Iterator[dict[str, Any]]:
    for change, texts in zip(history.changes, change_lines(history, history.changes), strict=True):
        places = {name: getattr(change, name) for name in ("series", "at", "earliest", "latest", "before", "after", "accepted")}
        told = {name: getattr(texts, name) for name in ("size", "levels", "commits", "date", "judged")}
        yield {**places, **told, "worse": change.worse, "lately": id(change) in lately}


class _RunSets:
    """The sets of runs that series have, each once: how many runs, and a bit for each run of the history."""

    def __init__(self, runs: int) -> None:
        self.packed: list[tuple[int, str]] = []
        self._runs = runs
        self._arrays: dict[int, int] = {}  # by identity: many series share an array
        self._known: dict[bytes, int] = {}

    def of(self, runs: NDArray[np.int32]) -> int:
        """Index into `packed`. The array has to live as long as this."""
        if id(runs) not in self._arrays:
            self._arrays[id(runs)] = self._of(runs)
        return self._arrays[id(runs)]

    def _of(self, runs: NDArray[np.int32]) -> int:
        key = runs.tobytes()
        if key not in self._known:
            bits = np.zeros(self._runs, dtype=bool)
            bits[runs] = True
            self._known[key] = len(self.packed)
            self.packed.append((len(runs), base64.b64encode(np.packbits(bits).tobytes()).decode()))
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
    least, largest = (values[0], values[0]) if values.strides == (0,) else (values.min(), values.max())
    least, largest = float(least), float(largest)
    if least == largest:
        return _PALETTE, [least], b""
    if np.isfinite(least) and np.isfinite(largest):
        if len(values) <= 16 or not (values[:16] % 1).any():  # times have as many different values as runs
            palette, indexes = np.unique(values, return_inverse=True)
            if len(palette) <= 256:
                return _PALETTE, palette.tolist(), indexes.astype(np.uint8).tobytes()
        if least > 0 and (low := math.log(least)) < (high := math.log(largest)):  # neighbours among floats have one logarithm
            step = (high - low) / 65535
            return _LOGARITHMIC, [low, step], np.rint((np.log(values) - low) / step).astype("<u2").tobytes()
    return _PLAIN, [], values.astype("<f4").tobytes()
