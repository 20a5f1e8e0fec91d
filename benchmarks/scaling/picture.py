"""The picture of `benchmark.py scaling`: efficiency against GPUs, predicted as lines and measured as points."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from tlt.errors import UserError, require

Efficiencies = Sequence[tuple[int, float]]  # (GPUs, efficiency in [0, 1])
Curves = dict[str, Efficiencies]  # by their names in the legend


class Panel(NamedTuple):
    """One pair of axes."""

    title: str
    lines: Curves
    points: Curves


def draw(panels: Sequence[Panel], file: str) -> None:
    """Write the picture; its format follows from the file's ending.

    Raises:
        UserError: matplotlib is missing, or the file can't be written.
    """
    require("matplotlib", extra="plot").use("Agg")
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(1, len(panels), figsize=(5.2 * len(panels), 4), squeeze=False, constrained_layout=True)
    for panel, axis in zip(panels, axes[0], strict=True):
        for label, pairs in panel.lines.items():
            axis.plot(*_percent(pairs), marker=".", lw=1, label=label)
        for label, pairs in panel.points.items():
            axis.plot(*_percent(pairs), "o", label=label)
        axis.set_xscale("log", base=2)
        axis.xaxis.set_major_formatter("{x:.0f}")
        axis.set(title=panel.title, xlabel="GPUs", ylabel="images/s per GPU (%)", ylim=(0, None))
        axis.grid(alpha=0.3)
        axis.legend(fontsize="small", loc="lower left")
    try:
        figure.savefig(file, dpi=90)
    except (OSError, ValueError) as error:  # ValueError: a format that matplotlib doesn't know
        raise UserError(f"--plot {file} can't be written: {error}") from error
    finally:
        plt.close(figure)


def _percent(pairs: Efficiencies) -> tuple[list[int], list[float]]:
    return [gpus for gpus, _ in pairs], [100 * efficiency for _, efficiency in pairs]
