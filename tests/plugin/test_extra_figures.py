"""Figures that a test adds to a measurement: `result.extra`."""

from __future__ import annotations

import csv
import io
import json

import pytest
from click.testing import CliRunner
from sessions import Run

from pytest_gpumem.cli import main


def test_a_figure_stands_in_the_row_the_benchmark_entry_and_the_csv(
    pytester: pytest.Pytester, gpumem: Run
) -> None:
    pytester.makepyfile(
        """
        import pytest
        from pytest_gpumem import MiB

        @pytest.mark.parametrize("mib", [1, 8])
        def test_copy(gpu_benchmark, gpu_kernels, device_buffer, mib):
            a, c = (device_buffer(mib * MiB) for _ in range(2))
            result = gpu_benchmark(gpu_kernels.copy, c, a)
            result.extra["elements"] = a.size

        def test_plain(gpu_benchmark, gpu_kernels, device_buffer):
            gpu_benchmark(gpu_kernels.copy, device_buffer(1 << 20), device_buffer(1 << 20))
        """
    )
    gpumem("--benchmark-json=out.json").assert_outcomes(passed=3)
    document = json.loads((pytester.path / "out.json").read_text())
    assert [row["extra"] for row in document["gpumem"]["rows"]] == [
        {"elements": 262144.0},
        {"elements": 2097152.0},
        {},
    ]
    assert [one["extra_info"]["gpumem"].get("extra") for one in document["benchmarks"]] == [
        {"elements": 262144.0},
        {"elements": 2097152.0},
        None,
    ]
    table = CliRunner().invoke(main, ["report", str(pytester.path / "out.json"), "--csv", "-"])
    assert [line["elements"] for line in csv.DictReader(io.StringIO(table.output))] == [
        "262144.0",
        "2097152.0",
        "",
    ]


@pytest.mark.parametrize(
    ("figure", "message"),
    [
        ("['x'] = float('nan')", "BadCall: extra['x'] = nan; accepted is a finite number"),
        ("['x'] = '3 GB/s'", "BadCall: extra['x'] = '3 GB/s'; accepted is a finite number"),
        (".setdefault('x', '3')", "BadCall: extra['x'] = '3'; accepted is a finite number"),
        (".update(x=True)", "BadCall: extra['x'] = True; accepted is a finite number"),
        (" |= {'x': '3'}", "BadCall: extra['x'] = '3'; accepted is a finite number"),
        (
            "[''] = 1",
            "BadCall: extra['']: the name of a figure is a short text, such as 'elements/s'",
        ),
    ],
)
def test_what_is_no_figure_is_refused(
    pytester: pytest.Pytester, gpumem: Run, figure: str, message: str
) -> None:
    pytester.makepyfile(
        f"""
        def test_it(gpu_benchmark, gpu_kernels, device_buffer):
            result = gpu_benchmark(gpu_kernels.copy, device_buffer(1 << 20), device_buffer(1 << 20))
            extra = result.extra
            extra{figure}
        """
    )
    result = gpumem()
    result.assert_outcomes(failed=1)
    assert message in result.stdout.str()


def test_a_test_can_write_its_figures_as_json(pytester: pytest.Pytester, gpumem: Run) -> None:
    pytester.makepyfile(
        """
        import json

        def test_it(gpu_benchmark, gpu_kernels, device_buffer):
            result = gpu_benchmark(gpu_kernels.copy, device_buffer(1 << 20), device_buffer(1 << 20))
            result.extra["elements/s"] = 2
            assert json.loads(json.dumps(result.extra)) == {"elements/s": 2.0}
        """
    )
    gpumem().assert_outcomes(passed=1)
