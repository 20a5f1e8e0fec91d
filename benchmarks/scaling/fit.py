"""The parameters of the scaling model from what was measured, by least squares; and where a model meets a number."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from benchmarks.scaling.model import Conditions, Link, Machine, Work, ring_seconds, step_seconds

Values = NDArray[np.float64]


class Transfer(NamedTuple):
    """A measured all-reduce."""

    size: float
    ranks: int
    seconds: float


class MeasuredStep(NamedTuple):
    """A measured step, and what each of the ranks did in it when it was alone."""

    work: Work
    ranks: int
    seconds: float


@dataclass(frozen=True)
class Fit:
    """The parameters that come nearest to what was measured, and by which share the model is off with them."""

    link: Link
    contention: float
    transfer_residuals: list[float]
    step_residuals: list[float]


def fit(transfers: Sequence[Transfer], steps: Sequence[MeasuredStep], conditions: Conditions) -> Fit:
    """The link from all-reduces alone, then the contention from the steps."""
    link = fit_link(transfers)
    contention = fit_contention(steps, link, conditions)
    off = step_residuals(steps, link, replace(conditions, contention=contention))
    return Fit(link, contention, transfer_residuals(transfers, link), off)


def fit_link(transfers: Sequence[Transfer]) -> Link:
    """The ring whose all-reduces differ least from the measured ones, squares of relative differences summed.

    A latency below 0 becomes 0. Needs sizes of both kinds: some where latency counts and some where bandwidth does.
    """
    ranks, size, seconds = (np.array([t[column] for t in transfers], float) for column in (1, 0, 2))
    messages = 2 * (ranks - 1)
    terms = np.stack([messages, messages / ranks * size], 1) / seconds[:, None]  # times (latency, 1 / bandwidth) is 1
    wanted = np.ones(len(transfers))
    latency, per_byte = np.linalg.lstsq(terms, wanted, rcond=None)[0]
    if latency < 0:
        latency, per_byte = 0.0, np.linalg.lstsq(terms[:, 1:], wanted, rcond=None)[0][0]
    return Link(float(latency), float(1 / per_byte))


def transfer_residuals(transfers: Sequence[Transfer], link: Link) -> list[float]:
    """By which share of the measured time the link is off, per all-reduce."""
    return [ring_seconds(t.size, t.ranks, link) / t.seconds - 1 for t in transfers]


def fit_contention(steps: Sequence[MeasuredStep], link: Link, conditions: Conditions) -> float:
    """What a transfer costs the computing meanwhile (`Conditions.contention`), to a hundredth; 0 up to 0.95."""
    tried = np.linspace(0, 0.95, 96)

    def misfit(contention: float) -> float:
        return sum(off**2 for off in step_residuals(steps, link, replace(conditions, contention=contention)))

    return float(tried[np.argmin([misfit(float(c)) for c in tried])])


def step_residuals(steps: Sequence[MeasuredStep], link: Link, conditions: Conditions) -> list[float]:
    """By which share of the measured time the model is off, per step."""
    return [step_seconds(s.work, s.ranks, Machine(s.ranks, link, link), conditions) / s.seconds - 1 for s in steps]


def where(function: Callable[[float], float], target: float, grid: Values) -> float:
    """The argument at which a monotone function meets `target`, between two points of `grid`; NaN if it never does."""
    values = np.array([function(float(x)) for x in grid])
    order = np.argsort(values, kind="stable")
    return float(np.interp(target, values[order], grid[order], left=np.nan, right=np.nan))
