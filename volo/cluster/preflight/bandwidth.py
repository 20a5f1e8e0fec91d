"""Who is slow: which all-reduces are measured, and what their bandwidths say.

A pair is as slow as its slower node, so a node counts as fast as the faster of its two pairs on the ring. That names
a node among three; a pair that is slow between two good nodes is the link. Two nodes have nothing to compare with.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from statistics import median

Group = tuple[int, ...]
_BISECTED_ABOVE = 8
_PASSES = 3


@dataclass(frozen=True)
class Measured:
    """An all-reduce over all processes of some nodes.

    Attributes:
        bandwidth: GB/s, bus bandwidth per process; 0 where it failed.
    """

    nodes: Group
    bandwidth: float
    error: str = ""


Measure = Callable[[Sequence[Group]], list[Measured]]
"""Measures groups that share no node at the same time."""


@dataclass(frozen=True)
class Bandwidths:
    """All that was measured.

    Attributes:
        alone: Of each node by itself; empty with one process per node.
        ring: Of neighbours.
        halves: Of halves, halves of the slower half and so on; empty for few nodes.
    """

    alone: tuple[Measured, ...] = ()
    ring: tuple[Measured, ...] = ()
    halves: tuple[tuple[Measured, Measured], ...] = ()


def ring_rounds(nodes: int) -> list[list[Group]]:
    """Pairs of neighbours on a ring, in rounds of pairs that share no node."""
    pairs: list[Group] = [(i, (i + 1) % nodes) for i in range(nodes if nodes > 2 else nodes - 1)]
    last = [pairs.pop()] if nodes > 2 and nodes % 2 else []
    return [each for each in (pairs[::2], pairs[1::2], last) if each]


def measure_all(nodes: int, processes: int, share: float, measure: Measure) -> Bandwidths:
    """Measure all of it."""
    alone_rounds: list[list[Group]] = [[(node,) for node in range(nodes)]] if processes > 1 else []
    alone = _measure_rounds(alone_rounds, share, measure)
    ring = _measure_rounds(ring_rounds(nodes), share, measure)
    halves = bisect(nodes, share, measure) if nodes > _BISECTED_ABOVE else []
    return Bandwidths(tuple(alone), tuple(ring), tuple(halves))


def _measure_rounds(rounds: Sequence[Sequence[Group]], share: float, measure: Measure) -> list[Measured]:
    """What is slow is measured again, beside less, and the best counts: other work passes, a bad cable stays.

    What fails is not: it takes as long as it may, each time.
    """
    best = {result.nodes: result for groups in rounds for result in measure(groups)}
    for _ in range(_PASSES - 1):
        usual_value = usual(best.values()) if best else 0.0
        slow = {group for group, result in best.items() if 0 < result.bandwidth < share * usual_value}
        for groups in rounds:
            again = measure([group for group in groups if group in slow]) if slow & {*groups} else []
            best |= {new.nodes: max(best[new.nodes], new, key=lambda each: each.bandwidth) for new in again}
    return list(best.values())


def node_bandwidths(measured: Iterable[Measured]) -> dict[int, float]:
    """The best that each node has reached, by rank."""
    best: dict[int, float] = {}
    for each in measured:
        for node in each.nodes:
            best[node] = max(best.get(node, 0.0), each.bandwidth)
    return best


def usual(measured: Iterable[Measured]) -> float:
    """The median node's bandwidth in GB/s."""
    return median(node_bandwidths(measured).values())


def slow_nodes(measured: Sequence[Measured], share: float) -> list[int]:
    """Nodes that reach less than `share` of the median node."""
    return [n for n, best in node_bandwidths(measured).items() if best < share * usual(measured)]


def slow_pairs(measured: Sequence[Measured], share: float) -> list[Measured]:
    """Slow or failed measurements that no slow node explains."""
    slow = set(slow_nodes(measured, share))
    return [
        each
        for each in measured
        if not slow & {*each.nodes} and (each.error or each.bandwidth < share * usual(measured))
    ]


def bisect(nodes: int, share: float, measure: Measure) -> list[tuple[Measured, Measured]]:
    """Measure the two halves at the same time, then the halves of a slow half; (slow, other) as long as one is slow.

    The last pair tells where the trouble is. A healthy cluster costs one round: its halves are returned, none slow.
    """
    found = []
    group: Group = tuple(range(nodes))
    while len(group) >= 4:
        middle = len(group) // 2
        slower, other = sorted(measure([group[:middle], group[middle:]]), key=lambda each: each.bandwidth)
        found.append((slower, other))
        if slower.bandwidth >= share * other.bandwidth:
            break
        group = slower.nodes
    return found


def slow_half(halves: Sequence[tuple[Measured, Measured]], share: float) -> tuple[Measured, Measured] | None:
    """The smallest half that is slower than its other half."""
    slow = [(one, other) for one, other in halves if one.bandwidth < share * other.bandwidth]
    return slow[-1] if slow else None
