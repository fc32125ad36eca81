"""Long runs on devices (needs torch): the same requests with and without DBO, memory and threads watched."""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from dbo.engine.requests import Request
from dbo.job.compare import MARGINS
from dbo.job.rank import RankJob, RequestSpec, start_rank

SAMPLES = 16
BURST_STEPS = 14
QUIET_EVERY = 5
"""Requests come every so many steps, and every so often to no rank but the others: some steps it is idle."""

LIMITS = {"device_bytes": 1.01, "host_bytes": 1.10, "threads": 1.0, "native_threads": 1.0}
"""By how much a rank may hold more at the end than in the middle of a run."""


@dataclass(frozen=True, kw_only=True)
class Sample:
    """What a rank held after so many steps.

    Attributes:
        device_bytes: of tensors on the device. host_bytes: resident.
        threads: Python's, without the ubatch threads. native_threads: of the process, with those of libraries.
    """

    step: int
    device_bytes: int
    host_bytes: int
    threads: int
    native_threads: int


@dataclass(frozen=True, kw_only=True)
class Soaked:
    """What a rank's long run came to.

    Attributes:
        steps, split, graphs, split_graphs, idle: how many of each kind; idle: without a token of this rank.
        tokens: by request. margins: by how much each was preferred to the next one, relative to the largest logit; empty
            where the job keeps no logits.
        samples: evenly over the run.
        set_up_s, steps_s: seconds until the first step, and of all steps.
        wakes: times that a ubatch thread woke during a replay of a split step; must be 0.
    """

    steps: int
    split: int
    graphs: int
    split_graphs: int
    idle: int
    tokens: dict[str, list[int]]
    margins: dict[str, list[float]]
    samples: tuple[Sample, ...]
    wakes: int
    set_up_s: float
    steps_s: float


@dataclass(frozen=True)
class Soak:
    """The program: `job.max_steps` steps with requests that come in bursts or stay away; keeps tokens."""

    job: RankJob

    def __call__(self, world: Any) -> Soaked:
        with torch.inference_mode():
            return _soak(world, self.job)


def _soak(world: Any, job: RankJob) -> Soaked:
    begun_s = time.monotonic()
    runner = start_rank(world, job)
    stepping_s = time.monotonic()
    coming = list(reversed(job.requests[world.rank]))
    drawn = np.random.default_rng(17 + world.rank)
    tokens: dict[str, list[int]] = {}
    margins: dict[str, list[float]] = {}
    samples: list[Sample] = []
    counts = dict.fromkeys(("steps", "split", "graphs", "split_graphs", "idle", "wakes"), 0)
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
        counts["split_graphs"] += replayed and decision.split
        counts["idle"] += not outcome.tokens
        counts["wakes"] += _wakes(world) - before if replayed else 0
        for id, token in outcome.tokens.items():
            tokens.setdefault(id, []).append(token)
        for id, row in outcome.logits.items():
            second, first = np.partition(row, -2)[-2:]
            margins.setdefault(id, []).append(float((first - second) / np.abs(row).max()))
        if counts["steps"] % every == 0:
            samples.append(_sample(world, counts["steps"]))
    return Soaked(
        tokens=tokens,
        margins=margins,
        samples=tuple(samples),
        set_up_s=stepping_s - begun_s,
        steps_s=time.monotonic() - stepping_s,
        **counts,
    )


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
    status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return Sample(
        step=step,
        device_bytes=torch.cuda.memory_allocated(device) if device.type == "cuda" else 0,
        host_bytes=1024 * int(status["VmRSS"].split()[0]),
        threads=threading.active_count() - len(world.host.workers),
        native_threads=int(status["Threads"]),
    )


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
        for name, allowed in LIMITS.items():
            if getattr(late, name) > allowed * getattr(early, name):
                was, now = getattr(early, name), getattr(late, name)
                found.append(f"rank {rank}: {name} grew from {was} at step {early.step} to {now} at step {late.step}")
        if run.wakes:
            found.append(f"rank {rank}: ubatch threads woke {run.wakes} times during replays")
    return found + _kinds_missing(runs)


def _kinds_missing(runs: list[Soaked]) -> list[str]:
    """Kinds of steps that never came: a long run of one kind says little."""
    first = runs[0]
    kinds = {
        "was split": first.split - first.split_graphs,
        "was whole": first.steps - first.split,
        "left a rank idle": sum(run.idle for run in runs),
    }
    if first.graphs:
        kinds |= {"was replayed whole": first.graphs - first.split_graphs, "was replayed split": first.split_graphs}
    return [f"no step {name}" for name, count in kinds.items() if not count]
