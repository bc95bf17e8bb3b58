"""The planted fail-opens fit today's sources."""

from __future__ import annotations

import fail_opens
import pytest


@pytest.mark.parametrize(("name", "old", "new"), fail_opens.FAIL_OPENS)
def test_each_replaces_one_place_of_its_file(name: str, old: str, new: str) -> None:
    assert (fail_opens.ROOT / "pytest_gpumem" / name).read_text().count(old) == 1
    assert old != new
