"""`gpumem l2-sweep`: what it makes of the runs of a test."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
from known_devices import H100
from measurements import passing
from msgspec.structs import replace
from processes import Players, process

from pytest_gpumem.commands import l2_sweep
from pytest_gpumem.outcomes import NoAnswer, Outcome, UserError
from pytest_gpumem.records.l2_sweep import OFF, Setting
from pytest_gpumem.records.measurement import Conditions, Limits, Window
from pytest_gpumem.records.row import Row, Verdict
from pytest_gpumem.runs.experiment import ATTEMPTS, Experiment
from pytest_gpumem.runs.processes import HEAD, ProcessRecord, Turn
from pytest_gpumem.units import MiB

STEP = H100.l2_step_bytes
NODEID = "tests/test_table.py::test_lookup"


def row(setting: Setting, seconds: float, label: str = "", **changes: Any) -> Row:
    """A row whose window has a setting."""
    window = (
        Window(8 * MiB, setting.hit_ratio, setting.set_aside, "stream", "persisting", "streaming")
        if setting.set_aside
        else None
    )
    return passing(
        NODEID,
        **{
            "label": label,
            "target": "look up",
            "window": window,
            "placements": ((seconds,),),
            **changes,
        },
    )


class Runs(l2_sweep._Runs):
    """Runs whose rows a function gives for a setting; as the test asks, 4 steps at ratio 1."""

    def __init__(self, rows: Callable[[Setting], list[Row]]) -> None:
        super().__init__(NODEID, Experiment(Players(lambda turn, attempt: []), []))
        self._rows = rows
        self.taken: Counter[Setting | None] = Counter()

    def run(self, setting: Setting | None) -> ProcessRecord:
        self.taken[setting] += 1
        return process(Turn(1, HEAD), self._rows(setting or Setting(4 * STEP, 1.0)))


def latency(setting: Setting) -> float:
    return 1e-3 if setting == Setting(4 * STEP, 1.0) else 1.5e-3 if setting.set_aside else 2e-3


def test_the_best_setting_of_a_row_is_found() -> None:
    runs = Runs(lambda setting: [row(setting, latency(setting))])
    ((key, found),) = l2_sweep._sweeps(runs).items()
    assert (key, found.target, found.window_bytes, found.device) == (
        NODEID,
        "look up",
        8 * MiB,
        H100.name,
    )
    assert found.recommend() == {"set_aside": 4 * STEP, "hit_ratio": 1.0}
    assert found.gain.share == pytest.approx(1.0)
    assert found.notes == ()
    assert runs.taken[None] == 1
    assert runs.taken[OFF] == 5  # once for the map, and in four rounds


def test_rows_without_a_window_are_not_swept_and_the_others_share_the_runs() -> None:
    def rows(setting: Setting) -> list[Row]:
        off = row(OFF, 2e-3, "off")
        return [
            off,
            row(setting, latency(setting), "one"),
            row(setting, 2 * latency(setting), "other"),
        ]

    runs = Runs(rows)
    found = l2_sweep._sweeps(runs)
    assert list(found) == [f"{NODEID}[one]", f"{NODEID}[other]"]
    alone = Runs(lambda setting: [row(setting, latency(setting))])
    l2_sweep._sweeps(alone)
    assert runs.taken == alone.taken


def test_another_size_than_requested_and_conditions_are_noted() -> None:
    largest, shared = H100.persisting_l2_max_bytes, Conditions(other_processes=2)

    def rows(setting: Setting) -> list[Row]:
        granted = Setting(largest, setting.hit_ratio) if setting.set_aside else OFF
        return [
            row(
                granted,
                latency(setting),
                conditions=(Conditions(), shared if setting == OFF else Conditions()),
            )
        ]

    ((_, found),) = l2_sweep._sweeps(Runs(rows)).items()
    driver, doubt = found.notes
    assert driver.startswith(
        "the driver set aside 31.25 MiB for a request of 6.25 MiB, and another size than requested"
    )
    assert doubt == "unreliable measurements, at 1 setting: 2 other processes on the device"


def test_a_setting_at_which_the_test_does_not_measure_ends_the_sweep_with_its_reason() -> None:
    def rows(setting: Setting) -> list[Row]:
        if setting.set_aside:
            return [row(setting, 1e-3)]
        why = "failed before anything was measured: BadWindow: beside another stream"
        return [replace(Row(NODEID, Limits(), Verdict(Outcome.FAIL, why)), failed=True)]

    with pytest.raises(
        NoAnswer,
        match=r"test_lookup has no measurement at off: failed before .* beside another stream",
    ):
        l2_sweep._sweeps(Runs(rows))


def test_a_test_without_a_window_has_nothing_to_sweep() -> None:
    runs = Runs(lambda setting: [row(OFF, 1e-3)])
    with pytest.raises(NoAnswer, match="nothing was swept"):
        l2_sweep._sweeps(runs)
    assert runs.taken == {None: 1}


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        ({}, "there is no test tests/test_table.py::test_lookup"),
        (
            {"error": "ended by SIGSEGV: Segmentation fault"},
            "test_lookup crashed: ended by SIGSEGV: Segmentation fault",
        ),
    ],
)
def test_a_run_without_results_ends_the_sweep_with_its_reason(
    answer: dict[str, Any], said: str
) -> None:
    players = Players(lambda turn, attempt: process(turn, [], attempt, **answer))
    with pytest.raises((UserError, NoAnswer), match=said):
        l2_sweep._Runs(NODEID, Experiment(players, [Turn(1, HEAD)])).run(None)


def test_a_run_that_others_disturbed_runs_again() -> None:
    def answer(turn: Turn, attempt: int) -> ProcessRecord:
        others = Conditions(other_processes=1 if attempt < ATTEMPTS else 0)
        return process(
            turn,
            [row(OFF, 1e-3, conditions=(others, others))],
            attempt,
            finished=frozenset({NODEID}),
        )

    players = Players(answer)
    assert (
        l2_sweep._Runs(NODEID, Experiment(players, [Turn(1, HEAD)])).run(None).attempt == ATTEMPTS
    )
    assert players.early
