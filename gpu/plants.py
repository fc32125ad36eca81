"""Small planted faults for runs on devices: `python -m gpu.check` must see its own watchdog bark. No torch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from dbo.program import Program
from dbo.ubatch import UBatchContext, dbo_current_ubatch_id


@dataclass(frozen=True)
class OnRank:
    """`program()` on one rank, the shipped program on the others."""

    rank: int
    program: Callable[[], Program]

    def __call__(self, rank: int) -> Program:
        return self.program() if rank == self.rank else Program()


class SkipsADispatch:
    """A backend that leaves out the second dispatch of ubatch 1 and goes on with what the first one brought."""

    def __init__(self, backend: Any) -> None:
        self._backend = backend
        self._dispatches = 0
        self._first: tuple[Any, Any] | None = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self._backend, name)

    def prepare_async(self, a1: Any, topk_weights: Any, topk_ids: Any) -> Any:
        mine = dbo_current_ubatch_id() == 1
        self._dispatches += mine
        if mine and self._dispatches == 2 and self._first is not None:
            receive, handle = self._first
            self._handles[1] = handle
            return receive
        started = self._backend.prepare_async(a1, topk_weights, topk_ids)
        if mine and self._dispatches == 1:
            receive = started[1] if isinstance(started, tuple) else started
            self._first = receive, self._handles.get(1)
        return started

    @property
    def _handles(self) -> dict[int, Any]:
        """What the backend keeps between a ubatch's dispatch and its combine; not every backend keeps something."""
        return getattr(self._backend, "_handles", {})


class DropsAYield(UBatchContext):
    """Ubatch 0 keeps the baton once, where the schedule hands it on."""

    def yield_(self) -> None:
        if self.index != 0 or self.played_yields != 1:
            super().yield_()


def skip_a_dispatch() -> Program:
    """One rank leaves out an exchange."""
    return Program(prepare_finalize=SkipsADispatch)


def drop_a_yield() -> Program:
    """One ubatch of one rank yields once too little."""
    return Program(context=DropsAYield)
