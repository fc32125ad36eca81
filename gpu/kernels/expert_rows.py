"""Needs torch and Triton. Rows to their experts and back: `dbo.moe.grouped_experts.RowMoves`, a kernel or two each.

Each kernel moves what it must and no more: a row is read once and written to its places; what lies behind the last local
pair is neither read nor written, though the buffers have room for every pair. No atomics: the same bits every time.

N rows, K ids a row, P = N * K pairs, L local experts, H hidden size, I expert width.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from gpu.kernels import grouped_gemm

_TILE = 8192
"""Elements of a (pairs x experts) tile: kept in registers."""


@triton.jit(do_not_specialize=["num_pairs"])
def _count(ids, counts, num_pairs, LANES: tl.constexpr, BLOCK: tl.constexpr):
    """Pairs of each expert in this block: `counts[block, expert]`."""
    block = tl.program_id(0)
    pair = block * BLOCK + tl.arange(0, BLOCK)
    expert = tl.load(ids + pair, mask=pair < num_pairs, other=-1)
    lane = tl.arange(0, LANES)
    hit = (expert[:, None] == lane[None, :]).to(tl.int32)
    tl.store(counts + block * LANES + lane, tl.sum(hit, axis=0))


@triton.jit(do_not_specialize=["num_pairs", "num_blocks"])
def _place(
    ids,
    counts,
    places,
    ends,
    num_pairs,
    num_blocks,
    num_local,
    LANES: tl.constexpr,
    BLOCK: tl.constexpr,
    STEP: tl.constexpr,
):
    """Where each pair of this block goes: behind the smaller experts, behind its expert's earlier pairs."""
    block = tl.program_id(0)
    lane = tl.arange(0, LANES)
    total = tl.zeros([LANES], tl.int32)
    before = tl.zeros([LANES], tl.int32)
    for start in range(0, num_blocks, STEP):
        other = start + tl.arange(0, STEP)
        found = tl.load(counts + other[:, None] * LANES + lane[None, :], mask=(other < num_blocks)[:, None], other=0)
        total += tl.sum(found, axis=0)
        before += tl.sum(tl.where((other < block)[:, None], found, 0), axis=0)
    last = tl.cumsum(total, axis=0)
    tl.store(ends + lane, last, mask=(block == 0) & (lane < num_local))
    pair = block * BLOCK + tl.arange(0, BLOCK)
    expert = tl.load(ids + pair, mask=pair < num_pairs, other=-1)
    hit = (expert[:, None] == lane[None, :]).to(tl.int32)
    # Earlier pairs of the same expert: a product with a triangle, exact in fp16 up to 2048 and faster than a scan.
    earlier = (tl.arange(0, BLOCK)[None, :] < tl.arange(0, BLOCK)[:, None]).to(tl.float16)
    within = tl.dot(earlier, hit.to(tl.float16)).to(tl.int32)
    place = tl.sum(hit * ((last - total + before)[None, :] + within), axis=1)
    tl.store(places + pair, tl.where(expert >= 0, place, -1), mask=pair < num_pairs)


@triton.jit(do_not_specialize=["num_pairs"])
def _invert(places, sources, num_pairs, K: tl.constexpr, BLOCK: tl.constexpr):
    """The row of each place."""
    pair = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    place = tl.load(places + pair, mask=pair < num_pairs, other=-1)
    tl.store(sources + place, pair // K, mask=place >= 0)


@triton.jit
def _spread(x, places, rows, stride_x, H: tl.constexpr, K: tl.constexpr, BLOCK: tl.constexpr):
    """A block of a row of `x` to the row's places."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < H
    wanted = tl.load(places + row * K) >= 0
    for k in tl.static_range(1, K):
        wanted = wanted | (tl.load(places + row * K + k) >= 0)
    value = tl.load(x + row * stride_x + column, mask=inside & wanted)
    for k in tl.static_range(K):
        place = tl.load(places + row * K + k).to(tl.int64)
        tl.store(rows + place * H + column, value, mask=inside & (place >= 0))


@triton.jit(do_not_specialize=["num_rows"])
def _activate(
    gate_up,
    ends,
    active,
    num_rows,
    num_local,
    WIDTH: tl.constexpr,
    HAS_ENDS: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """silu(gate) * up of the local pairs, or of all rows."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    live = row < num_rows
    if HAS_ENDS:
        live = live & (row < tl.load(ends + num_local - 1))
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = live[:, None] & (column < WIDTH)[None, :]
    at = row[:, None] * (2 * WIDTH) + column[None, :]
    gate = tl.load(gate_up + at, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(gate_up + at + WIDTH, mask=inside, other=0.0)
    # Rounded where torch rounds: after silu, and after the product.
    silu = (gate / (1.0 + tl.exp(-gate))).to(up.dtype)
    value = (silu.to(tl.float32) * up.to(tl.float32)).to(up.dtype)
    tl.store(active + row[:, None] * WIDTH + column[None, :], value, mask=inside)


@triton.jit
def _gather(rows, places, weights, out, H: tl.constexpr, K: tl.constexpr, BLOCK: tl.constexpr):
    """The weighted sum of a row's pairs, in fp32, in the order of K; 0 for a row without a local pair."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < H
    total = tl.zeros([BLOCK], tl.float32)
    for k in tl.static_range(K):
        place = tl.load(places + row * K + k).to(tl.int64)
        here = place >= 0
        weight = tl.load(weights + row * K + k, mask=here, other=0.0)
        # Selected, not multiplied by 0: a weight that is not meant for this rank may be NaN.
        value = tl.load(rows + place * H + column, mask=inside & here, other=0.0)
        total += value.to(tl.float32) * weight
    tl.store(out + row * H + column, total.to(out.dtype.element_ty), mask=inside)


class TritonRows:
    """See `dbo.moe.grouped_experts.RowMoves`. Launches kernels on the current stream, never waits."""

    def order(self, topk_ids: Tensor, num_local: int) -> tuple[Tensor, Tensor]:
        pairs = topk_ids.numel()
        lanes = max(16, triton.next_power_of_2(num_local))
        block = max(16, min(128, _TILE // lanes))
        blocks = max(1, triton.cdiv(pairs, block))
        new = {"dtype": torch.int32, "device": topk_ids.device}
        counts, ends = torch.empty((blocks, lanes), **new), torch.empty(num_local, **new)
        places = torch.empty(topk_ids.shape, **new)
        ids = topk_ids.contiguous()
        _count[(blocks,)](ids, counts, pairs, LANES=lanes, BLOCK=block, num_warps=8)
        _place[(blocks,)](
            ids,
            counts,
            places,
            ends,
            pairs,
            blocks,
            num_local,
            LANES=lanes,
            BLOCK=block,
            STEP=max(1, min(128, _TILE // lanes)),
            num_warps=8,
        )
        return places, ends

    def spread(self, x: Tensor, places: Tensor) -> Tensor:
        (num_rows, top_k), hidden = places.shape, x.shape[1]
        rows = torch.empty((num_rows * top_k, hidden), dtype=x.dtype, device=x.device)
        if num_rows:
            block = min(2048, triton.next_power_of_2(hidden))
            grid = (num_rows, triton.cdiv(hidden, block))
            _spread[grid](x, places, rows, x.stride(0), H=hidden, K=top_k, BLOCK=block, num_warps=4)
        return rows

    def sources(self, places: Tensor) -> Tensor:
        """The row of each place, `[N, K]` int32 to `[P]` int32; places that nobody has are undefined."""
        found = torch.empty(places.numel(), dtype=torch.int32, device=places.device)
        if places.numel():
            _invert[(triton.cdiv(places.numel(), 1024),)](places, found, places.numel(), K=places.shape[1], BLOCK=1024)
        return found

    def spread_gate_up(self, x: Tensor, places: Tensor, weights_LGH: Tensor, ends: Tensor) -> Tensor:
        if gathers(places.numel(), ends.shape[0], weights_LGH.shape[1] // 2):
            return grouped_gemm.gathered_gate_up(x, self.sources(places), weights_LGH, ends)
        return self.gate_up(self.spread(x, places), weights_LGH, ends)

    def activate(self, gate_up: Tensor, ends: Tensor | None) -> Tensor:
        num_rows, width = gate_up.shape[0], gate_up.shape[1] // 2
        active = torch.empty((num_rows, width), dtype=gate_up.dtype, device=gate_up.device)
        if num_rows:
            block = _columns(width)
            per_program = max(1, 4096 // block)
            grid = (triton.cdiv(num_rows, per_program), triton.cdiv(width, block))
            _activate[grid](
                gate_up,
                gate_up if ends is None else ends,
                active,
                num_rows,
                0 if ends is None else ends.shape[0],
                WIDTH=width,
                HAS_ENDS=ends is not None,
                ROWS=per_program,
                BLOCK=block,
                num_warps=4,
            )
        return active

    def gate_up(self, rows: Tensor, weights_LGH: Tensor, ends: Tensor) -> Tensor:
        if own_products(rows.shape[0], ends.shape[0], weights_LGH.shape[1] // 2):
            return grouped_gemm.gate_up(rows, weights_LGH, ends)
        return self.activate(torch._grouped_mm(rows, weights_LGH.transpose(1, 2), offs=ends), ends)

    def down(self, active: Tensor, weights_LIH: Tensor, ends: Tensor) -> Tensor:
        if own_products(active.shape[0], ends.shape[0], active.shape[1]):
            return grouped_gemm.down(active, weights_LIH, ends)
        return torch._grouped_mm(active, weights_LIH, offs=ends)

    def batched(self, x_LMH: Tensor, weights_LGH: Tensor, weights_LIH: Tensor, counts_L: Tensor) -> Tensor:
        num_local, slots, hidden = x_LMH.shape
        counts, rows = counts_L.to(torch.int32), x_LMH.reshape(-1, hidden)
        active = grouped_gemm.gate_up(rows, weights_LGH, counts, slots=slots)
        return grouped_gemm.down(active, weights_LIH, counts, slots=slots).view(num_local, slots, hidden)

    def gather(self, rows: Tensor, places: Tensor, topk_weights: Tensor) -> Tensor:
        (num_rows, top_k), hidden = places.shape, rows.shape[1]
        out = torch.empty((num_rows, hidden), dtype=rows.dtype, device=rows.device)
        if num_rows:
            block = min(1024, triton.next_power_of_2(hidden))
            grid = (num_rows, triton.cdiv(hidden, block))
            _gather[grid](rows, places, topk_weights.contiguous(), out, H=hidden, K=top_k, BLOCK=block, num_warps=4)
        return out


def own_products(pairs: int, num_local: int, width: int) -> bool:
    """Whether the project's products are the faster ones, as measured (docs/measurements/layer.md).

    With few rows an expert by a third, since tiles are low; with many by a tenth, unless experts are narrow: then a tile's
    work is short, and torch's kernel, which goes on to the next tile while it stores one, wins by a twentieth.
    """
    return pairs <= 96 * num_local or width >= 1024


def gathers(pairs: int, num_local: int, width: int) -> bool:
    """Whether the first product takes rows from where they are, instead of from a copy by expert.

    That costs the product a twentieth and saves writing and reading every pair's row, so it pays where products are short.
    """
    return pairs > 96 * num_local and width < 1024


def _columns(width: int) -> int:
    """Columns of a block: the largest of these that leaves no lane idle, else a small one."""
    for block in (512, 256, 128):
        if width % block == 0:
            return block
    return min(128, triton.next_power_of_2(width))


TRITON_ROWS = TritonRows()
