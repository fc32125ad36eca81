"""What host tasks of a simulated rank synchronise with: baton, barrier, worker. Each leaves its edges in the trace."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING

from dbo.errors import RingError
from dbo.trace import kinds
from sim.tasks import Task

if TYPE_CHECKING:
    from sim.world import SimWorld


class SimBaton:
    """A binary semaphore. Taking it orders the taker after the giver's last record."""

    def __init__(self, world: SimWorld, name: str) -> None:
        self.world = world
        self.name = name
        self._given: tuple[int, float] | None = None
        self._waiting: deque[Task] = deque()
        self._holder: Task | None = None

    def give(self) -> None:
        task = self.world.task()
        at_us = task.now_us + self.world.cost.host_switch_us
        if self._given is None:  # a second give adds nothing: the taker follows the first one only
            self._given = (task.last_record, at_us)
        if self._waiting:
            self.world.cluster.scheduler.wake(self._waiting[0], at_us)

    def take(self) -> None:
        task = self.world.task()
        self._note_contention(task)
        self._waiting.append(task)
        try:
            while self._given is None:
                self.world.cluster.scheduler.block(("baton", self.name))
        finally:
            self._waiting.remove(task)
        record, at_us = self._given
        self._given = None
        self._holder = task
        task.now_us = max(task.now_us, at_us)
        if record >= 0:
            task.edges.append(record)

    def _note_contention(self, task: Task) -> None:
        """Another schedule may let `task` take the baton before the line that waits for it, or that had it last."""
        other = self._waiting[-1] if self._waiting else self._holder
        if other is None or other is task:
            return
        what = f"{other.line} takes baton {self.name} before {task.line}, and the other way round in another schedule"
        unless = -1 if self._waiting else other.last_record
        self.world.engine.host_record(task, kinds.CHOICE, self.name, {"what": what, "unless": unless})


class SimBarrier:
    """Host tasks meet; `abort` wakes those who wait and refuses those who come later."""

    def __init__(self, world: SimWorld, parties: int, name: str) -> None:
        self.world = world
        self.name = name
        self.parties = parties
        self._arrived: list[tuple[Task, int]] = []
        self._open = False
        self.aborted = False

    def wait(self) -> None:
        task = self.world.task()
        scheduler = self.world.cluster.scheduler
        self._refuse_when_aborted()
        record = self.world.engine.host_record(task, kinds.BARRIER, self.name, {"name": self.name})
        self._arrived.append((task, record))
        if len(self._arrived) == self.parties:
            self._open = True
            at_us = max(t.now_us for t, _ in self._arrived)
            for other, _ in self._arrived:
                if other is not task:
                    scheduler.wake(other, at_us)
            task.now_us = at_us
        while not self._open:
            scheduler.block(("barrier", self.name, self.parties, len(self._arrived)))
            self._refuse_when_aborted()
        task.edges.extend(r for t, r in self._arrived if t is not task)

    def abort(self) -> None:
        self.aborted = True
        for task, _ in self._arrived:
            self.world.cluster.scheduler.wake(task, self.world.task().now_us)

    def _refuse_when_aborted(self) -> None:
        if self.aborted and not self._open:
            raise RingError(f"the barrier was aborted: barrier={self.name}; a party failed before it came")


class SimWorker:
    """A long-lived host task. Between two pieces of work it sleeps; a step creates no task."""

    def __init__(self, world: SimWorld, name: str) -> None:
        self.world = world
        self.name = name
        self._work: Callable[[], None] | None = None
        self._start = SimBaton(world, f"{name}.start")
        self._end = SimBaton(world, f"{name}.end")
        self.task = world.cluster.spawn(world, self._loop, name, daemon=True)

    def submit(self, work: Callable[[], None]) -> None:
        self._work = work
        self.task.daemon = False
        self._start.give()

    def join(self) -> None:
        self._end.take()

    def _loop(self) -> None:
        while True:
            self._start.take()
            work, self._work = self._work, None
            try:
                if work is not None:
                    work()
            finally:
                self.task.daemon = True
                self._end.give()
