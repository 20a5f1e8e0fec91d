"""Who hears of whom, and how much is read for it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from torch.distributed import HashStore, TCPStore

from tests.conftest import wait_until
from volo.cluster.heartbeat import Heartbeat
from volo.cluster.run_store import SECRET, serve

INTERVAL = 0.01
Start = Callable[..., Heartbeat]


@pytest.fixture(autouse=True)
def secret(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(SECRET, "of this run")


@pytest.fixture
def start() -> Iterator[Start]:
    """`start(store, rank, size, heard=list)`: each member tells its rank, and member 0 the sum of those it knows."""
    begun: list[Heartbeat] = []

    def start(store: Any, rank: int, size: int, heard: list[Any] | None = None) -> Heartbeat:
        beat = Heartbeat(store, "", "group", rank, size, INTERVAL, timeout=2)
        hear = [].append if heard is None else heard.append
        beat.start(
            lambda: {"rank": rank}, lambda: {"sum": sum(each.state["rank"] for each in beat.members.values())}, hear
        )
        begun.append(beat)
        return beat

    yield start
    assert all(beat.stop(5) for beat in begun)


def test_the_first_hears_all_and_all_hear_the_first(start: Start) -> None:
    store, heard = serve("127.0.0.1", 0), [list[Any]() for _ in range(4)]
    beats = {rank: start(store, rank, 4, heard[rank]) for rank in (3, 0, 2, 1)}
    wait_until(lambda: all({"sum": 6} in each for each in heard[1:]))
    first = beats[0]
    assert {rank: each.state for rank, each in first.members.items()} == {rank: {"rank": rank} for rank in range(4)}
    assert heard[0] == [] and all(set(beats[rank].members) == {0} for rank in (1, 2, 3))
    assert beats[3].stop(5) and first.told(5)
    silent, beat = first.members[3].moved, first.members[1].beat
    wait_until(lambda: first.members[1].beat > beat + 2)
    assert first.members[3].moved == silent < first.members[1].moved


class Counted:
    """A store that counts the values that are read."""

    def __init__(self, store: Any, read: Counter[int]) -> None:
        self.store, self.read, self.member = store, read, -1

    def clone(self) -> Counted:
        return Counted(self.store, self.read)

    def set_timeout(self, seconds: object) -> None:
        pass

    def check(self, keys: list[str]) -> bool:
        return bool(self.store.check(keys))

    def set(self, key: str, value: str) -> None:
        self.store.set(key, value)

    def get(self, key: str) -> bytes:
        return self.multi_get([key])[0]

    def multi_get(self, keys: list[str]) -> list[bytes]:
        self.read[self.member] += len(keys)
        return [self.store.get(key) for key in keys]


def test_what_is_read_grows_with_the_group_and_not_with_its_square() -> None:
    totals = {}
    for size in (10, 100):
        read: Counter[int] = Counter()
        beats = [Heartbeat(Counted(HashStore(), read), "", "group", rank, size, 0.0) for rank in range(size)]  # type: ignore[arg-type]
        shared = HashStore()
        for beat in beats:
            beat._signed._store.store, beat._signed._store.member = shared, beat.rank  # type: ignore[attr-defined]
        for _ in range(3):
            for beat in beats:
                beat._exchange(dict, dict, lambda state: None)
        assert set(beats[0].members) == set(range(size))
        assert len({read[rank] for rank in range(1, size)}) == 1
        totals[size] = read.total()
    assert totals[100] < 11 * totals[10]


def test_a_stranger_is_not_heard_and_a_twin_is_noticed(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    store = serve("127.0.0.1", 0)
    first = start(store, 0, 3)
    monkeypatch.setenv(SECRET, "guessed")
    stranger = start(store, 1, 3)
    monkeypatch.setenv(SECRET, "of this run")
    twins = [start(store, 2, 3) for _ in range(2)]
    wait_until(lambda: all(twin.has_twin for twin in twins))
    assert stranger.told(5) and stranger.members == {} and set(first.members) == {0, 2}
    assert not first.has_twin and not stranger.has_twin


def test_a_store_that_is_gone_is_noticed(start: Start) -> None:
    store: list[TCPStore] = [serve("127.0.0.1", 0)]
    beat = start(store[0], 1, 2)
    assert beat.told(5) and not beat.lost
    store.clear()
    wait_until(lambda: beat.lost)
    assert not beat.told(1)
