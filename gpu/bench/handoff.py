"""What a hand-over of the baton costs the host: raw locks and persistent threads against events and new ones. No torch.

ring of `threading.Event` with new threads a step      what the field does
persistent threads, raw locks                          `gpu.host.threads`
greenlets on one thread                                the other candidate; streams would be restored by the ring
"""

from __future__ import annotations

import importlib.util
import statistics
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

from gpu.host.threads import ThreadHost
from gpu.record.recorder import RankRecorder


@dataclass(frozen=True, kw_only=True)
class Cost:
    """Microseconds of a step of so many hand-overs: median and quartiles over the steps."""

    name: str
    median_us: float
    low_us: float
    high_us: float


def measure(*, steps: int = 300, yields: int = 54, ubatches: int = 2) -> list[Cost]:
    """Each way in turn. `yields` a ubatch and step: two a layer of a 27-layer model."""
    ways: list[tuple[str, Callable[[int, int], Callable[[], None]]]] = [
        ("new threads, threading.Event", _events),
        ("persistent threads, raw locks", _raw_locks),
    ]
    if importlib.util.find_spec("greenlet") is not None:
        ways.append(("greenlets on one thread", _greenlets))
    return [_timed(name, make(yields, ubatches), steps) for name, make in ways]


def _timed(name: str, step: Callable[[], None], steps: int) -> Cost:
    for _ in range(max(3, steps // 10)):
        step()
    times = []
    for _ in range(steps):
        start = time.perf_counter_ns()
        step()
        times.append((time.perf_counter_ns() - start) / 1000)
    low, median, high = statistics.quantiles(times, n=4)
    return Cost(name=name, median_us=median, low_us=low, high_us=high)


def _events(yields: int, ubatches: int) -> Callable[[], None]:
    def step() -> None:
        events = [threading.Event() for _ in range(ubatches)]
        ready = threading.Barrier(ubatches + 1)

        def run(me: int) -> None:
            following = events[(me + 1) % ubatches]
            ready.wait()
            events[me].wait()
            events[me].clear()
            for _ in range(yields):
                following.set()
                events[me].wait()
                events[me].clear()
            following.set()

        threads = [threading.Thread(target=run, args=(i,)) for i in range(ubatches)]
        for thread in threads:
            thread.start()
        ready.wait()
        events[0].set()
        for thread in threads:
            thread.join()

    return step


def _recorder() -> RankRecorder:
    recorder = RankRecorder(0, None, place=lambda: (0, 0), stamp=lambda stream: 0.0, keep=False)
    recorder.start_line("main", None)
    return recorder


def _raw_locks(yields: int, ubatches: int) -> Callable[[], None]:
    return _ring(ThreadHost(_recorder(), None, lambda: None), yields, ubatches)


def _greenlets(yields: int, ubatches: int) -> Callable[[], None]:
    from gpu.host.greenlets import GreenletHost

    return _ring(GreenletHost(_recorder(), lambda stream: None, None), yields, ubatches)


def _ring(host: Any, yields: int, ubatches: int) -> Callable[[], None]:
    """A step as the wrapper runs it: a barrier, the baton to ubatch 0, the ring, a join."""
    workers = [host.worker(f"u{i}") for i in range(ubatches)]

    def step() -> None:
        batons = [host.baton(f"u{i}") for i in range(ubatches)]
        ready = host.barrier(ubatches + 1, "ready")

        def run(me: int) -> None:
            following = batons[(me + 1) % ubatches]
            ready.wait()
            batons[me].take()
            for _ in range(yields):
                following.give()
                batons[me].take()
            following.give()

        for me, worker in enumerate(workers):
            worker.submit(partial(run, me))
        ready.wait()
        batons[0].give()
        for worker in workers:
            worker.join()

    return step
