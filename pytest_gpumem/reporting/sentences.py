"""What a reader of a table needs besides its figures: how they were taken, and the reason of every verdict that is not a pass."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence

from pytest_gpumem.judging.traffic import Finding, account
from pytest_gpumem.records.device import DeviceFacts
from pytest_gpumem.records.migrations import kernel_formula
from pytest_gpumem.records.migrations import sentences as page_sentences
from pytest_gpumem.records.row import Row
from pytest_gpumem.records.verdict import Outcome
from pytest_gpumem.units import format_share


def usual_way(rows: Sequence[Row]) -> tuple[str, str] | None:
    """The mode and the sampler of most rows; None where none was measured."""
    most = Counter((row.measurement.mode, row.measurement.sampler) for row in rows if row.measurement is not None).most_common(1)
    return most[0][0] if most else None


def sentences(rows: Sequence[Row], facts: DeviceFacts, *, columns: Collection[str], notes: bool, short: bool = False) -> list[str]:
    """The sentences under a table, without full stops.

    Args:
        rows: in the order in which they are shown.
        facts: the device that was measured.
        columns: the headings that the table has.
        notes: spell out what each measurement notes, else say only how many there are.
        short: the table says "sim" for simulated.
    """
    usual = usual_way(rows)
    text = []
    if short:
        text.append("sim: simulated, no GPU was measured")
    if usual is not None:
        others = any(r.measurement is not None and (r.measurement.mode, r.measurement.sampler) != usual for r in rows)
        how = f"{usual[0]}, sampler {usual[1]}{' where not said otherwise' if others else ''}"
        text.append(f"{how}; noise is half of the 95 % interval over placements" if "noise" in columns else how)
    if "bandwidth" in columns and any(r.measurement is not None and r.measurement.asked_bandwidth is not None for r in rows):
        text.append("asked: by the threads, over and over; caches and memory serve it together")
    catches = [row.verdict.comparison.catches for row in rows if row.verdict.comparison is not None]
    if catches:
        best, worst = format_share(min(catches)), format_share(max(catches))
        span = best if best == worst else f"{best} to {worst}, by test"
        text.append("change is against the baseline, in its interval (99.9 % below, 99.5 % above)")
        text.append(f"catches slow-downs from {span}")
    for what, count in Counter(what for row in rows for what in row.changed).items():
        text.append(f"changed since the baseline: {what} ({count} of {len(rows)})")
    slower = [r for r in rows if r.verdict.comparison is not None and r.verdict.comparison.low > 0 and r.limits.max_regression is None]
    if slower:
        text.append(f"SLOWER than the baseline, but held to no max_regression: {len(slower)} of {len(rows)}")
    for row in rows:
        # A suite has no baseline at first, and then that is one line for all; -v says of each row why, such as that a change was accepted.
        if row.verdict.outcome is not Outcome.PASS and (notes or row.verdict.outcome is not Outcome.NEW):
            text.append(f"{row.verdict.outcome.value} {row.key}: {row.verdict.reason}")
    noted = []
    for row in rows:
        if row.measurement is None:
            continue
        noted += [f"note {row.key}: {note}" for note in row.measurement.notes]
        if row.measurement.migrations is not None:
            noted += [f"kernel {row.key}: {kernel_formula(row.measurement)}"]
            noted += [f"pages {row.key}: {sentence}" for sentence in page_sentences(row.measurement.migrations)]
        said = account(row.measurement, facts)
        if said is not None and said.notable:
            # A wrong declaration makes the bandwidth in the table wrong: that is no note.
            (text if said.finding is Finding.WRONG else noted).append(f"traffic {row.key}: {said.sentence}")
    if notes:
        text += noted
    elif noted:
        text.append(f"{len(noted)} note{'s' * (len(noted) > 1)} on how it was measured; -v shows {'them' if len(noted) > 1 else 'it'}")
    if without := sum(row.verdict.outcome is Outcome.NEW for row in rows):
        text.append(f"NEW: {without} of {len(rows)} have nothing to compare with; --gpumem-save accepts this run's rows into the baseline")
    return text
