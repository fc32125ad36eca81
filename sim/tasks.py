"""Host tasks under one scheduler: greenlets or OS threads, one runs at a time, and a `Strategy` chooses the next one.

A task runs until it blocks. When no task can run, the scheduler asks its `idle` callback (the devices) to make
progress; when that cannot either, the remaining tasks are deadlocked: `on_deadlock` is told, every task is unwound.

Code that touches torch runs on OS threads always: grad mode, inference mode and dispatch modes are per thread.
"""

from __future__ import annotations

import _thread
import contextvars
import threading
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from dbo.errors import Unwinding


class TaskKilled(Unwinding):
    """Unwinds a task that can never go on. Not an error of the program: the scheduler has already reported why."""


class Strategy(Protocol):
    """Who runs next. `ready` is in canonical order: index 0 is what a run without a strategy would do."""

    def choose(self, ready: Sequence[Task]) -> int: ...


class Canonical:
    """First come, first served."""

    def choose(self, ready: Sequence[Task]) -> int:
        return 0


class Task:
    """One host task. `now_us` is its own clock; `line` is its line in the trace."""

    __slots__ = (
        "attrs",
        "daemon",
        "done",
        "edges",
        "error",
        "id",
        "last_record",
        "line",
        "now_us",
        "rank",
        "stream",
        "tags",
        "throw",
        "vehicle",
        "waits",
        "work",
    )

    def __init__(self, id: int, rank: int, line: str, work: Callable[[], None], daemon: bool) -> None:
        self.id = id
        self.rank = rank
        self.line = line
        self.work = work
        self.daemon = daemon
        self.done = False
        self.error: BaseException | None = None
        self.throw: BaseException | None = None
        self.waits: Any = None
        self.now_us = 0.0
        self.last_record = -1
        self.edges: list[int] = []
        self.stream: Any = None
        self.tags: tuple[int, int, int, str] = (-1, -1, -1, "")
        self.attrs: dict[str, Any] = {}
        self.vehicle: Any = None


class Scheduler:
    """Runs tasks until all that are not daemons are done.

    Args:
        vehicle: "greenlet" or "thread".
        strategy: chooses among ready tasks.
        idle: called when no task is ready; returns True when it made a task ready or may do so when called again.
        on_deadlock: called once with the tasks that can never go on.
    """

    def __init__(
        self,
        *,
        vehicle: str = "thread",
        strategy: Strategy | None = None,
        idle: Callable[[], bool] = lambda: False,
        on_deadlock: Callable[[list[Task]], None] = lambda stuck: None,
    ) -> None:
        self.strategy = strategy or Canonical()
        self.idle = idle
        self.on_deadlock = on_deadlock
        self.tasks: list[Task] = []
        self.ready: list[Task] = []
        self.current: Task | None = None
        self.switches = 0
        self.interrupted: BaseException | None = None
        self._canonical = type(self.strategy) is Canonical
        self._vehicle: Any = _Threads(self) if vehicle == "thread" else _Greenlets(self)

    def spawn(self, work: Callable[[], None], *, rank: int, line: str, daemon: bool = False) -> Task:
        """A new task, ready to run; it starts when it is chosen."""
        task = Task(len(self.tasks), rank, line, work, daemon)
        if self.current is not None:
            task.now_us = self.current.now_us
        self.tasks.append(task)
        self._vehicle.prepare(task)
        self.ready.append(task)
        return task

    def block(self, waits: Any) -> None:
        """The current task waits for `waits` (anything with a readable form) until somebody calls `wake`."""
        task = self.current
        if task is None:
            raise RuntimeError("only a task can block: run the program with Scheduler.spawn")
        if task.throw is None:
            task.waits = waits
            self._vehicle.leave(task)
            task.waits = None
        if task.throw is not None:
            error, task.throw = task.throw, None
            if isinstance(error, TaskKilled):
                task.throw = error
            raise error

    def wake(self, task: Task, at_us: float = 0.0) -> None:
        """`task` may go on; its clock is at least `at_us`."""
        if task.waits is None or task.done:
            return
        task.waits = None
        task.now_us = max(task.now_us, at_us)
        self.ready.append(task)

    def raise_in(self, task: Task, error: BaseException) -> None:
        """Make the blocked `task` raise `error` out of what it waits for."""
        if task.waits is not None:
            task.throw = error
            self.wake(task)

    def pick(self) -> Task | None:
        """The next task to run, or None when none is ready."""
        if not self.ready or self.interrupted is not None:
            return None
        index = 0 if self._canonical else self.strategy.choose(self.ready)
        task = self.ready.pop(index)
        self.current = task
        self.switches += 1
        return task

    def run(self) -> None:
        """Run to the end. Errors of tasks stay in `task.error`, but for what is meant for the whole process.

        Raises:
            KeyboardInterrupt, SystemExit: a task raised it; the others stay where they are.
        """
        while True:
            task = self.pick()
            if self.interrupted is not None:
                raise self.interrupted
            if task is not None:
                self._vehicle.enter(task)
                self.current = None
            elif self.idle():
                continue
            else:
                stuck = [t for t in self.tasks if not t.done and not t.daemon]
                if stuck:
                    self.on_deadlock(stuck)
                left = [t for t in self.tasks if not t.done]
                if not left:
                    self._vehicle.close()
                    return
                for t in left:
                    self.raise_in(t, TaskKilled())

    def body(self, task: Task) -> None:
        """What a vehicle runs for a task."""
        try:
            if task.throw is not None:
                raise task.throw
            task.work()
        except TaskKilled as killed:
            task.error = task.error or killed
        except BaseException as error:  # a task's error belongs to whoever reads `task.error`
            task.error = error
            if isinstance(error, KeyboardInterrupt | SystemExit):
                self.interrupted = error
        finally:
            task.done = True
            # The work closes over the rank's world; keep no cycle alive through a finished task.
            task.work = _nothing


def _nothing() -> None:
    return None


def _context_for(scheduler: Scheduler) -> contextvars.Context:
    """A first task sees its launcher's context variables; one that a task makes starts with none, as a new thread does.

    Otherwise a task that a ubatch makes would take itself for that ubatch.
    """
    return contextvars.copy_context() if scheduler.current is None else contextvars.Context()


class _Greenlets:
    """Tasks on greenlets, each in a context of its own."""

    def __init__(self, scheduler: Scheduler) -> None:
        from greenlet import getcurrent, greenlet

        self.scheduler = scheduler
        self._greenlet = greenlet
        self._hub = getcurrent()
        self._starting: Task | None = None

    def prepare(self, task: Task) -> None:
        g = self._greenlet(lambda: self.scheduler.body(task), parent=self._hub)
        g.gr_context = _context_for(self.scheduler)
        task.vehicle = g

    def enter(self, task: Task) -> None:
        starting: Task | None = task
        while starting is not None:
            self._starting = None
            starting.vehicle.switch()
            starting = self._starting

    def leave(self, task: Task) -> None:
        following = self.scheduler.pick()
        if following is task:
            return
        if following is None:
            self._hub.switch()
        elif following.vehicle:
            following.vehicle.switch()
        else:
            # A new greenlet begins at the recursion depth of whoever starts it: tasks that started each other would
            # add theirs up, so the hub starts them all.
            self._starting = following
            self._hub.switch()

    def close(self) -> None:
        return None


class _Threads:
    """Tasks on OS threads that hand one raw lock each from one to the next."""

    def __init__(self, scheduler: Scheduler) -> None:
        self.scheduler = scheduler
        self._hub = _thread.allocate_lock()
        self._hub.acquire()
        self._threads: list[threading.Thread] = []

    def prepare(self, task: Task) -> None:
        lock = _thread.allocate_lock()
        lock.acquire()
        context = _context_for(self.scheduler)
        thread = threading.Thread(
            target=self._main, args=(task, lock, context), name=f"r{task.rank}.{task.line}", daemon=True
        )
        task.vehicle = lock
        self._threads.append(thread)
        thread.start()

    def _main(self, task: Task, lock: Any, context: contextvars.Context) -> None:
        lock.acquire()
        context.run(self.scheduler.body, task)
        following = self.scheduler.pick()
        (self._hub if following is None else following.vehicle).release()

    def enter(self, task: Task) -> None:
        task.vehicle.release()
        self._hub.acquire()

    def leave(self, task: Task) -> None:
        following = self.scheduler.pick()
        if following is task:
            return
        (self._hub if following is None else following.vehicle).release()
        task.vehicle.acquire()

    def close(self) -> None:
        for thread in self._threads:
            thread.join()
