"""Needs torch and Triton. MLA on a device, in the form that suits the queries.

few queries a request     absorbed: one kernel over the pages (`gpu.kernels.mla_decode`); the cache is read once
many, nothing cached yet  expanded: keys and values of the rows themselves, torch's cuDNN or flash attention
many, some cached         expanded: the pages' rows gathered and expanded, torch's flash attention with lengths

Expanding costs 2 * latent * heads * (nope + value) operations a key and saves heads * (latent + rope + latent - nope - rope -
value) products a pair of query and key, so it pays from a few dozen queries a request on. All three are functions of
device tensors and of host bounds, so none waits, and a captured one reads a replay's own lengths.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from dbo.forward_context import get_forward_context
from dbo.model.attention import LATENT_NORM_EPS, MLAttention, Projected
from dbo.model.paging import PagedBatch
from dbo.model.rope import Rotation
from gpu.kernels.layer_rows import finish_projection
from gpu.kernels.mla_decode import mla_decode

ABSORBED_QUERIES = 16
"""Up to so many queries a request, the longest of a batch, the absorbed form is taken."""


class FusedMLAttention(MLAttention):
    """As `MLAttention`. `Projected.queries` are not absorbed here: `[T, heads, nope + rope]`."""

    def project(self, hidden: Tensor, by: Rotation) -> Projected:
        mixed = hidden @ self.w["kv_a_proj_with_mqa.weight"].t()
        queries = self._queries(hidden)
        latents = finish_projection(mixed, queries, self.w["kv_a_layernorm.weight"], LATENT_NORM_EPS, *by)
        return Projected(queries=queries, latents=latents)

    def attend(self, projected: Projected, kv_cache: Tensor, batch: PagedBatch) -> Tensor:
        metadata = get_forward_context().attn_metadata
        self.write(projected.latents, kv_cache, batch)
        if batch.empty:
            values = torch.zeros_like(projected.queries[..., : self.config.v_head_dim])
        elif metadata.max_query_len <= ABSORBED_QUERIES:
            values = self.absorbed(projected.queries, kv_cache, batch, metadata)
        else:
            values = self.expanded(projected, kv_cache, batch, metadata)
        # Selected, not multiplied: what a padding row computed may be NaN.
        return values.flatten(1).masked_fill(batch.padding_rows, 0.0) @ self.w["o_proj.weight"].t()

    def absorbed(self, queries: Tensor, kv_cache: Tensor, batch: PagedBatch, metadata: Any) -> Tensor:
        """Attention in the latent space, pages read where they lie: `[T, heads, value]`."""
        q_nope = queries[..., : self.config.qk_nope_head_dim].transpose(0, 1)
        mixed = mla_decode(
            torch.bmm(q_nope, self.key_up), queries, kv_cache.view(-1, kv_cache.shape[-1]),
            block_table=metadata.block_table_tensor, page_size=kv_cache.shape[1], row_requests=batch.row_queries,
            queries_per_request=metadata.max_query_len, positions=metadata.positions, padding_rows=batch.padding_rows,
            max_keys=metadata.max_seq_len, scale=self.scale,
        )  # fmt: skip
        return torch.bmm(mixed, self.value_up.transpose(1, 2)).transpose(0, 1)

    def expanded(self, projected: Projected, kv_cache: Tensor, batch: PagedBatch, metadata: Any) -> Tensor:
        """Keys and values of every head, then one fused call: `[T, heads, value]`."""
        starts, lens = metadata.query_start_loc, metadata.seq_lens
        if nothing_cached(metadata):
            keys, values = self.expand(projected.latents)
            return ragged_attention(
                projected.queries,
                keys,
                values,
                starts,
                starts,
                metadata.max_query_len,
                metadata.max_query_len,
                self.scale,
            )
        num_reqs, num_keys = batch.context_padding.shape[:2]
        cached = kv_cache.view(-1, kv_cache.shape[-1]).index_select(0, batch.context_slots)
        keys, values = self.expand(cached.to(projected.queries.dtype))
        key_starts = torch.arange(0, num_reqs * num_keys + 1, num_keys, dtype=torch.int32, device=keys.device)
        return ragged_attention(
            projected.queries, keys, values, starts, key_starts, metadata.max_query_len, num_keys, self.scale, lens
        )

    def expand(self, latents: Tensor) -> tuple[Tensor, Tensor]:
        """Cache rows `[S, latent + rope]` to keys `[S, heads, nope + rope]` and values `[S, heads, value]` (a view)."""
        config = self.config
        heads, nope = config.num_attention_heads, config.qk_nope_head_dim
        both = latents[:, : config.kv_lora_rank] @ self.w["kv_b_proj.weight"].t()
        keys, values = both.view(len(latents), heads, -1).split((nope, config.v_head_dim), dim=-1)
        rope = latents[:, None, config.kv_lora_rank :].expand(-1, heads, -1)
        return torch.cat((keys, rope), dim=-1), values


def nothing_cached(metadata: Any) -> bool:
    """Whether all keys are the batch's own rows, by the host's numbers. In a graph these are bounds, so never there."""
    if metadata.seq_lens.is_cuda and torch.cuda.is_current_stream_capturing():
        return False
    starts = metadata.query_start_loc_cpu
    return bool((metadata.seq_lens_cpu == starts[1:] - starts[:-1]).all())


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
