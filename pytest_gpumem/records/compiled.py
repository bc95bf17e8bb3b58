"""The machine code of a kernel, compiled without a GPU."""

from __future__ import annotations

from pytest_gpumem.records.record import Bytes, Count, Record, Sectors


class CompiledKernel(Record, frozen=True):
    """One kernel, compiled for one architecture."""

    source: str
    """Its file, or "module:function" of a Triton kernel."""
    name: str
    """As declared: a C++ name expression, or the signature of a Triton kernel."""
    architecture: str
    """Such as "sm_90"."""
    digest: str
    """Digest of the machine code: equal for equal code (`kernels.cubin`)."""
    registers: Count | None
    """Registers of a thread."""
    spill: Bytes | None
    """Local memory of a thread: spilled registers, and arrays that are indexed at run time."""
    shared: Bytes
    """Shared memory of a block: static, and of a Triton kernel also the dynamic one."""
    code: Bytes
    """Machine code."""
    sectors: Sectors | None = None
    """Sectors of 32 bytes that a warp's request to global memory touches, over the fewest that hold the same bytes, of the worst access: 1
    if all are coalesced. None if the pattern of no access is known (`kernels.warp_requests`)."""
    unknown: Count = 0
    """Loads and stores of global memory whose pattern is not known."""


class CompiledKernels(Record, frozen=True):
    """The kernels of a project."""

    kernels: tuple[CompiledKernel, ...]
