"""Compulsory traffic, sectors, launch shapes and refusals, against numbers worked out by hand."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kernel_calls import GiB, KiB, MiB, sized
from msgspec.structs import replace

from pytest_gpumem.kernels.catalogue import CATALOGUE
from pytest_gpumem.kernels.kernel import (
    Access,
    ArrayFacts,
    Call,
    requested_bytes,
    sectors_per_request,
)
from pytest_gpumem.kernels.stream import map_shape
from pytest_gpumem.records.device import DeviceFacts

N = 128 * MiB  # elements: 512 MiB of f4
NODES = sized("i4", nodes=160, out=1)
ONE_STEP = {"steps": 1, "start": 0}


def traffic(name: str, arrays: Mapping[str, ArrayFacts], **scalars: Any) -> tuple[int, int]:
    got = CATALOGUE[name].traffic(
        Call(arrays, {"width": 1024, "height": N // 1024, "times": 1, "stride": 1} | scalars)
    )
    return got.reads, got.writes


def test_compulsory_bytes() -> None:
    for name, arrays, reads, writes in [
        ("copy", sized(c=N, a=N), 512 * MiB, 512 * MiB),
        ("stream_add", sized(c=N, a=N, b=N), GiB, 512 * MiB),
        ("triad", sized("f8", a=N, b=N, c=N), 2 * GiB, GiB),
        ("write", sized(a=N), 0, 512 * MiB),
        # one 4-byte sum for each 64 KiB, or for each 32 KiB of both arrays
        ("read", sized(a=N, sums=8 * KiB), 512 * MiB, 32 * KiB),
        ("dot", sized(a=N, b=N, sums=16 * KiB), GiB, 64 * KiB),
        ("reset_data", sized("i4", data_streaming=256 * MiB, lut_persistent=2 * MiB), 8 * MiB, GiB),
        (
            "reset_data_shared",
            sized("i4", data_streaming=256 * MiB, lut_persistent=10 * KiB),
            40 * KiB,
            GiB,
        ),
        (
            "sliding_window",
            sized("i4", data_persistent=MiB, data_streaming=256 * MiB),
            4 * MiB + GiB,
            4 * MiB + GiB,
        ),
        ("add", sized(x=16 * MiB, y=16 * MiB), 128 * MiB, 64 * MiB),
        ("init_warp_per_page", sized(x=16 * MiB), 0, 64 * MiB),
        ("reread", sized(y=N, x=N), 512 * MiB, 512 * MiB),
        ("transpose", sized(odata=N, idata=N), 512 * MiB, 512 * MiB),
    ]:
        assert traffic(name, arrays) == (reads, writes), (name, arrays, reads, writes)


def test_rereading_asks_again_and_moves_whole_sectors() -> None:
    kernel, arrays = CATALOGUE["reread"], sized(y=1024, x=1024)
    read, write = kernel.accesses(Call(arrays, {"times": 3, "stride": 1}))
    assert (read.footprint, read.requested, read.sectors_per_request) == (4096, 3 * 4096, 4)
    assert (write.footprint, write.requested, write.sectors_per_request) == (4096, 3 * 4096, 4)
    assert [
        kernel.accesses(Call(arrays, {"times": 1, "stride": s}))[0].sectors_per_request
        for s in (2, 8, 32)
    ] == [8, 32, 32]
    assert (
        kernel.problem(Call(arrays, {"times": 1, "stride": 3}))
        == "stride is 3, which does not divide the 1024 elements"
    )
    assert (
        kernel.problem(Call(arrays, {"times": 0, "stride": 1}))
        == "times is 0; a whole number of at least 1 is needed"
    )


def sectors(name: str, **scalars: Any) -> set[float]:
    return {
        a.sectors_per_request
        for a in CATALOGUE[name].accesses(Call(sized(odata=4096, idata=4096), scalars))
    }


def test_sectors_of_the_access_patterns() -> None:
    # Best Practices Guide 9.2.1: four when aligned, five when not; four more for each step of the stride, up to one for each thread.
    assert [sectors("offset_copy", offset=o) for o in (0, 1, 7, 8, 9, 32)] == [
        {4},
        {5},
        {5},
        {4},
        {5},
        {4},
    ]
    assert [sectors("stride_copy", stride=s) for s in (1, 2, 3, 8, 9, 32)] == [
        {4},
        {8},
        {12},
        {32},
        {32},
        {32},
    ]
    assert sectors("permuted_copy") == {4}


def test_repeats_are_asked_for_again() -> None:
    table = Access("table", "read", 100, 1000)
    assert requested_bytes([table, Access("b", "write", 50, 50)]) == 1050
    assert sectors_per_request([table, Access("b", "write", 100, 100, sectors_per_request=15)]) == 5


def test_each_block_reads_the_table_into_shared_memory_once() -> None:
    arrays = sized("i4", data_streaming=1000, lut_persistent=10)
    kernel: Any = CATALOGUE["reset_data_shared"]
    for blocks, read in ((None, 40), (7, 280)):
        call = Call(arrays, {}, blocks)
        table, data = kernel.accesses(call)
        assert (table.footprint, table.requested) == (40, read)
        assert (data.footprint, data.requested) == (4000, 4000)
        assert kernel.on_chip_cycles(call) == 7 * 1000 / 32  # cycles of an SM for each warp


def test_no_more_blocks_than_the_sms_hold_with_their_tables(h100: DeviceFacts) -> None:
    for table, blocks in [
        (12 * KiB, 2 * 132),  # 48 KiB: the threads of an SM decide
        (28 * KiB, 2 * 132),  # two tables of 112 KiB and what the system keeps: 226 of 228 KiB
        (28 * KiB + 257, 132),
        (57 * KiB, 132),  # more than there is, which the device refuses
    ]:
        call = Call(sized("i4", data_streaming=256 * MiB, lut_persistent=table))
        got = CATALOGUE["reset_data_shared"].shape(h100, call)
        assert (got.blocks, got.threads, got.shared_bytes) == (blocks, 1024, 4 * table), table
        unknown = CATALOGUE["reset_data_shared"].shape(
            replace(h100, shared_bytes_per_sm=None), call
        )
        assert unknown.blocks == 2 * 132, table


def test_chase_reads_one_index_a_node() -> None:
    kernel: Any = CATALOGUE["chase"]
    nodes = sized("i4", nodes=16 * 1000, out=1)
    for steps, visited in ((10, 10), (1000, 1000), (5000, 1000)):
        call = Call(nodes, {"steps": steps, "start": 0})
        walk, last = kernel.accesses(call)
        assert (walk.footprint, walk.requested, walk.sectors_per_request) == (
            4 * visited,
            4 * steps,
            32,
        )
        assert walk.dependent
        assert last.footprint == 4
        assert kernel.accesses_per_launch(call) == steps


def test_a_transpose_scatters_its_writes_unless_a_tile_turns_them() -> None:
    call = Call(sized(odata=N, idata=N), {"width": 1024, "height": N // 1024})
    scattered = {
        name: [a.sectors_per_request for a in CATALOGUE[name].accesses(call)]
        for name in CATALOGUE
        if "trans" in name
    }
    assert scattered == {
        "transpose": [4, 32],
        "transpose_tiled": [4, 4],
        "transpose_padded": [4, 4],
    }
    # a line for the read, then 32 lines; a column in one bank; or a column in 32 banks, each between two coalesced requests
    kernels: list[Any] = [CATALOGUE[name] for name in scattered]
    assert [kernel.on_chip_cycles(call) / (N / 32) for kernel in kernels] == [33, 35, 4]


def test_the_page_of_a_warp_is_the_callers() -> None:
    kernel: Any = CATALOGUE["init_warp_per_page"]
    for page in (4096, 65536, 2 * MiB):
        call = Call(sized("f8", x=MiB), {"value": 1.0, "page": page})
        assert kernel.problem(call) is None
        assert kernel.launch_arguments(call) == ("x", "value", page // 8, MiB)
    for wrong in (0, 2048, 4 * MiB, 65537, 4096.5, 3 * 4096):
        assert "a power of two from 4096 to 2097152 bytes" in kernel.problem(
            Call(sized(x=MiB), {"value": 1.0, "page": wrong})
        )


def shape(
    name: str,
    facts: DeviceFacts,
    arrays: dict[str, ArrayFacts],
    blocks: int | None = None,
    **scalars: Any,
) -> tuple[int, int]:
    got = CATALOGUE[name].shape(facts, Call(arrays, scalars, blocks))
    return got.blocks, got.threads


def test_launch_shapes(h100: DeviceFacts) -> None:
    # one vector of 16 bytes a thread and array: tiles of 16 KiB, or of 4 KiB
    assert shape("triad", h100, sized(a=N, b=N, c=N)) == (32768, 1024)
    assert shape("triad", h100, sized(a=1, b=1, c=1)) == (1, 1024)
    # a tile a block: 64 KiB, or 32 KiB of both arrays
    assert shape("read", h100, sized(a=N, sums=N)) == (8192, 512)
    assert shape("dot", h100, sized(a=N, b=N, sums=N)) == (16384, 512)
    assert shape("dot", h100, sized(a=N, b=N, sums=N), blocks=3) == (3, 512)
    table = sized("i4", data_streaming=256 * MiB, lut_persistent=2 * MiB)
    assert shape("reset_data", h100, table) == (264, 1024)
    assert shape("reset_data", h100, table, blocks=32) == (32, 1024)
    assert shape(
        "sliding_window", h100, sized("i4", data_persistent=MiB, data_streaming=256 * MiB)
    ) == (262144, 1024)
    # 64 MiB are 1024 pages of 64 KiB: eight warps a block
    assert shape("init_warp_per_page", h100, sized(x=16 * MiB)) == (128, 256)
    assert shape("init_warp_per_page", h100, sized(x=16 * MiB), page=2 * MiB) == (4, 256)
    assert shape("stride_copy", h100, sized(odata=8192, idata=8192), stride=32) == (1, 256)
    # 16 x 16 tiles, and one more for a ragged row of them
    square = sized(odata=1024 * 1024, idata=1024 * 1024)
    assert shape("transpose_padded", h100, square, width=1024, height=1025) == (16 * 17, 256)
    # 4 blocks an SM, or as many as there are tiles and passes for their 8 warps
    assert shape("l2_read", h100, sized("i4", a=MiB, sums=MiB), repeats=16) == (528, 256)
    assert shape("l2_read", h100, sized("i4", a=5 * 1024, sums=100), repeats=3) == (2, 256)
    assert shape("chase", h100, sized("i4", nodes=160, out=1), steps=3, start=0) == (1, 1)


def test_threads_take_more_vectors_where_full_sms_cannot_keep_the_memory_busy(
    h100: DeviceFacts,
) -> None:
    for peak, threads, copy, triad in [
        (3.35e12, 2048, (256, 1), (1024, 1)),  # 4.3 MB in flight with one vector of one source
        (6.1e12, 2048, (256, 1), (1024, 1)),
        (6.2e12, 2048, (256, 2), (1024, 1)),
        (12.4e12, 2048, (256, 4), (1024, 2)),
        (99e12, 2048, (256, 4), (1024, 4)),
        (3.35e12, 1536, (256, 1), (512, 1)),  # 1024 threads would leave a third of an SM empty
        (4.7e12, 1536, (256, 2), (512, 1)),
    ]:
        facts = replace(h100, dram_peak=peak, max_threads_per_sm=threads)
        assert (map_shape(facts, 0), map_shape(facts, 1), map_shape(facts, 2)) == (
            (512, 2),
            copy,
            triad,
        ), (peak, threads, copy, triad)
        got = CATALOGUE["copy"].shape(facts, Call(sized(c=N, a=N)))
        assert (got.threads, got.vectors) == copy, (peak, threads, copy, triad)
        assert got.blocks * got.threads * got.vectors * 16 == 4 * N, (peak, threads, copy, triad)


EIGHT, TWELVE = (sized(odata=n, idata=n) for n in (8, 12))


def test_a_call_that_does_not_fit_is_refused_in_one_sentence() -> None:
    cases: list[tuple[str, dict[str, ArrayFacts], dict[str, Any], str]] = [
        (
            "triad",
            sized(a=8, b=8, c=9),
            {"s": 3.0},
            "the arrays must have the same number of elements: a has 8, b has 8, c has 9",
        ),
        ("triad", sized(a=8, b=8, c=8), {"s": float("nan")}, "s is nan; a finite number is needed"),
        (
            "triad",
            sized("i4", a=8, b=8, c=8),
            {"s": 0.4},
            "s is 0.4, which arrays of i4 cannot hold",
        ),
        (
            "read",
            sized(a=1000, sums=1),
            {},
            "read adds up tiles of 65536 bytes; a has 4000 bytes, which is no multiple of that",
        ),
        (
            "dot",
            sized(a=32 * KiB, b=32 * KiB, sums=3),
            {},
            "dot gives one sum for each 32768 bytes of a: sums needs 4 elements, it has 3",
        ),
        ("copy", sized(c=0, a=0), {}, "c is empty"),
        (
            "stride_copy",
            EIGHT,
            {"stride": 0},
            "stride is 0; a whole number of at least 1 is needed",
        ),
        (
            "chase",
            NODES | sized("i4", nodes=100),
            ONE_STEP,
            "nodes has 400 bytes, which is no multiple of a node's 64",
        ),
        (
            "transpose",
            TWELVE,
            {"width": 3, "height": 5},
            "a matrix of width 3 and height 5 has 15 elements; the arrays have 12",
        ),
        (
            "l2_read",
            sized("i4", a=2048, sums=5),
            {"repeats": 3},
            "l2_read gives 3 sums for each 4096 bytes of a: sums needs 6 elements",
        ),
    ]
    for name, arrays, scalars, problem in cases:
        assert str(CATALOGUE[name].problem(Call(arrays, scalars))).startswith(problem), (
            name,
            arrays,
            scalars,
            problem,
        )


def test_a_grid_that_cannot_be_is_refused() -> None:
    assert (
        CATALOGUE["chase"].problem(Call(NODES, ONE_STEP, 2))
        == "one thread follows the cycle; a grid of 2 blocks is not possible"
    )
    eight_bytes = ArrayFacts(8, "u1", 1)
    copied = Call({"destination": eight_bytes, "source": eight_bytes}, {}, 4)
    assert (
        CATALOGUE["memcpy"].problem(copied)
        == "a copy by the copy engine has no grid; 4 blocks were asked for"
    )


def test_the_catalogue_is_complete() -> None:
    for name, kernel in CATALOGUE.items():
        assert kernel.name == name
        assert kernel.section
        assert kernel.reference is not None
        assert kernel.source is None or kernel.entry
        assert len({p.name for p in kernel.parameters}) == len(kernel.parameters)
