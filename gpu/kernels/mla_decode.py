"""Needs torch and Triton. Absorbed MLA of few queries over the paged cache: pages are read once, where they lie.

A cache row is the key of all heads and its latent part the value, so one program serves 16 heads of one query from one
read of the keys. Keys are split over programs, since a batch of decodes alone does not fill the device; a second kernel
merges the parts by their log-sum-exp. No page is copied, nothing of the size of the scores is stored. torch's own fused
kernels take no head of 576.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

_HEADS = 16
"""Heads of a program: the least that a matrix unit takes."""

LN_2 = tl.constexpr(0.6931471805599453)


@triton.jit
def _attend(
    latent_queries,
    queries,
    cache,
    table,
    row_requests,
    positions,
    padding,
    parts,
    lses,
    out,
    whole,
    queries_per_request,
    scale_log2,
    stride_latent_head,
    stride_latent_row,
    stride_query_row,
    stride_table,
    stride_out_head,
    stride_out_row,
    HEADS: tl.constexpr,
    LATENT: tl.constexpr,
    NOPE: tl.constexpr,
    ROPE: tl.constexpr,
    PAGE: tl.constexpr,
    SPLITS: tl.constexpr,
    LATENT_BLOCK: tl.constexpr,
    ROPE_BLOCK: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_N: tl.constexpr,
    WITH_LSE: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    split = tl.program_id(1)
    head = tl.program_id(2) * BLOCK_H + tl.arange(0, BLOCK_H)
    real = head < HEADS
    request = (tl.load(row_requests + row) // queries_per_request).to(tl.int64)
    num_keys = tl.load(positions + row).to(tl.int32) + 1
    num_keys = tl.where(tl.load(padding + row) != 0, 0, num_keys)
    share = tl.cdiv(tl.cdiv(num_keys, SPLITS), BLOCK_N) * BLOCK_N
    first = split * share
    last = tl.minimum(first + share, num_keys)

    lane = tl.arange(0, LATENT_BLOCK)
    lane_real = lane < LATENT
    turn = tl.arange(0, ROPE_BLOCK)
    turn_real = turn < ROPE
    q = tl.load(
        latent_queries + head[:, None] * stride_latent_head + row * stride_latent_row + lane[None, :],
        mask=real[:, None] & lane_real[None, :],
        other=0.0,
    )
    q_rope = tl.load(
        queries + row * stride_query_row + head[:, None] * (NOPE + ROPE) + NOPE + turn[None, :],
        mask=real[:, None] & turn_real[None, :],
        other=0.0,
    )
    peak = tl.full([BLOCK_H], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_H], tl.float32)
    mixed = tl.zeros([BLOCK_H, LATENT_BLOCK], tl.float32)
    for start in range(first, last, BLOCK_N):
        key = start + tl.arange(0, BLOCK_N)
        seen = key < last
        if PAGE % BLOCK_N == 0:  # blocks of keys begin at multiples of their size, so each lies in one page
            page = tl.load(table + request * stride_table + start // PAGE).to(tl.int64)
            at = cache + (page * PAGE + start % PAGE + tl.arange(0, BLOCK_N)) * (LATENT + ROPE)
        else:
            page = tl.load(table + request * stride_table + key // PAGE, mask=seen, other=0).to(tl.int64)
            at = cache + (page * PAGE + key % PAGE) * (LATENT + ROPE)
        # A row that is not seen is not loaded either: whatever it holds, NaN too, has no part in this.
        latent = tl.load(at[:, None] + lane[None, :], mask=seen[:, None] & lane_real[None, :], other=0.0)
        rope = tl.load(at[:, None] + LATENT + turn[None, :], mask=seen[:, None] & turn_real[None, :], other=0.0)
        scores = tl.dot(q, tl.trans(latent), input_precision="ieee")
        scores += tl.dot(q_rope, tl.trans(rope), input_precision="ieee")
        scores = tl.where(seen[None, :], scores * scale_log2, float("-inf"))
        above = tl.maximum(peak, tl.max(scores, axis=1))
        weight = tl.exp2(scores - above[:, None])
        kept = tl.exp2(peak - above)
        total = total * kept + tl.sum(weight, axis=1)
        mixed = mixed * kept[:, None] + tl.dot(weight.to(latent.dtype), latent, input_precision="ieee")
        peak = above
    part = ((row * SPLITS + split) * HEADS + head).to(tl.int64)
    mixed = mixed / tl.where(total > 0, total, 1.0)[:, None]
    wanted = real[:, None] & lane_real[None, :]
    lse = tl.where(total > 0, peak + tl.log2(total), float("-inf"))
    if SPLITS == 1:
        if WITH_LSE:
            tl.store(whole + row * HEADS + head, lse * LN_2, mask=real)
        at = out + head[:, None] * stride_out_head + row * stride_out_row + lane[None, :]
        tl.store(at, mixed.to(out.dtype.element_ty), mask=wanted)
    else:
        tl.store(lses + part, lse, mask=real)
        # Nothing to say: the merge reads the log-sum-exp first.
        tl.store(parts + part[:, None] * LATENT + lane[None, :], mixed, mask=wanted & (first < last))


@triton.jit
def _merge(
    parts,
    lses,
    out,
    whole,
    stride_head,
    stride_row,
    HEADS: tl.constexpr,
    LATENT: tl.constexpr,
    SPLITS: tl.constexpr,
    LATENT_BLOCK: tl.constexpr,
    WITH_LSE: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    lane = tl.arange(0, LATENT_BLOCK)
    inside = lane < LATENT
    split = tl.arange(0, SPLITS)
    part = (row * SPLITS + split) * HEADS + head
    lse = tl.load(lses + part)
    peak = tl.max(lse, axis=0)
    weight = tl.exp2(lse - tl.where(peak == float("-inf"), 0.0, peak))
    # A weight of 0 loads nothing: that part may never have been written.
    wanted = inside[None, :] & (weight > 0)[:, None]
    value = tl.load(parts + part[:, None] * LATENT + lane[None, :], mask=wanted, other=0.0)
    total = tl.sum(weight, axis=0)
    if WITH_LSE:
        tl.store(whole + row * HEADS + head, tl.where(total > 0, peak + tl.log2(total), float("-inf")) * LN_2)
    mixed = tl.sum(value * weight[:, None], axis=0) / tl.where(total > 0, total, 1.0)
    target = out + head * stride_head + row * stride_row + lane
    tl.store(target, mixed.to(out.dtype.element_ty), mask=inside)


@dataclass(frozen=True, kw_only=True)
class AttentionTuning:
    """Keys that a program reads at a time, its warps and its pipeline's stages; programs wanted on the device at once."""

    block_keys: int = 64
    num_warps: int = 4
    num_stages: int = 3
    programs: int = 264


DEFAULT = AttentionTuning()


def splits_for(num_rows: int, head_blocks: int, max_keys: int, tuning: AttentionTuning) -> int:
    """Parts that each row's keys are cut in: a power of two, so that few kernels are compiled."""
    wanted = min(tuning.programs // max(1, num_rows * head_blocks), max_keys // (2 * tuning.block_keys), 32)
    return 1 << max(0, wanted.bit_length() - 1)


def mla_decode(
    latent_queries: Tensor,
    queries: Tensor,
    cache_rows: Tensor,
    *,
    block_table: Tensor,
    page_size: int,
    row_requests: Tensor,
    queries_per_request: int,
    positions: Tensor,
    padding_rows: Tensor,
    max_keys: int,
    scale: float,
    lse: Tensor | None = None,
    tuning: AttentionTuning = DEFAULT,
) -> Tensor:
    """Attention of every row to the keys of its request up to its own position.

    Args:
        latent_queries: `[heads, T, latent]`, the absorbed part. queries: `[T, heads, nope + rope]`; the last part is used.
        cache_rows: `[slots, latent + rope]`, contiguous. block_table: `[R, pages]` int32.
        row_requests: `[T]`, floor-divided by `queries_per_request` each row's request.
        positions: `[T]` int64, the last key that a row sees, -1: none. padding_rows: `[T, 1]` bool, they see none. Rows
            that see no key give 0 and read nothing.
        max_keys: a bound for any row's keys (host); chooses the splits.
        lse: `[T, heads]` fp32, contiguous: filled with the log-sum-exp of each row's scores, base e; no key: minus infinity.

    Returns:
        `[heads, T, latent]`.
    """
    heads, num_rows, latent = latent_queries.shape
    rope, width = cache_rows.shape[1] - latent, queries.shape[2]
    out = torch.empty((heads, num_rows, latent), dtype=queries.dtype, device=queries.device)
    if num_rows == 0:
        return out
    head_blocks = triton.cdiv(heads, _HEADS)
    splits = splits_for(num_rows, head_blocks, max_keys, tuning)
    # Without a merge nothing is written to them.
    parts = torch.empty(
        (num_rows, splits, heads, latent if splits > 1 else 0), dtype=torch.float32, device=queries.device
    )
    lses = torch.empty((num_rows, splits, heads), dtype=torch.float32, device=queries.device)
    power = triton.next_power_of_2
    _attend[(num_rows, splits, head_blocks)](
        latent_queries,
        queries,
        cache_rows,
        block_table,
        row_requests,
        positions,
        padding_rows.contiguous().view(torch.uint8),
        parts,
        lses,
        out,
        lses if lse is None else lse,
        queries_per_request,
        scale * 1.4426950408889634,
        latent_queries.stride(0),
        latent_queries.stride(1),
        queries.stride(0),
        block_table.stride(0),
        out.stride(0),
        out.stride(1),
        HEADS=heads,
        LATENT=latent,
        NOPE=width - rope,
        ROPE=rope,
        PAGE=page_size,
        SPLITS=splits,
        LATENT_BLOCK=power(latent),
        ROPE_BLOCK=max(16, power(rope)),
        BLOCK_H=_HEADS,
        BLOCK_N=tuning.block_keys,
        WITH_LSE=lse is not None,
        num_warps=tuning.num_warps,
        num_stages=tuning.num_stages,
    )
    if splits == 1:
        return out
    _merge[(num_rows, heads)](
        parts,
        lses,
        out,
        lses if lse is None else lse,
        out.stride(0),
        out.stride(1),
        HEADS=heads,
        LATENT=latent,
        SPLITS=splits,
        LATENT_BLOCK=power(latent),
        WITH_LSE=lse is not None,
        num_warps=4,
    )
    return out
