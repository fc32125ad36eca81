"""Arrays without values for ordering mode: a buffer, a shape and an item size. No torch.

Every operation on a symbol queues a device operation with the bytes it reads and writes, so streams, events, races and
buffer reuse are exactly those of the numeric program; only the numbers are missing.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import TYPE_CHECKING, Any

import numpy as np

from dbo.trace import Access, kinds
from sim.work import Work

if TYPE_CHECKING:
    from sim.world import SimWorld


_BYTE_RUN = (1,)


class Symbol:
    """A dense array `[rows, …]` in `buffer`, starting at byte `offset`."""

    __slots__ = ("buffer", "dtype", "itemsize", "nbytes", "notes", "offset", "shape", "world")

    def __init__(
        self,
        world: SimWorld,
        shape: Sequence[int],
        *,
        itemsize: int = 4,
        buffer: int | None = None,
        offset: int = 0,
        name: str = "",
        dtype: str = "float32",
    ) -> None:
        self.world = world
        self.shape = tuple(map(int, shape))
        self.itemsize = itemsize
        self.nbytes = prod(self.shape) * itemsize
        self.dtype = dtype
        self.offset = offset
        self.buffer = world.engine.new_buffer(world.rank, name, self.nbytes) if buffer is None else buffer
        self.notes: dict[str, Any] = {}

    def access(self) -> Access:
        """The bytes of this array."""
        return Access(self.buffer, self.offset, (self.nbytes,), _BYTE_RUN)

    def rows(self, start: int, stop: int) -> Symbol:
        """A view of rows [start, stop)."""
        row = prod(self.shape[1:]) * self.itemsize
        view = Symbol(
            self.world,
            (stop - start, *self.shape[1:]),
            itemsize=self.itemsize,
            buffer=self.buffer,
            offset=self.offset + start * row,
            dtype=self.dtype,
        )
        view.notes = self.notes
        return view

    def clone(self) -> Symbol:
        """A copy, queued on the current stream."""
        return launch(self.world, "copy", [self], self.shape, itemsize=self.itemsize)

    def __add__(self, other: Symbol) -> Symbol:
        return launch(self.world, "add", [self, other], self.shape, itemsize=self.itemsize)


def launch(
    world: SimWorld,
    name: str,
    reads: Sequence[Symbol],
    shape: Sequence[int],
    *,
    itemsize: int = 4,
    writes: Sequence[Symbol] = (),
    duration_us: float | None = None,
) -> Symbol:
    """Queue `name` on the current stream: it reads `reads`, writes `writes` and a fresh result of `shape`."""
    result = Symbol(world, shape, itemsize=itemsize, name=name)
    read, written = _accesses(reads), _accesses((result, *writes))
    if duration_us is None:
        duration_us = world.cost.kernel(sum([access.sizes[0] for access in read + written]), name)
    world.current_stream().launch(
        Work(kind=kinds.OP, name=name, reads=read, writes=written, duration_us=duration_us, src=world.source())
    )
    return result


def _accesses(symbols: Sequence[Symbol]) -> tuple[Access, ...]:
    return tuple([symbol.access() for symbol in symbols if symbol.nbytes])


class SymbolTensors:
    """`dbo.contract.world.Tensors` over symbols."""

    def __init__(self, world: SimWorld) -> None:
        self.world = world

    def from_numpy(self, array: np.ndarray, name: str) -> Symbol:
        return launch(self.world, f"copy {name}", [], array.shape, itemsize=array.dtype.itemsize)

    def empty(self, shape: Sequence[int], name: str) -> Symbol:
        """An uninitialised array."""
        return Symbol(self.world, shape, name=name)

    def op(self, name: str, reads: Sequence[Symbol], shape: Sequence[int], writes: Sequence[Symbol] = ()) -> Symbol:
        """Queue an operation: from `reads` to a fresh result of `shape`, and in place into `writes`."""
        return launch(self.world, name, reads, shape, writes=writes)

    def to_host(self, array: Symbol, why: str) -> np.ndarray:
        self.world.wait_current_stream(why, declared=True)
        return np.zeros(array.shape, dtype=np.float32)

    def cat(self, parts: Sequence[Symbol]) -> Symbol:
        shape = (sum(p.shape[0] for p in parts), *parts[0].shape[1:])
        return launch(self.world, "cat", parts, shape, itemsize=parts[0].itemsize)

    def rows(self, array: Symbol, start: int, stop: int) -> Symbol:
        return array.rows(start, stop)

    def take(self, array: Symbol, index: np.ndarray) -> Symbol:
        return launch(self.world, "take", [array], (len(index), *array.shape[1:]), itemsize=array.itemsize)

    def copy_into(self, target: Symbol, source: Symbol) -> None:
        launch(self.world, "copy", [source], (0,), writes=[target])

    def record_stream(self, array: Symbol, stream: Any) -> None:
        """Symbols are never freed."""

    # -- for collectives ------------------------------------------------------------------------------------------

    def access(self, array: Symbol) -> Access:
        return array.access()

    def itemsize(self, array: Symbol) -> int:
        return array.itemsize

    def mover(self, output: Symbol, input: Symbol, output_splits: list[int], input_splits: list[int]) -> SymbolMover:
        return SymbolMover()


class SymbolMover:
    """Moves nothing."""

    def block(self, peer: int) -> None:
        return None

    def deliver(self, blocks: Sequence[Any]) -> None:
        return None


class SymbolRowOps:
    """`dbo.moe.nccl.RowOps` over symbols."""

    def __init__(self, world: SimWorld) -> None:
        self.world = world

    def pack(
        self, x: Symbol, topk_weights: Symbol, topk_ids: Symbol, ranks: int, local_experts: int
    ) -> tuple[Symbol, Symbol]:
        rows = launch(self.world, "pack", [x, topk_ids], (ranks * x.shape[0], x.shape[1]))
        routing_shape = (ranks * x.shape[0], 2 * topk_ids.shape[1])
        return rows, launch(self.world, "pack routing", [topk_ids, topk_weights], routing_shape)

    def empty_rows(self, like: Symbol, rows: int) -> Symbol:
        return Symbol(self.world, (rows, *like.shape[1:]), itemsize=like.itemsize, name="rows")

    def unpack(self, routing: Symbol) -> tuple[Symbol, Symbol]:
        shape = (routing.shape[0], routing.shape[1] // 2)
        return launch(self.world, "unpack ids", [routing], shape), routing

    def keep_ids(self, ids: Symbol, ends: Symbol) -> Symbol:
        return launch(self.world, "keep ids", [ids, ends], ids.shape, itemsize=ids.itemsize)

    def reduce(self, rows: Symbol, ranks: int) -> Symbol:
        return launch(self.world, "reduce", [rows], (rows.shape[0] // ranks, rows.shape[1]))
