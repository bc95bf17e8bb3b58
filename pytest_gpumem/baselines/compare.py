"""Two sides of result files: the second is judged against the first as in a session. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from dataclasses import replace as with_fields

from msgspec.structs import replace

from pytest_gpumem.baselines.history import Baseline, changes, memory_of, times_of
from pytest_gpumem.baselines.result_sets import FAILED, SideResults
from pytest_gpumem.baselines.verdicts import judged, screened
from pytest_gpumem.judging.expectations import lost
from pytest_gpumem.judging.finding import counted, worst
from pytest_gpumem.judging.latencies import base_latency as compared_latency
from pytest_gpumem.judging.latencies import mean_latency
from pytest_gpumem.judging.verdict import with_verdict
from pytest_gpumem.limits import LIMITS, of_the_test
from pytest_gpumem.outcomes import Code, Exit, Outcome, UserError
from pytest_gpumem.records.device import DeviceFacts
from pytest_gpumem.records.measurement import Limits, Measurement
from pytest_gpumem.records.row import LOST, ROW, UNJUDGED, LimitResult, Omission, Row

OPTION = "--max-regression"


@dataclass(frozen=True)
class Pair:
    """A row of the second side, and its newest run of the first one."""

    row: Row  # judged against the first side
    before: Row | None  # None if the first side has no such row, or measured it in another way only
    base: float | None  # seconds: mean over the processes of the first side; None without a time
    head: float | None  # seconds: the same of the second side


@dataclass(frozen=True)
class SetComparison:
    """The result of a comparison."""

    pairs: tuple[Pair, ...]
    missing: tuple[Omission, ...]
    """Rows of the first side that the second lacks, and limits that its run did not judge."""
    forced: str | None  # why the sides are not comparable, if --force overrules it
    notes: tuple[str, ...]
    """Sentences on facts that the files lack, and on rows that are not compared."""

    @property
    def rows(self) -> list[Row]:
        """The judged rows of the second side."""
        return [pair.row for pair in self.pairs]

    @property
    def no_verdict(self) -> str | None:
        """Why the comparison decides nothing; None if it does."""
        if self.forced is not None:
            return "the sides are not comparable"
        if not any(pair.before is not None for pair in self.pairs):
            return "no row is on both sides"
        if not any(limited(row) for row in self.rows):
            return f"no row has a limit; {OPTION} sets one for all"
        unjudged = [omission.status for omission in self.missing].count(UNJUDGED)
        return f"{counted(unjudged, 'limit')} judged by nothing" if unjudged else None

    def exit_code(self, *, strict: bool) -> int:
        """Return the exit code, as `outcomes.EXIT_CODES` of `compare`.

        `strict`: every row needs a limit and a PASS of a real GPU.
        """
        if worst([row.verdict for row in self.rows]) is Outcome.FAIL or lost(self.missing):
            return Exit.FAILED
        if self.no_verdict is not None:
            return Exit.NO_VERDICT
        for row in self.rows:
            if strict and (row.verdict.outcome is not Outcome.PASS or row.verdict.simulated):
                return Exit.NO_VERDICT
        return Exit.FINE


def limited(row: Row) -> bool:
    """True if a row has a limit. A pass without one is none."""
    return any(getattr(row.limits, name) is not None for name in LIMITS)


def compare_sides(
    base: SideResults, head: SideResults, max_regression: str | None, *, force: bool
) -> SetComparison:
    """Judge every row of `head` against `base`.

    `base`: the side that serves as the baseline.
    `max_regression`: allowed slow-down of rows whose test sets none, as written; None: as `head`.
    `force`: compare results of different GPUs too.
    Raises `UserError`: the sides are not comparable, or share a file.
    Raises `QuantityError`: a limit that cannot be read.
    """
    paths = {file.run.id: file.path for file in base.files}
    for file in head.files:
        if file.run.id in paths:
            other = paths[file.run.id]
            raise UserError(f"{file.path}: the same file as {other} on the other side")
    why = _incomparable(base, head)
    if why is not None and not force:
        raise UserError(f"{why}; --force compares them all the same, and then passes no gate")
    facts, rows = head.newest.device, head.judged
    siblings: dict[str, dict[str, Measurement]] = {}
    for row in rows.values():
        if row.measurement is not None:
            siblings.setdefault(row.nodeid, {})[row.label] = row.measurement
    baseline = with_fields(base.baseline, note=f"{base.name} holds no such row")
    judged_rows = []
    for key, taken in rows.items():
        failed = head.left_out.get(key) == FAILED
        limits = _limits(taken, max_regression)
        row = replace(taken, limits=limits, failed=failed, differences=(), changed=())
        if failed:
            in_itself = LimitResult("", Outcome.FAIL, None, f"{FAILED} in {head.name}")
            row = with_verdict(row, [in_itself], comparison=None, simulated=facts.simulated)
        else:
            of_test = siblings.get(row.nodeid, {})
            row = judged(row, baseline, facts, siblings=of_test, strict=False)
        judged_rows.append(row)
    pairs = []
    for row in screened(judged_rows, baseline):
        pairs.append(_pair(row, base, baseline, facts))
    missing = tuple(_missing(base, head, rows))
    return SetComparison(tuple(pairs), missing, why, tuple(_notes(head, pairs)))


def _limits(row: Row, max_regression: str | None) -> Limits:
    """Return the limits of a row, with the option's slow-down unless its test sets or lifts it."""
    if max_regression is None or of_the_test(row.limits.origin.get("max_regression")):
        return row.limits
    return replace(
        row.limits,
        max_regression=max_regression,
        origin={**row.limits.origin, "max_regression": OPTION},
    )


def _pair(row: Row, base: SideResults, baseline: Baseline, facts: DeviceFacts) -> Pair:
    """Return a judged row with its newest run of the first side, and what changed between them."""
    runs = baseline.reference_runs(row) if row.measurement is not None else ()
    times, memory = times_of(runs), memory_of(baseline.saved(row))
    before = base_latency = head_latency = None
    if times or memory:
        then = times[-1][1] if times else None
        footprint = memory[-1] if memory else None
        before = Row(row.nodeid, Limits(), row.verdict, then, row.label, footprint=footprint)
    elif row.verdict.outcome.quiet or row.verdict.outcome is Outcome.NEW:
        row = _not_in_base(row, base)
    measurement = row.measurement
    if measurement is not None:
        row = replace(row, changed=changes(measurement, facts, row.test_source, runs))
        head_latency = mean_latency([measurement])
        if row.verdict.comparison is not None:
            # Both sides at the launch overhead of the second, so that the change is their ratio.
            base_latency = compared_latency(measurement, row.verdict.comparison)
        elif times:
            base_latency = mean_latency([run for _, run in times])
    return Pair(row, before, base_latency, head_latency)


def _not_in_base(row: Row, base: SideResults) -> Row:
    reason = f"not in {base.name}"
    absent = base.left_out.get(row.key)
    if absent:
        reason += f": {absent}"
    results = []
    for result in row.verdict.limits or (LimitResult("", Outcome.NEW),):
        code = result.code or Code.NO_BASELINE
        results.append(LimitResult(result.limit, Outcome.NEW, code, reason))
    return with_verdict(row, results)


def _missing(base: SideResults, head: SideResults, rows: Mapping[str, Row]) -> list[Omission]:
    """Return the rows of the first side that the second lacks, and limits that its run did not
    judge although that of the first side did."""
    expected = base.baseline.expected(head.newest.mode)
    for key, runs in base.baseline.rows.items():
        # A row with times too is expected in the mode of its times.
        if not times_of(runs):
            expected[key] = runs[-1]
    missing = []
    for key, saved in expected.items():
        if key not in rows:
            why = head.left_out.get(key) or f"not in {head.name}"
            lacks = Omission(saved.nodeid, saved.label, LOST, why)
            missing.append(head.missing.get((key, ROW)) or lacks)
    for what, omission in head.missing.items():
        if omission.status == UNJUDGED and what not in base.missing:
            missing.append(omission)
    return missing


def _notes(head: SideResults, pairs: Sequence[Pair]) -> list[str]:
    apart = 0
    for pair in pairs:
        measurement = pair.row.measurement
        if measurement is not None:
            processes = 0
            for _, times in times_of(head.baseline.saved(pair.row)):
                processes += 1 + len(times.further)
            apart += 1 + len(measurement.further) < processes
    if not apart:
        return []
    return [
        f"{counted(apart, 'row')} of {head.name}: processes that measured in another way than the "
        "newest are left out"
    ]


def _incomparable(base: SideResults, head: SideResults) -> str | None:
    """Return why the sides are of different GPUs; None if they are of the same kind.

    Raises `UserError`: one is simulated and one is real.
    """
    devices = {**base.devices, **head.devices}
    if len({facts.simulated for facts in devices.values()}) > 1:
        raise UserError("simulated results are never compared with a GPU's")
    for side in (base, head):
        if len(side.devices) > 1:
            keys = ", ".join(sorted(side.devices))
            return f"{side.name} holds results of different GPUs ({keys})"
    if len(devices) > 1:
        names = (
            f"{base.name} is of {', '.join(base.devices)}, {head.name} of {', '.join(head.devices)}"
        )
        return f"{names}: results of different GPUs are not comparable"
    return None
