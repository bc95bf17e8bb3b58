"""Observe NVTX ranges without a GPU and without Nsight: a small C library that NVTX loads as if it were a tool."""

from __future__ import annotations

import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

SOURCE = Path(__file__).with_name("nvtx_injection.c")


@dataclass(frozen=True)
class Event:
    kind: str
    """ "push", "pop" or "mark"."""
    domain: str
    message: str
    category: str = ""
    payload: int | None = None


class Trace:
    """What one or more child processes pushed, popped and marked.

    NVTX looks for its tool once per process, at the first call. Give `environment` to a child process, never to this one.
    """

    def __init__(self, library: Path, log: Path) -> None:
        self._log = log
        self.environment = {"NVTX_INJECTION64_PATH": str(library), "NVTX_LOG": str(log)}

    def events(self, domain: str = "gpumem") -> list[Event]:
        """Events of a domain in their order."""
        if not self._log.exists():
            return []
        rows = (line.split("\t") for line in self._log.read_text().splitlines())
        events = [
            Event(kind, dom, message, category, int(p) if p else None)
            for kind, dom, message, category, p in rows
        ]
        return [event for event in events if event.domain == domain]

    def ranges(self, domain: str = "gpumem") -> list[str]:
        """The path of every range, outermost first, as "test_a/test_a.measure". Fails if one was not closed."""
        paths: list[str] = []
        stack: list[str] = []
        for event in self.events(domain):
            if event.kind == "push":
                stack.append(event.message)
                paths.append("/".join(stack))
            elif event.kind == "pop":
                assert stack, "a range was popped that nobody pushed"
                stack.pop()
        assert not stack, f"ranges left open: {stack}"
        return paths


def build(folder: Path) -> Path | None:
    """Compile the library into `folder`; None without a C compiler."""
    compiler = shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
    if compiler is None:
        return None
    library = folder / "libnvtx_injection.so"
    subprocess.run(
        [compiler, "-shared", "-fPIC", "-O1", "-o", str(library), str(SOURCE)], check=True
    )
    return library
