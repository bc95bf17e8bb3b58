"""Further fresh processes of a run (`--gpumem-processes`): the same pytest command again, one after another, for its rows alone."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from pytest_gpumem.records.result_file import FileError, content, document_in, parsed
from pytest_gpumem.records.row import Row

SHOWN = 1500
"""Characters of a failed process's last words that are kept."""
_TAKEN_AWAY = ("GPUMEM_SAVE", "GPUMEM_L2_SWEEP", "GPUMEM_L2_SWEEP_MAP", "GITHUB_STEP_SUMMARY")
"""Variables that would have each process write what is the run's."""
_MEASURED = (0, 1)
"""pytest's exit codes of a run whose tests passed or failed: either way its rows are what was measured."""


class RepeatFailed(Exception):
    """A further process could not measure; one message with its last words."""


def repeats(arguments: Sequence[str], folder: Path, count: int, device: str, *, environment: Mapping[str, str]) -> Iterator[list[Row]]:
    """Run pytest in fresh processes, one after another, and give the rows of each as it ends.

    They save, report and compare nothing: what such options would write goes to a folder that is removed.

    Args:
        arguments: of pytest, as this process got them.
        folder: where it was called.
        count: of processes.
        device: baseline key of this process's device, which the others must have too.
        environment: variables of the processes.

    Raises:
        RepeatFailed: a process did not measure, or did on another device.
    """
    for number in range(count):
        with tempfile.TemporaryDirectory() as scratch:
            yield _rows(arguments, folder, Path(scratch), device, environment, f"process {number + 2} of {count + 1}")


def _rows(arguments: Sequence[str], folder: Path, scratch: Path, device: str, environment: Mapping[str, str], name: str) -> list[Row]:
    results = scratch / "results.json"
    # The last of an option counts: what stands here takes the place of what the arguments say.
    # One word each: pytest looks for its root folder among all words that are paths, and rows are named from there.
    own = ["--gpumem-processes=1", f"--gpumem-baseline={scratch}", f"--gpumem-report={scratch / 'report.html'}"]
    own += [f"--gpumem-markdown={scratch / 'summary.md'}", f"--gpumem-code-quality={scratch / 'quality.json'}"]
    own += [f"--benchmark-json={results}", f"--benchmark-storage=file://{scratch}", f"--junitxml={scratch / 'junit.xml'}"]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", *arguments, *own],
        cwd=folder,
        env=dict(environment),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        errors="replace",
        check=False,
    )
    if done.returncode not in _MEASURED or not results.exists():
        words = (done.stdout + done.stderr).strip()[-SHOWN:]
        raise RepeatFailed(f"{name} of --gpumem-processes ended with {done.returncode} and measured nothing: {words}")
    try:
        document = document_in(parsed(content(results)))
    except FileError as error:
        raise RepeatFailed(f"{name} of --gpumem-processes wrote no rows: {error}") from None
    if document.device.key != device:
        raise RepeatFailed(f"{name} of --gpumem-processes measured on {document.device.key}, this one is on {device}")
    return list(document.rows)


def environment_of(now: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Variables for the processes: those of this one, less what would have each of them write what is the run's."""
    return {name: value for name, value in now.items() if name not in _TAKEN_AWAY}
