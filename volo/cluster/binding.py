"""Bind each rank to the CPUs, the memory and the network card nearest its GPU, before torch is imported. Its GPU is
the one that `volo.cluster.distributed.choose_device` will choose. NCCL takes the card nearest a GPU by itself, out of
those that NCCL_IB_HCA names on all ranks alike; UCX gets the nearest port alone.

This implements the flag `--bind`, which docs/binding.md explains. Settings of the user, the launcher or NCCL's
configuration file stay as they are. What can't be bound is left alone, and a line says why.

torchrun's `--numa-binding` binds only CPUs, and ends the run if the cgroup contains no CPU of a node. If torchrun has
bound the CPUs, they stay so, and only memory and network card are bound here.
"""

import ctypes
import os
import socket
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path

from tlt.io.text import table
from volo.cluster.launch import launch_of
from volo.cluster.topology import Gpu, Machine, Port, interface_to, listed, read, read_machine, visible_gpus

_MEMORY = {"auto": "preferred", "cpu": "off", "cpu+mem": "bind"}
# Distances from near to far, as `nvidia-smi topo -m` names them: same PCIe switch, several switches, same host bridge,
# same NUMA node, anywhere.
LEVELS = ("PIX", "PXB", "PHB", "NODE", "SYS")
_BRIDGE = LEVELS.index("PHB")
_FAR = LEVELS.index("SYS")
_LEFT = "CPUs and memory are left to the kernel"
_SET_MEMPOLICY = {"x86_64": 238, "aarch64": 237}  # numbers of the system call set_mempolicy
_POLICIES = {"preferred": 1, "bind": 2}
_NODES = 1024  # bits in the node mask: the most nodes that any kernel supports; a kernel refuses a shorter mask


@dataclass(frozen=True)
class Share:
    """The CPUs, memory and network card of one rank."""

    gpu: Gpu | None = None  # None if the rank computes on the CPU
    cpus: tuple[int, ...] = ()  # empty if they are left unchanged
    node: int | None = None  # NUMA node of the memory; None if it is left unchanged
    memory: str = "off"  # policy for the memory of `node`: "preferred", "bind" or "off"
    port: Port | None = None  # port of the network card nearest the GPU


@dataclass(frozen=True)
class BindingPlan:
    """The shares of all ranks of a machine. Every rank makes the same plan if all ranks see the same GPUs and the
    launcher tells how many ranks the machine has; else a rank counts those up to its own, and shares may overlap."""

    shares: tuple[Share, ...]  # by local rank
    # Cards near any GPU of the machine, even one that this rank doesn't see: NCCL's rings need the same list on all
    # ranks. Empty if every active card is in the list, or none is.
    cards: tuple[str, ...]
    reasons: tuple[str, ...]  # what is not bound, and why
    own_gpu: bool = False  # whether each rank sees only its own GPU; then all shares are equal to this rank's


def bind_process(bind: str, device: str | None, local_rank: int = 0) -> list[str]:
    """Bind this process as `--bind` says, and return the lines that rank 0 logs. They also say what can't be bound.

    There are no lines if a single process runs on the CPU and nothing can be shared. On the other machines, local rank
    0 prints its lines to stderr.
    """
    if bind == "none":
        return []
    launch = launch_of(os.environ, local_rank)
    rank = launch.rank
    local_rank = launch.local_rank
    machine = read_machine()
    plan = make_plan(machine, bind, device, max(launch.local_size or 1, local_rank + 1), os.environ)
    share = plan.shares[local_rank]
    if share.gpu is not None:  # CUDA's default order puts the fastest GPU first
        os.environ.setdefault("CUDA_DEVICE_ORDER", "PCI_BUS_ID")
    added, left_out = variables(plan, local_rank, os.environ)
    os.environ.update(added)
    failures = apply(share)
    on_cpu = device == "cpu" or not any(gpu.usable for gpu in machine.gpus)
    if bind == "auto" and launch.size == 1 and on_cpu and not (left_out or failures):
        return []
    title = f"{socket.gethostname()} (--bind {bind})"
    lines = describe(plan, title, rank, added, [*left_out, *failures])
    if rank == 0:
        return lines
    warnings = [f"[rank {rank}] warning: {failure}" for failure in failures]
    for line in warnings if local_rank else lines:
        print(line, file=sys.stderr, flush=True)
    return []


def make_plan(machine: Machine, mode: str, device: str | None, ranks: int, env: Mapping[str, str]) -> BindingPlan:
    """Decide what each of the `ranks` processes on a machine gets; `mode` is the value of `--bind`, never "none"."""
    kind, _, index = (device or "").partition(":")
    visible, problem = ([], "") if kind == "cpu" else visible_gpus(machine.gpus, env)
    own_gpu = len(visible) == 1 < ranks and not index  # if the ranks share a GPU instead, `init_world` reports that
    numbers = [int(index) if index.isdigit() else 0 if own_gpu else rank for rank in range(ranks)]  # as `choose_device`
    gpus = [visible[number] if number < len(visible) else None for number in numbers]
    if visible and None in gpus:
        problem = f"{ranks} ranks, {len(visible)} GPUs"
    # If no rank knows the GPUs of the others, all ranks share the CPUs of this rank's NUMA node.
    cpu_shares, left_out = share_cpus(machine, mode, gpus[:1] if own_gpu else gpus, ranks)
    cpu_shares = cpu_shares * ranks if own_gpu else cpu_shares
    ports, nearest = choose_ports(machine.gpus if any(gpus) else (), machine.ports)
    shares = []
    for gpu, cpu_share in zip(gpus, cpu_shares, strict=True):
        memory = _MEMORY[mode] if cpu_share.node is not None else "off"
        port = nearest.get(gpu.name) if gpu else None
        shares.append(replace(cpu_share, gpu=gpu, memory=memory, port=port))
    idle = f" ({', '.join(machine.idle_ports)})" if machine.idle_ports else ""
    no_card = f"no InfiniBand or RoCE card near a GPU{idle}: left to NCCL" if any(gpus) and not nearest else ""
    cards = tuple(port.name for port in ports) if len(ports) < len(machine.ports) else ()
    alone = "what the other ranks have: each sees its own GPU alone" if own_gpu else ""
    return BindingPlan(tuple(shares), cards, tuple(filter(None, (problem, left_out, no_card, alone))), own_gpu)


def share_cpus(machine: Machine, mode: str, gpus: Sequence[Gpu | None], ranks: int) -> tuple[list[Share], str]:
    """Return the CPUs and NUMA node of each rank, and what is not bound and why. Only CPUs that this process may use
    are shared out. `gpus` holds the GPUs of the machine's ranks, or one GPU if only one is known."""
    homes = [gpu.node if gpu else None for gpu in gpus]
    shares = [Share() for _ in gpus]
    reasons = []
    if mode == "auto" and not any(gpus):
        return shares, f"{_LEFT} (--bind cpu would divide the CPUs among the ranks)"
    if mode == "auto" and len(machine.cores) < 2:
        return shares, f"one NUMA node: {_LEFT}"
    # If the parent has other CPUs, this rank has been bound already (torchrun --numa-binding, srun --cpu-bind).
    if ranks > 1 and machine.parent_allowed != machine.allowed:
        return [Share(node=home) for home in homes], "CPUs stay as the launcher has given them to each rank"
    usable = [(node, machine.allowed.intersection(core)) for node, cores in machine.cores.items() for core in cores]
    usable = [(node, cpus) for node, cpus in usable if cpus]
    if not any(gpus):
        if len(usable) >= len(gpus):
            return _divide(usable, len(gpus)), ""
        few = f"the machine has {len(usable)} cores in the CPU mask"
        return shares, f"local rank {listed(range(len(gpus)))} not bound: {few}"
    for home in dict.fromkeys(homes):
        members = [rank for rank, other in enumerate(homes) if other == home]
        cores = [core for core in usable if core[0] == home]
        if len(cores) >= len(members):
            for rank, share in zip(members, _divide(cores, len(members)), strict=True):
                shares[rank] = share
        else:
            why = "NUMA node unknown" if home is None else f"NUMA node {home} has {len(cores)} cores in the CPU mask"
            reasons.append(f"local rank {listed(members)} not bound: {why}")
    return shares, "; ".join(reasons)


def _divide(cores: Sequence[tuple[int, frozenset[int]]], count: int) -> list[Share]:
    """Divide cores, each with its NUMA node and CPUs, into `count` shares; the first get one core more if needed."""
    size, larger = divmod(len(cores), count)
    ends = [number * size + min(number, larger) for number in range(count + 1)]
    shares = []
    for part in (cores[first:end] for first, end in pairwise(ends)):
        nodes = {node for node, _ in part}
        cpus = tuple(sorted(cpu for _, threads in part for cpu in threads))
        shares.append(Share(cpus=cpus, node=nodes.pop() if len(nodes) == 1 else None))
    return shares


def choose_ports(gpus: Sequence[Gpu], ports: Sequence[Port]) -> tuple[list[Port], dict[str, Port]]:
    """Return the ports that NCCL may use, and the port nearest each GPU by the GPU's name.

    NCCL may use the fastest ports that are also the nearest to some GPU; ports below the same host bridge count as
    equally near. All are of one network, because NCCL can't mix InfiniBand and Ethernet. The other ports are for
    storage, or for the machine's own traffic. The result is empty if no port is both near a GPU and among the fastest.
    """
    distances = [[max(distance(gpu, port), _BRIDGE) for port in ports] for gpu in gpus]
    near = [port for i, port in enumerate(ports) if any(of_gpu[i] == min(of_gpu) < _FAR for of_gpu in distances)]
    fastest = [port for port in near if all(port.rate >= other.rate for other in ports)]
    layers = Counter(port.layer for port in fastest)
    usable = [port for port in fastest if port.layer == max(layers, key=lambda layer: (layers[layer], layer))]
    nearest: dict[str, Port] = {}
    for gpu in gpus if usable else ():
        taken = Counter(port.name for port in nearest.values())  # among equally near ports, take the one fewer GPUs use
        nearest[gpu.name] = min(usable, key=lambda port: (distance(gpu, port), taken[port.name]))  # noqa: B023
    return usable, nearest


def distance(gpu: Gpu, port: Port) -> int:
    """Return the distance between a GPU and a port as an index into LEVELS."""
    common = len(os.path.commonprefix([gpu.path, port.path]))
    if common > 1:
        return 0 if max(len(gpu.path), len(port.path)) - common <= 2 else 1
    if common == 1:
        return _BRIDGE
    return 3 if gpu.node is not None and gpu.node == port.node else _FAR


def variables(
    plan: BindingPlan, local_rank: int, env: Mapping[str, str], root: str | Path = "/"
) -> tuple[dict[str, str], list[str]]:
    """Return the environment variables to add for a rank, and the reasons why others are not set."""
    wanted = {}
    reasons = []
    share = plan.shares[local_rank]
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
    """Set this process's CPUs and memory policy; the threads and processes that it starts inherit them.

    Return a line for what the kernel refused.
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
    """Let the kernel take memory from `node` first ("preferred") or only ("bind"). Raises OSError if it refuses."""
    call = _SET_MEMPOLICY.get(os.uname().machine, -1)  # the kernel refuses call number -1 with an error
    mask = (1 << node).to_bytes(_NODES // 8, sys.byteorder)
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.syscall(ctypes.c_long(call), ctypes.c_int(_POLICIES[mode]), mask, ctypes.c_ulong(_NODES)):
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))


def describe(plan: BindingPlan, title: str, rank: int, added: Mapping[str, str], left_out: list[str]) -> list[str]:
    """Return a table of what the ranks of a machine are bound to, or one line if nothing is bound. `rank` is the global
    rank of the machine's first process; `left_out` are reasons besides those of the plan why something is not bound."""
    reasons = "; ".join([*plan.reasons, *left_out])
    shared = [f"{name}={value}" for name, value in added.items() if name != "UCX_NET_DEVICES"]
    env = [f"set on every rank here: {' '.join(shared)}"] if shared else []
    if not any(share.gpu or share.cpus for share in plan.shares):
        return [f"binding: nothing is bound: {reasons}", *env]
    rows = [["rank", "GPU", "NUMA node", "CPUs", "memory", "card", "distance"]]
    for i, share in enumerate(plan.shares[:1] if plan.own_gpu else plan.shares):
        gpu = share.gpu
        port = share.port
        card = (port.name, LEVELS[distance(gpu, port)]) if gpu and port else (None, None)
        node = gpu.node if gpu else share.node
        cpus = listed(share.cpus) or "as they are"
        cells = (rank + i, gpu and gpu.name, node, cpus, share.memory, *card)
        rows.append(["-" if cell is None else str(cell) for cell in cells])
    return [f"binding on {title}:", *table(rows), *env, *([f"left out: {reasons}"] if reasons else [])]
