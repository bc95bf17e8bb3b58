"""A row of results as text: name, figures, verdict and facts. Every report draws these, each in its own form."""

from __future__ import annotations

import posixpath
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

from msgspec import UNSET

from pytest_gpumem.judging.finding import basis, counted, window_text
from pytest_gpumem.judging.regression import against
from pytest_gpumem.judging.traffic import no_share_text
from pytest_gpumem.limits import LIMITS
from pytest_gpumem.outcomes import Code, Outcome
from pytest_gpumem.printable import printable
from pytest_gpumem.records.device import DeviceFacts
from pytest_gpumem.records.measurement import Conditions, Measurement, modes_of
from pytest_gpumem.records.migrations import Migrations, PageCounts
from pytest_gpumem.records.row import Comparison, Row
from pytest_gpumem.reporting.columns import hanging, wrapped
from pytest_gpumem.reporting.differences import why_lines
from pytest_gpumem.reporting.footprints import footprint_facts
from pytest_gpumem.reporting.groups import COALESCED, function_of
from pytest_gpumem.units import format_rate, format_share, format_time, short_bytes

OF_MEMORY = ("peak memory", "kept")  # headings of bytes
UNCHECKED = "unchecked"  # term of a measurement whose result nothing checked
HEADINGS = (
    "latency",
    "bandwidth",
    "of peak",
    "noise",
    *OF_MEMORY,
    "change",
)  # of `RowFacts.figures`
LEAST_NOISE = 1e-5  # share below which a noise is shown as "< 0.00100 %": the medians of all placements are on the same tick of the clock
_MEDIANS = 24  # placements whose medians are listed


@dataclass(frozen=True)
class Figure:
    """One figure of a row."""

    text: str = ""  # empty if the row has no such figure
    value: float | None = None  # for sorting: seconds, bytes per second, or a share
    short: str = ""  # a shorter text for a narrow table; empty if there is none


@dataclass(frozen=True)
class RowFacts:
    """A row as text."""

    row: Row
    device: DeviceFacts  # that measured it
    name: str  # the key without what all rows of the report share; with the GPU where the rows are of several
    function: str  # the part of the name before its parameters and its label
    apart: str
    """Parameters and label, such as "4, pinned", and the GPU of several: what tells the rows of one test function apart; may be empty."""
    memory: bool = False
    """Every peak is a figure, not only where it is limited or nothing else was measured."""

    @property
    def outcome(self) -> Outcome:
        """FAIL if the test failed, whatever the verdict; the outcome of the verdict otherwise."""
        return Outcome.FAIL if self.row.failed else self.row.verdict.outcome

    @property
    def verdict(self) -> str:
        """As `verdict_text`, without "(simulated)"."""
        return "".join(_verdict(self.row))

    @property
    def verdict_parts(self) -> tuple[str, str]:
        """`verdict` in two: of the row itself, and of its test, such as ", test failed"."""
        return _verdict(self.row)

    @property
    def css(self) -> str:
        """The class of the outcome in a page: "pass", "fail", "measured" or "doubt"."""
        return {Outcome.PASS: "pass", Outcome.FAIL: "fail", Outcome.MEASURED: "measured"}.get(
            self.outcome, "doubt"
        )

    @property
    def simulated(self) -> bool:
        """True if the row says nothing about a GPU."""
        return self.row.verdict.simulated or self.device.simulated

    @cached_property
    def figures(self) -> dict[str, Figure]:
        """One for each of `HEADINGS`, in their order."""
        found = dict.fromkeys(HEADINGS, Figure()) | dict(
            zip(OF_MEMORY, _memory(self.row, self.memory), strict=True)
        )
        if (comparison := self.row.verdict.comparison) is not None:
            found["change"] = _change(comparison)
        if (measurement := self.row.measurement) is not None:
            found["latency"], found["bandwidth"] = _latency(measurement), _bandwidth(measurement)
            # Bytes that are asked for repeatedly count once in a bandwidth and its share of the peak, so L2 would look slow.
            if (
                measurement.asked_bandwidth is None
                and (share := measurement.share_of_peak(self.device)) is not None
            ):
                found["of peak"] = Figure(f"{share * 100:.1f} %", share)
            if measurement.noise is not None:
                found["noise"] = Figure(_noise(measurement.noise), measurement.noise)
        return found

    def facts(self) -> Iterator[tuple[str, str]]:
        """Terms and texts in reading order: limits, change, measurement, conditions, notes."""
        row = self.row
        for name in LIMITS:
            if (written := getattr(row.limits, name)) is not None:
                yield "limit", f"{name} {written} ({row.limits.origin.get(name, 'origin unknown')})"
        if (past := row.verdict.comparison) is not None:
            hides = "unknown" if past.reach is None else format_share(past.reach)
            yield "change", f"{against(past)}, noise may hide {hides}"
        for line in why_lines(row):
            yield "why", line
        for changed in row.changed:
            yield "changed since", changed
        if row.measurement is not None:
            yield from _measured(row.measurement, self.device)
        for name, value in row.extra.items():
            yield "extra", f"{name} {value:.6g}"
        if row.footprint is not None:
            yield from footprint_facts(row.footprint)


def row_facts(rows: Sequence[Row], device: DeviceFacts, *, memory: bool = False) -> list[RowFacts]:
    """The rows of one report as text. `memory`: as `RowFacts.memory`."""
    found = []
    for row, name in zip(rows, names_of(rows), strict=True):
        parameters = row.nodeid[len(function_of(row)) :]
        label = f"[{row.label}]" if row.label else ""
        inside = parameters.removeprefix("[").removesuffix("]")
        if parameters and not inside.strip():
            inside = parameters  # an empty id
        elif f"{row.label}, ".startswith(f"{inside}, "):
            inside = ""  # the label repeats it
        apart = ", ".join(part for part in (inside, row.label) if part)
        found.append(
            RowFacts(row, device, name, name.removesuffix(parameters + label), apart, memory)
        )
    return found


def shown_headings(rows: Sequence[RowFacts]) -> list[str]:
    """The headings of a page: those for which some row has a figure."""
    return [heading for heading in HEADINGS if any(row.figures[heading].text for row in rows)]


def names_of(rows: Sequence[Row]) -> list[str]:
    """The keys, as `short`."""
    return short([row.key for row in rows])


def short(keys: Sequence[str]) -> list[str]:
    """Keys or node ids without their file where they are unique without it, else without the common folder of all."""
    tests = [key.partition("::")[2] for key in keys]
    if all(tests) and len({*tests}) == len(keys):
        return tests
    folders = [posixpath.dirname(key.partition("::")[0]) for key in keys]
    common = (
        posixpath.commonpath(folders)
        if all(folders) and not any(posixpath.isabs(f) for f in folders)
        else ""
    )
    return [key.removeprefix(f"{common}/") for key in keys]


def verdict_text(row: Row) -> str:
    """Such as "PASS", "PASS, test failed" (by something else than its verdict) or "FAIL (simulated)"."""
    return "".join(_verdict(row)) + (" (simulated)" if row.verdict.simulated else "")


def failure_text(row: Row, device: DeviceFacts, width: int) -> str:
    """The text of a failing test in lines of `width` characters: the verdict's reason, which begins with the figure, and the facts."""
    row, device = printable(row), printable(device)
    (described,) = row_facts([row], device)
    facts = [
        (
            "verdict",
            f"{row.verdict.outcome.word}{' (simulated)' if row.verdict.simulated else ''}, {row.key}",
        )
    ]
    # The reason names the limit, the change against it, and what changed since.
    told = (
        "medians",
        "limit",
        "why",
        "changed since",
        "measured",
        *(["change"] if row.limits.max_regression is not None else []),
    )
    facts += [(term, text) for term, text in described.facts() if term not in told]
    facts.append(
        (
            "device",
            f"{device.name}{f', driver {device.driver}' if device.driver else ''}, {device.key}",
        )
    )
    terms = max(len(term) for term, _ in facts) + 2
    lines = [
        line for part in row.verdict.reason.splitlines() for line in wrapped(part, width, indent="")
    ]
    return "\n".join(
        [
            *lines,
            *(line for term, text in facts for line in hanging(f"  {term:<{terms}}", text, width)),
        ]
    )


def conditions_text(conditions: Conditions) -> str:
    """Such as "SM 1980 MHz, memory 2619 MHz, 41 C, 310 W, not throttled"; empty if nothing is known. "THROTTLED" and "OTHER PROCESSES" are
    in capitals: they spoil a measurement."""
    figures = (
        ("SM {:.0f} MHz", conditions.sm_clock_hz, 1e-6),
        ("memory {:.0f} MHz", conditions.memory_clock_hz, 1e-6),
        ("{:.0f} C", conditions.temperature_c, 1.0),
        ("{:.0f} W", conditions.power_w, 1.0),
    )
    parts = [text.format(value * scale) for text, value, scale in figures if value is not None]
    if conditions.throttle_reasons:
        parts.append(f"THROTTLED: {', '.join(conditions.throttle_reasons)}")
    elif parts and conditions.throttle_reasons is not None:
        parts.append("not throttled")
    if conditions.other_processes:
        parts.append(counted(conditions.other_processes, "other process").upper())
    return ", ".join(parts)


def sectors_text(measurement: Measurement) -> str:
    """Such as "8 sectors a request"; empty for the four of coalesced requests, and if they are unknown."""
    if measurement.sectors_per_request in (None, COALESCED):
        return ""
    return f"{measurement.sectors_per_request:.3g} sectors a request"


def interval_text(measurement: Measurement) -> str:
    """The 95 % interval of a latency per access, such as "147.6 ns to 147.8 ns/access"; empty if there is none."""
    interval = measurement.latency_per_access_interval
    return (
        ""
        if interval is None
        else f"{format_time(interval[0])} to {format_time(interval[1])}/access"
    )


def _verdict(row: Row) -> tuple[str, str]:
    outcome = row.verdict.outcome
    settled = ", same code" if row.verdict.code is Code.SAME_CODE else ""
    return (
        outcome.word + settled,
        ", test failed" if row.failed and outcome is not Outcome.FAIL else "",
    )


def _latency(measurement: Measurement) -> Figure:
    if (access := measurement.latency_per_access) is not None:
        return Figure(f"{format_time(access)}/access", access)
    return Figure(format_time(measurement.latency), measurement.latency)


def _bandwidth(measurement: Measurement) -> Figure:
    # Where each access waits for the one before, bytes per second mean nothing.
    if not measurement.bandwidth or measurement.accesses_per_launch:
        return Figure()
    if (asked := measurement.asked_bandwidth) is not None:
        return Figure(f"{format_rate(asked)} asked", asked)
    return Figure(format_rate(measurement.bandwidth), measurement.bandwidth)


def _memory(row: Row, asked: bool) -> tuple[Figure, Figure]:
    """Peak and kept memory: where they are asked for or limited, where nothing else was measured, and what is kept in any case."""
    footprint, limits = row.footprint, row.limits
    if footprint is None or not footprint.watched:
        return Figure(), Figure()
    asked = asked or limits.max_peak is not None or limits.max_peak_regression is not None
    peak = (
        Figure(short_bytes(footprint.peak), float(footprint.peak))
        if asked or row.measurement is None
        else Figure()
    )
    ends = footprint.ended and (footprint.kept > 0 or limits.max_kept is not None)
    return peak, Figure(short_bytes(footprint.kept), float(footprint.kept)) if ends else Figure()


def _noise(noise: float) -> str:
    return format_share(noise) if noise >= LEAST_NOISE else f"< {format_share(LEAST_NOISE)}"


def _change(comparison: Comparison) -> Figure:
    """ "+12.34 %"."""
    return Figure(f"{round(comparison.delta * 100, 2) + 0.0:+.2f} %", comparison.delta)


def _moved(measurement: Measurement, device: DeviceFacts) -> str | None:
    """The bandwidth with the bytes that it counts, and its share of the peak; None where the bytes are unknown."""
    moved, bandwidth = measurement.moved_bytes, measurement.bandwidth
    if moved is None or bandwidth is None:
        return None
    apart = (
        ""
        if moved.declared is not None
        else f" ({short_bytes(moved.reads)} read, {short_bytes(moved.writes)} written)"
    )
    share = measurement.share_of_peak(device)
    peak = (
        f", {format_share(share)} of peak"
        if share is not None
        else f"; no share of peak: {no_share_text(measurement, device)}"
    )
    return f"{format_rate(bandwidth)} for {short_bytes(moved.total)}{apart}{peak}"


def _samples(measurement: Measurement) -> Iterator[tuple[str, str]]:
    spread = measurement.placement_spread
    apart = f", spread between placements {format_share(spread)}" if spread is not None else ""
    discarded = (
        f", {measurement.discarded} discarded under throttling" if measurement.discarded else ""
    )
    yield "samples", f"{basis(measurement)}{apart}{discarded}"
    more = (
        f" and {len(measurement.medians) - _MEDIANS} more"
        if len(measurement.medians) > _MEDIANS
        else ""
    )
    yield (
        "medians",
        ", ".join(format_time(median) for median in measurement.medians[:_MEDIANS]) + more,
    )


def _measured(measurement: Measurement, device: DeviceFacts) -> Iterator[tuple[str, str]]:
    noise = f" ± {format_share(measurement.noise)} (95 %)" if measurement.noise is not None else ""
    host = (
        ""
        if measurement.host_time is UNSET
        else f"; the host takes {format_time(measurement.host_time)} to queue it"
    )
    yield "latency", f"{format_time(measurement.latency)}{noise}, {measurement.target}{host}"
    if not measurement.checked:
        yield UNCHECKED, "no check compared the result of a launch with a reference"
    if interval := interval_text(measurement):
        yield "95 % interval", interval
    if bandwidth := _moved(measurement, device):
        yield "bandwidth", bandwidth
    if measurement.migrations is not None:
        for sentence in migrations_text(measurement.migrations):
            yield "pages", sentence
    if pattern := sectors_text(measurement):
        yield "access pattern", f"{pattern} ({COALESCED} where coalesced)"
    if (window := measurement.window) is not None:
        yield "window", window_text(window)
    yield from _samples(measurement)
    if modes := modes_text(measurement):
        yield "modes", modes
    yield (
        "method",
        f"{measurement.mode}, sampler {measurement.sampler} ({measurement.sampler_reason})",
    )
    if (
        measurement.overlap is not None
        and (hidden := measurement.overlap.hidden(measurement.latency)) is not None
    ):
        yield (
            "overlap",
            f"{format_share(hidden)} of what can be hidden, {counted(measurement.overlap.streams, 'stream')}",
        )
    yield from _conditions(measurement)
    if measurement.provenance is not None:
        yield (
            "measured",
            " ".join(
                part for part in (measurement.provenance.utc, measurement.provenance.card) if part
            ),
        )
    for note in measurement.notes:
        yield "note", note


def modes_text(measurement: Measurement) -> str | None:
    """The modes of the placements: "placements: 19 at 437.7 us, 3 at 478.1 us; the 19 count"; None for one mode."""
    by_mode: dict[int, list[float]] = {}
    for mode, median in sorted(
        zip(modes_of(measurement.medians), measurement.medians, strict=True)
    ):
        by_mode.setdefault(mode, []).append(median)
    if len(by_mode) < 2:
        return None
    each = ", ".join(
        f"{len(medians)} at {format_time(statistics.fmean(medians))}"
        for medians in by_mode.values()
    )
    count = len(measurement.counting)
    return f"placements: {each}; {'all' if count == len(measurement.medians) else f'the {count}'} count"


def _conditions(measurement: Measurement) -> Iterator[tuple[str, str]]:
    """Conditions before, during and after the samples; a line for all where they did not change."""
    before, after = measurement.conditions
    moments: dict[str, list[str]] = {}
    for moment, conditions in (("before", before), ("worst", measurement.during), ("after", after)):
        if conditions is not None and (text := conditions_text(conditions)):
            moments.setdefault(text, []).append(moment)
    for text, names in moments.items():
        yield "conditions" if len(moments) == 1 else ", ".join(names), text


def migrations_text(migrations: Migrations) -> Iterator[str]:
    """Sentences about a counting pass."""
    if migrations.launch is None or migrations.before is None:
        yield f"not counted: {migrations.not_counted}"
        return
    yield f"one launch, counted by {migrations.source}: {page_counts_text(migrations.launch)}"
    if migrations.before != PageCounts(mapped=migrations.before.mapped):
        yield f"before it, not timed: {page_counts_text(migrations.before)}"


def page_counts_text(counts: PageCounts) -> str:
    """All counts on one line."""
    faults = counted(counts.gpu_faults, "GPU page fault")
    if counts.gpu_faults:
        faults += f" in {counted(counts.gpu_groups, 'group')} on {counted(counts.gpu_pages, 'page')} ({counted(counts.duplicates, 'duplicate')})"
    parts = [faults, counted(counts.cpu_faults, "CPU page fault")]
    for nbytes, seconds, rate, way in (
        (counts.to_device, counts.to_device_seconds, counts.to_device_bandwidth, "to the device"),
        (counts.to_host, counts.to_host_seconds, counts.to_host_bandwidth, "to the host"),
    ):
        at = f" in {format_time(seconds)} = {format_rate(rate)}" if rate is not None else ""
        parts.append(f"{short_bytes(nbytes)} {way}{at}")
    if counts.between_devices:
        parts.append(f"{short_bytes(counts.between_devices)} between devices")
    if counts.mapped:
        parts.append(f"{short_bytes(counts.mapped)} mapped where it was")
    if counts.causes:
        parts.append(
            "moved by "
            + ", ".join(
                f"{cause} {short_bytes(nbytes)}"
                for cause, nbytes in counts.causes.items()
                if nbytes
            )
        )
    return ", ".join(parts)
