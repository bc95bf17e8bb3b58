"""Work as a test composes it (`gpu_work`, `staged_copy`), and as a target."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, TypeVar

from pytest_gpumem.devices.protocol import Stream
from pytest_gpumem.kernels.catalogue import CATALOGUE
from pytest_gpumem.measuring.bound import BadCall, BoundKernel
from pytest_gpumem.measuring.target import Target, nothing
from pytest_gpumem.measuring.work import Copy, Host, InTurn, KernelWork, StagedCopy, Together, Work
from pytest_gpumem.memory.buffers import Arena, Buffer
from pytest_gpumem.memory.current_device import on_its_device
from pytest_gpumem.memory.spaces import Memory
from pytest_gpumem.units import format_bytes, format_time, parse_bytes

_WorkT = TypeVar("_WorkT", bound=Work)


def work_target(work: Work, arena: Arena) -> Target:
    """Describe a piece of work where it is.

    Its buffers do not move, because addresses make no difference to a link.
    """
    device = arena.device

    def launch(place: int, stream: Stream) -> None:
        work.queue(stream)

    def check(stream: Stream) -> None:
        work.poison(stream)
        device.streams.synchronize(stream)
        work.queue(stream)
        device.streams.synchronize(stream)
        work.verify()

    return Target(
        name=work.name,
        stream=arena.stream,
        launch=launch,
        moved_bytes=work.moved_bytes,
        waits=work.on_host,
        prepare=nothing if work.before is None else work.before.queue,
        restores=True,  # launches that spread over streams do not follow each other in a batch
        check=check if work.verifies else None,
    )


class Works:
    """The fixture `gpu_work`: composes work for one test. `gpu_benchmark(work)` measures it."""

    def __init__(self, memory: Memory) -> None:
        self._memory = memory
        self._arena = memory.arena
        self.device = memory.arena.device
        self._made: list[Work] = []
        self._staged: dict[tuple[object, ...], tuple[Buffer, Buffer, Buffer | None]] = {}

    def copy(self, destination: Any, source: Any, *, pieces: int = 1) -> Copy:
        """A copy by a copy engine.

        Args:
            destination, source: buffers, or NumPy arrays, which are pageable memory.
            pieces: number of calls, of equal size.

        Raises:
            BadCall: the sizes differ, or the data is too small for so many pieces.
        """
        to = self._buffer("destination", destination)
        origin = self._buffer("source", source)
        return self._keep(Copy(self.device, to, origin, pieces=pieces))

    @on_its_device
    def kernel(self, kernel: BoundKernel, *arguments: Any, **scalars: Any) -> KernelWork:
        """One launch of a kernel of `gpu_kernels`, on its persisting stream if it has one.

        Raises:
            BadCall: the arguments do not fit.
        """
        if not isinstance(kernel, BoundKernel):
            raise BadCall(f"kernel() takes a kernel of gpu_kernels, not {kernel!r}")
        buffers, values = kernel.arguments(arguments, scalars)
        kernel.fill(buffers, self._arena.stream)
        return self._keep(KernelWork(kernel, buffers, values))

    def host(self, function: Callable[[], object], name: str | None = None) -> Host:
        """A function that runs on the host."""
        if not callable(function):
            raise BadCall(f"host() takes a function without arguments, not {function!r}")
        name = name or str(getattr(function, "__name__", type(function).__name__))

        def run(stream: Stream) -> None:
            function()

        return self._keep(Host(run, name))

    def busy(self, seconds: float) -> Host:
        """Work of the host that takes `seconds`: it reads the clock until they have passed."""
        if (
            isinstance(seconds, bool)
            or not isinstance(seconds, (int, float))
            or not 0 < seconds < 10
        ):
            raise BadCall(f"busy({seconds!r}): a number of seconds above 0 and below 10")
        now = self.device.now

        def spin() -> None:
            end = now() + seconds
            while now() < end:
                pass

        return self.host(spin, f"host busy for {format_time(seconds)}")

    @on_its_device
    def allocating(self, allocator: str, nbytes: int | str) -> Host:
        """One allocation and its free, by "cudaMalloc", "cudaMallocAsync", "CuPy pool" or another.

        `devices.protocol` has the allocators.

        Raises:
            DeviceError: there is no such allocator.
            Unsupported: the device does not have it.
        """
        size, made = parse_bytes(nbytes), self.device.memory.allocator(allocator)
        return self._keep(
            Host(partial(made.cycle, size), f"{allocator} of {format_bytes(size)}", made.close)
        )

    def in_turn(self, *works: Work) -> InTurn:
        """Pieces of work one after another. Raises `BadCall` for fewer than two."""
        return self._keep(InTurn(self.device, self._works(works)))

    def after(self, before: Work, work: _WorkT) -> _WorkT:
        """`work`, with an untimed run of `before` ahead of every sample, which fills the caches.

        Measure it with `mode="hot"`: in the other modes L2 is flushed in between.
        """
        self._works([before, work])
        made = copy.copy(work)
        made.before = before
        return made

    @on_its_device
    def together(self, *works: Work) -> Together:
        """Pieces of work on separate data, at once; the result says how much of the time is hidden.

        Raises:
            BadCall: fewer than two.
            Unsupported: the device has too few copy engines (`asyncEngineCount`); the test skips.
        """
        return self._keep(Together(self.device, self._works(works)))

    @on_its_device
    def staged(
        self,
        /,
        n_streams: int,
        shape: int | str | Sequence[int] = "64 MiB",
        dtype: Any = "f4",
        *,
        kernel: BoundKernel | None = None,
        chunks: int | None = None,
        back: bool = True,
        **scalars: Any,
    ) -> StagedCopy:
        """Data copied to the device, worked on and copied back, chunk by chunk: `staged_copy`.

        Args:
            n_streams: streams that chunks use in turn.
            shape, dtype: of the data, as for the buffer fixtures; a second call with the same uses
                the same buffers.
            kernel: of `gpu_kernels`, updates its one array element by element; default:
                `elementwise`.
            chunks: number of chunks; default: one for each stream. It need not divide the data, nor
                the streams divide it.
            back: copy the result back to the host.
            scalars: the kernel's, such as `rounds=8`.

        Raises:
            BadCall: the arguments do not fit together.
            Unsupported: the device has no copy engine (`asyncEngineCount` is 0); the test skips.
        """
        memory = self._memory
        wanted = repr(shape), str(dtype), back
        if wanted not in self._staged:
            source, there = memory.pinned(shape, dtype), memory.device(shape, dtype)
            self._staged[wanted] = source, there, memory.pinned(shape, dtype) if back else None
        source, there, target = self._staged[wanted]
        chosen = kernel or BoundKernel(CATALOGUE["elementwise"], self.device, self._arena.stream)
        return self._keep(StagedCopy(source, there, target, chosen, scalars, n_streams, chunks))

    @on_its_device
    def enqueue(self, work: Work) -> tuple[float, float]:
        """Seconds until the call that queues `work` returned, and until the work was done.

        An asynchronous call returns first.
        """
        self._works([work])
        device, stream = self.device, self._arena.stream
        work.queue(stream)  # the first run loads kernels
        device.streams.synchronize(stream)
        began = device.now()
        work.queue(stream)
        returned = device.now() - began
        device.streams.synchronize(stream)
        return returned, device.now() - began

    def close(self) -> None:
        """Free what the pieces of work allocated."""
        made, self._made = self._made, []
        for work in made:
            work.close()

    def _keep(self, work: _WorkT) -> _WorkT:
        self._made.append(work)
        return work

    def _buffer(self, name: str, value: Any) -> Buffer:
        taken = self._arena.taken(value)
        if not isinstance(taken, Buffer):
            raise BadCall(
                f"copy(): {name!r} is a buffer from a fixture or a NumPy array, not "
                f"{type(value).__name__}"
            )
        return taken

    @staticmethod
    def _works(works: Sequence[Any]) -> tuple[Work, ...]:
        for work in works:
            if not isinstance(work, Work):
                raise BadCall(f"{work!r} is no work; gpu_work makes it")
        return tuple(works)
