"""Student's t distribution to twelve digits: the tail, and the quantile.

SciPy has the same. It is larger than everything else that the package needs.
"""

from __future__ import annotations

import functools
import math
import sys
from statistics import NormalDist

_PRECISE = 4 * sys.float_info.epsilon
_SERIES_FROM = 100
"""`freedom / 2` from which five terms of the ratio of gamma functions have all digits; below,
these do not overflow."""


def tail(t: float, freedom: float) -> float:
    """Probability of a value of at least `t`.

    It is half of the regularised incomplete beta function I(x; freedom / 2, 1 / 2) at
    x = freedom / (freedom + t²) (Abramowitz and Stegun 26.7.1).
    """
    if t < 0:
        return 1 - tail(-t, freedom)
    a, b, square = freedom / 2, 0.5, t * t
    if square == 0:
        return 0.5
    x, y = freedom / (freedom + square), 1 / (1 + freedom / square)  # x + y = 1
    # x^a * y^b / B(a, b), where B(a, b) = sqrt(pi) * gamma(a) / gamma(a + 1/2)
    front = math.exp(-a * math.log1p(square / freedom)) * math.sqrt(y / math.pi) * _gamma_ratio(a)
    if x < (a + 1) / (a + b + 2):
        return front * _fraction(x, a, b) / a / 2
    return (1 - front * _fraction(y, b, a) / b) / 2


@functools.lru_cache(maxsize=4096)
def quantile(confidence: float, freedom: float) -> float:
    """The value that is not exceeded with this confidence, between 0 and 1."""
    if confidence < 0.5:
        return -quantile(1 - confidence, freedom)
    if confidence == 0.5:
        return 0.0
    beyond, t = 1 - confidence, NormalDist().inv_cdf(confidence)
    # The logarithm of the tail is a concave, falling function of the logarithm of t: Newton's
    # method converges from everywhere.
    density = _gamma_ratio(freedom / 2) / math.sqrt(math.pi * freedom)
    for _ in range(100):
        found = tail(t, freedom)
        slope = t * density * math.exp(-(freedom + 1) / 2 * math.log1p(t * t / freedom)) / found
        step = math.log(found / beyond) / slope
        t *= math.exp(step)
        if abs(step) < _PRECISE:
            break
    return t


def _gamma_ratio(a: float) -> float:
    """gamma(a + 1/2) / gamma(a)."""
    if a < _SERIES_FROM:
        return math.gamma(a + 0.5) / math.gamma(a)
    return math.sqrt(a) * (
        1 - (1 / 8 - (1 / 128 + (5 / 1024 - (21 / 32768 + 399 / 262144 / a) / a) / a) / a) / a
    )


def _fraction(x: float, a: float, b: float) -> float:
    """The continued fraction of the incomplete beta function (Lentz; Numerical Recipes, 6.4)."""
    c, d = 1.0, 1 / (1 - (a + b) * x / (a + 1))
    value = d
    for m in range(1, 10_000):
        for term in (
            m * (b - m) * x / ((a + 2 * m - 1) * (a + 2 * m)),
            -(a + m) * (a + b + m) * x / ((a + 2 * m) * (a + 2 * m + 1)),
        ):
            c, d = 1 + term / c, 1 / (1 + term * d)
            value *= c * d
        if abs(c * d - 1) < _PRECISE:
            break
    return value
