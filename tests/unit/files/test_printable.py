"""What is printed in place of characters that do not show."""

from __future__ import annotations

import msgspec

from pytest_gpumem.printable import printable


class Record(msgspec.Struct, frozen=True):
    name: str
    samples: tuple[float, ...] = (1.0, 2.0)
    inner: Record | None = None


def test_characters_that_do_not_show_are_escapes() -> None:
    assert (
        printable("a\n\x1b[2J\x9b\u202e\u2028\udcff\0é b")
        == r"a\n\x1b[2J\x9b\u202e\u2028\udcff\x00é b"
    )
    assert printable("a b\\n") == "a b\\n"


def test_the_text_in_a_record() -> None:
    record = Record("a", inner=Record("b\n"))
    shown = printable({"x\r": [record]})
    assert shown == {"x\\r": [Record("a", inner=Record("b\\n"))]}
    assert record.inner == Record("b\n")
    clean = Record("a")
    assert printable(clean) is clean
