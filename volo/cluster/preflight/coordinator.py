"""Node 0's part: ask all nodes, judge the answers, print the report and give everybody the same exit code."""

from __future__ import annotations

import json
import time
from argparse import Namespace
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from tlt.errors import UserError
from tlt.io.text import table
from volo.cluster.preflight.bandwidth import AllReduce, Bandwidths, NodeGroup, measure_all, node_bandwidths
from volo.cluster.preflight.channel import Answer, Channel, Task
from volo.cluster.preflight.findings import (
    Finding,
    Needs,
    check_bandwidths,
    check_clocks,
    check_nodes,
    missing_nodes,
    node_names,
)
from volo.cluster.preflight.local_node import LocalNode
from volo.cluster.preflight.node_report import ACTIVE, NodeReport, PathState

FIT, NOT_FIT = 0, 6
_REPORT_S = 30.0
_READY_S = 250.0
_RESTART_S = 20.0  # for a process that had to be killed
_END_S = 5.0
_HEADING = ("node", "rank", "address", "GPUs", "CPUs", "cards", "shm GB", "memlock GB", "free GB", "clock ms")


class _SilentNodesError(Exception):
    """Nodes have stopped answering."""

    def __init__(self, ranks: Sequence[int]) -> None:
        self.ranks = ranks


class Coordinator:
    """Asks the nodes step by step, from node 0."""

    def __init__(self, args: Namespace, channel: Channel, node: LocalNode) -> None:
        self._args, self._channel, self._node = args, channel, node
        self._rounds = 0
        self._failed = False

    def run(self, started: float) -> int:
        """Check all nodes, print and write the report; return the exit code, which the other nodes get, too."""
        report = self.check(started)
        code = NOT_FIT if report.problems else FIT
        print(report.text(time.monotonic() - started), flush=True)
        self._channel.ask({node.rank: {"do": "end", "code": code} for node in report.nodes if node.rank}, _END_S)
        if self._args.json:
            try:
                Path(self._args.json).write_text(json.dumps(report.record(code), indent=1) + "\n")
            except OSError as error:
                raise UserError(
                    f"--json {self._args.json}: {error.strerror}: name a file that node 0 can write"
                ) from error
        return code

    def check(self, started: float) -> PreflightReport:
        """Do all checks; bandwidth is measured only if all nodes are there."""
        args, rendezvous = self._args, self._channel.rendezvous
        present = self._channel.wait_for_nodes(started + args.timeout)
        reports, processes = self._reports(present)
        names = node_names(rendezvous, reports)
        missing = sorted({*range(rendezvous.nodes)} - {*present})
        silent = sorted({*present} - {report.rank for report in reports})
        clocks = {report.rank: self._channel.clock_offset(report.rank) for report in reports if report.rank}
        needs = Needs(self._node.processes, args.shm_gb, args.free_gb)
        findings = [
            *missing_nodes(missing, names, args.timeout, rendezvous.port),
            *_silent_nodes(silent, names),
            *check_nodes(reports, names, needs),
            *check_clocks(clocks, names, args.max_clock_skew),
        ]
        bandwidths = Bandwidths()
        if self._node.measures and not missing and not silent and len(processes) == 1:
            bandwidths, found = self._bandwidths(names)
            findings += found
        return PreflightReport(names, reports, clocks, bandwidths, findings, self._node.processes, self._node.backend)

    def _reports(self, present: Sequence[int]) -> tuple[list[NodeReport], set[int]]:
        """Return the reports in the order of ranks, and the numbers of processes per node that occur."""
        answers = self._channel.ask({rank: {"do": "report"} for rank in present}, _REPORT_S, self._node.perform)
        processes = {answer.pop("processes") for answer in answers.values()}
        for answer in answers.values():
            answer["paths"] = {path: PathState(**state) for path, state in answer["paths"].items()}
        return [NodeReport(**answers[rank]) for rank in sorted(answers)], processes

    def _bandwidths(self, names: dict[int, str]) -> tuple[Bandwidths, list[Finding]]:
        args = self._args
        try:
            errors = {names[rank]: error for rank, error in self._get_ready(names).items() if error}
            if errors:
                remedy = "mend that first; no bandwidth was measured"
                found = [Finding((name,), f"its processes don't start ({e})", remedy) for name, e in errors.items()]
                return Bandwidths(), found
            measured = measure_all(len(names), self._node.processes, args.slow_below, self._measure)
        except _SilentNodesError as error:
            return Bandwidths(), _silent_nodes(error.ranks, names)
        return measured, check_bandwidths(measured, names, args.slow_below, args.min_bandwidth)

    def _measure(self, groups: Sequence[NodeGroup]) -> list[AllReduce]:
        """Measure groups that share no node, at the same time."""
        if self._failed:  # else nodes whose processes were killed join the next one late, which then fails, too
            self._get_ready([rank for group in groups for rank in group])
        self._rounds += 1
        tasks: dict[int, Task] = {}
        for group in groups:
            task = {"do": "measure", "prefix": f"round{self._rounds}/{group[0]}", "seconds": self._args.round_timeout}
            tasks |= {rank: {**task, "index": i, "nodes": len(group)} for i, rank in enumerate(group)}
        answers = self._ask_all(tasks, self._args.round_timeout + _RESTART_S)
        measured = [_slowest(group, [answers[rank] for rank in group]) for group in groups]
        self._failed = any(each.error for each in measured)
        return measured

    def _get_ready(self, ranks: Iterable[int]) -> dict[int, str]:
        return self._ask_all({rank: {"do": "ready"} for rank in ranks}, _READY_S)

    def _ask_all(self, tasks: Mapping[int, Task], seconds: float) -> dict[int, Answer]:
        answers = self._channel.ask(tasks, seconds, self._node.perform)
        if silent := sorted({*tasks} - {*answers}):
            raise _SilentNodesError(silent)
        return answers


def _slowest(group: NodeGroup, answers: Sequence[dict[str, Any]]) -> AllReduce:
    errors = [answer["error"] for answer in answers if "error" in answer]
    if errors:
        return AllReduce(group, 0.0, errors[0])
    return AllReduce(group, min(answer["bandwidth"] for answer in answers))


def _silent_nodes(ranks: Sequence[int], names: Mapping[int, str]) -> list[Finding]:
    return [Finding((names[rank],), "came and has stopped answering", "its own log tells why") for rank in ranks]


@dataclass(frozen=True)
class PreflightReport:
    """All that was found: a table of the nodes, then a line per problem; the same as plain data for programs.

    Attributes:
        names: Names of all nodes by rank, also of those that did not come.
        clocks: (seconds ahead of node 0, uncertainty) by rank.
        processes: Processes per node.
    """

    names: Mapping[int, str]
    nodes: Sequence[NodeReport]
    clocks: Mapping[int, tuple[float, float]]
    bandwidths: Bandwidths
    findings: Sequence[Finding]
    processes: int
    backend: str

    @property
    def problems(self) -> list[Finding]:
        """Findings other than notes."""
        return [finding for finding in self.findings if not finding.is_note]

    def text(self, seconds: float) -> str:
        """Return table and findings, as they are printed."""
        return "\n".join(self._lines(seconds))

    def record(self, code: int) -> dict[str, Any]:
        """Return the same as plain data, for `--json`."""
        return {
            "exit_code": code,
            "processes_per_node": self.processes,
            "backend": self.backend,
            "nodes": [
                {"name": self.names[each.rank], **asdict(each), "clock_s": self.clocks.get(each.rank, (0.0, 0.0))}
                for each in self.nodes
            ],
            "bandwidth_gb_per_s": asdict(self.bandwidths),
            "findings": [{**asdict(each), "text": str(each)} for each in self.findings],
        }

    def _lines(self, seconds: float) -> Iterator[str]:
        bandwidths = {f"GB/s {how}": getattr(self.bandwidths, how) for how in ("alone", "ring")}
        columns = {title: node_bandwidths(measured) for title, measured in bandwidths.items() if measured}
        nodes, processes = _count(len(self.names), "node"), _count(self.processes, "process", "processes")
        yield f"preflight: {nodes}, {processes} each ({self.backend})"
        yield f"{'the same on all' if len(self.names) > 1 else 'versions'}: {', '.join(self._common_versions())}"
        reports = {report.rank: report for report in self.nodes}
        rows = [self._row(rank, reports.get(rank), list(columns.values())) for rank in self.names]
        yield from table([[*_HEADING, *columns], *rows])
        if self.bandwidths.halves:
            halves = [
                f"{self.names[half.nodes[0]]} to {self.names[half.nodes[-1]]} {half.bandwidth:.3g} GB/s"
                for half in self.bandwidths.halves[-1]
            ]
            yield f"halves: {'; '.join(halves)}"
        if columns:
            yield "GB/s: bus bandwidth of an all-reduce, per process (ring: with the better of two neighbours)"
        yield from map(str, self.findings)
        verdict = f"not fit: {_count(len(self.problems), 'problem')}" if self.problems else "fit"
        yield f"{nodes} checked in {seconds:.1f} s: {verdict}"

    def _common_versions(self) -> list[str]:
        first, *others = [report.versions for report in self.nodes]
        return [f"{what} {value}" for what, value in first.items() if all(each[what] == value for each in others)]

    def _row(self, rank: int, report: NodeReport | None, bandwidths: Sequence[Mapping[int, float]]) -> list[str]:
        if report is None:
            return [self.names[rank], str(rank), "missing", *[""] * (len(_HEADING) - 3 + len(bandwidths))]
        active = sum(state.startswith(ACTIVE) for state in report.cards.values())
        ahead, uncertainty = self.clocks.get(rank, (0.0, 0.0))
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
            f"{1000 * ahead:+.2g} ± {1000 * uncertainty:.1g}" if rank in self.clocks else "0",
            *(f"{column[rank]:.3g}" for column in bandwidths),
        ]


def _count(number: int, one: str, many: str = "") -> str:
    return f"{number} {one if number == 1 else many or one + 's'}"
