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
from gpu import board
from gpu.recorder import HostTask, Recorder


class RawBaton:
    """A binary semaphore over one raw lock, which is held while nobody has given."""

    def __init__(self, recorder: Recorder, *, sleeps_as: int = board.BATON) -> None:
        self._recorder = recorder
        self._sleeps_as = sleeps_as
        self._lock = _thread.allocate_lock()
        self._lock.acquire()
        self._giver = -1
        self._given_twice = False

    def give(self) -> None:
        task = self._recorder.task
        self._giver = task.last
        if self._sleeps_as == board.BATON and task.tags[2] >= 0:
            # Before the lock: a line that was slow to say so would look like the one at work when its peer dies.
            self._recorder.sleeps(board.BATON)
        try:
            self._lock.release()
        except RuntimeError:
            self._given_twice = True  # still the one permit: a semaphore of one, also while a failed ring unwinds

    def take(self) -> None:
        if not self._lock.acquire(blocking=False):
            self._recorder.sleeps(self._sleeps_as)
            self._lock.acquire()
        self._recorder.goes_on()
        if self._giver >= 0:
            self._recorder.task.after.append(self._giver)


class ThreadBarrier:
    """`parties` threads meet once; `abort` wakes those who wait and refuses those who come later."""

    def __init__(self, recorder: Recorder, parties: int, name: str) -> None:
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
            record = self._recorder.on_line("barrier", self._name, {"name": self._name})
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


class ThreadWorker:
    """A thread that lives as long as its rank and sleeps between two pieces of work; a step creates none.

    Attributes:
        error: what the last piece of work raised; who submits work says what becomes of it.
        wakes: pieces of work that it woke up for.
    """

    def __init__(self, recorder: Recorder, name: str, *, stream: Any, enter: Callable[[], None]) -> None:
        self._recorder = recorder
        self.name = name
        self._work: Callable[[], None] | None = None
        self.error: BaseException | None = None
        self._start = RawBaton(recorder, sleeps_as=board.IDLE)
        self._end = RawBaton(recorder, sleeps_as=board.JOIN)
        self.wakes = 0
        self.thread = threading.Thread(target=self._loop, args=(stream, enter), name=name, daemon=True)
        self.thread.start()

    def submit(self, work: Callable[[], None]) -> None:
        """Run `work` in the worker's thread."""
        self._work, self.error = work, None
        self._start.give()

    def join(self) -> None:
        """Block until the submitted work has ended."""
        self._end.take()

    def stop(self) -> None:
        """End the thread. It must have no work."""
        self._start.give()
        self.thread.join()

    def _loop(self, stream: Any, enter: Callable[[], None]) -> None:
        self._recorder.start_line(self.name, stream)
        enter()
        while True:
            self._start.take()
            self.wakes += 1
            work, self._work = self._work, None
            if work is None:
                return
            try:
                work()
            except BaseException as error:  # also what must not end a thread that others will wait for
                self.error = error
            finally:
                work = None  # with it go the step's contexts and, after an error, the frames that it was raised through
                self._end.give()


class ThreadHost:
    """Makes batons, barriers and worker threads of one rank.

    Args:
        stream: current when a worker begins. enter: called in each new thread.
    """

    def __init__(self, recorder: Recorder, stream: Any, enter: Callable[[], None]) -> None:
        self._recorder = recorder
        self._stream = stream
        self._enter = enter
        self.workers: list[ThreadWorker] = []

    def baton(self, name: str) -> RawBaton:
        return RawBaton(self._recorder)

    def barrier(self, parties: int, name: str) -> ThreadBarrier:
        return ThreadBarrier(self._recorder, parties, name)

    def worker(self, name: str) -> ThreadWorker:
        worker = ThreadWorker(self._recorder, name, stream=self._stream, enter=self._enter)
        self.workers.append(worker)
        return worker

    def close(self) -> None:
        """End all worker threads; none may have work."""
        for worker in self.workers:
            worker.stop()
        self.workers.clear()
