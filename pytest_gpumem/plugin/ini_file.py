"""Whether pytest found the project's own ini file.

pytest looks for it before it knows the options of its plugins. So it takes `/shared` in `--gpumem-baseline /shared` for a test that is to
run, looks from there, and loses the settings of the project: its limits, and with them what its tests would have failed by.
"""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import pytest

_SECTIONS = {
    **dict.fromkeys(("pytest.toml", ".pytest.toml", "pytest.ini", ".pytest.ini"), re.compile("")),
    "pyproject.toml": re.compile(r"^\s*\[tool\.pytest\b", re.MULTILINE),
    "tox.ini": re.compile(r"^\[pytest\]", re.MULTILINE),
    "setup.cfg": re.compile(r"^\[tool:pytest\]", re.MULTILINE),
}
"""By the name of an ini file, in pytest's order, what makes it one
(https://docs.pytest.org/en/stable/reference/customize.html#finding-the-rootdir)."""


def check(config: pytest.Config) -> None:
    """That the ini file in use is that of the tests.

    Raises:
        pytest.UsageError: a value of an option led pytest away from it.
    """
    if config.option.inifilename is not None or hasattr(config, "workerinput"):
        return
    tests = [str(given) for given in config.option.file_or_dir]
    given = [*shlex.split(os.environ.get("PYTEST_ADDOPTS", "")), *map(str, config.invocation_params.args)]
    away = astray(tests, given, config.invocation_params.dir, config.inipath)
    if away is not None:
        raise pytest.UsageError(f"gpumem: {away}")


def astray(tests: Sequence[str], arguments: Sequence[str], folder: Path, used: Path | None) -> str | None:
    """A sentence, if pytest uses another ini file than that of the tests because it took values of options for tests.

    Args:
        tests: what is to run, as it was given.
        arguments: the whole command line.
        folder: where pytest was started.
        used: the ini file in use; None if there is none.
    """
    values = [one for one in arguments if not one.startswith("-") and one not in tests and (folder / one).exists()]
    wanted = _ini_file(list(_folders(tests, folder)) or [folder])
    if not values or wanted is None or wanted == used:
        return None
    instead = f"{used} is used" if used is not None else "none is used"
    which = "it" if len(values) == 1 else "them"
    return (
        f"the settings in {wanted} are lost, {instead}: pytest takes {' and '.join(values)} for tests, and looks for an ini file there; "
        f"write {which} as --option=VALUE, with an equals sign, or name the file with -c"
    )


def _folders(tests: Iterable[str], folder: Path) -> Iterator[Path]:
    for one in tests:
        path = Path(os.path.abspath(folder / one.split("::")[0]))
        if path.exists():
            yield path if path.is_dir() else path.parent


def _ini_file(folders: Sequence[Path]) -> Path | None:
    """As pytest looks: from what all have in common upwards, then from each."""
    for start in (Path(os.path.commonpath(folders)), *folders):
        for folder in (start, *start.parents):
            for name, section in _SECTIONS.items():
                if (path := folder / name).is_file() and section.search(path.read_text(errors="replace")):
                    return path
    return None
