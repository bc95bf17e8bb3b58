"""A record keeps every sample once."""

from __future__ import annotations

from typing import Any

from keep_record import kept


def test_samples_stay_where_the_rows_have_them_and_only_there() -> None:
    rows: list[dict[str, Any]] = [
        {"key": "test_a[one]", "measurement": {"placements": [[1.0592000000000003e-05, 2.0]]}},
        {"key": "test_c", "measurement": None},
    ]
    benchmarks = [
        {"fullname": name, "stats": {"mean": 1.5, "data": [1.0, 2.0]}}
        for name in ("test_a[one]", "test_b", "test_c")
    ]
    run: dict[str, Any] = {"version": "5.2.3", "benchmarks": benchmarks, "gpumem": {"rows": rows}}
    record = kept(run)
    assert [("data" in one["stats"]) for one in record["benchmarks"]] == [False, True, True]
    assert all(one["stats"]["mean"] == 1.5 for one in record["benchmarks"])
    assert record["gpumem"]["rows"] == [
        {**rows[0], "measurement": {"placements": [[1.0592e-05, 2.0]]}},
        rows[1],
    ]
    assert record["version"] == "5.2.3"
    assert "data" in run["benchmarks"][0]["stats"]
    some = kept(run, "test_a")
    assert (
        [one["fullname"] for one in some["benchmarks"]]
        == [one["key"] for one in some["gpumem"]["rows"]]
        == ["test_a[one]"]
    )
