"""Runs of pytest in fresh processes: duets, repetitions, checkouts of other revisions."""

from pytest_gpumem.outcomes import UserError


class DuetError(UserError):
    """A duet that cannot run as requested: one line with the value and what is accepted."""
