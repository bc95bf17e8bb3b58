"""Any function as a target: it launches on the current stream, and moves only the buffers among its arguments."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np

from pytest_gpumem.devices.protocol import Foreign, Graph, Stream
from pytest_gpumem.judging.traffic import beyond_arguments
from pytest_gpumem.measuring.bound import BadCall
from pytest_gpumem.measuring.target import Target, captured, padding, refuse_window, window_notes
from pytest_gpumem.memory.buffers import Arena, Buffer
from pytest_gpumem.memory.l2 import PersistingStream
from pytest_gpumem.memory.managed import notes as managed_notes
from pytest_gpumem.records.measurement import Traffic


def callable_target(
    function: Callable[..., object],
    arguments: tuple[Any, ...],
    keywords: Mapping[str, Any],
    arena: Arena,
    stream: Stream,
    window: PersistingStream | None = None,
    moved: int | None = None,
) -> Target:
    """Describe a call of a function.
    `function`: launches work on the current stream.
    `window`: the persisting stream, if `stream` is one.
    `moved`: compulsory bytes of one call, as declared.
    Raises `BadCall`: the window cannot be on launches that the function makes itself, or the function has no kernel that could carry it.
    Raises `CannotCapture`: the window is to lie on a graph's kernels, and the function cannot be captured.
    """
    name = getattr(function, "__name__", type(function).__name__)
    if window is not None and window.where == "launch":
        raise BadCall(f'where="launch" is for kernels of gpu_kernels: {name} makes its launches itself; "stream" and "graph" reach them')
    values = (*arguments, *keywords.values())
    movable = tuple(b for b in dict.fromkeys(v for v in values if isinstance(v, Buffer)) if arena.can_move(b))
    calls = _Calls(name, Foreign(lambda: function(*arguments, **keywords)), movable, arena, stream, window)
    notes = [] if movable else ["one placement: the callable's arrays are its own; a Case is built anew for each"]
    if moved is not None and (note := beyond_arguments(moved, _nbytes(values))):
        notes.append(note)
    calls.target = Target(
        name=name,
        kind="callable",
        stream=stream,
        launch=calls.launch,
        traffic=None if moved is None else Traffic(0, 0, declared=moved),
        footprint=moved,
        # The callable may touch any managed buffer of the test, through closures or arrays of other libraries.
        managed=arena.homes,
        window=window,
        notes=(*notes, *window_notes(arena.device, window), *managed_notes(arena.device.facts, arena.managed)),
        move=calls.move if movable else None,
        run_on=calls.run_on,
    )
    return calls.target


class _Calls:
    """The calls of a function, as they are or as a graph."""

    def __init__(
        self, name: str, foreign: Foreign, movable: tuple[Buffer, ...], arena: Arena, stream: Stream, window: PersistingStream | None
    ) -> None:
        self._name, self._foreign, self._movable, self._arena, self._window = name, foreign, movable, arena, window
        self._graph: Graph | None = None
        self.target: Target
        if window is not None and window.where == "graph":
            # What a library sets up at its first call cannot be captured.
            arena.device.kernels.call(foreign, stream)
            arena.device.streams.synchronize()
            self._capture()

    def _capture(self) -> None:
        """Capture one call, for where its buffers now are, if the window is on a graph's kernels."""
        if self._window is not None and self._window.where == "graph":
            body = partial(self._arena.device.kernels.call, self._foreign, self._window.stream)
            self._graph = captured(self._name, self._arena.device, self._window, body)

    def launch(self, place: int, stream: Stream) -> None:
        if self._graph is not None:
            self._arena.device.graphs.replay(self._graph, stream)
        else:
            self._arena.device.kernels.call(self._foreign, stream)

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
    """Bytes of the distinct buffers and arrays among arguments, also in their lists and tuples."""
    found: dict[int, int] = {}

    def look(values: Iterable[Any]) -> None:
        for value in values:
            if isinstance(value, (list, tuple)):
                look(value)
            elif isinstance(nbytes := getattr(value, "nbytes", None), int):
                found[id(value)] = nbytes

    look(arguments)
    return sum(found.values())
