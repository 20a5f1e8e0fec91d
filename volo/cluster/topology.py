"""The parts of a machine, read from sysfs and procfs: CPUs, NUMA nodes, GPUs, InfiniBand and RoCE cards, routes.

Only files below `root` are read, so that a tree saved on another machine, or a made-up one, can be examined. Files that
are missing raise nothing: every function works on every machine. Needs no CUDA, no ibverbs and no Python package.
"""

from __future__ import annotations

import ipaddress
import os
import re
import socket
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from volo.cluster.ranks import own_address

_PCI = re.compile(r"pci[0-9a-f]{4,}:[0-9a-f]{2}|[0-9a-f]{4,}:[0-9a-f]{2}:[0-9a-f]{2}\.[0-9a-f]")
_NVIDIA = "0x10de"
_GPU_CLASSES = ("0x0300", "0x0302")  # with a display, without one
_UP, _REJECT = 0x1, 0x200  # flags of a route


@dataclass(frozen=True)
class PciPlace:
    """The place of a device in the machine.

    Attributes:
        path: From the host bridge down to the device, such as `("pci0000:20", "0000:20:01.0", "0000:21:00.0")`.
        node: NUMA node; None where it is unknown.
    """

    path: tuple[str, ...]
    node: int | None


@dataclass(frozen=True)
class Gpu:
    """An NVIDIA GPU.

    Attributes:
        address: PCI address, such as `0000:07:00.0`.
        kind: PCI device number, the same for GPUs of one kind.
        uuid: Empty where the driver doesn't report it.
        shown: Whether the driver shows it to this process; a container may get only some of the machine's.
    """

    address: str
    place: PciPlace
    kind: str = ""
    uuid: str = ""
    shown: bool = True


@dataclass(frozen=True)
class Port:
    """An active port of an InfiniBand or RoCE card.

    Attributes:
        name: Card and port in the form of NCCL and UCX, such as `mlx5_0:1`.
        rate: Gb/s.
        layer: "InfiniBand", or "Ethernet" with RoCE.
    """

    name: str
    place: PciPlace
    rate: float = 0.0
    layer: str = "InfiniBand"


@dataclass(frozen=True)
class Machine:
    """A machine as one process sees it.

    Attributes:
        cpus: NUMA node -> its CPUs, ascending; nodes without CPUs are left out.
        cores: CPU -> the lowest CPU of the same physical core.
        allowed: The CPUs that this process may use: its affinity mask, which is inside its cgroup.
        parent_allowed: The same for its parent process; None where that can't be read.
        memory_nodes: NUMA nodes from which this process may take memory.
        gpus: GPUs in the order of their addresses.
        ports: Active ports in the order of their names.
        idle_ports: Ports that can't be used, each with the reason.
    """

    cpus: Mapping[int, tuple[int, ...]]
    cores: Mapping[int, int]
    allowed: frozenset[int]
    parent_allowed: frozenset[int] | None = None
    memory_nodes: frozenset[int] = frozenset()
    gpus: tuple[Gpu, ...] = ()
    ports: tuple[Port, ...] = ()
    idle_ports: tuple[str, ...] = ()


def read_machine(root: str | Path = "/") -> Machine:
    """Read the machine whose /sys and /proc are below `root`."""
    root = Path(root)
    status = _status(root / "proc/self/status")
    cpus = _node_cpus(root)
    everything = frozenset(cpu for node in cpus.values() for cpu in node)
    ports, idle = _ports(root, cpus)
    parent = _status(root / "proc" / status.get("PPid", "0") / "status").get("Cpus_allowed_list")
    return Machine(
        cpus=cpus,
        cores={cpu: _core(root, cpu) for cpu in everything},
        allowed=frozenset(numbers(status["Cpus_allowed_list"])) if "Cpus_allowed_list" in status else everything,
        parent_allowed=None if parent is None else frozenset(numbers(parent)),
        memory_nodes=frozenset(numbers(status["Mems_allowed_list"]) if "Mems_allowed_list" in status else cpus),
        gpus=_gpus(root, cpus),
        ports=ports,
        idle_ports=idle,
    )


def numbers(text: str) -> tuple[int, ...]:
    """Return the numbers of a kernel list: "0-2,8" is (0, 1, 2, 8)."""
    ends = [part.partition("-") for part in text.strip().split(",") if part.strip()]
    return tuple(number for first, _, last in ends for number in range(int(first), int(last or first) + 1))


def listed(values: Iterable[int]) -> str:
    """Return the kernel's list of some numbers: (0, 1, 2, 8) is "0-2,8"."""
    runs: list[list[int]] = []
    for value in sorted(values):
        if runs and value == runs[-1][1] + 1:
            runs[-1][1] = value
        else:
            runs.append([value, value])
    return ",".join(str(first) if first == last else f"{first}-{last}" for first, last in runs)


def visible_gpus(gpus: Iterable[Gpu], env: Mapping[str, str]) -> tuple[list[Gpu], str]:
    """Return the GPUs in the order in which CUDA numbers them for a process, and the reason if there is none or if the
    order is unknown.

    `CUDA_VISIBLE_DEVICES` is read as CUDA reads it: numbers or beginnings of UUIDs up to the first that doesn't exist,
    and nothing at all if a GPU is named twice.
    """
    shown = [gpu for gpu in gpus if gpu.shown]
    chosen = env.get("CUDA_VISIBLE_DEVICES")
    if not shown:
        return [], "no NVIDIA GPU in /sys"
    if chosen is not None and chosen.startswith("MIG-"):
        return [], "CUDA_VISIBLE_DEVICES names parts of GPUs (MIG), which sysfs doesn't know"
    by_number = chosen is None or not chosen.startswith("GPU-")
    if by_number and len({gpu.kind for gpu in shown}) > 1 and env.get("CUDA_DEVICE_ORDER") != "PCI_BUS_ID":
        return [], "GPUs of several kinds, which CUDA orders by speed: set CUDA_DEVICE_ORDER=PCI_BUS_ID"
    if chosen is None:
        return shown, ""
    visible = [shown[index] for index in _chosen(chosen, [gpu.uuid for gpu in shown])]
    return visible, "" if visible else f"CUDA_VISIBLE_DEVICES={chosen} leaves no GPU"


def _chosen(text: str, uuids: list[str]) -> list[int]:
    found: list[int] = []
    for item in text.split(","):
        index = _index(item.strip(), uuids)
        if index in found:
            return []
        if index < 0:
            break
        found.append(index)
    there = [index < len(uuids) for index in found]
    return found[: there.index(False)] if False in there else found


def _index(item: str, uuids: list[str]) -> int:
    """Return the number of the GPU that `item` names, -1 for none or several."""
    if item.startswith("GPU-"):
        fitting = [index for index, uuid in enumerate(uuids) if uuid.startswith(item)]
        return fitting[0] if len(fitting) == 1 else -1
    number = re.match(r"\+?\d+", item)  # CUDA reads "1st" as 1
    return int(number[0]) if number else -1


def interface_to(address: str, root: str | Path = "/") -> str | None:
    """Return the network interface that leads to a host, which may be this one; None for loopback or without a route.

    Args:
        address: IPv4, IPv6, or a name that stands for one.
        root: Its main routing table is read; for IPv6 its interfaces.
    """
    try:
        target = ipaddress.IPv4Address(socket.gethostbyname(address))
    except (OSError, UnicodeError):
        return _ipv6_interface_to(address, root)
    lines = (_read(Path(root, "proc/net/route")) or "").splitlines()[1:]
    fitting = [
        (mask, -metric, name) for name, network, mask, metric in map(_route, lines) if int(target) & mask == network
    ]
    return None if target.is_loopback or not fitting else max(fitting)[2]


def _ipv6_interface_to(address: str, root: str | Path) -> str | None:
    try:
        own = int(ipaddress.IPv6Address(own_address(address)))
    except (OSError, UnicodeError, ValueError):
        return None
    lines = (_read(Path(root, "proc/net/if_inet6")) or "").splitlines()
    names = [name for digits, *_, name in map(str.split, lines) if int(digits, 16) == own]
    return names[0] if names and names[0] != "lo" else None


def _route(line: str) -> tuple[str, int, int, int]:
    """Return interface, network, mask and metric of a line of /proc/net/route; network -1, which fits no address, for a
    route that is not in use."""
    name, network, _, flags, _, _, metric, mask, *_ = line.split()
    used = int(flags, 16) & (_UP | _REJECT) == _UP
    return name, _network_order(network) if used else -1, _network_order(mask), int(metric)


def _network_order(digits: str) -> int:
    """Convert an address, which the kernel prints as one number in the machine's own byte order."""
    return int.from_bytes(int(digits, 16).to_bytes(4, sys.byteorder), "big")


def nccl_conf(env: Mapping[str, str], root: str | Path = "/") -> dict[str, str]:
    """Return every variable in NCCL's configuration files with the file that sets it."""
    own = env.get("NCCL_CONF_FILE") or f"{env.get('HOME', '')}/.nccl.conf"
    found = {}
    for file in (own, "/etc/nccl.conf"):
        for line in (_read(Path(root, file.lstrip("/"))) or "").splitlines():
            name, equals, _ = line.partition("=")
            if equals and not line.startswith("#"):
                found[name.strip()] = file
    return found


def _read(path: Path) -> str | None:
    try:
        # tar pads saved files of sysfs with zeros, because their reported size is 4096 bytes.
        return path.read_text(errors="replace").strip("\0 \n")
    except OSError:
        return None


def _entries(path: Path) -> list[Path]:
    """Return the entries of a directory in natural order; none if there is no such directory."""
    try:
        return sorted(path.iterdir(), key=lambda entry: [int(i) if i.isdigit() else i for i in _parts(entry.name)])
    except OSError:
        return []


def _parts(name: str) -> list[str]:
    return re.split(r"(\d+)", name)


def _status(path: Path) -> dict[str, str]:
    lines = (_read(path) or "").splitlines()
    return {key: value.strip() for key, _, value in (line.partition(":") for line in lines)}


def _node_cpus(root: Path) -> dict[int, tuple[int, ...]]:
    """Return the CPUs by NUMA node; all in node 0 where the kernel knows no nodes."""
    found = {}
    for entry in _entries(root / "sys/devices/system/node"):
        if re.fullmatch(r"node\d+", entry.name) and (cpus := numbers(_read(entry / "cpulist") or "")):
            found[int(entry.name[4:])] = cpus
    return found or {0: numbers(_read(root / "sys/devices/system/cpu/online") or "")}


def _core(root: Path, cpu: int) -> int:
    siblings = _read(root / f"sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list")
    return min(numbers(siblings)) if siblings else cpu


def _place(device: Path, nodes: Mapping[int, tuple[int, ...]]) -> PciPlace:
    """Return the place of the device with this directory in sysfs, or link to it."""
    real = Path(os.path.realpath(device))
    path = tuple(part for part in real.parts if _PCI.fullmatch(part))
    for directory in (real, *real.parents):  # a virtio device has no node of its own
        node = _read(directory / "numa_node")
        if node is not None:
            break
    if node is None or not node.isdecimal():  # -1, or empty
        return PciPlace(path, next(iter(nodes)) if len(nodes) == 1 else None)
    return PciPlace(path, int(node))


def _gpus(root: Path, nodes: Mapping[int, tuple[int, ...]]) -> tuple[Gpu, ...]:
    shown = root / "proc/driver/nvidia/gpus"
    found = []
    for device in _entries(root / "sys/bus/pci/devices"):
        kind = _read(device / "class") or ""
        if _read(device / "vendor") != _NVIDIA or not kind.startswith(_GPU_CLASSES):
            continue
        driver = device / "driver"
        if driver.is_symlink() and driver.resolve().name != "nvidia":
            continue  # passed on to a virtual machine
        told = _status(shown / device.name / "information")
        uuid = told.get("GPU UUID", "")
        visible = not shown.is_dir() or (shown / device.name).is_dir() and _opens(root, told.get("Device Minor"))
        found.append(Gpu(device.name, _place(device, nodes), _read(device / "device") or "", uuid, visible))
    return tuple(sorted(found, key=lambda gpu: [int(part, 16) for part in re.split("[:.]", gpu.address)]))


def _opens(root: Path, minor: str | None) -> bool:
    """Return whether this process may open a GPU's device file. The driver shows a Slurm job all GPUs of the machine;
    CUDA counts those that the job's cgroup lets it open."""
    file = root / f"dev/nvidia{minor}"
    return minor is None or not (root / "dev").is_dir() or os.access(file, os.R_OK | os.W_OK)


def _ports(root: Path, nodes: Mapping[int, tuple[int, ...]]) -> tuple[tuple[Port, ...], tuple[str, ...]]:
    """Return the ports that can be used, and the others with the reason."""
    found, idle = [], []
    locked = _without_device_file(root)
    for card in _entries(root / "sys/class/infiniband"):
        for port in _entries(card / "ports"):
            name = f"{card.name}:{port.name}"
            state = (_read(port / "state") or "unknown").rpartition(" ")[2]
            if state != "ACTIVE" or card.name in locked:
                idle.append(f"{name} is {state if state != 'ACTIVE' else 'not passed into this container'}")
                continue
            rate, layer = (_read(port / "rate") or "0").split()[0], _read(port / "link_layer") or "InfiniBand"
            found.append(Port(name, _place(_hardware(root, card, port), nodes), float(rate), layer))
    return tuple(found), tuple(idle)


def _hardware(root: Path, card: Path, port: Path) -> Path:
    """Return the device of a card; for RoCE in software, which has none, that of its network interface."""
    interface = _read(port / "gid_attrs/ndevs/0") or _read(card / "parent")
    if (card / "device").exists() or not interface:
        return card / "device"
    return root / "sys/class/net" / interface / "device"


def _without_device_file(root: Path) -> set[str]:
    """Return cards that sysfs shows, as it does in every container, but that can't be opened here."""
    if not (root / "dev").is_dir():  # a saved tree
        return set()
    verbs = _entries(root / "sys/class/infiniband_verbs")
    return {_read(each / "ibdev") or "" for each in verbs if not (root / "dev/infiniband" / each.name).exists()}
