"""Figures that a failed assertion shows with their units."""

from __future__ import annotations

from collections.abc import Callable

from pytest_gpumem.units import format_share, is_number


class Quantity(float):
    """A figure in SI units that a failed assertion shows with its unit; else it is a float."""

    __slots__ = ("write",)
    write: Callable[[float], str]

    def __new__(cls, value: float, write: Callable[[float], str]) -> Quantity:
        quantity = super().__new__(cls, value)
        quantity.write = write
        return quantity

    def __repr__(self) -> str:
        return self.write(float(self))

    __str__ = float.__repr__

    def __reduce__(self) -> tuple[type[float], tuple[float]]:
        return float, (float(self),)


def comparison_text(left: object, relation: str, right: object) -> list[str] | None:
    """Return the lines about a failed comparison with a `Quantity`, such as ["3188 GB/s > 3319
    GB/s", "3.95 % below"], or None if no side is a quantity."""
    if not (is_number(left) and is_number(right)):
        return None
    quantity = left if isinstance(left, Quantity) else right
    if not isinstance(quantity, Quantity) or relation not in ("<", "<=", ">", ">=", "=="):
        return None
    lines = [f"{quantity.write(float(left))} {relation} {quantity.write(float(right))}"]
    if right > 0 and left != right:
        side = "above" if left > right else "below"
        lines.append(f"{format_share(abs(left / right - 1))} {side}")
    return lines
