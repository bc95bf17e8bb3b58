"""The lines of a test's code at which the host waits for the device."""

from __future__ import annotations

from pytest_gpumem.records.record import Count, Record

SHOWN = 5  # lines that a text names


class WaitLine(Record, frozen=True):
    """A line at which one call of the driver makes the host wait."""

    file: str  # As `Site.file`; empty where no Python code ran in the thread that called
    line: Count  # Number of the line
    function: str  # Name of the function; of a thread without Python code the name of the thread
    call: str  # Call of the driver, such as "cuStreamSynchronize"
    count: Count  # Number of calls

    @property
    def place(self) -> str:
        """ "tests/test_a.py:12", or why there is no line."""
        if not self.file:
            return f"line unknown ({self.function})"
        return f"{self.file}:{self.line}"


class Waits(Record, frozen=True):
    """The waits of a test's body."""

    lines: tuple[WaitLine, ...] = ()
    """In the order of their first wait, without those of `allow_waits`."""
    not_read: str | None = None  # Why they are not known

    @property
    def count(self) -> int:
        """Times that the host waits."""
        return sum(line.count for line in self.lines)

    @property
    def text(self) -> str:
        """The lines in words."""
        text = ", ".join(f"{line.place} {line.count} x {line.call}" for line in self.lines[:SHOWN])
        more = len(self.lines) - SHOWN
        if more > 0:
            text += f" and {more} more"
        return text
