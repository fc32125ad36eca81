"""Faults of streams and events: a wait left out, an event recorded too early or after its yield, a receive read early."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from dbo.player import SchedulePlayer
from dbo.program import Program
from dbo.schedule import Item, Point, Yield
from sim.faults.fault import Fault, Site

STREAM_BACKENDS = ("nccl",)


def drop_wait(program: Program, site: Site) -> Program:
    """The consumer of an exchange does not wait for it."""

    class Dropping(SchedulePlayer):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            if self.context.index == site.ubatch:
                self._needs = self._needs | {"D.recv": (), "MLP": ()}

    return replace(program, player=Dropping)


def late_event(program: Program, site: Site) -> Program:
    """The event is recorded after the baton has come back, so it covers what the peer launched meanwhile."""

    class Late(SchedulePlayer):
        def _next(self, layer: int) -> Item:
            item = self.items[self._position]
            if isinstance(item, Yield) and self.context.index == site.ubatch:
                self._position += 1
                self._yield()
                self._close()
                return item
            return super()._next(layer)

    return replace(program, player=Late)


def early_event(program: Program, site: Site) -> Program:
    """The event is recorded when its producer has not been launched yet."""

    class Early(SchedulePlayer):
        def _next(self, layer: int) -> Item:
            item = super()._next(layer)
            if isinstance(item, Point) and self.context.index == site.ubatch and item.name in ("A1", "MLP"):
                self._close()
            return item

    return replace(program, player=Early)


def early_receive(program: Program, site: Site) -> Program:
    """The owner reads what it receives before the exchange is completed: experts run in front of the yield."""

    class Early(SchedulePlayer):
        def play(self, thunks: dict[str, Any], *, layer: int) -> None:
            if self.context.index == site.ubatch and layer == min(self.moe_layers):
                send, receive, mlp = thunks["D.send"], thunks["D.recv"], thunks["MLP"]

                def all_at_once() -> None:
                    send()
                    self.context.switch_to(self.context.compute_stream)
                    self.context.ring.world.at_point("MLP", layer=layer)
                    receive()
                    mlp()
                    self.context.ring.world.at_point("D.send", layer=layer)
                    self.context.switch_to(self._streams[self._open.stream if self._open else "compute"])

                thunks = thunks | {"D.send": all_at_once, "D.recv": _nothing, "MLP": _nothing}
            super().play(thunks, layer=layer)

    return replace(program, player=Early)


def _nothing() -> None:
    return None


FAULTS = (
    Fault(
        name="drop-wait", sentence="the experts do not wait for their dispatch", id="stream-race", plant=drop_wait,
        backends=STREAM_BACKENDS, keys=("rank", "ubatch"),
    ),
    Fault(
        name="late-event", sentence="events are recorded after the yield: nothing is hidden", id="no-overlap",
        plant=late_event, backends=STREAM_BACKENDS, keys=("rank", "ubatch"),
    ),
    Fault(
        name="early-event", sentence="events are recorded before their producer is launched", id="stream-race",
        plant=early_event, backends=STREAM_BACKENDS, keys=("rank", "ubatch"),
    ),
    Fault(
        name="early-receive", sentence="the experts read a low-latency receive before its hook has run", id="hook-late",
        plant=early_receive, backends=("deepep_low_latency",), keys=("rank", "ubatch"),
    ),
    Fault(
        name="early-read", sentence="the experts read an exchange's output before it is complete", id="stream-race",
        plant=early_receive, backends=STREAM_BACKENDS, keys=("rank", "ubatch"),
    ),
)  # fmt: skip
