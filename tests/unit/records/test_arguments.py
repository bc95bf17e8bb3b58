"""Arguments of kernels as text, without addresses."""

from __future__ import annotations

import re
import struct
from typing import Any

from pytest_gpumem.records.what_ran import PATTERN, argument_text

DEVICE, MANAGED = 0x7F3A_0000_0000, 0x7F3B_0000_0000


def memory(address: int) -> str | None:
    kinds = {DEVICE: "device", MANAGED: "managed"}
    return next((kind for begin, kind in kinds.items() if begin <= address < begin + 4096), None)


def text(layout: str, *values: Any, offset: int = 0) -> str:
    return argument_text(struct.pack(layout, *values), offset, memory)


def test_a_pointer_is_told_by_its_memory_and_a_number_by_its_words() -> None:
    for layout, value, expected in [
        ("<Q", DEVICE + 512, "device -"),
        ("<Q", MANAGED, "managed -"),
        ("<Q", 1000, "3e8 0"),
        ("<q", -1, "ffffffff ffffffff"),
        ("<f", 1.0, "3f800000"),
        ("<b", 7, "7"),
    ]:
        assert text(layout, value) == expected, (layout, value, expected)
        assert re.search(PATTERN, expected), (layout, value, expected)


def test_pointers_of_a_struct_lie_where_they_are_aligned() -> None:
    assert text("<QQQ", 7, DEVICE, 0) == "7 0 device - 0 0"
    assert "device" not in text("<iQ", 1, DEVICE)
    assert "device" in text("<iQ", 1, DEVICE, offset=4)
