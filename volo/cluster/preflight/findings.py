"""Problems of the nodes, each with its remedy: reports are compared with each other and with what the run needs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from volo.cluster.preflight.bandwidth import (
    AllReduce,
    Bandwidths,
    node_bandwidths,
    slow_half,
    slow_nodes,
    slow_pairs,
    usual,
)
from volo.cluster.preflight.node_report import ACTIVE, GB, NONE, NodeReport
from volo.cluster.preflight.rendezvous import Rendezvous

_MEMLOCK_GB = 1.0  # a training pins more; the usual default limits are far below
_ENVIRONMENT = "start all nodes from the same environment or image"
_REMEDIES = {
    "project": _ENVIRONMENT,
    "code": "bring the checkout on every node to the same state (git status, git pull), or share one",
    **dict.fromkeys(("Python", "torch", "CUDA", "NCCL"), _ENVIRONMENT),
    "driver": "have the driver updated there, or leave the node out",
}


@dataclass(frozen=True)
class Finding:
    """A problem of some nodes, or a note (`is_note`), which is good to know and no reason to stop."""

    nodes: tuple[str, ...]
    what: str
    remedy: str = ""
    is_note: bool = False

    def __str__(self) -> str:
        parts = [", ".join(self.nodes), self.what, self.remedy]
        return ("note: " if self.is_note else "") + ": ".join(part for part in parts if part)


@dataclass(frozen=True)
class Needs:
    """What a run needs on each node; shared memory in GB per process."""

    processes: int
    shm_gb: float = 0.0
    free_gb: float = 0.0


Names = Mapping[int, str]


def node_names(rendezvous: Rendezvous, reports: Sequence[NodeReport]) -> dict[int, str]:
    """Return what messages call the nodes, by rank: names of Slurm's or the user's list, else host names."""
    names = {rank: rendezvous.name(rank) for rank in range(rendezvous.nodes)}
    hosts = {report.rank: report.host for report in reports}
    if not rendezvous.names:
        # Where two hosts have the same name, their ranks tell them apart.
        names |= {r: host if [*hosts.values()].count(host) == 1 else f"{host}#{r}" for r, host in hosts.items()}
    return names


def check_nodes(reports: Sequence[NodeReport], names: Names, needs: Needs) -> list[Finding]:
    """Return all problems and notes that the reports show."""
    single = (finding for report in reports for finding in _check_node(report, names[report.rank], needs))
    return [*_differences(reports, names), *_same_address(reports, names), *_merged(single)]


def _merged(findings: Iterable[Finding]) -> list[Finding]:
    """Merge equal findings of several nodes into one."""
    nodes: dict[Finding, tuple[str, ...]] = {}
    for each in findings:
        what = replace(each, nodes=())
        nodes[what] = nodes.get(what, ()) + each.nodes
    return [replace(each, nodes=names) for each, names in nodes.items()]


def missing_nodes(missing: Sequence[int], names: Names, seconds: float, port: int) -> list[Finding]:
    """Return a finding for each node that did not come: each has to be looked at."""
    remedy = (
        f"see there whether it is up and the preflight was started on it (its own log tells), and whether it reaches "
        f"node 0's port {port}; or leave it out (#SBATCH --exclude={{}}); machines that start slowly: --timeout"
    )
    return [
        Finding((names[rank],), f"has not come within {seconds:g} s", remedy.format(names[rank])) for rank in missing
    ]


def check_clocks(offsets: Mapping[int, tuple[float, float]], names: Names, limit_s: float) -> list[Finding]:
    """Return clocks that are surely further from node 0's than `limit_s`; `offsets`: (seconds ahead, uncertainty)."""
    return [
        Finding(
            (names[rank],),
            f"its clock is {abs(ahead):.3g} s {'ahead of' if ahead > 0 else 'behind'} node 0's",
            "have it synchronised (chronyc tracking, timedatectl): log times and locks depend on it",
        )
        for rank, (ahead, uncertainty) in offsets.items()
        if abs(ahead) - uncertainty > limit_s
    ]


def check_bandwidths(measured: Bandwidths, names: Names, share: float, minimum: float | None = None) -> list[Finding]:
    """Return slow nodes, then slow links between good nodes, then what shows only among many nodes."""
    alone = _slow(measured.alone, names, share, "alone", "look at its NVLink and PCIe (nvidia-smi topo -m, dmesg)")
    network = "look at its network card and cable (ibstat, ethtool, ip -s link)"
    ring = _slow(measured.ring, names, share, "with its neighbours", network)
    named = {name for finding in (*alone, *ring) for name in finding.nodes}
    pairs = []
    for each in slow_pairs(measured.ring, share):
        if each.error:
            text, remedy = f"fails ({each.error})", "let them reach each other on all ports (firewall, routes)"
        else:
            text, remedy = _share_text(each.bandwidth, usual(measured.ring)), "look at the way between them"
        pairs.append(Finding(_named(each, names), f"all-reduce between them {text}", remedy))
    lone = [
        Finding((names[each.nodes[0]],), f"all-reduce alone fails ({each.error})", "its own log tells more")
        for each in measured.alone
        if each.error and names[each.nodes[0]] not in named
    ]
    below = _below(measured.ring, names, minimum)
    return [*alone, *ring, *lone, *pairs, *below, *_halves(measured, names, named, share)]


def _named(measured: AllReduce, names: Names) -> tuple[str, ...]:
    return tuple(names[node] for node in measured.nodes)


def _slow(measured: Sequence[AllReduce], names: Names, share: float, how: str, remedy: str) -> list[Finding]:
    best = node_bandwidths(measured)
    found = []
    for node in slow_nodes(measured, share):
        error = next((each.error for each in measured if node in each.nodes and each.error), "")
        text = f"fails ({error})" if not best[node] else _share_text(best[node], usual(measured))
        leave_out = f"or leave it out (#SBATCH --exclude={names[node]})"
        found.append(Finding((names[node],), f"all-reduce {how} {text}", f"{remedy}, {leave_out}"))
    return found


def _share_text(bandwidth: float, reference: float) -> str:
    return f"reaches {bandwidth:.3g} GB/s, {100 * bandwidth / reference:.2g} % of the median node's {reference:.3g}"


def _below(ring: Sequence[AllReduce], names: Names, minimum: float | None) -> list[Finding]:
    return [
        Finding(
            _named(each, names),
            f"all-reduce between them reaches {each.bandwidth:.3g} GB/s, less than --min-bandwidth {minimum:g}",
            "see which network it takes (NCCL_DEBUG=INFO tells), or lower the limit",
        )
        for each in ring
        if minimum is not None and not each.error and each.bandwidth < minimum
    ]


def _halves(measured: Bandwidths, names: Names, named: set[str], share: float) -> list[Finding]:
    found = [
        Finding(_named(half, names), f"all-reduce among them fails ({half.error})", "their logs tell more")
        for pair in measured.halves
        for half in pair
        if half.error
    ]
    slower, other = slow_half(measured.halves, share) or (None, None)
    # A slow node makes its half slow.
    if slower and other and not slower.error and not named & {*_named(slower, names)}:
        text = f"reaches {slower.bandwidth:.3g} GB/s, among as many others {other.bandwidth:.3g}"
        remedy = "look at what they share (leaf switch, uplinks)"
        found.append(Finding(_named(slower, names), f"all-reduce among them {text}", remedy))
    return found


def _differences(reports: Sequence[NodeReport], names: Names) -> list[Finding]:
    found = []
    for what, remedy in _REMEDIES.items():
        found += _unequal({r.rank: r.versions[what] for r in reports}, names, what, remedy)
    remedy = "look for a failed GPU (nvidia-smi, dmesg), or give the job whole nodes (--gpus-per-node)"
    found += _unequal({r.rank: str(r.gpus) for r in reports}, names, "GPUs", remedy)
    found += _unequal({r.rank: r.gpu for r in reports}, names, "GPU model", "ask for one kind (--constraint)")
    for card in sorted({card for report in reports for card in report.cards}):
        states = {r.rank: r.cards.get(card, NONE) for r in reports}
        found += _unequal(states, names, f"card {card}", "look at it (ibstat), or leave the node out")
    for path in sorted({path for report in reports for path in report.paths}):
        sizes = {r.rank: str(r.paths[path].size) for r in reports if path in r.paths and not r.paths[path].error}
        found += _unequal(sizes, names, f"size of {path}", "copy it there again, or mount the same one")
    return found


def _unequal(values: Mapping[int, str], names: Names, what: str, remedy: str) -> list[Finding]:
    """Return a finding for each value other than the most frequent one, or one for all values where none is."""
    counts = Counter(values.values()).most_common()
    if len(counts) < 2:
        return []
    if counts[0][1] == counts[1][1]:
        told = ", ".join(f"{value} on {', '.join(_with(values, names, value))}" for value, _ in counts)
        return [Finding(tuple(names[rank] for rank in values), f"{what} differs ({told})", remedy)]
    usual_value, count = counts[0]
    others = f"{usual_value} on the other {count}"
    return [Finding(_with(values, names, value), f"{what} {value}, {others}", remedy) for value, _ in counts[1:]]


def _with(values: Mapping[int, str], names: Names, value: str) -> tuple[str, ...]:
    return tuple(names[rank] for rank, each in values.items() if each == value)


def _same_address(reports: Sequence[NodeReport], names: Names) -> list[Finding]:
    addresses: dict[str, list[str]] = {}
    for report in reports:
        addresses.setdefault(report.address, []).append(names[report.rank])
    remedy = "give containers the host's network, or start one task per node"
    return [
        Finding(tuple(same), f"have the same address {address} on the way to node 0", remedy)
        for address, same in addresses.items()
        if len(same) > 1
    ]


def _check_node(report: NodeReport, name: str, needs: Needs) -> list[Finding]:
    found = [Finding((name,), note, is_note=True) for note in report.notes]

    def add(what: str, remedy: str) -> None:
        found.append(Finding((name,), what, remedy))

    count = needs.processes
    if report.versions["driver"] != NONE and not report.gpus:
        add("an NVIDIA driver is loaded, but torch sees no GPU", "give the task its GPUs, and a torch with CUDA")
    elif 0 < report.gpus < count:
        add(f"{report.gpus} GPUs for {count} processes", "give the job whole nodes, or start fewer processes")
    for path, state in report.paths.items():
        if state.error:
            add(f"can't read {path} ({state.error})", "mount it there, and check its name and permissions")
    if report.output_error:
        add(f"can't write to --output ({report.output_error})", "mount it there, and check its permissions")
    if report.free_gb is not None and report.free_gb < needs.free_gb:
        room = f"{report.free_gb:.3g} GB free for checkpoints, --free-gb {needs.free_gb:g}"
        add(room, "make room, or lower the limit")
    if report.shm_gb < needs.shm_gb * count:
        remedy = "enlarge it (docker run --ipc=host, mount -o remount,size=...), or use fewer data workers and --shm-gb"
        add(f"/dev/shm has {report.shm_gb:.3g} GB free, {count} processes want {needs.shm_gb * count:g}", remedy)
    active = any(state.startswith(ACTIVE) for state in report.cards.values())
    if active and report.memlock_gb is not None and report.memlock_gb < _MEMLOCK_GB:
        limit = f"{report.memlock_gb * GB / 1024:.0f} KiB"
        remedy = "unlimited in limits.conf, slurmd's LimitMEMLOCK=infinity, or docker run --ulimit memlock=-1"
        add(f"a process may lock {limit} of memory, too little for InfiniBand", remedy)
    return found
