"""Declarations of traffic that contradict themselves."""

from __future__ import annotations

from pytest_gpumem.judging.traffic import two_declarations
from pytest_gpumem.units import MB


def test_two_declarations_of_a_case() -> None:
    assert two_declarations(300, 200, 100) is None
    assert two_declarations(300, 0, 0) is None
    assert two_declarations(310, 200, 100) is None
    more, less = (
        two_declarations(400 * MB, 200 * MB, 100 * MB),
        two_declarations(100 * MB, 200 * MB, 100 * MB),
    )
    assert (
        more
        == "moved= says 381.5 MiB, more than the 286.1 MiB of reads= and writes= (190.7 MiB + 95.37 MiB); moved= counts"
    )
    assert less is not None
    assert "less than" in less
