"""The plain two-thread ring that other tools are compared on: a barrier, two batons, three hand-overs each."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

YIELDS = 3


class RingBaton(Protocol):
    """What `threading.Event` offers."""

    def set(self) -> None: ...
    def clear(self) -> None: ...
    def wait(self) -> Any: ...


class RingBarrier(Protocol):
    """What `threading.Barrier` offers."""

    def wait(self) -> Any: ...


class TwoThreadRing:
    """Two threads take turns.

    Args:
        barrier: of two parties.
        batons: one a thread.
    """

    def __init__(self, barrier: RingBarrier, batons: Sequence[RingBaton]) -> None:
        self.barrier = barrier
        self.batons = batons
        self.batons[0].set()
        self.turns: list[int] = []

    def work(self, index: int) -> None:
        """One thread: meet the other one, then take turns with it."""
        self.barrier.wait()
        for _ in range(YIELDS + 1):
            self.batons[index].wait()
            self.batons[index].clear()
            self.turns.append(index)
            self.batons[1 - index].set()

    @property
    def fair(self) -> bool:
        """Whether the turns went round."""
        return self.turns == [0, 1] * (YIELDS + 1)
