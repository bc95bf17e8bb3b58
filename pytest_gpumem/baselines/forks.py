"""Whether this run is of somebody's fork: such code may report any time, and must not decide what later changes are held to."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

_OURS = ("push", "schedule", "workflow_dispatch", "repository_dispatch", "merge_group", "release", "create")
"""GitHub's events that only somebody with write access to the repository causes. All others are open to anybody, or may become so."""
_PULL_REQUESTS = ("pull_request", "pull_request_target", "pull_request_review", "pull_request_review_comment")
"""Events whose payload names the repositories of both sides."""


def untrusted(environment: Mapping[str, str]) -> str | None:
    """Why this run's results may not be stored: it is of a pull or merge request from a fork, or may be; None if it is not.

    GitHub Actions names the event and the file of its payload; GitLab the projects of both sides ("Predefined CI/CD variables
    reference"). A pipeline inside a fork's own project is not seen here, and has no way to this project's storage.
    """
    return _github(environment) or _gitlab(environment)


def _github(environment: Mapping[str, str]) -> str | None:
    event = environment.get("GITHUB_EVENT_NAME", "")
    if event in ("", *_OURS):
        return None
    if event not in (*_PULL_REQUESTS, "workflow_run"):
        return f"the event {event}, whose payload does not say whose code is checked out"
    path = environment.get("GITHUB_EVENT_PATH", "")
    try:
        payload = json.loads(Path(path).read_bytes())
        if event == "workflow_run":
            run = payload["workflow_run"]
            if (first := run["event"]) not in (*_OURS, *_PULL_REQUESTS):
                return f"the event workflow_run after {first}, whose payload does not say whose code is checked out"
            base, head = payload["repository"], run["head_repository"]
        else:
            base, head = payload["pull_request"]["base"]["repo"], payload["pull_request"]["head"]["repo"]
        ours, theirs = base["full_name"], _name(head)
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return f"a {event} event whose payload (GITHUB_EVENT_PATH {path or 'unset'}) does not say whether it is of a fork"
    return None if ours == theirs else f"a {event} event from the fork {theirs}"


def _name(repository: Any) -> str:
    # A fork that was deleted meanwhile is null.
    return "that is gone" if repository is None else str(repository["full_name"])


def _gitlab(environment: Mapping[str, str]) -> str | None:
    ours, theirs = (environment.get(f"CI_MERGE_REQUEST_{side}PROJECT_ID", "") for side in ("", "SOURCE_"))
    if ours == theirs:
        return None
    return f"a merge request from the fork {environment.get('CI_MERGE_REQUEST_SOURCE_PROJECT_PATH') or theirs or 'that is not named'}"
