"""Routed experts by torch's grouped matrix product, for devices in bf16. Needs torch.

Rows are sorted by expert on the device and multiplied in one call a layer half. Shapes are static and the host learns no
count: buffers have room for every pair, what no local expert wants has no place in them, and the product ends at the last
offset. So a step can be captured, and rows of padding (id -1) are never computed.

The product (torch 2.11, CUTLASS on capability 9): `a` `[P, k]`, `b` `[L, k, n]`, `offs` `[L]` int32 on the device, each group's
end; last or last but one stride 1 and the other a multiple of 16 bytes; what lies behind the last end is not written.

Shapes: N rows, K ids a row, P = N * K pairs, L local experts, H hidden size, I expert width.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from dbo import registry
from dbo.moe.gated import gated
from dbo.moe.interface import ExpertInputs

ALIGNED_BYTES = 16
"""Rows of both operands begin at multiples of this."""


def available(gate_up_LGH: Tensor) -> bool:
    """Whether this device and dtype have the product: bf16 on a device of capability 9 or more."""
    if gate_up_LGH.device.type != "cuda" or gate_up_LGH.dtype != torch.bfloat16 or not hasattr(torch, "_grouped_mm"):
        return False
    aligned = all(size * gate_up_LGH.element_size() % ALIGNED_BYTES == 0 for size in gate_up_LGH.shape[1:])
    return aligned and torch.cuda.get_device_capability(gate_up_LGH.device) >= (9, 0)


class RowMoves(Protocol):
    """Rows to their experts, the products, and back. Plain torch here; kernels for devices in `gpu.kernels.expert_rows`.

    A group is the rows of one expert, up to its end. Rows behind the last end are undefined, in and out.
    """

    def order(self, topk_ids: Tensor, num_local: int) -> tuple[Tensor, Tensor]:
        """Sort `[N, K]` int64 ids, -1: nobody's.

        Returns:
            Places `[N, K]` int32 of the pairs by expert, in order within one, -1 for nobody's; ends `[L]` int32.
        """

    def spread(self, x: Tensor, places: Tensor) -> Tensor:
        """Rows `[N, H]` to their places `[P, H]`; other rows are undefined."""

    def spread_gate_up(self, x: Tensor, places: Tensor, weights_LGH: Tensor, ends: Tensor) -> Tensor:
        """`gate_up` of `spread`: `[N, H]` to `[P, I]`. Where that is faster, rows are taken from where they are."""

    def gate_up(self, rows: Tensor, weights_LGH: Tensor, ends: Tensor) -> Tensor:
        """`silu(rows @ gate) * (rows @ up)` of each group: `[P, H]` to `[P, I]`."""

    def down(self, active: Tensor, weights_LIH: Tensor, ends: Tensor) -> Tensor:
        """`active @ weights` of each group: `[P, I]` to `[P, H]`."""

    def gather(self, rows: Tensor, places: Tensor, topk_weights: Tensor) -> Tensor:
        """`[P, H]` back to `[N, H]`: the sum over K weighted by `[N, K]` fp32, in fp32; 0 without a place."""

    def batched(self, x_LMH: Tensor, weights_LGH: Tensor, weights_LIH: Tensor, counts_L: Tensor) -> Tensor:
        """Both products of the first `counts_L` `[L]` rows of each expert's M: `[L, M, H]`."""


class TorchRows:
    """`RowMoves` in torch's own operations, none of which asks the device for a number."""

    def order(self, topk_ids: Tensor, num_local: int) -> tuple[Tensor, Tensor]:
        experts_P = torch.where(topk_ids >= 0, topk_ids, num_local).reshape(-1)
        order_P = experts_P.argsort(stable=True)
        ranks_P = torch.arange(len(order_P), device=topk_ids.device)
        places = torch.empty_like(order_P).scatter_(0, order_P, ranks_P).view_as(topk_ids)
        ends = _counts(experts_P, num_local).cumsum(0).to(torch.int32)
        return places.masked_fill(topk_ids < 0, -1).to(torch.int32), ends

    def spread(self, x: Tensor, places: Tensor) -> Tensor:
        (num_rows, top_k), hidden = places.shape, x.shape[1]
        # Pairs without a place share a row behind the others.
        rows = x.new_empty((num_rows * top_k + 1, hidden))
        at_P = places.masked_fill(places < 0, num_rows * top_k).reshape(-1).long()
        return rows.index_copy_(0, at_P, x.repeat_interleave(top_k, dim=0))[:-1]

    def spread_gate_up(self, x: Tensor, places: Tensor, weights_LGH: Tensor, ends: Tensor) -> Tensor:
        return self.gate_up(self.spread(x, places), weights_LGH, ends)

    def gate_up(self, rows: Tensor, weights_LGH: Tensor, ends: Tensor) -> Tensor:
        return gated(torch._grouped_mm(rows, weights_LGH.transpose(1, 2), offs=ends))

    def down(self, active: Tensor, weights_LIH: Tensor, ends: Tensor) -> Tensor:
        return torch._grouped_mm(active, weights_LIH, offs=ends)

    def batched(self, x_LMH: Tensor, weights_LGH: Tensor, weights_LIH: Tensor, counts_L: Tensor) -> Tensor:
        return torch.bmm(gated(torch.bmm(x_LMH, weights_LGH.transpose(1, 2))), weights_LIH)

    def gather(self, rows: Tensor, places: Tensor, topk_weights: Tensor) -> Tensor:
        num_rows, top_k = places.shape
        pairs_NKH = rows.index_select(0, places.clamp(min=0).reshape(-1)).view(num_rows, top_k, rows.shape[1])
        share = pairs_NKH.float() * topk_weights[:, :, None]
        # Selected, not multiplied by 0: a row that belongs to nobody may hold NaN.
        return share.masked_fill((places < 0)[:, :, None], 0.0).sum(dim=1).to(rows.dtype)


class GroupedFlatExperts:
    """Layout "flat": `[N, H]` in, the sum over K weighted by `topk_weights` `[N, H]` out; 0 where no id is local.

    Args:
        gate_up_LGH, down_LIH: as for `dbo.moe.experts`.
        moves: who moves the rows; None: this device's kernels, else torch.
    """

    layout = "flat"

    def __init__(self, gate_up_LGH: Tensor, down_LIH: Tensor, moves: RowMoves | None = None) -> None:
        self.gate_up, self.down = gate_up_LGH, down_LIH
        self.moves = moves or row_moves(gate_up_LGH.device)

    def apply(self, inputs: ExpertInputs) -> Tensor:
        if inputs.x.shape[0] == 0:
            return torch.empty_like(inputs.x)
        moves = self.moves
        places, ends = moves.order(inputs.topk_ids, self.down.shape[0])
        active = moves.spread_gate_up(inputs.x, places, self.gate_up, ends)
        return moves.gather(moves.down(active, self.down, ends), places, inputs.topk_weights)


class GroupedBatchedExperts:
    """Layout "batched": `[L, M, H]` in, `[L, M, H]` out; rows past an expert's count are not computed where that saves."""

    layout = "batched"

    def __init__(self, gate_up_LGH: Tensor, down_LIH: Tensor, moves: RowMoves | None = None) -> None:
        self.gate_up, self.down = gate_up_LGH, down_LIH
        self.moves = moves or row_moves(gate_up_LGH.device)

    def apply(self, inputs: ExpertInputs) -> Tensor:
        return self.moves.batched(inputs.x, self.gate_up, self.down, inputs.counts)


def row_moves(device: torch.device) -> RowMoves:
    """The kernels for `device`, or torch's operations where it has none."""
    kernels = registry.layer_kernels(device.type)
    return TorchRows() if kernels is None else kernels.rows


def _counts(experts_P: Tensor, num_local: int) -> Tensor:
    """Pairs of each local expert, without asking the device how large the largest id is."""
    counts = torch.zeros(num_local + 1, dtype=torch.int64, device=experts_P.device)
    return counts.scatter_add_(0, experts_P, torch.ones_like(experts_P))[:num_local]
