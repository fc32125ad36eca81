"""Needs torch and Triton. The two products of routed experts, with tiles as high as the experts' rows are many.

torch's grouped product has two tile shapes, both made for many rows; with few rows an expert, as in decoding, it reads the
weights at half of the memory's rate. Here the tile's height follows P / L, and gate, up and `silu(gate) * up` are one kernel.
Tiles of all experts lie side by side in one grid that is large enough for any routing; a tile finds its expert from the ends
on the device, and those beyond the last one leave at once. Operands come through tensor descriptors (the copy engine).

P pairs, L local experts, H hidden size, I expert width.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor


@triton.jit
def _find(ends, tile, num_local, slots, LANES: tl.constexpr, BLOCK_M: tl.constexpr):
    """The expert of a tile, and its rows: the first, and the end of the expert's.

    With `slots`, groups begin at its multiples, and `ends` are counts.
    """
    lane = tl.arange(0, LANES)
    real = lane < num_local
    end = tl.load(ends + lane, mask=real, other=0)
    begin = tl.load(ends + lane - 1, mask=real & (lane > 0) & (slots == 0), other=0) + lane * slots
    end = tl.where(real & (slots > 0), end + begin, end)
    tiles = tl.where(real, (end - begin + BLOCK_M - 1) // BLOCK_M, 0)
    upto = tl.cumsum(tiles, axis=0)
    expert = tl.sum((real & (upto <= tile)).to(tl.int32), axis=0)
    mine = lane == expert
    first = tl.sum(tl.where(mine, begin + (tile - (upto - tiles)) * BLOCK_M, 0), axis=0)
    stop = tl.sum(tl.where(mine & real, end, 0), axis=0)
    return expert, first, stop


@triton.jit
def _gated(gate, up, dtype: tl.constexpr):
    """`silu(gate) * up`, rounded where torch rounds: the products, silu, and their product."""
    gate = gate.to(dtype).to(tl.float32)
    silu = (gate / (1.0 + tl.exp(-gate))).to(dtype).to(tl.float32)
    return (silu * up.to(dtype).to(tl.float32)).to(dtype)


@triton.jit
def _gate_up(
    rows,
    weights,
    active,
    ends,
    num_local,
    slots,
    hidden,
    WIDTH: tl.constexpr,
    LANES: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    expert, first, stop = _find(ends, tl.program_id(1), num_local, slots, LANES, BLOCK_M)
    if expert < num_local:
        column = tl.program_id(0) * BLOCK_N
        at = expert * (2 * WIDTH) + column
        gate = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
        up = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
        for k in range(0, hidden, BLOCK_K):
            a = rows.load([first, k])
            gate = tl.dot(a, weights.load([at, k]).T, gate)
            up = tl.dot(a, weights.load([at + WIDTH, k]).T, up)
        value = _gated(gate, up, active.dtype.element_ty)
        row = first + tl.arange(0, BLOCK_M)
        lane = column + tl.arange(0, BLOCK_N)
        inside = (row < stop)[:, None] & (lane < WIDTH)[None, :]
        tl.store(active + row.to(tl.int64)[:, None] * WIDTH + lane[None, :], value, mask=inside)


@triton.jit
def _gathered_gate_up(
    x,
    sources,
    weights,
    active,
    ends,
    num_local,
    hidden,
    stride_x,
    WIDTH: tl.constexpr,
    LANES: tl.constexpr,
    EVEN: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """As `_gate_up`, with rows taken from where they are: row i of the groups is row `sources[i]` of `x`."""
    expert, first, stop = _find(ends, tl.program_id(1), num_local, 0, LANES, BLOCK_M)
    if expert < num_local:
        column = tl.program_id(0) * BLOCK_N
        at = expert * (2 * WIDTH) + column
        row = first + tl.arange(0, BLOCK_M)
        # Behind the expert's end any row does: its product is not stored.
        source = tl.load(sources + row, mask=row < stop, other=0).to(tl.int64)
        depth = tl.arange(0, BLOCK_K)
        corner = x + source[:, None] * stride_x + depth[None, :]
        gate = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
        up = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
        for k in range(0, hidden, BLOCK_K):
            if EVEN:
                a = tl.load(corner + k)
            else:
                a = tl.load(corner + k, mask=(depth < hidden - k)[None, :], other=0.0)
            gate = tl.dot(a, weights.load([at, k]).T, gate)
            up = tl.dot(a, weights.load([at + WIDTH, k]).T, up)
        value = _gated(gate, up, active.dtype.element_ty)
        lane = column + tl.arange(0, BLOCK_N)
        inside = (row < stop)[:, None] & (lane < WIDTH)[None, :]
        tl.store(active + row.to(tl.int64)[:, None] * WIDTH + lane[None, :], value, mask=inside)


@triton.jit
def _down(
    rows,
    weights,
    out,
    ends,
    num_local,
    slots,
    width,
    HIDDEN: tl.constexpr,
    LANES: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    expert, first, stop = _find(ends, tl.program_id(1), num_local, slots, LANES, BLOCK_M)
    if expert < num_local:
        column = tl.program_id(0) * BLOCK_N
        total = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
        for k in range(0, width, BLOCK_K):
            # Behind the width, `rows` reads 0 and the weights are the next expert's.
            total = tl.dot(rows.load([first, k]), weights.load([expert * width + k, column]), total)
        row = first + tl.arange(0, BLOCK_M)
        lane = column + tl.arange(0, BLOCK_N)
        inside = (row < stop)[:, None] & (lane < HIDDEN)[None, :]
        target = out + row.to(tl.int64)[:, None] * HIDDEN + lane[None, :]
        tl.store(target, total.to(out.dtype.element_ty), mask=inside)


@dataclass(frozen=True, kw_only=True)
class Tile:
    """A tile's rows, columns (of gate and up each, or of the result) and depth; warps and stages of its program."""

    rows: int
    columns: int
    depth: int
    num_warps: int
    num_stages: int


GATE_UP = {
    16: Tile(rows=16, columns=64, depth=128, num_warps=4, num_stages=3),
    64: Tile(rows=64, columns=128, depth=64, num_warps=4, num_stages=4),
    128: Tile(rows=128, columns=128, depth=64, num_warps=8, num_stages=4),
}
GATHERED = {
    16: Tile(rows=16, columns=64, depth=128, num_warps=4, num_stages=3),
    64: Tile(rows=64, columns=128, depth=64, num_warps=4, num_stages=4),
    128: Tile(rows=128, columns=128, depth=64, num_warps=8, num_stages=3),
}
NARROW = {
    16: replace(GATHERED[16], columns=64),
    64: replace(GATHERED[64], columns=64),
    128: Tile(rows=64, columns=64, depth=64, num_warps=4, num_stages=4),
}
"""For experts no wider than such a tile."""
DOWN = {
    16: Tile(rows=16, columns=128, depth=128, num_warps=4, num_stages=3),
    64: Tile(rows=64, columns=256, depth=64, num_warps=4, num_stages=4),
    128: Tile(rows=128, columns=256, depth=64, num_warps=8, num_stages=4),
}


def tile_rows(pairs: int, num_local: int, slots: int = 0) -> int:
    """The height of tiles for so many pairs: most experts get one tile, while they have few rows."""
    # How many slots are taken the host does not know; where there are slots, batches are small.
    each = pairs / num_local if not slots else min(slots, 64)
    return 16 if each <= 12 else 64 if each <= 96 else 128


def gate_up(rows: Tensor, weights_LGH: Tensor, ends: Tensor, tile: Tile | None = None, *, slots: int = 0) -> Tensor:
    """`silu(rows @ gate) * (rows @ up)` of each group: `[P, H]`, `[L, 2I, H]`, `[L]` int32 to `[P, I]`.

    Groups lie side by side and `ends` are theirs; with `slots` each has so many rows and `ends` says how many count.
    """
    (pairs, hidden), (num_local, both, _) = rows.shape, weights_LGH.shape
    width = both // 2
    active = torch.empty((pairs, width), dtype=rows.dtype, device=rows.device)
    if pairs:
        tile = tile or GATE_UP[tile_rows(pairs, num_local, slots)]
        _gate_up[_grid(pairs, num_local, width, tile)](
            _blocks(rows, tile.rows, tile.depth),
            _blocks(weights_LGH.view(-1, hidden), tile.columns, tile.depth),
            active,
            ends,
            num_local,
            slots,
            hidden,
            WIDTH=width,
            **_constants(num_local, tile),
        )
    return active


def gathered_gate_up(x: Tensor, sources: Tensor, weights_LGH: Tensor, ends: Tensor, tile: Tile | None = None) -> Tensor:
    """`gate_up` of the rows `x[sources]`, `[N, H]` and `[P]` int32 to `[P, I]`, which are copied nowhere."""
    (pairs,), hidden, (num_local, both, _) = sources.shape, x.shape[1], weights_LGH.shape
    width = both // 2
    active = torch.empty((pairs, width), dtype=x.dtype, device=x.device)
    if pairs:
        tile = tile or (NARROW if width <= 64 else GATHERED)[tile_rows(pairs, num_local)]
        _gathered_gate_up[_grid(pairs, num_local, width, tile)](
            x,
            sources,
            _blocks(weights_LGH.view(-1, hidden), tile.columns, tile.depth),
            active,
            ends,
            num_local,
            hidden,
            x.stride(0),
            WIDTH=width,
            EVEN=hidden % tile.depth == 0,
            **_constants(num_local, tile),
        )
    return active


def down(rows: Tensor, weights_LIH: Tensor, ends: Tensor, tile: Tile | None = None, *, slots: int = 0) -> Tensor:
    """`rows @ weights` of each group: `[P, I]`, `[L, I, H]`, `[L]` int32 to `[P, H]`; `ends` and `slots` as for `gate_up`."""
    (pairs, width), (num_local, _, hidden) = rows.shape, weights_LIH.shape
    out = torch.empty((pairs, hidden), dtype=rows.dtype, device=rows.device)
    if pairs:
        tile = tile or DOWN[tile_rows(pairs, num_local, slots)]
        _down[_grid(pairs, num_local, hidden, tile)](
            _blocks(rows, tile.rows, tile.depth),
            _blocks(weights_LIH.view(-1, hidden), tile.depth, tile.columns),
            out,
            ends,
            num_local,
            slots,
            width,
            HIDDEN=hidden,
            **_constants(num_local, tile),
        )
    return out


def _blocks(matrix: Tensor, rows: int, columns: int) -> TensorDescriptor:
    return TensorDescriptor.from_tensor(matrix, [rows, columns])


def _grid(pairs: int, num_local: int, columns: int, tile: Tile) -> tuple[int, int]:
    """Enough tiles for any routing: each expert wastes at most one."""
    return triton.cdiv(columns, tile.columns), pairs // tile.rows + min(num_local, pairs)


def _constants(num_local: int, tile: Tile) -> dict[str, int]:
    return {
        "LANES": max(16, triton.next_power_of_2(num_local)),
        "BLOCK_M": tile.rows,
        "BLOCK_N": tile.columns,
        "BLOCK_K": tile.depth,
        "num_warps": tile.num_warps,
        "num_stages": tile.num_stages,
    }
