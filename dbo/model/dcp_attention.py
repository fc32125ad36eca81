"""MLA on one rank of a DCP group: own keys, exchange and merge, own part of the output projection. Needs torch.

Every rank computes the queries of all H heads against its share of the keys; after the merge it holds H / C heads over
all keys, applies its columns of the output projection, and the group sums. Latents are exchanged, not values: they are
what the absorbed form attends to, and the value projection of own heads comes after the merge.
"""

from __future__ import annotations

import torch

from dbo.dcp.interface import ContextParallel
from dbo.model.attention import MLAttention, Projected, kernels_for
from dbo.model.config import ModelConfig
from dbo.model.layers import Weights
from dbo.model.paging import PagedBatch


class DCPAttention(MLAttention):
    """The attention of one layer on one peer."""

    def __init__(self, config: ModelConfig, weights: Weights, prefix: str, group: ContextParallel) -> None:
        super().__init__(config, weights, prefix)
        self.group = group
        heads = config.num_attention_heads // group.size
        mine = slice(group.rank * heads, (group.rank + 1) * heads)
        self.own_value_up = self.value_up[mine]
        width = heads * config.v_head_dim
        self.own_projection = self.w["o_proj.weight"][:, group.rank * width : (group.rank + 1) * width]

    def attend(self, projected: Projected, kv_cache: torch.Tensor, batch: PagedBatch) -> torch.Tensor:
        """As of one rank that has all keys: `[T, H]`, the same bits on every peer. Padding rows give 0."""
        cache_rows = self.write(projected.latents, kv_cache, batch)
        out, lse = self.partial(projected.queries, cache_rows, batch)
        merged = self.group.reduce_heads(out, lse, batch.local_seq_lens, batch.query_start_loc)
        values = torch.bmm(merged.transpose(0, 1), self.own_value_up.transpose(1, 2)).transpose(0, 1)
        total = self.group.all_reduce(values.flatten(1) @ self.own_projection.t())
        return total.masked_fill(batch.padding_rows, 0.0)

    def partial(
        self, queries: torch.Tensor, cache_rows: torch.Tensor, batch: PagedBatch
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Attention over this peer's keys `[T, heads, latent]` and its log-sum-exp `[T, heads]` fp32, base e.

        A query that sees no key here has minus infinity there, and anything, NaN included, as output.
        """
        if batch.empty or batch.hidden_keys.shape[-1] == 0:
            nothing = torch.zeros_like(queries[..., : self.config.kv_lora_rank])
            return nothing, torch.full(queries.shape[:2], float("-inf"), device=queries.device)
        scores, context = self.scores(queries, cache_rows, batch)
        lse = scores.logsumexp(dim=-1).flatten(0, 1).index_select(0, batch.row_queries)
        return self.mix(scores, context, batch), lse


def make_dcp_attention(config: ModelConfig, weights: Weights, prefix: str, group: ContextParallel) -> DCPAttention:
    """The attention of a layer on a peer: this file's, or the fused one where there are kernels."""
    kernels = kernels_for(weights, prefix)
    found: DCPAttention = (DCPAttention if kernels is None else kernels.dcp_attention)(config, weights, prefix, group)
    return found
