"""What `import pytest_gpumem` gives, and what it costs."""

from __future__ import annotations

import pytest

import pytest_gpumem


def test_units_and_case_are_public() -> None:
    from pytest_gpumem import GB, KB, MB, Case, GiB, KiB, MiB
    from pytest_gpumem.measuring.case import Case as TheirCase

    assert (KB, MB, GB, KiB, MiB, GiB) == (10**3, 10**6, 10**9, 2**10, 2**20, 2**30)
    assert Case is TheirCase
    assert set(pytest_gpumem.__all__) < set(dir(pytest_gpumem))


def test_the_version_is_the_distributions() -> None:
    from importlib.metadata import version

    assert pytest_gpumem.__version__ == version("pytest-gpumem")


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="module 'pytest_gpumem' has no attribute 'Cases'"):
        pytest_gpumem.Cases  # noqa: B018
