"""The entries of JUnit's file that wait for the last verdict on their test. pytest writes the file once, after it has them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any
from xml.etree import ElementTree

import pytest
from _pytest.junitxml import bin_xml_escape, xml_key


class JUnit:
    """pytest closes an entry with the last report of its test; until the file is written, it can be completed."""

    def __init__(self, config: pytest.Config) -> None:
        self._config = config
        self._waiting: dict[str, Any] = {}  # entries by node id
        self._failures: dict[str, str] = {}  # texts by node id

    @property
    def _xml(self) -> Any:
        """pytest's writer of the file; None without one."""
        return self._config.stash.get(xml_key, None)

    def wait(self, report: pytest.TestReport) -> None:
        """Keep the entry of a test, which pytest is about to close with this report."""
        if self._xml is not None:
            self._waiting[report.nodeid] = self._xml.node_reporter(report)

    def report(self, failed: pytest.TestReport) -> None:
        """Report a test as failed that was reported as passed. Its entry stays one: pytest would begin another."""
        self._failures[failed.nodeid] = failed.longreprtext
        hooks = self._config.pluginmanager.subset_hook_caller(
            "pytest_runtest_logreport", [self._xml] if self._xml is not None else ()
        )
        hooks(report=failed)

    def complete(self, properties: Callable[[str], Mapping[str, object]]) -> None:
        """Complete the entries that wait. `properties`: those of a test, by its node id."""
        for nodeid, entry in self._waiting.items():
            case = entry.to_xml()
            found = case.find("properties")
            if found is None:
                case.insert(0, found := ElementTree.Element("properties"))
            for name, value in properties(nodeid).items():
                ElementTree.SubElement(found, "property", name=name, value=bin_xml_escape(value))
            if (text := self._failures.get(nodeid)) is not None:
                failure = ElementTree.SubElement(case, "failure", message=bin_xml_escape(text))
                failure.text = bin_xml_escape(text)
                self._xml.stats["passed"] -= 1
                self._xml.add_stats("failure")
        self._waiting.clear()
