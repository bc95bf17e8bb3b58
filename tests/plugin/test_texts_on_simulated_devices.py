"""What the texts say of an RTX 3090 and an A100, seen by a test's own eyes on the devices simulated after them."""

from __future__ import annotations

from pathlib import Path

import pytest
from sessions import Run

SUITE = Path(__file__).parents[1] / "memory"
QUICK = ("-o", "gpumem_placements=2", "-o", "gpumem_precision=1%")

RTX3090 = """
from pytest_gpumem import GiB, MiB

# "CUDA L2 Persistent Cache", Lei Mao: milliseconds without a window, at hit ratio 1 and at the fitted one, by MiB of the table.
TEXT = {
    1: (1.754, 1.685, 1.674),
    2: (2.158, 1.997, 2.002),
    3: (3.095, 2.510, 2.533),
    4: (3.906, 3.632, 3.706),
    5: (4.120, 4.554, 3.920),
    6: (4.194, 4.583, 4.255),
}
NOISE = 1.005

def test_reset_data(gpu_benchmark, gpu_kernels, device_buffer, persisting_stream):
    out, kernel, seen = device_buffer(1 * GiB, "i4"), gpu_kernels.reset_data.with_grid(32), {}
    for mib in TEXT:
        table = device_buffer(mib * MiB, "i4")
        for way, settings in enumerate((
            {"set_aside": "off"},
            {"set_aside": 3 * MiB, "hit_ratio": 1.0, "allow_thrash": True},
            {"set_aside": 3 * MiB, "hit_ratio": "fit"},
        )):
            with persisting_stream(table, **settings) as stream:
                result = gpu_benchmark(kernel, out, table, stream=stream, mode="hot", label=f"{mib} MiB, {way}")
            assert (result.measurement.window is None) == (way == 0)
            seen[mib, way] = result.latency
            # 1, 3 and 5 MiB are the fit set, the others are held out.
            assert abs(result.latency / (TEXT[mib][way] * 1e-3) - 1) < (0.15 if mib in (2, 4, 6) else 0.02), (mib, way)
    for mib in (1, 2, 3):  # the same settings twice
        assert 1 / NOISE < seen[mib, 2] / seen[mib, 1] < NOISE
        assert seen[mib, 1] < seen[mib, 0]
    for mib in (4, 5, 6):
        assert seen[mib, 2] < seen[mib, 1]  # at 4 MiB the text has 2 % the other way; its two runs at 3 MiB differ by 3 %
    for mib in (4, 5):
        assert seen[mib, 2] < seen[mib, 0]
    for mib in (5, 6):
        assert seen[mib, 1] > 1.05 * seen[mib, 0]
"""
A100 = """
from pytest_gpumem import GiB, MiB

def test_sliding_window(gpu_benchmark, gpu_kernels, device_buffer, persisting_stream):
    data, seen = device_buffer(1 * GiB, "i4"), {}
    for mib in (10, 20, 30, 40, 50, 60):
        region = device_buffer(mib * MiB, "i4")
        for way, settings in enumerate((
            {"set_aside": "off"},
            {"set_aside": 30 * MiB, "hit_ratio": 1.0, "allow_thrash": True},
            {"set_aside": 30 * MiB, "hit_ratio": min(1.0, 20 / mib)},
        )):
            with persisting_stream(region, **settings) as stream:
                result = gpu_benchmark(gpu_kernels.sliding_window, region, data, stream=stream, mode="hot", label=f"{mib} MiB, {way}")
            seen[mib, way] = result.latency
    # CUDA C++ Best Practices Guide 9.2.2.2: up to 50 % faster where it fits, about 10 % slower beyond 30 MB, good throughout when tuned.
    assert max(seen[mib, 0] / seen[mib, 1] for mib in (10, 20)) > 1.3
    for mib in (40, 50, 60):
        assert 1.02 < seen[mib, 1] / seen[mib, 0] < 1.2, mib
    for mib in (10, 20, 30, 40, 50, 60):
        assert seen[mib, 2] < seen[mib, 0], mib
"""


@pytest.mark.parametrize(("device", "test"), [("rtx3090", RTX3090), ("a100", A100)])
def test_a_text_is_met_through_the_public_fixtures(
    pytester: pytest.Pytester, gpumem: Run, device: str, test: str
) -> None:
    pytester.makepyfile(test)
    result = gpumem("--gpumem-device", f"sim:{device}", *QUICK)
    result.assert_outcomes(passed=1)
    result.stdout.fnmatch_lines(["*18 rows (simulated)*"])


@pytest.mark.parametrize("device", ["rtx3090", "a100", "h100", "h200"])
def test_the_suites_experiments_hold_on_every_simulated_device(
    pytester: pytest.Pytester, gpumem: Run, device: str
) -> None:
    suite = pytester.mkdir("suite")
    for name in ("conftest.py", "test_l2_seeds.py"):
        (suite / name).write_text((SUITE / name).read_text())
    result = gpumem("suite", "--import-mode=importlib", "--gpumem-device", f"sim:{device}", *QUICK)
    # No more than 4.1 MiB of an RTX 3090's L2 can be set aside, and the guide sets 30 MiB aside.
    result.assert_outcomes(
        **({"passed": 10, "skipped": 1} if device == "rtx3090" else {"passed": 11})
    )
