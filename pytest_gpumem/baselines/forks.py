"""Whose code runs: that of a fork may report any time, and enters no reference."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

_OURS = (
    "push",
    "schedule",
    "workflow_dispatch",
    "repository_dispatch",
    "merge_group",
    "release",
    "create",
)
"""Events of GitHub that only somebody with write access can cause."""


def untrusted(environment: Mapping[str, str]) -> str | None:
    """Return why the results of this run may not be stored: it runs code of a fork, or may.

    A pipeline in a fork's project is not detected; it has no access to this project's storage.
    """
    ours = environment.get("CI_MERGE_REQUEST_PROJECT_ID", "")
    theirs = environment.get("CI_MERGE_REQUEST_SOURCE_PROJECT_ID", "")
    if ours != theirs:
        path = environment.get("CI_MERGE_REQUEST_SOURCE_PROJECT_PATH") or theirs
        return f"a merge request from the fork {path or 'that is not named'}"
    event = environment.get("GITHUB_EVENT_NAME", "")
    if event in ("", *_OURS):
        return None
    unsaid = f"the event {event}, whose payload does not say whose code is checked out"
    if not event.startswith("pull_request"):
        return unsaid
    try:
        payload = json.loads(Path(environment.get("GITHUB_EVENT_PATH", "")).read_bytes())
        request = payload["pull_request"]
        base, head = request["base"]["repo"]["full_name"], request["head"]["repo"]["full_name"]
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return unsaid  # such as a fork that is gone
    return None if base == head else f"a {event} event from the fork {head}"
