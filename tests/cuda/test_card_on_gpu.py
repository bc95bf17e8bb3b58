"""`gpumem card` on a real GPU, which it has for itself."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from pytest_gpumem.outcomes import Exit

pytestmark = pytest.mark.usefixtures("free_gpu")


def test_a_card_of_a_data_centre_is_within_its_datasheet_and_healthy(tmp_path: Path) -> None:
    command = [sys.executable, "-c", "from pytest_gpumem.cli import main; main()", "card", "--device", "cuda:0", "--json", "-"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert done.returncode in (Exit.FINE, Exit.FAILED), done.stderr
    report = json.loads(done.stdout)
    figures, device, card = report["figures"], report["device"], report["card"]
    assert all(figures.values())
    peak = device["peak_bandwidth"]
    if peak:
        assert 0.75 * peak < figures["dram_read"] < peak
        # Up to a quarter of L2 of what is written stays there.
        assert 0.75 * peak < figures["dram_write"] < 1.05 * peak
        assert 0.75 * peak < figures["dram_copy"] < peak
    assert figures["l2_read"] > 1.1 * figures["dram_read"]
    assert figures["l2_latency"] < figures["dram_latency"] < 2e-6
    if device["link_bandwidth"]:
        assert 0.7 * device["link_bandwidth"] < figures["to_device"] < device["link_bandwidth"]
        assert 0.7 * device["link_bandwidth"] < figures["to_host"] < device["link_bandwidth"]
    if card is not None and card["link_width"] is not None:
        assert 1 <= card["link_width"] <= card["max_link_width"]
    findings = [check for check in report["checks"] if check["status"] != "OK"]
    assert not findings
    assert done.returncode == Exit.FINE
