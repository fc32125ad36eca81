"""Part `trace`: a run's trace is a linearisation, planted faults are found in it, and replays wake nobody (needs torch)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

from dbo.contract.patience import Patience
from dbo.engine.components import Components
from dbo.job.rank import RankJob, RankMain
from dbo.schedule import Point, Yield
from gpu.check import planted_faults, soak
from gpu.check.linearity import Problem, linearity
from gpu.check.setup import Found, Setup

STRUCK_RANK = 1
STEPS = 6
REPLAYED_STEPS = 60


@dataclass(frozen=True, kw_only=True)
class PlantedFault:
    """A planted fault, and what has to be found: its kind and the point (None: the schedule has no place for it)."""

    planted: Callable[[], Components]
    kind: str
    point: str | None


def check_trace(setup: Setup, backend: str) -> Found:
    """A clean run, a run a fault, and on a device one from graphs."""
    job = setup.job(backend, keep_logits=False, max_steps=STEPS)
    clean = setup.run(RankMain(job))
    if any(clean.errors):
        return False, f"the clean run failed: {clean.errors}"
    found = linearity(clean.trace)
    lines = [f"{found.checked} edges", *(f"  WRONG: {problem}" for problem in found.problems)]
    good = found.checked > 0 and not found.problems
    step = next((o.step for o in clean.values[STRUCK_RANK] if o.decision is not None and o.decision.split), -1)
    for fault in faults_of(job):
        named, words = _planted(setup, job, fault, step)
        good = good and named
        lines.append(words)
    if setup.on_device:
        asleep, words = _replayed(setup, backend)
        good = good and asleep
        lines.append(words)
    return good, "\n".join(lines)


def faults_of(job: RankJob) -> tuple[PlantedFault, ...]:
    """What is planted, and where the job's schedule lets it show."""
    program = job.schedule.program(job.config.all2all_backend)
    needs = {point.name: program.waits_for(point.name) for point in program.points}
    late = None
    for item, following in pairwise(program.folded):
        if isinstance(item, Point) and isinstance(following, Yield):
            users = [name for name, producers in needs.items() if item.name in producers]
            late = late or next(iter(users), None)
    return (
        PlantedFault(planted=planted_faults.miss_a_wait, kind="unordered", point="C.send" if needs["C.send"] else None),
        PlantedFault(planted=planted_faults.record_late, kind="late", point=late),
    )


def _planted(setup: Setup, job: RankJob, fault: PlantedFault, step: int) -> tuple[bool, str]:
    name = fault.planted.__name__
    if fault.point is None:
        return True, f"  {name}: has no place, no stream waits for another one at this point"
    layers = frozenset(i for i in range(job.model_config.num_hidden_layers) if job.model_config.is_moe_layer(i))
    place = (STRUCK_RANK, step, planted_faults.struck_layer(layers), 0, fault.point)
    launched = setup.run(
        RankMain(replace(job, program_of=planted_faults.OnRank(STRUCK_RANK, fault.planted))),
        patience=Patience(stall_s=10.0),
    )
    found = linearity(launched.trace)
    # A wait that is missing may show in the times as well, and need not.
    kinds = {fault.kind, "time"}
    named = [p for p in found.problems if p.kind == fault.kind and _place(p) == place]
    others = [p for p in found.problems if p.kind not in kinds]
    words = str(named[0]) if named else f"NOT FOUND at {place}: {[str(p) for p in found.problems]} {launched.errors}"
    return bool(named) and not others, f"  {name}: {words}"


def _place(problem: Problem) -> tuple[int, int, int, int, str]:
    return problem.rank, problem.step, problem.layer, problem.ubatch, problem.point


def _replayed(setup: Setup, backend: str) -> tuple[bool, str]:
    """A run from graphs: its trace is one too, and no ubatch thread wakes for a replay."""
    job = setup.job(backend, flags={"cudagraph_mode": "FULL"}, requests=40, max_steps=REPLAYED_STEPS)
    launched = setup.run(soak.Soak(job))
    if any(launched.errors):
        return False, f"  from graphs: {launched.errors}"
    runs: list[Any] = launched.values
    found = linearity(launched.trace)
    wakes, replays = sum(run.wakes for run in runs), sum(run.graphs for run in runs)
    words = f"  from graphs: {found.checked} edges, {replays} replays woke ubatch threads {wakes} times"
    lines = [words, *(f"  WRONG: {problem}" for problem in found.problems)]
    return found.checked > 0 and not found.problems and replays > 0 and wakes == 0, "\n".join(lines)
