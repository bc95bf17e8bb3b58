"""Allocations by the line of the user's code that made them."""

from __future__ import annotations

import sysconfig
from pathlib import Path

import pytest

from pytest_gpumem import GiB, MiB
from pytest_gpumem.devices import allocation_sites
from pytest_gpumem.devices.allocation_sites import innermost, is_users, shown_path, sites
from pytest_gpumem.devices.memory_events import NO_LINE, AllocationEvent, Line

LIBRARY = (f"{sysconfig.get_path('purelib')}/torch/nn/functional.py", 17, "relu")
STANDARD = (f"{sysconfig.get_path('stdlib')}/contextlib.py", 81, "inner")
OURS = (
    str(Path(allocation_sites.__file__).parent.parent / "plugin" / "running.py"),
    5,
    "pytest_runtest_call",
)


@pytest.fixture
def model(tmp_path: Path) -> Path:
    file = tmp_path / "model.py"
    file.write_text("import torch\n\ndef forward(a, b, c):\n    return torch.relu(a * b + c)\n")
    return file


def allocated(nbytes: int, *stack: Line, library: str = "PyTorch") -> AllocationEvent:
    """As an allocation whose stack, the outermost frame first, was looked at."""
    return AllocationEvent(
        0.0, (library, "device"), "use", 0, nbytes, innermost(reversed(stack)) or NO_LINE
    )


def test_allocations_are_grouped_by_the_innermost_line_of_the_user(
    model: Path, tmp_path: Path
) -> None:
    test = (str(tmp_path / "test_model.py"), 3, "test_forward")
    line = (str(model), 4, "forward")
    stayed = allocated(GiB, OURS, test, line, STANDARD, LIBRARY)
    found = sites(
        [stayed, allocated(64 * MiB, OURS, test, line), allocated(MiB, OURS, test)],
        [stayed],
        tmp_path,
    )
    first, second = found
    assert (first.file, first.line, first.function) == ("model.py", 4, "forward")
    assert first.code == "return torch.relu(a * b + c)"
    assert (first.at_peak, first.at_peak_count, first.kept, first.kept_count) == (
        GiB + 64 * MiB,
        2,
        GiB,
        1,
    )
    assert (second.file, second.at_peak, second.kept) == ("test_model.py", MiB, 0)


def test_a_suite_that_is_installed_is_the_users_code_where_there_is_no_other() -> None:
    assert not is_users(LIBRARY[0])
    assert not is_users(STANDARD[0])
    assert not is_users("<frozen importlib._bootstrap>")
    assert innermost((("<string>", 1, "<module>"), LIBRARY, OURS)) == LIBRARY


def test_what_started_pytest_is_no_part_of_the_way(tmp_path: Path) -> None:
    script, test = (
        (str(tmp_path / "run.py"), 1, "<module>"),
        (str(tmp_path / "test_it.py"), 2, "test_it"),
    )
    pytests = (f"{sysconfig.get_path('purelib')}/_pytest/python.py", 9, "pytest_pyfunc_call")
    assert innermost((LIBRARY, test, pytests, OURS, pytests, script)) == test
    assert innermost((OURS, pytests, script)) is None


def test_paths_are_the_same_on_every_machine(tmp_path: Path) -> None:
    assert shown_path(str(tmp_path / "src" / "a.py"), tmp_path) == "src/a.py"
    assert shown_path(LIBRARY[0], tmp_path) == "torch/nn/functional.py"
    assert shown_path(str(tmp_path / "venv" / "site-packages" / "b" / "c.py"), tmp_path) == "b/c.py"
    assert shown_path("/elsewhere/d.py", tmp_path) == "/elsewhere/d.py"
