"""Kernels of the catalogue bound to a device, as a test uses them: `gpu_kernels.triad`."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from numbers import Integral, Real
from typing import Any

from pytest_gpumem.devices.protocol import Allocation, Device, Launch, Stream, Unsupported
from pytest_gpumem.judging.finding import counted
from pytest_gpumem.kernels.catalogue import CATALOGUE
from pytest_gpumem.kernels.kernel import Access, Call, Kernel, Role
from pytest_gpumem.memory.buffers import Buffer
from pytest_gpumem.memory.l2 import PersistingStream
from pytest_gpumem.memory.window_request import BadWindow
from pytest_gpumem.units import format_bytes

CYCLE_SEED = 1  # seed of the cycle that a pointer chase walks: the same walk in every test


class BadCall(ValueError):
    """A kernel or a measurement was called with arguments that do not fit; one sentence that names them."""


class NoSuchKernel(AttributeError):
    """The catalogue has no kernel of that name; one sentence that lists the kernels."""


@dataclass(frozen=True)
class BoundKernel:
    """A kernel of the catalogue on one device. Calling it launches it once and waits, untimed. `gpu_benchmark(kernel, *arguments)` measures
    it."""

    kernel: Kernel
    device: Device
    stream: Stream  # where an untimed call runs
    blocks: int | None = None  # grid chosen by the caller; None: the kernel's own
    persisting: PersistingStream | None = None  # the persisting stream of `with_stream`
    _last: dict[tuple[object, ...], Launch] = field(
        default_factory=dict, init=False, repr=False, compare=False
    )
    """The last untimed launch, by its arguments and where they lie."""

    @property
    def name(self) -> str:
        return self.kernel.name

    def with_grid(self, blocks: int) -> BoundKernel:
        """The same kernel launched with `blocks` blocks. Raises `BadCall`: `blocks` is not a positive integer."""
        if isinstance(blocks, bool) or not isinstance(blocks, Integral) or blocks <= 0:
            raise BadCall(f"with_grid() takes a positive number of blocks, not {blocks!r}")
        return replace(self, blocks=int(blocks))

    def with_stream(self, stream: PersistingStream) -> BoundKernel:
        """The same kernel, whose untimed calls, and launches as a part of `gpu_work`, run on a persisting stream, under its window.
        Raises `BadCall`: it is no persisting stream.
        Raises `BadWindow`: it is not the stream that carries the window, or its block has ended.
        """
        if not isinstance(stream, PersistingStream):
            raise BadCall(
                f"with_stream() takes what persisting_stream() gives, not {type(stream).__name__}"
            )
        if stream.closed:
            raise BadWindow(
                "a persisting stream whose `with` block has ended has no window, which an untimed call could run under"
            )
        if stream.where != "stream":
            raise BadWindow(
                f'where="{stream.where}": the stream itself has no window, which an untimed call could run under'
            )
        stream.used = True
        return replace(self, stream=stream.stream, persisting=stream)

    def __call__(self, *arguments: Any, **scalars: Any) -> None:
        """Launch once and wait."""
        # A function that is measured calls it in each sample: its GPU is current then, and to describe a launch takes longer than to
        # queue it.
        if self.device.elsewhere() is not None:
            with self.device.current():
                self(*arguments, **scalars)
            return
        given = (*enumerate(arguments), *scalars.items())
        key = tuple(
            (name, v, v.allocation) if isinstance(v, Buffer) else (name, type(v), repr(v))
            for name, v in given
        )
        launch = self._last.get(key)
        if launch is None:
            buffers, values = self.arguments(arguments, scalars)
            self.call(buffers, values)
            self.fill(buffers, self.stream)
            if self.kernel.content:
                self.expected(
                    {name: b.view() for name, b in buffers.items()}, values
                )  # an index out of bounds would end the context
            launch = self.launch(buffers, values)
            self._last.clear()
            if not self.kernel.content:
                self._last[key] = launch
        self.device.kernels.launch(launch, self.stream)
        self.device.streams.synchronize(self.stream)

    def arguments(
        self, arguments: tuple[Any, ...], keywords: Mapping[str, Any]
    ) -> tuple[dict[str, Buffer], dict[str, int | float]]:
        """Sort a call's arguments into buffers and scalars by parameter name.
        Raises `BadCall`: too many, missing, unknown or ill-typed arguments, or arrays of different or unsupported element types.
        """
        kernel = self.kernel
        signature = f"{kernel.name}({', '.join(p.name for p in kernel.parameters)})"
        if len(arguments) > len(kernel.parameters):
            raise BadCall(f"{signature} got {counted(len(arguments), 'argument')}")
        given = {
            parameter.name: value
            for parameter, value in zip(kernel.parameters, arguments, strict=False)
        }
        for name, value in keywords.items():
            if name not in {p.name for p in kernel.parameters}:
                raise BadCall(f"{signature} has no parameter {name!r}")
            if name in given:
                raise BadCall(f"{signature} got {name!r} twice")
            given[name] = value
        buffers: dict[str, Buffer] = {}
        values: dict[str, int | float] = {}
        for parameter in kernel.parameters:
            value = given.get(parameter.name, parameter.default)
            if value is None:
                raise BadCall(f"{signature} needs {parameter.name!r}")
            if parameter.role is Role.SCALAR:
                if isinstance(value, bool) or not isinstance(value, Real):
                    raise BadCall(f"{signature}: {parameter.name!r} is a number, not {value!r}")
                values[parameter.name] = int(value) if isinstance(value, Integral) else float(value)
            elif isinstance(value, Buffer):
                buffers[parameter.name] = value
            else:
                raise BadCall(
                    f"{signature}: {parameter.name!r} is a buffer from a fixture such as device_buffer, not {type(value).__name__}"
                )
        # The sources say __restrict__, and a check that poisons an output would poison the input with it.
        for parameter in kernel.parameters:
            for name, buffer in buffers.items():
                written = parameter.role in (Role.WRITE, Role.UPDATE)
                if written and name != parameter.name and buffer is buffers[parameter.name]:
                    raise BadCall(
                        f"{signature}: {parameter.name!r} is written, so it cannot be the same buffer as {name!r}"
                    )
        return buffers, values

    def call(
        self,
        buffers: Mapping[str, Buffer],
        values: Mapping[str, int | float],
        copies: Mapping[Buffer, Allocation] | None = None,
    ) -> Call:
        """The call's facts: its arrays' shapes and its scalars.
        `copies`: memory in place of some buffers, each whole or a part.
        Raises `BadCall`: the kernel refuses types or sizes.
        """
        arrays = {}
        for name, buffer in buffers.items():
            memory = (copies or {}).get(buffer)
            arrays[name] = (
                buffer.facts
                if memory is None
                else replace(buffer.facts, size=memory.nbytes // buffer.itemsize)
            )
        call = Call(arrays, dict(values), self.blocks)
        if (wrong := self.kernel.problem(call)) is not None:
            raise BadCall(f"{self.kernel.name}: {wrong}")
        return call

    def accesses(self, *arguments: Any, **scalars: Any) -> tuple[Access, ...]:
        """The accesses of one launch with these arguments, which are those of a call; launches nothing.
        Raises `BadCall`: the arguments do not fit.
        """
        return self.kernel.accesses(self.call(*self.arguments(arguments, scalars)))

    def fill(self, buffers: Mapping[str, Buffer], stream: Stream) -> None:
        """Fill arguments with the content that the kernel needs, unless the user wrote, or may have written, content of their own."""
        for name, content in self.kernel.content.items():
            buffer = buffers[name]
            if content == "cycle" and not buffer.written:
                self.device.content.fill_cycle(
                    buffer.allocation, self.kernel.node_bytes, CYCLE_SEED, stream
                )
                self.device.streams.synchronize(stream)
                buffer.written = True

    def expected(
        self, arrays: Mapping[str, Any], values: Mapping[str, int | float]
    ) -> Mapping[str, Any]:
        """The reference's result. Raises `BadCall`: the reference refuses the content of the arguments."""
        assert self.kernel.reference is not None
        try:
            return self.kernel.reference(arrays, values)
        except ValueError as error:
            raise BadCall(f"{self.kernel.name}: {error}") from None

    def launch(
        self,
        buffers: Mapping[str, Buffer],
        values: Mapping[str, int | float],
        copies: Mapping[Buffer, Allocation] | None = None,
    ) -> Launch:
        """The launch for the device, with the buffers where they now are, or with `copies` of some of them, each whole or a part.
        Raises `BadCall`: the kernel refuses types or sizes, or cannot see the memory.
        Raises `Unsupported`: a block needs more shared memory than the device has for one.
        """
        call, facts = self.call(buffers, values, copies), self.device.facts
        shape = self.kernel.shape(facts, call)
        most = facts.max_shared_bytes_per_block
        if most is not None and shape.shared_bytes > most:
            raise Unsupported(
                f"{self.kernel.name} needs {format_bytes(shape.shared_bytes)} of shared memory for each block; "
                f"{facts.name} has at most {format_bytes(most)}"
            )
        memory = {name: (copies or {}).get(b, b.allocation) for name, b in buffers.items()}
        for name, allocation in memory.items() if self.kernel.source is not None else ():
            if not allocation.address:
                raise BadCall(
                    f"{self.kernel.name}: {name} is {allocation.kind.value} memory, which kernels cannot see"
                )
        return Launch(self.kernel, call, shape, memory)


class Kernels:
    """The catalogue on one device: `kernels.triad` is a `BoundKernel`.
    Raises `NoSuchKernel`: no kernel of that name; the message names the nearest.
    """

    def __init__(self, device: Device) -> None:
        self._device = device
        self._stream = device.streams.create()

    def __getattr__(self, name: str) -> BoundKernel:
        if name not in CATALOGUE:
            near = difflib.get_close_matches(name, CATALOGUE, n=1)
            hint = f"; did you mean {near[0]!r}?" if near else "."
            raise NoSuchKernel(
                f"no kernel {name!r} in the catalogue{hint} There are: {', '.join(sorted(CATALOGUE))}"
            )
        return BoundKernel(CATALOGUE[name], self._device, self._stream)

    def __dir__(self) -> list[str]:
        return sorted(CATALOGUE)
