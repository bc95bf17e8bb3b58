from __future__ import annotations

import itertools
import re

from hypothesis import given
from hypothesis import strategies as st

from pytest_gpumem.ranges import Names, labelled, phase


def test_name_is_the_last_component_in_characters_that_nsight_takes() -> None:
    for nodeid, name in [
        ("tests/test_a.py::test_triad", "test_triad"),
        ("tests/test_a.py::TestX::test_scale[1-f4]", "test_scale_1-f4"),
        ("tests/test_a.py::test_scale[a::b/c@d,*+]", "test_scale_a_b_c_d"),
        ("tests/test_a.py::test_ratio[0.5]", "test_ratio_0_5"),
        ("tests/test_a.py::test_größe", "test_gr_e"),
        ("README.md", "README_md"),
        ("tests/test_a.py::[]", "test"),
    ]:
        assert Names().unique(nodeid) == name, nodeid


def test_colliding_tests_each_get_a_hash_whatever_the_order() -> None:
    nodeids = ["a.py::test_x", "b.py::test_x", "b.py::test_y", "b.py::test_x[]"]
    seen = set()
    for order in itertools.permutations(nodeids):
        names = Names(order)
        seen.add(tuple(names.unique(nodeid) for nodeid in nodeids))
    assert len(seen) == 1
    ((first, second, other, third),) = seen
    assert other == "test_y"
    assert len({first, second, third}) == 3
    assert all(re.fullmatch(r"test_x-[0-9a-f]{6}", name) for name in (first, second, third))


@given(st.lists(st.text(min_size=1), unique=True))
def test_names_are_unique_and_filterable(nodeids: list[str]) -> None:
    names = Names(nodeids)
    given_names = [names.unique(nodeid) for nodeid in nodeids]
    assert len(set(given_names)) == len(nodeids)
    assert all(re.fullmatch(r"[A-Za-z0-9_-]+", name) for name in given_names)


def test_a_phase_is_never_the_name_of_a_test() -> None:
    assert phase("test_x", "measure") == "test_x.measure"
    assert Names().unique("a.py::test_x.measure") != phase("test_x", "measure")


def test_a_labelled_range_is_never_a_phase_and_differs_by_label() -> None:
    assert labelled("test_x", "faulting") == "test_x.label.faulting"
    assert labelled("test_x", "measure") != phase("test_x", "measure")
    assert re.fullmatch(r"test_x\.label\.64_MiB-[0-9a-f]{6}", labelled("test_x", "64 MiB"))


@given(st.lists(st.text(min_size=1), unique=True))
def test_labelled_ranges_are_unique_and_filterable(labels: list[str]) -> None:
    found = [labelled("test_x", label) for label in labels]
    assert len(set(found)) == len(labels)
    assert all(re.fullmatch(r"[A-Za-z0-9_.-]+", name) for name in found)
