"""Work of copy engines, kernels and the host, as a test composes it (`gpu_work`, `staged_copy`) and as a target."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

from pytest_gpumem.devices.protocol import Allocation, Device, Launch, Stream
from pytest_gpumem.kernels.catalogue import CATALOGUE
from pytest_gpumem.kernels.kernel import Kernel, Role
from pytest_gpumem.measuring.bound import BoundKernel
from pytest_gpumem.measuring.target import Target, WrongResult, nothing
from pytest_gpumem.measuring.work import (
    DEVICE_TO_HOST,
    HOST_TO_DEVICE,
    KERNEL,
    After,
    Allocating,
    BadWork,
    Copy,
    Host,
    InTurn,
    Launched,
    Together,
    Work,
    WrongContent,
    at_least_one,
    bound,
    check_engines,
    cut,
    enqueue,
)
from pytest_gpumem.memory.buffers import Arena, Buffer
from pytest_gpumem.memory.spaces import Memory
from pytest_gpumem.records.measurement import Traffic
from pytest_gpumem.units import format_time, parse_bytes


class StagedCopy(Work):
    """A copy to the device, a kernel there, and a copy back, chunk by chunk over several streams.

    Source: CUDA C++ Best Practices Guide, 9.1.2 Asynchronous and Overlapping Transfers with Computation.
    `source`, `target`: host buffers; `target` None: nothing is copied back.
    `there`: device buffer that the kernel updates in place.
    `kernel`: of the catalogue, with one array, which it updates element by element.
    `chunks`: number of chunks, which begin at multiples of 256 bytes; None: one for each stream. The last may be shorter.
    Raises `BadWork`: the buffers differ, the kernel does not fit, or the data is too small for so many chunks.
    Raises `Unsupported`: the device has no copy engine (`asyncEngineCount` is 0).
    """

    def __init__(
        self,
        device: Device,
        source: Buffer,
        there: Buffer,
        target: Buffer | None,
        kernel: Kernel,
        scalars: Mapping[str, int | float],
        streams: int,
        chunks: int | None = None,
    ) -> None:
        at_least_one("n_streams", streams)
        at_least_one("chunks", 1 if chunks is None else chunks)
        arrays = [p for p in kernel.parameters if p.role is not Role.SCALAR]
        if len(arrays) != 1 or arrays[0].role is not Role.UPDATE or kernel.reference is None:
            raise BadWork(f"{kernel.name} cannot be staged: it takes a kernel that updates one array in place, such as elementwise")
        for buffer in (b for b in (source, target) if b is not None):
            if (buffer.nbytes, buffer.dtype) != (there.nbytes, there.dtype):
                raise BadWork(f"{buffer!r} and {there!r} must have the same size and type")
        self._device, self._source, self._there, self._target = device, source, there, target
        self._kernel, self._parameter, self._scalars = kernel, arrays[0].name, dict(scalars)
        check_engines(device, frozenset([HOST_TO_DEVICE]))
        self.on_host = source.kind.pageable or (target is not None and target.kind.pageable)
        self._pieces = cut(there.nbytes, chunks or streams)
        self._lanes = tuple(device.streams.create() for _ in range(streams))
        self._steps = [self._step(offset, nbytes) for offset, nbytes in self._pieces]
        self._expected: Any = None
        self.verifies = True
        device.kernels.compile(self._steps[0][2])
        self.name = f"staged {kernel.name}"

    def _step(self, offset: int, nbytes: int) -> tuple[Allocation, Allocation, Launch, Allocation | None]:
        part = self._device.memory.part
        there = part(self._there.allocation, offset, nbytes)
        launch = bound(self._device, self._kernel, {self._parameter: (self._there, there)}, self._scalars)
        target = None if self._target is None else part(self._target.allocation, offset, nbytes)
        return there, part(self._source.allocation, offset, nbytes), launch, target

    @property
    def streams(self) -> int:
        """Number of streams that it uses."""
        return len(self._lanes)

    @property
    def chunks(self) -> int:
        """Number of chunks."""
        return len(self._pieces)

    @property
    def parts(self) -> tuple[Work, ...]:
        """The copy in, the kernel and the copy back, each whole."""
        back = () if self._target is None else (Copy(self._device, self._target, self._there),)
        return (
            Copy(self._device, self._there, self._source),
            Launched(self._device, self._kernel, {self._parameter: self._there}, self._scalars),
            *back,
        )

    @property
    def engines(self) -> frozenset[str]:
        return frozenset([HOST_TO_DEVICE, KERNEL] if self._target is None else [HOST_TO_DEVICE, KERNEL, DEVICE_TO_HOST])

    @property
    def traffic(self) -> Traffic:
        return Traffic(self._source.nbytes, 0 if self._target is None else self._target.nbytes, link=True)

    def queue(self, stream: Stream) -> None:
        device = self._device
        for lane in self._lanes:
            device.streams.join(lane, stream)
        for i, (there, source, launch, target) in enumerate(self._steps):
            lane = self._lanes[i % len(self._lanes)]
            device.content.copy(there, source, there.nbytes, lane)
            device.kernels.launch(launch, lane)
            if target is not None:
                device.content.copy(target, there, there.nbytes, lane)
        for lane in self._lanes:
            device.streams.join(stream, lane)

    def poison(self, stream: Stream) -> None:
        device, there = self._device, self._there
        device.content.copy(there.allocation, self._source.allocation, there.nbytes, stream)
        device.streams.synchronize(stream)
        assert self._kernel.reference is not None
        arrays = {self._parameter: device.memory.view(there.allocation, there.dtype_name, there.size)}
        self._expected = self._kernel.reference(arrays, self._steps[0][2].call.scalars)[self._parameter]
        for buffer in (there, self._target):
            if buffer is not None:
                device.content.poison(buffer.allocation, stream)

    def verify(self) -> None:
        device = self._device
        result = self._there if self._target is None else self._target
        actual = device.content.to_host(result.allocation, result.dtype_name, result.size)
        wrong = device.content.mismatch(actual, self._expected, self._kernel.relative_tolerance)
        if wrong is not None:
            raise WrongContent(f"{self.name}: {wrong[0]} of {actual.size} elements are wrong; the first is element {wrong[1]}")
        self._expected = None


_W = TypeVar("_W", bound=Work)


def work_target(work: Work, arena: Arena) -> Target:
    """Describe a piece of work where it is: its buffers do not move, because addresses make no difference to a link."""
    device, stream = arena.device, arena.stream

    def check() -> None:
        work.poison(stream)
        device.streams.synchronize(stream)
        work.queue(stream)
        device.streams.synchronize(stream)
        try:
            work.verify()
        except WrongContent as error:
            raise WrongResult(f"{error}, after one run on poisoned outputs") from None

    return Target(
        name=work.name,
        kind="work",
        stream=stream,
        launch=lambda place, queue: work.queue(queue),
        traffic=work.traffic,
        waits=work.on_host,
        prepare=work.before.queue if isinstance(work, After) else nothing,
        restores=True,  # where nothing is restored, launches that spread over streams do not follow each other in a batch
        check=check if work.verifies else None,
    )


class Works:
    """The fixture `gpu_work`: composes work for one test. `gpu_benchmark(work)` measures it."""

    def __init__(self, memory: Memory) -> None:
        self._memory = memory
        self._arena = memory.arena
        self._made: list[Work] = []
        self._staged: dict[tuple[object, ...], tuple[Buffer, Buffer, Buffer | None]] = {}

    def copy(self, destination: Any, source: Any, *, pieces: int = 1) -> Copy:
        """A copy by a copy engine.

        Args:
            destination, source: buffers, or NumPy arrays, which are pageable memory.
            pieces: number of calls, of equal size.

        Raises:
            BadWork: the sizes differ, or the data is too small for so many pieces.
        """
        device = self._arena.device
        return self._keep(Copy(device, self._buffer("destination", destination), self._buffer("source", source), pieces=pieces))

    def kernel(self, kernel: BoundKernel, *arguments: Any, **scalars: Any) -> Launched:
        """One launch of a kernel of `gpu_kernels`, on the persisting stream of its `with_stream` if it has one.

        Raises:
            BadCall, BadWork: the arguments do not fit.
        """
        if not isinstance(kernel, BoundKernel):
            raise BadWork(f"kernel() takes a kernel of gpu_kernels, not {kernel!r}")
        buffers, values = kernel.arguments(arguments, scalars)
        kernel.fill(buffers, self._arena.stream)
        return self._keep(Launched(self._arena.device, kernel.kernel, buffers, values, kernel.blocks, kernel.persisting))

    def host(self, function: Callable[[], object], name: str | None = None) -> Host:
        """A function that runs on the host."""
        if not callable(function):
            raise BadWork(f"host() takes a function without arguments, not {function!r}")
        return self._keep(Host(function, name))

    def busy(self, seconds: float) -> Host:
        """Work of the host that takes `seconds`: it reads the clock until they have passed."""
        if isinstance(seconds, bool) or not isinstance(seconds, (int, float)) or not 0 < seconds < 10:
            raise BadWork(f"busy({seconds!r}): a number of seconds above 0 and below 10")
        now = self._arena.device.now

        def spin() -> None:
            end = now() + seconds
            while now() < end:
                pass

        return self.host(spin, f"host busy for {format_time(seconds)}")

    def allocating(self, allocator: str, nbytes: int | str) -> Allocating:
        """One allocation and its free, by an allocator of `devices.protocol.ALLOCATORS`.

        Raises:
            DeviceError: there is no such allocator.
            Unsupported: the device does not have it.
        """
        return self._keep(Allocating(self._arena.device, allocator, parse_bytes(nbytes)))

    def in_turn(self, *works: Work) -> InTurn:
        """Pieces of work one after another. Raises `BadWork` for fewer than two."""
        return self._keep(InTurn(self._arena.device, self._works(works)))

    def after(self, before: Work, work: Work) -> After:
        """`work`, with an untimed run of `before` ahead of every sample, which finds the caches as that leaves them.

        Measure it with `mode="hot"`: in the other modes L2 is flushed in between.
        """
        return self._keep(After(*self._works([before, work])))

    def together(self, *works: Work) -> Together:
        """Pieces of work on separate data, at once; its measurement reports how much of the time is hidden.

        Raises:
            BadWork: fewer than two.
            Unsupported: the device has too few copy engines (`asyncEngineCount`); the test skips.
        """
        return self._keep(Together(self._arena.device, self._works(works)))

    def staged(
        self,
        n_streams: int,
        shape: int | str | Sequence[int] = "64 MiB",
        dtype: Any = "f4",
        *,
        kernel: BoundKernel | None = None,
        chunks: int | None = None,
        back: bool = True,
        **scalars: Any,
    ) -> StagedCopy:
        """Data copied to the device, worked on and copied back, chunk by chunk over `n_streams` streams: the fixture `staged_copy`.

        Args:
            n_streams: streams that chunks use in turn.
            shape, dtype: of the data, as for the buffer fixtures; a second call with the same uses the same buffers.
            kernel: of `gpu_kernels`, updates its one array element by element; default: `elementwise`.
            chunks: number of chunks; default: one for each stream. It need not divide the data, nor the streams divide it.
            back: copy the result back to the host.
            scalars: the kernel's, such as `rounds=8`.

        Raises:
            BadWork: the arguments do not fit together.
            Unsupported: the device has no copy engine (`asyncEngineCount` is 0); the test skips.
        """
        memory = self._memory
        wanted = (shape if isinstance(shape, (int, str)) else tuple(shape), str(dtype), back)
        if wanted not in self._staged:
            source, there = memory.pinned(shape, dtype), memory.device(shape, dtype)
            self._staged[wanted] = source, there, memory.pinned(shape, dtype) if back else None
        source, there, target = self._staged[wanted]
        chosen = CATALOGUE["elementwise"] if kernel is None else kernel.kernel
        return self._keep(StagedCopy(self._arena.device, source, there, target, chosen, scalars, n_streams, chunks))

    def enqueue(self, work: Work) -> tuple[float, float]:
        """Seconds until the call that queues `work` returned, and until the work was done: an asynchronous call returns first."""
        self._works([work])
        work.queue(self._arena.stream)  # the first run loads kernels
        return enqueue(self._arena.device, work, self._arena.stream)

    def close(self) -> None:
        """Free what the pieces of work allocated."""
        made, self._made = self._made, []
        for work in made:
            work.close()

    def _keep(self, work: _W) -> _W:
        self._made.append(work)
        return work

    def _buffer(self, name: str, value: Any) -> Buffer:
        taken = self._arena.taken(value)
        if not isinstance(taken, Buffer):
            raise BadWork(f"copy(): {name!r} is a buffer from a fixture or a NumPy array, not {type(value).__name__}")
        return taken

    @staticmethod
    def _works(works: Sequence[Any]) -> tuple[Work, ...]:
        for work in works:
            if not isinstance(work, Work):
                raise BadWork(f"{work!r} is no work; gpu_work makes it")
        return tuple(works)
