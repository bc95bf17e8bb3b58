"""A kernel as data: source, entry, launch shape, what it touches, and a reference for its result.

A device compiles the source or, where it is simulated, derives the time from the accesses and the
result from the reference.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import Enum
from inspect import Parameter as Place
from inspect import Signature
from typing import Any, Literal, TypeAlias

from pytest_gpumem.kernels.sources import CPP_TYPES
from pytest_gpumem.records.device import DeviceFacts
from pytest_gpumem.records.measurement import MovedBytes

RESERVED_SHARED_BYTES = 1024
"""Shared memory of each block that the system keeps (CUDA C++ Programming Guide, compute
capabilities 8.x and 9.0)."""


class Role(str, Enum):
    READ = "read"
    WRITE = "write"
    # read and then written: its content must be put back before a result can be checked
    UPDATE = "update"
    SCALAR = "scalar"


@dataclass(frozen=True)
class Parameter:
    """One parameter of a kernel, in the order in which a caller gives it."""

    name: str
    role: Role
    default: int | float | None = None
    """Value of a scalar that the caller leaves out; None: it must be given."""
    least: int | None = None
    """Smallest value of a scalar that is a whole number; None: it is of the first array's element
    type."""


@dataclass(frozen=True)
class ArrayFacts:
    size: int  # elements
    dtype: str  # numPy type string without byte order, such as "f4"
    itemsize: int  # bytes of an element
    on_host: bool = False
    """The memory lies on the host's side of the link (pinned, registered or pageable)."""

    @property
    def nbytes(self) -> int:
        return self.size * self.itemsize


@dataclass(frozen=True)
class LaunchShape:
    blocks: int
    threads: int  # of a block
    shared_bytes: int = 0  # of dynamic shared memory
    vectors: int = 1  # value of `{vectors}` in the entry: 16-byte vectors of a thread at once


@dataclass(frozen=True)
class Access:
    """How a launch touches an argument: enough for traffic, sectors and a model of the time."""

    argument: str
    direction: Literal["read", "write"]
    footprint: int  # distinct bytes touched
    requested: int  # bytes that the threads request, repeats counted
    sectors_per_request: float = 4.0  # 32-byte sectors of a warp's request of 4-byte words: 4 to 32
    dependent: bool = False  # each access waits for the last (pointer chase): latency decides
    onward: bool = False  # each launch touches other lines, until all of the array was touched
    through_l1: bool = False  # repeated loads find their lines in L1 while the array fits into it
    page_by_page: bool = False  # each warp goes through pages of its own: a fault for each page


@dataclass(frozen=True)
class Call:
    """The facts of a call: arrays and scalars by parameter name."""

    arrays: Mapping[str, ArrayFacts]
    scalars: Mapping[str, int | float] = field(default_factory=dict)
    blocks: int | None = None  # grid chosen by the caller; None: the kernel's default


Reference: TypeAlias = Callable[[Mapping[str, Any], Mapping[str, int | float]], Mapping[str, Any]]


@dataclass(frozen=True)
class Kernel:
    """A kernel of the catalogue, or a user's own.

    `shape(facts, call)` gives the launch shape, `accesses(call)` what a launch touches.
    `reference(arrays, scalars)` computes the result with NumPy or CuPy: it gets arrays by name,
    changes none, and returns the new content of every written or updated parameter by name. It must
    hold for a prefix: with every array cut to its first elements (at least one table period), the
    result is a prefix of the full result. The first `len(result)` elements are compared.
    """

    name: str
    parameters: tuple[Parameter, ...]
    shape: Callable[[DeviceFacts, Call], LaunchShape]
    accesses: Callable[[Call], tuple[Access, ...]]
    source: str | None = None
    """File name in `kernels/`; None for a copy by the device's copy engine."""
    entry: str = ""
    """Name of the template or function, as in "triad<{dtype}, {vectors}>"; `{dtype}` stands for the
    C++ type of the first array and `{vectors}` for the launch shape's."""
    reference: Reference | None = None
    launch_arguments: Callable[[Call], tuple[str | int, ...]] | None = None
    """C parameters in order: an array's name (its address), a scalar's name (passed in the element
    type of the first array), or an integer (passed as 64-bit). None: arrays, the element count of
    the first array, scalars; whole scalars as integers."""
    dtypes: tuple[str, ...] = ("f4", "f8", "i4")  # element types that it is compiled for
    section: str = ""  # section of the source text that it implements
    checks: tuple[Callable[[Call], str | None], ...] = ()
    """Each says what is wrong with a call, such as its sizes, or None."""
    relative_tolerance: float = 0.0
    """Largest relative difference to the reference; 0 for exact kernels."""
    accesses_per_launch: Callable[[Call], int] | None = None
    """Dependent accesses of a launch, for a latency per access."""
    on_chip_cycles: Callable[[Call], float] | None = None
    """Cycles of an SM for all requests of a launch, where they can decide its time: for each line
    of 128 bytes that a request touches, and each access to shared memory and bank conflict. Of a
    kernel that computes more than it moves: the cycles of its arithmetic."""
    cycle: str | None = None
    """Parameter that needs a random cycle in place of random data, for a pointer chase."""

    @property
    def signature(self) -> Signature:
        """How a caller gives the arguments."""
        places = []
        for parameter in self.parameters:
            default = Place.empty if parameter.default is None else parameter.default
            places.append(Place(parameter.name, Place.POSITIONAL_OR_KEYWORD, default=default))
        return Signature(places)

    def expression(self, dtype: str, shape: LaunchShape) -> str:
        """Return the C++ name expression to compile for an element type: "triad<float, 1>"."""
        named = self.entry.replace("{dtype}", CPP_TYPES.get(dtype, ""))
        return named.replace("{vectors}", str(shape.vectors))

    def arguments_of(self, call: Call) -> tuple[str | int, ...]:
        """Return the C parameters of a call, as `launch_arguments`."""
        if self.launch_arguments is not None:
            return self.launch_arguments(call)
        arrays: list[str | int] = []
        scalars: list[str | int] = []
        for parameter in self.parameters:
            if parameter.role is not Role.SCALAR:
                arrays.append(parameter.name)
            elif parameter.least is None:
                scalars.append(parameter.name)
            else:
                scalars.append(int(call.scalars[parameter.name]))
        return (*arrays, call.arrays[str(arrays[0])].size, *scalars)

    def problem(self, call: Call) -> str | None:
        """Return what is wrong with a call in a sentence that names the values, or None."""
        for name, array in call.arrays.items():
            if array.size < 1:
                return f"{name} is empty"
            if array.dtype not in self.dtypes:
                return f"{name} holds {array.dtype}; accepted: {', '.join(self.dtypes)}"
        if len({array.dtype for array in call.arrays.values()}) > 1:
            types = ", ".join(f"{name} holds {array.dtype}" for name, array in call.arrays.items())
            return f"the arrays must have one element type: {types}"
        if call.blocks is not None and call.blocks < 1:
            return f"a grid of {call.blocks} blocks launches nothing; at least 1 is needed"
        for parameter in self.parameters:
            value = call.scalars.get(parameter.name)
            if parameter.least is None or value is None:
                continue
            if not math.isfinite(value) or value != int(value) or value < parameter.least:
                least = f"a whole number of at least {parameter.least} is needed"
                return f"{parameter.name} is {value}; {least}"
        for check in self.checks:
            problem = check(call)
            if problem is not None:
                return problem
        return None

    def traffic(self, call: Call) -> MovedBytes:
        """Return the compulsory bytes of a launch; only those that cross the link, if some do."""
        totals = {"read": 0, "write": 0}
        accesses = self.accesses(call)
        link = any(call.arrays[access.argument].on_host for access in accesses)
        for access in accesses:
            on_host = call.arrays[access.argument].on_host
            if on_host or not link or self.source is None:
                totals[access.direction] += access.footprint
        return MovedBytes(reads=totals["read"], writes=totals["write"], link=link)
