"""What a node does when node 0 asks: report, get its processes ready, measure."""

from __future__ import annotations

import os
from argparse import Namespace
from dataclasses import asdict
from types import TracebackType

import torch

from volo.cluster.placement import make_plan, variables
from volo.cluster.preflight.meeting import Answer, Task
from volo.cluster.preflight.node_report import node_report
from volo.cluster.preflight.rendezvous import Rendezvous
from volo.cluster.preflight.workers import Workers
from volo.cluster.topology import read_machine


class Node:
    """This node. Use it as a context: its processes end with it.

    Args:
        own: Its address on the way to node 0.
        store: Address and port of the store on node 0.
    """

    def __init__(self, args: Namespace, rendezvous: Rendezvous, own: str, store: tuple[str, int]) -> None:
        self._rank, self._own = rendezvous.rank, own
        self._paths, self._output = [*args.data, *([args.image] if args.image else [])], args.output
        gpus = torch.cuda.device_count()
        self.processes = args.processes or gpus or 1
        self.backend = "nccl" if gpus else "gloo"
        self.measures = not args.no_bandwidth and rendezvous.nodes * self.processes > 1
        environments = network_variables(rendezvous, self.processes) if self.measures else []
        # Started now, ready when they are needed.
        self._workers = Workers("cuda" if gpus else "cpu", store, environments)

    def __enter__(self) -> Node:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._workers.end()

    def perform(self, task: Task) -> Answer:
        """Do "report" (a NodeReport as a dict), "ready" (what went wrong) or "measure" (see `Workers.measure`)."""
        if task["do"] == "report":
            report = node_report(self._rank, self._own, self._paths, self._output)
            return {**asdict(report), "processes": self.processes}
        if task["do"] == "ready":
            return self._workers.ready()
        return self._workers.measure(task["prefix"], task["index"], task["nodes"], task["seconds"])


def network_variables(rendezvous: Rendezvous, processes: int) -> list[dict[str, str]]:
    """Cards and interface of each process, as `--bind auto` names them to a run's ranks; the user's own stay."""
    if rendezvous.nodes == 1:  # nobody else has to be let in
        return [{"GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "lo"}] * processes
    env = {**os.environ, "RANK": "0", "WORLD_SIZE": str(rendezvous.nodes * processes)}
    plan = make_plan(read_machine(), "auto", None, processes, env)
    return [variables(plan, local_rank, env)[0] for local_rank in range(processes)]
