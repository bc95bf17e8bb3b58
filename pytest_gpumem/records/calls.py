"""The calls of a test's body, or of a part of it: kernels, copies, and the lines at which the host waits for the device. Exact."""

from __future__ import annotations

from msgspec import field

from pytest_gpumem.records.record import Bytes, Count, Record, Seconds
from pytest_gpumem.records.uses import CopyUse


class WaitLine(Record, frozen=True):
    """A line at which one call makes the host wait."""

    file: str  # As `Site.file`; empty where no Python code ran in the thread that called
    line: Count  # Number of the line
    function: str  # Name of the function; of a thread without Python code the name of the thread
    code: str  # Text of the line; empty if it cannot be read
    call: str  # Call of CUDA, such as "cuStreamSynchronize"
    of: str  # What it waits for: "device", "stream", "event", "copy", "memset", "free", "allocation" or "module"
    count: Count  # Number of calls
    seconds: Seconds = 0.0  # Time that the calls took together
    sure: bool = True  # False for a call that may wait: CUDA promises neither
    allowed: bool = False  # `allow_waits` names the line

    @property
    def place(self) -> str:
        """ "tests/test_a.py:12", or why there is no line."""
        return f"{self.file}:{self.line}" if self.file else f"line unknown ({self.function})"


class Calls(Record, frozen=True):
    """The calls of a test's body, or of a part of it. Calls of the first use of a module, a library or a pool have counts of their own."""

    kernels: Count = 0  # Launched kernels, those of graphs included
    copies: tuple[CopyUse, ...] = ()  # Copies by kind, without times
    memsets: Count = 0  # Memsets
    default_stream: Count = 0
    """Kernels, copies and memsets on the legacy default stream, which waits for other streams."""
    waiting: tuple[
        WaitLine, ...
    ] = ()  # Lines that wait or may wait, in the order of their first call
    strict: bool = False  # `strict_waits`: calls that may wait count as waits
    first_use: dict[str, Count] = field(default_factory=dict)
    """Calls inside a first use, by kind such as "modules", "kernels" and "waits": they depend on what ran before."""
    not_counted: str | None = None  # Why the counts are not known, or not all of them

    @property
    def copied(self) -> int:
        """Number of copies."""
        return sum(copy.count for copy in self.copies)

    @property
    def copied_bytes(self) -> Bytes:
        """Bytes that copies move."""
        return sum(copy.nbytes for copy in self.copies)

    @property
    def lines(self) -> list[WaitLine]:
        """Lines that wait, without those that are allowed."""
        return [wait for wait in self.waiting if not wait.allowed and (wait.sure or self.strict)]

    @property
    def waits(self) -> int:
        """Times that the host waits, at `lines`."""
        return sum(wait.count for wait in self.lines)

    @property
    def any(self) -> bool:
        """True if anything was counted."""
        return bool(self.kernels or self.copies or self.memsets or self.waiting)
