"""Full CUDA graphs of a step (needs torch): captured with the ubatch threads at work, replayed without them.

The capture opens on the stream that is current in the starter's thread; the comm stream joins it by the player's own
events. Ubatch threads launch into it from their threads, each with the library handles that the warm-up run made there.
All graphs of a rank share one memory pool: a replay of one may overwrite what another left, so outputs are read before
the next replay. With a trace, the graph writes its own timestamps (`gpu.record.stamp`), and each replay leaves its records.
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any

import torch

from dbo.errors import CaptureError
from dbo.trace import kinds
from gpu.record.recorder import Captured, Replayed

if TYPE_CHECKING:
    from gpu.device import GpuWorld

_POOLS: dict[int, tuple[Any, weakref.WeakSet[CudaGraph]]] = {}
"""By device: the pool of all graphs captured there, and who is in it. Memory of a pool is freed with its last graph."""


class CudaGraph:
    """One captured program of one rank; `dbo.contract.world.Graph`.

    Attributes:
        exchanges: by communicator, how many exchanges one replay makes.
    """

    def __init__(self, world: GpuWorld, name: str) -> None:
        self.world = world
        self.name = name
        self.exchanges: dict[str, int] = {}
        self._graph: Any = None
        self._captured: Captured | None = None
        self._replayed: list[Replayed] = []

    @contextmanager
    def capture(self) -> Iterator[CudaGraph]:
        """Keep what is launched inside the block, from the current stream and those that join it.

        Raises:
            CaptureError: the program did what a capture forbids, or left a stream unjoined. Nothing is left behind.
        """
        world = self.world
        if world.trace.capturing:
            raise CaptureError.of("one capture is open at a time", fix="close the other one", graph=self.name)
        torch.cuda.synchronize(world.device)
        gc.collect()
        world.trace.on_line(kinds.CAPTURE_BEGIN, self.name, {"graph": self.name})
        before = dict(world.counters)
        has_clock = world.trace.keeps and world.stamps is not None
        captured = world.trace.begin_capture(before, has_clock=has_clock)
        pool = _pool(world.device, self)
        graph = torch.cuda.CUDAGraph()
        collects = gc.isenabled()
        gc.disable()  # a collection could free, inside the capture, what a capture must not free
        try:
            graph.capture_begin(pool=pool, capture_error_mode="thread_local")
            try:
                yield self
            except BaseException:
                self._abandon(graph, pool)
                raise
            self._finish(graph, pool)
        finally:
            world.trace.end_capture()
            self.exchanges = {g: n - before.get(g, 0) for g, n in world.counters.items() if n > before.get(g, 0)}
            world.counters = before
            if collects:
                gc.enable()
        if self.exchanges.get("low_latency", 0) % 2:
            self._graph = None
            rule = "a graph makes an even number of low-latency calls, since each replay starts at buffer 0"
            raise CaptureError.of(rule, fix="capture whole layers", graph=self.name, calls=self.exchanges)
        self._captured = captured
        world.trace.on_line(kinds.CAPTURE_END, self.name, {"graph": self.name, "calls": sum(self.exchanges.values())})

    def replay(self, real_tokens: Sequence[int] = ()) -> None:
        """Launch it again on the current stream. No other thread wakes, and the host waits for nothing.

        With a trace it waits once: for the replay before, whose times are about to be overwritten.

        Raises:
            CaptureError: nothing was captured.
        """
        if self._graph is None or self._captured is None:
            raise CaptureError.of("a graph is captured before it is replayed", fix="capture it", graph=self.name)
        world = self.world
        world.trace.end_visit(world.trace.task)
        world.trace.on_line(kinds.REPLAY, self.name, {"graph": self.name, "calls": sum(self.exchanges.values())})
        for group, count in self.exchanges.items():
            world.trace.came(group, world.counters.get(group, 0) + count - 1, f"graph {self.name}"[:32])
        if self._captured.has_clock and world.trace.keeps:
            world.collect_stamps()  # of the replay before: its slots are about to be overwritten
            self._replayed = world.trace.replay(self._captured, world.counters, real_tokens)
            world.unread = self
        for group, count in self.exchanges.items():
            world.counters[group] = world.counters.get(group, 0) + count
        self._graph.replay()

    def collect(self, slots_us: Sequence[float]) -> None:
        """Fill in the times of the last replay, which has ended on the device."""
        captured = self._captured
        if captured is None:
            return
        values = {(id(record), name): int(value) for record, name, value in captured.later}
        for new, old in self._replayed:
            time_of = captured.times[old.id]
            new.t_us = slots_us[time_of.start]
            new.dur_us = 0.0 if time_of.stop is None else max(0.0, slots_us[time_of.stop] - new.t_us)
            new.attrs |= {name: value for (record, name), value in values.items() if record == id(old)}
        self._replayed = []

    def _finish(self, graph: Any, pool: Any) -> None:
        try:
            graph.capture_end()
        except RuntimeError as error:
            self._clean_up(graph, pool)
            rule = "streams that joined a capture are joined again at its end, and nothing in it waits for the host"
            raise CaptureError.of(rule, fix="look at the cause", graph=self.name) from error
        self._graph = graph

    def _abandon(self, graph: Any, pool: Any) -> None:
        """End a capture whose program has failed; its own error is the one that counts."""
        with suppress(RuntimeError):  # what a broken capture says at its end
            graph.capture_end()
        self._clean_up(graph, pool)

    def _clean_up(self, graph: Any, pool: Any) -> None:
        """Leave nothing of a failed capture: streams usable, the allocator out of the pool, the pool not used again."""
        graph.reset()
        with suppress(RuntimeError):  # the capture's end may have done it
            torch._C._cuda_endAllocateToPool(self.world.device.index, pool)
        _POOLS.pop(self.world.device.index, None)
        torch.cuda.synchronize(self.world.device)


def _pool(device: torch.device, graph: CudaGraph) -> Any:
    """The memory pool of all graphs of this process on `device`, which `graph` joins. Empty ones are not used again."""
    pool, members = _POOLS.get(device.index, (None, weakref.WeakSet[CudaGraph]()))
    if pool is None or not members:
        pool = torch.cuda.graph_pool_handle()
        _POOLS[device.index] = pool, members
    members.add(graph)
    return pool


def forget_pool(device: torch.device) -> None:
    """Graphs captured from now on share another pool: the old one is freed with the last graph in it."""
    _POOLS.pop(device.index, None)
