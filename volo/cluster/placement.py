"""The CPUs, the memory and the network card of each rank of a machine; every rank makes the same plan for all."""

from __future__ import annotations

import os
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple, TypeVar

from volo.cluster.ranks import ranks_from_environment
from volo.cluster.topology import Gpu, Machine, PciPlace, Port, interface_to, listed, nccl_conf, visible_gpus

T = TypeVar("T")
_MEMORY = {"auto": "preferred", "cpu": "off", "cpu+mem": "bind"}
# From near to far, in the words of `nvidia-smi topo -m`: same PCIe switch, several switches, same host bridge, same
# NUMA node, anywhere.
LEVELS = ("PIX", "PXB", "PHB", "NODE", "SYS")
_FAR = LEVELS.index("SYS")
_LEFT = "CPUs and memory are left to the kernel"


class Near(NamedTuple):
    """The card that a GPU uses."""

    port: Port
    level: str


class Cpus(NamedTuple):
    """NUMA node (None: not bound) and CPUs (empty: unchanged) by local rank; what is left out, and why."""

    nodes: Sequence[int | None]
    cpus: Sequence[tuple[int, ...]]
    left_out: str


@dataclass(frozen=True)
class Share:
    """CPUs, memory and network card of one rank.

    Attributes:
        gpu: None on the CPU.
        number: CUDA's number of that GPU.
        cpus: Empty where they are left unchanged.
        memory: Policy for the memory of `node`: "preferred", "bind" or "off".
        node: NUMA node.
        near: The card that the GPU uses.
    """

    gpu: Gpu | None = None
    cpus: tuple[int, ...] = ()
    memory: str = "off"
    node: int | None = None
    near: Near | None = None
    number: int | None = None


@dataclass(frozen=True)
class BindingPlan:
    """The shares of a machine's ranks, by local rank; every rank makes the same plan.

    Attributes:
        cards: Cards of all GPUs of the machine, also of those that a rank doesn't see: NCCL needs the same list on all
            ranks. Empty where these are all active cards, or none is near a GPU.
        reasons: What is left out, and why.
    """

    shares: tuple[Share, ...]
    cards: tuple[str, ...]
    reasons: tuple[str, ...]


def make_plan(machine: Machine, mode: str, device: str | None, ranks: int, env: Mapping[str, str]) -> BindingPlan:
    """Decide what each of the `ranks` processes on a machine gets.

    Args:
        mode: Value of `--bind`, but not "none".
        device: Value of `--device`.
        env: Gives CUDA_VISIBLE_DEVICES and CUDA_DEVICE_ORDER.
    """
    visible, problem = ([], "") if _on_cpu(device) else visible_gpus(machine.gpus, env)
    gpus = gpus_of_ranks(visible, device, ranks)
    if visible and None in gpus:
        problem = f"{ranks} ranks, {len(visible)} GPUs"
    nodes, cpus, left_out = share_cpus(machine, mode, gpus)
    ports = compute_ports(machine.gpus, machine.ports)
    nearest = nearest_ports(machine.gpus, ports) if any(gpus) else {}
    forbidden = {node for node in nodes if node is not None and node not in machine.memory_nodes}
    memory = ["off" if node is None or node in forbidden else _MEMORY[mode] for node in nodes]
    shares = tuple(
        Share(gpu, own, policy, node, nearest.get(gpu.address), visible.index(gpu))
        if gpu
        else Share(None, own, policy, node)
        for gpu, own, policy, node in zip(gpus, cpus, memory, nodes, strict=True)
    )
    idle = f" ({', '.join(machine.idle_ports)})" if machine.idle_ports else ""
    no_card = "" if nearest or not any(gpus) else f"no InfiniBand or RoCE card near a GPU{idle}: left to NCCL"
    no_memory = f"no memory of NUMA node {listed(forbidden)} for this process" if forbidden else ""
    cards = tuple(port.name for port in ports) if nearest and len(ports) < len(machine.ports) else ()
    return BindingPlan(shares, cards, tuple(reason for reason in (problem, left_out, no_memory, no_card) if reason))


def _on_cpu(device: str | None) -> bool:
    return (device or "").partition(":")[0] == "cpu"


def gpus_of_ranks(visible: Sequence[Gpu], device: str | None, ranks: int) -> list[Gpu | None]:
    """Return the GPU that `volo.cluster.distributed.choose_device` will choose for each rank; None for none."""
    index = (device or "").partition(":")[2]
    indices = [int(index)] * ranks if index.isdigit() else list(range(ranks))
    return [visible[i] if i < len(visible) else None for i in indices]


def share_cpus(machine: Machine, mode: str, gpus: Sequence[Gpu | None]) -> Cpus:
    """Divide the CPUs that this process may use; the hardware threads of a core stay together."""
    nodes, untouched = [gpu.place.node if gpu else None for gpu in gpus], [()] * len(gpus)
    if mode == "auto" and not any(gpus):
        return Cpus(nodes, untouched, f"{_LEFT} (--bind cpu would divide the CPUs among the ranks)")
    if mode == "auto" and len(machine.cpus) < 2:
        return Cpus([None] * len(gpus), untouched, f"one NUMA node: {_LEFT}")
    # The parent process has other CPUs: this rank has been bound already (torchrun --numa-binding, srun --cpu-bind).
    if len(gpus) > 1 and machine.parent_allowed not in (None, machine.allowed):
        return Cpus(nodes, untouched, "CPUs stay as the launcher has given them to each rank")
    return _divide_nodes(machine, nodes) if any(gpus) else _divide_machine(machine, len(gpus))


def _divide_machine(machine: Machine, ranks: int) -> Cpus:
    node_of = {cpu: node for node, cpus in machine.cpus.items() for cpu in cpus}
    cores = [core for node in sorted(machine.cpus) for core in _cores(machine, node)]
    if len(cores) < ranks:
        return Cpus([None] * ranks, [()] * ranks, f"{len(cores)} cores in the CPU mask for {ranks} ranks: {_LEFT}")
    cpus = [_joined(part) for part in _divide(cores, ranks)]
    homes = [{node_of[cpu] for cpu in own} for own in cpus]
    return Cpus([home.pop() if len(home) == 1 else None for home in homes], cpus, "")


def _divide_nodes(machine: Machine, nodes: Sequence[int | None]) -> Cpus:
    cpus: list[tuple[int, ...]] = [()] * len(nodes)
    bound, reasons = list(nodes), []
    members: dict[int | None, list[int]] = defaultdict(list)
    for rank, node in enumerate(nodes):
        members[node].append(rank)
    for node, ranks in members.items():
        cores = [] if node is None else _cores(machine, node)
        if len(cores) >= len(ranks):
            for rank, part in zip(ranks, _divide(cores, len(ranks)), strict=True):
                cpus[rank] = _joined(part)
            continue
        for rank in ranks:
            bound[rank] = None
        who = f"local rank {listed(ranks)} not bound"
        has = f"NUMA node {node} has {len(cores)} cores in the CPU mask" if node is not None else "NUMA node unknown"
        reasons.append(f"{who}: {has}")
    return Cpus(bound, cpus, "; ".join(reasons))


def _cores(machine: Machine, node: int) -> list[tuple[int, ...]]:
    """Return the physical cores of a NUMA node that this process may use, each as its hardware threads."""
    cores: dict[int, list[int]] = defaultdict(list)
    for cpu in machine.cpus.get(node, ()):
        if cpu in machine.allowed:
            cores[machine.cores.get(cpu, cpu)].append(cpu)
    return [tuple(cores[core]) for core in sorted(cores)]


def _divide(items: list[T], parts: int) -> list[list[T]]:
    """Cut a list into parts of the same length, or the first ones longer by one."""
    length, longer = divmod(len(items), parts)
    ends = [length * i + min(i, longer) for i in range(parts + 1)]
    return [items[start:end] for start, end in pairwise(ends)]


def _joined(cores: list[tuple[int, ...]]) -> tuple[int, ...]:
    return tuple(sorted(cpu for core in cores for cpu in core))


def compute_ports(gpus: Sequence[Gpu], ports: Sequence[Port]) -> list[Port]:
    """Return the ports that NCCL may use: all but those that are clearly for something else.

    A port is not needed if each GPU has another that is faster and as near, or nearer and as fast; nearest is below the
    same host bridge, then in the same NUMA node. Ports that are as fast and as near as others stay, and so do those
    that are faster but farther. Of two networks that are equal in this, and can't be mixed, the one with more ports is
    taken.
    """

    def better(gpu: Gpu, one: Port, other: Port) -> bool:
        near, as_near = _nearness(gpu, one), _nearness(gpu, other)
        return one.rate >= other.rate and near <= as_near and (one.rate, near) != (other.rate, as_near)

    needed = [
        port for port in ports if not gpus or any(not any(better(g, other, port) for other in ports) for g in gpus)
    ]
    layers = Counter(port.layer for port in needed)
    if len({port.rate for port in needed}) > 1 or len(layers) < 2:
        return needed
    layer = max(layers, key=lambda name: (layers[name], name == "InfiniBand"))
    return [port for port in needed if port.layer == layer]


def _nearness(gpu: Gpu, port: Port) -> int:
    """Return 0 below the same host bridge, 1 in the same NUMA node, 2 elsewhere."""
    return max(distance(gpu.place, port.place)[0] - LEVELS.index("PHB"), 0)


def nearest_ports(gpus: Sequence[Gpu], ports: Sequence[Port]) -> dict[str, Near]:
    """Return one card for each GPU, by address; empty if none is near any of them.

    Each GPU takes the nearest card, of several the one that fewer GPUs have taken. A GPU with no card in its NUMA node
    shares one with others.
    """
    options = {gpu.address: _options(gpu, ports) for gpu in gpus}
    taken: dict[str, int] = defaultdict(int)
    found = {}
    # GPUs with the fewest options come first, or others might take the only card near them.
    for gpu in sorted(gpus, key=lambda gpu: len(options[gpu.address])):
        if near := options[gpu.address]:
            port = min(near, key=lambda port: taken[port.name])
            taken[port.name] += 1
            found[gpu.address] = Near(port, LEVELS[distance(gpu.place, port.place)[0]])
    used = [port for port in ports if port.name in taken]
    for gpu in gpus if used else ():
        if gpu.address not in found:
            port = min(used, key=lambda port: taken[port.name])
            taken[port.name] += 1
            found[gpu.address] = Near(port, LEVELS[_FAR])
    return found


def _options(gpu: Gpu, ports: Sequence[Port]) -> list[Port]:
    """Return the nearest ports; none if all are in other NUMA nodes."""
    ranked = [distance(gpu.place, port.place) for port in ports]
    best = min(ranked, default=None)
    if best is None or best[0] == _FAR:
        return []
    return [port for port, rank in zip(ports, ranked, strict=True) if rank == best]


def distance(a: PciPlace, b: PciPlace) -> tuple[int, int]:
    """Return the distance of two devices, smaller is nearer: index into LEVELS, and PCIe hops below a host bridge."""
    common = len(os.path.commonprefix([a.path, b.path]))
    below = len(a.path) - common, len(b.path) - common
    if common > 1:
        return (0 if max(below) <= 2 else 1), sum(below)
    if common == 1:
        return 2, 0
    return (3 if a.node is not None and a.node == b.node else _FAR), 0


def variables(
    plan: BindingPlan, local_rank: int, env: Mapping[str, str], root: str | Path = "/"
) -> tuple[dict[str, str], list[str]]:
    """Return the variables to add to the environment of a rank, and the reasons why others are left out."""
    wanted, reasons = {}, []
    near = plan.shares[local_rank].near
    if plan.cards:
        # All ranks need the same list, else NCCL's rings don't fit together.
        wanted["NCCL_IB_HCA"] = "=" + ",".join(plan.cards)
    if near is not None:
        wanted["UCX_NET_DEVICES"] = near.port.name
    _, _, size = ranks_from_environment(env)
    if size > len(plan.shares) and "MASTER_ADDR" in env:
        if interface := interface_to(env["MASTER_ADDR"], root):
            wanted["NCCL_SOCKET_IFNAME"] = f"={interface}"
            wanted["GLOO_SOCKET_IFNAME"] = interface
        else:
            reasons.append(f"MASTER_ADDR={env['MASTER_ADDR']} is no address of another machine, or there is no route")
    configured = nccl_conf(env, root)
    for name in [name for name in wanted if name in env or name in configured]:
        reasons.append(f"{name} stays as set in {configured[name] if name not in env else 'the environment'}")
        del wanted[name]
    return wanted, reasons
