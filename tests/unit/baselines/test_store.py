"""The baseline on disk: what enters, what is refused, and that nothing wrong is ever loaded."""

from __future__ import annotations

import json
import re
import stat
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from known_devices import H100

from pytest_gpumem.baselines.store import BaselineError, Store
from pytest_gpumem.records.device import DeviceFacts
from pytest_gpumem.records.measurement import Conditions, Limits, Measurement, Traffic
from pytest_gpumem.records.row import Row
from pytest_gpumem.records.verdict import Comparison, Outcome, Verdict

A100 = replace(H100, name="NVIDIA A100-SXM4-80GB", compute_capability=(8, 0))
SIMULATED = replace(H100, simulated=True)


def row(name: str = "test_triad", *, latency: float = 268e-6, outcome: Outcome = Outcome.PASS, **changes: Any) -> Row:
    measured = {key: changes.pop(key) for key in ("mode", "sampler", "profiled", "conditions") if key in changes}
    measurement = Measurement(
        label="",
        target="triad",
        placements=((latency, latency * 1.001), (latency, latency * 0.999)),
        half_width=1e-7,
        traffic=Traffic(2, 1),
        footprint=3,
        floor=1.28e-6,
        sampler_reason="",
        **{"mode": "clean-cold", "sampler": "graph", "conditions": (Conditions(), Conditions()), **measured},
    )
    given = {
        "nodeid": f"tests/test_a.py::{name}",
        "limits": Limits(),
        "verdict": Verdict(outcome, "because"),
        "measurement": measurement,
    }
    return Row(**{**given, **changes})


def files(folder: Path) -> list[Path]:
    return sorted(p for p in folder.rglob("*") if p.is_file())


def test_what_was_saved_is_loaded_oldest_first(tmp_path: Path) -> None:
    store = Store(tmp_path, H100)
    first, second = row(latency=268e-6), row(latency=269e-6)
    one = store.save([first, row("test_copy")], "abc123")
    assert one.path is not None
    # Names sort by time only down to a second.
    one.path.rename(one.path.with_name("20200101T000000Z-abc123-x.json"))
    store.save([second], None)
    baseline = store.load()
    assert baseline.rows[first.key] == (first, second)
    assert len(baseline.rows["tests/test_a.py::test_copy"]) == 1
    assert (baseline.processes, baseline.note) == (2, None)


def test_the_file(tmp_path: Path) -> None:
    saved = Store(tmp_path, H100).save([row()], "feature/x y-0123456789abcdef", {"mode": "clean-cold"})
    assert saved.path is not None
    assert files(tmp_path) == [saved.path]
    assert saved.path.parent == tmp_path / H100.key / "gpumem"
    assert "-feature-x-y-" in saved.path.name
    written = json.loads(saved.path.read_text())
    assert written["revision"] == "feature/x y-0123456789abcdef"
    assert written["utc"].endswith("+00:00")
    assert written["settings"] == {"mode": "clean-cold"}
    assert written["schema"] == 1
    # Shared like any file of the repository, not the owner's alone.
    other = tmp_path / "other"
    other.touch()
    assert stat.S_IMODE(saved.path.stat().st_mode) == stat.S_IMODE(other.stat().st_mode)


def test_writers_of_the_same_second_do_not_meet(tmp_path: Path) -> None:
    with ThreadPoolExecutor(8) as pool:
        saved = list(pool.map(lambda _: Store(tmp_path, H100).save([row()], "abc"), range(24)))
    assert len({s.path for s in saved}) == 24
    assert Store(tmp_path, H100).load().processes == 24


def test_readers_never_see_half_a_file(tmp_path: Path) -> None:
    """What a writer has not finished, or was killed over, carries a temporary name."""
    store = Store(tmp_path, H100)
    store.save([row()], None)
    (tmp_path / H100.key / "gpumem" / "20260101T000000Z-abc-x.tmp").write_text('{"schema": 1, "dev')
    assert store.load().processes == 1


def test_a_failed_write_leaves_nothing_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.replace", full)
    with pytest.raises(BaselineError, match="cannot write the baseline: No space left on device"):
        Store(tmp_path, H100).save([row()], None)
    assert files(tmp_path) == []


def test_nothing_accepted_is_said(tmp_path: Path) -> None:
    assert Store(tmp_path, H100).save([], None).lines() == ["no row was accepted"]


def test_a_folder_that_cannot_be_made_is_said(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(BaselineError, match="cannot write the baseline"):
        Store(tmp_path / "file", H100).save([row()], None)


THROTTLED = (Conditions(), Conditions(throttle_reasons=("sw_power_cap",)))


def change(delta: float, processes: int) -> Verdict:
    return Verdict(Outcome.INCONCLUSIVE, "because", Comparison(delta, -0.02, 0.02, 0.03, processes))


@pytest.mark.parametrize(
    ("refused", "why"),
    [
        (row(failed=True), "its test failed"),
        (row(outcome=Outcome.FAIL), "FAIL: because"),
        (row(outcome=Outcome.SUSPECT), "SUSPECT: because"),
        (row(outcome=Outcome.UNRELIABLE), "UNRELIABLE: because"),
        (row(outcome=Outcome.INCONCLUSIVE), "INCONCLUSIVE: because"),
        (row(verdict=change(0.006, 1), limits=Limits(max_regression="1%")), "INCONCLUSIVE: because"),
        (row(verdict=change(0.001, 3), limits=Limits(max_regression="1%")), "INCONCLUSIVE: because"),
        (row(profiled=True), "under a profiler"),
        (row(conditions=THROTTLED), r"under throttling \(sw_power_cap\)"),
        (row(measurement=None), "nothing was measured"),
        (row(verdict=Verdict(Outcome.PASS, "", simulated=True)), "it is simulated"),
    ],
)
def test_what_never_enters(tmp_path: Path, refused: Row, why: str) -> None:
    store = Store(tmp_path, H100)
    saved = store.save([refused], "abc")
    assert (saved.path, saved.accepted) == (None, ())
    assert [r for r, _ in saved.refused] == [refused]
    assert re.search(why, saved.refused[0][1])
    assert files(tmp_path) == []


@pytest.mark.parametrize(
    "accepted",
    [
        row(),
        row(outcome=Outcome.NO_BASELINE),
        row(verdict=change(0.004, 1), limits=Limits(max_regression="1%")),
        row(verdict=change(-0.10, 2), limits=Limits(max_regression="1%")),
    ],
)
def test_what_enters(tmp_path: Path, accepted: Row) -> None:
    """INCONCLUSIVE too, while one or two processes are too few to decide: else they would stay too few for ever."""
    store = Store(tmp_path, H100)
    saved = store.save([accepted, row("test_slow", outcome=Outcome.FAIL)], "abc")
    assert saved.accepted == (accepted,)
    assert [r.nodeid for r, _ in saved.refused] == ["tests/test_a.py::test_slow"]
    assert store.load().rows == {accepted.key: (accepted,)}
    assert saved.lines() == [f"1 row accepted into {saved.path}", "refused tests/test_a.py::test_slow: FAIL: because"]


def test_one_process_counts_once(tmp_path: Path) -> None:
    saved = Store(tmp_path, H100).save([row(), row(latency=1e-3)], None)
    assert len(saved.accepted) == 1
    assert saved.refused[0][1] == "another row of this run has the same key"


def test_only_the_same_mode_compares(tmp_path: Path) -> None:
    store = Store(tmp_path, H100)
    store.save([row()], None)
    store.save([row(mode="hot")], None)
    baseline = store.load()
    key = row().key
    assert [m.mode for m in baseline.history(key, "clean-cold").measurements] == ["clean-cold"]
    assert [m.mode for m in baseline.history(key, "hot").measurements] == ["hot"]
    other = baseline.history(key, "dirty-cold")
    assert other.measurements == ()
    assert other.reason == "its rows are clean-cold and hot; this one is dirty-cold"
    unknown = baseline.history("tests/test_a.py::test_new", "hot")
    assert unknown.reason == "none of the 2 accepted processes holds tests/test_a.py::test_new"


def test_a_missing_baseline_is_said(tmp_path: Path) -> None:
    baseline = Store(tmp_path / "nowhere", H100).load()
    assert (dict(baseline.rows), baseline.processes) == ({}, 0)
    assert baseline.note == f"no baseline of {H100.key} in {tmp_path / 'nowhere'}"
    assert baseline.history("x", "hot").reason == baseline.note


def test_another_devices_baseline_is_said_and_not_used(tmp_path: Path) -> None:
    Store(tmp_path, A100).save([row()], None)
    Store(tmp_path, SIMULATED).save([row(verdict=Verdict(Outcome.PASS, "", simulated=True))], None)
    baseline = Store(tmp_path, H100).load()
    assert dict(baseline.rows) == {}
    assert baseline.note is not None
    assert baseline.note.endswith(f"there are baselines of {A100.key}, {SIMULATED.key}, which do not compare")


def moved(tmp_path: Path, facts: DeviceFacts, to: DeviceFacts) -> Path:
    simulated = Verdict(Outcome.PASS, "", simulated=facts.simulated)
    saved = Store(tmp_path, facts).save([row(verdict=simulated)], None).path
    assert saved is not None
    target = tmp_path / to.key / "gpumem" / saved.name
    target.parent.mkdir(parents=True)
    return saved.rename(target)


def test_a_file_of_another_gpu_is_refused(tmp_path: Path) -> None:
    file = moved(tmp_path, A100, H100)
    with pytest.raises(BaselineError) as refused:
        Store(tmp_path, H100).load()
    assert str(refused.value) == f"{file}: of {A100.key}, this device is {H100.key}"


@pytest.mark.parametrize(
    ("of", "to", "words"), [(SIMULATED, H100, "of a simulated device, this one is real"), (H100, SIMULATED, "of a real")]
)
def test_simulated_and_real_never_meet(tmp_path: Path, of: DeviceFacts, to: DeviceFacts, words: str) -> None:
    moved(tmp_path, of, to)
    with pytest.raises(BaselineError, match=words):
        Store(tmp_path, to).load()


def spoilt(tmp_path: Path, change: Any) -> Store:
    store = Store(tmp_path, H100)
    path = store.save([row()], None).path
    assert path is not None
    content = json.loads(path.read_text())
    change(content)
    path.write_text(json.dumps(content))
    return store


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda c: c.update(schema=2), r"\$\.schema: 2; this version reads 1"),
        (lambda c: c["rows"][0].update(failed=True), r"\$\.rows\[0\] does not belong into a baseline: its test failed"),
        (lambda c: c["rows"][0]["verdict"].update(outcome="FAIL"), "does not belong into a baseline: FAIL"),
        (lambda c: c["rows"][0]["measurement"].update(profiled=True), "under a profiler"),
        (lambda c: c["rows"].append(c["rows"][0]), "holds tests/test_a.py::test_triad twice"),
        (lambda c: c["rows"][0]["measurement"].update(placements=[[float("nan")]]), "nan is not a finite number"),
        (lambda c: c.pop("rows"), r"\$\.rows: missing"),
    ],
)
def test_a_file_that_was_tampered_with_is_refused(tmp_path: Path, change: Any, words: str) -> None:
    store = spoilt(tmp_path, change)
    with pytest.raises(BaselineError, match=words) as refused:
        store.load()
    assert str(refused.value).startswith(str(files(tmp_path)[0]))
    assert "\n" not in str(refused.value)


def test_a_folder_with_a_files_name_is_refused(tmp_path: Path) -> None:
    (tmp_path / H100.key / "gpumem" / "x.json").mkdir(parents=True)
    with pytest.raises(BaselineError, match=r"x\.json: Is a directory"):
        Store(tmp_path, H100).load()


def placed(folder: Path, content: bytes) -> Store:
    place = folder / H100.key / "gpumem"
    place.mkdir(parents=True, exist_ok=True)
    (place / "20260101T000000Z-abc-x.json").write_bytes(content)
    return Store(folder, H100)


@pytest.mark.parametrize("content", [b"", b"{", b"null", b"[]", b"\xff\xfe", b"[" * 100_000, b"1" * 10_000, b'{"schema": 1}'])
def test_junk_is_refused(tmp_path: Path, content: bytes) -> None:
    with pytest.raises(BaselineError, match=r"20260101T000000Z-abc-x\.json: "):
        placed(tmp_path, content).load()


@given(st.binary(max_size=200) | st.text(alphabet='{}[]":,0123456789.eE-schemadvictrowulsNaInfty ', max_size=60).map(str.encode))
@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_junk_never_loads_silently(tmp_path: Path, content: bytes) -> None:
    with pytest.raises(BaselineError):
        placed(tmp_path, content).load()


@given(st.data())
@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_a_damaged_file_is_refused_or_whole(tmp_path: Path, data: st.DataObject) -> None:
    """Cut at any place or with any byte replaced: refused, or still a document whose rows may be in a baseline."""
    good = tmp_path / "good"
    if not good.exists():
        path = Store(tmp_path / "made", H100).save([row()], None).path
        assert path is not None
        good.write_bytes(path.read_bytes())
    content = good.read_bytes()
    place = data.draw(st.integers(0, len(content) - 1))
    cut = data.draw(st.booleans())
    damaged = content[:place] if cut else content[:place] + data.draw(st.binary(min_size=1, max_size=1)) + content[place + 1 :]
    store = placed(tmp_path, damaged)
    if cut:
        with pytest.raises(BaselineError):
            store.load()
        return
    try:
        baseline = store.load()
    except BaselineError:
        return
    assert [len(rows) for rows in baseline.rows.values()] == [1]


def test_a_slower_row_stays_out_also_without_a_limit(tmp_path: Path) -> None:
    slower = replace(
        row(), verdict=Verdict(Outcome.PASS, "no limit set", Comparison(delta=0.12, low=0.11, high=0.13, resolvable=0.01, processes=3))
    )
    saved = Store(tmp_path, H100).save([slower], None)
    assert saved.path is None
    assert "slower than the baseline by 12.00%" in saved.refused[0][1]
