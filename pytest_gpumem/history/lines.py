"""A change as texts, for the terminal and the page."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from pytest_gpumem.history.data import Change, History, Run
from pytest_gpumem.judging.finding import change as share_of_change
from pytest_gpumem.printable import printable
from pytest_gpumem.units import format_bytes, format_time


@dataclass(frozen=True)
class ChangeLine:
    """The texts of a change, safe to print."""

    test: str
    metric: str
    size: str  # such as "+3.20 %", or "new" where the level before was 0
    levels: str  # before and after it: "100.0 us -> 102.5 us"
    commits: str  # as git takes them: the commit before the first run that the change may begin with, and that of the last one
    date: str  # of the first run at the new level
    card: str
    accepted: bool
    judged: str  # whether it was accepted, by whom, and why


def change_lines(history: History, changes: Iterable[Change]) -> Iterator[ChangeLine]:
    """The texts of some changes of a history."""
    cards = card_names(history.runs)
    for change in changes:
        one = history.series[change.series]
        first, last = (history.runs[one.runs[at]] for at in (change.at, change.latest))
        before = history.runs[one.runs[change.earliest - 1]] if change.earliest else None
        yield ChangeLine(
            test=printable(one.test),
            metric=printable(one.metric),
            size=share_of_change(change.relative) if np.isfinite(change.relative) else "new",
            levels=f"{_figure(change.before, one.unit)} -> {_figure(change.after, one.unit)}",
            commits=_commits(before, last),
            date=f"{first.when:%Y-%m-%d}",
            card=card_of(one.card, one.variant, cards),
            accepted=change.accepted,
            judged=_judged(change),
        )


def card_names(runs: Sequence[Run]) -> dict[str, str]:
    """By key, the name of a card: its device, or the key where cards of one name have several."""
    devices = {one.card: f"{one.device} (simulated)" if one.simulated else one.device for one in runs}
    names = list(devices.values())
    return {card: printable(device if names.count(device) == 1 else card) for card, device in devices.items()}


def card_of(card: str, variant: str | None, cards: dict[str, str]) -> str:
    """The name of a card with its variant. `cards`: of `card_names`."""
    return cards[card] if variant is None else f"{cards[card]}, {printable(variant)}"


def _judged(change: Change) -> str:
    if not change.accepted:
        return "not accepted"
    who = f"accepted by {change.who}" if change.who else "accepted"
    return printable(f"{who}: {change.why}" if change.why else who)


def _commits(before: Run | None, last: Run) -> str:
    """The commits that may have made a change, as git takes them: behind the first one, up to the second one."""
    after = revision(last)
    if before is None or not after or not (base := revision(before)):
        return f"up to {after}" if after else "unknown commit"
    return f"{base}..{after}" if base != after else f"none: {after} before and after"


def revision(run: Run) -> str:
    """The commit of a run, shortened; "-dirty" stays. Empty where it is unknown."""
    commit, dash, dirty = run.revision.partition("-")
    return printable(f"{commit[:8]}{dash}{dirty}")


_FORMATS: dict[str, Callable[[float], str]] = {"s": format_time, "B": lambda value: format_bytes(round(value))}


def _figure(value: float, unit: str) -> str:
    return _FORMATS[unit](value) if unit in _FORMATS else f"{value:.10g}{unit and ' '}{printable(unit)}"
