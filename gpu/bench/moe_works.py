"""Needs torch. What `dbo bench moe` times of one backend: each work checked, captured where graphs are wanted, by name."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from dbo.bench.moe import MoEBench
from dbo.bench.moe_figures import COMM, COMM_HALVES, COMPUTE, DBO, HALVES, LONG, NO_DBO, VARIANTS, Batch, MoERow
from dbo.config import DBOConfig
from dbo.errors import DBOError
from dbo.schedule import Schedule
from gpu.bench.moe_batch import PAGE
from gpu.bench.moe_stack import Runs, comm_sms
from gpu.bench.moe_timing import meet

LIMIT = 0.05
"""Of a row of the output, by norm: bf16 through eight layers stays below half of it, one wrong exchange does not."""
WORST = 1e9
"""Stands for an error that is no number."""


class Key(NamedTuple):
    """One work. `comm_sms` is 0 and `schedule` empty where the work does not depend on them."""

    backend: str
    variant: str
    comm_sms: int = 0
    schedule: str = ""


@dataclass(kw_only=True)
class Works:
    """One backend's.

    Attributes:
        calls: by key; each is a pass over the stack on all ranks.
        errors: by key, the largest over the ranks. apart: of the step without DBO, from that of the first backend.
        same_bits: by key of a DBO pass.
        refused: by key, why it cannot be captured.
        beside_compute: by key of a DBO pass, see `dbo.bench.moe_figures`.
    """

    calls: dict[Key, Callable[[], Any]] = field(default_factory=dict)
    errors: dict[Key, float] = field(default_factory=dict)
    apart: float = 0.0
    same_bits: dict[Key, bool] = field(default_factory=dict)
    refused: dict[Key, str] = field(default_factory=dict)
    beside_compute: dict[Key, float] = field(default_factory=dict)

    def right(self) -> dict[Key, Callable[[], Any]]:
        """Those that may be timed."""
        return {k: call for k, call in self.calls.items() if self.errors[k] <= LIMIT and not self.refused[k]}


def config_of(bench: MoEBench, backend: str, tokens: int, mode: str) -> DBOConfig:
    """What the backend is built for."""
    return DBOConfig(
        world="gpu",
        data_parallel_size=bench.ranks,
        enable_expert_parallel=True,
        enable_dbo=True,
        all2all_backend=backend,
        dbo_comm_sms=0,
        cudagraph_mode="FULL" if mode == "graph" else "NONE",
        max_num_batched_tokens=tokens,
        max_num_seqs=tokens,
        low_latency_max_tokens_per_rank=tokens,
        block_size=PAGE,
        dtype="bfloat16",
    )


def depths_of(bench: MoEBench) -> dict[str, int]:
    """Layers of a pass, by the ending of its name."""
    return {"": bench.layers} | ({LONG: 2 * bench.layers} if bench.steady else {})


def prepare(bench: MoEBench, runs: Runs, mode: str, reference: Tensor | None) -> tuple[Works, Tensor]:
    """Record, list, check and capture every work of one backend; all ranks together.

    Args:
        reference: output of the short stack without DBO on another backend, or None for the first one.

    Returns:
        The works, and this backend's own such output.
    """
    depths = depths_of(bench)
    world = runs.world

    def alone(run: Callable[..., Any], *args: Any) -> Any:
        # Sizes change from pass to pass, and rows may lie where a peer's next pass writes (`dbo.moe.symm_copy`).
        meet(world)
        return run(*args)

    alone(runs.record, max(depths.values()))
    expected = {n: alone(runs.no_dbo, n).clone() for n in depths.values()}
    serial = alone(runs.serial, bench.layers).clone()
    works = Works()
    works.apart = 0.0 if reference is None else error_of(expected[bench.layers], reference)
    for key, n, call in _list(bench, runs, depths):
        out = alone(call)
        works.errors[key] = works.apart
        if out is not None:
            works.errors[key] = max(works.apart, error_of(out, expected[n]))
        if key.variant == DBO:
            works.same_bits[key] = torch.equal(out, serial)
        works.refused[key] = ""
        if mode == "graph":
            call, replayed, works.refused[key] = _captured(world, key, call)
            if replayed is not None:
                works.errors[key] = max(works.errors[key], error_of(replayed, expected[n]))
        works.calls[key] = call
    _agree(runs.world, works)
    return works, expected[bench.layers]


def _list(bench: MoEBench, runs: Runs, depths: dict[str, int]) -> list[tuple[Key, int, Callable[[], Any]]]:
    name = runs.name
    found: list[tuple[Key, int, Callable[[], Any]]] = []
    for ending, n in depths.items():
        found.append((Key(name, COMPUTE + ending), n, partial(runs.compute, n)))
        found.append((Key(name, HALVES + ending), n, partial(runs.compute_halves, n)))
        for sms in bench.sms_for(name):
            for variant, work in ((NO_DBO, runs.no_dbo), (COMM, runs.comm), (COMM_HALVES, runs.comm_halves)):
                found.append((Key(name, variant + ending, sms), n, _with_sms(runs.backend, sms, partial(work, n))))
            for schedule in bench.schedules_for(name):
                call = _with_sms(runs.backend, sms, partial(runs.dbo, n, schedule))
                found.append((Key(name, DBO + ending, sms, schedule.name), n, call))
    return found


def _with_sms(backend: Any, sms: int, call: Callable[[], Any]) -> Callable[[], Any]:
    def run() -> Any:
        with comm_sms(backend, sms):
            return call()

    return run


def _captured(world: Any, key: Key, call: Callable[[], Any]) -> tuple[Callable[[], Any], Tensor | None, str]:
    """The same from a graph, what a replay gives, and why there is no graph on some rank: then none replays.

    `call` has run once, so what it compiles is compiled.
    """
    graph = world.new_graph(" ".join(map(str, key)))
    out, why = None, ""
    try:
        with graph.capture():
            out = call()
    except (DBOError, RuntimeError) as error:
        why = first_cause(error)
    # A replay on one rank alone would leave its peers' signals up, or wait for ever.
    why = next((found for found in world.control.all_gather_object(why) if found), "")
    if why:
        return call, None, why
    graph.replay()
    world.compute.drain()
    return graph.replay, out, ""


def error_of(found: Tensor, expected: Tensor) -> float:
    """The largest error of a row, by norm, relative to the expected row's."""
    apart = (found.float() - expected.float()).norm(dim=-1) / expected.float().norm(dim=-1)
    return min(WORST, float(torch.nan_to_num(apart, nan=WORST, posinf=WORST).max()))


def first_cause(error: BaseException) -> str:
    """The first line of what began it."""
    while error.__cause__ is not None:
        error = error.__cause__
    return f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0][:200]}"


def _agree(world: Any, works: Works) -> None:
    """One rank's error is every rank's."""
    mine = list(works.errors.values()), list(works.same_bits.values()), list(works.refused.values()), works.apart
    errors, same_bits, refused, apart = zip(*world.control.all_gather_object(mine), strict=True)
    works.apart = max(apart)
    works.errors = dict(zip(works.errors, map(max, *errors), strict=True))
    works.same_bits = dict(zip(works.same_bits, map(all, zip(*same_bits, strict=True)), strict=True))
    works.refused = dict(zip(works.refused, map(max, *refused), strict=True))


def rows_of(
    bench: MoEBench, batch: Batch, what: str, name: str, works: Works, samples: dict[Key, tuple[float, ...]]
) -> list[MoERow]:
    """The table's rows of one backend: by SMs and schedule, with the samples that they share."""
    shape, tokens, mode = batch
    schedules: list[Schedule] = bench.schedules_for(name)
    rows = []
    for sms in bench.sms_for(name):
        for schedule in schedules:
            keys = {
                variant + ending: key_of(name, variant + ending, sms, schedule.name)
                for variant in VARIANTS
                for ending in depths_of(bench)
            }
            error = max(works.errors.get(key, 0.0) for key in keys.values())
            right = error <= LIMIT
            refused = next((works.refused[key] for key in keys.values() if works.refused.get(key)), "")
            timed = right and not refused
            rows.append(
                MoERow(
                    shape=shape,
                    tokens=tokens,
                    mode=mode,
                    backend=name,
                    comm_sms=sms,
                    schedule=schedule.name,
                    layers=bench.layers,
                    what=what,
                    error=error,
                    limit=LIMIT,
                    bit_equal=works.same_bits[keys[DBO]],
                    samples_ms={v: samples[key] for v, key in keys.items() if key in samples} if timed else {},
                    beside_compute=works.beside_compute.get(keys[DBO]),
                    note=(f"not captured: {refused}" if refused else "") if right else _wrong(works, keys),
                )
            )
    return rows


def _wrong(works: Works, keys: Mapping[str, Key]) -> str:
    """What is wrong: the backend itself, or some of its ways."""
    if works.apart > LIMIT:
        return f"wrong: not timed; without DBO {works.apart:.1e} from the first backend"
    ways = [f"{variant} {works.errors[key]:.1e}" for variant, key in keys.items() if works.errors.get(key, 0.0) > LIMIT]
    return f"wrong: not timed; {', '.join(ways)}"


def key_of(backend: str, variant: str, sms: int, schedule: str) -> Key:
    """Who else has the same work: compute is nobody's exchange, and only DBO has a schedule."""
    kind = variant.removesuffix(LONG)
    return Key(backend, variant, 0 if kind in (COMPUTE, HALVES) else sms, schedule if kind == DBO else "")
