"""Needs torch and Triton. MLA on a device, in the form that suits the queries.

few queries a request     absorbed: one kernel over the pages (`gpu.kernels.mla_decode`); the cache is read once
many, nothing cached yet  expanded: keys and values of the rows themselves, torch's cuDNN attention
many, some cached         expanded: the pages' rows gathered and expanded, torch's flash attention with lengths

Expanding costs 2 * latent * heads * (nope + value) operations a key and saves 2 * heads * (2 * latent - nope - value) a pair of
query and key, so it pays from some dozen queries a request on. cuDNN takes keys and values of different widths (flash does
not) and runs 2.5 times as fast, but its causal mask begins at the first key, and it bakes lengths, so it is for eager steps.
On a peer of a DCP group few queries take the same kernel, which hands out the log-sum-exp; many take `dbo.model`'s.
Nothing here waits for the device; in a graph the other two read a replay's own lengths.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from dbo.model.attention import LATENT_NORM_EPS, MLAttention, Projected
from dbo.model.config import ModelConfig
from dbo.model.dcp_attention import DCPAttention
from dbo.model.layers import Weights, rms_norm
from dbo.model.paging import PagedBatch
from dbo.model.rope import Rotation
from dbo.ubatching.forward_context import get_forward_context
from gpu.kernels.layer_rows import clear_padding_, expanded_keys, finish_projection
from gpu.kernels.mla_decode import mla_decode

ABSORBED_QUERIES = 16
"""Up to so many queries a request, the longest of a batch, the absorbed form is taken."""

LENGTH_STEP = 128
"""cuDNN builds a plan a length: lengths are rounded up to multiples of this where rows follow."""


class FusedMLAttention(MLAttention):
    """As `MLAttention`. `Projected.queries` are not absorbed here: `[T, heads, nope + rope]`."""

    def __init__(self, config: ModelConfig, weights: Weights, prefix: str) -> None:
        super().__init__(config, weights, prefix)
        # One product instead of two: the latents' columns alone are too few to fill a device.
        self.first = self.w["q_proj.weight"] if config.q_lora_rank is None else self.w["q_a_proj.weight"]
        self.num_first = len(self.first)
        self.first = torch.cat((self.first, self.w["kv_a_proj_with_mqa.weight"]))

    def project(self, hidden: Tensor, by: Rotation) -> Projected:
        config = self.config
        both = hidden @ self.first.t()
        queries, mixed = both[:, : self.num_first], both[:, self.num_first :]
        if config.q_lora_rank is not None:
            normed = rms_norm(queries, self.w["q_a_layernorm.weight"], LATENT_NORM_EPS)
            queries = normed @ self.w["q_b_proj.weight"].t()
        queries = queries.unflatten(-1, (config.num_attention_heads, config.qk_head_dim))
        latents = finish_projection(mixed, queries, self.w["kv_a_layernorm.weight"], LATENT_NORM_EPS, *by)
        return Projected(queries=queries, latents=latents)

    def attend(self, projected: Projected, kv_cache: Tensor, batch: PagedBatch) -> Tensor:
        context = get_forward_context()
        metadata = context.attn_metadata
        self.write(projected.latents, kv_cache, batch)
        if batch.empty:
            values = torch.zeros_like(projected.queries[..., : self.config.v_head_dim])
        elif metadata.max_query_len <= ABSORBED_QUERIES:
            values = self.absorbed(projected.queries, kv_cache, batch, metadata)
        else:
            lengths = fresh_lengths(metadata) if context.graph_key is None else None
            values = self.expanded(projected, kv_cache, batch, metadata, lengths)
            # Selected, not multiplied: what a padding row computed may be NaN.
            values = clear_padding_(values.flatten(1), batch.padding_rows).view_as(values)
        return values.flatten(1) @ self.w["o_proj.weight"].t()

    def absorbed(self, queries: Tensor, kv_cache: Tensor, batch: PagedBatch, metadata: Any) -> Tensor:
        """Attention in the latent space, pages read where they lie: `[T, heads, value]`; 0 in padding rows."""
        q_nope = queries[..., : self.config.qk_nope_head_dim].transpose(0, 1)
        mixed = mla_decode(
            torch.bmm(q_nope, self.key_up),
            queries,
            kv_cache.view(-1, kv_cache.shape[-1]),
            block_table=metadata.block_table_tensor,
            page_size=kv_cache.shape[1],
            row_requests=batch.row_queries,
            queries_per_request=metadata.max_query_len,
            positions=metadata.positions,
            padding_rows=batch.padding_rows,
            max_keys=metadata.max_seq_len,
            scale=self.scale,
        )
        return torch.bmm(mixed, self.value_up.transpose(1, 2)).transpose(0, 1)

    def expanded(
        self, projected: Projected, kv_cache: Tensor, batch: PagedBatch, metadata: Any, lengths: list[int] | None
    ) -> Tensor:
        """Keys and values of every head, then torch's fused attention: `[T, heads, value]`.

        `lengths`: of the requests, when all their keys are the batch's own rows and the host may bake that.
        """
        if lengths is not None:
            return fresh_attention(projected.queries, *self.expand(projected.latents), lengths, self.scale)
        num_reqs, num_keys = batch.context_padding.shape[:2]
        cached = kv_cache.view(-1, kv_cache.shape[-1]).index_select(0, batch.context_slots)
        keys, values = self.expand(cached.to(projected.queries.dtype))
        key_starts = torch.arange(0, num_reqs * num_keys + 1, num_keys, dtype=torch.int32, device=keys.device)
        return ragged_attention(
            projected.queries,
            keys,
            values,
            metadata.query_start_loc,
            key_starts,
            metadata.max_query_len,
            num_keys,
            self.scale,
            metadata.seq_lens,
        )

    def expand(self, latents: Tensor) -> tuple[Tensor, Tensor]:
        """Cache rows `[S, latent + rope]` to keys `[S, heads, nope + rope]` and values `[S, heads, value]` (a view)."""
        config = self.config
        heads, nope, latent = config.num_attention_heads, config.qk_nope_head_dim, config.kv_lora_rank
        both = latents[:, :latent] @ self.w["kv_b_proj.weight"].t()
        keys = expanded_keys(both, latents, heads=heads, nope=nope, latent=latent)
        return keys, both.view(len(latents), heads, both.shape[1] // heads)[..., nope:]


class FusedDCPAttention(DCPAttention, FusedMLAttention):
    """As `DCPAttention`, with fused kernels for the projection and for few queries a request.

    Many queries take torch's own operations: the keys of a peer are every so many positions of a request, and no fused kernel
    masks such a triangle.
    """

    def partial(self, queries: Tensor, cache_rows: Tensor, batch: PagedBatch) -> tuple[Tensor, Tensor]:
        context, config = get_forward_context(), self.config
        metadata = context.attn_metadata
        q_nope, q_rope = queries.split((config.qk_nope_head_dim, config.qk_rope_head_dim), dim=-1)
        latent_queries = torch.bmm(q_nope.transpose(0, 1), self.key_up)
        if batch.empty or metadata.max_query_len > ABSORBED_QUERIES:
            return super().partial(torch.cat((latent_queries.transpose(0, 1), q_rope), dim=-1), cache_rows, batch)
        lse = torch.empty(queries.shape[:2], dtype=torch.float32, device=queries.device)
        mixed = mla_decode(
            latent_queries,
            queries,
            cache_rows,
            block_table=metadata.block_table_tensor,
            page_size=context.kv_caches[0].shape[1],
            row_requests=batch.row_queries,
            queries_per_request=metadata.max_query_len,
            positions=batch.last_keys,
            padding_rows=batch.padding_rows,
            max_keys=metadata.dcp_layout.max_local_len(metadata.max_seq_len),
            scale=self.scale,
            lse=lse,
        )
        return mixed.transpose(0, 1), lse


def fresh_lengths(metadata: Any) -> list[int] | None:
    """The requests' lengths when all keys are the batch's own rows, by the host's numbers; else None."""
    starts = metadata.query_start_loc_cpu
    lengths = starts[1:] - starts[:-1]
    # Where a step was planned ahead, the host's lengths are bounds: not less than these, and equal only if exact.
    return lengths.tolist() if bool((metadata.seq_lens_cpu == lengths).all()) else None


def fresh_attention(queries: Tensor, keys: Tensor, values: Tensor, lengths: list[int], scale: float) -> Tensor:
    """Causal attention of requests side by side to their own rows, by torch's cuDNN kernels.

    Args:
        queries, keys: `[T, heads, d]`. values: `[T, heads, v]`. lengths: rows of each request, from the first row on.

    Returns:
        `[T, heads, v]`; rows behind the last request are undefined.
    """
    total, longest = sum(lengths), max(lengths)
    if total == len(queries) == longest * len(lengths):
        q, k, v = (t.unflatten(0, (len(lengths), longest)) for t in (queries, keys, values))
        return causal(q, k, v, scale).flatten(0, 1)
    out = queries.new_empty((*queries.shape[:2], values.shape[-1]))
    start = 0
    for length in lengths:
        # What follows is another request's: later rows have no part in earlier ones, and are overwritten or left out.
        stop = min(total, start + -(-length // LENGTH_STEP) * LENGTH_STEP)
        if length:
            q, k, v = (t[None, start:stop] for t in (queries, keys, values))
            out[start : start + length] = causal(q, k, v, scale)[0, :length]
        start += length
    return out


def causal(queries: Tensor, keys: Tensor, values: Tensor, scale: float) -> Tensor:
    """cuDNN's causal attention of `[R, S, heads, d]` and values `[R, S, heads, v]`: `[R, S, heads, v]`."""
    q, k, v = (t.transpose(1, 2) for t in (queries, keys, values))
    out = torch.ops.aten._scaled_dot_product_cudnn_attention(q, k, v, None, False, 0.0, True, False, scale=scale)[0]
    return out.transpose(1, 2)


def ragged_attention(
    queries: Tensor,
    keys: Tensor,
    values: Tensor,
    query_starts: Tensor,
    key_starts: Tensor,
    max_queries: int,
    max_keys: int,
    scale: float,
    lens: Tensor | None = None,
) -> Tensor:
    """Causal attention of requests side by side, the last query of each to all of its keys, by torch's flash kernel.

    Args:
        queries: `[T, heads, d]`. keys: `[S, heads, d]`. values: `[S, heads, v]`, v <= d.
        query_starts, key_starts: `[R + 1]` int32, device. lens: `[R]` int32, keys that count; None: all.

    Returns:
        `[T, heads, v]`; rows behind the last start are undefined.
    """
    width = values.shape[-1]
    # The kernel wants one head size.
    wide = pad(values, (0, queries.shape[-1] - width))
    out, *_ = torch.ops.aten._flash_attention_forward(
        queries,
        keys,
        wide,
        query_starts,
        key_starts,
        max_queries,
        max_keys,
        0.0,
        True,
        False,
        scale=scale,
        seqused_k=lens,
    )
    return out[..., :width]
