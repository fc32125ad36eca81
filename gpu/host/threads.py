"""What host threads of one rank synchronise with: raw-lock batons, a barrier, persistent workers.

A raw lock is the cheapest hand-over that Python has: `release` in one thread, `acquire` in another, no condition
variable and no queue between them. Every wait is on the board before it begins. Each object leaves its edges in the
trace.
"""

from __future__ import annotations

import _thread
import threading
from collections.abc import Callable
from typing import Any

from dbo.errors import RingError
from dbo.trace import kinds
from gpu.host.workers import RankHost, RankWorker
from gpu.record.recorder import HostTask, RankRecorder
from gpu.watch import flight_recorder as board


class RawBaton:
    """A binary semaphore over one raw lock, which is held while nobody has given."""

    def __init__(self, recorder: RankRecorder, *, sleeps_as: int = board.BATON) -> None:
        self._recorder = recorder
        self._sleeps_as = sleeps_as
        self._lock = _thread.allocate_lock()
        self._lock.acquire()
        self._giver = -1

    def give(self) -> None:
        task = self._recorder.task
        self._giver = task.last
        if self._sleeps_as == board.BATON and task.tags[2] >= 0:
            # Before the lock: a line that was slow to say so would look like the one at work when its peer dies.
            self._recorder.sleeps(board.BATON)
        try:
            self._lock.release()
        except RuntimeError:
            pass  # given twice: still the one permit, also while a failed ring unwinds

    def take(self) -> None:
        if not self._lock.acquire(blocking=False):
            self._recorder.sleeps(self._sleeps_as)
            self._lock.acquire()
        self._recorder.goes_on()
        if self._giver >= 0:
            self._recorder.task.after.append(self._giver)


class ThreadBarrier:
    """`parties` threads meet once; `abort` wakes those who wait and refuses those who come later."""

    def __init__(self, recorder: RankRecorder, parties: int, name: str) -> None:
        self._recorder = recorder
        self._name = name
        self._parties = parties
        self._lock = _thread.allocate_lock()
        self._arrived: list[tuple[HostTask, int, Any]] = []
        self.aborted = False

    def wait(self) -> None:
        """Block until all parties have come.

        Raises:
            RingError: `abort` was called.
        """
        task = self._recorder.task
        gate = _thread.allocate_lock()
        gate.acquire()
        with self._lock:
            self._refuse_when_aborted()
            record = self._recorder.on_line(kinds.BARRIER, self._name, {"name": self._name})
            self._arrived.append((task, record, gate))
            if len(self._arrived) == self._parties:
                self._open_gates()
        self._recorder.sleeps(board.BARRIER)
        gate.acquire()
        self._recorder.goes_on()
        if len(self._arrived) < self._parties:
            self._refuse_when_aborted()
        task.after.extend(r for other, r, _ in self._arrived if other is not task and r >= 0)

    def abort(self) -> None:
        with self._lock:
            if not self.aborted:
                self.aborted = True
                if len(self._arrived) < self._parties:
                    self._open_gates()

    def _open_gates(self) -> None:
        for _, _, gate in self._arrived:
            gate.release()

    def _refuse_when_aborted(self) -> None:
        if self.aborted:
            raise RingError(f"the barrier was aborted: barrier={self._name}; a party failed before it came")


class ThreadWorker(RankWorker):
    """A worker with a thread of its own."""

    def __init__(self, recorder: RankRecorder, name: str, *, stream: Any, enter: Callable[[], None]) -> None:
        super().__init__(
            name, start=RawBaton(recorder, sleeps_as=board.IDLE), end=RawBaton(recorder, sleeps_as=board.JOIN)
        )
        self._recorder = recorder
        self.thread = threading.Thread(target=self._loop, args=(stream, enter), name=name, daemon=True)
        self.thread.start()

    def stop(self) -> None:
        self._start.give()
        self.thread.join()

    def _loop(self, stream: Any, enter: Callable[[], None]) -> None:
        self._recorder.start_line(self.name, stream)
        enter()
        while self._works():
            pass


class ThreadHost(RankHost):
    """Makes batons, barriers and worker threads of one rank.

    Args:
        stream: current when a worker begins. enter: called in each new thread.
    """

    def __init__(self, recorder: RankRecorder, stream: Any, enter: Callable[[], None]) -> None:
        super().__init__()
        self._recorder = recorder
        self._stream = stream
        self._enter = enter

    def baton(self, name: str) -> RawBaton:
        return RawBaton(self._recorder)

    def barrier(self, parties: int, name: str) -> ThreadBarrier:
        return ThreadBarrier(self._recorder, parties, name)

    def worker(self, name: str) -> ThreadWorker:
        worker = ThreadWorker(self._recorder, name, stream=self._stream, enter=self._enter)
        self.workers.append(worker)
        return worker
