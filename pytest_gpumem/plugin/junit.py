"""The JUnit file of a session whose rows were judged again after their tests had been reported."""

from __future__ import annotations

import json
import xml.etree.ElementTree as ElementTree
from collections.abc import Mapping, Sequence
from io import BytesIO
from pathlib import Path

from pytest_gpumem.files import write_whole


def correct_junit(path: Path, rows: Sequence[Mapping[str, object]]) -> None:
    """Give each test one entry, with the last verdicts of its rows. pytest writes a second entry for a test that is reported again.

    Args:
        path: of the file; nothing happens where pytest wrote none.
        rows: the JUnit properties of each row that was judged again.
    """
    if not path.is_file():
        return
    tree = ElementTree.parse(path)
    for suite in tree.getroot().iter("testsuite"):
        first: dict[tuple[str | None, str | None], ElementTree.Element] = {}
        for case in suite.findall("testcase"):
            known = first.setdefault((case.get("classname"), case.get("name")), case)
            if known is not case and known.find("failure") is None and (failures := case.findall("failure")):
                known.extend(failures)
                suite.remove(case)
                suite.set("tests", str(int(suite.get("tests", "1")) - 1))
    # The first property is the summary as JSON, whose range is the test's own.
    summaries = (next(iter(row.items())) for row in rows)
    again = {(name, json.loads(str(summary))["range"]): row for (name, summary), row in zip(summaries, rows, strict=True)}
    names = {name for name, _ in again}
    for case in tree.getroot().iter("testcase"):
        shown = {one.get("name", ""): one for one in case.iter("property")}
        for summary in names & shown.keys():
            row = again.get((summary, json.loads(shown[summary].get("value", "{}"))["range"]), {})
            for name in row.keys() & shown.keys():
                shown[name].set("value", str(row[name]))
    text = BytesIO()
    tree.write(text, encoding="utf-8", xml_declaration=True)
    write_whole(path, text.getvalue().decode())
