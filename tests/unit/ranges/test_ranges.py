from __future__ import annotations

import os
import subprocess
import sys
import textwrap

import pytest
from nvtx_injection import Event, Trace

PROGRAM = """
from pytest_gpumem.ranges import Names, Ranges, phase

ranges = Ranges()
assert ranges.tool_attached()
nodeid = "tests/test_a.py::test_scale[1]"
name = Names([nodeid]).unique(nodeid)
with ranges.test(name, nodeid):
    with ranges.range(phase(name, "setup")):
        pass
    try:
        with ranges.range(phase(name, "measure")):
            for _ in range(3):
                with ranges.range("launch"):
                    pass
            raise RuntimeError
    except RuntimeError:
        pass
"""


def run(program: str, environment: dict[str, str]) -> None:
    subprocess.run(
        [sys.executable, "-c", textwrap.dedent(program)],
        env={**os.environ, **environment},
        check=True,
    )


def test_a_tool_sees_the_ranges_nested_and_closed(nvtx_trace: Trace) -> None:
    run(PROGRAM, nvtx_trace.environment)
    assert nvtx_trace.ranges() == [
        "test_scale_1",
        "test_scale_1/test_scale_1.setup",
        "test_scale_1/test_scale_1.measure",
        "test_scale_1/test_scale_1.measure/launch",
        "test_scale_1/test_scale_1.measure/launch",
        "test_scale_1/test_scale_1.measure/launch",
    ]
    events = nvtx_trace.events()
    assert events[0] == Event("push", "gpumem", "test_scale_1")
    assert events[1] == Event("mark", "gpumem", "tests/test_a.py::test_scale[1]", category="nodeid")


@pytest.mark.parametrize("installed", [True, False])
def test_without_a_tool_or_the_package_ranges_do_nothing(installed: bool) -> None:
    run(
        f"""
        import sys
        if not {installed}:
            sys.modules["nvtx"] = None
        from pytest_gpumem.ranges import Ranges
        ranges = Ranges()
        assert not ranges.tool_attached()
        with ranges.test("test_a", "a.py::test_a"), ranges.range("test_a.measure"):
            pass
        """,
        {},
    )


def test_nvtx_is_not_imported_with_the_module() -> None:
    run("import sys, pytest_gpumem.ranges\nassert 'nvtx' not in sys.modules", {})
