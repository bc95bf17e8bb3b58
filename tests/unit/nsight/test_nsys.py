"""Exports of Nsight Systems, made by hand: what belongs to which measurement."""

from __future__ import annotations

import sqlite3
from collections.abc import Callable
from pathlib import Path

import pytest
from nsys_sqlite import OTHER_PID, PID, VERSIONS, Export

from pytest_gpumem.nsight.nsys import read_sqlite
from pytest_gpumem.nsight.nsys_tables import Tables
from pytest_gpumem.nsight.recording import BadReport
from pytest_gpumem.records.profile import TestProfile
from pytest_gpumem.records.uses import CopyUse

TRIAD = "void triad<float, 2>(T1 *, const T1 *)"
NODEID = "tests/test_a.py::test_triad[1]"


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "report.sqlite"


@pytest.fixture
def export(path: Path) -> Export:
    """One with the plugin's domain."""
    made = Export(path)
    made.domain()
    return made


def read(path: Path) -> tuple[TestProfile, ...]:
    with Tables(path) as tables:
        return read_sqlite(tables)


def sample(
    export: Export, begin: int, name: str = "test_triad", *, pid: int = PID, registered: bool = True
) -> int:
    """One sample as `PlainSampler` takes it: a flush, a measured launch, a wait. Its kernel runs from begin + 300 on; 100 ns."""
    export.range(begin, begin + 50, f"{name}.flush", registered=registered, pid=pid)
    export.kernel(
        begin + 60, begin + 200, "flush", export.call(begin + 10, begin + 20, pid=pid), pid=pid
    )
    export.range(begin + 100, begin + 150, f"{name}.measure", registered=registered, pid=pid)
    export.range(begin + 101, begin + 149, f"{name}.launch", registered=registered, pid=pid)
    export.kernel(
        begin + 300, begin + 400, TRIAD, export.call(begin + 110, begin + 120, pid=pid), pid=pid
    )
    export.call(begin + 160, begin + 450, "cudaStreamSynchronize_v3020", pid=pid)
    return begin + 460


def one_test(export: Export, samples: int = 2, *, pid: int = PID, **how: bool) -> int:
    begin, name = 1000, "test_triad"
    end = begin + 10
    for _ in range(samples):
        end = sample(export, end, name, pid=pid, **how)
    export.range(begin, end, name, pid=pid, **how)
    export.mark(begin + 5, NODEID, pid=pid)
    return end


@pytest.mark.parametrize("schema", VERSIONS)
@pytest.mark.parametrize("registered", [True, False])
def test_kernels_belong_to_the_ranges_that_they_were_launched_in(
    path: Path, schema: str, registered: bool
) -> None:
    export = Export(path, schema)
    export.domain()
    export.category()
    end = one_test(export, registered=registered)
    export.kernel(end + 10, end + 60, "somebody_else", export.call(end + 1, end + 2))
    found = read(export.close())
    (profile,) = found
    assert (profile.name, profile.nodeid, profile.label, profile.launches) == (
        "test_triad",
        NODEID,
        "",
        2,
    )
    assert (profile.tool, profile.tool_version, profile.process) == (
        "nsys",
        VERSIONS[schema] or "",
        PID,
    )
    (kernel,) = profile.kernels
    assert (kernel.name, kernel.grid, kernel.block, kernel.launches, kernel.nanoseconds) == (
        TRIAD,
        (264, 1, 1),
        (1024, 1, 1),
        2,
        200,
    )
    assert (kernel.registers, kernel.shared, kernel.local, kernel.dram_read) == (32, 128, 0, None)


def test_labels_processes_and_shapes_are_told_apart(path: Path) -> None:
    export = Export(path)
    for pid in (PID, OTHER_PID):
        export.domain(pid=pid)
        export.category(pid=pid)
    # One test with two labels in one process; a test of the same name in another one, whose correlation ids are its own.
    end = 1010
    for label in ("small", "large"):
        begin, end = end, sample(export, end + 5)
        export.range(begin, end, f"test_triad.label.{label}")
    export.range(1000, end + 50, "test_triad")
    export.kernel(
        end + 20, end + 25, TRIAD, export.call(end + 1, end + 2), grid=(1, 2, 3)
    )  # in the test, in no label
    one_test(export, pid=OTHER_PID, samples=1)
    found = read(export.close())
    assert [
        (p.process, p.label, p.launches, sum(k.nanoseconds for k in p.kernels)) for p in found
    ] == [
        (OTHER_PID, "", 1, 100),
        (PID, "small", 1, 100),
        (PID, "large", 1, 100),
    ]


def test_the_same_correlation_id_of_another_process_is_another_call(export: Export) -> None:
    one_test(export, samples=1)
    export.kernel(
        1300, 1333, "foreign", 2, pid=OTHER_PID
    )  # 2 is the measured launch's in the first process
    found = read(export.close())
    assert [k.name for one in found for k in one.kernels] == [TRIAD]


def test_a_call_of_another_thread_is_in_no_range(export: Export) -> None:
    one_test(export, samples=1)
    export.kernel(1300, 1340, "of_a_thread", export.call(1121, 1125, thread=1))
    found = read(export.close())
    assert [k.name for one in found for k in one.kernels] == [TRIAD]


def test_kernels_of_a_graph_belong_where_it_was_launched(export: Export) -> None:
    export.range(1000, 2000, "test_graph")
    export.range(1100, 1200, "test_graph.measure")
    launch = export.call(1110, 1150, "cudaGraphLaunch_v10000")
    export.kernel(1300, 1400, "first", launch, node=11)
    export.kernel(1400, 1450, "second", launch, node=12)
    (profile,) = read(export.close())
    assert profile.launches == 1
    assert [(k.name, k.nanoseconds) for k in profile.kernels] == [("first", 100), ("second", 50)]


@pytest.mark.parametrize("schema", VERSIONS)
def test_copies_are_told_by_way_and_memory(path: Path, schema: str) -> None:
    export = Export(path, schema)
    export.domain()
    export.range(1000, 2000, "test_link")
    export.range(1100, 1500, "test_link.measure")
    for begin in (1110, 1120):
        export.copy(
            begin + 500, begin + 600, 4096, 1, export.call(begin, begin + 5), srcKind=1, dstKind=2
        )
    export.copy(1700, 1800, 64, 1, export.call(1130, 1135), srcKind=0, dstKind=5)
    export.copy(
        1800,
        1810,
        64,
        8,
        export.call(1140, 1145),
        srcKind=2,
        dstKind=2,
        srcDeviceId=0,
        dstDeviceId=1,
    )
    export.copy(1900, 1910, 32, 2, export.call(1160, 1165), srcKind=2, dstKind=1, copyCount=3)
    export.memset(1950, 1960, 128, export.call(1150, 1155))
    (profile,) = read(export.close())
    between = "P2P" if schema != "1" else "D2D"  # the first version does not say which devices
    assert profile.copies == (
        CopyUse("H2D", "pinned", "device", 2, 8192, 200),
        CopyUse("H2D", "pageable", "device", 1, 64, 100),
        CopyUse(between, "device", "device", 1, 64, 10),
        CopyUse("D2H", "device", "pinned", 3 if schema == "3.24" else 1, 32, 10),
    )
    assert profile.memsets == (
        CopyUse("memset", "", "device" if schema != "1" else "unknown", 1, 128, 10),
    )


def test_pages_that_moved_are_no_copies(export: Export) -> None:
    one_test(export)
    export.migration(1311, 1330, 4096, 11, 2)
    found = read(export.close())
    assert not any(one.copies for one in found)


def test_other_domains_and_other_marks_are_nobodys(export: Export) -> None:
    export.domain("CCCL", 2)
    export.category()
    export.category("memory", 2)
    end = one_test(export, samples=1)
    export.range(1130, 1131, "test_other.measure", domain=2)
    export.mark(1140, "not an id", category=2)
    export.range(end + 1, end + 2, "loose", domain=2)
    (profile,) = read(export.close())
    assert (profile.name, profile.nodeid, profile.launches) == ("test_triad", NODEID, 1)


def test_a_recording_that_began_after_the_domain_was_made_still_tells_its_ranges(
    path: Path,
) -> None:
    export = Export(path)
    export.domain("CCCL", 2)
    # With --capture-range the outermost range itself may be missing, and the last one may never have been closed.
    sample(export, 1000)
    export.range(1500, None, "test_triad.measure")
    export.kernel(1600, 1640, TRIAD, export.call(1510, 1520))
    export.range(1525, 1530, "end", domain=2)
    (profile,) = read(export.close())
    assert (profile.name, profile.nodeid, profile.launches) == ("test_triad", None, 2)
    assert [kernel.nanoseconds for kernel in profile.kernels] == [140]


def test_a_test_within_a_test_is_told_by_the_inner_one(export: Export) -> None:
    export.range(900, 5000, "test_that_runs_pytest")
    one_test(export, samples=1)
    found = {profile.name: profile for profile in read(export.close())}
    assert sum(kernel.nanoseconds for kernel in found["test_triad"].kernels) == 100


# What is no export


def exported(path: Path, sql: str = "", samples: int = 40) -> Path:
    """An export with what a statement makes of it."""
    export = Export(path)
    export.domain()
    if samples:
        one_test(export, samples=samples)
    export._db.execute(sql)
    return export.close()


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda path: path.write_bytes(b""), "an empty file"),
        (
            lambda path: path.write_bytes(b"%PDF-1.7 and more of it"),
            "no SQLite; accepted is what `nsys export --type sqlite` writes",
        ),
        (
            lambda path: sqlite3.connect(path).execute("VACUUM").connection.close(),
            "an empty SQLite file",
        ),
        (
            lambda path: (
                sqlite3.connect(path).execute("CREATE TABLE songs (id INTEGER)").connection.close()
            ),
            "SQLite, but no export of Nsight Systems",
        ),
        (
            lambda path: exported(
                path,
                "UPDATE META_DATA_EXPORT SET value = '4.0.1' WHERE name = 'EXPORT_SCHEMA_VERSION'",
            ),
            r"of schema 4\.0\.1, which is newer than 3\.x; export it by an older nsys",
        ),
        (
            lambda path: exported(path, samples=0),
            "no NVTX range of the domain gpumem: record pytest --gpumem with --trace=cuda,nvtx",
        ),
        (lambda path: path.write_bytes(exported(path).read_bytes()[:-8192]), "cut off or damaged"),
        (
            lambda path: exported(
                path, 'ALTER TABLE CUPTI_ACTIVITY_KIND_KERNEL RENAME COLUMN "gridX" TO "gridWidth"'
            ),
            r"CUPTI_ACTIVITY_KIND_KERNEL has no column gridX: schema 3\.16\.1 is unknown",
        ),
        (
            lambda path: exported(path, "ALTER TABLE META_DATA_EXPORT RENAME COLUMN name TO title"),
            "META_DATA_EXPORT has no column name: a schema without a version is unknown",
        ),
        (
            lambda path: exported(path, "UPDATE CUPTI_ACTIVITY_KIND_KERNEL SET \"end\" = 'late'"),
            "damaged: CUPTI_ACTIVITY_KIND_KERNEL has 'late' for end, accepted is integer; export the report again",
        ),
        (
            lambda path: exported(path, 'UPDATE CUPTI_ACTIVITY_KIND_RUNTIME SET "start" = NULL'),
            "CUPTI_ACTIVITY_KIND_RUNTIME has NULL for start",
        ),
        (
            lambda path: exported(path, 'UPDATE NVTX_EVENTS SET "end" = 1.5 WHERE eventType = 59'),
            "NVTX_EVENTS has 1.5 for end",
        ),
        (
            lambda path: exported(path, "UPDATE StringIds SET value = x'07'"),
            r"StringIds has b'\\x07' for value, accepted is text",
        ),
    ],
)
def test_what_is_no_export_is_refused_in_one_line(
    path: Path, make: Callable[[Path], object], said: str
) -> None:
    make(path)
    with pytest.raises(BadReport, match=said) as refusal:
        read(path)
    assert "\n" not in str(refusal.value)
    assert not list(path.parent.glob("*-journal"))


def test_a_view_that_never_ends_is_refused(path: Path) -> None:
    export = Export(path)
    sample(export, 100)
    export.close()
    base = sqlite3.connect(path)
    base.execute("ALTER TABLE StringIds RENAME TO was")
    endless = "WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n) SELECT i AS id, 'x' AS value FROM n"
    base.execute(f"CREATE VIEW StringIds AS {endless}")
    base.commit()
    base.close()
    with pytest.raises(BadReport, match="StringIds is a view"):
        read(path)
