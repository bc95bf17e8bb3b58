"""`--gpumem-memory-limit`: a run as on a smaller card, on the simulated device."""

from __future__ import annotations

import json

import pytest
from known_devices import H100
from sessions import Run
from test_options import only_line

from pytest_gpumem import GiB
from pytest_gpumem.devices import opening

NEEDS_11_GIB = """
def test_small(device_buffer, gpu_benchmark, gpu_kernels):
    gpu_benchmark(gpu_kernels.copy, device_buffer("1 MiB"), device_buffer("1 MiB"))

def test_large(device_buffer):
    held = [device_buffer("1 GiB") for _ in range(11)]
"""


def test_what_needs_11_gib_passes_at_12_and_fails_at_10_with_its_peak(
    pytester: pytest.Pytester, gpumem: Run
) -> None:
    pytester.makepyfile(NEEDS_11_GIB)
    gpumem("--gpumem-memory-limit", "12 GiB").assert_outcomes(passed=2)
    result = gpumem("--gpumem-memory-limit=10GiB", "--junitxml=junit.xml")
    result.assert_outcomes(passed=1, failed=1)
    result.stdout.fnmatch_lines(
        [
            "*memory limit 10 GiB*",
            "*asked for 1 GiB beside 9.5 GiB in use (0.5 GiB of it before *), a peak of 10.5 GiB*",
        ]
    )
    result.stdout.fnmatch_lines(["*::test_large: out of memory at a limit of 10 GiB*"])
    assert (
        json.dumps({"limit": 10 * GiB, "in_use": 19 * GiB // 2, "asked": GiB}).replace(
            '"', "&quot;"
        )
        in (pytester.path / "junit.xml").read_text()
    )


def test_traced_memory_names_the_lines_that_fill_it(pytester: pytest.Pytester, gpumem: Run) -> None:
    pytester.makepyfile(NEEDS_11_GIB)
    result = gpumem("--gpumem-memory-limit=10GiB", "--gpumem-footprint=trace", "-k", "large")
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(
        [
            "*a peak of 10.5 GiB*",
            "in use at the peak, 9 GiB in 9 allocations:",
            "  9 GiB  test_*.py:5 in *",
        ]
    )


def test_the_error_of_any_library_is_reported_with_its_figures(
    pytester: pytest.Pytester, gpumem: Run
) -> None:
    pytester.makepyfile("""
        class OutOfMemoryError(RuntimeError): pass
        def test_it(): raise OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has")
        def test_other(): assert "out" == "of memory"
    """)
    result = gpumem("--gpumem-memory-limit", "4 GiB")
    result.assert_outcomes(failed=2)
    assert (
        len([line for line in result.outlines if "a peak of 2.5 GiB" in line and "::" in line]) == 1
    )


@pytest.mark.parametrize(
    ("limit", "named"),
    [
        ("16", "'16' is not understood"),
        ("16 GHz", "'16 GHz' is not understood"),
        ("-4 GiB", "'-4 GiB'"),
        ("0 B", "leaves no memory"),
        ("900 GiB", "above the 80 GiB"),
        ("300 MiB", "context"),
    ],
)
def test_a_limit_that_cannot_be_is_one_line(
    pytester: pytest.Pytester, gpumem: Run, limit: str, named: str
) -> None:
    pytester.makepyfile("def test_it(): pass")
    line = only_line(gpumem(f"--gpumem-memory-limit={limit}"))
    assert "--gpumem-memory-limit" in line
    assert named in line


def test_without_a_gpu(
    pytester: pytest.Pytester, session: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_gpu(index: int, asked: object) -> None:
        raise opening.NoDevice("the driver is broken")

    monkeypatch.setattr(opening, "_cuda", no_gpu)
    pytester.makepyfile(NEEDS_11_GIB)
    for limit, failed in (("10 GiB", 1), ("900 GiB", 0)):  # a larger card than the simulated one
        session("--gpumem", "--gpumem-memory-limit", limit).assert_outcomes(
            passed=2 - failed, failed=failed
        )


def test_without_gpumem(pytester: pytest.Pytester, session: Run) -> None:
    pytester.makepyfile("def test_it(): pass")
    assert "without --gpumem" in only_line(session("--gpumem-memory-limit", "4 GiB"))


@pytest.mark.parametrize("arguments", [("-n", "2"), ("--dist", "load", "--tx", "3*popen")])
def test_workers_that_share_a_gpu_are_refused(
    pytester: pytest.Pytester,
    session: Run,
    monkeypatch: pytest.MonkeyPatch,
    arguments: tuple[str, ...],
) -> None:
    one_gpu = opening.DeviceChoice(H100, lambda: pytest.fail("opened"), gpus=("GPU-1",))
    monkeypatch.setattr(opening, "_cuda", lambda index, asked: one_gpu)
    pytester.makepyfile("def test_it(): pass")
    assert "accepted is -n 1" in only_line(
        session("--gpumem", "--gpumem-memory-limit", "4 GiB", *arguments)
    )


def test_workers_with_a_device_each_have_the_limit_each(
    pytester: pytest.Pytester, gpumem: Run
) -> None:
    pytester.makepyfile(NEEDS_11_GIB)
    result = gpumem("--gpumem-memory-limit=10GiB", "-n", "2")
    result.assert_outcomes(passed=1, failed=1)
    assert (
        len(
            [
                line
                for line in result.outlines
                if "::test_large: out of memory at a limit of 10 GiB" in line
            ]
        )
        == 1
    )
