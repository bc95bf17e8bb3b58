"""Kernels of the catalogue bound to a device, as a test uses them: `gpu_kernels.triad`."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from numbers import Integral, Real
from operator import index
from types import MappingProxyType
from typing import Any

from pytest_gpumem.devices.protocol import Allocation, Device, Launch, Stream, Unsupported
from pytest_gpumem.kernels.catalogue import CATALOGUE
from pytest_gpumem.kernels.kernel import Access, Call, Kernel, Role
from pytest_gpumem.memory.buffers import Arena, Buffer, on_its_device
from pytest_gpumem.memory.l2 import PersistingStream
from pytest_gpumem.memory.window_request import BadWindow
from pytest_gpumem.units import ShownError, did_you_mean, format_bytes

Buffers = Mapping[str, Buffer]  # by parameter
Values = Mapping[str, int | float]  # of scalars, by parameter
Copies = Mapping[Buffer, Allocation]


class BadCall(ShownError, ValueError):
    """A kernel or a measurement was called with arguments that do not fit."""


def whole_number(name: str, value: Any) -> int:
    """Return a number of at least 1 as an integer. Raises `BadCall`: it is none."""
    with suppress(TypeError):  # NumPy has integers of its own
        if index(value) >= 1:
            return index(value)
    raise BadCall(f"{name}={value!r}; accepted is a whole number of at least 1")


class NoSuchKernel(ShownError, AttributeError):
    """The catalogue has no kernel of that name."""


def check_stream(name: str, stream: object) -> None:
    """Note that a persisting stream is used, or raise `BadCall`: it is none, or not open."""
    if not isinstance(stream, PersistingStream):
        given = type(stream).__name__
        raise BadCall(f"{name} takes s of `with persisting_stream(...) as s:`, not {given}")
    if stream.closed:
        raise BadCall(
            f"{name} is a persisting stream whose `with` block has ended: measure inside the block"
        )
    stream.used = True


@dataclass(frozen=True)
class BoundKernel:
    """A kernel of the catalogue on a device.

    Calling it launches it once and waits, untimed. `gpu_benchmark(kernel, *arguments)` measures it.
    """

    kernel: Kernel
    device: Device
    stream: Stream  # where an untimed call runs
    blocks: int | None = None  # grid chosen by the caller; None: the kernel decides
    persisting: PersistingStream | None = None  # the persisting stream of `with_stream`

    @property
    def name(self) -> str:
        return self.kernel.name

    def with_grid(self, blocks: int) -> BoundKernel:
        """The same kernel launched with `blocks` blocks. Raises `BadCall`: fewer than one."""
        return replace(self, blocks=whole_number("with_grid(): blocks", blocks))

    def with_stream(self, stream: PersistingStream) -> BoundKernel:
        """The same kernel on a persisting stream: its untimed calls, its measurements, and its
        launches as a part of `gpu_work`.
        Raises `BadCall`, `BadWindow`: no open stream carries the window.
        """
        check_stream("with_stream()", stream)
        if stream.where != "stream":
            raise BadWindow(
                "with_stream() takes a persisting stream that itself has the window "
                f'(where="stream"); this one has where="{stream.where}"'
            )
        return replace(self, stream=stream.stream, persisting=stream)

    @on_its_device
    def __call__(self, *arguments: Any, **scalars: Any) -> None:
        """Launch once and wait."""
        buffers, values = self.arguments(arguments, scalars)
        launch = self.launch(buffers, values)
        self.fill(buffers, self.stream)
        if self.kernel.cycle is not None:  # an index out of bounds would end the context
            self.expected({name: b.view() for name, b in buffers.items()}, values)
        self.device.kernels.launch(launch, self.stream)
        self.device.streams.synchronize(self.stream)

    def arguments(
        self, arguments: tuple[Any, ...], keywords: Mapping[str, Any], arena: Arena | None = None
    ) -> tuple[dict[str, Buffer], dict[str, int | float]]:
        """Return buffers and scalars by name. `arena` finds those of arrays. Raises `BadCall`."""
        parameters = self.kernel.parameters
        signature = f"{self.name}({', '.join(parameter.name for parameter in parameters)})"
        try:
            given = self.kernel.signature.bind(*arguments, **keywords)
        except TypeError as error:
            raise BadCall(f"{signature}: {error}") from None
        given.apply_defaults()
        buffers: dict[str, Buffer] = {}
        values: dict[str, int | float] = {}
        for parameter in parameters:
            name = parameter.name
            value = given.arguments[name]
            if parameter.role is Role.SCALAR:
                if isinstance(value, bool) or not isinstance(value, Real):
                    raise BadCall(f"{signature}: {name!r} is a number, not {value!r}")
                values[name] = int(value) if isinstance(value, Integral) else float(value)
                continue
            if arena is not None:
                value = arena.taken(value)
            if not isinstance(value, Buffer):
                raise BadCall(
                    f"{signature}: {name!r} is a buffer from a fixture such as device_buffer, not "
                    f"{type(value).__name__}"
                )
            buffers[name] = value
        # The sources say __restrict__, and a check that poisons an output would poison the input.
        for parameter in parameters:
            if parameter.role in (Role.WRITE, Role.UPDATE):
                for name, buffer in buffers.items():
                    if name != parameter.name and buffer is buffers[parameter.name]:
                        raise BadCall(
                            f"{signature}: {parameter.name!r} is written, so it cannot be the same "
                            f"buffer as {name!r}"
                        )
        return buffers, values

    def accesses(self, *arguments: Any, **scalars: Any) -> tuple[Access, ...]:
        """The accesses of a launch with these arguments; launches nothing."""
        return self.kernel.accesses(self.launch(*self.arguments(arguments, scalars)).call)

    def fill(self, buffers: Buffers, stream: Stream) -> None:
        """Fill arguments with the content that the kernel needs, unless the user may have."""
        buffer = buffers.get(self.kernel.cycle or "")
        if buffer is not None and not buffer.written:
            self.device.content.fill_cycle(buffer.allocation, stream)
            self.device.streams.synchronize(stream)
            buffer.written = True

    def expected(self, arrays: Mapping[str, Any], values: Values) -> Mapping[str, Any]:
        """The reference's result. Raises `BadCall`: the arguments' content does not fit."""
        assert self.kernel.reference is not None
        try:
            return self.kernel.reference(arrays, values)
        except ValueError as error:
            raise BadCall(f"{self.kernel.name}: {error}") from None

    def launch(
        self, buffers: Buffers, values: Values, copies: Copies = MappingProxyType({})
    ) -> Launch:
        """The launch with the buffers where they now are, or with `copies` of them or of parts.
        Raises `BadCall`, `Unsupported`: types or sizes do not fit, or the memory cannot be seen.
        """
        kernel, device = self.kernel, self.device.facts
        arrays, memory = {}, {}
        for name, buffer in buffers.items():
            facts, memory[name] = buffer.facts, copies.get(buffer, buffer.allocation)
            if kernel.source is None:
                facts = replace(facts, size=buffer.nbytes, dtype="u1", itemsize=1)
            if buffer in copies:
                facts = replace(facts, size=memory[name].nbytes // facts.itemsize)
            arrays[name] = facts
        call = Call(arrays, dict(values), self.blocks)
        wrong = kernel.problem(call)
        if wrong is not None:
            raise BadCall(f"{kernel.name}: {wrong}")
        shape = kernel.shape(device, call)
        most = device.max_shared_bytes_per_block
        if most is not None and shape.shared_bytes > most:
            raise Unsupported(
                f"{kernel.name} needs {format_bytes(shape.shared_bytes)} of shared memory for "
                f"each block; {device.name} has at most {format_bytes(most)}"
            )
        return Launch(kernel, call, shape, memory)


class Kernels:
    """The catalogue on a device: `kernels.triad` is a `BoundKernel`."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self._stream = device.streams.create()

    def __getattr__(self, name: str) -> BoundKernel:
        if name not in CATALOGUE:
            hint, known = did_you_mean(name, CATALOGUE), ", ".join(sorted(CATALOGUE))
            raise NoSuchKernel(f"no kernel {name!r} in the catalogue{hint}. There are: {known}")
        return BoundKernel(CATALOGUE[name], self._device, self._stream)

    def __dir__(self) -> list[str]:
        return sorted(CATALOGUE)
