"""Bind each rank to the CPUs, the memory and the network card nearest its GPU, before torch is imported.

What `--bind` of train.py, validate.py, generate_label.py and the preflight decides: docs/binding.md. What the user, the
launcher or NCCL's configuration has set stays. What can't be done is left out, with the reason in a line.

torchrun's `--numa-binding` binds CPUs alone, and ends the run where the cgroup has none of a node. Where it is used its
CPUs are kept, and the rest is added.
"""

from __future__ import annotations

import ctypes
import os
import socket
import sys
from argparse import Namespace
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from tlt.io.text import table
from volo.cluster.launch import launch_of
from volo.cluster.topology import Gpu, Machine, Port, interface_to, listed, read, read_machine, visible_gpus

_COLUMNS = ("rank", "GPU", "NUMA node", "CPUs", "memory", "card", "distance")
_MEMORY = {"auto": "preferred", "cpu": "off", "cpu+mem": "bind"}
# From near to far, in the words of `nvidia-smi topo -m`: same PCIe switch, several switches, same host bridge, same
# NUMA node, anywhere.
LEVELS = ("PIX", "PXB", "PHB", "NODE", "SYS")
_BRIDGE, _FAR = LEVELS.index("PHB"), LEVELS.index("SYS")
_LEFT = "CPUs and memory are left to the kernel"
_SET_MEMPOLICY = {"x86_64": 238, "aarch64": 237}  # the number of the system call
_POLICIES = {"preferred": 1, "bind": 2}
_NODES = 1024  # the most that any kernel supports; a kernel refuses a mask of fewer than it supports


@dataclass(frozen=True)
class Share:
    """CPUs, memory and network card of one rank."""

    gpu: Gpu | None = None  # None on the CPU
    cpus: tuple[int, ...] = ()  # empty where they are left unchanged
    node: int | None = None  # NUMA node of its memory; None where that is left unchanged
    memory: str = "off"  # policy for the memory of `node`: "preferred", "bind" or "off"
    port: Port | None = None  # the card nearest to the GPU


@dataclass(frozen=True)
class BindingPlan:
    """What the ranks of a machine get; every rank makes the same plan, where all see the same GPUs."""

    shares: tuple[Share, ...]  # by local rank
    # Of all GPUs of the machine, also of those that a rank doesn't see: NCCL's rings need the same list on all ranks.
    # Empty where these are all active cards, or there are none.
    cards: tuple[str, ...]
    reasons: tuple[str, ...]  # what is left out, and why
    own_gpu: bool = False  # whether a rank sees its own GPU alone: all shares are those that it would have


def bind_process(args: Namespace) -> list[str]:
    """Bind this process as `--bind` says; return the lines that rank 0 logs, which say what can't be bound, too: none
    where one process on a CPU has nothing to divide.

    On other machines the first rank prints them to stderr.
    """
    if args.bind == "none":
        return []
    launch = launch_of(os.environ, getattr(args, "local_rank", 0))
    rank, local_rank = launch.rank, launch.local_rank
    machine = read_machine()
    plan = make_plan(machine, args.bind, args.device, max(launch.local_size or 1, local_rank + 1), os.environ)
    share = plan.shares[local_rank]
    if share.gpu is not None:  # CUDA would put the fastest GPU first
        os.environ.setdefault("CUDA_DEVICE_ORDER", "PCI_BUS_ID")
    added, left_out = variables(plan, local_rank, os.environ)
    os.environ.update(added)
    failures = apply(share)
    on_cpu = args.device == "cpu" or not any(gpu.shown for gpu in machine.gpus)
    if args.bind == "auto" and launch.size == 1 and on_cpu and not (left_out or failures):
        return []
    title = f"{socket.gethostname()} (--bind {args.bind})"
    lines = describe(plan, title, rank, added, [*left_out, *failures])
    if rank == 0:
        return lines
    others = [f"[rank {rank}] warning: {failure}" for failure in failures]
    for line in others if local_rank else lines:
        print(line, file=sys.stderr, flush=True)
    return []


def make_plan(machine: Machine, mode: str, device: str | None, ranks: int, env: Mapping[str, str]) -> BindingPlan:
    """Decide what each of the `ranks` processes on a machine gets; `mode` is the value of `--bind`, but not "none"."""
    kind, _, index = (device or "").partition(":")
    visible, problem = ([], "") if kind == "cpu" else visible_gpus(machine.gpus, env)
    own_gpu = len(visible) == 1 < ranks and not index  # or the ranks share it, which their meeting would find
    numbers = [int(index) if index.isdigit() else 0 if own_gpu else rank for rank in range(ranks)]  # as `choose_device`
    gpus = [visible[number] if number < len(visible) else None for number in numbers]
    if visible and None in gpus:
        problem = f"{ranks} ranks, {len(visible)} GPUs"
    # Ranks that don't know each other's GPUs share the CPUs of a node.
    homes, left_out = share_cpus(machine, mode, gpus[:1] if own_gpu else gpus, ranks)
    homes = homes * ranks if own_gpu else homes
    ports, nearest = choose_ports(machine.gpus if any(gpus) else (), machine.ports)
    shares = []
    for gpu, home in zip(gpus, homes, strict=True):
        memory, port = _MEMORY[mode] if home.node is not None else "off", nearest.get(gpu.name) if gpu else None
        shares.append(replace(home, gpu=gpu, memory=memory, port=port))
    idle = f" ({', '.join(machine.idle_ports)})" if machine.idle_ports else ""
    no_card = f"no InfiniBand or RoCE card near a GPU{idle}: left to NCCL" if any(gpus) and not nearest else ""
    cards = tuple(port.name for port in ports) if len(ports) < len(machine.ports) else ()
    alone = "what the other ranks have: each sees its own GPU alone" if own_gpu else ""
    return BindingPlan(tuple(shares), cards, tuple(filter(None, (problem, left_out, no_card, alone))), own_gpu)


def share_cpus(machine: Machine, mode: str, gpus: Sequence[Gpu | None], ranks: int) -> tuple[list[Share], str]:
    """Return CPUs and NUMA node of each rank, of the CPUs that this process may use; what is left out, and why. `gpus`
    are those of the machine's ranks, or that of the only one that is known."""
    homes = [gpu.node if gpu else None for gpu in gpus]
    shares = [Share() for _ in gpus]
    if mode == "auto" and not any(gpus):
        return shares, f"{_LEFT} (--bind cpu would divide the CPUs among the ranks)"
    if mode == "auto" and len(machine.cores) < 2:
        return shares, f"one NUMA node: {_LEFT}"
    # The parent process has other CPUs: this rank has been bound already (torchrun --numa-binding, srun --cpu-bind).
    if ranks > 1 and machine.parent_allowed != machine.allowed:
        return [Share(node=home) for home in homes], "CPUs stay as the launcher has given them to each rank"
    usable = [
        (node, threads)
        for node, cores in machine.cores.items()
        for core in cores
        if (threads := [cpu for cpu in core if cpu in machine.allowed])
    ]
    reasons = []
    for home in dict.fromkeys(homes):
        members = [rank for rank, other in enumerate(homes) if other == home]
        cores = [core for core in usable if core[0] == home or not any(gpus)]
        if len(cores) < len(members):
            where = f"NUMA node {home}" if any(gpus) else "the machine"
            unknown = "NUMA node unknown" if any(gpus) and home is None else ""
            why = unknown or f"{where} has {len(cores)} cores in the CPU mask"
            reasons.append(f"local rank {listed(members)} not bound: {why}")
            continue
        for done, rank in enumerate(members):
            size = -(-len(cores) // (len(members) - done))  # the first get one more where they can't be equal
            part, cores = cores[:size], cores[size:]
            nodes = {node for node, _ in part}
            cpus = tuple(sorted(cpu for _, threads in part for cpu in threads))
            shares[rank] = Share(cpus=cpus, node=nodes.pop() if len(nodes) == 1 else None)
    return shares, "; ".join(reasons)


def choose_ports(gpus: Sequence[Gpu], ports: Sequence[Port]) -> tuple[list[Port], dict[str, Port]]:
    """Return the ports that NCCL may use, and the one nearest to each GPU, by the GPU's name.

    NCCL may use the fastest ports, as far as no other port is nearer to some GPU (what is below the same host bridge is
    equally near), and of one network: InfiniBand and Ethernet can't be mixed. The other ports are for storage, or for
    the machine's own traffic. Empty if no port is near any GPU, or none of these is the fastest.
    """
    steps = [[max(distance(gpu, port), _BRIDGE) for port in ports] for gpu in gpus]
    near = [port for i, port in enumerate(ports) if any(far[i] == min(far) < _FAR for far in steps)]
    fastest = [port for port in near if all(port.rate >= other.rate for other in ports)]
    layers = Counter(port.layer for port in fastest)
    usable = [port for port in fastest if port.layer == max(layers, key=lambda it: (layers[it], it))]
    nearest: dict[str, Port] = {}
    for gpu in gpus if usable else ():
        taken = Counter(port.name for port in nearest.values())  # of equally near ones the one that fewer GPUs have
        nearest[gpu.name] = min(usable, key=lambda port: (distance(gpu, port), taken[port.name]))  # noqa: B023
    return usable, nearest


def distance(gpu: Gpu, port: Port) -> int:
    """Return how far they are from each other, an index into LEVELS."""
    common = len(os.path.commonprefix([gpu.path, port.path]))
    if common > 1:
        return 0 if max(len(gpu.path), len(port.path)) - common <= 2 else 1
    if common == 1:
        return _BRIDGE
    return 3 if gpu.node is not None and gpu.node == port.node else _FAR


def variables(
    plan: BindingPlan, local_rank: int, env: Mapping[str, str], root: str | Path = "/"
) -> tuple[dict[str, str], list[str]]:
    """Return the variables to add to the environment of a rank, and the reasons why others are left out."""
    wanted, reasons, share = {}, [], plan.shares[local_rank]
    if plan.cards:
        wanted["NCCL_IB_HCA"] = "=" + ",".join(plan.cards)
    if share.port:
        wanted["UCX_NET_DEVICES"] = share.port.name
    launch = launch_of(env)
    if launch.size > len(plan.shares) and launch.address:
        if interface := interface_to(launch.address):
            wanted |= {"NCCL_SOCKET_IFNAME": f"={interface}", "GLOO_SOCKET_IFNAME": interface}
        else:
            reasons.append(f"MASTER_ADDR={launch.address} is no address of another machine, or there is no route")
    files = (env.get("NCCL_CONF_FILE") or f"{env.get('HOME', '')}/.nccl.conf", "/etc/nccl.conf")
    lines = [line for file in files for line in read(Path(root) / file.lstrip("/")).splitlines()]
    users = {*env, *(line.partition("=")[0].strip() for line in lines)}
    reasons += [f"{name} stays as you have set it" for name in wanted if name in users]
    return {name: value for name, value in wanted.items() if name not in users}, reasons


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
    """Take memory of `node` first ("preferred"), or of no other ("bind"); OSError where the kernel refuses it."""
    call = _SET_MEMPOLICY.get(os.uname().machine, -1)  # the kernel has no -1, and says so
    mask = (1 << node).to_bytes(_NODES // 8, sys.byteorder)
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.syscall(ctypes.c_long(call), ctypes.c_int(_POLICIES[mode]), mask, ctypes.c_ulong(_NODES)):
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))


def describe(plan: BindingPlan, title: str, rank: int, added: Mapping[str, str], left_out: list[str]) -> list[str]:
    """Return the table of a machine, or one line if nothing is bound.

    Args:
        rank: Rank of the machine's first process in the whole run.
        left_out: Reasons besides those of the plan.
    """
    reasons = "; ".join([*plan.reasons, *left_out])
    shared = [f"{name}={value}" for name, value in added.items() if name != "UCX_NET_DEVICES"]
    env = [f"set on every rank here: {' '.join(shared)}"] if shared else []
    if not any(share.gpu or share.cpus for share in plan.shares):
        return [f"binding: nothing is bound: {reasons}", *env]
    rows = [list(_COLUMNS)]
    for i, share in enumerate(plan.shares[:1] if plan.own_gpu else plan.shares):
        gpu, port = share.gpu, share.port
        card = (port.name, LEVELS[distance(gpu, port)]) if gpu and port else (None, None)
        node, cpus = gpu.node if gpu else share.node, listed(share.cpus) or "as they are"
        cells = (rank + i, gpu and gpu.name, node, cpus, share.memory, *card)
        rows.append(["-" if cell is None else str(cell) for cell in cells])
    return [f"binding on {title}:", *table(rows), *env, *([f"left out: {reasons}"] if reasons else [])]
