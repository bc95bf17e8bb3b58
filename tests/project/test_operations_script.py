"""The table of operations beside the libraries' timers."""

from __future__ import annotations

import operations


def test_the_table_has_the_time_and_the_spread_of_each_way() -> None:
    ways = {}
    for number, way in enumerate(operations.WAYS):
        ways[way] = {"seconds": (number + 1) * 1e-5, "spread": 0.012, "wall": 0.5}
    record = {
        "device": {"name": "GPU", "simulated": False, "driver": "580"},
        "ended": "2026-11-29T00:00:00+00:00",
        "processes": 3,
        "operations": {"cupy add": ways},
    }
    first, _, head, row, walls = operations.table(record).splitlines()
    assert first.startswith("GPU, driver 580, 2026-11-29, 3 processes")
    assert [way in head for way in operations.WAYS] == [True] * 5
    cells = "10.00 1.2 20.00 1.2 30.00 1.2 40.00 1.2 50.00 1.2"
    assert " ".join(row.split()) == f"cupy add {cells}"
    assert walls.split()[-1] == "0.50"
