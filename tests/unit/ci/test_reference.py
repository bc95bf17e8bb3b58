"""The tables of the reference pages."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import docs_reference
import pytest
import results_schema

from pytest_gpumem.kernels.catalogue import CATALOGUE

ROOT = Path(__file__).parents[3]


def test_every_kernel_has_a_sentence_and_its_traffic() -> None:
    assert sorted(docs_reference.SENTENCES) == sorted(CATALOGUE)
    assert all(
        sentence.endswith(".") and sentence.count(". ") == 0
        for sentence in docs_reference.SENTENCES.values()
    )
    assert docs_reference.traffic(CATALOGUE["triad"]) == "reads `b`, `c`; writes `a`"
    assert all(docs_reference.traffic(kernel) for kernel in CATALOGUE.values())
    assert len(docs_reference.kernels().splitlines()) == 2 + len(CATALOGUE)


def test_the_readme_has_every_fixture() -> None:
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    fixtures = [line.split("`")[1] for line in docs_reference.fixtures().splitlines()[2:]]
    assert [name for name in fixtures if f"`{name}`" not in readme] == []


def test_the_file_of_the_schema_is_what_the_code_gives() -> None:
    assert results_schema.FILE.read_text(encoding="utf-8") == results_schema.text(), (
        "python ci/results_schema.py writes it anew"
    )


def test_every_constant_of_a_verdict_has_a_source_and_they_are_few() -> None:
    constants = docs_reference.judging_constants()
    assert [
        name
        for name, _, comment, _ in constants
        if docs_reference.SOURCE.fullmatch(comment) is None
    ] == []
    assert sum(count for *_, count in constants) <= 35
    table = docs_reference.constants()
    assert len(table.splitlines()) == 2 + len(constants)
    records = re.findall(r"\]\((\S+\.json)\)", table)
    assert records
    assert [
        record for record in records if not (ROOT / "docs" / "explanation" / record).exists()
    ] == []


def test_a_constant_without_a_source_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    text = "LEAST = 3\nMOST = 1 - LEAST\nBOTH = (1, 2, LEAST)  # two; choice\nHALF = 0.5  # half; choice: a reason\n"
    monkeypatch.setattr(
        docs_reference, "_modules_of_judging", lambda: iter([("one", ast.parse(text), text)])
    )
    assert docs_reference.judging_constants() == [
        ("one.LEAST", "3", "", 1),
        ("one.HALF", "0.5", "half; choice: a reason", 1),
    ]
    with pytest.raises(ValueError, match="LEAST"):
        docs_reference.constants()


def test_no_constant_of_a_verdict_hides_in_a_function() -> None:
    """But for halves, and factors of units."""
    hidden = []
    for module, tree, _ in docs_reference._modules_of_judging():
        if module not in docs_reference.OF_RECORDS:
            parts = (
                part
                for one in ast.walk(tree)
                if isinstance(one, ast.FunctionDef)
                for part in ast.walk(one)
            )
            hidden += [
                (module, one.value)
                for one in parts
                if isinstance(one, ast.Constant) and type(one.value) is float
            ]
    assert {value for _, value in hidden} <= {0.0, 0.5, 1.0, 1e6, 1e-6}, hidden
