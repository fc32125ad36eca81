"""Routed experts of one layer on one rank, for both layouts of `dbo.moe.interface`. Needs torch.

Shapes are static: every local expert computes every row it could be given, and rows it was not given are selected away.
So the host never asks the device how many rows arrived.

Weights: `gate_up_LGH` `[L, 2I, H]` (gate rows, then up rows) and `down_LIH` `[L, I, H]`.
"""

from __future__ import annotations

import torch

from dbo.errors import ConfigError
from dbo.moe import grouped_experts
from dbo.moe.gated import gated
from dbo.moe.grouped_experts import GroupedBatchedExperts, GroupedFlatExperts
from dbo.moe.interface import ExpertInputs, Experts


class BatchedExperts:
    """Layout "batched": `[L, M, H]` in, `[L, M, H]` out; rows past an expert's count are undefined on both sides."""

    layout = "batched"

    def __init__(self, gate_up_LGH: torch.Tensor, down_LIH: torch.Tensor) -> None:
        self.gate_up, self.down = gate_up_LGH, down_LIH

    def apply(self, inputs: ExpertInputs) -> torch.Tensor:
        return torch.bmm(gated(torch.bmm(inputs.x, self.gate_up.transpose(1, 2))), self.down)


class FlatExperts:
    """Layout "flat": `[N, H]` in, the sum over K weighted by `topk_weights` `[N, H]` out; 0 where no id is local.

    The local experts side by side are one wide gated MLP; the router's weights open each row's share of its columns.
    Two products do it all, and the second one sums over the experts.
    """

    layout = "flat"

    def __init__(self, gate_up_LGH: torch.Tensor, down_LIH: torch.Tensor) -> None:
        self.gate_up, self.down = gate_up_LGH, down_LIH

    def apply(self, inputs: ExpertInputs) -> torch.Tensor:
        x, (num_local, width, hidden) = inputs.x, self.down.shape
        locals_L = torch.arange(num_local, device=x.device)
        chosen_NKL = inputs.topk_ids[:, :, None] == locals_L
        weights_NL = inputs.topk_weights[:, :, None].masked_fill(~chosen_NKL, 0.0).sum(dim=1)
        active = gated((x @ self.gate_up.view(-1, hidden).t()).unflatten(-1, (num_local, 2 * width)))
        # Selected, not multiplied by 0: a row that belongs to nobody may hold NaN.
        share = (active.float() * weights_NL[:, :, None]).masked_fill(~chosen_NKL.any(dim=1)[:, :, None], 0.0)
        return share.to(x.dtype).flatten(1) @ self.down.view(-1, hidden)


def make_experts(layout: str, gate_up_LGH: torch.Tensor, down_LIH: torch.Tensor) -> Experts:
    """The experts for a backend's `layout`.

    Raises:
        ConfigError: a layout that is neither "batched" nor "flat".
    """
    grouped = grouped_experts.available(gate_up_LGH)
    for kind in (GroupedBatchedExperts, GroupedFlatExperts) if grouped else (BatchedExperts, FlatExperts):
        if kind.layout == layout:
            return kind(gate_up_LGH, down_LIH)
    raise ConfigError.of("an expert layout is batched or flat", fix="correct the backend", layout=layout)
