"""What processes of a run tell each other through a store that anybody can write to."""

from __future__ import annotations

import socket
import time
from pathlib import Path

import pytest
from torch.distributed import HashStore

from tests.conftest import LIMIT
from volo.cluster.run_store import SECRET, SignedStore, connect, knock, serve, wait_for_store


@pytest.fixture(autouse=True)
def secret(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(SECRET, "of this run")


def test_what_others_write_counts_as_not_written(monkeypatch: pytest.MonkeyPatch) -> None:
    store = HashStore()
    own = SignedStore(store, "start 1")
    value = {"rank": 1, "waits": [0.1, None], "name": "é"}
    assert own.get("a") is None
    own.set("a", value)
    assert own.get("a") == SignedStore(store, "start 1").get("a") == value
    assert own.is_there("a") and not own.is_there("b") and own.get_all([]) == []
    written = store.get("a")
    monkeypatch.setenv(SECRET, "guessed")
    stranger = SignedStore(store, "start 1")
    assert stranger.get("a") is None
    # Garbage, another's signature, the own one of another key, of another start, and of another value.
    stranger.set("b", value)
    assert own.get("b") is None and own.get_all(["a", "b"]) == [value, None]
    forged = [b"", b"\x80\x05cposix", b"null", written.replace(b"0.1", b"0.2"), written[:-1]]
    for each in forged:
        store.set("a", each.decode("latin-1"))
        assert own.get("a") is None, each
    store.set("b", written.decode())
    assert own.get("b") is None
    store.set("a", written.decode())
    assert own.get("a") == value
    monkeypatch.setenv(SECRET, "of this run")
    assert SignedStore(store, "start 2").get("a") is None


def test_the_first_to_write_is_heard() -> None:
    store = SignedStore(HashStore())
    assert store.set_first("me", ["n1", 1]) == ["n1", 1]
    assert store.set_first("me", ["n2", 2]) == ["n1", 1]


def test_a_store_listens_at_its_address_alone() -> None:
    store = serve("127.0.0.1", 0)
    connect("127.0.0.1", store.port).set("a", "1")
    assert store.get("a") == b"1"
    port = f"{store.port:04X}"
    lines = [line.split()[1] for file in ("tcp", "tcp6") for line in Path("/proc/net", file).read_text().splitlines()]
    assert [line for line in lines if line.endswith(f":{port}")][0].startswith("0100007F:")
    with pytest.raises(OSError):
        knock("127.0.0.2", store.port)
    with pytest.raises(OSError, match="in use"):
        serve("127.0.0.1", store.port)
    with pytest.raises(OSError):
        serve("198.51.100.7", 0)  # kept for examples: no machine has it


def test_a_port_of_connections_that_have_ended_can_be_used_again() -> None:
    store = serve("127.0.0.1", 0)
    port = store.port
    with socket.create_connection(("127.0.0.1", port)):
        del store
    serve("127.0.0.1", port)


def test_a_store_is_waited_for_until_the_deadline_or_until_the_check_raises() -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    failures, stores = [], []

    def open_later() -> None:
        failures.append(None)
        if len(failures) == 2:
            stores.append(serve("127.0.0.1", port))

    def interrupt() -> None:
        raise KeyboardInterrupt

    wait_for_store("127.0.0.1", port, time.monotonic() + LIMIT, open_later)
    assert len(failures) == 2
    stores.clear()
    with pytest.raises(ConnectionRefusedError):
        wait_for_store("127.0.0.1", port, time.monotonic())
    with pytest.raises(KeyboardInterrupt):
        wait_for_store("127.0.0.1", port, time.monotonic() + LIMIT, interrupt)
