"""The CPUs, the memory and the network card of each rank of a machine; every rank makes the same plan for all."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from volo.cluster.ranks import ranks_from_environment
from volo.cluster.topology import Device, Gpu, Machine, Port, interface_to, listed, read, visible_gpus

_MEMORY = {"auto": "preferred", "cpu": "off", "cpu+mem": "bind"}
# From near to far, in the words of `nvidia-smi topo -m`: same PCIe switch, several switches, same host bridge, same
# NUMA node, anywhere.
LEVELS = ("PIX", "PXB", "PHB", "NODE", "SYS")
_BRIDGE, _FAR = LEVELS.index("PHB"), LEVELS.index("SYS")
_LEFT = "CPUs and memory are left to the kernel"


@dataclass(frozen=True)
class Share:
    """CPUs, memory and network card of one rank.

    Attributes:
        gpu: None on the CPU.
        cpus: Empty where they are left unchanged.
        node: NUMA node of its memory; None where that is left unchanged.
        memory: Policy for the memory of `node`: "preferred", "bind" or "off".
        port: The card that the GPU uses.
    """

    gpu: Gpu | None = None
    cpus: tuple[int, ...] = ()
    node: int | None = None
    memory: str = "off"
    port: Port | None = None


@dataclass(frozen=True)
class BindingPlan:
    """The shares of a machine's ranks, by local rank; every rank makes the same plan.

    Attributes:
        cards: Cards of all GPUs of the machine, also of those that a rank doesn't see: NCCL's rings need the same
            list on all ranks. Empty where these are all active cards, or none is near a GPU.
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
        env: Gives CUDA_VISIBLE_DEVICES.
    """
    kind, _, index = (device or "").partition(":")
    visible, problem = ([], "") if kind == "cpu" else visible_gpus(machine.gpus, env)
    numbers = [int(index) if index.isdigit() else rank for rank in range(ranks)]  # as `choose_device` chooses
    gpus = [visible[number] if number < len(visible) else None for number in numbers]
    if visible and None in gpus:
        problem = f"{ranks} ranks, {len(visible)} GPUs"
    own, left_out = share_cpus(machine, mode, gpus)
    ports = compute_ports(machine.gpus, machine.ports) if any(gpus) else []
    nearest = nearest_ports(machine.gpus, ports)
    shares = []
    for gpu, home in zip(gpus, own, strict=True):
        memory, port = _MEMORY[mode] if home.node is not None else "off", nearest.get(gpu.name) if gpu else None
        shares.append(replace(home, gpu=gpu, memory=memory, port=port))
    idle = f" ({', '.join(machine.idle_ports)})" if machine.idle_ports else ""
    no_card = f"no InfiniBand or RoCE card near a GPU{idle}: left to NCCL" if any(gpus) and not nearest else ""
    cards = tuple(port.name for port in ports) if nearest and len(ports) < len(machine.ports) else ()
    return BindingPlan(tuple(shares), cards, tuple(filter(None, (problem, left_out, no_card))))


def share_cpus(machine: Machine, mode: str, gpus: Sequence[Gpu | None]) -> tuple[list[Share], str]:
    """Return CPUs and NUMA node of each rank, of the CPUs that this process may use; what is left out, and why."""
    homes = [gpu.node if gpu else None for gpu in gpus]
    shares = [Share() for _ in gpus]
    if mode == "auto" and not any(gpus):
        return shares, f"{_LEFT} (--bind cpu would divide the CPUs among the ranks)"
    if mode == "auto" and len(machine.cores) < 2:
        return shares, f"one NUMA node: {_LEFT}"
    # The parent process has other CPUs: this rank has been bound already (torchrun --numa-binding, srun --cpu-bind).
    if len(gpus) > 1 and machine.parent_allowed != machine.allowed:
        return [Share(node=home) for home in homes], "CPUs stay as the launcher has given them to each rank"
    usable = [
        (node, threads)
        for node, cores in machine.cores.items()
        for core in cores
        if (threads := [cpu for cpu in core if cpu in machine.allowed])
    ]
    reasons = []
    for home in dict.fromkeys(homes):
        ranks = [rank for rank, other in enumerate(homes) if other == home]
        cores = [core for core in usable if core[0] == home or not any(gpus)]
        if len(cores) < len(ranks):
            where = f"NUMA node {home}" if any(gpus) else "the machine"
            unknown = "NUMA node unknown" if any(gpus) and home is None else ""
            why = unknown or f"{where} has {len(cores)} cores in the CPU mask"
            reasons.append(f"local rank {listed(ranks)} not bound: {why}")
            continue
        for done, rank in enumerate(ranks):
            size = -(-len(cores) // (len(ranks) - done))  # the first get one more where they can't be equal
            part, cores = cores[:size], cores[size:]
            nodes = {node for node, _ in part}
            cpus = tuple(sorted(cpu for _, threads in part for cpu in threads))
            shares[rank] = Share(cpus=cpus, node=nodes.pop() if len(nodes) == 1 else None)
    return shares, "; ".join(reasons)


def compute_ports(gpus: Sequence[Gpu], ports: Sequence[Port]) -> list[Port]:
    """Return the ports that NCCL may use: the fastest ones, as far as no port is nearer to some GPU, of one network.

    What is below the same host bridge is equally near. The other ports are for storage or for the machine's own
    traffic; where the nearest are not the fastest, all stay. InfiniBand and Ethernet can't be mixed.
    """

    def bridges(gpu: Gpu, port: Port) -> int:
        return max(distance(gpu, port)[0], _BRIDGE)

    near = [port for port in ports if any(all(bridges(g, port) <= bridges(g, each) for each in ports) for g in gpus)]
    found = [port for port in near if all(port.rate >= each.rate for each in ports)]
    layers = Counter(port.layer for port in found)
    return [port for port in found if port.layer == max(layers, key=lambda it: (layers[it], it))] or list(ports)


def nearest_ports(gpus: Sequence[Gpu], ports: Sequence[Port]) -> dict[str, Port]:
    """Return one card for each GPU, by the GPU's name: the nearest, of several the one that fewer GPUs have taken.

    Empty if none is near any of them.
    """
    if all(distance(gpu, port)[0] == _FAR for gpu in gpus for port in ports):
        return {}
    found: dict[str, Port] = {}
    for gpu in gpus:
        taken = Counter(port.name for port in found.values())
        found[gpu.name] = min(ports, key=lambda port: (distance(gpu, port), taken[port.name]))  # noqa: B023
    return found


def distance(a: Device, b: Device) -> tuple[int, int]:
    """Return the distance of two devices, smaller is nearer: index into LEVELS, and PCIe hops below a host bridge."""
    common = len(os.path.commonprefix([a.path, b.path]))
    below = len(a.path) - common, len(b.path) - common
    if common > 1:
        return (0 if max(below) <= 2 else 1), sum(below)
    if common == 1:
        return _BRIDGE, 0
    return (3 if a.node is not None and a.node == b.node else _FAR), 0


def variables(
    plan: BindingPlan, local_rank: int, env: Mapping[str, str], root: str | Path = "/"
) -> tuple[dict[str, str], list[str]]:
    """Return the variables to add to the environment of a rank, and the reasons why others are left out."""
    wanted, reasons, share = {}, [], plan.shares[local_rank]
    if plan.cards:
        wanted["NCCL_IB_HCA"] = "=" + ",".join(plan.cards)
    if share.port:
        wanted["UCX_NET_DEVICES"] = share.port.name
    if ranks_from_environment(env).size > len(plan.shares) and "MASTER_ADDR" in env:
        if interface := interface_to(env["MASTER_ADDR"]):
            wanted |= {"NCCL_SOCKET_IFNAME": f"={interface}", "GLOO_SOCKET_IFNAME": interface}
        else:
            reasons.append(f"MASTER_ADDR={env['MASTER_ADDR']} is no address of another machine, or there is no route")
    own = {*env, *_nccl_conf(env, Path(root))}
    reasons += [f"{name} stays as you have set it" for name in wanted if name in own]
    added = {name: value for name, value in wanted.items() if name not in own}
    return added, reasons


def _nccl_conf(env: Mapping[str, str], root: Path) -> set[str]:
    """Return the names of the variables that NCCL's configuration files set."""
    own = env.get("NCCL_CONF_FILE") or f"{env.get('HOME', '')}/.nccl.conf"
    lines = [line for file in (own, "/etc/nccl.conf") for line in read(root / file.lstrip("/")).splitlines()]
    return {line.partition("=")[0].strip() for line in lines}
