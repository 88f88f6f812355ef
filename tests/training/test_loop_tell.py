"""Ranks that exchange facts without a collective: silent peers are waited for together, not one after the other."""

import json

import pytest

torch = pytest.importorskip("torch")

from rlhf_core.training import distributed  # noqa: E402
from rlhf_core.training.types import NullReporter  # noqa: E402

pytestmark = pytest.mark.training


class SilentStore:
    """Only this rank has told anything. Waiting costs time on a clock of its own."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self.content: dict[str, str] = {}

    def set(self, key: str, value: str) -> None:
        self.content[key] = value

    def get(self, key: str) -> str:
        return self.content[key]

    def check(self, keys: list[str]) -> bool:
        return all(key in self.content for key in keys)

    def pass_time(self, seconds: float) -> None:
        self.now_s += seconds

    def add(self, key: str, amount: int) -> int:
        self.content[key] = str(int(self.content.get(key, "0")) + amount)
        return int(self.content[key])


def test_many_silent_ranks_do_not_add_up(monkeypatch: pytest.MonkeyPatch) -> None:
    store = SilentStore()
    monkeypatch.setattr(distributed.time, "monotonic", lambda: store.now_s)
    monkeypatch.setattr(distributed.time, "sleep", store.pass_time)
    ranks = distributed.Ranks(5, 64, torch.device("cpu"), NullReporter(), store)
    answers = ranks.tell("topic", {"step": 7}, wait_s=3.0)
    assert answers == {5: {"step": 7}}
    assert json.loads(store.get("topic/5")) == {"step": 7}
    assert store.now_s < 3.5, "one rank after the other it would be three minutes: taken for a hang"
