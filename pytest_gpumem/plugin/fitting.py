"""A run as on a card of less memory: opens the device ahead of the first test, and reports what ran out of memory."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial

import pytest

from pytest_gpumem.devices.opening import DeviceChoice
from pytest_gpumem.devices.protocol import DeviceError
from pytest_gpumem.devices.shortage import asked_for, shortage
from pytest_gpumem.judging.finding import counted
from pytest_gpumem.plugin.footprints import WATCHED
from pytest_gpumem.plugin.running import Feature
from pytest_gpumem.plugin.state import GpuSession
from pytest_gpumem.plugin.workers import is_part, worker_count
from pytest_gpumem.printable import printable
from pytest_gpumem.reporting.footprints import site_lines
from pytest_gpumem.settings import Settings
from pytest_gpumem.units import GiB, format_bytes

PROPERTY = "gpumem_out_of_memory"
"""Name of the JUnit property of a test that ran out of memory: JSON with the bytes `limit`, `in_use` and `asked`."""


SECTION = "gpumem: out of memory"  # title of the section of its report


def check(config: pytest.Config, settings: Settings, chosen: DeviceChoice) -> None:
    """Refuse a limit that cannot be kept, before anything is opened.
    Raises `pytest.UsageError`: the card has less memory, or workers share the card.
    """
    if settings.memory_limit is None or is_part(
        config
    ):  # the process that hands out the tests has checked it
        return
    origin, limit = settings.origins["memory_limit"], format_bytes(settings.memory_limit)
    if settings.memory_limit > chosen.facts.memory_bytes and chosen.fallback_reason is None:
        raise pytest.UsageError(
            f"gpumem: {origin}: a limit of {limit} is above the {chosen.facts.memory_bytes / GiB:.4g} GiB of {chosen.facts.name}"
        )
    gpus = 1 if ":" in settings.device else len(chosen.gpus)
    if not chosen.facts.simulated and (workers := worker_count(config)) > max(1, gpus):
        shared = f"-n {workers} on {counted(gpus, 'GPU')}; accepted is -n {max(1, gpus)}"
        raise pytest.UsageError(
            f"gpumem: {origin}: the limit is of a process that has a GPU for itself: {shared}"
        )


class FitFeature(Feature):
    """Takes all memory but `--gpumem-memory-limit`; registered only with that option."""

    def __init__(self, session: GpuSession) -> None:
        self._session = session
        # bytes in use before the first test: the context, and what libraries took for themselves
        self._before: int | None = None

    @contextmanager
    def test(self, item: pytest.Item, nextitem: pytest.Item | None) -> Iterator[None]:
        """Limit the memory before any test or fixture allocates, and leave all of it to the test."""
        self._session.shed()
        if not self._session.is_part:
            self._limit(pytest.UsageError)
        yield

    @contextmanager
    def setup(self, item: pytest.Item) -> Iterator[None]:
        if self._session.is_part:  # one that a usage error ends dies without a word to the user
            self._limit(partial(pytest.fail.Exception, pytrace=False))
        yield

    def _limit(self, error_of: Callable[[str], BaseException]) -> None:
        try:
            if self._before is None:
                self._before = self._session.device.memory.in_use()
        except DeviceError as error:
            raise error_of(f"gpumem: {error}") from None

    def report(
        self, item: pytest.Item, call: pytest.CallInfo[None], report: pytest.TestReport
    ) -> None:
        # The test's frames live as long as its exception, and with them what it had allocated.
        error = None if call.excinfo is None or not report.failed else shortage(call.excinfo.value)
        if error is None or self._session.lost_in is not None:
            return
        limit = self._session.settings.memory_limit
        assert limit is not None
        in_use, asked = self._session.device.memory.in_use(), asked_for(error)
        text = out_of_memory_text(limit, self._before or 0, in_use, asked)
        watched = item.stash.get(WATCHED, None)
        lines = site_lines(watched.so_far()) if watched is not None else []
        report.sections.append((SECTION, "\n".join([text, *printable(lines)])))
        item.user_properties.append(
            (PROPERTY, json.dumps({"limit": limit, "in_use": in_use, "asked": asked}))
        )

    @contextmanager
    def logged(self, report: pytest.TestReport) -> Iterator[None]:
        """Repeat the sentences at the session's end; reports of workers reach the controller."""
        if report.failed and not self._session.is_part:
            texts = [text.partition("\n")[0] for title, text in report.sections if title == SECTION]
            self._session.remark(*(f"{report.nodeid}: {text}" for text in texts))
        yield


def out_of_memory_text(limit: int, before: int, in_use: int, asked: int | None) -> str:
    """One sentence on a test that ran out of memory; all in bytes, `asked` None if the library does not say.
    `before`: those of `in_use` that were in use before the first test.
    """
    used = f"{in_use / GiB:.4g} GiB in use ({before / GiB:.4g} GiB of it before the first test, such as the context)"
    if asked is None:
        need = f"{used}, and the library does not say how much it asked for"
    else:
        need = f"it asked for {asked / GiB:.4g} GiB beside {used}, a peak of {(in_use + asked) / GiB:.4g} GiB"
    return f"out of memory at a limit of {limit / GiB:.4g} GiB: {need}"
