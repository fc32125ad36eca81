"""Benchmarks, repeated: their median and spread stand against a target."""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from dbo.contract.benchmark import Benchmark
from dbo.errors import UsageError


@dataclass(frozen=True, kw_only=True)
class BenchResult:
    """A benchmark's samples, in order."""

    benchmark: Benchmark
    samples: tuple[float, ...]

    @property
    def median(self) -> float:
        return statistics.median(self.samples)

    @property
    def spread(self) -> tuple[float, float]:
        """The least and the largest sample."""
        return min(self.samples), max(self.samples)

    @property
    def reached(self) -> bool | None:
        """None: there is no target."""
        target = self.benchmark.target
        return None if target is None else target.reached(self.median)


def measure(benchmark: Benchmark, repeat: int) -> BenchResult:
    """Sample up to `repeat` times, after one that warms up where a sample is short."""
    times = min(repeat, benchmark.most)
    if benchmark.most > 1:
        benchmark.sample()
    samples = []
    for _ in range(times):
        gc.collect()  # what the sample before left behind is not this one's cost
        samples.append(benchmark.sample())
    return BenchResult(benchmark=benchmark, samples=tuple(samples))


def milliseconds(work: Callable[[], object]) -> float:
    """CPU time of this process for `work`: on a shared machine the wall clock also counts the neighbours."""
    start = time.process_time()
    work()
    return (time.process_time() - start) * 1e3


def chosen(benchmarks: Sequence[Benchmark], only: Sequence[str]) -> list[Benchmark]:
    """Those whose names begin with one of `only`; all when it is empty.

    Raises:
        UsageError: a name that fits none.
    """
    for name in only:
        if not name or not any(benchmark.name.startswith(name) for benchmark in benchmarks):
            known = ", ".join(benchmark.name for benchmark in benchmarks)
            raise UsageError.of("--only names benchmarks", fix=f"choose from {known}", only=name)
    return [b for b in benchmarks if not only or any(b.name.startswith(name) for name in only)]
