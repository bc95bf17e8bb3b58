"""Lends CUPTI to the profilers of PyTorch and JAX, and to a test that subscribes by cupti-python: meanwhile this process holds no
subscription.

CUPTI serves one subscriber, and PyTorch's profiler initialises it once: if it is taken then, all later profiles of the process have no
kernels. So the functions by which a trace begins and ends are wrapped as soon as their modules are imported.
Sources: torch.profiler, `prepare_trace` and `stop_trace`; torch.autograd.profiler, `profile`; jax.profiler, `start_trace` and `stop_trace`.
"""

from __future__ import annotations

import importlib.util
import sys
import threading
from collections.abc import Callable, Sequence
from functools import wraps
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, SourceFileLoader
from types import ModuleType
from typing import Any

_ENTRIES: dict[str, tuple[str, str, str, str]] = {
    "torch.profiler.profiler": ("PyTorch", "_KinetoProfile", "prepare_trace", "stop_trace"),
    "torch.autograd.profiler": ("PyTorch", "profile", "__enter__", "__exit__"),
    "jax._src.profiler": ("JAX", "", "start_trace", "stop_trace"),
    "jax.profiler": ("JAX", "", "start_trace", "stop_trace"),
    "cupti.cupti": (
        "the test",
        "",
        "subscribe",
        "unsubscribe",
    ),  # our own subscription takes the library's functions
}
"""By module: whose profiler it is, the class in it, and what begins and ends a trace."""


class Lending(MetaPathFinder):
    """Wraps the profilers' functions while it is open.
    `lend`: called with whose profiler a trace is of, before it begins.
    `take_back`: called after the last trace has ended.
    """

    def __init__(self, lend: Callable[[str], None], take_back: Callable[[], None]) -> None:
        self._lend, self._take_back = lend, take_back
        self._local = threading.local()
        self._tracing: set[int] = set()  # the objects whose trace has begun; 0 for JAX's only one
        self._wrapped: list[tuple[Any, str, Any]] = []

    def open(self) -> None:
        """Wrap what is imported now, and the rest when it is imported."""
        sys.meta_path.insert(0, self)
        for name in _ENTRIES:
            if (module := sys.modules.get(name)) is not None:
                self._wrap(module)

    def close(self) -> None:
        """Put the functions back."""
        if self in sys.meta_path:
            sys.meta_path.remove(self)
        while self._wrapped:
            owner, name, original = self._wrapped.pop()
            setattr(owner, name, original)

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname not in _ENTRIES or getattr(self._local, "looking", False):
            return None
        self._local.looking = True
        try:
            spec = importlib.util.find_spec(fullname)
        finally:
            self._local.looking = False
        if spec is None or not isinstance(loader := spec.loader, SourceFileLoader):
            return None
        execute = loader.exec_module

        def executed(module: ModuleType) -> None:
            execute(module)
            self._wrap(module)

        loader.exec_module = executed  # type: ignore[method-assign]
        return spec

    def _wrap(self, module: ModuleType) -> None:
        whose, of, begins, ends = _ENTRIES[module.__name__]
        owner = getattr(module, of, None) if of else module
        begin, end = getattr(owner, begins, None), getattr(owner, ends, None)
        if (
            begin is None or end is None or hasattr(begin, "__gpumem__")
        ):  # an older version, or wrapped in the other module
            return

        @wraps(begin)
        def begun(*arguments: Any, **keywords: Any) -> Any:
            if not self._tracing:
                self._lend(whose)
            self._tracing.add(id(arguments[0]) if of else 0)
            try:
                return begin(*arguments, **keywords)
            except BaseException:
                self._end(id(arguments[0]) if of else 0)
                raise

        @wraps(end)
        def ended(*arguments: Any, **keywords: Any) -> Any:
            try:
                return end(*arguments, **keywords)
            finally:
                self._end(id(arguments[0]) if of else 0)

        for name, original, new in ((begins, begin, begun), (ends, end, ended)):
            new.__gpumem__ = True  # type: ignore[attr-defined]
            self._wrapped.append((owner, name, original))
            setattr(owner, name, new)

    def _end(self, trace: int) -> None:
        if trace in self._tracing:
            self._tracing.remove(trace)
            if not self._tracing:
                self._take_back()
