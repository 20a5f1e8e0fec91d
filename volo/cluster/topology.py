"""What this machine has: CPUs, GPUs and network cards, and how near they are to each other.

CPUs by NUMA node, GPUs, and ports of InfiniBand and RoCE cards are read from the files of /sys and /proc below `root`,
so that a test can make up a machine. What is missing there is left out. This needs neither CUDA, ibverbs nor torch.
"""

import os
import re
import socket
import struct
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path

Cores = tuple[tuple[int, ...], ...]
_PCI = re.compile(r"(pci)?[0-9a-f]{4,}:[0-9a-f:.]+")
_NVIDIA = "0x10de"
_GPU_CLASSES = ("0x0300", "0x0302")  # with a display, without one
_SIOCGIFADDR = 0x8915


@dataclass(frozen=True)
class Device:
    """A device in the machine."""

    name: str  # a GPU's PCI address, such as 0000:07:00.0; a port as NCCL and UCX name it, such as mlx5_0:1
    path: tuple[str, ...]  # from the host bridge to the device: ("pci0000:20", "0000:20:01.0", "0000:21:00.0")
    node: int | None  # NUMA node; None if unknown


@dataclass(frozen=True)
class Gpu(Device):
    """An NVIDIA GPU."""

    uuid: str = ""  # empty if the driver doesn't report it
    usable: bool = True  # whether this process may use it; a container or job may get only some of the machine's GPUs


@dataclass(frozen=True)
class Port(Device):
    """An active port of an InfiniBand or RoCE card."""

    rate: float = 0.0  # Gb/s
    layer: str = "InfiniBand"  # "Ethernet" for RoCE


@dataclass(frozen=True)
class Machine:
    """A machine as one process sees it."""

    cores: Mapping[int, Cores]  # by NUMA node: the physical cores, each as the numbers of its logical CPUs
    allowed: frozenset[int]  # the CPUs that this process may use: its affinity mask, which lies within its cgroup
    parent_allowed: frozenset[int]  # the CPUs that its parent process may use
    gpus: tuple[Gpu, ...] = ()  # sorted by address
    ports: tuple[Port, ...] = ()  # active ports, sorted by name
    idle_ports: tuple[str, ...] = ()  # ports that can't be used, each with the reason, such as "mlx5_0:1 is DOWN"


def read_machine(root: str | Path = "/") -> Machine:
    """Return the machine whose /sys and /proc are below `root`."""
    root = Path(root)
    cores = _node_cores(root)
    process = _fields(root / "proc/self/status")
    parent = _fields(root / "proc" / process.get("PPid", "0") / "status")
    allowed = process.get("Cpus_allowed_list", listed(cpu for node in cores.values() for core in node for cpu in core))
    parent_allowed = frozenset(numbers(parent.get("Cpus_allowed_list", allowed)))
    return Machine(cores, frozenset(numbers(allowed)), parent_allowed, _gpus(root, [*cores]), *_ports(root, [*cores]))


def numbers(text: str) -> tuple[int, ...]:
    """Return the numbers in a list as the kernel writes it: "0-2,8" is (0, 1, 2, 8)."""
    ends = [part.partition("-") for part in text.split(",") if part]
    return tuple(number for first, _, last in ends for number in range(int(first), int(last or first) + 1))


def listed(values: Iterable[int]) -> str:
    """Return numbers as a list as the kernel writes it: (0, 1, 2, 8) is "0-2,8"."""
    ranges = []
    for _, run in groupby(enumerate(sorted(values)), lambda pair: pair[1] - pair[0]):
        members = [value for _, value in run]
        ranges.append(f"{members[0]}-{members[-1]}" if len(members) > 1 else str(members[0]))
    return ",".join(ranges)


def visible_gpus(gpus: Iterable[Gpu], env: Mapping[str, str]) -> tuple[list[Gpu], str]:
    """Return the GPUs that a process sees, in CUDA's order, and the reason if there are none.

    `CUDA_VISIBLE_DEVICES` is read as CUDA reads it: numbers or prefixes of UUIDs, up to the first that doesn't exist.
    """
    usable = [gpu for gpu in gpus if gpu.usable]
    setting = env.get("CUDA_VISIBLE_DEVICES")
    if not usable:
        return [], "no NVIDIA GPU in /sys"
    if setting is None:
        return usable, ""
    visible = []
    for item in map(str.strip, setting.split(",")):
        by_uuid = [gpu for gpu in usable if item.startswith("GPU-") and gpu.uuid.startswith(item)]
        matches = by_uuid or [gpu for i, gpu in enumerate(usable) if item == str(i)]
        if len(matches) != 1:
            break
        visible += matches
    return visible, "" if visible else f"CUDA_VISIBLE_DEVICES={setting} names no whole GPU that /sys shows"


def own_address(host: str) -> str | None:
    """Return this machine's address on the route to a host, which is a name, an IPv4 or an IPv6 address; None without a
    route."""
    try:
        family, *_, where = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect(where)  # UDP: this sends nothing
            return str(probe.getsockname()[0]).partition("%")[0]
    except (OSError, UnicodeError):
        return None


def interface_to(host: str) -> str | None:
    """Return the network interface on the route to a host, which may be this one. None if it is loopback, if there is
    no route, and on systems other than Linux."""
    address = own_address(host)
    names = [name for name, of_interface in _addresses() if of_interface == address and name != "lo"] if address else []
    return names[0] if names else None


def _addresses() -> Iterator[tuple[str, str]]:
    """Yield (interface, address) for the first IPv4 address of each interface and all IPv6 addresses."""
    import fcntl  # Windows doesn't have it

    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            with suppress(OSError):  # the interface has no IPv4 address
                filled = fcntl.ioctl(probe, _SIOCGIFADDR, struct.pack("256s", name.encode()))
                yield name, socket.inet_ntoa(filled[20:24])
    for digits, *_, name in map(str.split, read(Path("/proc/net/if_inet6")).splitlines()):
        yield name, socket.inet_ntop(socket.AF_INET6, bytes.fromhex(digits))


def read(path: Path) -> str:
    """Return the text of a file; empty if it can't be read."""
    try:
        return path.read_text(errors="replace").strip()
    except OSError:
        return ""


def _fields(path: Path) -> dict[str, str]:
    """Return the lines "name: value" of a file of /proc as a dict."""
    return {name: value.strip() for name, _, value in (line.partition(":") for line in read(path).splitlines())}


def _entries(folder: Path, pattern: str = "*") -> list[Path]:
    """Return the entries of a folder, with mlx5_2 before mlx5_10; empty if there is no such folder."""
    return sorted(folder.glob(pattern), key=lambda entry: (len(str(entry)), entry))


def _node_cores(root: Path) -> dict[int, Cores]:
    """Return the physical cores by NUMA node; all are in node 0 if the kernel reports no nodes."""
    system = root / "sys/devices/system"
    lists = {int(node.name[4:]): node / "cpulist" for node in _entries(system / "node", "node[0-9]*")}
    cores = {}
    for node, file in (lists or {0: system / "cpu/online"}).items():
        siblings = {cpu: read(system / f"cpu/cpu{cpu}/topology/thread_siblings_list") for cpu in numbers(read(file))}
        if siblings:
            cores[node] = tuple(sorted({numbers(text) or (cpu,) for cpu, text in siblings.items()}))
    return cores


def _place(device: Path, nodes: Sequence[int]) -> tuple[tuple[str, ...], int | None]:
    """Return the PCI path and the NUMA node of a device, given its directory in sysfs or a link to it."""
    real = device.resolve()
    node = read(real / "numa_node")
    only = nodes[0] if len(nodes) == 1 else None
    return tuple(filter(_PCI.fullmatch, real.parts)), int(node) if node.isdecimal() else only  # -1 means unknown


def _gpus(root: Path, nodes: Sequence[int]) -> tuple[Gpu, ...]:
    """Return the machine's GPUs. The driver shows a container only its own GPUs, but shows a Slurm job all of them;
    CUDA counts only those whose device file the job's cgroup lets it open."""
    driver = root / "proc/driver/nvidia/gpus"
    gpus = []
    for device in _entries(root / "sys/bus/pci/devices"):
        if read(device / "vendor") == _NVIDIA and read(device / "class").startswith(_GPU_CLASSES):
            information = _fields(driver / device.name / "information")
            file = root / f"dev/nvidia{information.get('Device Minor')}"
            usable = not driver.is_dir() or os.access(file, os.R_OK | os.W_OK)
            gpus.append(Gpu(device.name, *_place(device, nodes), information.get("GPU UUID", ""), usable))
    return tuple(gpus)


def _ports(root: Path, nodes: Sequence[int]) -> tuple[tuple[Port, ...], tuple[str, ...]]:
    """Return the ports that can be used, and the names of the others, each with the reason.

    Every container sees all cards in sysfs, but can't open those whose device file is missing.
    """
    active = []
    idle = []
    verbs = _entries(root / "sys/class/infiniband_verbs")
    locked = {read(card / "ibdev") for card in verbs if not (root / "dev/infiniband" / card.name).exists()}
    for port in _entries(root / "sys/class/infiniband", "*/ports/*"):
        card = port.parents[1]
        name = f"{card.name}:{port.name}"
        state = read(port / "state").rpartition(" ")[2] or "unknown"
        if state != "ACTIVE" or card.name in locked:
            idle.append(f"{name} is {state if state != 'ACTIVE' else 'not passed into this container'}")
            continue
        rate = (read(port / "rate") or "0").split()[0]
        layer = read(port / "link_layer") or "InfiniBand"
        active.append(Port(name, *_place(card / "device", nodes), float(rate), layer))
    return tuple(active), tuple(idle)
