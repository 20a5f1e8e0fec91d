"""Checks that machines are fit for a run. One task per node: `srun --ntasks-per-node=1 python -m volo preflight`.

Node 0 (`coordinator`) waits for the others, asks each for a report (`node_report`) through a store (`channel`),
compares the reports (`findings`), has bandwidth measured (`bandwidth`) by processes as a run would start them
(`local_node`, `worker`), and prints one table and a line per problem. All nodes end with the same exit code: 0 fit, 2
bad flags or variables, 6 not fit.

Environment: NNODES, NODE_RANK, MASTER_ADDR, MASTER_PORT as for `distributed_train.sh` (the port after it is used), else
Slurm's. NODES names the nodes where SLURM_JOB_NODELIST doesn't: `NODES="n1 n2"` or `NODES=n[1-8]`.
"""

from __future__ import annotations

import os
import time
from argparse import Namespace

from volo.cluster.preflight.rendezvous import addresses, rendezvous_from_environment


def run(args: Namespace) -> int:
    """Check the machines; return the exit code, which is the same on all nodes."""
    started = time.monotonic()
    rendezvous = rendezvous_from_environment(os.environ)
    node_0_address, own_address = addresses(rendezvous)
    # torch warns of connections that it tries again and of names that it can't resolve: both are expected here.
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    # Imported only now because they import torch, which takes seconds: a wrong address is reported at once.
    from volo.cluster.preflight.channel import PATIENCE_S, Channel, open_store
    from volo.cluster.preflight.coordinator import Coordinator
    from volo.cluster.preflight.local_node import LocalNode

    store = open_store(rendezvous, node_0_address, started + args.timeout)
    channel = Channel(rendezvous, store, patience=args.timeout + PATIENCE_S)
    with LocalNode(args, rendezvous, own_address, (node_0_address, store.port)) as node:
        channel.announce()
        if rendezvous.rank:
            return channel.follow(node.perform)
        return Coordinator(args, channel, node).run(started)
