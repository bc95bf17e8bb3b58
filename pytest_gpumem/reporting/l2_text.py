"""The result of a sweep of persisting L2 in words."""

from __future__ import annotations

from pytest_gpumem.records.l2_sweep import LEAST_GAIN, Change, Setting, Sweep, Textbook
from pytest_gpumem.units import format_bytes, format_share, format_shares


def setting_text(setting: Setting) -> str:
    """Such as "9.375 MiB at hit ratio 0.8", or "off"."""
    return f"{format_bytes(setting.set_aside)} at hit ratio {setting.hit_ratio:.3g}" if setting.set_aside else "off"


def sweep_sentence(sweep: Sweep) -> str:
    """Whether persistence pays, with the gain of the best setting."""
    gain = f"{format_share(sweep.gain.share, sign=True)} against off, 95 % interval {_interval(sweep.gain)}"
    best = setting_text(sweep.best.setting)
    if sweep.pays:
        return f"persistence pays: {best} gains {gain}"
    if sweep.gain.high < 0:
        why = "it costs"
    elif sweep.gain.low <= 0:
        why = "the interval of the gain includes 0"
    else:
        why = f"the gain is below {format_share(LEAST_GAIN)}"
    return f"persistence does not pay, leave it off: {why}; the best setting, {best}, gains {gain}"


def sweep_sentences(sweep: Sweep) -> tuple[str, ...]:
    """The result, the loss of the textbook's settings, the size of the search, and notes."""
    losses = (f"{book.name}, {setting_text(book.point.setting)}: {_loss(sweep, book)}" for book in sweep.textbook)
    took = f"{len(sweep.points)} of {sweep.grid} settings measured, then the best, off and the textbook's again on fresh samples"
    return (sweep_sentence(sweep), *losses, took, *sweep.notes)


def _loss(sweep: Sweep, book: Textbook) -> str:
    if sweep.pays and book.point.setting == sweep.best.setting:
        return "it is what is recommended"
    return f"latency {format_share(book.loss.share, sign=True)} against what is recommended, 95 % interval {_interval(book.loss)}"


def _interval(change: Change) -> str:
    return " to ".join(format_shares(change.low, change.high))
