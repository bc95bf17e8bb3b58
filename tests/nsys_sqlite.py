"""SQLite files as `nsys export --type sqlite` writes them, made by hand.

Tables, columns and constraints follow the "SQLite Schema Reference" of the Nsight Systems user guide, reduced to what a report of a pytest
session has. `schema` is "3.16" (Nsight Systems 2024.6), "3.24" (2026.1) or "1" (2021.5: all fields NOT NULL with defaults, no
enumerations, no META_DATA_EXPORT).
"""

from __future__ import annotations

import sqlite3
from pathlib import Path

PID, OTHER_PID = 4242, 4343

_KERNEL = (
    "start", "end", "deviceId", "contextId", "streamId", "correlationId", "globalPid", "demangledName", "shortName", "registersPerThread",
    "gridX", "gridY", "gridZ", "blockX", "blockY", "blockZ", "staticSharedMemory", "dynamicSharedMemory", "localMemoryPerThread",
    "localMemoryTotal", "gridId",
)  # fmt: skip
_COPY = (
    "start", "end", "deviceId", "contextId", "streamId", "correlationId", "globalPid", "bytes", "copyKind", "srcKind", "dstKind",
    "migrationCause", "virtualAddress",
)  # fmt: skip
_TABLES = {
    "1": {
        "CUPTI_ACTIVITY_KIND_KERNEL": _KERNEL,
        "CUPTI_ACTIVITY_KIND_MEMCPY": _COPY,
        "CUPTI_ACTIVITY_KIND_MEMSET": ("start", "end", "deviceId", "streamId", "correlationId", "globalPid", "value", "bytes"),
        "CUPTI_ACTIVITY_KIND_RUNTIME": ("start", "end", "eventClass", "globalTid", "correlationId", "nameId", "returnValue"),
        "NVTX_EVENTS": ("start", "end", "eventType", "rangeId", "category", "color", "text", "globalTid", "textId", "domainId"),
        "CUPTI_ACTIVITY_KIND_GRAPH_TRACE": ("start", "end", "deviceId", "streamId", "correlationId", "globalPid", "graphId"),
    }
}  # fmt: skip
_TABLES["3.16"] = {
    **_TABLES["1"],
    "CUPTI_ACTIVITY_KIND_KERNEL": (*_KERNEL, "greenContextId", "mangledName", "graphNodeId"),
    "CUPTI_ACTIVITY_KIND_MEMCPY": (*_COPY, "srcDeviceId", "dstDeviceId", "graphNodeId"),
    "CUPTI_ACTIVITY_KIND_MEMSET": (
        *_TABLES["1"]["CUPTI_ACTIVITY_KIND_MEMSET"],
        "graphNodeId",
        "memKind",
    ),
    "NVTX_EVENTS": (
        *_TABLES["1"]["NVTX_EVENTS"],
        "endGlobalTid",
        "uint64Value",
        "jsonText",
        "binaryData",
    ),
}
_TABLES["3.24"] = {
    **_TABLES["3.16"],
    "CUPTI_ACTIVITY_KIND_KERNEL": (
        *_TABLES["3.16"]["CUPTI_ACTIVITY_KIND_KERNEL"],
        "clusterX",
        "tensorSizeMinusOneElements",
    ),
    "CUPTI_ACTIVITY_KIND_MEMCPY": (*_TABLES["3.16"]["CUPTI_ACTIVITY_KIND_MEMCPY"], "copyCount"),
    "NVTX_EVENTS": (*_TABLES["3.16"]["NVTX_EVENTS"], "eventId"),
}
VERSIONS = {"1": None, "3.16": "2024.6.2.225", "3.24": "2026.1.1.204"}
_MEMORY = (
    "PAGEABLE",
    "PINNED",
    "DEVICE",
    "ARRAY",
    "MANAGED",
    "DEVICE_STATIC",
    "MANAGED_STATIC",
    "UNKNOWN",
)


class Export:
    """A file under way. Times are nanoseconds; every row is of process `pid` and its main thread unless told otherwise."""

    def __init__(self, path: Path, schema: str = "3.16") -> None:
        self.path, self.schema = path, schema
        self._db = sqlite3.connect(path)
        self._strings: dict[str, int] = {}
        self._made = set[str]()
        self._correlation = 0
        self._db.execute(
            "CREATE TABLE StringIds (id INTEGER NOT NULL PRIMARY KEY, value TEXT NOT NULL)"
        )
        self._db.execute("CREATE TABLE TARGET_INFO_SESSION_START_TIME (utcEpochNs INTEGER)")
        if schema != "1":
            self._db.execute("CREATE TABLE META_DATA_EXPORT (name TEXT NOT NULL, value TEXT)")
            self.meta("EXPORT_PRODUCT_VERSION", str(VERSIONS[schema]))
            self.meta("EXPORT_SCHEMA_VERSION", f"{schema}.1")
            self._db.execute(
                "CREATE TABLE ENUM_CUDA_MEM_KIND (id INTEGER NOT NULL PRIMARY KEY, name TEXT, label TEXT)"
            )
            rows = [
                (number, f"CUDA_MEMOPR_MEMORY_KIND_{name}", name.title())
                for number, name in enumerate(_MEMORY)
            ]
            self._db.executemany("INSERT INTO ENUM_CUDA_MEM_KIND VALUES (?, ?, ?)", rows)

    def meta(self, name: str, value: str) -> None:
        self._db.execute("INSERT INTO META_DATA_EXPORT VALUES (?, ?)", (name, value))

    def string(self, value: str) -> int:
        if value not in self._strings:
            self._strings[value] = len(self._strings) + 1
            self._db.execute("INSERT INTO StringIds VALUES (?, ?)", (self._strings[value], value))
        return self._strings[value]

    def insert(self, table: str, **values: object) -> None:
        columns = _TABLES[self.schema][table]
        default = 0 if self.schema == "1" else None
        if table not in self._made:
            self._made.add(table)
            null = " NOT NULL" if self.schema == "1" else ""
            kinds = ", ".join(
                f'"{name}" {"TEXT" if name == "text" else "INTEGER"}{null}' for name in columns
            )
            self._db.execute(f"CREATE TABLE {table} ({kinds})")
        # What a version has no column for, it does not export.
        rest = {
            name: ("" if name == "text" and self.schema == "1" else default) for name in columns
        }
        row = rest | {
            name: value for name, value in values.items() if name in rest and value is not None
        }
        marks = ", ".join("?" * len(columns))
        self._db.execute(f"INSERT INTO {table} VALUES ({marks})", [row[name] for name in columns])

    def close(self) -> Path:
        self._db.commit()
        self._db.close()
        return self.path

    # NVTX

    def domain(self, name: str = "gpumem", number: int = 1, pid: int = PID) -> None:
        self.insert(
            "NVTX_EVENTS", start=1, eventType=75, text=name, globalTid=tid(pid), domainId=number
        )

    def category(
        self, name: str = "nodeid", number: int = 1, domain: int = 1, pid: int = PID
    ) -> None:
        self.insert(
            "NVTX_EVENTS",
            start=2,
            eventType=33,
            category=number,
            text=name,
            globalTid=tid(pid),
            domainId=domain,
        )

    def mark(self, at: int, text: str, category: int = 1, domain: int = 1, pid: int = PID) -> None:
        self.insert(
            "NVTX_EVENTS",
            start=at,
            eventType=34,
            category=category,
            textId=self.string(text),
            globalTid=tid(pid),
            domainId=domain,
        )

    def range(
        self,
        start: int,
        end: int | None,
        name: str,
        *,
        registered: bool = True,
        domain: int = 1,
        pid: int = PID,
        thread: int = 0,
    ) -> None:
        written = {"textId": self.string(name)} if registered else {"text": name}
        self.insert(
            "NVTX_EVENTS",
            start=start,
            end=end,
            eventType=59,
            globalTid=tid(pid, thread),
            domainId=domain,
            **written,
        )

    # CUDA

    def call(
        self, start: int, end: int, name: str = "cuLaunchKernel", pid: int = PID, thread: int = 0
    ) -> int:
        """A call of CUDA's API; gives its correlation id."""
        self._correlation += 1
        self.insert(
            "CUPTI_ACTIVITY_KIND_RUNTIME",
            start=start, end=end, eventClass=1, globalTid=tid(pid, thread), correlationId=self._correlation, nameId=self.string(name),
            returnValue=0,
        )  # fmt: skip
        return self._correlation

    def kernel(
        self,
        start: int,
        end: int,
        name: str,
        correlation: int | None,
        grid: tuple[int, int, int] = (264, 1, 1),
        block: tuple[int, int, int] = (1024, 1, 1),
        pid: int = PID,
        node: int | None = None,
    ) -> None:
        shape = dict(
            zip(
                ("gridX", "gridY", "gridZ", "blockX", "blockY", "blockZ"),
                (*grid, *block),
                strict=True,
            )
        )
        self.insert(
            "CUPTI_ACTIVITY_KIND_KERNEL",
            start=start, end=end, correlationId=correlation, globalPid=gpid(pid), demangledName=self.string(name),
            shortName=self.string(name.split("<")[0]), registersPerThread=32, staticSharedMemory=100, dynamicSharedMemory=28,
            localMemoryPerThread=0, graphNodeId=node, deviceId=0, contextId=1, streamId=7, localMemoryTotal=0, gridId=1, **shape,
        )  # fmt: skip

    def copy(
        self, start: int, end: int, nbytes: int, kind: int, correlation: int | None, **more: int
    ) -> None:
        pid = more.pop("pid", PID)
        self.insert(
            "CUPTI_ACTIVITY_KIND_MEMCPY",
            start=start, end=end, bytes=nbytes, copyKind=kind, correlationId=correlation, globalPid=gpid(pid), deviceId=0, streamId=7,
            contextId=1, **more,
        )  # fmt: skip

    def migration(self, start: int, end: int, nbytes: int, kind: int, cause: int) -> None:
        self.copy(
            start,
            end,
            nbytes,
            kind,
            None,
            srcKind=4,
            dstKind=4,
            migrationCause=cause,
            virtualAddress=0x10000,
        )

    def memset(self, start: int, end: int, nbytes: int, correlation: int, kind: int = 2) -> None:
        self.insert(
            "CUPTI_ACTIVITY_KIND_MEMSET",
            start=start, end=end, bytes=nbytes, correlationId=correlation, globalPid=gpid(PID), memKind=kind, value=0, deviceId=0,
            streamId=7,
        )  # fmt: skip


def gpid(pid: int) -> int:
    """A serialised process id: 8 bits of hardware, 8 of the machine, 24 of the process, 24 of the thread, in an integer with a sign."""
    return (0x81 << 56 | pid << 24) - (1 << 64)


def tid(pid: int, thread: int = 0) -> int:
    """A serialised thread id; the main thread has its process's id."""
    return gpid(pid) | (pid + thread)
