"""The simulation of the gate under foreign noise, with counts that take seconds."""

from __future__ import annotations

import json
from dataclasses import asdict

import judging_simulation as simulation
import pytest

from pytest_gpumem.outcomes import Outcome


def test_creep_is_named_soon_and_unchanged_code_is_not() -> None:
    crept = [one for one in simulation.creep(1) if "+0.4%" in one.of]
    assert [one.missed for one in crept] == [False] * 3
    source, main = simulation.Source(32, "a row"), simulation.Main((3,))
    assert Outcome.FAIL not in [
        main.night(source.run(0.0, 3, night), night).outcome for night in range(30)
    ]


def test_days_and_cards_add_what_they_are_said_to() -> None:
    source = simulation.Source(256, "a row", days=0.1)
    one, same, other = (
        source.run(0.0, 1, day, card=card).latency for day, card in ((0, "a"), (0, "a"), (1, "a"))
    )
    assert one == pytest.approx(same, rel=0.01)
    assert one != pytest.approx(other, rel=0.01)


def test_the_record_of_two_h100s_passes_no_slower_row_on_the_other_card() -> None:
    assert [one.of for one in simulation.variants(1) if one.missed] == []


def test_a_missed_target_is_marked() -> None:
    answers = [
        simulation.Answer("by time: PASS", "32 MiB, 3x3, days 0.0%, +1.0 limits", 0.02, "<= 0.01"),
        simulation.Answer("creep", "+0.4% a run", 0.03, "<= 0.035"),
        simulation.Answer("creep", "+0.1% a run", 0.9, ">= 0.95", "of 20"),
    ]
    record = {
        "answers": [asdict(one) for one in answers],
        "before": [{"question": "creep", "of": "+0.4% a run", "figure": 0.136}],
    }
    drawn = simulation.table(json.loads(json.dumps(record)))
    assert [one.missed for one in answers] == [True, False, True]
    assert "   32 3x3              0.0            !2.0" in drawn
    assert "+0.4% a run <= 3.5 13.60 3.00" in " ".join(drawn.split())
    assert "!90.00  of 20" in drawn
