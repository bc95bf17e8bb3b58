"""What is known of a launch before it runs: the sectors of its requests."""

from __future__ import annotations

from bench import Bench


def test_a_measurement_knows_the_sectors_of_its_requests() -> None:
    for kernel, scalars, sectors in [
        ("offset_copy", (1,), 5),
        ("stride_copy", (16,), 32),
        ("memcpy", (), None),
    ]:
        bench = Bench()
        assert bench.measure(kernel, *bench.buffers(2), *scalars).sectors_per_request == sectors, (
            kernel,
            scalars,
            sectors,
        )
