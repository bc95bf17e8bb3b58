"""Tables of cases in one test."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest


@contextmanager
def naming(*case: object) -> Iterator[None]:
    """Name the case in the message of whatever fails for it."""
    try:
        yield
    except (Exception, pytest.fail.Exception) as error:
        raise AssertionError(f"case {case!r}: {error}") from error
