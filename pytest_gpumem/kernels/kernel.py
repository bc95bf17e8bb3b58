"""A kernel as data: source, entry, launch shape, what it touches, and a reference for its result.

A kernel knows no device. `shape` and `accesses` are pure functions of a call's facts; a device compiles the source or, where it is
simulated, derives the time from the accesses and the result from the reference.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, Literal

from pytest_gpumem.records.device import DeviceFacts
from pytest_gpumem.records.measurement import MovedBytes

RESERVED_SHARED_BYTES = 1024
"""Shared memory of each block that the system keeps (CUDA C++ Programming Guide, compute capabilities 8.x and 9.0)."""


class Role(str, Enum):
    """Use of a parameter by a kernel."""

    READ = "read"
    WRITE = "write"
    UPDATE = "update"  # read and then written: its content must be put back before a result can be checked
    SCALAR = "scalar"


@dataclass(frozen=True)
class Parameter:
    """One parameter of a kernel, in the order in which a caller gives it."""

    name: str
    role: Role
    default: int | float | None = None
    """Value of a scalar that the caller leaves out; None: it must be given."""
    least: int | None = None
    """A scalar that is a whole number from this one on; None: it is of the first array's element
    type."""


@dataclass(frozen=True)
class ArrayFacts:
    """Facts of one array argument."""

    size: int  # elements
    dtype: str  # numPy type string without byte order, such as "f4"
    itemsize: int  # bytes of one element
    on_host: bool = False
    """The memory lies on the host's side of the link (pinned, registered or pageable)."""

    @property
    def nbytes(self) -> int:
        return self.size * self.itemsize


@dataclass(frozen=True)
class LaunchShape:
    """Grid and block of a launch; threads of a block and dynamic shared memory in bytes."""

    blocks: int
    threads: int
    shared_bytes: int = 0
    vectors: int = 1  # value of `{vectors}` in the kernel's entry: 16-byte vectors of each array that one thread handles at once


@dataclass(frozen=True)
class Access:
    """How one launch touches one argument: enough for compulsory traffic, for sectors and for a model of the time."""

    argument: str
    direction: Literal["read", "write"]
    footprint: int  # distinct bytes touched
    requested: int  # bytes that the threads ask for, repeats counted: above `footprint` where lines are used again
    sectors_per_request: float = 4.0  # 32-byte sectors that one warp-wide request of 4-byte words touches: 4 when coalesced, up to 32
    dependent: bool = False  # each access waits for the one before (pointer chase): latency, not bandwidth, decides
    random: bool = False  # lines are touched in no order that a page or a row buffer could use
    nearby: bool = False
    """Other requests for the sectors of one follow at once, by neighbouring warps: they find them in L2 however large the array is, so
    that sectors beyond the coalesced four cost bandwidth of L2, not of DRAM."""
    onward: bool = False  # a launch touches other lines than the launches before, until it has been through the whole array
    through_l1: bool = False  # repeated loads of a pointer chase find their lines in L1 while the whole array fits into it
    page_by_page: bool = False  # each warp goes through a page of its own, so that one fault stands for the whole page
    wrapping: bool = False
    """The threads of a grid-stride loop read element i modulo the array's size: those of a block may come to the same few again and again,
    and find them in L1. All other loads are modelled as going to L2."""


@dataclass(frozen=True)
class Call:
    """The facts of one call: arrays and scalars by parameter name, and a grid if the caller chose one."""

    arrays: Mapping[str, ArrayFacts]
    scalars: Mapping[str, int | float] = field(default_factory=dict)
    blocks: int | None = None  # grid chosen by the caller; None: the kernel's own default


@dataclass(frozen=True)
class Kernel:
    """One kernel of the catalogue, or a user's own.

    `shape(facts, call)` gives the launch shape, `accesses(call)` what a launch touches. `reference(arrays, scalars)` computes the result
    with NumPy or CuPy: it gets arrays by name, changes none, and returns the new content of every written or updated parameter by name. It
    must hold for a prefix: with every array cut to its first elements (at least one table period), the result is a prefix of the full
    result. The first `len(result)` elements are compared: one written element may come from many read ones, or from one that lies far
    behind.
    """

    name: str
    parameters: tuple[Parameter, ...]
    shape: Callable[[DeviceFacts, Call], LaunchShape]
    accesses: Callable[[Call], tuple[Access, ...]]
    source: str | None = None
    """File name in `kernels/`; None for a copy by the device's copy engine."""
    entry: str = ""
    """Name of the template or function; `{dtype}` stands for the C++ type of the first array and `{vectors}` for the launch shape's, as in
    "triad<{dtype}, {vectors}>"."""
    reference: (
        Callable[[Mapping[str, Any], Mapping[str, int | float]], Mapping[str, Any]] | None
    ) = None
    elementwise: bool = False
    """The reference holds for every piece: with all arrays cut to the same elements, the result is that piece of the full result."""
    launch_arguments: Callable[[Call], tuple[str | int, ...]] | None = None
    """C parameters in order: an array's name (its address), a scalar's name (passed in the element type of the first array), or an
    integer such as a size or a step count (passed as 64-bit). None: arrays, the element count of the first one, scalars; whole ones as
    integers.
    """
    dtypes: tuple[str, ...] = ("f4", "f8", "i4")  # element types that it is compiled for
    section: str = ""  # section of the source text that it implements
    loads_in_flight: int = 1
    """Independent loads that one thread has in flight before the first is used, for each of its launch shape's vectors."""
    load_bytes: int | None = None  # bytes of one load of a thread; None: one element
    checks: tuple[
        Callable[[Call], str | None], ...
    ] = ()  # each says what is wrong with a call, such as its sizes, or None
    relative_tolerance: float = 0.0
    """Largest relative difference to the reference; 0 for exact kernels."""
    accesses_per_launch: Callable[[Call], int] | None = None
    """Dependent accesses of one launch, for a latency per access."""
    on_chip_cycles: Callable[[Call], float] | None = None
    """Cycles for which one SM's L1 and shared memory are busy with all requests of a launch, where they can decide its time: one for each
    line of 128 bytes that a request to global memory touches, one for each access to shared memory and bank conflict. Of a kernel that
    computes more than it moves: the cycles of its arithmetic."""
    on_chip_loads: Callable[[Call], int] | None = None
    """Loads from shared memory of a launch, over all threads, where a thread waits for each before it goes on to the next: with few
    threads they decide its time."""
    content: Mapping[str, str] = field(default_factory=dict)
    """Content that a parameter needs where random data will not do, such as "cycle" for the nodes of a pointer chase."""
    node_bytes: int = 64
    """Bytes from one node to the next, for a parameter whose content is "cycle"."""

    def expression(self, cpp_type: str, shape: LaunchShape) -> str:
        """The C++ name expression to compile: "triad<float, 1>"."""
        return self.entry.replace("{dtype}", cpp_type).replace("{vectors}", str(shape.vectors))

    def arguments_of(self, call: Call) -> tuple[str | int, ...]:
        """The C parameters of a call, as `launch_arguments` describes them."""
        if self.launch_arguments is not None:
            return self.launch_arguments(call)
        arrays = [p.name for p in self.parameters if p.role is not Role.SCALAR]
        scalars = [p for p in self.parameters if p.role is Role.SCALAR]
        return (
            *arrays,
            call.arrays[arrays[0]].size,
            *(p.name if p.least is None else int(call.scalars[p.name]) for p in scalars),
        )

    def problem(self, call: Call) -> str | None:
        """What is wrong with a call, in one sentence that names the values: arrays, grid, scalars, then `checks`. None if nothing is."""
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
            if (
                parameter.least is not None
                and value is not None
                and not (math.isfinite(value) and value == int(value) >= parameter.least)
            ):
                return f"{parameter.name} is {value}; a whole number of at least {parameter.least} is needed"
        return next(
            (problem for check in self.checks if (problem := check(call)) is not None), None
        )

    def traffic(self, call: Call) -> MovedBytes:
        """Compulsory bytes of one launch: the sum of the accesses' footprints by direction."""
        accesses = self.accesses(call)
        link = any(call.arrays[a.argument].on_host for a in accesses)
        if link and self.source is not None:
            # A kernel that reads mapped host memory: what crosses the link is what lies beyond it.
            accesses = tuple(a for a in accesses if call.arrays[a.argument].on_host)
        return MovedBytes(
            reads=sum(a.footprint for a in accesses if a.direction == "read"),
            writes=sum(a.footprint for a in accesses if a.direction == "write"),
            link=link,
        )
