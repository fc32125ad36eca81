"""Torch kernels around the copies of backend `symm_copy` (needs torch): `CopyRows`. No host reads.

Sizes that depend on the data come in as integers, from the counts that the ranks have exchanged.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


class TorchCopyRows:
    """See `dbo.moe.symm_copy.CopyRows` for shapes."""

    def counts(self, topk_ids: Tensor, ranks: int, local_experts: int) -> Tensor:
        return has_expert(topk_ids, ranks, local_experts).sum(-1).to(torch.int32)

    def pack(
        self, x: Tensor, topk_weights: Tensor, topk_ids: Tensor, ranks: int, local_experts: int, rows: int
    ) -> tuple[Tensor, Tensor, Tensor]:
        wanted = has_expert(topk_ids, ranks, local_experts)
        # Stable: wanted rows first, by (peer, token).
        chosen = (~wanted).flatten().to(torch.int8).argsort(stable=True)[:rows] % max(1, x.shape[0])
        places = (wanted.cumsum(-1) - 1).masked_fill(~wanted, -1)
        return x[chosen], routing_of(topk_weights, topk_ids)[chosen], places

    def route(self, topk_weights: Tensor, topk_ids: Tensor, ranks: int, local_experts: int) -> tuple[Tensor, Tensor]:
        wanted = has_expert(topk_ids, ranks, local_experts)
        at = torch.arange(wanted.shape[1], device=topk_ids.device).expand_as(wanted)
        return routing_of(topk_weights, topk_ids), at.masked_fill(~wanted, -1)

    def unpack(self, routing: Tensor, first_expert: int, local_experts: int) -> tuple[Tensor, Tensor]:
        ids, weights = routing.chunk(2, dim=-1)
        local = ids.to(torch.int64) - first_expert
        return local.masked_fill((local < 0) | (local >= local_experts), -1), weights

    def reduce(self, blocks: Sequence[Tensor], places: Tensor) -> Tensor:
        total = blocks[0].new_zeros((places.shape[1], blocks[0].shape[1]), dtype=torch.float32)
        for block, at in zip(blocks, places, strict=True):
            if len(block):  # selected, not multiplied by 0: a row that is not meant for this rank may be NaN
                total += block[at.clamp(min=0)].float().masked_fill((at < 0)[:, None], 0.0)
        return total.to(blocks[0].dtype)


def routing_of(topk_weights: Tensor, topk_ids: Tensor) -> Tensor:
    """Ids and weights side by side, `[T, 2 * K]` fp32; ids below 2 ** 24 are exact."""
    return torch.cat((topk_ids.float(), topk_weights.float()), dim=-1)


def has_expert(topk_ids: Tensor, ranks: int, local_experts: int) -> Tensor:
    """`[R, T]` bool: the token has an expert on the rank."""
    owner = topk_ids.div(local_experts, rounding_mode="floor").masked_fill(topk_ids < 0, -1)
    return (owner.unsqueeze(0) == torch.arange(ranks, device=topk_ids.device)[:, None, None]).any(-1)
