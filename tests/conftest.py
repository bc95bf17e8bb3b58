"""Fixtures of this project's own tests."""

from __future__ import annotations

import gc
import os
import shutil
import signal
import subprocess
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from functools import partial
from pathlib import Path
from typing import Any

import compiling
import pytest
from nvtx_injection import Trace, build

pytest_plugins = ["pytester"]

if (
    signal.getsignal(signal.SIGINT) is signal.SIG_IGN
):  # of a shell's background job; tests of Ctrl-C start processes that would inherit it
    signal.signal(signal.SIGINT, signal.default_int_handler)

# Of each interpreter that imports NumPy: threads for linear algebra, which nothing here needs, take a third of that import.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

compiling.compile_package()
_collecting = ExitStack()
_collecting.enter_context(
    compiling.written()
)  # also the tests, whose assertions each worker would rewrite again
with suppress(ImportError):  # the memory suite runs without Hypothesis
    from hypothesis import settings

    # How long an example takes depends on what else the machine does.
    settings.register_profile("untimed", deadline=None)
    settings.load_profile("untimed")


def pytest_collection_finish() -> None:
    """What is imported by now stays: the garbage collector, which a fifth of the time went to, need not search it again and again."""
    _collecting.close()
    gc.freeze()
    gc.set_threshold(20_000, 20, 20)


def _with_room(call: Callable[..., Any], /, **arguments: Any) -> Any:
    return call(**arguments)


# CPython keeps frames in chunks of 16 KiB, which it maps and unmaps again wherever a call crosses from one to the next: a loop that
# happens to call there takes several times as long. Under a frame that claims a large stack, all others lie in one chunk.
_with_room.__code__ = _with_room.__code__.replace(co_stacksize=100_000)


@pytest.hookimpl(wrapper=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> Iterator[None]:
    pyfuncitem.obj = partial(_with_room, pyfuncitem.obj)
    return (yield)


@pytest.fixture
def little_content(monkeypatch: pytest.MonkeyPatch) -> None:
    from pytest_gpumem.devices.simulated import memory

    # Its results decide no time, and take some.
    monkeypatch.setattr(memory, "BACKED_BYTES", 1 << 14)
    monkeypatch.setattr(memory, "PREFIX_BYTES", 1 << 12)


@pytest.fixture
def quick_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Processes of this interpreter are forked where they can be."""
    import forked  # here: the memory suite starts none

    monkeypatch.setattr(subprocess, "Popen", forked.Popen)


@pytest.fixture(scope="session")
def _nvtx_library(tmp_path_factory: pytest.TempPathFactory) -> Path | None:
    return build(tmp_path_factory.mktemp("nvtx"))


@pytest.fixture
def nvtx_trace(_nvtx_library: Path | None, tmp_path: Path) -> Trace:
    """Records the NVTX events of child processes that get its `environment`; skips without a C compiler or NVTX."""
    pytest.importorskip("nvtx", reason="nvtx has no wheel for this platform")
    if _nvtx_library is None:
        pytest.skip("no C compiler to build the NVTX injection library with")
    return Trace(_nvtx_library, tmp_path / "nvtx.log")


@pytest.fixture(scope="module")
def opened() -> Iterator[Callable[[Path, int], Any]]:
    """Opens files, with a width, in headless Chromium, where it and Playwright are installed. No page may print or raise anything."""
    playwright = pytest.importorskip("playwright.sync_api")
    chromium = next(
        (
            found
            for name in ("chromium", "chromium-browser", "google-chrome")
            if (found := shutil.which(name))
        ),
        None,
    )
    if chromium is None:
        pytest.skip("no Chromium is installed")
    said: list[str] = []
    with playwright.sync_playwright() as started:
        browser = started.chromium.launch(executable_path=chromium, args=["--no-sandbox"])

        def page(file: Path, width: int) -> Any:
            made = browser.new_page(viewport={"width": width, "height": 800}, color_scheme="dark")
            made.on("console", lambda message: said.append(message.text))
            made.on("pageerror", lambda error: said.append(str(error)))
            made.goto(file.as_uri())
            return made

        yield page
        browser.close()
    assert said == []
