"""The baseline on disk: what enters, what is refused, and that nothing wrong is ever loaded."""

from __future__ import annotations

import json
import os
import re
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from cases import naming
from known_devices import H100
from msgspec.structs import replace
from stored_rows import A100, SIMULATED, row

from pytest_gpumem.baselines.store import Store, digest, reduced
from pytest_gpumem.outcomes import Outcome, UserError
from pytest_gpumem.records.device import Conditions, DeviceFacts
from pytest_gpumem.records.footprint import Footprint, MemoryUse
from pytest_gpumem.records.limits import Limits
from pytest_gpumem.records.measurement import Measurement
from pytest_gpumem.records.row import Row, Verdict
from pytest_gpumem.revisions import Ancestry


def files(folder: Path) -> list[Path]:
    return sorted(p for p in folder.rglob("*") if p.is_file())


def test_what_was_saved_is_loaded_oldest_first(tmp_path: Path) -> None:
    store = Store(tmp_path, H100)
    first, second = (
        row(latency=268e-6, overhead=2e-6),
        row(latency=269e-6, limits=Limits(max_regression="1%")),
    )
    one = store.save([first, row("test_copy")], "abc123")
    assert one.path is not None
    # By the time in the file, down to a microsecond; names know a second.
    one.path.rename(one.path.with_name("20990101T000000Z-abc123-x.json"))
    store.save([second], None)
    baseline = store.load()
    stored = baseline.rows[first.key]
    assert [one.measurement for one in stored] == [
        kept(first),
        kept(second),
    ]
    assert [(one.nodeid, one.key, one.limits) for one in stored] == [
        (first.nodeid, first.key, first.limits),
        (first.nodeid, first.key, Limits(max_regression="1%")),
    ]
    assert [(one.file.revision, one.file.device) for one in stored] == [
        ("abc123", H100),
        (None, H100),
    ]
    assert len(baseline.rows["tests/test_a.py::test_copy"]) == 1
    assert (baseline.processes, baseline.note, baseline.left_out) == (2, None, None)


def test_a_footprint_is_stored_beside_times_and_without_them(tmp_path: Path) -> None:
    """All of it that a comparison needs: without remarks."""
    use = MemoryUse("CuPy", "device", peak=4096, kept=512, allocations=3)
    full = Footprint(
        4096,
        (use,),
        driver_watched=True,
        watched=("CUPTI",),
    )
    timed, untimed = (
        row(footprint=full),
        row("test_copy", measurement=None, footprint=full, label="part"),
    )
    store = Store(tmp_path, H100)
    for peak in (4096, 5120):
        store.save([timed, replace(untimed, footprint=replace(full, peak=peak))], f"abc{peak}")
    baseline = store.load()
    stored = baseline.rows[untimed.key]
    assert [(run.nodeid, run.label, run.file.revision) for run in stored] == [
        (untimed.nodeid, "part", "abc4096"),
        (untimed.nodeid, "part", "abc5120"),
    ]
    bare = replace(full)
    assert [run.footprint for run in stored] == [bare, replace(bare, peak=5120)]
    assert [run.footprint for run in baseline.rows[timed.key]] == [bare, bare]


def kept(stored: Row) -> Measurement:
    assert stored.measurement is not None
    return reduced(stored.measurement)


def test_what_is_kept_of_a_measurement(tmp_path: Path) -> None:
    """All that a comparison asks of it, and no samples."""
    store = Store(tmp_path, H100)
    sampled = row(overhead=2e-6, notes=("a note",))
    store.save([sampled], None)
    (stored,) = store.load().rows[sampled.key]
    before, after = sampled.measurement, stored.measurement
    assert before is not None
    assert after is not None
    assert after.placements == tuple((median,) for median in before.medians)
    kept = "latency medians half_width overhead mode sampler target moved_bytes window conditions"
    for name in kept.split():
        assert getattr(after, name) == getattr(before, name)
    assert (after.notes, after.sampler_reason) == ((), "")


def test_the_file(tmp_path: Path) -> None:
    saved = Store(tmp_path, H100).save([row()], "feature/x y-0123456789abcdef", "clean-cold")
    assert saved.path is not None
    assert files(tmp_path) == [saved.path]
    assert saved.path.parent == tmp_path / H100.key / "gpumem"
    assert "-feature-x-y-" in saved.path.name
    written = json.loads(saved.path.read_text())
    content = written["content"]
    assert content["revision"] == "feature/x y-0123456789abcdef"
    assert content["utc"].endswith("Z")
    assert content["mode"] == "clean-cold"
    assert content["written_by"].startswith("pytest-gpumem ")
    assert (written["schema"], written["sha256"]) == (5, digest(content))
    assert [line for line in saved.path.read_text().splitlines() if '"nodeid"' in line] == [
        json.dumps(content["rows"][0])
    ]
    # Shared like any file of the repository, not the owner's alone.
    other = tmp_path / "other"
    other.touch()
    assert stat.S_IMODE(saved.path.stat().st_mode) == stat.S_IMODE(other.stat().st_mode)


def test_a_failed_write_leaves_nothing_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.replace", full)
    with pytest.raises(UserError, match="cannot write the run: No space left on device"):
        Store(tmp_path, H100).save([row()], None)
    assert files(tmp_path) == []


THROTTLED = (Conditions(), Conditions(throttle_reasons=("sw_power_cap",)))
CROWDED = (Conditions(), Conditions(other_processes=1))


def test_what_never_enters(tmp_path_factory: pytest.TempPathFactory) -> None:
    for refused, why in [
        (row(failed=True), "its test failed"),
        (row(outcome=Outcome.FAIL), "FAIL: because"),
        (row(profiled=True), "a profiler was attached"),
        (row(conditions=THROTTLED), r"throttled at the last samples \(sw_power_cap\)"),
        (row(conditions=CROWDED), "1 other process on the device"),
        (row(measurement=None), "nothing was measured"),
        (row(verdict=Verdict(Outcome.PASS, "", simulated=True)), "it is simulated"),
    ]:
        tmp_path = tmp_path_factory.mktemp("case")
        store = Store(tmp_path, H100)
        saved = store.save([refused], "abc")
        assert (saved.path, saved.saved) == (None, 0), refused
        assert [r for r, _ in saved.refused] == [refused], refused
        assert re.search(why, saved.refused[0][1]), refused
        assert files(tmp_path) == [], refused


def test_another_devices_baseline_is_said_and_not_used(tmp_path: Path) -> None:
    Store(tmp_path, A100).save([row()], None)
    Store(tmp_path, SIMULATED).save([row(verdict=Verdict(Outcome.PASS, "", simulated=True))], None)
    baseline = Store(tmp_path, H100).load()
    assert dict(baseline.rows) == {}
    assert baseline.note is not None
    assert baseline.note.endswith(
        f"there are baselines of {A100.key}, {SIMULATED.key}, which do not compare"
    )


def moved(tmp_path: Path, facts: DeviceFacts, to: DeviceFacts) -> Path:
    simulated = Verdict(Outcome.PASS, "", simulated=facts.simulated)
    saved = Store(tmp_path, facts).save([row(verdict=simulated)], None).path
    assert saved is not None
    target = tmp_path / to.key / "gpumem" / saved.name
    target.parent.mkdir(parents=True)
    return saved.rename(target)


def test_simulated_and_real_never_meet(tmp_path_factory: pytest.TempPathFactory) -> None:
    for of, to, words in [
        (SIMULATED, H100, "of simulated-NVIDIA-H100"),
        (H100, SIMULATED, "of NVIDIA-H100"),
    ]:
        tmp_path = tmp_path_factory.mktemp("case")
        with naming(of):
            moved(tmp_path, of, to)
            with pytest.raises(UserError, match=words):
                Store(tmp_path, to).load()


def spoilt(tmp_path: Path, change: Callable[[dict[str, Any]], object], *, signed: bool) -> Store:
    """A store whose only file was changed; `signed`: with a digest that fits."""
    store = Store(tmp_path, H100)
    path = store.save([row()], None).path
    assert path is not None
    file = json.loads(path.read_text())
    change(file["content"])
    if signed:
        file["sha256"] = digest(file["content"])
    path.write_text(json.dumps(file))
    return store


def measured(content: dict[str, Any]) -> dict[str, Any]:
    measurement: dict[str, Any] = content["rows"][0]["measurement"]
    return measurement


def test_a_file_that_was_edited_is_refused(tmp_path_factory: pytest.TempPathFactory) -> None:
    for change in [
        lambda c: measured(c).update(placements=[[1e-3], [1e-3]]),
        lambda c: c.pop("rows"),
        lambda c: c.update(more=1),
    ]:
        tmp_path = tmp_path_factory.mktemp("case")
        store = spoilt(tmp_path, change, signed=False)
        before = files(tmp_path)[0].read_bytes()
        assert one_line(tmp_path, store) == (
            "its content does not fit its sha256: it was edited by hand, or is damaged; restore the file from a copy, or delete it"
        ), change
        assert files(tmp_path)[0].read_bytes() == before, change


def one_line(tmp_path: Path, store: Store) -> str:
    """What is said of the folder's only file."""
    with pytest.raises(UserError) as refused:
        store.load()
    (file,) = files(tmp_path)
    assert str(refused.value).startswith(f"{file}: ")
    assert "\n" not in str(refused.value)
    return str(refused.value).removeprefix(f"{file}: ")


def test_values_that_cannot_be_are_refused(tmp_path_factory: pytest.TempPathFactory) -> None:
    for change, words in [
        (lambda c: c["rows"].append(c["rows"][0]), "holds tests/test_a.py::test_triad twice"),
        (
            lambda c: measured(c).update(placements=[[-1e-3]]),
            "$.content.rows[0].measurement.placements[0][0]: -0.001; expected",
        ),
        (lambda c: c.update(utc="yesterday"), "$.content.utc: 'yesterday'; invalid"),
        (
            lambda c: c["rows"][0].update(limits={"max_regression": "much"}),
            "$.content.rows[0].limits.max_regression: 'much'",
        ),
        (lambda c: c.pop("id"), "missing required field `id`"),
        (lambda c: c["device"].update(simulated=True), "of simulated-NVIDIA-H100"),
    ]:
        tmp_path = tmp_path_factory.mktemp("case")
        assert words in one_line(tmp_path, spoilt(tmp_path, change, signed=True)), change


def test_a_copy_is_no_second_process(tmp_path: Path) -> None:
    store = Store(tmp_path, H100)
    path = store.save([row()], None).path
    assert path is not None
    path.with_name("20990101T000000Z-copy.json").write_bytes(path.read_bytes())
    with pytest.raises(UserError, match=rf"copy\.json: a copy of {re.escape(path.name)}"):
        store.load()


def placed(folder: Path, content: bytes) -> Store:
    place = folder / H100.key / "gpumem"
    place.mkdir(parents=True, exist_ok=True)
    (place / "20260101T000000Z-abc-x.json").write_bytes(content)
    return Store(folder, H100)


def test_junk_is_refused(tmp_path_factory: pytest.TempPathFactory) -> None:
    for content, words in [
        (b"", "not JSON"),
        (b"{", "this baseline file is corrupt: not JSON"),
        (b"null", "this is no baseline file of this plugin; remove it"),
        (b"\xff\xfe", "not JSON"),
        (b"[" * 100_000, "not JSON"),
        (b'{"schema": 5, "sha256": "", "content": {"x": ' + b"[" * 900 + b"]" * 900 + b"}}", ""),
        (b'{"x": 1}', "this is no baseline file of this plugin; remove it"),
        (b'{"schema": 5, "sha256": "", "content": {"x": 1e999}}', "$.content: Out of range float"),
    ]:
        tmp_path = tmp_path_factory.mktemp("case")
        assert words in one_line(tmp_path, placed(tmp_path, content)), (content, words)


def test_files_of_another_layout_are_left_out_and_named(tmp_path: Path) -> None:
    left_out = "files do not count: of another version of the plugin; save anew, then delete them"
    for layout in (4, 6):
        store = placed(tmp_path, b'{"schema": %d, "content": {}}' % layout)
        (old,) = files(tmp_path)
        assert str(store.load().note).endswith(f" in {tmp_path}: 1 of 1 {left_out}")
        store.save([row()], "main")
        baseline = store.load()
        assert (baseline.processes, baseline.left_out) == (1, f"1 of 2 {left_out}")
        assert old in files(tmp_path)
        for path in files(tmp_path):
            path.unlink()


def test_a_pipe_is_not_waited_for(tmp_path: Path) -> None:
    store = placed(tmp_path, b"{")
    files(tmp_path)[0].unlink()
    os.mkfifo(store.folder / "x.json")
    with pytest.raises(UserError, match=r"x\.json: not a file"):
        store.load()


# Ancestry


def test_only_the_history_that_a_change_is_built_on_counts(tmp_path: Path) -> None:
    store, key = Store(tmp_path, H100), row().key
    for index, revision in enumerate(["main", "main-dirty", "mine", "theirs", "gone", None]):
        store.save([row(latency=(200 + index) * 1e-6)], revision)
    asked = []

    def ancestry(revisions: frozenset[str]) -> Ancestry:
        asked.append(revisions)
        return Ancestry("0123456789abcdef", frozenset({"main"}), frozenset({"gone", "main-dirty"}))

    baseline = store.load(ancestry)
    assert asked == [{"main", "main-dirty", "mine", "theirs", "gone"}]
    (run,) = baseline.rows[key]
    assert run.measurement is not None
    assert run.measurement.latency == pytest.approx(200e-6, rel=1e-3)
    assert baseline.processes == 1
    assert baseline.left_out == (
        "5 of 6 files do not count: of no commit up to 0123456789ab; "
        "3 saved with uncommitted changes, or of no revision of this repository"
    )
    assert store.load().processes == 6


def test_a_file_is_no_baseline(tmp_path: Path) -> None:
    """Not "no baseline": somebody meant a baseline, and every row would pass without one."""
    (tmp_path / "old.json").write_text("{}")
    with pytest.raises(UserError, match=r"old\.json.*: Not a directory"):
        Store(tmp_path / "old.json", H100).load()


def test_what_took_a_folders_place_is_no_empty_baseline(
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    """A share that is not mounted behind a link, say: a NEW row would be green."""
    for kind in ["file", "link"]:
        for depth in [0, 1, 2]:
            tmp_path = tmp_path_factory.mktemp("case")
            with naming(kind, depth):
                root = tmp_path / "shared"
                place = [root, root / H100.key, root / H100.key / "gpumem"][depth]
                place.parent.mkdir(parents=True, exist_ok=True)
                if kind == "file":
                    place.write_text("")
                else:
                    place.symlink_to(tmp_path / "not mounted")
                with pytest.raises(UserError, match=re.escape(str(root))):
                    Store(root, H100).load()
