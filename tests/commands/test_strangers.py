"""Other users of the machine while a run of several processes is under way: they reach nothing that would heed them."""

from __future__ import annotations

import base64
import os
import pickle
import sys
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import pytest
from torch.distributed import DistError, PrefixStore, TCPStore

from tests.commands.conftest import QUICK, ROOT, Running, environment, start, storage
from tests.conftest import free_port, wait_until
from volo.cluster.run_store import SignedStore


def listening(pids: list[int]) -> set[str]:
    """The TCP addresses, in hexadecimal, at which these processes listen."""
    inodes = set()
    for pid in pids:
        for link in Path(f"/proc/{pid}/fd").iterdir():
            inodes.add(os.readlink(link).removeprefix("socket:[").removesuffix("]"))
    found = set()
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/{pids[0]}/net", table).read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == "0A" and fields[9] in inodes:
                found.add(fields[1].partition(":")[0])
    return found


class Harm:
    """What runs a command when it is unpickled."""

    def __init__(self, made: Path) -> None:
        self.made = made

    def __reduce__(self) -> tuple[Callable[..., int], tuple[str]]:
        return os.system, (f"touch {self.made}",)


def test_a_run_on_one_machine_listens_on_loopback_alone_and_unpickles_nothing(
    make_dataset: Callable[..., Path], tmp_path: Path
) -> None:
    data, harmed, go_on = make_dataset(train=16, validation=8), tmp_path / "harmed", tmp_path / "go on"
    flags = f"{QUICK} -b 4 --epochs 2 --lr 1e-3 --output {tmp_path} --experiment run"
    waits = (
        f"while '/train/' in str(path) and next(number) >= 10 and not os.path.exists({str(go_on)!r}): time.sleep(0.05)"
    )
    run = start(flags, data, processes=2, **storage(tmp_path, waits))
    run.read_until("epoch 1 [2/2]")
    ranks = run.ranks()
    assert listening([run.process.pid, *ranks.values()]) <= {"0100007F", "0" * 24 + "01000000"}
    given = environment(ranks[0])
    store = TCPStore(given["MASTER_ADDR"], int(given["MASTER_PORT"]), None, False)
    # torch 2.9 has no list_keys.
    keys = getattr(store, "list_keys", lambda: ["volo/0", "watchdog/0"])
    wait_until(lambda: any("watchdog/0" in key for key in keys()))
    harm = pickle.dumps(Harm(harmed)).decode("latin-1")
    for key in {*keys(), "torch.rendezvous.volo.0"}:
        for value in (base64.b64encode(harm.encode("latin-1")).decode(), "", '{"id": 1}', harm):
            store.set(key, value)
    wait_until(lambda: store.get("volo/0") != harm.encode())  # the launcher has been there again
    go_on.touch()
    assert run.end() == 0, run.output
    assert not harmed.exists()


_HELD = """
import os, time
scandir = os.scandir
def listing(path):
    while os.environ.get("RANK") == "0" and b"/train" in os.fsencode(path):
        time.sleep(0.05)
    return scandir(path)
os.scandir = listing
"""


def test_ranks_without_a_secret_open_no_file_that_the_store_names(
    make_dataset: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As `srun` or `mpirun` start them: whoever reaches the store can sign, too."""
    data, harmed, bait = make_dataset(train=16), tmp_path / "harmed", tmp_path / "bait"
    bait.write_bytes(pickle.dumps(Harm(harmed)))
    (tmp_path / "sitecustomize.py").write_text(_HELD)
    port = free_port()
    env = {"PYTHONPATH": f"{tmp_path}{os.pathsep}{ROOT}", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    command = [sys.executable, str(ROOT / "train.py"), str(data), *QUICK.split(), *f"-b 4 --output {tmp_path}".split()]
    ranks = [Running(command, **env, RANK=str(rank), WORLD_SIZE="2", LOCAL_WORLD_SIZE="2") for rank in (0, 1)]
    monkeypatch.delenv("RUN_SECRET", raising=False)
    store = wait_until(lambda: stranger(port))
    SignedStore(PrefixStore("/0/0/", store), "/0").set("once/0/0", ["file", str(bait)])
    wait_until(lambda: harmed.exists() or ranks[1].process.poll() is not None)  # it has read that
    assert not harmed.exists()


def stranger(port: int) -> TCPStore | None:
    """Reach the store of a run, once both of its ranks are there."""
    try:
        store = TCPStore("127.0.0.1", port, None, False, timedelta(seconds=1))
        return store if store.check(["/0/watchdog/0", "/0/watchdog/1"]) else None
    except DistError:
        return None
