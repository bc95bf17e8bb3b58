"""Whose code is measured: results of a fork are never stored."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from pytest_gpumem.baselines.store import untrusted

OURS = {"full_name": "lab/kernels"}
THEIRS = {"full_name": "guest/kernels"}


def pull_request(head: object) -> dict[str, object]:
    return {"pull_request": {"base": {"repo": OURS}, "head": {"repo": head}}}


def github(tmp_path: Path, event: str, payload: object) -> dict[str, str]:
    path = tmp_path / "event.json"
    path.write_text(payload if isinstance(payload, str) else json.dumps(payload))
    return {"GITHUB_EVENT_NAME": event, "GITHUB_EVENT_PATH": str(path)}


def test_pull_requests_on_github(tmp_path_factory: pytest.TempPathFactory) -> None:
    for event in ["pull_request", "pull_request_target", "pull_request_review"]:
        tmp_path = tmp_path_factory.mktemp("case")
        assert untrusted(github(tmp_path, event, pull_request(OURS))) is None, event
        why = untrusted(github(tmp_path, event, pull_request(THEIRS)))
        assert why == f"a {event} event from the fork guest/kernels", event


def test_an_event_that_anybody_can_cause_is_not_trusted(
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    for event in ["issue_comment", "fork", "workflow_run", "an_event_of_tomorrow"]:
        tmp_path = tmp_path_factory.mktemp("case")
        why = untrusted(github(tmp_path, event, pull_request(OURS)))
        assert why == f"the event {event}, whose payload does not say whose code is checked out", (
            event
        )


def test_what_does_not_say_is_not_trusted(tmp_path_factory: pytest.TempPathFactory) -> None:
    for payload in ["{", "[]", "{}", '{"pull_request": null}', json.dumps(pull_request(None))]:
        tmp_path = tmp_path_factory.mktemp("case")
        words = "does not say whose code is checked out"
        assert words in str(untrusted(github(tmp_path, "pull_request", payload))), payload
        assert words in str(untrusted({"GITHUB_EVENT_NAME": "pull_request"})), payload


def test_other_events_are_ours() -> None:
    for event in ["push", "schedule", "workflow_dispatch", "merge_group", ""]:
        assert untrusted({"GITHUB_EVENT_NAME": event}) is None, event
        assert untrusted({}) is None, event


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
