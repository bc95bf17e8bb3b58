"""The primary context that a thread makes meanwhile, with a fake driver."""

from __future__ import annotations

import pytest

pytest.importorskip("cuda.bindings.driver")

from pytest_gpumem.devices.cuda import primary


class FakeDriver:
    CUdevice = int

    def __init__(self, refuses: str = "") -> None:
        self.refuses = refuses
        self.called: list[str] = []

    def __getattr__(self, name: str) -> object:
        def call(*_: object) -> tuple[int, ...]:
            self.called.append(name)
            return (1 if name == self.refuses else 0, 7)[
                : 1 if name in ("cuInit", "cuDevicePrimaryCtxRelease") else 2
            ]

        return call


MADE = ["cuInit", "cuDeviceGet", "cuDevicePrimaryCtxRetain"]


@pytest.mark.parametrize(
    ("refuses", "called"),
    [
        ("", [*MADE, "cuDevicePrimaryCtxRelease"]),
        ("cuInit", MADE[:1]),
        ("cuDevicePrimaryCtxRetain", MADE),
    ],
)
def test_what_was_made_is_let_go_after_the_block(
    monkeypatch: pytest.MonkeyPatch, refuses: str, called: list[str]
) -> None:
    driver = FakeDriver(refuses)
    monkeypatch.setattr(primary, "D", driver)
    with primary.made_meanwhile(0):
        assert "cuDevicePrimaryCtxRelease" not in driver.called
    assert driver.called == called


def test_it_is_let_go_after_an_error_too(monkeypatch: pytest.MonkeyPatch) -> None:
    driver = FakeDriver()
    monkeypatch.setattr(primary, "D", driver)
    with pytest.raises(ZeroDivisionError), primary.made_meanwhile(0):
        _ = 1 / 0
    assert driver.called == [*MADE, "cuDevicePrimaryCtxRelease"]
