"""Torch kernels around the copies of backend `symm_copy` (needs torch): `CopyRows`. No host reads.

Sizes that depend on the data come in as integers, from the counts that the ranks have exchanged.
"""

from __future__ import annotations

import torch
from torch import Tensor

from dbo.moe.nccl_ops import TorchRowOps


class TorchCopyRows:
    """See `dbo.moe.symm_copy.CopyRows` for shapes."""

    def __init__(self) -> None:
        self._rows = TorchRowOps()

    def counts(self, topk_ids: Tensor, ranks: int, local_experts: int) -> Tensor:
        return has_expert(topk_ids, ranks, local_experts).sum(-1).to(torch.int32)

    def pack(
        self, x: Tensor, topk_weights: Tensor, topk_ids: Tensor, ranks: int, local_experts: int, rows: int | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        every_row, every_routing = self._rows.pack(x, topk_weights, topk_ids, ranks, local_experts)
        wanted = has_expert(topk_ids, ranks, local_experts)
        if rows is None:
            at = torch.arange(wanted.numel(), device=x.device).view_as(wanted)
            return every_row, every_routing, at.masked_fill(~wanted, -1)
        # Stable: wanted rows first, by (peer, token).
        chosen = (~wanted).flatten().to(torch.int8).argsort(stable=True)[:rows]
        at = wanted.flatten().cumsum(0).view_as(wanted) - 1
        return every_row[chosen], every_routing[chosen], at.masked_fill(~wanted, -1)

    def unpack(self, routing: Tensor) -> tuple[Tensor, Tensor]:
        return self._rows.unpack(routing)

    def reduce(self, rows: Tensor, places: Tensor) -> Tensor:
        absent = places < 0
        if rows.shape[0] == 0:
            return rows.new_zeros((places.shape[1], rows.shape[1]))
        partial = rows[places.clamp(min=0, max=rows.shape[0] - 1)].float().masked_fill(absent[:, :, None], 0.0)
        return partial.sum(0).to(rows.dtype)


def has_expert(topk_ids: Tensor, ranks: int, local_experts: int) -> Tensor:
    """`[R, T]` bool: the token has an expert on the rank."""
    owner = topk_ids.div(local_experts, rounding_mode="floor").masked_fill(topk_ids < 0, -1)
    return (owner.unsqueeze(0) == torch.arange(ranks, device=topk_ids.device)[:, None, None]).any(-1)
