"""`benchmark.py scaling`: how the step time of data-parallel training grows with ranks, measured here and predicted.

    python benchmark.py scaling                                               measure ranks on this machine
    python benchmark.py scaling --model volo_d5 -b 44 --machine dgx-a100 --images-per-second 62.5      predict
    python benchmark.py scaling --published                                   published numbers against the model

What is measured is in `scaling_measure`, the model in `scaling_model`, its parameters from measurements in
`scaling_fit`, published numbers in `scaling_published`.
"""

from __future__ import annotations

import json
import math
import os
from argparse import Namespace
from collections.abc import Sequence
from dataclasses import asdict, replace
from typing import Any

import torch

from benchmarks.scaling.fit import Fit, MeasuredStep, Transfer, fit
from benchmarks.scaling.machines import MACHINES, machine_of
from benchmarks.scaling.measure import Job, Measured, measure
from benchmarks.scaling.model import MIB, Conditions, Link, Machine, Prediction, Work, predict
from benchmarks.scaling.picture import Curves, Panel, draw
from benchmarks.scaling.published import published
from benchmarks.scaling.work import check_model, computing, gradients_of
from benchmarks.timing import machine as this_machine
from tlt.errors import UserError, require
from volo.cluster.ddp import DdpSettings
from volo.cluster.distributed import choose_device

_SIZES = (2**14, MIB, 4 * MIB, 25 * MIB, 100 * MIB)  # bytes of the all-reduces that are timed alone


Report = tuple[dict[str, Any], list[str], list[Panel]]  # for --json, for people, for --plot
# With --settings: one of the settings changed at a time.
_OTHERS: dict[str, dict[str, Any]] = {
    "no bucket view": {"bucket_view": False},
    "static graph": {"static_graph": True},
    "buckets of 5 MiB": {"bucket_mb": 5.0},
    "buckets of 100 MiB": {"bucket_mb": 100.0},
    "bf16 gradients": {"compression": "bf16"},
}


def run(args: Namespace) -> int:
    """Entry point, after the arguments are parsed."""
    if args.plot:
        require("matplotlib", extra="plot")
    found, lines, panels = published() if args.published else measured_and_predicted(args)
    if args.plot:
        draw(panels, args.plot)
    print(json.dumps(found) if args.json else "\n".join(lines), flush=True)
    return 0


def measured_and_predicted(args: Namespace) -> Report:
    """What `--json` and the tables say, and what is drawn."""
    if args.images_per_second is not None:
        work = computing(args.batch_size / args.images_per_second, args.batch_size, gradients_of(args.model))
        return predicted(args, work, None)
    check_model(args.model)
    settings = settings_of(args)
    measured = [measure(job, ranks) for job, ranks in jobs(args, tuple(settings.values()))]
    best = fitted(measured, args)
    ours, lines, panels = predicted(args, measured[-1].work, best)
    base = measured[0].work
    alone = base.forward + base.backward
    points: Curves = {"measured": [(m.ranks, alone / m.steps[0]) for m in measured]}
    found = {"measured": [_plain(m, list(settings)) for m in measured], "fit": best and asdict(best), **ours}
    return (
        found,
        [*_measured_lines(args, measured, list(settings), best), "", *lines],
        [p._replace(points=points) for p in panels],
    )


def settings_of(args: Namespace) -> dict[str, DdpSettings]:
    """The settings to measure, by what they are called; what the flags say comes first."""
    chosen = DdpSettings(args.grad_compression, args.bucket_mb)
    others = {name: replace(chosen, **change) for name, change in _OTHERS.items()} if args.settings else {}
    return {"step": chosen} | {name: other for name, other in others.items() if other != chosen}


def jobs(args: Namespace, settings: tuple[DdpSettings, ...]) -> list[tuple[Job, int]]:
    """What to measure on how many ranks.

    Raises:
        UserError: More ranks than GPUs.
    """
    device = choose_device(args.device, 0)
    cpus = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    places = torch.cuda.device_count() if device.type == "cuda" else cpus
    ranks = args.ranks or [2**k for k in range(places.bit_length())]
    if device.type == "cuda" and max(ranks) > places:
        raise UserError(f"--ranks {max(ranks)}: this machine shows {places} GPUs")
    threads = args.threads or max(1, cpus // max(ranks))
    job = Job(args.model, args.batch_size, args.device, args.rounds, threads, settings, _SIZES)
    return [(job, count) for count in sorted(set(ranks))]


def fitted(measured: Sequence[Measured], args: Namespace) -> Fit | None:
    """The model's parameters; None where one rank alone was measured."""
    several = [m for m in measured if m.ranks > 1]
    if not several:
        return None
    transfers = [Transfer(size, m.ranks, seconds) for m in several for size, seconds in m.transfers.items()]
    steps = [MeasuredStep(m.work, m.ranks, m.steps[0]) for m in several]
    return fit(transfers, steps, conditions_of(args, 0.0))


def predicted(args: Namespace, work: Work, fit: Fit | None) -> Report:
    """The step on `--gpus`, as the model has it."""
    conditions = conditions_of(args, fit.contention if fit and args.machine == "here" else 0.0)
    machine = machine_from(args, fit.link if fit else None)
    rows = [predict(work, gpus, machine, conditions) for gpus in sorted(set(args.gpus))]
    apart = [predict(work, gpus, machine, replace(conditions, overlap=False)) for gpus in sorted(set(args.gpus))]
    found = {"machine": asdict(machine), "conditions": asdict(conditions), "predicted": [asdict(row) for row in rows]}
    lines: Curves = {"predicted": _efficiencies(rows), "all-reduce after the backward pass": _efficiencies(apart)}
    panel = Panel(f"{args.model}, {args.batch_size} images per GPU, {args.machine}", lines, {})
    return found, [*_machine_lines(args, machine, conditions, work), *_prediction_lines(rows)], [panel]


def conditions_of(args: Namespace, contention: float) -> Conditions:
    """The conditions that the flags name; `--contention` wins over the measured one."""
    return Conditions(
        args.bucket_mb,
        0.5 if args.grad_compression == "bf16" else 1.0,
        args.algorithm,
        contention=contention if args.contention is None else args.contention,
        jitter=args.jitter,
        input_rate=math.inf if args.input_rate is None else args.input_rate,
    )


def machine_from(args: Namespace, link: Link | None) -> Machine:
    """The machine that the flags name; `here`: all GPUs are joined as the measured ranks.

    Raises:
        UserError: Links as measured, where none was.
    """
    if args.machine != "here":
        machine = machine_of(MACHINES[args.machine], args.link_efficiency)
    elif link is None:
        raise UserError("--machine here needs a measurement of two ranks: name another --machine")
    else:
        machine = Machine(max(args.gpus), link, link)
    gbits, microseconds = args.node_gbits, args.latency_us
    return Machine(
        args.gpus_per_node or machine.gpus,
        machine.intra,
        Link(
            machine.inter.latency if microseconds is None else microseconds * 1e-6,
            machine.inter.bandwidth if gbits is None else gbits / 8 * 1e9,
        ),
    )


def _efficiencies(rows: Sequence[Prediction]) -> list[tuple[int, float]]:
    return [(row.gpus, row.efficiency) for row in rows]


def _plain(measured: Measured, names: Sequence[str]) -> dict[str, Any]:
    work = measured.work
    return {
        "ranks": measured.ranks,
        "device": measured.device,
        "forward": work.forward,
        "backward": work.backward,
        "gradient_bytes": work.gradient_bytes,
        "all_reduce": measured.transfers,
        **dict(zip(names, measured.steps, strict=True)),
    }


def _measured_lines(args: Namespace, measured: Sequence[Measured], names: Sequence[str], fit: Fit | None) -> list[str]:
    base = measured[0].work
    lines = [
        f"{args.model}, {args.batch_size} images per rank, {base.gradient_bytes / 1e6:.1f} MB of gradients; "
        f"measured on {measured[0].device}, {this_machine()}",
        f"{'ranks':>6}{'forward':>12}{'backward':>12}{'step':>12}{'images/s':>12}{'efficiency':>12}",
    ]
    alone = base.forward + base.backward
    for m in measured:
        times = "".join(f"{1000 * s:9.1f} ms" for s in (m.work.forward, m.work.backward, m.steps[0]))
        lines.append(f"{m.ranks:6}{times}{m.ranks * args.batch_size / m.steps[0]:12.1f}{alone / m.steps[0]:11.1%}")
    for m in measured[1:] if len(names) > 1 else ():
        lines.append(f"settings, {m.ranks} ranks:")
        lines += [f"    {name:20}{1000 * seconds:9.1f} ms" for name, seconds in zip(names, m.steps, strict=True)]
    for m in measured:
        if m.ranks > 1:
            times = ", ".join(f"{size / MIB:g} MiB {1000 * seconds:.2f} ms" for size, seconds in m.transfers.items())
            lines.append(f"all-reduce alone, {m.ranks} ranks: {times}")
    return lines + ([] if fit is None else _fit_lines(fit))


def _fit_lines(fit: Fit) -> list[str]:
    off = ", ".join(f"{share:+.0%}" for share in fit.transfer_residuals)
    steps = ", ".join(f"{share:+.1%}" for share in fit.step_residuals)
    return [
        f"fitted: latency {fit.link.latency * 1e6:.0f} us, bandwidth {fit.link.bandwidth / 1e9:.2f} GB/s "
        f"(all-reduces off by {off}); contention {fit.contention:.2f} (steps off by {steps})"
    ]


def _machine_lines(args: Namespace, machine: Machine, conditions: Conditions, work: Work) -> list[str]:
    intra, inter = machine.intra, machine.inter
    more = [f"{conditions.bucket_mb:g} MiB buckets", f"{args.grad_compression} compression", conditions.algorithm]
    more += [f"contention {conditions.contention:g}"] if conditions.contention else []
    more += [f"jitter {conditions.jitter:g}"] if conditions.jitter else []
    more += [f"input {conditions.input_rate:g} images/s"] if math.isfinite(conditions.input_rate) else []
    return [
        f"predicted for {args.model}, {work.images} images per GPU, {work.gradient_bytes / 1e6:.1f} MB of gradients: "
        f"{', '.join(more)}",
        f"{args.machine}: {machine.gpus} GPUs a node, {intra.bandwidth / 1e9:.2f} GB/s and "
        f"{intra.latency * 1e6:.1f} us in it, {inter.bandwidth * 8 / 1e9:.1f} Gbit/s and "
        f"{inter.latency * 1e6:.1f} us between nodes",
    ]


def _prediction_lines(rows: Sequence[Prediction]) -> list[str]:
    lines = [f"{'GPUs':>6}{'step':>13}{'exposed':>13}{'images/s':>12}{'efficiency':>12}"]
    for row in rows:
        times = f"{1000 * row.step:10.1f} ms{1000 * row.exposed:10.1f} ms"
        lines.append(f"{row.gpus:6}{times}{row.images_per_second:12.1f}{row.efficiency:11.1%}")
    return lines
