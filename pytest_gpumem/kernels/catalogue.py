"""Every kernel that ships, by name: one module for each source file in `kernels/`."""

from __future__ import annotations

from types import MappingProxyType

from pytest_gpumem.kernels import access_pattern, l2_bandwidth, l2_persistence, latency, stream, transfers, transpose, unified_memory
from pytest_gpumem.kernels.kernel import Kernel

_ROOMS = (stream, l2_persistence, l2_bandwidth, unified_memory, access_pattern, transpose, latency, transfers)

CATALOGUE: MappingProxyType[str, Kernel] = MappingProxyType({k.name: k for room in _ROOMS for k in room.KERNELS})
"""The catalogue: name to kernel."""

SENTENCES: MappingProxyType[str, str] = MappingProxyType(
    {
        "copy": "Copies an array.",
        "mul": "Writes an array times a number into another.",
        "stream_add": "Adds two arrays into a third.",
        "triad": "Adds an array and a number times another into a third.",
        "write": "Fills an array with a number.",
        "read": "Sums an array, a partial sum for each block.",
        "dot": "Multiplies two arrays element by element and sums the products, a partial sum for each block.",
        "reset_data": "Fills a long array with a short table, over and over: the table can persist in L2.",
        "reset_data_shared": "Does the same with the table in shared memory.",
        "sliding_window": "Updates every element of a long array, and elements of a short region that can persist in L2.",
        "l2_read": "Reads an array several times in one launch: L2 serves what fits.",
        "add": "Adds one array to another in place.",
        "init": "Fills an array, each thread one element after another with a stride of the grid.",
        "init_warp_per_page": "Fills an array, each warp one page of it.",
        "offset_copy": "Copies an array from an offset on: requests lie across sectors.",
        "stride_copy": "Copies every element at a stride: requests touch more sectors than they use.",
        "permuted_copy": "Copies an array with the threads of a warp in another order within their segment.",
        "transpose": "Transposes a matrix with strided writes.",
        "transpose_tiled": "Transposes a matrix through tiles in shared memory, with bank conflicts.",
        "transpose_padded": "Transposes a matrix through padded tiles in shared memory, without bank conflicts.",
        "chase": "Follows a random cycle of nodes, each access after the one before.",
        "chase_l1": "Follows the cycle with loads through L1.",
        "chase_onward": "Follows the cycle from where the launch before ended.",
        "memcpy": "Copies by the copy engine, without a kernel.",
        "elementwise": "Updates every element in place, with arithmetic for some rounds.",
        "reread": "Reads an array several times at a stride, and writes it.",
    }
)
"""What each kernel does, for the documentation."""
