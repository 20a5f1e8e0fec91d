"""`benchmark.py scaling`: how the step time of data-parallel training grows with ranks, measured here and predicted.

python benchmark.py scaling                                               measure ranks on this machine
python benchmark.py scaling --model volo_d5 -b 44 --machine dgx-a100 --images-per-second 62.5      predict
python benchmark.py scaling --published                                   compare the model with published numbers
"""

from __future__ import annotations

import json
import os
from argparse import Namespace
from collections.abc import Sequence
from dataclasses import asdict, replace
from typing import Any

import numpy as np
import torch

from benchmarks.scaling.machines import LINK_EFFICIENCY, MACHINES, PUBLISHED, PublishedRuns
from benchmarks.scaling.measure import Job, MeasuredRanks, measure
from benchmarks.scaling.prediction import (
    MIB,
    Link,
    Machine,
    Transfer,
    Work,
    check_model,
    computing,
    fit_link,
    gradients_of,
    predict,
    ring_seconds,
    step_seconds,
)
from benchmarks.timing import machine as this_machine
from tlt.errors import UserError
from volo.cluster.ddp import DdpSettings
from volo.cluster.distributed import choose_device

_SIZES = (2**14, MIB, 4 * MIB, 25 * MIB, 100 * MIB)  # bytes of the all-reduces that are timed alone
_GBITS = np.geomspace(0.1, 2000, 400)  # tried to explain a published number
Report = tuple[dict[str, Any], list[str]]  # for --json, and lines for people


def run(args: Namespace) -> int:
    """Entry point, after the arguments are parsed."""
    if args.published:
        found, lines = published()
    elif args.images_per_second is not None:
        work = computing(args.batch_size / args.images_per_second, args.batch_size, gradients_of(args.model))
        found, lines = predicted(args, work, None)
    else:
        found, lines = measured_and_predicted(args)
    print(json.dumps(found) if args.json else "\n".join(lines), flush=True)
    return 0


def measured_and_predicted(args: Namespace) -> Report:
    """Measure ranks on this machine, and predict more of them with the link that was found."""
    check_model(args.model)
    measured = [measure(job, ranks) for job, ranks in jobs(args)]
    fit = fitted(measured, args)
    found, lines = predicted(args, measured[-1].work, None if fit is None else Link(**fit["link"]))
    rows = [
        {
            "ranks": m.ranks,
            "device": m.device,
            "forward": m.work.forward,
            "backward": m.work.backward,
            "gradient_bytes": m.work.gradient_bytes,
            "all_reduce": m.transfers,
            "step": m.step,
        }
        for m in measured
    ]
    return {"measured": rows, "fit": fit, **found}, [*_measured_lines(args, measured, fit), "", *lines]


def jobs(args: Namespace) -> list[tuple[Job, int]]:
    """Return what to measure on how many ranks. Raises UserError if there are fewer GPUs."""
    device = choose_device(args.device, 0)
    cpus = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    places = torch.cuda.device_count() if device.type == "cuda" else cpus
    ranks = args.ranks or [2**k for k in range(places.bit_length())]
    if device.type == "cuda" and max(ranks) > places:
        raise UserError(f"--ranks {max(ranks)}: this machine shows {places} GPUs")
    threads = args.threads or max(1, cpus // max(ranks))
    settings = DdpSettings(args.grad_compression, args.bucket_mb)
    job = Job(args.model, args.batch_size, args.device, args.rounds, threads, settings, _SIZES)
    return [(job, count) for count in sorted(set(ranks))]


def fitted(measured: Sequence[MeasuredRanks], args: Namespace) -> dict[str, Any] | None:
    """Fit a link to the all-reduces and return it with the relative errors of what it predicts; None for one rank."""
    several = [m for m in measured if m.ranks > 1]
    if not several:
        return None
    transfers = [Transfer(size, m.ranks, seconds) for m in several for size, seconds in m.transfers.items()]
    link = fit_link(transfers)
    return {
        "link": asdict(link),
        "transfer_residuals": [ring_seconds(t.size, t.ranks, link) / t.seconds - 1 for t in transfers],
        "step_residuals": [
            step_seconds(m.work, m.ranks, Machine(m.ranks, link, link), **conditions_of(args)) / m.step - 1
            for m in several
        ],
    }


def conditions_of(args: Namespace) -> dict[str, float]:
    """Return what the flags say of sending gradients, as arguments of `predict`."""
    return {"bucket_mb": args.bucket_mb, "compression": 0.5 if args.grad_compression == "bf16" else 1.0}


def predicted(args: Namespace, work: Work, link: Link | None) -> Report:
    """Predict the step on `--gpus`; `link` is what was measured."""
    conditions, machine = conditions_of(args), machine_from(args, link)
    rows = [predict(work, gpus, machine, **conditions) for gpus in sorted(set(args.gpus))]
    found = {"machine": asdict(machine), "conditions": conditions, "predicted": [asdict(row) for row in rows]}
    lines = [
        f"predicted for {args.model}, {work.images} images per GPU, {work.gradient_bytes / 1e6:.1f} MB of gradients: "
        f"{args.bucket_mb:g} MiB buckets, {args.grad_compression} compression",
        f"{args.machine}: {machine.gpus} GPUs a node, {machine.intra.bandwidth / 1e9:.2f} GB/s and "
        f"{machine.intra.latency * 1e6:.1f} us in it, {machine.inter.bandwidth * 8 / 1e9:.1f} Gbit/s and "
        f"{machine.inter.latency * 1e6:.1f} us between nodes",
        f"{'GPUs':>6}{'step':>13}{'exposed':>13}{'images/s':>12}{'efficiency':>12}",
    ]
    for row in rows:
        times = f"{1000 * row.step:10.1f} ms{1000 * row.exposed:10.1f} ms"
        lines.append(f"{row.gpus:6}{times}{row.images_per_second:12.1f}{row.efficiency:11.1%}")
    return found, lines


def machine_from(args: Namespace, link: Link | None) -> Machine:
    """Return the machine that the flags name; `here` means that all GPUs are joined as the measured ranks are.

    Raises:
        UserError: `here` is asked for and no link was measured.
    """
    if args.machine != "here":
        machine = machine_of(args.machine, args.link_efficiency)
    elif link is None:
        raise UserError("--machine here needs a measurement of two ranks: name another --machine")
    else:
        machine = Machine(max(args.gpus), link, link)
    gbits, microseconds = args.node_gbits, args.latency_us
    inter = Link(
        machine.inter.latency if microseconds is None else microseconds * 1e-6,
        machine.inter.bandwidth if gbits is None else gbits / 8 * 1e9,
    )
    return Machine(args.gpus_per_node or machine.gpus, machine.intra, inter)


def machine_of(name: str, efficiency: float = LINK_EFFICIENCY) -> Machine:
    """Return a row of `MACHINES`, its links at `efficiency` of their nominal bandwidth."""
    row = MACHINES[name]
    return Machine(
        row.gpus,
        Link(row.intra_us * 1e-6, row.gpu_gbytes * 1e9 * efficiency),
        Link(row.inter_us * 1e-6, row.cards * row.card_gbits / 8 * 1e9 * efficiency),
    )


def published() -> Report:
    """Compare published throughputs with the model: what it predicts with the machine's own links, and the bandwidth
    between nodes that alone would explain the published number."""
    found = [row for runs in PUBLISHED for row in compared(runs)]
    lines = [
        "published images/s, predicted ones with the machine's own links, and the Gbit/s out of a node that alone "
        "would explain the published number (images per GPU are assumed)",
        f"{'':28}{'per GPU':>8}{'GPUs':>6}{'published':>11}{'per GPU':>9}{'predicted':>11}{'Gbit/s':>9}",
    ]
    for row in found:
        gbits = "" if row["gbits"] is None else f"{row['gbits']:.2f}"
        lines.append(
            f"{row['name']:28}{row['batch_size']:8}{row['gpus']:6}{row['images_per_second']:11.0f}"
            f"{row['efficiency']:9.1%}{row['predicted']:11.0f}{gbits:>9}"
        )
    return {"published": found}, lines


def compared(runs: PublishedRuns) -> list[dict[str, Any]]:
    """Return a row per published throughput; `gbits` is None for `known`, and where no bandwidth explains it."""
    gradients, (gpus, rate) = gradients_of(runs.model), runs.known
    machine = replace(machine_of(runs.machine), gpus=runs.gpus_per_node)
    step = gpus * runs.batch_size / rate
    tried = [computing(share * step, runs.batch_size, gradients) for share in np.linspace(0.2, 1, 400)]
    steps = [step_seconds(work, gpus, machine) for work in tried]
    seconds = np.interp(step, steps, [work.forward + work.backward for work in tried])
    work = computing(float(seconds), runs.batch_size, gradients)

    def throughput(gpus: int, machine: Machine) -> float:
        return predict(work, gpus, machine).images_per_second

    rows = []
    for gpus, rate in runs.throughputs.items():
        slower = [replace(machine, inter=Link(machine.inter.latency, gbits / 8 * 1e9)) for gbits in _GBITS]
        rates = [throughput(gpus, each) for each in slower]
        explained = (gpus, rate) != runs.known and rates[0] <= rate <= rates[-1]
        rows.append(
            {
                "name": runs.name,
                "batch_size": runs.batch_size,
                "gpus": gpus,
                "images_per_second": rate,
                "efficiency": rate / gpus * runs.known[0] / runs.known[1],
                "predicted": throughput(gpus, machine),
                "gbits": float(np.interp(rate, rates, _GBITS)) if explained else None,
            }
        )
    return rows


def _measured_lines(args: Namespace, measured: Sequence[MeasuredRanks], fit: dict[str, Any] | None) -> list[str]:
    base = measured[0].work
    lines = [
        f"{args.model}, {args.batch_size} images per rank, {base.gradient_bytes / 1e6:.1f} MB of gradients; "
        f"measured on {measured[0].device}, {this_machine()}",
        f"{'ranks':>6}{'forward':>12}{'backward':>12}{'step':>12}{'images/s':>12}{'efficiency':>12}",
    ]
    alone = base.forward + base.backward
    for m in measured:
        times = "".join(f"{1000 * s:9.1f} ms" for s in (m.work.forward, m.work.backward, m.step))
        lines.append(f"{m.ranks:6}{times}{m.ranks * args.batch_size / m.step:12.1f}{alone / m.step:11.1%}")
    for m in measured:
        if m.ranks > 1:
            times = ", ".join(f"{size / MIB:g} MiB {1000 * seconds:.2f} ms" for size, seconds in m.transfers.items())
            lines.append(f"all-reduce alone, {m.ranks} ranks: {times}")
    if fit is not None:
        off = ", ".join(f"{share:+.0%}" for share in fit["transfer_residuals"])
        steps = ", ".join(f"{share:+.1%}" for share in fit["step_residuals"])
        lines.append(
            f"fitted: latency {fit['link']['latency'] * 1e6:.0f} us, bandwidth {fit['link']['bandwidth'] / 1e9:.2f} "
            f"GB/s (all-reduces off by {off}; steps off by {steps})"
        )
    return lines
