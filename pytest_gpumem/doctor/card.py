"""Judges one card: beside others of its model, under load, in its configuration, and beside its own history.

No limit is chosen by hand. Figures are compared with those of the cards on record (`cards.json`, which ci/card_reference.py makes of
ci/records) and differ if they lie beyond what the spread between these cards allows; controls as `judging.drift` compares them.
"""

from __future__ import annotations

import math
import statistics
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from functools import cache
from pathlib import Path

import msgspec
from msgspec import to_builtins

from pytest_gpumem.baselines.storage import Storage
from pytest_gpumem.baselines.store import files
from pytest_gpumem.doctor import gpu
from pytest_gpumem.doctor.report import Check, Status
from pytest_gpumem.judging.drift import APART, BEYOND_NOISE, KINDS, between
from pytest_gpumem.judging.finding import change, counted
from pytest_gpumem.judging.spread import Variance, squares_around_mean
from pytest_gpumem.measuring.card import Examined
from pytest_gpumem.records.device import Card, CardFigures, DeviceFacts
from pytest_gpumem.records.measurement import Controls
from pytest_gpumem.records.record import Record
from pytest_gpumem.records.schema import device_to_json
from pytest_gpumem.units import format_rate, format_share, format_time

SCHEMA = 1  # version of the JSON report
NAMES = {
    "dram_read": "DRAM, read",
    "dram_write": "DRAM, written",
    "dram_copy": "DRAM, copied",
    "l2_read": "L2, read",
    "dram_latency": "DRAM latency",
    "l2_latency": "L2 latency",
    "to_device": "host to device",
    "to_host": "device to host",
    "launch": "idle launch",
}
TIMES = ("dram_latency", "l2_latency", "launch")  # figures that are better if they are smaller


class Known(Record, frozen=True):
    """A card on record."""

    figures: CardFigures
    ecc: bool | None = None
    link: str | None = None
    """Its host link, such as "PCIe Gen5 x16"."""


@dataclass(frozen=True)
class CardReport:
    """What `gpumem card` says of one card."""

    facts: DeviceFacts
    examined: Examined
    known: tuple[Known, ...]  # other cards of the model on record
    checks: tuple[Check, ...]

    @property
    def healthy(self) -> bool:
        return all(check.status is Status.OK for check in self.checks)

    def to_json(self) -> dict[str, object]:
        """The report for programs."""
        examined = self.examined
        return {
            "schema": SCHEMA,
            "kind": "card",
            "utc": datetime.now(timezone.utc).isoformat(timespec="seconds"),
            "healthy": self.healthy,
            "device": device_to_json(self.facts),
            "figures": to_builtins(examined.figures),
            "controls": to_builtins(examined.controls),
            "card": to_builtins(examined.card),
            "known": [to_builtins(one) for one in self.known],
            "checks": [check.to_json() for check in self.checks],
        }

    def figures(self) -> list[tuple[str, str, str]]:
        """Each figure: its name, its value, and the range of the other cards'."""
        lines = []
        for field, name in NAMES.items():
            own, others = getattr(self.examined.figures, field), sorted(_values(self.known, field))
            ends = " to ".join(dict.fromkeys(_format(field, end) for end in (others[0], others[-1]))) if others else ""
            cards = f"{ends} on {counted(len(others), 'card')}" if others else "no other card on record"
            lines.append((name, "not measured" if own is None else _format(field, own), cards))
        return lines


@cache
def on_record() -> dict[str, list[Known]]:
    """By model, the cards on record that ship with the package."""
    return msgspec.json.decode(Path(__file__).with_name("cards.json").read_bytes(), type=dict[str, list[Known]])


def model(facts: DeviceFacts) -> str:
    """The name under which cards of a model are on record."""
    return " ".join(part for part in ("simulated" if facts.simulated else "", facts.name, facts.mig_profile or "") if part)


def stored(place: Storage, key: str) -> dict[str | None, list[Controls]]:
    """By UUID of the card, the readings of controls that accepted runs kept. Raises `BaselineError`: as `files`."""
    found: dict[str | None, dict[Controls, None]] = defaultdict(dict)
    for _, content in files(place, key):
        for row in content.rows:
            own = row.measurement
            card = own.provenance.card if own.provenance is not None else None
            for controls in (own.controls, *(one.controls for one in own.further)):
                if controls is not None:
                    found[card][controls] = None
    return {card: list(readings) for card, readings in found.items()}


def judge(facts: DeviceFacts, examined: Examined, history: Mapping[str | None, Sequence[Controls]] | None = None) -> CardReport:
    """Judge a card.
    `history`: what `stored` gives; None without a store.
    """
    everything = on_record()
    known = tuple(everything.get(model(facts), ()))
    checks = (
        _like_its_model(facts, examined, known, everything, history or {}),
        _throttling(examined),
        _configuration(facts, examined, known),
        _ageing(facts, examined, history),
    )
    return CardReport(facts, examined, known, checks)


def _like_its_model(
    facts: DeviceFacts,
    examined: Examined,
    known: Sequence[Known],
    everything: Mapping[str, Sequence[Known]],
    history: Mapping[str | None, Sequence[Controls]],
) -> Check:
    found, unjudged = list[str](), list[str]()
    for field, name in NAMES.items():
        own, others = getattr(examined.figures, field), _values(known, field)
        if own is None or not others:
            unjudged += [name] if own is not None else []
        elif field == "dram_latency":
            if all(abs(math.log(own / other)) > math.log1p(APART) for other in others):
                theirs = ", ".join(dict.fromkeys(format_time(other) for other in sorted(others)))
                found.append(f"another variant than the cards on record: DRAM answers in {format_time(own)}, theirs in {theirs}")
        elif (limit := reach(field, len(others), facts.simulated, everything)) is None:
            unjudged.append(name)
        elif (slower := _slower(field, own, others)) > limit:
            found.append(f"{name} is {format_share(math.expm1(slower))} slower than on other cards, which differ by up to {_share(limit)}")
    cards = [readings for card, readings in history.items() if card != facts.uuid]
    found += _slower_controls(examined.controls, [[_mean(readings)] for readings in cards], "other cards of the store")
    if found:
        return Check("like its model", Status.WARNING, "; ".join(found), "look at the lines below; if they are OK, have the card examined")
    if not known:
        return Check("like its model", Status.OK, f"unknown: no card of this model is on record, {model(facts)}")
    rest = f"; too few cards are on record to judge {', '.join(unjudged)}" if unjudged else ""
    return Check("like its model", Status.OK, f"as {counted(len(known), 'other card')} on record{rest}")


def reach(field: str, cards: int, simulated: bool, everything: Mapping[str, Sequence[Known]]) -> float | None:
    """The log-ratio to the mean of some cards that a further card does not reach by chance; None where too few cards are on record.

    The spread between cards is that of all models together: each has few.
    """
    squares, freedom = 0.0, 0
    for name, known in everything.items():
        logs = [math.log(value) for value in _values(known, field)]
        if name.startswith("simulated") == simulated and len(logs) > 1:
            squares, freedom = squares + squares_around_mean(logs), freedom + len(logs) - 1
    if not freedom:
        return None
    return Variance(squares / freedom * (1 + 1 / cards), freedom).reach(BEYOND_NOISE)


def _slower(field: str, own: float, others: Sequence[float]) -> float:
    """Log-ratio of the time that a figure stands for to the mean of others; slower is positive."""
    log = math.log(own) - statistics.fmean(map(math.log, others))
    return log if field in TIMES else -log


def _slower_controls(own: Controls, others: Sequence[Sequence[Controls]], whose: str) -> list[str]:
    """What the controls show to be slower than others' readings."""
    found = []
    for kind, name in KINDS.items():
        now = getattr(own, kind)
        then = [value for some in others for one in some if one.source == own.source and (value := getattr(one, kind)) is not None]
        drift = between([now] if now is not None else [], then, kind)
        if drift is not None and drift.too_large and drift.share > 0:
            found.append(f"{name} takes {change(drift.share)} against {whose} ({counted(len(then), 'reading')})")
    return found


def _mean(readings: Sequence[Controls]) -> Controls:
    """One reading for a card: the means, of the newest source."""
    same = [one for one in readings if one.source == readings[-1].source]
    values = {kind: [value for one in same if (value := getattr(one, kind)) is not None] for kind in KINDS}
    means = {kind: statistics.fmean(some) for kind, some in values.items() if some}
    return Controls(**means, source=readings[-1].source)


_UNSEEN = "the driver does not say; pip install nvidia-ml-py"


def _throttling(examined: Examined) -> Check:
    if examined.card is None:
        return Check("throttling", Status.OK, _UNSEEN)
    return _state(examined.card)["throttling"]


def _configuration(facts: DeviceFacts, examined: Examined, known: Sequence[Known]) -> Check:
    """Link, ECC, power limit, MIG and other processes."""
    card = examined.card
    checks = [] if card is None else [_state(card)[name] for name in ("ECC", "clocks", "host link")]
    found = [check for check in checks if check.status is not Status.OK]
    details, remedies = [f"{check.name}: {check.detail}" for check in found], [check.remedy for check in found]
    if facts.mig_profile is not None:
        details.append(f"MIG: an instance of {facts.mig_profile}, a part of the card")
        remedies.append("sudo nvidia-smi -mig 0")
    if facts.ecc is False and any(one.ecc for one in known):
        details.append("ECC: off, and on on other cards of the model")
        remedies.append("sudo nvidia-smi -e 1, and reboot")
    links = {one.link for one in known if one.link is not None}
    if facts.link is not None and links and facts.link not in links:
        details.append(f"host link: {facts.link}, and {' or '.join(sorted(links))} on other cards of the model")
        remedies.append("check the slot, its lanes and its generation in the BIOS")
    if examined.other_processes:
        details.append(f"other processes: {examined.other_processes} on the GPU; the figures above are of what they leave")
        remedies.append("end them")
    if details:
        return Check("configuration", Status.WARNING, "; ".join(details), "; ".join(dict.fromkeys(remedies)))
    return Check("configuration", Status.OK, _UNSEEN if card is None else "link, ECC, power limit, MIG and processes are as they should be")


def _ageing(facts: DeviceFacts, examined: Examined, history: Mapping[str | None, Sequence[Controls]] | None) -> Check:
    """Memory errors, replaced rows, and what became slower."""
    found = list[str]()
    card = examined.card
    remedy = "measure again on the idle card; if it stays, have the card examined"
    if card is not None:
        errors = _state(card)["memory errors"]
        found += [errors.detail] if errors.status is not Status.OK else []
        found += [f"{counted(card.remapped_rows, 'row')} of memory replaced by spare ones"] if card.remapped_rows else []
        remedy = errors.remedy or remedy
    own = (history or {}).get(facts.uuid, ())
    found += _slower_controls(examined.controls, [own], "its own history")
    if found:
        return Check("ageing", Status.WARNING, "; ".join(found), remedy)
    past = sum(one.source == examined.controls.source for one in own)
    beside = f"as in {counted(past, 'earlier process')} of its own" if past else "nothing of this card is in a store to compare with"
    return Check("ageing", Status.OK, f"no replaced rows or errors that the driver tells of; {beside}")


def state(examined: Examined) -> list[str]:
    """The state under load, in words: one line each."""
    card = examined.card
    if card is None:
        return [_UNSEEN]
    shown = {name: check.detail for name, check in _state(card).items()}
    mig = "unknown" if card.mig is None else "on" if card.mig else "off"
    rows = "unknown" if card.remapped_rows is None else card.remapped_rows
    corrected, uncorrected = ("unknown" if n is None else n for n in (card.corrected_errors, card.uncorrected_errors))
    others = "unknown" if examined.other_processes is None else examined.other_processes
    return [
        f"under load: {shown['clocks']}",
        f"host link: {shown['host link']}",
        f"ECC {shown['ECC']}, errors corrected {corrected}, not corrected {uncorrected}, rows replaced {rows}",
        f"MIG {mig}, persistence mode {shown['persistence mode']}, other processes {others}",
    ]


def _state(card: Card) -> dict[str, Check]:
    """The checks of the card's state by name."""
    return {check.name: check for check in gpu.state(card)}


def _values(known: Iterable[Known], field: str) -> list[float]:
    return [value for one in known if (value := getattr(one.figures, field)) is not None]


def _format(field: str, value: float) -> str:
    return format_time(value) if field in TIMES else format_rate(value)


def _share(log: float) -> str:
    return format_share(math.expm1(log))
