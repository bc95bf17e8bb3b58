"""The footprint of a test: how much memory of the GPU it takes, keeps and reserves, by library and
by kind of memory."""

from __future__ import annotations

from typing import Literal

from pytest_gpumem.records import ByteChange, Bytes, Count, Record

MemoryPlace = Literal["device", "managed", "pinned"]
"""Memory of the GPU, managed memory, and page-locked memory of the host, allocated or
registered."""

# Values of `MemoryUse.library` beside names of libraries:
FIXTURES = "gpumem"  # buffers that a test gets from fixtures of pytest-gpumem
DRIVER = "CUDA"  # allocations of the driver that no pool made: raw CUDA, Numba, cuda.core
GRAPHS = "CUDA graphs"  # memory that CUDA graphs allocate when they run


class WaitLine(Record, frozen=True):
    """A line at which a call of the driver makes the host wait."""

    file: str
    """Relative to pytest's root folder where it lies in it; empty where no Python code ran in the
    thread that called."""
    line: Count  # Number of the line
    function: str  # Name of the function; of a thread without Python code the name of the thread
    call: str  # Call of the driver, such as "cuStreamSynchronize"
    count: Count  # Number of calls


class Waits(Record, frozen=True):
    """The waits of a test's body."""

    lines: tuple[WaitLine, ...] = ()
    """In the order of their first wait, without those of `allow_waits`."""
    not_read: str | None = None  # Why they are not known

    @property
    def count(self) -> int:
        """Times that the host waits."""
        return sum(line.count for line in self.lines)


class MemoryUse(Record, frozen=True):
    """Memory of one kind that a library took. Memory inside a pool counts once: where it is used,
    and else as reserved."""

    library: str
    """Who allocated: "CuPy", "PyTorch", "CUDA" for the driver itself, "gpumem" for buffers of the
    fixtures."""
    kind: MemoryPlace  # Where the memory lies
    peak: Bytes = 0  # Most bytes in use at once, above those before the test
    kept: ByteChange = 0
    """Bytes in use at the end, above those before the test. Below 0 if it freed earlier memory."""
    allowed: Bytes = 0  # Bytes in use at the end besides, from lines that `allow_kept` names
    reserved: ByteChange = 0
    """Bytes that the library's pool holds at the end and nobody uses, above those before."""
    allocations: Count = 0  # Number of allocations
    largest: Bytes = 0  # Bytes of the largest allocation


class Footprint(Record, frozen=True):
    """The memory that a test took, or a labelled part of it. Work of the harness does not count."""

    peak: Bytes  # Most bytes of device memory in use at once, above those before the test
    uses: tuple[MemoryUse, ...] = ()  # By library and kind; what was not touched is missing
    driver_watched: bool = False  # Each allocation of the driver was reported
    peak_bound: Bytes | None = None
    """The most that the peak can be, where that of a library is not known."""
    bound: Bytes | None = None
    """If the driver was not watched: bytes by which the free memory of the GPU shrank beyond what
    is known, other processes included."""
    watched: tuple[str, ...] = ()  # Sources that were read, such as "CUPTI", "CuPy", "PyTorch"
    not_watched: tuple[str, ...] = ()  # Parts that were not recorded, each with the reason
    further_peaks: tuple[Bytes, ...] = ()  # `peak` of further processes of this run
    further_kept: tuple[Bytes, ...] = ()  # `kept` of the same processes
    ended: bool = True
    """False while the test still runs: what it keeps and reserves is not known yet."""
    waits: Waits | None = None  # Waits of the test's body; None where they were not to be read

    @property
    def kept(self) -> int:
        """Bytes of all kinds in use at the end beyond those before. A library that uses less than
        before does not make up for others."""
        return sum(max(0, use.kept) for use in self.uses)

    @property
    def reserved(self) -> int:
        """Bytes of all kinds that pools hold at the end and nobody uses, above those before."""
        return sum(max(0, use.reserved) for use in self.uses)

    @property
    def allocations(self) -> int:
        """Number of allocations of all kinds."""
        return sum(use.allocations for use in self.uses)

    @property
    def largest(self) -> int:
        """Bytes of the largest allocation of any kind."""
        return max((use.largest for use in self.uses), default=0)

    @property
    def pinned_peak(self) -> int:
        """Most page-locked bytes: the sum of the libraries' peaks."""
        return sum(use.peak for use in self.uses if use.kind == "pinned")

    @property
    def managed_peak(self) -> int:
        """Most managed bytes: the sum of the libraries' peaks."""
        return sum(use.peak for use in self.uses if use.kind == "managed")
