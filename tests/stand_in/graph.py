"""A CUDA graph of the device that is not there.

A capture computes nothing that lasts: what it has overwritten comes back at its end, and what it has made holds NaN
until the first replay. It keeps each operation with the numbers that Python had for it. A replay does them all again,
in the same memory, as one launch of the current stream. Random numbers are drawn as a GPU draws them there: from the
device's default generator as it is at the replay, so that they follow a seed that is set before.

What a GPU refuses in a capture raises: a wait, a copy between host and device, page-locked memory, a seed, the state of
a generator, a generator of one's own, a capture on the default stream. Memory that was given back, and is used by a
later replay, is a race. A GPU gives memory that a capture has freed to its next allocations, and to later captures in
the same pool; here nothing is given twice.
"""

import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from tests.stand_in.streams import ACTIVE, Block, Event, Stream, current_stream, on_stream


class Kept(NamedTuple):
    """An operation of a graph."""

    name: str
    place: str  # the function of the product that has called it
    numbers: tuple[Any, ...]  # of Python, among its operands
    run: Callable[[], Any]
    results: list[Tensor]

    def __str__(self) -> str:
        """What is the same in the graphs of two steps, if this is."""
        return f"{self.name}{[tuple(result.shape) for result in self.results]} {self.numbers} in {self.place}"


class Graph:
    """Stands for `torch.cuda.CUDAGraph`.

    Attributes:
        kept: What a replay does, in order.
    """

    def __init__(self, keep_graph: bool = False) -> None:
        self.kept: list[Kept] = []
        self.failed = True
        self._before: dict[int, tuple[Any, Any]] = {}  # others' storages that were overwritten, and their contents
        self._made: set[int] = set()  # the graph's own storages
        self._used, self._written = weakref.WeakSet[Block](), weakref.WeakSet[Block]()
        self._outside: dict[int, weakref.ref[Block]] = {}  # memory that is not the graph's own
        self._replayed: tuple[Any, Event] | None = None  # device and end of the newest replay

    def capture_begin(self) -> None:
        device = ACTIVE.device
        if current_stream() is device.default:
            raise RuntimeError("CUDA graphs must be captured on a non-default stream.")
        self._draws = torch.get_rng_state()
        self.failed, device.capturing = False, self

    def keep(self, what: tuple[str, str, Any], run: Callable[[], Any], tensors: list[Any], written: list[Any]) -> Any:
        """Keep an operation, `what` its name, place and numbers are, on tensors of the device, of which it overwrites
        some. Returns results of its shapes."""
        for tensor in written:
            storage = tensor.held.untyped_storage()
            if storage._cdata not in self._made and storage._cdata not in self._before:
                self._before[storage._cdata] = (storage, storage.clone())
            self._written.add(tensor.block)
        for block in {tensor.block for tensor in tensors}:
            self._used.add(block)
            if block.graph is not self:
                self._outside[id(block)] = weakref.ref(block)
        self.kept.append(Kept(*what, run, results := _tensors(result := run())))
        given = {tensor.held.untyped_storage()._cdata for tensor in tensors}
        self._made |= {each.untyped_storage()._cdata for each in results} - given
        return result

    def capture_end(self) -> None:
        """Undo what the operations have done when they were tried for the shapes of their results."""
        ACTIVE.device.capturing = None
        torch.set_rng_state(self._draws)
        with _disable_current_modes(), torch.no_grad():
            for storage, contents in self._before.values():
                storage.copy_(contents)
            for result in (each for kept in self.kept for each in kept.results if each.is_floating_point()):
                if result.untyped_storage()._cdata in self._made:
                    result.fill_(float("nan"))
        self._before.clear()
        if self.failed:
            ACTIVE.device.left_by_failures |= {"generator", "pool", "memory"}
            raise RuntimeError("CUDA error: operation failed due to a previous error during capture")

    def replay(self) -> None:
        if self.failed:
            raise RuntimeError("Called CUDAGraph::replay without a preceding successful capture.")
        device = ACTIVE.device
        device.refuse_in_capture("replay")
        if any(block() is None for block in self._outside.values()):
            device.race("a graph uses memory that was given back")
        device.launch("a graph", current_stream(), {*self._used}, {*self._written})
        with _disable_current_modes(), torch.no_grad():
            for kept in self.kept:
                for result, new in zip(kept.results, _tensors(kept.run()), strict=True):
                    if new is not result:
                        result.copy_(new)
        self._replayed = device, current_stream().record_event()

    def __del__(self) -> None:
        if self._replayed is not None and not self._replayed[1].query():
            self._replayed[0].race("a graph and its memory are freed while it may still run")

    def reset(self) -> None:
        self.__init__()  # type: ignore[misc]

    def pool(self) -> tuple[int, int]:
        return (0, 1)


@contextmanager
def capture(graph: Graph, pool: Any = None, stream: Stream | None = None, **_: Any) -> Iterator[None]:
    """Stands for `torch.cuda.graph`."""
    ACTIVE.device.synchronize()
    with on_stream(stream or Stream(name="capture stream")):
        graph.capture_begin()
        try:
            yield
        finally:
            graph.capture_end()


def _tensors(values: Any) -> list[Tensor]:
    """The tensors among the results of an operation."""
    if isinstance(values, Tensor):
        return [values]
    return [each for value in values for each in _tensors(value)] if type(values) in (list, tuple) else []
