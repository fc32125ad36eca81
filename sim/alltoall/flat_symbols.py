"""Flat exchanges in ordering mode: which arrays, which bytes, how many rows at most. No values.

How many rows a rank receives depends on values that ordering mode does not have. Every real row is taken to go to every
rank, the most that can happen.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from sim.symbols import Symbol

if TYPE_CHECKING:
    from sim.world import SimWorld


def real_rows(topk_ids: Symbol) -> int:
    """Rows that have an expert; padding rows have none. A graph is captured for any number of them: all."""
    rows = topk_ids.notes.get("rows")
    return int(topk_ids.shape[0] if rows is None else rows)


class SymbolMember:
    """What a rank brings to an exchange: nothing, or the number of rows that it sends to each peer."""

    def __init__(self, rows: int = 0) -> None:
        self.rows = rows

    def block(self, peer: int) -> int:
        return self.rows

    def experts(self, peer: int) -> list[int]:
        return []


class SymbolFlatPayload:
    """See `sim.alltoall.flat_numeric.NumericFlatPayload`."""

    def __init__(self, world: SimWorld) -> None:
        self.world = world

    def empty(self, shape: Sequence[int], dtype: str, name: str) -> Symbol:
        return Symbol(self.world, shape, name=name, dtype=dtype)

    def dtype_of(self, array: Symbol) -> str:
        return array.dtype

    def layout(self, *arrays: Symbol) -> Callable[[], None] | None:
        return None

    def counts(self, topk_ids: Symbol, per_rank: Symbol, per_expert: Symbol) -> SymbolMember:
        return SymbolMember(real_rows(topk_ids))

    def counts_of(self, topk_ids: Symbol, num_experts: int) -> SymbolMember:
        return SymbolMember(real_rows(topk_ids))

    def rows(self, *arrays: Symbol | None) -> SymbolMember:
        return SymbolMember()

    def write_ends(self, ends: Symbol) -> Callable[[list[int]], None]:
        return _nothing

    def receive(self, *arrays: Symbol, **options: bool) -> Callable[[list[Any]], None]:
        return _nothing

    def results(self, *arrays: Symbol) -> SymbolMember:
        return SymbolMember()

    def reduce(self, combined: Symbol) -> Callable[[list[Any]], None]:
        return _nothing


def _nothing(*values: Any) -> None:
    return None
