"""PyTorch's caching allocator: its history reports tensors and segments, statistics the rest."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Mapping, Sequence
from functools import wraps
from typing import Any, Literal

from pytest_gpumem.devices.memory_events import AllocationEvent, Figures, MemoryLog, Series, Source
from pytest_gpumem.devices.user_lines import innermost

_SERIES: Series = ("PyTorch", "device")
MOST_ENTRIES = 1_000_000  # of the history between two looks at it; of more the oldest are lost
_RECORDERS = ("_cuda_record_memory_history", "_cuda_record_memory_history_legacy")
"""Functions of `torch._C` that begin and end a history, whoever calls them."""
_OF_TEST = "a history of the test's own: the peak is that of its statistics"
_LAYERS: Mapping[str, Literal["use", "segment"]] = {
    "alloc": "use",
    "free_requested": "use",
    "segment_alloc": "segment",
}
"""By the entries of the history that count. The driver reports freed segments."""


class TorchMemory(Source):
    name = "PyTorch"

    def __init__(self, index: int) -> None:
        self._index = index
        self._log: MemoryLog | None = None
        self._queued = False  # it is to be recorded as soon as PyTorch uses the device
        self._records = False  # the history is recorded, and it is ours
        self._yielded = False  # it would be, but for the test's own
        self._wrapped: dict[str, Any] = {}  # functions of `_RECORDERS`, while the history is ours
        self._seen = -1  # allocations and frees that PyTorch had counted at the last look
        self._in_graphs = 0
        """Bytes that CUDA graphs hold in pools of their own and no tensor uses, as of the last
        `settle`."""

    @property
    def _torch(self) -> Any:
        """PyTorch, if it is built for CUDA; `torch.cuda.is_available` would open the driver."""
        torch = sys.modules.get("torch")
        version = getattr(torch, "version", None)
        return torch if getattr(version, "cuda", None) else None

    def ready(self) -> bool:
        return self._torch is not None

    def start(self, log: MemoryLog) -> str | None:
        torch, self._log = self._torch, log
        backend = torch.cuda.get_allocator_backend()
        if backend != "native":
            return f"its allocator is {backend}, whose allocations are the driver's"
        if torch.cuda.is_initialized():
            return self._record()
        # Before that there is no allocator that could record.
        if not self._queued:
            torch.cuda._lazy_call(self._record_if_wanted)
            self._queued = True
        return None

    def _record_if_wanted(self) -> None:
        if self._log is not None and not self._records:
            self._record()

    def _record(self) -> str | None:
        torch = self._torch
        if getattr(torch._C, "_cuda_isHistoryEnabled", lambda: False)():
            self._yielded = True
            return _OF_TEST
        context = None
        if self._log is not None and self._log.allows is not None:
            context = "alloc"
        try:
            torch.cuda.memory._record_memory_history(
                "all", context=context, stacks="python", max_entries=MOST_ENTRIES
            )
        except (AttributeError, TypeError, RuntimeError) as error:
            return f"its history cannot be recorded ({error}): the peak is that of its statistics"
        if self._yielded:  # watches that are open have not seen all
            self.lost(_OF_TEST)
        self._records, self._yielded, self._seen = True, False, self._count()
        for name in _RECORDERS:
            recorder = getattr(torch._C, name, None)
            if recorder is not None:
                self._wrapped[name] = recorder
                setattr(torch._C, name, self._yielding(recorder))
        return None

    def _yielding(self, recorder: Callable[..., Any]) -> Callable[..., Any]:
        """A function of `_RECORDERS` that ends our history first."""

        @wraps(recorder)
        def recorded(*arguments: Any, **keywords: Any) -> Any:
            if self._records:
                self.drain()
                self._end()
                self._yielded = True
                self.lost(_OF_TEST)
            return recorder(*arguments, **keywords)

        return recorded

    def _end(self) -> None:
        torch = self._torch
        while self._wrapped:
            setattr(torch._C, *self._wrapped.popitem())
        torch.cuda.memory._record_memory_history(None)
        self._records = False

    def drain(self) -> None:
        if self._yielded and self._log is not None:
            self._record()
        count = self._count() if self._records else self._seen
        if count == self._seen or self._log is None:
            return
        self._seen = count
        offset = time.perf_counter() - time.time()
        entries = self._torch.cuda.memory._snapshot()["device_traces"][self._index]
        report(self._log, entries, offset)
        # Cleared: the next look would get the whole history again.
        self._end()
        self._record()
        if len(entries) >= MOST_ENTRIES:
            self.lost(f"its history has room for {MOST_ENTRIES:,} entries, and older ones are lost")

    def _statistics(self) -> Mapping[str, Any]:
        """PyTorch's statistics; empty before it uses the device."""
        torch = self._torch
        if torch is None or not torch.cuda.is_initialized() or not self._is_native():
            return {}
        statistics: Mapping[str, Any] = torch.cuda.memory_stats_as_nested_dict(self._index)
        return statistics

    def _is_native(self) -> bool:
        return bool(self._torch.cuda.get_allocator_backend() == "native")

    def _count(self) -> int:
        counts = self._statistics().get("allocation", {}).get("all", {})
        return int(counts.get("allocated", 0)) + int(counts.get("freed", 0))

    def figures(self) -> Mapping[str, Figures]:
        statistics = self._statistics()
        if not statistics:
            return {}
        requested = statistics.get("requested_bytes", statistics["allocated_bytes"])["all"]
        used, high = int(requested["current"]) + self._in_graphs, int(requested["peak"])
        reserved = int(statistics["reserved_bytes"]["all"]["current"])
        unused = reserved - int(statistics["allocated_bytes"]["all"]["current"]) - self._in_graphs
        made = int(statistics["allocation"]["all"]["allocated"])
        single = self._records
        return {self.name: Figures(used, unused, reserved, high, single=single, allocations=made)}

    def settle(self) -> None:
        """Give back workspaces of cuBLAS and page-locked memory, and find what graphs hold."""
        torch = self._torch
        if torch is None or not torch.cuda.is_initialized():
            return
        if self._bytes_in_graphs():
            # Only an emptied cache tells the pools of graphs that live from those of graphs that
            # are gone. Graphs may use the workspaces.
            torch.cuda.empty_cache()
            self._in_graphs = self._bytes_in_graphs()
        else:
            self._in_graphs = 0
            _call(torch._C, "_cuda_clearCublasWorkspaces")
        if not _call(torch._C, "_host_emptyCache"):
            _call(torch._C, "_cuda_hostEmptyCache")

    def _bytes_in_graphs(self) -> int:
        """Bytes in pools of CUDA graphs that no tensor uses."""
        if not self._is_native():
            return 0
        unused = 0
        for segment in self._torch.cuda.memory_snapshot():
            of_graph = tuple(segment.get("segment_pool_id", (0, 0))) != (0, 0)
            if of_graph and segment["device"] == self._index:
                unused += int(segment["total_size"]) - int(segment["allocated_size"])
        return unused

    def stop(self) -> None:
        self._log = None
        if self._records:
            self._end()


def report(log: MemoryLog, entries: Sequence[Mapping[str, Any]], offset: float) -> None:
    """`offset`: seconds from the wall clock to that of `time.perf_counter`."""
    at = 0.0
    for entry in entries:
        layer = _LAYERS.get(entry["action"])
        if layer is None:
            continue
        if "time_us" in entry:
            at = max(at, entry["time_us"] * 1e-6 + offset)
        nbytes = 0 if entry["action"] == "free_requested" else int(entry["size"])
        event = AllocationEvent(at, _SERIES, layer, int(entry["addr"]), nbytes)
        if nbytes and log.allows is not None:
            frames = entry.get("frames", ())
            lines = [(frame["filename"], frame["line"], frame["name"]) for frame in frames]
            event.allowed = log.allows(innermost(lines))
        log.add(event)


def _call(module: Any, name: str) -> bool:
    """Call a function that not every version has; True if there is one."""
    function = getattr(module, name, None)
    if function is not None:
        function()
    return function is not None
