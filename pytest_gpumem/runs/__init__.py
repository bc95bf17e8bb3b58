"""Runs of pytest in fresh processes: experiments, duets, checkouts of other revisions."""
