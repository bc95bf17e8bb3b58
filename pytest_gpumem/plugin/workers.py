"""pytest-xdist: which process of a session this is."""

from __future__ import annotations

import pytest


def is_worker(config: pytest.Config) -> bool:
    """True in a worker, which runs the tests that the controller hands it."""
    return hasattr(config, "workerinput")


def is_controller(config: pytest.Config) -> bool:
    """True in the process that hands the tests to workers, and runs none itself."""
    return not is_worker(config) and getattr(config.option, "dist", "no") != "no"


def under_xdist(config: pytest.Config) -> bool:
    """True in both."""
    return is_worker(config) or is_controller(config)


def refuse_workers(config: pytest.Config, what: str) -> None:
    """Raises `pytest.UsageError`: the session has workers; `what` says what one process does."""
    if under_xdist(config):
        raise pytest.UsageError(f"gpumem: {what}, not under xdist; leave out -n")


def worker_count(config: pytest.Config) -> int:
    """Processes that run tests: the controller's workers, or 1."""
    if not is_controller(config):
        return 1
    return sum(int(count) if times else 1 for count, times, _ in (spec.partition("*") for spec in config.option.tx))
