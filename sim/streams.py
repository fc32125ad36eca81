"""Streams and events of one simulated rank. Names and meaning are torch's."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from dbo.contract.own import own
from dbo.trace import Record, kinds
from sim.engine import Node
from sim.work import Work

if TYPE_CHECKING:
    from dbo.contract.world import Event, Stream
    from sim.world import SimWorld


# What `launch` returns while a capture is open: nothing may depend on it.
CAPTURED = Node(Record(-1, -1, "", "captured", ""), 0, 0.0)


class SimStream:
    """A FIFO of device work. `name` is its line in the trace."""

    def __init__(self, world: SimWorld, name: str) -> None:
        self.world = world
        self.name = name
        self.tail: Node | None = None

    def launch(self, work: Work | str, name: str = "", **of_work: Any) -> Node:
        """Queue work here, for the calling task's point. During a capture the call is kept instead, and made at replays.

        `launch(kind, name, …)` is short for `launch(Work(kind=kind, name=name, …))`.
        """
        if not isinstance(work, Work):
            work = Work(kind=work, name=name, **of_work)
        world, task = self.world, self.world.task()
        touched = (*work.reads, *work.writes)
        if world.device is not None and touched:
            world.device.note_use(touched, self.name)
        if world.capture is not None:
            world.capture.note(touched)
            world.capture.add(self, lambda: self.launch(replace(work, attrs=dict(work.attrs or {}))))
            return CAPTURED
        if world.replaying is None:
            task.now_us += world.cost.host_launch_us
        node = world.engine.node(
            work, rank=world.rank, line=self.name, tags=task.tags, issued_by=task, stream_tail=self.tail
        )
        self.tail = node
        return node

    def wait_event(self, event: Event) -> None:
        event = own(event, SimEvent)
        if self.world.capture is not None:
            self.world.capture.add_wait(self, event)
        elif event.marker is not None:
            self.launch(Work(kind=kinds.WAIT, name=event.name, after=(event.marker,), attrs={"event": event.name}))

    def wait_stream(self, stream: Stream) -> None:
        self.wait_event(stream.record_event())

    def record_event(self, event: Event | None = None) -> SimEvent:
        event = own(event, SimEvent) if event is not None else SimEvent(self.world, f"{self.name}.tail")
        event.record(self)
        return event

    def query(self) -> bool:
        self.world.refuse_in_capture(f"query of {self.name}")
        return _answer(self.world, self.name, self.tail)

    def synchronize(self) -> None:
        self.world.refuse_in_capture(f"synchronize {self.name}")
        self.world.cluster.check_peers(self.world.rank)
        task = self.world.task()
        if self.tail is not None:
            self.world.engine.wait_host(task, self.tail, f"synchronize {self.name}")
        self.world.engine.host_record(
            task, kinds.HOST_WAIT, self.name, {"why": "synchronize", "declared": not _in_a_layer(self.world)}
        )


class SimEvent:
    """A marker; `record` again moves it, and waits made before keep the old place."""

    def __init__(self, world: SimWorld, name: str) -> None:
        self.world = world
        self.name = name
        self.marker: Node | None = None

    def record(self, stream: Stream | None = None) -> None:
        stream = own(stream, SimStream) if stream is not None else self.world.current_stream()
        if self.world.capture is not None:
            self.world.capture.add_record(stream, self)
        else:
            self.marker = stream.launch(Work(kind=kinds.RECORD, name=self.name, attrs={"event": self.name}))

    def wait(self, stream: Stream | None = None) -> None:
        (stream or self.world.current_stream()).wait_event(self)

    def query(self) -> bool:
        self.world.refuse_in_capture(f"query of {self.name}")
        return _answer(self.world, self.name, self.marker)

    def synchronize(self) -> None:
        self.world.refuse_in_capture(f"synchronize {self.name}")
        self.world.cluster.check_peers(self.world.rank)
        task = self.world.task()
        if self.marker is not None:
            self.world.engine.wait_host(task, self.marker, f"synchronize {self.name}")
        self.world.engine.host_record(
            task, kinds.HOST_WAIT, self.name, {"why": "synchronize", "declared": not _in_a_layer(self.world)}
        )


def _answer(world: SimWorld, name: str, node: Node | None) -> bool:
    """What a query says now. On a device that is faster or slower it says otherwise, unless the host waited before."""
    if node is None:
        return True
    what = f"query of {name} says {node.done}; a device of another speed says {not node.done}"
    world.engine.host_record(world.task(), kinds.CHOICE, name, {"what": what, "unless": node.record.id})
    return node.done


def _in_a_layer(world: SimWorld) -> bool:
    """Whether the calling task computes a layer: a host that waits there launches nothing meanwhile, for either ubatch."""
    _, layer, _, point = world.tags()
    return layer >= 0 and bool(point)
