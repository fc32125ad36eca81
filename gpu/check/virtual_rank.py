"""Needs torch, Triton and a CUDA device. Virtual ranks of the direct path: inputs whose results are known, and rounds.

A `VirtualRank` queues exchanges on a stream of its own and counts wrong rows on the device, so that ranks run ahead of
each other as far as the protocol lets them. `gpu.check.dcp_kernels` drives several in one process, or one in each of two.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from dbo.dcp import empty_rows, merge
from dbo.dcp.direct import DirectLayout
from gpu.kernels.exchange import DirectExchange

DEVICE = "cuda"
LIMITS = {torch.float16: 2e-3, torch.bfloat16: 1.6e-2, torch.float32: 1e-5}
DIRECT_SHAPES = ((24, 4, 192), (3, 2, 576), (0, 1, 80), (200, 1, 80))  # B, heads of a rank, D
SETS = 5
DIRECT_DTYPE = torch.bfloat16


def random_parts(
    world: int, rows: int, heads: int, dim: int, dtype: torch.dtype, *, seed: int, strided: bool = False
) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """`[B, H, D]` and `[B, H]` of every rank."""
    generator = torch.Generator(DEVICE).manual_seed(seed)
    outs, lses = [], []
    for _ in range(world):
        wide = torch.randn(rows, world * heads, dim + 6, generator=generator, device=DEVICE).to(dtype)
        outs.append(wide[..., 3 : dim + 3] if strided else wide[..., :dim].contiguous())
        lse = torch.randn(world * heads, rows, generator=generator, device=DEVICE) * 3
        lses.append(lse.t() if strided else lse.t().contiguous())
    return outs, lses


def mask_of(rows: int, rank: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Four requests, one without a row, some without local keys on some ranks; the last row is padding."""
    last = max(0, rows - 1)
    starts = [0, min(1, last), min(1, last), last // 2, last]
    lens = [5 * (rank % 2), 9, 0 if rank == 0 else 3, 1]
    return (
        torch.tensor(lens, dtype=torch.int32, device=DEVICE),
        torch.tensor(sorted(starts), dtype=torch.int32, device=DEVICE),
    )


def wrong_rows(
    got: torch.Tensor, got_lse: torch.Tensor, want: torch.Tensor, want_lse: torch.Tensor, limit: float
) -> torch.Tensor:
    """How many (row, head) differ, as a tensor: no host read, so that ranks may run ahead of each other."""
    near = torch.isclose(got.float(), want.float(), rtol=limit, atol=limit).all(dim=-1)
    return (~(near & torch.isclose(got_lse, want_lse, rtol=1e-5, atol=1e-5))).sum()


@dataclass
class PartialsBatch:
    """Fixed buffers of one rank for one shape, so that eager calls and the captured graph read the same addresses."""

    out: torch.Tensor
    lse: torch.Tensor
    lens: torch.Tensor
    starts: torch.Tensor
    merged: torch.Tensor
    merged_lse: torch.Tensor
    inputs: list[tuple[torch.Tensor, torch.Tensor]]
    wanted: list[tuple[torch.Tensor, torch.Tensor]]
    graph: torch.cuda.CUDAGraph | None = None


class VirtualRank:
    """One rank: its end of the exchange, a stream, and a counter of wrong rows that stays on the device."""

    def __init__(self, end: DirectExchange, world: int, seed: int) -> None:
        self.end = end
        self.stream = torch.cuda.Stream()
        self.bad = torch.zeros((), dtype=torch.int64, device=DEVICE)
        self.choices = random.Random(seed)
        self.replays = 0
        self.batches = [self._batch(world, *shape) for shape in DIRECT_SHAPES]
        for batch in self.batches:
            self.end.prepare(*self._inputs(batch), **self._outputs(batch))

    def _batch(self, world: int, rows: int, heads: int, dim: int) -> PartialsBatch:
        rank = self.end.rank
        mine = slice(rank * heads, (rank + 1) * heads)
        inputs, wanted = [], []
        for number in range(SETS):
            outs, lses = random_parts(world, rows, heads, dim, DIRECT_DTYPE, seed=100 * rows + number)
            inputs.append((outs[rank], lses[rank].clone()))
            for source, lse in enumerate(lses):
                lse[empty_rows(rows, *mask_of(rows, source))] = -math.inf
            wanted.append(merge(torch.stack(outs)[:, :, mine], torch.stack(lses)[:, :, mine]))
        lens, starts = mask_of(rows, rank)
        return PartialsBatch(
            out=torch.empty_like(inputs[0][0]),
            lse=torch.empty_like(inputs[0][1]),
            lens=lens,
            starts=starts,
            merged=torch.empty_like(wanted[0][0]),
            merged_lse=torch.empty_like(wanted[0][1]),
            inputs=inputs,
            wanted=wanted,
        )

    def _inputs(self, batch: PartialsBatch) -> tuple[torch.Tensor, torch.Tensor]:
        return batch.out, batch.lse

    def _outputs(self, batch: PartialsBatch) -> dict[str, Any]:
        return {
            "merged_BND": batch.merged,
            "merged_lse_BN": batch.merged_lse,
            "seq_lens": batch.lens,
            "query_start_loc": batch.starts,
        }

    def capture(self) -> None:
        for batch in self.batches:
            batch.graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(batch.graph, stream=self.stream, capture_error_mode="thread_local"):
                self.end.launch(*self._inputs(batch), **self._outputs(batch))

    def warm_up(self) -> None:
        """Everything but the exchange, so that nothing is loaded or allocated while a kernel spins."""
        with torch.cuda.stream(self.stream):
            for batch in self.batches:
                for number in range(SETS):
                    self._load(batch, number)
                    self._compare(batch, number)
            torch.cuda._sleep(1)
            self.bad.zero_()
        self.stream.synchronize()

    def _load(self, batch: PartialsBatch, number: int) -> None:
        batch.out.copy_(batch.inputs[number][0])
        batch.lse.copy_(batch.inputs[number][1])
        batch.merged.fill_(math.nan)
        batch.merged_lse.fill_(math.nan)

    def _compare(self, batch: PartialsBatch, number: int) -> None:
        self.bad += wrong_rows(batch.merged, batch.merged_lse, *batch.wanted[number], LIMITS[DIRECT_DTYPE])

    def round(self, shape: int, number: int, *, compare_with: int | None = None) -> None:
        """One exchange, queued without waiting: load, dawdle, eager or replayed, compare."""
        batch = self.batches[shape]
        with torch.cuda.stream(self.stream):
            self._load(batch, number)
            if self.choices.random() < 0.5:
                torch.cuda._sleep(self.choices.randrange(1, 200_000))
            if batch.graph is not None and self.choices.random() < 0.5:
                batch.graph.replay()
                self.replays += 1
            else:
                self.end.launch(*self._inputs(batch), **self._outputs(batch))
            self._compare(batch, number if compare_with is None else compare_with)


def direct_layout(world: int) -> DirectLayout:
    rows = max(rows * heads for rows, heads, _ in DIRECT_SHAPES)
    return DirectLayout(world_size=world, max_rows=rows, row_bytes=max(2 * dim for *_, dim in DIRECT_SHAPES))


def rounds_of(seed: int, count: int) -> Iterator[tuple[int, int]]:
    """Shape and input set of every round; the same on every rank."""
    common = random.Random(seed)
    for _ in range(count):
        yield common.randrange(len(DIRECT_SHAPES)), common.randrange(SETS)
