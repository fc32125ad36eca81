"""Shared experts on a side stream: launched as soon as their input is there, waited for where the layer sums its parts."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from dbo.contract.world import Event, World


class SideStream:
    """The third stream of a rank, for work that depends on the layer's input only.

    What crosses between it and the compute stream is told to the allocator, as for exchanges.
    """

    def __init__(self, world: World) -> None:
        self.world = world

    def launch(self, work: Callable[[Any], Any], hidden: Any) -> tuple[Any, Event]:
        """Run `work(hidden)` there, behind what the current stream holds now; returns the result and when it is done."""
        world, side = self.world, self.world.side
        current = world.current_stream()
        ready = world.event("side.ready")
        ready.record(current)
        world.set_stream(side)
        try:
            side.wait_event(ready)
            world.tensors.record_stream(hidden, side)
            world.launches()
            result = work(hidden)
            done = world.event("side.done")
            done.record(side)
        finally:
            world.set_stream(current)
        return result, done

    def join(self, result: Any, done: Event) -> Any:
        """Let the current stream wait for the result, which it uses from now on."""
        current = self.world.current_stream()
        current.wait_event(done)
        self.world.tensors.record_stream(result, current)
        return result

    def stay(self, work: Callable[[Any], Any], hidden: Any) -> Any:
        """Run `work(hidden)` on the current stream, whichever the schedule chose; the compute stream uses the result."""
        self.world.launches()
        result = work(hidden)
        self.world.tensors.record_stream(hidden, self.world.current_stream())
        self.world.tensors.record_stream(result, self.world.compute)
        return result
