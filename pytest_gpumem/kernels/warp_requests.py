"""The sectors that each request of a warp to global memory touches, from a kernel's PTX, where the index is simple.

Each register is followed as a known number for each thread of a warp, plus one that all of them share and nobody knows: `tid.x` is 0 to 31
plus a multiple of 32. Sums, products with a constant, shifts and masks keep that form; any other access counts as unknown. Two
assumptions: the block's x dimension is a multiple of 32, and the shared part of an address is a multiple of 128 bytes.
"""

from __future__ import annotations

import math
import operator
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

_WARP = 32
_SECTOR = 32  # bytes
_ROUNDS = 20  # passes over the instructions at most; registers of a loop in a loop need four


@dataclass(frozen=True)
class Requests:
    """The requests of a kernel to global memory."""

    worst: float | None  # largest ratio of touched sectors to the fewest that hold the same bytes; None if no access is known
    unknown: int  # loads and stores whose pattern is not known


def requests(ptx: str) -> dict[str, Requests]:
    """By mangled name, the requests of each kernel of a PTX module."""
    found = {}
    parts = re.split(r"^\s*(?:\.(?:visible|weak|extern)\s+)*\.(entry|func)\b", re.sub(r"//.*", "", ptx), flags=re.MULTILINE)
    for kind, text in zip(parts[1::2], parts[2::2], strict=True):
        name = re.match(r"\s*([\w$]+)", text)
        if kind == "entry" and name is not None:
            ratios = list(_ratios(text.partition("{")[2]))
            known = [ratio for ratio in ratios if ratio is not None]
            found[name[1]] = Requests(max(known, default=None), len(ratios) - len(known))
    return found


@dataclass(frozen=True)
class _Value:
    """What is known of a register: a number for each thread of a warp, plus a shared one that is a multiple of `divisor`."""

    lanes: tuple[int, ...]
    divisor: int  # 0 if there is no shared number

    @property
    def uniform(self) -> bool:
        """All threads have the same number."""
        return len(set(self.lanes)) == 1

    @property
    def constant(self) -> int | None:
        """The number, if it is known and all threads have it."""
        return self.lanes[0] if self.divisor == 0 and self.uniform else None

    @property
    def power(self) -> int | float:
        """Largest power of two that the shared number is a multiple of."""
        return self.divisor & -self.divisor if self.divisor else math.inf


_Registers = Mapping[str, "_Value | None"]
_Operation = Callable[[_Value, _Value], "_Value | None"]
_SAME = (0,) * _WARP
_SHARED = _Value(_SAME, 1)
_SPECIAL = {"%tid.x": _Value(tuple(range(_WARP)), _WARP), "%laneid": _Value(tuple(range(_WARP)), 0), "%ntid.x": _Value(_SAME, _WARP)}


@dataclass(frozen=True)
class _Instruction:
    name: tuple[str, ...]  # its parts: ("ld", "global", "f32")
    operands: tuple[str, ...]

    @property
    def written(self) -> tuple[str, ...]:
        """The registers that it writes."""
        if self.name[0] in ("st", "red", "bra", "bar", "ret", "setp") or not self.operands:
            return ()
        return tuple(re.findall(r"%[\w.]+", self.operands[0]))

    @property
    def sources(self) -> tuple[str, ...]:
        return self.operands[1:]

    @property
    def width(self) -> int | None:
        """Bytes of each thread's access, if it is a load or store of global memory."""
        spaces = {"param", "shared", "local", "const"}
        if self.name[0] not in ("ld", "ldu", "st") or spaces & {part.partition("::")[0] for part in self.name}:
            return None
        count = next((int(part[1:]) for part in self.name if re.fullmatch(r"v[248]", part)), 1)
        bits = re.fullmatch(r"[a-z]+(\d+)(?:x2)?", self.name[-1])
        return count * int(bits[1]) // 8 if bits else None

    @property
    def address(self) -> str:
        return next((one for one in self.operands if one.startswith("[")), "")


def _ratios(body: str) -> Iterator[float | None]:
    """Of each load and store of global memory, the touched sectors over the fewest; None if its pattern is not known."""
    instructions = list(_parsed(body))
    known = _followed(instructions)
    for one in instructions:
        if (width := one.width) is not None:
            address = _operand(one.address, known)
            yield None if address is None else _ratio(address.lanes, width)


def _ratio(lanes: Sequence[int], width: int) -> float:
    touched = {byte // _SECTOR for lane in lanes for byte in (lane, lane + width - 1)}
    distinct = {lane + byte for lane in lanes for byte in range(width)}
    return len(touched) / math.ceil(len(distinct) / _SECTOR)


def _parsed(body: str) -> Iterator[_Instruction]:
    body = re.sub(r"^\s*\..*$", "", body, flags=re.MULTILINE)  # directives, of which .loc has no semicolon
    # A block inside, as inline assembly has it, is part of the kernel; other braces hold the registers of a vector.
    for statement in re.split(r";|^\s*[\w$]+:|^\s*[{}]", body, flags=re.MULTILINE):
        match = re.fullmatch(r"\s*(?:@!?%\w+\s+)?([a-z][\w.:]*)\s*(.*?)\s*", statement, re.DOTALL)
        if match:
            operands = re.findall(r"\{[^}]*\}|\[[^\]]*\]|[^,\s]+", match[2])
            yield _Instruction(tuple(match[1].split(".")), tuple(operands))


def _followed(instructions: Sequence[_Instruction]) -> _Registers:
    """What is known of each register, over all instructions that write it; None: nothing."""
    registers: dict[str, _Value | None] = {}
    for _ in range(_ROUNDS):
        now: dict[str, _Value | None] = {}
        for one in instructions:
            # A register of a loop has its value of the round before, which is that of all its instructions.
            seen = {**now, **registers}
            used = [name for text in one.sources for name in re.findall(r"%[\w.]+", text)]
            if all(name in seen or not name.startswith("%r") for name in used):
                value = _value(one, seen)
                for name in one.written:
                    now[name] = _joined(now[name], value) if name in now else value
        if now == registers:
            return registers
        registers = now
    return {}


def _joined(one: _Value | None, other: _Value | None) -> _Value | None:
    """What holds of a register that two instructions write."""
    if one is None or other is None:
        return None
    apart = {a - b for a, b in zip(one.lanes, other.lanes, strict=True)}
    return replace(one, divisor=math.gcd(one.divisor, other.divisor, *apart)) if len(apart) == 1 else None


def _operand(text: str, registers: _Registers) -> _Value | None:
    """A register, a special register, a number, a name of a variable, or an address: a sum of these in brackets."""
    text = text.strip("[] \t\n")
    if not text:
        return None
    if "+" in text:
        parts = [value for part in text.split("+") if (value := _operand(part, registers)) is not None]
        return _sum(*parts) if len(parts) == 2 == text.count("+") + 1 else None
    if re.fullmatch(r"-?(0x[0-9a-fA-F]+|\d+)U?", text):
        return _Value((int(text.rstrip("U"), 0),) * _WARP, 0)
    if text in _SPECIAL:
        return _SPECIAL[text]
    if re.fullmatch(r"%(ctaid|nctaid|ntid|tid|warpid|nwarpid|gridid|smid|nsmid|cluster\w*)(\.[xyz])?", text):
        return _SHARED  # tid.y and tid.z too, where the block's x dimension is a multiple of 32
    return registers.get(text) if text.startswith("%") else _SHARED


def _value(one: _Instruction, registers: _Registers) -> _Value | None:
    """What an instruction writes; None if it, or one of its operands, is unknown."""
    if "param" in one.name:
        return _SHARED
    values = [value for text in one.sources if (value := _operand(text, registers)) is not None]
    if len(values) < len(one.sources):
        return None
    name, integer = one.name[0], re.fullmatch(r"[usb]\d+", one.name[-1]) is not None
    if name in ("mov", "cvt", "cvta") and len(values) == 1 and integer:
        return values[0]
    if name in ("mad", "fma") and len(values) == 3 and integer:
        product = _product(values[0], values[1])
        return None if product is None else _sum(product, values[2])
    if name == "bfi" and len(values) == 4:
        return _inserted(*values)
    if name in _OPERATIONS and len(values) == 2 and integer:
        return _OPERATIONS[name](*values)
    # Whatever is computed from numbers that all threads share is shared; the choices of `selp` and votes may differ.
    shared = all(value.uniform for value in values)
    return _SHARED if shared and name not in ("selp", "atom", "shfl", "vote", "match", "slct") else None


def _sum(one: _Value, other: _Value) -> _Value:
    return _Value(tuple(map(operator.add, one.lanes, other.lanes)), math.gcd(one.divisor, other.divisor))


def _times(value: _Value, factor: int) -> _Value:
    return _Value(tuple(lane * factor for lane in value.lanes), value.divisor * abs(factor))


def _product(one: _Value, other: _Value) -> _Value | None:
    for a, b in ((one, other), (other, one)):
        if (factor := b.constant) is not None:
            return _times(a, factor)
    if one.uniform and other.uniform:
        return _Value(_SAME, math.gcd(one.lanes[0], one.divisor) * math.gcd(other.lanes[0], other.divisor))
    return None


def _with_constant(known: Callable[[_Value, int], _Value | None]) -> _Operation:
    """An operation of which something is known if its second operand is constant; shared if both operands are."""

    def operation(one: _Value, other: _Value) -> _Value | None:
        found = known(one, other.constant) if other.constant is not None else None
        return found if found is not None else _SHARED if one.uniform and other.uniform else None

    return operation


def _shifted_left(value: _Value, bits: int) -> _Value | None:
    return _times(value, 1 << bits) if 0 <= bits < 64 else None


def _quotient(value: _Value, by: int) -> _Value | None:
    if by < 1 or value.divisor % by or min(value.lanes) < 0:
        return None
    return _Value(tuple(lane // by for lane in value.lanes), value.divisor // by)


def _shifted_right(value: _Value, bits: int) -> _Value | None:
    if not 0 <= bits < 64:
        return None
    if min(value.lanes) >= 0 and max(value.lanes) < value.power <= 1 << bits:
        return _SHARED  # the bits that differ are dropped
    return _quotient(value, 1 << bits)


def _remainder(value: _Value, by: int) -> _Value | None:
    if by < 1 or value.divisor % by or min(value.lanes) < 0:
        return None
    return _Value(tuple(lane % by for lane in value.lanes), 0)


def _masked(value: _Value, mask: int) -> _Value | None:
    if 0 <= mask < value.power:  # none of the shared number's bits
        return _Value(tuple(lane & mask for lane in value.lanes), 0)
    if min(value.lanes) < 0 or max(value.lanes) >= value.power:
        return None
    return _Value(tuple(lane & mask for lane in value.lanes), int(value.power))


def _either(one: _Value, other: _Value) -> _Value | None:
    """Compilers write sums of numbers without common bits so."""
    if not any(map(operator.and_, one.lanes, other.lanes)):
        return _sum(one, other)
    return _SHARED if one.uniform and other.uniform else None


def _inserted(one: _Value, other: _Value, place: _Value, _count: _Value) -> _Value | None:
    """Bits of `one` above those of `other`: so compilers write a product with a power of two plus a smaller number."""
    if place.constant is None or other.divisor or min(other.lanes) < 0 or max(other.lanes) >= 1 << place.constant:
        return None
    shifted = _shifted_left(one, place.constant)
    return None if shifted is None else _sum(shifted, other)


_OPERATIONS: Mapping[str, _Operation] = {
    "add": _sum,
    "sub": lambda one, other: _sum(one, _times(other, -1)),
    "mul": _product,
    "shl": _with_constant(_shifted_left),
    "shr": _with_constant(_shifted_right),
    "div": _with_constant(_quotient),
    "rem": _with_constant(_remainder),
    "and": _with_constant(_masked),
    "or": _either,
}
