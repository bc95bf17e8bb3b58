"""Persisting streams in a session: warnings that name the test, skips with the exact reason."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from sessions import Run

from pytest_gpumem.devices.simulated.datasheets import DATASHEETS

THRASHING = "*Thrashing: thrashing: hit ratio x bytes is 1 x 40 MiB = 40 MiB, 31.25 MiB of L2 are set aside: its lines evict each other*"

TEST = """
    import pytest
    from pytest_gpumem import MiB

    @pytest.mark.parametrize("wanted", [{wanted}])
    def test_table(gpu_benchmark, device_buffer, persisting_stream, gpu_kernels, wanted):
        out, table = device_buffer(64 * MiB, "i4"), device_buffer(40 * MiB, "i4")
        with persisting_stream(table, set_aside="max", hit_ratio=1.0, allow_thrash=wanted) as stream:
            result = gpu_benchmark(gpu_kernels.reset_data, out, table, stream=stream)
        assert any("thrashing" in note for note in result.notes) is not wanted
    """


def test_thrashing_is_a_warning_that_names_the_test(pytester: pytest.Pytester, gpumem: Run) -> None:
    pytester.makepyfile(TEST.format(wanted=False))
    result = gpumem("--gpumem-device", "sim:h100")
    result.assert_outcomes(passed=1, warnings=1)
    result.stdout.fnmatch_lines(["*::test_table?False?", THRASHING])


def test_wanted_thrashing_is_none(pytester: pytest.Pytester, gpumem: Run) -> None:
    pytester.makepyfile(TEST.format(wanted=True))
    gpumem("--gpumem-device", "sim:h100").assert_outcomes(passed=1, warnings=0)


def test_two_streams_are_open_at_once(pytester: pytest.Pytester, gpumem: Run) -> None:
    pytester.makepyfile(
        """
        from pytest_gpumem import MiB

        def test_both(gpu_benchmark, gpu_device, device_buffer, persisting_stream, gpu_kernels):
            found = gpu_device.l2.set_aside()
            out, one, other = (device_buffer(8 * MiB, "i4") for _ in range(3))
            with persisting_stream(one) as first, persisting_stream(other, where="launch") as second:
                for label, table, stream in (("one", one, first), ("other", other, second)):
                    result = gpu_benchmark(gpu_kernels.reset_data, out, table, stream=stream, label=label)
                    assert result.measurement.window.set_aside == gpu_device.l2.set_aside() == 18.75 * MiB
            assert gpu_device.l2.set_aside() == found
        """
    )
    gpumem("--gpumem-device", "sim:h100").assert_outcomes(passed=1, warnings=0)


def test_mistakes_are_one_line(pytester: pytest.Pytester, gpumem: Run) -> None:
    pytester.makepyfile(
        """
        def test_keyword(device_buffer, persisting_stream):
            with persisting_stream(device_buffer("1 MiB"), setaside="fit"):
                pass

        def test_another_keyword(device_buffer, persisting_stream):
            with persisting_stream(device_buffer("1 MiB"), label="x"):
                pass

        def test_too_large(device_buffer, persisting_stream):
            with persisting_stream(device_buffer("256 MiB")):
                pass
        """
    )
    result = gpumem("--gpumem-device", "sim:h100")
    result.assert_outcomes(failed=3)
    accepted = "hit_ratio, set_aside, hit, miss, window, offset, where, allow_thrash"
    result.stdout.fnmatch_lines(
        [
            "*py:2: BadCall: persisting_stream() has no keyword 'setaside' (did you mean set_aside?)",
            f"*py:6: BadCall: persisting_stream() has no keyword 'label'; accepted are {accepted}",
            '*py:10: BadWindow: *128 MiB; persisting_stream(..., window="clamp") lays the window over its first bytes',
        ]
    )


def test_an_array_of_another_library_stands_for_its_buffer(
    pytester: pytest.Pytester, gpumem: Run
) -> None:
    pytester.makepyfile(
        """
        import numpy

        def test_array(managed_buffer, persisting_stream):  # NumPy sees no memory of a device
            with persisting_stream(managed_buffer("8 MiB", like=numpy)):
                pass
        """
    )
    result = gpumem("--gpumem-device", "sim:h100")
    result.assert_outcomes(failed=1)
    needs = "*BadWindow: a persisting window needs a buffer of device memory"
    result.stdout.fnmatch_lines([f"{needs}, not <managed buffer, 8 MiB of *"])


@pytest.mark.parametrize(
    ("changes", "reason", "strict"),
    [
        (
            {"compute_capability": (7, 5)},
            "compute capability 7.5) has no persisting L2: it came with compute capability 8.0",
            False,
        ),
        (
            {"mig_profile": "1g.10gb"},
            "MIG profile 1g.10gb) has no persisting L2: the set-aside is disabled in MIG mode",
            True,
        ),
        (
            {"mps": True},
            "9.375 MiB, which no process changes (in this process it is 30)",
            False,
        ),
    ],
)
def test_where_it_cannot_work_the_test_skips_or_fails_with_the_reason(
    pytester: pytest.Pytester,
    gpumem: Run,
    monkeypatch: pytest.MonkeyPatch,
    changes: dict[str, Any],
    reason: str,
    strict: bool,
) -> None:
    monkeypatch.setenv("CUDA_DEVICE_DEFAULT_PERSISTING_L2_CACHE_PERCENTAGE_LIMIT", "30")
    monkeypatch.setitem(DATASHEETS, "changed", sheet := replace(DATASHEETS["h100"]))
    vars(sheet).update(changes)
    pytester.makepyfile(
        """
        def test_table(device_buffer, persisting_stream):
            with persisting_stream(device_buffer(1 << 20), set_aside="max"):
                pass
        """
    )
    result = gpumem("--gpumem-device=sim:changed", "-rs", *["--gpumem-strict"] * strict)
    result.assert_outcomes(skipped=not strict, failed=strict)
    result.stdout.fnmatch_lines([f"*{reason.replace('[', '?')}*"])
