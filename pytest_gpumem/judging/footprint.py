"""The limits of a footprint. Bytes are counted: a limit holds or does not.

A growth of the peak is judged against the greatest peak of the reference. Where the reference has
different peaks, as by caches and autotuning, a growth beyond the limit needs a duet. Other limits
are on the process of the run that takes the most.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from statistics import median_low

from msgspec.structs import replace

from pytest_gpumem.judging.finding import Check, check_of
from pytest_gpumem.limits import AT_THE_END, BASE, MAX_WAITS, OF_WATCHED
from pytest_gpumem.outcomes import Code, Outcome
from pytest_gpumem.records.footprint import Footprint, WaitLine, Waits
from pytest_gpumem.records.limits import Limits
from pytest_gpumem.records.row import LimitResult
from pytest_gpumem.units import counted, format_share, parse_bytes, parse_growth, short_bytes, sizes

SHOWN = 5  # most lines of waits that a text names


def peaks_of(footprint: Footprint) -> tuple[int, ...]:
    return (footprint.peak, *footprint.further_peaks)


def judge_footprint(
    footprint: Footprint,
    limits: Limits,
    past: Sequence[Footprint],
    no_history: str | None = None,
    *,
    fixtures_alone: bool = False,
) -> Iterator[LimitResult]:
    """Yield a finding for each limit that is set. Limits on a test's end wait until it has ended.

    `past`: footprints of the row's saved runs. `no_history`: why there are none.
    `fixtures_alone`: it is of a whole simulated test, which keeps nothing beyond its fixtures.
    """
    for name in OF_WATCHED:
        check = check_of(limits, name)
        if check is None or (name in AT_THE_END and not footprint.ended):
            continue
        if name != MAX_WAITS:
            yield judge_bytes(check, footprint, past, no_history, fixtures_alone)
        elif footprint.waits is not None:
            yield judge_waits(check, footprint.waits, past, no_history, "the baseline")


def judge_waits(
    check: Check, waits: Waits, past: Sequence[Footprint], no_history: str | None, past_name: str
) -> LimitResult:
    if waits.not_read is not None:
        return check.not_judged(waits.not_read, Code.NOT_READ)
    figure = f"the host waits {counted(waits.count, 'time')}"
    if waits.lines:
        figure += f": {waits_text(waits)}"
    counts = []
    for run in past:
        if run.waits is not None and run.waits.not_read is None:
            counts.append(run.waits.count)
    if counts and check.written == BASE:
        figure += f", {counted(max(counts), 'time')} in {past_name}"
    why_new = no_history or f"no run of {past_name} read waits"
    return check.of_count(waits.count, figure, counts, why_new)


def waits_text(waits: Waits) -> str:
    lines = []
    for line in waits.lines[:SHOWN]:
        lines.append(f"{place_of(line)} {line.count} x {line.call}")
    text = ", ".join(lines)
    if len(waits.lines) > SHOWN:
        text += f" and {len(waits.lines) - SHOWN} more"
    return text


def place_of(line: WaitLine) -> str:
    """Return "tests/test_a.py:12", or why there is no line."""
    if not line.file:
        return f"line unknown ({line.function})"
    return f"{line.file}:{line.line}"


def judge_bytes(
    check: Check,
    footprint: Footprint,
    past: Sequence[Footprint],
    no_history: str | None = None,
    fixtures_alone: bool = False,
) -> LimitResult:
    """Judge what was seen; a PASS must also hold for what was not."""
    finding = _judge_seen(check, footprint, past, no_history)
    # A FAIL stays: unseen bytes add to seen ones.
    if not footprint.watched and finding.outcome is not Outcome.FAIL:
        why = "; ".join(footprint.not_watched) or "nothing was watched"
        return check.not_judged(why, Code.NOT_READ)
    at_the_end = check.name in AT_THE_END
    if fixtures_alone and at_the_end and not footprint.kept:
        why = "a simulated device has only the buffers of fixtures, which end with them"
        return check.not_judged(why, Code.NOT_READ)
    if finding.outcome is not Outcome.PASS:
        return finding
    unseen = ""
    if footprint.bound:
        unseen = f"up to {short_bytes(footprint.bound)} more of the GPU's memory are taken"
    elif not footprint.driver_watched and (footprint.bound is None or not at_the_end):
        # A bound of 0: nothing else is kept, but the peak may have been higher.
        unseen = "memory that the driver gave and got back meanwhile was not seen"
    elif footprint.peak_bound is not None and not at_the_end:
        highest = replace(footprint, peak=footprint.peak_bound)
        if _judge_seen(check, highest, past, no_history).outcome is not Outcome.PASS:
            unseen = f"the peak is at most {short_bytes(footprint.peak_bound)}"
    if unseen:
        unseen += f"; {'; '.join(footprint.not_watched)}"
        return check.not_judged(unseen, Code.CONDITIONS)
    return finding


def _judge_seen(
    check: Check, footprint: Footprint, past: Sequence[Footprint], no_history: str | None
) -> LimitResult:
    if check.name == "max_peak_regression":
        return _judge_growth(check, footprint, past, no_history)
    if check.name == "max_peak":
        nbytes = max(peaks_of(footprint))
        figure = f"a peak of {short_bytes(nbytes)}"
    else:
        nbytes = max(footprint.kept, *footprint.further_kept, 0)
        figure = f"{short_bytes(nbytes)} kept"
        allowed = sum(use.allowed for use in footprint.uses)
        if allowed:
            figure += f", beside {short_bytes(allowed)} that allow_kept names"
    return check.at_most(nbytes, parse_bytes(check.written), figure, Code.TOO_MUCH_MEMORY)


def _judge_growth(
    check: Check, footprint: Footprint, past: Sequence[Footprint], no_history: str | None
) -> LimitResult:
    past = [run for run in past if run.watched]  # the others have waits alone
    if not past:
        return check.new(no_history or "the baseline holds no such row")
    saved: list[int] = []
    for run in past:
        saved += peaks_of(run)
    peak, least, greatest = median_low(peaks_of(footprint)), min(saved), max(saved)
    growth = short_bytes(peak - greatest)
    if peak >= greatest:
        growth = f"+{growth}"
    if greatest:
        growth += f", {format_share(peak / greatest - 1, sign=True)}"
    peak_text, greatest_text = sizes(peak, greatest)
    runs_text = counted(len(past), "saved run")
    figure = f"a peak of {peak_text} against {greatest_text} of {runs_text} ({growth})"
    most = parse_growth(check.written).most(greatest)
    if peak > most and least < greatest:
        figure += (
            f"; unchanged code varies between {short_bytes(least)} and {short_bytes(greatest)}"
        )
        return check.finding(Outcome.UNDECIDED, f"{check.limit} needs a duet: {figure}", Code.NOISY)
    return check.at_most(peak, most, figure, Code.TOO_MUCH_MEMORY)
