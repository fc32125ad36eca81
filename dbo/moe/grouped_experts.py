"""Routed experts by torch's grouped matrix product, for devices in bf16. Needs torch.

Rows are sorted by expert on the device and multiplied in one call a layer half; shapes stay static and the host learns no
count: rows that belong to no local expert come last, behind the last offset, and are selected away.

Shapes: N rows, K ids a row, P = N * K pairs, L local experts, H hidden size, I expert width.
"""

from __future__ import annotations

import torch
from torch import Tensor

from dbo.model.layers import gated
from dbo.moe.interface import ExpertInputs

ALIGNED_BYTES = 16
"""Rows of both operands begin at multiples of this."""


def available(gate_up_LGH: Tensor) -> bool:
    """Whether this device and dtype have the product: bf16 on a device of capability 9 or more."""
    if gate_up_LGH.device.type != "cuda" or gate_up_LGH.dtype != torch.bfloat16 or not hasattr(torch, "_grouped_mm"):
        return False
    aligned = all(size * gate_up_LGH.element_size() % ALIGNED_BYTES == 0 for size in gate_up_LGH.shape[1:])
    return aligned and torch.cuda.get_device_capability(gate_up_LGH.device) >= (9, 0)


class GroupedFlatExperts:
    """Layout "flat": `[N, H]` in, the sum over K weighted by `topk_weights` `[N, H]` out; 0 where no id is local."""

    layout = "flat"

    def __init__(self, gate_up_LGH: Tensor, down_LIH: Tensor) -> None:
        # The product wants the second operand's columns contiguous: one is stored so, the other is copied once.
        self.gate_up = gate_up_LGH.transpose(1, 2)
        self.down = down_LIH.transpose(1, 2).contiguous().transpose(1, 2)

    def apply(self, inputs: ExpertInputs) -> Tensor:
        x, ids_NK, weights_NK = inputs.x, inputs.topk_ids, inputs.topk_weights
        (num_rows, top_k), num_local = ids_NK.shape, self.down.shape[0]
        experts_P = torch.where(ids_NK >= 0, ids_NK, num_local).reshape(-1)
        order_P = experts_P.argsort(stable=True)
        ends_L = _counts(experts_P, num_local).cumsum(0).to(torch.int32)
        rows = x.index_select(0, order_P // top_k)
        out_PH = self._product(gated(self._product(rows, self.gate_up, ends_L)), self.down, ends_L)
        # Back to pairs in their own order; behind the last offset there is whatever memory held.
        place_P = torch.empty_like(order_P).scatter_(0, order_P, torch.arange(len(order_P), device=x.device))
        pairs_NKH = out_PH.index_select(0, place_P).view(num_rows, top_k, -1)
        share = pairs_NKH.float() * weights_NK[:, :, None]
        return share.masked_fill((ids_NK < 0)[:, :, None], 0.0).sum(dim=1).to(x.dtype)

    def _product(self, rows: Tensor, weights: Tensor, ends_L: Tensor) -> Tensor:
        return torch._grouped_mm(rows, weights, offs=ends_L)


def _counts(experts_P: Tensor, num_local: int) -> Tensor:
    """Pairs of each local expert, without asking the device how large the largest id is."""
    counts = torch.zeros(num_local + 1, dtype=torch.int64, device=experts_P.device)
    return counts.scatter_add_(0, experts_P, torch.ones_like(experts_P))[:num_local]
