"""Which saved runs make the reference of a row, and which rows are saved."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import date, datetime, timedelta, timezone
from typing import Any

from hypothesis import given
from hypothesis import strategies as st
from known_devices import H100
from msgspec import structs
from stored_rows import row

from pytest_gpumem.baselines.acceptances import Acceptance, Acceptances, AcceptedChange, Figure
from pytest_gpumem.baselines.references import Baseline, PastRow, SavedRow, SavedRun, assemble
from pytest_gpumem.records.device import DeviceFacts
from pytest_gpumem.records.footprint import Footprint
from pytest_gpumem.records.limits import Limits
from pytest_gpumem.records.measurement import MovedBytes, Window
from pytest_gpumem.records.row import Row

START = datetime(2026, 11, 1, 10, tzinfo=timezone.utc)
FACTS = structs.replace(H100, driver="580.95.05", cuda="13.0")
KEY = row().key
ONE = Limits(max_regression="1%", max_peak_regression="1%")
TODAY = date(2027, 1, 1)


def run(
    day: float,
    us: float = 100.0,
    *,
    facts: DeviceFacts = FACTS,
    limits: Limits = ONE,
    accepted: str = "",
    **measured: Any,
) -> SavedRun:
    """A run `day` days after the first, which took so many microseconds."""
    head = row(latency=us * 1e-6, **measured)
    saved = SavedRow(
        head.nodeid, measurement=head.measurement, limits=limits, accepted_time=accepted
    )
    return saved_run(day, saved, facts)


def memory(day: int, peak: int) -> SavedRun:
    return saved_run(day, SavedRow(row().nodeid, footprint=of_peak(peak), limits=ONE))


def saved_run(day: float, saved: SavedRow, facts: DeviceFacts = FACTS) -> SavedRun:
    utc = START + timedelta(days=day)
    return SavedRun(id=f"{day} {saved.footprint}", utc=utc, device=facts, rows=(saved,))


def of_peak(peak: int) -> Footprint:
    return Footprint(peak, driver_watched=True, watched=("CUPTI",))


def baseline(
    runs: Sequence[SavedRun], facts: DeviceFacts = FACTS, acceptances: Acceptances | None = None
) -> Baseline:
    return assemble(runs, facts, acceptances or Acceptances())


def days(found: Sequence[PastRow]) -> list[int]:
    return [(saved.file.utc - START).days for saved in found]


def reference(runs: Sequence[SavedRun], head: Row | None = None) -> list[int]:
    return days(baseline(runs).reference_runs(head or row()))


def test_a_reference_is_of_the_first_twelve_dates() -> None:
    assert reference([run(day) for day in range(20)]) == list(range(12))
    # Runs of one date count as one, whatever their number.
    twice = [run(day + hour / 24) for day in range(13) for hour in (0, 1)]
    assert reference(twice) == [day for day in range(12) for _ in range(2)]
    assert reference([]) == []


@given(st.permutations(list(range(14))))
def test_the_order_of_files_does_not_matter(order: list[int]) -> None:
    assert reference([run(day) for day in order]) == list(range(12))


def test_gains_of_three_successive_days_begin_it_anew() -> None:
    cases: list[tuple[Sequence[float], list[int]]] = [
        ([100, 98, 98, 98], [1, 2, 3]),  # three days faster by more than 1 %
        ([100, 98, 98], [0, 1, 2]),  # two are not enough
        ([100, 98, 100, 98, 98], [0, 1, 2, 3, 4]),  # not in succession
        ([100, 99.5, 99.5, 99.5], [0, 1, 2, 3]),  # within the limit
        ([100, 102, 102, 102], [0, 1, 2, 3]),  # it never follows a slow-down
        ([100] * 12 + [100, 98, 98, 98], [13, 14, 15]),  # a full one too
        ([100] * 12 + [98, 98, 98, 90, 90, 90], [15, 16, 17]),  # and again
    ]
    for latencies, expected in cases:
        assert reference([run(day, us) for day, us in enumerate(latencies)]) == expected, latencies


def test_a_row_without_a_limit_begins_anew_from_five_percent_on() -> None:
    none = Limits()
    by_4 = [run(day, us, limits=none) for day, us in enumerate([100, 96, 96, 96])]
    by_6 = [run(day, us, limits=none) for day, us in enumerate([100, 94, 94, 94])]
    assert (reference(by_4), reference(by_6)) == ([0, 1, 2, 3], [1, 2, 3])


# Identity


def test_another_way_of_measuring_begins_a_new_reference() -> None:
    cases: list[tuple[dict[str, Any], str, bool]] = [
        ({"mode": "hot"}, "mode clean-cold → hot", True),
        ({"sampler": "blocked"}, "sampler graph → blocked", True),
        ({"window": Window(1, 0.5, 1)}, "window none → ", True),
        ({"moved_bytes": MovedBytes(1, 1)}, "declared bytes 3 B → 2 B", True),
        ({"moved_bytes": None}, "declared bytes 3 B → unknown", True),
        ({"moved_bytes": MovedBytes(9, 1)}, "declared bytes 3 B → 10 B", False),
    ]
    for changed, reason, differently in cases:
        saved, head = baseline([run(0)]), row(**changed)
        assert saved.reference_runs(head) == (), changed
        assert saved.why_new(head).startswith(reason), changed
        assert saved.why_new(head).endswith(", so a new reference begins"), changed
        assert saved.measured_differently(head) is differently, changed
        # The runs before come back with the way before.
        both = baseline([run(0), run(1, **changed)])
        assert (days(both.reference_runs(row())), days(both.reference_runs(head))) == ([0], [1]), (
            changed
        )
        assert days(both.saved(head)) == [0, 1], changed


def test_a_driver_begins_a_new_reference() -> None:
    newer = structs.replace(FACTS, driver="590.10", cuda="13.1")
    saved = baseline([run(0)], newer)
    assert saved.reference_runs(row()) == ()
    assert saved.why_new(row()) == (
        "driver 580.95.05 → 590.10, CUDA 13.0 → 13.1, so a new reference begins"
    )
    assert not saved.measured_differently(row())
    assert days(baseline([run(0), run(1, facts=newer)], newer).reference_runs(row())) == [1]


def accepted(
    up_to: str, base: str, utc: str = "2026-11-02", figure: Figure = "time", reason: str = "why"
) -> Acceptance:
    return Acceptance(KEY, reason, "ada", (AcceptedChange(KEY, figure, up_to),), base, utc=utc)


def test_an_acceptance_begins_a_new_reference_and_its_revert_returns() -> None:
    slower = Acceptances({"a.json": accepted("10%", "abc")})
    digest = slower.digest(KEY, "time")
    runs = [run(0), run(1)]
    waiting = baseline(runs, acceptances=slower)
    assert waiting.reference_runs(row()) == ()
    assert waiting.why_new(row()) == (
        "a change of its time was accepted (ada: why), so a new reference begins"
    )
    runs.append(run(2, 110, accepted=digest))
    assert days(baseline(runs, acceptances=slower).reference_runs(row())) == [2]
    # Other words are the same acceptance.
    reworded = Acceptances({"a.json": accepted("10%", "abc", reason="because")})
    assert days(baseline(runs, acceptances=reworded).reference_runs(row())) == [2]
    # A later one replaces it.
    again = Acceptances({**slower.files, "b.json": accepted("3%", "def", "2026-11-03")})
    assert baseline(runs, acceptances=again).reference_runs(row()) == ()
    # Without its file the earlier runs count again.
    assert days(baseline(runs).reference_runs(row())) == [0, 1]
    gone = baseline([run(2, accepted=digest)])
    assert gone.why_new(row()).startswith("an accepted change of its time was taken back")


def test_accepted_bytes_forgive_no_time() -> None:
    more = Acceptances({"a.json": accepted("96 MiB", "abc", figure="memory")})
    saved = baseline([run(0), memory(0, 64)], acceptances=more)
    head = row(footprint=of_peak(64))
    assert days(saved.reference_runs(head)) == [0]
    assert saved.reference_runs(head, "memory") == ()
    assert saved.why_new(head, "memory").startswith("a change of its memory was accepted")


# What is saved


def enters(latencies: Sequence[float], now: float) -> bool:
    """On the day after the last one."""
    runs = [run(day, us) for day, us in enumerate(latencies)]
    today = (START + timedelta(days=len(latencies))).date()
    return baseline(runs).enters(row(latency=now * 1e-6, limits=ONE), "time", today)


def test_a_full_reference_takes_gains_and_the_day_after_each() -> None:
    full = [100.0] * 12
    assert enters(full[:11], 100)
    assert not enters(full, 100)
    assert not enters(full, 99.5)
    assert enters(full, 98)
    assert enters([*full, 98], 100)  # else nobody sees that the gain is over
    assert not enters([*full, 98, 100], 100)
    assert enters([*full, 98, 100], 98)


def test_a_full_reference_takes_a_run_whose_test_has_another_limit() -> None:
    """A gate compares the limits of calls with those of the newest run."""
    saved = baseline([run(day) for day in range(12)])
    for origin, other in (("call", True), ("marker", True), ("--gpumem-max-latency", False)):
        limits = structs.replace(ONE, max_latency="1 ms", origin={"max_latency": origin})
        assert saved.enters(row(limits=limits), "time", TODAY) is other


def test_saved_memory_is_bounded_in_the_same_way() -> None:
    peaks = baseline([memory(day, 100) for day in range(14)])
    head = row(footprint=of_peak(100), limits=ONE)
    assert days(peaks.reference_runs(head, "memory")) == list(range(12))
    assert not peaks.enters(head, "memory", TODAY)
    assert peaks.enters(structs.replace(head, footprint=of_peak(98)), "memory", TODAY)
    fewer = baseline([memory(day, peak) for day, peak in enumerate([100, 98, 98, 98])])
    assert days(fewer.reference_runs(head, "memory")) == [1, 2, 3]


def test_what_a_session_measures() -> None:
    rows = baseline([structs.replace(run(0), mode="clean-cold"), memory(1, 100)])
    assert list(rows.expected("clean-cold")) == [KEY]
    assert list(rows.expected("hot")) == []
