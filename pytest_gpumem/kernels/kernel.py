"""Kernels as data: what each launches and touches, a reference for its result, and its source.

A device compiles the source. The simulated device derives the time from the accesses and the result
from the reference.
"""

from __future__ import annotations

import hashlib
import inspect
import math
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from typing import Any, Literal, TypeAlias

from pytest_gpumem.records.device import DeviceFacts
from pytest_gpumem.records.measurement import MovedBytes

COMPILE_OPTIONS = ("--std=c++17",)
"""Options of NVRTC and nvcc alike, besides the architecture. The sources include no header and need
no other option."""
CPP_TYPES = {"f4": "float", "f8": "double", "i4": "int"}  # of the templates' elements
_PACKAGE = Path(__file__).parent
WARP = 32  # threads
SECTORS_COALESCED = 4.0
"""32-byte sectors of a warp's request for 32 consecutive, aligned 4-byte words."""
SECTORS_SCATTERED = 32.0  # sectors of a request in which no two threads share one
RESERVED_SHARED_BYTES = 1024
"""Shared memory of each block that the system keeps (CUDA C++ Programming Guide, compute
capabilities 8.x and 9.0)."""

Direction: TypeAlias = Literal["read", "write"]


class Role(str, Enum):
    READ = "read"
    WRITE = "write"
    # read and then written
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
    """Smallest value of a whole-number scalar. None: a scalar of the first array's element type."""


@dataclass(frozen=True)
class ArrayFacts:
    size: int  # elements
    dtype: str  # NumPy type string without byte order, such as "f4"
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
    direction: Direction
    footprint: int  # distinct bytes touched
    requested: int  # bytes that the threads request, each time counted
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


ShapeOf: TypeAlias = Callable[[DeviceFacts, Call], LaunchShape]
Accesses: TypeAlias = Callable[[Call], tuple[Access, ...]]
Check: TypeAlias = Callable[[Call], str | None]  # None, or one sentence that names the values
Arrays: TypeAlias = Mapping[str, Any]  # arrays of a module, by parameter name
Scalars: TypeAlias = Mapping[str, int | float]  # by parameter name
Reference: TypeAlias = Callable[[Arrays, Scalars], Mapping[str, Any]]


@dataclass(frozen=True)
class Kernel:
    """A kernel of the catalogue, or a user's own.

    `shape(facts, call)` gives the launch shape, `accesses(call)` what a launch touches.
    `reference(arrays, scalars)` computes the result with NumPy or CuPy: it gets arrays by name,
    changes none, and returns the new content of every written or updated parameter by name. The
    simulated device cuts every array to its first elements: the result must then be a prefix of the
    full result. The first `len(result)` elements are compared.
    """

    name: str
    parameters: tuple[Parameter, ...]
    shape: ShapeOf
    accesses: Accesses
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
    section: str = ""  # section of the manual that it implements
    checks: tuple[Check, ...] = ()
    """Each says what is wrong with a call, such as its sizes, or None."""
    relative_tolerance: float = 0.0
    """Largest relative difference to the reference; 0 for exact kernels."""
    accesses_per_launch: Callable[[Call], int] | None = None
    """Dependent accesses of a launch, for a latency per access."""
    on_chip_cycles: Callable[[Call], float] | None = None
    """Cycles that a single SM would need for a launch, where they can decide its time: one for each
    line of 128 bytes that a request touches, each access to shared memory and each bank conflict;
    of a kernel that computes more than it moves, those of its arithmetic."""
    cycle: str | None = None
    """Parameter that needs a random cycle in place of random data, for a pointer chase."""

    @property
    def signature(self) -> inspect.Signature:
        """How a caller gives the arguments."""
        kind, accepted = inspect.Parameter.POSITIONAL_OR_KEYWORD, []
        for parameter in self.parameters:
            default = inspect.Parameter.empty if parameter.default is None else parameter.default
            accepted.append(inspect.Parameter(parameter.name, kind, default=default))
        return inspect.Signature(accepted)

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
            # A copy counts both sides: of a link `MovedBytes.total` takes the larger one.
            if on_host or not link or self.source is None:
                totals[access.direction] += access.footprint
        return MovedBytes(reads=totals["read"], writes=totals["write"], link=link)


# Functions that make the fields of a kernel


def ceil_div(dividend: int, divisor: int) -> int:
    return -(-dividend // divisor)


def grid(call: Call, default: int, threads: int) -> LaunchShape:
    """Return the grid that the caller chose, or `default` blocks and at least one."""
    if call.blocks is not None:
        return LaunchShape(call.blocks, threads)
    return LaunchShape(max(default, 1), threads)


def enough_threads(count: Callable[[Call], int], threads: int = 256) -> ShapeOf:
    """At least `count` threads, in blocks of `threads`."""

    def shape(_facts: DeviceFacts, call: Call) -> LaunchShape:
        return grid(call, ceil_div(count(call), threads), threads)

    return shape


def thread_per_element(name: str, threads: int = 256) -> ShapeOf:
    """One thread to each element of the array `name`: the textbook launch."""

    def size(call: Call) -> int:
        return call.arrays[name].size

    return enough_threads(size, threads)


def touch(
    name: str,
    direction: Direction,
    call: Call,
    *,
    elements: int | None = None,
    requests: int | None = None,
    sectors: float = SECTORS_COALESCED,
    **traits: bool,
) -> Access:
    """Return the access to an array. `elements`: how many distinct ones are touched (default: all).
    `requests`: how often threads ask for one (default: once each). `sectors`: as
    `Access.sectors_per_request`. `traits`: flags of `Access`."""
    array = call.arrays[name]
    if elements is None:
        elements = array.size
    if requests is None:
        requests = elements
    return Access(
        argument=name,
        direction=direction,
        footprint=elements * array.itemsize,
        requested=requests * array.itemsize,
        sectors_per_request=sectors,
        **traits,
    )


def touch_all(reads: Sequence[str], writes: Sequence[str]) -> Accesses:
    """The accesses of a kernel that touches each element of these arrays once."""

    def accesses(call: Call) -> tuple[Access, ...]:
        touched = [touch(name, "read", call) for name in reads]
        touched += [touch(name, "write", call) for name in writes]
        return tuple(touched)

    return accesses


def same_size(*names: str) -> Check:
    def check(call: Call) -> str | None:
        sizes = [call.arrays[name].size for name in names]
        if len(set(sizes)) == 1:
            return None
        listed = ", ".join(f"{name} has {size}" for name, size in zip(names, sizes, strict=True))
        return f"the arrays must have the same number of elements: {listed}"

    return check


def in_element_type(name: str) -> Check:
    """The scalar `name` is finite and, for integer arrays, an integer that the element type can
    hold."""

    def check(call: Call) -> str | None:
        value = call.scalars[name]
        array = next(iter(call.arrays.values()))
        if not math.isfinite(value):
            return f"{name} is {value}; a finite number is needed"
        if array.dtype.startswith("i"):
            limit = 2 ** (8 * array.itemsize - 1)
            if value != int(value) or not -limit <= value < limit:
                return f"{name} is {value}, which arrays of {array.dtype} cannot hold"
        return None

    return check


def module_of(array: Any) -> Any:
    """The module of an array, `numpy` or `cupy`."""
    return sys.modules[type(array).__module__.partition(".")[0]]


def element(value: int | float, array: Any) -> Any:
    """A scalar in an array's element type, as the kernel gets it."""
    return array.dtype.type(value)


def scaled(array: Any, value: int | float) -> Any:
    # In CuPy `array * scalar` imports SciPy, which takes a quarter of a second.
    return module_of(array).multiply(array, element(value, array))


def filled_like(array: Any, value: int | float) -> Any:
    return module_of(array).full(array.shape, element(value, array), dtype=array.dtype)


def copied(destination: str, source: str) -> Reference:
    """The expected result of a copy."""

    def reference(arrays: Arrays, _scalars: Scalars) -> dict[str, Any]:
        return {destination: arrays[source].copy()}

    return reference


def filled(name: str) -> Reference:
    """The expected result of filling an array with the scalar `value`."""

    def reference(arrays: Arrays, scalars: Scalars) -> dict[str, Any]:
        return {name: filled_like(arrays[name], scalars["value"])}

    return reference


def requested_bytes(accesses: Sequence[Access]) -> int:
    return sum(access.requested for access in accesses)


def sectors_per_request(accesses: Sequence[Access]) -> float:
    """Return the mean sectors of the requests of a launch: 4 if all are coalesced, up to 32."""
    requested = requested_bytes(accesses)
    if not requested:
        raise ValueError("no access asks for a byte: no request has sectors")
    return sum(access.requested * access.sectors_per_request for access in accesses) / requested


# Sources


def source_folder() -> Path:
    """Return the folder of the `.cu` files: of the wheel, else of the checkout.

    Raises `FileNotFoundError`: the installation is incomplete.
    """
    shipped, checkout = _PACKAGE / "cu", _PACKAGE.parent.parent / "kernels"
    for candidate in (shipped, checkout):
        if any(candidate.glob("*.cu")):
            return candidate
    raise FileNotFoundError(
        f"no CUDA sources in {shipped} (installed) nor in {checkout} (checkout): reinstall "
        "pytest-gpumem"
    )


def read_source(name: str) -> str:
    """Return the text of a source file, such as "stream.cu"."""
    path = source_folder() / name
    try:
        return path.read_text(encoding="utf-8")
    except FileNotFoundError:
        present = ", ".join(sorted(p.name for p in path.parent.glob("*.cu")))
        raise FileNotFoundError(
            f"no kernel source {name!r} in {path.parent}; there are {present}"
        ) from None


def fingerprint(name: str) -> str:
    """Return the SHA-256 of a source's text, in hexadecimal."""
    return hashlib.sha256(read_source(name).encode("utf-8")).hexdigest()
