"""The JSON schema: what is written is read back equal, and nothing else is read."""

from __future__ import annotations

import copy
import json
import math
from typing import Any

import pytest
from cases import naming
from hypothesis import given, settings
from hypothesis import strategies as st
from known_devices import H100
from msgspec.structs import replace

from pytest_gpumem.outcomes import Code, FileError, Outcome
from pytest_gpumem.records.device import Conditions
from pytest_gpumem.records.footprint import Footprint, MemoryUse
from pytest_gpumem.records.limits import Limits
from pytest_gpumem.records.measurement import Measurement, MovedBytes, Repeat
from pytest_gpumem.records.row import Comparison, Omission, PairedChange, Row, Verdict
from pytest_gpumem.records.schema import (
    SCHEMA,
    document,
    document_from_json,
    from_plain,
    row_to_json,
)
from pytest_gpumem.records.what_ran import Migrations, PageCounts

MEASURED = Measurement(
    label="warm",
    target="triad",
    mode="clean-cold",
    sampler="graph",
    sampler_reason="the work can be captured",
    placements=((2.68e-4, 2.69e-4, 2.70e-4), (2.67e-4, 2.68e-4, 2.68e-4)),
    half_width=4e-7,
    moved_bytes=MovedBytes(reads=2 * 2**28, writes=2**28),
    footprint=3 * 2**28,
    floor=1.28e-6,
    conditions=(
        Conditions(sm_clock_hz=1.98e9, throttle_reasons=("sw_power_cap",)),
        Conditions(other_processes=0),
    ),
    migrations=Migrations(
        before=PageCounts(to_host=2**20, causes={"fault": 2**20}),
        launch=PageCounts(
            gpu_faults=24,
            gpu_groups=1,
            gpu_pages=1,
            mapped=0,
        ),
        source="CUPTI",
    ),
    card="GPU-a",
    further=(Repeat((2.68e-4, 2.69e-4), 2e-6),),
)

ROW = Row(
    nodeid="tests/test_a.py::test_triad[1]",
    limits=Limits(max_regression="1%", origin={"max_regression": "marker"}),
    verdict=Verdict(
        Outcome.UNDECIDED,
        "why",
        Comparison(0.001, 0.006, days=2, processes=4, same_code=True, base=2e-4),
        code=Code.NOISY,
        paired=PairedChange(0.001, -0.001, 0.003, 8, 2e-4, 2.002e-4),
    ),
    measurement=MEASURED,
    label="warm",
    range_name="test_triad_1",
    footprint=Footprint(
        peak=3 * 2**20,
        uses=(
            MemoryUse(
                "CuPy",
                "device",
                peak=3 * 2**20,
                kept=4096,
                allocations=2,
                largest=2**21,
            ),
        ),
        driver_watched=True,
        not_watched=("PyTorch: its history is off",),
    ),
)

seconds = st.floats(1e-9, 10.0)
texts = st.text(max_size=8)
finite = st.floats(allow_nan=False, allow_infinity=False)
not_negative = st.floats(0, 1e12)
conditions = st.builds(
    Conditions,
    sm_clock_hz=st.none() | not_negative,
    memory_clock_hz=st.none() | not_negative,
    temperature_c=st.none() | finite,
    power_w=st.none() | not_negative,
    throttle_reasons=st.lists(texts, max_size=2).map(tuple),
    other_processes=st.none() | st.integers(0, 9),
)
verdicts = st.builds(
    Verdict,
    outcome=st.sampled_from(Outcome),
    reason=texts,
    comparison=st.none()
    | st.builds(
        Comparison,
        finite,
        finite,
        st.integers(0, 99),
        st.integers(0, 99),
        st.booleans(),
        st.none() | not_negative,
    ),
    simulated=st.booleans(),
    code=st.none() | st.sampled_from(Code),
)


@st.composite
def rows(draw: st.DrawFn) -> Row:
    label = draw(texts)
    samples = st.lists(seconds, min_size=1, max_size=3).map(tuple)
    measurement = st.builds(
        Measurement,
        label=st.just(label),
        placements=st.lists(samples, min_size=1, max_size=3).map(tuple),
        half_width=st.none() | st.floats(0, 1),
        floor=st.floats(0, 1),
        moved_bytes=st.none()
        | st.builds(MovedBytes, st.integers(0, 2**60), st.integers(0, 2**60), st.booleans()),
        footprint=st.none() | st.integers(0, 2**62),
        conditions=st.tuples(conditions, conditions),
        discarded=st.integers(0, 9),
        notes=st.lists(texts, max_size=2).map(tuple),
        accesses_per_launch=st.none() | st.integers(1, 2**40),
        sectors_per_request=st.none() | st.floats(1, 32),
        requested=st.none() | st.integers(0, 2**62),
    )
    limits = st.builds(Limits, origin=st.dictionaries(texts, texts, max_size=2))
    return draw(
        st.builds(
            Row,
            limits=limits,
            verdict=verdicts,
            measurement=st.none() | measurement,
            label=st.just(label),
        )
    )


@given(rows())
@settings(max_examples=60)
def test_what_is_written_is_read_back_equal(row: Row) -> None:
    text = json.dumps(row_to_json(row), allow_nan=False)
    assert from_plain(json.loads(text), Row) == row


def test_a_document_is_read_back_equal() -> None:
    written = json.loads(
        json.dumps(
            document(H100, [ROW, replace(ROW, measurement=None)], {"mode": "hot", "budget": None})
        )
    )
    assert written["schema"] == SCHEMA
    assert written["simulated"] is False
    read = document_from_json(written)
    assert (read.device, read.rows) == (H100, (ROW, replace(ROW, measurement=None)))
    assert read.settings == {"mode": "hot", "budget": None}


def test_missing_measurements_are_read_back_equal_and_older_files_have_none() -> None:
    missing = (
        Omission("t.py::a", "y", "lost", "its test skipped"),
        Omission("t.py::b", "", "not run", "deselected"),
    )
    written = json.loads(json.dumps(document(H100, [ROW], {}, missing)))
    assert [one["key"] for one in written["missing"]] == ["t.py::a[y]", "t.py::b"]
    assert document_from_json(written).missing == missing
    del written["missing"]
    assert document_from_json(written).missing == ()
    with pytest.raises(FileError, match=r"\$\.missing\[0\]\.status"):
        document_from_json(
            {**written, "missing": [{"nodeid": "a", "label": "", "status": "gone", "reason": ""}]}
        )


def test_readers_find_the_derived_figures() -> None:
    written = row_to_json(ROW)
    assert written["key"] == "tests/test_a.py::test_triad[1][warm]"
    assert written["measurement"]["latency"] == MEASURED.latency
    assert written["measurement"]["bandwidth"] == pytest.approx(3 * 2**28 / MEASURED.latency)
    assert written["measurement"]["latency_per_access"] is None
    chase = row_to_json(replace(ROW, measurement=replace(MEASURED, accesses_per_launch=1000)))[
        "measurement"
    ]
    assert chase["latency_per_access"] == pytest.approx(chase["latency"] / 1000)


def changed(path: list[str | int], value: object) -> dict[str, Any]:
    written = json.loads(json.dumps(row_to_json(ROW)))
    place: Any = written
    for step in path[:-1]:
        place = place[step]
    place[path[-1]] = value
    return written  # type: ignore[no-any-return]


PLACEMENTS = ["measurement", "placements"]


def test_what_does_not_fit_is_refused_with_its_path() -> None:
    cases: list[tuple[list[Any], object, str]] = [
        (["nodeid"], 3, r"\$\.nodeid: 3; expected `str`"),
        (["verdict", "outcome"], "MAYBE", r"\$\.verdict\.outcome: 'MAYBE'; invalid enum"),
        ([*PLACEMENTS, 1, 2], "x", r"\$\.measurement\.placements\[1\]\[2\]: 'x'; expected `float`"),
        (PLACEMENTS, [], r"placements: \[\]; expected `array` of length >= 1"),
        ([*PLACEMENTS, 0, 0], 0.0, r"placements\[0\]\[0\]: 0.0; expected `float` >= 1e-12"),
        (["verdict", "paired", "head"], 0.0, r"paired.head: 0.0; expected `float` >= 1e-12"),
        ([*PLACEMENTS, 0, 0], math.nan, r"placements\[0\]\[0\]: nan is not a finite"),
        (["measurement", "half_width"], -1e-9, "half_width: -1e-09; expected `float` >= 0"),
        (["measurement", "moved_bytes", "reads"], 10**400, r"reads: 1000.*000; expected `int` <= "),
        (["measurement", "further", 0, "medians"], [], r"further\[0\]\.medians: \[\]; expected"),
        (["verdict", "\udcff"], 1, "surrogates not allowed"),
        (
            ["measurement", "migrations", "before", "causes", "fault"],
            -1,
            r"migrations\.before\.causes\[\.\.\.\]: {'fault': -1}; expected",
        ),
        (["measurement", "conditions"], [], r"\$\.measurement\.conditions: "),
    ]
    for path, value, where in cases:
        with naming(path, value, where), pytest.raises(FileError, match=where):
            from_plain(changed(path, value), Row)


def test_a_missing_field_is_refused() -> None:
    for key in ["nodeid", "limits", "verdict"]:
        with naming(key):
            written = row_to_json(ROW)
            del written[key]
            with pytest.raises(FileError, match=rf"\$: Object missing required field `{key}`"):
                from_plain(written, Row)


def test_what_could_not_be_read_is_not_written() -> None:
    for measurement in [
        replace(MEASURED, placements=((math.nan,),)),
        replace(MEASURED, placements=()),
        replace(MEASURED, floor=math.inf),
        replace(MEASURED, half_width=math.nan),
    ]:
        with naming(measurement), pytest.raises(FileError, match=r"\$\.measurement"):
            row_to_json(replace(ROW, measurement=measurement))


def test_a_document_that_does_not_fit_is_refused() -> None:
    cases: list[tuple[str, object, str]] = [
        ("schema", 3, r"\$\.schema: 3; this version reads 2"),
        ("schema", None, r"\$\.schema: missing; this version reads 2"),
        ("simulated", True, r"\$\.simulated: contradicts"),
        ("settings", [], r"\$\.settings: \[\]; expected `object`"),
        ("rows", [3], r"\$\.rows\[0\]: 3; expected `object`"),
        ("device", {}, r"\$\.device: Object missing"),
    ]
    for key, value, where in cases:
        with naming(key, value, where):
            written = {**document(H100, [ROW], {}), key: value}
            with pytest.raises(FileError, match=where):
                document_from_json(json.loads(json.dumps(written)))


def test_a_simulated_row_among_real_ones_is_refused() -> None:
    mixed = document(H100, [ROW, replace(ROW, verdict=replace(ROW.verdict, simulated=True))], {})
    with pytest.raises(FileError, match=r"\$\.rows\[1\]\.verdict\.simulated"):
        document_from_json(mixed)


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3)
    ),
    max_leaves=8,
)


def _places(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    inner = (
        value.items()
        if isinstance(value, dict)
        else enumerate(value)
        if isinstance(value, list)
        else ()
    )
    return [path, *(place for key, v in inner for place in _places(v, (*path, key)))]


WRITTEN = json.loads(json.dumps(document(H100, [ROW], {"mode": "hot"})))


@given(st.sampled_from([p for p in _places(WRITTEN) if p]), json_values)
@settings(max_examples=60)
def test_junk_anywhere_is_refused_or_readable(path: tuple[Any, ...], junk: Any) -> None:
    """Whatever stands in a file: either a `FileError`, or a document that can be written again."""
    spoilt = copy.deepcopy(WRITTEN)
    place = spoilt
    for step in path[:-1]:
        place = place[step]
    place[path[-1]] = junk
    try:
        read = document_from_json(spoilt)
    except FileError as error:
        assert str(error).startswith("$")  # noqa: PT017
    else:
        json.dumps(document(read.device, read.rows, {}), allow_nan=False)
