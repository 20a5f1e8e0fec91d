"""Bind each rank to the CPUs, the memory and the network card nearest its GPU, before torch is imported.

What `--bind` of train.py, validate.py, generate_label.py and the preflight decides: docs/binding.md. What the user, the
launcher or NCCL's configuration has set stays. What can't be done is left out, with the reason in a line.

torchrun's `--numa-binding` binds CPUs alone, needs the numactl program, and ends the run where the cgroup has no CPU of
a node. Where it is used its CPUs are kept, and the rest is added.
"""

from __future__ import annotations

import ctypes
import os
import socket
import sys
from argparse import Namespace
from collections.abc import Mapping

from tlt.io.text import table
from volo.cluster.placement import LEVELS, BindingPlan, Share, distance, make_plan, variables
from volo.cluster.ranks import ranks_from_environment
from volo.cluster.topology import listed, read_machine

_COLUMNS = ("rank", "GPU", "NUMA node", "CPUs", "memory", "card", "distance")
_SET_MEMPOLICY = {"x86_64": 238, "aarch64": 237}  # the number of the system call
_MODES = {"preferred": 1, "bind": 2}
_NODES = 1024  # the most that any kernel supports; a kernel refuses a mask of fewer than it supports


def bind_process(args: Namespace) -> list[str]:
    """Bind this process as `--bind` says; return the lines that rank 0 logs.

    On other machines the first rank prints them to stderr. Never raises: the lines say what can't be bound.
    """
    if args.bind == "none":
        return []
    rank, local_rank, _, ranks = ranks_from_environment(os.environ, getattr(args, "local_rank", 0))
    try:
        plan = make_plan(read_machine(), args.bind, args.device, max(ranks, local_rank + 1), os.environ)
    except (OSError, ValueError, LookupError) as error:  # this kernel's files have an unknown format
        return [f"binding: nothing is bound: {type(error).__name__}: {error}"] if rank == 0 else []
    share = plan.shares[local_rank]
    if share.gpu is not None:  # CUDA would put the fastest GPU first
        os.environ.setdefault("CUDA_DEVICE_ORDER", "PCI_BUS_ID")
    added, left_out = variables(plan, local_rank, os.environ)
    os.environ.update(added)
    failures = apply(share)
    if local_rank:
        for failure in failures:
            print(f"[rank {rank}] warning: {failure}", file=sys.stderr, flush=True)
        return []
    lines = describe(plan, f"{socket.gethostname()} (--bind {args.bind})", rank, added, [*left_out, *failures])
    if rank == 0:
        return lines
    print(*lines, sep="\n", file=sys.stderr, flush=True)
    return []


def apply(share: Share) -> list[str]:
    """Set this process's CPUs and memory policy, which threads and processes that it starts inherit.

    Returns what the kernel refused.
    """
    step = f"CPUs {listed(share.cpus)}"
    try:
        if share.cpus:
            os.sched_setaffinity(0, share.cpus)
        step = f"memory policy {share.memory} {share.node}"
        if share.node is not None and share.memory != "off":
            set_policy(share.memory, share.node)
    except OSError as error:
        hint = "; in docker it takes --cap-add SYS_NICE" if isinstance(error, PermissionError) else ""
        return [f"{step}: {error.strerror}{hint}"]
    return []


def set_policy(mode: str, node: int) -> None:
    """Take memory of `node` first ("preferred"), or of no other ("bind").

    Raises:
        OSError: The kernel has no NUMA, has no such node, or forbids it.
    """
    call = _SET_MEMPOLICY.get(os.uname().machine, -1)  # the kernel has no -1, and says so
    mask = (1 << node).to_bytes(_NODES // 8, sys.byteorder)
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.syscall(ctypes.c_long(call), ctypes.c_int(_MODES[mode]), mask, ctypes.c_ulong(_NODES)):
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))


def describe(plan: BindingPlan, title: str, rank: int, added: Mapping[str, str], left_out: list[str]) -> list[str]:
    """Return the table of a machine, or one line if nothing is bound.

    Args:
        rank: Rank of the machine's first process in the whole run.
        added: Variables that were added to the environment of this process.
        left_out: Reasons besides those of the plan.
    """
    reasons = "; ".join([*plan.reasons, *left_out])
    shared = [f"{name}={value}" for name, value in added.items() if name != "UCX_NET_DEVICES"]
    env = [f"set on every rank here: {' '.join(shared)}"] if shared else []
    if not any(share.gpu or share.cpus for share in plan.shares):
        return [f"binding: nothing is bound: {reasons}", *env]
    rows = table([_COLUMNS, *(_row(rank + i, share) for i, share in enumerate(plan.shares))])
    return [f"binding on {title}:", *rows, *env, *([f"left out: {reasons}"] if reasons else [])]


def _row(rank: int, share: Share) -> list[str]:
    gpu, port = share.gpu, share.port
    node = gpu.node if gpu else share.node
    card = (port.name, LEVELS[distance(gpu, port)[0]]) if gpu and port else (None, None)
    cells = (rank, gpu and gpu.name, node, listed(share.cpus) or "as they are", share.memory, *card)
    return ["-" if cell is None else str(cell) for cell in cells]
