"""What a test gets from gpu_benchmark, and how its mistakes are told."""

from __future__ import annotations

import json

import pytest
from sessions import SIMULATED, TRIAD, Run, row_in, rows_in, stored_in


def test_results_and_table(pytester: pytest.Pytester, gpumem: Run) -> None:
    pytester.makepyfile(
        """
        from statistics import fmean, median

        def test_triad(gpu_benchmark, device_buffer, gpu_kernels, gpu_device):
            a, b, c = (device_buffer(1 << 20, "f4") for _ in range(3))
            result = gpu_benchmark(gpu_kernels.triad, a, b, c, 3.0)
            assert result.latency == fmean(median(p) for p in result.measurement.placements)
            assert result.bandwidth == 3 * (1 << 20) / result.latency
            assert len(result.samples) == sum(map(len, result.measurement.placements)) > 4
            assert result.device.peak_bandwidth == gpu_device.facts.peak_bandwidth
            assert "triad" in repr(result) and "simulated" in repr(result)
        """
    )
    result = gpumem()
    result.assert_outcomes(passed=1)
    result.stdout.fnmatch_lines(
        ["gpumem: SIMULATED *", "*test_triad*measured (sim)", "1 row (simulated): 1 measured"]
    )


def test_a_result_says_how_it_was_taken(pytester: pytest.Pytester, gpumem: Run) -> None:
    pytester.makepyfile(
        """
        from pytest_gpumem import Case

        def test_how(gpu_benchmark, device_buffer, gpu_kernels):
            a, b = device_buffer(1 << 20), device_buffer(1 << 20)
            cold = gpu_benchmark(gpu_kernels.copy, a, b, label="cold")
            assert (cold.sampler, cold.checked) == ("blocked", True)
            assert cold.measurement.sampler_reason == "each launch is queued while the stream is blocked, which varies least"
            assert len(cold.measurement.placements) >= 8
            assert 0 < cold.measurement.noise < 0.05
            assert cold.measurement.overhead > cold.measurement.floor
            assert cold.measurement.during is not None
            hot = gpu_benchmark(gpu_kernels.copy, a, b, mode="hot", label="hot")
            assert (hot.sampler, hot.measurement.overhead) == ("graph", None)

        def test_streams(gpu_benchmark, device_buffer):
            assert gpu_benchmark.stream is gpu_benchmark.stream
            handles = [gpu_benchmark.stream.handle]

            def build(memory):
                handles.append(memory.stream.handle)
                return Case(lambda: None, reference=lambda: None, reads=[memory.device(1 << 20)])

            result = gpu_benchmark.case(build)
            assert len(set(handles)) == 1 and len(handles) > 8
            assert len(result.measurement.placements) == len(handles) - 1
        """
    )
    gpumem("--gpumem-budget=5 ms").assert_outcomes(passed=2)


def test_a_name_that_the_function_has_as_a_parameter_goes_to_it(
    pytester: pytest.Pytester, gpumem: Run
) -> None:
    pytester.makepyfile(
        """
        import pytest

        def test_kernels(gpu_benchmark, device_buffer, gpu_kernels):
            a, b = device_buffer(1 << 20, "f4"), device_buffer(1 << 20, "f4")
            far, near = (gpu_benchmark(gpu_kernels.stride_copy, a, b, stride=n, label=str(n)) for n in (32, 1))
            assert far.latency < near.latency  # a quarter of the sectors
            with pytest.raises(ValueError, match=r"gpu_benchmark\\(\\) has no keyword 'labl' \\(did you mean label\\?\\)"):
                gpu_benchmark(gpu_kernels.stride_copy, a, b, stride=1, labl="x")

        def test_functions(gpu_benchmark):
            with pytest.raises(ValueError, match=r"^gpu_benchmark.case\\(\\) has no keyword 'reads': it is a field of the Case$"):
                gpu_benchmark.case(lambda memory: None, reads=[])
        """
    )
    gpumem().assert_outcomes(passed=2)


def test_a_function_of_your_own_is_checked_and_has_a_bandwidth(
    pytester: pytest.Pytester, gpumem: Run
) -> None:
    pytester.makepyfile(
        """
        import pytest

        def scale(x, y):
            raise NotImplementedError("needs a GPU")

        @pytest.mark.parametrize("factor", [2, 3])
        def test_scale(gpu_benchmark, device_buffer, factor):
            x, y = device_buffer("64 MiB"), device_buffer("64 MiB")

            def reference():
                y.view()[:] = factor * x.view()

            right = lambda: (y.read() == 2 * x.read()).all()
            result = gpu_benchmark(scale, x, y, reference=reference, check=right, reads=[x], writes=[y])
            assert result.checked and len(result.measurement.placements) > 1
            assert result.bandwidth == pytest.approx(2 * x.nbytes / result.latency)

        def test_no_reference(gpu_benchmark, device_buffer):
            x, y = device_buffer("64 MiB"), device_buffer("64 MiB")
            gpu_benchmark(scale, x, y, check=lambda: True, reads=[x], writes=[y])
        """
    )
    result = gpumem("-rfs")
    result.assert_outcomes(passed=1, failed=1, skipped=1)
    result.stdout.fnmatch_lines(
        [
            "*WrongResult: scale: its check returned False after one launch",
            "SKIPPED*a function without reference= does not run on the simulated device",
            "test_scale?2?*measured (sim)*",
            "1 row (simulated): 1 measured; 1 test failed without a measurement*",
        ]
    )


@pytest.mark.parametrize("then", ["pass", "pytest.skip('flaky')", "raise ValueError('its own')"])
def test_a_wrong_result_fails_its_test_also_if_the_test_catches_the_error(
    pytester: pytest.Pytester, gpumem: Run, then: str
) -> None:
    pytester.makepyfile(
        f"""
        import pytest
        from pytest_gpumem import Case

        def test_caught(gpu_benchmark):
            try:
                gpu_benchmark.case(
                    lambda memory: Case(lambda: None, reference=lambda: None, check=lambda: False, reads=[memory.device(64)])
                )
            except AssertionError:
                {then}
        """
    )
    result = gpumem("-rf")
    assert result.ret == pytest.ExitCode.TESTS_FAILED
    own = (
        "*its own*"
        if "its own" in then
        else "*its check returned False after one launch (the test caught this error)"
    )
    result.stdout.fnmatch_lines([f"FAILED *::test_caught - {own}"])


def test_quiet_shows_the_table(pytester: pytest.Pytester, gpumem: Run) -> None:
    pytester.makepyfile(TRIAD)
    result = gpumem("-q", "--benchmark-quiet")
    result.stdout.fnmatch_lines(
        ["test_triad * us * GB/s * measured (sim)", "1 row (simulated): 1 measured"]
    )


def test_no_row_takes_the_place_of_another(pytester: pytest.Pytester, gpumem: Run) -> None:
    """The parameter `a` with the label `b` and the parameter `a][b` without one are two rows."""
    pytester.makepyfile(
        """
        import pytest

        @pytest.mark.parametrize("p", ["a", "a][b"])
        def test_x(gpu_benchmark, device_buffer, gpu_kernels, p):
            gpu_benchmark(gpu_kernels.copy, device_buffer(1 << 20), device_buffer(1 << 20), label="b" if p == "a" else None)
        """
    )
    gpumem("--benchmark-json=out.json", "--gpumem-save").assert_outcomes(passed=2)
    rows = rows_in(pytester.path)
    assert [(row["nodeid"].partition("::")[2], row["label"]) for row in rows] == [
        ("test_x[a]", "b"),
        ("test_x[a][b]", ""),
    ]
    (stored,) = stored_in(pytester.path)
    assert len(json.loads(stored.read_text())["content"]["rows"]) == 2


def test_a_test_that_is_collected_twice_is_a_usage_error(
    pytester: pytest.Pytester, gpumem: Run
) -> None:
    path = pytester.makepyfile(TRIAD)
    result = gpumem("--keep-duplicates", path.name, path.name)
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    result.stderr.fnmatch_lines(
        [f"ERROR: gpumem: {path.name}::test_triad: it is collected twice, *"]
    )


def test_several_measurements_have_labels(pytester: pytest.Pytester, gpumem: Run) -> None:
    pytester.makepyfile(
        """
        import pytest

        def test_labels(gpu_benchmark, device_buffer, gpu_kernels):
            a, b = device_buffer(1 << 20), device_buffer(1 << 20)
            gpu_benchmark(gpu_kernels.copy, a, b, label="there")
            gpu_benchmark(gpu_kernels.copy, b, a, label="back")

        def test_same_label(gpu_benchmark, device_buffer, gpu_kernels):
            a, b = device_buffer(1 << 20), device_buffer(1 << 20)
            gpu_benchmark(gpu_kernels.copy, a, b, label="there")
            gpu_benchmark(gpu_kernels.copy, b, a, label="there")

        def test_no_label(gpu_benchmark, device_buffer, gpu_kernels):
            a, b = device_buffer(1 << 20), device_buffer(1 << 20)
            gpu_benchmark(gpu_kernels.copy, a, b)
            gpu_benchmark(gpu_kernels.copy, b, a)

        @pytest.mark.parametrize("label", ["", "a\\nb", 3])
        def test_bad_label(gpu_benchmark, device_buffer, gpu_kernels, label):
            a, b = device_buffer(1 << 20), device_buffer(1 << 20)
            gpu_benchmark(gpu_kernels.copy, a, b, label=label)
        """
    )
    result = gpumem()
    result.assert_outcomes(passed=1, failed=5)
    result.stdout.fnmatch_lines(
        [
            "*test_several_measurements_have_labels.py:11: BadCall: label='there': the label is used already*",
            "*test_several_measurements_have_labels.py:16: BadCall: this test measures a second time without label=*",
        ]
    )
    assert "Traceback" not in result.stdout.str()
    assert "pytest_gpumem/" not in result.stdout.str()


def test_mistakes_are_told_with_the_users_line(pytester: pytest.Pytester, gpumem: Run) -> None:
    pytester.makepyfile(
        """
        def test_too_big(device_buffer):
            device_buffer(1 << 50)

        def test_size(device_buffer):
            device_buffer(-1)

        def test_limit(gpu_benchmark, device_buffer, gpu_kernels):
            gpu_benchmark(gpu_kernels.write, device_buffer(1 << 20), 1.0, max_latency="soon")

        def test_traffic(gpu_benchmark, device_buffer, gpu_kernels):
            from pytest_gpumem import Case
            def case(memory):
                x = memory.device(1 << 20)
                return Case(lambda: None, reference=lambda: None)
            gpu_benchmark.case(case).bandwidth
        """
    )
    result = gpumem()
    result.assert_outcomes(failed=4)
    name = "test_mistakes_are_told_with_the_users_line.py"
    result.stdout.fnmatch_lines(
        [
            f"{name}:2: OutOfMemory: 1024 TiB of device memory asked for, 79.5 GiB are free",
            f"{name}:5: BadBuffer: *-1*",
            f"{name}:8: SettingsError: call: max_latency: 'soon'*",
            f"{name}:15: NoTraffic: *moved=*",
        ]
    )
    gpumem("--tb=line", "-k", "limit").stdout.fnmatch_lines(
        [f"*{name}:7: Failed: {name}:8: SettingsError: *"]
    )


def test_a_call_whose_error_is_expected_has_used_the_fixture(
    pytester: pytest.Pytester, gpumem: Run
) -> None:
    """One that only asked for the fixture has not, and pytest-benchmark warns of it."""
    pytester.makepyfile(
        """
        import pytest

        def test_call(gpu_benchmark):
            with pytest.raises(Exception, match="not an object of type int"):
                gpu_benchmark(1)

        def test_case(gpu_benchmark):
            with pytest.raises(ZeroDivisionError):
                gpu_benchmark.case(lambda memory: 1 / 0)

        def test_none(gpu_benchmark):
            pass
        """
    )
    result = gpumem("-W", "error")
    result.assert_outcomes(passed=3, errors=1)
    result.stdout.fnmatch_lines(
        ["*ERROR at teardown of test_none*", "*Benchmark fixture was not used*"]
    )


def test_an_interrupted_measurement_leaves_the_summary(pytester: pytest.Pytester) -> None:
    pytester.makepyfile(
        TRIAD, test_second="def test_interrupted(gpu_benchmark): raise KeyboardInterrupt"
    )
    result = pytester.runpytest_inprocess(*SIMULATED, "-W", "error", no_reraise_ctrlc=True)
    assert result.ret == pytest.ExitCode.INTERRUPTED
    result.stdout.fnmatch_lines(["1 row (simulated): 1 measured"])


def test_a_users_own_exception_keeps_its_traceback(pytester: pytest.Pytester, gpumem: Run) -> None:
    """Without the frames of this package between the test and the function that it gave; `--full-trace` shows all."""
    pytester.makepyfile(
        """
        def test_it(gpu_benchmark):
            def case(memory):
                raise ZeroDivisionError("the user's own")
            gpu_benchmark.case(case)
        """
    )
    result = gpumem()
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(
        [">*raise ZeroDivisionError*", "E*ZeroDivisionError: the user's own"]
    )
    assert "measuring/case.py" not in result.stdout.str()
    gpumem("--full-trace").stdout.fnmatch_lines(
        ["*measuring/case.py*", "E*ZeroDivisionError: the user's own"]
    )


def test_a_wrong_result_fails_before_any_speed(pytester: pytest.Pytester, gpumem: Run) -> None:
    pytester.makepyfile(
        """
        from pytest_gpumem import Case

        def test_it(gpu_benchmark):
            def case(memory):
                x = memory.device((1024,), "f4")
                def check():
                    assert (x.view() == 1).all(), "not all ones"
                return Case(lambda: None, writes=[x], check=check, reference=lambda: None)
            gpu_benchmark.case(case)
            raise AssertionError("a speed was reported")
        """
    )
    result = gpumem("--benchmark-json=out.json")
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(["*WrongResult: *not all ones*"])
    assert "a speed was reported" not in result.stdout.str()


def test_what_the_device_cannot_do_skips(pytester: pytest.Pytester, gpumem: Run) -> None:
    pytester.makepyfile(
        """
        import pytest

        def test_body(gpu_benchmark):
            gpu_benchmark(lambda: None)  # no reference: the simulated device cannot run it

        @pytest.fixture
        def mine(gpu_device):
            from pytest_gpumem.devices.protocol import Unsupported
            raise Unsupported("no such thing on this device")

        def test_setup(mine): ...
        """
    )
    result = gpumem("-rs")
    result.assert_outcomes(skipped=2)
    result.stdout.fnmatch_lines(["SKIPPED*no such thing on this device"])
    strict = gpumem("--gpumem-strict")
    strict.assert_outcomes(failed=1, errors=1)
    strict.stdout.fnmatch_lines(["*--gpumem-strict fails a skip: no such thing on this device"])


def test_getfixturevalue_measures(pytester: pytest.Pytester, gpumem: Run) -> None:
    pytester.makepyfile(
        """
        def test_first(request, device_buffer, gpu_kernels):
            benchmark = request.getfixturevalue("gpu_benchmark")
            result = benchmark(gpu_kernels.write, device_buffer(1 << 20), 1.0)
            assert 0 < result.latency < 1

        def test_after_benchmark(request, benchmark, device_buffer, gpu_kernels):
            measure = request.getfixturevalue("gpu_benchmark")
            measure(gpu_kernels.write, device_buffer(1 << 20), 1.0)

        def test_both(benchmark, gpu_benchmark, device_buffer, gpu_kernels):
            benchmark.extra_info["mine"] = 1
            gpu_benchmark(gpu_kernels.write, device_buffer(1 << 20), 1.0)

        def test_called_besides(benchmark, gpu_benchmark, device_buffer, gpu_kernels):
            benchmark(lambda: None)
            gpu_benchmark(gpu_kernels.write, device_buffer(1 << 20), 1.0)
        """
    )
    result = gpumem("--benchmark-json=out.json", "--benchmark-max-time=0.001")
    result.assert_outcomes(passed=4)
    document = json.loads((pytester.path / "out.json").read_text())
    stored = {bench["name"]: bench for bench in document["benchmarks"]}
    assert set(stored) == {
        "test_first",
        "test_after_benchmark",
        "test_both",
        "test_called_besides",
        "test_called_besides[gpu]",
    }
    assert stored["test_both"]["extra_info"]["mine"] == 1
    rows = {
        row["nodeid"].split("::")[1]: row
        for row in document["gpumem"]["rows"]
        if row["measurement"]
    }
    del stored["test_called_besides"]  # of the host
    for name, bench in stored.items():
        row = rows[name.removesuffix("[gpu]")]
        samples = [s for placement in row["measurement"]["placements"] for s in placement]
        assert bench["stats"]["data"] == samples


def test_marker_sets_the_plan(pytester: pytest.Pytester, gpumem: Run) -> None:
    pytester.makepyfile(
        """
        import pytest

        @pytest.mark.gpumem(placements=3)
        class TestIt:
            @pytest.mark.gpumem(mode="hot")
            def test_it(self, gpu_benchmark, device_buffer, gpu_kernels):
                result = gpu_benchmark(gpu_kernels.write, device_buffer(1 << 20), 1.0)
                assert result.measurement.mode == "hot"
                assert len(result.measurement.placements) == 3
        """
    )
    gpumem("-o", "gpumem_precision=50%", "--gpumem-budget", "20 ms").assert_outcomes(passed=1)


def test_memory_is_freed_after_a_failure_and_ctrl_c(pytester: pytest.Pytester) -> None:
    pytester.makeconftest(
        """
        from pytest_gpumem.devices.simulated.memory import SimulatedMemory
        from pytest_gpumem.devices.simulated.device import SimulatedDevice

        live, found = set(), []
        allocate, free, close = SimulatedMemory.allocate, SimulatedMemory.free, SimulatedDevice.close

        def counted(self, *args, **kwargs):
            allocation = allocate(self, *args, **kwargs)
            live.add(allocation.address or allocation.host_address)
            return allocation

        def freed(self, allocation):
            live.discard(allocation.address or allocation.host_address)
            free(self, allocation)

        def closed(self):
            print("live at close:", len(live), "set-aside:", self.l2.set_aside() == found[0])
            close(self)

        SimulatedMemory.allocate, SimulatedMemory.free, SimulatedDevice.close = counted, freed, closed
        """
    )
    pytester.makepyfile(
        """
        from conftest import found, live

        def test_failing(device_buffer, gpu_device, persisting_stream):
            found.append(gpu_device.l2.set_aside())
            table = device_buffer(8 << 20)
            with persisting_stream(table):
                assert gpu_device.l2.set_aside() != found[0]
                assert live
                raise ValueError("the body fails")

        def test_after():
            assert not live

        def test_interrupted(device_buffer, persisting_stream):
            with persisting_stream(device_buffer(8 << 20)):
                assert live
                raise KeyboardInterrupt
        """
    )
    result = pytester.runpytest_subprocess(*SIMULATED, "-s")
    assert result.ret == pytest.ExitCode.INTERRUPTED
    result.stdout.fnmatch_lines(["live at close: 0 set-aside: True"])
    result.stdout.fnmatch_lines(["*1 failed, 1 passed*"])


def test_a_latency_per_access_is_of_dependent_accesses(
    pytester: pytest.Pytester, gpumem: Run
) -> None:
    pytester.makepyfile(
        """
        import pytest

        def test_chase(gpu_benchmark, device_buffer, gpu_kernels):
            result = gpu_benchmark(gpu_kernels.chase, device_buffer(1 << 20, "i4"), device_buffer((1,), "i4"), 200, mode="hot")
            assert result.latency_per_access == pytest.approx(result.latency / 200)
            assert result.sectors_per_request is None

        def test_stride(gpu_benchmark, device_buffer, gpu_kernels):
            result = gpu_benchmark(gpu_kernels.stride_copy, device_buffer(1 << 20), device_buffer(1 << 20), 2)
            assert result.sectors_per_request == 8
            result.latency_per_access
        """
    )
    result = gpumem("-v", "--benchmark-json=out.json")
    result.assert_outcomes(passed=1, failed=1)
    name = "test_a_latency_per_access_is_of_dependent_accesses.py"
    result.stdout.fnmatch_lines(
        [
            f"{name}:11: NoTraffic: stride_copy has no dependent accesses; its latency is `.latency`",
            "test_chase * ns/access * measured (sim)",
        ]
    )
    rows = rows_in(pytester.path)
    assert [row["measurement"]["sectors_per_request"] for row in rows] == [None, 8]


def test_memory_kept_between_tests_is_given_back_unless_the_next_test_uses_it(
    pytester: pytest.Pytester, gpumem: Run
) -> None:
    pytester.makeconftest(
        """
        from pytest_gpumem.devices.simulated.memory import SimulatedMemory

        given_back = []
        SimulatedMemory.make_room = lambda memory, *, unless_free=1.0: given_back.append(unless_free)
        """
    )
    pytester.makepyfile(
        """
        from conftest import given_back

        def test_1_kernel(gpu_benchmark, gpu_kernels, device_buffer):
            gpu_benchmark(gpu_kernels.write, device_buffer(1 << 20))

        def test_2_kernel(gpu_benchmark, gpu_kernels, device_buffer):
            assert not given_back
            gpu_benchmark(gpu_kernels.write, device_buffer(1 << 20))

        def test_3_plain():
            assert given_back == [1.0]
            given_back.clear()

        def test_4_no_kernel(gpu_device):
            assert 0.0 < given_back[-1] < 1.0  # it may stay where most of the memory is free
            given_back.clear()

        def test_5_plain():
            assert given_back == [1.0]
        """
    )
    gpumem().assert_outcomes(passed=5)


def test_a_failed_assertion_has_units_and_a_short_device(
    pytester: pytest.Pytester, gpumem: Run
) -> None:
    pytester.makepyfile(
        """
        def test_copy(gpu_benchmark, device_buffer, gpu_kernels):
            result = gpu_benchmark(gpu_kernels.copy, device_buffer(1 << 20), device_buffer(1 << 20))
            assert result.bandwidth > 0.99 * result.device.peak_bandwidth
        """
    )
    result = gpumem()
    result.stdout.fnmatch_lines(["E *assert *GB/s > 3319 GB/s", "E *% below"])
    assert "DeviceFacts(" not in result.stdout.str()


def test_an_error_of_a_fixture_is_the_reason_of_its_row(
    pytester: pytest.Pytester, gpumem: Run
) -> None:
    pytester.makepyfile(
        """
        import pytest

        @pytest.fixture
        def table():
            raise ValueError("no such table")

        def test_lookup(gpu_benchmark, table):
            pass
        """
    )
    gpumem("--benchmark-json=out.json").assert_outcomes(errors=1)
    row = row_in(pytester.path)
    assert (
        row["verdict"]["reason"] == "failed before anything was measured: ValueError: no such table"
    )


def test_an_unknown_peak_fails_an_assertion_on_its_share(
    pytester: pytest.Pytester, gpumem: Run
) -> None:
    """A peak of 0 would let every bandwidth pass."""
    pytester.makepyfile(
        """
        from dataclasses import replace

        from msgspec import structs

        def test_triad(gpu_benchmark, device_buffer, gpu_kernels):
            a, b, c = (device_buffer(1 << 20, "f4") for _ in range(3))
            result = gpu_benchmark(gpu_kernels.triad, a, b, c, 3.0)
            result = replace(result, device=structs.replace(result.device, dram_peak=0.0))  # as a driver without a memory clock
            assert result.bandwidth > 0.85 * result.device.peak_bandwidth
        """
    )
    result = gpumem()
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(["*UnknownPeak: the peak bandwidth of * is unknown: *"])
    result.stdout.no_fnmatch_line("*Traceback*")
