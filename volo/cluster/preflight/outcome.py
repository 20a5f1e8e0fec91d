"""What the preflight tells: a table of the nodes, then a line per problem; the same for programs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from tlt.io.text import table
from volo.cluster.preflight.bandwidth import Bandwidths, Measured, node_bandwidths
from volo.cluster.preflight.findings import Finding
from volo.cluster.preflight.node_report import ACTIVE, NodeReport

_HEADING = ("node", "rank", "address", "GPUs", "CPUs", "cards", "shm GB", "memlock GB", "free GB", "clock ms")


@dataclass(frozen=True)
class Outcome:
    """All that was found.

    Attributes:
        names: Of all nodes by rank, also of those that did not come.
        clocks: (seconds ahead of node 0, uncertainty) by rank.
        processes: Per node.
    """

    names: Mapping[int, str]
    reports: Sequence[NodeReport]
    clocks: Mapping[int, tuple[float, float]]
    bandwidths: Bandwidths
    findings: Sequence[Finding]
    processes: int
    backend: str

    @property
    def problems(self) -> list[Finding]:
        """Findings that are no notes."""
        return [finding for finding in self.findings if not finding.is_note]

    def text(self, seconds: float) -> str:
        """Table and findings, as they are printed."""
        return "\n".join(self._lines(seconds))

    def record(self, code: int) -> dict[str, Any]:
        """The same as plain data, for `--json`."""
        return {
            "exit_code": code,
            "processes_per_node": self.processes,
            "backend": self.backend,
            "nodes": [
                {"name": self.names[each.rank], **asdict(each), "clock_s": self.clocks.get(each.rank, (0.0, 0.0))}
                for each in self.reports
            ],
            "bandwidth_gb_per_s": asdict(self.bandwidths),
            "findings": [{**asdict(each), "text": str(each)} for each in self.findings],
        }

    def _lines(self, seconds: float) -> Iterator[str]:
        count = len(self.names)
        nodes, processes = _count(count, "node"), _count(self.processes, "process", "processes")
        yield f"preflight: {nodes}, {processes} each ({self.backend})"
        yield f"{'the same on all' if count > 1 else 'versions'}: {', '.join(self._common_versions())}"
        yield from table([self._heading(), *(self._row(rank) for rank in self.names)])
        if self.bandwidths.halves:
            yield "halves: " + "; ".join(map(self._half_text, self.bandwidths.halves[-1]))
        if self.bandwidths.alone or self.bandwidths.ring:
            yield "GB/s: bus bandwidth of an all-reduce, per process (ring: with the better of two neighbours)"
        yield from map(str, self.findings)
        verdict = f"not fit: {_count(len(self.problems), 'problem')}" if self.problems else "fit"
        yield f"{nodes} checked in {seconds:.1f} s: {verdict}"

    def _common_versions(self) -> list[str]:
        first, *others = [report.versions for report in self.reports]
        return [f"{what} {value}" for what, value in first.items() if all(each[what] == value for each in others)]

    def _heading(self) -> list[str]:
        alone, ring = ["GB/s alone"] * bool(self.bandwidths.alone), ["GB/s ring"] * bool(self.bandwidths.ring)
        return [*_HEADING, *alone, *ring]

    def _row(self, rank: int) -> list[str]:
        report = next((each for each in self.reports if each.rank == rank), None)
        if report is None:
            return [self.names[rank], str(rank), "missing", *[""] * (len(self._heading()) - 3)]
        active = sum(state.startswith(ACTIVE) for state in report.cards.values())
        return [
            self.names[rank],
            str(rank),
            report.address,
            str(report.gpus),
            str(report.cpus),
            f"{active} of {len(report.cards)}" if report.cards else "0",
            f"{report.shm_gb:.1f}",
            "any" if report.memlock_gb is None else f"{report.memlock_gb:.3g}",
            "-" if report.free_gb is None else f"{report.free_gb:.0f}",
            self._clock_text(rank),
            *(f"{node_bandwidths(each)[rank]:.3g}" for each in (self.bandwidths.alone, self.bandwidths.ring) if each),
        ]

    def _clock_text(self, rank: int) -> str:
        if rank not in self.clocks:
            return "0"
        ahead, uncertainty = self.clocks[rank]
        return f"{1000 * ahead:+.2g} ± {1000 * uncertainty:.1g}"

    def _half_text(self, half: Measured) -> str:
        return f"{self.names[half.nodes[0]]} to {self.names[half.nodes[-1]]} {half.bandwidth:.3g} GB/s"


def _count(number: int, one: str, many: str = "") -> str:
    return f"{number} {one if number == 1 else many or one + 's'}"
