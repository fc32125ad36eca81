"""The smallest `TensorDevice`: FIFO streams, events, and a log. No clocks, no detectors, no torch.

The reference for engines, and what the tests of this package run on. Streams run when the host drains them or reads.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass

from dbo.errors import DBOError
from dbo.trace import Access


@dataclass(frozen=True, kw_only=True)
class Operation:
    """One submitted operation."""

    name: str
    stream: str
    reads: tuple[Access, ...]
    writes: tuple[Access, ...]
    run: Callable[[], None]
    src: str


class FifoEvent:
    """Recorded on one stream, waited for by others. Fires when the stream that recorded it gets there."""

    def __init__(self, stream: str) -> None:
        self.stream = stream
        self.fired = False


class FifoDevice:
    """A device whose streams are queues. The stream is the calling task's (`stream`), "compute" by default.

    Attributes:
        log: every operation, in the order of issue.
        host_reads: (why, declared) of every host read.
        buffers: name and size in bytes of the live buffers.
        freed: ids of the freed buffers, in order.
        capturing: set it to try what a capture forbids.
    """

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.capturing = False
        self.log: list[Operation] = []
        self.host_reads: list[tuple[str, bool]] = []
        self.buffers: dict[int, tuple[str, int]] = {}
        self.freed: list[int] = []
        self._queues: dict[str, deque[Operation | FifoEvent | tuple[str, FifoEvent]]] = {}
        self._stream: ContextVar[str] = ContextVar(f"fifo_stream_{rank}", default="compute")
        self._next_buffer = 1

    # -- TensorDevice --------------------------------------------------------------------------------------------------

    def submit(
        self, name: str, *, reads: tuple[Access, ...], writes: tuple[Access, ...], run: Callable[[], None], src: str
    ) -> None:
        operation = Operation(name=name, stream=self._stream.get(), reads=reads, writes=writes, run=run, src=src)
        self.log.append(operation)
        self._queue(operation.stream).append(operation)

    def host_read(self, why: str, *, declared: bool) -> None:
        self.host_reads.append((why, declared))
        self.drain(self._stream.get())

    def new_buffer(self, nbytes: int, name: str) -> int:
        buffer = self._next_buffer
        self._next_buffer += 1
        self.buffers[buffer] = (name, nbytes)
        return buffer

    def free_buffer(self, buffer: int) -> None:
        del self.buffers[buffer]
        self.freed.append(buffer)

    # -- streams -------------------------------------------------------------------------------------------------------

    @contextmanager
    def stream(self, name: str) -> Iterator[None]:
        """Make `name` the calling task's current stream."""
        token = self._stream.set(name)
        try:
            yield
        finally:
            self._stream.reset(token)

    def record(self) -> FifoEvent:
        """An event after what is queued on the current stream."""
        event = FifoEvent(self._stream.get())
        self._queue(event.stream).append(event)
        return event

    def wait(self, event: FifoEvent) -> None:
        """Later work of the current stream starts after `event`."""
        self._queue(self._stream.get()).append(("wait", event))

    @property
    def pending(self) -> int:
        """Operations that have not run."""
        return sum(isinstance(item, Operation) for queue in self._queues.values() for item in queue)

    def drain(self, *streams: str) -> None:
        """Run the given streams to their ends, one after the other; without arguments, all of them."""
        for name in streams or tuple(self._queues):
            queue = self._queue(name)
            while queue:
                self._step(name)

    def _step(self, name: str) -> None:
        item = self._queue(name).popleft()
        if isinstance(item, Operation):
            item.run()
        elif isinstance(item, FifoEvent):
            item.fired = True
        else:
            event = item[1]
            while not event.fired:
                if not self._queue(event.stream):
                    raise DBOError.of(
                        "an event fires on the stream that records it", fix="record it", event=event.stream
                    )
                self._step(event.stream)

    def _queue(self, name: str) -> deque[Operation | FifoEvent | tuple[str, FifoEvent]]:
        return self._queues.setdefault(name, deque())
