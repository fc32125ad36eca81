"""Faults of streams and events: a wait left out, an event too early or after its yield, a receive read early."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from dbo.check.overlap import is_communication
from dbo.engine.components import Components
from dbo.schedule import Item, Point, Yield
from dbo.trace import kinds
from dbo.ubatching.player import SchedulePlayer
from sim.faults.clean_run import CleanRun, every_ubatch
from sim.faults.essential import essential_waits
from sim.faults.fault import Fault, Site

STREAM_BACKENDS = ("nccl", "deepep_high_throughput", "deepep_v2", "symm_copy")


def drop_wait(program: Components, site: Site) -> Components:
    """The consumer of an exchange does not wait for it."""

    class Dropping(SchedulePlayer):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            if self.context.index == site.ubatch:
                self._needs = self._needs | {"D.recv": (), "MLP": ()}

    return replace(program, player=Dropping)


def late_event(program: Components, site: Site) -> Components:
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


def early_event(program: Components, site: Site) -> Components:
    """The event is recorded when its producer has not been launched yet."""

    class Early(SchedulePlayer):
        def _next(self, layer: int) -> Item:
            item = super()._next(layer)
            if isinstance(item, Point) and self.context.index == site.ubatch and item.name in ("A1", "MLP"):
                self._close()
            return item

    return replace(program, player=Early)


def early_receive(program: Components, site: Site) -> Components:
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


def events_that_can_be_late(run: CleanRun) -> Iterator[Site]:
    """Ubatches with a send that would wait for its peer's compute, if its event were recorded after the yield.

    Their compute's event stands directly before a yield, and their send starts before what the peer launches meanwhile
    on the compute stream has ended.
    """
    for rank, ubatch in run.ubatches():
        steps = [step for r, step, u in run.eager_lines if (r, u) == (rank, ubatch)]
        if any(_gains_from_an_early_event(run, rank, step, ubatch) for step in steps):
            yield Site(rank=rank, ubatch=ubatch)


def _gains_from_an_early_event(run: CleanRun, rank: int, step: int, ubatch: int) -> bool:
    mine = run.lines[rank, step, ubatch]
    others = [r for (q, s, u), line in run.lines.items() if (q, s) == (rank, step) and u != ubatch for r in line]
    foreign = [r for r in others if r.line == "compute" and r.kind == kinds.OP]
    for at, record in enumerate(mine):
        if record.kind != kinds.YIELD:
            continue
        event = next((r for r in reversed(mine[:at]) if r.on_device), None)
        back = next((r.id for r in mine[at:] if r.kind == kinds.RESUME), None)
        if event is None or event.kind != kinds.RECORD or event.line != "compute" or back is None:
            continue
        send = next((r for r in mine[at:] if is_communication(r) and r.id > back), None)
        meanwhile = max((r.end_us for r in foreign if record.id < r.id < back), default=0.0)
        if send is not None and send.t_us < meanwhile:
            return True
    return False


_SPLIT = "a split step"

FAULTS = (
    Fault(
        name="drop-wait",
        sentence="the experts do not wait for their dispatch",
        id="stream-race",
        plant=drop_wait,
        needs="a split step in which nothing else orders the experts after their dispatch",
        sites=essential_waits("D.recv", "MLP"),
        backends=STREAM_BACKENDS,
        keys=("rank", "ubatch"),
    ),
    Fault(
        name="late-event",
        sentence="events are recorded after the yield: nothing is hidden",
        id="no-overlap",
        plant=late_event,
        needs="a send whose producer stands directly before a yield, and that starts before the "
        "peer's compute of that yield ends",
        sites=events_that_can_be_late,
        backends=STREAM_BACKENDS,
        keys=("rank", "ubatch"),
    ),
    Fault(
        name="early-event",
        sentence="events are recorded before their producer is launched",
        id="stream-race",
        plant=early_event,
        needs=_SPLIT,
        sites=every_ubatch,
        backends=STREAM_BACKENDS,
        keys=("rank", "ubatch"),
    ),
    Fault(
        name="early-receive",
        sentence="the experts read a low-latency receive before its hook has run",
        id="hook-late",
        plant=early_receive,
        needs=_SPLIT,
        sites=every_ubatch,
        backends=("deepep_low_latency",),
        keys=("rank", "ubatch"),
    ),
    Fault(
        name="early-read",
        sentence="the experts read an exchange's output before it is complete",
        id="stream-race",
        plant=early_receive,
        needs="a split step in which nothing else orders the experts after their dispatch",
        sites=essential_waits("D.recv", "MLP"),
        backends=STREAM_BACKENDS,
        keys=("rank", "ubatch"),
    ),
)
