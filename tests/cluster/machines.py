"""Trees of files that look like /sys and /proc of machines: what each has is written down, not read from any."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from volo.cluster.topology import numbers


class Tree:
    """A machine below `root`, to which parts are added."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.write("sys/devices/system/cpu/online", "0")

    def write(self, path: str, text: str) -> None:
        """Write a file as the kernel does, with a line's end."""
        file = self.root / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text + "\n")

    def link(self, path: str, to: str) -> None:
        """Make a relative link between two places below the root, as in sysfs."""
        link = self.root / path
        link.parent.mkdir(parents=True, exist_ok=True)
        link.symlink_to(Path(*[".."] * (len(Path(path).parts) - 1), to))

    def nodes(self, cpus: Mapping[int, str], second_threads: int = 0) -> None:
        """NUMA nodes with their CPUs; CPU n + `second_threads` is the second hardware thread of n's core."""
        for node, text in cpus.items():
            self.write(f"sys/devices/system/node/node{node}/cpulist", text)
            for cpu in numbers(text):
                core = cpu % second_threads if second_threads else cpu
                siblings = f"{core},{core + second_threads}" if second_threads else str(cpu)
                self.write(f"sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list", siblings)
        self.write("sys/devices/system/node/possible", "0-63")

    def process(self, allowed: str, memory: str, parent_allowed: str | None = None) -> None:
        """The process that looks, and the one that started it."""
        self.write(
            "proc/self/status", f"Name:\tpython\nPPid:\t7\nCpus_allowed_list:\t{allowed}\nMems_allowed_list:\t{memory}"
        )
        self.write("proc/7/status", f"PPid:\t1\nCpus_allowed_list:\t{parent_allowed or allowed}")

    def device(self, path: str, node: int, **files: str) -> str:
        """A PCI device below host bridge and bridges, such as "pci0000:20/0000:20:01.0/0000:21:00.0"; its address."""
        address = path.rpartition("/")[2]
        for name, text in {"numa_node": str(node), **files}.items():
            self.write(f"sys/devices/{path}/{name}", text)
        self.link(f"sys/bus/pci/devices/{address}", f"sys/devices/{path}")
        return address

    def gpu(self, path: str, node: int, kind: str = "0x20b0", uuid: str | None = None) -> None:
        """An NVIDIA GPU; with a UUID the driver shows it to this process."""
        address = self.device(path, node, vendor="0x10de", device=kind, **{"class": "0x030200"})
        if uuid is not None:
            self.write(f"proc/driver/nvidia/gpus/{address}/information", f"Model: \t A100\nGPU UUID: \t {uuid}")

    def card(
        self, name: str, path: str, node: int, state: str = "4: ACTIVE", rate: int = 200, layer: str = "InfiniBand"
    ) -> None:
        """An InfiniBand or RoCE card with one port."""
        self.device(path, node, vendor="0x15b3", device="0x101b", **{"class": "0x020700"})
        self.port(name, f"sys/devices/{path}", state, rate, layer)
        self.link(f"sys/devices/{path}/infiniband/{name}/device", f"sys/devices/{path}")

    def port(
        self, card: str, device: str, state: str = "4: ACTIVE", rate: int = 200, layer: str = "InfiniBand"
    ) -> None:
        """The port of a card, which RoCE in software has without hardware."""
        port = f"{device}/infiniband/{card}/ports/1"
        for name, text in {"state": state, "rate": f"{rate} Gb/sec (4X HDR)", "link_layer": layer}.items():
            self.write(f"{port}/{name}", text)
        self.link(f"sys/class/infiniband/{card}", f"{device}/infiniband/{card}")


def dgx_a100(root: Path) -> Tree:
    """Two sockets of 64 cores in four NUMA nodes each; GPUs and cards in pairs on nodes 3, 1, 7 and 5."""
    tree = Tree(root)
    tree.nodes({n: f"{16 * n}-{16 * n + 15},{128 + 16 * n}-{143 + 16 * n}" for n in range(8)}, second_threads=128)
    tree.process("0-255", "0-7")
    places = {3: (("07", "0f"), ("0c", "12")), 1: (("47", "4e"), ("4b", "54")), 7: (("87", "90"), ("8d", "94"))}
    places[5] = (("b7", "bd"), ("ba", "cc"))
    cards = iter((0, 1, 2, 3, 6, 7, 8, 9))
    for number, (node, (gpus, ports)) in enumerate(places.items()):
        top = f"pci0000:{number:02x}/0000:{number:02x}:01.1"  # a root port, and two layers of switches below it
        for i, (gpu, port) in enumerate(zip(gpus, ports, strict=True)):
            tree.gpu(f"{top}/0000:f{number}:00.0/0000:f{number}:1{i}.0/0000:{gpu}:00.0", node)
            tree.card(
                f"mlx5_{next(cards)}",
                f"{top}/0000:f{number}:00.0/0000:f{number}:2{i}.0/0000:e{i}:00.0/0000:{port}:00.0",
                node,
            )
    for i in (0, 1):
        tree.card(f"mlx5_{4 + i}", f"pci0000:60/0000:60:03.1/0000:61:00.{i}", 2)  # storage
    return tree


def dgx_h100(root: Path) -> Tree:
    """Two sockets of 56 cores, a node each; a card beside each GPU, two storage cards with two ports in all."""
    tree = Tree(root)
    tree.nodes({0: "0-55,112-167", 1: "56-111,168-223"}, second_threads=112)
    tree.process("0-223", "0-1")
    gpus = ("1b", "43", "52", "61", "9d", "c3", "d1", "df")
    cards = {0: "18", 3: "40", 4: "4f", 5: "5e", 6: "9a", 9: "c0", 10: "ce", 11: "dc"}
    for i, (gpu, (card, port)) in enumerate(zip(gpus, cards.items(), strict=True)):
        top = f"pci0000:{i + 1:02x}/0000:{i + 1:02x}:01.0/0000:a{i}:00.0"
        tree.gpu(
            f"{top}/0000:a{i}:01.0/0000:{gpu}:00.0",
            i // 4,
            "0x2330",
            f"GPU-{i}{i}{i}{i}0000-0000-0000-0000-00000000000{i}",
        )
        tree.card(f"mlx5_{card}", f"{top}/0000:a{i}:02.0/0000:{port}:00.0", i // 4, rate=400)
    for card, port, node in ((1, "29:00.0", 0), (2, "29:00.1", 0), (7, "aa:00.0", 1), (8, "aa:00.1", 1)):
        tree.card(f"mlx5_{card}", f"pci0000:b{node}/0000:b{node}:01.0/0000:{port}", node, rate=400)
    return tree


def dgx_2(root: Path) -> Tree:
    """Two sockets of 24 cores; 16 GPUs, each two of which share a switch and a card; Ethernet cards elsewhere."""
    tree = Tree(root)
    tree.nodes({0: "0-23,48-71", 1: "24-47,72-95"}, second_threads=48)
    tree.process("0-95", "0-1")
    gpus = ["34", "36", "39", "3b", "57", "59", "5c", "5e", "b7", "b9", "bc", "be", "e0", "e2", "e5", "e7"]
    ports = ["35", "3a", "58", "5d", "b8", "bd", "e1", "e6"]
    cards = (0, 1, 2, 3, 6, 7, 8, 9)
    for i, (card, port) in enumerate(zip(cards, ports, strict=True)):
        top = (
            f"pci0000:{i // 2:02x}/0000:{i // 2:02x}:00.0/0000:d{i // 2}:00.0/0000:d{i // 2}:0{i % 2}.0/0000:c{i}:00.0"
        )
        for j, gpu in enumerate(gpus[2 * i : 2 * i + 2]):
            tree.gpu(f"{top}/0000:c{i}:1{j}.0/0000:{gpu}:00.0", i // 4, "0x1db8")
        tree.card(f"mlx5_{card}", f"{top}/0000:c{i}:20.0/0000:{port}:00.0", i // 4, rate=100)
    for i in (0, 1):
        tree.card(f"mlx5_{4 + i}", f"pci0000:80/0000:80:02.0/0000:86:00.{i}", 0, rate=100, layer="Ethernet")
    return tree


def amd_nps4(root: Path) -> Tree:
    """One socket of 32 cores in four NUMA nodes, without second threads; a GPU in each, and one RoCE card in node 1."""
    tree = Tree(root)
    tree.nodes({n: f"{8 * n}-{8 * n + 7}" for n in range(4)})
    tree.process("0-31", "0-3")
    for bus, node in (("01", 3), ("21", 2), ("41", 1), ("61", 0)):
        tree.gpu(f"pci0000:{bus}/0000:{bus}:01.1/0000:{bus[0]}2:00.0", node, "0x20b5")
    tree.card("mlx5_0", "pci0000:41/0000:41:03.1/0000:48:00.0", 1, rate=100, layer="Ethernet")
    tree.card("mlx5_1", "pci0000:41/0000:41:03.1/0000:48:00.1", 1, "1: DOWN", rate=100, layer="Ethernet")
    return tree


def laptop(root: Path) -> Tree:
    """Four cores with two threads each, next to each other, and one GPU that knows no node."""
    tree = Tree(root)
    tree.nodes({0: "0-7"})
    for cpu in range(8):
        tree.write(
            f"sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list", f"{cpu // 2 * 2}-{cpu // 2 * 2 + 1}"
        )
    tree.process("0-7", "0")
    tree.gpu("pci0000:00/0000:00:01.0/0000:01:00.0", -1, "0x2820")
    return tree


def virtual(root: Path) -> Tree:
    """A virtual machine of two nodes, whose two GPUs hang on one bridge without a node; soft RoCE on a virtio card."""
    tree = Tree(root)
    tree.nodes({0: "0-3", 1: "4-7"})
    tree.process("0-7", "0-1")
    for slot in (5, 6):
        tree.gpu(f"pci0000:00/0000:00:0{slot}.0", -1)
    tree.device("pci0000:00/0000:00:03.0", -1, vendor="0x1af4", device="0x1000", **{"class": "0x020000"})
    tree.write("sys/devices/pci0000:00/0000:00:03.0/virtio0/net/eth0/mtu", "1500")
    tree.link(
        "sys/devices/pci0000:00/0000:00:03.0/virtio0/net/eth0/device", "sys/devices/pci0000:00/0000:00:03.0/virtio0"
    )
    tree.link("sys/class/net/eth0", "sys/devices/pci0000:00/0000:00:03.0/virtio0/net/eth0")
    tree.port("rxe0", "sys/devices/virtual", rate=10, layer="Ethernet")
    tree.write("sys/devices/virtual/infiniband/rxe0/ports/1/gid_attrs/ndevs/0", "eth0")
    return tree
