"""NVTX ranges in the domain `gpumem`, with names that Nsight Systems and Nsight Compute accept.

`ncu --nvtx --nvtx-include "gpumem@NAME/"` and `nsys profile -c nvtx -p "NAME@gpumem"` read
`@ , [ ] / * + :` as operators: names are of `[A-Za-z0-9_.-]`.
"""

from __future__ import annotations

import hashlib
import re
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

DOMAIN = "gpumem"  # NVTX domain of every range
MEASURE, LAUNCH = "measure", "launch"
"""Phase of the samples, and a launch within it. Under a profiler the phase contains the measured
launches alone or what `benchmark` times."""


class Names:
    """Unique names for tests: `tests/test_a.py::TestX::test_scale[1-f4]` becomes `test_scale_1-f4`.

    Where collected node ids would share a name, each gets a short hash of its id, so that all
    workers give the same names.
    """

    def __init__(self, collected: Iterable[str] = ()) -> None:
        nodeids = list(dict.fromkeys(collected))
        shared = Counter(_base(nodeid) for nodeid in nodeids)
        self._names: dict[str, str] = {}
        # Used before any test: of those that share a name, the first gets a hash too.
        self._used = {base for base, count in shared.items() if count > 1}
        for nodeid in nodeids:
            self.unique(nodeid)

    def unique(self, nodeid: str) -> str:
        if nodeid not in self._names:
            name, length = _base(nodeid), 6
            while name in self._used:
                name = f"{_base(nodeid)}-{_digest(nodeid)[:length]}"
                length += 2
            self._used.add(name)
            self._names[nodeid] = name
        return self._names[nodeid]


def _base(nodeid: str) -> str:
    # Only what follows the file is split: parameters may hold "::" and "/" themselves.
    _, _, inside = nodeid.partition("::")
    function, bracket, parameters = (inside or nodeid).partition("[")
    last = function.rsplit("::", 1)[-1] + bracket + parameters
    return re.sub(r"[^A-Za-z0-9_-]+", "_", last).rstrip("_") or "test"


def phase(name: str, which: str) -> str:
    return f"{name}.{which}"


def labelled(name: str, label: str) -> str:
    """Return the range of a labelled measurement: "test_add.label.faulting". A label that loses
    characters which Nsight's filters refuse gets a short hash."""
    cleaned = re.sub(r"[^A-Za-z0-9_-]+", "_", label)
    if cleaned != label:
        cleaned += f"-{_digest(label)[:6]}"
    return phase(name, f"label.{cleaned}")


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()


class Ranges:
    """Ranges of a process. Without a tool, or without NVTX, they cost next to nothing."""

    def __init__(self) -> None:
        self._domain = _domain()
        self._attributes: dict[str, Any] = {}

    def tool_attached(self) -> bool:
        """Return True if a tool listens to the domain: times under it are not comparable."""
        return self._domain is not None

    def range(self, name: str) -> AbstractContextManager[None]:
        if self._domain is None:
            return nullcontext()
        if name not in self._attributes:
            self._attributes[name] = self._domain.get_event_attributes(message=name)
        return _Range(self._domain, self._attributes[name])

    @contextmanager
    def test(self, name: str, nodeid: str) -> Iterator[None]:
        """Open the range of a test, with a mark of category "nodeid" and the full node id."""
        with self.range(name):
            if self._domain is not None:
                mark = self._domain.get_event_attributes(message=nodeid, category="nodeid")
                self._domain.mark(mark)
            yield


class _Range:
    # A class and not a generator: four times cheaper, and it stands around measured launches.
    __slots__ = ("_attributes", "_domain")

    def __init__(self, domain: Any, attributes: Any) -> None:
        self._domain, self._attributes = domain, attributes

    def __enter__(self) -> None:
        self._domain.push_range(self._attributes)

    def __exit__(self, kind: object, error: object, trace: object, /) -> None:
        self._domain.pop_range()


def _domain() -> Any:
    """The NVTX domain, or None where no tool listens."""
    try:
        import nvtx
    except ImportError:
        return None
    domain = nvtx.get_domain(DOMAIN)
    # Without a tool, and under NVTX_DISABLE, get_domain returns a DummyDomain.
    return domain if isinstance(domain, nvtx.Domain) else None
