"""The measurements of a session: what is to be measured is described, then measured."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from msgspec.structs import replace

from pytest_gpumem.devices.protocol import OWN_CONTEXT, PLENTY, DeviceError, Stream
from pytest_gpumem.measuring.bound import BadCall, BoundKernel
from pytest_gpumem.measuring.case import CallTarget, Case, CaseTarget
from pytest_gpumem.measuring.harness import Harness
from pytest_gpumem.measuring.measure import Measuring
from pytest_gpumem.measuring.plan import NO_PASSES, Passes, Plan
from pytest_gpumem.measuring.target import KernelTarget, Target
from pytest_gpumem.measuring.work import Work
from pytest_gpumem.memory.buffers import Arena
from pytest_gpumem.memory.current_device import on_its_device
from pytest_gpumem.memory.l2 import PersistingStream
from pytest_gpumem.memory.spaces import Memory
from pytest_gpumem.options import MODES, SAMPLERS
from pytest_gpumem.records.measurement import Measurement


class Conductor(Harness):
    """Describes and measures targets on a device, for a whole session."""

    @on_its_device
    def target(
        self,
        /,
        function: BoundKernel | Work | Callable[..., object],
        arguments: tuple[Any, ...],
        keywords: dict[str, Any],
        *,
        arena: Arena,
        stream: PersistingStream | None = None,
        on_simulated: bool = False,
        **declared: Any,
    ) -> Target:
        """Describe a kernel of the catalogue, work or any callable, with its arguments.

        `declared`: fields of a `Case` that the user gave for a callable.
        Raises `BadCall`: `function`, its arguments or what is declared do not fit.
        """
        queue = arena.stream if stream is None else _stream_of(stream)
        if isinstance(function, Work):
            if arguments or keywords or declared or stream is not None:
                names = ", ".join(f"{name}=" for name in (declared or ("stream",)))
                raise BadCall(
                    f"gpu_benchmark({function.name}): work of gpu_work takes no arguments and no "
                    f"{names}: it has its own"
                )
            return function.target(arena)
        if isinstance(function, BoundKernel):
            for name, value in declared.items():
                known = "check" if name in ("check", "reference") else "traffic"
                raise BadCall(
                    f"{name}={value!r}: the {known} of {function.name} is known from the kernel"
                )
            if stream is None and function.persisting is not None:
                raise BadCall(
                    f"{function.name}.with_stream(stream): with_stream() is for untimed calls; "
                    "measure with stream=stream"
                )
            return KernelTarget(function, arguments, keywords, arena, queue, stream).target
        if not callable(function):
            raise _not_callable(function)
        self.device.memory.make_room(unless_free=PLENTY)
        return CallTarget(
            function, arguments, keywords, arena, queue, stream, declared, on_simulated=on_simulated
        ).target

    @on_its_device
    def case(self, build: Callable[[Memory], Case], *, arena: Arena) -> Target:
        """Describe what `build` makes at each placement. Raises `BadCall` if that is no `Case`."""
        if not callable(build):
            raise BadCall(
                "gpu_benchmark.case() takes a function that is given a memory and returns a Case, "
                f"not an object of type {type(build).__name__}"
            )
        self.device.memory.make_room(unless_free=PLENTY)
        return CaseTarget(build, arena).target

    def measure(
        self,
        target: Target,
        plan: Plan,
        *,
        arena: Arena,
        label: str,
        name: str,
        passes: Passes = NO_PASSES,
    ) -> Measurement:
        """Measure a target, and close it.

        `arena`: holds the padding between placements; its seed makes them repeatable.
        `label`: tells the measurements of a test apart; `name`: of the test's NVTX ranges.
        `passes`: untimed passes to take after the samples.
        Raises `WrongResult`: the result of a launch is not the reference's.
        Raises `BadCall`: mode or sampler do not fit the target.
        Raises `Unsupported`, `DeviceError`: the device cannot do it, or a launch failed.
        """
        elsewhere = self.device.elsewhere()
        if target.foreign and elsewhere == OWN_CONTEXT:
            raise DeviceError(
                f"{OWN_CONTEXT} is current, not the GPU's primary one: work of the two cannot "
                "be measured together"
            )
        with self.device.current(), self.device.footprints.paused():
            try:
                for option, value, accepted in (
                    ("mode", plan.mode, MODES),
                    ("sampler", plan.sampler, SAMPLERS),
                ):
                    if value not in accepted:
                        raise BadCall(f"{option}={value!r}; accepted are {', '.join(accepted)}")
                measuring = Measuring(self, target, plan, passes, arena, name)
                measured = measuring.run(label)
            finally:
                try:
                    arena.pad(0)
                finally:
                    target.close()
        if elsewhere is None:
            return measured
        note = (
            f"the test had made {elsewhere} current; this row is of the GPU that the session "
            "measures"
        )
        return replace(measured, notes=(*measured.notes, note))


def _stream_of(stream: PersistingStream) -> Stream:
    """Return the stream of a persisting stream that a measurement uses."""
    if not isinstance(stream, PersistingStream):
        raise BadCall(f"stream= takes what persisting_stream() gives, not {type(stream).__name__}")
    if stream.closed:
        raise BadCall(
            "stream= is a persisting stream whose `with` block has ended: measure inside the block"
        )
    stream.used = True
    return stream.stream


def _not_callable(given: object) -> BadCall:
    """Return the error of what `gpu_benchmark` cannot measure."""
    remedy = ""
    if isinstance(given, Case):
        remedy = "; pass gpu_benchmark.case() a function that returns it"
    elif given is None:
        remedy = (
            ": pass the kernel and its arguments, as in gpu_benchmark(kernel, a, b), and do not "
            "call it"
        )
    kind = type(given).__name__
    return BadCall(
        "gpu_benchmark() takes a kernel of gpu_kernels or a callable, not an object of type "
        f"{kind}{remedy}"
    )
