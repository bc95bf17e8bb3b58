"""Every limit and every measurement of the baseline ends in a verdict, or in a word that fails under --gpumem-strict."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from sessions import Run

MEASURES = """
import pytest

@pytest.mark.gpu
@pytest.mark.gpumem(max_regression="5%")
def test_copy(gpu_benchmark, device_buffer, gpu_kernels):
    gpu_benchmark(gpu_kernels.copy, device_buffer(64 << 20), device_buffer(64 << 20))

@pytest.mark.gpu
def test_other(gpu_benchmark, device_buffer, gpu_kernels):
    gpu_benchmark(gpu_kernels.copy, device_buffer(32 << 20), device_buffer(32 << 20))
"""
INI = "[pytest]\nmarkers = gpu\n"

Found = Callable[..., tuple[pytest.RunResult, dict[str, tuple[str, str, bool]]]]


@pytest.fixture
def run(pytester: pytest.Pytester, gpumem: Run) -> Found:
    """A session; gives its result, and by key and limit what was not judged: status, reason, and whether words left it out."""

    def session(*arguments: str) -> tuple[pytest.RunResult, dict[str, tuple[str, str, bool]]]:
        result = gpumem("--benchmark-json=out.json", "-p", "no:randomly", *arguments)
        path = Path(pytester.path, "out.json")
        text = path.read_text() if path.exists() else ""
        path.unlink(missing_ok=True)
        missing: list[dict[str, Any]] = json.loads(text)["gpumem"]["missing"] if text else []
        return result, {
            f"{one['key']} {one['what']}": (one["status"], one["reason"], one["by_words"])
            for one in missing
        }

    return session


@pytest.fixture
def saved(pytester: pytest.Pytester, run: Found) -> None:
    """A baseline of both tests."""
    pytester.makeini(INI)
    pytester.makepyfile(test_a=MEASURES)
    assert run("--gpumem-save")[0].ret == 0


@pytest.mark.parametrize(
    ("limit", "how"), [('max_latency="1 ms"', ()), ('max_regression="1%"', ("-n", "1"))]
)
def test_a_limit_on_a_test_that_measures_nothing_is_not_judged(
    pytester: pytest.Pytester, run: Found, limit: str, how: tuple[str, ...]
) -> None:
    why = "the test passed and measured nothing"
    pytester.makepyfile(
        test_a=f"import pytest\n\n@pytest.mark.gpumem({limit})\ndef test_plain():\n    pass\n"
    )
    result, found = run(*how)
    assert (result.ret, found) == (
        0,
        {f"test_a.py::test_plain {limit.partition('=')[0]}": ("undecided", why, False)},
    )
    assert f"not judged: test_a.py::test_plain, {limit.partition('=')[0]}: {why}" in result.outlines
    assert run("--gpumem-strict", *how)[0].ret == pytest.ExitCode.TESTS_FAILED


def test_a_limit_that_one_measurement_has_or_lifts_is_judged(
    pytester: pytest.Pytester, run: Found
) -> None:
    pytester.makepyfile(
        test_a="""
        import pytest

        @pytest.mark.gpumem(max_latency="1 s")
        def test_all(gpu_benchmark, device_buffer, gpu_kernels):
            gpu_benchmark(gpu_kernels.copy, device_buffer(1 << 20), device_buffer(1 << 20))

        @pytest.mark.gpumem(max_latency="1 s")
        def test_lifted(gpu_benchmark, device_buffer, gpu_kernels):
            gpu_benchmark(gpu_kernels.copy, device_buffer(1 << 20), device_buffer(1 << 20), max_latency=None)

        @pytest.mark.gpumem(max_peak="1 GiB", max_kept="0 B")
        def test_memory(device_buffer):
            device_buffer(1 << 20)

        @pytest.mark.gpumem(max_latency="1 s")
        def test_fails():
            assert False
        """
    )
    assert run("--gpumem-strict")[1] == {}


def test_a_limit_of_the_session_is_expected_of_tests_with_the_fixture(
    pytester: pytest.Pytester, run: Found
) -> None:
    pytester.makepyfile(
        test_a="def test_unused(gpu_benchmark):\n    pass\n\ndef test_plain():\n    pass\n"
    )
    assert [*run("--gpumem-max-latency=1 s")[1]] == ["test_a.py::test_unused max_latency"]


@pytest.mark.usefixtures("saved")
@pytest.mark.parametrize(
    ("change", "arguments", "status", "words"),
    [
        # Deleted, renamed and import-skipped tests do not vanish behind -m and -k.
        ({"test_a.py": MEASURES.replace("def test_copy", "def test_renamed")}, ("-m", "gpu"), "lost", False),
        # A test that its own file leaves out is not left out by the words that ask for it.
        ({"test_a.py": MEASURES, "pytest.ini": INI + "addopts = --deselect test_a.py::test_copy\n"}, (), "not run", False),
        ({"test_a.py": MEASURES, "pytest.ini": INI + "testpaths = other\n", "other/test_b.py": ""}, (), "not run", False),
        ({"test_a.py": MEASURES, "conftest.py": 'collect_ignore = ["test_a.py"]\n'}, (), "not run", False),
        (
            {
                "test_a.py": MEASURES,
                "conftest.py": "def pytest_collection_modifyitems(config, items):\n"
                "    config.hook.pytest_deselected(items=items[:1])\n    del items[:1]\n",
            },
            (),
            "not run",
            False,
        ),
        # An option of the project whose name is a word of ours is not one that deselects.
        (
            {
                "test_a.py": MEASURES,
                "conftest.py": "def pytest_addoption(parser):\n    parser.addoption('--project')\n\n"
                "def pytest_collection_modifyitems(config, items):\n"
                "    config.hook.pytest_deselected(items=items[:1])\n    del items[:1]\n",
            },
            ("--project=a",),
            "not run",
            False,
        ),
        # What the words leave out, somebody meant to leave out.
        ({"test_a.py": MEASURES}, ("-k", "other"), "not run", True),
        ({"test_a.py": MEASURES}, ("test_a.py::test_other",), "not run", True),
    ],
    ids=[
        "renamed -m", "addopts deselect", "testpaths", "collect_ignore", "conftest",
        "option named project", "-k", "named",
    ],
)  # fmt: skip
def test_a_measurement_that_is_left_out_has_a_word(
    pytester: pytest.Pytester,
    run: Found,
    change: dict[str, str],
    arguments: tuple[str, ...],
    status: str,
    words: bool,
) -> None:
    for name, text in change.items():
        (pytester.path / name).parent.mkdir(exist_ok=True)
        (pytester.path / name).write_text(text)
    result, found = run(*arguments)
    assert result.ret in (0, pytest.ExitCode.NO_TESTS_COLLECTED)
    assert (found["test_a.py::test_copy row"][0], found["test_a.py::test_copy row"][2]) == (
        status,
        words,
    )
    assert run("--gpumem-strict", *arguments)[0].ret == (
        result.ret if words else pytest.ExitCode.TESTS_FAILED
    )
