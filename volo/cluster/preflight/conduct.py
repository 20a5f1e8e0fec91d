"""Node 0's part: ask all nodes, judge the answers, tell everybody how it ended."""

from __future__ import annotations

import json
import time
from argparse import Namespace
from collections.abc import Sequence
from pathlib import Path

from tlt.errors import UserError
from volo.cluster.preflight.bandwidth import Bandwidths, Group, Measured, measure_all
from volo.cluster.preflight.findings import (
    Finding,
    Needs,
    check_bandwidths,
    check_clocks,
    check_nodes,
    missing_nodes,
    node_names,
)
from volo.cluster.preflight.meeting import Meeting
from volo.cluster.preflight.node import Node
from volo.cluster.preflight.node_report import NodeReport, PathState
from volo.cluster.preflight.outcome import Outcome

FIT, NOT_FIT = 0, 6
_REPORT_S = 30.0
_READY_S = 250.0
_RESTART_S = 20.0  # of a process that had to be killed
_END_S = 5.0


class _Silent(Exception):
    """A node doesn't answer any more."""

    def __init__(self, ranks: Sequence[int]) -> None:
        self.ranks = ranks


def conduct(args: Namespace, meeting: Meeting, node: Node, started: float) -> int:
    """Check all nodes, print and write the outcome; return the exit code, which the others get, too."""
    outcome = Conductor(args, meeting, node).check(started)
    code = NOT_FIT if outcome.problems else FIT
    print(outcome.text(time.monotonic() - started), flush=True)
    meeting.ask({report.rank: {"do": "end", "code": code} for report in outcome.reports if report.rank}, _END_S)
    if args.json:
        try:
            Path(args.json).write_text(json.dumps(outcome.record(code), indent=1) + "\n")
        except OSError as error:
            raise UserError(f"--json {args.json}: {error.strerror}: name a file that node 0 can write") from error
    return code


class Conductor:
    """Asks step by step; what it finds adds up in an Outcome."""

    def __init__(self, args: Namespace, meeting: Meeting, node: Node) -> None:
        self._args, self._meeting, self._node = args, meeting, node
        self._rendezvous = meeting.rendezvous
        self._rounds = 0
        self._failed = False

    def check(self, started: float) -> Outcome:
        """Go through all checks; bandwidth is measured only if all nodes are there."""
        args, rendezvous = self._args, self._rendezvous
        present = self._meeting.arrived(started + args.timeout)
        reports, processes = self._reports(present)
        names = node_names(rendezvous, reports)
        missing = sorted({*range(rendezvous.nodes)} - {*present})
        silent = sorted({*present} - {report.rank for report in reports})
        clocks = {report.rank: self._meeting.clock_offset(report.rank) for report in reports if report.rank}
        needs = Needs(self._node.processes, args.shm_gb, args.free_gb)
        findings = [
            *missing_nodes(missing, names, args.timeout, rendezvous.port),
            *_stopped(silent, names),
            *check_nodes(reports, names, needs),
            *check_clocks(clocks, names, args.max_clock_skew),
        ]
        bandwidths = Bandwidths()
        if self._node.measures and not missing and not silent and len(processes) == 1:
            bandwidths, found = self._bandwidths(names)
            findings += found
        return Outcome(names, reports, clocks, bandwidths, findings, self._node.processes, self._node.backend)

    def _reports(self, present: Sequence[int]) -> tuple[list[NodeReport], set[int]]:
        """Return the reports in the order of ranks, and the numbers of processes per node that occur."""
        answers = self._meeting.ask({rank: {"do": "report"} for rank in present}, _REPORT_S, self._node.perform)
        processes = {answer.pop("processes") for answer in answers.values()}
        for answer in answers.values():
            answer["paths"] = {path: PathState(**state) for path, state in answer["paths"].items()}
        return [NodeReport(**answers[rank]) for rank in sorted(answers)], processes

    def _bandwidths(self, names: dict[int, str]) -> tuple[Bandwidths, list[Finding]]:
        args = self._args
        try:
            failures = self._ask_all({rank: {"do": "ready"} for rank in names}, _READY_S)
            if any(failures.values()):
                remedy = "mend that first; no bandwidth was measured"
                text = "its processes don't start"
                return Bandwidths(), [Finding((names[r],), f"{text} ({e})", remedy) for r, e in failures.items() if e]
            measured = measure_all(len(names), self._node.processes, args.slow_below, self._measure)
        except _Silent as error:
            return Bandwidths(), _stopped(error.ranks, names)
        return measured, check_bandwidths(measured, names, args.slow_below, args.min_bandwidth)

    def _measure(self, groups: Sequence[Group]) -> list[Measured]:
        """Measure groups that share no node, at the same time."""
        if self._failed:  # or those whose process was killed come late to the next one, and fail again
            self._ask_all({rank: {"do": "ready"} for group in groups for rank in group}, _READY_S)
        self._rounds += 1
        seconds = self._args.round_timeout
        tasks = {
            rank: {
                "do": "measure",
                "prefix": f"round{self._rounds}/{group[0]}",
                "index": index,
                "nodes": len(group),
                "seconds": seconds,
            }
            for group in groups
            for index, rank in enumerate(group)
        }
        answers = self._ask_all(tasks, seconds + _RESTART_S)
        measured = [_measured(group, [answers[rank] for rank in group]) for group in groups]
        self._failed = any(each.error for each in measured)
        return measured

    def _ask_all(self, tasks: dict[int, dict], seconds: float) -> dict:
        answers = self._meeting.ask(tasks, seconds, self._node.perform)
        if silent := sorted({*tasks} - {*answers}):
            raise _Silent(silent)
        return answers


def _measured(group: Group, answers: Sequence[dict]) -> Measured:
    errors = [answer["error"] for answer in answers if "error" in answer]
    if errors:
        return Measured(group, 0.0, errors[0])
    return Measured(group, min(answer["bandwidth"] for answer in answers))


def _stopped(ranks: Sequence[int], names: dict[int, str]) -> list[Finding]:
    return [Finding((names[rank],), "came and has stopped answering", "its own log tells why") for rank in ranks]
