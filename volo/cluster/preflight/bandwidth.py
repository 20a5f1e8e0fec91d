"""Which all-reduces are measured, and which nodes and links their bandwidths show to be slow.

A pair is as slow as its slower node, so a node counts as fast as the faster of its two pairs on the ring. That names
the slow node among three or more; a slow pair of two good nodes means a slow link. Two nodes alone can't be compared.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from statistics import median

NodeGroup = tuple[int, ...]
_BISECTED_ABOVE = 8
_PASSES = 3


@dataclass(frozen=True)
class AllReduce:
    """A measured all-reduce over all processes of some nodes.

    Attributes:
        bandwidth: GB/s, bus bandwidth per process; 0 where it failed.
    """

    nodes: NodeGroup
    bandwidth: float
    error: str = ""


Measure = Callable[[Sequence[NodeGroup]], list[AllReduce]]
"""Measures groups that share no node, at the same time."""


@dataclass(frozen=True)
class Bandwidths:
    """All that was measured.

    Attributes:
        alone: One of each node; empty with one process per node.
        ring: One of each pair of neighbours.
        halves: (slower half, other half), then the halves of the slower one and so on; empty for few nodes.
    """

    alone: tuple[AllReduce, ...] = ()
    ring: tuple[AllReduce, ...] = ()
    halves: tuple[tuple[AllReduce, AllReduce], ...] = ()


def ring_rounds(nodes: int) -> list[list[NodeGroup]]:
    """Return the pairs of neighbours on a ring, in rounds of pairs that share no node."""
    pairs: list[NodeGroup] = [(i, (i + 1) % nodes) for i in range(nodes if nodes > 2 else nodes - 1)]
    last = [pairs.pop()] if nodes > 2 and nodes % 2 else []
    return [each for each in (pairs[::2], pairs[1::2], last) if each]


def measure_all(nodes: int, processes: int, share: float, measure: Measure) -> Bandwidths:
    """Measure each node alone, the ring, and halves; slow is what reaches less than `share` of the usual."""
    alone: list[list[NodeGroup]] = [[(node,) for node in range(nodes)]] if processes > 1 else []
    return Bandwidths(
        _measure_rounds(alone, share, measure),
        _measure_rounds(ring_rounds(nodes), share, measure),
        _bisect(nodes, share, measure) if nodes > _BISECTED_ABOVE else (),
    )


def _measure_rounds(rounds: Sequence[Sequence[NodeGroup]], share: float, measure: Measure) -> tuple[AllReduce, ...]:
    """Measure; what is slow is measured again, beside fewer others, and the best counts.

    Other work on the machines passes, a bad cable stays. What failed is not repeated: it may take the full timeout.
    """
    best = {result.nodes: result for groups in rounds for result in measure(groups)}
    for _ in range(_PASSES - 1 if best else 0):
        least = share * usual(best.values())
        slow = {group for group, result in best.items() if 0 < result.bandwidth < least}
        for groups in rounds:
            again = measure([group for group in groups if group in slow]) if slow & {*groups} else []
            best |= {new.nodes: max(best[new.nodes], new, key=lambda each: each.bandwidth) for new in again}
    return tuple(best.values())


def node_bandwidths(measured: Iterable[AllReduce]) -> dict[int, float]:
    """Return the best that each node has reached, in GB/s by rank."""
    best: dict[int, float] = {}
    for each in measured:
        for node in each.nodes:
            best[node] = max(best.get(node, 0.0), each.bandwidth)
    return best


def usual(measured: Iterable[AllReduce]) -> float:
    """Return the median node's bandwidth in GB/s."""
    return median(node_bandwidths(measured).values())


def slow_nodes(measured: Sequence[AllReduce], share: float) -> list[int]:
    """Return the nodes that reach less than `share` of the median node."""
    return [n for n, best in node_bandwidths(measured).items() if best < share * usual(measured)]


def slow_pairs(measured: Sequence[AllReduce], share: float) -> list[AllReduce]:
    """Return slow or failed measurements that no slow node explains."""
    slow = set(slow_nodes(measured, share))
    return [
        each
        for each in measured
        if not slow & {*each.nodes} and (each.error or each.bandwidth < share * usual(measured))
    ]


def _bisect(nodes: int, share: float, measure: Measure) -> tuple[tuple[AllReduce, AllReduce], ...]:
    """Measure the two halves at the same time, then those of the slower half, as long as one of two is slow.

    The last slow half tells where the trouble is. A healthy cluster costs one round.
    """
    found = []
    group: NodeGroup = tuple(range(nodes))
    while len(group) >= 4:
        middle = len(group) // 2
        slower, other = sorted(measure([group[:middle], group[middle:]]), key=lambda each: each.bandwidth)
        found.append((slower, other))
        if slower.bandwidth >= share * other.bandwidth:
            break
        group = slower.nodes
    return tuple(found)


def slow_half(halves: Sequence[tuple[AllReduce, AllReduce]], share: float) -> tuple[AllReduce, AllReduce] | None:
    """Return the smallest half that is slower than its other half, and that one."""
    slow = [(slower, other) for slower, other in halves if slower.bandwidth < share * other.bandwidth]
    return slow[-1] if slow else None
