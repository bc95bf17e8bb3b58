"""What the operating system says of a process's memory."""

from __future__ import annotations

import pytest

from pytest_gpumem.devices.memory_kinds import is_mapped, is_of_a_driver

MAPS = """\
1000-3000 rw-p 00000000 00:00 0                          [heap]
4000-5000 ---p 00000000 00:00 0
6000-7000 rw-s 00000000 00:01 2052                       /dev/zero (deleted)
8000-9000 rw-s 00000000 00:1a 7                          /dev/shm/psm_1
"""


def test_an_address_is_mapped_where_it_can_be_read(
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    for address, mapped in [
        (0xFFF, False),
        (0x1000, True),
        (0x2FFF, True),
        (0x3000, False),
        (0x4800, False),
        (0x5000, False),
    ]:
        tmp_path = tmp_path_factory.mktemp("case")
        (tmp_path / "maps").write_text(MAPS)
        assert is_mapped(address, tmp_path) is mapped, address


def test_what_is_mapped_from_a_device_file_is_a_drivers(
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    for address, theirs in [(0x1000, False), (0x3000, False), (0x6000, True), (0x8000, False)]:
        tmp_path = tmp_path_factory.mktemp("case")
        (tmp_path / "maps").write_text(MAPS)
        assert is_of_a_driver(address, tmp_path) is theirs, address
