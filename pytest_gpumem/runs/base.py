"""BASE in a gate: the tests that it selects."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing, contextmanager
from pathlib import Path

from pytest_gpumem.judging.expectations import Selection
from pytest_gpumem.outcomes import NoAnswer
from pytest_gpumem.records.schema import SchemaError, from_plain
from pytest_gpumem.runs import RunError
from pytest_gpumem.runs.experiment import Processes
from pytest_gpumem.runs.processes import BASE, Turn
from pytest_gpumem.runs.worktree import Side
from pytest_gpumem.settings import SELECTION


@contextmanager
def selecting(
    side: Side, tree: Side, arguments: Sequence[str], environment: Mapping[str, str]
) -> Iterator[Future[Selection]]:
    """Collect the tests that BASE selects on this machine, while the block runs.

    It selects by the gate's arguments and its files. No GPU is needed: nothing is measured.
    `tree`: the working tree, of which BASE imports nothing.
    The future raises `NoAnswer`: its tests cannot be collected.
    """
    with (
        ThreadPoolExecutor(1) as thread,
        tempfile.TemporaryDirectory(prefix="gpumem-") as folder,
    ):
        file = Path(folder, "selection.json")
        processes = Processes(
            {BASE: side},
            [*arguments, "--collect-only", "--gpumem-device=sim"],
            (),
            {**environment, SELECTION: str(file)},
            ahead=0,
            tree=tree,
        )
        # To close them ends the process, also by Ctrl-C, and so the thread.
        with closing(processes):
            yield thread.submit(_collect, processes, side, file)


def _collect(processes: Processes, side: Side, file: Path) -> Selection:
    try:
        process = processes.run([Turn(1, BASE)], None)
        if process.error is not None:
            raise RunError(f"{process.name} {process.error}")
        return from_plain(json.loads(file.read_text(encoding="utf-8")), Selection)
    except RunError as error:
        raise NoAnswer(f"BASE: its tests cannot be collected: {error}") from None
    except (OSError, ValueError, SchemaError):
        raise NoAnswer(
            f"BASE: {side.title} has another version of pytest-gpumem, which does not say what it "
            "selects"
        ) from None
