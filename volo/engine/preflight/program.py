"""The preflight on one node: it meets the others, then node 0 asks and all answer."""

from __future__ import annotations

import os
import time
from argparse import Namespace

from volo.engine.preflight.place import Place, Unfit, master_address, place_from_environment, source_address


def run(args: Namespace) -> int:
    """Check the machines; return the exit code, the same on all nodes."""
    started = time.monotonic()
    place = place_from_environment(os.environ)
    address, own = _addresses(place)
    # What torch says about connections that it tries again, and names that it can't resolve, is no news here.
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    # They import torch, which takes seconds: a wrong address is to be told at once.
    from volo.engine.preflight.conduct import conduct
    from volo.engine.preflight.meeting import Meeting, open_store
    from volo.engine.preflight.node import Node

    store = open_store(place, address, started + args.timeout)
    meeting = Meeting(place, store)
    with Node(args, place, own, (address, store.port)) as node:
        meeting.arrive()
        if place.rank:
            return meeting.follow(node.perform)
        return conduct(args, meeting, node, started)


def _addresses(place: Place) -> tuple[str, str]:
    """Return node 0's address and this node's own on the way there."""
    if place.nodes == 1:
        return "127.0.0.1", "127.0.0.1"
    address = master_address(place)
    try:
        return address, source_address(address)
    except OSError as error:
        name = place.name(place.rank)
        raise Unfit(f"{name}: no route to node 0 at {address} ({error.strerror}): bring its network up") from error
