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
def _add_norm(residual, x, weight, total, out, eps, H: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    inside = column < H
    at = row * H + column
    value = tl.load(residual + at, mask=inside, other=0.0).to(tl.float32)
    value = (value + tl.load(x + at, mask=inside, other=0.0).to(tl.float32)).to(total.dtype.element_ty)
    tl.store(total + at, value, mask=inside)
    wide = value.to(tl.float32)
    scale = tl.rsqrt(tl.sum(wide * wide, axis=0) / H + eps)
    scaled = (wide * scale).to(out.dtype.element_ty).to(tl.float32)
    scaled = scaled * tl.load(weight + column, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + at, scaled.to(out.dtype.element_ty), mask=inside)


def add_rms_norm(
    residual: Tensor, x: Tensor, weight: Tensor, eps: float, out: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """As `dbo.model.layers.add_rms_norm`: `[T, H]` each; the sum is written once and not read again."""
    hidden = x.shape[-1]
    total = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    out = torch.empty_like(total) if out is None else out
    if x.numel():
        block = triton.next_power_of_2(hidden)
        _add_norm[(x.numel() // hidden,)](
            residual.contiguous(),
            x.contiguous(),
            weight,
            total,
            out,
            eps,
            H=hidden,
            BLOCK=block,
            num_warps=max(1, min(8, block // 512)),
        )
    return total, out


@triton.jit
def _add_three(residual, routed, shared, out, H: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < H  # a constant: what may be masked off is known to come in whole vectors
    at = row * H + column
    # Rounded where two sums would round.
    both = tl.load(routed + at, mask=inside).to(tl.float32) + tl.load(shared + at, mask=inside).to(tl.float32)
    both = both.to(out.dtype.element_ty).to(tl.float32)
    value = tl.load(residual + at, mask=inside).to(tl.float32) + both
    tl.store(out + at, value.to(out.dtype.element_ty), mask=inside)


def add_three(residual: Tensor, routed: Tensor, shared: Tensor) -> Tensor:
    """As `dbo.model.layers.add_three`, in one pass."""
    hidden = residual.shape[-1]
    out = torch.empty(residual.shape, dtype=residual.dtype, device=residual.device)
    if out.numel():
        block = min(2048, triton.next_power_of_2(hidden))
        _add_three[(out.numel() // hidden, triton.cdiv(hidden, block))](
            residual.contiguous(),
            routed.contiguous(),
            shared.contiguous(),
            out,
            H=hidden,
            BLOCK=block,
            num_warps=max(1, block // 512),
        )
    return out


@triton.jit
def _turned(x, cos, sin, ROWS: tl.constexpr, PAIRS: tl.constexpr):
    """Rotate neighbouring pairs of `x` `[ROWS, 2 * PAIRS]`; `cos` and `sin` `[PAIRS]`."""
    even, odd = tl.split(tl.reshape(x.to(tl.float32), [ROWS, PAIRS, 2]))
    c = cos[None, :]
    s = sin[None, :]
    return tl.reshape(tl.join(even * c - odd * s, even * s + odd * c), [ROWS, 2 * PAIRS])


@triton.jit
def _finish(
    mixed,
    queries,
    latents,
    weight,
    cos,
    sin,
    stride_mixed,
    stride_queries,
    eps,
    LATENT: tl.constexpr,
    PAIRS: tl.constexpr,
    HEADS: tl.constexpr,
    NOPE: tl.constexpr,
    LATENT_BLOCK: tl.constexpr,
    PAIR_BLOCK: tl.constexpr,
    HEAD_BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    source = mixed + row * stride_mixed
    target = latents + row * (LATENT + 2 * PAIRS)
    dtype = latents.dtype.element_ty
    column = tl.arange(0, LATENT_BLOCK)
    inside = column < LATENT
    pair = tl.arange(0, PAIR_BLOCK)
    turn = tl.arange(0, 2 * PAIR_BLOCK)
    real = (turn < 2 * PAIRS)[None, :]
    head = tl.arange(0, HEAD_BLOCK)
    both = (head < HEADS)[:, None] & real
    at = queries + row * stride_queries + head[:, None] * (NOPE + 2 * PAIRS) + NOPE + turn[None, :]
    # All loads first: they are under way together.
    latent = tl.load(source + column, mask=inside, other=0.0)
    scaling = tl.load(weight + column, mask=inside, other=0.0).to(tl.float32)
    key = tl.load(source + LATENT + turn[None, :], mask=real, other=0.0)
    query = tl.load(at, mask=both, other=0.0)
    c = tl.load(cos + row * PAIRS + pair, mask=pair < PAIRS, other=0.0)
    s = tl.load(sin + row * PAIRS + pair, mask=pair < PAIRS, other=0.0)

    wide = latent.to(tl.float32)
    scale = tl.rsqrt(tl.sum(wide * wide, axis=0) / LATENT + eps)
    normed = (wide * scale).to(dtype).to(tl.float32) * scaling
    tl.store(target + column, normed.to(dtype), mask=inside)
    tl.store(target + LATENT + turn[None, :], _turned(key, c, s, 1, PAIR_BLOCK).to(dtype), mask=real)
    tl.store(at, _turned(query, c, s, HEAD_BLOCK, PAIR_BLOCK).to(dtype), mask=both)


def finish_projection(
    mixed: Tensor, queries: Tensor, norm_weight: Tensor, eps: float, cos: Tensor, sin: Tensor
) -> Tensor:
    """Norm the latents, rotate the shared key part, and rotate the queries' last part **in place**.

    Args:
        mixed: `[T, latent + rope]`, any stride between rows.
        queries: `[T, heads, nope + rope]`, any stride between rows, heads side by side.
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
            mixed,
            queries,
            latents,
            norm_weight,
            cos.contiguous(),
            sin.contiguous(),
            mixed.stride(0),
            queries.stride(0),
            eps,
            LATENT=latent,
            PAIRS=pairs,
            HEADS=heads,
            NOPE=width - 2 * pairs,
            LATENT_BLOCK=power(latent),
            PAIR_BLOCK=power(pairs),
            HEAD_BLOCK=power(heads),
            num_warps=4,
        )
    return latents


@triton.jit(do_not_specialize=["num_rows"])
def _keys(
    both,
    latents,
    keys,
    num_rows,
    stride_latents,
    HEADS: tl.constexpr,
    NOPE: tl.constexpr,
    ROPE: tl.constexpr,
    VALUE: tl.constexpr,
    LATENT: tl.constexpr,
    ROWS: tl.constexpr,
    NOPE_BLOCK: tl.constexpr,
    ROPE_BLOCK: tl.constexpr,
):
    flat = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    row = flat // HEADS
    live = (row < num_rows)[:, None]
    column = tl.arange(0, NOPE_BLOCK)[None, :]
    turn = tl.arange(0, ROPE_BLOCK)[None, :]
    nope = tl.load(both + flat[:, None] * (NOPE + VALUE) + column, mask=live & (column < NOPE))
    rope = tl.load(latents + row[:, None] * stride_latents + LATENT + turn, mask=live & (turn < ROPE))
    target = keys + flat[:, None] * (NOPE + ROPE)
    tl.store(target + column, nope, mask=live & (column < NOPE))
    tl.store(target + NOPE + turn, rope, mask=live & (turn < ROPE))


def expanded_keys(both: Tensor, latents: Tensor, *, heads: int, nope: int, latent: int) -> Tensor:
    """Keys `[S, heads, nope + rope]` of expanded latents `[S, heads * (nope + value)]` and cache rows `[S, latent + rope]`."""
    num_rows, rope = len(both), latents.shape[1] - latent
    keys = torch.empty((num_rows, heads, nope + rope), dtype=both.dtype, device=both.device)
    if num_rows:
        rows = 32
        _keys[(triton.cdiv(num_rows * heads, rows),)](
            both,
            latents,
            keys,
            num_rows,
            latents.stride(0),
            HEADS=heads,
            NOPE=nope,
            ROPE=rope,
            VALUE=both.shape[1] // heads - nope,
            LATENT=latent,
            ROWS=rows,
            NOPE_BLOCK=triton.next_power_of_2(nope),
            ROPE_BLOCK=triton.next_power_of_2(rope),
            num_warps=4,
        )
    return keys


@triton.jit(do_not_specialize=["num_rows"])
def _clear(x, padding, num_rows, H: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    pad = tl.load(padding + row, mask=row < num_rows, other=0) != 0
    zero = tl.zeros([ROWS, BLOCK], x.dtype.element_ty)
    for start in range(0, H, BLOCK):
        column = start + tl.arange(0, BLOCK)
        tl.store(x + row.to(tl.int64)[:, None] * H + column[None, :], zero, mask=pad[:, None] & (column < H)[None, :])


def clear_padding_(x: Tensor, padding_rows: Tensor) -> Tensor:
    """0 **in place** in the rows of `x` `[T, H]` that `padding_rows` `[T, 1]` names; the others are not touched."""
    if len(x):
        rows = 64
        _clear[(triton.cdiv(len(x), rows),)](
            x, padding_rows.contiguous().view(torch.uint8), len(x), H=x.shape[1], ROWS=rows, BLOCK=128, num_warps=4
        )
    return x


@triton.jit(do_not_specialize=["num_rows"])
def _route(
    logits,
    padding,
    weights,
    ids,
    num_rows,
    scaling,
    E: tl.constexpr,
    K: tl.constexpr,
    ROWS: tl.constexpr,
    LANES: tl.constexpr,
):
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
            logits.contiguous(),
            padding_rows.contiguous().view(torch.uint8),
            weights,
            ids,
            num_rows,
            scaling,
            E=experts,
            K=top_k,
            ROWS=rows,
            LANES=lanes,
            num_warps=4,
        )
    return weights, ids


def gated(gate_up: Tensor) -> Tensor:
    """As `dbo.model.layers.gated`: `[..., 2I]` to `[..., I]`."""
    flat = gate_up.reshape(-1, gate_up.shape[-1])
    return TRITON_ROWS.activate(flat, None).view(*gate_up.shape[:-1], gate_up.shape[-1] // 2)
