"""The driver's answers are kept for later processes, for as long as what decides them stays the same."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest
from known_devices import H100
from msgspec.structs import replace

pytest.importorskip("pynvml")

from pytest_gpumem.devices import opening
from pytest_gpumem.devices.cuda import facts, kept_facts, nvml

H200 = replace(H100, name="NVIDIA H200")
Session = Callable[[], tuple[str, bool]]


class Process:
    """The process that asks the driver; its answer is the card that is there."""

    running = False
    card = H100
    started = 0

    def __init__(self, index: int, file: Path | None = None) -> None:
        self.file = file
        Process.started += 1

    def answer(self) -> bytes:
        return msgspec.json.encode(facts.DriverFacts(self.card, 13000))

    def close(self) -> None:
        pass


@pytest.fixture
def session(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Session:
    """Starts a session on a GPU; gives the card's name, and whether the driver was asked."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.delenv("CUDA_MPS_PIPE_DIRECTORY", raising=False)
    monkeypatch.setattr(kept_facts, "_MPS", tmp_path / "mps")
    monkeypatch.setattr(nvml, "identities", lambda: ["580.1", "GPU-1 H100"])
    monkeypatch.setattr(facts, "_installed", lambda module: True)
    monkeypatch.setattr(facts, "_linked_version", lambda: 13000)
    monkeypatch.setattr(facts, "FactsProcess", Process)
    monkeypatch.setattr(Process, "card", H100)

    def start() -> tuple[str, bool]:
        before = Process.started
        with opening.asked("cuda") as asked:
            return opening.choose("cuda", asked=asked).facts.name, Process.started > before

    return start


def test_the_driver_is_asked_once(session: Session) -> None:
    assert session() == (H100.name, True)
    assert session() == (H100.name, False)


@pytest.mark.parametrize("change", ["driver", "variable"])
def test_it_is_asked_again_when_something_changes(
    session: Session, monkeypatch: pytest.MonkeyPatch, change: str
) -> None:
    session()
    monkeypatch.setattr(Process, "card", H200)
    if change == "driver":
        monkeypatch.setattr(nvml, "identities", lambda: ["590.1", "GPU-1 H100"])
    else:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")
    assert session() == (H200.name, True)


@pytest.mark.parametrize("unknown", ["MIG", "MPS", "MPS elsewhere"])
def test_nothing_is_kept_where_too_little_is_known(
    session: Session, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, unknown: str
) -> None:
    if unknown == "MIG":
        monkeypatch.setattr(nvml, "identities", lambda: None)
    elif unknown == "MPS":
        (tmp_path / "mps").mkdir()
    else:
        monkeypatch.setenv("CUDA_MPS_PIPE_DIRECTORY", "/elsewhere")
    assert [session()[1] for _ in range(2)] == [True, True]


def test_a_damaged_answer_is_no_answer(session: Session) -> None:
    session()
    (file,) = kept_facts.folder().iterdir()
    file.write_bytes(file.read_bytes()[:-3])
    assert session() == (H100.name, True)
    assert session() == (H100.name, False)


def test_all_answers_are_forgotten(session: Session) -> None:
    session()
    kept_facts.forget()
    assert session() == (H100.name, True)
