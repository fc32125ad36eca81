"""Ubatches as greenlets on one thread: the cheaper hand-over. Needs greenlet; `gpu.host.threads` is the way without it.

A switch between greenlets costs a fraction of a microsecond, one between threads several, since the interpreter's lock
has to change hands too. Everything that torch keeps a thread for is shared by the ubatches then: grad and inference
mode are the starter's anyway, and the current stream is set again with every switch.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any

import greenlet

from dbo.errors import RingError
from dbo.trace import kinds
from gpu.host.workers import RankHost, RankWorker
from gpu.record.recorder import HostTask, RankRecorder
from gpu.watch import flight_recorder as board


class Hub:
    """Who may run next. All host lines of a rank but one sleep at any time.

    Args:
        recorder: told which line runs.
        resume: called with the stream of a line that goes on.
    """

    def __init__(self, recorder: RankRecorder, resume: Callable[[Any], None]) -> None:
        self.recorder = recorder
        self._resume = resume
        self._ready: deque[Any] = deque()

    def wake(self, sleeper: Any) -> None:
        """Let it run when the others sleep."""
        self._ready.append(sleeper)

    def forget(self, sleeper: Any) -> None:
        """It runs already, without having been picked."""
        if sleeper in self._ready:
            self._ready.remove(sleeper)

    def sleep(self, state: int) -> None:
        """Run others until somebody wakes the calling line.

        Raises:
            RingError: nobody is left who could.
        """
        task, me = self.recorder.task, greenlet.getcurrent()
        if not self._ready:
            rule = "somebody must be left to wake a host line that sleeps"
            raise RingError.of(rule, fix="look at the schedule", line=task.line, tags=task.tags)
        self.recorder.sleeps(state)
        following = self._ready.popleft()
        if following is not me:
            following.switch()
        self.recorder.switch_to(task)
        self._resume(task.stream)
        self.recorder.goes_on()


class GreenletBaton:
    """A binary semaphore between greenlets."""

    def __init__(self, hub: Hub, *, sleeps_as: int = board.BATON) -> None:
        self._hub = hub
        self._sleeps_as = sleeps_as
        self._given = False
        self._giver = -1
        self._taker: Any = None

    def give(self) -> None:
        self._giver = self._hub.recorder.task.last
        self._given = True
        if self._taker is not None:
            self._hub.wake(self._taker)
            self._taker = None

    def take(self) -> None:
        while not self._given:
            self._taker = greenlet.getcurrent()
            self._hub.sleep(self._sleeps_as)
        self._given = False
        if self._giver >= 0:
            self._hub.recorder.task.after.append(self._giver)


class GreenletBarrier:
    """`parties` greenlets meet once."""

    def __init__(self, hub: Hub, parties: int, name: str) -> None:
        self._hub = hub
        self._name = name
        self._parties = parties
        self._arrived: list[tuple[HostTask, int]] = []
        self._asleep: list[Any] = []
        self.aborted = False

    def wait(self) -> None:
        """Sleep until all parties have come.

        Raises:
            RingError: `abort` was called.
        """
        self._refuse_when_aborted()
        task = self._hub.recorder.task
        self._arrived.append((task, self._hub.recorder.on_line(kinds.BARRIER, self._name, {"name": self._name})))
        if len(self._arrived) == self._parties:
            self._wake_all()
        while len(self._arrived) < self._parties:
            self._asleep.append(greenlet.getcurrent())
            self._hub.sleep(board.BARRIER)
            self._refuse_when_aborted()
        task.after.extend(r for other, r in self._arrived if other is not task and r >= 0)

    def abort(self) -> None:
        self.aborted = True
        self._wake_all()

    def _wake_all(self) -> None:
        for sleeper in self._asleep:
            self._hub.wake(sleeper)
        self._asleep.clear()

    def _refuse_when_aborted(self) -> None:
        if self.aborted and len(self._arrived) < self._parties:
            raise RingError(f"the barrier was aborted: barrier={self._name}; a party failed before it came")


class GreenletWorker(RankWorker):
    """A worker with a greenlet of its own; its work begins when the starter sleeps."""

    def __init__(self, hub: Hub, name: str, *, stream: Any) -> None:
        super().__init__(
            name, start=GreenletBaton(hub, sleeps_as=board.IDLE), end=GreenletBaton(hub, sleeps_as=board.JOIN)
        )
        self._hub = hub
        self._task = HostTask(name, stream)
        self._greenlet = greenlet.greenlet(self._loop)
        hub.wake(self._greenlet)

    def stop(self) -> None:
        self._start.give()
        self._end.take()
        self._hub.forget(greenlet.getcurrent())  # the ended greenlet came back here by itself

    def _loop(self) -> None:
        self._hub.recorder.switch_to(self._task)
        while self._works():
            pass
        self._end.give()  # returning goes on in the greenlet that made this one: the one that stops it


class GreenletHost(RankHost):
    """Makes batons, barriers and workers of one rank, all on the calling thread."""

    def __init__(self, recorder: RankRecorder, resume: Callable[[Any], None], stream: Any) -> None:
        super().__init__()
        self._hub = Hub(recorder, resume)
        self._stream = stream

    def baton(self, name: str) -> GreenletBaton:
        return GreenletBaton(self._hub)

    def barrier(self, parties: int, name: str) -> GreenletBarrier:
        return GreenletBarrier(self._hub, parties, name)

    def worker(self, name: str) -> GreenletWorker:
        worker = GreenletWorker(self._hub, name, stream=self._stream)
        self.workers.append(worker)
        return worker
