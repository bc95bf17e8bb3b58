"""Every Python example of the documentation: what needs neither a GPU nor a library runs on the simulated device, all in one session."""

from __future__ import annotations

import sys
from collections.abc import Callable

import pytest
from document_blocks import blocks

EXAMPLES = list(blocks("python"))
# Copied from a file that tests of its own hold them to.
TESTS = [block for block in EXAMPLES if block.is_test and not block.marker.startswith("file: ")]
LIBRARIES = ("cupy", "numba", "torch", "triton")
SKIPS = ("could not import", "one GPU is simulated", "the test needs 2 GPUs")
"""Why an example may skip here: libraries, which are not to be found in this session, and a second GPU."""


def test_there_are_some() -> None:
    assert len(TESTS) > 12


def test_it_compiles() -> None:
    for block in EXAMPLES:
        compile("\n" * block.line + block.code, str(block.page), "exec")


def test_all_run_on_the_simulated_device(
    pytester: pytest.Pytester,
    gpumem: Callable[..., pytest.RunResult],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for block in TESTS:
        # With the page's own lines, so that a failure shows them.
        (pytester.path / f"{block.module}.py").write_text(
            "\n" * block.line + block.code, encoding="utf-8"
        )
    for name in LIBRARIES:
        monkeypatch.setitem(sys.modules, name, None)  # as where it is not installed
    result = gpumem(
        "--gpumem-device",
        "sim:h200",
        "--gpumem-budget",
        "10 ms",
        "--benchmark-disable",
        "-q",
        "-rs",
    )
    outcomes = result.parseoutcomes()
    assert result.ret == pytest.ExitCode.OK, result.stdout.str()
    skipped = [line for line in result.outlines if line.startswith("SKIPPED")]
    assert all(any(reason in line for reason in SKIPS) for line in skipped), skipped
    assert len(skipped) == outcomes["skipped"]
    assert outcomes["passed"] >= 20
