"""Explanations made again from evidence that was taken on a GPU: whatever `explain_proof.py --keep` has left in tests/data/explain.

`expected.json` says what was named first on that day. Rules have changed since then, so what a case holds to is what was planted.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from pytest_gpumem.commands.explain import explanations
from pytest_gpumem.explain.causes import Explanation, Note
from pytest_gpumem.explain.evidence import load
from pytest_gpumem.explain.text import note_text, sentence
from pytest_gpumem.records.row import UNEXPLAINED

KEPT = Path(__file__).parents[2] / "data" / "explain"
LARGEST = 200 * 1024
CASES = sorted(folder for folder in KEPT.iterdir() if folder.is_dir())


def test_the_folder_holds_cases_and_nothing_else() -> None:
    for folder in CASES:
        assert sorted(path.name for path in folder.iterdir()) == [
            "base.json",
            "expected.json",
            "head.json",
        ]
        assert all(path.stat().st_size <= LARGEST for path in folder.iterdir())
    assert [path.name for path in KEPT.iterdir() if path.is_file()] == ["README.md"]


def explained(folder: Path) -> Explanation:
    (found,) = explanations(
        *(load(str(folder / f"{side}.json")) for side in ("base", "head"))
    ).values()
    return found


@pytest.mark.parametrize("folder", [pytest.param(folder, id=folder.name) for folder in CASES])
def test_what_was_planted_is_named_first_without_a_gpu(folder: Path) -> None:
    expected = json.loads((folder / "expected.json").read_text(encoding="utf-8"))
    found = explained(folder)
    planted = expected["planted"]
    if planted == []:
        assert found.causes == ()
    elif planted is not None and expected["right"]:
        assert found.first in planted
    else:
        assert found.first == expected["first"]
    if found.first is not None:
        told = sum(cause.seconds for cause in found.causes) + found.unexplained
        assert told == pytest.approx(found.slow_down.seconds)
        assert found.first == UNEXPLAINED or found.causes[0].rule == found.first


TOLD: dict[str, tuple[tuple[str, str], ...]] = {
    # Two causes were planted. The records' unused seventh field is a sixth more of what is read, the array of distances twice that.
    "kmeans_records": (
        (
            "more bytes",
            "DeviceReduceKernel reads 27.89 MiB more, assign_records writes 27.13 MiB more",
        ),
        (
            "access pattern",
            "assign_records: sectors per load 4 → 28: stride 7; L1 keeps a part from L2, which is asked for 16.7 % more",
        ),
    ),
    # The second is more data in a worse pattern, which these counters do not tell from a worse pattern alone; so it says so.
    "gated_residual": (
        ("fewer threads", "the launch fills 12.5 % of the device's threads where it was 50 %"),
        ("access pattern", "asked for 34.1 % more, and whether that is more data was not counted"),
    ),
    "embedding_bags": (
        ("L2 misses", "DRAM bytes +101 % (L2 hit rate 59 → 27 %) with as much to move"),
    ),
    "kepler_steps": (),
    "misaligned_by_one": (
        ("access pattern", "sectors per store 4 → 5: misaligned, each warp touches a sector more"),
    ),
    "stride_two": (
        ("access pattern", "stride 2"),
        ("L2 misses", "because sectors that stores fill in part are read first"),
    ),
}


@pytest.mark.parametrize("name", TOLD)
def test_sentences_say_what_the_counters_of_a_gpu_show(name: str) -> None:
    found = explained(KEPT / name)
    assert [cause.rule for cause in found.causes] == [rule for rule, _ in TOLD[name]]
    for cause, (_, words) in zip(found.causes, TOLD[name], strict=True):
        assert words in sentence(cause)


def test_notes_are_short_and_tell_where_to_look() -> None:
    assert explained(KEPT / "kmeans_records").notes == (
        Note("kernels", "assign_planes", "assign_records"),
    )
    (note,) = explained(KEPT / "kepler_steps").notes
    assert (
        "the kernels themselves take longer at about the same bytes and accesses, 255.2 us → 393.3 us"
        in note_text(note)
    )


def test_wider_data_is_more_bytes_where_the_sectors_of_l1_were_counted() -> None:
    """Half of one input's width more: without the count it may as well be coalescing, with it it is not."""
    rules = [cause.rule for cause in explained(KEPT / "gated_residual_sectors").causes]
    assert rules == ["fewer threads", "more bytes"]
