"""Needs torch. The LSE-weighted sum of partial outputs, stable and blind to what empty shards hold."""

from __future__ import annotations

import math

import torch


def clean_lse(lse: torch.Tensor) -> torch.Tensor:
    """`lse` as fp32 with NaN and plus infinity read as minus infinity: neither can be a weight."""
    lse = lse.float()
    return torch.where(lse < math.inf, lse, -math.inf)  # a comparison with NaN is false


def merge(
    out_CBND: torch.Tensor, lse_CBN: torch.Tensor, is_lse_base_on_e: bool = True
) -> tuple[torch.Tensor, torch.Tensor]:
    """Reduce over the source ranks.

    A partial output whose weight is 0 is *selected* away, not multiplied by 0, so a NaN in it cannot leak.

    Args:
        out_CBND: `[C, B, N, D]` partial outputs, any strides, any floating dtype.
        lse_CBN: `[C, B, N]` their log-sum-exp.
        is_lse_base_on_e: base e, else base 2.

    Returns:
        `[B, N, D]` in the dtype of `out_CBND` (accumulated in fp32) and `[B, N]` fp32 in the same base. Where all
        shards are empty: 0 and minus infinity.
    """
    exp, log = (torch.exp, torch.log) if is_lse_base_on_e else (torch.exp2, torch.log2)
    lse = clean_lse(lse_CBN)
    peak = lse.amax(dim=0)
    # Two empty shards: minus infinity minus minus infinity is NaN. Any finite stand-in gives weight 0.
    weights = exp(lse - torch.where(peak == -math.inf, 0.0, peak))
    total = weights.sum(dim=0)
    acc = torch.zeros(out_CBND.shape[1:], dtype=torch.float32, device=out_CBND.device)
    for out_BND, weight_BN in zip(out_CBND, weights, strict=True):
        weight = weight_BN.unsqueeze(-1)
        acc += torch.where(weight > 0, out_BND.float() * weight, 0.0)
    alive = total > 0
    merged = torch.where(alive.unsqueeze(-1), acc / total.unsqueeze(-1), 0.0)
    return merged.to(out_CBND.dtype), torch.where(alive, peak + log(total), -math.inf)
