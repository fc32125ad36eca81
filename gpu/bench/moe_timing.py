"""Needs torch. Times of what all ranks do together, in turns: a barrier, an event on either side, the slower rank counts.

Each sample comes behind some time of the same work, so that the device's clock is the one that it keeps under this load. A
device that has rested, or had light work, runs faster for some tens of milliseconds: computation alone, sampled behind
exchanges, took 2.93 ms a layer and on its own account 3.44 (docs/measurements/dbo_gain.md).
"""

from __future__ import annotations

import gc
import math
import time
from collections.abc import Callable, Hashable, Mapping
from typing import Any, TypeVar

import torch
import torch.distributed as dist

Key = TypeVar("Key", bound=Hashable)
Work = Callable[[], Any]

WARM_UP = 3
OWN_LOAD_MS = 50.0
"""Of the same work before each sample, on devices."""


def meet(world: Any) -> None:
    """Wait for all ranks, each with nothing left on its device."""
    world.compute.drain()
    dist.barrier(group=world.process_groups.control)


class Turns:
    """Samples work of this rank and its peers.

    Args:
        world: the rank's; its compute stream is current, and work ends on it.
        repeat: samples of each.
    """

    def __init__(self, world: Any, repeat: int) -> None:
        self.world = world
        self.repeat = repeat
        self._one = torch.zeros(1, device=world.device)

    def samples(self, works: Mapping[Key, Work]) -> dict[Key, tuple[float, ...]]:
        """Milliseconds of each of `works`, by repetition. All ranks bring the same works in the same order."""
        mine: dict[Key, list[float]] = {key: [] for key in works}
        before = dict.fromkeys(works, 0)
        collects = gc.isenabled()
        gc.collect()
        gc.disable()  # a collection would be some work's cost, and not another's
        try:
            for turn in range(WARM_UP + self.repeat):
                first_ms: list[float] = []
                for key, work in works.items():
                    self.meet()
                    for _ in range(before[key]):
                        work()
                    taken_ms = self._once(work)
                    first_ms.append(taken_ms)
                    if turn >= WARM_UP:
                        mine[key].append(taken_ms)
                if turn == WARM_UP - 1 and self.world.asynchronous:
                    # The same number on all ranks: their exchanges belong together.
                    by_work = zip(*self.world.control.all_gather_object(first_ms), strict=True)
                    before = {key: math.ceil(OWN_LOAD_MS / max(ms)) for key, ms in zip(works, by_work, strict=True)}
        finally:
            if collects:
                gc.enable()
        everybody = self.world.control.all_gather_object(list(mine.values()))
        return {
            key: tuple(max(samples) for samples in zip(*(ranks[i] for ranks in everybody), strict=True))
            for i, key in enumerate(works)
        }

    def meet(self) -> None:
        """All ranks' hosts, then their devices: an exchange on the stream ends at about the same time everywhere."""
        meet(self.world)
        data = self.world.process_groups.data
        if self.world.asynchronous and data is not None:
            dist.all_reduce(self._one, group=data)

    def _once(self, work: Work) -> float:
        if not self.world.asynchronous:
            start = time.perf_counter()
            work()
            return (time.perf_counter() - start) * 1e3
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        stream = self.world.compute.cuda
        begin.record(stream)
        work()
        end.record(stream)
        end.synchronize()
        return float(begin.elapsed_time(end))
