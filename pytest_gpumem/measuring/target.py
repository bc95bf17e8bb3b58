"""The target of a measurement: a kernel, a callable, a `Case` or work, by the same record.

How the four differ is in the fields; `target_kernel`, `target_callable`, `target_case` and `works`
fill them in.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import numpy as np

from pytest_gpumem.devices.protocol import Device, Graph, OutOfMemory, Stream
from pytest_gpumem.measuring.bound import BadCall
from pytest_gpumem.memory.buffers import Buffer
from pytest_gpumem.memory.l2 import PersistingStream, idle_set_aside
from pytest_gpumem.records.measurement import MovedBytes
from pytest_gpumem.units import GiB, MiB, parse_bytes


class WrongResult(AssertionError):
    """The result of one launch is not the reference's; no speed is reported for it."""


class NotChecked(Exception):
    """The result of a launch could not be compared; the message is the reason."""


_MEMORY_ERRORS = (
    "out of memory",
    "out_of_memory",
    "cudaerrormemoryallocation",
    "resource_exhausted",
    "_alloc_failed",
    "_allocation_failed",
)
"""What messages contain: of PyTorch, CUDA's driver and runtime, RMM, XLA, cuBLAS, cuFFT, cuDNN,
cuSOLVER, cuSPARSE and cuRAND."""


def out_of_memory(error: Exception) -> bool:
    """Return True for a lack of memory, whichever library raised it; none is imported."""
    if isinstance(error, (MemoryError, OutOfMemory)) or type(error).__name__ == "OutOfMemoryError":
        return True
    if isinstance(error, AssertionError):
        return False
    text = str(error).lower()
    return any(words in text for words in _MEMORY_ERRORS)


def nothing(*_: object) -> None:
    """Do nothing: for targets without inputs to restore or memory to free."""


@dataclass(frozen=True)
class Target:
    """One thing to measure, where it is now."""

    name: str
    kind: Literal["kernel", "callable", "case", "work"]
    stream: Stream  # where it runs
    launch: Callable[[int, Stream], None]  # queues one launch on the buffers of one placement
    places: int = 1  # placements of its buffers that live side by side
    moved_bytes: MovedBytes | None = None  # compulsory bytes of one launch, if known
    footprint: int | None = None  # distinct bytes touched by one launch, if known
    accesses_per_launch: int | None = None  # dependent accesses of one launch
    sectors_per_request: float | None = None
    """Mean sectors of a launch's warp-wide requests, if it makes any and their pattern is known."""
    requested: int | None = None
    """Bytes that the threads of a launch request, repeats counted, if `sectors_per_request` is."""
    host_memory: tuple[tuple[str, str], ...] = ()
    """Name and kind of memory of each argument that is not plain device memory, if known."""
    managed: tuple[Buffer, ...] = ()  # managed buffers whose pages are put back before every sample
    window: PersistingStream | None = None  # the persisting stream, if it runs on one
    notes: tuple[str, ...] = ()  # what a reader of the result must know
    waits: bool = False
    """The host takes part in every launch, as in a copy of pageable memory: no held stream can show
    its time."""
    restores: bool = False
    """Something comes before every launch: launches do not follow each other in a batch."""
    prepare: Callable[[Stream], None] = nothing  # queues what restores changed inputs, untimed
    check: Callable[[], None] | None = None
    """Launches once on poisoned outputs and restored inputs and compares.

    Raises `WrongResult`, or `NotChecked` where memory is short.
    """
    move: Callable[[int, int, np.random.Generator], Target] | None = None
    """Returns the same thing at fresh addresses; None for what stays where it is.

    Takes the number of placements wanted side by side, and the largest number where they are small.
    Raises `OutOfMemory` and leaves everything usable where not even a single placement fits.
    """
    run_on: Callable[[Stream], Target] | None = None
    """Returns the same thing on another stream, for functions whose library sends its work there.

    Raises `BadCall` on a persisting stream, whose window covers its own work alone.
    """
    close: Callable[[], None] = nothing  # frees what the target itself holds

    @property
    def foreign(self) -> bool:
        """True for code of the user, which is not captured unasked: it may do anything."""
        return self.kind in ("callable", "case")

    @property
    def any_stream(self) -> bool:
        """True if launches may go to any stream; else they belong on `stream`."""
        return self.kind == "kernel" and self.window is None and not self.managed


def declared_bytes(name: str, moved: object) -> int | None:
    """The compulsory bytes that a user declares for one launch, or None.
    Raises `BadCall`: `moved`, which the user gave as `name`, is no positive integer.
    Raises `QuantityError`: it is a text, and no size.
    """
    if moved is None:
        return None
    if isinstance(moved, str):
        moved = parse_bytes(moved)
    if isinstance(moved, bool) or not isinstance(moved, (int, np.integer)) or moved <= 0:
        raise BadCall(
            f"{name}={moved!r}; it is the compulsory bytes of one launch, a positive integer or a "
            'size such as "64 MiB"'
        )
    return int(moved)


# Placements

PADDING_STEP = 2 * MiB  # device memory is mapped in pages of 2 MiB: less padding moves nothing
MOST_PADDING = 64  # steps of padding at most, 128 MiB
SMALL_BYTES = 16 * GiB
"""Memory up to which placements beyond the wanted number are made at once: copying their content
takes milliseconds."""
MEMORY_SHARE = 0.5  # share of the free memory that placements side by side may take


def side_by_side(set_bytes: int, wanted: int, most: int, free: int) -> int:
    """Number of placements to make at once; 0 where not even one more fits.
    `set_bytes`: bytes of the buffers of one placement.
    `most`: largest number where they are small.
    `free`: bytes of device memory that are free.
    """
    count = max(wanted, min(most, SMALL_BYTES // set_bytes))
    return min(count, int(free * MEMORY_SHARE) // set_bytes)


def padding(random: np.random.Generator) -> int:
    """Return bytes to keep allocated, so that the next allocation gets another address."""
    return int(random.integers(1, MOST_PADDING + 1)) * PADDING_STEP


# Windows


def window_notes(device: Device, window: PersistingStream | None) -> tuple[str, ...]:
    """What a reader must know of the window, or of a set-aside without one."""
    if window is not None:
        return window.notes
    idle = idle_set_aside(device)
    return () if idle is None else (idle,)


def refuse_window(name: str, window: PersistingStream | None) -> None:
    """Raise `BadCall` if work that runs on another stream has a window."""
    if window is not None:
        raise BadCall(
            f"{name} does not launch on the persisting stream, so its window does not cover what "
            f"{name} does"
        )


def captured(
    name: str, device: Device, window: PersistingStream, body: Callable[[], None]
) -> Graph:
    """The graph of `body`, with the window on its kernels.
    Raises `BadCall`: it has no kernel that could carry the window.
    Raises `CannotCapture`: with the reason.
    """
    graph = device.graphs.capture(window.stream, body, window=window.spec)
    windows = device.graphs.windows(graph)
    if window.spec is not None and not any(windows):
        raise BadCall(f'where="graph": {name} queues no kernel that could carry the window')
    window.read_back(windows)
    return graph
