"""The reasons why an adopted time differs from the time of a library's timer."""

from __future__ import annotations

import pytest
from adopted_times import reason, table


def row(peer: str, seconds: float | None, there: float, launch: float) -> dict[str, object]:
    difference = None if seconds is None else seconds / there - 1
    found = {
        "test": "test_hot[add]",
        "peer": peer,
        "seconds": seconds,
        "peer_seconds": there,
        "host_seconds": launch,
    }
    return {**found, "difference": difference}


@pytest.mark.parametrize(
    ("peer", "seconds", "there", "launch", "expected"),
    [
        ("torch.utils.benchmark", 100e-6, 102e-6, 10e-6, ""),
        ("torch.utils.benchmark", 2e-6, 11e-6, 10e-6, "launch outlasts the GPU"),
        ("torch.utils.benchmark", 100e-6, 110e-6, 10e-6, "not explained"),
        (
            "triton.testing.do_bench",
            9e-6,
            10e-6,
            17e-6,
            "not explained",
        ),  # the launch hides behind the fill
        ("triton.testing.do_bench", 90e-6, 140e-6, 120e-6, "launch outlasts the GPU"),
        ("cupyx.profiler.benchmark", 100e-6, 120e-6, 10e-6, "launch inside its events"),
    ],
)
def test_a_difference_has_a_reason(
    peer: str, seconds: float, there: float, launch: float, expected: str
) -> None:
    assert reason(row(peer, seconds, there, launch)) == expected


def test_the_table_has_what_was_not_measured() -> None:
    record = {
        "device": {"name": "H200", "driver": "580"},
        "versions": {"torch": "2.11.0"},
        "rows": [
            row("triton.testing.do_bench", None, 1e-6, 2e-6),
            row("triton.testing.do_bench", 1e-6, 1e-6, 2e-6),
        ],
    }
    first, _, _, *rows = table(record).splitlines()
    assert first == "H200, driver 580, torch 2.11.0"
    assert [line.split()[1:-1] for line in rows] == [
        ["2.00", "not", "measured", "1.00"],
        ["2.00", "1.00", "+0.0%", "1.00"],
    ]
