"""Machines for `benchmark.py scaling`: links as their makers' data sheets have them, and what of it a program gets."""

from __future__ import annotations

from typing import NamedTuple

from benchmarks.scaling.model import Link, Machine

# Of nominal bandwidth, what all-reduces of large messages usually reach with NCCL.
LINK_EFFICIENCY = 0.8


class Row(NamedTuple):
    """GB/s of one GPU in one direction; cards of a node and Gbit/s of each; microseconds of a message in and between
    nodes (usual values for NCCL; no data sheet has them)."""

    gpus: int
    gpu_gbytes: float
    cards: int
    card_gbits: float
    intra_us: float
    inter_us: float


# fmt: off
MACHINES = {
    #                         GPUs  GB/s  cards Gb/s  us   us
    "dgx-1-v100":         Row(   8,  150,    4,  100, 3.0,  6.0),  # NVLink 2 (6 x 25 GB/s), EDR
    "dgx-2":              Row(  16,  150,    8,  100, 3.0,  6.0),  # NVLink 2 and NVSwitch, EDR
    "dgx-a100":           Row(   8,  300,    8,  200, 3.0,  6.0),  # NVLink 3 (12 x 25 GB/s), HDR
    "dgx-h100":           Row(   8,  450,    8,  400, 3.0,  6.0),  # NVLink 4 (18 x 25 GB/s), NDR
    "pcie-ethernet-25g":  Row(   8,   16,    1,   25, 5.0, 30.0),  # PCIe 3.0 x16, one card, TCP
    "pcie-ethernet-10g":  Row(   8,   16,    1,   10, 5.0, 30.0),
}
# fmt: on


def machine_of(row: Row, efficiency: float = LINK_EFFICIENCY) -> Machine:
    """The links of a row, at `efficiency` of their nominal bandwidth."""
    between = row.cards * row.card_gbits / 8
    return Machine(
        row.gpus,
        Link(row.intra_us * 1e-6, row.gpu_gbytes * 1e9 * efficiency),
        Link(row.inter_us * 1e-6, between * 1e9 * efficiency),
    )
