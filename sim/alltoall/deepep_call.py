"""What every DeepEP call does about streams, events and counts; shared by the simulated `Buffer` and `ElasticBuffer`.

The library has a comm stream of its own. A call makes it wait for `previous_event` or, without one, for the tail that the
caller's current stream has *at that moment*; afterwards the caller's stream waits for it, unless the call is asynchronous:
then an event is returned, and what the call touches is recorded on both streams.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from dbo.errors import NotAvailable
from dbo.trace import kinds
from sim.streams import SimEvent

if TYPE_CHECKING:
    from sim.world import SimWorld


class EventHandle:
    """An event captured on the stream that is current when it is made."""

    def __init__(self, world: SimWorld) -> None:
        self._world = world
        self.marker: SimEvent = world.current_stream().record_event(world.event("deepep"))

    def current_stream_wait(self) -> None:
        self.marker.wait(self._world.current_stream())


class EventOverlap:
    """DeepEP's wrapper of an event; `event` is None after a call in stream order."""

    def __init__(self, event: EventHandle | None = None) -> None:
        self.event = event

    def current_stream_wait(self) -> None:
        """The current stream waits for the event."""
        if self.event is None:
            rule = "only an asynchronous call leaves an event to wait for"
            raise NotAvailable.of(rule, fix="pass async_finish=True or do not wait", event=None)
        self.event.current_stream_wait()


class LibraryCall:
    """One call: opened before it launches anything, closed with the arrays that it touched."""

    def __init__(
        self,
        world: SimWorld,
        *,
        previous_event: EventOverlap | EventHandle | None,
        asynchronous: bool,
        allocate_on_comm_stream: bool,
    ) -> None:
        self.world = world
        self.caller = world.current_stream()
        self.asynchronous = asynchronous
        self.allocation_stream = world.comm if allocate_on_comm_stream else self.caller
        event = previous_event.event if isinstance(previous_event, EventOverlap) else previous_event
        if event is not None:
            world.comm.wait_event(event.marker)
        elif self.caller is not world.comm:
            world.comm.wait_stream(self.caller)

    @contextmanager
    def on_comm(self) -> Iterator[None]:
        """Launches inside the block go to the library's stream."""
        self.world.set_stream(self.world.comm)
        try:
            yield
        finally:
            self.world.set_stream(self.caller)

    @contextmanager
    def allocating(self) -> Iterator[None]:
        """Arrays made inside the block belong to the stream that the caller asked for."""
        self.world.set_stream(self.allocation_stream)
        try:
            yield
        finally:
            self.world.set_stream(self.caller)

    def close(self, touched: Sequence[Any]) -> EventOverlap:
        """Order the caller's stream, or leave that to an event."""
        world = self.world
        if not self.asynchronous:
            if self.caller is not world.comm:
                self.caller.wait_stream(world.comm)
            return EventOverlap()
        for array in touched:
            for stream in (world.comm, self.caller):
                world.tensors.record_stream(array, stream)
        with self.on_comm():
            return EventOverlap(EventHandle(world))


def spin_for_counts(world: SimWorld, why: str) -> None:
    """The host polls until what the comm stream holds has run, and keeps the GIL: nothing else of its process runs."""
    world.refuse_in_capture(f"host wait for {why}")
    task, node = world.task(), world.comm.tail
    since_us = task.now_us
    if node is not None:
        world.engine.wait_host(task, node, why)
    world.engine.host_record(
        task, kinds.HOST_WAIT, "comm", {"why": why, "declared": True, "gil": "held", "since_us": since_us}
    )


def swap_blocks(
    deliver: Callable[[list[Any]], None],
) -> Callable[[dict[int, Any], int], tuple[Callable[[], None], Callable[[], None]]]:
    """For `SimGroup.exchange`: at the start take every member's block for this rank, at the end `deliver` them by rank."""

    def connect(members: dict[int, Any], rank: int) -> tuple[Callable[[], None], Callable[[], None]]:
        taken: list[Any] = []

        def begin() -> None:
            taken.extend(members[peer].block(rank) for peer in sorted(members))

        return begin, lambda: deliver(taken)

    return connect


def remote_bytes(shape: tuple[int, int], topk: int, ranks: int, itemsize: int) -> int:
    """Bytes of `[T, H]` rows that leave the rank when experts are drawn evenly: at most one row for each other rank."""
    tokens, hidden = shape
    return int(tokens * min(topk / ranks, 1.0) * (ranks - 1) * hidden * itemsize)
