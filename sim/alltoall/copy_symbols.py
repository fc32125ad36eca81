"""Copies through symmetric memory in ordering mode: which bytes, no values."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from sim.alltoall.flat_symbols import real_rows
from sim.symbols import Symbol, launch

if TYPE_CHECKING:
    from sim.world import SimWorld


class SymbolCopyPayload:
    """See `sim.alltoall.copy_numeric.NumericCopyPayload`."""

    def __init__(self, world: SimWorld) -> None:
        self.world = world

    def empty(self, shape: Sequence[int], like: Symbol, name: str) -> Symbol:
        return Symbol(self.world, shape, itemsize=like.itemsize, name=name, dtype=like.dtype)

    def counts(self, counts: Symbol) -> Callable[[], list[int]]:
        return lambda: [int(counts.notes["each"])] * counts.shape[0]

    def block(self, views: Sequence[Symbol]) -> Callable[[], None]:
        return _nothing

    def deliver(self, received: Sequence[Symbol], own: Sequence[Symbol], rank: int) -> Callable[[dict[int, Any]], None]:
        return _nothing


class SymbolCopyRows:
    """`dbo.moe.symm_copy.CopyRows` over symbols: one fused kernel each."""

    def __init__(self, world: SimWorld) -> None:
        self.world = world

    def counts(self, topk_ids: Symbol, ranks: int, local_experts: int) -> Symbol:
        counts = launch(self.world, "counts", [topk_ids], (ranks,))
        counts.notes["each"] = real_rows(topk_ids)
        return counts

    def pack(
        self, x: Symbol, topk_weights: Symbol, topk_ids: Symbol, ranks: int, local_experts: int, rows: int
    ) -> tuple[Symbol, Symbol, Symbol]:
        routing = Symbol(self.world, (rows, 2 * topk_ids.shape[1]), name="routing")
        places = Symbol(self.world, (ranks, x.shape[0]), itemsize=8, name="places")
        inputs = [x, topk_ids, topk_weights]
        return launch(self.world, "pack", inputs, (rows, x.shape[1]), writes=[routing, places]), routing, places

    def route(self, topk_weights: Symbol, topk_ids: Symbol, ranks: int, local_experts: int) -> tuple[Symbol, Symbol]:
        tokens, top_k = topk_ids.shape
        places = Symbol(self.world, (ranks, tokens), itemsize=8, name="places")
        return launch(self.world, "route", [topk_ids, topk_weights], (tokens, 2 * top_k), writes=[places]), places

    def unpack(self, routing: Symbol, first_expert: int, local_experts: int) -> tuple[Symbol, Symbol]:
        shape = (routing.shape[0], routing.shape[1] // 2)
        weights = Symbol(self.world, shape, name="weights")
        return launch(self.world, "unpack", [routing], shape, writes=[weights]), weights

    def reduce(self, blocks: Sequence[Symbol], places: Symbol) -> Symbol:
        return launch(self.world, "reduce", [*blocks, places], (places.shape[1], blocks[0].shape[1]))


def _nothing(*values: Any) -> None:
    return None
