"""Whose code is measured: results of a fork are never stored."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from pytest_gpumem.baselines.forks import untrusted

OURS = {"full_name": "lab/kernels"}
THEIRS = {"full_name": "guest/kernels"}


def pull_request(head: object) -> dict[str, object]:
    return {"pull_request": {"base": {"repo": OURS}, "head": {"repo": head}}}


def github(tmp_path: Path, event: str, payload: object) -> dict[str, str]:
    path = tmp_path / "event.json"
    path.write_text(payload if isinstance(payload, str) else json.dumps(payload))
    return {"GITHUB_EVENT_NAME": event, "GITHUB_EVENT_PATH": str(path)}


@pytest.mark.parametrize("event", ["pull_request", "pull_request_target", "pull_request_review"])
def test_pull_requests_on_github(tmp_path: Path, event: str) -> None:
    assert untrusted(github(tmp_path, event, pull_request(OURS))) is None
    assert (
        untrusted(github(tmp_path, event, pull_request(THEIRS)))
        == f"a {event} event from the fork guest/kernels"
    )
    assert (
        untrusted(github(tmp_path, event, pull_request(None)))
        == f"a {event} event from the fork that is gone"
    )


@pytest.mark.parametrize("event", ["pull_request", "pull_request_target", "push"])
def test_a_run_after_a_run(tmp_path: Path, event: str) -> None:
    def payload(head: object) -> dict[str, object]:
        return {"repository": OURS, "workflow_run": {"head_repository": head, "event": event}}

    assert untrusted(github(tmp_path, "workflow_run", payload(OURS))) is None
    assert (
        untrusted(github(tmp_path, "workflow_run", payload(THEIRS)))
        == "a workflow_run event from the fork guest/kernels"
    )


@pytest.mark.parametrize(
    "event",
    ["issue_comment", "issues", "discussion_comment", "fork", "watch", "an_event_of_tomorrow"],
)
def test_an_event_that_anybody_can_cause_is_not_trusted(tmp_path: Path, event: str) -> None:
    """Such a run may have checked out a fork's code, and its payload does not say so; nor does that of a run after it."""
    payload = {
        "repository": OURS,
        "issue": {"number": 1, "pull_request": {}},
        "comment": {"author_association": "NONE"},
    }
    assert (
        untrusted(github(tmp_path, event, payload))
        == f"the event {event}, whose payload does not say whose code is checked out"
    )
    after = {"repository": OURS, "workflow_run": {"head_repository": OURS, "event": event}}
    assert untrusted(github(tmp_path, "workflow_run", after)) == (
        f"the event workflow_run after {event}, whose payload does not say whose code is checked out"
    )


@pytest.mark.parametrize(
    "payload",
    [
        "{",
        "[]",
        "{}",
        '{"pull_request": null}',
        '{"pull_request": {"base": {"repo": null}, "head": {}}}',
    ],
)
def test_what_does_not_say_is_not_trusted(tmp_path: Path, payload: str) -> None:
    said = untrusted(github(tmp_path, "pull_request", payload))
    assert said is not None
    assert "does not say whether it is of a fork" in said
    assert untrusted({"GITHUB_EVENT_NAME": "pull_request"}) == (
        "a pull_request event whose payload (GITHUB_EVENT_PATH unset) does not say whether it is of a fork"
    )


@pytest.mark.parametrize(
    "event",
    [
        "push",
        "schedule",
        "workflow_dispatch",
        "repository_dispatch",
        "merge_group",
        "release",
        "create",
        "",
    ],
)
def test_other_events_are_ours(event: str) -> None:
    assert untrusted({"GITHUB_EVENT_NAME": event}) is None
    assert untrusted({}) is None


def test_merge_requests_on_gitlab() -> None:
    ours = {"CI_MERGE_REQUEST_PROJECT_ID": "1", "CI_MERGE_REQUEST_SOURCE_PROJECT_ID": "1"}
    assert untrusted(ours) is None
    theirs = {
        **ours,
        "CI_MERGE_REQUEST_SOURCE_PROJECT_ID": "10",
        "CI_MERGE_REQUEST_SOURCE_PROJECT_PATH": "guest/kernels",
    }
    assert untrusted(theirs) == "a merge request from the fork guest/kernels"
    # A fork that was deleted has no project any more.
    assert (
        untrusted({"CI_MERGE_REQUEST_PROJECT_ID": "1"})
        == "a merge request from the fork that is not named"
    )
