"""Long runs on devices (needs torch): the same requests with and without DBO, memory and threads watched."""

from __future__ import annotations

import threading
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from dbo.compare import MARGINS
from dbo.engine.requests import Request
from dbo.rank import RankJob, RequestSpec, agree_on_config, build_runner

SAMPLES = 16
BURST_STEPS = 14
QUIET_EVERY = 5
"""Requests come every so many steps, and every so often to no rank but the others: some steps it is idle."""


@dataclass(frozen=True, kw_only=True)
class Sample:
    """What a rank held after so many steps; `threads` without its ubatch threads."""

    step: int
    device_bytes: int
    host_bytes: int
    threads: int


@dataclass(frozen=True, kw_only=True)
class Soaked:
    """What a rank's long run came to.

    Attributes:
        steps, split, graphs, idle: how many of each kind.
        tokens: by request. margins: by how much each was preferred to the next one, relative to the largest logit.
        samples: evenly over the run.
        wakes: times that a ubatch thread woke during a replay of a split step; must be 0.
    """

    steps: int
    split: int
    graphs: int
    idle: int
    tokens: dict[str, list[int]]
    margins: dict[str, list[float]]
    samples: tuple[Sample, ...]
    wakes: int


@dataclass(frozen=True)
class Soak:
    """The program: `job.max_steps` steps with requests that come in bursts or stay away; keeps tokens."""

    job: RankJob

    def __call__(self, world: Any) -> Soaked:
        with torch.inference_mode():
            return _soak(world, self.job)


def _soak(world: Any, job: RankJob) -> Soaked:
    program = job.program_of(world.rank)
    agree_on_config(world, job.config, program)
    runner = build_runner(world, job, program)
    runner.capture_graphs()
    coming = list(reversed(job.requests[world.rank]))
    drawn = np.random.default_rng(17 + world.rank)
    tokens: dict[str, list[int]] = {}
    margins: dict[str, list[float]] = {}
    samples: list[Sample] = []
    counts = {"steps": 0, "split": 0, "graphs": 0, "idle": 0, "wakes": 0}
    every = max(1, job.max_steps // SAMPLES)
    while counts["steps"] < job.max_steps:
        for spec in _arriving(coming, _burst(counts["steps"], world.rank, drawn)):
            runner.scheduler.add(
                Request(id=spec.id, prompt_token_ids=spec.prompt_token_ids, max_new_tokens=spec.max_new_tokens)
            )
        before = _wakes(world)
        outcome = runner.step()
        counts["steps"] += 1
        decision = outcome.decision
        if decision is None:
            raise RuntimeError(f"step {outcome.step} made no decision: {outcome.error!r}")
        replayed = decision.cudagraph_mode == "FULL"
        counts["split"] += decision.split
        counts["graphs"] += replayed
        counts["idle"] += not outcome.tokens
        counts["wakes"] += _wakes(world) - before if replayed else 0
        for id, token in outcome.tokens.items():
            tokens.setdefault(id, []).append(token)
            row = outcome.logits[id]
            second, first = np.partition(row, -2)[-2:]
            margins.setdefault(id, []).append(float((first - second) / np.abs(row).max()))
        if counts["steps"] % every == 0:
            samples.append(_sample(world, counts["steps"]))
    return Soaked(tokens=tokens, margins=margins, samples=tuple(samples), **counts)


def _burst(step: int, rank: int, drawn: np.random.Generator) -> int:
    """How many requests arrive before a step: some at once now and then, so that steps of every kind follow."""
    if step % BURST_STEPS:
        return 0
    wanted = int(drawn.integers(3, 9))
    return 0 if (step // BURST_STEPS + rank) % QUIET_EVERY == 0 else wanted


def _arriving(coming: list[RequestSpec], count: int) -> list[RequestSpec]:
    return [coming.pop() for _ in range(min(count, len(coming)))]


def _wakes(world: Any) -> int:
    return sum(worker.wakes for worker in world.host.workers)


def _sample(world: Any, step: int) -> Sample:
    device = world.device
    with open("/proc/self/status") as status:
        resident = next((line.split()[1] for line in status if line.startswith("VmRSS:")), "0")
    return Sample(
        step=step, device_bytes=torch.cuda.memory_allocated(device) if device.type == "cuda" else 0,
        host_bytes=1024 * int(resident), threads=threading.active_count() - len(world.host.workers),
    )  # fmt: skip


def differing(run: Soaked, plain: Soaked, *, dtype: str) -> tuple[int, int, int]:
    """(requests that say the same, requests that part at a tie of the run without DBO, all others)."""
    same = ties = others = 0
    for id, tokens in plain.tokens.items():
        mine = run.tokens.get(id, [])
        at = next((i for i, (a, b) in enumerate(zip(tokens, mine, strict=False)) if a != b), None)
        if at is None and len(tokens) == len(mine):
            same += 1
        elif at is not None and plain.margins[id][at] <= MARGINS[dtype]:
            ties += 1
        else:
            others += 1
    return same, ties, others


def problems(runs: list[Soaked], plain: list[Soaked]) -> list[str]:
    """What is wrong with a long run, sentence by sentence; `plain` is the same without DBO."""
    found = []
    for rank, (run, other) in enumerate(zip(runs, plain, strict=True)):
        if run.tokens.keys() != other.tokens.keys():
            found.append(f"rank {rank} answered {len(run.tokens)} requests, without DBO {len(other.tokens)}")
        # Allocators, caches and libraries settle in the first half.
        early, late = run.samples[len(run.samples) // 2], run.samples[-1]
        for name, allowed in (("device_bytes", 1.01), ("host_bytes", 1.10), ("threads", 1.0)):
            if getattr(late, name) > allowed * getattr(early, name):
                was, now = getattr(early, name), getattr(late, name)
                found.append(f"rank {rank}: {name} grew from {was} at step {early.step} to {now} at step {late.step}")
        if run.wakes:
            found.append(f"rank {rank}: ubatch threads woke {run.wakes} times during replays")
        if not run.split:
            found.append(f"rank {rank}: no step was split")
    return found
