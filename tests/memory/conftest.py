"""Sizes that scale with the device's L2, so that the same experiment means the same on every GPU."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from pytest_gpumem import GiB, MiB, Result

NEEDS_GPU = (
    "test_a_fitted_hit_ratio_avoids_thrashing",
    "test_a_pool_that_keeps_its_memory_beats_cudamalloc",
    "test_a_reset_gives_the_next_kernel_all_of_l2",
    "test_a_set_aside_that_nothing_uses_slows_a_saturated_kernel",
    "test_a_table_in_shared_memory",
    "test_a_tile_in_shared_memory_beats_strided_writes",
    "test_a_window_on_a_graph_or_on_a_launch_gains_too",
    "test_an_array_over_a_buffer_is_of_the_buffers_kind",
    "test_case_in_place",
    "test_cupy_callable",
    "test_cupys_pool_beats_cudamalloc",
    "test_discarded_content_is_not_copied",
    "test_lines_that_a_flush_wrote_cost_the_next_kernel",
    "test_locking_pages_costs_more_than_a_copy_saves",
    "test_lookup_table_stays_in_l2",
    "test_lookup_table_stays_in_l2_of_a_busy_gpu",
    "test_offset_copy",
    "test_page_locking_is_a_heavyweight_operation_and_grows_with_the_size",
    "test_persisting_data_serves_two_kernels",
    "test_reset_data_at_shares_of_l2",
    "test_reset_data_at_the_texts_sizes",
    "test_sliding_window",
    "test_sliding_window_at_shares_of_l2",
    "test_sliding_window_at_the_texts_sizes",
    "test_torch_callable",
    "test_two_windows_at_once",
    "test_without_a_release_threshold_every_synchronisation_empties_the_pool",
    "test_writing_read_mostly_memory_drops_the_other_copies",
)
"""Tests of effects of hardware that a roofline does not have, and of code that it cannot run."""


@pytest.fixture(autouse=True)
def _on_a_gpu(request: pytest.FixtureRequest) -> None:
    needs_gpu = request.node.originalname in NEEDS_GPU
    if needs_gpu and request.getfixturevalue("gpu_device").facts.simulated:
        pytest.skip("needs a GPU")


@pytest.fixture
def of_l2(gpu_device) -> Callable[..., int]:
    """Bytes of a share of L2, in whole MiB, not more than `most`: `of_l2(0.16, most=8 * MiB)` is 8 MiB on an H100, 1 MiB on an RTX 3090."""
    return lambda share, most=None: min(
        max(1, round(share * gpu_device.facts.l2_bytes / MiB)) * MiB,
        most or gpu_device.facts.memory_bytes,
    )


@pytest.fixture
def streamed_bytes(gpu_device) -> int:
    """Bytes of an array that no cache holds: 512 MiB, less on a small GPU, never under 4x L2."""
    facts = gpu_device.facts
    return max(min(512 * MiB, facts.memory_bytes // 16 // MiB * MiB), 4 * facts.l2_bytes)


@pytest.fixture
def swept_bytes(gpu_device) -> int:
    """Bytes of the large buffer in the L2 experiments: the seeds' 1 GiB, less on a small GPU."""
    return min(1 * GiB, gpu_device.facts.memory_bytes // 8 // MiB * MiB)


@pytest.fixture
def real_gpu(gpu_device) -> None:
    """For code that a model cannot run, before its library is even imported."""
    if gpu_device.facts.simulated:
        pytest.skip("the simulated device runs no foreign kernels")


AGREE, AGREE_SECONDS = 0.1, 3e-6
"""Largest distance between the quartiles of samples that agree: a share, or seconds. A copy of a few KiB varies by 2 us on a quiet H200."""


@pytest.fixture
def link_benchmark(gpu_benchmark) -> Callable[..., Result]:
    """`gpu_benchmark` for work of the host link: the first of three measurements whose samples agree and that `holds`. A link that other
    machines' guests use too copies at half the rate at times, also while the parts of a piece of work are measured alone. It may still not
    hold: assert it."""

    def measured(
        *arguments, label: str, holds: Callable[[Result], bool] = lambda result: True, **keywords
    ) -> Result:
        agreeing = None
        for again in ("", ", again", ", a third time"):
            result = gpu_benchmark(*arguments, label=f"{label}{again}", **keywords)
            low, middle, high = np.quantile(result.measurement.samples, (0.25, 0.5, 0.75))
            if high - low < max(AGREE * middle, AGREE_SECONDS):
                agreeing = result
                if holds(result):
                    return result
        if agreeing is None:
            pytest.skip(
                f"others use the link: half of the samples lie further apart than {(high - low) / middle:.0%}"
            )
        return agreeing

    return measured
