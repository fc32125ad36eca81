"""Copies through symmetric memory on simulated tensors, and the kernels around them (needs torch)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from dbo.moe.symm_copy_ops import TorchCopyRows
from sim import tensors

if TYPE_CHECKING:
    from sim.world import SimWorld

Block = tuple[Tensor, ...]


class NumericCopyPayload:
    """What travels, and how it is put into a receiver's arrays. Runs when the device work that it belongs to runs."""

    def __init__(self, world: SimWorld) -> None:
        self.rank = world.rank

    def empty(self, shape: Sequence[int], like: Tensor, name: str) -> Tensor:
        return tensors.poisoned_empty(shape, like.dtype, self.rank, name)

    def counts(self, counts: Tensor) -> Callable[[], list[int]]:
        """Reads the counts `[R]`; a count read too early is poison and counts as 0."""
        told = tensors.raw(counts)

        @torch.inference_mode()
        def read() -> list[int]:
            return [max(int(n), 0) for n in told]

        return read

    def block(self, views: Sequence[Tensor]) -> Callable[[], Block]:
        """Takes the rows for one peer as they are when the copy runs."""
        sources = [tensors.raw(view) for view in views]

        @torch.inference_mode()
        def take() -> Block:
            return tuple(source.clone() for source in sources)

        return take

    def deliver(
        self, received: Sequence[Tensor], own: Sequence[Tensor], rank: int
    ) -> Callable[[dict[int, Block]], None]:
        """Writes what lies in a region, own rows between, into the `received` arrays by source rank.

        Rows that are not there yet leave poison behind.
        """
        outputs, kept = [tensors.raw(t) for t in received], self.block(own)

        @torch.inference_mode()
        def write(held: dict[int, Block]) -> None:
            blocks = held | {rank: kept()}
            for index, out in enumerate(outputs):
                rows = torch.cat([blocks[source][index] for source in sorted(blocks)])[: len(out)]
                out[: len(rows)] = rows

        return write


class FusedCopyRows:
    """`dbo.moe.symm_copy.CopyRows`, each method one kernel: on devices they are fused, and they take SMs."""

    def __init__(self, world: SimWorld) -> None:
        self.world = world
        self._rows = TorchCopyRows()

    def counts(self, topk_ids: Tensor, ranks: int, local_experts: int) -> Tensor:
        out = self._empty((ranks,), torch.int32)
        self._kernel("counts", self._rows.counts, (topk_ids,), (out,), ranks, local_experts)
        return out

    def pack(
        self, x: Tensor, topk_weights: Tensor, topk_ids: Tensor, ranks: int, local_experts: int, rows: int
    ) -> tuple[Tensor, Tensor, Tensor]:
        packed = self._empty((rows, x.shape[1]), x.dtype)
        routing = self._empty((rows, 2 * topk_ids.shape[1]), torch.float32)
        places = self._empty((ranks, x.shape[0]), torch.int64)
        made = (packed, routing, places)
        self._kernel("pack", self._rows.pack, (x, topk_weights, topk_ids), made, ranks, local_experts, rows)
        return made

    def route(self, topk_weights: Tensor, topk_ids: Tensor, ranks: int, local_experts: int) -> tuple[Tensor, Tensor]:
        tokens, top_k = topk_ids.shape
        made = self._empty((tokens, 2 * top_k), torch.float32), self._empty((ranks, tokens), torch.int64)
        self._kernel("route", self._rows.route, (topk_weights, topk_ids), made, ranks, local_experts)
        return made

    def unpack(self, routing: Tensor, first_expert: int, local_experts: int) -> tuple[Tensor, Tensor]:
        shape = (routing.shape[0], routing.shape[1] // 2)
        ids, weights = self._empty(shape, torch.int64), self._empty(shape, torch.float32)
        self._kernel("unpack", self._rows.unpack, (routing,), (ids, weights), first_expert, local_experts)
        return ids, weights

    def reduce(self, blocks: Sequence[Tensor], places: Tensor) -> Tensor:
        combined = self._empty((places.shape[1], blocks[0].shape[1]), blocks[0].dtype)
        self._kernel("reduce", lambda *read: self._rows.reduce(read[:-1], read[-1]), (*blocks, places), (combined,))
        return combined

    def _empty(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        return tensors.poisoned_empty(shape, dtype, self.world.rank)

    def _kernel(
        self, name: str, work: Callable[..., Any], reads: Sequence[Tensor], writes: Sequence[Tensor], *sizes: Any
    ) -> None:
        inputs, outputs = [tensors.raw(t) for t in reads], [tensors.raw(t) for t in writes]

        @torch.inference_mode()
        def run() -> None:
            results = work(*inputs, *sizes)
            for out, result in zip(outputs, results if isinstance(results, tuple) else (results,), strict=True):
                out.copy_(result)

        tensors.submit_kernel(name, reads=reads, writes=writes, run=run)
