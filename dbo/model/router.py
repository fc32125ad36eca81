"""The MoE gate: which experts a token goes to, and with what weight. Needs torch."""

from __future__ import annotations

import torch

from dbo import registry
from dbo.model.config import ModelConfig


class Router:
    """Softmax scores over all experts, then the top k of them, or of the best groups of experts."""

    def __init__(self, config: ModelConfig, weight: torch.Tensor) -> None:
        self.weight = weight
        self.top_k = config.num_experts_per_tok
        self.num_groups, self.topk_groups = config.n_group, config.topk_group
        self.grouped = config.topk_method == "group_limited_greedy"
        self.scaling = config.routed_scaling_factor

    def __call__(self, hidden: torch.Tensor, padding_rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Route `hidden` `[T, H]`; `padding_rows` `[T, 1]` bool.

        Returns:
            Weights `[T, K]` fp32 and expert ids `[T, K]` int64; padding rows carry weight 0 and id -1.
        """
        kernels = registry.layer_kernels(hidden.device.type)
        if kernels is not None and not self.grouped:
            logits = kernels.gate_logits(hidden, self.weight)
            return kernels.route(logits, padding_rows, self.top_k, self.scaling)
        scores = (hidden.float() @ self.weight.float().t()).softmax(dim=-1)
        if self.grouped:
            scores = self._within_best_groups(scores)
        topk_weights, topk_ids = scores.topk(self.top_k, dim=-1)
        # Selected, not multiplied: what a padding row computed may be NaN.
        return (topk_weights * self.scaling).masked_fill(padding_rows, 0.0), topk_ids.masked_fill(padding_rows, -1)

    def _within_best_groups(self, scores: torch.Tensor) -> torch.Tensor:
        by_group = scores.unflatten(-1, (self.num_groups, -1))
        best_groups = by_group.amax(dim=-1).topk(self.topk_groups, dim=-1).indices
        closed = torch.ones_like(by_group[..., 0], dtype=torch.bool).scatter(-1, best_groups, False)
        return by_group.masked_fill(closed[..., None], 0.0).flatten(-2)
