"""Needs torch. The ranks' program of `dbo bench moe`, and its launcher.

Every (shape, tokens, mode) is one batch: all backends are prepared and checked, then everything that is right is sampled
in turns, then the table is told. `dbo` names this module as a string; see `dbo.registry.moe_bench`.
"""

from __future__ import annotations

import gc
import json
import os
import platform
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from dbo.bench.moe import LOW_LATENCY_TOKENS, MoEBench
from dbo.bench.moe_figures import DBO, MoERow
from dbo.bench.moe_figures import Batch as BatchName
from dbo.bench.moe_shapes import SHAPES
from dbo.bench.moe_table import Measured, head, table
from dbo.config import facts
from dbo.contract.patience import Patience
from dbo.errors import DBOError, PeerFailed
from dbo.job.rank import make_prepare_finalize
from dbo.schedule import load_schedule
from dbo.ubatching.wrapper import UBatchWrapper
from gpu import probe
from gpu.bench import handoff
from gpu.bench.moe_batch import RoutedBatch
from gpu.bench.moe_profile import beside_compute
from gpu.bench.moe_stack import Layers, Runs
from gpu.bench.moe_timing import Turns
from gpu.bench.moe_works import Key, Works, config_of, depths_of, first_cause, prepare, rows_of
from gpu.graph import forget_pool
from gpu.world import launch

LAST_S = 300.0
"""What a run may take beyond its budget, and after what silence of all ranks the watchdog ends it (a compiler is silent)."""
UNLIMITED_S = 7200.0


def cuda_devices() -> int:
    """Devices that torch sees."""
    return torch.cuda.device_count() if torch.cuda.is_available() else 0


def measure(bench: MoEBench) -> Measured:
    """Run it on real processes. Tables appear on stderr as soon as they are complete.

    Raises:
        DBOError: a rank ended with an error; what was complete is on stderr, and in `bench.save`.
    """
    deadline = time.time() + (UNLIMITED_S if bench.budget_s is None else bench.budget_s)
    measured = Measured(machine=machine(bench))
    _host(measured, bench)
    program = MoEProgram(bench=bench, deadline=deadline, measured=measured)
    run = launch(
        program,
        ranks=bench.ranks,
        device=bench.device,
        trace=False,
        vehicle=bench.vehicle,
        patience=Patience(stall_s=LAST_S),
        timeout_s=max(0.0, deadline - time.time()) + LAST_S,
    )
    failed = [error for error in run.errors if error is not None]
    if failed:
        raise next((error for error in failed if not isinstance(error, PeerFailed)), failed[0])
    result: Measured = run.values[0]
    return result


def machine(bench: MoEBench) -> list[str]:
    """Hardware and versions."""
    found = probe.probe()
    devices = [f"{len(found.devices)} x {d.name}, {d.num_sms} SMs" for d in found.devices[:1]]
    where = (
        devices[0] if bench.device == "cuda" and devices else f"CPU tensors over gloo, {os.cpu_count()} cores: no speed"
    )
    names = ("torch", "cuda", "nccl", "triton", "deep_ep")
    versions = [f"{name} {found.libraries[name].what}" for name in names if found.libraries[name].there]
    return [f"{bench.ranks} ranks: {where}", ", ".join([f"Python {platform.python_version()}", *versions])]


def _host(measured: Measured, bench: MoEBench) -> None:
    costs = handoff.measure(steps=100)
    measured.host = {cost.name: cost.median_us for cost in costs}
    kinds = {"thread": ("persistent threads",), "greenlet": ("greenlets",), "auto": ("greenlets", "persistent threads")}
    mine = [cost.median_us for kind in kinds[bench.vehicle] for cost in costs if cost.name.startswith(kind)]
    measured.host_ratio = costs[0].median_us / mine[0] if mine else None


def no_model(**inputs: Any) -> None:
    """What the wrapper has before a pass and after the last one."""


@dataclass(frozen=True, kw_only=True)
class MoEProgram:
    """What every rank runs; rank 0 tells."""

    bench: MoEBench
    deadline: float
    measured: Measured

    def __call__(self, world: Any) -> Measured:
        with torch.inference_mode():
            ranks = _Rank(world, self)
            ranks.run()
        return ranks.measured


class _Rank:
    def __init__(self, world: Any, program: MoEProgram) -> None:
        self.world, self.bench, self.deadline = world, program.bench, program.deadline
        self.measured = program.measured
        self.turns = Turns(world, self.bench.repeat)
        # One wrapper for everything: its threads, and what libraries keep for each of them, are made once.
        self.wrapper = UBatchWrapper(
            no_model, world=world, schedule=load_schedule("mlp_shared_overlap"), backend="nccl", moe_layers=()
        )
        self.longest_s = 0.0

    def run(self) -> None:
        bench = self.bench
        self._say(head(bench.command, self.measured))
        # Largest first: some libraries make their buffers once, for the first that comes.
        sizes = [(tokens, SHAPES[shape].hidden, shape) for shape in bench.shapes for tokens in bench.tokens]
        for tokens, _, shape in sorted(sizes, key=lambda size: (-size[0], -size[1])):
            for mode in bench.modes:
                began = time.time()
                if self._late(self.longest_s):
                    self.measured.skipped.append(f"{shape} {tokens} {mode}: the budget is spent")
                    continue
                self._batch((shape, tokens, mode))
                self._clean_up()
                self.longest_s = max(self.longest_s, time.time() - began)
        for name in self.measured.skipped:
            self._say(f"skipped: {name}")

    def _late(self, needed_s: float) -> bool:
        """Whether something that takes so long would end too late; rank 0's clock decides for all."""
        late = time.time() + needed_s > self.deadline
        return bool(self.world.control.all_gather_object(late)[0])

    def _batch(self, name: BatchName) -> None:
        shape, tokens, mode = name
        bench, world = self.bench, self.world
        count = max(depths_of(bench).values())
        layers = Layers(world, SHAPES[shape], count, seed=bench.seed)
        batch = RoutedBatch(
            world,
            SHAPES[shape],
            tokens,
            count,
            prompt_tokens=bench.prompt_tokens,
            context_tokens=bench.context_tokens,
            seed=bench.seed,
        )
        prepared: dict[str, Works] = {}
        reference: torch.Tensor | None = None
        for backend in bench.backends:
            why = self._unfit(backend, tokens) or ("the budget is spent" if self._late(0.0) else "")
            if not why:
                works, mine, why = self._prepared(name, backend, layers, batch, reference)
                if works is not None:
                    prepared[backend] = works
                    reference = mine if reference is None else reference
            if why:
                self.measured.skipped.append(f"{shape} {tokens} {mode} {backend}: {why}")
        samples: dict[Key, tuple[float, ...]] = {}
        if prepared:
            samples = self.turns.samples({k: call for works in prepared.values() for k, call in works.right().items()})
        for works in prepared.values():
            works.beside_compute = self._profiled(works)
        rows = [
            row
            for backend, works in prepared.items()
            for row in rows_of(bench, name, batch.what, backend, works, samples)
        ]
        self._tell(name, rows)

    def _profiled(self, works: Works) -> dict[Key, float]:
        """Of every right DBO pass over the short stack, what ran beside its exchanges; the least of all ranks."""
        found: dict[Key, float] = {}
        for key, call in works.right().items():
            if key.variant == DBO:
                self.turns.meet()
                mine = self.world.control.all_gather_object(beside_compute(self.world, call, self.bench.layers))
                if all(share is not None for share in mine):
                    found[key] = min(mine)
        return found

    def _unfit(self, backend: str, tokens: int) -> str:
        if backend == facts.LOW_LATENCY and tokens > LOW_LATENCY_TOKENS:
            return f"a call takes at most {LOW_LATENCY_TOKENS} tokens"
        return "" if self.bench.schedules_for(backend) else "none of the schedules is for it"

    def _prepared(
        self, name: BatchName, backend: str, layers: Layers, batch: RoutedBatch, reference: torch.Tensor | None
    ) -> tuple[Works | None, torch.Tensor | None, str]:
        """The works of one backend, or why there are none: the same on all ranks."""
        shape, tokens, mode = name
        works, mine, why = None, None, ""
        try:
            config = config_of(self.bench, backend, tokens, mode)
            exchange = make_prepare_finalize(self.world, config, SHAPES[shape].config(1))
            runs = Runs(self.world, self.wrapper, layers, batch, backend, exchange)
            works, mine = prepare(self.bench, runs, mode, reference)
        except (DBOError, RuntimeError, ImportError) as error:
            why = first_cause(error)
        whys = [found for found in self.world.control.all_gather_object(why) if found]
        return (works, mine, "") if not whys else (None, None, whys[0])

    def _tell(self, name: BatchName, rows: list[MoERow]) -> None:
        self.measured.rows += rows
        if rows:
            self._say(table(name, rows, self.measured.rows))
        if self.world.rank == 0 and self.bench.save:
            path = Path(self.bench.save)
            partial = path.with_name(path.name + ".partial")
            partial.write_text(json.dumps({"command": self.bench.command} | self.measured.to_json()))
            os.replace(partial, path)

    def _say(self, text: str) -> None:
        if self.world.rank == 0:
            sys.stderr.write(text + "\n\n")
            sys.stderr.flush()

    def _clean_up(self) -> None:
        """Give the batch's memory back before the next one asks for more."""
        self.wrapper.model = no_model  # the last stack's weights
        gc.collect()
        if self.world.asynchronous:
            forget_pool(self.world.device)
            torch.cuda.synchronize(self.world.device)
            torch.cuda.empty_cache()
        self.turns.meet()
