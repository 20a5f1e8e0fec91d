"""Machines and published throughputs for `benchmark.py scaling`; no torch, so that `--help` answers at once."""

from __future__ import annotations

from typing import NamedTuple

# The share of nominal bandwidth that all-reduces of large messages usually reach with NCCL.
LINK_EFFICIENCY = 0.8


class MachineRow(NamedTuple):
    """GB/s of one GPU in one direction; cards of a node and Gbit/s of each; microseconds of a message within and
    between nodes (usual values for NCCL; no data sheet has them)."""

    gpus: int
    gpu_gbytes: float
    cards: int
    card_gbits: float
    intra_us: float
    inter_us: float


class PublishedRuns(NamedTuple):
    """Published images/s by number of GPUs. Computing time is taken from `known` = (GPUs, images/s)."""

    name: str
    model: str
    batch_size: int  # per GPU; assumed, none of the tables tells it
    machine: str
    gpus_per_node: int
    known: tuple[int, float]
    throughputs: dict[int, float]


# fmt: off
MACHINES = {
    #                               GPUs  GB/s  cards Gb/s  us   us
    "dgx-1-v100":         MachineRow(   8,  150,    4,  100, 3.0,  6.0),  # NVLink 2 (6 x 25 GB/s), EDR
    "dgx-2":              MachineRow(  16,  150,    8,  100, 3.0,  6.0),  # NVLink 2 and NVSwitch, EDR
    "dgx-a100":           MachineRow(   8,  300,    8,  200, 3.0,  6.0),  # NVLink 3 (12 x 25 GB/s), HDR
    "dgx-h100":           MachineRow(   8,  450,    8,  400, 3.0,  6.0),  # NVLink 4 (18 x 25 GB/s), NDR
    "pcie-ethernet-25g":  MachineRow(   8,   16,    1,   25, 5.0, 30.0),  # PCIe 3.0 x16, one card, TCP
    "pcie-ethernet-10g":  MachineRow(   8,   16,    1,   10, 5.0, 30.0),
}
# fmt: on

_VIT_B = ("vit_base_patch16_224", 64, "dgx-1-v100", 4, (16, 1507))  # V100s of Azure, 4 a node
PUBLISHED = (
    PublishedRuns("VOLO-D5, DGX A100", "volo_d5", 44, "dgx-a100", 8, (8, 500), {8: 500, 40: 2100}),
    PublishedRuns("ViT-B, V100, InfiniBand", *_VIT_B, {16: 1507, 32: 2980}),
    PublishedRuns("ViT-B, V100, no InfiniBand", *_VIT_B, {16: 634, 32: 1686}),
)
