"""Multi-head latent attention over a paged cache, in the absorbed form. Needs torch.

The cache holds one row a token: the normed latent, then the rotated key part. Instead of expanding it to keys and
values of every head, the expansion is moved to the other side of the product: queries are taken into the latent space,
so that a cache row *is* the key of all heads and its latent part *is* the value. One batched product serves all heads.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from dbo import registry
from dbo.model.config import ModelConfig
from dbo.model.layers import Weights, rms_norm
from dbo.model.paging import PagedBatch
from dbo.model.rope import Rotation, rotate, softmax_scale

# The family's latent norms do not follow `rms_norm_eps`.
LATENT_NORM_EPS = 1e-6


@dataclass(frozen=True, kw_only=True)
class Projected:
    """What A0 hands to A1: `queries` `[T, heads, latent + rope]` and `latents` `[T, latent + rope]`."""

    queries: torch.Tensor
    latents: torch.Tensor


class MLAttention:
    """The attention of one layer; `project` is point A0, `attend` the first part of A1."""

    def __init__(self, config: ModelConfig, weights: Weights, prefix: str) -> None:
        self.config = config
        self.scale = softmax_scale(config)
        self.w = {key.removeprefix(f"{prefix}."): tensor for key, tensor in weights.items() if key.startswith(prefix)}
        shape = (config.num_attention_heads, config.qk_nope_head_dim + config.v_head_dim, config.kv_lora_rank)
        key_value = self.w["kv_b_proj.weight"].view(shape)
        self.key_up, self.value_up = key_value.split((config.qk_nope_head_dim, config.v_head_dim), dim=1)

    def project(self, hidden: torch.Tensor, by: Rotation) -> Projected:
        """Queries and latents of the normed `hidden` `[T, H]`, rotated by the rows' positions."""
        config = self.config
        latent, k_rope = (hidden @ self.w["kv_a_proj_with_mqa.weight"].t()).split(
            (config.kv_lora_rank, config.qk_rope_head_dim), dim=-1
        )
        latent = rms_norm(latent, self.w["kv_a_layernorm.weight"], LATENT_NORM_EPS)
        q_nope, q_rope = self._queries(hidden).split((config.qk_nope_head_dim, config.qk_rope_head_dim), dim=-1)
        q_latent = torch.bmm(q_nope.transpose(0, 1), self.key_up).transpose(0, 1)
        return Projected(
            queries=torch.cat((q_latent, rotate(q_rope, by)), dim=-1),
            latents=torch.cat((latent, rotate(k_rope[:, None], by)[:, 0]), dim=-1),
        )

    def _queries(self, hidden: torch.Tensor) -> torch.Tensor:
        if self.config.q_lora_rank is None:
            queries = hidden @ self.w["q_proj.weight"].t()
        else:
            latent = rms_norm(hidden @ self.w["q_a_proj.weight"].t(), self.w["q_a_layernorm.weight"], LATENT_NORM_EPS)
            queries = latent @ self.w["q_b_proj.weight"].t()
        return queries.view(-1, self.config.num_attention_heads, self.config.qk_head_dim)

    def attend(self, projected: Projected, kv_cache: torch.Tensor, batch: PagedBatch) -> torch.Tensor:
        """Write the latents to `kv_cache` `[num_blocks, block_size, latent + rope]`, attend, project: `[T, H]`.

        Padding rows give 0.
        """
        attended = self._core(projected.queries, self.write(projected.latents, kv_cache, batch), batch)
        values = torch.bmm(attended.transpose(0, 1), self.value_up.transpose(1, 2)).transpose(0, 1)
        # Selected, not multiplied: what a padding row computed may be NaN.
        return (values.flatten(1) @ self.w["o_proj.weight"].t()).masked_fill(batch.padding_rows, 0.0)

    def write(self, latents: torch.Tensor, kv_cache: torch.Tensor, batch: PagedBatch) -> torch.Tensor:
        """Write the rows' latents to their slots; the cache as rows `[slots, latent + rope]`."""
        cache_rows = kv_cache.view(-1, kv_cache.shape[-1])
        written = latents[: batch.slot_mapping.shape[0]]
        cache_rows.index_copy_(0, batch.slot_mapping, written.to(kv_cache.dtype))
        return cache_rows

    def scores(
        self, queries: torch.Tensor, cache_rows: torch.Tensor, batch: PagedBatch
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Scores `[R, Q, heads, S]` fp32, minus infinity where a key is hidden, and the contexts `[R, S, latent + rope]`."""
        num_reqs, num_queries, _, num_keys = batch.hidden_keys.shape
        heads = self.config.num_attention_heads
        context = cache_rows.index_select(0, batch.context_slots).view(num_reqs, num_keys, -1).to(queries.dtype)
        # Slots that a request has not written hold anything, and a weight of 0 does not hide a NaN.
        context = context.masked_fill(batch.context_padding, 0.0)
        padded = queries.index_select(0, batch.query_rows).view(num_reqs, num_queries * heads, -1)
        scores = torch.bmm(padded, context.transpose(1, 2)).view(num_reqs, num_queries, heads, num_keys)
        return (scores.float() * self.scale).masked_fill(batch.hidden_keys, float("-inf")), context

    def mix(self, scores: torch.Tensor, context: torch.Tensor, batch: PagedBatch) -> torch.Tensor:
        """Softmax of the scores over the latents of the contexts, by row: `[T, heads, latent]`."""
        num_reqs, num_queries, heads, num_keys = scores.shape
        latent = self.config.kv_lora_rank
        probabilities = scores.softmax(dim=-1).to(context.dtype).view(num_reqs, num_queries * heads, num_keys)
        mixed = torch.bmm(probabilities, context[..., :latent])
        return mixed.view(num_reqs * num_queries, heads, latent).index_select(0, batch.row_queries)

    def _core(self, queries: torch.Tensor, cache_rows: torch.Tensor, batch: PagedBatch) -> torch.Tensor:
        """Softmax attention of `queries` `[T, heads, latent + rope]`: `[T, heads, latent]`."""
        if batch.empty:
            return torch.zeros_like(queries[..., : self.config.kv_lora_rank])
        scores, context = self.scores(queries, cache_rows, batch)
        return self.mix(scores, context, batch)


def make_attention(config: ModelConfig, weights: Weights, prefix: str) -> MLAttention:
    """The attention of a layer: this file's, or the fused one where the weights' device has kernels for their dtype."""
    kernels = kernels_for(weights, prefix)
    return (MLAttention if kernels is None else kernels.attention)(config, weights, prefix)


def kernels_for(weights: Weights, prefix: str) -> Any:
    """The kernels of the weights' device, where there are any for their dtype; else None."""
    weight = weights[f"{prefix}.o_proj.weight"]
    # Flash kernels take 16-bit numbers only.
    return registry.layer_kernels(weight.device.type) if weight.dtype in (torch.bfloat16, torch.float16) else None
