"""Limits of a footprint: what fails, what passes, and counts that vary by themselves."""

from __future__ import annotations

from typing import Any

from msgspec.structs import replace

from pytest_gpumem.judging.footprint import judge_footprint
from pytest_gpumem.outcomes import Code, Outcome
from pytest_gpumem.records.footprint import Footprint, MemoryUse, WaitLine, Waits
from pytest_gpumem.records.limits import Limits
from pytest_gpumem.units import GiB, MiB


def footprint(peak: int = 0, *uses: MemoryUse, **fields: Any) -> Footprint:
    return Footprint(peak, uses, watched=("CUPTI",), driver_watched=True, **fields)


def judged(
    now: Footprint, past: list[Footprint] | None = None, /, **limits: Any
) -> list[tuple[Outcome, Code | None, str]]:
    found = judge_footprint(
        now, Limits(**limits, origin=dict.fromkeys(limits, "marker")), past or []
    )
    return [(one.outcome, one.code, one.reason) for one in found]


def past(*peaks: int) -> list[Footprint]:
    return [footprint(peak) for peak in peaks]


KEPT = MemoryUse("CuPy", "device", kept=4096, reserved=MiB, allocations=3)
PINNED = MemoryUse("CUDA", "pinned", kept=MiB)
FREED = MemoryUse("PyTorch", "device", kept=-GiB)


def test_a_limit_is_exact() -> None:
    for limit, written, outcome in [
        ("max_peak", "2 MiB", Outcome.PASS),
        ("max_peak", "2097151 B", Outcome.FAIL),
        ("max_kept", "1052672 B", Outcome.PASS),
        ("max_kept", "1052671 B", Outcome.FAIL),  # what PyTorch freed makes up for nothing
    ]:
        now = footprint(2 * MiB, KEPT, PINNED, FREED)
        ((found, code, sentence),) = judged(now, **{limit: written})
        assert (found, code) == (
            outcome,
            Code.TOO_MUCH_MEMORY if outcome is Outcome.FAIL else None,
        ), (limit, written, outcome)
        assert f"{limit} {written} (marker)" in sentence, (limit, written, outcome)


def test_a_growth_is_exact() -> None:
    for peak, allowed, outcome in [
        (100, "0 B", Outcome.PASS),
        (101, "0 B", Outcome.FAIL),
        (105, "5%", Outcome.PASS),
        (106, "5%", Outcome.FAIL),
        (116, "5% + 10 B", Outcome.FAIL),
        (129, "29%", Outcome.PASS),  # 100 x 0.29 is less than 29 in floats
    ]:
        grown = judged(footprint(peak), past(100, 100), max_peak_regression=allowed)
        assert grown[0][0] is outcome, peak


def run(*peaks: int) -> Footprint:
    return footprint(peaks[0], further_peaks=peaks[1:])


def test_a_growth_is_over_the_greatest_peak_and_a_duet_decides_where_unchanged_code_varies() -> (
    None
):
    varying = [*past(100, 105), run(100, 110)]
    for peak, outcome in ((110, Outcome.PASS), (111, Outcome.UNDECIDED), (999, Outcome.UNDECIDED)):
        assert judged(footprint(peak), varying, max_peak_regression="0 B")[0][0] is outcome
    ((_, code, sentence),) = judged(footprint(111), varying, max_peak_regression="0 B")
    assert code is Code.NOISY
    assert "needs a duet" in sentence
    assert "unchanged code varies between 100 B and 110 B" in sentence


def test_the_middle_process_of_a_run_is_judged() -> None:
    for peaks, outcome in (((130, 100, 100), Outcome.PASS), ((100, 130, 130), Outcome.FAIL)):
        ((found, _, _sentence),) = judged(run(*peaks), past(100), max_peak_regression="0 B")
        assert found is outcome


def test_an_absolute_limit_is_on_the_process_that_takes_most() -> None:
    for limit in ["max_peak", "max_kept"]:
        several = footprint(1, further_peaks=(1, 3), further_kept=(0, 3))
        outcome, _, _sentence = judged(several, **{limit: "2 B"})[0]
        assert outcome is Outcome.FAIL, limit
        assert (
            judged(replace(several, further_peaks=(2,), further_kept=(2,)), **{limit: "2 B"})[0][0]
            is Outcome.PASS
        ), limit


def test_without_history_it_is_new() -> None:
    assert judged(footprint(1), max_peak_regression="0 B")[0][:2] == (Outcome.NEW, Code.NO_BASELINE)


def test_what_was_not_seen_is_no_pass() -> None:
    unseen = Footprint(0, not_watched=("no GPU",))
    for limit in ({"max_kept": "0 B"}, {"max_peak": "1 GiB"}, {"max_peak_regression": "5%"}):
        for before in ([], past(100)):
            ((outcome, code, sentence),) = judged(unseen, before, **limit)
            assert (outcome, code) == (Outcome.UNDECIDED, Code.NOT_READ)
            assert sentence.endswith("cannot be judged: no GPU")
    bounded = Footprint(0, watched=("CuPy",), bound=4 * MiB, not_watched=("CUPTI: it is missing",))
    assert judged(bounded, max_kept="0 B")[0][0] is Outcome.UNDECIDED
    assert judged(Footprint(0, watched=("CuPy",), bound=0), max_kept="0 B")[0][0] is Outcome.PASS
    assert (
        judged(Footprint(0, watched=("CuPy",), not_watched=("CUPTI: lent",)), max_kept="0 B")[0][0]
        is Outcome.UNDECIDED
    )


def test_a_peak_that_is_known_within_bounds_passes_only_by_the_upper_one() -> None:
    for allowed, outcome in [
        ("2 MiB", Outcome.FAIL),
        ("5 MiB", Outcome.UNDECIDED),
        ("6 MiB", Outcome.PASS),
    ]:
        now = footprint(3 * MiB, peak_bound=6 * MiB, not_watched=("JAX: its peak",))
        ((found, _, sentence),) = judged(now, max_peak=allowed)
        assert found is outcome, allowed
        assert ("JAX: its peak" in sentence) == (outcome is Outcome.UNDECIDED), allowed
        ((found, _, _),) = judged(
            now,
            past(3 * MiB),
            max_peak_regression=f"{int(allowed[0]) - 3} MiB" if allowed != "2 MiB" else "0 B",
        )
        assert found is (Outcome.PASS if allowed == "6 MiB" else Outcome.UNDECIDED), allowed
        assert judged(now, max_kept="0 B")[0][0] is Outcome.PASS, allowed


def waiting(*counts: int, not_read: str | None = None) -> Footprint:
    lines = [
        WaitLine("conftest.py", 20 + at, "wait", "cuStreamSynchronize", count)
        for at, count in enumerate(counts)
    ]
    return Footprint(0, waits=Waits(tuple(lines), not_read))


def test_waits_are_counted_by_line_and_judged_without_memory() -> None:
    assert judged(Footprint(0), max_waits="0") == []
    ((outcome, _, text),) = judged(waiting(2, 1), max_waits="2")
    assert (outcome, text) == (
        Outcome.FAIL,
        "the host waits 3 times: conftest.py:20 2 x cuStreamSynchronize, conftest.py:21 1 x cuStreamSynchronize, "
        "above max_waits 2 (marker) by 1",
    )
    assert judged(waiting(), max_waits="0")[0][0] is Outcome.PASS
    assert judged(waiting(*[1] * 7), max_waits="0")[0][2].count("conftest.py") == 5
    ((outcome, code, text),) = judged(waiting(not_read="not read: the test forked"), max_waits="0")
    assert (outcome, code) == (Outcome.UNDECIDED, Code.NOT_READ)
    assert text == "max_waits 0 (marker) cannot be judged: not read: the test forked"


def test_waits_against_the_base() -> None:
    def against(now: int, *past: int) -> tuple[Outcome, str]:
        saved = [waiting(count) for count in past]
        ((outcome, _, text),) = judged(waiting(now), saved, max_waits="base")
        return outcome, text

    assert against(3)[0] is Outcome.NEW
    assert against(3, 3) == (
        Outcome.PASS,
        "the host waits 3 times: conftest.py:20 3 x cuStreamSynchronize, 3 times in the baseline, "
        "not above max_waits base (marker)",
    )
    assert against(4, 4, 3)[0] is Outcome.PASS
    assert against(5, 4, 3)[0] is Outcome.FAIL
    unread = waiting(not_read="not read: the test forked")
    assert judged(waiting(3), [waiting(3), unread], max_waits="base")[0][0] is Outcome.PASS
    assert judged(waiting(3), [unread], max_waits="base")[0][0] is Outcome.NEW


def test_a_saved_run_that_read_waits_alone_says_nothing_of_memory() -> None:
    saved = waiting(1)
    assert judged(footprint(5 * MiB), [saved], max_peak_regression="0 B")[0][0] is Outcome.NEW
