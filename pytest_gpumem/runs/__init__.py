"""Runs of pytest in fresh processes: experiments, duets, checkouts of other revisions."""

from pytest_gpumem.outcomes import UserError


class RunError(UserError):
    """Runs that cannot happen as requested: one line with the value and what is accepted."""
