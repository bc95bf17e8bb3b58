"""What drawings are made of: numbers in few characters, texts that are escaped, and the element around them."""

from __future__ import annotations

from collections.abc import Iterable

from markupsafe import Markup, escape

WIDTH = 480
"""Units across a drawing. It is shown at the width of its column: on a telephone a unit is three quarters of a pixel."""
CHARACTER = 6.9
"""Units across a character of the drawings' font, on average."""


def number(value: float) -> str:
    """A coordinate, to a tenth of a unit."""
    text = f"{value:.1f}"
    return text[:-2] if text.endswith(".0") else text


def text(x: float, y: float, said: str, *, anchor: str = "start", style: str = "") -> str:
    """A line of text; `anchor` is "start", "middle" or "end"."""
    at = "" if anchor == "start" else f' text-anchor="{anchor}"'
    css = f' class="{style}"' if style else ""
    return f'<text x="{number(x)}" y="{number(y)}"{at}{css}>{escape(said)}</text>'


def line(x1: float, y1: float, x2: float, y2: float, style: str) -> str:
    """A straight line."""
    return f'<path class="{style}" d="M{number(x1)} {number(y1)}L{number(x2)} {number(y2)}"/>'


def points(at: Iterable[tuple[float, float]]) -> str:
    """The path of many dots, to a unit: each is a line of no length with round ends, and lies relative to the one before."""
    parts, last_x, last_y = [], 0, 0
    for x, y in at:
        dx, dy = round(x) - last_x, round(y) - last_y
        parts.append(f"m{dx}{'' if dy < 0 else ' '}{dy}h0")
        last_x, last_y = last_x + dx, last_y + dy
    return "".join(parts)


def tips(said: Iterable[str]) -> str:
    """The attribute of a line from which the page's script makes what shows where the pointer rests on the line's points, in their order.

    An element for each point would be most of a page with many tests.
    """
    return f' data-tips="{escape("|".join(one.replace("|", "/") for one in said))}"'


def path(at: Iterable[tuple[float, float]], style: str) -> str:
    """A line through points."""
    return f'<path class="{style}" d="M{"L".join(f"{number(x)} {number(y)}" for x, y in at)}"/>'


def box(x: float, y: float, width: float, height: float, style: str, tip: str = "") -> str:
    """A filled rectangle; `tip` shows where the pointer rests on it."""
    shape = f'<rect class="{style}" x="{number(x)}" y="{number(y)}" width="{number(max(width, 0.5))}" height="{number(height)}"'
    return f"{shape}><title>{escape(tip)}</title></rect>" if tip else f"{shape}/>"


def dot(x: float, y: float, radius: float, style: str, tip: str = "") -> str:
    """A filled circle."""
    shape = f'<circle class="{style}" cx="{number(x)}" cy="{number(y)}" r="{number(radius)}"'
    return f"{shape}><title>{escape(tip)}</title></circle>" if tip else f"{shape}/>"


def link(target: str, inside: str) -> str:
    """What leads to an element of the page."""
    return f'<a href="#{escape(target)}">{inside}</a>'


def drawing(height: float, inside: Iterable[str], what: str) -> Markup:
    """The whole drawing; `what` is read out in its place."""
    # What is inside was made by this module's functions, which escape every text.
    return Markup(f'<svg viewBox="0 0 {WIDTH} {number(height)}" role="img" aria-label="{escape(what)}">{"".join(inside)}</svg>')


def fitted(said: str, units: float) -> str:
    """A text that takes at most so many units: the middle goes."""
    most = max(5, int(units / CHARACTER))
    if len(said) <= most:
        return said
    end = (most - 1) * 2 // 3
    return f"{said[: most - 1 - end]}\N{HORIZONTAL ELLIPSIS}{said[len(said) - end :]}"
