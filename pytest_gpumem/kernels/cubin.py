"""Machine code: the kernels of a cubin, their parameters, and a digest that is equal for equal code.

A cubin is an ELF file, whose sections NVIDIA does not document. A cubin of a large library holds thousands of kernels, so sections are read
when they are asked for; a general ELF reader takes seconds for such a file.
"""

from __future__ import annotations

import hashlib
import re
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

_EM_CUDA = 190
_HEADER = struct.Struct("<16sHHIQQQIHHHHHH")
_SECTION = struct.Struct("<IIQQQQIIQQ")
_SYMBOL = struct.Struct("<IBBHQQ")
_RELOCATION = struct.Struct("<QQ")
_RELOCATION_WITH_ADDEND = struct.Struct("<QQq")
_SHT_SYMTAB, _SHT_RELA, _SHT_NOBITS, _SHT_REL = 2, 4, 8, 9
_STT_FUNC = 2
_STO_ENTRY = 0x10  # bit of a symbol's `st_other`: the function is a kernel

# Items of `.nv.info`: one byte of format, one of attribute, and two of value or, in the last format, of the size of what follows.
_EIFMT_SVAL = 4
_EIATTR_KPARAM_INFO = 0x17
_EIATTR_CBANK_PARAM_SIZE = 0x19
_EIATTR_KPARAM_INFO_V2 = 0x45  # of kernels whose parameters together take more than 4 KiB
_PARAMETER = struct.Struct("<4xHHI")  # ordinal, offset and, with flags, size


class NotACubin(ValueError):
    """The bytes are no cubin, or a damaged one."""


class NotInCubin(KeyError):
    """The cubin holds no kernel of that name."""


@dataclass(frozen=True)
class MachineCode:
    """One kernel of a cubin."""

    digest: str
    """SHA-256, in hexadecimal, of all that decides what the instructions do: the section `.text.NAME`, the constants that the compiler put
    beside it, the functions that the module's kernels may call, and the initial values of the module's constants and variables. It does not
    depend on paths, line numbers, comments or debug information."""
    parameters: tuple[tuple[int, int], ...] | None
    """Offset and bytes of each C parameter, in their order, in the block of parameters; None if the cubin does not say."""


@dataclass(frozen=True)
class _Section:
    name: str
    kind: int
    offset: int
    size: int
    link: int
    info: int


@dataclass(frozen=True)
class _Symbol:
    name: str
    kind: int
    other: int
    section: int
    value: int
    size: int


class Cubin:
    """The kernels of a cubin. Raises `NotACubin`: also by every other member, where a section is damaged."""

    def __init__(self, content: bytes) -> None:
        self._content = content
        if content[:4] != b"\x7fELF":
            raise NotACubin("no ELF file: it begins with other bytes")
        try:
            (ident, _, machine, _, _, _, offset, _, _, _, _, entry_size, count, names) = (
                _HEADER.unpack_from(content)
            )
        except struct.error:
            raise NotACubin(f"an ELF file of only {len(content)} bytes") from None
        if machine != _EM_CUDA or ident[4:6] != b"\x02\x01":
            raise NotACubin(
                f"an ELF file for machine {machine}; that of CUDA is {_EM_CUDA}, with 64 bits and little endian"
            )
        try:
            rows = [
                _SECTION.unpack_from(content, offset + index * entry_size) for index in range(count)
            ]
            names_at, names_size = rows[names][4:6]
        except (struct.error, IndexError):
            raise NotACubin("its table of sections is cut off") from None
        table = content[names_at : names_at + names_size]
        self._sections = [
            _Section(_string(table, row[0]), row[1], row[4], row[5], row[6], row[7]) for row in rows
        ]

    def kernel(self, name: str) -> MachineCode:
        """One kernel. Raises `NotInCubin`: there is none of that name."""
        if name not in self._kernels:
            raise NotInCubin(name)
        return MachineCode(self._digest(name), self._parameters(name))

    def _parameters(self, name: str) -> tuple[tuple[int, int], ...] | None:
        """As `MachineCode.parameters`."""
        if f".nv.info.{name}" not in self._by_name:
            return None
        found, has_some = dict[int, tuple[int, int]](), False
        for attribute, value in _items(self._bytes(self._by_name[f".nv.info.{name}"])):
            if attribute == _EIATTR_CBANK_PARAM_SIZE:
                has_some = True
            elif (
                attribute in (_EIATTR_KPARAM_INFO, _EIATTR_KPARAM_INFO_V2)
                and len(value) == _PARAMETER.size
            ):
                ordinal, offset, size = _PARAMETER.unpack(value)
                found[ordinal] = (
                    offset,
                    size >> 18 if attribute == _EIATTR_KPARAM_INFO else size & 0xFFFF,
                )
        whole = sorted(found) == list(range(len(found))) and bool(found) is has_some
        return tuple(found[ordinal] for ordinal in sorted(found)) if whole else None

    def _digest(self, name: str) -> str:
        digest = hashlib.sha256(self._shared_digest)
        self._add(digest, f".text.{name}")
        for bank in (1, 2):  # bank 0 holds the launch's arguments, 3 and 4 belong to the module
            if f".nv.constant{bank}.{name}" in self._by_name:
                self._add(digest, f".nv.constant{bank}.{name}")
        return digest.hexdigest()

    @cached_property
    def _shared_digest(self) -> bytes:
        """Of all that the module's kernels share: any of them may use it."""
        digest = hashlib.sha256()
        for section in self._sections:
            name = section.name
            function = (
                name.startswith(".text.") and name.removeprefix(".text.") not in self._kernels
            )
            if function or name in (".nv.constant3", ".nv.constant4", ".nv.global.init"):
                self._add(digest, name)
        return digest.digest()

    def _add(self, digest: hashlib._Hash, name: str) -> None:
        """The content of a section, and the places and targets of its relocations. Names of symbols are left out: they may hold paths."""
        section = self._section_of(name)
        content = self._bytes(section)
        digest.update(len(content).to_bytes(8, "little") + content)
        for offset, kind, addend, target in sorted(
            self._relocations(section), key=lambda one: one[:3]
        ):
            digest.update(
                struct.pack("<QIqQQ", offset, kind, addend, target.value, target.size)
                + self._place(target).encode()
            )

    def _place(self, symbol: _Symbol) -> str:
        """Where a symbol lies: the kind of its section, or the name of one that is defined elsewhere, such as `vprintf`."""
        if not 0 < symbol.section < len(self._sections):
            return symbol.name
        section = self._sections[symbol.section]
        kind = re.match(r"\.(text|nv\.\w+)", section.name)
        return f"{kind[0] if kind else ''} {section.kind}"

    def _section_of(self, name: str) -> _Section:
        try:
            return self._by_name[name]
        except KeyError:
            raise NotACubin(f"it has no section {name!r}") from None

    def _bytes(self, section: _Section) -> bytes:
        if section.kind == _SHT_NOBITS:
            return b""
        content = self._content[section.offset : section.offset + section.size]
        if len(content) < section.size:
            raise NotACubin(f"the section {section.name!r} is cut off")
        return content

    @cached_property
    def _by_name(self) -> dict[str, _Section]:
        return {section.name: section for section in self._sections}

    @cached_property
    def _symbols(self) -> list[_Symbol]:
        table = next((section for section in self._sections if section.kind == _SHT_SYMTAB), None)
        if table is None or table.link >= len(self._sections):
            raise NotACubin("it has no table of symbols")
        strings = self._bytes(self._sections[table.link])
        content = self._bytes(table)
        whole = content[: len(content) - len(content) % _SYMBOL.size]
        return [
            _Symbol(_string(strings, name), info & 0xF, other, section, value, size)
            for name, info, other, section, value, size in _SYMBOL.iter_unpack(whole)
        ]

    @cached_property
    def _kernels(self) -> set[str]:
        """Mangled names of the kernels."""
        return {
            symbol.name
            for symbol in self._symbols
            if symbol.kind == _STT_FUNC
            and symbol.other & _STO_ENTRY
            and f".text.{symbol.name}" in self._by_name
        }

    def _relocations(self, section: _Section) -> Iterator[tuple[int, int, int, _Symbol]]:
        """Offset, type, addend and target of each relocation of a section."""
        for table in self._tables_of_relocations.get(self._sections.index(section), ()):
            layout = _RELOCATION_WITH_ADDEND if table.kind == _SHT_RELA else _RELOCATION
            content = self._bytes(table)
            for offset, info, *addend in layout.iter_unpack(
                content[: len(content) - len(content) % layout.size]
            ):
                if info >> 32 >= len(self._symbols):
                    raise NotACubin(f"the section {table.name!r} names a symbol that is not there")
                yield offset, info & 0xFFFFFFFF, sum(addend), self._symbols[info >> 32]

    @cached_property
    def _tables_of_relocations(self) -> dict[int, list[_Section]]:
        """By the index of the section that they are for."""
        found: dict[int, list[_Section]] = {}
        for section in self._sections:
            if section.kind in (_SHT_RELA, _SHT_REL):
                found.setdefault(section.info, []).append(section)
        return found


def _items(content: bytes) -> Iterator[tuple[int, bytes]]:
    at = 0
    while at + 4 <= len(content):
        form, attribute, size = struct.unpack_from("<BBH", content, at)
        at += 4
        yield attribute, content[at : at + size] if form == _EIFMT_SVAL else b""
        if form == _EIFMT_SVAL:
            at += size


def _string(table: bytes, at: int) -> str:
    end = table.find(b"\0", at)
    return table[at : end if end >= 0 else len(table)].decode(errors="replace")
