"""Two sides of result files: the rows that can be compared, each judged. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

from msgspec.structs import replace

from pytest_gpumem.baselines.history import Accepted, changes
from pytest_gpumem.baselines.result_sets import UNKNOWN_GPU, Side, merged
from pytest_gpumem.judging.finding import counted
from pytest_gpumem.judging.judge import comparable, judge
from pytest_gpumem.judging.screen import Family, base_latency, mean_latency
from pytest_gpumem.outcomes import Code, Exit, Outcome, UserError
from pytest_gpumem.records.measurement import Limits
from pytest_gpumem.records.row import Row, Verdict

OPTION = "--max-regression"


@dataclass(frozen=True)
class Pair:
    """One row, on both sides or on one."""

    row: Row  # of the second side, judged against the first; without a measurement if only the first side has the row
    base: float | None
    """Seconds that the change is against: the mean over the processes of the first side. None if only the second side has the row."""
    head: float | None = None  # seconds: the same of the second side


@dataclass(frozen=True)
class Compared:
    """The result of a comparison."""

    pairs: tuple[Pair, ...]
    forced: str | None  # why the sides are not comparable, if --force overrules it
    notes: tuple[str, ...]  # sentences on facts that the files lack, and on rows that are not compared

    @property
    def rows(self) -> list[Row]:
        """The judged rows of the second side."""
        return [pair.row for pair in self.pairs]

    def exit_code(self, *, strict: bool) -> int:
        """As `outcomes.EXIT_CODES` of `compare`; under `strict` every row needs a limit and a PASS of a real GPU."""
        if any(row.verdict.outcome is Outcome.FAIL for row in self.rows):
            return Exit.FAILED
        if self.forced is not None or not any(pair.base is not None and pair.row.measurement is not None for pair in self.pairs):
            return Exit.NO_VERDICT
        undecided = any(row.verdict.outcome is not Outcome.PASS or not _limited(row) or row.verdict.simulated for row in self.rows)
        return Exit.NO_VERDICT if strict and undecided else Exit.FINE


def compare_sides(base: Side, head: Side, max_regression: str | None, *, force: bool) -> Compared:
    """Judge every row of `head` against `base`.
    `base`: the side that serves as the baseline.
    `max_regression`: allowed slow-down of every row, as written; None: the limit of each row's test in `head`.
    `force`: compare results of different GPUs too.
    Raises `UserError`: the sides are not comparable, or share a file.
    Raises `QuantityError`: a limit that cannot be read.
    """
    theirs = {file.digest: file.path for file in base.files}
    if copy := next((file for file in head.files if file.digest in theirs and file.content.process is not None), None):
        raise UserError(f"{copy.path}: the same file as {theirs[copy.digest]} on the other side")
    why = _incomparable(base, head)
    if why is not None and not force:
        raise UserError(f"{why}; --force compares them all the same, and then passes no gate")
    keys = [*head.rows, *(key for key in head.left_out if key not in head.rows)]
    keys += [key for key in base.rows if key not in keys]
    family = Family(size=max(1, sum(key in base.rows for key in head.rows)))
    pairs = []
    for key in keys:
        pair = _pair(key, base, head, max_regression, family)
        family = family.after(pair.row.verdict) if _limited(pair.row) else family
        pairs.append(pair)
    notes = []
    if stock := " and ".join(one.name for one in (base, head) if one.stock):
        notes.append(
            f"stock pytest-benchmark wrote {stock}: the GPU, its clocks and driver are not known, times are the host's (medians of the "
            "rounds), the state of the caches, placements and launch overhead were left to chance"
        )
    if memory := max(base.of_memory, head.of_memory):
        notes.append(f"{counted(memory, 'test')} whose memory alone was watched: gpumem diff compares it")
    there = {key: sum(one.processes for one in rows) for key, rows in head.rows.items()}
    if apart := sum((one := pair.row).measurement is not None and 1 + len(one.measurement.further) < there[one.key] for pair in pairs):
        notes.append(
            f"{counted(apart, 'row')} of {head.name}: processes that measured in another way than the newest, or on another variant of the "
            "card, are left out"
        )
    return Compared(tuple(pairs), why, tuple(notes))


def _pair(key: str, base: Side, head: Side, written: str | None, family: Family) -> Pair:
    past, now = base.rows.get(key, ()), head.rows.get(key, ())
    if not now:
        why = f"not in {head.name}" if key not in head.left_out else f"in {head.name}: {head.left_out[key]}"
        nodeid = past[0].nodeid if past else key
        verdict = Verdict(
            Outcome.UNDECIDED,
            why,
            simulated=any(facts.simulated for side in (base, head) for facts in side.devices.values()),
            code=Code.NOT_MEASURED,
        )
        return Pair(Row(nodeid, Limits(), verdict, label=past[0].label if past else ""), _latency(past))
    measurement, facts = merged(now), now[-1].process.device
    history = base.baseline.history(key, partial(comparable, measurement))
    limit, origin = (written, OPTION) if written is not None else (head.limit(key), "of its test")
    limits = Limits(max_regression=limit, origin={} if limit is None else {"max_regression": origin})
    absent = base.left_out.get(key)
    verdict = judge(
        measurement,
        limits,
        facts,
        history.measurements,
        strict=False,
        no_history=f"in {base.name}: {absent}" if absent is not None else f"{base.name} holds no such row",
        family=family,
        first=history.first_measurement,
    )
    if not past:
        reason = f"not in {base.name}" + (f": {absent}" if absent else "")
        verdict = replace(verdict, outcome=Outcome.NEW, reason=reason, code=Code.NO_BASELINE)
    changed = changes(measurement, facts, now[-1].test_source, history.accepted)
    row = Row(now[-1].nodeid, limits, verdict, measurement, measurement.label, test_source=now[-1].test_source, changed=changed)
    # Both sides at the launch overhead of the second one, so that the change is their ratio.
    compared = verdict.comparison
    before = base_latency(measurement, compared) if compared is not None else _latency(history.accepted)
    return Pair(row, before, mean_latency([measurement]))


def _limited(row: Row) -> bool:
    return row.limits.max_regression is not None


def _latency(rows: Sequence[Accepted]) -> float | None:
    return mean_latency([one.measurement for one in rows]) if rows else None


def _incomparable(base: Side, head: Side) -> str | None:
    """Why the sides are of different GPUs; None if they are of one kind. Raises `UserError`: one is simulated and one is real."""
    devices = {**base.devices, **head.devices}
    if len({facts.simulated for facts in devices.values()}) > 1:
        raise UserError("simulated results are never compared with a GPU's")
    for one in (base, head):
        if len(one.devices) > 1:
            return f"{one.name} holds results of different GPUs ({', '.join(sorted(one.devices))})"
    if len(devices) > 1:
        return f"{base.name} is of {_key(base)}, {head.name} of {_key(head)}: results of different GPUs are not comparable"
    return None


def _key(one: Side) -> str:
    (key,) = one.devices
    return "an unknown GPU" if key == UNKNOWN_GPU.key else key
