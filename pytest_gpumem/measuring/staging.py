"""Data that is copied to the device, worked on and copied back, chunk by chunk over several streams.

Source: CUDA C++ Best Practices Guide, 9.1.2 Asynchronous and Overlapping Transfers with Computation.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pytest_gpumem.devices.protocol import Allocation, Device, Launch, Stream
from pytest_gpumem.kernels.kernel import Kernel, Role
from pytest_gpumem.measuring.work import (
    DEVICE_TO_HOST,
    HOST_TO_DEVICE,
    KERNEL,
    BadWork,
    Copy,
    Launched,
    Work,
    WrongContent,
    at_least_one,
    bound,
    check_engines,
    cut,
)
from pytest_gpumem.memory.buffers import Buffer
from pytest_gpumem.records.measurement import Traffic


class StagedCopy(Work):
    """A copy to the device, a kernel there, and a copy back, chunk by chunk over several streams.

    Args:
        source, target: host buffers; `target` None: nothing is copied back.
        there: device buffer that the kernel updates in place.
        kernel: of the catalogue, with one array, which it updates element by element.
        chunks: number of chunks, which begin at multiples of 256 bytes; None: one for each stream. The last may be shorter.

    Raises:
        BadWork: the buffers differ, the kernel does not fit, or the data is too small for so many chunks.
        Unsupported: the device has no copy engine (`asyncEngineCount` is 0).
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
