"""Forked processes have the descriptors that a process of its own would have."""

from __future__ import annotations

import fcntl
import os
import sys

import forked
import pytest

SCRIPT = """
import os, sys

reads, writes = map(int, sys.argv[1:])
os.write(writes, os.read(reads, 5))
"""


def test_a_process_has_descriptors_of_any_number(tmp_path_factory: pytest.TempPathFactory) -> None:
    """A worker of xdist may have hundreds of them."""
    for least in [50, 203]:
        tmp_path = tmp_path_factory.mktemp("case")
        script = tmp_path / "script.py"
        script.write_text(SCRIPT)
        (reads, tell), (heard, writes) = os.pipe(), os.pipe()
        passed = [fcntl.fcntl(one, fcntl.F_DUPFD, least) for one in (reads, writes)]
        try:
            os.write(tell, b"hello")
            assert (
                forked.Popen(
                    [sys.executable, str(script), *map(str, passed)], pass_fds=passed
                ).wait()
                == 0
            ), least
            assert os.read(heard, 5) == b"hello", least
        finally:
            for one in (reads, tell, heard, writes, *passed):
                os.close(one)
