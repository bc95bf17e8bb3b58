"""Any function as a target: it launches on the current stream, and its buffers move."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from functools import partial
from types import MappingProxyType
from typing import Any

import numpy as np

from pytest_gpumem.devices.protocol import Graph, Stream
from pytest_gpumem.judging.traffic import beyond_arguments
from pytest_gpumem.measuring.bound import BadCall
from pytest_gpumem.measuring.case import (
    Case,
    by_buffers,
    check_launch,
    footprint_of,
    foreign_of,
    known_buffers,
    notes_of,
    traffic_of,
)
from pytest_gpumem.measuring.target import Target, captured, padding, refuse_window, window_notes
from pytest_gpumem.memory.buffers import Arena, Buffer
from pytest_gpumem.memory.l2 import PersistingStream
from pytest_gpumem.memory.managed import notes as managed_notes

NAMED = "{}="  # how the user wrote a declared field


def callable_target(
    function: Callable[..., object],
    arguments: tuple[Any, ...],
    keywords: Mapping[str, Any],
    arena: Arena,
    stream: Stream,
    window: PersistingStream | None = None,
    declared: Mapping[str, Any] = MappingProxyType({}),
    *,
    on_simulated: bool = False,
) -> Target:
    """Describe a call of a function, which launches work on the current stream.

    `window`: the persisting stream, if `stream` is one.
    `declared`: fields of a `Case` that the user gave for the call.
    Raises `BadCall`: a declared field is wrong, or the window reaches no kernel of the function.
    Raises `CannotCapture`: the window is to lie on a graph's kernels.
    """
    name = getattr(function, "__name__", type(function).__name__)
    if window is not None and window.where == "launch":
        raise BadCall(
            f'where="launch" is for kernels of gpu_kernels: {name} makes its launches itself; '
            '"stream" and "graph" reach them'
        )
    values = (*arguments, *keywords.values())
    movable = []
    for value in values:
        if isinstance(value, Buffer) and value not in movable and arena.can_move(value):
            movable.append(value)
    case = by_buffers(Case(partial(function, *arguments, **keywords), **declared), arena, NAMED)
    calls = _Calls(name, case, on_simulated, movable, arena, stream, window)
    notes = []
    if not movable:
        notes.append(
            "one placement: the callable's arrays are its own; a Case is built anew for each"
        )
    if case.moved is not None:
        note = beyond_arguments(int(case.moved), _nbytes(values))
        if note:
            notes.append(note)
    notes += [
        *notes_of(case, arena),
        *window_notes(arena.device, window),
        *managed_notes(arena.device.facts, arena.managed),
    ]
    calls.target = Target(
        name=name,
        kind="callable",
        stream=stream,
        launch=calls.launch,
        moved_bytes=traffic_of(case),
        footprint=footprint_of(case),
        # It may touch any managed buffer of the test, through closures or other libraries.
        managed=arena.homes,
        window=window,
        notes=tuple(notes),
        check=None if case.check is None else calls.check,
        move=calls.move if movable else None,
        run_on=calls.run_on,
    )
    return calls.target


class _Calls:
    """The calls of a function, as they are or as a graph."""

    def __init__(
        self,
        name: str,
        case: Case,
        on_simulated: bool,
        movable: list[Buffer],
        arena: Arena,
        stream: Stream,
        window: PersistingStream | None,
    ) -> None:
        self._name, self._case, self._on_simulated = name, case, on_simulated
        self._movable, self._arena, self._window = movable, arena, window
        self._reads = known_buffers(case.reads, arena)
        self._writes = known_buffers(case.writes, arena)
        self._graph: Graph | None = None
        self.target: Target
        if window is not None and window.where == "graph":
            # What a library sets up at its first call cannot be captured.
            self._call(stream)
            arena.device.streams.synchronize()
            self._capture()

    def _capture(self) -> None:
        """Capture a call, for where its buffers now are, if the window is on a graph's kernels."""
        if self._window is not None and self._window.where == "graph":
            body = partial(self._call, self._window.stream)
            self._graph = captured(self._name, self._arena.device, self._window, body)

    def launch(self, place: int, stream: Stream) -> None:
        if self._graph is not None:
            self._arena.device.graphs.replay(self._graph, stream)
        else:
            self._call(stream)

    def _call(self, stream: Stream) -> None:
        launch, reference = self._case.launch, self._case.reference
        foreign = foreign_of(
            launch, reference, self._reads, self._writes, on_simulated=self._on_simulated
        )
        self._arena.device.kernels.call(foreign, stream)

    def check(self) -> None:
        check_launch(self._arena.device, self.target, self._case, self._reads, self._writes, NAMED)

    def move(self, wanted: int, most: int, random: np.random.Generator) -> Target:
        self._arena.pad(padding(random))
        try:
            for buffer in self._movable:
                buffer.move()
        finally:
            self._capture()
        return self.target

    def run_on(self, stream: Stream) -> Target:
        refuse_window(self._name, self._window)
        self.target = replace(self.target, stream=stream)
        return self.target


def _nbytes(arguments: Iterable[Any]) -> int:
    """Return the bytes of the distinct buffers and arrays, also in lists and tuples."""
    sizes: dict[int, int] = {}
    waiting = list(arguments)
    while waiting:
        value = waiting.pop()
        nbytes = getattr(value, "nbytes", None)
        if isinstance(value, (list, tuple)):
            waiting.extend(value)
        elif isinstance(nbytes, int):
            sizes[id(value)] = nbytes
    return sum(sizes.values())
