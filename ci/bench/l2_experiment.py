"""One experiment on persisting L2: a kernel on its buffers, timed at any set-aside and hit ratio, on one placement or several."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
from held_samples import HeldSamples

from pytest_gpumem.devices.protocol import Allocation, Device, MemoryKind, Stream, WindowSpec
from pytest_gpumem.measuring.bound import BoundKernel
from pytest_gpumem.measuring.flush import Flush
from pytest_gpumem.measuring.target import padding
from pytest_gpumem.memory.buffers import Buffer
from pytest_gpumem.memory.l2 import persisting

WARM_UP = 2
"""Launches before the first sample: they bring the lines in that persist. The flush before a sample leaves those where they are."""
SECONDS = 0.04
"""Seconds of samples at one setting, on one placement."""
LEAST, MOST = 5, 25
"""Samples at one setting, on one placement."""
DEFAULT: Mapping[str, Any] = {}
"""No persisting stream: the set-aside that the process began with, and no window."""
IN_A_GRAPH: Mapping[str, Any] = {"set_aside": "off", "where": "graph"}
"""Off, launched as a graph of one kernel: what a window on a graph's kernel is compared with."""


class Experiment:
    """Times launches of one kernel, clean-cold, from behind a held stream.

    Args:
        kernel: with its grid.
        arguments: its buffers.
        window: the one of them that is under the window.
        seed: of where the placements lie.
    """

    def __init__(self, device: Device, kernel: BoundKernel, arguments: Sequence[Buffer], window: Buffer, *, seed: int) -> None:
        self._device = device
        self._kernel = kernel
        self._arguments = tuple(arguments)
        self._window = window
        self._random = np.random.default_rng(seed)
        self._flush = Flush(device, "clean-cold")
        self._samples = HeldSamples(device, MOST)
        self._plain = device.streams.create()
        self._padding: Allocation | None = None
        self._bind()
        # A kernel is loaded at its first launch, which waits for the device: neither held nor within a capture.
        self._launch(self._plain)
        self._flush(self._plain)
        device.streams.synchronize()

    def _bind(self) -> None:
        """The launch on the buffers where they now are."""
        self._bound = self._kernel.launch(*self._kernel.arguments(self._arguments, {}))

    def _launch(self, stream: Stream, window: WindowSpec | None = None) -> None:
        self._device.kernels.launch(self._bound, stream, window=window)

    def seconds(self, options: Mapping[str, Any]) -> list[float]:
        """Samples at one setting, where the buffers now are.

        Args:
            options: arguments of `persisting`, or `DEFAULT`.
        """
        self._bind()
        if not options:
            return self._timed(self._plain, self._launch)
        with persisting(self._device, self._window, **options, allow_thrash=True) as stream:
            if stream.where == "launch":
                return self._timed(stream.stream, partial(self._launch, window=stream.spec))
            if stream.where == "graph":
                body = partial(self._launch, stream.stream)
                graph = self._device.graphs.capture(stream.stream, body, window=stream.spec)
                return self._timed(stream.stream, lambda queue: self._device.graphs.replay(graph, queue))
            return self._timed(stream.stream, self._launch)

    def _timed(self, stream: Stream, work: Callable[[Stream], None]) -> list[float]:
        for _ in range(WARM_UP):
            self._flush(stream)
            work(stream)
        first = self._samples.take(stream, self._flush, [work])
        more = max(LEAST, min(MOST, int(SECONDS / first[0])))
        return self._samples.take(stream, self._flush, [work] * more)

    def move(self) -> None:
        """Put all buffers at fresh addresses."""
        self._pad(padding(self._random))
        for buffer in self._arguments:
            buffer.move()
        self._device.memory.settle()

    def rounds(self, settings: Sequence[Mapping[str, Any]], count: int) -> list[list[list[float]]]:
        """Samples of each setting in each of `count` rounds, by setting and round.

        A round is one placement, on which all settings are measured; every second one goes backwards, so that a steady drift of the
        clocks favours nobody.
        """
        taken: list[list[list[float]]] = [[] for _ in settings]
        for number in range(count):
            self.move()
            order = range(len(settings)) if number % 2 == 0 else reversed(range(len(settings)))
            for i in order:
                taken[i].append(self.seconds(settings[i]))
        return taken

    def _pad(self, nbytes: int) -> None:
        if self._padding is not None:
            self._device.memory.free(self._padding)
        self._padding = self._device.memory.allocate(nbytes, MemoryKind.DEVICE) if nbytes else None

    def close(self) -> None:
        """Free what is not the test's."""
        self._pad(0)
        self._flush.close()
