"""Small planted faults for runs on devices: `python -m gpu.check` must see its own watchdog bark. No torch.

Each strikes once, in a split step: what a run does before it is the same as without. When it strikes, the board notes
the time (`gpu.watch.flight_recorder.MARKS`); the trace and the watchdog learn of it by its effects only.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NoReturn

from dbo.engine.components import Components
from dbo.schedule import Item, Point, Yield
from dbo.ubatching.forward_context import get_forward_context
from dbo.ubatching.player import SchedulePlayer
from dbo.ubatching.ring import UBatchContext, dbo_current_ubatch_id, dbo_enabled

STRIKES_IN_LAYER = 1
"""Faults of one layer strike in this one of the MoE layers, counted from 0: not in the first, which begins a step."""


@dataclass(frozen=True)
class OnRank:
    """`program()` on one rank, the shipped program on the others."""

    rank: int
    program: Callable[[], Components]

    def __call__(self, rank: int) -> Components:
        return self.program() if rank == self.rank else Components()


def strike(world: Any) -> None:
    """The fault happens now."""
    if world.rows is not None:
        world.rows.mark("planted")


def _world() -> Any:
    """The calling ubatch's."""
    player: Any = get_forward_context().player
    return player.context.ring.world


# -- faults that hang a run -----------------------------------------------------------------------------------------


class SkipsADispatch:
    """A backend that leaves out the second dispatch of ubatch 1 and goes on with what the first one brought."""

    def __init__(self, backend: Any) -> None:
        self._backend = backend
        self._dispatches = 0
        self._first: tuple[Any, ...] | None = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self._backend, name)

    def prepare_async(self, a1: Any, topk_weights: Any, topk_ids: Any) -> Any:
        mine = dbo_enabled() and dbo_current_ubatch_id() == 1
        self._dispatches += mine
        if mine and self._dispatches == 2 and self._first is not None:
            strike(_world())
            receive, *kept = self._first
            for state, value in zip(self._states, kept, strict=True):
                state[1] = value
            return receive
        started = self._backend.prepare_async(a1, topk_weights, topk_ids)
        if mine and self._dispatches == 1:
            receive = started[1] if isinstance(started, tuple) else started
            self._first = receive, *(state.get(1) for state in self._states)
        return started

    @property
    def _states(self) -> list[dict[int, Any]]:
        """What the backend keeps between a ubatch's dispatch and its combine; not every backend keeps something."""
        return [getattr(self._backend, name) for name in ("_handles", "_sent") if hasattr(self._backend, name)]


class DropsAYield(UBatchContext):
    """Ubatch 0 keeps the baton once, where the schedule hands it on."""

    def yield_(self) -> None:
        if self.index != 0 or self.played_yields != 1:
            super().yield_()
        else:
            strike(self.ring.world)


class KeepsTheBaton(UBatchContext):
    """Ubatch 1 waits for the baton that it has not handed on."""

    def yield_(self) -> None:
        if self.index == 1 and self.played_yields == 3:
            strike(self.ring.world)
            self.baton.take()
        super().yield_()


class DiesInAnExchange:
    """A backend whose process is killed in the second dispatch of ubatch 0: it has come, its bytes have not."""

    def __init__(self, backend: Any) -> None:
        self._backend = backend
        self._dispatches = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._backend, name)

    def prepare_async(self, a1: Any, topk_weights: Any, topk_ids: Any) -> Any:
        if dbo_enabled() and dbo_current_ubatch_id() == 0:
            self._dispatches += 1
            if self._dispatches == 2:
                world = _world()
                came = world.trace.came

                def comes(group: str, index: int, op: str) -> NoReturn:
                    came(group, index, op)
                    _die(world)

                world.trace.came = comes
        return self._backend.prepare_async(a1, topk_weights, topk_ids)


class DiesComputing(SchedulePlayer):
    """The rank's process is killed while ubatch 1 computes its experts."""

    def _next(self, layer: int) -> Item:
        item = super()._next(layer)
        if is_point(item, "MLP") and self.context.index == 1 and layer == struck_layer(self.moe_layers):
            _die(self.context.ring.world)
        return item


def is_point(item: Item, name: str) -> bool:
    """Whether an item of a schedule is the point called `name`."""
    return isinstance(item, Point) and item.name == name


def struck_layer(moe_layers: frozenset[int]) -> int:
    """The layer in which faults of one layer strike."""
    return sorted(moe_layers)[STRIKES_IN_LAYER]


def _die(world: Any) -> NoReturn:
    strike(world)
    os.kill(os.getpid(), signal.SIGKILL)
    while True:  # a signal may come a moment later
        time.sleep(1.0)


def skip_a_dispatch() -> Components:
    """One rank leaves out an exchange."""
    return Components(prepare_finalize=SkipsADispatch)


def drop_a_yield() -> Components:
    """One ubatch of one rank yields once too little."""
    return Components(context=DropsAYield)


def keep_the_baton() -> Components:
    """No ubatch of one rank has the baton."""
    return Components(context=KeepsTheBaton)


def die_in_an_exchange() -> Components:
    """A rank's process is killed in the middle of an exchange."""
    return Components(prepare_finalize=DiesInAnExchange)


def die_computing() -> Components:
    """A rank's process is killed in the middle of a step, outside of any exchange."""
    return Components(player=DiesComputing)


# -- faults that leave a run going ----------------------------------------------------------------------------------


def miss_a_wait() -> Components:
    """C.send of ubatch 0 does not wait for its experts, in one layer of the first split step: one wait is left out."""

    class MissesAWait(SchedulePlayer):
        left = 1

        def _next(self, layer: int) -> Item:
            item = self.items[self._position]
            kind, needs = type(self), self._needs
            if kind.left and is_point(item, "C.send") and _strikes(self, layer) and needs["C.send"]:
                kind.left -= 1
                strike(self.context.ring.world)
                self._needs = needs | {"C.send": ()}
            try:
                return super()._next(layer)
            finally:
                self._needs = needs

    return Components(player=MissesAWait)


def record_late() -> Components:
    """One event of ubatch 0 is recorded when the baton has come back, in one layer of the first split step."""

    class RecordsLate(SchedulePlayer):
        left = 1

        def _next(self, layer: int) -> Item:
            kind, opened = type(self), self._open
            passes = isinstance(self.items[self._position], Yield) and _strikes(self, layer)
            if not (passes and kind.left and opened is not None and opened.name in self._recorded):
                return super()._next(layer)
            kind.left -= 1
            strike(self.context.ring.world)
            self._open = None
            item = super()._next(layer)
            self._open = opened
            return item

    return Components(player=RecordsLate)


def _strikes(player: SchedulePlayer, layer: int) -> bool:
    return layer == struck_layer(player.moe_layers) and player.context.index == 0
