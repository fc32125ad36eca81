"""Full CUDA graphs of a step (needs torch): captured with the ubatch threads at work, replayed without them.

The capture opens on the stream that is current in the starter's thread; the comm stream joins it by the player's own events.
Ubatch threads launch into it from their threads, each with the library handles that the warm-up run made there. All graphs of
a rank share one memory pool: a replay of one may overwrite what another left, so outputs are read before the next replay.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch

from dbo.errors import CaptureError, refusal

if TYPE_CHECKING:
    from gpu.device import GpuWorld

_POOLS: dict[int, Any] = {}


class CudaGraph:
    """One captured program of one rank; `dbo.contract.Graph`.

    Attributes:
        exchanges: by communicator, how many exchanges one replay makes.
    """

    def __init__(self, world: GpuWorld, name: str) -> None:
        self.world = world
        self.name = name
        self.exchanges: dict[str, int] = {}
        self._graph: Any = None

    @contextmanager
    def capture(self) -> Iterator[CudaGraph]:
        """Keep what is launched inside the block, from the current stream and those that join it.

        Raises:
            CaptureError: the program did what a capture forbids, or left a stream unjoined. Nothing is left behind.
        """
        world, stream = self.world, self.world.current_stream()
        if world.trace.capturing:
            raise CaptureError(refusal("one capture is open at a time", "close the other one", graph=self.name))
        torch.cuda.synchronize(world.device)
        gc.collect()  # a collection inside the capture could free what a capture must not free
        world.trace.on_line("capture.begin", self.name, {"graph": self.name})
        before = dict(world.counters)
        graph = torch.cuda.CUDAGraph()
        world.trace.capturing = True
        graph.capture_begin(pool=_pool(world.device), capture_error_mode="thread_local")
        try:
            yield self
        except BaseException:
            self._abandon(graph, stream)
            raise
        else:
            self._finish(graph, stream)
        finally:
            world.trace.capturing = False
            self.exchanges = {g: n - before.get(g, 0) for g, n in world.counters.items() if n > before.get(g, 0)}
            world.counters = before
        odd = {group: n for group, n in self.exchanges.items() if group == "low_latency" and n % 2}
        if odd:
            self._graph = None
            rule = "a graph makes an even number of low-latency calls, since each replay starts at buffer 0"
            raise CaptureError(refusal(rule, "capture whole layers", graph=self.name, **odd))
        world.trace.on_line("capture.end", self.name, {"graph": self.name, "calls": sum(self.exchanges.values())})

    def replay(self, real_tokens: Sequence[int] = ()) -> None:
        """Launch it again on the current stream. No other thread wakes, and the host waits for nothing.

        Raises:
            CaptureError: nothing was captured.
        """
        if self._graph is None:
            raise CaptureError(refusal("a graph is captured before it is replayed", "capture it", graph=self.name))
        world = self.world
        world.trace.on_line("replay", self.name, {"graph": self.name, "calls": sum(self.exchanges.values())})
        for group, count in self.exchanges.items():
            first = world.counters.get(group, 0)
            world.trace.came(group, first + count - 1, f"graph {self.name}"[:32])
            world.counters[group] = first + count
        self._graph.replay()

    def _finish(self, graph: Any, stream: Any) -> None:
        try:
            with torch.cuda.stream(stream.cuda):
                graph.capture_end()
        except BaseException as error:
            self._abandon(graph, stream, ended=True)
            rule = "streams that joined a capture are joined again at its end, and nothing in it waits for the host"
            raise CaptureError(refusal(rule, "look at the cause", graph=self.name)) from error
        self._graph = graph

    def _abandon(self, graph: Any, stream: Any, *, ended: bool = False) -> None:
        """Leave nothing of a failed capture: the stream usable, the pool free for others, no graph."""
        if not ended:
            try:
                with torch.cuda.stream(stream.cuda):
                    graph.capture_end()
            except RuntimeError as error:
                self.world.trace.on_line("capture.end", self.name, {"graph": self.name, "calls": 0, "why": str(error)})
        graph.reset()
        _POOLS.pop(self.world.device.index, None)  # half-captured allocations keep their pool; the next graph gets a new one
        torch.cuda.synchronize(self.world.device)


def _pool(device: torch.device) -> Any:
    """The memory pool of all graphs of this process on `device`."""
    if device.index not in _POOLS:
        _POOLS[device.index] = torch.cuda.graph_pool_handle()
    return _POOLS[device.index]
