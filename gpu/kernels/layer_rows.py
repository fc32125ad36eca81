"""Needs torch and Triton. What a layer does between its matrix products, each as one pass over its rows.

Every kernel rounds where `dbo.model` rounds (norms, rotations and gates in fp32, the dtype kept), and computes a row from
that row alone, so a ubatch gives the bits of the whole batch.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from gpu.kernels.expert_rows import TRITON_ROWS


@triton.jit
def _norm(x, weight, out, stride_x, eps, H: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    inside = column < H
    wide = tl.load(x + row * stride_x + column, mask=inside, other=0.0).to(tl.float32)
    scale = tl.rsqrt(tl.sum(wide * wide, axis=0) / H + eps)
    scaled = (wide * scale).to(out.dtype.element_ty).to(tl.float32)
    value = scaled * tl.load(weight + column, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + row * H + column, value.to(out.dtype.element_ty), mask=inside)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """As `dbo.model.layers.rms_norm`: `[..., H]`, any stride between rows."""
    hidden = x.shape[-1]
    rows = x.reshape(-1, hidden)
    if rows.stride(-1) != 1:
        rows = rows.contiguous()
    out = torch.empty(rows.shape, dtype=x.dtype, device=x.device)
    if len(rows):
        block = triton.next_power_of_2(hidden)
        warps = max(1, min(8, block // 512))
        _norm[(len(rows),)](rows, weight, out, rows.stride(0), eps, H=hidden, BLOCK=block, num_warps=warps)
    return out.view(x.shape)


@triton.jit
def _turn(pointer, cos, sin, mask):
    """Rotate neighbouring pairs: even elements at `pointer`, odd ones behind them."""
    even = tl.load(pointer, mask=mask, other=0.0).to(tl.float32)
    odd = tl.load(pointer + 1, mask=mask, other=0.0).to(tl.float32)
    return even * cos - odd * sin, even * sin + odd * cos


@triton.jit
def _finish(
    mixed, queries, latents, weight, cos, sin, stride_mixed, eps,
    LATENT: tl.constexpr, PAIRS: tl.constexpr, HEADS: tl.constexpr, NOPE: tl.constexpr,
    LATENT_BLOCK: tl.constexpr, PAIR_BLOCK: tl.constexpr, HEAD_BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    source = mixed + row * stride_mixed
    target = latents + row * (LATENT + 2 * PAIRS)
    dtype = latents.dtype.element_ty
    column = tl.arange(0, LATENT_BLOCK)
    inside = column < LATENT
    wide = tl.load(source + column, mask=inside, other=0.0).to(tl.float32)
    scale = tl.rsqrt(tl.sum(wide * wide, axis=0) / LATENT + eps)
    normed = (wide * scale).to(dtype).to(tl.float32) * tl.load(weight + column, mask=inside, other=0.0).to(tl.float32)
    tl.store(target + column, normed.to(dtype), mask=inside)

    pair = tl.arange(0, PAIR_BLOCK)
    real = pair < PAIRS
    c = tl.load(cos + row * PAIRS + pair, mask=real, other=0.0)
    s = tl.load(sin + row * PAIRS + pair, mask=real, other=0.0)
    even, odd = _turn(source + LATENT + 2 * pair, c, s, real)
    tl.store(target + LATENT + 2 * pair, even.to(dtype), mask=real)
    tl.store(target + LATENT + 2 * pair + 1, odd.to(dtype), mask=real)

    head = tl.arange(0, HEAD_BLOCK)
    both = (head < HEADS)[:, None] & real[None, :]
    at = queries + row * (HEADS * (NOPE + 2 * PAIRS)) + head[:, None] * (NOPE + 2 * PAIRS) + NOPE + 2 * pair[None, :]
    even, odd = _turn(at, c[None, :], s[None, :], both)
    tl.store(at, even.to(dtype), mask=both)
    tl.store(at + 1, odd.to(dtype), mask=both)


def finish_projection(
    mixed: Tensor, queries: Tensor, norm_weight: Tensor, eps: float, cos: Tensor, sin: Tensor
) -> Tensor:
    """Norm the latents, rotate the shared key part, and rotate the queries' last part **in place**.

    Args:
        mixed: `[T, latent + rope]`, any stride between rows. queries: `[T, heads, nope + rope]`, contiguous.
        norm_weight: `[latent]`. cos, sin: `[T, 1, rope / 2]` fp32.

    Returns:
        The cache's rows `[T, latent + rope]`.
    """
    num_rows, heads, width = queries.shape
    latent, pairs = norm_weight.shape[0], cos.shape[-1]
    latents = torch.empty(mixed.shape, dtype=mixed.dtype, device=mixed.device)
    if num_rows:
        power = triton.next_power_of_2
        _finish[(num_rows,)](
            mixed, queries, latents, norm_weight, cos.contiguous(), sin.contiguous(), mixed.stride(0), eps,
            LATENT=latent, PAIRS=pairs, HEADS=heads, NOPE=width - 2 * pairs,
            LATENT_BLOCK=power(latent), PAIR_BLOCK=power(pairs), HEAD_BLOCK=power(heads), num_warps=4,
        )  # fmt: skip
    return latents


@triton.jit(do_not_specialize=["num_rows"])
def _route(
    logits, padding, weights, ids, num_rows, scaling, E: tl.constexpr, K: tl.constexpr, ROWS: tl.constexpr,
    LANES: tl.constexpr,
):  # fmt: skip
    """Softmax over the experts, then the best one K times; the first of equal ones."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    live = row < num_rows
    lane = tl.arange(0, LANES)
    real = (lane < E)[None, :]
    score = tl.load(logits + row[:, None] * E + lane[None, :], mask=live[:, None] & real, other=float("-inf"))
    pad = tl.load(padding + row, mask=live, other=1) != 0
    score = tl.where(pad[:, None] & real, 0.0, score)  # whatever padding computed, NaN too
    score = tl.where(live[:, None] | (lane > 0)[None, :], score, 0.0)
    score = tl.exp(score - tl.max(score, axis=1)[:, None])
    score = score / tl.sum(score, axis=1)[:, None]
    for k in tl.static_range(K):
        best = tl.max(score, axis=1)
        chosen = tl.min(tl.where(score == best[:, None], lane[None, :], LANES), axis=1)
        tl.store(weights + row * K + k, tl.where(pad, 0.0, best * scaling), mask=live)
        tl.store(ids + row * K + k, tl.where(pad, -1, chosen).to(tl.int64), mask=live)
        score = tl.where(lane[None, :] == chosen[:, None], -1.0, score)


def route(logits: Tensor, padding_rows: Tensor, top_k: int, scaling: float) -> tuple[Tensor, Tensor]:
    """Router logits `[T, E]` fp32 to weights `[T, K]` fp32 and ids `[T, K]` int64; 0 and -1 in padding rows `[T, 1]`."""
    num_rows, experts = logits.shape
    weights = torch.empty((num_rows, top_k), dtype=torch.float32, device=logits.device)
    ids = torch.empty((num_rows, top_k), dtype=torch.int64, device=logits.device)
    if num_rows:
        lanes = max(2, triton.next_power_of_2(experts))
        rows = max(1, 512 // lanes)
        _route[(triton.cdiv(num_rows, rows),)](
            logits.contiguous(), padding_rows.contiguous().view(torch.uint8), weights, ids, num_rows, scaling,
            E=experts, K=top_k, ROWS=rows, LANES=lanes, num_warps=4,
        )  # fmt: skip
    return weights, ids


def gated(gate_up: Tensor) -> Tensor:
    """As `dbo.model.layers.gated`: `[..., 2I]` to `[..., I]`."""
    flat = gate_up.reshape(-1, gate_up.shape[-1])
    return TRITON_ROWS.activate(flat, None).view(*gate_up.shape[:-1], -1)
