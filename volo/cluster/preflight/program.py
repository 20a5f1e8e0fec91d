"""The preflight on one node: it meets the others, then node 0 asks and all answer."""

from __future__ import annotations

import os
import time
from argparse import Namespace

from volo.cluster.preflight.rendezvous import Rendezvous, Unfit, master_address, rendezvous_from_environment
from volo.cluster.ranks import own_address


def run(args: Namespace) -> int:
    """Check the machines; return the exit code, the same on all nodes."""
    started = time.monotonic()
    rendezvous = rendezvous_from_environment(os.environ)
    address, own = _addresses(rendezvous)
    # What torch says about connections that it tries again, and names that it can't resolve, is no news here.
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    # They import torch, which takes seconds: a wrong address is to be told at once.
    from volo.cluster.preflight.conduct import conduct
    from volo.cluster.preflight.meeting import PATIENCE_S, Meeting, open_store
    from volo.cluster.preflight.node import Node

    store = open_store(rendezvous, address, started + args.timeout)
    meeting = Meeting(rendezvous, store, patience=args.timeout + PATIENCE_S)
    with Node(args, rendezvous, own, (address, store.port)) as node:
        meeting.arrive()
        if rendezvous.rank:
            return meeting.follow(node.perform)
        return conduct(args, meeting, node, started)


def _addresses(rendezvous: Rendezvous) -> tuple[str, str]:
    """Return node 0's address and this node's own on the way there."""
    if rendezvous.nodes == 1:
        return "127.0.0.1", "127.0.0.1"
    address = master_address(rendezvous)
    try:
        return address, own_address(address)
    except OSError as error:
        name = rendezvous.name(rendezvous.rank)
        raise Unfit(f"{name}: no route to node 0 at {address} ({error.strerror}): bring its network up") from error
