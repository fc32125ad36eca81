"""What the tests of backends and presets share: which combinations there are, and one small job of each. No torch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from dbo.check.report import Report
from dbo.config import BACKENDS
from dbo.engine.components import Components
from dbo.job.rank import RankJob
from dbo.schedule import presets
from dbo.trace import Record
from sim.faults import CATALOGUE, Fault, Site
from sim.faults.clean_run import CleanRun
from sim.world import SimRun
from tests.sim.job_harness import ordering_job, run, verdict_of

FAULTS: dict[str, Fault] = {fault.name: fault for fault in CATALOGUE}
STREAM_BACKENDS = ("deepep_high_throughput", "deepep_v2", "nccl", "symm_copy")
ALL_BACKENDS = tuple(BACKENDS)
PRESETS = tuple(presets())

# Every preset on every backend that it declares.
DECLARED = tuple((name, backend) for name, schedule in presets().items() for backend in schedule.backends)


@dataclass(frozen=True)
class Case:
    """A preset on a backend, and the one-step, three-layer run of it that mutants are compared with."""

    preset: str
    backend: str

    def __str__(self) -> str:
        return f"{self.preset}-{self.backend}"

    def job(self, programs: Callable[[int], Components] | None = None) -> RankJob:
        return ordering_job(
            ((8,), (8,)),
            backend=self.backend,
            schedule=self.preset,
            model={"num_hidden_layers": 4},
            new_tokens=1,
            programs=programs,
        )

    def clean(self) -> CleanRun:
        launched = run(self.job())
        assert str(verdict_of(launched).verdict) == "proved"
        return CleanRun(launched.trace)

    def mutant(self, fault: str, site: Site) -> SimRun:
        where = ",".join(f"{key}={getattr(site, key)}" for key in FAULTS[fault].keys)
        return run(self.job(FAULTS[fault].programs(self.job().config, where)))

    def judged(self, fault: str, site: Site) -> Report:
        return verdict_of(self.mutant(fault, site))


def with_worst_case(backend: Any) -> Any:
    """The backend without a host wait for counts."""
    backend.worst_case = True
    return backend


def host_counts(launched: SimRun) -> list[Record]:
    """Host waits for receive counts."""
    return [r for r in launched.trace.of_kind("host.wait") if "counts" in r.attrs["why"]]


def starts(launched: SimRun) -> list[tuple[Any, ...]]:
    """When every piece of device work starts."""
    work = [r for r in launched.trace.records if r.on_device and r.dur_us]
    return sorted((r.rank, r.line, r.step, r.layer, r.ubatch, r.point, r.name, round(r.t_us, 3)) for r in work)
