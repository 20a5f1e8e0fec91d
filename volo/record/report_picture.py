"""The picture of `volo report`: curves across restarts on one axis, accuracy, and where the time went."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import datetime
from itertools import chain, pairwise, repeat
from pathlib import Path

import matplotlib

from volo.record.history import History, Record, gap, number, time_of

matplotlib.use("Agg")

from matplotlib import pyplot as plt  # noqa: E402
from matplotlib.axes import Axes  # noqa: E402

_LOST, _KEPT, _WAIT = "tab:red", "tab:blue", "tab:orange"


def draw(history: History, file: Path) -> None:
    """Write the picture; its format follows from the file's ending."""
    figure, (top, middle, bottom) = plt.subplots(3, 1, figsize=(10, 10), constrained_layout=True)
    _loss(top, history)
    _accuracy(middle, history)
    middle.sharex(top)
    _throughput(bottom, history)
    for axes in (top, middle, bottom):
        axes.grid(alpha=0.3)
        if axes.get_legend_handles_labels()[0]:
            axes.legend(loc="lower right", bbox_to_anchor=(1, 1), ncols=4, fontsize="small", frameon=False)
        else:
            axes.text(0.5, 0.5, "nothing recorded", transform=axes.transAxes, ha="center")
    figure.suptitle(f"{history.run.resolve().name}: {len(history.starts)} starts")
    try:
        figure.savefig(file, dpi=110)
    except ValueError as error:  # a format that matplotlib doesn't know
        raise OSError(0, str(error)) from error
    finally:
        plt.close(figure)


def _loss(axes: Axes, history: History) -> None:
    stretches = [s for s in _stretches(history.superseded, history) if s]
    for label, stretch in zip(_only_first("done again"), stretches, strict=False):
        axes.plot(*_points(stretch, "loss"), color=_LOST, alpha=0.35, lw=5, label=label)
    if history.reports:
        points = _points(history.reports, "loss")
        axes.plot(*points, color=_KEPT, lw=1, marker=_marker(history.reports), label="training loss")
    _mark_restarts(axes, history)
    axes.set(xlabel="update", ylabel="loss")


def _accuracy(axes: Axes, history: History) -> None:
    # An epoch's record stands at the last update of its reports.
    ends = {r.get("epoch"): number(r, "update") for r in history.reports}
    for key, label in (("eval_top1", "top-1"), ("eval_top1_ema", "top-1, averaged weights")):
        records = [r | {"update": ends[r.get("epoch")]} for r in history.epochs if r.get("epoch") in ends and key in r]
        if records:
            axes.plot(*_points(records, key), marker=_marker(records), label=label)
    if axes.lines:
        _mark_restarts(axes, history)
    axes.set(xlabel="update", ylabel="validation accuracy (%)")


def _mark_restarts(axes: Axes, history: History) -> None:
    for label, start in zip(_only_first("restarted from here"), history.trained[1:], strict=False):
        axes.axvline(start.first, color="black", ls="--", lw=0.8, alpha=0.6, label=label)


def _throughput(axes: Axes, history: History) -> None:
    """Over the time since the first start; a line per start, so that nothing is drawn where nothing ran."""
    timed = [[(t, r) for r in start.records if (t := time_of(r)) is not None] for start in history.starts]
    axes.set(ylabel="images/s")
    if not any(timed):
        return
    began = min(start.time for start in history.starts if start.time is not None)
    unit, seconds = _unit(max((t - began).total_seconds() for reports in timed for t, _ in reports))
    waits = axes.twinx()
    for label, reports in zip(_only_first("images/s"), filter(None, timed), strict=False):
        x = [(t - began).total_seconds() / seconds for t, _ in reports]
        records = [record for _, record in reports]
        shares = [100 * number(r, "wait_seconds") / max(number(r, "seconds"), 1e-9) for r in records]
        waits.plot(x, shares, color=_WAIT, lw=1, alpha=0.6)
        axes.plot(
            x, [number(r, "images_per_second") for r in records], color=_KEPT, marker=_marker(records), label=label
        )
    axes.plot([], [], color=_WAIT, label="waiting for data (% of the time)")
    _shade_gaps(axes, history, began, seconds)
    axes.set_ylim(bottom=0)
    axes.set_xlabel(f"{unit} since the first start")
    waits.set(ylim=(0, 100), ylabel="waiting for data (%)")


def _unit(seconds: float) -> tuple[str, int]:
    return ("hours", 3600) if seconds > 2 * 3600 else ("minutes", 60) if seconds > 120 else ("seconds", 1)


def _only_first(label: str) -> Iterator[str | None]:
    """Labels for lines that share one entry of the legend."""
    return chain([label], repeat(None))


def _shade_gaps(axes: Axes, history: History, began: datetime, unit: int) -> None:
    restarts = [(before, gap(before, after)) for before, after in pairwise(history.trained)]
    spans = [(before.seen, seconds) for before, seconds in restarts if before.seen is not None and seconds]
    for label, (seen, seconds) in zip(_only_first("not training"), spans, strict=False):
        left = (seen - began).total_seconds()
        axes.axvspan(left / unit, (left + seconds) / unit, color=_LOST, alpha=0.2, lw=0, label=label)


def _stretches(records: list[Record], history: History) -> list[list[Record]]:
    """Cut records by the start that made them."""
    wanted = {id(record) for record in records}
    return [[r for r in start.records if id(r) in wanted] for start in history.starts]


def _points(records: list[Record], key: str) -> tuple[list[float], list[float]]:
    nan = float("nan")
    return [number(r, "update", nan) for r in records], [number(r, key, nan) for r in records]


def _marker(records: list[Record]) -> str:
    return "." if len(records) < 60 else ""
