"""Names of kernels, as short as a reader needs them."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

LONGEST = 60
"""Characters of a name with its template arguments."""
_OPENS, _CLOSES = "<([{", ">)]}"


def base_name(name: str) -> str:
    """The function alone, without return type, namespaces, template arguments and parameters, as Nsight's base names are.

    Args:
        name: demangled, or mangled as CUPTI has it (Itanium C++ ABI); any other name stays as it is.
    """
    if name.startswith("_Z"):
        return _mangled(name) or name
    depth, kept = 0, []
    for letter in name.replace("->", "  "):
        depth -= letter in _CLOSES
        if depth <= 0 and letter not in _OPENS + _CLOSES:
            kept.append(letter)
        depth += letter in _OPENS
    words = "".join(kept).rpartition("::")[2].split()
    return words[-1] if words else name


def _mangled(name: str) -> str:
    """The last of the parts that lead a mangled name, each written as its length and itself; "" where there is none."""
    last, rest = "", re.sub(r"^_Z[NLK]*", "", name)
    while found := re.match(r"[0-9]+", rest):
        end = found.end() + int(found[0])
        last, rest = rest[found.end() : end], rest[end:]
    return last


def base_names(names: Iterable[str]) -> str:
    """Base names of some kernels, each once."""
    return ", ".join(dict.fromkeys(map(base_name, names)))


def only(base: Sequence[str], head: Sequence[str]) -> tuple[str, str]:
    """The kernels that only base runs, and those that only head runs: base names, with template arguments where only these differ."""
    gone, new = ([name for name in dict.fromkeys(one) if name not in other] for one, other in ((base, head), (head, base)))
    short = base_names(gone), base_names(new)
    return short if short[0] != short[1] else (_with_arguments(gone), _with_arguments(new))


def _with_arguments(names: Iterable[str]) -> str:
    whole = (name.removeprefix("void ").replace("(anonymous namespace)::", "").partition(">(")[0] for name in names)
    closed = (f"{one}>" if one.count("<") > one.count(">") else one for one in whole)
    return ", ".join(one if len(one) <= LONGEST else f"{one[:LONGEST]}..." for one in closed)
