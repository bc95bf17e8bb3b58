"""`--gpumem-processes M`: the run's tests are measured in M fresh processes, and each row is judged over all of them."""

from __future__ import annotations

from collections.abc import Generator
from typing import TYPE_CHECKING

import pytest

from pytest_gpumem.plugin.fixtures import BENCHMARK_FIXTURE
from pytest_gpumem.plugin.running import uses
from pytest_gpumem.settings import FURTHER_PROCESS, READS_CONTROLS

if TYPE_CHECKING:
    from pytest_gpumem.plugin.session import GpuSession


def check_alone(config: pytest.Config) -> None:
    """Refuse workers of xdist: processes of the run follow each other on the GPU."""
    if hasattr(config, "workerinput") or getattr(config.option, "dist", "no") != "no":
        raise pytest.UsageError("gpumem: --gpumem-processes runs its processes one after another, not under xdist; leave out -n")


class RepeatHooks:
    """Runs the further processes before the tests of this one; registered only with more than one process."""

    def __init__(self, session: GpuSession) -> None:
        check_alone(session.config)
        self._session = session

    @pytest.hookimpl(wrapper=True)
    def pytest_runtestloop(self, session: pytest.Session) -> Generator[None, object, object]:
        from pytest_gpumem.duet.repeats import RepeatFailed, environment_of, repeats

        gpu, config = self._session, self._session.config
        if not config.option.collectonly and not session.testsfailed and any(uses(item, BENCHMARK_FIXTURE) for item in session.items):
            arguments = [str(argument) for argument in config.invocation_params.args]
            if gpu.settings.total_budget is not None:
                arguments += [f"--gpumem-budget={gpu.settings.total_budget / gpu.settings.processes!r} s total"]
            environment = environment_of() | {FURTHER_PROCESS: READS_CONTROLS if gpu.reads_controls else "1"}
            further = repeats(arguments, config.invocation_params.dir, gpu.settings.processes - 1, gpu.facts.key, environment=environment)
            try:
                for rows in further:
                    gpu.further.append({row.key: row for row in rows})
            except RepeatFailed as failed:
                raise pytest.exit.Exception(f"gpumem: {failed}", returncode=pytest.ExitCode.TESTS_FAILED) from None
        return (yield)
