"""Without --gpumem the plugin costs nothing and changes nothing but the tests that use its fixtures, which skip."""

from __future__ import annotations

import subprocess
import sys

import pytest

pytestmark = pytest.mark.usefixtures("new_interpreters")

HEAVY = "cupy cuda pynvml scipy numpy nvtx rich msgspec click numba torch"


def modules_after(pytester: pytest.Pytester, *arguments: str) -> set[str]:
    """Top-level packages, and modules of ours, that a whole session imports."""
    pytester.makeconftest(
        """
        import sys
        def pytest_unconfigure():
            with open("modules.txt", "w") as file:
                file.write("\\n".join(sys.modules))
        """
    )
    pytester.makepyfile("def test_nothing(): pass")
    result = pytester.runpytest_subprocess(*arguments)
    assert result.ret == 0
    names = (pytester.path / "modules.txt").read_text().splitlines()
    return {name for name in names if "." not in name or name.startswith("pytest_gpumem")}


def test_off_imports_no_heavy_package(pytester: pytest.Pytester) -> None:
    without = modules_after(pytester, "-p", "no:gpumem")
    off = modules_after(pytester)
    assert "pytest_gpumem.plugin.hooks" in off
    assert not {name for name in off - without if name in HEAVY.split()}
    ours = {name for name in off if name.startswith("pytest_gpumem.")}
    assert ours == {
        "pytest_gpumem.plugin",
        "pytest_gpumem.plugin.hooks",
        "pytest_gpumem.plugin.marks",
        "pytest_gpumem.limits",
        "pytest_gpumem.options",
        "pytest_gpumem.settings",
        "pytest_gpumem.units",
    }


def test_tests_that_use_our_fixtures_skip(pytester: pytest.Pytester) -> None:
    pytester.makepyfile(
        """
        import pytest

        @pytest.fixture(scope="module")
        def expensive():
            raise AssertionError("set up although the test skips")

        @pytest.mark.parametrize("name", ["gpu_device", "gpu_kernels", "gpu_benchmark", "device_buffer", "managed_buffer",
            "prefetched_buffer", "pinned_buffer", "registered_buffer", "persisting_stream"])
        def test_dynamic(request, name):
            request.getfixturevalue(name)
            raise AssertionError("ran")

        def test_direct(expensive, gpu_benchmark):
            raise AssertionError("ran")

        @pytest.fixture
        def buffers(device_buffer):
            raise AssertionError("ran")

        def test_indirect(expensive, buffers):
            raise AssertionError("ran")

        def test_other(): pass
        """
    )
    result = pytester.runpytest("-rs")
    result.assert_outcomes(passed=1, skipped=11)
    result.stdout.fnmatch_lines(["SKIPPED*needs --gpumem"])


def test_a_users_own_fixture_of_the_same_name_is_theirs(pytester: pytest.Pytester) -> None:
    pytester.makeconftest(
        """
        import pytest

        @pytest.fixture
        def gpu_benchmark():
            return "mine"

        @pytest.fixture
        def device_buffer():
            return "mine"

        @pytest.fixture
        def gpu_device():
            return "mine"
        """
    )
    pytester.makepyfile(
        """
        def test_mine(gpu_benchmark, device_buffer, gpu_device):
            assert gpu_benchmark == device_buffer == gpu_device == "mine"

        def test_theirs_is_not_ours(gpu_kernels): ...
        """
    )
    pytester.runpytest().assert_outcomes(passed=1, skipped=1)


def test_an_override_that_uses_ours_skips(pytester: pytest.Pytester) -> None:
    pytester.makeconftest(
        """
        import pytest

        @pytest.fixture
        def gpu_benchmark(gpu_benchmark):
            raise AssertionError("ran")
        """
    )
    pytester.makepyfile("def test_it(gpu_benchmark): raise AssertionError('ran')")
    pytester.runpytest().assert_outcomes(skipped=1)


def test_without_pytest_benchmark_tests_still_skip(pytester: pytest.Pytester) -> None:
    pytester.makepyfile("def test_it(gpu_benchmark): raise AssertionError('ran')")
    pytester.runpytest("-p", "no:benchmark").assert_outcomes(skipped=1)


def test_marker_is_known_with_strict_markers(pytester: pytest.Pytester) -> None:
    pytester.makepyfile(
        "import pytest\n@pytest.mark.gpumem(max_latency='1 ms')\ndef test_it(): pass"
    )
    pytester.runpytest("--strict-markers").assert_outcomes(passed=1)


STATE = """
import atexit, gc, os, signal, sys, threading, warnings

def state():
    wakeup = signal.set_wakeup_fd(-1)
    if wakeup != -1:
        signal.set_wakeup_fd(wakeup)
    return {
        "meta_path": [str(one) for one in sys.meta_path],
        "path_hooks": [*map(str, sys.path_hooks)],
        "hooks": [sys.excepthook, sys.unraisablehook, sys.displayhook, sys.breakpointhook, threading.excepthook],
        "tracing": [sys.gettrace(), sys.getprofile()],
        "signals": {one: signal.getsignal(one) for one in signal.valid_signals()},
        "wakeup": wakeup,
        "atexit": atexit._ncallbacks(),
        "filters": [*warnings.filters],
        "garbage": [gc.isenabled(), *gc.callbacks],
        "streams": [sys.stdout, sys.stderr],
        "environment": {**os.environ},
        "folder": os.getcwd(),
    }
"""

GLOBALS = (
    STATE
    + """
import importlib
import pytest

for name in sys.argv[1].split():
    importlib.import_module(name)
if sys.argv[1]:  # the first temporary folder of a process registers what removes all at its end
    import tempfile
    tempfile.TemporaryDirectory().cleanup()
assert pytest.main(["-q", "-p", "no:gpumem", "-p", "no:cacheprovider", "test_a.py"]) == 0
before = state()
assert pytest.main(["-q", "-p", "no:cacheprovider", *sys.argv[2:]]) == 0
after = state()
changed = {name: (before[name], after[name]) for name in before if before[name] != after[name]}
assert not changed, changed
"""
)
THIRD_PARTIES = "numpy msgspec rich.console rich.table rich.text filelock platformdirs nvtx jinja2 multiprocessing.connection multiprocessing.util"
"""What a session with --gpumem imports of others, which register what they like."""
MEASURES = """
def test_it(gpu_benchmark, gpu_kernels, device_buffer):
    gpu_benchmark(gpu_kernels.copy, device_buffer(1 << 20), device_buffer(1 << 20))
"""


@pytest.mark.parametrize(
    ("others", "arguments"),
    [
        ("", ()),
        (
            THIRD_PARTIES,
            ("--gpumem", "--gpumem-device=sim", "--gpumem-budget=5 ms", "--gpumem-save"),
        ),
    ],
    ids=["without", "with"],
)
def test_a_session_leaves_nothing_global_behind(
    pytester: pytest.Pytester, others: str, arguments: tuple[str, ...]
) -> None:
    pytester.makepyfile(test_a="def test_nothing(): pass", test_b=MEASURES)
    done = subprocess.run(
        [sys.executable, "-c", GLOBALS, others, *arguments],
        cwd=pytester.path,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
