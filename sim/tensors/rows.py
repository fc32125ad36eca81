"""Needs torch. Declared rows: which rows of a tensor an indexed operation may touch, known to the host alone.

An indexed read or write (`index_copy_`, `index_put_`, `index_select`, `embedding`, …) depends on values that are on the
device, so it counts as touching the whole tensor. Two ubatches that write different slots of one KV cache would then
look like a race. Inside ``with declared_rows(cache, rows)`` the operations on `cache` touch those rows only, and every
index is checked against them when the operation runs: a declaration cannot hide a race.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch

from dbo.errors import DeviceTensorError, UsageError
from dbo.trace.accesses import strided
from sim.tensors.tensor import SimTensor

Spans = tuple[
    tuple[int, int], ...
]  # byte offsets in the buffer of the first element of the first and past the last row


class Declaration:
    """Rows of one tensor: the accesses that they make up and the byte spans that an index may point into."""

    def __init__(self, tensor: SimTensor, rows: Sequence[tuple[int, int]]) -> None:
        lay = tensor._layout
        if not lay.shape:
            raise UsageError.of("a 0-dim tensor has no rows", fix="declare rows of a tensor with a dimension", shape=())
        for start, stop in rows:
            if not 0 <= start <= stop <= lay.shape[0]:
                raise UsageError.of(
                    "declared rows lie in the tensor",
                    fix="give 0 <= start <= stop <= len",
                    rows=(start, stop),
                    len=lay.shape[0],
                )
        step = lay.strides[0]
        first = tensor._offset_bytes // lay.itemsize
        self.whole = tensor._access
        self.row_bytes = step * lay.itemsize
        self.spans: Spans = tuple(
            (tensor._offset_bytes + a * self.row_bytes, tensor._offset_bytes + b * self.row_bytes)
            for a, b in rows
            if a < b
        )
        self.accesses = tuple(
            strided(self.whole.buffer, first + a * step, (b - a, *lay.shape[1:]), lay.strides, lay.itemsize)
            for a, b in rows
            if a < b
        )


_current: ContextVar[tuple[Declaration, ...]] = ContextVar("sim_declared_rows", default=())


@contextmanager
def declared_rows(tensor: torch.Tensor, rows: Sequence[tuple[int, int]]) -> Iterator[None]:
    """Indexed operations of the calling task on `tensor`, or on a view of all its bytes, touch only these rows.

    Args:
        tensor: a tensor on sim.
        rows: half-open intervals along dimension 0. A negative index is legal if it lands in one of them.

    Raises:
        UsageError: rows that the tensor does not have.
        DeviceTensorError: when the operation runs and an index points elsewhere.
    """
    if not isinstance(tensor, SimTensor):
        raise UsageError.of(
            "rows are declared of a tensor on sim", fix="pass the device tensor", got=type(tensor).__name__
        )
    token = _current.set((*_current.get(), Declaration(tensor, rows)))
    try:
        yield
    finally:
        _current.reset(token)


def declared_for(tensor: SimTensor) -> Declaration | None:
    """The innermost declaration about all of `tensor`'s bytes, if there is one."""
    declarations = _current.get()
    if not declarations:
        return None
    mine = tensor._access
    return next((d for d in reversed(declarations) if d.whole == mine), None)


def checker(name: str, tensor: SimTensor, index: torch.Tensor, declaration: Declaration) -> Callable[[], None]:
    """A check, to be called when the operation runs, that `index` (a CPU twin) selects declared rows of `tensor`."""
    base, step, length = (
        tensor._offset_bytes,
        tensor._layout.strides[0] * tensor._layout.itemsize,
        tensor._layout.shape[0],
    )
    spans = declaration.spans

    def check() -> None:
        at = index.to(torch.int64).reshape(-1)
        at = torch.where(at < 0, at + length, at) * step + base
        inside = torch.zeros_like(at, dtype=torch.bool)
        for start, stop in spans:
            inside |= (at >= start) & (at + step <= stop)
        if not bool(inside.all()):
            stray = index.reshape(-1)[~inside].unique()[:4].tolist()
            raise DeviceTensorError.of(
                "an indexed operation touches declared rows only", fix="declare these too", op=name, indices=stray
            )

    return check


def first_index(name: str, args: list[Any]) -> torch.Tensor | None:
    """The CPU twin of the index that selects rows (dimension 0) of the first argument, or None if another one does."""
    if name in ("index", "index_put_", "_index_put_impl_", "_unsafe_index", "_unsafe_index_put"):
        found = args[1][0] if args[1] else None
        return found if isinstance(found, torch.Tensor) and found.dtype not in (torch.bool, torch.uint8) else None
    if name == "embedding":
        return args[1]
    if len(args) < 3:
        return None
    dim, index = args[1], args[2]
    return index if dim in (0, -args[0].dim()) else None
