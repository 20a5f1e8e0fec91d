"""Published throughputs held against the scaling model: what it says with nominal links, and what would explain them.

A number of GPUs and images/s is one equation. Each explanation is therefore what one cause alone would have to be;
which of them it was, the number can't tell.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from benchmarks.scaling.fit import where
from benchmarks.scaling.machines import MACHINES, machine_of
from benchmarks.scaling.model import Conditions, Gradient, Link, Machine, Work, in_buckets, step_seconds
from benchmarks.scaling.picture import Curves, Efficiencies, Panel
from benchmarks.scaling.work import computing, gradients_of

_GBITS = np.geomspace(0.1, 2000, 120)


class Point(NamedTuple):
    """A published throughput."""

    gpus: int
    images_per_second: float


# VOLO-D5 at 224 px: 1 and 5 DGX A100; 44 images a GPU as in the published command (the table itself doesn't say).
VOLO_D5 = (Point(8, 500), Point(40, 2100))
VOLO_D5_BATCH = 44
# ViT-B/16 on Azure's V100s, 4 GPUs a node in every row. Images a GPU are not told.
VIT_B_INFINIBAND = (Point(16, 1507), Point(32, 2980))
VIT_B_ETHERNET = (Point(16, 634), Point(32, 1686))
VIT_B_BATCH = 64
VIT_B_NODE = 4


def calibrated(
    point: Point, images: int, gradients: Sequence[Gradient], machine: Machine, conditions: Conditions
) -> Work:
    """The work with which the model has `point`."""
    step = point.gpus * images / point.images_per_second
    seconds = where(
        lambda s: step_seconds(computing(s, images, gradients), point.gpus, machine, conditions),
        step,
        step * np.geomspace(0.2, 1.0, 200),
    )
    return computing(seconds, images, gradients)


def between_nodes(machine: Machine, gbits: float) -> Machine:
    """The machine with so many Gbit/s between a node and the others."""
    return replace(machine, inter=Link(machine.inter.latency, gbits / 8 * 1e9))


@dataclass(frozen=True)
class Explained:
    """Images/s that nominal links would give, and what each cause alone would have to be for the published number.

    Attributes:
        gbits, gbits_without_overlap: Between a node and the others, with all-reduces under the backward pass, and with
            none before its end. NaN: no bandwidth would explain it.
        jitter: As `Conditions`.
        input_rate: As `Conditions`.
    """

    nominal: float
    gbits: float
    gbits_without_overlap: float
    jitter: float
    input_rate: float


def explain(
    known: Point, point: Point, images: int, gradients: Sequence[Gradient], machine: Machine, nominal: Conditions
) -> Explained:
    """What separates `point` from a run of the same work within one node, `known`."""

    def throughput(machine: Machine, conditions: Conditions) -> float:
        work = calibrated(known, images, gradients, machine, conditions)
        return point.gpus * images / step_seconds(work, point.gpus, machine, conditions)

    def at_bandwidth(conditions: Conditions) -> float:
        return where(lambda g: throughput(between_nodes(machine, g), conditions), point.images_per_second, _GBITS)

    return Explained(
        throughput(machine, nominal),
        at_bandwidth(nominal),
        at_bandwidth(replace(nominal, overlap=False)),
        where(
            lambda j: throughput(machine, replace(nominal, jitter=j)), point.images_per_second, np.linspace(0, 1, 101)
        ),
        point.images_per_second,
    )


@dataclass(frozen=True)
class EthernetFit:
    """The one bandwidth between nodes that comes nearest to both Ethernet rows, and what each row alone would need.

    Attributes:
        gbits: Of the best fit, the sum of squares of the logarithms' differences being smallest.
        predicted: Images/s per row with it.
        needed: Gbit/s with which the model would have the row.
    """

    gbits: float
    predicted: tuple[float, float]
    needed: tuple[float, float]

    @property
    def residuals(self) -> list[float]:
        """By which share of the published number the fit is off, per row."""
        return [p / row.images_per_second - 1 for p, row in zip(self.predicted, VIT_B_ETHERNET, strict=True)]


def fit_ethernet(gradients: Sequence[Gradient], images: int) -> EthernetFit:
    """Fit the Ethernet rows of the ViT-B table, with the computing time of its InfiniBand row of 16 GPUs."""
    machine = replace(machine_of(MACHINES["dgx-1-v100"]), gpus=VIT_B_NODE)
    work = calibrated(VIT_B_INFINIBAND[0], images, gradients, machine, Conditions())

    def throughput(row: Point, gbits: float) -> float:
        return row.gpus * images / step_seconds(work, row.gpus, between_nodes(machine, gbits), Conditions())

    def misfit(gbits: float) -> float:
        return sum(float(np.log(throughput(row, gbits) / row.images_per_second)) ** 2 for row in VIT_B_ETHERNET)

    fine = np.geomspace(0.1, 100, 600)
    best = float(fine[np.argmin([misfit(g) for g in fine])])
    first, second = (throughput(row, best) for row in VIT_B_ETHERNET)
    needed = [where(partial(throughput, row), row.images_per_second, _GBITS) for row in VIT_B_ETHERNET]
    return EthernetFit(best, (first, second), (needed[0], needed[1]))


def least_misfit(rows: tuple[Point, Point]) -> float:
    """By which factor one of two rows is missed at least by any model in which more GPUs don't make a step quicker."""
    first, second = rows
    gain = second.images_per_second / first.images_per_second
    return max(1.0, float(np.sqrt(gain / (second.gpus / first.gpus))))


def published() -> tuple[dict[str, Any], list[str], list[Panel]]:
    """What `--json` and the tables say, and what is drawn."""
    volo, vit = (in_buckets(gradients_of(name), 25) for name in ("volo_d5", "vit_base_patch16_224"))
    explained = explain(*VOLO_D5, VOLO_D5_BATCH, volo, machine_of(MACHINES["dgx-a100"]), Conditions())
    fit = fit_ethernet(vit, VIT_B_BATCH)
    found = {
        "volo_d5": asdict(explained),
        "vit_b": asdict(fit) | {"residuals": fit.residuals},
        "vit_b_least_misfit": least_misfit(VIT_B_ETHERNET),
    }
    return found, [*_volo_lines(explained), "", *_vit_lines(fit)], [_volo_panel(volo, explained), _vit_panel(fit)]


def _volo_lines(found: Explained) -> list[str]:
    (few, before), (many, after) = VOLO_D5
    nominal = machine_of(MACHINES["dgx-a100"]).inter.bandwidth * 8 / 1e9
    share = many / few * before
    return [
        f"VOLO-D5 on DGX A100: {few} GPUs {before} images/s, {many} GPUs {after} images/s published, "
        f"{after / share:.1%} of {many // few} times as many; {VOLO_D5_BATCH} images per GPU assumed",
        f"    the model with the machine's own links: {found.nominal:.0f} images/s, {found.nominal / share:.1%}",
        "    each of these alone would explain the difference:",
        f"        {found.gbits:.1f} Gbit/s from node to node, under the backward pass "
        f"({found.gbits / nominal:.1%} of what the cards should give)",
        f"        {found.gbits_without_overlap:.1f} Gbit/s from node to node, if all-reduces wait for the end of the "
        f"backward pass ({found.gbits_without_overlap / nominal:.1%})",
        f"        computing times that vary by {found.jitter:.0%} (standard deviation) between ranks and steps",
        f"        storage that gives no more than {found.input_rate:.0f} images/s to all nodes together",
    ]


def _vit_lines(fit: EthernetFit) -> list[str]:
    (few, before), (many, after) = VIT_B_INFINIBAND
    gain = VIT_B_ETHERNET[1].images_per_second / VIT_B_ETHERNET[0].images_per_second
    rates, off, needed = (
        f"{a:{form}} and {b:{form}}"
        for (a, b), form in ((fit.predicted, ".0f"), (fit.residuals, "+.0%"), (fit.needed, ".2f"))
    )
    return [
        f"ViT-B on V100s with InfiniBand: {few} GPUs {before}, {many} GPUs {after} images/s published, "
        f"{after / (many / few * before):.1%} of {many // few} times as many",
        f"    without: {', '.join(f'{gpus} GPUs {rate} images/s' for gpus, rate in VIT_B_ETHERNET)}, "
        f"{gain:.2f} times as many on twice the GPUs",
        "    no model in which more GPUs don't make a step quicker has both rows: one is missed by "
        f"{least_misfit(VIT_B_ETHERNET) - 1:.0%} at least",
        f"    the best fit of one bandwidth, {VIT_B_NODE} GPUs a node, {VIT_B_BATCH} images per GPU assumed (others "
        f"change the bandwidth, not the differences): {fit.gbits:.2f} Gbit/s gives {rates} images/s, off by {off}; the "
        f"rows alone need {needed} Gbit/s",
    ]


def _volo_panel(gradients: Sequence[Gradient], found: Explained) -> Panel:
    machine, known = machine_of(MACHINES["dgx-a100"]), VOLO_D5[0]
    slow = between_nodes(machine, found.gbits)
    cases = {
        "8 x 200 Gbit/s a node": (machine, Conditions()),
        f"{found.gbits:.0f} Gbit/s a node": (slow, Conditions()),
        f"{found.gbits:.0f} Gbit/s a node, bf16 gradients": (slow, Conditions(compression=0.5)),
        f"computing varies by {found.jitter:.0%}": (machine, Conditions(jitter=found.jitter)),
    }
    lines: Curves = {}
    for label, (links, conditions) in cases.items():
        work = calibrated(known, VOLO_D5_BATCH, gradients, links, replace(conditions, compression=1.0))
        lines[label] = [
            (gpus, known.gpus / known.images_per_second * VOLO_D5_BATCH / step_seconds(work, gpus, links, conditions))
            for gpus in (8, 16, 40, 80, 160, 320, 640)
        ]
    return Panel("VOLO-D5, per GPU against one DGX A100", lines, {"published": _against(known, VOLO_D5)})


def _vit_panel(fit: EthernetFit) -> Panel:
    known = VIT_B_INFINIBAND[0]
    lines: Curves = {
        f"best fit, {fit.gbits:.1f} Gbit/s a node": _against(
            known, [Point(row.gpus, rate) for row, rate in zip(VIT_B_ETHERNET, fit.predicted, strict=True)]
        )
    }
    points: Curves = {
        "published, InfiniBand": _against(known, VIT_B_INFINIBAND),
        "published, without": _against(known, VIT_B_ETHERNET),
    }
    return Panel("ViT-B, per GPU against 16 V100s with InfiniBand", lines, points)


def _against(known: Point, rows: Sequence[Point]) -> Efficiencies:
    """Images/s per GPU as a share of those of `known`."""
    return [(row.gpus, row.images_per_second / row.gpus * known.gpus / known.images_per_second) for row in rows]
