"""Torch row operations around exchanges, first of all the `nccl` backend's (needs torch). Static shapes, no host reads."""

from __future__ import annotations

import torch
from torch import Tensor


class TorchRowOps:
    """See `dbo.moe.nccl.RowOps` and `dbo.moe.deepep_v2.ValidRows` for shapes."""

    def pack(
        self, x: Tensor, topk_weights: Tensor, topk_ids: Tensor, ranks: int, local_experts: int
    ) -> tuple[Tensor, Tensor]:
        first = torch.arange(ranks, device=x.device).view(ranks, 1, 1) * local_experts
        local = topk_ids.unsqueeze(0) - first
        here = (local >= 0) & (local < local_experts) & (topk_ids >= 0)
        ids = torch.where(here, local, -1)
        weights = torch.where(here, topk_weights.float(), 0.0)
        # Selected, not multiplied: whatever a padding row holds stays here.
        rows = torch.where(here.any(-1, keepdim=True), x.unsqueeze(0), torch.zeros((), dtype=x.dtype, device=x.device))
        routing = torch.cat((ids.float(), weights), dim=-1)
        return rows.reshape(-1, x.shape[-1]), routing.reshape(-1, routing.shape[-1])

    def empty_rows(self, like: Tensor, rows: int) -> Tensor:
        return torch.empty((rows, *like.shape[1:]), dtype=like.dtype, device=like.device)

    def unpack(self, routing: Tensor) -> tuple[Tensor, Tensor]:
        ids, weights = routing.chunk(2, dim=-1)
        return ids.to(torch.int64), weights

    def keep_ids(self, ids: Tensor, ends: Tensor) -> Tensor:
        rows = torch.arange(ids.shape[0], device=ids.device)
        return ids.masked_fill((rows >= ends[-1])[:, None], -1)

    def reduce(self, rows: Tensor, ranks: int) -> Tensor:
        return rows.view(ranks, -1, rows.shape[-1]).float().sum(0).to(rows.dtype)
