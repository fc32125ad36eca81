"""Needs torch. Times of device work as a graph replays it, and what the device can do at most, in the same run.

Each candidate is captured once. Then all candidates of a part take turns, each behind a write that empties the L2 cache (it
also keeps the device busy until the launch is queued), with an event on either side; the median counts. So host time is in
no figure, and a drifting clock meets all candidates.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

Work = Callable[[], Any]

FLUSH_BYTES = 256 << 20


@dataclass(frozen=True, kw_only=True)
class Limits:
    """Measured: a bf16 product of 8192^3 in FLOP/s, and a copy in bytes/s, read and written bytes counted."""

    flops_per_s: float
    bytes_per_s: float

    def floor_ms(self, flops: float, nbytes: float) -> float:
        """The least that work of so many operations and bytes takes."""
        return 1e3 * max(flops / self.flops_per_s, nbytes / self.bytes_per_s)


class Stopwatch:
    """Times work on the current device."""

    def __init__(self, *, repeats: int = 20) -> None:
        self.repeats = repeats
        self._flush = torch.empty(FLUSH_BYTES, dtype=torch.uint8, device="cuda")

    def medians(self, works: Mapping[str, Work]) -> tuple[dict[str, float], dict[str, str]]:
        """Milliseconds of each of `works`, and for those that refuse these inputs the first line of why."""
        graphs: dict[str, torch.cuda.CUDAGraph] = {}
        refused: dict[str, str] = {}
        for name, work in works.items():
            try:
                graphs[name] = self.capture(work)
            except (RuntimeError, ValueError, TypeError, NotImplementedError, AttributeError) as error:
                refused[name] = str(error).strip().partition("\n")[0][:160]
        samples: dict[str, list[float]] = {name: [] for name in graphs}
        for _ in range(self.repeats):
            for name, graph in graphs.items():
                samples[name].append(self._once(graph))
        return {name: statistics.median(times) for name, times in samples.items()}, refused

    def capture(self, work: Work) -> torch.cuda.CUDAGraph:
        """`work` as a graph; it runs twice before, so that what it compiles is compiled."""
        for _ in range(2):
            work()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            work()
        graph.replay()
        torch.cuda.synchronize()
        return graph

    def _once(self, graph: torch.cuda.CUDAGraph) -> float:
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        self._flush.zero_()
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        return float(start.elapsed_time(end))

    def limits(self) -> Limits:
        """What this device does now, on random numbers."""
        a, b = (torch.randn(8192, 8192, dtype=torch.bfloat16, device="cuda") for _ in range(2))
        sizes = (1 << 28, 1 << 29, 1 << 30)
        works: dict[str, Work] = {str(nbytes): copy_of(nbytes) for nbytes in sizes}
        found, _ = self.medians({"product": lambda: a @ b, **works})
        rate = max(nbytes / found[str(nbytes)] for nbytes in sizes)
        return Limits(flops_per_s=2 * 8192**3 / found["product"] * 1e3, bytes_per_s=rate * 1e3)


def copy_of(nbytes: float) -> Work:
    """A device copy that reads and writes `nbytes` together."""
    size = max(1, int(nbytes) // 4)
    source = torch.randn(size, dtype=torch.bfloat16, device="cuda")
    target = torch.empty_like(source)
    return lambda: target.copy_(source)


def product_of(rows: int, inner: int, columns: int, *, batch: int | None = None) -> Work:
    """A cuBLAS product `[rows, inner] x [inner, columns]`, the second stored as weights are; with `batch`, so many."""
    lead = () if batch is None else (batch,)
    a = torch.randn(*lead, rows, inner, dtype=torch.bfloat16, device="cuda")
    b = torch.randn(*lead, columns, inner, dtype=torch.bfloat16, device="cuda").transpose(-1, -2)
    return lambda: a @ b


def in_turn(*works: Work) -> Work:
    """One after another."""

    def run() -> None:
        for work in works:
            work()

    return run
