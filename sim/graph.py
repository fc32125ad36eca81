"""Full graphs of the simulated machine: a capture keeps the calls that would have launched work; a replay makes them again.

What a capture forbids, as CUDA does: host waits and reads, queries, host-level collectives, work on a stream that is not
part of the capture, waiting for an event recorded outside, and streams that are not joined at its end. Nothing runs while
capturing, and a capture that fails leaves nothing behind.

What a graph captured stays in place: buffers made inside belong to the graph; buffers made outside are *baked*: freeing one
while the graph lives is written to the trace, and a later replay that touches it is a stale graph.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from dbo.errors import CaptureError
from dbo.trace import Access, kinds

if TYPE_CHECKING:
    from sim.streams import SimEvent, SimStream
    from sim.world import SimWorld


@dataclass(frozen=True, slots=True)
class Call:
    """One captured call: where it was made, and how to make it again."""

    stream: SimStream
    tags: tuple[int, int, int, str]
    again: Callable[[], object]


class SimGraph:
    """One captured program of one rank."""

    def __init__(self, world: SimWorld, name: str) -> None:
        self.world = world
        self.name = name
        self.calls: list[Call] = []
        self.pool: set[int] = set()
        self.baked: set[int] = set()
        self.low_latency_calls = 0
        self._origin: SimStream | None = None
        self._open: dict[SimStream, bool] = {}
        self._recorded: dict[SimEvent, tuple[SimStream, int]] = {}

    # -- capturing --------------------------------------------------------------------------------------------------

    @contextmanager
    def capture(self) -> Iterator[SimGraph]:
        """Keep what is launched inside the block, from the current stream and those that join it.

        Raises:
            CaptureError: the program did what a capture forbids, or left a stream unjoined.
        """
        world = self.world
        if world.capture is not None:
            raise CaptureError.of("one capture is open at a time", fix="close the other one", open=world.capture.name)
        world.engine.host_record(world.task(), kinds.CAPTURE_BEGIN, self.name, {"graph": self.name})
        world.capture = self
        self._origin = world.current_stream()
        self._open[self._origin] = False
        try:
            yield self
            self._refuse_unjoined()
        except BaseException:
            self._forget()
            raise
        finally:
            world.capture = None
        world.graphs.append(self)
        world.engine.host_record(
            world.task(), kinds.CAPTURE_END, self.name, {"graph": self.name, "calls": len(self.calls)}
        )

    def add(self, stream: SimStream, again: Callable[[], object]) -> None:
        """Keep a call made on `stream`."""
        self._refuse_stranger(stream)
        self._open[stream] = True
        self.calls.append(Call(stream, self.world.task().tags, again))

    def add_record(self, stream: SimStream, event: SimEvent) -> None:
        """Keep an event's record."""
        self.add(stream, lambda: event.record(stream))
        self._recorded[event] = (stream, len(self.calls))

    def add_wait(self, stream: SimStream, event: SimEvent) -> None:
        """Keep a wait; `stream` joins the capture by it, and the origin closes what it waits for."""
        found = self._recorded.get(event)
        if found is None:
            if event.marker is None:
                return
            rule = "a captured stream waits only for events recorded inside the capture"
            raise CaptureError.of(rule, fix="record it inside, or wait before the capture", event=event.name)
        source, at = found
        self._open.setdefault(stream, False)
        self.add(stream, lambda: stream.wait_event(event))
        if not any(call.stream is source for call in self.calls[at:]):
            self._open[source] = False

    def note(self, accesses: Sequence[Access]) -> None:
        """The captured program touches these bytes."""
        self.baked |= {a.buffer for a in accesses if a.buffer not in self.pool}

    def refuse(self, what: str, fix: str) -> None:
        """Raise for something that the host may not do now."""
        raise CaptureError.of("an open graph capture forbids it", fix=fix, operation=what, rank=self.world.rank)

    def _refuse_stranger(self, stream: SimStream) -> None:
        if stream not in self._open:
            rule = "work inside a capture is launched on streams that have joined it"
            fix = "let the stream wait for an event of the captured one first"
            raise CaptureError.of(rule, fix=fix, stream=stream.name, rank=self.world.rank)

    def _refuse_unjoined(self) -> None:
        left = sorted(s.name for s, is_open in self._open.items() if is_open and s is not self._origin)
        if left:
            rule = "streams that joined a capture are joined again at its end"
            raise CaptureError.of(rule, fix="let the captured stream wait for them", streams=",".join(left))

    def _forget(self) -> None:
        self.calls.clear()
        self.pool.clear()
        self.baked.clear()

    # -- replaying --------------------------------------------------------------------------------------------------

    def replay(self, real_tokens: Sequence[int] = ()) -> None:
        """Launch the captured program again, in the calling task. No other task wakes.

        Args:
            real_tokens: by ubatch, what sends carry in the trace.
        """
        world, task = self.world, self.world.task()
        attrs: dict[str, Any] = {"graph": self.name, "calls": len(self.calls)}
        if self.low_latency_calls:  # its calls alternate from buffer 0 on, so it starts at an even one
            attrs |= {"baked": {"low_latency_buffer": 0}, "live": {"low_latency_buffer": world.low_latency.calls % 2}}
        world.engine.host_record(task, kinds.REPLAY, self.name, attrs)
        stream, tags = task.stream, task.tags
        world.replaying = self
        world.replay_real_tokens = list(real_tokens)
        try:
            for call in self.calls:
                task.stream = call.stream
                task.tags = (tags[0], *call.tags[1:])
                call.again()
        finally:
            world.replaying = None
            task.stream, task.tags = stream, tags
        task.now_us += world.cost.graph_launch_us
