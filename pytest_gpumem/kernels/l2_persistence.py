"""The experiments on persisting L2 of Lei Mao's article and of the Best Practices Guide, and the
table in shared memory instead (`kernels/l2_persistence.cu`)."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from pytest_gpumem.kernels.kernel import (
    RESERVED_SHARED_BYTES,
    WARP,
    Access,
    Arrays,
    Call,
    Kernel,
    LaunchShape,
    Parameter,
    Role,
    Scalars,
    ceil_div,
    element,
    grid,
    module_of,
    scaled,
    thread_per_element,
    touch,
)
from pytest_gpumem.records.device import DeviceFacts

_THREADS = 1024
_REMAINDER_CYCLES = 7.0
"""SM cycles of a warp's iteration: a 64-bit `%` is about 30 instructions, of which the four
schedulers of an SM issue four a cycle."""


def _reset_shape(facts: DeviceFacts, call: Call) -> LaunchShape:
    # The article launches 32 blocks: `with_grid(32)`.
    return grid(call, 2 * facts.sm_count, _THREADS)


def _reset_accesses(call: Call) -> tuple[Access, ...]:
    data, table = call.arrays["data_streaming"], call.arrays["lut_persistent"]
    entries = min(table.size, data.size)
    return (
        touch("lut_persistent", "read", call, elements=entries, requests=data.size),
        touch("data_streaming", "write", call),
    )


def _reset_arguments(call: Call) -> tuple[str | int, ...]:
    data, table = call.arrays["data_streaming"], call.arrays["lut_persistent"]
    return "data_streaming", "lut_persistent", data.size, table.size


def _reset(arrays: Arrays, _scalars: Scalars) -> dict[str, Any]:
    data, table = arrays["data_streaming"], arrays["lut_persistent"]
    result = module_of(data).empty_like(data)
    whole = data.size // table.size * table.size
    # A view with a row for each whole repetition of the table.
    result[:whole].reshape(-1, table.size)[:] = table
    result[whole:] = table[: data.size - whole]
    return {"data_streaming": result}


def _shared_shape(facts: DeviceFacts, call: Call) -> LaunchShape:
    """As many blocks as the SMs hold at once, each with the table."""
    data, table = call.arrays["data_streaming"], call.arrays["lut_persistent"]
    resident = facts.max_threads_per_sm // _THREADS
    if facts.shared_bytes_per_sm is not None:
        tables = facts.shared_bytes_per_sm // (table.nbytes + RESERVED_SHARED_BYTES)
        resident = min(resident, tables)
    blocks = min(facts.sm_count * max(resident, 1), ceil_div(data.size, _THREADS))
    return replace(grid(call, blocks, _THREADS), shared_bytes=table.nbytes)


def _shared_accesses(call: Call) -> tuple[Access, ...]:
    # Each block reads the table. The default grid depends on the device, which is not known here:
    # without a grid of the caller a single block is counted.
    table = call.arrays["lut_persistent"]
    return (
        touch("lut_persistent", "read", call, requests=table.size * (call.blocks or 1)),
        touch("data_streaming", "write", call),
    )


def _cycles(call: Call) -> float:
    return _REMAINDER_CYCLES * call.arrays["data_streaming"].size / WARP


def _sliding_accesses(call: Call) -> tuple[Access, ...]:
    persistent, streaming = call.arrays["data_persistent"], call.arrays["data_streaming"]
    touched = min(persistent.size, streaming.size)
    return (
        touch("data_persistent", "read", call, elements=touched, requests=streaming.size),
        touch("data_persistent", "write", call, elements=touched, requests=streaming.size),
        touch("data_streaming", "read", call),
        touch("data_streaming", "write", call),
    )


def _sliding_arguments(call: Call) -> tuple[str | int, ...]:
    persistent, streaming = call.arrays["data_persistent"], call.arrays["data_streaming"]
    return "data_persistent", "data_streaming", persistent.size, streaming.size


def _sliding(arrays: Arrays, _scalars: Scalars) -> dict[str, Any]:
    persistent, streaming = arrays["data_persistent"].copy(), arrays["data_streaming"]
    persistent[: streaming.size] |= element(1, persistent)
    return {"data_persistent": persistent, "data_streaming": scaled(streaming, 3)}


_RESET = Kernel(
    name="reset_data",
    parameters=(Parameter("data_streaming", Role.WRITE), Parameter("lut_persistent", Role.READ)),
    shape=_reset_shape,
    accesses=_reset_accesses,
    source="l2_persistence.cu",
    entry="reset_data<{dtype}>",
    reference=_reset,
    launch_arguments=_reset_arguments,
    dtypes=("i4", "f4"),
    section="CUDA L2 Persistent Cache, Lei Mao: data reset",
    on_chip_cycles=_cycles,
)

KERNELS = (
    _RESET,
    replace(
        _RESET,
        name="reset_data_shared",
        shape=_shared_shape,
        accesses=_shared_accesses,
        entry="reset_data_shared<{dtype}>",
        section="CUDA L2 Persistent Cache, Lei Mao: persistent cache VS shared memory",
    ),
    Kernel(
        name="sliding_window",
        parameters=(
            Parameter("data_persistent", Role.UPDATE),
            Parameter("data_streaming", Role.UPDATE),
        ),
        shape=thread_per_element("data_streaming", _THREADS),
        accesses=_sliding_accesses,
        source="l2_persistence.cu",
        entry="sliding_window",
        reference=_sliding,
        launch_arguments=_sliding_arguments,
        dtypes=("i4",),
        section="CUDA C++ Best Practices Guide 9.2.2.2 Tuning the Access Window Hit-Ratio",
    ),
)
