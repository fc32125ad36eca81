"""Needs torch and Triton. The kernels around the copies of backend `symm_copy`: `dbo.moe.symm_copy.CopyRows`, one each.

They are what this backend takes of the SMs, so each reads what it must once. Packing, which only eager steps with exact
sizes do, is torch's.

T tokens, R ranks, L local experts, K experts a token, N rows received, H hidden size.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from dbo.moe.interface import PartialSums
from dbo.moe.symm_copy_ops import TorchCopyRows

_ROWS = 32
_BLOCK = 2048
MOST_BLOCKS = 8
"""Peers that one launch of the reduction adds up: those of one node."""


@triton.jit(do_not_specialize=["tokens"])
def _route(
    weights,
    ids,
    routing,
    places,
    tokens,
    ranks,
    local_experts,
    K: tl.constexpr,
    LANES: tl.constexpr,
    ROWS: tl.constexpr,
):
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    lane = tl.arange(0, LANES)
    inside = (row < tokens)[:, None] & (lane < K)[None, :]
    at = row[:, None] * K + lane[None, :]
    expert = tl.load(ids + at, mask=inside, other=-1)
    weight = tl.load(weights + at, mask=inside, other=0.0)
    into = routing + row[:, None] * (2 * K) + lane[None, :]
    tl.store(into, expert.to(tl.float32), mask=inside)
    tl.store(into + K, weight, mask=inside)
    for rank in range(ranks):
        mine = (expert >= rank * local_experts) & (expert < (rank + 1) * local_experts)
        wanted = tl.sum(mine.to(tl.int32), axis=1) > 0
        tl.store(places + rank * tokens + row, tl.where(wanted, row, -1), mask=row < tokens)


@triton.jit(do_not_specialize=["rows"])
def _unpack(
    routing, ids, weights, rows, first, local_experts, K: tl.constexpr, LANES: tl.constexpr, ROWS: tl.constexpr
):
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    lane = tl.arange(0, LANES)
    inside = (row < rows)[:, None] & (lane < K)[None, :]
    source = routing + row[:, None] * (2 * K) + lane[None, :]
    expert = tl.load(source, mask=inside, other=-1.0).to(tl.int64) - first
    here = (expert >= 0) & (expert < local_experts)
    at = row[:, None] * K + lane[None, :]
    tl.store(ids + at, tl.where(here, expert, -1), mask=inside)
    tl.store(weights + at, tl.load(source + K, mask=inside, other=0.0), mask=inside)


@triton.jit
def _part(block, places, row, column, inside, H: tl.constexpr):
    """A piece of the row's partial sum from one peer, fp32; 0 where it has none."""
    place = tl.load(places + row).to(tl.int64)
    # Selected, not multiplied by 0: a row that is not meant for this rank may be NaN.
    return tl.load(block + place * H + column, mask=inside & (place >= 0), other=0.0).to(tl.float32)


@triton.jit(do_not_specialize=["tokens"])
def _reduce(
    b0,
    b1,
    b2,
    b3,
    b4,
    b5,
    b6,
    b7,
    places,
    residual,
    shared,
    out,
    tokens,
    H: tl.constexpr,
    R: tl.constexpr,
    ADDS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < H
    total = _part(b0, places, row, column, inside, H)
    if R > 1:
        total += _part(b1, places + tokens, row, column, inside, H)
    if R > 2:
        total += _part(b2, places + 2 * tokens, row, column, inside, H)
    if R > 3:
        total += _part(b3, places + 3 * tokens, row, column, inside, H)
    if R > 4:
        total += _part(b4, places + 4 * tokens, row, column, inside, H)
    if R > 5:
        total += _part(b5, places + 5 * tokens, row, column, inside, H)
    if R > 6:
        total += _part(b6, places + 6 * tokens, row, column, inside, H)
    if R > 7:
        total += _part(b7, places + 7 * tokens, row, column, inside, H)
    value = total.to(out.dtype.element_ty)
    at = row * H + column
    if ADDS:  # rounded where two sums more would round
        more = value.to(tl.float32) + tl.load(shared + at, mask=inside).to(tl.float32)
        more = more.to(out.dtype.element_ty).to(tl.float32)
        value = (tl.load(residual + at, mask=inside).to(tl.float32) + more).to(out.dtype.element_ty)
    tl.store(out + at, value, mask=inside)


class TritonCopyRows(TorchCopyRows):
    """See `dbo.moe.symm_copy.CopyRows`. Launches kernels on the current stream, never waits."""

    def route(self, topk_weights: Tensor, topk_ids: Tensor, ranks: int, local_experts: int) -> tuple[Tensor, Tensor]:
        tokens, top_k = topk_ids.shape
        routing = torch.empty((tokens, 2 * top_k), dtype=torch.float32, device=topk_ids.device)
        places = torch.empty((ranks, tokens), dtype=torch.int64, device=topk_ids.device)
        if tokens:
            _route[(triton.cdiv(tokens, _ROWS),)](
                topk_weights.float().contiguous(),
                topk_ids.contiguous(),
                routing,
                places,
                tokens,
                ranks,
                local_experts,
                K=top_k,
                LANES=triton.next_power_of_2(top_k),
                ROWS=_ROWS,
                num_warps=1,
            )
        return routing, places

    def unpack(self, routing: Tensor, first_expert: int, local_experts: int) -> tuple[Tensor, Tensor]:
        rows, top_k = routing.shape[0], routing.shape[1] // 2
        ids = torch.empty((rows, top_k), dtype=torch.int64, device=routing.device)
        weights = torch.empty((rows, top_k), dtype=torch.float32, device=routing.device)
        if rows:
            _unpack[(triton.cdiv(rows, _ROWS),)](
                routing,
                ids,
                weights,
                rows,
                first_expert,
                local_experts,
                K=top_k,
                LANES=triton.next_power_of_2(top_k),
                ROWS=_ROWS,
                num_warps=1,
            )
        return ids, weights

    def reduce(self, blocks: Sequence[Tensor], places: Tensor) -> Tensor:
        return super().reduce(blocks, places) if len(blocks) > MOST_BLOCKS else _added(blocks, places)


def adds_partial(routed: PartialSums) -> bool:
    """Whether `add_partial_sums` takes so many blocks."""
    return len(routed.blocks) <= MOST_BLOCKS


def add_partial_sums(residual: Tensor, routed: PartialSums, shared: Tensor) -> Tensor:
    """`residual + (routed.summed() + shared)`, `[T, H]` each, in one pass."""
    return _added(routed.blocks, routed.places, residual.contiguous(), shared.contiguous())


def _added(
    blocks: Sequence[Tensor], places: Tensor, residual: Tensor | None = None, shared: Tensor | None = None
) -> Tensor:
    ranks, tokens = places.shape
    hidden = blocks[0].shape[1]
    out = torch.empty((tokens, hidden), dtype=blocks[0].dtype, device=places.device)
    if tokens:
        parts = [block.contiguous() for block in blocks] + [out] * (MOST_BLOCKS - ranks)
        block = min(_BLOCK, triton.next_power_of_2(hidden))
        _reduce[(tokens, triton.cdiv(hidden, block))](
            *parts,
            places,
            out if residual is None else residual,
            out if shared is None else shared,
            out,
            tokens,
            H=hidden,
            R=ranks,
            ADDS=residual is not None,
            BLOCK=block,
            num_warps=max(1, min(8, block // 256)),
        )
    return out


TRITON_COPY_ROWS = TritonCopyRows()
