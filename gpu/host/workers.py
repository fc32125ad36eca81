"""What the host lines of a rank have in common, threads (`gpu.host.threads`) or greenlets (`gpu.host.greenlets`)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol


class RankBaton(Protocol):
    """A binary semaphore."""

    def give(self) -> None:
        """One permit, however often it is called."""

    def take(self) -> None:
        """Sleep until there is one."""


class RankWorker:
    """A host line that lives as long as its rank and sleeps between two pieces of work; a step makes none.

    Args:
        start: given when there is work, or when it is to end. end: given by the worker when its work has ended.

    Attributes:
        error: what the last piece of work raised; who submits work says what becomes of it.
        wakes: pieces of work that it woke up for.
    """

    def __init__(self, name: str, *, start: RankBaton, end: RankBaton) -> None:
        self.name = name
        self.error: BaseException | None = None
        self.wakes = 0
        self._work: Callable[[], None] | None = None
        self._start = start
        self._end = end

    def submit(self, work: Callable[[], None]) -> None:
        """Have `work` run in this line."""
        self._work, self.error = work, None
        self._start.give()

    def join(self) -> None:
        """Sleep until the submitted work has ended."""
        self._end.take()

    def stop(self) -> None:
        """End it. It must have no work."""
        raise NotImplementedError

    def _works(self) -> bool:
        """In the worker's own line: do the next piece of work. False: there is none, which ends the worker."""
        self._start.take()
        self.wakes += 1
        work, self._work = self._work, None
        if work is None:
            return False
        try:
            work()
        except BaseException as error:  # also what must not end a line that others will wait for
            self.error = error
        work = None  # with it go the step's contexts and, after an error, the frames that it was raised through
        self._end.give()
        return True


class RankHost:
    """The workers of one rank."""

    def __init__(self) -> None:
        self.workers: list[Any] = []

    def close(self) -> None:
        """End all workers; none may have work."""
        for worker in self.workers:
            worker.stop()
        self.workers.clear()
