"""Plays a schedule while a layer's program runs: yields, receive hooks, streams and events, where the schedule puts them.

The layer says `reach("A0")`, `reach("A1")`; the modular kernel hands over a thunk for every other point. Nothing here knows
a particular schedule: which point comes when, on which stream, and where the baton is passed is read from its items.

Order on the device: a point that has a consumer on the other stream records its event as soon as it has been issued, in any
case before the next yield (after it, the event would cover the peer's work too); the consumer waits for that event.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any

from dbo.contract.world import Event
from dbo.errors import ScheduleError
from dbo.schedule import Item, Point, RunRecvHook, Schedule, Yield
from dbo.schedule.model import OPTIONAL_POINTS
from dbo.ubatching.ring import UBatchContext

# What leaves a layer: the model goes on with these on the compute stream.
RESULTS = ("S", "C.recv", "copy")


class SchedulePlayer:
    """One ubatch's way through the schedule of one step.

    Args:
        context: the ubatch's place in the ring; its `declared_yields` is set here.
        schedule, backend: whose program to play.
        moe_layers: the layers that it is played for; other layers only mark their points.
    """

    def __init__(
        self, context: UBatchContext, schedule: Schedule, *, backend: str, moe_layers: Collection[int]
    ) -> None:
        self.context = context
        self.schedule = schedule
        program = schedule.program(backend)
        self.items = program.folded
        self.moe_layers = frozenset(moe_layers)
        self._needs = {p.name: program.waits_for(p.name) for p in program.points}
        self._needs["A0"] = ()  # the outputs of the layer before were waited for when it ended
        self._recorded = {producer for needs in self._needs.values() for producer in needs}
        self._recorded |= {p.name for p in program.points if p.name in RESULTS and p.stream != "compute"}
        self._streams = {"compute": context.compute_stream, "comm": context.comm_stream}
        self._done: dict[str, Event] = {}
        self._open: Point | None = None
        self._yields_seen = 0
        self._position = 0
        self._layer = -1
        context.declared_yields = schedule.yields(len(self.moe_layers), context.index, len(context.ring.contexts))

    def reach(self, point: str, *, layer: int) -> None:
        """Do everything that the schedule puts before `point`."""
        if layer not in self.moe_layers:
            self.context.ring.world.at_point(point, layer=layer)
            return
        if layer != self._layer:
            self._layer, self._position = layer, 0
        while self._position < len(self.items):
            item = self._next(layer)
            if isinstance(item, Point) and item.name == point:
                return
        raise ScheduleError.of(
            "a schedule names every point of the layer's program", fix="add the point", point=point, layer=layer
        )

    def play(self, thunks: dict[str, Callable[[], Any]], *, layer: int) -> None:
        """Run the rest of the layer, `thunks` in the schedule's order; leave the compute stream current."""
        left = dict(thunks)
        while self._position < len(self.items):
            item = self._next(layer)
            if isinstance(item, Point) and item.name in left:
                left.pop(item.name)()
        left = {name: thunk for name, thunk in left.items() if name not in OPTIONAL_POINTS}
        if left:
            rule = "a schedule names every point of the layer's program"
            raise ScheduleError.of(rule, fix="add them", points=",".join(sorted(left)), layer=layer)
        self._close()
        self.context.switch_to(self.context.compute_stream)
        self.context.ring.world.at_point("", layer=layer)  # what follows belongs to no point: sums of the results
        for point in RESULTS:
            if point in self._done:
                self.context.compute_stream.wait_event(self._done.pop(point))

    def _next(self, layer: int) -> Item:
        """Carry out the next item; a point is only opened, its work is the caller's."""
        item = self.items[self._position]
        self._position += 1
        self._close()
        if isinstance(item, RunRecvHook):
            self.context.run_recv_hook()
        elif isinstance(item, Yield):
            self._yield()
        else:
            stream = self._streams[item.stream]
            self.context.switch_to(stream)
            self.context.ring.world.at_point(item.name, layer=layer)
            for producer in self._needs[item.name]:
                if producer in self._done:  # else a point before this one has made the same stream wait for it
                    stream.wait_event(self._done.pop(producer))
            self._open = item
        return item

    def _close(self) -> None:
        """The last opened point has been issued: record its event where another stream waits for it."""
        point, self._open = self._open, None
        if point is not None and point.name in self._recorded:
            self._done[point.name] = self.context.record_done()

    def _yield(self) -> None:
        index, self._yields_seen = self._yields_seen, self._yields_seen + 1
        ring = self.context.ring
        if not self.schedule.skips(
            index, num_moe_layers=len(self.moe_layers), ubatch=self.context.index, num_ubatches=len(ring.contexts)
        ):
            self.context.yield_()
            self.context.played_yields += 1
