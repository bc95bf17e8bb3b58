"""The questions of a gate to its base: the tests that it selects, and the figures of some of them, by one process each."""

from __future__ import annotations

import json
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from pytest_gpumem.judging.expectations import Selection
from pytest_gpumem.outcomes import NoAnswer
from pytest_gpumem.records.schema import SchemaError, from_plain
from pytest_gpumem.runs import RunError
from pytest_gpumem.runs.experiment import Experiment, Processes
from pytest_gpumem.runs.processes import BASE, HEAD, ProcessRecord, Turn
from pytest_gpumem.runs.worktree import Side
from pytest_gpumem.settings import SELECTION
from pytest_gpumem.units import format_time


@dataclass(frozen=True)
class Base:
    """The commit that a change is compared with."""

    side: Side
    tree: Side  # the working tree, of which base imports nothing
    arguments: tuple[str, ...]  # pytest's, as the gate has them
    environment: Mapping[str, str]

    @contextmanager
    def selecting(self) -> Iterator[Future[Selection]]:
        """Find the tests that it selects on this machine by the gate's arguments and its own files, while the block runs. No GPU is
        needed: nothing is measured. The future raises `NoAnswer`: its tests cannot be collected.
        """
        with (
            ThreadPoolExecutor(1) as thread,
            tempfile.TemporaryDirectory(prefix="gpumem-") as folder,
        ):
            file = Path(folder, "selection.json")
            # Its end, also by Ctrl-C, ends the process, and so the thread.
            with self._experiment(
                ["--collect-only", "--gpumem-device=sim"], {SELECTION: str(file)}
            ) as experiment:
                yield thread.submit(self._selection, experiment, file)

    def _selection(self, experiment: Experiment, file: Path) -> Selection:
        try:
            process = experiment.measure(None)
            if process.error is not None:
                raise RunError(f"{process.name} {process.error}")
            return from_plain(json.loads(file.read_text(encoding="utf-8")), Selection)
        except RunError as error:
            raise NoAnswer(f"BASE: its tests cannot be collected: {error}") from None
        except (OSError, ValueError, SchemaError):
            raise NoAnswer(
                f"BASE: {self.side.title} has another version of pytest-gpumem, which does not say what it selects"
            ) from None

    def figures(self, tests: Sequence[str], side: str = BASE) -> ProcessRecord:
        """One process of these tests, with their memory, and with what a launch runs. `side`: `BASE`, or `HEAD` for the working tree.
        Raises `RunError`: pytest did not accept its arguments or the device.
        """
        with self._experiment(
            ["--gpumem-footprint=on", "--gpumem-count-pages"], {}, side, evidence=True
        ) as experiment:
            return experiment.measure(tests)

    def traced(self, tests: Sequence[str], seconds: float) -> tuple[ProcessRecord, ProcessRecord]:
        """One more process of each side, base first, with the lines that allocate, the counts of pages and what a launch runs.
        Raises `RunError`: a process broke off, or they take longer than `seconds`.
        """
        until = time.monotonic() + seconds

        def watch(_finished: int) -> None:
            if time.monotonic() > until:
                raise RunError(f"they take longer than {format_time(seconds)}")

        found = []
        for side in (BASE, HEAD):
            with self._experiment(
                ["--gpumem-footprint=trace", "--gpumem-count-pages"], {}, side, evidence=True
            ) as experiment:
                process = experiment.measure(tests, watch=watch)
            if process.error is not None:
                raise RunError(f"{process.name} {process.error}")
            found.append(process)
        return found[0], found[1]

    def _experiment(
        self,
        arguments: Sequence[str],
        variables: Mapping[str, str],
        side: str = BASE,
        *,
        evidence: bool = False,
    ) -> Experiment:
        started = Processes(
            {side: self.side if side == BASE else self.tree},
            [*self.arguments, *arguments],
            (),
            {**self.environment, **variables},
            ahead=0,
            evidence=evidence,
            tree=self.tree,
            everything=True,
        )
        return Experiment(started, [Turn(1, side)])
