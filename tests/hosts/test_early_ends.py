"""What happens before the ranks of two hosts have met: all end, and say which host it was and why."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.commands.conftest import Running
from tests.hosts.conftest import Host, ip
from tests.hosts.test_two_hosts import FLAGS, ends

pytestmark = pytest.mark.hosts


@pytest.fixture
def data(make_dataset: Callable[..., Path]) -> Path:
    return make_dataset(train=8, validation=8)


@pytest.fixture
def pair(hosts: list[Host], data: Path) -> Callable[..., list[Running]]:
    """`pair(flags of host 0, flags of host 1, **environment)`."""

    def start(*flags: str, **env: str) -> list[Running]:
        nodes = {"NNODES": "2", "MASTER_ADDR": hosts[0].address, **env}
        return [hosts[rank].train(flags[rank], data, NODE_RANK=str(rank), **nodes) for rank in (0, 1)]

    return start


@pytest.mark.parametrize(
    ("wrong", "flag", "told"),
    [(0, "--device cuda", "this machine shows 0"), (1, "--no-such-flag", "error: unknown flag --no-such-flag")],
)
def test_fault_64_a_host_where_the_run_cannot_begin_ends_both(
    pair: Callable[..., list[Running]], wrong: int, flag: str, told: str
) -> None:
    runs = pair(*(f"{FLAGS} {flag if rank == wrong else ''}" for rank in (0, 1)))
    codes = ends(runs)
    assert (codes[wrong], codes[1 - wrong]) == (2, 5), "\n".join(run.output for run in runs)
    other = runs[1 - wrong].output
    assert told in runs[wrong].output and "Traceback" not in other
    # The store ends with host 0's launcher, before rank 1 has reached it or after.
    missed = (
        ("rank 0 does not answer at", "another rank has ended") if wrong == 0 else ("rank 1 did not come within 60 s",)
    )
    assert any(f"error: {each}" in other for each in missed)


def test_hosts_that_have_ipv6_alone_train_together(hosts: list[Host], data: Path, tmp_path: Path) -> None:
    addresses = [f"fd00:78::{10 + number}" for number in range(2)]
    for host, address in zip(hosts, addresses, strict=True):
        for words in ("addr flush dev eth0 scope global", f"addr add {address}/64 dev eth0 nodad"):
            assert ip("-n", host.namespace, *words.split()).returncode == 0
        host.names.write_text(f"127.0.0.1 localhost\n::1 localhost\n127.0.1.1 {host.name}\n")
    nodes = {"NNODES": "2", "MASTER_ADDR": addresses[0]}
    flags = f"{FLAGS} --epochs 1 --output {tmp_path} --experiment"
    runs = [hosts[rank].train(f"{flags} six", data, NODE_RANK=str(rank), **nodes) for rank in (0, 1)]
    assert ends(runs) == [0, 0], "\n".join(run.output for run in runs)
