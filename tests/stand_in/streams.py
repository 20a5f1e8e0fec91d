"""Streams and events of the CUDA device that is not there, and the memory that they read and write."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

ACTIVE: Any = SimpleNamespace(device=None)  # the `StandIn` within whose block the program is


class Block:
    """Allocated memory of the device, which the tensors share that look at it."""

    def __init__(self, owner: Stream) -> None:
        self.device = ACTIVE.device
        self.owner, self.written, self.used = owner, (owner, owner.time), {owner: owner.time}
        self.recorded = {owner}  # streams for which `record_stream` keeps the memory
        self.graph = self.device.capturing  # in whose memory it lies

    def __del__(self) -> None:
        # What the main stream has made, and others read, are constants, in use until the last batch that nobody takes.
        for stream, time in self.used.items() if self.owner not in self.device.mains else ():
            if stream not in self.recorded and not self.owner.comes_after(stream, time):
                self.device.race(f"memory of {self.owner} is given back while {stream} may still use it")


class Stream:
    """Work that the device does in order. `time` counts it; `known[s]` is how far it has waited for stream s."""

    finished: dict[Stream, int] = {}  # how far the host has waited for each stream

    def __init__(self, device: Any = None, priority: int = 0, name: str = "side stream") -> None:
        self.name, self.time, self.known, self.copies = name, 0, {}, []

    def __str__(self) -> str:
        return self.name

    def comes_after(self, stream: Stream, time: int) -> bool:
        """Whether what this stream does next comes after the work of another one up to then."""
        return stream is self or max(self.known.get(stream, 0), Stream.finished.get(stream, 0)) >= time

    def record_event(self, event: Event | None = None) -> Event:
        event = event or Event()
        event.record(self)
        return event

    def wait_event(self, event: Event) -> None:
        self.known = {s: max(self.known.get(s, 0), event.known.get(s, 0)) for s in {*self.known, *event.known}}

    def wait_stream(self, stream: Stream) -> None:
        self.wait_event(stream.record_event())

    def synchronize(self) -> None:
        self.record_event().synchronize()

    def query(self) -> bool:
        return self.record_event().query()

    def is_capturing(self) -> bool:
        return ACTIVE.device.capturing is not None and self is current_stream()


class Event:
    """A point in the work of a stream, and of those for which that one had waited."""

    def __init__(self, *_: Any, **__: Any) -> None:
        self.known: dict[Stream, int] = {}

    def record(self, stream: Stream | None = None) -> None:
        stream = stream or current_stream()
        self.known = {**stream.known, stream: stream.time}

    def wait(self, stream: Stream | None = None) -> None:
        (stream or current_stream()).wait_event(self)

    def query(self) -> bool:
        ACTIVE.device.refuse_in_capture("Event.query")
        return all(Stream.finished.get(stream, 0) >= time for stream, time in self.known.items())

    def synchronize(self) -> None:
        """The host waits; what was copied to its memory up to here has arrived."""
        ACTIVE.device.host_waits("synchronize", self)

    def reached(self) -> None:
        """The host knows that the device is here."""
        for stream, time in self.known.items():
            Stream.finished[stream] = max(Stream.finished.get(stream, 0), time)
            for copied, host, values in list(stream.copies):
                if copied <= Stream.finished[stream]:
                    stream.copies.remove((copied, host, values))
                    host.copy_(values)

    def elapsed_time(self, other: Event) -> float:
        if not (self.query() and other.query()):
            raise RuntimeError("CUDA error: device not ready")
        return 1.0


class _Current(threading.local):
    def __init__(self) -> None:
        self.streams: list[Stream] = []


_current = _Current()


def current_stream(device: Any = None) -> Stream:
    return _current.streams[-1] if _current.streams else ACTIVE.device.default


@contextmanager
def on_stream(stream: Stream | None) -> Iterator[None]:
    """Stands for `torch.cuda.stream`."""
    _current.streams.append(stream or current_stream())
    yield
    _current.streams.pop()


def set_stream(stream: Stream) -> None:
    """Stands for `torch.cuda.set_stream`, of the thread that trains."""
    _current.streams[-1:] = [stream]
    ACTIVE.device.main = stream
    ACTIVE.device.mains.add(stream)


def begin() -> None:
    """A new device: no stream is chosen, and nothing was waited for."""
    Stream.finished = {}
    _current.streams.clear()
