"""Needs torch. Layouts: one interned object for each (shape, strides, dtype), so that caches compare by identity."""

from __future__ import annotations

import torch

from dbo.trace import Access
from dbo.trace.accesses import strided


class Layout:
    """How a tensor lies in its storage, wherever it begins.

    Attributes:
        shape, strides: in elements.
        nbytes: bytes from the first to the last element, both included.
        box_sizes, box_strides: the byte box of an `Access`.
    """

    __slots__ = ("shape", "strides", "dtype", "itemsize", "nbytes", "box_sizes", "box_strides")

    def __init__(self, shape: tuple[int, ...], strides: tuple[int, ...], dtype: torch.dtype) -> None:
        self.shape = shape
        self.strides = strides
        self.dtype = dtype
        self.itemsize = dtype.itemsize
        box = strided(0, 0, shape, strides, self.itemsize)
        self.box_sizes, self.box_strides = box.sizes, box.strides
        self.nbytes = 0 if 0 in shape else box.stop

    def access(self, buffer: int, offset_bytes: int) -> Access:
        """The bytes of a tensor of this layout whose first element lies at `offset_bytes` of `buffer`."""
        return Access(buffer, offset_bytes, self.box_sizes, self.box_strides)

    def __repr__(self) -> str:
        return f"Layout(shape={self.shape}, strides={self.strides}, dtype={self.dtype})"


LIMIT = 1 << 16
_layouts: dict[tuple[tuple[int, ...], tuple[int, ...], torch.dtype], Layout] = {}


def layout(shape: tuple[int, ...], strides: tuple[int, ...], dtype: torch.dtype) -> Layout:
    """The one layout of this shape, strides and dtype."""
    key = (shape, strides, dtype)
    found = _layouts.get(key)
    if found is None:
        if len(_layouts) >= LIMIT:
            _layouts.clear()  # a layout made twice costs a miss in the shape cache, nothing else
        # two threads may both get here; setdefault keeps one
        found = _layouts.setdefault(key, Layout(tuple(shape), tuple(strides), dtype))
    return found


def layout_of(data: torch.Tensor) -> Layout:
    """The layout of a plain tensor (CPU or meta)."""
    return layout(data.shape, data.stride(), data.dtype)
