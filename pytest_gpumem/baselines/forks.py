"""Whose code runs: code of a fork may report any time, and enters no reference."""

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
_PULL_REQUESTS = (
    "pull_request",
    "pull_request_target",
    "pull_request_review",
    "pull_request_review_comment",
)
"""Events whose payload names the repositories of both sides."""


def untrusted(environment: Mapping[str, str]) -> str | None:
    """Return why the results of this run may not be stored: it runs code of a fork, or may.

    GitHub Actions gives the event and its payload, GitLab the projects of both sides ("Predefined
    CI/CD variables reference"). A pipeline in a fork's project is not detected; it has no access
    to this project's storage.
    """
    ours = environment.get("CI_MERGE_REQUEST_PROJECT_ID", "")
    theirs = environment.get("CI_MERGE_REQUEST_SOURCE_PROJECT_ID", "")
    if ours != theirs:
        path = environment.get("CI_MERGE_REQUEST_SOURCE_PROJECT_PATH") or theirs
        return f"a merge request from the fork {path or 'that is not named'}"
    event = environment.get("GITHUB_EVENT_NAME", "")
    if event in ("", *_OURS):
        return None
    unsaid = "whose payload does not say whose code is checked out"
    if event not in (*_PULL_REQUESTS, "workflow_run"):
        return f"the event {event}, {unsaid}"
    path = environment.get("GITHUB_EVENT_PATH", "")
    try:
        payload = json.loads(Path(path).read_bytes())
        if event == "workflow_run":
            run = payload["workflow_run"]
            if run["event"] not in (*_OURS, *_PULL_REQUESTS):
                return f"the event workflow_run after {run['event']}, {unsaid}"
            base, head = payload["repository"], run["head_repository"]
        else:
            request = payload["pull_request"]
            base, head = request["base"]["repo"], request["head"]["repo"]
        if head is None:  # a deleted fork
            return f"a {event} event from the fork that is gone"
        if base["full_name"] == head["full_name"]:
            return None
        return f"a {event} event from the fork {head['full_name']}"
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return (
            f"a {event} event whose payload (GITHUB_EVENT_PATH {path or 'unset'}) does not say "
            "whether it is of a fork"
        )
