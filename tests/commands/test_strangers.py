"""Other users of the machine while a run of several processes is under way: they reach nothing that would heed them."""

from __future__ import annotations

import base64
import contextlib
import os
import pickle
from pathlib import Path

from torch.distributed import TCPStore

from tests.checkpoint.test_weights import Payload
from tests.commands.conftest import QUICK, Make, environment, start, storage


def listening(pids: list[int]) -> set[str]:
    """The TCP addresses, in hexadecimal, at which these processes listen."""
    inodes = set()
    for pid in pids:
        for link in Path(f"/proc/{pid}/fd").iterdir():
            # A running program may close a file between the listing and this line; a listening socket it keeps.
            with contextlib.suppress(FileNotFoundError):
                inodes.add(os.readlink(link).removeprefix("socket:[").removesuffix("]"))
    found = set()
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/{pids[0]}/net", table).read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == "0A" and fields[9] in inodes:
                found.add(fields[1].partition(":")[0])
    return found


def test_a_run_on_one_machine_listens_on_loopback_alone_and_unpickles_nothing(
    make_dataset: Make, tmp_path: Path
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
    keys = store.list_keys()
    assert len(keys) > 0
    harm = pickle.dumps(Payload(harmed)).decode("latin-1")
    for key in keys:
        for value in (base64.b64encode(harm.encode("latin-1")).decode(), "", '{"id": 1}', harm):
            store.set(key, value)
    go_on.touch()
    assert run.end() == 0, run.output
    assert not harmed.exists()
