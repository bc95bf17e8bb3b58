"""The key of a row: no two measurements of a session share one."""

from __future__ import annotations

from itertools import product

from pytest_gpumem.records import key_of, selects

TEST = "tests/test_a.py::test_x"


def test_an_ordinary_key_is_the_node_id_and_the_label() -> None:
    for parameters, label, key in [
        ("", "", TEST),
        ("", "warm", f"{TEST}[warm]"),
        ("[a-8MiB]", "", f"{TEST}[a-8MiB]"),
        ("[a-8MiB]", "warm", f"{TEST}[a-8MiB][warm]"),
        (r"[\xe4]", r"C:\x", rf"{TEST}[\xe4][C:\x]"),
    ]:
        assert key_of(TEST + parameters, label) == key, (parameters, label, key)


def test_no_two_measurements_share_a_key() -> None:
    """All short parameter sets and labels of a test, of the characters that could be mistaken for the key's own."""
    texts = ["".join(letters) for length in range(4) for letters in product("a[]\\", repeat=length)]
    keys = {key_of(f"{TEST}[{parameters}]", label) for parameters in texts for label in texts}
    assert len(keys) == len(texts) ** 2


def test_a_set_of_parameters_selects_itself_alone() -> None:
    assert selects(f"{TEST}[a]", f"{TEST}[a]")
    assert selects(TEST, f"{TEST}[a][b]")
    assert not any(selects(f"{TEST}[a]", f"{TEST}[{other}]") for other in ("a][b", "a]::b", "a]/b"))
