"""Needs torch and Triton. What the kernels share: the empty-shard mask, LSE lanes, and how a row is cut in blocks."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

RAW = {torch.float16: torch.int16, torch.bfloat16: torch.int16, torch.float32: torch.int32}
"""The integer dtype under which bits move unchanged."""


def block_dim(head_dim: int) -> int:
    """Columns of a block: the whole row where little is wasted, else pieces of 64 that leave no lane idle for long."""
    whole = triton.next_power_of_2(head_dim)
    return whole if head_dim <= 128 or whole * 3 <= head_dim * 4 else 64


@triton.jit
def row_is_empty(row, live, seq_lens, query_start_loc, num_requests):
    """Whether batch row `row` (a block of integers) has no local key: padding, or a request of local length 0."""
    end = tl.load(query_start_loc + num_requests)
    inside = live & (row < end)
    # Decode batches have one row a request, so row b is usually request b: two loads instead of a search.
    near = row < num_requests
    start = tl.load(query_start_loc + row, mask=live & near, other=-1)
    stop = tl.load(query_start_loc + row + 1, mask=live & near, other=-1)
    owner = row
    guessed = (start <= row) & (row < stop)
    if tl.min((guessed | (inside == 0)).to(tl.int32), axis=0) == 0:
        low = tl.zeros_like(row)
        high = low + num_requests
        span = num_requests
        while span > 1:  # invariant: the last request that starts at or before the row lies in [low, high)
            middle = (low + high) // 2
            below = tl.load(query_start_loc + middle, mask=inside, other=0) <= row
            low = tl.where(below, middle, low)
            high = tl.where(below, high, middle)
            span = (span + 1) // 2
        owner = low
    length = tl.load(seq_lens + owner, mask=inside, other=0)
    return length <= 0


@triton.jit
def masked_lse_bits(
    lse, row, head, live, stride_row, stride_head, seq_lens, query_start_loc, num_requests, HAS_MASK: tl.constexpr
):
    """fp32 bits of the LSE of (row, head), as int32; minus infinity in empty rows. 16 bits are widened, then cast."""
    value = tl.load(lse + row * stride_row + head * stride_head, mask=live, other=0.0)
    bits = value.to(tl.float32).to(tl.int32, bitcast=True)
    if HAS_MASK:
        empty = row_is_empty(row, live, seq_lens, query_start_loc, num_requests)
        bits = tl.where(empty, float("-inf"), 0.0).to(tl.int32, bitcast=True) | tl.where(empty, 0, bits)
    return bits


@triton.jit
def clean(lse):
    """NaN and plus infinity read as minus infinity."""
    return tl.where(lse < float("inf"), lse, float("-inf"))


@triton.jit
def power(x, BASE_E: tl.constexpr):
    """e ** x or 2 ** x."""
    if BASE_E:
        return tl.exp(x)
    else:
        return tl.exp2(x)


@triton.jit
def logarithm(x, BASE_E: tl.constexpr):
    """The inverse of `power`."""
    if BASE_E:
        return tl.log(x)
    else:
        return tl.log2(x)
