"""The planted fail-opens fit today's sources."""

from __future__ import annotations

import fail_opens


def test_each_replaces_one_place_of_its_file() -> None:
    for name, old, new in fail_opens.FAIL_OPENS:
        text = (fail_opens.ROOT / "pytest_gpumem" / name).read_text()
        assert (name, old, text.count(old)) == (name, old, 1)
        assert old != new
