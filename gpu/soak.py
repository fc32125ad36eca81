"""Long runs on devices (needs torch): the same requests with and without DBO, memory and threads watched."""

from __future__ import annotations

import threading
from dataclasses import dataclass
from typing import Any

import torch

from dbo.contract import World
from dbo.engine.requests import Request
from dbo.rank import RankJob, agree_on_config, build_runner

SAMPLES = 16


@dataclass(frozen=True, kw_only=True)
class Sample:
    """What a rank held after so many steps."""

    step: int
    device_bytes: int
    host_bytes: int
    threads: int


@dataclass(frozen=True, kw_only=True)
class Soaked:
    """What a rank's long run came to.

    Attributes:
        steps, split, graphs, idle: how many of each kind.
        tokens: by request.
        samples: evenly over the run.
        wakes: times that a ubatch thread woke during a replay of a split step; must be 0.
    """

    steps: int
    split: int
    graphs: int
    idle: int
    tokens: dict[str, list[int]]
    samples: tuple[Sample, ...]
    wakes: int


@dataclass(frozen=True)
class Soak:
    """The program: step until all ranks are idle, or `job.max_steps`; keep tokens only."""

    job: RankJob

    def __call__(self, world: Any) -> Soaked:
        with torch.inference_mode():
            return _soak(world, self.job)


def _soak(world: Any, job: RankJob) -> Soaked:
    program = job.program_of(world.rank)
    agree_on_config(world, job.config, program)
    runner = build_runner(world, job, program)
    for spec in job.requests[world.rank]:
        runner.scheduler.add(
            Request(id=spec.id, prompt_token_ids=spec.prompt_token_ids, max_new_tokens=spec.max_new_tokens)
        )
    runner.capture_graphs()
    tokens: dict[str, list[int]] = {}
    samples: list[Sample] = []
    counts = {"steps": 0, "split": 0, "graphs": 0, "idle": 0, "wakes": 0}
    every = max(1, job.max_steps // SAMPLES)
    while counts["steps"] < job.max_steps:
        before = _wakes(world)
        outcome = runner.step()
        decision = outcome.decision
        if decision is None or decision.all_idle:
            break
        replayed = decision.cudagraph_mode == "FULL"
        counts["steps"] += 1
        counts["split"] += decision.split
        counts["graphs"] += replayed
        counts["idle"] += not outcome.tokens
        counts["wakes"] += _wakes(world) - before if replayed else 0
        for id, token in outcome.tokens.items():
            tokens.setdefault(id, []).append(token)
        if counts["steps"] % every == 0:
            samples.append(_sample(world, counts["steps"]))
    return Soaked(tokens=tokens, samples=tuple(samples), **counts)


def _wakes(world: Any) -> int:
    return sum(worker.wakes for worker in world.host.workers)


def _sample(world: World | Any, step: int) -> Sample:
    device = world.device
    with open("/proc/self/statm") as statm:
        pages = int(statm.read().split()[1])
    return Sample(
        step=step, device_bytes=torch.cuda.memory_allocated(device) if device.type == "cuda" else 0,
        host_bytes=4096 * pages, threads=threading.active_count(),
    )  # fmt: skip


def problems(runs: list[Soaked], plain: list[Soaked]) -> list[str]:
    """What is wrong with a long run, sentence by sentence; `plain` is the same without DBO."""
    found = []
    for rank, (run, other) in enumerate(zip(runs, plain, strict=True)):
        if run.tokens.keys() != other.tokens.keys():
            found.append(f"rank {rank} answered {len(run.tokens)} requests, without DBO {len(other.tokens)}")
        early, late = run.samples[len(run.samples) // 4], run.samples[-1]
        for name, allowed in (("device_bytes", 1.01), ("host_bytes", 1.10), ("threads", 1.0)):
            if getattr(late, name) > allowed * getattr(early, name):
                was, now = getattr(early, name), getattr(late, name)
                found.append(f"rank {rank}: {name} grew from {was} at step {early.step} to {now} at step {late.step}")
        if run.wakes:
            found.append(f"rank {rank}: ubatch threads woke {run.wakes} times during replays")
        if not run.split:
            found.append(f"rank {rank}: no step was split")
    return found
