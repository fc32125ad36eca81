"""The exchange of a DCP group in ordering mode: what `dbo.dcp`'s paths launch, the bytes they touch, no values."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any

from dbo.dcp.interface import DCPShape
from sim.dcp.direct import SimDirect
from sim.dcp.group import SimDCPGroup, SymbolMoving
from sim.symbols import Symbol, launch

if TYPE_CHECKING:
    from sim.world import SimWorld


class SymbolContextParallel:
    """See `dbo.dcp.interface.ContextParallel`."""

    def __init__(self, world: SimWorld, shape: DCPShape, current_ubatch: Callable[[], int]) -> None:
        self.world = world
        self.group = SimDCPGroup(world, shape.size, SymbolMoving())
        self.size, self.rank = shape.size, self.group.rank
        self._current_ubatch = current_ubatch
        self._backend = shape.backend
        self.direct = SimDirect(world, shape.size, SymbolDirect(world), world.cluster.direct_fabric)
        row = (shape.heads // shape.size) * (shape.head_dim + 1)  # symbols have fp32 elements: one lane an LSE
        elements = shape.size * shape.max_rows * row
        self._staging = [
            (Symbol(world, (elements,), name=f"dcp.send.u{u}"), Symbol(world, (elements,), name=f"dcp.recv.u{u}"))
            for u in range(shape.num_ubatches)
        ]

    def reduce_heads(self, out_THD: Symbol, lse_TH: Symbol, seq_lens: Any, query_start_loc: Any) -> Symbol:
        if self._backend == "a2a_direct":
            return self.direct.reduce(out_THD, lse_TH, out_THD, lse_TH, ubatch=self._current_ubatch())
        return self._a2a(out_THD, lse_TH) if self._backend == "a2a" else self._ag_rs(out_THD, lse_TH)

    def all_reduce(self, x: Symbol) -> Symbol:
        total = self._like(x, x.shape)
        self.group.all_reduce(total, x)
        return total

    def all_gather_rows(self, rows: Symbol) -> Symbol:
        gathered = self._like(rows, (self.size * rows.shape[0], *rows.shape[1:]))
        self.group.all_gather_into_tensor(gathered, rows)
        return gathered

    def staging(self, graph: str) -> AbstractContextManager[None]:
        return nullcontext()  # the reservation never grows, so a graph may keep its addresses

    def _a2a(self, out: Symbol, lse: Symbol) -> Symbol:
        rows, heads, dim = out.shape
        n = heads // self.size
        used = self.size * rows * n * (dim + 1)
        send, recv = (buffer.rows(0, used) for buffer in self._staging[self._current_ubatch()])
        launch(self.world, "dcp.pack", [out, lse], (0,), writes=[send])
        self.group.all_to_all_single(recv, send)
        return launch(self.world, "dcp.unpack_merge", [recv], (rows, n, dim))

    def _ag_rs(self, out: Symbol, lse: Symbol) -> Symbol:
        rows, heads, dim = out.shape
        all_lse = self._like(lse, (self.size, *lse.shape))
        self.group.all_gather_into_tensor(all_lse, lse)
        scaled = launch(self.world, "dcp.scale", [out, all_lse], (self.size, rows, heads // self.size, dim))
        merged = self._like(out, scaled.shape[1:])
        self.group.reduce_scatter_tensor(merged, scaled)
        return merged

    def _like(self, x: Symbol, shape: tuple[int, ...]) -> Symbol:
        return Symbol(self.world, shape, itemsize=x.itemsize, name="dcp", dtype=x.dtype)


class SymbolDirect:
    """See `sim.dcp.numeric.NumericDirect`."""

    def __init__(self, world: SimWorld) -> None:
        self._world = world

    def call(self, out: Symbol, lse: Symbol, seq_lens: Any, query_start_loc: Any, members: Sequence[int]) -> SymbolCall:
        rows, heads, dim = out.shape
        return SymbolCall(Symbol(self._world, (rows, heads // len(members), dim), itemsize=out.itemsize, name="merged"))


class SymbolCall:
    """One exchange: its result, and no values."""

    def __init__(self, merged: Symbol) -> None:
        self.merged = merged

    def chunk(self, member: int) -> None:
        return None

    def merge(self, held: Mapping[int, Any]) -> None:
        return None
