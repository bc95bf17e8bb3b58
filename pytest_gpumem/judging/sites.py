"""Which lines take more memory than in the baseline."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from difflib import SequenceMatcher

from pytest_gpumem.records.footprint import Site

ALIKE = 0.5
"""Two lines of one function with at least this similarity (`SequenceMatcher.ratio`) count as one changed line."""

_Key = tuple[str, str, str, str, str]


@dataclass(frozen=True)
class SiteChange:
    """One line in both runs."""

    site: Site
    """As it is now; as it was where it allocates nothing now."""
    before: int
    """Bytes in the baseline."""
    after: int
    """Bytes now."""
    was: str = ""
    """Text of the line in the baseline, where it was another."""

    @property
    def growth(self) -> int:
        return self.after - self.before


def site_changes(base: Sequence[Site], head: Sequence[Site], of: Callable[[Site], int]) -> tuple[SiteChange, ...]:
    """The lines whose bytes changed, the largest growth first.

    Lines are the same if file, function, text, library and kind of memory are: a line that only moved is the same. Two other
    lines of one function with similar text count as one changed line.

    Args:
        base: sites of the baseline.
        head: sites of this run.
        of: bytes of a site: at the peak, or kept.
    """
    before, after = _by_line(base), _by_line(head)
    was = {key: key for key in after if key in before}
    gone = [key for key in before if key not in after]
    for key in after:
        if key in was:
            continue
        alike = max((one for one in gone if one[0] == key[0] and one[2:] == key[2:]), key=lambda one: _similarity(one, key), default=None)
        if alike is not None and _similarity(alike, key) >= ALIKE:
            was[key] = alike
            gone.remove(alike)
    found = []
    for key, sites in after.items():
        old = was.get(key)
        found.append(SiteChange(_largest(sites, of), _sum(before.get(old, ()) if old else (), of), _sum(sites, of), _text(old, key)))
    found += [SiteChange(_largest(before[key], of), _sum(before[key], of), 0) for key in gone]
    return tuple(sorted((one for one in found if one.growth), key=lambda one: -one.growth))


def _by_line(sites: Iterable[Site]) -> dict[_Key, list[Site]]:
    found: dict[_Key, list[Site]] = {}
    for site in sites:
        # A line whose text cannot be read is told by its number.
        key = (site.file, site.code or str(site.line), site.function, site.library, site.kind)
        found.setdefault(key, []).append(site)
    return found


def _similarity(one: _Key, other: _Key) -> float:
    return SequenceMatcher(None, one[1], other[1], autojunk=False).ratio()


def _text(old: _Key | None, new: _Key) -> str:
    return old[1] if old is not None and old[1] != new[1] else ""


def _largest(sites: Sequence[Site], of: Callable[[Site], int]) -> Site:
    return max(sites, key=of)


def _sum(sites: Iterable[Site], of: Callable[[Site], int]) -> int:
    return sum(of(site) for site in sites)
