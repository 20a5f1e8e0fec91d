"""Made-up machines as tables, and the files of /sys, /proc and /dev that stand for one; no such machine was read.

A row is a NUMA node with its CPUs, behind a comma the second threads of their cores; or a device, its node and its way
down from the host bridge: a bridge is `bus:slot`, the device `bus`. Of a card follow Gb/s (200), link layer
(InfiniBand) and state (ACTIVE). What a GPU's rank gets stands behind the arrow: CPUs, card and distance.
"""

from pathlib import Path

from volo.cluster.topology import listed, numbers

# Two sockets of 64 cores in four NUMA nodes each; GPUs and cards in pairs below two layers of switches; 4, 5: storage.
_NODES = "\n".join(f"node {i} {16 * i}-{16 * i + 15},{128 + 16 * i}-{143 + 16 * i}" for i in range(8))
DGX_A100 = f"""{_NODES}
gpu    3 00/00:01/f0:00/f0:10/07 -> 48-55,176-183 mlx5_0:1 PXB
gpu    3 00/00:01/f0:00/f0:11/0f -> 56-63,184-191 mlx5_1:1 PXB
gpu    1 01/01:01/f1:00/f1:10/47 -> 16-23,144-151 mlx5_2:1 PXB
gpu    1 01/01:01/f1:00/f1:11/4e -> 24-31,152-159 mlx5_3:1 PXB
gpu    7 02/02:01/f2:00/f2:10/87 -> 112-119,240-247 mlx5_6:1 PXB
gpu    7 02/02:01/f2:00/f2:11/90 -> 120-127,248-255 mlx5_7:1 PXB
gpu    5 03/03:01/f3:00/f3:10/b7 -> 80-87,208-215 mlx5_8:1 PXB
gpu    5 03/03:01/f3:00/f3:11/bd -> 88-95,216-223 mlx5_9:1 PXB
mlx5_0 3 00/00:01/f0:00/f0:20/e0:00/0c
mlx5_1 3 00/00:01/f0:00/f0:21/e1:00/12
mlx5_2 1 01/01:01/f1:00/f1:20/e2:00/4b
mlx5_3 1 01/01:01/f1:00/f1:21/e3:00/54
mlx5_4 2 60/60:03/61
mlx5_5 2 60/60:03/62
mlx5_6 7 02/02:01/f2:00/f2:20/e4:00/8d
mlx5_7 7 02/02:01/f2:00/f2:21/e5:00/94
mlx5_8 5 03/03:01/f3:00/f3:20/e6:00/ba
mlx5_9 5 03/03:01/f3:00/f3:21/e7:00/cc
"""
# One socket of 32 cores in four NUMA nodes, without second threads; a card at every other distance from a GPU.
AMD_NPS4 = """
node 0 0-7
node 1 8-15
node 2 16-23
node 3 24-31
gpu    3 01/01:01/02 -> 24-31 mlx5_0:1 SYS
gpu    2 21/21:01/22 -> 16-23 mlx5_2:1 NODE
gpu    1 41/41:01/42 -> 8-15 mlx5_0:1 PHB
gpu    0 61/61:01/a0:00/a0:01/62 -> 0-7 mlx5_1:1 PIX
mlx5_0 1 41/41:03/48 100 Ethernet
mlx5_1 0 61/61:01/a0:00/a0:02/63 100 Ethernet
mlx5_2 2 22/22:01/23 100 Ethernet
mlx5_3 1 41/41:03/49 100 Ethernet DOWN
"""
LAPTOP = """
node 0 0-3,4-7
gpu    -1 00/00:01/01
"""


def write(root: Path, path: str, text: str) -> None:
    """Write a file as the kernel does, with a line's end."""
    (root / path).parent.mkdir(parents=True, exist_ok=True)
    (root / path).write_text(text + "\n")


def device(root: Path, node: str, way: str, vendor: str, kind: str) -> Path:
    """Write a PCI device of a class, such as "0x030200", a 3D controller; return its directory."""
    host, *bridges, bus = way.split("/")
    folder = root.joinpath("sys/devices", f"pci0000:{host}", *(f"0000:{it}.0" for it in bridges), f"0000:{bus}:00.0")
    for name, text in {"numa_node": node, "vendor": vendor, "class": kind}.items():
        write(folder, name, text)
    (root / "sys/bus/pci/devices").mkdir(parents=True, exist_ok=True)
    (root / "sys/bus/pci/devices" / folder.name).symlink_to(folder)
    return folder


def process(root: Path, allowed: str, parent_allowed: str = "") -> None:
    """Write the CPUs that the process that looks may use, and those of the one that started it."""
    write(root, "proc/self/status", f"PPid:\t7\nCpus_allowed_list:\t{allowed}")
    write(root, "proc/7/status", f"PPid:\t1\nCpus_allowed_list:\t{parent_allowed or allowed}")


def build(root: Path, machine: str, *more: str) -> Path:
    """Write the files of a machine, and of more rows; this process may use all of it. Return `root`."""
    rows = [row.partition("->")[0].split() for row in (*machine.strip().splitlines(), *more)]
    process(root, ",".join(row[2] for row in rows if row[0] == "node"))
    for what, node, place, *port in rows:
        if what == "node":
            write(root, f"sys/devices/system/node/node{node}/cpulist", place)
            for core in zip(*map(numbers, place.split(",")), strict=True):
                for cpu in core:
                    write(root, f"sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list", listed(core))
        elif what == "gpu":
            driver, minor = root / "proc/driver/nvidia/gpus", len(list(root.glob("dev/nvidia*")))
            information = f"Model: \t A100\nGPU UUID: \t GPU-{minor}{minor}{minor}{minor}-00\nDevice Minor: \t {minor}"
            write(driver / device(root, node, place, "0x10de", "0x030200").name, "information", information)
            write(root, f"dev/nvidia{minor}", "")
        else:
            rate, layer, state = [*port, *("200", "InfiniBand", "ACTIVE")[len(port) :]]
            card = root / "sys/class/infiniband" / what
            for name, text in {"state": f"4: {state}", "rate": f"{rate} Gb/sec (4X)", "link_layer": layer}.items():
                write(card, f"ports/1/{name}", text)
            (card / "device").symlink_to(device(root, node, place, "0x15b3", "0x020700"))
    return root
